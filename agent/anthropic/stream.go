package anthropic

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
	run *run

	mu    sync.Mutex
	w     http.ResponseWriter
	begun bool
	open  int // the item whose text has begun, -1 for none
	out   bytes.Buffer
}

// stream answers with the events of a run.
func (s *Server) stream(w http.ResponseWriter, r *http.Request, run *run) error {
	out := &streamer{run: run, w: w, open: -1}
	ctx, cancel := context.WithCancel(r.Context())
	var pings sync.WaitGroup
	pings.Go(func() { out.ping(ctx, cancel) })
	err := agent.Continue(ctx, s.Upstream, &run.Run, out)
	cancel()
	pings.Wait()
	if err == nil || !out.begun {
		return agent.ClientError(err)
	}
	known := agent.Public(err)
	if r.Context().Err() != nil { // the client has left, or waits at a server that shuts down
		known = api.Unavailable(1, "this server is shutting down; send the request again")
	}
	s.Log.WarnContext(ctx, "agent run failed", "run", run.message.ID, "error", err, "request_id", w.Header().Get("X-Request-Id"))
	_, kind := statusOf(known)
	return out.send("error", &errorBody{Type: "error", Error: errorDetail{Type: kind, Message: known.Message}, RequestID: w.Header().Get("X-Request-Id")})
}

// ping sends pings until ctx is done. It calls gone if the client does not read any more.
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
		err := s.begin()
		if err == nil {
			err = s.send("ping", map[string]string{"type": "ping"})
		}
		s.mu.Unlock()
		if err != nil {
			gone()
			return
		}
	}
}

// Append implements [agent.Log].
func (s *streamer) Append(_ context.Context, e agent.Event) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if err := s.begin(); err != nil {
		return err
	}
	switch e.Kind {
	case agent.EventText:
		if s.open != e.Item {
			s.open = e.Item
			s.add("content_block_start", blockStart{"content_block_start", e.Item, &textBlock{Type: "text"}})
		}
		s.add("content_block_delta", blockDelta{"content_block_delta", e.Item, textDelta{"text_delta", e.Text}})
	case agent.EventTextEnd:
		s.add("content_block_stop", blockStop{"content_block_stop", e.Item})
	case agent.EventCall:
		use, arguments := blockOf(&e), e.Call.Arguments
		use.(*useBlock).Input = json.RawMessage("{}") //nolint:forcetypeassert // of this kind of event
		s.add("content_block_start", blockStart{"content_block_start", e.Item, use})
		s.add("content_block_delta", blockDelta{"content_block_delta", e.Item, jsonDelta{"input_json_delta", string(arguments)}})
		s.add("content_block_stop", blockStop{"content_block_stop", e.Item})
	case agent.EventResult:
		s.add("content_block_start", blockStart{"content_block_start", e.Item, blockOf(&e)})
		s.add("content_block_stop", blockStop{"content_block_stop", e.Item})
	case agent.EventEnd:
		s.run.finish(e.End)
		m := &s.run.message
		s.add("message_delta", messageDelta{"message_delta", deltaBody{m.StopReason, m.StopSequence, m.Container}, m.Usage})
		s.add("message_stop", map[string]string{"type": "message_stop"})
	}
	return s.flush()
}

// Events.
type (
	messageStart struct {
		Type    string   `json:"type"`
		Message *message `json:"message"`
	}
	blockStart struct {
		Type         string `json:"type"`
		Index        int    `json:"index"`
		ContentBlock any    `json:"content_block"`
	}
	blockDelta struct {
		Type  string `json:"type"`
		Index int    `json:"index"`
		Delta any    `json:"delta"`
	}
	blockStop struct {
		Type  string `json:"type"`
		Index int    `json:"index"`
	}
	textDelta struct {
		Type string `json:"type"`
		Text string `json:"text"`
	}
	jsonDelta struct {
		Type        string `json:"type"`
		PartialJSON string `json:"partial_json"`
	}
	messageDelta struct {
		Type  string    `json:"type"`
		Delta deltaBody `json:"delta"`
		Usage usageBody `json:"usage"`
	}
	deltaBody struct {
		StopReason   *string        `json:"stop_reason"`
		StopSequence *string        `json:"stop_sequence"`
		Container    *containerBody `json:"container"`
	}
)

// begin begins the answer, if that has not begun.
func (s *streamer) begin() error {
	if s.begun {
		return nil
	}
	s.begun = true
	h := s.w.Header()
	h.Set(requestIDHeader, h.Get("X-Request-Id"))
	h.Set("Content-Type", "text/event-stream")
	h.Set("Cache-Control", "no-store")
	h.Set("X-Accel-Buffering", "no")
	return s.send("message_start", messageStart{"message_start", &s.run.message})
}

// add adds an event to what the next flush sends.
func (s *streamer) add(name string, data any) {
	text, err := json.Marshal(data)
	if err != nil {
		panic(err) // arguments of calls are valid JSON, and all else is text and numbers
	}
	_, _ = fmt.Fprintf(&s.out, "event: %s\ndata: %s\n\n", name, text) // a buffer has no errors
}

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

// maxSpare is the size of a buffer that a stream keeps, in bytes.
const maxSpare = 8 << 10

// send sends an event at once.
func (s *streamer) send(name string, data any) error {
	s.add(name, data)
	return s.flush()
}
