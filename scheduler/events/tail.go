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
	"github.com/bullpen-run/bullpen/scheduler/store"
)

const (
	// liveMessages are buffered for one reader, half a MiB of output and the record at the end, 1 MiB at most; one that is slower reads the
	// rest from the stream.
	liveMessages = 4
	// lookEvery is how long a reader waits for news before it looks itself, in case a notice was lost. While nothing happens it waits
	// twice as long each time, up to lookMost: many may read what says nothing for long.
	lookEvery   = time.Second
	lookMost    = 5 * time.Second
	readTimeout = 5 * time.Second
	// heldOutput is how many bytes of a result's output a reader holds while it reads events: larger ones are read again at the end,
	// since many may read slowly.
	heldOutput = 64 << 10
)

// Records tells how an execution stands.
type Records interface {
	Lookup(ctx context.Context, id proto.TraceID) (*proto.Record, error)
}

// Log opens the events of executions.
type Log struct {
	Store   *store.Store
	Records Records
}

// Follow begins to read the events of an execution with numbers greater than after. Its error is [proto.ErrNotFound] where there is
// no such execution.
func (g *Log) Follow(ctx context.Context, id proto.TraceID, after int64) (*Tail, error) {
	t := &Tail{log: g, id: id, sent: after, live: make(chan *nats.Msg, liveMessages), from: 1, connection: g.Store.Conn.Stats().Reconnects}
	for _, subject := range []string{store.OutputPattern(id), store.DoneSubject(id)} {
		sub, err := g.Store.Conn.ChanSubscribe(subject, t.live)
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
	t.adopt(rec)
	t.behind, t.late = true, rec.Status.Terminal()
	return t, nil
}

// Tail reads the events of one execution. It is not safe for concurrent use.
type Tail struct {
	log     *Log
	id      proto.TraceID
	subs    []*nats.Subscription
	live    chan *nats.Msg
	rec     *proto.Record
	outline bool   // the result in rec is without its outputs
	attempt int    // the latest whose output was met: what earlier ones published after it is nobody's
	sent    int64  // number of the last event that the reader has
	given   int64  // the same, if it was given out here
	missed  bool   // events were gone before they could be given out
	from    uint64 // where the stream is read on
	dropped int    // live messages that overflowed the buffer
	behind  bool   // the stream may hold events that were not given out
	looked  int    // how often in a row the reader has looked and there was nothing
	ended   bool
	// connection is the one that live messages come over, counted by reconnections: between two of them messages were missed.
	connection uint64
	held       *proto.Batch // to be given out next
	late       bool         // opened when the execution had ended: gets the last [proto.MaxEvents] events, however many still lie there
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
			return t.end(ctx)
		}
		b, err := t.await(ctx)
		if err != nil || len(b.Lines) > 0 {
			return b, err
		}
	}
}

// await waits for the next live message, or for a moment to look at the record.
func (t *Tail) await(ctx context.Context) (proto.Batch, error) {
	if t.overflowed() || t.reconnected() {
		t.behind = true
		return proto.Batch{}, nil
	}
	look := time.NewTimer(min(lookEvery<<t.looked, lookMost))
	defer look.Stop()
	select {
	case <-ctx.Done():
		return proto.Batch{}, context.Cause(ctx)
	case m := <-t.live:
		t.looked = 0
		if m.Subject == store.DoneSubject(t.id) {
			if rec, err := proto.DecodeRecord(t.id, m.Data); err == nil {
				t.adopt(rec.Told())
				return proto.Batch{}, nil
			}
			return proto.Batch{}, t.refresh(ctx)
		}
		p, err := parse(m.Subject, m.Header, m.Data)
		if err != nil || p.attempt < t.rec.Attempt {
			return proto.Batch{}, nil // malformed, or of a worker that lost its lease; the stream has the rest
		}
		if p.first > t.sent+1 {
			t.behind = true // a gap: the buffer overflowed, or another attempt went on
			return proto.Batch{}, nil
		}
		return t.give(p), nil
	case <-look.C:
		if lookEvery<<t.looked < lookMost {
			t.looked++
		}
		return proto.Batch{}, t.refresh(ctx)
	}
}

// reconnected reports whether the connection was lost and made again since it was last asked.
func (t *Tail) reconnected() bool {
	n := t.log.Store.Conn.Stats().Reconnects
	again := n != t.connection
	t.connection = n
	return again
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
	rec, err := t.lookup(ctx)
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

func (t *Tail) lookup(ctx context.Context) (*proto.Record, error) {
	ctx, cancel := context.WithTimeout(ctx, readTimeout)
	defer cancel()
	return t.log.Records.Lookup(ctx, t.id)
}

// adopt takes a newer record. Once it is terminal every event there will be is in the stream.
func (t *Tail) adopt(rec *proto.Record) {
	t.rec, t.outline = rec, false
	if !rec.Status.Terminal() {
		return
	}
	t.behind = t.behind || t.sent < rec.ResultSeq-1
	if len(rec.Result.Stdout)+len(rec.Result.Stderr) > heldOutput {
		slim, result := *rec, *rec.Result
		result.Stdout, result.Stderr = "", ""
		slim.Result = &result
		t.rec, t.outline = &slim, true
	}
}

// catchUp reads the next message of the stream that has something new.
func (t *Tail) catchUp(ctx context.Context) (proto.Batch, error) {
	for {
		m, err := t.read(ctx)
		switch {
		case store.IsNotFound(err):
			return proto.Batch{}, nil
		case ctx.Err() != nil:
			return proto.Batch{}, context.Cause(ctx)
		case err != nil && !passing(err):
			return proto.Batch{}, fmt.Errorf("read output of %s: %w", t.id, err)
		case err != nil:
			_ = pause(ctx)
			continue
		}
		t.from = m.Sequence + 1
		p, err := parse(m.Subject, m.Header, m.Data)
		if err != nil {
			continue
		}
		if b := t.give(p); len(b.Lines) > 0 {
			return b, nil
		}
	}
}

func (t *Tail) read(ctx context.Context) (*jetstream.RawStreamMsg, error) {
	ctx, cancel := context.WithTimeout(ctx, readTimeout)
	defer cancel()
	return t.log.Store.Next(ctx, t.log.Store.Output, t.from, store.OutputPattern(t.id))
}

// passing reports whether what failed may work in a moment: the store is away, or is being started.
func passing(err error) bool {
	if api, ok := errors.AsType[*jetstream.APIError](err); ok {
		return api.Code >= 500
	}
	return !errors.Is(err, nats.ErrConnectionClosed)
}

// give cuts off what was given out before, what is older than the events that are kept, and what comes after the end. The status event
// is never missing: a reader from the beginning gets it even when the message that held it was evicted.
func (t *Tail) give(p piece) proto.Batch {
	if p.attempt < t.attempt {
		return proto.Batch{} // published by a worker that had lost its lease
	}
	t.missed = t.missed || p.attempt > t.attempt && p.first <= t.given // its numbers were used
	t.attempt = p.attempt
	begins := t.sent < 1
	skipTo := t.sent + 1
	if t.late {
		skipTo = max(skipTo, t.rec.ResultSeq-proto.MaxEvents)
	}
	if t.rec.Status.Terminal() {
		p.cutTo(t.rec.ResultSeq - 1)
	}
	p.cutFrom(skipTo)
	if p.last < p.first {
		return proto.Batch{}
	}
	t.missed = t.missed || p.first > skipTo && (!begins || p.first > 2)
	t.sent, t.given = p.last, p.last
	b := proto.Batch{First: p.first, Last: p.last, Lines: p.lines}
	if begins && p.first > 1 {
		t.held = &b
		return proto.Batch{First: 1, Last: 1, Lines: proto.AppendStatusEvent(nil, t.id)}
	}
	return b
}

// end gives out the result event, whatever number the reader is at.
func (t *Tail) end(ctx context.Context) (proto.Batch, error) {
	rec := *t.rec
	for t.outline {
		whole, err := t.lookup(ctx)
		switch {
		case err == nil && whole.Status.Terminal():
			rec, t.outline = *whole, false
		case ctx.Err() != nil:
			return proto.Batch{}, context.Cause(ctx)
		case err != nil && (errors.Is(err, proto.ErrNotFound) || !passing(err)):
			return proto.Batch{}, fmt.Errorf("read the result of %s: %w", t.id, err)
		default:
			_ = pause(ctx)
		}
	}
	t.missed = t.missed || t.sent < rec.ResultSeq-1
	rec.OutputTruncated = rec.OutputTruncated || t.missed
	t.ended = true
	return proto.Batch{First: rec.ResultSeq, Last: rec.ResultSeq, Result: &rec}, nil
}

// piece is what one message of output holds.
type piece struct {
	attempt     int
	first, last int64 // of its events; the message that begins a later attempt may have none, and then last is first-1
	lines       []byte
}

// parse reads a message of output.
func parse(subject string, h nats.Header, lines []byte) (p piece, err error) {
	if p.attempt, err = strconv.Atoi(subject[strings.LastIndexByte(subject, '.')+1:]); err != nil || p.attempt < 1 {
		return p, fmt.Errorf("attempt of %q: %w", subject, errors.Join(err, proto.ErrConflict))
	}
	if p.first, err = strconv.ParseInt(strings.TrimSpace(h.Get(store.HeaderFirst)), 10, 64); err != nil {
		return p, fmt.Errorf("first event: %w", err)
	}
	p.last, err = strconv.ParseInt(h.Get(store.HeaderLast), 10, 64)
	if err != nil || p.first < 1 || p.last < p.first-1 || int64(bytes.Count(lines, []byte{'\n'})) != p.last-p.first+1 {
		return p, fmt.Errorf("last event %q: %w", h.Get(store.HeaderLast), errors.Join(err, proto.ErrConflict))
	}
	p.lines = lines
	return p, nil
}

// cutFrom removes the events before number first.
func (p *piece) cutFrom(first int64) {
	for p.first < first && len(p.lines) > 0 {
		p.lines = p.lines[bytes.IndexByte(p.lines, '\n')+1:]
		p.first++
	}
}

// cutTo removes the events after number last.
func (p *piece) cutTo(last int64) {
	if last >= p.last {
		return
	}
	rest := *p
	rest.cutFrom(last + 1)
	p.lines = p.lines[:len(p.lines)-len(rest.lines)]
	p.last = max(last, p.first-1)
}
