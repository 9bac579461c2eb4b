package responses

import (
	"encoding/json"
	"time"

	"github.com/bullpen-run/bullpen/agent"
)

// response is an answer.
type response struct {
	ID         string             `json:"id"`
	Object     string             `json:"object"`
	CreatedAt  int64              `json:"created_at"`
	Status     string             `json:"status"`
	Model      string             `json:"model"`
	Output     []any              `json:"output"`
	Error      *responseError     `json:"error"`
	Incomplete *incompleteDetails `json:"incomplete_details"`
	Usage      *usage             `json:"usage"`
	Background bool               `json:"background"`
	Store      bool               `json:"store"`
	Previous   *string            `json:"previous_response_id"`
	*echo                         // nil for Perplexity
}

// echo are the members of a response of OpenAI that repeat the request, or its defaults.
type echo struct {
	CompletedAt     *int64            `json:"completed_at"`
	Instructions    *string           `json:"instructions"`
	MaxOutputTokens *int              `json:"max_output_tokens"`
	MaxToolCalls    *int              `json:"max_tool_calls"`
	Metadata        json.RawMessage   `json:"metadata"`
	Parallel        bool              `json:"parallel_tool_calls"`
	Reasoning       json.RawMessage   `json:"reasoning"`
	Temperature     float64           `json:"temperature"`
	Text            json.RawMessage   `json:"text"`
	ToolChoice      json.RawMessage   `json:"tool_choice"`
	Tools           []json.RawMessage `json:"tools"`
	TopP            float64           `json:"top_p"`
	Truncation      string            `json:"truncation"`
}

// MarshalJSON implements [json.Marshaler]. Perplexity's clients expect members without a value to be
// absent, where OpenAI's expect null.
func (r *response) MarshalJSON() ([]byte, error) {
	type plain response
	if r.echo != nil {
		return json.Marshal((*plain)(r))
	}
	return json.Marshal(&struct {
		*plain
		Error      *responseError     `json:"error,omitempty"`
		Incomplete *incompleteDetails `json:"incomplete_details,omitempty"`
		Usage      *usage             `json:"usage,omitempty"`
		Previous   *string            `json:"previous_response_id,omitempty"`
	}{(*plain)(r), r.Error, r.Incomplete, r.Usage, r.Previous})
}

type responseError struct {
	Code    string `json:"code"`
	Message string `json:"message"`
	Type    string `json:"type"`
}

type incompleteDetails struct {
	Reason string `json:"reason"`
}

type usage struct {
	InputTokens        int                   `json:"input_tokens"`
	InputTokensDetails map[string]int        `json:"input_tokens_details"`
	OutputTokens       int                   `json:"output_tokens"`
	OutputDetails      map[string]int        `json:"output_tokens_details,omitempty"`
	TotalTokens        int                   `json:"total_tokens"`
	ToolCallsDetails   map[string]invocation `json:"tool_calls_details,omitempty"`
}

type invocation struct {
	Invocation int `json:"invocation"`
}

// Items of the output.
type (
	messageItem struct {
		ID      string       `json:"id"`
		Type    string       `json:"type"`
		Role    string       `json:"role"`
		Status  string       `json:"status"`
		Content []outputText `json:"content"`
	}
	outputText struct {
		Type        string            `json:"type"`
		Text        string            `json:"text"`
		Annotations []fileCitation    `json:"annotations"`
		Logprobs    []json.RawMessage `json:"logprobs,omitzero"` // nil for Perplexity
	}
	// fileCitation tells of a file that a program has left in a container.
	fileCitation struct {
		Type        string `json:"type"`
		ContainerID string `json:"container_id"`
		FileID      string `json:"file_id"`
		Filename    string `json:"filename"`
		StartIndex  int    `json:"start_index"` // in characters of the text
		EndIndex    int    `json:"end_index"`
	}
	functionItem struct {
		ID        string `json:"id"`
		Type      string `json:"type"`
		CallID    string `json:"call_id"`
		Name      string `json:"name"`
		Arguments string `json:"arguments"`
		Status    string `json:"status"`
	}
	customItem struct {
		ID     string `json:"id"`
		Type   string `json:"type"`
		CallID string `json:"call_id"`
		Name   string `json:"name"`
		Input  string `json:"input"`
		Status string `json:"status"`
	}
	reasoningItem struct {
		ID        string        `json:"id"`
		Type      string        `json:"type"`
		Summary   []summaryText `json:"summary"`
		Encrypted string        `json:"encrypted_content,omitempty"`
		Status    string        `json:"status"`
	}
	summaryText struct {
		Type string `json:"type"`
		Text string `json:"text"`
	}
	interpreterItem struct {
		ID          string              `json:"id"`
		Type        string              `json:"type"`
		Status      string              `json:"status"`
		Code        *string             `json:"code"`
		ContainerID string              `json:"container_id"`
		Outputs     []interpreterOutput `json:"outputs"` // null unless the request includes them
	}
	shellItem struct {
		ID          string          `json:"id"`
		Type        string          `json:"type"`
		CallID      string          `json:"call_id"`
		Status      string          `json:"status"`
		Action      *shellArguments `json:"action"`
		Environment containerUse    `json:"environment"`
	}
	containerUse struct {
		Type        string `json:"type"`
		ContainerID string `json:"container_id"`
	}
	shellOutputItem struct {
		ID              string        `json:"id"`
		Type            string        `json:"type"`
		CallID          string        `json:"call_id"`
		Status          string        `json:"status"`
		Output          []shellOutput `json:"output"`
		MaxOutputLength *int          `json:"max_output_length"`
	}
	sandboxItem struct {
		ID          string          `json:"id"`
		Type        string          `json:"type"`
		CallID      string          `json:"call_id"`
		ContainerID string          `json:"container_id"`
		Language    string          `json:"language"`
		Code        string          `json:"code"`
		Status      string          `json:"status"`
		Results     []sandboxResult `json:"results"`
	}
)

// newResponse returns the response to a request before its first event.
func newResponse(v vendor, id string, created time.Time, req *request) *response {
	r := &response{
		ID: id, Object: "response", CreatedAt: created.Unix(), Status: statusInProgress, Model: req.Model, Output: []any{},
		Previous:   req.Previous,
		Background: req.Background, Store: req.stored(),
	}
	if req.Background {
		r.Status = statusQueued
	}
	if v == perplexity {
		return r
	}
	r.echo = &echo{
		Instructions: req.Instructions, MaxOutputTokens: req.MaxOutputTokens, MaxToolCalls: req.MaxToolCalls,
		Metadata: req.Metadata, Parallel: req.Parallel == nil || *req.Parallel,
		Reasoning: json.RawMessage(`{"effort":null,"summary":null}`), Temperature: 1,
		Text:       json.RawMessage(`{"format":{"type":"text"}}`),
		ToolChoice: req.ToolChoice, Tools: req.Tools, TopP: 1, Truncation: "disabled",
	}
	if isSet(req.Text.Format) {
		r.Text = value(map[string]json.RawMessage{"format": req.Text.Format})
	}
	if !isSet(r.Metadata) {
		r.Metadata = json.RawMessage("{}")
	}
	if !isSet(r.ToolChoice) {
		r.ToolChoice = json.RawMessage(`"auto"`)
	}
	if r.Tools == nil {
		r.Tools = []json.RawMessage{}
	}
	if req.Temperature != nil {
		r.Temperature = *req.Temperature
	}
	if req.TopP != nil {
		r.TopP = *req.TopP
	}
	return r
}

// end completes the response, but for its output, at a time.
func (r *response) end(v vendor, end *agent.End, at time.Time) {
	u := &usage{
		InputTokens: end.Usage.Input, InputTokensDetails: map[string]int{
			"cached_tokens": end.Usage.CacheRead, "cache_write_tokens": end.Usage.CacheWrite,
		},
		OutputTokens: end.Usage.Output, OutputDetails: map[string]int{"reasoning_tokens": 0},
		TotalTokens: end.Usage.Input + end.Usage.Output,
	}
	if v == perplexity {
		u.InputTokensDetails, u.OutputDetails = map[string]int{
			"cache_creation_input_tokens": end.Usage.CacheWrite, "cache_read_input_tokens": end.Usage.CacheRead,
		}, nil
		if end.Calls > 0 {
			u.ToolCallsDetails = map[string]invocation{sandboxName: {end.Calls}}
		}
	}
	r.Usage, r.Status = u, statusCompleted
	if end.Reason == agent.ReasonCalls && v == perplexity {
		r.Status = statusAction
	}
	if reason := incompleteReasons[end.Reason]; reason != "" {
		r.Status, r.Incomplete = statusIncomplete, &incompleteDetails{reason}
	}
	if r.echo != nil && r.Status == statusCompleted {
		r.CompletedAt = new(at.Unix())
	}
}

// incompleteReasons are why a response is not complete. OpenAI documents none for a limit of steps.
var incompleteReasons = map[agent.Reason]string{
	agent.ReasonLength: "max_output_tokens", agent.ReasonRefused: "content_filter", agent.ReasonPaused: "max_steps",
}
