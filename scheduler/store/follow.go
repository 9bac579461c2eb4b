package store

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
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

// Range selects messages of a stream. The zero value selects all.
type Range struct {
	Subject string    // matches their subjects, if not empty
	From    uint64    // their lowest sequence number
	Since   time.Time // when the first of them was stored; not used with From
	New     bool      // selects only messages that are stored from now on
}

// consumer returns the configuration of a consumer of the headers.
func (r Range) consumer() jetstream.ConsumerConfig {
	cfg := jetstream.ConsumerConfig{FilterSubject: r.Subject, HeadersOnly: true}
	switch {
	case r.New:
		cfg.DeliverPolicy = jetstream.DeliverNewPolicy
	case r.From > 0:
		cfg.DeliverPolicy, cfg.OptStartSeq = jetstream.DeliverByStartSequencePolicy, r.From
	case !r.Since.IsZero():
		cfg.DeliverPolicy, cfg.OptStartTime = jetstream.DeliverByStartTimePolicy, &r.Since
	}
	return cfg
}

const (
	refollowMinPause = 200 * time.Millisecond
	refollowMaxPause = 5 * time.Second
)

// KeepFollowing calls follow again whenever it returns, until ctx is done. The pauses between calls
// grow while follow returns early. KeepFollowing logs each error with the message, except while
// NATS is unreachable, which is logged already.
func (s *Store) KeepFollowing(
	ctx context.Context, log *slog.Logger, message string, follow func(context.Context) error,
) {
	for pause := refollowMinPause; ; pause = min(2*pause, refollowMaxPause) {
		began := time.Now()
		err := follow(ctx)
		if ctx.Err() != nil {
			return
		}
		if time.Since(began) > refollowMaxPause {
			pause = refollowMinPause
		}
		if s.Conn.IsConnected() {
			log.Warn(message, "error", err, "in_ms", pause.Milliseconds())
		}
		select {
		case <-ctx.Done():
			return
		case <-time.After(pause):
		}
	}
}

// Follow calls handle with the messages in r without their data, in order and without gaps: first the
// stored ones, then new ones. It calls onCurrent once, after the last message that existed at the
// start. By then the leader of the stream has each message, unless it was removed or replaced since.
// Follow makes all calls itself. It returns when ctx is done, or with an error if it may have missed a
// message.
func (st Stream) Follow(ctx context.Context, r Range, handle func(*Message), onCurrent func()) error {
	return st.follow(ctx, r.consumer(), bufferedHeaders, handle, onCurrent)
}

// Read is Follow for the messages that exist at the start. It returns nil after the last one. A
// message that is replaced during the call may be delivered twice. On a cluster, the delivering server
// may lag behind the leader.
func (st Stream) Read(ctx context.Context, r Range, handle func(*Message)) error {
	return st.follow(ctx, r.consumer(), bufferedHeaders, handle, nil)
}

// delivery is a message that was delivered and not handled yet.
type delivery struct {
	message *Message
	pending uint64 // number of messages after it
}

// follow is Follow with or without bodies, according to cfg. If onCurrent is nil, follow returns nil
// instead of calling it.
func (st Stream) follow(
	ctx context.Context, cfg jetstream.ConsumerConfig, buffer int, handle func(*Message), onCurrent func(),
	opts ...jetstream.PullConsumeOpt,
) error {
	ctx, fail := context.WithCancelCause(ctx)
	defer fail(nil)
	inbox := make(chan delivery, buffer)
	stop, consumer, err := st.consume(ctx, cfg, func(d delivery) {
		select {
		case inbox <- d:
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
			return fmt.Errorf("follow %s: %w", st.Name(), context.Cause(ctx))
		case d := <-inbox:
			handle(d.message)
			handled++
			all = all || d.pending == 0
		case <-silent.C:
			all = all || drained(ctx, consumer, handled)
		}
		if !current {
			silent.Reset(drainedAfter)
		}
	}
}

// consume calls handle with each message that cfg selects until stop is called. It calls fail at
// least once when it finds a gap or loses the consumer. The caller must ignore later messages.
func (st Stream) consume(
	ctx context.Context, cfg jetstream.ConsumerConfig, handle func(delivery), fail func(error),
	opts ...jetstream.PullConsumeOpt,
) (stop func(), consumer jetstream.Consumer, err error) {
	name := st.Name()
	cfg.AckPolicy, cfg.MemoryStorage = jetstream.AckNonePolicy, true
	cfg.InactiveThreshold, cfg.Replicas = time.Minute, 1
	create, cancel := context.WithTimeout(ctx, createTimeout)
	defer cancel()
	// Each attempt creates a consumer of its own, since the server chosen for the last one may just
	// have died. The server removes consumers that nobody reads.
	err = st.store.Leaders.Retry(name, createAttempt).Do(create, func(ctx context.Context) error {
		consumer, err = st.CreateConsumer(ctx, cfg)
		return err
	})
	if err != nil {
		return nil, nil, fmt.Errorf("follow %s: %w", name, err)
	}
	next, waitForLeader := uint64(1), st.leaderHas(ctx)
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
		handle(delivery{
			&Message{Subject: m.Subject(), Header: m.Headers(), Data: m.Data(), Seq: at.Sequence.Stream, Time: at.Timestamp},
			at.NumPending,
		})
	}, append(opts, jetstream.PullHeartbeat(heartbeat),
		jetstream.ConsumeErrHandler(func(_ jetstream.ConsumeContext, err error) {
			if !errors.Is(err, jetstream.ErrConsumerLeadershipChanged) {
				fail(fmt.Errorf("follow %s: %w", name, err))
			}
		}))...)
	if err != nil {
		return nil, nil, fmt.Errorf("follow %s: %w", name, err)
	}
	stopWatching := onReconnecting(ctx, st.store.Conn, func() { fail(errDisconnected) })
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
func onReconnecting(ctx context.Context, conn *nats.Conn, f func()) (stop context.CancelFunc) {
	lost := conn.StatusChanged(nats.RECONNECTING)
	ctx, stop = context.WithCancel(ctx)
	go func() {
		select {
		case <-lost:
			f()
		case <-ctx.Done():
		}
		conn.RemoveStatusListener(lost)
	}()
	return stop
}

// errBehind means that the leader of a stream lags behind another server.
var errBehind = errors.New("the leader of the stream is behind")

// leaderHas returns a function that waits until the leader has stored a message. The server
// of a cluster that runs the consumer may store a message a moment earlier.
func (st Stream) leaderHas(ctx context.Context) func(seq uint64) error {
	cfg, last := st.CachedInfo().Config, uint64(0)
	return func(seq uint64) error {
		if cfg.Replicas == 1 || seq <= last {
			return nil
		}
		return st.store.Leaders.Retry(cfg.Name, getTimeout).Do(ctx, func(ctx context.Context) error {
			now, err := st.store.JS.Stream(ctx, cfg.Name)
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

// stalledAfter is how long ReadAll keeps reading without receiving anything: a cluster may be electing
// a leader.
const stalledAfter = 15 * time.Second

// drainedAfter is the time without a message after which a reader that is behind checks whether it
// has received everything.
const drainedAfter = 10 * time.Millisecond

// ReadAll calls handle with all messages and their data, at least those that the leader had at the time
// of the call. A message that is replaced during the call may be delivered twice. A lost consumer is
// replaced, unless nothing arrives for too long.
func (st Stream) ReadAll(ctx context.Context, handle func(*Message)) error {
	info, err := st.Info(ctx)
	if err != nil {
		return fmt.Errorf("read the state of stream %s: %w", st.Name(), err)
	}
	seen, received := uint64(0), time.Now()
	for {
		cfg := Range{From: seen + 1}.consumer()
		cfg.HeadersOnly = false
		err := st.follow(ctx, cfg, bufferedMessages, func(m *Message) {
			seen, received = m.Seq, time.Now()
			handle(m)
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
		if _, err = st.At(ctx, info.State.LastSeq, FromLeader, WithoutBody); IsNotFound(err) {
			return nil
		}
		if err != nil {
			return err
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
