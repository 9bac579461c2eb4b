package claude

import (
	"encoding/json"

	"github.com/bullpen-run/bullpen/agent/sessions"
	"github.com/bullpen-run/bullpen/agent/sessions/streamjson"
)

// read reports the output of Claude Code until the program ends.
func (c *conversation) read() {
	defer close(c.done)
	for {
		l, err := c.Next()
		if err != nil {
			c.mu.Lock()
			inTurn := c.inTurn
			c.mu.Unlock()
			_ = c.Ended(err, inTurn) // the conversation may be closed
			return
		}
		if err := c.handle(l); err != nil {
			return
		}
	}
}

// handle handles a line. It returns an error if the conversation is closed.
func (c *conversation) handle(l *streamjson.Line) error {
	switch l.Type {
	case "system":
		switch l.Subtype {
		case "init":
			return c.Session(l)
		case "session_state_changed":
			return c.state(l)
		}
	case "control_request":
		return c.request(l)
	case "control_cancel_request":
		return c.withdraw(l)
	}
	c.mu.Lock()
	hasBegun := c.hasBegun()
	c.mu.Unlock()
	if !hasBegun {
		return nil
	}
	switch l.Type {
	case "stream_event":
		return c.Delta(l)
	case "assistant", "user":
		return c.Items(l)
	case "result":
		return c.result(l)
	}
	return nil // there are many other types
}

// hasBegun reports whether Claude Code has received the message of a turn in progress.
func (c *conversation) hasBegun() bool { return c.inTurn && c.waiting == nil }

// result handles the result of a turn. The turn ends when Claude Code is idle.
func (c *conversation) result(l *streamjson.Line) error {
	c.mu.Lock()
	c.finished = true
	interrupted := c.interrupted
	c.mu.Unlock()
	if interrupted {
		return nil
	}
	return c.Failure(l)
}

// state handles that Claude Code begins to work or is idle.
func (c *conversation) state(l *streamjson.Line) error {
	var line struct {
		State string `json:"state"`
	}
	if err := l.Decode(&line); err != nil {
		return c.Unparsed(err.Error())
	}
	ended, turn := c.setBusy(line.State != "idle")
	if !ended {
		return nil
	}
	return c.Emit(sessions.TurnEnded, turn)
}

// setBusy sets whether Claude Code works. If it begins to work between turns, it is interrupted. If it is
// idle, a waiting turn begins, or the turn ends that has a result: until then it may continue by itself.
func (c *conversation) setBusy(busy bool) (ended bool, turn sessions.Turn) {
	c.mu.Lock()
	defer c.mu.Unlock()
	var lines []any // if they cannot be written, the program has ended, and Next returns that
	switch c.busy = busy; {
	case busy && !c.inTurn:
		lines = []any{interruptLine()}
	case !busy && c.waiting != nil:
		lines, c.waiting = c.waiting, nil
		if ended = c.interrupted; ended {
			lines = nil
		}
	case !busy && c.inTurn:
		ended = c.finished
	}
	_ = c.write(lines...)
	if ended {
		c.inTurn = false
		clear(c.requests)
	}
	if ended && c.interrupted {
		turn.Metadata = json.RawMessage(`{"interrupted":true}`)
	}
	return ended, turn
}
