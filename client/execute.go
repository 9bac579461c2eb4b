package client

import (
	"context"
	"net/http"
	"net/url"
	"strconv"

	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/proto/api"
)

const (
	executePath = "/v1/sandbox/execute"
	// longPollSeconds is how long one request of [Client.Wait] waits, at most a minute.
	longPollSeconds = 30
)

// Result is what a program did, or why it did not run to its end.
type Result struct {
	proto.Result

	TraceID proto.TraceID `json:"-"` // of the execution
}

// Execute runs a program and waits for its result. A failing program's result is no error: see
// [proto.Result.Status]. For programs that run for longer than a minute, use [Client.Stream], or
// [Client.Submit] and [Client.Wait].
func (c *Client) Execute(ctx context.Context, req api.ExecuteRequest) (*Result, error) {
	result := new(Result)
	header, err := c.decode(ctx, call{
		method: http.MethodPost, path: executePath, body: req, resend: true, header: c.idempotent(nil),
	}, result)
	if err != nil {
		return nil, err
	}
	result.TraceID = proto.TraceID(header.Get("X-Trace-Id"))
	return result, nil
}

// Submit starts a program and does not wait for it. A request with an earlier one's idempotency key
// returns that one's execution and starts none. If the key is empty, a random one makes retries of
// this call safe.
func (c *Client) Submit(ctx context.Context, req api.ExecuteRequest, idempotencyKey string) (*api.Accepted, error) {
	header := c.idempotent(map[string]string{"Prefer": "respond-async"})
	if idempotencyKey != "" {
		header["Idempotency-Key"] = idempotencyKey
	}
	return get[api.Accepted](ctx, c, call{
		method: http.MethodPost, path: executePath, body: req, resend: true, header: header,
	})
}

// Get returns the state of an execution, with its result if it has ended.
func (c *Client) Get(ctx context.Context, id proto.TraceID) (*api.Execution, error) {
	return read[api.Execution](ctx, c, executionPath(id))
}

// Request returns what was submitted for an execution, without the values of environment variables.
func (c *Client) Request(ctx context.Context, id proto.TraceID) (*api.SubmittedRequest, error) {
	return read[api.SubmittedRequest](ctx, c, executionPath(id)+"/request")
}

// Wait returns an execution when it has ended.
func (c *Client) Wait(ctx context.Context, id proto.TraceID) (*api.Execution, error) {
	for {
		e, err := read[api.Execution](ctx, c, executionPath(id)+"?wait="+strconv.Itoa(longPollSeconds))
		if err != nil || e.CompletedAt != nil {
			return e, err
		}
	}
}

// RawOutput returns the bytes of an output of an execution that has ended. Results have U+FFFD for
// bytes that are not UTF-8; RawOutput has the exact ones.
func (c *Client) RawOutput(ctx context.Context, id proto.TraceID, of proto.Stream) ([]byte, error) {
	body, _, err := c.bytes(ctx, call{
		method: http.MethodGet, path: executionPath(id) + "/output/" + string(of), resend: true,
	})
	return body, err
}

// Cancel ends an execution. A running program receives SIGTERM, and SIGKILL after its grace period.
func (c *Client) Cancel(ctx context.Context, id proto.TraceID) (*api.Cancelled, error) {
	return get[api.Cancelled](ctx, c, call{method: http.MethodPost, path: executionPath(id) + "/cancel", resend: true})
}

// Delivery returns the webhook of an execution.
func (c *Client) Delivery(ctx context.Context, id proto.TraceID) (*api.Delivery, error) {
	return read[api.Delivery](ctx, c, executionPath(id)+"/webhook")
}

// DeliveryBody returns the body that the webhook of an execution sends.
func (c *Client) DeliveryBody(ctx context.Context, id proto.TraceID) ([]byte, error) {
	body, _, err := c.bytes(ctx, call{method: http.MethodGet, path: executionPath(id) + "/webhook/body", resend: true})
	return body, err
}

// ReplayDelivery sends the webhook of an execution again.
func (c *Client) ReplayDelivery(ctx context.Context, id proto.TraceID) (*api.Delivery, error) {
	return get[api.Delivery](ctx, c, call{method: http.MethodPost, path: executionPath(id) + "/webhook/replay"})
}

func executionPath(id proto.TraceID) string { return "/v1/executions/" + url.PathEscape(string(id)) }
