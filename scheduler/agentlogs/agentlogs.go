// Package agentlogs stores the logs of agent runs, see package agentruns, and of agent sessions,
// see package agentsessions.
//
// Appends are compare-and-set on the number of the last message. If two processes append to a log
// at the same time, only one succeeds.
package agentlogs

import (
	"context"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/scheduler/store"
)

const (
	// pollEvery is how often a follower polls for the next message, in case a notification was
	// lost.
	pollEvery     = 5 * time.Second
	liveMessages  = 64      // buffered per follower; it reads the others from the stream
	maxLive       = 4 << 10 // bytes of a buffered message; larger ones are read from the stream, too
	removeTimeout = time.Minute
)

// Logs stores logs.
type Logs struct{ Store *store.Store }

func missing(id string) error { return fmt.Errorf("log %s: %w", id, proto.ErrNotFound) }

// Append adds a message to a log after message number after, and returns the new number. after is 0
// for an empty log. Append returns [proto.ErrConflict] if message number after is not the last.
func (l *Logs) Append(ctx context.Context, org, id string, after uint64, message []byte) (at uint64, err error) {
	return l.append(ctx, org, id, after, message, nats.Header{})
}

// AppendTurn is Append for the message that ends a turn. The turn counts as usage of an API key.
func (l *Logs) AppendTurn(
	ctx context.Context, org, id string, after uint64, message []byte, key string,
) (at uint64, err error) {
	return l.append(ctx, org, id, after, message, nats.Header{store.HeaderTurn: {key}})
}

func (l *Logs) append(
	ctx context.Context, org, id string, after uint64, message []byte, h nats.Header,
) (at uint64, err error) {
	at, err = l.Store.AgentLogs.Write(ctx, store.AgentLogSubject(org, id), h, message, after)
	if store.IsConflict(err) {
		return 0, fmt.Errorf("append to log %s: %w: %w", id, proto.ErrConflict, err)
	}
	return at, err
}

// Last returns the last message of a log and its number. It returns [proto.ErrNotFound] if there is
// none.
func (l *Logs) Last(ctx context.Context, org, id string) (message []byte, at uint64, err error) {
	m, err := l.Store.AgentLogs.Last(ctx, store.AgentLogSubject(org, id))
	if store.IsNotFound(err) {
		return nil, 0, missing(id)
	}
	if err != nil {
		return nil, 0, err
	}
	return m.Data, m.Seq, nil
}

// Next returns the first message of a log with a number greater than after, and its number. The
// message is nil if there is none. If after is not 0 and that message is gone, because the log was
// removed or has expired, Next returns [proto.ErrNotFound].
func (l *Logs) Next(ctx context.Context, org, id string, after uint64) (message []byte, at uint64, err error) {
	m, err := l.Store.AgentLogs.Next(ctx, after+1, store.AgentLogSubject(org, id))
	if store.IsNotFound(err) && after == 0 {
		return nil, 0, nil
	}
	if store.IsNotFound(err) {
		if _, err = l.Store.AgentLogs.At(ctx, after, store.WithoutBody); store.IsNotFound(err) {
			err = missing(id)
		}
		return nil, after, err
	}
	if err != nil {
		return nil, after, err
	}
	return m.Data, m.Seq, nil
}

// Watch returns a channel that receives a value after a message is stored in a log, and every
// pollEvery. The caller calls stop to end the watch.
func (l *Logs) Watch(org, id string) (added <-chan struct{}, stop func(), err error) {
	c, done := make(chan struct{}, 1), make(chan struct{})
	notify := func() {
		select {
		case c <- struct{}{}:
		default:
		}
	}
	sub, err := l.Store.Conn.Subscribe(store.AgentLoggedSubject(org, id), func(*nats.Msg) { notify() })
	if err != nil {
		return nil, nil, fmt.Errorf("watch log %s: %w", id, err)
	}
	tick := time.NewTicker(pollEvery)
	go func() {
		for {
			select {
			case <-done:
				return
			case <-tick.C:
				notify()
			}
		}
	}()
	return c, func() {
		_ = sub.Unsubscribe()
		tick.Stop()
		close(done)
	}, nil
}

// Follow returns a follower of a log.
func (l *Logs) Follow(org, id string) (*Follower, error) {
	f := &Follower{logs: l, org: org, id: id, live: make(chan *nats.Msg, liveMessages), poll: pollEvery}
	var err error
	// Messages that wait for a slow reader are in no budget of memory.
	if f.sub, err = l.Store.Conn.Subscribe(store.AgentLoggedSubject(org, id), func(m *nats.Msg) {
		if len(m.Data) > maxLive {
			m = &nats.Msg{Header: m.Header}
		}
		select {
		case f.live <- m:
		default: // see full
		}
	}); err != nil {
		return nil, fmt.Errorf("follow log %s: %w", id, err)
	}
	return f, nil
}

// Follower waits for messages of a log. It is not safe for concurrent use.
type Follower struct {
	logs    *Logs
	org, id string
	live    chan *nats.Msg // messages that NATS republishes once they are stored
	sub     *nats.Subscription
	current bool // whether all further messages arrive in live, or were dropped from it
	full    bool // whether live was full, so that messages may have been dropped
	poll    time.Duration
}

// Close releases the follower.
func (f *Follower) Close() { _ = f.sub.Unsubscribe() }

// Next blocks until there is a message with a number greater than after, and returns the first one
// and its number. If after is not 0, that message is gone and there is no later one, Next returns
// [proto.ErrNotFound].
func (f *Follower) Next(ctx context.Context, after uint64) (message []byte, at uint64, err error) {
	for {
		if !f.current {
			if message, at, err = f.logs.Next(ctx, f.org, f.id, after); err != nil || message != nil {
				return message, at, err
			}
			f.current = true
		}
		if f.full && len(f.live) == 0 {
			f.full, f.current = false, false
			continue
		}
		poll := time.NewTimer(f.poll)
		select {
		case <-ctx.Done():
			poll.Stop()
			return nil, after, context.Cause(ctx)
		case <-poll.C:
			f.current = false
			continue
		case m := <-f.live:
			poll.Stop()
			f.full = f.full || len(f.live) >= cap(f.live)-1
			seq, previous := number(m, jetstream.SequenceHeader), number(m, jetstream.LastSequenceHeader)
			switch {
			case seq != 0 && seq <= after:
			case previous == after && len(m.Data) > 0:
				return m.Data, seq, nil
			default: // one was lost, or is too large
				f.current = false
			}
		}
	}
}

// number returns the number in a header of a republished message; 0 for none.
func number(m *nats.Msg, header string) uint64 {
	n, err := strconv.ParseUint(m.Header.Get(header), 10, 64)
	if err != nil {
		return 0
	}
	return n
}

// IDs returns the ids of the logs of an organisation that begin with a prefix, in order.
func (l *Logs) IDs(ctx context.Context, org, prefix string) ([]string, error) {
	counts, err := l.Store.AgentLogs.Subjects(ctx, store.AgentLogPatternOf(org))
	if err != nil {
		return nil, fmt.Errorf("list logs: %w", err)
	}
	var ids []string
	for subject := range counts {
		if id, ok := strings.CutPrefix(subject, store.AgentLogSubject(org, prefix)); ok {
			ids = append(ids, prefix+id)
		}
	}
	slices.Sort(ids)
	return ids, nil
}

// Remove removes a log.
func (l *Logs) Remove(ctx context.Context, org, id string) error {
	ctx, cancel := context.WithTimeout(ctx, removeTimeout)
	defer cancel()
	subject := store.AgentLogSubject(org, id)
	var bodies []nats.Header
	for from := uint64(1); ; {
		m, err := l.Store.AgentLogs.Next(ctx, from, subject, store.WithoutBody)
		if store.IsNotFound(err) {
			break
		}
		if err != nil {
			return fmt.Errorf("remove log %s: %w", id, err)
		}
		if store.BodyName(m.Header) != "" {
			bodies = append(bodies, m.Header)
		}
		from = m.Seq + 1
	}
	// Purge first: a body without its message is only garbage, a message without its body is an
	// error.
	if err := l.Store.AgentLogs.PurgeSubject(ctx, subject); err != nil {
		return err
	}
	for _, h := range bodies {
		l.Store.Bodies.Discard(ctx, h)
	}
	return nil
}
