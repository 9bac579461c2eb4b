package store

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/cenkalti/backoff/v4"
	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
)

// feedTimeout bounds the requests of a feed, which can be sent again: one that was on its way to a server that was just started again
// gets no answer at all.
const feedTimeout = time.Second

// A consumer is made by the leader of the cluster's servers. Where that is not chosen yet nobody answers, nor is it told when there is one.
const (
	feedPatience = 5 * time.Second
	feedTry      = 500 * time.Millisecond
)

// feedBeat is how often the server says of a feed that it lives; after two that did not come it is lost. Its consumer lives on one server of
// a cluster, which may die while the connection is to another: that is noticed before the others have chosen new leaders.
const feedBeat = 1500 * time.Millisecond

const (
	headersAhead  = 256     // headers that may wait to be taken
	messagesAhead = 4       // messages that may
	feedBytes     = 8 << 20 // that the server sends ahead
)

// Feed delivers the headers of a stream's messages to take, in order and without gaps, until stop is called: first those that lie there
// as cfg chooses them, then what comes. Whoever asks the leader of the stream for what was delivered is not told that it is not there, unless
// it was removed or replaced since. A gap, or the loss of the consumer, is told to fail once or more, after which nothing that is delivered
// counts.
func (s *Store) Follow(
	ctx context.Context, st jetstream.Stream, cfg jetstream.ConsumerConfig, take func(jetstream.Msg, *jetstream.MsgMetadata), fail func(error),
) (stop func(), consumer jetstream.Consumer, err error) {
	cfg.HeadersOnly = true
	return s.feed(ctx, st, cfg, take, fail)
}

// feed is Feed with or without the bodies, as cfg says.
func (s *Store) feed(
	ctx context.Context, st jetstream.Stream, cfg jetstream.ConsumerConfig, take func(jetstream.Msg, *jetstream.MsgMetadata), fail func(error),
	opts ...jetstream.PullConsumeOpt,
) (stop func(), consumer jetstream.Consumer, err error) {
	name := st.CachedInfo().Config.Name
	cfg.AckPolicy, cfg.MemoryStorage = jetstream.AckNonePolicy, true
	cfg.InactiveThreshold, cfg.Replicas = time.Minute, 1
	ask, cancel := context.WithTimeout(ctx, feedPatience)
	defer cancel()
	// Each try makes one of its own: the server that is to have it may be one that has just died. Those that nobody reads go by themselves.
	consumer, err = insist(ask, s.news, name, feedTry, func(try context.Context) (jetstream.Consumer, error) {
		c, err := st.CreateConsumer(try, cfg)
		if err != nil && !IsTransient(err) && !errors.Is(err, context.Canceled) {
			err = backoff.Permanent(err)
		}
		return c, err
	})
	if err != nil {
		return nil, nil, fmt.Errorf("follow %s: %w", name, err)
	}
	next, leads := uint64(1), s.leads(ctx, st)
	consuming, err := consumer.Consume(func(m jetstream.Msg) {
		at, err := m.Metadata()
		if err != nil || at.Sequence.Consumer != next {
			fail(fmt.Errorf("a gap in %s at delivery %d", name, next))
			return
		}
		next++
		if err := leads(at.Sequence.Stream); err != nil {
			fail(fmt.Errorf("follow %s: %w", name, err))
			return
		}
		take(m, at)
	}, append(opts, jetstream.PullHeartbeat(feedBeat), jetstream.ConsumeErrHandler(func(_ jetstream.ConsumeContext, err error) {
		if !errors.Is(err, jetstream.ErrConsumerLeadershipChanged) {
			fail(fmt.Errorf("follow %s: %w", name, err))
		}
	}))...)
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

// errBehind says that the leader of a stream has not stored yet what another server has.
var errBehind = errors.New("the leader of the stream is behind")

// leads gives what waits until the leader of st has stored a message. On a cluster the server that feeds may store it a moment earlier.
func (s *Store) leads(ctx context.Context, st jetstream.Stream) func(seq uint64) error {
	cfg, has := st.CachedInfo().Config, uint64(0)
	return func(seq uint64) error {
		if cfg.Replicas == 1 || seq <= has {
			return nil
		}
		_, err := again(ctx, s.news, cfg.Name, func(ctx context.Context) (jetstream.Stream, error) {
			now, err := s.JS.Stream(ctx, cfg.Name)
			if err != nil {
				return nil, err
			}
			if has = now.CachedInfo().State.LastSeq; has < seq {
				return nil, errBehind
			}
			return now, nil
		})
		return err
	}
}

// lostMost is how long a reader of a stream whose feed was lost tries to begin another. On a cluster that may need a new leader.
const lostMost = 15 * time.Second

// drainedLook is how often a reader asks whether it has had everything.
const drainedLook = 10 * time.Millisecond

// Headers calls take for the headers of all messages of st on subjects like filter, and returns when it has had each that was there. One
// that is replaced meanwhile may come twice. It reads where the server has it do so, which on a cluster may lag behind the leader.
func (s *Store) ReadHeaders(ctx context.Context, st jetstream.Stream, filter string, take func(jetstream.Msg)) error {
	cfg := jetstream.ConsumerConfig{DeliverPolicy: jetstream.DeliverAllPolicy, FilterSubject: filter, HeadersOnly: true}
	return s.read(ctx, st, cfg, headersAhead, take)
}

// Messages calls take for all messages of st, with the bodies that are in them. It returns when it has had each that was there, by the word
// of the leader, when it was called. One that is replaced meanwhile may come twice. Where what it reads from is lost, as with a server of a
// cluster, it reads on from another, unless nothing comes for too long.
func (s *Store) ReadMessages(ctx context.Context, st jetstream.Stream, take func(jetstream.Msg, *jetstream.MsgMetadata)) error {
	info, err := st.Info(ctx)
	if err != nil {
		return fmt.Errorf("ask for the state of stream %s: %w", st.CachedInfo().Config.Name, err)
	}
	seen, moved := uint64(0), time.Now()
	for {
		cfg := jetstream.ConsumerConfig{DeliverPolicy: jetstream.DeliverByStartSequencePolicy, OptStartSeq: seen + 1}
		err := s.read(ctx, st, cfg, messagesAhead, func(m jetstream.Msg) {
			if at, err := m.Metadata(); err == nil { // else it was no message of a feed
				seen, moved = at.Sequence.Stream, time.Now()
				take(m, at)
			}
		}, jetstream.PullMaxBytes(feedBytes))
		if err != nil && IsTransient(err) && time.Since(moved) < lostMost {
			select {
			case <-time.After(retryMost):
				continue
			case <-ctx.Done():
			}
		}
		if err != nil || seen >= info.State.LastSeq {
			return err
		}
		// It was removed, or the server that was read from lags behind.
		_, err = s.askLeader(ctx, st, map[string]any{"seq": info.State.LastSeq})
		if IsNotFound(err) {
			return nil
		}
		if err != nil {
			return fmt.Errorf("ask for message %d of %s: %w", info.State.LastSeq, st.CachedInfo().Config.Name, err)
		}
	}
}

func (s *Store) read(
	ctx context.Context, st jetstream.Stream, cfg jetstream.ConsumerConfig, ahead int, take func(jetstream.Msg), opts ...jetstream.PullConsumeOpt,
) error {
	ctx, fail := context.WithCancelCause(ctx)
	defer fail(nil)
	messages := make(chan jetstream.Msg, ahead)
	stop, consumer, err := s.feed(ctx, st, cfg, func(m jetstream.Msg, _ *jetstream.MsgMetadata) {
		select {
		case messages <- m:
		case <-ctx.Done():
		}
	}, fail, opts...)
	if err != nil {
		return err
	}
	defer stop()
	look := time.NewTicker(drainedLook)
	defer look.Stop()
	if consumer.CachedInfo().NumPending == 0 {
		return nil
	}
	for taken := uint64(0); ; {
		select {
		case <-ctx.Done():
			return fmt.Errorf("read %s %s: %w", st.CachedInfo().Config.Name, cfg.FilterSubject, context.Cause(ctx))
		case m := <-messages:
			take(m)
			taken++
			if at, err := m.Metadata(); err == nil && at.NumPending == 0 {
				return nil // nothing came after it at that moment, so that nothing of before is missing
			}
			continue
		case <-look.C:
		}
		if Drained(ctx, consumer, taken) {
			return nil
		}
	}
}

// Drained reports whether a feed that has delivered so many messages has nothing to deliver now. What lay there when it began tells less:
// of that, what is removed or replaced meanwhile is never delivered.
func Drained(ctx context.Context, consumer jetstream.Consumer, delivered uint64) bool {
	ask, cancel := context.WithTimeout(ctx, feedTimeout)
	defer cancel()
	now, err := consumer.Info(ask)
	return err == nil && now.NumPending == 0 && now.Delivered.Consumer == delivered
}
