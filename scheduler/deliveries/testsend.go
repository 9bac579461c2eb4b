package deliveries

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"time"

	"github.com/nats-io/nats.go"

	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/scheduler/store"
)

// testTimeout is longer than an attempt.
const testTimeout = time.Duration(proto.MaxWebhookTimeout) + 5*time.Second

// maxTests is the number of concurrent tests.
const maxTests = 16

// testRequest asks for a test of the URL of an API key.
type testRequest struct {
	Org string `json:"org"`
	Key string `json:"key"`
}

// testReply contains the attempt, or why none was made.
type testReply struct {
	Attempt *proto.DeliveryAttempt `json:"attempt,omitempty"`
	NoURL   bool                   `json:"no_url,omitempty"`
	Error   string                 `json:"error,omitempty"`
}

// Test makes the leading webhook dispatcher send a test event to a key's URL, and returns the
// attempt. It returns [proto.ErrNotFound] if the key has no URL, and a [*proto.Rejection] if no
// dispatcher leads.
func (s *Store) Test(ctx context.Context, key proto.Key) (*proto.DeliveryAttempt, error) {
	ctx, cancel := context.WithTimeout(ctx, testTimeout)
	defer cancel()
	request, err := json.Marshal(testRequest{key.Org, key.ID})
	if err != nil {
		return nil, fmt.Errorf("test the webhook of key %s: %w", key.ID, err)
	}
	m, err := s.Store.Conn.RequestWithContext(ctx, store.WebhookTestSubject, request)
	if errors.Is(err, nats.ErrNoResponders) {
		return nil, &proto.Rejection{Reason: proto.RejectedUnavailable, Detail: "no process with the webhook role is ready"}
	}
	if err != nil {
		return nil, fmt.Errorf("test the webhook of key %s: %w", key.ID, err)
	}
	var reply testReply
	if err := json.Unmarshal(m.Data, &reply); err != nil {
		return nil, fmt.Errorf("test the webhook of key %s: %w", key.ID, err)
	}
	switch {
	case reply.NoURL:
		return nil, fmt.Errorf("webhook URL of key %s: %w", key.ID, proto.ErrNotFound)
	case reply.Attempt == nil:
		return nil, fmt.Errorf("test the webhook of key %s: %s", key.ID, reply.Error)
	}
	return reply.Attempt, nil
}

// ServeTests calls send for each test request until stop is called. Requests beyond maxTests are
// rejected.
func (s *Store) ServeTests(
	ctx context.Context, send func(ctx context.Context, org, key string) (*proto.DeliveryAttempt, error),
) (stop func(), err error) {
	slots := make(chan struct{}, maxTests)
	sub, err := s.Store.Conn.Subscribe(store.WebhookTestSubject, func(m *nats.Msg) {
		select {
		case slots <- struct{}{}:
		default:
			respond(m, testReply{Error: "too many tests are being sent; try again"})
			return
		}
		go func() {
			defer func() { <-slots }()
			var request testRequest
			var reply testReply
			err := json.Unmarshal(m.Data, &request)
			if err == nil {
				reply.Attempt, err = send(ctx, request.Org, request.Key)
			}
			reply.NoURL = errors.Is(err, proto.ErrNotFound)
			if err != nil {
				reply.Error = err.Error()
			}
			respond(m, reply)
		}()
	})
	if err != nil {
		return nil, fmt.Errorf("listen on %s: %w", store.WebhookTestSubject, err)
	}
	return func() { _ = sub.Unsubscribe() }, nil
}

// respond ignores errors: the requester notices a lost reply by its timeout.
func respond(m *nats.Msg, r testReply) {
	if body, err := json.Marshal(r); err == nil {
		_ = m.Respond(body)
	}
}
