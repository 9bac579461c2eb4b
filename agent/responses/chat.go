package responses

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"slices"
	"strings"

	"github.com/bullpen-run/bullpen/agent"
	"github.com/bullpen-run/bullpen/proto"
)

// Completions asks a model's server for chat completions.
type Completions interface {
	// Complete forwards a request with only the model's name changed, and returns the answer. The
	// caller closes body. The error is an [*agent.UpstreamError].
	Complete(ctx context.Context, model string, members map[string]json.RawMessage) (
		contentType string, body io.ReadCloser, err error)
}

// chatMembers are the forwarded members of requests for chat completions. Others could make the
// model server do things beyond the client's rights, such as fetching addresses or storing texts.
var chatMembers = strings.Fields(
	`frequency_penalty function_call functions logit_bias logprobs max_completion_tokens max_tokens messages model n
	parallel_tool_calls presence_penalty prompt_cache_key reasoning_effort response_format safety_identifier
	seed stop stream stream_options temperature
	tool_choice tools top_k top_logprobs top_p user verbosity`)

// decodeChat returns the forwardable members of a request for a chat completion, and its model.
func decodeChat(raw []byte) (model string, members map[string]json.RawMessage, err error) {
	if err := json.Unmarshal(raw, &members); err != nil {
		return "", nil, proto.FieldErrorf("body", "is not a valid request: %v", err)
	}
	if json.Unmarshal(members["model"], &model) != nil || model == "" {
		return "", nil, proto.FieldErrorf("model", "is required")
	}
	for name, value := range members {
		if isSet(value) && !slices.Contains(chatMembers, name) {
			return "", nil, proto.FieldErrorf(
				proto.Shorten(name), "must be left out: this server does not pass it on to the model's server")
		}
	}
	return model, members, checkChat(members["messages"])
}

// completeChat passes a request for a chat completion on to the model's server, or asks one with another
// protocol. It has none of this side's tools.
func (s *Server) completeChat(w http.ResponseWriter, r *http.Request) error {
	var model string
	var members map[string]json.RawMessage
	err := s.Host(r).ReadBody(w, func(raw []byte) (err error) {
		model, members, err = decodeChat(raw)
		return err
	})
	if err != nil {
		return err
	}
	if s.Completions == nil {
		return s.runChat(w, r, members)
	}
	contentType, body, err := s.Completions.Complete(r.Context(), model, members)
	if err != nil {
		return agent.ClientError(err)
	}
	defer func() { _ = body.Close() }() // it was only read
	h := w.Header()
	h.Set("Content-Type", contentType)
	h.Set("Cache-Control", "no-store")
	h.Set("X-Accel-Buffering", "no")
	w.WriteHeader(http.StatusOK)
	if _, err := io.Copy(flushed{w, http.NewResponseController(w)}, body); err != nil {
		return fmt.Errorf("pass a completion on: %w", err)
	}
	return nil
}

// flushed sends each part at once.
type flushed struct {
	io.Writer
	control *http.ResponseController
}

// Write implements [io.Writer].
func (f flushed) Write(p []byte) (int, error) {
	n, err := f.Writer.Write(p)
	if err == nil {
		err = f.control.Flush()
	}
	return n, err
}

// checkChat refuses messages with parts that the model's server would fetch.
func checkChat(raw json.RawMessage) error {
	var messages []struct {
		Content json.RawMessage `json:"content"`
	}
	if json.Unmarshal(raw, &messages) != nil || len(messages) == 0 {
		return proto.FieldErrorf("messages", "must be a list of at least one message")
	}
	for i, m := range messages {
		if !bytes.HasPrefix(m.Content, []byte("[")) {
			continue
		}
		field := fmt.Sprintf("messages[%d].content", i)
		var parts []struct {
			Type     string `json:"type"`
			ImageURL struct {
				URL string `json:"url"`
			} `json:"image_url"`
			File struct {
				ID string `json:"file_id"`
			} `json:"file"`
		}
		if err := json.Unmarshal(m.Content, &parts); err != nil {
			return proto.FieldErrorf(field, "is not a list of parts: %v", err)
		}
		for _, p := range parts {
			switch {
			case p.Type == "image_url" && !strings.HasPrefix(p.ImageURL.URL, "data:"):
				return proto.FieldErrorf(
					field, "has an image at an address; this server passes no URLs on to the model's server: send the image "+
						"itself, as a data URL")
			case p.Type == "file" && p.File.ID != "":
				return proto.FieldErrorf(field, "has a file by its id; send the file itself, as file_data")
			case !slices.Contains([]string{"text", "refusal", "image_url", "input_audio", "file"}, p.Type):
				return proto.FieldErrorf(field, "has a part of type %q, which this server does not pass on", proto.Shorten(p.Type))
			}
		}
	}
	return nil
}
