package client

import (
	"context"
	"encoding/json"
	"net/http"
	"net/url"
	"time"

	"github.com/bullpen-run/bullpen/proto"
)

const (
	deadLettersPath = "/v1/admin/dead-letters"
	// deadLetterPage is how many dead letters are asked for at once, the most that the server gives.
	deadLetterPage = 100
)

// DeadLetter is what nobody could act on, as the server tells it.
type DeadLetter struct {
	ID         string           `json:"id"`
	Reason     proto.DeadReason `json:"reason"`
	Message    string           `json:"message"`
	SetAsideAt time.Time        `json:"set_aside_at"`
	Org        *string          `json:"org"` // nil, as the next two, for what is no job
	KeyID      *string          `json:"key_id"`
	Attempt    *int             `json:"attempt"`
	Workers    []string         `json:"workers"`
	RequeuedAs *proto.TraceID   `json:"requeued_as"` // nil while it was not
	RequeuedAt *time.Time       `json:"requeued_at"`
	// Execution and Malformed are not in lists. One of them is nil.
	Execution *DeadExecution `json:"execution,omitempty"`
	Malformed *DeadMessage   `json:"malformed,omitempty"`
}

// DeadExecution is what was asked for with a job that was set aside.
type DeadExecution struct {
	Language    proto.Language    `json:"language"`
	Timeout     int               `json:"timeout"` // seconds
	Mode        proto.Mode        `json:"delivery_mode"`
	MaxAttempts int               `json:"max_attempts"`
	ThreadID    *string           `json:"thread_id"`
	Metadata    map[string]string `json:"metadata"`
	WebhookURL  *string           `json:"webhook_url"`
	Sandbox     string            `json:"sandbox"`
	RequestID   *string           `json:"request_id"`
	CreatedAt   time.Time         `json:"created_at"`
	CodeBytes   int               `json:"code_bytes"`
}

// DeadMessage is a malformed message that was set aside.
type DeadMessage struct {
	Subject string              `json:"subject"`
	Headers map[string][]string `json:"headers"`
	Data    string              `json:"data"` // its beginning
	Bytes   int                 `json:"bytes"`
}

// DeadLetters lists all dead letters, the newest first.
func (c *Client) DeadLetters(ctx context.Context) ([]DeadLetter, error) {
	type page struct {
		DeadLetters []DeadLetter `json:"dead_letters"`
		NextCursor  *string      `json:"next_cursor"`
	}
	return pages(ctx, c, deadLettersPath, deadLetterPage, func(p *page) ([]DeadLetter, *string) { return p.DeadLetters, p.NextCursor })
}

// DeadLetter gives a dead letter, and the answer's bytes.
func (c *Client) DeadLetter(ctx context.Context, id string) (*DeadLetter, json.RawMessage, error) {
	return c.deadLetter(ctx, call{method: http.MethodGet, path: deadLetterPath(id), resend: true})
}

// Requeue has the job of a dead letter run again, and gives the dead letter, which names the execution. Sent again it does no harm: the dead
// letter names one execution at most.
func (c *Client) Requeue(ctx context.Context, id string) (*DeadLetter, json.RawMessage, error) {
	return c.deadLetter(ctx, call{method: http.MethodPost, path: deadLetterPath(id) + "/requeue", resend: true})
}

func (c *Client) deadLetter(ctx context.Context, call call) (*DeadLetter, json.RawMessage, error) {
	l := new(DeadLetter)
	raw, _, err := c.getJSON(ctx, call, l)
	return l, raw, err
}

// RemoveDeadLetter removes a dead letter.
func (c *Client) RemoveDeadLetter(ctx context.Context, id string) error {
	return c.empty(ctx, call{method: http.MethodDelete, path: deadLetterPath(id)})
}

func deadLetterPath(id string) string { return deadLettersPath + "/" + url.PathEscape(id) }
