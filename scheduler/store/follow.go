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

// handler is called with a message and its metadata.
type handler = func(jetstream.Msg, *jetstream.MsgMetadata)

// Follow calls handle with the headers of the messages of st that cfg selects, in order and without
// gaps: first the stored ones, then new ones. It calls onCurrent once, after the last message that
// existed at the start. By then the leader of the stream has each message, unless it was removed or
// replaced since. Follow makes all calls itself. It returns when ctx is done, or with an error if
// it may have missed a message.
func (s *Store) Follow(
	ctx context.Context, st jetstream.Stream, cfg jetstream.ConsumerConfig, handle handler, onCurrent func(),
) error {
	cfg.HeadersOnly = true
	return s.follow(ctx, st, cfg, bufferedHeaders, handle, onCurrent)
}

// Read is Follow for the messages that exist at the start. It returns nil after the last one. A
// message that is replaced meanwhile may be delivered twice. On a cluster, the server that delivers
// may lag behind the leader.
func (s *Store) Read(ctx context.Context, st jetstream.Stream, cfg jetstream.ConsumerConfig, handle handler) error {
	cfg.HeadersOnly = true
	return s.follow(ctx, st, cfg, bufferedHeaders, handle, nil)
}

// message is a message that was delivered and not handled yet.
type message struct {
	msg jetstream.Msg
	at  *jetstream.MsgMetadata
}

// follow is Follow with or without bodies, according to cfg. If onCurrent is nil, it returns nil in
// its place.
func (s *Store) follow(
	ctx context.Context, st jetstream.Stream, cfg jetstream.ConsumerConfig, buffer int, handle handler, onCurrent func(),
	opts ...jetstream.PullConsumeOpt,
) error {
	ctx, fail := context.WithCancelCause(ctx)
	defer fail(nil)
	inbox := make(chan message, buffer)
	stop, consumer, err := s.consume(ctx, st, cfg, func(m jetstream.Msg, at *jetstream.MsgMetadata) {
		select {
		case inbox <- message{m, at}:
		case <-ctx.Done():
		}
	}, fail, opts...)
	if err != nil {
		return err
	}
	defer stop()
	// A message may be replaced before it is delivered, and others may be stored in between. So all
	// messages are known only at a moment when none was pending.
	handled, current := uint64(0), false
	all := consumer.CachedInfo().NumPending == 0
	silent := time.NewTimer(drainedAfter)
	defer silent.Stop()
	for {
		if !current && all {
			if onCurrent == nil {
				return nil
			}
			current = true
			onCurrent()
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("follow %s: %w", nameOf(st), context.Cause(ctx))
		case m := <-inbox:
			handle(m.msg, m.at)
			handled++
			all = all || m.at.NumPending == 0
		case <-silent.C:
			all = all || drained(ctx, consumer, handled)
		}
		if !current {
			silent.Reset(drainedAfter)
		}
	}
}

// consume calls take with each message that cfg selects until stop is called. It calls fail at
// least once when it finds a gap or loses the consumer. Messages after that are to be ignored.
func (s *Store) consume(
	ctx context.Context, st jetstream.Stream, cfg jetstream.ConsumerConfig, take handler, fail func(error),
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
	}, append(opts, jetstream.PullHeartbeat(heartbeat),
		jetstream.ConsumeErrHandler(func(_ jetstream.ConsumeContext, err error) {
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

// drainedAfter is the time without a message after which a reader that is behind checks whether it
// has received everything.
const drainedAfter = 10 * time.Millisecond

// ReadHeaders is [Store.Read] of the messages on subjects that match filter.
func (s *Store) ReadHeaders(ctx context.Context, st jetstream.Stream, filter string, take func(jetstream.Msg)) error {
	cfg := jetstream.ConsumerConfig{DeliverPolicy: jetstream.DeliverAllPolicy, FilterSubject: filter}
	return s.Read(ctx, st, cfg, func(m jetstream.Msg, _ *jetstream.MsgMetadata) { take(m) })
}

// ReadMessages calls take with all messages of st and the bodies in them. It returns after take has
// been called with every message that the leader had at the time of the call. A message that is
// replaced meanwhile may be delivered twice. A lost consumer is replaced, unless nothing is
// received for too long.
func (s *Store) ReadMessages(ctx context.Context, st jetstream.Stream, take handler) error {
	info, err := st.Info(ctx)
	if err != nil {
		return fmt.Errorf("read the state of stream %s: %w", nameOf(st), err)
	}
	seen, received := uint64(0), time.Now()
	for {
		cfg := jetstream.ConsumerConfig{DeliverPolicy: jetstream.DeliverByStartSequencePolicy, OptStartSeq: seen + 1}
		err := s.follow(ctx, st, cfg, bufferedMessages, func(m jetstream.Msg, at *jetstream.MsgMetadata) {
			seen, received = at.Sequence.Stream, time.Now()
			take(m, at)
		}, nil, jetstream.PullMaxBytes(prefetchBytes))
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
		_, err = s.askLeader(ctx, nameOf(st), map[string]any{"seq": info.State.LastSeq})
		if IsNotFound(err) {
			return nil
		}
		if err != nil {
			return fmt.Errorf("read message %d of %s: %w", info.State.LastSeq, nameOf(st), err)
		}
	}
}

// drained reports whether a consumer that has delivered that many messages has no more to deliver
// now.
func drained(ctx context.Context, consumer jetstream.Consumer, delivered uint64) bool {
	ctx, cancel := context.WithTimeout(ctx, consumerTimeout)
	defer cancel()
	now, err := consumer.Info(ctx)
	return err == nil && now.NumPending == 0 && now.Delivered.Consumer == delivered
}

// stateTimeout bounds one question for the state of a stream.
const stateTimeout = time.Second

// StreamState is what a stream contains.
type StreamState struct {
	Created     time.Time
	First, Last uint64 // sequence numbers
}

// State returns what a stream contains. It repeats the question until ctx is done, at once after a
// change of the stream's leader.
func (s *Store) State(ctx context.Context, st jetstream.Stream) (state StreamState, err error) {
	name := st.CachedInfo().Config.Name
	err = s.RetryLeader(name, stateTimeout).Do(ctx, func(ctx context.Context) error {
		now, err := s.JS.Stream(ctx, name)
		if err != nil {
			return err
		}
		info := now.CachedInfo()
		state = StreamState{info.Created, info.State.FirstSeq, info.State.LastSeq}
		return nil
	})
	if err != nil {
		return state, fmt.Errorf("read the state of stream %s: %w", name, err)
	}
	return state, nil
}
