package main_test

import (
	"os"
	"strings"
	"testing"

	"connectrpc.com/connect"

	"github.com/bullpen-run/bullpen/guest/processpb"
)

// inTerminal makes a process that runs a script in a terminal.
func inTerminal(script string, cols, rows uint32) *processpb.StartRequest {
	r := bash(script)
	r.Stdin, r.Pty = nil, &processpb.PTY{Size: &processpb.PTY_Size{Cols: cols, Rows: rows}}
	return r
}

func (s *sandbox) typeIn(p *processpb.ProcessSelector, text string) error {
	_, err := s.process.SendInput(s.t.Context(), connect.NewRequest(&processpb.SendInputRequest{
		Process: p, Input: &processpb.ProcessInput{Input: &processpb.ProcessInput_Pty{Pty: []byte(text)}},
	}))
	return err
}

func TestTerminal(t *testing.T) {
	s := newSandbox(t)
	for _, user := range []string{"user", "root"} {
		t.Run(user, func(t *testing.T) {
			e := s.begin(user, inTerminal(
				`stty size; [ -t 0 -a -t 1 -a -t 2 ] && echo "$TERM"; [ -O $(tty) ] && echo own
				read -r line; stty size; echo "<$line>"`, 80, 24))
			if got := e.readLines(3); got != "24 80\r\nxterm-256color\r\nown\r\n" {
				t.Fatalf("%q", got)
			}
			size := &processpb.PTY_Size{Cols: 100, Rows: 40}
			_, err := s.process.Update(t.Context(), connect.NewRequest(&processpb.UpdateRequest{
				Process: pid(e.pid), Pty: &processpb.PTY{Size: size},
			}))
			check(t, err)
			check(t, s.typeIn(pid(e.pid), "hello\n"))
			r := e.all()
			if !strings.Contains(r.pty, "40 100\r\n<hello>\r\n") || r.stdout+r.stderr != "" || r.end.GetExitCode() != 0 {
				t.Fatalf("%+v", r)
			}
		})
	}
}

func TestTerminalEndsByHangUp(t *testing.T) {
	s := newSandbox(t)
	e := s.begin("", inTerminal(`sleep 1000 & echo $!; exec sleep 1001`, 80, 24))
	child := strings.TrimSpace(e.readLines(1))
	wantCode(t, s.send(pid(e.pid), "x"), connect.CodeInternal, "has a terminal")
	wantCode(t, s.closeStdin(pid(e.pid)), connect.CodeFailedPrecondition, "terminal")
	check(t, s.kill(pid(e.pid)))
	if r := e.all(); r.end.GetStatus() != "signal: killed" {
		t.Fatalf("%+v", r)
	}
	if alive(t, child) {
		t.Error("the child is alive")
	}
	without := s.begin("", bash("sleep 1000"))
	_, err := s.process.Update(t.Context(), connect.NewRequest(&processpb.UpdateRequest{
		Process: pid(without.pid), Pty: &processpb.PTY{Size: &processpb.PTY_Size{Cols: 1, Rows: 1}},
	}))
	wantCode(t, err, connect.CodeFailedPrecondition, "no terminal")
	check(t, s.kill(pid(without.pid)))
}

// TestManyTerminals finds terminals that are not closed.
func TestManyTerminals(t *testing.T) {
	s := newSandbox(t)
	descriptors := func() int {
		entries, err := os.ReadDir(s.proc("fd"))
		check(t, err)
		return len(entries)
	}
	run := func() {
		if r := s.begin("", inTerminal("echo x", 80, 24)).all(); r.pty != "x\r\n" {
			t.Fatalf("%+v", r)
		}
		if r := s.run("", "echo x"); r.stdout != "x\n" {
			t.Fatalf("%+v", r)
		}
	}
	run()
	before := descriptors()
	for range 20 {
		run()
	}
	eventually(t, func() bool { return descriptors() <= before+2 }) // connections of clients
}
