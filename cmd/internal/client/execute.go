package client

import (
	"cmp"
	"context"
	"encoding/json"
	"net/http"
	"net/url"
	"strconv"

	"github.com/bullpen-run/bullpen/proto"
)

const (
	executePath = "/v1/sandbox/execute"
	// longPollSeconds is how long one request of [Client.Wait] waits, at most a minute.
	longPollSeconds = 30
)

// Execute runs a program and waits for its result.
func (c *Client) Execute(ctx context.Context, req Request) (*proto.Result, proto.TraceID, error) {
	result := new(proto.Result)
	_, header, err := c.decode(ctx, call{
		method: http.MethodPost, path: executePath, body: req, resend: true,
		header: map[string]string{"Idempotency-Key": newIdempotencyKey()},
	}, result)
	if err != nil {
		return nil, "", err
	}
	return result, proto.TraceID(header.Get("X-Trace-Id")), nil
}

// Submit starts a program and does not wait for it. A request with the idempotency key of an
// earlier one returns the execution of that one. If the key is empty, a random one makes retries
// safe.
func (c *Client) Submit(ctx context.Context, req Request, idempotencyKey string) (*Accepted, error) {
	a, _, err := get[Accepted](ctx, c, call{
		method: http.MethodPost, path: executePath, body: req, resend: true,
		header: map[string]string{"Idempotency-Key": cmp.Or(idempotencyKey, newIdempotencyKey()), "Prefer": "respond-async"},
	})
	return a, err
}

// Get returns the state of an execution, and the answer's bytes.
func (c *Client) Get(ctx context.Context, id proto.TraceID) (*Execution, json.RawMessage, error) {
	return get[Execution](ctx, c, call{method: http.MethodGet, path: executionPath(id), resend: true})
}

// Wait returns an execution when it has ended, and the answer's bytes.
func (c *Client) Wait(ctx context.Context, id proto.TraceID) (*Execution, json.RawMessage, error) {
	for {
		e, raw, err := get[Execution](ctx, c, call{
			method: http.MethodGet, path: executionPath(id) + "?wait=" + strconv.Itoa(longPollSeconds), resend: true,
		})
		if err != nil || e.CompletedAt != nil {
			return e, raw, err
		}
	}
}

// Cancel ends an execution.
func (c *Client) Cancel(ctx context.Context, id proto.TraceID) (*Accepted, error) {
	a, _, err := get[Accepted](ctx, c, call{method: http.MethodPost, path: executionPath(id) + "/cancel", resend: true})
	return a, err
}

// Ready returns an error unless the server can run programs now.
func (c *Client) Ready(ctx context.Context) error {
	resp, err := c.once(ctx, call{method: http.MethodGet, path: "/readyz"}, nil)
	if err != nil {
		return err
	}
	return resp.Body.Close()
}

func executionPath(id proto.TraceID) string { return "/v1/executions/" + url.PathEscape(string(id)) }
