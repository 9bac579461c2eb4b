package acp

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"strconv"
	"time"

	"github.com/bullpen-run/bullpen/agent/sessions"
	"github.com/bullpen-run/bullpen/proto"
)

// keepalive is the interval of comments on an idle stream. Clients drop a stream that is silent for
// five minutes.
const keepalive = 15 * time.Second

// drainingStream is the maximum duration of a stream that starts while this gateway shuts down.
const drainingStream = 2 * time.Second

// stream sends a server's messages after the last one the client has seen, as server-sent events.
// It ends between two messages when this gateway begins to shut down. Clients then reconnect to
// another.
func (s *Server) stream(w http.ResponseWriter, r *http.Request) error {
	id, err := serverID(r)
	if err != nil {
		return err
	}
	if !accepts(r, "text", "event-stream") {
		return invalid(w, http.StatusNotAcceptable, "the Accept header must allow text/event-stream")
	}
	last, err := lastEventID(r)
	if err != nil {
		return invalid(w, http.StatusBadRequest, err.Error())
	}
	host := s.Host(r)
	org, _ := host.Caller()
	open, end := host.UntilDrain(r.Context())
	defer end()
	if open.Err() != nil { // do not end at once: the client may reconnect here repeatedly
		open, end = context.WithTimeout(r.Context(), drainingStream)
		defer end()
	}
	release := s.project(r.Context(), host, id)
	defer release()
	h := w.Header()
	h.Set("Content-Type", "text/event-stream")
	h.Set("Cache-Control", "no-store")
	h.Set("X-Accel-Buffering", "no")
	ctx, cancel := context.WithCancel(open)
	events := make(chan found)
	go func() {
		defer close(events)
		s.read(ctx, host, &serverLog{logs: s.Logs, org: org, id: logID(id)}, last, events)
	}()
	defer func() {
		cancel()
		for e := range events { // wait for the goroutine to end
			e.release()
		}
	}()
	return send(ctx, w, host, events)
}

// lastEventID returns the number of the last message the client has seen; -1 if the header is
// missing.
func lastEventID(r *http.Request) (int64, error) {
	text := r.Header.Get("Last-Event-ID")
	if text == "" {
		return -1, nil
	}
	n, err := strconv.ParseUint(text, 10, 63)
	if err != nil {
		return 0, errors.New("Last-Event-ID must be a positive integer")
	}
	return int64(n), nil
}

// found are encoded events that were read. release releases their memory.
type found struct {
	text    []byte
	release func()
}

// send sends events until ctx is done, the client disconnects, its API key is invalid, or events is
// closed. It sends comments while there are no events.
func send(ctx context.Context, w http.ResponseWriter, host Host, events <-chan found) error {
	control := http.NewResponseController(w)
	ticks := time.NewTicker(keepalive)
	defer ticks.Stop()
	checked := time.Now()
	comment := func(text string) found { return found{[]byte(text), func() {}} }
	for next, more := comment(": connected\n\n"), true; more; {
		if time.Since(checked) >= keepalive {
			if host.CheckCaller() != nil {
				next.release()
				return nil
			}
			checked = time.Now()
		}
		_, err := w.Write(next.text)
		if err == nil {
			err = control.Flush()
		}
		if next.release(); err != nil {
			return nil // the client has disconnected
		}
		ticks.Reset(keepalive)
		select {
		case <-ctx.Done():
			return nil
		case <-ticks.C:
			next = comment(": keep-alive\n\n")
		case next, more = <-events:
		}
	}
	return nil
}

// read sends the messages after number last to events, until ctx is done or the log is removed. It
// retries errors of the store, because clients do not reconnect after an error.
func (s *Server) read(ctx context.Context, host Host, l *serverLog, last int64, events chan<- found) {
	var follower sessions.Follower
	defer func() {
		if follower != nil {
			follower.Close()
		}
	}()
	var after uint64
	for ctx.Err() == nil {
		limited, release := host.LimitReads(ctx)
		var err error
		if follower == nil {
			if last, after, err = l.begin(limited, last); err == nil {
				follower, err = s.Logs.Follow(l.org, l.id)
			}
		}
		var text []byte
		if err == nil {
			text, after, err = next(limited, follower, after, &last)
		}
		if err == nil && len(text) > 0 {
			select {
			case events <- found{text, release}:
				continue
			case <-ctx.Done():
			}
		}
		switch release(); {
		case errors.Is(err, proto.ErrNotFound):
			return
		case err != nil:
			s.logStore(ctx, "messages not read", l, err)
			pause(ctx)
		}
	}
}

// begin returns the number of the message after which a stream starts, and the number of an entry
// before the stream's first message.
func (l *serverLog) begin(ctx context.Context, last int64) (int64, uint64, error) {
	// The server may not exist yet: clients open the stream before their first message is answered.
	if err := l.load(ctx); err != nil {
		return last, 0, err
	}
	from := last
	if last < 0 || last > l.state.Number { // the client has seen nothing of this server
		from = max(l.state.First-1, 0)
	}
	after, err := l.seek(ctx, from)
	if err != nil {
		return last, 0, err
	}
	return from, after, nil
}

// next returns the messages of the entry after number after, encoded as events, and the entry's
// number. It skips messages up to number *last and updates *last.
func next(ctx context.Context, follower sessions.Follower, after uint64, last *int64) (
	text []byte, at uint64, err error,
) {
	message, at, err := follower.Next(ctx, after)
	if err != nil {
		return nil, after, err
	}
	e, err := decodeEntry(message)
	if err != nil {
		return nil, after, err
	}
	for i, m := range e.Messages {
		if n := e.first() + int64(i); n > *last {
			text = fmt.Appendf(text, "event: message\nid: %d\ndata: %s\n\n", n, m.Data)
			*last = n
		}
	}
	return text, at, nil
}

// logStore logs an error of the store.
func (s *Server) logStore(ctx context.Context, what string, l *serverLog, err error) {
	if ctx.Err() == nil {
		s.Log.WarnContext(ctx, "agent client protocol: "+what, "org", l.org, "log", l.id, "error", err)
	}
}
