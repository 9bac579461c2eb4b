// Package amp drives Amp. Each turn is a process, which reads the message from its standard input and
// reports in the format stream-json. Its models are those of its own service, not this server's: the
// environment of the session must have AMP_API_KEY, and AMP_URL for another service, which the network
// policy of the session must allow.
package amp

import (
	"context"
	"encoding/json"
	"fmt"
	"sync/atomic"

	"github.com/bullpen-run/bullpen/agent/sessions"
	"github.com/bullpen-run/bullpen/agent/sessions/streamjson"
)

// Agent is Amp. Its fields must be set before use.
type Agent struct {
	// Installed describes the program that workers have.
	Installed func() sessions.Installation
}

// Info implements [sessions.Agent]. Credentials is false, because only the environments of sessions have
// them. Amp asks no one: it refuses tools that need a permission, unless the session bypasses permissions.
func (a *Agent) Info() *sessions.Info {
	return &sessions.Info{
		ID: "amp", Installation: a.Installed(), Sandboxed: true,
		Modes:           []sessions.Mode{{ID: "build", Name: "Build", Description: "Default build mode"}},
		PermissionModes: []string{sessions.PermissionDefault, sessions.PermissionBypass},
		Models:          []sessions.Model{{ID: "amp-default"}}, DefaultModel: "amp-default", PendingAssistant: true,
		Capabilities: sessions.Capabilities{
			ToolCalls: true, ToolResults: true, TextMessages: true, Reasoning: true, ErrorEvents: true, FileAttachments: true,
			CommandExecution: true, FileChanges: true, ItemStarted: true,
		},
	}
}

// conversation starts a process for each turn.
type conversation struct {
	agent  *Agent
	start  *sessions.Start
	native string // id of Amp's thread; empty if there is none yet
	turn   *turn  // the last one; nil if there is none
}

// turn is a process of Amp.
type turn struct {
	*streamjson.Reader
	interrupted atomic.Bool
	done        chan struct{} // closed after the last report
}

// Start implements [sessions.Agent].
func (a *Agent) Start(_ context.Context, s *sessions.Start) (sessions.Conversation, error) {
	return &conversation{agent: a, start: s, native: s.Native}, nil
}

// Resumed implements [sessions.Conversation]. The process of a turn in progress has ended with its sandbox.
func (c *conversation) Resumed() bool { return false }

// run is a shell script that runs a command with a file as its standard input. Without a key, Amp would wait
// for a person to log in.
const run = `: "${AMP_API_KEY:?set it in the environment of the session}"; exec "$@" < "$0"`

// Send implements [sessions.Conversation].
func (c *conversation) Send(ctx context.Context, m *sessions.Message) error {
	c.Close()
	if c.turn != nil && c.turn.ID != "" {
		c.native = c.turn.ID
	}
	prompt := c.start.Sandbox.Home() + "/" + sessions.StateDir + "/amp/prompt"
	if err := c.start.Sandbox.WriteFile(ctx, prompt, []byte(m.Prompt())); err != nil {
		return fmt.Errorf("write the message for Amp: %w", err)
	}
	args := []string{"sh", "-c", run, prompt, "node", c.agent.Installed().Dir + "/dist/main.js"}
	if c.native != "" {
		args = append(args, "threads", "continue", c.native)
	}
	args = append(args, "--execute", "--stream-json", "--stream-json-thinking", "--no-color", "--no-ide")
	if c.start.Session.PermissionMode == sessions.PermissionBypass {
		args = append(args, "--dangerously-allow-all")
	}
	process, err := c.start.Sandbox.Start(ctx, &sessions.Program{Args: args})
	if err != nil {
		return fmt.Errorf("start Amp: %w", err)
	}
	c.turn = &turn{
		Reader: &streamjson.Reader{Process: process, Program: "Amp", Report: c.start.Report},
		done:   make(chan struct{}),
	}
	go c.turn.read()
	return nil
}

// Answer implements [sessions.Conversation]. Amp asks nothing.
func (c *conversation) Answer(context.Context, *sessions.Answer) error { return nil }

// Interrupt implements [sessions.Conversation].
func (c *conversation) Interrupt(context.Context) error {
	c.turn.interrupted.Store(true)
	c.turn.Process.Close()
	return nil
}

// Close implements [sessions.Conversation].
func (c *conversation) Close() {
	if c.turn != nil {
		c.turn.Process.Close()
		<-c.turn.done
	}
}

// read reports the output of the process. The turn ends with the process, which stores its thread after the
// result.
func (t *turn) read() {
	defer close(t.done)
	finished := false
	for {
		l, err := t.Next()
		switch {
		case err == nil:
			finished = finished || l.Type == "result"
			if t.handle(l) != nil {
				return // the conversation is closed
			}
		case t.interrupted.Load():
			_ = t.Emit(sessions.TurnEnded, sessions.Turn{Metadata: json.RawMessage(`{"interrupted":true}`)})
			return
		case finished:
			_ = t.Emit(sessions.TurnEnded, nil)
			return
		default:
			_ = t.Ended(err, true)
			return
		}
	}
}

// handle handles a line. It returns an error if the conversation is closed.
func (t *turn) handle(l *streamjson.Line) error {
	switch l.Type {
	case "system":
		if l.Subtype == "init" {
			return t.Session(l)
		}
	case "assistant", "user":
		return t.Items(l)
	case "result":
		if !t.interrupted.Load() {
			return t.Failure(l)
		}
	}
	return nil
}
