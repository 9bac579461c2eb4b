// Package opencode drives OpenCode 1.18. One process of opencode serve serves all turns of a session. It is
// reached over HTTP on a loopback port of the sandbox, and reports what it does as server-sent events.
package opencode

import (
	"cmp"
	"context"
	"fmt"
	"sync"
	"time"

	"github.com/bullpen-run/bullpen/agent/sessions"
	"github.com/bullpen-run/bullpen/proto"
)

// Agent is OpenCode. Its fields must be set before use.
type Agent struct {
	// Installed describes the program that workers have.
	Installed func() sessions.Installation
	// DefaultModel is the model of sessions that name none. The default is a model named default.
	DefaultModel string
	// Ripgrep is a directory of sandboxes that contains rg, without which OpenCode cannot search files. It
	// comes last in PATH. It is empty if sandboxes have rg anyway.
	Ripgrep string
}

// The agent modes that OpenCode always has.
const (
	modeBuild = "build"
	modePlan  = "plan"
)

// Info implements [sessions.Agent].
func (a *Agent) Info() *sessions.Info {
	installed, model := a.Installed(), cmp.Or(a.DefaultModel, "default")
	return &sessions.Info{
		ID: "opencode", Installation: installed, Sandboxed: true, Credentials: installed.Missing == "",
		SkillsDir: sessions.StateDir + "/opencode/config/opencode/skills",
		Modes: []sessions.Mode{
			{ID: modeBuild, Name: "Build", Description: "Default build mode"},
			{ID: modePlan, Name: "Plan", Description: "Plan mode: tools that change something are refused"},
		},
		AnyMode: true, PermissionModes: []string{sessions.PermissionDefault},
		Models:       []sessions.Model{{ID: model, Variants: []string{"high", "max"}}},
		DefaultModel: model,
		Capabilities: sessions.Capabilities{
			PlanMode: true, Permissions: true, Questions: true, ToolCalls: true, ToolResults: true, TextMessages: true,
			Images: true, FileAttachments: true, Reasoning: true, Status: true, ErrorEvents: true, CommandExecution: true,
			FileChanges: true, MCPTools: true, StreamingDeltas: true, ItemStarted: true,
		},
	}
}

// conversation is a session of OpenCode. Its goroutine run does all work and calls Report. Only the fields
// up to done are shared with other goroutines.
type conversation struct {
	start   *sessions.Start
	agent   *Agent
	context context.Context // of all requests; done when the conversation is closed
	cancel  context.CancelFunc
	mu      sync.Mutex
	inbox   []func()      // what the runner has requested
	wake    chan struct{} // has a value if inbox is not empty
	done    chan struct{} // closed when run has returned

	server   *server // nil if no program runs
	events   <-chan []byte
	native   string // OpenCode's id of the session; empty if it has none yet
	previous string // OpenCode's id of the last user message of earlier turns
	model    string
	variant  string
	turn     turn
	timer    *time.Timer
}

// Start implements [sessions.Agent].
func (a *Agent) Start(ctx context.Context, s *sessions.Start) (sessions.Conversation, error) {
	c := &conversation{
		agent: a, start: s, wake: make(chan struct{}, 1), done: make(chan struct{}), native: s.Native,
		model: cmp.Or(s.Session.Model, a.Info().DefaultModel), variant: s.Session.Variant, timer: time.NewTimer(time.Hour),
	}
	c.timer.Stop()
	c.context, c.cancel = context.WithCancel(ctx)
	if !s.Running { // otherwise there may be no further turn
		if err := c.spawn(c.model); err != nil {
			c.cancel()
			return nil, err
		}
	}
	go c.run()
	return c, nil
}

func isPlan(x *proto.AgentSession) bool { return x.AgentMode == modePlan }

// Resumed implements [sessions.Conversation]. It returns false, because OpenCode does not continue an
// unfinished turn.
func (c *conversation) Resumed() bool { return false }

// Send implements [sessions.Conversation].
func (c *conversation) Send(_ context.Context, m *sessions.Message) error {
	c.do(func() { c.begin(m) })
	return nil
}

// Answer implements [sessions.Conversation].
func (c *conversation) Answer(_ context.Context, a *sessions.Answer) error {
	c.do(func() { c.answer(a) })
	return nil
}

// Interrupt implements [sessions.Conversation].
func (c *conversation) Interrupt(context.Context) error {
	c.do(c.interrupt)
	return nil
}

// Close implements [sessions.Conversation].
func (c *conversation) Close() {
	c.cancel()
	<-c.done
}

// do makes run call f.
func (c *conversation) do(f func()) {
	c.mu.Lock()
	c.inbox = append(c.inbox, f)
	c.mu.Unlock()
	select {
	case c.wake <- struct{}{}:
	default:
	}
}

// run handles requests of the runner and events of the program until the conversation is closed or the
// program has ended.
func (c *conversation) run() {
	defer close(c.done)
	defer c.stop()
	defer c.cancel()
	for c.context.Err() == nil {
		var exited <-chan struct{}
		if c.server != nil {
			exited = c.server.exited
		}
		select {
		case <-c.context.Done():
		case <-exited:
			c.reportExit()
		case <-c.wake:
			c.mu.Lock()
			requests := c.inbox
			c.inbox = nil
			c.mu.Unlock()
			for _, f := range requests {
				f()
			}
		case data, ok := <-c.events:
			if ok {
				c.handle(data)
			} else {
				c.reconnect()
			}
		case <-c.timer.C:
			c.timeout()
		}
	}
}

// stop ends the program.
func (c *conversation) stop() {
	if c.server != nil {
		c.server.stop()
		c.server, c.events = nil, nil
	}
}

// report reports n. It closes the conversation if the runner has no use for reports.
func (c *conversation) report(n *sessions.Native) {
	if c.start.Report(*n) != nil {
		c.cancel()
	}
}

// reportExit reports the end of the program, and closes the conversation.
func (c *conversation) reportExit() {
	defer c.cancel()
	ended := sessions.Ended{Reason: sessions.EndError, TerminatedBy: sessions.FromAgent, Message: "OpenCode ended"}
	if exit := c.server.exit; exit == nil {
		ended.TerminatedBy, ended.Message = sessions.FromDaemon, "the connection to the agent was lost"
	} else {
		ended.ExitCode = &exit.Code
		if exit.Stderr.Head != "" {
			ended.Stderr = &exit.Stderr
		}
		if exit.Code == 0 && !c.turn.running {
			ended.Reason = sessions.EndCompleted
		}
	}
	c.report(&sessions.Native{Type: sessions.SessionEnded, Data: ended})
}

// spawn starts the program with a model.
func (c *conversation) spawn(model string) error {
	content, err := c.config(model)
	if err != nil {
		return err
	}
	if err := c.preventInstall(); err != nil {
		return fmt.Errorf("prepare the directory of OpenCode: %w", err)
	}
	c.server, err = c.launch(content)
	if err != nil {
		return fmt.Errorf("start OpenCode: %w", err)
	}
	c.server.model = model
	return nil
}
