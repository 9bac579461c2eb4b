package client

import (
	"context"
	"encoding/json"
	"net/http"
	"net/url"

	"github.com/bullpen-run/bullpen/proto/api"
)

const deadLettersPath = "/v1/admin/dead-letters"

// DeadLetters lists all dead letters, the newest first.
func (c *Client) DeadLetters(ctx context.Context) ([]DeadLetter, error) {
	return pages(ctx, c, deadLettersPath, func(p *api.DeadLetters) ([]DeadLetter, *string) { return p.DeadLetters, p.NextCursor })
}

// DeadLetter returns a dead letter, and the answer's bytes.
func (c *Client) DeadLetter(ctx context.Context, id string) (*WholeDeadLetter, json.RawMessage, error) {
	return get[WholeDeadLetter](ctx, c, call{method: http.MethodGet, path: deadLetterPath(id), resend: true})
}

// Requeue runs the job of a dead letter again, and returns the dead letter, which names the
// execution. The request may be sent again: the dead letter names one execution at most.
func (c *Client) Requeue(ctx context.Context, id string) (*DeadLetter, json.RawMessage, error) {
	return get[DeadLetter](ctx, c, call{method: http.MethodPost, path: deadLetterPath(id) + "/requeue", resend: true})
}

// RemoveDeadLetter removes a dead letter.
func (c *Client) RemoveDeadLetter(ctx context.Context, id string) error {
	return c.empty(ctx, call{method: http.MethodDelete, path: deadLetterPath(id)})
}

func deadLetterPath(id string) string { return deadLettersPath + "/" + url.PathEscape(id) }
