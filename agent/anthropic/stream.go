package anthropic

import (
	"context"
	"encoding/json"
	"net/http"
	"time"

	"github.com/bullpen-run/bullpen/agent"
	"github.com/bullpen-run/bullpen/proto/api"
)

// streamer makes an answer of server-sent events.
type streamer struct {
	agent.Stream
	run    *run
	open   int // the item that has begun, -1 for none
	hidden int // items that the client does not see
}

// stream answers with the events of a run.
func (s *Server) stream(w http.ResponseWriter, r *http.Request, run *run) error {
	out := &streamer{run: run, open: -1}
	out.W = w
	out.Begin = func() { out.Add("message_start", messageStart{"message_start", &run.message}) }
	out.Ping = func() { out.Add("ping", map[string]string{"type": "ping"}) }
	out.Event = func(_ context.Context, e agent.Event) error { out.add(&e); return nil }
	w.Header().Set(requestIDHeader, w.Header().Get("X-Request-Id"))
	err := out.Serve(r.Context(), func(ctx context.Context) error {
		return agent.Continue(ctx, s.Upstream, &run.Run, out)
	})
	if err == nil {
		return nil
	}
	return out.Fail(r, s.Log, run.message.ID, err, func(known *api.Error) error {
		_, kind := statusOf(known)
		detail := errorDetail{Type: kind, Message: known.Message}
		out.Add("error", &errorBody{Type: "error", Error: detail, RequestID: w.Header().Get("X-Request-Id")})
		return nil
	})
}

func (s *streamer) add(e *agent.Event) {
	at := e.Item - s.hidden
	switch e.Kind {
	case agent.EventText:
		s.begin(at, &textBlock{Type: "text"})
		s.delta(at, textDelta{"text_delta", e.Text})
	case agent.EventTextEnd:
		s.end(at)
	case agent.EventThinking:
		if s.run.thinks {
			s.begin(at, &thinkingBlock{Type: "thinking"})
			s.delta(at, thinkingDelta{"thinking_delta", e.Text})
		}
	case agent.EventThought:
		s.thought(at, e)
	case agent.EventCallPart:
		s.begin(at, blockOf(&agent.Event{Kind: agent.EventCall, Call: e.Call}))
		s.delta(at, jsonDelta{"input_json_delta", e.Text})
	case agent.EventCall:
		if s.open != at {
			use, arguments := blockOf(e), e.Call.Arguments
			use.(*useBlock).Input = json.RawMessage("{}") //nolint:forcetypeassert // of this kind of event
			s.begin(at, use)
			s.delta(at, jsonDelta{"input_json_delta", string(arguments)})
		}
		s.end(at)
	case agent.EventResult:
		s.begin(at, blockOf(e))
		s.end(at)
	case agent.EventEnd:
		if s.open >= 0 { // a call that was cut off
			s.end(s.open)
		}
		s.run.finish(e.End, time.Now())
		m := &s.run.message
		s.Add("message_delta", messageDelta{"message_delta", deltaBody{m.StopReason, m.StopSequence, m.Container}, m.Usage})
		s.Add("message_stop", map[string]string{"type": "message_stop"})
	}
}

// thought adds a thinking block, or what is missing of it.
func (s *streamer) thought(at int, e *agent.Event) {
	if !s.run.thinks {
		s.hidden++
		return
	}
	block, ok := blockOf(e).(*thinkingBlock)
	switch {
	case !ok: // it is redacted
		s.begin(at, blockOf(e))
	case s.open != at:
		s.begin(at, &thinkingBlock{Type: block.Type})
		s.delta(at, thinkingDelta{"thinking_delta", block.Thinking})
		fallthrough
	default:
		s.delta(at, signatureDelta{"signature_delta", block.Signature})
	}
	s.end(at)
}

// begin begins a block, unless it has begun.
func (s *streamer) begin(at int, block any) {
	if s.open != at {
		s.open = at
		s.Add("content_block_start", blockStart{"content_block_start", at, block})
	}
}

func (s *streamer) delta(at int, delta any) {
	s.Add("content_block_delta", blockDelta{"content_block_delta", at, delta})
}

func (s *streamer) end(at int) {
	s.open = -1
	s.Add("content_block_stop", blockStop{"content_block_stop", at})
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
	thinkingDelta struct {
		Type     string `json:"type"`
		Thinking string `json:"thinking"`
	}
	signatureDelta struct {
		Type      string `json:"type"`
		Signature string `json:"signature"`
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
