// Package client is the client of bullpen's HTTP API for the command line. It retries requests that
// the server asks to retry, and resumes streams that break off. It prints nothing and knows no exit
// codes.
package client

import (
	"bytes"
	"context"
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"strconv"
	"strings"
	"time"

	"github.com/cenkalti/backoff/v4"

	"github.com/bullpen-run/bullpen/proto"
)

const (
	// defaultPatience is the default of [Client.Patience].
	defaultPatience = 30 * time.Second
	firstPause      = 200 * time.Millisecond
	longestPause    = 5 * time.Second
	// maxErrorBody is the largest part of an error's body that is read.
	maxErrorBody = 64 << 10

	ndjson = "application/x-ndjson"
)

// Client sends requests to one server with one API key. It is safe for concurrent use.
type Client struct {
	URL   string       // of the server, such as http://127.0.0.1:8080
	Key   string       // the API key
	Agent string       // the User-Agent header
	HTTP  *http.Client // nil for http.DefaultClient; it must have no timeout, because streams are long
	// Patience bounds retries while the server is unavailable or a stream cannot be resumed; 0 is
	// 30 s.
	Patience time.Duration
	// Once makes each request be sent once, whatever happens.
	Once bool
	// Retrying, if not nil, is called with the cause before a request is sent again, from the
	// goroutine that sends it.
	Retrying func(error)
}

func (c *Client) retrying(err error) {
	if c.Retrying != nil {
		c.Retrying(err)
	}
}

// Error is an answer with an error status.
type Error struct {
	Status     int    // HTTP status
	Code       string // of the API, such as validation_error; empty if something other than bullpen answered
	Message    string // what is wrong, and what to do about it
	TraceID    proto.TraceID
	RequestID  string
	RetryAfter time.Duration // from the header Retry-After; 0 without it
}

func (e *Error) Error() string {
	var b strings.Builder
	fmt.Fprintf(&b, "%s (HTTP %d", e.Message, e.Status)
	for _, s := range []string{e.Code, string(e.TraceID), e.RequestID} {
		if s != "" {
			b.WriteString(", " + s)
		}
	}
	return b.String() + ")"
}

// UnreachableError is returned if no connection to the server could be made. The server has
// received at most an earlier attempt.
type UnreachableError struct {
	URL   string
	Err   error
	Broke bool // an earlier attempt broke off, and the server may have carried it out
}

func (e *UnreachableError) Error() string { return fmt.Sprintf("cannot reach %s: %v", e.URL, e.Err) }

// Unwrap returns the cause.
func (e *UnreachableError) Unwrap() error { return e.Err }

// call is a request and its retry policy.
type call struct {
	method, path string
	url          string // the whole address, instead of path: one that needs no key, maybe of another host
	body         any
	upload       func() io.Reader // opens a body that is not JSON; nil for none
	size         int64            // of upload, in bytes
	header       map[string]string
	resend       bool // it may be sent again although the server may have received it
	redial       bool // retry if no connection can be made; after an answer or a broken connection that is always done
}

// do sends the request and returns a successful answer. It returns [*Error], [*UnreachableError],
// ctx.Err(), or the error of a broken connection.
func (c *Client) do(ctx context.Context, call call) (*http.Response, error) {
	var body []byte
	if call.body != nil {
		var err error
		if body, err = json.Marshal(call.body); err != nil {
			return nil, fmt.Errorf("encode request: %w", err)
		}
	}
	var resp *http.Response
	broke := false
	wait := &hintedBackOff{ExponentialBackOff: c.newBackOff()}
	err := backoff.RetryNotify(func() error {
		var err error
		resp, err = c.once(ctx, call, body) //nolint:bodyclose // the caller closes it
		var refused *Error
		var unreachable *UnreachableError
		switch {
		case err == nil:
			return nil
		case c.Once:
			return backoff.Permanent(err)
		case ctx.Err() != nil:
			return backoff.Permanent(context.Cause(ctx))
		case errors.As(err, &refused):
			// A 429 without a time is a limit of the plan, which waiting does not change.
			if refused.Status == http.StatusServiceUnavailable || refused.Status == http.StatusTooManyRequests && refused.RetryAfter > 0 {
				wait.hint = refused.RetryAfter
				call.redial = true // the server was there; it may be restarting now
				return err
			}
			return backoff.Permanent(err)
		case errors.As(err, &unreachable) && call.redial:
			wait.hint, unreachable.Broke = 0, broke
			return err
		case !errors.As(err, &unreachable) && call.resend:
			wait.hint, call.redial = 0, true // as above
			if !broke {
				broke = true
				wait.Reset() // the wait for the answer may have been long; Patience begins now
			}
			return err
		default:
			return backoff.Permanent(err)
		}
	}, backoff.WithContext(wait, ctx), func(err error, _ time.Duration) { c.retrying(err) })
	return resp, err
}

func (c *Client) once(ctx context.Context, call call, body []byte) (*http.Response, error) {
	var content io.Reader = bytes.NewReader(body)
	if call.upload != nil {
		content = call.upload()
	}
	address := c.address(call.path)
	if call.url != "" {
		address = call.url
	}
	req, err := http.NewRequestWithContext(ctx, call.method, address, content)
	if err != nil {
		return nil, fmt.Errorf("make request: %w", err)
	}
	if call.upload != nil {
		req.ContentLength = call.size
		if call.size == 0 {
			req.Body = http.NoBody
		}
	}
	if body != nil {
		req.Header.Set("Content-Type", "application/json")
	}
	for name, value := range call.header {
		req.Header.Set(name, value)
	}
	if call.url != "" {
		return c.exchange(req, req.URL.Scheme+"://"+req.URL.Host)
	}
	return c.send(req)
}

// address returns the URL of a path of the server.
func (c *Client) address(path string) string { return strings.TrimRight(c.URL, "/") + path }

// send sends a request with the key and returns a successful answer.
func (c *Client) send(req *http.Request) (*http.Response, error) {
	req.Header.Set("Authorization", "Bearer "+c.Key)
	if req.Header.Get("Accept") == "" {
		req.Header.Set("Accept", "application/json")
	}
	return c.exchange(req, c.URL)
}

// exchange sends a request to the server and returns a successful answer.
func (c *Client) exchange(req *http.Request, server string) (*http.Response, error) {
	req.Header.Set("User-Agent", c.Agent)
	client := c.HTTP
	if client == nil {
		client = http.DefaultClient
	}
	resp, err := client.Do(req)
	if err != nil {
		var op *net.OpError
		if errors.As(err, &op) && op.Op == "dial" {
			return nil, &UnreachableError{URL: server, Err: op}
		}
		return nil, fmt.Errorf("%s %s: %w", req.Method, req.URL.Path, err)
	}
	if resp.StatusCode/100 == 2 {
		return resp, nil
	}
	defer func() { _ = resp.Body.Close() }() // its content was read or is not needed
	return nil, readError(resp)
}

func readError(resp *http.Response) *Error {
	e := &Error{
		Status: resp.StatusCode, TraceID: proto.TraceID(resp.Header.Get("X-Trace-Id")), RequestID: resp.Header.Get("X-Request-Id"),
	}
	if s, err := strconv.Atoi(resp.Header.Get("Retry-After")); err == nil && s >= 0 {
		e.RetryAfter = time.Duration(s) * time.Second
	}
	var envelope struct {
		Error   string `json:"error"`
		Message string `json:"message"`
	}
	body, err := io.ReadAll(io.LimitReader(resp.Body, maxErrorBody))
	if err == nil {
		err = json.Unmarshal(body, &envelope)
	}
	if err != nil || envelope.Error == "" {
		e.Message = "the answer is not one of bullpen's: check the URL, and the proxies on the way"
		return e
	}
	e.Code, e.Message = envelope.Error, envelope.Message
	return e
}

// get sends the request and decodes the answer. It also returns the answer's bytes. The answer is
// never nil.
func get[T any](ctx context.Context, c *Client, call call) (*T, json.RawMessage, error) {
	v := new(T)
	raw, _, err := c.decode(ctx, call, v)
	return v, raw, err
}

// mayHaveHappened reports whether the server may have carried out a request that failed with err.
func mayHaveHappened(err error) bool {
	var refused *Error
	var unreachable *UnreachableError
	return err != nil && !errors.As(err, &refused) && !errors.As(err, &unreachable)
}

// decode sends the request and decodes the answer into v. It also returns the answer's bytes and
// headers.
func (c *Client) decode(ctx context.Context, call call, v any) (json.RawMessage, http.Header, error) {
	resp, err := c.do(ctx, call)
	if err != nil {
		return nil, nil, err
	}
	body, err := io.ReadAll(resp.Body)
	if err := errors.Join(err, resp.Body.Close()); err != nil {
		return nil, nil, fmt.Errorf("%s %s: the answer broke off: %w", call.method, call.path, err)
	}
	if err := json.Unmarshal(body, v); err != nil {
		return nil, nil, fmt.Errorf("%s %s: decode the answer: %w", call.method, call.path, err)
	}
	return body, resp.Header, nil
}

func (c *Client) newBackOff() *backoff.ExponentialBackOff {
	patience := c.Patience
	if patience == 0 {
		patience = defaultPatience
	}
	return backoff.NewExponentialBackOff(backoff.WithInitialInterval(firstPause), backoff.WithMaxInterval(longestPause),
		backoff.WithMaxElapsedTime(patience))
}

// hintedBackOff waits at least as long as the server asks.
type hintedBackOff struct {
	*backoff.ExponentialBackOff
	hint time.Duration
}

// NextBackOff returns the next pause, or Stop if it would exceed the patience.
func (b *hintedBackOff) NextBackOff() time.Duration {
	next := b.ExponentialBackOff.NextBackOff()
	if next == backoff.Stop || b.GetElapsedTime()+b.hint > b.MaxElapsedTime {
		return backoff.Stop
	}
	return max(next, b.hint)
}

// newIdempotencyKey returns a key under which the server carries out a request only once.
func newIdempotencyKey() string { return "cli-" + rand.Text() }
