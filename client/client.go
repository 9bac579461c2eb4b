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
	"net/url"
	"strings"
	"time"

	"github.com/cenkalti/backoff/v4"
)

const (
	// defaultPatience is the default of [Config.Patience].
	defaultPatience  = 30 * time.Second
	defaultUserAgent = "bullpen-go"
	firstPause       = 200 * time.Millisecond
	longestPause     = 5 * time.Second

	ndjson = "application/x-ndjson"
)

// Config describes how to reach a server. URL and Key are required.
type Config struct {
	URL string // of the server, such as https://bullpen.example.com; a path is a prefix
	Key string // the API key, sk-…

	UserAgent string // of the requests; empty for bullpen-go
	// HTTP sends the requests; nil for [http.DefaultClient]. It must have no timeout, because streams
	// are long: limit single calls with their contexts.
	HTTP *http.Client
	// Patience bounds retries while the server is unavailable or a stream cannot be resumed; 0 for 30 s.
	Patience time.Duration
	// NoRetry makes the client send each request only once, without an idempotency key.
	NoRetry bool
	// OnRetry, if not nil, is called with the cause before a request is resent. It may be called
	// concurrently.
	OnRetry func(cause error)
}

// Client sends requests to one server with one API key. It is safe for concurrent use and need not
// be closed.
type Client struct {
	cfg Config
}

// New returns a client. It sends nothing. It returns an error if the URL is invalid or the key is
// missing.
func New(cfg Config) (*Client, error) {
	u, err := url.Parse(cfg.URL)
	if err != nil || u.Scheme != "http" && u.Scheme != "https" || u.Host == "" || u.RawQuery != "" || u.Fragment != "" {
		return nil, fmt.Errorf("client: %q is not the URL of a server: write https://HOST or http://HOST:PORT", cfg.URL)
	}
	if cfg.Key == "" {
		return nil, errors.New("client: the API key is empty")
	}
	cfg.URL = strings.TrimRight(cfg.URL, "/")
	if cfg.UserAgent == "" {
		cfg.UserAgent = defaultUserAgent
	}
	if cfg.HTTP == nil {
		cfg.HTTP = http.DefaultClient
	}
	if cfg.Patience == 0 {
		cfg.Patience = defaultPatience
	}
	if cfg.OnRetry == nil {
		cfg.OnRetry = func(error) {}
	}
	return &Client{cfg}, nil
}

// Do sends a request that no other method covers, such as one of a newer server. The path begins
// with a slash and may have a query. If body is not nil, it is sent as JSON. If into is not nil,
// the answer's JSON is decoded into it. Do returns the headers of the answer. Only GET requests are
// resent when the connection breaks.
func (c *Client) Do(ctx context.Context, method, path string, header map[string]string, body, into any,
) (http.Header, error) {
	r := call{method: method, path: path, body: body, header: header, resend: method == http.MethodGet}
	if into == nil {
		resp, err := c.do(ctx, r)
		if err != nil {
			return nil, err
		}
		return resp.Header, resp.Body.Close()
	}
	return c.decode(ctx, r, into)
}

// Ready returns nil if the server can run programs now. It does not retry.
func (c *Client) Ready(ctx context.Context) error {
	resp, err := c.once(ctx, call{method: http.MethodGet, path: "/readyz"}, nil)
	if err != nil {
		return err
	}
	return resp.Body.Close()
}

// call is a request and its retry policy.
type call struct {
	method, path string
	url          string // the whole address, instead of path: one that needs no key, maybe of another host
	body         any
	upload       func() io.Reader // opens a body that is not JSON; nil for none
	size         int64            // of upload, in bytes; -1 if it is unknown
	header       map[string]string
	single       bool // its body can be read once: it is never sent again
	resend       bool // it may be resent although the server may have received it
	redial       bool // retry if no connection can be made; after an answer or a broken connection that is always done
}

// do sends the request and returns a successful answer. It returns [*Error], [*UnreachableError],
// the cause of ctx, or the error of a broken connection.
func (c *Client) do(ctx context.Context, call call) (*http.Response, error) {
	var body []byte
	if call.body != nil {
		var err error
		if body, err = json.Marshal(call.body); err != nil {
			return nil, fmt.Errorf("encode request: %w", err)
		}
	}
	var resp *http.Response
	broke := false // a connection broke after the request was sent
	wait := &hintedBackOff{ExponentialBackOff: c.newBackOff()}
	err := backoff.RetryNotify(func() error {
		var err error
		resp, err = c.once(ctx, call, body) //nolint:bodyclose // the caller closes it
		if err == nil {
			return nil
		}
		if ctx.Err() != nil {
			return backoff.Permanent(context.Cause(ctx))
		}
		refused, isAnswer := errors.AsType[*Error](err)
		_, isUnreachable := errors.AsType[*UnreachableError](err)
		firstBreak := !isAnswer && !isUnreachable && !broke
		broke = broke || firstBreak
		wait.hint = 0
		switch {
		case c.cfg.NoRetry || call.single:
			return backoff.Permanent(err)
		case isAnswer && refused.temporary():
			wait.hint = refused.RetryAfter
			call.redial = true // the server was there; it may be restarting now
			return err
		case isUnreachable && call.redial:
			return err
		case !isAnswer && !isUnreachable && call.resend:
			call.redial = true // as above
			if firstBreak {
				wait.Reset() // the wait for the answer may have been long; Patience begins now
			}
			return err
		default:
			return backoff.Permanent(err)
		}
	}, backoff.WithContext(wait, ctx), func(err error, _ time.Duration) { c.cfg.OnRetry(err) })
	_, isAnswer := errors.AsType[*Error](err)
	if err != nil && broke && !isAnswer && ctx.Err() == nil && call.method != http.MethodGet {
		err = fmt.Errorf("%w; %w", err, ErrUnknownOutcome)
	}
	return resp, err
}

// once sends the request once.
func (c *Client) once(ctx context.Context, call call, body []byte) (*http.Response, error) {
	var content io.Reader = bytes.NewReader(body)
	if call.upload != nil {
		content = io.NopCloser(call.upload())
	}
	address, server := c.cfg.URL+call.path, c.cfg.URL
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
	req.Header.Set("Accept", "application/json")
	for name, value := range call.header {
		req.Header.Set(name, value)
	}
	if call.url == "" {
		req.Header.Set("Authorization", "Bearer "+c.cfg.Key)
	} else {
		server = req.URL.Scheme + "://" + req.URL.Host
	}
	req.Header.Set("User-Agent", c.cfg.UserAgent)
	resp, err := c.cfg.HTTP.Do(req)
	if err != nil {
		if op, ok := errors.AsType[*net.OpError](err); ok && op.Op == "dial" {
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

// get sends the request and decodes the answer, which is nil if there is an error.
func get[T any](ctx context.Context, c *Client, call call) (*T, error) {
	v := new(T)
	if _, err := c.decode(ctx, call, v); err != nil {
		return nil, err
	}
	return v, nil
}

// read gets the JSON of a path.
func read[T any](ctx context.Context, c *Client, path string) (*T, error) {
	return get[T](ctx, c, call{method: http.MethodGet, path: path, resend: true})
}

// decode sends the request and decodes the answer into v. It returns the headers of the answer.
func (c *Client) decode(ctx context.Context, call call, v any) (http.Header, error) {
	body, header, err := c.bytes(ctx, call)
	if err != nil {
		return nil, err
	}
	if err := json.Unmarshal(body, v); err != nil {
		return nil, fmt.Errorf("%s %s: decode the answer: %w", call.method, call.path, err)
	}
	return header, nil
}

// bytes sends the request and returns the answer.
func (c *Client) bytes(ctx context.Context, call call) ([]byte, http.Header, error) {
	resp, err := c.do(ctx, call)
	if err != nil {
		return nil, nil, err
	}
	var body bytes.Buffer
	if err := save(resp, &body); err != nil {
		return nil, nil, err
	}
	return body.Bytes(), resp.Header, nil
}

// save writes the body of an answer to w.
func save(resp *http.Response, w io.Writer) error {
	_, err := io.Copy(w, resp.Body)
	if err := errors.Join(err, resp.Body.Close()); err != nil {
		return fmt.Errorf("%s %s: the answer broke off: %w", resp.Request.Method, resp.Request.URL.Path, err)
	}
	return nil
}

// copyTo sends the request and writes the body of the answer to w.
func (c *Client) copyTo(ctx context.Context, call call, w io.Writer) error {
	resp, err := c.do(ctx, call)
	if err != nil {
		return err
	}
	return save(resp, w)
}

// empty sends a request whose answer has no body.
func (c *Client) empty(ctx context.Context, call call) error {
	resp, err := c.do(ctx, call)
	if err != nil {
		return err
	}
	return resp.Body.Close()
}

// withQuery returns a path with the parameters that are not empty.
func withQuery(path string, query url.Values) string {
	if query = given(query); len(query) > 0 {
		return path + "?" + query.Encode()
	}
	return path
}

// given returns the parameters that are not empty.
func given(query url.Values) url.Values {
	some := url.Values{}
	for name, values := range query {
		if len(values) > 0 && values[0] != "" {
			some[name] = values
		}
	}
	return some
}

func (c *Client) newBackOff() *backoff.ExponentialBackOff {
	return backoff.NewExponentialBackOff(backoff.WithInitialInterval(firstPause), backoff.WithMaxInterval(longestPause),
		backoff.WithMaxElapsedTime(c.cfg.Patience))
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

// idempotent returns headers that make the server carry out a request only once. A client that
// never resends needs none.
func (c *Client) idempotent(header map[string]string) map[string]string {
	if header == nil {
		header = map[string]string{}
	}
	if !c.cfg.NoRetry {
		header["Idempotency-Key"] = "go-" + rand.Text()
	}
	return header
}
