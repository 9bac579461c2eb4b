package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strconv"
	"strings"
	"time"

	"github.com/bullpen-run/bullpen/client"
	"github.com/bullpen-run/bullpen/proto"
	wire "github.com/bullpen-run/bullpen/proto/api"
)

const (
	executePath = "/v1/sandbox/execute"
	// idleConnections exceeds the number of callers, so that each keeps its connection.
	idleConnections = 64
	maxErrorBody    = 4 << 10
	programTimeout  = 60 // seconds
	agent           = "bullpen-bench"
)

// api is a client of a server that does not retry.
type api struct {
	url, key string
	http     *http.Client
	client   *client.Client // nil without a key
}

func newAPI(url, key string) *api {
	return apiOf(strings.TrimRight(url, "/"), key, &http.Client{Transport: &http.Transport{
		MaxIdleConns: idleConnections, MaxIdleConnsPerHost: idleConnections, DisableCompression: true,
	}})
}

// apiOf returns a client that sends its requests with another one.
func apiOf(url, key string, through *http.Client) *api {
	a := &api{url: url, key: key, http: through}
	// nil without a key
	a.client, _ = client.New(client.Config{URL: url, Key: key, UserAgent: agent, HTTP: through, NoRetry: true})
	return a
}

// do sends a request, whose body is JSON if it is not empty. A response with another status than 200,
// 201 and 204 is an error.
func (a *api) do(ctx context.Context, method, path, accept string, body []byte) (*http.Response, error) {
	//nolint:gosec // the user names the server
	req, err := http.NewRequestWithContext(ctx, method, a.url+path, bytes.NewReader(body))
	if err != nil {
		return nil, fmt.Errorf("make request: %w: check --url", err)
	}
	if a.key != "" {
		req.Header.Set("Authorization", "Bearer "+a.key)
	}
	if len(body) > 0 {
		req.Header.Set("Content-Type", "application/json")
	}
	req.Header.Set("Accept", accept)
	req.Header.Set("User-Agent", agent)
	resp, err := a.http.Do(req) //nolint:gosec // as above
	if err != nil {
		return nil, err
	}
	switch resp.StatusCode {
	case http.StatusOK, http.StatusCreated, http.StatusNoContent:
		return resp, nil
	}
	text, err := io.ReadAll(io.LimitReader(resp.Body, maxErrorBody))
	_ = resp.Body.Close()
	return nil, errors.Join(fmt.Errorf("%s %s: HTTP %d: %s", method, path, resp.StatusCode, bytes.TrimSpace(text)), err)
}

func (a *api) get(ctx context.Context, path string) ([]byte, error) {
	resp, err := a.do(ctx, http.MethodGet, path, "*/*", nil)
	if err != nil {
		return nil, err
	}
	body, err := io.ReadAll(resp.Body)
	return body, errors.Join(err, resp.Body.Close())
}

// asked is the body of a submission.
type asked = wire.ExecuteRequest

func request(language proto.Language, code string, timeout int) asked {
	return asked{Language: language, Code: code, Timeout: timeout}
}

// execute runs a program inline, for at most timeout seconds.
func (a *api) execute(
	ctx context.Context, language proto.Language, code string, timeout int,
) (*proto.Result, string, error) {
	return a.inline(ctx, request(language, code, timeout))
}

// inline sends a request and waits for its result.
func (a *api) inline(ctx context.Context, body asked) (*proto.Result, string, error) {
	result, err := a.client.Execute(ctx, body)
	if err != nil {
		return nil, "", err
	}
	return &result.Result, string(result.TraceID), nil
}

// submit sends a request and does not wait for its result.
func (a *api) submit(ctx context.Context, body asked) (string, error) {
	accepted, err := a.client.Submit(ctx, body, "")
	if err != nil {
		return "", err
	}
	return string(accepted.TraceID), nil
}

// queued returns how long an execution was queued.
func (a *api) queued(ctx context.Context, id string) (time.Duration, error) {
	e, err := a.client.Get(ctx, proto.TraceID(id))
	if err != nil {
		return 0, err
	}
	return time.Duration(e.QueuedMS) * time.Millisecond, nil
}

// newKey creates a key and returns a client that uses it.
func (a *api) newKey(ctx context.Context, name, org string) (*api, error) {
	key, err := a.client.Admin().Keys.Create(
		ctx, &wire.KeyRequest{Org: org, KeySettings: wire.KeySettings{Name: name, Plan: "enterprise"}})
	if err != nil {
		return nil, err
	}
	return apiOf(a.url, key.Secret, a.http), nil
}

// streamed is a raw stream of events. It is decoded afterwards, so that decoding does not slow it
// down.
type streamed struct {
	body  []byte
	marks []mark
}

// mark is the number of bytes that had arrived at a time.
type mark struct {
	bytes int
	at    time.Duration // since the start of the request
}

// readPiece is the size of the read buffer for streams.
const readPiece = 256 << 10

// stream runs a program and reads its events.
func (a *api) stream(ctx context.Context, language proto.Language, code string, capacity int) (*streamed, error) {
	s := &streamed{body: make([]byte, 0, capacity)}
	began := time.Now()
	body, err := json.Marshal(request(language, code, programTimeout))
	if err != nil {
		return nil, err
	}
	resp, err := a.do(ctx, http.MethodPost, executePath, "application/x-ndjson", body)
	if err != nil {
		return nil, err
	}
	defer func() { _ = resp.Body.Close() }() // it has been read
	for {
		if cap(s.body)-len(s.body) < readPiece {
			s.body = append(make([]byte, 0, 2*cap(s.body)+readPiece), s.body...)
		}
		n, err := resp.Body.Read(s.body[len(s.body) : len(s.body)+readPiece])
		s.body = s.body[:len(s.body)+n]
		s.marks = append(s.marks, mark{len(s.body), time.Since(began)})
		switch {
		case errors.Is(err, io.EOF):
			return s, nil
		case err != nil:
			return nil, fmt.Errorf("execution %s: the stream broke off: %w", resp.Header.Get("X-Trace-Id"), err)
		}
	}
}

// arrived returns when the first n bytes had arrived.
func (s *streamed) arrived(n int) time.Duration {
	for _, m := range s.marks {
		if m.bytes >= n {
			return m.at
		}
	}
	return 0
}

// metrics reads the server's metrics that have no labels.
func (a *api) metrics(ctx context.Context) (map[string]float64, error) {
	text, err := a.get(ctx, "/metrics")
	if err != nil {
		return nil, fmt.Errorf("read the server's metrics: %w", err)
	}
	return parseMetrics(string(text)), nil
}

func parseMetrics(text string) map[string]float64 {
	figures := map[string]float64{}
	for line := range strings.Lines(text) {
		name, value, ok := strings.Cut(strings.TrimSpace(line), " ")
		if v, err := strconv.ParseFloat(value, 64); ok && err == nil && !strings.ContainsAny(name, "#{") {
			figures[name] = v
		}
	}
	return figures
}
