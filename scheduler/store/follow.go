package store

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
)

// consumerTimeout bounds requests about consumers, which can be repeated. A request on its way to a
// server that was just restarted is never answered.
const consumerTimeout = time.Second

// A consumer is created by the leader of the cluster's servers. Nobody answers while there is none,
// and its election is not announced.
const (
	createTimeout = 5 * time.Second
	createAttempt = 500 * time.Millisecond
)

// heartbeat is how often the server confirms that a consumer lives. After two missing heartbeats it
// counts as lost. A consumer lives on one server of a cluster, which may die while the connection
// is to another one.
const heartbeat = 1500 * time.Millisecond

const (
	bufferedHeaders  = 256
	bufferedMessages = 4
	prefetchBytes    = 8 << 20
)

// Follow calls take with the headers of the messages of st that cfg selects, in order and without
// gaps, until stop is called: first the stored ones, then new ones. By then the leader of the
// stream has the message, unless it was removed or replaced since. Follow calls fail at least once
// when it finds a gap or loses the consumer. Messages after that are to be ignored.
func (s *Store) Follow(
	ctx context.Context, st jetstream.Stream, cfg jetstream.ConsumerConfig, take func(jetstream.Msg, *jetstream.MsgMetadata), fail func(error),
) (stop func(), consumer jetstream.Consumer, err error) {
	cfg.HeadersOnly = true
	return s.follow(ctx, st, cfg, take, fail)
}

// follow is Follow with or without bodies, according to cfg.
func (s *Store) follow(
	ctx context.Context, st jetstream.Stream, cfg jetstream.ConsumerConfig, take func(jetstream.Msg, *jetstream.MsgMetadata), fail func(error),
	opts ...jetstream.PullConsumeOpt,
) (stop func(), consumer jetstream.Consumer, err error) {
	name := nameOf(st)
	cfg.AckPolicy, cfg.MemoryStorage = jetstream.AckNonePolicy, true
	cfg.InactiveThreshold, cfg.Replicas = time.Minute, 1
	create, cancel := context.WithTimeout(ctx, createTimeout)
	defer cancel()
	// Each attempt creates a consumer of its own, since the server chosen for the last one may just
	// have died. The server removes consumers that nobody reads.
	err = s.RetryLeader(name, createAttempt).Do(create, func(ctx context.Context) error {
		consumer, err = st.CreateConsumer(ctx, cfg)
		return err
	})
	if err != nil {
		return nil, nil, fmt.Errorf("follow %s: %w", name, err)
	}
	next, waitForLeader := uint64(1), s.leaderHas(ctx, st)
	consuming, err := consumer.Consume(func(m jetstream.Msg) {
		at, err := m.Metadata()
		if err != nil || at.Sequence.Consumer != next {
			fail(fmt.Errorf("gap in %s at delivery %d", name, next))
			return
		}
		next++
		if err := waitForLeader(at.Sequence.Stream); err != nil {
			fail(fmt.Errorf("follow %s: %w", name, err))
			return
		}
		take(m, at)
	}, append(opts, jetstream.PullHeartbeat(heartbeat), jetstream.ConsumeErrHandler(func(_ jetstream.ConsumeContext, err error) {
		if !errors.Is(err, jetstream.ErrConsumerLeadershipChanged) {
			fail(fmt.Errorf("follow %s: %w", name, err))
		}
	}))...)
	if err != nil {
		return nil, nil, fmt.Errorf("follow %s: %w", name, err)
	}
	stopWatching := s.onReconnecting(ctx, func() { fail(errDisconnected) })
	id := consumer.CachedInfo().Name
	return func() {
		consuming.Stop()
		stopWatching()
		gone, cancel := context.WithTimeout(context.WithoutCancel(ctx), consumerTimeout)
		defer cancel()
		_ = st.DeleteConsumer(gone, id) // its inactivity threshold would
	}, consumer, nil
}

var errDisconnected = errors.New("the connection to NATS was lost")

// onReconnecting calls f when the connection is lost, until the returned function is called or ctx
// is done. Messages on their way are gone then, which nothing but the next message would show.
func (s *Store) onReconnecting(ctx context.Context, f func()) (stop context.CancelFunc) {
	lost := s.Conn.StatusChanged(nats.RECONNECTING)
	ctx, stop = context.WithCancel(ctx)
	go func() {
		select {
		case <-lost:
			f()
		case <-ctx.Done():
		}
		s.Conn.RemoveStatusListener(lost)
	}()
	return stop
}

// errBehind means that the leader of a stream has not stored yet what another server has.
var errBehind = errors.New("the leader of the stream is behind")

// leaderHas returns a function that waits until the leader of st has stored a message. The server
// of a cluster that runs the consumer may store a message a moment earlier.
func (s *Store) leaderHas(ctx context.Context, st jetstream.Stream) func(seq uint64) error {
	cfg, last := st.CachedInfo().Config, uint64(0)
	return func(seq uint64) error {
		if cfg.Replicas == 1 || seq <= last {
			return nil
		}
		return s.RetryLeader(cfg.Name, getTimeout).Do(ctx, func(ctx context.Context) error {
			now, err := s.JS.Stream(ctx, cfg.Name)
			if err != nil {
				return err
			}
			if last = now.CachedInfo().State.LastSeq; last < seq {
				return errBehind
			}
			return nil
		})
	}
}

// stalledAfter is how long ReadMessages reads on without receiving anything. On a cluster a new
// leader may be needed meanwhile.
const stalledAfter = 15 * time.Second

// drainedEvery is how often a reader checks whether it has received everything.
const drainedEvery = 10 * time.Millisecond

// ReadHeaders calls take with the headers of all messages of st on subjects that match filter. It
// returns after take has been called with every message that was there. A message that is replaced
// meanwhile may be delivered twice. On a cluster, the server that delivers may lag behind the
// leader.
func (s *Store) ReadHeaders(ctx context.Context, st jetstream.Stream, filter string, take func(jetstream.Msg)) error {
	cfg := jetstream.ConsumerConfig{DeliverPolicy: jetstream.DeliverAllPolicy, FilterSubject: filter, HeadersOnly: true}
	return s.readAll(ctx, st, cfg, bufferedHeaders, take)
}

// ReadMessages calls take with all messages of st and the bodies in them. It returns after take has
// been called with every message that the leader had at the time of the call. A message that is
// replaced meanwhile may be delivered twice. A lost consumer is replaced, unless nothing is
// received for too long.
func (s *Store) ReadMessages(ctx context.Context, st jetstream.Stream, take func(jetstream.Msg, *jetstream.MsgMetadata)) error {
	info, err := st.Info(ctx)
	if err != nil {
		return fmt.Errorf("read the state of stream %s: %w", nameOf(st), err)
	}
	seen, received := uint64(0), time.Now()
	for {
		cfg := jetstream.ConsumerConfig{DeliverPolicy: jetstream.DeliverByStartSequencePolicy, OptStartSeq: seen + 1}
		err := s.readAll(ctx, st, cfg, bufferedMessages, func(m jetstream.Msg) {
			if at, err := m.Metadata(); err == nil {
				seen, received = at.Sequence.Stream, time.Now()
				take(m, at)
			}
		}, jetstream.PullMaxBytes(prefetchBytes))
		if err != nil && IsTransient(err) && time.Since(received) < stalledAfter {
			select {
			case <-time.After(retryMaxPause):
				continue
			case <-ctx.Done():
			}
		}
		if err != nil || seen >= info.State.LastSeq {
			return err
		}
		// The last message was removed, or the server that delivers lags behind.
		_, err = s.askLeader(ctx, st, map[string]any{"seq": info.State.LastSeq})
		if IsNotFound(err) {
			return nil
		}
		if err != nil {
			return fmt.Errorf("read message %d of %s: %w", info.State.LastSeq, nameOf(st), err)
		}
	}
}

func (s *Store) readAll(
	ctx context.Context, st jetstream.Stream, cfg jetstream.ConsumerConfig, buffer int, take func(jetstream.Msg), opts ...jetstream.PullConsumeOpt,
) error {
	ctx, fail := context.WithCancelCause(ctx)
	defer fail(nil)
	messages := make(chan jetstream.Msg, buffer)
	stop, consumer, err := s.follow(ctx, st, cfg, func(m jetstream.Msg, _ *jetstream.MsgMetadata) {
		select {
		case messages <- m:
		case <-ctx.Done():
		}
	}, fail, opts...)
	if err != nil {
		return err
	}
	defer stop()
	tick := time.NewTicker(drainedEvery)
	defer tick.Stop()
	if consumer.CachedInfo().NumPending == 0 {
		return nil
	}
	for taken := uint64(0); ; {
		select {
		case <-ctx.Done():
			return fmt.Errorf("read %s %s: %w", nameOf(st), cfg.FilterSubject, context.Cause(ctx))
		case m := <-messages:
			take(m)
			taken++
			if at, err := m.Metadata(); err == nil && at.NumPending == 0 {
				return nil // it was the last message when it was sent
			}
			continue
		case <-tick.C:
		}
		if Drained(ctx, consumer, taken) {
			return nil
		}
	}
}

// Drained reports whether a consumer that has delivered that many messages has no more to deliver
// now. The number of messages at its start is no measure: one that is removed or replaced meanwhile
// is never delivered.
func Drained(ctx context.Context, consumer jetstream.Consumer, delivered uint64) bool {
	ctx, cancel := context.WithTimeout(ctx, consumerTimeout)
	defer cancel()
	now, err := consumer.Info(ctx)
	return err == nil && now.NumPending == 0 && now.Delivered.Consumer == delivered
}
