package acp

import (
	"encoding/json"
	"fmt"
	"slices"
	"strings"

	"github.com/bullpen-run/bullpen/agent/sessions"
)

// The reasons why turns end.
const (
	stopEnd       = "end_turn"
	stopCancelled = "cancelled"
)

// The kinds of updates.
const (
	userChunk      = "user_message_chunk"
	messageChunk   = "agent_message_chunk"
	thoughtChunk   = "agent_thought_chunk"
	toolCall       = "tool_call"
	toolCallUpdate = "tool_call_update"
)

// The statuses of tool calls.
const (
	callPending   = "pending"
	callRunning   = "in_progress"
	callCompleted = "completed"
	callFailed    = "failed"
)

// update is a session update for the client. Kind determines which fields are set.
type update struct {
	Kind       string          `json:"sessionUpdate,omitempty"` // empty in a request for a permission
	Content    any             `json:"content,omitempty"`       // a block of a chunk, or a list of toolContent
	ToolCallID string          `json:"toolCallId,omitempty"`
	Title      string          `json:"title,omitempty"`
	ToolKind   string          `json:"kind,omitempty"`
	Status     string          `json:"status,omitempty"`
	RawInput   json.RawMessage `json:"rawInput,omitempty"`
	RawOutput  json.RawMessage `json:"rawOutput,omitempty"`
	Locations  []location      `json:"locations,omitempty"`
}

// block is a piece of content.
type block struct {
	Type string `json:"type"`
	Text string `json:"text,omitempty"`
	Name string `json:"name,omitempty"`
	URI  string `json:"uri,omitempty"`
	MIME string `json:"mimeType,omitempty"`
	// Resource is embedded, with a text or a blob.
	Resource *resource `json:"resource,omitempty"`
}

type resource struct {
	URI  string `json:"uri"`
	Text string `json:"text"`
}

// toolContent is a piece of a tool's output.
type toolContent struct {
	Type    string `json:"type"`
	Content block  `json:"content"`
}

type location struct {
	Path string `json:"path"`
}

// translator translates the entries of a session's log into messages and updates the state.
type translator struct {
	state *state
	id    string // of the session
	*session
	// replay is set while a client loads the session. The client then also receives the user's
	// messages, but no requests.
	replay bool
	out    []outgoing
}

// entry translates an entry.
func (t *translator) entry(e *sessions.Entry) error {
	if e.Message != nil {
		for i := range t.state.Prompts {
			if p := &t.state.Prompts[i]; p.Session == t.id && p.Key == e.Message.Key {
				p.Turn = e.Message.Number
			}
		}
	}
	for i := range e.Events {
		if err := t.event(e, &e.Events[i]); err != nil {
			return err
		}
	}
	return nil
}

func (t *translator) event(e *sessions.Entry, v *sessions.Event) error {
	if t.replay && (v.Type == sessions.PermissionRequested || v.Type == sessions.QuestionRequested) {
		return nil
	}
	switch v.Type {
	case sessions.TurnStarted:
		t.Thoughts, t.Calls, t.Failure = nil, nil, ""
		return nil
	case sessions.TurnEnded:
		return t.turnEnded(e)
	case sessions.SessionEnded:
		return with(v, func(d sessions.Ended) error { return t.sessionEnded(e, &d) })
	case sessions.ItemStarted:
		return with(v, func(d sessions.ItemData) error { return t.item(&d.Item, false) })
	case sessions.ItemCompleted:
		return with(v, func(d sessions.ItemData) error { return t.item(&d.Item, true) })
	case sessions.ItemDelta:
		return with(v, func(d sessions.Delta) error { return t.chunk(messageChunk, textBlock(d.Delta)) })
	case sessions.ErrorEvent:
		return with(v, func(d sessions.Failure) error { t.Failure = d.Message; return nil })
	case sessions.PermissionRequested:
		return with(v, func(d sessions.Permission) error { return t.permission(&d) })
	case sessions.QuestionRequested:
		return with(v, func(d sessions.Question) error { return t.question(&d) })
	case sessions.PermissionResolved:
		return with(v, func(d sessions.Permission) error { t.removeRequest(d.ID, ""); return nil })
	case sessions.QuestionResolved:
		return with(v, func(d sessions.Question) error { t.removeRequest("", d.ID); return nil })
	default:
		return nil
	}
}

// with calls f with the decoded data of an event.
func with[T any](v *sessions.Event, f func(T) error) error {
	data, err := sessions.DataOf[T](v)
	if err != nil {
		return err
	}
	return f(data)
}

func textBlock(text string) block { return block{Type: "text", Text: text} }

// send adds a message.
func (t *translator) send(m *rpcMessage) error {
	m.Version = "2.0"
	data, err := encode(m)
	t.out = append(t.out, outgoing{Data: data})
	return err
}

// update adds an update.
func (t *translator) update(u *update) error {
	return t.send(&rpcMessage{Method: "session/update", Params: map[string]any{"sessionId": t.id, "update": u}})
}

// chunk adds a piece of a message or of a thought.
func (t *translator) chunk(kind string, content block) error {
	if content.Type == "text" && content.Text == "" {
		return nil
	}
	return t.update(&update{Kind: kind, Content: content})
}

// answer adds a response to each prompt for which match returns true: result, or failure if not
// nil.
func (t *translator) answer(result any, failure error, match func(*prompt) bool) error {
	for _, p := range slices.Clone(t.state.Prompts) {
		if p.Session != t.id || !match(&p) {
			continue
		}
		m, err := response(p.ID, result, failure)
		if err != nil {
			return err
		}
		m.prompt = true
		t.out = append(t.out, m)
		t.state.remove(&p)
	}
	t.state.release(t.id)
	return nil
}

func stopReason(reason string) any { return map[string]string{"stopReason": reason} }

// endCalls adds an update with a final status for each tool call without a result.
func (t *translator) endCalls(status string) error {
	for _, id := range t.Calls {
		if err := t.update(&update{Kind: toolCallUpdate, ToolCallID: id, Status: status}); err != nil {
			return err
		}
	}
	t.Calls = nil
	return nil
}

func (t *translator) turnEnded(e *sessions.Entry) error {
	cancelled := e.State.Interrupted >= e.Turn
	reason, status := stopEnd, callCompleted
	var failure error
	switch {
	case cancelled:
		reason, status = stopCancelled, callFailed
	case t.Failure != "":
		failure, status = &rpcError{Code: codeInternal, Message: t.Failure}, callFailed
	}
	if err := t.endCalls(status); err != nil {
		return err
	}
	t.Thoughts, t.Failure = nil, ""
	if e.Turn >= t.Loaded {
		t.Loaded = 0
	}
	return t.answer(stopReason(reason), failure, func(p *prompt) bool { return p.Turn == e.Turn })
}

func (t *translator) sessionEnded(e *sessions.Entry, d *sessions.Ended) error {
	status := callFailed
	if d.Reason == sessions.EndCompleted {
		status = callCompleted
	}
	if err := t.endCalls(status); err != nil {
		return err
	}
	t.Thoughts = nil
	if d.Reason != sessions.EndCompleted || e.Turn >= t.Loaded {
		t.Loaded = 0
	}
	t.state.Requests = slices.DeleteFunc(t.state.Requests, func(r request) bool { return r.Session == t.id })
	sent := func(p *prompt) bool { return p.Turn > 0 }
	switch d.Reason {
	case sessions.EndCompleted: // the turns of queued messages follow
		return t.answer(stopReason(stopEnd), nil, func(p *prompt) bool { return p.Turn > 0 && p.Turn <= e.Turn })
	case sessions.EndTerminated:
		return t.answer(stopReason(stopCancelled), nil, sent)
	default:
		message := "the agent's program ended"
		if d.ExitCode != nil {
			message += fmt.Sprintf(" with code %d", *d.ExitCode)
		}
		if d.Message != "" {
			message += ": " + d.Message
		}
		return t.answer(nil, &rpcError{Code: codeInternal, Message: message}, sent)
	}
}

// sessionRemoved fails all prompts of a removed session.
func (t *translator) sessionRemoved(cause error) error {
	t.Loaded = 0
	t.state.Requests = slices.DeleteFunc(t.state.Requests, func(r request) bool { return r.Session == t.id })
	return t.answer(nil, cause, func(*prompt) bool { return true })
}

// item translates an item that was started or completed.
func (t *translator) item(x *sessions.Item, completed bool) error {
	switch {
	case x.Kind == sessions.KindToolCall:
		return t.toolCall(x, completed)
	case x.Kind == sessions.KindToolResult:
		if !completed {
			return nil
		}
		return t.toolResult(x)
	case x.Role != nil && *x.Role == sessions.RoleUser:
		if !completed || !t.replay {
			return nil
		}
		return t.chunk(userChunk, textBlock(sessions.TextOf(x.Content)))
	case x.Kind == sessions.KindMessage && x.Role != nil && *x.Role == sessions.RoleAssistant:
		return t.message(x, completed)
	case completed: // a status, or an item that the protocol has no form for
		return t.parts(thoughtChunk, x.Content)
	default:
		return nil
	}
}

// message translates a message of the assistant, except for its text, which is sent as deltas.
func (t *translator) message(x *sessions.Item, completed bool) error {
	thought := 0
	for _, p := range x.Content {
		if p.Type != sessions.PartReasoning {
			continue
		}
		if thought++; thought <= t.Thoughts[x.ID] {
			continue
		}
		if err := t.chunk(thoughtChunk, textBlock(p.Text)); err != nil {
			return err
		}
	}
	if !completed {
		if thought > 0 {
			if t.Thoughts == nil {
				t.Thoughts = map[string]int{}
			}
			t.Thoughts[x.ID] = thought
		}
		return nil
	}
	delete(t.Thoughts, x.ID)
	t.Failure = ""
	others := slices.DeleteFunc(slices.Clone(x.Content), func(p sessions.Part) bool {
		return p.Type == sessions.PartReasoning || p.Type == sessions.PartText
	})
	return t.parts(messageChunk, others)
}

// parts sends each part as a chunk.
func (t *translator) parts(kind string, parts []sessions.Part) error {
	for _, p := range parts {
		if err := t.chunk(kind, blockOf(&p)); err != nil {
			return err
		}
	}
	return nil
}

// blockOf returns a part as a block.
func blockOf(p *sessions.Part) block {
	switch p.Type {
	case sessions.PartJSON:
		return textBlock(string(p.JSON))
	case sessions.PartImage, sessions.PartFileRef:
		link := block{Type: "resource_link", Name: p.Path[strings.LastIndexByte(p.Path, '/')+1:], URI: fileURI(p.Path)}
		if p.MIME != nil {
			link.MIME = *p.MIME
		}
		return link
	case sessions.PartStatus:
		if p.Detail != nil && *p.Detail != "" {
			return textBlock(p.Label + ": " + *p.Detail)
		}
		return textBlock(p.Label)
	case sessions.PartToolResult:
		return textBlock(p.Output)
	case sessions.PartToolCall:
		return textBlock(p.Name + " " + p.Arguments)
	default:
		return textBlock(p.Text)
	}
}

func fileURI(path string) string {
	if strings.Contains(path, "://") {
		return path
	}
	return "file://" + path
}

// toolCall translates a tool call.
func (t *translator) toolCall(x *sessions.Item, completed bool) error {
	u := &update{Kind: toolCall, ToolCallID: x.ID, Title: "tool", ToolKind: "other", Status: callRunning}
	for _, p := range x.Content {
		if p.Type == sessions.PartToolCall {
			if p.CallID != "" {
				u.ToolCallID = p.CallID
			}
			u.Title, u.ToolKind, u.RawInput = p.Name, toolKind(p.Name), jsonOf(p.Arguments)
		}
	}
	known := slices.Contains(t.Calls, u.ToolCallID)
	switch {
	case known && !completed:
		return nil
	case known:
		u.Kind = toolCallUpdate
	default:
		t.Calls = append(t.Calls, u.ToolCallID)
	}
	if x.Status == sessions.Failed {
		u.Status = callFailed
		t.endCall(u.ToolCallID)
	}
	return t.update(u)
}

func (t *translator) endCall(id string) {
	t.Calls = slices.DeleteFunc(t.Calls, func(other string) bool { return other == id })
}

// toolResult translates the result of a tool.
func (t *translator) toolResult(x *sessions.Item) error {
	u := &update{Kind: toolCallUpdate, ToolCallID: x.ID, Status: callCompleted}
	if x.Status == sessions.Failed {
		u.Status = callFailed
	}
	var content []toolContent
	for _, p := range x.Content {
		switch p.Type {
		case sessions.PartToolResult:
			if p.CallID != "" {
				u.ToolCallID = p.CallID
			}
			u.RawOutput = jsonOf(p.Output)
			content = append(content, toolContent{"content", textBlock(p.Output)})
		case sessions.PartFileRef:
			u.Locations = append(u.Locations, location{p.Path})
			if p.Diff != nil && *p.Diff != "" {
				content = append(content, toolContent{"content", textBlock(*p.Diff)})
			}
		default:
			content = append(content, toolContent{"content", blockOf(&p)})
		}
	}
	if len(content) > 0 {
		u.Content = content
	}
	if !slices.Contains(t.Calls, u.ToolCallID) { // clients do not know the call
		u.Kind, u.Title, u.ToolKind = toolCall, "tool", "other"
	}
	t.endCall(u.ToolCallID)
	return t.update(u)
}

// jsonOf returns text if it is JSON, and otherwise text as a JSON string.
func jsonOf(text string) json.RawMessage {
	if json.Valid([]byte(text)) {
		return json.RawMessage(text)
	}
	quoted, err := encode(text)
	if err != nil {
		return nil
	}
	return quoted
}

// toolKinds maps words in the names of tools to kinds. The first match counts.
var toolKinds = []struct {
	kind  string
	words []string
}{
	{"execute", []string{"bash", "command", "exec", "shell", "terminal"}},
	{"edit", []string{"edit", "write", "patch", "filechange", "file_change"}},
	{"delete", []string{"delete"}},
	{"move", []string{"move", "rename"}},
	{"search", []string{"search", "grep", "glob", "find"}},
	{"fetch", []string{"fetch", "web"}},
	{"read", []string{"read", "list"}},
	{"think", []string{"think"}},
}

// toolKind returns the kind of a tool, guessed from its name.
func toolKind(name string) string {
	name = strings.ToLower(name)
	for _, k := range toolKinds {
		if slices.ContainsFunc(k.words, func(word string) bool { return strings.Contains(name, word) }) {
			return k.kind
		}
	}
	return "other"
}

// option is an answer that the client can choose.
type option struct {
	ID   string `json:"optionId"`
	Name string `json:"name"`
	Kind string `json:"kind"`
}

// The kinds of options. They are also the ids of the options of permissions.
const (
	allowOnce   = "allow_once"
	allowAlways = "allow_always"
	rejectOnce  = "reject_once"
)

// answerPrefix is the prefix of the ids of the options of questions. The index of the option
// follows.
const answerPrefix = "answer_"

// ask adds a request to the client, unless the state already has one for the same permission or
// question.
func (t *translator) ask(r request, about *update, options []option) error {
	if slices.ContainsFunc(t.state.Requests, func(other request) bool {
		return other.Session == r.Session && other.Permission == r.Permission && other.Question == r.Question
	}) {
		return nil
	}
	t.state.Asked++
	r.ID = fmt.Sprintf("request_%d_%d", t.state.Connection, t.state.Asked)
	t.state.Requests = append(t.state.Requests, r)
	id, err := encode(r.ID)
	if err != nil {
		return err
	}
	err = t.send(&rpcMessage{ID: id, Method: "session/request_permission", Params: map[string]any{
		"sessionId": t.id, "toolCall": about, "options": options,
	}})
	t.out[len(t.out)-1].requestID = r.ID
	return err
}

// toolCallFields are the fields of a permission's metadata that identify the tool call. Each agent
// has names of its own.
type toolCallFields struct {
	ToolUseID string `json:"toolUseId"`
	ToolUse   string `json:"tool_use_id"`
	ItemID    string `json:"itemId"`
	CallID    string `json:"callID"`
	Command   any    `json:"command"`
	Path      string `json:"path"`
	Input     struct {
		Command string `json:"command"`
		Path    string `json:"file_path"`
	} `json:"input"`
}

func (t *translator) permission(p *sessions.Permission) error {
	about := &update{
		ToolCallID: p.ID, Title: p.Action, ToolKind: toolKind(p.Action), Status: callPending, RawInput: p.Metadata,
	}
	var s toolCallFields
	_ = json.Unmarshal(p.Metadata, &s) // agents may give these fields other types
	for _, id := range []string{s.ToolUseID, s.ToolUse, s.ItemID, s.CallID} {
		if slices.Contains(t.Calls, id) {
			about.ToolCallID = id
		}
	}
	for _, detail := range []any{s.Command, s.Path, s.Input.Command, s.Input.Path} {
		if text, ok := detail.(string); ok && text != "" {
			about.Title = p.Action + ": " + text
			break
		}
	}
	return t.ask(request{Session: t.id, Permission: p.ID}, about, []option{
		{allowOnce, "Allow once", allowOnce},
		{allowAlways, "Always allow", allowAlways},
		{rejectOnce, "Reject", rejectOnce},
	})
}

// question sends a question to the client as a permission with one option for each answer.
func (t *translator) question(q *sessions.Question) error {
	about := &update{ToolCallID: q.ID, Title: q.Prompt, ToolKind: "other", Status: callPending}
	var options []option
	refuses := false
	for i, name := range q.Options {
		o := option{fmt.Sprint(answerPrefix, i), name, allowOnce}
		switch strings.ToLower(name) {
		case "no", "reject", "deny", "cancel":
			o.Kind, refuses = rejectOnce, true
		}
		options = append(options, o)
	}
	if !refuses {
		options = append(options, option{rejectOnce, "Do not answer", rejectOnce})
	}
	return t.ask(request{Session: t.id, Question: q.ID, Options: q.Options}, about, options)
}

// removeRequest removes the request for a permission or a question; the other id is empty. It also
// drops the request from the messages that have not been sent yet.
func (t *translator) removeRequest(permission, question string) {
	t.state.Requests = slices.DeleteFunc(t.state.Requests, func(r request) bool {
		found := r.Session == t.id && r.Permission == permission && r.Question == question
		if found {
			t.out = slices.DeleteFunc(t.out, func(m outgoing) bool { return m.requestID == r.ID })
		}
		return found
	})
	t.state.release(t.id)
}
