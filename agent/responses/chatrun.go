package responses

import (
	"context"
	"crypto/rand"
	"encoding/json"
	"fmt"
	"net/http"
	"time"

	"github.com/bullpen-run/bullpen/agent"
	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/proto/api"
)

// chatRequest is a request for a chat completion by a model whose server has another protocol.
type chatRequest struct {
	Model         string          `json:"model"`
	Messages      []chatMessage   `json:"messages"`
	Tools         []chatTool      `json:"tools"`
	ToolChoice    json.RawMessage `json:"tool_choice"`
	Parallel      *bool           `json:"parallel_tool_calls"`
	MaxTokens     int             `json:"max_tokens"`
	MaxCompletion int             `json:"max_completion_tokens"`
	Temperature   *float64        `json:"temperature"`
	TopP          *float64        `json:"top_p"`
	Stop          json.RawMessage `json:"stop"`
	Format        json.RawMessage `json:"response_format"`
	Stream        bool            `json:"stream"`
	StreamOptions struct {
		IncludeUsage bool `json:"include_usage"`
	} `json:"stream_options"`
	// Members that change the reply, and that other protocols do not have.
	N         *int            `json:"n"`
	Logprobs  bool            `json:"logprobs"`
	LogitBias map[string]any  `json:"logit_bias"`
	Presence  float64         `json:"presence_penalty"`
	Frequency float64         `json:"frequency_penalty"`
	Functions json.RawMessage `json:"functions"`
}

type (
	chatMessage struct {
		Role       string          `json:"role"`
		Content    json.RawMessage `json:"content"`
		ToolCalls  []chatCall      `json:"tool_calls"`
		ToolCallID string          `json:"tool_call_id"`
	}
	chatPart struct {
		Type     string `json:"type"`
		Text     string `json:"text"`
		Refusal  string `json:"refusal"`
		ImageURL struct {
			URL json.RawMessage `json:"url"`
		} `json:"image_url"`
		File struct {
			Name string `json:"filename"`
			Data string `json:"file_data"`
		} `json:"file"`
	}
	chatTool struct {
		Type     string `json:"type"`
		Function struct {
			Name        string          `json:"name"`
			Description string          `json:"description"`
			Parameters  json.RawMessage `json:"parameters"`
		} `json:"function"`
	}
	// chatCall is a call of a function. Answers that are no streams have no indexes.
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
)

// run returns the run of a request.
func (r *chatRequest) run(host agent.Host) (*agent.Run, error) {
	switch {
	case r.N != nil && *r.N != 1:
		return nil, unknownToModel("n")
	case r.Logprobs:
		return nil, unknownToModel("logprobs")
	case len(r.LogitBias) > 0:
		return nil, unknownToModel("logit_bias")
	case r.Presence != 0:
		return nil, unknownToModel("presence_penalty")
	case r.Frequency != 0:
		return nil, unknownToModel("frequency_penalty")
	case isSet(r.Functions):
		return nil, proto.FieldErrorf("functions", "must be left out; use tools")
	}
	c := &conversation{}
	for i := range r.Messages {
		if err := c.chatMessage(&r.Messages[i]); err != nil {
			return nil, proto.FieldErrorf(fmt.Sprintf("messages[%d]", i), "%s", err.Error())
		}
	}
	tools, choice, err := r.tools()
	if err != nil {
		return nil, err
	}
	format, err := decodeFormat("response_format", r.Format)
	if err != nil {
		return nil, err
	}
	var stop []string
	if isSet(r.Stop) && json.Unmarshal(r.Stop, &stop) != nil {
		stop = make([]string, 1)
		if json.Unmarshal(r.Stop, &stop[0]) != nil {
			return nil, proto.FieldErrorf("stop", "must be a text, or a list of texts")
		}
	}
	return &agent.Run{
		Turn: agent.Turn{
			Model: r.Model, System: c.system, Items: c.items, Choice: choice, Format: format,
			MaxTokens: max(r.MaxTokens, r.MaxCompletion), Temperature: r.Temperature, TopP: r.TopP, Stop: stop,
			Serial: r.Parallel != nil && !*r.Parallel, Anthropic: agent.AnthropicSettings{AutoCache: len(tools) > 0},
		},
		Tools: tools, NewCallID: func(*agent.Tool) string { return "call_" + rand.Text() }, Reserve: host.Reserve,
		Parts: r.Stream, Steps: maxSteps, Wall: maxWall,
	}, nil
}

func unknownToModel(field string) error {
	return proto.FieldErrorf(field, "must be left out: the model's server has another protocol, without it")
}

// tools returns the tools of a request, and which of them the model must call.
func (r *chatRequest) tools() ([]agent.Tool, agent.Choice, error) {
	set := &request{ToolChoice: r.ToolChoice}
	for i := range r.Tools {
		t := &r.Tools[i]
		if t.Type != "function" {
			return nil, agent.Choice{}, proto.FieldErrorf(fmt.Sprintf("tools[%d].type", i), "must be function")
		}
		set.Tools = append(set.Tools, value(map[string]any{
			"type": "function", "name": t.Function.Name, "description": t.Function.Description,
			"parameters": t.Function.Parameters,
		}))
	}
	var named chatTool
	if isSet(r.ToolChoice) && json.Unmarshal(r.ToolChoice, &named) == nil && named.Function.Name != "" {
		set.ToolChoice = value(map[string]string{"type": "function", "name": named.Function.Name})
	}
	tools, err := set.toolSet(openAI)
	if err != nil {
		return nil, agent.Choice{}, err
	}
	choice, err := set.choice(tools)
	return tools.clients, choice, err
}

// chatMessage adds a message.
func (c *conversation) chatMessage(m *chatMessage) error {
	items, err := chatItems(agent.Role(m.Role), m.Content)
	if err != nil {
		return err
	}
	switch m.Role {
	case "system", "developer":
		for _, item := range items {
			c.system = append(c.system, agent.Instruction{Text: item.Text})
		}
	case "user":
		c.items = append(c.items, items...)
	case "assistant":
		c.items = append(c.items, items...)
		for _, call := range m.ToolCalls {
			if err := c.add(&item{
				Type: "function_call", CallID: call.ID, Name: call.Function.Name, Arguments: call.Function.Arguments,
			}); err != nil {
				return err
			}
		}
	case "tool":
		if m.ToolCallID == "" {
			return fmt.Errorf("must have a tool_call_id")
		}
		for i := range items {
			items[i].Role = agent.RoleUser
		}
		c.put(agent.Item{Result: &agent.Result{CallID: m.ToolCallID, Items: items}})
	default:
		return fmt.Errorf("must have the role system, developer, user, assistant or tool")
	}
	return nil
}

// chatItems returns the items of the content of a message: a text, or parts.
func chatItems(role agent.Role, raw json.RawMessage) (items []agent.Item, err error) {
	var text string
	var parts []chatPart
	if !isSet(raw) {
		return nil, nil
	}
	if json.Unmarshal(raw, &text) == nil {
		parts = []chatPart{{Type: "text", Text: text}}
	} else if json.Unmarshal(raw, &parts) != nil {
		return nil, fmt.Errorf("must have a text or parts as content")
	}
	for _, p := range parts {
		var other part
		switch p.Type {
		case "text", "refusal":
			other = part{Type: p.Type, Text: p.Text, Refusal: p.Refusal}
		case "image_url":
			other = part{Type: "input_image", ImageURL: p.ImageURL.URL}
		case "file":
			other = part{Type: "input_file", Filename: p.File.Name, FileData: p.File.Data}
		default:
			return nil, fmt.Errorf("has a part of type %q, which the model's server does not have", proto.Shorten(p.Type))
		}
		if role == "tool" { // its images are those of a user for a model
			role = agent.RoleUser
		}
		item, err := other.item(role)
		if err != nil {
			return nil, err
		}
		if item != nil {
			items = append(items, *item)
		}
	}
	return items, nil
}

// runChat answers a request for a chat completion by a run without tools of this side.
func (s *Server) runChat(w http.ResponseWriter, r *http.Request, members map[string]json.RawMessage) error {
	var req chatRequest
	if err := json.Unmarshal(value(members), &req); err != nil {
		return proto.FieldErrorf("body", "is not a valid request: %v", err)
	}
	run, err := req.run(s.Host(r))
	if err != nil {
		return err
	}
	out := &chatEncoder{id: "chatcmpl-" + rand.Text(), model: req.Model, created: time.Now().Unix(), open: -1}
	if !req.Stream {
		if err := agent.Continue(r.Context(), s.Upstream, run, out); err != nil {
			return agent.ClientError(err)
		}
		writeJSON(w, http.StatusOK, out.completion())
		return nil
	}
	stream := &agent.Stream{W: w}
	add := func(data any) { stream.AddText("data: " + encode(data) + "\n\n") }
	stream.Begin = func() { add(out.chunk(chatDelta{Role: "assistant", Content: new("")}, nil)) }
	stream.Ping = func() { stream.AddText(": ping\n\n") }
	stream.Event = func(ctx context.Context, e agent.Event) error {
		for _, delta := range out.deltas(&e) {
			add(out.chunk(delta, nil))
		}
		if e.Kind != agent.EventEnd {
			return nil
		}
		add(out.chunk(chatDelta{}, new(finishReasons[e.End.Reason])))
		if req.StreamOptions.IncludeUsage {
			last := out.chunk(chatDelta{}, nil)
			last.Choices, last.Usage = []chatChoice{}, usageOf(&e.End.Usage)
			add(last)
		}
		stream.AddText("data: [DONE]\n\n")
		return nil
	}
	err = stream.Serve(r.Context(), func(ctx context.Context) error {
		return agent.Continue(ctx, s.Upstream, run, stream)
	})
	if err == nil {
		return nil
	}
	return stream.Fail(r, s.Log, out.id, err, func(known *api.Error) error {
		_, detail := chatError(known)
		add(&errorBody{detail})
		return nil
	})
}

var finishReasons = map[agent.Reason]string{
	agent.ReasonDone: "stop", agent.ReasonLength: "length", agent.ReasonStop: "stop", agent.ReasonCalls: "tool_calls",
	agent.ReasonPaused: "length", agent.ReasonRefused: "content_filter",
}

// chatEncoder makes a chat completion, or the chunks of its stream.
type chatEncoder struct {
	id, model string
	created   int64
	open      int // the item that has begun, -1 for none
	// Of an answer that is no stream.
	message chatDelta
	end     *agent.End
}

type (
	chatBody struct {
		ID      string       `json:"id"`
		Object  string       `json:"object"`
		Created int64        `json:"created"`
		Model   string       `json:"model"`
		Choices []chatChoice `json:"choices"`
		Usage   *chatUsage   `json:"usage,omitempty"`
	}
	chatChoice struct {
		Index   int        `json:"index"`
		Delta   *chatDelta `json:"delta,omitempty"`
		Message *chatDelta `json:"message,omitempty"`
		Finish  *string    `json:"finish_reason"`
	}
	// chatDelta is a part of a message, or all of it.
	chatDelta struct {
		Role      string     `json:"role,omitempty"`
		Content   *string    `json:"content,omitempty"`
		Reasoning string     `json:"reasoning_content,omitempty"`
		ToolCalls []chatCall `json:"tool_calls,omitempty"`
	}
	chatUsage struct {
		Prompt     int            `json:"prompt_tokens"`
		Completion int            `json:"completion_tokens"`
		Total      int            `json:"total_tokens"`
		Details    map[string]int `json:"prompt_tokens_details"`
	}
)

func usageOf(u *agent.Usage) *chatUsage {
	return &chatUsage{u.Input, u.Output, u.Input + u.Output, map[string]int{"cached_tokens": u.CacheRead}}
}

func (c *chatEncoder) chunk(delta chatDelta, finish *string) *chatBody {
	return &chatBody{
		ID: c.id, Object: "chat.completion.chunk", Created: c.created, Model: c.model,
		Choices: []chatChoice{{Delta: &delta, Finish: finish}},
	}
}

// deltas returns what an event adds to the message.
func (c *chatEncoder) deltas(e *agent.Event) []chatDelta {
	begun := c.open == e.Item
	switch e.Kind {
	case agent.EventText:
		return []chatDelta{{Content: &e.Text}}
	case agent.EventThinking:
		c.open = e.Item
		return []chatDelta{{Reasoning: e.Text}}
	case agent.EventThought:
		if !begun && e.Thought.Text != "" {
			return []chatDelta{{Reasoning: e.Thought.Text}}
		}
	case agent.EventCallPart:
		if c.open = e.Item; !begun {
			return c.call(e.Call, e.Text)
		}
		index := len(c.message.ToolCalls) - 1
		return []chatDelta{{ToolCalls: []chatCall{{Index: &index, Function: chatFunction{Arguments: e.Text}}}}}
	case agent.EventCall:
		if !begun {
			return c.call(e.Call, string(e.Call.Arguments))
		}
	}
	return nil
}

// call begins a call.
func (c *chatEncoder) call(call *agent.Call, arguments string) []chatDelta {
	index := len(c.message.ToolCalls)
	made := chatCall{ID: call.ID, Type: "function", Function: chatFunction{call.Name, arguments}}
	c.message.ToolCalls = append(c.message.ToolCalls, made)
	made.Index = &index
	return []chatDelta{{ToolCalls: []chatCall{made}}}
}

// Append implements [agent.Log] for an answer that is no stream.
func (c *chatEncoder) Append(_ context.Context, e agent.Event) error {
	switch e.Kind {
	case agent.EventTextEnd:
		if c.message.Content == nil {
			c.message.Content = new("")
		}
		*c.message.Content += e.Text
	case agent.EventThought:
		c.message.Reasoning += e.Thought.Text
	case agent.EventCall:
		c.call(e.Call, string(e.Call.Arguments))
	case agent.EventEnd:
		c.end = e.End
	}
	return nil
}

// completion returns the answer that is no stream.
func (c *chatEncoder) completion() *chatBody {
	c.message.Role = "assistant"
	return &chatBody{
		ID: c.id, Object: "chat.completion", Created: c.created, Model: c.model, Usage: usageOf(&c.end.Usage),
		Choices: []chatChoice{{Message: &c.message, Finish: new(finishReasons[c.end.Reason])}},
	}
}
