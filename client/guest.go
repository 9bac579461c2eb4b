package client

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"strings"
	"time"

	"connectrpc.com/connect"
	"github.com/cenkalti/backoff/v4"

	"github.com/bullpen-run/bullpen/guest/processpb"
)

// headerUser names the user of a sandbox as whom a request to its guest acts.
const headerUser = "Bullpen-User"

// maxGuestMessage is the largest message that is read from a guest, in bytes.
const maxGuestMessage = 4 << 20

// Guest reaches the guest of a live sandbox, which starts processes and serves files. It is safe for
// concurrent use and need not be closed.
type Guest struct {
	// URL is where the guest answers. It speaks E2B's protocol: process.Process and
	// filesystem.Filesystem over Connect, and /files, /health, /envs and /metrics over HTTP.
	URL string
	// HTTP sends requests to URL and paths below it, with the API key and the user. It returns an
	// [*Error] if the server does not pass a request on, such as for a paused sandbox.
	HTTP *http.Client

	client    *Client
	user      string
	processes processpb.ProcessClient
}

// Guest returns the guest of a live sandbox. Requests to it act as a user of the sandbox: user or root;
// empty for user. It sends nothing.
func (c *Client) Guest(id, user string) *Guest {
	g := &Guest{URL: c.cfg.URL + sandboxPath(id) + "/guest", client: c, user: user}
	sender := *c.cfg.HTTP
	sender.Transport = &guestTransport{client: c, base: g.URL + "/", user: user}
	// A tenant may control the guest, and must not be able to send the key elsewhere.
	sender.CheckRedirect = func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse }
	g.HTTP = &sender
	g.processes = processpb.NewProcessClient(g.HTTP, g.URL, connect.WithReadMaxBytes(maxGuestMessage))
	return g
}

// guestTransport sends requests to a guest.
type guestTransport struct {
	client *Client
	base   string // the beginning of their URLs
	user   string
}

// RoundTrip implements [http.RoundTripper].
func (t *guestTransport) RoundTrip(r *http.Request) (*http.Response, error) {
	if !strings.HasPrefix(r.URL.String(), t.base) {
		return nil, fmt.Errorf("%s is not below %s", r.URL, t.base)
	}
	r = r.Clone(r.Context())
	r.Header.Set("Authorization", "Bearer "+t.client.cfg.Key)
	r.Header.Set("User-Agent", t.client.cfg.UserAgent)
	if t.user != "" {
		r.Header.Set(headerUser, t.user)
	}
	sender := t.client.cfg.HTTP.Transport
	if sender == nil {
		sender = http.DefaultTransport
	}
	resp, err := sender.RoundTrip(r)
	if err != nil {
		if op, ok := errors.AsType[*net.OpError](err); ok && op.Op == "dial" {
			return nil, &UnreachableError{URL: t.client.cfg.URL, Err: op}
		}
		return nil, err
	}
	if resp.StatusCode/100 == 2 {
		return resp, nil
	}
	body, err := io.ReadAll(io.LimitReader(resp.Body, maxErrorBody))
	_ = resp.Body.Close() // what matters of it was read
	if err != nil {
		return nil, err
	}
	resp.Body = io.NopCloser(bytes.NewReader(body))
	if refused := readError(resp); refused.Code != "" { // the guest's errors have another form
		return nil, refused
	}
	resp.Body = io.NopCloser(bytes.NewReader(body))
	return resp, nil
}

// GuestError is an error of a sandbox's guest.
type GuestError struct {
	Code    string // of the Connect protocol, such as not_found
	Message string
}

// Error returns the message and the code.
func (e *GuestError) Error() string { return fmt.Sprintf("%s (%s)", e.Message, e.Code) }

// guestError converts an error of a call of the guest: it is an [*Error], an [*UnreachableError], a
// [*GuestError], or the error of a broken connection.
func guestError(err error) error {
	if refused, ok := errors.AsType[*Error](err); ok {
		return refused
	}
	if unreachable, ok := errors.AsType[*UnreachableError](err); ok {
		return unreachable
	}
	if failed, ok := errors.AsType[*connect.Error](err); ok && connect.IsWireError(err) {
		return &GuestError{failed.Code().String(), failed.Message()}
	}
	return err
}

// retry calls f until it succeeds, or fails with an error after which repeating it is no use: it is
// repeated if the server asks for that, and while a restarting server cannot be reached.
func (g *Guest) retry(ctx context.Context, f func() error) error {
	c, wait, redial := g.client, &hintedBackOff{ExponentialBackOff: g.client.newBackOff()}, false
	return backoff.RetryNotify(func() error {
		err := f()
		refused, isAnswer := errors.AsType[*Error](err)
		_, isUnreachable := errors.AsType[*UnreachableError](err)
		wait.hint = 0
		switch {
		case err == nil:
			return nil
		case ctx.Err() != nil:
			return backoff.Permanent(context.Cause(ctx))
		case c.cfg.NoRetry:
		case isAnswer && refused.temporary():
			wait.hint, redial = refused.RetryAfter, true
			return err
		case isUnreachable && redial:
			return err
		}
		return backoff.Permanent(err)
	}, backoff.WithContext(wait, ctx), func(err error, _ time.Duration) { c.cfg.OnRetry(err) })
}

// Download writes a file of the sandbox to w. The path is absolute or relative to the home.
func (g *Guest) Download(ctx context.Context, path string, w io.Writer) error {
	var resp *http.Response
	err := g.retry(ctx, func() (err error) {
		resp, err = g.sendFile(ctx, http.MethodGet, path, nil, 0) //nolint:bodyclose // save closes it
		return err
	})
	if err != nil {
		return err
	}
	return save(resp, w)
}

// Upload writes size bytes of body to a file of the sandbox, -1 if their number is unknown. Missing
// directories are created. The body is sent once.
func (g *Guest) Upload(ctx context.Context, path string, body io.Reader, size int64) error {
	resp, err := g.sendFile(ctx, http.MethodPost, path, body, size)
	if err != nil {
		return err
	}
	return resp.Body.Close()
}

// sendFile sends a request for a file and returns a successful answer.
func (g *Guest) sendFile(
	ctx context.Context, method, path string, body io.Reader, size int64,
) (*http.Response, error) {
	query := given(url.Values{"path": {path}, "username": {g.user}})
	r, err := http.NewRequestWithContext(ctx, method, g.URL+"/files?"+query.Encode(), body)
	if err != nil {
		return nil, fmt.Errorf("make request: %w", err)
	}
	if body != nil {
		r.ContentLength = size
		if size == 0 {
			r.Body = http.NoBody
		}
		r.Header.Set("Content-Type", "application/octet-stream")
	}
	resp, err := g.HTTP.Do(r)
	if err != nil {
		if ctx.Err() != nil {
			return nil, context.Cause(ctx)
		}
		return nil, guestError(err)
	}
	if resp.StatusCode/100 == 2 {
		return resp, nil
	}
	defer func() { _ = resp.Body.Close() }() // it is in memory
	var problem struct {
		Message string `json:"message"`
	}
	failed := &GuestError{fileErrorCode(resp.StatusCode), "the guest answers with " + resp.Status}
	if json.NewDecoder(resp.Body).Decode(&problem) == nil && problem.Message != "" {
		failed.Message = problem.Message
	}
	return nil, failed
}

// fileErrorCode returns the code of the Connect protocol for a status of the route of files.
func fileErrorCode(status int) string {
	code := connect.CodeUnknown
	switch status {
	case http.StatusBadRequest:
		code = connect.CodeInvalidArgument
	case http.StatusUnauthorized:
		code = connect.CodeUnauthenticated
	case http.StatusForbidden:
		code = connect.CodePermissionDenied
	case http.StatusNotFound:
		code = connect.CodeNotFound
	case http.StatusRequestEntityTooLarge, http.StatusInsufficientStorage:
		code = connect.CodeResourceExhausted
	}
	return code.String()
}
