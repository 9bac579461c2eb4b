package client

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"net/url"
	"strconv"
	"time"

	"github.com/bullpen-run/bullpen/proto"
)

const (
	executePath = "/v1/sandbox/execute"
	// longPollSeconds is how long one request of [Client.Wait] waits, at most a minute.
	longPollSeconds = 30
)

// Execution is an execution as the server tells it. Times and results it does not have yet are nil.
type Execution struct {
	TraceID      proto.TraceID       `json:"trace_id"`
	Status       proto.Status        `json:"status"`
	Language     proto.Language      `json:"language"`
	ExitCode     *int                `json:"exit_code"`
	Stdout       *string             `json:"stdout"`
	Stderr       *string             `json:"stderr"`
	ErrorCode    *string             `json:"error_code"`
	ErrorMessage *string             `json:"error_message"`
	DurationMS   int64               `json:"duration_ms"`
	QueuedMS     *int64              `json:"queued_ms"`
	Attempt      int                 `json:"attempt"`
	Timeout      int                 `json:"timeout"` // seconds
	Mode         proto.Mode          `json:"delivery_mode"`
	ThreadID     *string             `json:"thread_id"`
	Metadata     map[string]string   `json:"metadata"`
	CreatedAt    time.Time           `json:"created_at"`
	CompletedAt  *time.Time          `json:"completed_at"`
	Truncated    bool                `json:"output_truncated"`
	Sandbox      *string             `json:"sandbox"`
	Network      *proto.NetworkUsage `json:"network"` // nil where it was blocked
	WebhookURL   *string             `json:"webhook_url"`
	// WebhookDeliveryStatus is how its webhook stands; nil where it has none.
	WebhookDeliveryStatus *string `json:"webhook_delivery_status"`
	// StdoutTruncated and StderrTruncated say that the output is not all that the program wrote.
	StdoutTruncated bool `json:"stdout_truncated"`
	StderrTruncated bool `json:"stderr_truncated"`
}

// Execute runs a program and waits for its result.
func (c *Client) Execute(ctx context.Context, req Request) (*proto.Result, proto.TraceID, error) {
	result := new(proto.Result)
	_, header, err := c.getJSON(ctx, call{
		method: http.MethodPost, path: executePath, body: req, resend: true,
		header: map[string]string{"Idempotency-Key": newIdempotencyKey()},
	}, result)
	if err != nil {
		return nil, "", err
	}
	return result, proto.TraceID(header.Get("X-Trace-Id")), nil
}

// Submit starts a program and does not wait for it. A request with the idempotency key of an earlier one returns the execution of that
// one. If the key is empty, a random one makes retries safe.
func (c *Client) Submit(ctx context.Context, req Request, idempotencyKey string) (*Accepted, error) {
	a := new(Accepted)
	_, _, err := c.getJSON(ctx, call{
		method: http.MethodPost, path: executePath, body: req, resend: true,
		header: map[string]string{"Idempotency-Key": cmp.Or(idempotencyKey, newIdempotencyKey()), "Prefer": "respond-async"},
	}, a)
	return a, err
}

// Get asks how an execution stands. The answer's bytes come along.
func (c *Client) Get(ctx context.Context, id proto.TraceID) (*Execution, json.RawMessage, error) {
	e := new(Execution)
	raw, _, err := c.getJSON(ctx, call{method: http.MethodGet, path: executionPath(id), resend: true}, e)
	return e, raw, err
}

// Wait returns an execution when it has ended, and the answer's bytes.
func (c *Client) Wait(ctx context.Context, id proto.TraceID) (*Execution, json.RawMessage, error) {
	for {
		e := new(Execution)
		raw, _, err := c.getJSON(ctx, call{
			method: http.MethodGet, path: executionPath(id) + "?wait=" + strconv.Itoa(longPollSeconds), resend: true,
		}, e)
		if err != nil || e.CompletedAt != nil {
			return e, raw, err
		}
	}
}

// Cancel has an execution ended.
func (c *Client) Cancel(ctx context.Context, id proto.TraceID) (*Accepted, error) {
	a := new(Accepted)
	_, _, err := c.getJSON(ctx, call{method: http.MethodPost, path: executionPath(id) + "/cancel", resend: true}, a)
	return a, err
}

// Ready reports whether the server can run programs now; its error says why not.
func (c *Client) Ready(ctx context.Context) error {
	resp, err := c.once(ctx, call{method: http.MethodGet, path: "/readyz"}, nil)
	if err != nil {
		return err
	}
	return resp.Body.Close()
}

func executionPath(id proto.TraceID) string { return "/v1/executions/" + url.PathEscape(string(id)) }

// NewKey is a key to make.
type NewKey struct {
	Name       string       `json:"name"`
	Org        string       `json:"org"`
	Plan       string       `json:"plan"`
	Rights     proto.Rights `json:"rights,omitempty"`
	Sandbox    string       `json:"sandbox,omitempty"`
	Concurrent *int         `json:"concurrent,omitempty"`
}

// Key is an API key as the server tells it.
type Key struct {
	ID         string       `json:"id"`
	Name       string       `json:"name"`
	Org        string       `json:"org"`
	Plan       string       `json:"plan"`
	Rights     proto.Rights `json:"rights"`
	Sandbox    string       `json:"sandbox"`
	Concurrent *int         `json:"concurrent"` // nil where it has no limit of its own
	Hint       string       `json:"hint"`
	CreatedAt  time.Time    `json:"created_at"`
	RevokedAt  *time.Time   `json:"revoked_at"`
	// Secret is the key itself, which is known only when it has just been made.
	Secret string `json:"key,omitempty"`
}

// CreateKey makes an API key. It is not sent again when the connection breaks, because that could make two.
func (c *Client) CreateKey(ctx context.Context, k NewKey) (*Key, error) {
	made := new(Key)
	_, _, err := c.getJSON(ctx, call{
		method: http.MethodPost, path: "/v1/admin/keys", body: k,
		header: map[string]string{"Idempotency-Key": newIdempotencyKey()},
	}, made)
	var refused *Error
	var unreachable *UnreachableError
	if err != nil && !errors.As(err, &refused) && !errors.As(err, &unreachable) {
		return nil, fmt.Errorf("%w; the key may have been made all the same: see `bullpen key list`", err)
	}
	return made, err
}

// Keys lists all API keys.
func (c *Client) Keys(ctx context.Context) ([]Key, error) {
	var list struct {
		Keys []Key `json:"keys"`
	}
	_, _, err := c.getJSON(ctx, call{method: http.MethodGet, path: "/v1/admin/keys", resend: true}, &list)
	return list.Keys, err
}

// RevokeKey makes an API key invalid.
func (c *Client) RevokeKey(ctx context.Context, id string) (*Key, error) {
	k := new(Key)
	_, _, err := c.getJSON(ctx, call{method: http.MethodDelete, path: "/v1/admin/keys/" + url.PathEscape(id), resend: true}, k)
	return k, err
}
