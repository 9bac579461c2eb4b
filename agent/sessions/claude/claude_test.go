package claude_test

import (
	"encoding/json"
	"errors"
	"fmt"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"github.com/bullpen-run/bullpen/agent/sessions"
	"github.com/bullpen-run/bullpen/agent/sessions/claude"
	"github.com/bullpen-run/bullpen/agent/sessions/sessionstest"
	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/scheduler/storetest"
)

func TestMain(m *testing.M) { sessionstest.Main(m) }

// session is a session whose Claude Code replays recordings.
type session struct {
	*sessionstest.World
	t    *testing.T
	at   int64  // number of the last event that was read
	lead func() // starts the work on messages
}

// play creates a session.
func play(t *testing.T, recordings []string, change ...func(*proto.AgentSession)) *session {
	t.Helper()
	sandboxes := &sessionstest.Sandboxes{T: t, Server: sessions.Models{URL: "http://models", Token: "token"}}
	for _, name := range recordings {
		sandboxes.Recordings = append(sandboxes.Recordings, filepath.Join("testdata", name+".txt"))
	}
	installed := sessions.Installation{Dir: "/claude"}
	w := sessionstest.New(t, storetest.Open(t, storetest.Server(t)),
		&claude.Agent{Installed: func() sessions.Installation { return installed }})
	w.Sandboxes = sandboxes
	w.MustCreate("s", "claude", change...)
	return &session{World: w, t: t, at: 1, lead: sync.OnceFunc(func() { w.Lead() })}
}

// until returns a description of the next events, up to the first of a type.
func (s *session) until(last sessions.EventType) string {
	s.t.Helper()
	s.lead()
	events := s.Until("s", s.at, sessionstest.Is(last))
	s.at = events[len(events)-1].Sequence
	return show(s.t, events)
}

// turn sends a message and returns a description of the turn without that message. answer is called for what
// Claude Code asks.
func (s *session) turn(m sessions.Message, answers ...func(id string) error) string {
	s.t.Helper()
	if _, err := s.Send(s.t.Context(), sessionstest.Org, "s", m, ""); err != nil {
		s.t.Fatal(err)
	}
	s.lead()
	var text strings.Builder
	for len(answers) > 0 {
		events := s.Until("s", s.at, func(e *sessions.Event) bool {
			return e.Type == sessions.PermissionRequested || e.Type == sessions.QuestionRequested ||
				e.Type == sessions.TurnEnded
		})
		s.at = events[len(events)-1].Sequence
		text.WriteString(show(s.t, events))
		x, err := s.Get(s.t.Context(), sessionstest.Org, "s")
		if err != nil || !x.Running {
			s.t.Fatalf("%d answers are left, %v; after\n%s", len(answers), err, text.String())
		}
		if len(x.Pending) == 0 { // granted before
			continue
		}
		if err := answers[0](x.Pending[0].ID()); err != nil {
			s.t.Fatal(err)
		}
		answers = answers[1:]
	}
	text.WriteString(s.until(sessions.TurnEnded))
	lines := strings.SplitAfter(text.String(), "\n")
	return strings.Join(lines[3:], "")
}

func (s *session) permit(status sessions.PermissionStatus) func(id string) error {
	return func(id string) error { return s.AnswerPermission(s.t.Context(), sessionstest.Org, "s", id, status) }
}

func (s *session) answer(answers ...[]string) func(id string) error {
	return func(id string) error { return s.AnswerQuestion(s.t.Context(), sessionstest.Org, "s", id, answers) }
}

// show describes events in lines. It leaves out starts of items that are complete at once.
func show(t *testing.T, events []sessions.Event) string {
	t.Helper()
	var b strings.Builder
	for i := range events {
		line := describe(t, &events[i])
		if i+1 < len(events) && events[i].Type == sessions.ItemStarted && events[i+1].Type == sessions.ItemCompleted &&
			events[i].Synthetic {
			continue
		}
		b.WriteString(line + "\n")
	}
	return b.String()
}

func describe(t *testing.T, e *sessions.Event) string {
	t.Helper()
	var b strings.Builder
	fmt.Fprint(&b, e.Type)
	switch e.Type {
	case sessions.ItemStarted, sessions.ItemCompleted:
		d := sessionstest.Data[sessions.ItemData](t, e)
		fmt.Fprintf(&b, " %s %s %s", d.Item.ID, *d.Item.Role, d.Item.Kind)
		if d.Item.ParentID != nil {
			fmt.Fprintf(&b, " of %s", *d.Item.ParentID)
		}
		for _, p := range d.Item.Content {
			fmt.Fprintf(&b, " %s:%s%s%s", p.Type, p.Text, p.Name, p.Output)
			if p.Type == sessions.PartFileRef {
				fmt.Fprintf(&b, "%s %s", p.Action, p.Path)
			}
			if p.Diff != nil {
				fmt.Fprintf(&b, " %q", *p.Diff)
			}
		}
	case sessions.ItemDelta:
		d := sessionstest.Data[sessions.Delta](t, e)
		fmt.Fprintf(&b, " %s %q", d.ItemID, d.Delta)
	case sessions.PermissionRequested, sessions.PermissionResolved:
		d := sessionstest.Data[sessions.Permission](t, e)
		fmt.Fprintf(&b, " %s %s", d.Action, d.Status)
	case sessions.QuestionRequested, sessions.QuestionResolved:
		d := sessionstest.Data[sessions.Question](t, e)
		fmt.Fprintf(&b, " %s %v %s", d.Prompt, d.Options, d.Status)
	case sessions.ErrorEvent:
		d := sessionstest.Data[sessions.Failure](t, e)
		fmt.Fprintf(&b, " %s: %s", *d.Code, d.Message)
		if string(d.Details) != "null" {
			fmt.Fprintf(&b, " %s", d.Details)
		}
	case sessions.TurnEnded:
		fmt.Fprintf(&b, " %s", sessionstest.Data[sessions.Turn](t, e).Metadata)
	case sessions.SessionEnded:
		d := sessionstest.Data[sessions.Ended](t, e)
		fmt.Fprintf(&b, " %s %d", d.Reason, *d.ExitCode)
		if d.Stderr != nil {
			fmt.Fprintf(&b, " %q", d.Stderr.Head)
		}
	}
	return strings.TrimSpace(b.String())
}

func check(t *testing.T, what, got, want string) {
	t.Helper()
	want = strings.TrimPrefix(want, "\n")
	if got != want {
		t.Errorf("%s:\n%s\nwant:\n%s", what, got, want)
	}
}

func text(s string) sessions.Message { return sessions.Message{Text: s} }

// interrupt interrupts the turn, instead of an answer.
func (s *session) interrupt(string) error { return s.Interrupt(s.t.Context(), sessionstest.Org, "s") }

func plan(x *proto.AgentSession) { x.AgentMode = "plan" }

// TestRecordings replays recordings of Claude Code 2.1.112 with a scripted model.
func TestRecordings(t *testing.T) {
	const (
		always = sessions.PermissionAlways
		once   = sessions.PermissionAccepted
		no     = sessions.PermissionRejected
	)
	for _, c := range []struct {
		name       string
		recordings []string
		change     func(*proto.AgentSession)
		run        func(s *session) string
		want       string
	}{
		{"text and a thought", []string{"text"}, nil, func(s *session) string {
			return s.turn(text("hello"))
		}, `
item.completed itm_3 assistant status reasoning:Short.
item.delta itm_2 "Hel"
item.delta itm_2 "lo."
item.completed itm_2 assistant message text:Hello.
turn.ended
`},
		{"permissions, changed files", []string{"permission"}, nil, func(s *session) string {
			return s.turn(text("make a file"), s.permit(always), s.permit(once), s.permit(once), s.permit(no))
		}, `
item.delta itm_2 "I'll "
item.delta itm_2 "do it"
item.delta itm_2 "."
item.completed itm_2 assistant message text:I'll do it.
item.completed itm_3 assistant tool_call of itm_2 tool_call:Bash
item.completed itm_4 assistant tool_call of itm_2 tool_call:Write
permission.requested Bash requested
permission.resolved Bash accept_for_session
item.completed itm_5 tool tool_result of itm_3 tool_result:Exit code 254
permission.requested Write requested
permission.resolved Write accept
item.completed itm_6 tool tool_result of itm_4 tool_result:File created successfully at: /home/user/work/a.txt file_ref:write /home/user/work/a.txt
item.completed itm_7 assistant tool_call tool_call:Bash
item.completed itm_8 assistant tool_call tool_call:Edit
permission.requested Bash requested
permission.resolved Bash accept_for_session
item.completed itm_9 tool tool_result of itm_7 tool_result:Exit code 254
permission.requested Edit requested
permission.resolved Edit accept
item.completed itm_10 tool tool_result of itm_8 tool_result:The file /home/user/work/a.txt has been updated successfully. file_ref:patch /home/user/work/a.txt "@@ -1,2 +1,2 @@\n one\n-two\n+three\n"
item.completed itm_11 assistant tool_call tool_call:Bash
permission.requested Bash requested
permission.resolved Bash reject
item.completed itm_12 tool tool_result of itm_11 tool_result:The user refused this use of the tool. Do not try it in another way.
item.started itm_13 assistant message
item.delta itm_13 "Ma"
item.delta itm_13 "de"
item.delta itm_13 "."
item.completed itm_13 assistant message text:Made.
turn.ended
`},
		{"question, then resume", []string{"question", "resume"}, nil, func(s *session) string {
			return s.turn(text("ask"), s.answer([]string{"Blue"}, []string{"A", "B"})) + s.turn(text("again"))
		}, `
item.completed itm_3 assistant tool_call tool_call:AskUserQuestion
question.requested Which color? [Red Blue] requested
question.resolved Which color? [Red Blue] answered
item.completed itm_4 tool tool_result of itm_3 tool_result:User has answered your questions: "Which color?"="Blue", "Which letters?"="A,B". You can now continue with the user's answers in mind.
item.delta itm_2 "Blue "
item.delta itm_2 "it is"
item.delta itm_2 "."
item.completed itm_2 assistant message text:Blue it is.
turn.ended
item.delta itm_6 "I rem"
item.delta itm_6 "ember"
item.delta itm_6 "."
item.completed itm_6 assistant message text:I remember.
turn.ended
`},
		{"approved plan", []string{"plan_approved"}, plan, func(s *session) string {
			return s.turn(text("plan"), s.answer([]string{"approve"}), s.permit(once))
		}, `
item.completed itm_3 assistant tool_call tool_call:Write
item.completed itm_4 assistant tool_call tool_call:Write
item.completed itm_5 tool tool_result of itm_3 tool_result:The session is in plan mode, in which nothing is changed. Finish the plan and ask for its approval with ExitPlanMode.
item.completed itm_6 tool tool_result of itm_4 tool_result:File created successfully at: /home/user/.agent/claude/plans/plan.md file_ref:write /home/user/.agent/claude/plans/plan.md
item.completed itm_7 assistant tool_call tool_call:ExitPlanMode
question.requested Approve plan execution? [approve reject] requested
question.resolved Approve plan execution? [approve reject] answered
item.completed itm_8 tool tool_result of itm_7 tool_result:User has approved your plan. You can now start coding. Start with updating your todo list if applicable
item.completed itm_9 assistant tool_call tool_call:Write
permission.requested Write requested
permission.resolved Write accept
item.completed itm_10 tool tool_result of itm_9 tool_result:File created successfully at: /home/user/work/a.txt file_ref:write /home/user/work/a.txt
item.delta itm_2 "Do"
item.delta itm_2 "ne"
item.delta itm_2 "."
item.completed itm_2 assistant message text:Done.
turn.ended
`},
		{"rejected plan", []string{"plan_rejected"}, plan, func(s *session) string {
			return s.turn(text("plan"), s.answer([]string{"change the order"}))
		}, `
item.completed itm_3 assistant tool_call tool_call:Write
item.completed itm_4 assistant tool_call tool_call:Write
item.completed itm_5 tool tool_result of itm_3 tool_result:The session is in plan mode, in which nothing is changed. Finish the plan and ask for its approval with ExitPlanMode.
item.completed itm_6 tool tool_result of itm_4 tool_result:File created successfully at: /home/user/.agent/claude/plans/plan.md file_ref:write /home/user/.agent/claude/plans/plan.md
item.completed itm_7 assistant tool_call tool_call:ExitPlanMode
question.requested Approve plan execution? [approve reject] requested
question.resolved Approve plan execution? [approve reject] answered
item.completed itm_8 tool tool_result of itm_7 tool_result:The user did not approve the plan. The answer was: change the order
item.completed itm_9 assistant tool_call tool_call:Write
item.completed itm_10 tool tool_result of itm_9 tool_result:The session is in plan mode, in which nothing is changed. Finish the plan and ask for its approval with ExitPlanMode.
item.delta itm_2 "Do"
item.delta itm_2 "ne"
item.delta itm_2 "."
item.completed itm_2 assistant message text:Done.
turn.ended
`},
		{"an approval is for its turn", []string{"plan_again"}, plan, func(s *session) string {
			s.MustSend("s", "plan")
			return s.turn(text("more"), s.answer([]string{"approve"})) + s.until(sessions.TurnEnded)
		}, `
item.completed itm_3 assistant tool_call tool_call:ExitPlanMode
question.requested Approve plan execution? [approve reject] requested
question.resolved Approve plan execution? [approve reject] answered
item.completed itm_4 tool tool_result of itm_3 tool_result:User has approved your plan. You can now start coding. Start with updating your todo list if applicable
item.delta itm_2 "Do"
item.delta itm_2 "ne"
item.delta itm_2 "."
item.completed itm_2 assistant message text:Done.
turn.ended
turn.started
item.completed itm_5 user message text:more
item.started itm_6 assistant message
item.completed itm_7 assistant tool_call tool_call:Write
item.completed itm_8 tool tool_result of itm_7 tool_result:The session is in plan mode, in which nothing is changed. Finish the plan and ask for its approval with ExitPlanMode.
item.delta itm_6 "Not "
item.delta itm_6 "done"
item.delta itm_6 "."
item.completed itm_6 assistant message text:Not done.
turn.ended
`},
		{"interrupted tool", []string{"interrupt"}, nil, func(s *session) string {
			s.MustSend("s", "wait")
			s.until(sessions.ItemDelta)
			events := s.Until("s", s.at, func(e *sessions.Event) bool {
				return e.Type == sessions.ItemCompleted && strings.Contains(string(e.Data), "tool_call")
			})
			s.at = events[len(events)-1].Sequence
			if err := s.interrupt(""); err != nil {
				s.t.Fatal(err)
			}
			return s.until(sessions.TurnEnded)
		}, `
item.completed itm_4 tool tool_result of itm_3 tool_result:Exit code 137
[Request interrupted by user for tool use]
turn.ended {"interrupted":true}
`},
		{"withdrawn permission", []string{"withdrawn"}, nil, func(s *session) string {
			return s.turn(text("test"), s.interrupt)
		}, `
item.completed itm_3 assistant tool_call tool_call:Bash
permission.requested Bash requested
permission.resolved Bash reject
item.completed itm_4 tool tool_result of itm_3 tool_result:Tool permission request failed: AbortError
turn.ended {"interrupted":true}
`},
		{"model that fails", []string{"failure"}, nil, func(s *session) string {
			return s.turn(text("hello"))
		}, `
error api_error: API Error: 400 {"type":"error","error":{"type":"invalid_request_error","message":"no"}} {"status":400}
turn.ended
`},
		{"lost conversation", []string{"text", "lost", "begun_again"}, nil, func(s *session) string {
			s.turn(text("hello"))
			return s.turn(text("again")) + s.turn(text("more"))
		}, `
error conversation_lost: Claude Code no longer has this conversation; the next message begins a new one, without the earlier ones
turn.ended
item.delta itm_7 "Hello "
item.delta itm_7 "again."
item.completed itm_7 assistant message text:Hello again.
turn.ended
`},
		{"full or read-only home", []string{"unwritable"}, nil, func(s *session) string {
			return s.turn(text("hello"))
		}, `
error agent_unavailable: the agent could not be reached: Claude Code ended with exit code 0 at its start: it has no output; it may be unable to write to .agent/claude in the session's home
turn.ended
`},
		{"tool of an MCP server", []string{"mcp"}, func(x *proto.AgentSession) {
			x.MCP = json.RawMessage(`{"files":{"type":"local","command":["python3","/home/user/mcp.py"],"env":{"FOO":"bar"},
				"cwd":"/home/user/sub","timeoutMs":5000},"off":{"type":"local","command":"false","enabled":false},
				"web":{"type":"remote","url":"http://127.0.0.1:1/","bearerTokenEnvVar":"TOK","envHeaders":{"X-A":"A"}}}`)
		}, func(s *session) string {
			return s.turn(text("where"), s.permit(once))
		}, `
item.completed itm_3 assistant tool_call tool_call:mcp__files__where
permission.requested mcp__files__where requested
permission.resolved mcp__files__where accept
item.completed itm_4 tool tool_result of itm_3 tool_result:/home/user/sub bar {'x': 'y'}
item.delta itm_2 "The"
item.delta itm_2 "re."
item.completed itm_2 assistant message text:There.
turn.ended
`},
		{"subagent", []string{"subagent"}, nil, func(s *session) string {
			return s.turn(text("ask"), s.permit(no))
		}, `
item.delta itm_2 "I a"
item.delta itm_2 "sk."
item.completed itm_2 assistant message text:I ask.
item.completed itm_3 assistant tool_call of itm_2 tool_call:Task
item.completed itm_4 assistant tool_call of itm_3 tool_call:Bash
permission.requested Bash requested
permission.resolved Bash reject
item.completed itm_5 tool tool_result of itm_4 tool_result:The user refused this use of the tool. Do not try it in another way.
item.completed itm_6 tool tool_result of itm_3 tool_result:sub answer
agentId: ad245df4ea4398927 (use SendMessage with to: 'ad245df4ea4398927' to continue this agent)
item.started itm_7 assistant message
item.delta itm_7 "It sa"
item.delta itm_7 "ys so"
item.delta itm_7 "."
item.completed itm_7 assistant message text:It says so.
turn.ended
`},
		{"turn that continues by itself", []string{"background"}, nil, func(s *session) string {
			return s.turn(text("run"))
		}, `
item.completed itm_3 assistant tool_call tool_call:Bash
item.completed itm_4 tool tool_result of itm_3 tool_result:Command running in background with ID: bn16rp2je
item.delta itm_2 "Star"
item.delta itm_2 "ted."
item.completed itm_2 assistant message text:Started.
item.started itm_5 assistant message
item.delta itm_5 "It has"
item.delta itm_5 " ended"
item.delta itm_5 "."
item.completed itm_5 assistant message text:It has ended.
turn.ended
`},
	} {
		t.Run(c.name, func(t *testing.T) {
			change := []func(*proto.AgentSession){}
			if c.change != nil {
				change = append(change, c.change)
			}
			s := play(t, c.recordings, change...)
			check(t, c.name, c.run(s), c.want)
			if x, err := s.Get(t.Context(), sessionstest.Org, "s"); err != nil || x.Ended != "" {
				t.Errorf("%+v, %v", x, err)
			}
		})
	}
}

// TestModel checks that the model of a message is that of later turns, even after a restart of Claude Code.
func TestModel(t *testing.T) {
	s := play(t, []string{"model", "model_kept"})
	s.MustSend("s", "hello")
	s.turn(sessions.Message{Text: "again", Model: "opus", Variant: "low"})
	s.until(sessions.TurnEnded)
	check(t, "the next turn", s.turn(text("more")), `
item.delta itm_6 "Aga"
item.delta itm_6 "in."
item.completed itm_6 assistant message text:Again.
turn.ended
`)
}

func TestCrash(t *testing.T) {
	s := play(t, []string{"crash"})
	s.MustSend("s", "hello")
	s.MustSend("s", "waits")
	lines := strings.SplitAfter(s.until(sessions.SessionEnded), "\n")
	check(t, "the end", strings.Join(lines[3:], ""), `
session.ended error 7 "out of luck"
`)
	_, err := s.Send(t.Context(), sessionstest.Org, "s", text("more"), "")
	if e, ok := errors.AsType[*sessions.Error](err); !ok || e.Kind != sessions.AgentExited {
		t.Errorf("a message after the crash: %v", err)
	}
}
