package responses

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/bullpen-run/bullpen/agent"
	"github.com/bullpen-run/bullpen/proto"
)

// request is the body of a request for a response. Members that are not here are ignored.
type request struct {
	Model           string            `json:"model"`
	Models          []string          `json:"models"` // of Perplexity
	Preset          string            `json:"preset"` // of Perplexity
	Input           json.RawMessage   `json:"input"`
	Instructions    *string           `json:"instructions"`
	MaxOutputTokens *int              `json:"max_output_tokens"`
	MaxSteps        *int              `json:"max_steps"` // of Perplexity
	MaxToolCalls    *int              `json:"max_tool_calls"`
	Stream          bool              `json:"stream"`
	Background      bool              `json:"background"`
	Store           *bool             `json:"store"`
	Previous        *string           `json:"previous_response_id"`
	Conversation    json.RawMessage   `json:"conversation"`
	Prompt          json.RawMessage   `json:"prompt"`
	Temperature     *float64          `json:"temperature"`
	TopP            *float64          `json:"top_p"`
	Tools           []json.RawMessage `json:"tools"`
	ToolChoice      json.RawMessage   `json:"tool_choice"`
	Parallel        *bool             `json:"parallel_tool_calls"`
	Include         []string          `json:"include"`
	Metadata        json.RawMessage   `json:"metadata"`
	Skills          []json.RawMessage `json:"skills"`
	ResponseFormat  json.RawMessage   `json:"response_format"`
	Reasoning       struct {
		Effort string `json:"effort"`
	} `json:"reasoning"`
	Text struct {
		Format    json.RawMessage `json:"format"`
		Verbosity string          `json:"verbosity"`
	} `json:"text"`

	format *agent.Format // of Text or ResponseFormat
	// codex is set for Codex, which offers tools of OpenAI's servers in all requests, and sends a
	// request again after each end that is not complete.
	codex bool
}

// format is a form of texts. Perplexity has the schema in a member of its own.
type format struct {
	Type string `json:"type"`
	schema
	JSONSchema schema `json:"json_schema"`
}

type schema struct {
	Name   string          `json:"name"`
	Schema json.RawMessage `json:"schema"`
	Strict *bool           `json:"strict"`
}

// decodeFormat decodes a form of texts, nil for any.
func decodeFormat(field string, raw json.RawMessage) (*agent.Format, error) {
	var f format
	if !isSet(raw) {
		return nil, nil
	}
	if err := json.Unmarshal(raw, &f); err != nil {
		return nil, proto.FieldErrorf(field, "is no format: %v", err)
	}
	if len(f.JSONSchema.Schema) > 0 {
		f.schema = f.JSONSchema
	}
	switch {
	case f.Type == "text":
		return nil, nil
	case f.Type != "json_schema":
		return nil, proto.FieldErrorf(field+".type", "must be text or json_schema")
	case !bytes.HasPrefix(f.Schema, []byte("{")) || f.Name == "":
		return nil, proto.FieldErrorf(field, "must have a name and a schema")
	}
	return &agent.Format{Name: f.Name, Schema: f.Schema, Strict: f.Strict}, nil
}

// Values of include.
const (
	includeOutputs   = "code_interpreter_call.outputs"
	includeReasoning = "reasoning.encrypted_content"
)

// decodeRequest decodes a request's body, and refuses unsupported features.
func decodeRequest(v vendor, body []byte) (*request, error) {
	var r request
	if err := json.Unmarshal(body, &r); err != nil {
		return nil, proto.FieldErrorf("body", "is not a valid request: %v", err)
	}
	if v == perplexity && r.Model == "" {
		r.Model = r.Preset // the operator maps it like a model
	}
	if v == perplexity && len(r.Models) > 0 {
		r.Model = r.Models[0]
	}
	switch {
	case r.Model == "":
		return nil, proto.FieldErrorf("model", "is required")
	case len(r.Models) > 1:
		return nil, proto.FieldErrorf("models", "must be one model: this server does not fall back to others")
	case isSet(r.Conversation):
		return nil, proto.FieldErrorf("conversation",
			"must be left out: this server does not store conversations; use previous_response_id, or send the items as input")
	case isSet(r.Prompt):
		return nil, proto.FieldErrorf("prompt", "must be left out: this server has no stored prompts")
	case len(r.Skills) > 0:
		return nil, proto.FieldErrorf("skills", "must be empty: this server has no skills")
	case r.MaxOutputTokens != nil && *r.MaxOutputTokens < 1:
		return nil, proto.FieldErrorf("max_output_tokens", "must be a whole number, at least 1")
	case r.MaxSteps != nil && (*r.MaxSteps < 1 || *r.MaxSteps > maxSteps):
		return nil, proto.FieldErrorf("max_steps", "must be a whole number from 1 to %d", maxSteps)
	case r.MaxToolCalls != nil && *r.MaxToolCalls < 1:
		return nil, proto.FieldErrorf("max_tool_calls", "must be a whole number, at least 1")
	}
	field, raw := "text.format", r.Text.Format
	if v == perplexity {
		field, raw = "response_format", r.ResponseFormat
	}
	var err error
	r.format, err = decodeFormat(field, raw)
	return &r, err
}

// stored reports whether the response is stored. Background responses always are; others are unless
// the request opts out.
func (r *request) stored() bool { return r.Background || r.Store == nil || *r.Store }

func isSet(raw json.RawMessage) bool { return len(raw) > 0 && string(raw) != "null" }

// item is an item of the input: a message, or an item of an earlier response.
type item struct {
	Type    string          `json:"type"`
	ID      string          `json:"id"`
	CallID  string          `json:"call_id"`
	Role    string          `json:"role"`
	Content json.RawMessage `json:"content"`
	Name    string          `json:"name"`
	Status  string          `json:"status"`
	// Arguments are the text of a JSON object.
	Arguments string          `json:"arguments"`
	Output    json.RawMessage `json:"output"`
	Input     string          `json:"input"`             // of a custom tool
	Encrypted string          `json:"encrypted_content"` // of reasoning
	// Of the code interpreter and the sandbox.
	Code        string              `json:"code"`
	Language    string              `json:"language"`
	ContainerID string              `json:"container_id"`
	Outputs     []interpreterOutput `json:"outputs"`
	Results     []sandboxResult     `json:"results"`
	Action      json.RawMessage     `json:"action"` // of the shell
}

type part struct {
	Type     string          `json:"type"`
	Text     string          `json:"text"`
	Refusal  string          `json:"refusal"`
	ImageURL json.RawMessage `json:"image_url"`
	Filename string          `json:"filename"`
	FileData string          `json:"file_data"`
}

// conversation is what a request says.
type conversation struct {
	system    []agent.Instruction
	items     []agent.Item
	container string // of the last call of a code interpreter
}

// inputItems returns the items of the input.
func (r *request) inputItems() []json.RawMessage {
	var items []json.RawMessage
	if json.Unmarshal(r.Input, &items) == nil {
		return items
	}
	return []json.RawMessage{value(map[string]any{"type": "message", "role": "user", "content": r.Input})}
}

// conversation returns the conversation of a request.
func (r *request) conversation() (*conversation, error) {
	c := &conversation{}
	if r.Instructions != nil && *r.Instructions != "" {
		c.system = append(c.system, agent.Instruction{Text: *r.Instructions})
	}
	var text string
	if json.Unmarshal(r.Input, &text) == nil && isSet(r.Input) {
		c.items = append(c.items, agent.Item{Role: agent.RoleUser, Text: text})
		return c, nil
	}
	var items []item
	if err := json.Unmarshal(r.Input, &items); err != nil || len(items) == 0 {
		return nil, proto.FieldErrorf("input", "must be a text, or a list of at least one item")
	}
	for i := range items {
		if err := c.add(&items[i]); err != nil {
			return nil, proto.FieldErrorf(fmt.Sprintf("input[%d]", i), "%s", err.Error())
		}
	}
	return c, nil
}

func (c *conversation) put(item agent.Item) { c.items = append(c.items, item) }

// call puts a call and, unless it is nil, its result.
func (c *conversation) call(id, name string, arguments any, result *agent.Result) {
	text, err := json.Marshal(arguments)
	if err != nil {
		panic(err) // arguments are texts here, or valid JSON
	}
	c.put(agent.Item{Call: &agent.Call{ID: id, Name: name, Arguments: text}})
	if result != nil {
		result.CallID = id
		c.put(agent.Item{Result: result})
	}
}

func (c *conversation) add(i *item) error {
	switch i.Type {
	case "", "message":
		return c.message(i)
	case "function_call":
		arguments := json.RawMessage(i.Arguments)
		switch {
		case len(arguments) == 0:
			arguments = json.RawMessage("{}")
		case !json.Valid(arguments): // the model wrote so; the result says what came of it
			arguments = value(map[string]string{"malformed": i.Arguments})
		}
		var object map[string]json.RawMessage
		if i.CallID == "" || i.Name == "" || json.Unmarshal(arguments, &object) != nil {
			return errors.New("must have a call_id, a name, and the text of a JSON object as arguments")
		}
		c.call(i.CallID, i.Name, arguments, nil)
	case "function_call_output", "custom_tool_call_output":
		return c.output(i)
	case "custom_tool_call":
		if i.CallID == "" || i.Name == "" {
			return errors.New("must have a call_id and a name")
		}
		c.call(i.CallID, i.Name, map[string]string{customInput: i.Input}, nil)
	case "code_interpreter_call":
		if i.ID == "" {
			return errors.New("must have an id")
		}
		c.container = i.ContainerID
		c.call(i.ID, interpreterName, codeArguments{Code: i.Code}, i.interpreterResult())
	case "shell_call":
		if i.CallID == "" || !isSet(i.Action) {
			return errors.New("must have a call_id and an action")
		}
		c.call(i.CallID, shellName, i.Action, nil)
	case "shell_call_output":
		if i.CallID == "" {
			return errors.New("must have a call_id")
		}
		c.put(agent.Item{Result: &agent.Result{CallID: i.CallID, Text: string(i.Output)}})
	case "sandbox_results":
		if i.CallID == "" {
			return errors.New("must have a call_id")
		}
		var result *agent.Result
		if i.Status != statusInProgress {
			result = sandboxText(i.Results, i.Status)
		}
		c.call(i.CallID, sandboxName, codeArguments{Language: i.Language, Code: i.Code}, result)
	case "reasoning":
		if thought := decodeThought(i.Encrypted); thought != nil {
			c.put(agent.Item{Role: agent.RoleAssistant, Thinking: thought})
		}
	// no model of another vendor could read them
	case "search_results", "fetch_url_results", "share_file", "web_search_call":
	default:
		return fmt.Errorf("has the type %q, which this server does not support", proto.Shorten(i.Type))
	}
	return nil
}

// output adds the result of a client's tool.
func (c *conversation) output(i *item) error {
	parts, err := decodeParts(i.Output)
	if err != nil || i.CallID == "" {
		return errors.New("must have a call_id, and a text or parts as output")
	}
	result := &agent.Result{CallID: i.CallID}
	var texts []string
	files := false
	for _, p := range parts {
		item, err := p.item(agent.RoleUser)
		if err != nil {
			return err
		}
		if item == nil {
			continue
		}
		result.Items = append(result.Items, *item)
		texts = append(texts, item.Text)
		files = files || item.Image != nil || item.Document != nil
	}
	if !files {
		result.Text, result.Items = strings.Join(texts, "\n"), nil
	}
	c.put(agent.Item{Result: result})
	return nil
}

// interpreterResult returns the result of a call, or nil if it was not carried out yet.
func (i *item) interpreterResult() *agent.Result {
	switch {
	case i.Status == statusInProgress:
		return nil
	case i.Outputs == nil:
		return &agent.Result{Text: "(The output is not part of the conversation any more.)"}
	}
	var all []string
	for _, o := range i.Outputs {
		if o.Logs != nil {
			all = append(all, *o.Logs)
		}
	}
	return &agent.Result{Text: strings.Join(all, "\n"), Failed: i.Status != statusCompleted}
}

// message adds a message.
func (c *conversation) message(i *item) error {
	role := agent.RoleUser
	switch i.Role {
	case "user":
	case "assistant":
		role = agent.RoleAssistant
	case "system", "developer":
		text, err := texts(i.Content)
		c.system = append(c.system, agent.Instruction{Text: text})
		return err
	default:
		return errors.New("must have the role user, assistant, system or developer")
	}
	parts, err := decodeParts(i.Content)
	if err != nil {
		return err
	}
	for _, p := range parts {
		item, err := p.item(role)
		if err != nil {
			return err
		}
		if item != nil {
			c.put(*item)
		}
	}
	return nil
}

// item returns the item of a part, nil for an empty one.
func (p *part) item(role agent.Role) (*agent.Item, error) {
	switch {
	case p.Type == "input_image" && role == agent.RoleUser:
		image, err := p.image()
		return &agent.Item{Role: role, Image: image}, err
	case p.Type == "input_file" && role == agent.RoleUser:
		document, err := p.document()
		return &agent.Item{Role: role, Document: document}, err
	case p.text() != "":
		return &agent.Item{Role: role, Text: p.text()}, nil
	case !slices.Contains(textParts, p.Type):
		return nil, p.unsupported()
	default:
		return nil, nil
	}
}

var textParts = []string{"input_text", "output_text", "text", "refusal"}

func (p *part) unsupported() error {
	return fmt.Errorf("has a part of type %q, which this server does not support here; use input_text or input_image",
		proto.Shorten(p.Type))
}

// text returns the text of a part, empty for other parts.
func (p *part) text() string {
	switch {
	case p.Type == "refusal":
		return p.Refusal
	case slices.Contains(textParts, p.Type):
		return p.Text
	default:
		return ""
	}
}

func (p *part) image() (*agent.Image, error) {
	var url string
	if json.Unmarshal(p.ImageURL, &url) != nil || url == "" {
		return nil, errors.New("has an image without an image_url, which must be a data URL")
	}
	rest, inline := strings.CutPrefix(url, "data:")
	if !inline {
		return nil, errors.New("has an image at an address; this server passes no URLs on to the model's server: send the " +
			"image itself, as a data URL")
	}
	kind, data, ok := strings.Cut(rest, ";base64,")
	if !ok {
		return nil, errors.New("has an image whose data URL is not in Base64")
	}
	return &agent.Image{MediaType: kind, Base64: data}, nil
}

// document returns the file of a part.
func (p *part) document() (*agent.Document, error) {
	rest, inline := strings.CutPrefix(p.FileData, "data:")
	kind, data, ok := strings.Cut(rest, ";base64,")
	if !inline || !ok {
		return nil, errors.New("has a file without file_data, which must be a data URL in Base64; this server passes no " +
			"addresses and no ids on to the model's server")
	}
	return &agent.Document{Name: p.Filename, MediaType: kind, Base64: data}, nil
}

// decodeParts decodes content: a text, or a list of parts.
func decodeParts(raw json.RawMessage) ([]part, error) {
	var text string
	if bytes.HasPrefix(raw, []byte(`"`)) && json.Unmarshal(raw, &text) == nil {
		return []part{{Type: "input_text", Text: text}}, nil
	}
	var parts []part
	if err := json.Unmarshal(raw, &parts); err != nil {
		return nil, errors.New("must have a text or parts as content")
	}
	return parts, nil
}

// texts returns the text of content that is text only.
func texts(raw json.RawMessage) (string, error) {
	parts, err := decodeParts(raw)
	if err != nil {
		return "", err
	}
	var all []string
	for _, p := range parts {
		if !slices.Contains(textParts, p.Type) {
			return "", p.unsupported()
		}
		all = append(all, p.text())
	}
	return strings.Join(all, "\n"), nil
}

// choice returns which tools the model must call.
func (r *request) choice(set *toolSet) (agent.Choice, error) {
	var mode string
	var object struct {
		Type string `json:"type"`
		Name string `json:"name"`
	}
	if !isSet(r.ToolChoice) {
		return agent.Choice{}, nil
	}
	if json.Unmarshal(r.ToolChoice, &mode) == nil {
		switch mode {
		case "auto", "none":
			return agent.Choice{Mode: mode}, nil
		case "required":
			return agent.Choice{Mode: "any"}, nil
		}
	} else if json.Unmarshal(r.ToolChoice, &object) == nil {
		if object.Type != "function" && object.Type != customTool {
			object.Name = object.Type
		}
		if set.names[object.Name] {
			return agent.Choice{Mode: "tool", Name: object.Name}, nil
		}
	}
	return agent.Choice{}, proto.FieldErrorf("tool_choice", "must be auto, none, required, or name one of the tools")
}
