package client

import (
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"net/url"
	"time"

	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/proto/api"
)

const webhookPath = "/v1/webhook"

// settingsPath returns a path of the webhook settings of an API key, the calling one if key is
// empty.
func settingsPath(key, suffix string) string {
	if key == "" {
		return webhookPath + suffix
	}
	return webhookPath + suffix + "?key=" + url.QueryEscape(key)
}

// Webhook returns the webhook settings of an API key, the calling one if key is empty, and the
// answer's bytes. If there are none, the error is an [*Error] of status 404.
func (c *Client) Webhook(ctx context.Context, key string) (*Webhook, json.RawMessage, error) {
	return get[Webhook](ctx, c, call{method: http.MethodGet, path: settingsPath(key, ""), resend: true})
}

// PutWebhook replaces the settings of a key. It is not sent again when the connection breaks: a
// created secret would be lost.
func (c *Client) PutWebhook(ctx context.Context, key string, s *WebhookSettings) (*Webhook, json.RawMessage, error) {
	w, raw, err := get[Webhook](ctx, c, call{method: http.MethodPut, path: settingsPath(key, ""), body: s})
	return w, raw, lostSecret(err)
}

// PatchWebhook changes the settings of a key that are not nil in s.
func (c *Client) PatchWebhook(ctx context.Context, key string, s *WebhookSettings) (*Webhook, json.RawMessage, error) {
	return get[Webhook](ctx, c, call{method: http.MethodPatch, path: settingsPath(key, ""), body: s, resend: true})
}

// RotateWebhook replaces the secret of a key; the server creates one if secret is empty. The
// previous secret signs too during the overlap. If overlap is nil, the server's default applies.
// The request is not sent again when the connection breaks.
func (c *Client) RotateWebhook(ctx context.Context, key, secret string, overlap *time.Duration) (*Webhook, json.RawMessage, error) {
	var body api.WebhookRotation
	if secret != "" {
		body.Secret = &secret
	}
	if overlap != nil {
		body.Overlap = new(proto.Seconds(*overlap))
	}
	w, raw, err := get[Webhook](ctx, c, call{method: http.MethodPost, path: settingsPath(key, "/rotate"), body: body})
	return w, raw, lostSecret(err)
}

// lostSecret extends an error after which the server may have an unknown secret.
func lostSecret(err error) error {
	if !mayHaveHappened(err) {
		return err
	}
	return fmt.Errorf("%w; the secret may have been changed all the same: see `bullpen key webhook show`, and `bullpen key webhook rotate` for a new one", err)
}

// RemoveWebhook removes the settings of a key.
func (c *Client) RemoveWebhook(ctx context.Context, key string) error {
	return c.empty(ctx, call{method: http.MethodDelete, path: settingsPath(key, "")})
}

// empty sends a request whose answer has no body.
func (c *Client) empty(ctx context.Context, call call) error {
	resp, err := c.do(ctx, call)
	if err != nil {
		return err
	}
	return resp.Body.Close()
}

// TestWebhook sends a test to the URL of the key, and returns the attempt.
func (c *Client) TestWebhook(ctx context.Context) (*DeliveryAttempt, json.RawMessage, error) {
	return get[DeliveryAttempt](ctx, c, call{method: http.MethodPost, path: webhookPath + "/test"})
}

// Delivery returns the webhook of an execution.
func (c *Client) Delivery(ctx context.Context, id proto.TraceID) (*Delivery, json.RawMessage, error) {
	return get[Delivery](ctx, c, call{method: http.MethodGet, path: executionPath(id) + "/webhook", resend: true})
}

// Replay sends the webhook of an execution again.
func (c *Client) Replay(ctx context.Context, id proto.TraceID) (*Delivery, json.RawMessage, error) {
	return get[Delivery](ctx, c, call{method: http.MethodPost, path: executionPath(id) + "/webhook/replay"})
}

// ReplayFailed replays one batch of the webhooks that have failed since a time. The batch starts
// after the execution with id after, or at the first if it is empty.
func (c *Client) ReplayFailed(ctx context.Context, since time.Time, after proto.TraceID) (*Replayed, error) {
	query := url.Values{"since": {since.UTC().Format(time.RFC3339Nano)}}
	if after != "" {
		query.Set("after", string(after))
	}
	// It may be sent twice: pending deliveries are not replayed.
	r, _, err := get[Replayed](ctx, c, call{method: http.MethodPost, path: webhookPath + "/replay-failed?" + query.Encode(), resend: true})
	return r, err
}

// Endpoints lists the URLs at which deliveries of the key's organisation fail.
func (c *Client) Endpoints(ctx context.Context) ([]Endpoint, json.RawMessage, error) {
	list, raw, err := get[api.Endpoints](ctx, c, call{method: http.MethodGet, path: webhookPath + "/endpoints", resend: true})
	return list.Endpoints, raw, err
}

// EnableEndpoint enables deliveries to a URL again.
func (c *Client) EnableEndpoint(ctx context.Context, target string) error {
	return c.empty(ctx, call{method: http.MethodPost, path: webhookPath + "/endpoints/enable", body: api.EndpointRequest{URL: target}})
}
