package amp_test

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/bullpen-run/bullpen/agent/sessions"
	"github.com/bullpen-run/bullpen/agent/sessions/amp"
	"github.com/bullpen-run/bullpen/agent/sessions/sessionstest"
	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/scheduler/storetest"
)

func TestMain(m *testing.M) { sessionstest.Main(m) }

// play creates a session whose Amp replays recordings, one for each turn.
func play(t *testing.T, recordings ...string) (w *sessionstest.World, home string) {
	t.Helper()
	sandboxes := &sessionstest.Sandboxes{T: t, Path: t.TempDir()}
	for _, name := range recordings {
		sandboxes.Recordings = append(sandboxes.Recordings, filepath.Join("testdata", name+".txt"))
	}
	installed := sessions.Installation{Dir: "/amp"}
	w = sessionstest.New(t, storetest.Open(t, storetest.Server(t)),
		&amp.Agent{Installed: func() sessions.Installation { return installed }})
	w.Sandboxes = sandboxes
	w.Lead()
	return w, sandboxes.Path
}

// show describes the events of turns, but for the starts of items.
func show(t *testing.T, events []sessions.Event) string {
	t.Helper()
	var b strings.Builder
	for i := range events {
		switch e := &events[i]; e.Type {
		case sessions.ItemStarted, sessions.ItemDelta:
		case sessions.ItemCompleted:
			d, err := sessions.DataOf[sessions.ItemData](e)
			if err != nil {
				t.Fatal(err)
			}
			for _, p := range d.Item.Content {
				fmt.Fprintf(&b, "%s %s:%s%s%s%s\n", *d.Item.Role, p.Type, p.Text, p.Name, p.Arguments, p.Output)
			}
		case sessions.ErrorEvent:
			d, err := sessions.DataOf[sessions.Failure](e)
			if err != nil {
				t.Fatal(err)
			}
			fmt.Fprintf(&b, "%s: %s\n", *d.Code, d.Message)
		case sessions.SessionEnded:
			d, err := sessions.DataOf[sessions.Ended](e)
			if err != nil {
				t.Fatal(err)
			}
			fmt.Fprintf(&b, "%s %s %d %s\n", e.Type, d.Reason, *d.ExitCode, d.Stderr.Head)
		case sessions.TurnEnded:
			d, err := sessions.DataOf[sessions.Turn](e)
			if err != nil {
				t.Fatal(err)
			}
			fmt.Fprintln(&b, e.Type+" "+sessions.EventType(d.Metadata))
		}
	}
	return b.String()
}

func check(t *testing.T, what, got, want string) {
	t.Helper()
	if want = strings.TrimPrefix(want, "\n"); got != want {
		t.Errorf("%s:\n%s\nwant:\n%s", what, got, want)
	}
}

func TestTurns(t *testing.T) {
	w, home := play(t, "first", "second")
	w.MustCreate("s", "amp")
	w.MustSend("s", "count")
	events := w.Until("s", 1, sessionstest.Is(sessions.TurnEnded))
	w.MustSend("s", "again")
	events = append(events, w.Until("s", events[len(events)-1].Sequence, sessionstest.Is(sessions.TurnEnded))...)
	check(t, "the session", show(t, events), `
user text:count
assistant reasoning:With ls.
assistant text:I look.
assistant tool_call:Bash{"cmd":"ls"}
tool tool_result:a b
assistant text:Two.
turn.ended 
user text:again
assistant text:Still two.
turn.ended 
`)
	message, err := os.ReadFile(filepath.Join(home, sessions.StateDir, "amp", "prompt"))
	if err != nil || string(message) != "again" {
		t.Errorf("Amp gets the message %q, %v", message, err)
	}
}

func TestFailures(t *testing.T) {
	w, _ := play(t, "failure", "nokey")
	w.MustCreate("s", "amp", func(x *proto.AgentSession) { x.PermissionMode = sessions.PermissionBypass })
	w.MustSend("s", "hi")
	events := w.Until("s", 1, sessionstest.Is(sessions.TurnEnded))
	w.MustSend("s", "again")
	events = append(events, w.Until("s", events[len(events)-1].Sequence, sessionstest.Is(sessions.SessionEnded))...)
	check(t, "the session", show(t, events), `
user text:hi
error_during_execution: out of credits
turn.ended 
user text:again
session.ended error 2 AMP_API_KEY: set it in the environment of the session
`)
}

func TestInterrupt(t *testing.T) {
	w, _ := play(t, "hang", "second")
	w.MustCreate("s", "amp")
	w.MustSend("s", "wait")
	events := w.Until("s", 1, sessionstest.Is(sessions.ItemDelta))
	if err := w.Interrupt(t.Context(), sessionstest.Org, "s"); err != nil {
		t.Fatal(err)
	}
	w.MustSend("s", "again")
	for range 2 {
		events = append(events, w.Until("s", events[len(events)-1].Sequence, sessionstest.Is(sessions.TurnEnded))...)
	}
	check(t, "the session", show(t, events), `
user text:wait
assistant text:I wait.
turn.ended {"interrupted":true}
user text:again
assistant text:Still two.
turn.ended 
`)
}
