package opencode

import (
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"strings"

	"github.com/bullpen-run/bullpen/agent/sessions"
)

const (
	maxID      = 200       // bytes of an id
	maxMessage = 2 << 10   // bytes of an error's text
	maxText    = 256 << 10 // bytes of other texts; longer ones are truncated
	maxRaw     = 64 << 10  // bytes of an event that is stored as it is
	maxDiffs   = 100       // that are remembered
	maxFiles   = 100       // of a tool call that are reported
	maxTodos   = 100       // that are reported
)

const (
	roleUser      = "user"
	roleAssistant = "assistant"

	statusIdle  = "idle"
	statusBusy  = "busy"
	statusRetry = "retry"
)

// event is an event of OpenCode. Events of other types than those of handle are ignored.
type event struct {
	Type       string          `json:"type"`
	Properties json.RawMessage `json:"properties"`
}

type status struct {
	Type    string `json:"type"`
	Attempt int    `json:"attempt"`
	Message string `json:"message"`
	Next    int64  `json:"next"` // milliseconds since the epoch
}

// failure is an error of OpenCode.
type failure struct {
	Name string `json:"name"`
	Data struct {
		Message string `json:"message"`
		Status  int    `json:"statusCode"`
	} `json:"data"`
}

// report returns the failure for clients, without the stack traces that some have.
func (f *failure) report() *sessions.Failure {
	text, _, _ := strings.Cut(f.Data.Message, "\n    at ")
	code := shorten(cmp.Or(f.Name, "UnknownError"), maxID)
	if code == "APIError" {
		code = "api_error"
	}
	failed := &sessions.Failure{Message: shorten(cmp.Or(text, "OpenCode failed"), maxMessage), Code: &code}
	if f.Data.Status != 0 {
		failed.Details = json.RawMessage(fmt.Sprintf(`{"status":%d}`, f.Data.Status))
	}
	return failed
}

type message struct {
	Info  info   `json:"info"`
	Parts []part `json:"parts"`
}

// info describes a message.
type info struct {
	ID        string          `json:"id"`
	SessionID string          `json:"sessionID"`
	Role      string          `json:"role"`
	Parent    string          `json:"parentID"` // of the assistant's: the user's message
	Summary   json.RawMessage `json:"summary"`  // of the assistant's: true for a summary of the conversation
	Error     *failure        `json:"error"`
	Time      times           `json:"time"`
	Finish    string          `json:"finish"`
}

type times struct {
	Completed float64 `json:"completed"`
	End       float64 `json:"end"`
}

// part is a part of a message.
type part struct {
	ID        string    `json:"id"`
	SessionID string    `json:"sessionID"`
	MessageID string    `json:"messageID"`
	Type      string    `json:"type"`
	Text      string    `json:"text"`
	Tool      string    `json:"tool"`
	CallID    string    `json:"callID"`
	State     toolState `json:"state"`
	Time      times     `json:"time"`
}

type toolState struct {
	Status   string          `json:"status"`
	Input    json.RawMessage `json:"input"`
	Output   string          `json:"output"`
	Error    string          `json:"error"`
	Metadata json.RawMessage `json:"metadata"`
}

// permission is a request for a permission.
type permission struct {
	ID         string          `json:"id"`
	SessionID  string          `json:"sessionID"`
	Permission string          `json:"permission"`
	Patterns   []string        `json:"patterns"`
	Metadata   json.RawMessage `json:"metadata"`
	Tool       struct {
		CallID string `json:"callID"`
	} `json:"tool"`
}

// question is a request for answers.
type question struct {
	ID        string `json:"id"`
	SessionID string `json:"sessionID"`
	Questions []struct {
		Question string `json:"question"`
		Multiple bool   `json:"multiple"`
		Options  []struct {
			Label string `json:"label"`
		} `json:"options"`
	} `json:"questions"`
}

// decode decodes JSON of a program that is not trusted. Members of unexpected types are left out.
func decode(data []byte, v any) error {
	err := json.Unmarshal(data, v)
	if _, ok := errors.AsType[*json.UnmarshalTypeError](err); ok {
		return nil
	}
	return err
}

// shorten truncates a text to at most n bytes.
func shorten(text string, n int) string {
	if len(text) > n {
		const truncated = "… [truncated]"
		text = text[:max(0, n-len(truncated))] + truncated
	}
	return strings.ToValidUTF8(text, "\ufffd")
}

// remember adds an entry to what is known of a turn.
func remember[T any](m map[string]T, id string, value T) bool {
	if id == "" || len(id) > maxID || len(m) >= maxKnown {
		return false
	}
	m[id] = value
	return true
}

// handle handles an event.
func (c *conversation) handle(data []byte) {
	if !c.turn.running {
		return
	}
	var e event
	if err := decode(data, &e); err != nil {
		text := "an event is no JSON object"
		if data == nil {
			text = fmt.Sprintf("an event is longer than %d bytes", maxEvent)
		}
		c.report(&sessions.Native{Type: sessions.Unparsed, Data: sessions.UnparsedOutput{
			Error: text, Location: "opencode.event",
		}})
		return
	}
	raw := data
	if len(raw) > maxRaw {
		raw = nil
	}
	switch e.Type {
	case "message.updated":
		var p struct {
			Info info `json:"info"`
		}
		if decode(e.Properties, &p) == nil && p.Info.SessionID == c.native && p.Info.Role == roleAssistant {
			c.updateMessage(&p.Info)
		}
	case "message.part.updated":
		var p struct {
			Part part `json:"part"`
		}
		if decode(e.Properties, &p) == nil && p.Part.SessionID == c.native {
			c.updatePart(&p.Part, raw)
		}
	case "message.part.delta":
		c.addDelta(e.Properties, raw)
	case "permission.asked":
		var p permission
		if decode(e.Properties, &p) == nil {
			c.askPermission(&p)
		}
	case "question.asked":
		var q question
		if decode(e.Properties, &q) == nil {
			c.askQuestion(&q)
		}
	default:
		c.handleSession(&e)
	}
}

// handleSession handles an event about the state of the session.
func (c *conversation) handleSession(e *event) {
	var p struct {
		SessionID string   `json:"sessionID"`
		RequestID string   `json:"requestID"`
		Status    status   `json:"status"`
		Error     *failure `json:"error"`
		Todos     []todo   `json:"todos"`
	}
	if decode(e.Properties, &p) != nil {
		return
	}
	if e.Type == "permission.replied" { // also of a subagent
		delete(c.turn.permissions, p.RequestID)
	}
	if p.SessionID != c.native {
		return
	}
	switch {
	case e.Type == "session.status" && p.Status.Type == statusBusy:
		c.started()
	case e.Type == "session.status" && p.Status.Type == statusRetry && c.turn.busy:
		c.retry(&p.Status)
	case e.Type == "session.idle":
		c.idle()
	case e.Type == "session.error" && p.Error != nil:
		c.failed(p.Error)
	case e.Type == "todo.updated" && c.turn.busy:
		c.reportTodos(p.Todos)
	}
}

// updateMessage handles a new state of a message of the assistant.
func (c *conversation) updateMessage(m *info) {
	t := &c.turn
	if string(m.Summary) == "true" || !remember(t.messages, m.ID, true) {
		return
	}
	if m.Parent != "" && len(m.Parent) <= maxID {
		t.prompt = m.Parent
	}
	t.answered = m.Time.Completed > 0
}

// updatePart reports a new state of a part of a message.
func (c *conversation) updatePart(p *part, raw json.RawMessage) {
	t := &c.turn
	if !t.messages[p.MessageID] || p.ID == "" || len(p.ID) > maxID || len(p.CallID) > maxID {
		return // the user's message is an item already
	}
	switch {
	case p.Type == "text" && p.Time.End == 0:
		remember(t.texts, p.ID, true)
	case p.Type == "text" && p.Text != "":
		t.text = p.ID
		c.reportItem(raw, &sessions.Item{
			NativeID: &p.ID, Kind: sessions.KindMessage, Role: new(sessions.RoleAssistant), Status: sessions.Completed,
			Content: []sessions.Part{sessions.Text(shorten(p.Text, maxText))},
		})
	case p.Type == "reasoning" && p.Time.End > 0 && p.Text != "":
		c.reportItem(raw, &sessions.Item{
			NativeID: &p.ID, Kind: sessions.KindStatus, Role: new(sessions.RoleAssistant), Status: sessions.Completed,
			Content: []sessions.Part{{
				Type: sessions.PartReasoning, Text: shorten(p.Text, maxText), Visibility: "public",
			}},
		})
	case p.Type == "tool":
		c.updateTool(p, raw)
	}
}

// addDelta reports the next piece of a text.
func (c *conversation) addDelta(properties, raw json.RawMessage) {
	var p struct {
		PartID string `json:"partID"`
		Field  string `json:"field"`
		Delta  string `json:"delta"`
	}
	if decode(properties, &p) != nil || p.Field != "text" || !c.turn.texts[p.PartID] || p.Delta == "" {
		return
	}
	c.report(&sessions.Native{Type: sessions.ItemDelta, Raw: raw, Data: sessions.Delta{
		NativeItemID: &p.PartID, Delta: shorten(p.Delta, maxText),
	}})
}

// reportItem reports a completed item.
func (c *conversation) reportItem(raw json.RawMessage, item *sessions.Item) {
	c.report(&sessions.Native{Type: sessions.ItemCompleted, Raw: raw, Data: sessions.ItemData{Item: *item}})
}

// status reports what has no other form.
func (c *conversation) status(label, detail string) {
	c.reportItem(nil, &sessions.Item{
		Kind: sessions.KindStatus, Role: new(sessions.RoleAssistant), Status: sessions.Completed,
		Content: []sessions.Part{{Type: sessions.PartStatus, Label: label, Detail: &detail}},
	})
}

type todo struct {
	Content string `json:"content"`
	Status  string `json:"status"`
}

// reportTodos reports the list of tasks that the model keeps.
func (c *conversation) reportTodos(todos []todo) {
	item := sessions.Item{Kind: sessions.KindStatus, Role: new(sessions.RoleAssistant), Status: sessions.Completed}
	for i := range todos[:min(len(todos), maxTodos)] {
		state := shorten(todos[i].Status, maxID)
		item.Content = append(item.Content, sessions.Part{
			Type: sessions.PartStatus, Label: shorten(todos[i].Content, maxMessage), Detail: &state,
		})
	}
	if len(item.Content) > 0 {
		c.reportItem(nil, &item)
	}
}

// updateTool reports a tool call once its arguments are complete, and its result.
func (c *conversation) updateTool(p *part, raw json.RawMessage) {
	t, state, tool := &c.turn, &p.State, shorten(p.Tool, maxID)
	failed := state.Status == "error"
	if tool == "invalid" { // a call of a tool that does not exist or is denied
		var input struct {
			Tool string `json:"tool"`
		}
		if decode(state.Input, &input) == nil && input.Tool != "" {
			tool, failed = shorten(input.Tool, maxID), true
		}
	}
	if state.Status == "pending" {
		return
	}
	if !t.calls[p.ID] {
		remember(t.calls, p.ID, true)
		call := &sessions.Item{
			NativeID: &p.ID, Kind: sessions.KindToolCall, Role: new(sessions.RoleAssistant), Status: sessions.Completed,
			Content: []sessions.Part{{
				Type: sessions.PartToolCall, Name: tool, Arguments: shorten(string(state.Input), maxText), CallID: p.CallID,
			}},
		}
		if t.text != "" {
			call.ParentID = new(t.text)
		}
		c.reportItem(raw, call)
	}
	if state.Status == "running" {
		return
	}
	result := &sessions.Item{
		NativeID: new(p.ID + "_result"), ParentID: &p.ID, Kind: sessions.KindToolResult, Role: new(sessions.RoleTool),
		Content: []sessions.Part{{
			Type: sessions.PartToolResult, CallID: p.CallID, Output: shorten(cmp.Or(state.Output, state.Error), maxText),
		}},
		Status: sessions.Completed,
	}
	if failed {
		result.Status = sessions.Failed
	} else {
		result.Content = append(result.Content, c.files(p)...)
	}
	delete(t.diffs, p.CallID)
	c.reportItem(raw, result)
}

// files returns the files that a tool call has read or changed.
func (c *conversation) files(p *part) (list []sessions.Part) {
	add := func(action, path, diff string) {
		if path == "" || len(list) >= maxFiles {
			return
		}
		ref := sessions.Part{Type: sessions.PartFileRef, Action: action, Path: shorten(path, maxMessage)}
		if diff != "" {
			ref.Diff = new(shorten(diff, maxText))
		}
		list = append(list, ref)
	}
	var input struct {
		Path string `json:"filePath"`
	}
	var metadata struct {
		Path string `json:"filepath"`
		Diff string `json:"diff"`
		File struct {
			Path string `json:"file"`
		} `json:"filediff"`
		Files []struct {
			Path  string `json:"filePath"`
			Moved string `json:"movePath"`
			Patch string `json:"patch"`
		} `json:"files"`
	}
	if decode(p.State.Input, &input) != nil || decode(p.State.Metadata, &metadata) != nil {
		return nil
	}
	switch p.Tool {
	case "read":
		add("read", input.Path, "")
	case "write":
		add("write", cmp.Or(metadata.Path, input.Path), c.turn.diffs[p.CallID])
	case "edit":
		add("patch", cmp.Or(metadata.File.Path, input.Path), metadata.Diff)
	case "apply_patch":
		for i := range metadata.Files {
			f := &metadata.Files[i]
			add("patch", cmp.Or(f.Moved, f.Path), f.Patch)
		}
	}
	return list
}

// askPermission reports a request for a permission, or denies it in plan mode.
func (c *conversation) askPermission(p *permission) {
	t := &c.turn
	if _, known := t.permissions[p.ID]; known || !remember(t.permissions, p.ID, p.SessionID) {
		return
	}
	isEdit := p.Permission == "edit"
	if isPlan(c.start.Session) && (isEdit || p.Permission == "bash") {
		delete(t.permissions, p.ID)
		err := c.replyPermission(p.ID, object{
			"reply": "reject", "message": "this session is in plan mode, in which nothing is changed",
		})
		if err != nil && !isNotFound(err) {
			c.unreachable(err)
		}
		return
	}
	var metadata object
	if len(p.Metadata) > maxText {
		metadata = object{"truncated": true}
	} else if decode(p.Metadata, &metadata) != nil || metadata == nil {
		metadata = object{}
	}
	if diff, ok := metadata["diff"].(string); ok && isEdit && len(t.diffs) < maxDiffs {
		remember(t.diffs, p.Tool.CallID, diff)
	}
	patterns := make([]string, 0, min(len(p.Patterns), maxFiles))
	for _, pattern := range p.Patterns[:cap(patterns)] {
		patterns = append(patterns, shorten(pattern, maxMessage))
	}
	metadata["permission"], metadata["patterns"] = shorten(p.Permission, maxID), patterns
	encoded, err := json.Marshal(metadata)
	if err != nil {
		return // it was decoded from JSON
	}
	c.report(&sessions.Native{Type: sessions.PermissionRequested, Data: sessions.Permission{
		ID: p.ID, Action: shorten(p.Permission, maxID), Status: sessions.PermissionPending, Metadata: encoded,
	}})
}

// askQuestion reports a question. The options are those of its first part. The prompt contains the other
// parts.
func (c *conversation) askQuestion(q *question) {
	t := &c.turn
	if _, known := t.questions[q.ID]; known || len(q.Questions) == 0 || !remember(t.questions, q.ID, q.SessionID) {
		return
	}
	t.asked[q.ID] = len(q.Questions)
	options := []string{}
	var prompt strings.Builder
	for i := range q.Questions[:min(len(q.Questions), maxTodos)] {
		part := &q.Questions[i]
		if i > 0 {
			prompt.WriteString("\n")
		}
		prompt.WriteString(shorten(part.Question, maxMessage))
		var labels []string
		for j := range part.Options[:min(len(part.Options), maxTodos)] {
			labels = append(labels, shorten(part.Options[j].Label, maxMessage))
		}
		if i == 0 {
			options = append(options, labels...)
		} else {
			prompt.WriteString(" [" + strings.Join(labels, ", ") + "]")
		}
	}
	c.report(&sessions.Native{Type: sessions.QuestionRequested, Data: sessions.Question{
		ID: q.ID, Prompt: prompt.String(), Options: options, Status: sessions.QuestionPending,
	}})
}
