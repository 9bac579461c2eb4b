package client

import (
	"context"
	"io"
	"iter"
	"net/http"
	"net/url"
	"strconv"

	"github.com/bullpen-run/bullpen/proto/api"
)

const threadsPath = "/v1/threads"

// tarType is the content type of archives.
const tarType = "application/x-tar"

func threadPath(id string) string { return threadsPath + "/" + url.PathEscape(id) }

// Threads returns the threads of the key's organisation by id.
func (c *Client) Threads(ctx context.Context) iter.Seq2[api.Thread, error] {
	return pages[api.Thread](ctx, c, threadsPath, "threads", largestPages())
}

// Thread returns a thread with its versions.
func (c *Client) Thread(ctx context.Context, id string) (*api.WholeThread, error) {
	return read[api.WholeThread](ctx, c, threadPath(id))
}

// RemoveThread removes a thread with all its versions.
func (c *Client) RemoveThread(ctx context.Context, id string) error {
	return c.empty(ctx, call{method: http.MethodDelete, path: threadPath(id)})
}

// ForkThread creates a thread from a version of another, 0 for the newest.
func (c *Client) ForkThread(ctx context.Context, id, to string, version int64) (*api.WholeThread, error) {
	body := api.ForkRequest{ID: to, Version: version}
	return get[api.WholeThread](ctx, c, call{method: http.MethodPost, path: threadPath(id) + "/fork", body: body})
}

// ThreadArchive writes a directory of a version of a thread's home to w as a tar: the home if dir is
// empty, and the newest version for 0.
func (c *Client) ThreadArchive(ctx context.Context, id string, version int64, dir string, w io.Writer) error {
	return c.archive(ctx, withQuery(threadPath(id)+"/archive", archiveQuery(version, dir)), w)
}

// UnpackThread unpacks a tar below a directory of a thread's home; an empty dir is the home. The
// body is sent once.
func (c *Client) UnpackThread(ctx context.Context, id, dir string, body io.Reader) (*api.ChangedFile, error) {
	path := withQuery(threadPath(id)+"/archive", archiveQuery(0, dir))
	return get[api.ChangedFile](ctx, c, sendOnce(path, tarType, body, -1))
}

// archiveQuery returns the parameters that select a directory of a version.
func archiveQuery(version int64, dir string) url.Values {
	query := url.Values{"path": {dir}}
	if version > 0 {
		query.Set("version", strconv.FormatInt(version, 10))
	}
	return query
}

// archive writes the tar at a path to w.
func (c *Client) archive(ctx context.Context, path string, w io.Writer) error {
	return c.copyTo(ctx, call{method: http.MethodGet, path: path, header: map[string]string{"Accept": tarType}}, w)
}

// sendOnce is a PUT of a body that can be read once. size is -1 if it is unknown.
func sendOnce(path, contentType string, body io.Reader, size int64) call {
	return call{
		method: http.MethodPut, path: path, upload: func() io.Reader { return body }, size: size, single: true,
		// 100-continue: so that a rejection arrives before the body is sent
		header: map[string]string{"Content-Type": contentType, "Expect": "100-continue"},
	}
}
