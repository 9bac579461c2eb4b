package client

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"net/url"
	"time"

	"github.com/bullpen-run/bullpen/proto"
)

const webhookPath = "/v1/webhook"

// WebhookSettings are settings to store; what is nil is left to the server, which also checks the rest.
type WebhookSettings struct {
	URL              *string   `json:"url,omitempty"`
	Secret           *string   `json:"secret,omitempty"`
	MaxAttempts      *int      `json:"max_attempts,omitempty"`
	Waits            any       `json:"waits,omitempty"` // numbers of seconds, or the name of a ladder
	SignatureHeaders *[]string `json:"signature_headers,omitempty"`
	Timeout          *float64  `json:"timeout,omitempty"` // seconds
}

// Webhook are the webhook settings of an API key.
type Webhook struct {
	URL              *string    `json:"url"`
	Secret           string     `json:"secret"`      // only where it was just made
	SecretHint       *string    `json:"secret_hint"` // nil where nothing is signed
	OldSecretUntil   *time.Time `json:"old_secret_until"`
	MaxAttempts      int        `json:"max_attempts"`
	Waits            []float64  `json:"waits"` // seconds
	SignatureHeaders []string   `json:"signature_headers"`
	Timeout          float64    `json:"timeout"` // seconds
	UpdatedAt        time.Time  `json:"updated_at"`
}

// Delivery is the webhook of an execution.
type Delivery struct {
	TraceID      proto.TraceID        `json:"trace_id"`
	WebhookID    string               `json:"webhook_id"`
	URL          string               `json:"url"`
	Status       proto.DeliveryStatus `json:"status"`
	Reason       *string              `json:"reason"`
	CreatedAt    *time.Time           `json:"created_at"`
	NextAt       *time.Time           `json:"next_at"`
	AttemptsMade int                  `json:"attempts_made"`
	Attempts     []DeliveryAttempt    `json:"attempts"`
}

// DeliveryAttempt is one attempt of a [Delivery], or a test.
type DeliveryAttempt struct {
	Number     int                   `json:"number"`
	At         time.Time             `json:"at"`
	Status     *int                  `json:"status"` // nil where there was no answer
	Error      *string               `json:"error"`  // nil where nothing went wrong
	Detail     *string               `json:"detail"`
	RemoteAddr *string               `json:"remote_addr"`
	Timings    proto.DeliveryTimings `json:"timings"`
	Response   *string               `json:"response"`
}

// Replayed is how far a bulk replay has come.
type Replayed struct {
	Replayed int            `json:"replayed"`
	Left     int            `json:"left"`
	Next     *proto.TraceID `json:"next"` // to go on after; nil where nothing is left
}

// Endpoint is a URL that deliveries fail at.
type Endpoint struct {
	URL          string     `json:"url"`
	FailingSince time.Time  `json:"failing_since"`
	DisabledAt   *time.Time `json:"disabled_at"` // nil where it is still delivered to
	Reason       *string    `json:"reason"`
}

// Webhook gives the webhook settings of the key, and the answer's bytes. Its error is an [*Error] of status 404 where there are none.
func (c *Client) Webhook(ctx context.Context) (*Webhook, json.RawMessage, error) {
	return c.webhook(ctx, call{method: http.MethodGet, path: webhookPath, resend: true})
}

// PutWebhook replaces the settings of the key as a whole. It is not sent again when the connection breaks: the secret that was made would
// be lost.
func (c *Client) PutWebhook(ctx context.Context, s *WebhookSettings) (*Webhook, json.RawMessage, error) {
	w, raw, err := c.webhook(ctx, call{method: http.MethodPut, path: webhookPath, body: s})
	return w, raw, lostSecret(err)
}

// PatchWebhook changes what s names of the settings of the key.
func (c *Client) PatchWebhook(ctx context.Context, s *WebhookSettings) (*Webhook, json.RawMessage, error) {
	return c.webhook(ctx, call{method: http.MethodPatch, path: webhookPath, body: s, resend: true})
}

// RotateWebhook puts another secret, made by the server where it is empty, in the place of the present one, which signs too for the time
// given, nil for the server's default. It is not sent again when the connection breaks.
func (c *Client) RotateWebhook(ctx context.Context, secret string, overlap *time.Duration) (*Webhook, json.RawMessage, error) {
	body := struct {
		Secret  string   `json:"secret,omitempty"`
		Overlap *float64 `json:"overlap,omitempty"`
	}{Secret: secret}
	if overlap != nil {
		body.Overlap = new(overlap.Seconds())
	}
	w, raw, err := c.webhook(ctx, call{method: http.MethodPost, path: webhookPath + "/rotate", body: body})
	return w, raw, lostSecret(err)
}

// lostSecret adds to an error after which a secret may hold that nobody knows what to do about it.
func lostSecret(err error) error {
	var refused *Error
	var unreachable *UnreachableError
	if err == nil || errors.As(err, &refused) || errors.As(err, &unreachable) {
		return err
	}
	return fmt.Errorf("%w; the secret may have been changed all the same: see `bullpen key webhook show`, and `bullpen key webhook rotate` for a new one", err)
}

func (c *Client) webhook(ctx context.Context, call call) (*Webhook, json.RawMessage, error) {
	w := new(Webhook)
	raw, _, err := c.getJSON(ctx, call, w)
	return w, raw, err
}

// RemoveWebhook removes the settings of the key.
func (c *Client) RemoveWebhook(ctx context.Context) error {
	return c.empty(ctx, call{method: http.MethodDelete, path: webhookPath})
}

// empty sends a request whose answer has no body.
func (c *Client) empty(ctx context.Context, call call) error {
	resp, err := c.do(ctx, call)
	if err != nil {
		return err
	}
	return resp.Body.Close()
}

// TestWebhook sends a test to the URL of the key, and tells what came of it.
func (c *Client) TestWebhook(ctx context.Context) (*DeliveryAttempt, json.RawMessage, error) {
	a := new(DeliveryAttempt)
	raw, _, err := c.getJSON(ctx, call{method: http.MethodPost, path: webhookPath + "/test"}, a)
	return a, raw, err
}

// Delivery tells what became of the webhook of an execution.
func (c *Client) Delivery(ctx context.Context, id proto.TraceID) (*Delivery, json.RawMessage, error) {
	return c.delivery(ctx, call{method: http.MethodGet, path: executionPath(id) + "/webhook", resend: true})
}

// Replay has the webhook of an execution sent again.
func (c *Client) Replay(ctx context.Context, id proto.TraceID) (*Delivery, json.RawMessage, error) {
	return c.delivery(ctx, call{method: http.MethodPost, path: executionPath(id) + "/webhook/replay"})
}

func (c *Client) delivery(ctx context.Context, call call) (*Delivery, json.RawMessage, error) {
	d := new(Delivery)
	raw, _, err := c.getJSON(ctx, call, d)
	return d, raw, err
}

// ReplayFailed has webhooks sent again that have failed since a time, some at a time: those after the one given, empty for all.
func (c *Client) ReplayFailed(ctx context.Context, since time.Time, after proto.TraceID) (*Replayed, error) {
	query := url.Values{"since": {since.UTC().Format(time.RFC3339Nano)}}
	if after != "" {
		query.Set("after", string(after))
	}
	r := new(Replayed)
	// Sent twice it does no harm: what is pending already is not begun again.
	_, _, err := c.getJSON(ctx, call{method: http.MethodPost, path: webhookPath + "/replay-failed?" + query.Encode(), resend: true}, r)
	return r, err
}

// Endpoints lists the URLs that deliveries of the key's organisation fail at.
func (c *Client) Endpoints(ctx context.Context) ([]Endpoint, json.RawMessage, error) {
	var list struct {
		Endpoints []Endpoint `json:"endpoints"`
	}
	raw, _, err := c.getJSON(ctx, call{method: http.MethodGet, path: webhookPath + "/endpoints", resend: true}, &list)
	return list.Endpoints, raw, err
}

// EnableEndpoint has a URL delivered to again.
func (c *Client) EnableEndpoint(ctx context.Context, target string) error {
	return c.empty(ctx, call{method: http.MethodPost, path: webhookPath + "/endpoints/enable", body: map[string]string{"url": target}})
}
