package upstream

import (
	"cmp"
	"encoding/json"
	"fmt"
	"net/http"
	"strings"

	"github.com/bullpen-run/bullpen/agent"
)

// defaultMaxTokens limits a reply if the request does not: the protocol requires a limit.
const defaultMaxTokens = 16_384

type anthropicProtocol struct {
	model, key string
	betas      []string
}

func (*anthropicProtocol) path() string { return "/v1/messages" }

// modelsPath asks for as many models as the API returns at once.
func (*anthropicProtocol) modelsPath() string { return "/v1/models?limit=1000" }

func (p *anthropicProtocol) headers(h http.Header) {
	h.Set("Anthropic-Version", "2023-06-01")
	if p.key != "" {
		h.Set("X-Api-Key", p.key)
	}
	if len(p.betas) > 0 {
		h.Set("Anthropic-Beta", strings.Join(p.betas, ","))
	}
}

type (
	messagesRequest struct {
		Model       string          `json:"model"`
		System      any             `json:"system,omitempty"` // a text or blocks
		Messages    []message       `json:"messages"`
		Tools       []messagesTool  `json:"tools,omitempty"`
		ToolChoice  any             `json:"tool_choice,omitempty"`
		MaxTokens   int             `json:"max_tokens"`
		Temperature *float64        `json:"temperature,omitempty"`
		TopP        *float64        `json:"top_p,omitempty"`
		Stop        []string        `json:"stop_sequences,omitempty"`
		Stream      bool            `json:"stream"`
		Output      *outputConfig   `json:"output_config,omitempty"`
		Thinking    json.RawMessage `json:"thinking,omitempty"`
		Context     json.RawMessage `json:"context_management,omitempty"`
	}
	outputConfig struct {
		Format *outputFormat `json:"format,omitempty"`
		Effort string        `json:"effort,omitempty"`
	}
	outputFormat struct {
		Type   string          `json:"type"`
		Schema json.RawMessage `json:"schema"`
	}
	message struct {
		Role    string  `json:"role"`
		Content []block `json:"content"`
	}
	block struct {
		Type      string          `json:"type"`
		Text      string          `json:"text,omitempty"`
		ID        string          `json:"id,omitempty"`
		Name      string          `json:"name,omitempty"`
		Input     json.RawMessage `json:"input,omitempty"`
		ToolUseID string          `json:"tool_use_id,omitempty"`
		Content   any             `json:"content,omitempty"` // of a result: a text or blocks
		IsError   bool            `json:"is_error,omitempty"`
		Source    *source         `json:"source,omitempty"`
		Title     string          `json:"title,omitempty"`
		Thinking  *string         `json:"thinking,omitempty"`
		Signature string          `json:"signature,omitempty"`
		Data      string          `json:"data,omitempty"` // of redacted thinking
		Cache     json.RawMessage `json:"cache_control,omitempty"`
	}
	source struct {
		Type      string `json:"type"`
		MediaType string `json:"media_type,omitempty"`
		Data      string `json:"data,omitempty"`
	}
	messagesTool struct {
		Name        string          `json:"name"`
		Description string          `json:"description,omitempty"`
		Schema      json.RawMessage `json:"input_schema"`
		Cache       json.RawMessage `json:"cache_control,omitempty"`
	}
	messageEvent struct {
		Type    string `json:"type"`
		Index   int    `json:"index"`
		Message struct {
			Usage messagesUsage `json:"usage"`
		} `json:"message"`
		ContentBlock block `json:"content_block"`
		Delta        struct {
			Type         string  `json:"type"`
			Text         string  `json:"text"`
			PartialJSON  string  `json:"partial_json"`
			Thinking     string  `json:"thinking"`
			Signature    string  `json:"signature"`
			StopReason   string  `json:"stop_reason"`
			StopSequence *string `json:"stop_sequence"`
		} `json:"delta"`
		Usage messagesUsage `json:"usage"`
		Error struct {
			Type    string `json:"type"`
			Message string `json:"message"`
		} `json:"error"`
	}
	messagesUsage struct {
		Input         int `json:"input_tokens"`
		Output        int `json:"output_tokens"`
		CacheCreation int `json:"cache_creation_input_tokens"`
		CacheRead     int `json:"cache_read_input_tokens"`
	}
)

func (p *anthropicProtocol) request(turn *agent.Turn) any {
	r := &messagesRequest{
		Model: p.model, MaxTokens: cmp.Or(turn.MaxTokens, defaultMaxTokens),
		Temperature: turn.Temperature, TopP: turn.TopP, Stop: turn.Stop, Stream: true,
		Thinking: turn.Thinking, Context: turn.Anthropic.Context,
	}
	if system := systemBlocks(turn); len(system) > 0 {
		r.System = system
	}
	if turn.Format != nil || turn.Anthropic.Effort != "" {
		r.Output = &outputConfig{Effort: turn.Anthropic.Effort}
	}
	if turn.Format != nil {
		r.Output.Format = &outputFormat{"json_schema", turn.Format.Schema}
	}
	for _, x := range agent.Exchanges(turn.Items) {
		blocks := blocksOf(&x)
		if len(blocks) == 0 { // of thinking alone, without a signature
			continue
		}
		if n := len(r.Messages); n > 0 && r.Messages[n-1].Role == string(x.Role) { // results, and the user's text after them
			r.Messages[n-1].Content = append(r.Messages[n-1].Content, blocks...)
			continue
		}
		r.Messages = append(r.Messages, message{string(x.Role), blocks})
	}
	for _, t := range turn.Tools {
		r.Tools = append(r.Tools, messagesTool(t))
	}
	mode := turn.Choice.Mode
	if turn.Serial {
		mode = cmp.Or(mode, "auto")
	}
	if mode != "" && len(r.Tools) > 0 {
		choice := map[string]any{"type": mode}
		if turn.Choice.Name != "" {
			choice["name"] = turn.Choice.Name
		}
		if turn.Serial && mode != "none" {
			choice["disable_parallel_tool_use"] = true
		}
		r.ToolChoice = choice
	}
	if turn.Anthropic.AutoCache && len(r.Messages) > 0 {
		last := r.Messages[len(r.Messages)-1].Content
		last[len(last)-1].Cache = cacheHere
	}
	return r
}

// cacheHere ends a prefix of the conversation that is to be cached.
var cacheHere = json.RawMessage(`{"type":"ephemeral"}`)

func systemBlocks(turn *agent.Turn) []block {
	var list []block
	for _, i := range turn.System {
		if i.Text != "" {
			list = append(list, block{Type: "text", Text: i.Text, Cache: i.Cache})
		}
	}
	if n := len(list); turn.Anthropic.AutoCache && n > 0 { // of the tools, too, which are before it
		list[n-1].Cache = cacheHere
	}
	return list
}

func blocksOf(x *agent.Exchange) []block {
	var list []block
	for _, item := range x.Results {
		r := item.Result
		b := block{Type: "tool_result", ToolUseID: r.CallID, IsError: r.Failed, Cache: item.Cache}
		if len(r.Pictures) > 0 {
			parts := []agent.Item{{Text: r.Text}}
			for i := range r.Pictures {
				parts = append(parts, agent.Item{Image: &r.Pictures[i]})
			}
			b.Content = blocksOf(&agent.Exchange{Items: parts})
		} else if r.Items != nil {
			b.Content = blocksOf(&agent.Exchange{Items: r.Items})
		} else if r.Text != "" {
			b.Content = r.Text
		}
		list = append(list, b)
	}
	for _, item := range x.Items {
		if b := blockOf(&item); b != nil {
			b.Cache = item.Cache
			list = append(list, *b)
		}
	}
	return list
}

// blockOf returns the block of an item that is no result; nil for thinking of a model of another
// protocol, which has no signature.
func blockOf(item *agent.Item) *block {
	switch {
	case item.Call != nil:
		return &block{Type: "tool_use", ID: item.Call.ID, Name: item.Call.Name, Input: item.Call.Arguments}
	case item.Thinking != nil && item.Thinking.Redacted != "":
		return &block{Type: "redacted_thinking", Data: item.Thinking.Redacted}
	case item.Thinking != nil && item.Thinking.Signature != "":
		return &block{Type: "thinking", Thinking: &item.Thinking.Text, Signature: item.Thinking.Signature}
	case item.Thinking != nil:
		return nil
	case item.Document != nil:
		d := item.Document
		return &block{
			Type: "document", Title: d.Name, Source: &source{Type: "base64", MediaType: d.MediaType, Data: d.Base64},
		}
	case item.Image != nil:
		return &block{
			Type: "image", Source: &source{Type: "base64", MediaType: item.Image.MediaType, Data: item.Image.Base64},
		}
	default:
		return &block{Type: "text", Text: item.Text}
	}
}

func (*anthropicProtocol) events(turn *agent.Turn) events {
	return &messageEvents{calls: map[int]int{}, turn: turn}
}

// messageEvents collects the events of a message.
type messageEvents struct {
	list  []agent.Call
	calls map[int]int // indexes in list, by those of blocks
	stop  string
	at    *string // the stop sequence
	usage agent.Usage

	turn    *agent.Turn     // for its functions
	thought *agent.Thinking // that goes on
}

func (e *messageEvents) finished() bool { return e.stop != "" }

func (e *messageEvents) event(data []byte, text func(string) error) (done bool, err error) {
	var event messageEvent
	if err := json.Unmarshal(data, &event); err != nil {
		return false, fmt.Errorf("decode an event: %w", err)
	}
	switch event.Type {
	case "message_start":
		e.addUsage(&event.Message.Usage)
	case "content_block_start":
		switch event.ContentBlock.Type {
		case "tool_use":
			e.calls[event.Index] = len(e.list)
			e.list = append(e.list, agent.Call{ID: event.ContentBlock.ID, Name: event.ContentBlock.Name})
			return false, e.callPart(event.Index, "", false)
		case "thinking", "redacted_thinking":
			e.thought = &agent.Thinking{Redacted: event.ContentBlock.Data}
		}
	case "content_block_stop":
		if thought := e.thought; thought != nil {
			e.thought = nil
			if e.turn.OnThinking != nil {
				return false, e.turn.OnThinking(thought)
			}
		}
		if _, isCall := e.calls[event.Index]; isCall {
			return false, e.callPart(event.Index, "", true)
		}
	case "content_block_delta":
		switch i, isCall := e.calls[event.Index]; {
		case event.Delta.Type == "text_delta":
			return false, text(event.Delta.Text)
		case e.thought != nil:
			e.thought.Text += event.Delta.Thinking
			e.thought.Signature += event.Delta.Signature
			if e.turn.OnThinkingPart != nil {
				return false, e.turn.OnThinkingPart(event.Delta.Thinking)
			}
		case event.Delta.Type == "input_json_delta" && isCall:
			e.list[i].Arguments = append(e.list[i].Arguments, event.Delta.PartialJSON...)
			return false, e.callPart(event.Index, event.Delta.PartialJSON, false)
		}
	case "message_delta":
		e.addUsage(&event.Usage)
		if event.Delta.StopReason != "" {
			e.stop, e.at = event.Delta.StopReason, event.Delta.StopSequence
		}
	case "message_stop":
		return true, nil
	case "error":
		kind := agent.UpstreamFailed
		if event.Error.Type == "overloaded_error" {
			kind = agent.UpstreamOverloaded
		}
		return false, &agent.UpstreamError{Kind: kind, Message: "the model's server failed: " + messageOf(data)}
	}
	return false, nil
}

// callPart reports a part of the call in a block.
func (e *messageEvents) callPart(index int, arguments string, end bool) error {
	if e.turn.OnCallPart == nil {
		return nil
	}
	i := e.calls[index]
	return e.turn.OnCallPart(&agent.CallPart{Call: i, Name: e.list[i].Name, Arguments: arguments, End: end})
}

// addUsage notes the usage, which later events repeat with larger numbers.
func (e *messageEvents) addUsage(u *messagesUsage) {
	e.usage.Input = max(e.usage.Input, u.Input+u.CacheCreation+u.CacheRead)
	e.usage.Output = max(e.usage.Output, u.Output)
	e.usage.CacheRead, e.usage.CacheWrite = max(e.usage.CacheRead, u.CacheRead), max(e.usage.CacheWrite, u.CacheCreation)
}

func (e *messageEvents) reply() *agent.Reply {
	r := &agent.Reply{Calls: e.list, Usage: e.usage, Finish: agent.FinishDone}
	switch e.stop {
	case "max_tokens", "model_context_window_exceeded":
		r.Finish = agent.FinishLength
	case "stop_sequence":
		r.Finish = agent.FinishStop
		if e.at != nil {
			r.Stop = *e.at
		}
	case "refusal":
		r.Finish = agent.FinishRefused
	}
	for i := range r.Calls {
		if len(r.Calls[i].Arguments) == 0 {
			r.Calls[i].Arguments = json.RawMessage("{}")
		}
	}
	return r
}
