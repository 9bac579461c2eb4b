package claude

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"

	"github.com/bullpen-run/bullpen/agent/sessions"
)

// The options of the question that asks for the approval of a plan.
const (
	approve = "approve"
	reject  = "reject"
)

// line is a line of Claude Code's output. Lines of other types are ignored.
type line struct {
	Type      string          `json:"type"`
	Subtype   string          `json:"subtype"`
	SessionID string          `json:"session_id"`
	Parent    *string         `json:"parent_tool_use_id"` // nil unless a subagent wrote the line
	RequestID string          `json:"request_id"`
	Request   controlRequest  `json:"request"`
	Message   json.RawMessage `json:"message"`
	Event     streamEvent     `json:"event"`
	IsError   bool            `json:"is_error"`
	Status    *int            `json:"api_error_status"`
	Result    string          `json:"result"`
}

type controlRequest struct {
	Subtype     string          `json:"subtype"`
	Tool        string          `json:"tool_name"`
	Input       json.RawMessage `json:"input"`
	ToolUse     string          `json:"tool_use_id"`
	Suggestions json.RawMessage `json:"permission_suggestions"`
	Blocked     *string         `json:"blocked_path"`
}

type streamEvent struct {
	Type    string `json:"type"`
	Index   int    `json:"index"`
	Message struct {
		ID string `json:"id"`
	} `json:"message"`
	Delta struct {
		Type string `json:"type"`
		Text string `json:"text"`
	} `json:"delta"`
}

type message struct {
	ID      string          `json:"id"`
	Content json.RawMessage `json:"content"`
}

type block struct {
	Type     string          `json:"type"`
	Text     string          `json:"text"`
	Thinking string          `json:"thinking"`
	ID       string          `json:"id"`
	Name     string          `json:"name"`
	Input    json.RawMessage `json:"input"`
	ToolUse  string          `json:"tool_use_id"`
	Content  json.RawMessage `json:"content"`
	IsError  bool            `json:"is_error"`
}

type questions struct {
	Questions []struct {
		Question string `json:"question"`
		Options  []struct {
			Label string `json:"label"`
		} `json:"options"`
	} `json:"questions"`
}

// reader translates the output of a process.
type reader struct {
	*conversation
	raw     json.RawMessage
	cursor  string
	message string // id of the assistant's message being streamed
	texts   int    // number of complete texts of that message
}

// read reports the output of Claude Code until the program ends.
func (c *conversation) read() {
	defer close(c.done)
	r := &reader{conversation: c}
	for {
		text, cursor, err := c.process.ReadLine()
		if errors.Is(err, io.EOF) {
			r.exited()
			return
		}
		if err != nil {
			r.send(sessions.SessionEnded, sessions.Ended{
				Reason: sessions.EndError, TerminatedBy: sessions.FromDaemon, Message: "the connection to the agent was lost",
			})
			return
		}
		r.raw, r.cursor = slices.Clone(text), cursor
		var l line
		if err := json.Unmarshal(text, &l); err != nil {
			r.raw = nil
			r.send(sessions.Unparsed, sessions.UnparsedOutput{Error: "a line is no JSON object", Location: "claude.stdout"})
			continue
		}
		if !r.handle(&l) {
			return
		}
	}
}

// send reports data. It returns false if the conversation is closed.
func (r *reader) send(kind sessions.EventType, data any) bool {
	return r.report(sessions.Native{Type: kind, Data: data, Raw: r.raw, Cursor: r.cursor}) == nil
}

// handle handles a line. It returns false if the conversation is closed.
func (r *reader) handle(l *line) bool {
	switch l.Type {
	case "system":
		if l.Subtype == "init" {
			return r.report(sessions.Native{
				Type: sessions.SessionStarted, NativeSession: l.SessionID, Cursor: r.cursor,
			}) == nil
		}
	case "stream_event":
		if l.Parent == nil {
			return r.stream(&l.Event)
		}
	case "assistant", "user":
		return r.blocks(l)
	case "control_request":
		if l.Request.Subtype == "can_use_tool" {
			return r.handleToolRequest(l)
		}
	case "control_cancel_request":
		r.mu.Lock()
		for id, pending := range r.requests {
			if pending.id == l.RequestID {
				delete(r.requests, id)
			}
		}
		r.mu.Unlock()
	case "result":
		return r.result(l)
	}
	return true
}

// stream reports the next piece of a text.
func (r *reader) stream(e *streamEvent) bool {
	switch e.Type {
	case "message_start":
		r.message, r.texts = e.Message.ID, 0
	case "content_block_delta":
		if e.Delta.Type == "text_delta" {
			return r.send(sessions.ItemDelta, sessions.Delta{NativeItemID: new(r.textID()), Delta: e.Delta.Text})
		}
	}
	return true
}

// textID returns the native id of the text being streamed.
func (r *reader) textID() string { return fmt.Sprintf("%s_%d", r.message, r.texts) }

// blocks reports each part of a message as an item.
func (r *reader) blocks(l *line) bool {
	var m message
	var list []block
	if json.Unmarshal(l.Message, &m) != nil || json.Unmarshal(m.Content, &list) != nil {
		return true // a user's text, which is an item already
	}
	for i := range list {
		if l.Parent != nil && list[i].Type == "text" { // of a subagent
			continue
		}
		if !r.block(l.Type, &m, &list[i]) {
			return false
		}
	}
	return true
}

func (r *reader) block(author string, m *message, b *block) bool {
	item := sessions.Item{Kind: sessions.KindMessage, Role: new(sessions.RoleAssistant), Status: sessions.Completed}
	switch {
	case author == "assistant" && b.Type == "text":
		if m.ID != r.message {
			r.message, r.texts = m.ID, 0
		}
		item.NativeID, item.Content = new(r.textID()), []sessions.Part{sessions.Text(b.Text)}
		r.texts++
	case author == "assistant" && b.Type == "thinking":
		item.NativeID = new(m.ID + "_thinking")
		item.Content = []sessions.Part{{Type: sessions.PartReasoning, Text: b.Thinking, Visibility: "public"}}
		item.Kind = sessions.KindStatus
	case author == "assistant" && b.Type == "tool_use":
		item.Kind, item.NativeID, item.ParentID = sessions.KindToolCall, new(b.ID), new(m.ID+"_0")
		item.Content = []sessions.Part{{
			Type: sessions.PartToolCall, Name: b.Name, Arguments: string(b.Input), CallID: b.ID,
		}}
	case author == "user" && b.Type == "tool_result":
		item.Kind, item.Role = sessions.KindToolResult, new(sessions.RoleTool)
		item.NativeID, item.ParentID = new(b.ToolUse+"_result"), new(b.ToolUse)
		item.Content = []sessions.Part{{Type: sessions.PartToolResult, CallID: b.ToolUse, Output: textOf(b.Content)}}
		if b.IsError {
			item.Status = sessions.Failed
		}
	default:
		return true
	}
	return r.send(sessions.ItemCompleted, sessions.ItemData{Item: item})
}

// textOf returns the text of a tool's result: a string or a list of blocks.
func textOf(content json.RawMessage) string {
	var text string
	if json.Unmarshal(content, &text) == nil {
		return text
	}
	var list []block
	if json.Unmarshal(content, &list) != nil {
		return string(content)
	}
	var texts []string
	for _, b := range list {
		if b.Type == "text" {
			texts = append(texts, b.Text)
		}
	}
	return strings.Join(texts, "\n")
}

// isMutating reports whether a tool changes files or processes. Claude Code asks to use such tools
// even in plan mode.
func isMutating(tool string) bool {
	return slices.Contains([]string{"Bash", "Write", "Edit", "MultiEdit", "NotebookEdit", "KillShell"}, tool)
}

// handleToolRequest reports a request to use a tool, or denies it in plan mode.
func (r *reader) handleToolRequest(l *line) bool {
	q := &l.Request
	pending := request{id: l.RequestID, input: q.Input, suggestions: q.Suggestions}
	switch q.Tool {
	case "AskUserQuestion":
		var asked questions
		if json.Unmarshal(q.Input, &asked) == nil && len(asked.Questions) > 0 {
			first := asked.Questions[0]
			options := []string{}
			for _, o := range first.Options {
				options = append(options, o.Label)
			}
			return r.reportPending(q.ToolUse, pending, sessions.QuestionRequested, sessions.Question{
				ID: q.ToolUse, Prompt: first.Question, Options: options, Status: sessions.QuestionPending,
			})
		}
	case "ExitPlanMode":
		pending.plan = true
		return r.reportPending(q.ToolUse, pending, sessions.QuestionRequested, sessions.Question{
			ID: q.ToolUse, Prompt: "Approve plan execution?", Options: []string{approve, reject},
			Status: sessions.QuestionPending,
		})
	}
	if r.plan && isMutating(q.Tool) {
		return r.respond(l.RequestID, map[string]any{
			"behavior": "deny", "message": "this session is in plan mode, in which nothing is changed",
		}) == nil
	}
	metadata, err := json.Marshal(map[string]any{
		"toolName": q.Tool, "input": q.Input, "permissionSuggestions": q.Suggestions, "blockedPath": q.Blocked,
	})
	if err != nil {
		return true // it was decoded from JSON
	}
	return r.reportPending(l.RequestID, pending, sessions.PermissionRequested, sessions.Permission{
		ID: l.RequestID, Action: q.Tool, Status: sessions.PermissionPending, Metadata: metadata,
	})
}

// reportPending registers a request and reports its question or permission.
func (r *reader) reportPending(id string, pending request, kind sessions.EventType, data any) bool {
	r.mu.Lock()
	r.requests[id] = pending
	r.mu.Unlock()
	return r.send(kind, data)
}

// result reports the end of a turn. A rejection by the model server has the subtype success, and
// IsError is set.
func (r *reader) result(l *line) bool {
	r.mu.Lock()
	interrupted := r.interrupted
	r.inTurn = false
	r.mu.Unlock()
	if interrupted {
		return r.send(sessions.TurnEnded, sessions.Turn{Metadata: json.RawMessage(`{"interrupted":true}`)})
	}
	if l.IsError || l.Subtype != "success" {
		code := l.Subtype
		if l.Subtype == "success" {
			code = "api_error"
		}
		text := l.Result
		if text == "" {
			text = "the turn ended with " + l.Subtype
		}
		failure := sessions.Failure{Message: text, Code: &code}
		if l.Status != nil {
			failure.Details = json.RawMessage(fmt.Sprintf(`{"status":%d}`, *l.Status))
		}
		if !r.send(sessions.ErrorEvent, failure) {
			return false
		}
	}
	return r.send(sessions.TurnEnded, nil)
}

// exited reports the end of the program.
func (r *reader) exited() {
	exit := r.process.Exit()
	r.raw = nil
	ended := sessions.Ended{Reason: sessions.EndError, TerminatedBy: sessions.FromAgent, ExitCode: &exit.Code}
	ended.Message = "Claude Code ended"
	if exit.Stderr.Head != "" {
		ended.Stderr = &exit.Stderr
	}
	r.mu.Lock()
	if exit.Code == 0 && !r.inTurn {
		ended.Reason = sessions.EndCompleted
	}
	r.mu.Unlock()
	r.send(sessions.SessionEnded, ended)
}
