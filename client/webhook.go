package client

import (
	"context"
	"iter"
	"net/http"
	"net/url"
	"time"

	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/proto/api"
)

const webhookPath = "/v1/webhook"

// settingsPath returns a path of an API key's webhook settings; an empty key is the caller.
func settingsPath(key, suffix string) string {
	return withQuery(webhookPath+suffix, url.Values{"key": {key}})
}

// Webhook returns an API key's webhook settings; an empty key is the caller. If there are none, the
// error is an [*Error] of status 404.
func (c *Client) Webhook(ctx context.Context, key string) (*api.Webhook, error) {
	return read[api.Webhook](ctx, c, settingsPath(key, ""))
}

// PutWebhook replaces the settings of a key. It is not sent again when the connection breaks: a
// created secret would be lost.
func (c *Client) PutWebhook(ctx context.Context, key string, s *api.WebhookRequest) (*api.Webhook, error) {
	return get[api.Webhook](ctx, c, call{method: http.MethodPut, path: settingsPath(key, ""), body: s})
}

// PatchWebhook changes the settings of a key that are not nil in s.
func (c *Client) PatchWebhook(ctx context.Context, key string, s *api.WebhookRequest) (*api.Webhook, error) {
	return get[api.Webhook](ctx, c, call{method: http.MethodPatch, path: settingsPath(key, ""), body: s, resend: true})
}

// RotateWebhook replaces the secret of a key; the server creates one if secret is empty. The
// previous secret signs too during the overlap. If overlap is nil, the server's default applies.
// The request is not sent again when the connection breaks.
func (c *Client) RotateWebhook(ctx context.Context, key, secret string, overlap *time.Duration) (*api.Webhook, error) {
	var body api.WebhookRotation
	if secret != "" {
		body.Secret = &secret
	}
	if overlap != nil {
		body.Overlap = new(proto.Seconds(*overlap))
	}
	return get[api.Webhook](ctx, c, call{method: http.MethodPost, path: settingsPath(key, "/rotate"), body: body})
}

// RemoveWebhook removes the settings of a key.
func (c *Client) RemoveWebhook(ctx context.Context, key string) error {
	return c.empty(ctx, call{method: http.MethodDelete, path: settingsPath(key, "")})
}

// TestWebhook sends a test to the key's URL, and returns the attempt.
func (c *Client) TestWebhook(ctx context.Context) (*api.DeliveryAttempt, error) {
	return get[api.DeliveryAttempt](ctx, c, call{method: http.MethodPost, path: webhookPath + "/test"})
}

// Deliveries returns the webhooks of the key's organisation that have a status, most recently
// changed first. An empty status selects all.
func (c *Client) Deliveries(
	ctx context.Context, status proto.DeliveryStatus,
) iter.Seq2[api.ListedDelivery, error] {
	query := largestPages()
	if status != "" {
		query.Set("status", string(status))
	}
	return pages[api.ListedDelivery](ctx, c, webhookPath+"/deliveries", "deliveries", query)
}

// ReplayFailed replays one page of the webhooks that have failed since a time. The page starts at
// after, the previous page's [api.Replayed.Next]; an empty one starts at the first page.
func (c *Client) ReplayFailed(ctx context.Context, since time.Time, after string) (*api.Replayed, error) {
	query := url.Values{"since": {since.UTC().Format(time.RFC3339Nano)}, "after": {after}}
	// It may be sent twice: pending deliveries are not replayed.
	return get[api.Replayed](ctx, c, call{
		method: http.MethodPost, path: withQuery(webhookPath+"/replay-failed", query), resend: true,
	})
}

// Endpoints returns the URLs at which deliveries of the key's organisation fail.
func (c *Client) Endpoints(ctx context.Context) (*api.Endpoints, error) {
	return read[api.Endpoints](ctx, c, webhookPath+"/endpoints")
}

// EnableEndpoint enables deliveries to a URL again.
func (c *Client) EnableEndpoint(ctx context.Context, target string) error {
	return c.empty(ctx, call{
		method: http.MethodPost, path: webhookPath + "/endpoints/enable", body: api.EndpointRequest{URL: target},
	})
}
