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

// testTimeout is how long the answer to a test may take: more than an attempt.
const testTimeout = time.Duration(proto.MaxWebhookTimeout) + 5*time.Second

// testReply is the answer to a test: the attempt, or why there was none.
type testReply struct {
	Attempt *proto.DeliveryAttempt `json:"attempt,omitempty"`
	Missing bool                   `json:"missing,omitempty"` // the key has no URL
	Error   string                 `json:"error,omitempty"`
}

// Test has the dispatcher of webhooks send a test to the endpoint of a key, and gives what came of it. Its error is
// [proto.ErrNotFound] where the key has no URL, and a [*proto.Refusal] where no dispatcher leads.
func (s *Store) Test(ctx context.Context, key proto.Key) (*proto.DeliveryAttempt, error) {
	ctx, cancel := context.WithTimeout(ctx, testTimeout)
	defer cancel()
	m, err := s.Store.Conn.RequestWithContext(ctx, store.WebhookTestSubject, []byte(key.ID))
	if errors.Is(err, nats.ErrNoResponders) {
		return nil, &proto.Refusal{Reason: proto.RefusedUnavailable, Detail: "no process with the webhook role is ready"}
	}
	if err != nil {
		return nil, fmt.Errorf("test the webhook of key %s: %w", key.ID, err)
	}
	var reply testReply
	if err := json.Unmarshal(m.Data, &reply); err != nil {
		return nil, fmt.Errorf("test the webhook of key %s: %w", key.ID, err)
	}
	switch {
	case reply.Missing:
		return nil, fmt.Errorf("webhook URL of key %s: %w", key.ID, proto.ErrNotFound)
	case reply.Attempt == nil:
		return nil, fmt.Errorf("test the webhook of key %s: %s", key.ID, reply.Error)
	}
	return reply.Attempt, nil
}

// ServeTests answers tests with what send says until stop is called. At most a few are sent at once; others are told to come again.
func (s *Store) ServeTests(
	ctx context.Context, send func(ctx context.Context, key string) (*proto.DeliveryAttempt, error),
) (stop func(), err error) {
	free := make(chan struct{}, testsAtOnce)
	sub, err := s.Store.Conn.Subscribe(store.WebhookTestSubject, func(m *nats.Msg) {
		select {
		case free <- struct{}{}:
		default:
			answer(m, testReply{Error: "too many tests are being sent; try again"})
			return
		}
		go func() {
			defer func() { <-free }()
			attempt, err := send(ctx, string(m.Data))
			reply := testReply{Attempt: attempt, Missing: errors.Is(err, proto.ErrNotFound)}
			if err != nil {
				reply.Error = err.Error()
			}
			answer(m, reply)
		}()
	})
	if err != nil {
		return nil, fmt.Errorf("listen on %s: %w", store.WebhookTestSubject, err)
	}
	return func() { _ = sub.Unsubscribe() }, nil
}

const testsAtOnce = 16

// answer replies as well as it can: who asked hears of a lost answer by its timeout.
func answer(m *nats.Msg, r testReply) {
	if body, err := json.Marshal(r); err == nil {
		_ = m.Respond(body)
	}
}
