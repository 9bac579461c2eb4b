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
	"github.com/bullpen-run/bullpen/proto/api"
)

const (
	threadsPath      = "/v1/threads"
	adminThreadsPath = "/v1/admin/threads"
)

// Threads lists all threads of the key's organisation.
func (c *Client) Threads(ctx context.Context) ([]Thread, error) {
	return pages(ctx, c, threadsPath, func(p *api.Threads) ([]Thread, *string) { return p.Threads, p.NextCursor })
}

// Thread returns a thread, and the answer's bytes.
func (c *Client) Thread(ctx context.Context, id string) (*WholeThread, json.RawMessage, error) {
	return get[WholeThread](ctx, c, call{method: http.MethodGet, path: threadPath(id), resend: true})
}

// RemoveThread removes a thread.
func (c *Client) RemoveThread(ctx context.Context, id string) error {
	return c.empty(ctx, call{method: http.MethodDelete, path: threadPath(id)})
}

// ForkThread creates a thread from a version of another, 0 for the newest.
func (c *Client) ForkThread(ctx context.Context, id, to string, version int64) (*WholeThread, json.RawMessage, error) {
	body := api.ForkRequest{ID: to, Version: version}
	return get[WholeThread](ctx, c, call{method: http.MethodPost, path: threadPath(id) + "/fork", body: body})
}

func threadPath(id string) string { return threadsPath + "/" + url.PathEscape(id) }

// ThreadArchive writes a directory of a version of a thread's home to w as a tar: the home if dir is
// empty, and the newest version for 0.
func (c *Client) ThreadArchive(ctx context.Context, id string, version int64, dir string, w io.Writer) error {
	query := url.Values{}
	if version > 0 {
		query.Set("version", strconv.FormatInt(version, 10))
	}
	path := archivePath(id, dir, query)
	resp, err := c.do(ctx, call{method: http.MethodGet, path: path, header: map[string]string{"Accept": "application/x-tar"}})
	if err != nil {
		return err
	}
	return save(resp, w)
}

func archivePath(id, dir string, query url.Values) string {
	if dir != "" {
		query.Set("path", dir)
	}
	path := threadPath(id) + "/archive"
	if len(query) > 0 {
		path += "?" + query.Encode()
	}
	return path
}

// UnpackThread unpacks a tar below a directory of a thread's home, the home if dir is empty. The
// body is sent once.
func (c *Client) UnpackThread(ctx context.Context, id, dir string, body io.Reader) (*ChangedFile, error) {
	path := archivePath(id, dir, url.Values{})
	req, err := http.NewRequestWithContext(ctx, http.MethodPut, c.address(path), io.NopCloser(body))
	if err != nil {
		return nil, fmt.Errorf("make request: %w", err)
	}
	req.Header.Set("Content-Type", "application/x-tar")
	req.Header.Set("Expect", "100-continue") // so that a rejection comes before the body is sent
	resp, err := c.send(req)
	if err != nil {
		return nil, err
	}
	changed := new(ChangedFile)
	err = json.NewDecoder(resp.Body).Decode(changed)
	if err := errors.Join(err, resp.Body.Close()); err != nil {
		return nil, fmt.Errorf("PUT %s: decode the answer: %w", path, err)
	}
	return changed, nil
}

// save writes the body of an answer to w.
func save(resp *http.Response, w io.Writer) error {
	_, err := io.Copy(w, resp.Body)
	if err := errors.Join(err, resp.Body.Close()); err != nil {
		return fmt.Errorf("%s %s: the answer broke off: %w", resp.Request.Method, resp.Request.URL.Path, err)
	}
	return nil
}

// CollectThreads removes garbage older than safeAge from the store of threads. If safeAge is nil,
// the server's default applies.
func (c *Client) CollectThreads(ctx context.Context, safeAge *time.Duration) (*proto.Collected, error) {
	var body api.CollectRequest
	if safeAge != nil {
		body.SafeAge = proto.Seconds(*safeAge)
	}
	removed, _, err := get[proto.Collected](ctx, c, call{method: http.MethodPost, path: adminThreadsPath + "/gc", body: body})
	return removed, err
}

// RebuildThreads rebuilds threads from the store.
func (c *Client) RebuildThreads(ctx context.Context) (*proto.Rebuilt, error) {
	rebuilt, _, err := get[proto.Rebuilt](ctx, c, call{method: http.MethodPost, path: adminThreadsPath + "/rebuild"})
	return rebuilt, err
}
