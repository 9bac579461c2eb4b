package stream

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
)

// feedTimeout bounds the requests of a feed, which can be sent again: one that was on its way to a server that was just started again
// gets no answer at all.
const feedTimeout = time.Second

// Feed delivers the headers of a stream's messages to take, in order and without gaps, until stop is called: first those that lie there
// as cfg chooses them, then what comes. A gap, or the loss of the consumer, is told to fail once or more, after which nothing that is
// delivered counts.
func (s *Set) Feed(
	ctx context.Context, st jetstream.Stream, cfg jetstream.ConsumerConfig, take func(jetstream.Msg, *jetstream.MsgMetadata), fail func(error),
) (stop func(), consumer jetstream.Consumer, err error) {
	name := st.CachedInfo().Config.Name
	cfg.HeadersOnly, cfg.AckPolicy, cfg.MemoryStorage = true, jetstream.AckNonePolicy, true
	cfg.InactiveThreshold, cfg.Replicas = time.Minute, 1
	ask, cancel := context.WithTimeout(ctx, feedTimeout)
	defer cancel()
	consumer, err = st.CreateConsumer(ask, cfg)
	if err != nil {
		return nil, nil, fmt.Errorf("follow %s: %w", name, err)
	}
	next := uint64(1)
	consuming, err := consumer.Consume(func(m jetstream.Msg) {
		at, err := m.Metadata()
		if err != nil || at.Sequence.Consumer != next {
			fail(fmt.Errorf("a gap in %s at delivery %d", name, next))
			return
		}
		next++
		take(m, at)
	}, jetstream.ConsumeErrHandler(func(_ jetstream.ConsumeContext, err error) {
		if !errors.Is(err, jetstream.ErrConsumerLeadershipChanged) {
			fail(fmt.Errorf("follow %s: %w", name, err))
		}
	}))
	if err != nil {
		return nil, nil, fmt.Errorf("follow %s: %w", name, err)
	}
	// What was on its way when the connection broke is gone, and is noticed only with what comes next.
	away := s.Conn.StatusChanged(nats.RECONNECTING)
	watched, unwatch := context.WithCancel(ctx)
	go func() {
		select {
		case <-away:
			fail(errors.New("the connection to NATS was lost"))
		case <-watched.Done():
		}
		s.Conn.RemoveStatusListener(away)
	}()
	id := consumer.CachedInfo().Name
	return func() {
		consuming.Stop()
		unwatch()
		gone, cancel := context.WithTimeout(context.WithoutCancel(ctx), feedTimeout)
		defer cancel()
		_ = st.DeleteConsumer(gone, id) // else its inactivity threshold does
	}, consumer, nil
}

// Drained reports whether a feed that has delivered so many messages has nothing to deliver now. What lay there when it began tells less:
// of that, what is removed or replaced meanwhile is never delivered.
func Drained(ctx context.Context, consumer jetstream.Consumer, delivered uint64) bool {
	ask, cancel := context.WithTimeout(ctx, feedTimeout)
	defer cancel()
	now, err := consumer.Info(ask)
	return err == nil && now.NumPending == 0 && now.Delivered.Consumer == delivered
}
