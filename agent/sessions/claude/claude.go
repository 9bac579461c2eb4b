// Package claude drives Claude Code. One process serves all turns of a conversation. It reads and writes
// JSON lines: the format stream-json of version 2.1.112, with the control requests of its SDK.
package claude

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"strings"
	"sync"
	"time"

	"github.com/bullpen-run/bullpen/agent/sessions"
	"github.com/bullpen-run/bullpen/agent/sessions/streamjson"
	"github.com/bullpen-run/bullpen/proto"
)

// programName is the name of the program in messages to users.
const programName = "Claude Code"

// startTimeout bounds the start of the program. It takes a second of a CPU that is otherwise idle.
const startTimeout = 5 * time.Minute

// Agent is Claude Code. Its fields must be set before use.
type Agent struct {
	// Installed describes the program that workers have.
	Installed func() sessions.Installation
}

// Info implements [sessions.Agent].
func (a *Agent) Info() *sessions.Info {
	installed := a.Installed()
	efforts := []string{"low", "medium", "high", "xhigh"}
	model := func(id, name string) sessions.Model {
		return sessions.Model{ID: id, Name: name, Variants: efforts}
	}
	return &sessions.Info{
		ID: "claude", Installation: installed, Sandboxed: true, Credentials: installed.Missing == "",
		SkillsDir: sessions.StateDir + "/claude/skills",
		Modes: []sessions.Mode{
			{ID: "build", Name: "Build", Description: "Default build mode"},
			{ID: "plan", Name: "Plan", Description: "Plan mode: tools that change something are refused"},
		},
		PermissionModes: []string{
			sessions.PermissionDefault, sessions.PermissionPlan, sessions.PermissionBypass, sessions.PermissionAcceptEdits,
		},
		Models: []sessions.Model{
			model(defaultModel, "Default"), model("sonnet", "Sonnet"), model("opus", "Opus"), model("haiku", "Haiku"),
		},
		DefaultModel: defaultModel, PendingAssistant: true,
		Capabilities: sessions.Capabilities{
			PlanMode: true, Permissions: true, Questions: true, ToolCalls: true, ToolResults: true, TextMessages: true,
			Reasoning: true, ErrorEvents: true, FileAttachments: true, CommandExecution: true, FileChanges: true, MCPTools: true,
			StreamingDeltas: true, ItemStarted: true,
		},
	}
}

// conversation is a process of Claude Code.
type conversation struct {
	*streamjson.Reader
	planMode bool          // of the session
	done     chan struct{} // closed after the last report

	mu       sync.Mutex
	requests map[string]request // unanswered, by the id of the permission or question
	model    string             // that the process uses
	variant  string
	effort   string // the variant that the process uses
	planning bool   // whether tools that change something are refused
	inTurn   bool
	// busy is set while Claude Code works. It can begin by itself, for example when a background command
	// ends. A message that it received then would become part of that work.
	busy    bool
	waiting []any // lines of a turn that begins once Claude Code is idle
	// finished is set once Claude Code has reported the result of the turn. It may still continue by itself.
	finished bool
	// interrupted is set if a user has interrupted the turn. Its end is then not an error.
	interrupted bool
}

// Start implements [sessions.Agent].
func (a *Agent) Start(ctx context.Context, s *sessions.Start) (sessions.Conversation, error) {
	if s.Running {
		return nil, errors.New("start Claude Code: it cannot continue a turn of another process")
	}
	program, err := a.program(s)
	if err != nil {
		return nil, err
	}
	process, err := s.Sandbox.Start(ctx, program)
	if err != nil {
		return nil, fmt.Errorf("start Claude Code: %w", err)
	}
	c := &conversation{
		Reader:   &streamjson.Reader{Process: process, Program: programName, Report: s.Report},
		planMode: isPlan(s.Session), planning: isPlan(s.Session),
		model: s.Session.Model, variant: s.Session.Variant, requests: map[string]request{}, done: make(chan struct{}),
	}
	if err := c.initialize(ctx); err != nil {
		process.Close()
		return nil, err
	}
	go c.read()
	return c, nil
}

// initialize waits until Claude Code answers. Otherwise it says nothing before the first message, even if
// it cannot work.
func (c *conversation) initialize(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, startTimeout)
	defer cancel()
	stop := context.AfterFunc(ctx, c.Process.Close)
	defer stop()
	if err := c.write(controlLine("initialize", "initialize", nil)); err != nil {
		return fmt.Errorf("start Claude Code: %w", err)
	}
	for {
		text, _, err := c.Process.ReadLine()
		switch {
		case errors.Is(err, io.EOF) && ctx.Err() == nil:
			return c.startError()
		case err != nil:
			return fmt.Errorf("start Claude Code: %w", errors.Join(ctx.Err(), err))
		}
		var l struct {
			Type string `json:"type"`
		}
		if json.Unmarshal(text, &l) == nil && l.Type == "control_response" {
			return nil
		}
	}
}

// startError returns why Claude Code has ended before its first turn.
func (c *conversation) startError() error {
	exit := c.Process.Exit()
	message := strings.TrimSpace(exit.Stderr.Head)
	switch {
	case strings.Contains(message, "No conversation found with session ID"):
		return &sessions.Error{
			Kind: sessions.ConversationLost, Agent: "claude",
			Message: "Claude Code no longer has this conversation; the next message begins a new one, without the earlier ones",
		}
	case message == "":
		message = "it has no output; it may be unable to write to " + sessions.StateDir + "/claude in the session's home"
	}
	return &sessions.Error{
		Kind: sessions.AgentExited, Agent: "claude",
		Message: fmt.Sprintf("Claude Code ended with exit code %d at its start: %s", exit.Code, message),
	}
}

func isPlan(x *proto.AgentSession) bool {
	return x.AgentMode == "plan" || x.PermissionMode == sessions.PermissionPlan
}

// Resumed implements [sessions.Conversation].
func (c *conversation) Resumed() bool { return false }

// Send implements [sessions.Conversation].
func (c *conversation) Send(_ context.Context, m *sessions.Message) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	var lines []any
	if c.planMode && !c.planning { // the user has approved the plan of an earlier turn
		lines = append(lines, controlLine("plan", "set_permission_mode", map[string]any{"mode": "plan"}))
		c.planning = true
	}
	if m.Model != "" && m.Model != c.model {
		lines = append(lines, controlLine("model", "set_model", map[string]any{"model": m.Model}))
		c.model = m.Model
	}
	if m.Variant != "" {
		c.variant = m.Variant
	}
	if c.variant != c.effort {
		lines = append(lines, controlLine("effort", "apply_flag_settings", map[string]any{
			"settings": map[string]any{"effortLevel": c.variant}, // the default if it is unknown
		}))
		c.effort = c.variant
	}
	lines = append(lines, map[string]any{
		"type": "user", "message": map[string]any{"role": "user", "content": m.Prompt()},
		"parent_tool_use_id": nil, "session_id": "",
	})
	c.inTurn, c.finished, c.interrupted = true, false, false
	if c.busy {
		c.waiting = lines
		return nil
	}
	return c.write(lines...)
}

// controlLine returns a control request.
func controlLine(id, subtype string, fields map[string]any) any {
	request := map[string]any{"subtype": subtype}
	maps.Copy(request, fields)
	return map[string]any{"type": "control_request", "request_id": id, "request": request}
}

func interruptLine() any { return controlLine("interrupt", "interrupt", nil) }

func (c *conversation) write(lines ...any) error {
	for _, v := range lines {
		line, err := json.Marshal(v)
		if err != nil {
			return fmt.Errorf("encode a line for Claude Code: %w", err)
		}
		if err := c.Process.WriteLine(line); err != nil {
			return err
		}
	}
	return nil
}

// Interrupt implements [sessions.Conversation].
func (c *conversation) Interrupt(context.Context) error {
	c.mu.Lock()
	c.interrupted = true
	c.mu.Unlock()
	return c.write(interruptLine())
}

// Close implements [sessions.Conversation].
func (c *conversation) Close() {
	c.Process.Close()
	<-c.done
}
