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

// feedBeat is how often the server says of a feed that it lives; after two that did not come it is lost. Its consumer lives on one server of
// a cluster, which may die while the connection is to another.
const feedBeat = 2 * time.Second

// headersAhead is how many messages may wait to be taken.
const headersAhead = 256

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
	}, jetstream.PullHeartbeat(feedBeat), jetstream.ConsumeErrHandler(func(_ jetstream.ConsumeContext, err error) {
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

// drainedLook is how often a reader asks whether it has had everything.
const drainedLook = 10 * time.Millisecond

// Headers calls take for the headers of all messages of st on subjects like filter, and returns when it has had each that was there. One
// that is replaced meanwhile may come twice. It reads where the server has it do so, which on a cluster may lag behind the leader.
func (s *Set) Headers(ctx context.Context, st jetstream.Stream, filter string, take func(jetstream.Msg)) error {
	ctx, fail := context.WithCancelCause(ctx)
	defer fail(nil)
	messages := make(chan jetstream.Msg, headersAhead)
	cfg := jetstream.ConsumerConfig{DeliverPolicy: jetstream.DeliverAllPolicy, FilterSubject: filter}
	stop, consumer, err := s.Feed(ctx, st, cfg, func(m jetstream.Msg, _ *jetstream.MsgMetadata) {
		select {
		case messages <- m:
		case <-ctx.Done():
		}
	}, fail)
	if err != nil {
		return err
	}
	defer stop()
	look := time.NewTicker(drainedLook)
	defer look.Stop()
	pending := consumer.CachedInfo().NumPending
	for taken := uint64(0); pending > 0; {
		select {
		case <-ctx.Done():
			return fmt.Errorf("read %s: %w", filter, context.Cause(ctx))
		case m := <-messages:
			take(m)
			taken++
			if taken != pending { // what lay there; if all of it has come, this is the end unless some of it was replaced
				continue
			}
		case <-look.C:
		}
		if Drained(ctx, consumer, taken) {
			return nil
		}
	}
	return nil
}

// Drained reports whether a feed that has delivered so many messages has nothing to deliver now. What lay there when it began tells less:
// of that, what is removed or replaced meanwhile is never delivered.
func Drained(ctx context.Context, consumer jetstream.Consumer, delivered uint64) bool {
	ask, cancel := context.WithTimeout(ctx, feedTimeout)
	defer cancel()
	now, err := consumer.Info(ask)
	return err == nil && now.NumPending == 0 && now.Delivered.Consumer == delivered
}
