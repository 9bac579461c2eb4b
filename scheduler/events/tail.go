// Package events carries the output of executions: a [Writer] publishes what a program prints as numbered events, and a [Tail]
// follows them from any number on, during the run and after it, from any process. It is one projection of the execution: the last
// event is made from the execution's record and so is never lost.
package events

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"strconv"
	"strings"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/scheduler/stream"
)

const (
	liveMessages = 64 // buffered for one reader; one that is slower reads the rest from the stream
	lookEvery    = time.Second
)

// Records tells how an execution stands.
type Records interface {
	Lookup(ctx context.Context, id proto.TraceID) (*proto.Record, error)
}

// Log opens the events of executions.
type Log struct {
	Set     *stream.Set
	Records Records
}

// Follow begins to read the events of an execution with numbers greater than after. Its error is [proto.ErrNotFound] where there is
// no such execution.
func (g *Log) Follow(ctx context.Context, id proto.TraceID, after int64) (*Tail, error) {
	t := &Tail{log: g, id: id, sent: after, live: make(chan *nats.Msg, liveMessages), from: 1}
	for _, subject := range []string{stream.OutOf(id), stream.Done(id)} {
		sub, err := g.Set.Conn.ChanSubscribe(subject, t.live)
		if err != nil {
			t.Close()
			return nil, fmt.Errorf("follow %s: %w", id, err)
		}
		t.subs = append(t.subs, sub)
	}
	rec, err := g.Records.Lookup(ctx, id)
	if err != nil {
		t.Close()
		return nil, err
	}
	t.rec, t.behind, t.late = rec, true, rec.Status.Terminal()
	return t, nil
}

// Tail reads the events of one execution. It is not safe for concurrent use.
type Tail struct {
	log     *Log
	id      proto.TraceID
	subs    []*nats.Subscription
	live    chan *nats.Msg
	rec     *proto.Record
	sent    int64  // number of the last event given out
	from    uint64 // where the stream is read on
	dropped int    // live messages that overflowed the buffer
	behind  bool   // the stream may hold events that were not given out
	ended   bool
	held    *proto.Batch // to be given out next
	late    bool         // opened when the execution had ended: gets the last [proto.MaxEvents] events, however many still lie there
}

// Close ends the reading.
func (t *Tail) Close() {
	for _, sub := range t.subs {
		_ = sub.Unsubscribe()
	}
}

// Next returns the next events. Its error is [io.EOF] after the result event; when ctx ends first it is ctx's, and Next may be
// called again.
func (t *Tail) Next(ctx context.Context) (proto.Batch, error) {
	for {
		if t.ended {
			return proto.Batch{}, io.EOF
		}
		if b := t.held; b != nil {
			t.held = nil
			return *b, nil
		}
		if t.behind {
			b, err := t.catchUp(ctx)
			if err != nil || len(b.Lines) > 0 {
				return b, err
			}
			t.behind = false
		}
		if t.rec.Status.Terminal() {
			return t.end()
		}
		b, err := t.await(ctx)
		if err != nil || len(b.Lines) > 0 {
			return b, err
		}
	}
}

// await waits for the next live message, or for a moment to look at the record.
func (t *Tail) await(ctx context.Context) (proto.Batch, error) {
	if t.overflowed() {
		t.behind = true
		return proto.Batch{}, nil
	}
	look := time.NewTimer(lookEvery)
	defer look.Stop()
	select {
	case <-ctx.Done():
		return proto.Batch{}, context.Cause(ctx)
	case m := <-t.live:
		if m.Subject == stream.Done(t.id) {
			if rec, err := proto.DecodeRecord(t.id, m.Data); err == nil {
				t.adopt(rec)
				return proto.Batch{}, nil
			}
			return proto.Batch{}, t.refresh(ctx)
		}
		first, last, err := span(m.Header)
		if err != nil {
			return proto.Batch{}, nil // a malformed message is nobody's event; the stream has the rest
		}
		if first > t.sent+1 {
			t.behind = true // a gap: the buffer overflowed, or another attempt went on
			return proto.Batch{}, nil
		}
		return t.give(first, last, m.Data), nil
	case <-look.C:
		return proto.Batch{}, t.refresh(ctx)
	}
}

// overflowed reports whether live messages were dropped since it was last asked, once those that were not have been read.
func (t *Tail) overflowed() bool {
	if len(t.live) > 0 {
		return false
	}
	n, err := t.subs[0].Dropped()
	over := err == nil && n != t.dropped
	t.dropped = n
	return over
}

// refresh reads the record.
func (t *Tail) refresh(ctx context.Context) error {
	rec, err := t.log.Records.Lookup(ctx, t.id)
	switch {
	case err == nil:
		t.adopt(rec)
		return nil
	case ctx.Err() != nil:
		return context.Cause(ctx)
	case errors.Is(err, proto.ErrNotFound):
		return err
	default:
		return nil // the store is away for a moment
	}
}

// adopt takes a newer record. Once it is terminal every event there will be is in the stream.
func (t *Tail) adopt(rec *proto.Record) {
	t.rec = rec
	t.behind = t.behind || rec.Status.Terminal() && t.sent < rec.ResultSeq-1
}

// catchUp reads the next message of the stream that has something new.
func (t *Tail) catchUp(ctx context.Context) (proto.Batch, error) {
	for {
		m, err := t.log.Set.Outs.GetMsg(ctx, t.from, jetstream.WithGetMsgSubject(stream.OutOf(t.id)))
		if stream.Missing(err) {
			return proto.Batch{}, nil
		}
		if err != nil {
			if ctx.Err() != nil {
				return proto.Batch{}, context.Cause(ctx)
			}
			return proto.Batch{}, fmt.Errorf("read output of %s: %w", t.id, err)
		}
		t.from = m.Sequence + 1
		first, last, err := span(m.Header)
		if err != nil {
			continue
		}
		if b := t.give(first, last, m.Data); len(b.Lines) > 0 {
			return b, nil
		}
	}
}

// give cuts off what was given out before, and what is older than the events that are kept. The status event is never missing: a
// reader from the beginning gets it even when the message that held it was evicted.
func (t *Tail) give(first, last int64, lines []byte) proto.Batch {
	begins := t.sent < 1
	skipTo := t.sent + 1
	if t.late {
		skipTo = max(skipTo, t.rec.ResultSeq-proto.MaxEvents)
	}
	if last < skipTo {
		return proto.Batch{}
	}
	for ; first < skipTo; first++ {
		i := bytes.IndexByte(lines, '\n')
		if i < 0 {
			return proto.Batch{}
		}
		lines = lines[i+1:]
	}
	t.sent = last
	b := proto.Batch{First: first, Last: last, Lines: lines}
	if begins && first > 1 {
		t.held = &b
		return proto.Batch{First: 1, Last: 1, Lines: proto.AppendStatusEvent(nil, t.id)}
	}
	return b
}

// end gives out the result event, whatever number the reader is at.
func (t *Tail) end() (proto.Batch, error) {
	lines, err := proto.AppendResultEvent(nil, t.rec)
	if err != nil {
		return proto.Batch{}, err
	}
	t.ended = true
	return proto.Batch{First: t.rec.ResultSeq, Last: t.rec.ResultSeq, Lines: lines}, nil
}

// span reads which events a message holds.
func span(h nats.Header) (first, last int64, err error) {
	first, err = strconv.ParseInt(strings.TrimSpace(h.Get(stream.HeaderFirst)), 10, 64)
	if err != nil {
		return 0, 0, fmt.Errorf("first event: %w", err)
	}
	last, err = strconv.ParseInt(h.Get(stream.HeaderLast), 10, 64)
	if err != nil || last < first || first < 1 {
		return 0, 0, fmt.Errorf("last event %q: %w", h.Get(stream.HeaderLast), errors.Join(err, proto.ErrConflict))
	}
	return first, last, nil
}
