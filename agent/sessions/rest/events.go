package rest

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"net/http"
	"strconv"
	"time"

	"github.com/bullpen-run/bullpen/agent/sessions"
)

const (
	// keepAlive is the longest silence of a stream. Some clients drop a silent one after five
	// minutes.
	keepAlive = 15 * time.Second
	// bufferSize is the size of the buffer of a list of events, in bytes.
	bufferSize = 32 << 10
)

// view is the form of events.
type view struct {
	raw    bool   // with the agent's own output
	legacy string // the agent of the session, for the form of A11; empty for the form of events
}

// viewOf returns the form of events that a request asks for. A view of legacy events needs the
// session's agent.
func viewOf(q query, x func() (*sessions.Session, error)) (v view, err error) {
	if v.raw, err = q.flag("includeRaw", "include_raw"); err != nil {
		return v, err
	}
	switch schema, ok := q.get("schema"); {
	case !ok:
		return v, nil
	case schema != "legacy":
		return v, badQuery("schema: unknown variant, expected `legacy`")
	}
	session, err := x()
	if err != nil {
		return v, err
	}
	v.legacy = session.Agent
	return v, nil
}

// append appends the JSON form of an event to b. It reports whether the view has the event.
func (v *view) append(b *bytes.Buffer, e *sessions.Event) (shown bool, err error) {
	var form any = e
	if v.legacy != "" {
		if form, err = v.legacyForm(e); err != nil || form == nil {
			return false, err
		}
	} else if !v.raw {
		e.Raw = nil
	}
	enc := json.NewEncoder(b)
	enc.SetEscapeHTML(false)
	if err := enc.Encode(form); err != nil {
		return false, fmt.Errorf("encode event %d: %w", e.Sequence, err)
	}
	b.Truncate(b.Len() - 1) // the line break
	return true, nil
}

func (s *Server) listEvents(w http.ResponseWriter, r *http.Request) error {
	host, org, id, err := s.find(r)
	if err != nil {
		return err
	}
	q, err := queryOf(r)
	if err != nil {
		return err
	}
	offset, err := q.number("offset", 0)
	if err != nil {
		return err
	}
	limit, err := q.number("limit", math.MaxInt64)
	if err != nil {
		return err
	}
	x, err := s.Service.Get(r.Context(), org, id)
	if err != nil {
		return err
	}
	v, err := viewOf(q, func() (*sessions.Session, error) { return x, nil })
	if err != nil {
		return err
	}
	reader, err := s.Service.Read(r.Context(), org, id, offset)
	if err != nil {
		return err
	}
	defer reader.Close()
	list := &eventList{view: v, limit: limit, out: bufio.NewWriterSize(&jsonAnswer{w: w}, bufferSize)}
	for last := offset; last < x.Sequence && !list.more; { // events that are added meanwhile are for the next request
		entry, err := reader.Next(r.Context(), false)
		if err != nil {
			return err
		}
		if entry == nil {
			break
		}
		if err := list.add(entry.Events); err != nil {
			return err
		}
		last = entry.State.Sequence
		host.ReleaseMemory()
	}
	return list.end()
}

// jsonAnswer begins an answer at its first byte, so that an error before can be answered.
type jsonAnswer struct {
	w     http.ResponseWriter
	begun bool
}

// Write implements [io.Writer].
func (a *jsonAnswer) Write(p []byte) (int, error) {
	if !a.begun {
		a.begun = true
		a.w.Header().Set("Content-Type", "application/json")
		a.w.Header().Set("Cache-Control", "no-store")
	}
	return a.w.Write(p)
}

// eventList writes an answer with a list of events while they are read.
type eventList struct {
	view
	limit int64
	out   *bufio.Writer
	event bytes.Buffer
	count int64
	more  bool // there are events beyond the limit
}

const listStart = `{"events":[`

func (l *eventList) add(events []sessions.Event) error {
	for i := range events {
		l.event.Reset()
		shown, err := l.append(&l.event, &events[i])
		if err != nil {
			return err
		}
		if !shown {
			continue
		}
		if l.count == l.limit {
			l.more = true
			return nil
		}
		separator := listStart
		if l.count > 0 {
			separator = ","
		}
		l.count++
		if _, err := l.out.WriteString(separator); err != nil {
			return err
		}
		if _, err := l.out.Write(l.event.Bytes()); err != nil {
			return err
		}
	}
	return nil
}

func (l *eventList) end() error {
	start := ""
	if l.count == 0 {
		start = listStart
	}
	_, _ = fmt.Fprintf(l.out, `%s],"hasMore":%t}`, start, l.more) // Flush returns the error
	return l.out.Flush()
}

// streamEvents sends the events of a session, and then further ones.
func (s *Server) streamEvents(w http.ResponseWriter, r *http.Request) error {
	host, org, id, err := s.find(r)
	if err != nil {
		return err
	}
	q, err := queryOf(r)
	if err != nil {
		return err
	}
	offset, err := q.number("offset", 0)
	if err != nil {
		return err
	}
	if last := r.Header.Get("Last-Event-ID"); last != "" { // a client that comes back repeats the query
		n, err := strconv.ParseInt(last, 10, 64)
		if err != nil || n < 0 {
			return sessions.Invalidf("Last-Event-ID must be a positive integer")
		}
		offset = n
	}
	v, err := viewOf(q, func() (*sessions.Session, error) { return s.Service.Get(r.Context(), org, id) })
	if err != nil {
		return err
	}
	reader, err := s.Service.Read(r.Context(), org, id, offset)
	if err != nil {
		return err
	}
	defer reader.Close()
	f := &follower{view: v, w: w, host: host, reader: reader}
	f.begin()
	ctx, cancel := host.UntilDrain(r.Context())
	defer cancel()
	err = f.follow(ctx, func(e *sessions.Entry) (events []sessions.Event, last bool) { return e.Events, false })
	if err != nil { // the end of a stream makes clients come back, and a connection that breaks off does not
		s.Log.WarnContext(r.Context(), "stream of a session ended", "session", id, "org", org, "error", err)
	}
	return nil
}

// streamMessage sends a message, and the events of its turn up to the first after which the client
// must act.
func (s *Server) streamMessage(w http.ResponseWriter, r *http.Request) error {
	q, err := queryOf(r)
	if err != nil {
		return err
	}
	raw, err := q.flag("includeRaw", "include_raw")
	if err != nil {
		return err
	}
	_, org, id, err := s.find(r)
	if err != nil {
		return err
	}
	host, sent, err := s.send(w, r)
	if err != nil {
		return err
	}
	reader := s.Service.ReadTurn(org, id, sent)
	defer reader.Close()
	host.ReleaseMemory() // of the body: a turn may take long
	f := &follower{view: view{raw: raw}, w: w, host: host, reader: reader}
	f.begin()
	return f.follow(r.Context(), func(e *sessions.Entry) (events []sessions.Event, last bool) {
		return turn(e, sent.Number)
	})
}

// turn returns the events of an entry that the stream of a turn has, and whether the stream ends
// with them.
func turn(e *sessions.Entry, number int64) (events []sessions.Event, last bool) {
	if e.Turn != number {
		// A session that was terminated does not begin the turn.
		if e.State.Ended != sessions.EndTerminated {
			return nil, false
		}
		for i := range e.Events {
			if e.Events[i].Type == sessions.SessionEnded {
				return e.Events[i : i+1], true
			}
		}
		return nil, true
	}
	for i := range e.Events {
		if e.Events[i].EndsTurn() {
			return e.Events[:i+1], true
		}
	}
	return e.Events, false
}

// follower sends the events of a reader as they are added.
type follower struct {
	view
	w      http.ResponseWriter
	host   Host
	reader *sessions.Reader

	out     bytes.Buffer
	event   bytes.Buffer
	checked time.Time // when the caller was checked
}

// begin begins the answer.
func (f *follower) begin() {
	h := f.w.Header()
	h.Set("Content-Type", "text/event-stream")
	h.Set("Cache-Control", "no-cache")
	h.Set("X-Accel-Buffering", "no")
	f.w.WriteHeader(http.StatusOK)
	_ = http.NewResponseController(f.w).Flush() // the next write has the error
	f.checked = time.Now()
}

// follow sends the events that pick returns of each entry, until it reports the last ones. It
// returns nil if the client or this server leaves, or the session was removed.
func (f *follower) follow(ctx context.Context, pick func(*sessions.Entry) ([]sessions.Event, bool)) error {
	for {
		if !f.allowed() {
			return nil
		}
		entry, err := f.next(ctx)
		switch {
		case isOver(ctx, err):
			return nil
		case err != nil:
			return err
		case entry == nil && f.send([]byte(": keep-alive\n\n")):
			continue
		case entry == nil:
			return nil
		}
		events, last := pick(entry)
		if err := f.encode(events); err != nil {
			return err
		}
		if f.out.Len() > 0 && !f.send(f.out.Bytes()) || last {
			return nil
		}
		f.host.ReleaseMemory()
	}
}

// allowed reports whether the API key is still valid. It looks from time to time.
func (f *follower) allowed() bool {
	if time.Since(f.checked) < keepAlive {
		return true
	}
	f.checked = time.Now()
	return f.host.CheckCaller() == nil
}

// next waits for the next entry. It returns nil after the time of keepAlive.
func (f *follower) next(ctx context.Context) (*sessions.Entry, error) {
	limited, cancel := context.WithTimeout(ctx, keepAlive)
	defer cancel()
	entry, err := f.reader.Next(limited, true)
	if ctx.Err() == nil && limited.Err() != nil {
		return entry, nil
	}
	return entry, err
}

// isOver reports whether a stream ends because its client or this server leaves, or because the
// session was removed.
func isOver(ctx context.Context, err error) bool {
	_, removed := errors.AsType[*sessions.Error](err)
	return removed || ctx.Err() != nil
}

// encode puts events into out.
func (f *follower) encode(events []sessions.Event) error {
	if f.out.Reset(); f.out.Cap() > bufferSize { // a slow stream needs only a small one
		f.out = bytes.Buffer{}
	}
	for i := range events {
		f.event.Reset()
		shown, err := f.append(&f.event, &events[i])
		if err != nil {
			return err
		}
		if shown {
			_, _ = fmt.Fprintf(&f.out, "id: %d\ndata: %s\n\n", events[i].Sequence, f.event.Bytes()) // a buffer has no errors
		}
	}
	if f.event.Cap() > bufferSize { // the client may be slow
		f.event = bytes.Buffer{}
	}
	return nil
}

// send sends a text. It reports whether the client is still there.
func (f *follower) send(text []byte) bool {
	_, err := f.w.Write(text)
	if err == nil {
		err = http.NewResponseController(f.w).Flush()
	}
	return err == nil
}
