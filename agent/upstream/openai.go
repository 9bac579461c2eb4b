package upstream

import (
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
	}
	if turn.System != "" {
		r.Messages = append(r.Messages, chatMessage{Role: "system", Content: turn.System})
	}
	for _, x := range agent.Exchanges(turn.Items) {
		r.Messages = append(r.Messages, chatMessages(&x)...)
	}
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

// chatMessages returns the messages of an exchange: one for each result, or one for all else.
func chatMessages(x *agent.Exchange) []chatMessage {
	var list []chatMessage
	for _, result := range x.Results {
		list = append(list, chatMessage{Role: "tool", ToolCallID: result.CallID, Content: result.Text})
	}
	if len(x.Items) == 0 {
		return list
	}
	m := chatMessage{Role: string(x.Role)}
	var texts []string
	var parts []chatPart
	inline := false
	for _, item := range x.Items {
		switch {
		case item.Call != nil:
			m.ToolCalls = append(m.ToolCalls,
				chatCall{ID: item.Call.ID, Type: "function", Function: chatFunction{item.Call.Name, string(item.Call.Arguments)}})
		case item.Thinking != nil: // the protocol has none
		case item.Document != nil:
			inline = true
			d := item.Document
			parts = append(parts, chatPart{
				Type: "file", File: &chatFile{d.Name, fmt.Sprintf("data:%s;base64,%s", d.MediaType, d.Base64)},
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
	}
	return append(list, m)
}

func (*openAIProtocol) events(*agent.Turn) events { return &chatEvents{} }

// chatEvents collects the chunks of a completion.
type chatEvents struct {
	calls   []agent.Call
	indexes []int // of the calls, as the server counts
	finish  string
	done    bool
	refused bool
	usage   agent.Usage
}

func (e *chatEvents) finished() bool { return e.finish != "" || e.done }

func (e *chatEvents) event(data []byte, text func(string) error) (done bool, err error) {
	if string(data) == "[DONE]" {
		e.done = true
		return true, nil
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
	for i := range choice.Delta.ToolCalls {
		e.addCall(&choice.Delta.ToolCalls[i])
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

// addCall adds a part of a call. Some servers send no index, or the same one for all calls; then
// only a call's first part has a name.
func (e *chatEvents) addCall(part *chatCall) {
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
