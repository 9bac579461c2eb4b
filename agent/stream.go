package agent

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"log/slog"
	"net/http"
	"sync"
	"time"

	"github.com/bullpen-run/bullpen/proto/api"
)

const (
	// pingEvery is how often an idle stream shows that it is alive.
	pingEvery = 10 * time.Second
	// maxSpare is the size of a buffer that a stream keeps, in bytes.
	maxSpare = 8 << 10
)

// Stream is an answer of server-sent events. It begins with the first event, so that an earlier
// error is answered as such. It is a [Log] of a run. Its fields are set before its use.
type Stream struct {
	W http.ResponseWriter
	// Begin, if not nil, adds the first events of the answer.
	Begin func()
	// Ping adds an event that shows that the stream is alive.
	Ping func()
	// Event adds the client's form of an event of the run. It is not called with internal events.
	Event func(ctx context.Context, e Event) error

	mu    sync.Mutex
	begun bool
	out   bytes.Buffer
}

// Serve calls produce, and sends pings until that has returned. The context of produce is done when
// ctx is, or when the client reads no more.
func (s *Stream) Serve(ctx context.Context, produce func(ctx context.Context) error) error {
	ctx, cancel := context.WithCancel(ctx)
	var pings sync.WaitGroup
	defer pings.Wait()
	defer cancel()
	pings.Go(func() {
		ticks := time.NewTicker(pingEvery)
		defer ticks.Stop()
		for {
			select {
			case <-ctx.Done():
				return
			case <-ticks.C:
			}
			if s.Send(func() error { s.Ping(); return nil }) != nil {
				cancel()
				return
			}
		}
	})
	return produce(ctx)
}

// Append implements [Log].
func (s *Stream) Append(ctx context.Context, e Event) error {
	if e.Kind == EventTurn || e.Kind == EventChange {
		return nil
	}
	return s.Send(func() error { return s.Event(ctx, e) })
}

// Fail ends the stream of a run that failed. If the answer has begun, it logs the error and calls
// fail to add the client's error. Otherwise it returns that, and sends nothing.
func (s *Stream) Fail(r *http.Request, log *slog.Logger, run string, err error, fail func(*api.Error) error) error {
	if !s.begun {
		return ClientError(err)
	}
	known := Public(err)
	if r.Context().Err() != nil { // the client has left, or waits at a server that shuts down
		known = api.Unavailable(1, "this server is shutting down; send the request again")
	}
	log.WarnContext(r.Context(), "agent run failed", "run", run, "error", err, "request_id",
		s.W.Header().Get("X-Request-Id"))
	return s.Send(func() error { return fail(known) })
}

// Begun reports whether the answer has begun. It is not called while Serve runs.
func (s *Stream) Begun() bool { return s.begun }

// Send begins the answer if necessary, calls add, and sends the added events. It returns an error
// of add unchanged, and one that is [context.Canceled] if the client no longer reads.
func (s *Stream) Send(add func() error) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if !s.begun {
		s.begun = true
		h := s.W.Header()
		h.Set("Content-Type", "text/event-stream")
		h.Set("Cache-Control", "no-store")
		h.Set("X-Accel-Buffering", "no")
		if s.Begin != nil {
			s.Begin()
		}
	}
	if err := add(); err != nil {
		return err
	}
	_, err := s.W.Write(s.out.Bytes())
	if s.out.Reset(); s.out.Cap() > maxSpare {
		s.out = bytes.Buffer{}
	}
	if err == nil {
		err = http.NewResponseController(s.W).Flush()
	}
	if err != nil {
		return fmt.Errorf("%w: send an event: %w", context.Canceled, err)
	}
	return nil
}

// Add adds an event with the JSON form of data. It is called by functions that Send calls.
func (s *Stream) Add(name string, data any) {
	text, err := json.Marshal(data)
	if err != nil {
		panic(err) // arguments of calls are valid JSON, and everything else is text and numbers
	}
	_, _ = fmt.Fprintf(&s.out, "event: %s\ndata: %s\n\n", name, text) // a buffer has no errors
}

// AddText adds text that is no event. It is called like Add.
func (s *Stream) AddText(text string) { s.out.WriteString(text) }
