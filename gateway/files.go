package gateway

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"path"
	"strconv"
	"strings"

	"github.com/bullpen-run/bullpen/gateway/filestore"
	"github.com/bullpen-run/bullpen/gateway/web"
	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/proto/api"
)

// listFiles sends the list while it is read. The list of a large home may not fit into memory.
func (s *Server) listFiles(w http.ResponseWriter, r *web.Request) error {
	req, err := web.DecodeBody[api.FileListRequest](&s.Core, w, r)
	if err != nil {
		return err
	}
	files, dir, err := s.opener.OpenPath(r, &req.FileRequest, req.Path, proto.CleanFilePath)
	if err != nil {
		return err
	}
	defer files.Close()
	out := bufio.NewWriterSize(web.NewLazyWriter(w, r, web.JSONHeader), web.SmallOutput)
	separator := `{"files":[`
	err = files.List(r.Context(), dir, req.Recursive, func(f proto.File) error {
		text, err := json.Marshal(api.NewFile(&f))
		if err != nil {
			return fmt.Errorf("encode %q: %w", f.Path, err)
		}
		_, _ = out.WriteString(separator) // the next write returns the error again
		separator = ","
		_, err = out.Write(text)
		return err
	})
	if err != nil {
		return err
	}
	end := "]}\n"
	if separator != "," {
		end = separator + end
	}
	_, _ = out.WriteString(end) // Flush returns the error
	return out.Flush()
}

func (s *Server) uploadURL(w http.ResponseWriter, r *web.Request) error {
	req, err := web.DecodeBody[api.FileUploadRequest](&s.Core, w, r)
	if err != nil {
		return err
	}
	answer, err := s.signUpload(r, req)
	if err != nil {
		return err
	}
	return web.WriteValue(w, http.StatusOK, answer)
}

// signUpload returns a URL to upload a file to.
func (s *Server) signUpload(r *web.Request, req *api.FileUploadRequest) (*api.SignedURL, error) {
	files, name, err := s.opener.OpenPath(r, &req.FileRequest, req.Path, proto.CleanFileName)
	if err != nil {
		return nil, err
	}
	defer files.Close()
	if err := s.checkUpload(r.Context(), files, name, req.ContentLength, files.Blobs); err != nil {
		return nil, err
	}
	key := &r.Key
	g := &grant{
		method: http.MethodPut, key: key.ID, org: key.Org, source: req.Source, id: req.ID, path: name,
		size: req.ContentLength,
	}
	// The length is for clients that would otherwise send a stream without it.
	headers := []api.Header{{Name: "Content-Length", Value: strconv.FormatInt(g.size, 10)}}
	if req.ContentType != nil {
		headers = append(headers, api.Header{Name: "Content-Type", Value: *req.ContentType})
	}
	return s.signedURL(r, g, headers...)
}

// checkUpload returns the error with which an upload would be refused now. blobs reports that the
// file, or its parts, are stored in the blob store.
func (s *Server) checkUpload(ctx context.Context, files *filestore.Store, name string, size int64, blobs bool) error {
	if blobs {
		if err := s.Admission.CheckQuota(ctx, files.Org, proto.QuotaStored); err != nil {
			return err
		}
	}
	return files.CheckPut(ctx, name, size)
}

func (s *Server) downloadURL(w http.ResponseWriter, r *web.Request) error {
	req, err := web.DecodeBody[api.FileDownloadRequest](&s.Core, w, r)
	if err != nil {
		return err
	}
	answer, err := s.signDownload(r, req)
	if err != nil {
		return err
	}
	return web.WriteValue(w, http.StatusOK, answer)
}

// signDownload returns a URL to download a file from.
func (s *Server) signDownload(r *web.Request, req *api.FileDownloadRequest) (*api.SignedURL, error) {
	files, name, err := s.opener.OpenPath(r, &req.FileRequest, req.Path, proto.CleanFileName)
	if err != nil {
		return nil, err
	}
	defer files.Close()
	if _, err := files.Open(r.Context(), name); err != nil {
		return nil, err // report it now rather than when the URL is used
	}
	key := &r.Key
	return s.signedURL(r, &grant{
		method: http.MethodGet, key: key.ID, org: key.Org, source: req.Source, id: req.ID,
		path: name,
	})
}

func (s *Server) deleteFile(w http.ResponseWriter, r *web.Request) error {
	req, err := web.DecodeBody[api.FileDeleteRequest](&s.Core, w, r)
	if err != nil {
		return err
	}
	files, name, err := s.opener.OpenPath(r, &req.FileRequest, req.Path, changedPath("path"))
	if err != nil {
		return err
	}
	defer files.Close()
	return s.changeFile(w, r, files, name, func(ctx context.Context) (int64, error) {
		return files.Remove(ctx, name, req.Recursive)
	})
}

func (s *Server) renameFile(w http.ResponseWriter, r *web.Request) error {
	req, err := web.DecodeBody[api.FileRenameRequest](&s.Core, w, r)
	if err != nil {
		return err
	}
	files, from, err := s.opener.OpenPath(r, &req.FileRequest, req.Path, changedPath("path"))
	if err != nil {
		return err
	}
	defer files.Close()
	to, err := changedPath("to")(files.Root, req.To)
	if err != nil {
		return err
	}
	return s.changeFile(w, r, files, to, func(ctx context.Context) (int64, error) { return files.Rename(ctx, from, to) })
}

// changeFile makes a change of files, which goes on if the client leaves, and answers with the new
// version. Changes count as transfers: each copies the names in directories of any size.
func (s *Server) changeFile(
	w http.ResponseWriter, r *web.Request, files *filestore.Store, path string,
	change func(ctx context.Context) (version int64, err error),
) error {
	end, err := files.Begin(r.Context())
	if err != nil {
		return err
	}
	defer end()
	ctx, cancel := context.WithTimeout(context.WithoutCancel(r.Context()), web.VersionsTimeout)
	defer cancel()
	version, err := change(ctx)
	if err != nil {
		return err
	}
	return web.WriteValue(w, http.StatusOK, api.ChangedFile{Path: path, Version: version})
}

// changedPath returns a function that cleans the path of a file or directory that a request
// changes, which the field of that name has.
func changedPath(field string) func(root, name string) (string, error) {
	return func(root, name string) (string, error) {
		clean, err := proto.CleanFilePath(root, name)
		if wrong, ok := errors.AsType[*proto.FieldError](err); ok {
			return "", &proto.FieldError{Field: field, Message: field + strings.TrimPrefix(wrong.Message, wrong.Field)}
		}
		if err == nil && clean == "" {
			err = proto.FieldErrorf(field, "must not be the home itself, or the storage connection itself")
		}
		return clean, err
	}
}

// getContent sends a file, or the range of it that the request asks for.
func (s *Server) getContent(w http.ResponseWriter, r *web.Request) error {
	g, key, err := s.checkGrant(r, http.MethodGet)
	if err != nil {
		return err
	}
	files, err := s.opener.Open(r.Context(), key, g.source, g.id)
	if err != nil {
		return err
	}
	defer files.Close()
	content, err := files.Open(r.Context(), g.path)
	if err != nil {
		return err
	}
	h := w.Header()
	tag := `"` + content.Tag + `"`
	part := web.Span{Length: content.Size}
	whole := true
	if asked := r.Header.Get("Range"); asked != "" && r.Method == http.MethodGet &&
		rangeIsCurrent(r.Header.Get("If-Range"), tag) {
		if part, whole, err = web.ParseRange(asked, content.Size); err != nil {
			h.Set("Content-Range", fmt.Sprintf("bytes */%d", content.Size))
			return err
		}
	}
	begin := func() {
		status := http.StatusOK
		if !whole {
			status = http.StatusPartialContent
			h.Set("Content-Range", fmt.Sprintf("bytes %d-%d/%d", part.Offset, part.Offset+part.Length-1, content.Size))
		}
		h.Set("Content-Length", strconv.FormatInt(part.Length, 10))
		h.Set("Content-Type", "application/octet-stream")
		h.Set("Content-Disposition", web.Attachment(path.Base(g.path)))
		h.Set("Cache-Control", "private, no-store")
		h.Set("Accept-Ranges", "bytes")
		h.Set("ETag", tag)
		h.Set("Last-Modified", content.Modified.UTC().Format(http.TimeFormat))
		w.WriteHeader(status)
	}
	if r.Method == http.MethodHead || part.Length == 0 {
		begin()
		return nil
	}
	done, err := files.Begin(r.Context())
	if err != nil {
		return err
	}
	defer done()
	return files.Wrap("send a file of", s.sendPart(w, r, content, part, begin))
}

// sendPart sends a part of a file. The end of the part is verified before it is sent: an error of a
// short file is answered, and an error of a long one breaks the answer off.
func (s *Server) sendPart(
	w http.ResponseWriter, r *web.Request, content *proto.FileContent, part web.Span, begin func(),
) error {
	body, err := content.Read(r.Context(), part.Offset, part.Length)
	if err != nil {
		return fmt.Errorf("read %d bytes at %d of a file: %w", part.Length, part.Offset, err)
	}
	defer func() { _ = body.Close() }() // it was only read
	in := bufio.NewReaderSize(body, web.SmallOutput)
	end := min(part.Length, web.SmallOutput)
	long := part.Length > end
	if long {
		if _, err := in.Peek(1); err != nil {
			return fmt.Errorf("read a file at %d: %w", part.Offset, web.NoEOF(err))
		}
		begin()
		if sent, err := io.CopyN(w, in, part.Length-end); err != nil {
			return fmt.Errorf("send a file from %d, after %d of %d bytes: %w", part.Offset, sent, part.Length, web.NoEOF(err))
		}
	}
	rest, err := io.ReadAll(io.LimitReader(in, end+1))
	if err == nil && int64(len(rest)) != end {
		err = io.ErrUnexpectedEOF
	}
	if err != nil {
		return fmt.Errorf("read the last %d bytes before %d of a file, got %d: %w", end, part.Offset+part.Length,
			len(rest), err)
	}
	if !long {
		begin()
	}
	_, err = w.Write(rest)
	return err
}

// rangeIsCurrent reports whether the condition of a range request holds for content with this tag.
// Times are not accepted as conditions: they do not distinguish contents.
func rangeIsCurrent(ifRange, tag string) bool { return ifRange == "" || ifRange == tag }

// putContent stores an uploaded file.
func (s *Server) putContent(w http.ResponseWriter, r *web.Request) error {
	err := s.storeContent(w, r)
	if err != nil {
		w.Header().Set("Connection", "close") // the body, or the rest of it, is not read
	}
	return err
}

func (s *Server) storeContent(w http.ResponseWriter, r *web.Request) error {
	g, key, err := s.checkGrant(r, http.MethodPut)
	if err == nil {
		err = web.RequireIdentity(w, r)
	}
	if err == nil {
		err = checkLength(r.ContentLength, g.size)
	}
	if err != nil {
		return err
	}
	files, err := s.opener.Open(r.Context(), key, g.source, g.id)
	if err != nil {
		return err
	}
	defer files.Close()
	end, err := files.BeginUpload(r.Context(), g.size)
	if err != nil {
		return err
	}
	defer end()
	body := r.LongBody(r.Body, g.size)
	err = files.Put(r.Context(), g.path, g.size, body)
	body.ClearDeadline()
	if err != nil {
		return err
	}
	return web.WriteValue(w, http.StatusOK, api.Uploaded{Path: g.path, Size: g.size})
}

// checkLength compares the length of an upload with the length that its URL allows.
func checkLength(length, allowed int64) error {
	switch {
	case length < 0:
		return api.Errorf(api.CodeLengthRequired, "a file is sent with its Content-Length")
	case length > allowed:
		return web.BodyTooLarge(allowed)
	case length < allowed:
		return proto.FieldErrorf("Content-Length", "is %d, and the URL is for a file of %d bytes", length, allowed)
	default:
		return nil
	}
}
