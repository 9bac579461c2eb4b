// Package events transports the output of executions. A [Writer] publishes what a program prints as
// numbered events. A [Tail] follows them from any number on, during and after the execution, from
// any process. The last event is the result. It is built from the execution's record, and is never
// lost.
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

	"github.com/klauspost/compress/s2"
	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/scheduler/store"
)

const (
	// liveMessages are buffered per reader: half a MiB of output, and the record of at most 1 MiB.
	// A slower reader reads the rest from the stream.
	liveMessages = 4
	// pollEvery is the first interval at which a reader reads the record, in case a notification
	// was lost. While nothing happens, the interval doubles up to maxPoll.
	pollEvery   = time.Second
	maxPoll     = 5 * time.Second
	readTimeout = 5 * time.Second
	// maxHeldOutput limits how much of the result's output a reader keeps in memory while it reads
	// events. Larger output is read again at the end.
	maxHeldOutput = 64 << 10
)

// Records reads executions.
type Records interface {
	Lookup(ctx context.Context, org string, id proto.TraceID) (*proto.Record, error)
	// Summary is Lookup without the outputs of the result.
	Summary(ctx context.Context, org string, id proto.TraceID) (*proto.Record, error)
}

// Log reads the events of executions.
type Log struct {
	Store   *store.Store
	Records Records
}

// Follow returns a reader of the events with numbers greater than after, or [proto.ErrNotFound] if
// the organisation has no such execution.
func (g *Log) Follow(ctx context.Context, org string, id proto.TraceID, after int64) (*Tail, error) {
	t := &Tail{
		log: g, org: org, id: id, sent: after, live: make(chan *nats.Msg, liveMessages), from: 1,
		reconnects: g.Store.Conn.Stats().Reconnects,
	}
	for _, subject := range []string{store.OutputPattern(org, id), store.DoneSubject(org, id)} {
		sub, err := g.Store.Conn.ChanSubscribe(subject, t.live)
		if err != nil {
			t.Close()
			return nil, fmt.Errorf("follow %s: %w", id, err)
		}
		t.subs = append(t.subs, sub)
	}
	rec, err := g.Records.Summary(ctx, org, id)
	if err != nil {
		t.Close()
		return nil, err
	}
	t.adoptSummary(rec)
	t.behind, t.late = true, rec.Status.Terminal()
	if !t.late { // nothing that a late reader needs is evicted
		answer := func(m *nats.Msg) { _ = m.Respond(nil) }
		sub, err := g.Store.Conn.Subscribe(store.ReadersSubject(org, id), answer)
		if err != nil {
			t.Close()
			return nil, fmt.Errorf("follow %s: %w", id, err)
		}
		t.subs = append(t.subs, sub)
	}
	return t, nil
}

// Tail reads the events of one execution. It is not safe for concurrent use.
type Tail struct {
	log      *Log
	org      string
	id       proto.TraceID
	subs     []*nats.Subscription
	live     chan *nats.Msg
	rec      *proto.Record
	partial  bool   // the outputs of the result in rec are not loaded
	attempt  int    // the latest with output; later output of earlier attempts is ignored
	sent     int64  // number of the last event that the reader has, or will not get
	returned int64  // number of the last event that this Tail has returned
	missed   bool   // events were evicted before they were returned
	from     uint64 // next sequence number to read from the stream
	dropped  int    // live messages that overflowed the buffer
	behind   bool   // the stream may contain events that were not returned
	polls    int    // consecutive polls without a change
	ended    bool
	// reconnects of the connection at the last check. Live messages are lost during a reconnect.
	reconnects uint64
	next       []proto.Events // to be returned next
	late       bool           // opened after the end: returns only the last [proto.MaxEvents] events
}

// Close ends the subscriptions.
func (t *Tail) Close() {
	for _, sub := range t.subs {
		_ = sub.Unsubscribe()
	}
}

// Next returns the next events. It returns [io.EOF] after the result event. It returns the error of
// ctx if ctx is done first, and may be called again then.
func (t *Tail) Next(ctx context.Context) (proto.Events, error) {
	for {
		if t.ended {
			return proto.Events{}, io.EOF
		}
		if len(t.next) > 0 {
			b := t.next[0]
			t.next = t.next[1:]
			return b, nil
		}
		if t.behind {
			b, err := t.catchUp(ctx)
			if err != nil || len(b.Lines) > 0 {
				return b, err
			}
			t.behind = false
		}
		if t.rec.Status.Terminal() {
			return t.result(ctx)
		}
		b, err := t.await(ctx)
		if err != nil || len(b.Lines) > 0 {
			return b, err
		}
	}
}

// await waits for the next live message, or until the next poll of the record.
func (t *Tail) await(ctx context.Context) (proto.Events, error) {
	if t.overflowed() || t.reconnected() {
		t.behind = true
		return proto.Events{}, nil
	}
	poll := time.NewTimer(min(pollEvery<<t.polls, maxPoll))
	defer poll.Stop()
	select {
	case <-ctx.Done():
		return proto.Events{}, context.Cause(ctx)
	case m := <-t.live:
		t.polls = 0
		if m.Subject == store.DoneSubject(t.org, t.id) {
			if rec, err := proto.DecodeRecord(t.id, m.Data); err == nil {
				t.adopt(rec.Public())
				return proto.Events{}, nil
			}
			return proto.Events{}, t.refresh(ctx)
		}
		p, err := parse(m.Subject, m.Header, m.Data)
		if err != nil || p.attempt < t.rec.Attempt {
			return proto.Events{}, nil // malformed, or from a worker that lost its lease
		}
		if p.first > t.sent+1 {
			t.behind = true // the buffer overflowed, or another attempt began
			return proto.Events{}, nil
		}
		return t.accept(p), nil
	case <-poll.C:
		if pollEvery<<t.polls < maxPoll {
			t.polls++
		}
		return proto.Events{}, t.refresh(ctx)
	}
}

// reconnected reports whether the connection was re-established since the last call.
func (t *Tail) reconnected() bool {
	n := t.log.Store.Conn.Stats().Reconnects
	changed := n != t.reconnects
	t.reconnects = n
	return changed
}

// overflowed reports whether live messages were dropped since the last call. It returns false until
// the buffered ones have been read.
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
	limited, cancel := context.WithTimeout(ctx, readTimeout)
	defer cancel()
	rec, err := t.log.Records.Summary(limited, t.org, t.id)
	switch {
	case err == nil:
		t.adoptSummary(rec)
		return nil
	case ctx.Err() != nil:
		return context.Cause(ctx)
	case errors.Is(err, proto.ErrNotFound):
		return err
	default:
		return nil // the store does not answer now
	}
}

func (t *Tail) lookup(ctx context.Context) (*proto.Record, error) {
	ctx, cancel := context.WithTimeout(ctx, readTimeout)
	defer cancel()
	return t.log.Records.Lookup(ctx, t.org, t.id)
}

// adopt stores a newer record. All events are in the stream once the record is terminal.
func (t *Tail) adopt(rec *proto.Record) {
	t.rec, t.partial = rec, false
	if !rec.Status.Terminal() {
		return
	}
	t.behind = t.behind || t.sent < rec.ResultSeq-1
	if rec.Result.OutputBytes() > maxHeldOutput {
		slim, result := *rec, rec.Result.WithoutOutput()
		slim.Result = &result
		t.rec, t.partial = &slim, true
	}
}

// adoptSummary stores a newer record whose outputs are not loaded.
func (t *Tail) adoptSummary(rec *proto.Record) {
	t.adopt(rec)
	t.partial = rec.Status.Terminal()
}

// catchUp returns the next new events in the stream, or an empty batch.
func (t *Tail) catchUp(ctx context.Context) (proto.Events, error) {
	for {
		m, err := t.read(ctx)
		switch {
		case store.IsNotFound(err):
			return proto.Events{}, nil
		case ctx.Err() != nil:
			return proto.Events{}, context.Cause(ctx)
		case err != nil && !isTransient(err):
			return proto.Events{}, fmt.Errorf("read output of %s: %w", t.id, err)
		case err != nil:
			_ = pause(ctx)
			continue
		}
		t.from = m.Seq + 1
		p, err := parse(m.Subject, m.Header, m.Data)
		if err != nil {
			continue
		}
		if b := t.accept(p); len(b.Lines) > 0 {
			return b, nil
		}
	}
}

func (t *Tail) read(ctx context.Context) (*store.Message, error) {
	ctx, cancel := context.WithTimeout(ctx, readTimeout)
	defer cancel()
	end, err := proto.BeginRead(ctx)
	if err != nil {
		return nil, err
	}
	defer end()
	return t.log.Store.Output.Next(ctx, t.from, store.OutputPattern(t.org, t.id), store.WithoutBody)
}

// isTransient reports whether a read may succeed later.
func isTransient(err error) bool {
	if api, ok := errors.AsType[*jetstream.APIError](err); ok {
		return api.Code >= 500
	}
	return !errors.Is(err, nats.ErrConnectionClosed)
}

// accept returns the new events in a message. It drops events that were returned before, that are
// no longer promised, or that follow the end. A reader from the beginning gets the status event
// even if its message was evicted. Missing events are reported by an event in front.
func (t *Tail) accept(p piece) proto.Events {
	if p.attempt < t.attempt {
		return proto.Events{} // from a worker that lost its lease
	}
	t.missed = t.missed || p.attempt > t.attempt && p.first <= t.returned // its numbers were used by an earlier attempt
	t.attempt = p.attempt
	skipTo := t.sent + 1
	if t.late {
		skipTo = max(skipTo, t.rec.ResultSeq-proto.MaxEvents)
	}
	if t.rec.Status.Terminal() {
		p.cutTo(t.rec.ResultSeq - 1)
	}
	p.cutFrom(skipTo)
	if p.last < p.first {
		return proto.Events{}
	}
	var out []proto.Events
	if t.sent < 1 && p.first > 1 {
		out = append(out, proto.Events{First: 1, Last: 1, Lines: proto.AppendStatusEvent(nil, t.id)})
		t.sent = 1
	}
	if p.first > t.sent+1 {
		out = append(out, t.missing(p.first-1))
	}
	out = append(out, proto.Events{First: p.first, Last: p.last, Lines: p.lines})
	t.sent, t.returned = p.last, p.last
	t.next = out[1:]
	return out[0]
}

// missing returns the event that reports that the events up to number last are gone.
func (t *Tail) missing(last int64) proto.Events {
	b := proto.Events{First: t.sent, Last: t.sent, Lines: proto.AppendMissingEvent(nil, t.sent, t.sent+1, last)}
	t.missed, t.sent = true, last
	return b
}

// result returns the result event, whatever number the reader is at.
func (t *Tail) result(ctx context.Context) (proto.Events, error) {
	if t.sent < t.rec.ResultSeq-1 {
		return t.missing(t.rec.ResultSeq - 1), nil
	}
	rec := *t.rec
	for t.partial {
		full, err := t.lookup(ctx)
		switch {
		case err == nil && full.Status.Terminal():
			rec, t.partial = *full, false
		case ctx.Err() != nil:
			return proto.Events{}, context.Cause(ctx)
		case err != nil && (errors.Is(err, proto.ErrNotFound) || !isTransient(err)):
			return proto.Events{}, fmt.Errorf("read the result of %s: %w", t.id, err)
		default:
			_ = pause(ctx)
		}
	}
	rec.OutputTruncated = t.missed // for this reader
	t.ended = true
	return proto.Events{First: rec.ResultSeq, Last: rec.ResultSeq, Result: &rec}, nil
}

// piece is the content of one message.
type piece struct {
	attempt     int
	first, last int64 // events; last is first-1 in a fence without events
	lines       []byte
}

func parse(subject string, h nats.Header, lines []byte) (p piece, err error) {
	if p.attempt, err = store.OutputAttempt(subject); err != nil {
		return p, err
	}
	if h.Get(store.HeaderPacked) != "" {
		if n, err := s2.DecodedLen(lines); err != nil || n > maxUnpacked {
			return p, fmt.Errorf("unpack %d bytes: %w", n, errors.Join(err, proto.ErrConflict))
		}
		if lines, err = s2.Decode(nil, lines); err != nil {
			return p, fmt.Errorf("unpack: %w", err)
		}
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
