// Package claude drives Claude Code. One process serves all turns of a session. It reads and writes
// JSON lines: the format stream-json of version 2.1.112.
package claude

import (
	"context"
	"crypto/sha256"
	"encoding/json"
	"fmt"
	"strings"
	"sync"

	"github.com/bullpen-run/bullpen/agent/sessions"
	"github.com/bullpen-run/bullpen/proto"
)

// Agent is Claude Code. Its fields must be set before use.
type Agent struct {
	// Installed describes the program that workers have.
	Installed func() sessions.Installation
}

// Info implements [sessions.Agent].
func (a *Agent) Info() *sessions.Info {
	installed := a.Installed()
	return &sessions.Info{
		ID: "claude", Installation: installed, Sandboxed: true, Credentials: installed.Missing == "",
		Modes: []sessions.Mode{
			{ID: "build", Name: "Build", Description: "Default build mode"},
			{ID: "plan", Name: "Plan", Description: "Plan mode: tools that change something are refused"},
		},
		PermissionModes: []string{
			sessions.PermissionDefault, sessions.PermissionPlan, sessions.PermissionBypass, sessions.PermissionAcceptEdits,
		},
		Models: []sessions.Model{
			{ID: "default", Name: "Default"},
			{ID: "sonnet", Name: "Sonnet"},
			{ID: "opus", Name: "Opus"},
			{ID: "haiku", Name: "Haiku"},
		},
		DefaultModel: "default", PendingAssistant: true,
		Capabilities: sessions.Capabilities{
			PlanMode: true, Permissions: true, Questions: true, ToolCalls: true, ToolResults: true, TextMessages: true,
			Reasoning: true, ErrorEvents: true, FileAttachments: true, CommandExecution: true, FileChanges: true, MCPTools: true,
			StreamingDeltas: true, ItemStarted: true,
		},
	}
}

// conversation is a process of Claude Code.
type conversation struct {
	process sessions.Process
	report  func(sessions.Native) error
	plan    bool
	done    chan struct{} // closed after the last report

	mu       sync.Mutex
	requests map[string]request // unanswered, by the id of the permission or question
	inTurn   bool
	// interrupted is set if a user has interrupted the turn. Its end is then not an error.
	interrupted bool
}

// request is a request of Claude Code to use a tool.
type request struct {
	id          string // of the control request
	input       json.RawMessage
	plan        bool            // whether the request is for the approval of a plan
	suggestions json.RawMessage // permission rules that Claude Code proposes; empty for none
}

// Start implements [sessions.Agent].
func (a *Agent) Start(ctx context.Context, s *sessions.Start) (sessions.Conversation, error) {
	process, err := s.Sandbox.Start(ctx, &sessions.Program{Args: a.args(s)})
	if err != nil {
		return nil, fmt.Errorf("start Claude Code: %w", err)
	}
	c := &conversation{
		process: process, report: s.Report, plan: isPlan(s.Session), requests: map[string]request{},
		done: make(chan struct{}),
	}
	go c.read()
	return c, nil
}

func isPlan(x *proto.AgentSession) bool {
	return x.AgentMode == "plan" || x.PermissionMode == sessions.PermissionPlan
}

func (a *Agent) args(s *sessions.Start) []string {
	args := []string{
		"node", a.Installed().Dir + "/cli.js", "-p", "--output-format", "stream-json", "--input-format", "stream-json",
		"--verbose", "--include-partial-messages", "--permission-prompt-tool", "stdio",
	}
	if model := s.Session.Model; model != "" && model != "default" {
		args = append(args, "--model", model)
	}
	if s.Native != "" { // Claude Code has stored a transcript with this id
		args = append(args, "--resume", s.Native)
	} else {
		args = append(args, "--session-id", sessionUUID(s.Session, s.Turns))
	}
	switch mode := s.Session.PermissionMode; {
	case isPlan(s.Session):
		args = append(args, "--permission-mode", "plan")
	case mode == sessions.PermissionAcceptEdits:
		args = append(args, "--permission-mode", "acceptEdits")
	case mode == sessions.PermissionBypass:
		args = append(args, "--dangerously-skip-permissions")
	}
	return args
}

// sessionUUID returns the id of a new transcript. It depends on the number of the turn, because
// Claude Code refuses an existing id, such as that of a first turn whose process died.
func sessionUUID(x *proto.AgentSession, turn int64) string {
	sum := sha256.Sum256(fmt.Appendf(nil, "%s\x00%s\x00%d", x.Org, x.ID, turn))
	sum[6], sum[8] = sum[6]&0x0f|0x40, sum[8]&0x3f|0x80
	return fmt.Sprintf("%x-%x-%x-%x-%x", sum[:4], sum[4:6], sum[6:8], sum[8:10], sum[10:16])
}

// Resumed implements [sessions.Conversation]. It returns false, because Claude Code drops the tool
// calls of an unfinished turn.
func (c *conversation) Resumed() bool { return false }

// Send implements [sessions.Conversation].
func (c *conversation) Send(_ context.Context, m *sessions.Message) error {
	c.mu.Lock()
	c.inTurn, c.interrupted = true, false
	c.mu.Unlock()
	return c.write(map[string]any{
		"type": "user", "message": map[string]any{"role": "user", "content": m.Prompt()},
		"parent_tool_use_id": nil, "session_id": "",
	})
}

func (c *conversation) write(v any) error {
	line, err := json.Marshal(v)
	if err != nil {
		return fmt.Errorf("encode a line for Claude Code: %w", err)
	}
	return c.process.WriteLine(line)
}

// Interrupt implements [sessions.Conversation].
func (c *conversation) Interrupt(context.Context) error {
	c.mu.Lock()
	c.interrupted = true
	c.mu.Unlock()
	return c.write(map[string]any{
		"type": "control_request", "request_id": "interrupt", "request": map[string]any{"subtype": "interrupt"},
	})
}

// Close implements [sessions.Conversation].
func (c *conversation) Close() {
	c.process.Close()
	<-c.done
}

// Answer implements [sessions.Conversation].
func (c *conversation) Answer(_ context.Context, a *sessions.Answer) error {
	id := (&sessions.Pending{Question: a.Question, Permission: a.Permission}).ID()
	c.mu.Lock()
	r, ok := c.requests[id]
	delete(c.requests, id)
	c.mu.Unlock()
	if !ok { // withdrawn by Claude Code
		return nil
	}
	return c.answerRequest(r, a)
}

// answerRequest allows or denies a request.
func (c *conversation) answerRequest(r request, a *sessions.Answer) error {
	response := map[string]any{"behavior": "allow", "updatedInput": json.RawMessage("{}")}
	deny := func(message string) { response = map[string]any{"behavior": "deny", "message": message} }
	switch {
	case r.plan:
		if a.Question.Response == nil || *a.Question.Response != approve {
			deny("the user did not approve the plan")
		}
	case a.Question != nil:
		if a.Question.Status == sessions.QuestionRejected {
			deny("the user did not answer the question")
			break
		}
		input, err := withAnswers(r.input, a.Answers)
		if err != nil {
			return err
		}
		response["updatedInput"] = input
	case a.Permission.Status == sessions.PermissionRejected:
		deny("the user refused the permission")
	case a.Permission.Status == sessions.PermissionAlways && len(r.suggestions) > 0:
		response["updatedPermissions"] = r.suggestions
	}
	return c.respond(r.id, response)
}

func (c *conversation) respond(id string, response any) error {
	return c.write(map[string]any{"type": "control_response", "response": map[string]any{
		"subtype": "success", "request_id": id, "response": response,
	}})
}

// withAnswers returns the input of AskUserQuestion with answers, keyed by the texts of its
// questions. It joins several answers to one question with commas.
func withAnswers(input json.RawMessage, answers [][]string) (map[string]any, error) {
	var fields map[string]any
	if err := json.Unmarshal(input, &fields); err != nil {
		return nil, fmt.Errorf("decode the questions of Claude Code: %w", err)
	}
	var asked questions
	if err := json.Unmarshal(input, &asked); err != nil {
		return nil, fmt.Errorf("decode the questions of Claude Code: %w", err)
	}
	byText := map[string]string{}
	for i, q := range asked.Questions {
		if i < len(answers) {
			byText[q.Question] = strings.Join(answers[i], ",")
		}
	}
	fields["answers"] = byText
	return fields, nil
}
