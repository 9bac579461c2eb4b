package anthropic

import (
	"bytes"
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"strings"

	"github.com/bullpen-run/bullpen/agent"
	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/proto/api"
)

// request is the body of a request for a message. Members that are not here are ignored.
type request struct {
	Model       string            `json:"model"`
	MaxTokens   int               `json:"max_tokens"`
	Messages    []inputMessage    `json:"messages"`
	System      content           `json:"system"`
	Tools       []json.RawMessage `json:"tools"`
	ToolChoice  *toolChoice       `json:"tool_choice"`
	Stream      bool              `json:"stream"`
	Temperature *float64          `json:"temperature"`
	TopP        *float64          `json:"top_p"`
	Stop        []string          `json:"stop_sequences"`
	Container   containerRef      `json:"container"`
	Thinking    json.RawMessage   `json:"thinking"`
	Context     json.RawMessage   `json:"context_management"`
	// OutputConfig has the form of texts. OutputFormat is how earlier clients send it.
	OutputConfig struct {
		Format *outputFormat `json:"format"`
		Effort string        `json:"effort"`
	} `json:"output_config"`
	OutputFormat *outputFormat `json:"output_format"`
	// Members whose features this server does not have.
	Thread     json.RawMessage   `json:"thread"`
	MCPServers []json.RawMessage `json:"mcp_servers"`

	betas []string // of the header
}

// outputFormat is the form of texts.
type outputFormat struct {
	Type   string          `json:"type"`
	Schema json.RawMessage `json:"schema"`
}

// format returns the form of texts, nil for any.
func (r *request) format() *agent.Format {
	f := cmp.Or(r.OutputConfig.Format, r.OutputFormat)
	if f == nil {
		return nil
	}
	return &agent.Format{Name: "output", Schema: f.Schema, Strict: new(true)}
}

// ifSet returns a member of a request, nil for none.
func ifSet(raw json.RawMessage) json.RawMessage {
	if !isSet(raw) {
		return nil
	}
	return raw
}

// thinks reports whether the client is to see what the model thinks.
func (r *request) thinks() bool {
	var thinking struct {
		Type string `json:"type"`
	}
	return json.Unmarshal(r.Thinking, &thinking) == nil && (thinking.Type == "enabled" || thinking.Type == "adaptive")
}

// maxBetas is the number of features that a request may name.
const maxBetas = 50

// betasOf returns the names of features in the header of a request. Servers refuse other texts.
func betasOf(h http.Header) (names []string) {
	for _, list := range h.Values("Anthropic-Beta") {
		for name := range strings.SplitSeq(list, ",") {
			name = strings.TrimSpace(name)
			valid := name != "" && strings.Trim(name, "abcdefghijklmnopqrstuvwxyz0123456789-_.") == ""
			if valid && len(names) < maxBetas {
				names = append(names, name)
			}
		}
	}
	return names
}

type inputMessage struct {
	Role    string  `json:"role"`
	Content content `json:"content"`
}

type toolChoice struct {
	Type   string `json:"type"`
	Name   string `json:"name"`
	Serial bool   `json:"disable_parallel_tool_use"`
}

// containerRef is the id of a container, alone or in an object.
type containerRef string

// UnmarshalJSON implements [json.Unmarshaler].
func (c *containerRef) UnmarshalJSON(text []byte) error {
	var id *string
	if json.Unmarshal(text, &id) != nil {
		var object struct {
			ID     *string           `json:"id"`
			Skills []json.RawMessage `json:"skills"`
		}
		if json.Unmarshal(text, &object) != nil {
			return proto.FieldErrorf("container", "must be an id, or an object with one")
		}
		if len(object.Skills) > 0 {
			return proto.FieldErrorf("container.skills", "must be empty: this server has no skills")
		}
		id = object.ID
	}
	if id != nil {
		*c = containerRef(*id)
	}
	return nil
}

// content is a list of blocks, or a text as its short form.
type content []block

// UnmarshalJSON implements [json.Unmarshaler].
func (c *content) UnmarshalJSON(text []byte) error {
	switch first := bytes.TrimLeft(text, " \t\r\n"); {
	case bytes.HasPrefix(first, []byte(`"`)):
		var s string
		if err := json.Unmarshal(text, &s); err != nil {
			return err
		}
		*c = content{{Type: "text", Text: s}}
		return nil
	default:
		return json.Unmarshal(text, (*[]block)(c))
	}
}

// block is a content block in a request.
type block struct {
	Type      string          `json:"type"`
	Text      string          `json:"text"`
	ID        string          `json:"id"`
	Name      string          `json:"name"`
	Input     json.RawMessage `json:"input"`
	ToolUseID string          `json:"tool_use_id"`
	IsError   bool            `json:"is_error"`
	Content   json.RawMessage `json:"content"`
	FileID    string          `json:"file_id"`
	Title     string          `json:"title"`
	Thinking  string          `json:"thinking"`
	Signature string          `json:"signature"`
	Data      string          `json:"data"`
	Source    *source         `json:"source"`
	Cache     json.RawMessage `json:"cache_control"`
	ToolName  string          `json:"tool_name"` // of a reference to a tool
}

// UnmarshalJSON implements [json.Unmarshaler]. The source of a search result is a text.
func (b *block) UnmarshalJSON(text []byte) error {
	type plain block
	var sourced struct {
		*plain
		Source json.RawMessage `json:"source"`
	}
	sourced.plain = (*plain)(b)
	if err := json.Unmarshal(text, &sourced); err != nil {
		return err
	}
	if !isSet(sourced.Source) || bytes.HasPrefix(sourced.Source, []byte(`"`)) {
		return nil
	}
	return json.Unmarshal(sourced.Source, &b.Source)
}

// source is where the content of a block is.
type source struct {
	Type      string          `json:"type"`
	MediaType string          `json:"media_type"`
	Data      string          `json:"data"`
	Content   json.RawMessage `json:"content"`
}

// conversation is what a request says.
type conversation struct {
	items   []agent.Item
	uploads []upload
}

// upload is a block that puts a file into the container.
type upload struct {
	id      string
	item    int  // the place of the text that tells the model of it, in items
	current bool // no message of the assistant follows: the file may not be there yet
}

// decodeRequest decodes the body of a request for a message.
func decodeRequest(body []byte) (*request, error) {
	r, err := decodeCount(body)
	if err != nil {
		return nil, err
	}
	switch {
	case r.MaxTokens < 1:
		return nil, proto.FieldErrorf("max_tokens", "must be a whole number, at least 1")
	case isSet(r.Thread):
		return nil, &api.Error{
			Code: api.CodeValidation, Reason: threadUnsupported,
			Message: "thread must be left out: this server stores no conversations; send all messages",
		}
	case len(r.MCPServers) > 0:
		return nil, proto.FieldErrorf("mcp_servers", "must be empty: this server has no MCP connectors")
	}
	if f := cmp.Or(r.OutputConfig.Format, r.OutputFormat); f != nil &&
		(f.Type != "json_schema" || !bytes.HasPrefix(f.Schema, []byte("{"))) {
		return nil, proto.FieldErrorf("output_config.format", "must have the type json_schema and a schema")
	}
	return r, nil
}

// threadUnsupported is the error code that makes the SDKs resend the whole conversation, without a
// thread.
const threadUnsupported = api.Reason("thread_unsupported_request")

func isSet(raw json.RawMessage) bool { return len(raw) > 0 && string(raw) != "null" }

// decodeCount decodes the body of a request to count the tokens of one.
func decodeCount(body []byte) (*request, error) {
	var r request
	if err := json.Unmarshal(body, &r); err != nil {
		if field, ok := errors.AsType[*proto.FieldError](err); ok {
			return nil, field
		}
		return nil, proto.FieldErrorf("body", "is not a valid request: %v", err)
	}
	switch {
	case r.Model == "":
		return nil, proto.FieldErrorf("model", "is required")
	case len(r.Messages) == 0:
		return nil, proto.FieldErrorf("messages", "must have at least one message")
	}
	return &r, nil
}

// conversation returns the conversation of a request.
func (r *request) conversation() (*conversation, error) {
	c := &conversation{}
	for i := range r.Messages {
		m := &r.Messages[i]
		if m.Role != "user" && m.Role != "assistant" {
			return nil, proto.FieldErrorf(fmt.Sprintf("messages.%d.role", i), "must be user or assistant")
		}
		if m.Role == "assistant" {
			for k := range c.uploads {
				c.uploads[k].current = false
			}
		}
		for j := range m.Content {
			if err := c.add(agent.Role(m.Role), &m.Content[j]); err != nil {
				return nil, proto.FieldErrorf(fmt.Sprintf("messages.%d.content.%d", i, j), "%s", err.Error())
			}
		}
	}
	return c, nil
}

// unsigned is the signature of thinking of a model whose protocol has none. Clients drop thinking
// without a signature, and the model needs it back.
const unsigned = "bullpen-unsigned"

// add adds a block to the conversation. It omits the assistant's blocks that no model can read,
// which another server has produced.
func (c *conversation) add(role agent.Role, b *block) error {
	put := func(item agent.Item) {
		item.Cache = ifSet(b.Cache)
		c.items = append(c.items, item)
	}
	switch {
	case b.Type == "tool_use" || b.Type == "server_tool_use":
		if b.ID == "" || b.Name == "" {
			return fmt.Errorf("must have an id and a name")
		}
		input := b.Input
		if len(input) == 0 {
			input = json.RawMessage("{}")
		}
		put(agent.Item{Call: &agent.Call{ID: b.ID, Name: b.Name, Arguments: input}})
	case b.Type == "tool_result":
		items, err := contents(b.Content)
		if err != nil {
			return err
		}
		result := &agent.Result{CallID: b.ToolUseID, Failed: b.IsError, Items: items}
		if text, isText := textOf(items); isText {
			result.Text, result.Items = text, nil
		}
		put(agent.Item{Result: result})
	case strings.HasSuffix(b.Type, "_tool_result"):
		put(agent.Item{Result: &agent.Result{
			CallID: b.ToolUseID, Text: compact(b.Content), Failed: bytes.Contains(b.Content, []byte("_tool_result_error")),
		}})
	case role == agent.RoleAssistant && (b.Type == "thinking" || b.Type == "redacted_thinking"):
		thought := &agent.Thinking{Text: b.Thinking, Signature: b.Signature, Redacted: b.Data}
		if b.Signature == unsigned {
			thought.Signature = ""
		}
		put(agent.Item{Role: role, Thinking: thought})
	case role == agent.RoleAssistant && b.Type != "text":
	case b.Type == "container_upload":
		if b.FileID == "" {
			return fmt.Errorf("must have a file_id")
		}
		c.uploads = append(c.uploads, upload{b.FileID, len(c.items), true})
		put(agent.Item{Role: role, Text: "(A file that does not exist any more.)"})
	default:
		item, err := b.item(role)
		if err != nil {
			return err
		}
		if item != nil {
			put(*item)
		}
	}
	return nil
}

// item returns the item of a block that can also be in a tool's result, nil for an empty one.
func (b *block) item(role agent.Role) (*agent.Item, error) {
	switch {
	case b.Type == "text" && b.Text == "":
		return nil, nil
	case b.Type == "text":
		return &agent.Item{Role: role, Text: b.Text}, nil
	case b.Type == "image" && (b.Source == nil || b.Source.Type != "base64"):
		return nil, fmt.Errorf("must have a source of type base64; this server passes no URLs on to the model's server: " +
			"send the image itself")
	case b.Type == "image":
		return &agent.Item{Role: role, Image: &agent.Image{MediaType: b.Source.MediaType, Base64: b.Source.Data}}, nil
	case b.Type == "document" && b.Source != nil && b.Source.Type == "text":
		return &agent.Item{Role: role, Text: strings.TrimSpace(b.Title + "\n" + b.Source.Data)}, nil
	case b.Type == "document" && b.Source != nil && b.Source.Type == "base64":
		return &agent.Item{
			Role:     role,
			Document: &agent.Document{Name: b.Title, MediaType: b.Source.MediaType, Base64: b.Source.Data},
		}, nil
	case b.Type == "document" && b.Source != nil && b.Source.Type == "content":
		return titled(role, b.Title, b.Source.Content)
	case b.Type == "document":
		return nil, fmt.Errorf("must have a source of type base64, text or content; this server passes no addresses on to " +
			"the model's server: send the document itself")
	case b.Type == "search_result":
		return titled(role, b.Title, b.Content)
	case b.Type == "tool_reference":
		return &agent.Item{Role: role, Text: "(The tool " + b.ToolName + ")"}, nil
	default:
		return nil, fmt.Errorf("has the type %q, which this server does not support; use text, image, document, tool_result "+
			"or container_upload", proto.Shorten(b.Type))
	}
}

// titled returns the text of content with a title.
func titled(role agent.Role, title string, content json.RawMessage) (*agent.Item, error) {
	items, err := contents(content)
	if err != nil {
		return nil, err
	}
	text, isText := textOf(items)
	if !isText {
		return nil, fmt.Errorf("must have texts as content")
	}
	return &agent.Item{Role: role, Text: strings.TrimSpace(title + "\n" + text)}, nil
}

// contents returns the items of a text or blocks of the user.
func contents(raw json.RawMessage) (items []agent.Item, err error) {
	if len(raw) == 0 {
		return nil, nil
	}
	var blocks content
	if err := json.Unmarshal(raw, &blocks); err != nil {
		return nil, fmt.Errorf("must have a text or blocks as content")
	}
	for i := range blocks {
		item, err := blocks[i].item(agent.RoleUser)
		if err != nil {
			return nil, fmt.Errorf("has content that %w", err)
		}
		if item != nil {
			items = append(items, *item)
		}
	}
	return items, nil
}

// textOf returns the text of items, and whether they are only that.
func textOf(items []agent.Item) (text string, isText bool) {
	var texts []string
	for _, item := range items {
		if item.Image != nil || item.Document != nil {
			return "", false
		}
		texts = append(texts, item.Text)
	}
	return strings.Join(texts, "\n"), true
}

func compact(raw json.RawMessage) string {
	var out bytes.Buffer
	if json.Compact(&out, raw) != nil {
		return ""
	}
	return out.String()
}

// message is an answer.
type message struct {
	ID           string         `json:"id"`
	Type         string         `json:"type"`
	Role         string         `json:"role"`
	Model        string         `json:"model"`
	Content      []any          `json:"content"`
	StopReason   *string        `json:"stop_reason"`
	StopSequence *string        `json:"stop_sequence"`
	Container    *containerBody `json:"container"`
	Usage        usageBody      `json:"usage"`
}

type containerBody struct {
	ID        string          `json:"id"`
	ExpiresAt string          `json:"expires_at"`
	Skills    json.RawMessage `json:"skills"`
}

type usageBody struct {
	InputTokens         int             `json:"input_tokens"`
	OutputTokens        int             `json:"output_tokens"`
	CacheCreationTokens int             `json:"cache_creation_input_tokens"`
	CacheReadTokens     int             `json:"cache_read_input_tokens"`
	ServerToolUse       *serverToolUse  `json:"server_tool_use"`
	ServiceTier         string          `json:"service_tier,omitempty"`
	CacheCreation       json.RawMessage `json:"cache_creation,omitempty"`
}

type serverToolUse struct {
	WebSearchRequests     int `json:"web_search_requests"`
	WebFetchRequests      int `json:"web_fetch_requests"`
	CodeExecutionRequests int `json:"code_execution_requests"`
}

// Blocks of answers.
type (
	textBlock struct {
		Type string `json:"type"`
		Text string `json:"text"`
	}
	thinkingBlock struct {
		Type      string `json:"type"`
		Thinking  string `json:"thinking"`
		Signature string `json:"signature"`
	}
	redactedBlock struct {
		Type string `json:"type"`
		Data string `json:"data"`
	}
	useBlock struct {
		Type  string          `json:"type"`
		ID    string          `json:"id"`
		Name  string          `json:"name"`
		Input json.RawMessage `json:"input"`
	}
	resultBlock struct {
		Type      string `json:"type"`
		ToolUseID string `json:"tool_use_id"`
		Content   any    `json:"content"`
	}
	programResult struct {
		Type       string       `json:"type"`
		Stdout     string       `json:"stdout"`
		Stderr     string       `json:"stderr"`
		ReturnCode int          `json:"return_code"`
		Content    []outputFile `json:"content"`

		pictures []agent.Image
	}
	outputFile struct {
		Type   string `json:"type"`
		FileID string `json:"file_id"`
	}
	resultError struct {
		Type         string  `json:"type"`
		ErrorCode    string  `json:"error_code"`
		ErrorMessage *string `json:"error_message,omitempty"`
	}
	viewResult struct {
		Type       string `json:"type"`
		FileType   string `json:"file_type"`
		Content    string `json:"content"`
		NumLines   *int   `json:"num_lines"`
		StartLine  *int   `json:"start_line"`
		TotalLines *int   `json:"total_lines"`
	}
	createResult struct {
		Type         string `json:"type"`
		IsFileUpdate bool   `json:"is_file_update"`
	}
	replaceResult struct {
		Type     string   `json:"type"`
		OldStart *int     `json:"old_start"`
		OldLines *int     `json:"old_lines"`
		NewStart *int     `json:"new_start"`
		NewLines *int     `json:"new_lines"`
		Lines    []string `json:"lines"`
	}
)
