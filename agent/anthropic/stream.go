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
	run  *run
	open int // the item whose text has begun, -1 for none
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
	switch e.Kind {
	case agent.EventText:
		if s.open != e.Item {
			s.open = e.Item
			s.Add("content_block_start", blockStart{"content_block_start", e.Item, &textBlock{Type: "text"}})
		}
		s.Add("content_block_delta", blockDelta{"content_block_delta", e.Item, textDelta{"text_delta", e.Text}})
	case agent.EventTextEnd:
		s.Add("content_block_stop", blockStop{"content_block_stop", e.Item})
	case agent.EventThought:
		thought := blockOf(e)
		if block, ok := thought.(*thinkingBlock); ok {
			thought = &thinkingBlock{Type: block.Type}
			s.Add("content_block_start", blockStart{"content_block_start", e.Item, thought})
			s.Add("content_block_delta",
				blockDelta{"content_block_delta", e.Item, thinkingDelta{"thinking_delta", block.Thinking}})
			s.Add("content_block_delta",
				blockDelta{"content_block_delta", e.Item, signatureDelta{"signature_delta", block.Signature}})
		} else {
			s.Add("content_block_start", blockStart{"content_block_start", e.Item, thought})
		}
		s.Add("content_block_stop", blockStop{"content_block_stop", e.Item})
	case agent.EventCall:
		use, arguments := blockOf(e), e.Call.Arguments
		use.(*useBlock).Input = json.RawMessage("{}") //nolint:forcetypeassert // of this kind of event
		s.Add("content_block_start", blockStart{"content_block_start", e.Item, use})
		s.Add("content_block_delta",
			blockDelta{"content_block_delta", e.Item, jsonDelta{"input_json_delta", string(arguments)}})
		s.Add("content_block_stop", blockStop{"content_block_stop", e.Item})
	case agent.EventResult:
		s.Add("content_block_start", blockStart{"content_block_start", e.Item, blockOf(e)})
		s.Add("content_block_stop", blockStop{"content_block_stop", e.Item})
	case agent.EventEnd:
		s.run.finish(e.End, time.Now())
		m := &s.run.message
		s.Add("message_delta", messageDelta{"message_delta", deltaBody{m.StopReason, m.StopSequence, m.Container}, m.Usage})
		s.Add("message_stop", map[string]string{"type": "message_stop"})
	}
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
