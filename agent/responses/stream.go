package responses

import (
	"context"
	"net/http"

	"github.com/bullpen-run/bullpen/agent"
	"github.com/bullpen-run/bullpen/proto/api"
)

// streamer makes an answer of server-sent events.
type streamer struct {
	agent.Stream
	encoder *encoder
	after   int // events up to this number are left out
}

// newStream returns an answer with the events of an encoder.
func newStream(w http.ResponseWriter, out *encoder) *streamer {
	s := &streamer{encoder: out, after: -1}
	s.W, s.Begin, s.Ping = w, out.begin, func() { s.AddText(": ping\n\n") }
	out.send = func(e event) error {
		if e["sequence_number"].(int) > s.after { //nolint:forcetypeassert // the encoder sets it
			s.Add(e["type"].(string), e) //nolint:forcetypeassert // the encoder sets it
		}
		return nil
	}
	return s
}

// Append implements [agent.Log].
func (s *streamer) Append(ctx context.Context, e agent.Event) error {
	if e.Kind == agent.EventTurn || e.Kind == agent.EventChange {
		return nil
	}
	return s.Send(func() error { return s.encoder.Append(ctx, e) })
}

// finishStream ends the stream of a run, with an error unless err is nil. An error before the first
// event is returned.
func (s *Server) finishStream(r *http.Request, stream *streamer, id string, err error) error {
	if err != nil && !stream.Begun() {
		return agent.ClientError(err)
	}
	return stream.Send(func() error {
		if err != nil {
			known := agent.Public(err)
			if r.Context().Err() != nil { // the client has left, or waits at a server that shuts down
				known = api.Unavailable(1, "this server is shutting down; send the request again")
			}
			s.Log.WarnContext(r.Context(), "agent run failed", "run", id, "error", err, "request_id", stream.W.Header().Get("X-Request-Id"))
			stream.encoder.fail(known)
		}
		if stream.encoder.vendor == perplexity {
			stream.AddText("data: [DONE]\n\n")
		}
		return stream.encoder.err
	})
}
