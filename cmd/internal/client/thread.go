package client

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"strconv"
	"time"

	"github.com/bullpen-run/bullpen/proto"
)

const (
	threadsPath      = "/v1/threads"
	adminThreadsPath = "/v1/admin/threads"
	// threadPage is how many threads are asked for at once, the most that the server gives.
	threadPage = 100
)

// Thread is a thread as the server tells it.
type Thread struct {
	ID        string         `json:"id"`
	Version   int64          `json:"version"` // 0 while its home is empty
	Bytes     int64          `json:"bytes"`
	Files     int64          `json:"files"`
	CreatedAt time.Time      `json:"created_at"`
	UsedAt    time.Time      `json:"used_at"`
	Holder    *proto.TraceID `json:"holder"` // nil where it is free
	// Versions and Staged are not in lists.
	Versions []ThreadVersion `json:"versions,omitempty"`
	Staged   []StagedFile    `json:"staged,omitempty"`
}

// ThreadVersion is a version that can be gone back to.
type ThreadVersion struct {
	Number    int64          `json:"number"`
	CreatedAt time.Time      `json:"created_at"`
	Trace     *proto.TraceID `json:"trace_id"` // nil where it was forked
	Bytes     int64          `json:"bytes"`
	Files     int64          `json:"files"`
}

// StagedFile is an uploaded file that is in no version yet.
type StagedFile struct {
	Path string    `json:"path"`
	Size int64     `json:"size"` // bytes
	At   time.Time `json:"at"`
}

// Threads lists all threads of the key's organisation.
func (c *Client) Threads(ctx context.Context) ([]Thread, error) {
	type page struct {
		Threads    []Thread `json:"threads"`
		NextCursor *string  `json:"next_cursor"`
	}
	return pages(ctx, c, threadsPath, threadPage, func(p *page) ([]Thread, *string) { return p.Threads, p.NextCursor })
}

// Thread gives a thread, and the answer's bytes.
func (c *Client) Thread(ctx context.Context, id string) (*Thread, json.RawMessage, error) {
	return c.thread(ctx, call{method: http.MethodGet, path: threadPath(id), resend: true})
}

// RemoveThread removes a thread.
func (c *Client) RemoveThread(ctx context.Context, id string) error {
	return c.empty(ctx, call{method: http.MethodDelete, path: threadPath(id)})
}

// ForkThread makes a new thread from a version of another, 0 for the newest.
func (c *Client) ForkThread(ctx context.Context, id, to string, version int64) (*Thread, json.RawMessage, error) {
	body := struct {
		ID      string `json:"id"`
		Version int64  `json:"version,omitempty"`
	}{to, version}
	return c.thread(ctx, call{method: http.MethodPost, path: threadPath(id) + "/fork", body: body})
}

func (c *Client) thread(ctx context.Context, call call) (*Thread, json.RawMessage, error) {
	t := new(Thread)
	raw, _, err := c.getJSON(ctx, call, t)
	return t, raw, err
}

func threadPath(id string) string { return threadsPath + "/" + url.PathEscape(id) }

// ThreadArchive writes a version of a thread's home to w as a tar, that of the newest where version is 0.
func (c *Client) ThreadArchive(ctx context.Context, id string, version int64, w io.Writer) error {
	path := threadPath(id) + "/archive"
	if version > 0 {
		path += "?version=" + strconv.FormatInt(version, 10)
	}
	resp, err := c.do(ctx, call{method: http.MethodGet, path: path, header: map[string]string{"Accept": "application/x-tar"}})
	if err != nil {
		return err
	}
	return save(resp, w)
}

// save writes the body of an answer to w.
func save(resp *http.Response, w io.Writer) error {
	_, err := io.Copy(w, resp.Body)
	if err := errors.Join(err, resp.Body.Close()); err != nil {
		return fmt.Errorf("%s %s: the answer broke off: %w", resp.Request.Method, resp.Request.URL.Path, err)
	}
	return nil
}

// CollectThreads removes blobs from the store of threads that nothing refers to and that are older than safeAge, nil for the server's
// default.
func (c *Client) CollectThreads(ctx context.Context, safeAge *time.Duration) (*proto.Collected, error) {
	var body struct {
		SafeAge *float64 `json:"safe_age,omitempty"`
	}
	if safeAge != nil {
		body.SafeAge = new(safeAge.Seconds())
	}
	done := new(proto.Collected)
	_, _, err := c.getJSON(ctx, call{method: http.MethodPost, path: adminThreadsPath + "/gc", body: body}, done)
	return done, err
}

// RebuildThreads makes threads again from what the store has.
func (c *Client) RebuildThreads(ctx context.Context) (*proto.Rebuilt, error) {
	done := new(proto.Rebuilt)
	_, _, err := c.getJSON(ctx, call{method: http.MethodPost, path: adminThreadsPath + "/rebuild"}, done)
	return done, err
}

// fileRequest is the body of requests about files of a thread.
type fileRequest struct {
	Source    proto.FileSource `json:"source"`
	ID        string           `json:"id"`
	Path      string           `json:"path"`
	Recursive bool             `json:"recursive,omitempty"`
	Size      *int64           `json:"content_length,omitempty"`
}

// Files lists what is at a path in a thread's home, with all below it where recursive is true.
func (c *Client) Files(ctx context.Context, thread, path string, recursive bool) ([]proto.File, json.RawMessage, error) {
	var list struct {
		Files []proto.File `json:"files"`
	}
	raw, _, err := c.getJSON(ctx, call{
		method: http.MethodPost, path: "/v1/files/list", resend: true,
		body: fileRequest{Source: proto.SourceThread, ID: thread, Path: path, Recursive: recursive},
	}, &list)
	return list.Files, raw, err
}

// signed is a URL that says itself what it allows.
type signed struct {
	URL     string `json:"url"`
	Method  string `json:"method"`
	Headers []struct {
		Name  string `json:"name"`
		Value string `json:"value"`
	} `json:"headers"`
}

// Download writes a file of a thread to w.
func (c *Client) Download(ctx context.Context, thread, path string, w io.Writer) error {
	resp, err := c.useSigned(ctx, "/v1/files/download_url", fileRequest{Source: proto.SourceThread, ID: thread, Path: path}, nil)
	if err != nil {
		return err
	}
	return save(resp, w)
}

// Upload makes size bytes of body a file of a thread. They are sent once.
func (c *Client) Upload(ctx context.Context, thread, path string, size int64, body io.Reader) error {
	resp, err := c.useSigned(ctx, "/v1/files/upload_url", fileRequest{Source: proto.SourceThread, ID: thread, Path: path, Size: &size}, body)
	if err != nil {
		return err
	}
	return resp.Body.Close()
}

// useSigned asks for a signed URL and sends body there, as many bytes as asked for. The URL may be of another host, and needs no key.
func (c *Client) useSigned(ctx context.Context, path string, ask fileRequest, body io.Reader) (*http.Response, error) {
	var at signed
	if _, _, err := c.getJSON(ctx, call{method: http.MethodPost, path: path, body: ask, resend: true}, &at); err != nil {
		return nil, err
	}
	req, err := http.NewRequestWithContext(ctx, at.Method, at.URL, nil)
	if err != nil {
		return nil, fmt.Errorf("make request: %w", err)
	}
	if body != nil {
		req.Body, req.ContentLength = io.NopCloser(body), *ask.Size
		if *ask.Size == 0 {
			req.Body = http.NoBody
		}
		req.Header.Set("Expect", "100-continue") // so that a refusal comes before the body goes
	}
	for _, h := range at.Headers {
		req.Header.Set(h.Name, h.Value)
	}
	return c.exchange(req, req.URL.Scheme+"://"+req.URL.Host)
}
