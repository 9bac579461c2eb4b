package upstream

import (
	"cmp"
	"encoding/json"
	"fmt"
	"net/http"
	"strings"

	"github.com/bullpen-run/bullpen/agent"
)

type openAIProtocol struct{ model, key string }

func (*openAIProtocol) path() string { return "/chat/completions" }

func (*openAIProtocol) modelsPath() string { return "/models" }

func (p *openAIProtocol) headers(h http.Header) {
	if p.key != "" {
		h.Set("Authorization", "Bearer "+p.key)
	}
}

type (
	chatRequest struct {
		Model         string        `json:"model"`
		Messages      []chatMessage `json:"messages"`
		Tools         []chatTool    `json:"tools,omitempty"`
		ToolChoice    any           `json:"tool_choice,omitempty"`
		MaxTokens     int           `json:"max_tokens,omitempty"`
		Temperature   *float64      `json:"temperature,omitempty"`
		TopP          *float64      `json:"top_p,omitempty"`
		Stop          []string      `json:"stop,omitempty"`
		Stream        bool          `json:"stream"`
		StreamOptions any           `json:"stream_options,omitempty"`
		Format        *chatFormat   `json:"response_format,omitempty"`
		Parallel      *bool         `json:"parallel_tool_calls,omitempty"`
		Effort        string        `json:"reasoning_effort,omitempty"`
		Verbosity     string        `json:"verbosity,omitempty"`
	}
	chatFormat struct {
		Type   string `json:"type"`
		Schema struct {
			Name   string          `json:"name"`
			Schema json.RawMessage `json:"schema"`
			Strict *bool           `json:"strict,omitempty"`
		} `json:"json_schema"`
	}
	chatMessage struct {
		Role       string     `json:"role"`
		Content    any        `json:"content"` // a string, parts, or null
		ToolCalls  []chatCall `json:"tool_calls,omitempty"`
		ToolCallID string     `json:"tool_call_id,omitempty"`
		Reasoning  string     `json:"reasoning_content,omitempty"`
	}
	chatPart struct {
		Type     string     `json:"type"`
		Text     string     `json:"text,omitempty"`
		ImageURL *chatImage `json:"image_url,omitempty"`
		File     *chatFile  `json:"file,omitempty"`
	}
	chatFile struct {
		Name string `json:"filename"`
		Data string `json:"file_data"`
	}
	chatImage struct {
		URL string `json:"url"`
	}
	chatCall struct {
		Index    *int         `json:"index,omitempty"`
		ID       string       `json:"id,omitempty"`
		Type     string       `json:"type,omitempty"`
		Function chatFunction `json:"function"`
	}
	chatFunction struct {
		Name      string `json:"name,omitempty"`
		Arguments string `json:"arguments"`
	}
	chatTool struct {
		Type     string         `json:"type"`
		Function chatDefinition `json:"function"`
	}
	chatDefinition struct {
		Name        string          `json:"name"`
		Description string          `json:"description,omitempty"`
		Parameters  json.RawMessage `json:"parameters"`
	}
	chatChunk struct {
		Choices []struct {
			Delta struct {
				Content   *string    `json:"content"`
				Refusal   *string    `json:"refusal"`
				ToolCalls []chatCall `json:"tool_calls"`
				// Servers have one of two names for what the model thinks.
				ReasoningContent string          `json:"reasoning_content"`
				Reasoning        json.RawMessage `json:"reasoning"`
			} `json:"delta"`
			FinishReason *string `json:"finish_reason"`
		} `json:"choices"`
		Usage *struct {
			Prompt     int `json:"prompt_tokens"`
			Completion int `json:"completion_tokens"`
			Details    struct {
				Cached int `json:"cached_tokens"`
			} `json:"prompt_tokens_details"`
		} `json:"usage"`
		Error json.RawMessage `json:"error"`
	}
)

func (p *openAIProtocol) request(turn *agent.Turn) any {
	r := &chatRequest{
		Model: p.model, MaxTokens: turn.MaxTokens, Temperature: turn.Temperature, TopP: turn.TopP, Stop: turn.Stop,
		Stream: true, StreamOptions: map[string]bool{"include_usage": true},
		Effort: turn.OpenAI.Effort, Verbosity: turn.OpenAI.Verbosity,
	}
	if turn.Serial && len(turn.Tools) > 0 {
		r.Parallel = new(false)
	}
	var system []string
	for _, i := range turn.System {
		if i.Text != "" {
			system = append(system, i.Text)
		}
	}
	if len(system) > 0 {
		r.Messages = append(r.Messages, chatMessage{Role: "system", Content: strings.Join(system, "\n")})
	}
	r.Messages = append(r.Messages, chatMessages(agent.Exchanges(turn.Items))...)
	for _, t := range turn.Tools {
		r.Tools = append(r.Tools, chatTool{"function", chatDefinition{t.Name, t.Description, t.Schema}})
	}
	if turn.Format != nil {
		r.Format = &chatFormat{Type: "json_schema"}
		r.Format.Schema.Name, r.Format.Schema.Schema, r.Format.Schema.Strict = turn.Format.Name, turn.Format.Schema,
			turn.Format.Strict
	}
	switch turn.Choice.Mode {
	case "any":
		r.ToolChoice = "required"
	case "none":
		r.ToolChoice = "none"
	case "tool":
		r.ToolChoice = map[string]any{"type": "function", "function": map[string]string{"name": turn.Choice.Name}}
	}
	return r
}

// chatMessages returns the messages of a conversation: one for each result, or one for all else of an
// exchange. What the model has thought is only its business until the user's next message.
func chatMessages(list []agent.Exchange) []chatMessage {
	last := 0 // the exchange with the last message of the user
	for i := range list {
		if list[i].Role == agent.RoleUser && len(list[i].Items) > 0 {
			last = i
		}
	}
	var messages []chatMessage
	for i := range list {
		x := &list[i]
		var files []agent.Item
		for _, item := range x.Results {
			text, more := resultText(item.Result)
			messages = append(messages, chatMessage{Role: "tool", ToolCallID: item.Result.CallID, Content: text})
			files = append(files, more...)
		}
		if m := chatMessageOf(x.Role, append(files, x.Items...), i > last); m != nil {
			messages = append(messages, *m)
		}
	}
	return messages
}

// resultText returns the text of a result, and its images and documents, which only a message of the
// user can have.
func resultText(r *agent.Result) (text string, files []agent.Item) {
	if r.Items == nil {
		return r.Text, nil
	}
	var texts []string
	for _, item := range r.Items {
		if item.Image == nil && item.Document == nil {
			texts = append(texts, item.Text)
			continue
		}
		files = append(files, item)
	}
	if len(files) > 0 {
		texts = append(texts, "(The files of this result are in the next message of the user.)")
	}
	return strings.Join(texts, "\n"), files
}

// chatMessageOf returns a message with items, nil if there is nothing to say.
func chatMessageOf(role agent.Role, items []agent.Item, thoughts bool) *chatMessage {
	m := chatMessage{Role: string(role)}
	var texts []string
	var parts []chatPart
	inline := false
	for _, item := range items {
		switch {
		case item.Call != nil:
			m.ToolCalls = append(m.ToolCalls,
				chatCall{ID: item.Call.ID, Type: "function", Function: chatFunction{item.Call.Name, string(item.Call.Arguments)}})
		case item.Thinking != nil:
			if thoughts && item.Thinking.Signature == "" { // of a server of this protocol
				m.Reasoning += item.Thinking.Text
			}
		case item.Document != nil:
			inline = true
			d := item.Document
			parts = append(parts, chatPart{
				Type: "file", File: &chatFile{cmp.Or(d.Name, "document"), fmt.Sprintf("data:%s;base64,%s", d.MediaType, d.Base64)},
			})
		case item.Image != nil:
			inline = true
			url := fmt.Sprintf("data:%s;base64,%s", item.Image.MediaType, item.Image.Base64)
			parts = append(parts, chatPart{Type: "image_url", ImageURL: &chatImage{url}})
		default:
			texts = append(texts, item.Text)
			parts = append(parts, chatPart{Type: "text", Text: item.Text})
		}
	}
	switch {
	case inline:
		m.Content = parts
	case len(texts) > 0: // a string, because some servers read nothing else
		m.Content = strings.Join(texts, "\n")
	case len(m.ToolCalls) == 0:
		return nil
	}
	return &m
}

func (*openAIProtocol) events(turn *agent.Turn) events { return &chatEvents{turn: turn} }

// chatEvents collects the chunks of a completion.
type chatEvents struct {
	calls   []agent.Call
	indexes []int // of the calls, as the server counts
	finish  string
	done    bool
	refused bool
	usage   agent.Usage
	turn    *agent.Turn // for its functions
	thought strings.Builder
}

func (e *chatEvents) finished() bool { return e.finish != "" || e.done }

func (e *chatEvents) event(data []byte, text func(string) error) (done bool, err error) {
	if string(data) == "[DONE]" {
		e.done = true
		return true, e.endThought()
	}
	var chunk chatChunk
	if err := json.Unmarshal(data, &chunk); err != nil {
		return false, fmt.Errorf("decode a chunk: %w", err)
	}
	if len(chunk.Error) > 0 && string(chunk.Error) != "null" {
		return false, &agent.UpstreamError{
			Kind: agent.UpstreamFailed, Message: "the model's server failed: " + messageOf(data),
		}
	}
	if chunk.Usage != nil { // with or without choices; the last one counts
		e.usage = agent.Usage{
			Input: chunk.Usage.Prompt, Output: chunk.Usage.Completion,
			CacheRead: chunk.Usage.Details.Cached,
		}
	}
	if len(chunk.Choices) == 0 {
		return false, nil
	}
	choice := &chunk.Choices[0]
	if err := e.think(choice.Delta.ReasoningContent, choice.Delta.Reasoning); err != nil {
		return false, err
	}
	begins := func(text *string) bool { return text != nil && *text != "" }
	if begins(choice.Delta.Content) || begins(choice.Delta.Refusal) || begins(choice.FinishReason) ||
		len(choice.Delta.ToolCalls) > 0 {
		if err := e.endThought(); err != nil {
			return false, err
		}
	}
	for i := range choice.Delta.ToolCalls {
		if err := e.addCall(&choice.Delta.ToolCalls[i]); err != nil {
			return false, err
		}
	}
	if choice.FinishReason != nil && *choice.FinishReason != "" {
		e.finish = *choice.FinishReason
	}
	if choice.Delta.Refusal != nil && *choice.Delta.Refusal != "" {
		e.refused = true
		return false, text(*choice.Delta.Refusal)
	}
	if choice.Delta.Content != nil {
		return false, text(*choice.Delta.Content)
	}
	return false, nil
}

// think adds a part of what the model thinks, which is in one of two members.
func (e *chatEvents) think(part string, other json.RawMessage) error {
	if part == "" {
		_ = json.Unmarshal(other, &part) // some servers have an object there
	}
	if part == "" {
		return nil
	}
	e.thought.WriteString(part)
	if e.turn.OnThinkingPart == nil {
		return nil
	}
	return e.turn.OnThinkingPart(part)
}

// endThought reports what the model has thought before it says something.
func (e *chatEvents) endThought() error {
	text := e.thought.String()
	e.thought.Reset()
	if text == "" || e.turn.OnThinking == nil {
		return nil
	}
	return e.turn.OnThinking(&agent.Thinking{Text: text})
}

// addCall adds a part of a call. Some servers send no index, or the same one for all calls; then
// only a call's first part has a name.
func (e *chatEvents) addCall(part *chatCall) error {
	i := len(e.calls) - 1
	switch {
	case part.Index != nil:
		for i >= 0 && e.indexes[i] != *part.Index {
			i--
		}
		if i >= 0 && part.ID != "" && e.calls[i].ID != "" && part.ID != e.calls[i].ID {
			i = -1
		}
	case part.Function.Name != "":
		i = -1
	}
	if i < 0 {
		i = len(e.calls)
		e.calls = append(e.calls, agent.Call{})
		index := i
		if part.Index != nil {
			index = *part.Index
		}
		e.indexes = append(e.indexes, index)
	}
	call := &e.calls[i]
	if part.ID != "" {
		call.ID = part.ID
	}
	if call.Name == "" { // some servers repeat it
		call.Name = part.Function.Name
	}
	call.Arguments = append(call.Arguments, part.Function.Arguments...)
	if e.turn.OnCallPart == nil {
		return nil
	}
	return e.turn.OnCallPart(&agent.CallPart{Call: i, Name: call.Name, Arguments: part.Function.Arguments})
}

func (e *chatEvents) reply() *agent.Reply {
	r := &agent.Reply{Calls: e.calls, Usage: e.usage, Finish: agent.FinishDone}
	switch {
	case e.finish == "length":
		r.Finish = agent.FinishLength
	case e.finish == "content_filter" || e.refused:
		r.Finish = agent.FinishRefused
	}
	for i := range r.Calls {
		if len(r.Calls[i].Arguments) == 0 { // of a tool without parameters
			r.Calls[i].Arguments = json.RawMessage("{}")
		}
	}
	return r
}
