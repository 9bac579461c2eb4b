package claude_test

import (
	"errors"
	"fmt"
	"path/filepath"
	"strings"
	"testing"

	"github.com/bullpen-run/bullpen/agent/sessions"
	"github.com/bullpen-run/bullpen/agent/sessions/claude"
	"github.com/bullpen-run/bullpen/agent/sessions/sessionstest"
	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/scheduler/storetest"
)

func TestMain(m *testing.M) { sessionstest.Main(m) }

// world returns a gateway whose Claude Code replays recordings.
func world(t *testing.T, recordings ...string) *sessionstest.World {
	t.Helper()
	sandboxes := &sessionstest.Sandboxes{T: t}
	for _, name := range recordings {
		sandboxes.Recordings = append(sandboxes.Recordings, filepath.Join("testdata", name))
	}
	installed := sessions.Installation{Dir: "/claude"}
	w := sessionstest.New(t, storetest.Open(t, storetest.Server(t)),
		&claude.Agent{Installed: func() sessions.Installation { return installed }})
	w.Sandboxes = sandboxes
	w.Lead()
	return w
}

// show describes events in lines.
func show(t *testing.T, events []sessions.Event) string {
	t.Helper()
	var b strings.Builder
	for i := range events {
		e := &events[i]
		fmt.Fprint(&b, e.Type)
		switch e.Type {
		case sessions.ItemStarted, sessions.ItemCompleted:
			d, err := sessions.DataOf[sessions.ItemData](e)
			if err != nil {
				t.Fatal(err)
			}
			fmt.Fprintf(&b, " %s %s %s", d.Item.ID, *d.Item.Role, d.Item.Kind)
			for _, p := range d.Item.Content {
				fmt.Fprintf(&b, " %s:%s%s%s", p.Type, p.Text, p.Name, p.Output)
			}
		case sessions.ItemDelta:
			d, err := sessions.DataOf[sessions.Delta](e)
			if err != nil {
				t.Fatal(err)
			}
			fmt.Fprintf(&b, " %s %q", d.ItemID, d.Delta)
		case sessions.PermissionRequested, sessions.PermissionResolved:
			d, err := sessions.DataOf[sessions.Permission](e)
			if err != nil {
				t.Fatal(err)
			}
			fmt.Fprintf(&b, " %s %s", d.Action, d.Status)
		case sessions.QuestionRequested, sessions.QuestionResolved:
			d, err := sessions.DataOf[sessions.Question](e)
			if err != nil {
				t.Fatal(err)
			}
			fmt.Fprintf(&b, " %s %v %s", d.Prompt, d.Options, d.Status)
		case sessions.ErrorEvent:
			d, err := sessions.DataOf[sessions.Failure](e)
			if err != nil {
				t.Fatal(err)
			}
			fmt.Fprintf(&b, " %s: %s", *d.Code, d.Message)
		case sessions.SessionEnded:
			d, err := sessions.DataOf[sessions.Ended](e)
			if err != nil {
				t.Fatal(err)
			}
			fmt.Fprintf(&b, " %s %d %q", d.Reason, *d.ExitCode, d.Stderr.Head)
		}
		b.WriteString("\n")
	}
	return b.String()
}

func check(t *testing.T, what, got, want string) {
	t.Helper()
	want = strings.TrimPrefix(want, "\n")
	if got != want {
		t.Errorf("%s:\n%s\nwant:\n%s", what, got, want)
	}
}

// pending returns the id of what waits for an answer.
func pending(t *testing.T, w *sessionstest.World) string {
	t.Helper()
	x, err := w.Get(t.Context(), sessionstest.Org, "s")
	if err != nil || len(x.Pending) != 1 {
		t.Fatalf("%d pending, %v", len(x.Pending), err)
	}
	return x.Pending[0].ID()
}

func TestPermission(t *testing.T) {
	w := world(t, "permission.txt")
	w.MustCreate("s", "claude")
	w.MustSend("s", "make a file")
	events := w.Until("s", 1, sessionstest.Is(sessions.PermissionRequested))
	err := w.AnswerPermission(t.Context(), sessionstest.Org, "s", pending(t, w), sessions.PermissionAlways)
	if err != nil {
		t.Fatal(err)
	}
	events = append(events, w.Until("s", events[len(events)-1].Sequence, sessionstest.Is(sessions.TurnEnded))...)
	check(t, "the turn", show(t, events), `
turn.started
item.started itm_1 user message text:make a file
item.completed itm_1 user message text:make a file
item.started itm_2 assistant message
item.delta itm_2 "I'll "
item.delta itm_2 "do it."
item.completed itm_2 assistant message text:I'll do it.
item.started itm_3 assistant tool_call tool_call:Bash
item.completed itm_3 assistant tool_call tool_call:Bash
permission.requested Bash requested
permission.resolved Bash accept_for_session
item.started itm_4 tool tool_result tool_result:done
item.completed itm_4 tool tool_result tool_result:done
item.started itm_5 assistant message text:Made.
item.delta itm_5 "Made."
item.completed itm_5 assistant message text:Made.
turn.ended
`)
	native := "11111111-2222-4333-8444-555555555555"
	if x, err := w.Get(t.Context(), sessionstest.Org, "s"); err != nil || x.Native != native || x.Running {
		t.Errorf("%+v, %v", x, err)
	}
}

func TestQuestionAndResume(t *testing.T) {
	w := world(t, "question.txt", "resume.txt")
	w.MustCreate("s", "claude")
	w.MustSend("s", "ask")
	w.Until("s", 1, sessionstest.Is(sessions.QuestionRequested))
	err := w.AnswerQuestion(t.Context(), sessionstest.Org, "s", pending(t, w), [][]string{{"Blue"}, {"A", "B"}})
	if err != nil {
		t.Fatal(err)
	}
	w.Until("s", 1, sessionstest.Is(sessions.TurnEnded))
	sent := w.MustSend("s", "again")
	last := int64(0)
	events := w.Until("s", 1, func(e *sessions.Event) bool {
		if e.Type == sessions.TurnEnded {
			last++
		}
		return last == sent.Number
	})
	check(t, "the session", show(t, events), `
turn.started
item.started itm_1 user message text:ask
item.completed itm_1 user message text:ask
item.started itm_2 assistant message
question.requested Which color? [Red Blue] requested
question.resolved Which color? [Red Blue] answered
item.delta itm_2 "Blue it is."
item.completed itm_2 assistant message text:Blue it is.
turn.ended
turn.started
item.started itm_3 user message text:again
item.completed itm_3 user message text:again
item.started itm_4 assistant message
item.delta itm_4 "I remember."
item.completed itm_4 assistant message text:I remember.
turn.ended
`)
}

func TestPlan(t *testing.T) {
	for _, c := range []struct{ answer, recording string }{
		{"approve", "plan_approved.txt"}, {"reject", "plan_rejected.txt"},
	} {
		w := world(t, c.recording)
		w.MustCreate("s", "claude", func(x *proto.AgentSession) { x.AgentMode = "plan" })
		w.MustSend("s", "plan")
		w.Until("s", 1, sessionstest.Is(sessions.QuestionRequested))
		err := w.AnswerQuestion(t.Context(), sessionstest.Org, "s", pending(t, w), [][]string{{c.answer}})
		if err != nil {
			t.Fatal(err)
		}
		events := w.Until("s", 1, sessionstest.Is(sessions.TurnEnded))
		check(t, c.answer, show(t, events[4:]), `
question.requested Approve plan execution? [approve reject] requested
question.resolved Approve plan execution? [approve reject] answered
turn.ended
`)
	}
}

func TestFailures(t *testing.T) {
	w := world(t, "refused.txt")
	w.MustCreate("s", "claude")
	w.MustSend("s", "hi")
	events := w.Until("s", 1, sessionstest.Is(sessions.TurnEnded))
	check(t, "a model server that refuses", show(t, events[4:]), `
error api_error: API Error: 400 no
turn.ended
`)
	w = world(t, "crash.txt")
	w.MustCreate("s", "claude")
	w.MustSend("s", "hi")
	w.MustSend("s", "waits")
	events = w.Until("s", 1, sessionstest.Is(sessions.SessionEnded))
	check(t, "a crash", show(t, events[4:]), `
session.ended error 7 "out of luck"
`)
	_, err := w.Send(t.Context(), sessionstest.Org, "s", sessions.Message{Text: "more"}, "")
	if e, ok := errors.AsType[*sessions.Error](err); !ok || e.Kind != sessions.AgentExited {
		t.Errorf("a message after the crash: %v", err)
	}
}
