package responses

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"sync"
	"time"

	"github.com/bullpen-run/bullpen/agent"
	"github.com/bullpen-run/bullpen/proto/api"
)

// pingEvery is how often a stream without events shows that it is alive.
const pingEvery = 10 * time.Second

// streamer makes an answer of server-sent events. The answer begins with the first event, so that an
// error before it is answered as such.
type streamer struct {
	*encoder
	mu    sync.Mutex
	w     http.ResponseWriter
	begun bool
	out   bytes.Buffer
}

// stream answers with the events of a run.
func (s *Server) stream(w http.ResponseWriter, r *http.Request, run *run) error {
	out := &streamer{encoder: newEncoder(run), w: w}
	out.send = out.add
	ctx, cancel := context.WithCancel(r.Context())
	var pings sync.WaitGroup
	pings.Go(func() { out.ping(ctx, cancel) })
	err := agent.Continue(ctx, s.Upstream, &run.Run, out)
	cancel()
	pings.Wait()
	if err != nil && !out.begun {
		return agent.ClientError(err)
	}
	if err != nil {
		known := agent.Public(err)
		if r.Context().Err() != nil { // the client has left, or waits at a server that shuts down
			known = api.Unavailable(1, "this server is shutting down; send the request again")
		}
		s.Log.WarnContext(ctx, "agent run failed", "run", run.response.ID, "error", err, "request_id", w.Header().Get("X-Request-Id"))
		out.fail(known)
	}
	if run.vendor == perplexity {
		out.out.WriteString("data: [DONE]\n\n")
	}
	return out.flush()
}

// ping sends comments until ctx is done. It calls gone if the client does not read any more.
func (s *streamer) ping(ctx context.Context, gone func()) {
	ticks := time.NewTicker(pingEvery)
	defer ticks.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-ticks.C:
		}
		s.mu.Lock()
		s.start()
		s.out.WriteString(": ping\n\n")
		err := s.flush()
		s.mu.Unlock()
		if err != nil {
			gone()
			return
		}
	}
}

// Append implements [agent.Log].
func (s *streamer) Append(ctx context.Context, e agent.Event) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.start()
	if err := s.encoder.Append(ctx, e); err != nil {
		return err
	}
	return s.flush()
}

// start begins the answer, if that has not begun.
func (s *streamer) start() {
	if s.begun {
		return
	}
	s.begun = true
	h := s.w.Header()
	h.Set("Content-Type", "text/event-stream")
	h.Set("Cache-Control", "no-store")
	h.Set("X-Accel-Buffering", "no")
	s.begin()
}

// add adds an event to what the next flush sends.
func (s *streamer) add(e event) error {
	text, err := json.Marshal(e)
	if err != nil {
		return fmt.Errorf("encode an event: %w", err)
	}
	_, _ = fmt.Fprintf(&s.out, "event: %s\ndata: %s\n\n", e["type"], text) // a buffer has no errors
	return nil
}

// maxSpare is the size of a buffer that a stream keeps, in bytes.
const maxSpare = 8 << 10

// flush sends the events that were added.
func (s *streamer) flush() error {
	_, err := s.w.Write(s.out.Bytes())
	if s.out.Reset(); s.out.Cap() > maxSpare {
		s.out = bytes.Buffer{}
	}
	if err == nil {
		err = http.NewResponseController(s.w).Flush()
	}
	if err != nil {
		return fmt.Errorf("%w: send an event: %w", context.Canceled, err)
	}
	return nil
}
