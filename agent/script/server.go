package script

import (
	"context"
	"crypto/rand"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"regexp"
	"strconv"
	"strings"
	"sync"
	"time"
)

const (
	roleUser = "user"
	roleTool = "tool"

	maxBody = 64 << 20
)

// modelName is the name of the one model that is listed. Requests may have any.
const modelName = "script"

// Server replies as a script says, at /v1/chat/completions and /v1/messages, and lists a model at
// /v1/models. Its fields are set before its use.
type Server struct {
	Script *Script
	// Requests, if not nil, is called with the header and the body of each request.
	Requests func(h http.Header, body []byte)

	mu   sync.Mutex
	used map[*Rule]int
}

// ServeHTTP implements [http.Handler].
func (s *Server) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	if r.Method == http.MethodGet && strings.HasSuffix(r.URL.Path, "/models") {
		w.Header().Set("Content-Type", "application/json")
		// the client may be gone
		_ = json.NewEncoder(w).Encode(object{"object": "list", "data": []object{{"id": modelName, "object": "model"}}})
		return
	}
	chat := strings.HasSuffix(r.URL.Path, "/chat/completions")
	if !chat && !strings.HasSuffix(r.URL.Path, "/messages") || r.Method != http.MethodPost {
		fail(w, http.StatusNotFound, "there is POST …/chat/completions, POST …/messages and GET …/models")
		return
	}
	body, err := io.ReadAll(http.MaxBytesReader(w, r.Body, maxBody))
	if err != nil {
		fail(w, http.StatusBadRequest, err.Error())
		return
	}
	if s.Requests != nil {
		s.Requests(r.Header, body)
	}
	var q question
	if err := json.Unmarshal(body, &q); err != nil || len(q.Messages) == 0 || !q.Stream && !chat {
		fail(w, http.StatusBadRequest, "the body must have messages, and stream must be true for the protocol of messages")
		return
	}
	role, text := q.last()
	rule, groups := s.choose(role, text, &q)
	if rule == nil {
		fail(w, http.StatusBadRequest,
			fmt.Sprintf("no rule of the script matches the last message, of the role %s: %.200q", role, text))
		return
	}
	if rule.Status != 0 {
		if rule.RetryAfter > 0 {
			w.Header().Set("Retry-After", strconv.Itoa(rule.RetryAfter))
		}
		fail(w, rule.Status, rule.Text)
		return
	}
	a := &answer{ctx: r.Context(), w: w, rule: rule, input: len(body) / 4, created: time.Now().Unix()}
	defer a.fault()
	expand := groups.expand
	if !q.Stream {
		a.completion(expand)
		return
	}
	w.Header().Set("Content-Type", "text/event-stream")
	if chat {
		a.chat(expand)
	} else {
		a.messages(expand)
	}
}

// fail answers with an error in a form that is both protocols'.
func fail(w http.ResponseWriter, status int, message string) {
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(status)
	// the client may be gone
	_ = json.NewEncoder(w).Encode(
		map[string]any{"type": "error", "error": map[string]string{"type": "error", "message": message}})
}

// question is the common part of both protocols' requests.
type question struct {
	Messages []struct {
		Role    string          `json:"role"`
		Content json.RawMessage `json:"content"`
	} `json:"messages"`
	Tools []struct {
		Name     string `json:"name"`
		Function struct {
			Name string `json:"name"`
		} `json:"function"`
	} `json:"tools"`
	Stream bool `json:"stream"`
}

// last returns the role and the text of the last message.
func (q *question) last() (role, text string) {
	m := &q.Messages[len(q.Messages)-1]
	role = m.Role
	if json.Unmarshal(m.Content, &text) == nil {
		return role, text
	}
	var parts []struct {
		Type    string          `json:"type"`
		Text    string          `json:"text"`
		Content json.RawMessage `json:"content"`
	}
	_ = json.Unmarshal(m.Content, &parts) // another form has no text
	var texts []string
	for _, p := range parts {
		switch p.Type {
		case "tool_result":
			role = roleTool
			p.Text = resultText(p.Content)
		case "text":
			role = m.Role
		}
		texts = append(texts, p.Text)
	}
	return role, strings.Join(texts, "\n")
}

// resultText returns the text of a result, which is a text or a list of parts.
func resultText(content json.RawMessage) (text string) {
	var parts []struct {
		Text string `json:"text"`
	}
	if json.Unmarshal(content, &text) == nil || json.Unmarshal(content, &parts) != nil {
		return text
	}
	for _, p := range parts {
		text += p.Text
	}
	return text
}

func (q *question) has(tool string) bool {
	for _, t := range q.Tools {
		if t.Name == tool || t.Function.Name == tool {
			return true
		}
	}
	return false
}

// match is where the groups of a rule are in a text.
type match struct {
	text string
	at   []int
}

// group is a reference to a group of a match. Other dollar signs are left alone, as programs use
// them.
var group = regexp.MustCompile(`\$\{[0-9]+\}`)

// expand replaces the references in a text by the groups.
func (m match) expand(text string) string {
	return group.ReplaceAllStringFunc(text, func(name string) string {
		n, err := strconv.Atoi(name[2 : len(name)-1])
		if err != nil || 2*n+1 >= len(m.at) || m.at[2*n] < 0 {
			return ""
		}
		return m.text[m.at[2*n]:m.at[2*n+1]]
	})
}

func (s *Server) choose(role, text string, q *question) (*Rule, match) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.used == nil {
		s.used = map[*Rule]int{}
	}
	for _, r := range s.Script.Rules {
		at := r.match.FindStringSubmatchIndex(text)
		if at == nil || r.Role != "" && r.Role != role || r.Tool != "" && !q.has(r.Tool) ||
			r.Times > 0 && s.used[r] >= r.Times {
			continue
		}
		s.used[r]++
		return r, match{text, at}
	}
	return nil, match{}
}

// answer is a reply in the making.
type answer struct {
	ctx     context.Context
	w       http.ResponseWriter
	rule    *Rule
	input   int // tokens
	output  int
	created int64 // in seconds
}

// send sends an event.
func (a *answer) send(name string, data any) {
	text, ok := data.(string)
	if !ok {
		raw, err := json.Marshal(data)
		if err != nil {
			panic(err) // the data here are maps of texts and numbers
		}
		text = string(raw)
	}
	if name != "" {
		_, _ = fmt.Fprintf(a.w, "event: %s\n", name) // the client may be gone
	}
	_, _ = fmt.Fprintf(a.w, "data: %s\n\n", text)
	_ = http.NewResponseController(a.w).Flush()
}

// parts calls each with the parts of a text.
func (a *answer) parts(text string, each func(string)) {
	size := a.rule.Chunk
	if size <= 0 {
		size = max(1, len(text))
	}
	for len(text) > 0 {
		n := min(size, len(text))
		for n < len(text) && text[n]&0xc0 == 0x80 { // within a character
			n++
		}
		if a.rule.Delay > 0 {
			select {
			case <-a.ctx.Done():
				return
			case <-time.After(a.rule.Delay):
			}
		}
		each(text[:n])
		a.output++
		text = text[n:]
	}
}

// fault does what the rule's Fault says.
func (a *answer) fault() {
	switch a.rule.Fault {
	case "hang":
		<-a.ctx.Done()
	case "drop":
		panic(http.ErrAbortHandler)
	}
}

func (c *Call) arguments(expand func(string) string) string {
	if c.Raw != "" {
		return expand(c.Raw)
	}
	arguments := c.Arguments
	if arguments == nil {
		arguments = map[string]any{}
	}
	raw, err := json.Marshal(expandAll(arguments, expand))
	if err != nil {
		panic(err) // the arguments come from YAML
	}
	return string(raw)
}

func expandAll(v any, expand func(string) string) any {
	switch v := v.(type) {
	case string:
		return expand(v)
	case map[string]any:
		m := map[string]any{}
		for name, value := range v {
			m[name] = expandAll(value, expand)
		}
		return m
	case []any:
		list := []any{}
		for _, value := range v {
			list = append(list, expandAll(value, expand))
		}
		return list
	default:
		return v
	}
}

type object = map[string]any

// chat replies in the protocol of chat completions.
func (a *answer) chat(expand func(string) string) {
	chunk := func(delta object, finish any) {
		a.send("", object{
			"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": a.created, "model": modelName,
			"choices": []object{{"index": 0, "delta": delta, "finish_reason": finish}},
		})
	}
	chunk(object{"role": "assistant", "content": ""}, nil)
	a.parts(expand(a.rule.Thinking), func(part string) { chunk(object{"reasoning_content": part}, nil) })
	a.parts(expand(a.rule.Text), func(part string) { chunk(object{"content": part}, nil) })
	for i := range a.rule.Calls {
		call := &a.rule.Calls[i]
		first := object{"index": i, "type": "function", "function": object{"name": call.Name, "arguments": ""}}
		if !call.NoID {
			first["id"] = "call_" + rand.Text()
		}
		chunk(object{"tool_calls": []object{first}}, nil)
		a.parts(call.arguments(expand), func(part string) {
			chunk(object{"tool_calls": []object{{"index": i, "function": object{"arguments": part}}}}, nil)
		})
	}
	if a.rule.Fault != "" {
		return
	}
	chunk(object{}, a.finish())
	a.send("", object{
		"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": a.created, "model": modelName,
		"choices": []object{}, "usage": object{
			"prompt_tokens": a.input, "completion_tokens": a.output, "total_tokens": a.input + a.output,
		},
	})
	a.send("", "[DONE]")
}

// finish returns why a chat completion ends.
func (a *answer) finish() string {
	switch {
	case a.rule.Finish == "length":
		return "length"
	case a.rule.Finish == "refused":
		return "content_filter"
	case len(a.rule.Calls) > 0:
		return "tool_calls"
	default:
		return "stop"
	}
}

// completion replies with a chat completion that is no stream. Such a reply has no parts.
func (a *answer) completion(expand func(string) string) {
	message := object{"role": "assistant", "content": expand(a.rule.Text)}
	var calls []object
	for i := range a.rule.Calls {
		call := &a.rule.Calls[i]
		calls = append(calls, object{
			"id": "call_" + rand.Text(), "type": "function",
			"function": object{"name": call.Name, "arguments": call.arguments(expand)},
		})
	}
	if calls != nil {
		message["tool_calls"] = calls
	}
	a.w.Header().Set("Content-Type", "application/json")
	_ = json.NewEncoder(a.w).Encode(object{ // the client may be gone
		"id": "chatcmpl-1", "object": "chat.completion", "created": a.created, "model": modelName,
		"choices": []object{{"index": 0, "message": message, "finish_reason": a.finish()}},
		"usage": object{
			"prompt_tokens": a.input, "completion_tokens": len(a.rule.Text) / 4,
			"total_tokens": a.input + len(a.rule.Text)/4,
		},
	})
}

// messages replies in the protocol of Anthropic's messages.
func (a *answer) messages(expand func(string) string) {
	event := func(name string, data object) {
		data["type"] = name
		a.send(name, data)
	}
	event("message_start", object{"message": object{
		"id": "msg_1", "type": "message", "role": "assistant", "content": []object{},
		"usage": object{"input_tokens": a.input, "output_tokens": 0},
	}})
	index := 0
	block := func(start object, text string, delta func(string) object) {
		event("content_block_start", object{"index": index, "content_block": start})
		a.parts(text, func(part string) { event("content_block_delta", object{"index": index, "delta": delta(part)}) })
		if start["type"] == "thinking" {
			event("content_block_delta", object{
				"index": index, "delta": object{"type": "signature_delta", "signature": "scripted"},
			})
		}
		event("content_block_stop", object{"index": index})
		index++
	}
	if text := expand(a.rule.Thinking); text != "" {
		block(object{"type": "thinking", "thinking": "", "signature": ""}, text, func(part string) object {
			return object{"type": "thinking_delta", "thinking": part}
		})
	}
	if text := expand(a.rule.Text); text != "" {
		block(object{"type": "text", "text": ""}, text, func(part string) object {
			return object{"type": "text_delta", "text": part}
		})
	}
	for i := range a.rule.Calls {
		call := &a.rule.Calls[i]
		start := object{"type": "tool_use", "name": call.Name, "input": object{}}
		if !call.NoID {
			start["id"] = "toolu_" + rand.Text()
		}
		block(start, call.arguments(expand), func(part string) object {
			return object{"type": "input_json_delta", "partial_json": part}
		})
	}
	if a.rule.Fault != "" {
		return
	}
	reason := "end_turn"
	switch {
	case a.rule.Finish == "length":
		reason = "max_tokens"
	case a.rule.Finish == "refused":
		reason = "refusal"
	case len(a.rule.Calls) > 0:
		reason = "tool_use"
	}
	event("message_delta", object{
		"delta": object{"stop_reason": reason, "stop_sequence": nil},
		"usage": object{"output_tokens": a.output},
	})
	event("message_stop", object{})
}
