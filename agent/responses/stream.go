package responses

import (
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
	s.W, s.Begin, s.Ping, s.Event = w, out.begin, func() { s.AddText(": ping\n\n") }, out.Append
	out.send = func(e event) error {
		if e["sequence_number"].(int) > s.after { //nolint:forcetypeassert // the encoder sets it
			s.Add(e["type"].(string), e) //nolint:forcetypeassert // the encoder sets it
		}
		return nil
	}
	return s
}

// finishStream ends the stream of a run, with an error unless err is nil. An error before the first
// event is returned.
func (s *Server) finishStream(r *http.Request, stream *streamer, id string, err error) error {
	end := func() error {
		if stream.encoder.vendor == perplexity {
			stream.AddText("data: [DONE]\n\n")
		}
		return stream.encoder.err
	}
	if err == nil {
		return stream.Send(end)
	}
	tooLong := agent.Public(err)
	if stream.encoder.codex && tooLong.Reason == api.ReasonTooLong && !stream.Begun() {
		return stream.Send(func() error { // in a stream, Codex reads the code, and shortens the conversation
			stream.encoder.fail(tooLong)
			return end()
		})
	}
	return stream.Fail(r, s.Log, id, err, func(known *api.Error) error {
		stream.encoder.fail(known)
		return end()
	})
}
