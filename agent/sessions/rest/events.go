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
	// keepAlive is the maximum time between two writes to a stream. Some clients drop a stream that
	// is silent for five minutes.
	keepAlive = 15 * time.Second
	// bufferSize is the size of the write buffer of a response, in bytes.
	bufferSize = 32 << 10
)

// view is the form in which a response shows events.
type view struct {
	raw    bool   // includes the agent's own output
	legacy string // the session's agent, for the legacy form; empty for the current form
}

// viewOf returns the view that a query selects. It calls x only for the legacy form, which contains
// the session's agent.
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

// append appends the JSON form of an event to b. It reports whether the view shows the event.
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

// eventsRequest is a request for the events of a session after an offset.
type eventsRequest struct {
	query
	host    Host
	org, id string // of the session
	offset  int64
}

func (s *Server) eventsOf(r *http.Request) (e eventsRequest, err error) {
	if e.host, e.org, e.id, err = s.find(r); err != nil {
		return e, err
	}
	if e.query, err = queryOf(r); err != nil {
		return e, err
	}
	e.offset, err = e.number("offset", 0)
	return e, err
}

func (s *Server) listEvents(w http.ResponseWriter, r *http.Request) error {
	e, err := s.eventsOf(r)
	if err != nil {
		return err
	}
	limit, err := e.number("limit", math.MaxInt64)
	if err != nil {
		return err
	}
	x, err := s.Service.Get(r.Context(), e.org, e.id)
	if err != nil {
		return err
	}
	v, err := viewOf(e.query, func() (*sessions.Session, error) { return x, nil })
	if err != nil {
		return err
	}
	reader, err := s.Service.Read(r.Context(), e.org, e.id, e.offset)
	if err != nil {
		return err
	}
	defer reader.Close()
	list := &eventList{view: v, limit: limit, out: bufio.NewWriterSize(&jsonAnswer{w: w}, bufferSize)}
	for last := e.offset; last < x.Sequence && !list.more; { // later events are for the next request
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
		e.host.ReleaseMemory()
	}
	return list.end()
}

// jsonAnswer sets the headers of a response at the first byte, so that an earlier error can still
// become the response.
type jsonAnswer struct {
	w       http.ResponseWriter
	started bool
}

// Write implements [io.Writer].
func (a *jsonAnswer) Write(p []byte) (int, error) {
	if !a.started {
		a.started = true
		a.w.Header().Set("Content-Type", "application/json")
		a.w.Header().Set("Cache-Control", "no-store")
	}
	return a.w.Write(p)
}

// eventList writes a list of events as they are read.
type eventList struct {
	view
	limit int64
	out   *bufio.Writer
	event bytes.Buffer
	count int64
	more  bool // whether there are events beyond the limit
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

// streamEvents sends the events of a session and continues with new ones.
func (s *Server) streamEvents(w http.ResponseWriter, r *http.Request) error {
	e, err := s.eventsOf(r)
	if err != nil {
		return err
	}
	if last := r.Header.Get("Last-Event-ID"); last != "" { // reconnecting clients repeat the old offset
		n, err := strconv.ParseInt(last, 10, 64)
		if err != nil || n < 0 {
			return sessions.Invalidf("Last-Event-ID must be a positive integer")
		}
		e.offset = n
	}
	v, err := viewOf(e.query, func() (*sessions.Session, error) { return s.Service.Get(r.Context(), e.org, e.id) })
	if err != nil {
		return err
	}
	reader, err := s.Service.Read(r.Context(), e.org, e.id, e.offset)
	if err != nil {
		return err
	}
	defer reader.Close()
	f := &follower{view: v, w: w, host: e.host, reader: reader}
	f.begin()
	ctx, cancel := e.host.UntilDrain(r.Context())
	defer cancel()
	err = f.follow(ctx, func(e *sessions.Entry) (events []sessions.Event, last bool) { return e.Events, false })
	if err != nil { // clients reconnect after a clean end, but not after a broken connection
		s.Log.WarnContext(r.Context(), "stream of a session ended", "session", e.id, "org", e.org, "error", err)
	}
	return nil
}

// streamMessage sends a message. It streams the events of the turn up to its end, or up to the
// first event that the client must react to.
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
	host.ReleaseMemory() // of the body, because a turn may take long
	f := &follower{view: view{raw: raw}, w: w, host: host, reader: reader}
	f.begin()
	return f.follow(r.Context(), func(e *sessions.Entry) (events []sessions.Event, last bool) {
		return turnEvents(e, sent.Number)
	})
}

// turnEvents returns the events of an entry that belong to the stream of a turn, and whether the
// stream ends with them.
func turnEvents(e *sessions.Entry, number int64) (events []sessions.Event, last bool) {
	if e.Turn != number {
		// A terminated session never starts the turn.
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

// follower streams the events of a reader as they are stored.
type follower struct {
	view
	w      http.ResponseWriter
	host   Host
	reader *sessions.Reader

	out     bytes.Buffer
	event   bytes.Buffer
	checked time.Time // when the API key was checked last
}

// begin sends the headers.
func (f *follower) begin() {
	h := f.w.Header()
	h.Set("Content-Type", "text/event-stream")
	h.Set("Cache-Control", "no-cache")
	h.Set("X-Accel-Buffering", "no")
	f.w.WriteHeader(http.StatusOK)
	_ = http.NewResponseController(f.w).Flush() // the next write has the error
	f.checked = time.Now()
}

// follow sends the events that pick selects from each entry, until pick reports the last ones. It
// returns nil if the client disconnects, the server drains or the session is removed.
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

// allowed reports whether the API key is still valid. It checks at most once per keepAlive.
func (f *follower) allowed() bool {
	if time.Since(f.checked) < keepAlive {
		return true
	}
	f.checked = time.Now()
	return f.host.CheckCaller() == nil
}

// next blocks until there is an entry. It returns nil after keepAlive.
func (f *follower) next(ctx context.Context) (*sessions.Entry, error) {
	limited, cancel := context.WithTimeout(ctx, keepAlive)
	defer cancel()
	entry, err := f.reader.Next(limited, true)
	if ctx.Err() == nil && limited.Err() != nil {
		return entry, nil
	}
	return entry, err
}

// isOver reports whether a stream ends without an error: the client disconnected, the server drains
// or the session was removed.
func isOver(ctx context.Context, err error) bool {
	_, removed := errors.AsType[*sessions.Error](err)
	return removed || ctx.Err() != nil
}

// encode replaces the content of out by events.
func (f *follower) encode(events []sessions.Event) error {
	if f.out.Reset(); f.out.Cap() > bufferSize { // do not keep a large buffer for a long stream
		f.out = bytes.Buffer{}
	}
	for i := range events {
		f.event.Reset()
		shown, err := f.append(&f.event, &events[i])
		if err != nil {
			return err
		}
		if shown {
			_, _ = fmt.Fprintf(&f.out, "id: %d\ndata: %s\n\n", events[i].Sequence, f.event.Bytes()) // to a buffer
		}
	}
	if f.event.Cap() > bufferSize { // the client may be slow
		f.event = bytes.Buffer{}
	}
	return nil
}

// send writes and flushes a text. It reports whether the client is still connected.
func (f *follower) send(text []byte) bool {
	_, err := f.w.Write(text)
	if err == nil {
		err = http.NewResponseController(f.w).Flush()
	}
	return err == nil
}
