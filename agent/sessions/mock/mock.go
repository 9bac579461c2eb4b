// Package mock is a coding agent without a model or a program, for tests of clients. The text of a
// message selects a script, and the agent replies with it. The scripts are those of the mock agent
// of the Sandbox Agent API 0.1.11.
package mock

import (
	"context"
	"encoding/json"
	"fmt"
	"strings"
	"sync"
	"time"

	"github.com/bullpen-run/bullpen/agent/sessions"
)

// Agent is the mock agent.
type Agent struct {
	// Delay is the time between two events. The original's is 200 ms.
	Delay time.Duration
}

// info describes the agent. Its scripts cover everything that a client can handle.
var info = &sessions.Info{
	ID: "mock", Installation: sessions.Installation{Version: "builtin"}, Credentials: true,
	Modes: []sessions.Mode{
		{ID: "build", Name: "Build", Description: "Mock agent for UI testing"},
		{ID: "plan", Name: "Plan", Description: "Plan-only mock mode"},
	},
	PermissionModes: []string{sessions.PermissionDefault, sessions.PermissionPlan, sessions.PermissionBypass},
	Models:          []sessions.Model{{ID: "mock", Name: "Mock"}},
	DefaultModel:    "mock",
	Capabilities: sessions.Capabilities{
		PlanMode: true, Permissions: true, Questions: true, ToolCalls: true, ToolResults: true, TextMessages: true,
		Images: true, FileAttachments: true, SessionLifecycle: true, ErrorEvents: true, Reasoning: true, Status: true,
		CommandExecution: true, FileChanges: true, MCPTools: true, StreamingDeltas: true, ItemStarted: true,
	},
	NativeID:     func(session string) string { return "mock-" + session },
	OwnUserItems: true,
}

// Info implements [sessions.Agent].
func (*Agent) Info() *sessions.Info { return info }

// Start implements [sessions.Agent].
func (a *Agent) Start(ctx context.Context, s *sessions.Start) (sessions.Conversation, error) {
	ctx, cancel := context.WithCancel(ctx)
	c := &conversation{
		delay: a.Delay, report: s.Report, cancel: cancel, turns: make(chan *turn, 1), ended: make(chan struct{}),
		pending: map[string]bool{}, answered: make(chan struct{}, 1),
	}
	// The log contains the cursor only if it contains the whole script. Only answers are missing
	// then.
	if s.Running && s.Cursor == prefix(s.Turns) {
		c.resumed = true
		for _, p := range s.Pending {
			c.pending[p.ID()] = true
		}
		c.begin(nil)
	}
	go c.run(ctx)
	return c, nil
}

// prefix returns the prefix of the ids of a message's turn. It is also the cursor after the script.
func prefix(message int64) string { return fmt.Sprintf("mock_%d", message) }

// conversation implements [sessions.Conversation].
type conversation struct {
	delay   time.Duration
	report  func(sessions.Native) error
	cancel  context.CancelFunc
	resumed bool
	current *turn // the last turn; nil before the first
	turns   chan *turn
	ended   chan struct{} // closed when run returns

	mu       sync.Mutex
	pending  map[string]bool // ids of the unanswered questions and permissions
	answered chan struct{}   // receives a value after an answer
}

// turn is a turn for run to play.
type turn struct {
	script      []sessions.Native
	interrupted chan struct{} // receives a value when the turn must end
}

// Resumed implements [sessions.Conversation].
func (c *conversation) Resumed() bool { return c.resumed }

// Send implements [sessions.Conversation].
func (c *conversation) Send(_ context.Context, m *sessions.Message) error {
	c.begin(script(prefix(m.Number), strings.TrimSpace(m.Prompt())))
	return nil
}

// begin begins a turn.
func (c *conversation) begin(script []sessions.Native) {
	c.current = &turn{script, make(chan struct{}, 1)}
	c.turns <- c.current
}

// Answer implements [sessions.Conversation].
func (c *conversation) Answer(_ context.Context, a *sessions.Answer) error {
	p := sessions.Pending{Question: a.Question, Permission: a.Permission}
	c.mu.Lock()
	delete(c.pending, p.ID())
	c.mu.Unlock()
	signal(c.answered)
	return nil
}

// Interrupt implements [sessions.Conversation].
func (c *conversation) Interrupt(context.Context) error {
	if c.current != nil {
		signal(c.current.interrupted)
	}
	return nil
}

// signal sends a value. It does nothing if the last one has not been received yet.
func signal(to chan<- struct{}) {
	select {
	case to <- struct{}{}:
	default:
	}
}

// Close implements [sessions.Conversation].
func (c *conversation) Close() {
	c.cancel()
	<-c.ended
}

// run plays turns until ctx is done.
func (c *conversation) run(ctx context.Context) {
	defer close(c.ended)
	for {
		select {
		case <-ctx.Done():
			return
		case t := <-c.turns:
			if c.play(ctx, t) != nil {
				return
			}
		}
	}
}

// play reports the script of a turn, waits for all answers, and ends the turn. It leaves the turn
// open if the script ends the session. It returns an error if the conversation is closed.
func (c *conversation) play(ctx context.Context, t *turn) error {
	interrupted := false
	for i := 0; i < len(t.script) && !interrupted; i++ {
		n := t.script[i]
		c.expectAnswer(&n)
		if err := c.report(n); err != nil || n.Type == sessions.SessionEnded {
			return err
		}
		if i < len(t.script)-1 {
			interrupted = wait(ctx, t, time.After(c.delay))
		}
	}
	for !interrupted && c.isWaiting() {
		interrupted = wait(ctx, t, c.answered)
	}
	if ctx.Err() != nil {
		return ctx.Err()
	}
	end := sessions.Turn{}
	if interrupted {
		end.Metadata = json.RawMessage(`{"interrupted":true}`)
	}
	c.mu.Lock()
	clear(c.pending)
	c.mu.Unlock()
	return c.report(sessions.Native{Type: sessions.TurnEnded, Data: end, Synthetic: true})
}

// wait blocks until it receives a value from until. It reports whether the turn was interrupted.
func wait[T any](ctx context.Context, t *turn, until <-chan T) (interrupted bool) {
	select {
	case <-ctx.Done():
		return true
	case <-t.interrupted:
		return true
	case <-until:
		return false
	}
}

// expectAnswer registers the question or permission of an event. It must be called before the event
// is reported, because the answer may arrive before the report returns.
func (c *conversation) expectAnswer(n *sessions.Native) {
	c.mu.Lock()
	defer c.mu.Unlock()
	switch data := n.Data.(type) {
	case sessions.Permission:
		c.pending[data.ID] = true
	case sessions.Question:
		c.pending[data.ID] = true
	}
}

// isWaiting reports whether an answer is pending.
func (c *conversation) isWaiting() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return len(c.pending) > 0
}
