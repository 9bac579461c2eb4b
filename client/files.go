package client

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"strconv"
	"sync/atomic"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/proto/api"
)

const (
	// PartsFrom is the size in bytes from which a file is uploaded in parts.
	PartsFrom = 64 << 20
	// partConcurrency is how many parts are sent at once.
	partConcurrency = 4
	// maxResumes is how often a download is resumed without any progress.
	maxResumes = 5
	// abortTimeout bounds the removal of an upload that failed.
	abortTimeout = 10 * time.Second
)

// ThreadFiles names the files of a thread. They are relative to its home.
func ThreadFiles(thread string) api.FileRequest {
	return api.FileRequest{Source: proto.SourceThread, ID: thread}
}

// ConnectionFiles addresses the files of a storage connection, to which the API key must have
// access. Paths are relative to /data/SLUG.
func ConnectionFiles(slug string) api.FileRequest {
	return api.FileRequest{Source: proto.SourceVolume, ID: slug}
}

// Files lists the files at a path, and everything below it if recursive is true.
func (c *Client) Files(ctx context.Context, at api.FileRequest, path string, recursive bool) (*api.Files, error) {
	return c.ListFiles(ctx, &api.FileListRequest{FileRequest: at, Path: path, Recursive: recursive})
}

// ListFiles is Files with all fields of the request, such as the version.
func (c *Client) ListFiles(ctx context.Context, req *api.FileListRequest) (*api.Files, error) {
	return get[api.Files](ctx, c, call{method: http.MethodPost, path: "/v1/files/list", resend: true, body: req})
}

// DownloadURL returns a URL from which anyone can download a file for 15 minutes.
func (c *Client) DownloadURL(ctx context.Context, req *api.FileDownloadRequest) (*api.SignedURL, error) {
	return get[api.SignedURL](ctx, c, call{
		method: http.MethodPost, path: "/v1/files/download_url", resend: true, body: req,
	})
}

// CompareFiles compares two versions of a thread or a volume.
func (c *Client) CompareFiles(ctx context.Context, req *api.FileCompareRequest) (*api.FileDifference, error) {
	return get[api.FileDifference](ctx, c, call{
		method: http.MethodPost, path: "/v1/files/compare", resend: true, body: req,
	})
}

// DeleteFile deletes what is at a path; a directory with its content only if recursive is true.
func (c *Client) DeleteFile(ctx context.Context, at api.FileRequest, path string, recursive bool,
) (*api.ChangedFile, error) {
	body := api.FileDeleteRequest{FileRequest: at, Path: path, Recursive: recursive}
	return get[api.ChangedFile](ctx, c, call{method: http.MethodPost, path: "/v1/files/delete", body: body})
}

// RenameFile renames a file or directory.
func (c *Client) RenameFile(ctx context.Context, at api.FileRequest, path, to string) (*api.ChangedFile, error) {
	body := api.FileRenameRequest{FileRequest: at, Path: path, To: to}
	return get[api.ChangedFile](ctx, c, call{method: http.MethodPost, path: "/v1/files/rename", body: body})
}

// Download writes a file to w. It resumes a broken download, unless the file has changed.
func (c *Client) Download(ctx context.Context, at api.FileRequest, path string, w io.Writer) error {
	var written int64
	tag := ""
	for resumes := 0; ; resumes++ {
		signed, err := c.DownloadURL(ctx, &api.FileDownloadRequest{FileRequest: at, Path: path})
		if err != nil {
			return err
		}
		header := headersOf(signed)
		if written > 0 {
			header["Range"], header["If-Range"] = fmt.Sprintf("bytes=%d-", written), tag
		}
		resp, err := c.do(ctx, call{method: signed.Method, url: signed.URL, header: header, resend: true})
		if err != nil {
			return err
		}
		if written > 0 && resp.StatusCode != http.StatusPartialContent {
			_ = resp.Body.Close()
			return fmt.Errorf("download %s: the answer broke off after %d bytes, and the file has changed since", path, written)
		}
		tag = resp.Header.Get("ETag")
		target := &failingWriter{w: w}
		n, err := io.Copy(target, resp.Body)
		_ = resp.Body.Close()
		if written += n; n > 0 {
			resumes = 0
		}
		switch {
		case err == nil:
			return nil
		case target.err != nil || ctx.Err() != nil || tag == "" || resumes == maxResumes || c.cfg.NoRetry:
			return fmt.Errorf("download %s: the answer broke off: %w", path, err)
		}
		c.cfg.OnRetry(err)
	}
}

// failingWriter remembers the error of a writer.
type failingWriter struct {
	w   io.Writer
	err error
}

// Write implements [io.Writer].
func (f *failingWriter) Write(p []byte) (n int, err error) {
	n, f.err = f.w.Write(p)
	return n, f.err
}

// Upload stores size bytes of body as a file: in parts from PartsFrom on. progress, if not nil, is
// called with the number of stored bytes, by several goroutines.
func (c *Client) Upload(ctx context.Context, at api.FileRequest, path string, size int64, body io.ReaderAt,
	progress func(stored int64),
) error {
	if size >= PartsFrom {
		return c.uploadParts(ctx, at, path, size, body, progress)
	}
	signed, err := get[api.SignedURL](ctx, c, call{
		method: http.MethodPost, path: "/v1/files/upload_url", resend: true,
		body: api.FileUploadRequest{FileRequest: at, Path: path, ContentLength: size},
	})
	if err != nil {
		return err
	}
	return c.putSigned(ctx, signed.URL, size, headersOf(signed), io.NewSectionReader(body, 0, size))
}

// headersOf returns the headers to send to a signed URL.
func headersOf(signed *api.SignedURL) map[string]string {
	header := map[string]string{}
	for _, h := range signed.Headers {
		header[h.Name] = h.Value
	}
	return header
}

// putSigned sends a section of a file to a signed URL.
func (c *Client) putSigned(ctx context.Context, at string, size int64, header map[string]string,
	section *io.SectionReader,
) error {
	header["Expect"] = "100-continue" // so that a rejection comes before the body is sent
	return c.empty(ctx, call{
		method: http.MethodPut, url: at, header: header, resend: true, size: size,
		upload: func() io.Reader { return io.NewSectionReader(section, 0, size) },
	})
}

func (c *Client) uploadParts(ctx context.Context, at api.FileRequest, path string, size int64, body io.ReaderAt,
	progress func(int64),
) (err error) {
	begun, err := get[api.PartUpload](ctx, c, call{
		method: http.MethodPost, path: "/v1/files/uploads", resend: true,
		body: api.PartUploadRequest{FileRequest: at, Path: path, ContentLength: size},
	})
	if err != nil {
		return err
	}
	if begun.PartSize < 1 || begun.Parts < 1 {
		return errors.New("POST /v1/files/uploads: the answer has no parts")
	}
	defer func() {
		if err != nil {
			ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), abortTimeout)
			defer cancel()
			_ = c.empty(ctx, call{method: http.MethodDelete, url: begun.URL}) // the server removes it later otherwise
		}
	}()
	var stored atomic.Int64
	sending, sendCtx := errgroup.WithContext(ctx)
	sending.SetLimit(partConcurrency)
	for i := range begun.Parts {
		offset := int64(i) * begun.PartSize
		n := min(begun.PartSize, size-offset)
		sending.Go(func() error {
			query := url.Values{"part": {strconv.Itoa(i + 1)}}
			part := io.NewSectionReader(body, offset, n)
			if err := c.putSigned(sendCtx, begun.URL+"?"+query.Encode(), n, map[string]string{}, part); err != nil {
				return err
			}
			if now := stored.Add(n); progress != nil {
				progress(now)
			}
			return nil
		})
	}
	if err := sending.Wait(); err != nil {
		return err
	}
	return c.empty(ctx, call{method: http.MethodPost, url: begun.URL})
}
