package claude_test

import (
	"context"
	"encoding/json"
	"io"
	"strings"
	"sync"
	"testing"

	"github.com/bullpen-run/bullpen/agent/sessions"
	"github.com/bullpen-run/bullpen/agent/sessions/claude"
	"github.com/bullpen-run/bullpen/proto"
)

// puppet is a sandbox, and the program in it, whose lines a test writes and reads.
type puppet struct {
	sessions.Sandbox
	out, in chan string
	end     func()
}

func newPuppet() *puppet {
	p := &puppet{out: make(chan string, 10), in: make(chan string, 10)}
	p.end = sync.OnceFunc(func() { close(p.out) })
	return p
}

func (p *puppet) Home() string            { return "/home/user" }
func (p *puppet) Dir() string             { return "/home/user" }
func (p *puppet) Models() sessions.Models { return sessions.Models{} }
func (p *puppet) Close()                  { p.end() }
func (p *puppet) Exit() sessions.Exit     { return sessions.Exit{} }

func (p *puppet) Start(context.Context, *sessions.Program) (sessions.Process, error) { return p, nil }

func (p *puppet) WriteLine(line []byte) error {
	p.in <- string(line)
	return nil
}

func (p *puppet) ReadLine() ([]byte, string, error) {
	line, ok := <-p.out
	if !ok {
		return nil, "", io.EOF
	}
	return []byte(line), "", nil
}

// expect reads the next line that the adapter has written.
func (p *puppet) expect(t *testing.T, part string) {
	t.Helper()
	if line := <-p.in; !strings.Contains(line, part) {
		t.Fatalf("it wrote %s, without %s", line, part)
	}
}

// TestUnaskedTurn checks that a turn which Claude Code starts by itself between two turns is interrupted, and
// becomes neither a turn of its own nor part of the next one.
func TestUnaskedTurn(t *testing.T) {
	p := newPuppet()
	reports := make(chan sessions.Native, 10)
	p.out <- `{"type":"control_response","response":{"subtype":"success","request_id":"initialize"}}`
	agent := &claude.Agent{Installed: func() sessions.Installation { return sessions.Installation{} }}
	c, err := agent.Start(t.Context(), &sessions.Start{
		Session: &proto.AgentSession{Org: "acme", ID: "s"}, Sandbox: p,
		Report: func(n sessions.Native) error { reports <- n; return nil },
	})
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	p.expect(t, `"initialize"`)
	const running, idle = `{"type":"system","subtype":"session_state_changed","state":"running"}`,
		`{"type":"system","subtype":"session_state_changed","state":"idle"}`
	p.out <- running
	p.expect(t, `"interrupt"`)
	if err := c.Send(t.Context(), &sessions.Message{Number: 1, Text: "mine"}); err != nil {
		t.Fatal(err)
	}
	p.out <- `{"type":"assistant","message":{"id":"a","content":[{"type":"text","text":"unasked"}]}}`
	p.out <- `{"type":"control_request","request_id":"r","request":{"subtype":"can_use_tool","tool_name":"Bash"}}`
	p.expect(t, `"deny"`)
	p.out <- `{"type":"result","subtype":"error_during_execution","is_error":true}`
	p.out <- idle
	p.expect(t, "mine")
	p.out <- running
	p.out <- `{"type":"assistant","message":{"id":"b","content":[{"type":"text","text":"asked"}]}}`
	p.out <- `{"type":"result","subtype":"success"}`
	p.out <- idle
	first, second := <-reports, <-reports
	item, err := json.Marshal(first.Data)
	if err != nil || !strings.Contains(string(item), `"asked"`) || second.Type != sessions.TurnEnded {
		t.Errorf("it reported %s and %s, %v", item, second.Type, err)
	}
}

// TestHostileLines checks that lines of a wrong form end nothing.
func TestHostileLines(t *testing.T) {
	p := newPuppet()
	reports := make(chan sessions.Native, 20)
	p.out <- `{"type":"control_response"}`
	agent := &claude.Agent{Installed: func() sessions.Installation { return sessions.Installation{} }}
	c, err := agent.Start(t.Context(), &sessions.Start{
		Session: &proto.AgentSession{Org: "acme", ID: "s"}, Sandbox: p,
		Report: func(n sessions.Native) error { reports <- n; return nil },
	})
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	if err := c.Send(t.Context(), &sessions.Message{Number: 1, Text: "mine"}); err != nil {
		t.Fatal(err)
	}
	for _, line := range []string{
		``, `[]`, `"x"`, `{"type":7}`, `{"type":"system","subtype":"init","session_id":7}`,
		`{"type":"system","subtype":"session_state_changed","state":[]}`, `{"type":"stream_event","event":"x"}`,
		`{"type":"assistant","message":"x"}`, `{"type":"control_request","request":[]}`,
		`{"type":"control_cancel_request","request_id":{}}`, `{"type":"result","result":{}}`,
	} {
		p.out <- line
		if n := <-reports; n.Type != sessions.Unparsed {
			t.Errorf("%s: it reported %s", line, n.Type)
		}
	}
	for _, line := range []string{
		`{}`, `null`, `{"type":"user"}`, `{"type":"assistant","message":{"content":[{"type":"tool_use"}]}}`,
	} {
		p.out <- line
	}
	p.out <- `{"type":"assistant","message":{"content":[{"type":"text","text":"fine"}]}}`
	<-reports // the call
	if n := <-reports; n.Type != sessions.ItemCompleted {
		t.Errorf("it reported %s", n.Type)
	}
}
