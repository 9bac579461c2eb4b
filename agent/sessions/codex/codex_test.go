package codex_test

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/bullpen-run/bullpen/agent/sessions"
	"github.com/bullpen-run/bullpen/agent/sessions/codex"
	"github.com/bullpen-run/bullpen/agent/sessions/sessionstest"
	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/scheduler/storetest"
)

func TestMain(m *testing.M) { sessionstest.Main(m) }

// world returns a gateway whose Codex replays recordings: names of files in testdata, or paths.
func world(t *testing.T, recordings ...string) *sessionstest.World {
	t.Helper()
	sandboxes := &sessionstest.Sandboxes{T: t, Server: sessions.Models{URL: "http://models", Token: "secret"}}
	for _, name := range recordings {
		if !filepath.IsAbs(name) {
			name = filepath.Join("testdata", name)
		}
		sandboxes.Recordings = append(sandboxes.Recordings, name)
	}
	installed := sessions.Installation{Dir: "/codex"}
	w := sessionstest.New(t, storetest.Open(t, storetest.Server(t)),
		&codex.Agent{Installed: func() sessions.Installation { return installed }})
	w.Sandboxes = sandboxes
	w.Lead()
	return w
}

// begins is how recordings begin: up to the start of turn_1 in thread_1.
const begins = `> {"id":"initialize"}
> {"method":"initialized"}
> {"id":"thread/start"}
< {"id":"thread/start","result":{"thread":{"id":"thread_1"},"model":"m"}}
> {"id":"turn/start","params":{"threadId":"thread_1"}}
< {"id":"turn/start","result":{"turn":{"id":"turn_1"}}}
`

const ends = `< {"method":"turn/completed","params":{"threadId":"thread_1","turn":{"id":"turn_1","status":"completed"}}}
`

// recording writes a recording.
func recording(t *testing.T, text string) (path string) {
	t.Helper()
	path = filepath.Join(t.TempDir(), "recording.txt")
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	return path
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
			d := sessionstest.Data[sessions.ItemData](t, e).Item
			fmt.Fprintf(&b, " %s %s %s", d.ID, *d.Role, d.Kind)
			if d.Status == sessions.Failed {
				b.WriteString(" failed")
			}
			for _, p := range d.Content {
				fmt.Fprintf(&b, " %s:%s%s%s%s%s%s%s", p.Type, p.Text, p.Name, p.Arguments, p.Output, p.JSON, p.Label, p.Path)
				if p.Detail != nil {
					fmt.Fprintf(&b, " (%s)", *p.Detail)
				}
				if p.Diff != nil {
					fmt.Fprintf(&b, " %s %q", p.Action, *p.Diff)
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
			fmt.Fprintf(&b, " %s: %s %s", *d.Code, d.Message, d.Details)
		case sessions.TurnEnded:
			if d := sessionstest.Data[sessions.Turn](t, e); d.Metadata != nil {
				fmt.Fprintf(&b, " %s", d.Metadata)
			}
		case sessions.SessionEnded:
			d := sessionstest.Data[sessions.Ended](t, e)
			fmt.Fprintf(&b, " %s %d %q", d.Reason, *d.ExitCode, d.Stderr.Head)
		case sessions.Unparsed:
			fmt.Fprintf(&b, " %s", sessionstest.Data[sessions.UnparsedOutput](t, e).Location)
		}
		b.WriteString("\n")
	}
	return b.String()
}

// check compares events with those wanted.
func check(t *testing.T, what string, events []sessions.Event, want string) {
	t.Helper()
	want = strings.TrimPrefix(want, "\n")
	if got := show(t, events); got != want {
		t.Errorf("%s:\n%s\nwant:\n%s", what, got, want)
	}
}

func nth(n int, kind sessions.EventType) func(*sessions.Event) bool {
	return func(e *sessions.Event) bool {
		if e.Type == kind {
			n--
		}
		return n == 0
	}
}

// answer waits until a session has asked for n permissions, and answers the last.
func answer(w *sessionstest.World, n int, status sessions.PermissionStatus) (id string) {
	w.T.Helper()
	events := w.Until("s", 1, nth(n, sessions.PermissionRequested))
	id = sessionstest.Data[sessions.Permission](w.T, &events[len(events)-1]).ID
	if err := w.AnswerPermission(w.T.Context(), sessionstest.Org, "s", id, status); err != nil {
		w.T.Fatal(err)
	}
	return id
}

// reply waits until a session has asked n questions, and answers the one with an index; nil rejects it.
func reply(w *sessionstest.World, n, index int, answers [][]string) {
	w.T.Helper()
	var ids []string
	for _, e := range w.Until("s", 1, nth(n, sessions.QuestionRequested)) {
		if e.Type == sessions.QuestionRequested {
			ids = append(ids, sessionstest.Data[sessions.Question](w.T, &e).ID)
		}
	}
	if err := w.AnswerQuestion(w.T.Context(), sessionstest.Org, "s", ids[index], answers); err != nil {
		w.T.Fatal(err)
	}
}

// turns returns the events of the first n turns.
func turns(w *sessionstest.World, n int) []sessions.Event {
	w.T.Helper()
	return w.Until("s", 1, nth(n, sessions.TurnEnded))
}

func TestTwoTurns(t *testing.T) {
	w := world(t, "text.txt")
	w.MustCreate("s", "codex")
	w.MustSend("s", "hi")
	w.MustSend("s", "again")
	check(t, "two turns", turns(w, 2), `
turn.started
item.started itm_1 user message text:hi
item.completed itm_1 user message text:hi
item.started itm_2 assistant status reasoning:**Thinking**
item.completed itm_2 assistant status reasoning:**Thinking**
item.started itm_3 assistant message
item.delta itm_3 "Hello "
item.delta itm_3 "there. "
item.completed itm_3 assistant message text:Hello there. `+`
turn.ended
turn.started
item.started itm_4 user message text:again
item.completed itm_4 user message text:again
item.started itm_5 assistant message
item.delta itm_5 "Second. "
item.completed itm_5 assistant message text:Second. `+`
turn.ended
`)
	if x, err := w.Get(t.Context(), sessionstest.Org, "s"); err != nil || x.Native != "thread_1" || x.Running {
		t.Errorf("%+v, %v", x, err)
	}
}

func TestCommand(t *testing.T) {
	w := world(t, "command.txt")
	w.MustCreate("s", "codex")
	w.MustSend("s", "make a file")
	answer(w, 1, sessions.PermissionAlways)
	answer(w, 3, sessions.PermissionRejected)
	answer(w, 4, sessions.PermissionAccepted)
	events := turns(w, 1)
	check(t, "commands", events[8:], `
item.started itm_3 assistant tool_call tool_call:shell{"command":"echo hi \u003e out.txt","cwd":"/home/user"}
item.completed itm_3 assistant tool_call tool_call:shell{"command":"echo hi \u003e out.txt","cwd":"/home/user"}
permission.requested commandExecution requested
permission.resolved commandExecution accept_for_session
item.started itm_4 tool tool_result tool_result:
item.completed itm_4 tool tool_result tool_result:
item.started itm_5 assistant tool_call tool_call:shell{"command":"echo hi \u003e out.txt","cwd":"/home/user"}
item.completed itm_5 assistant tool_call tool_call:shell{"command":"echo hi \u003e out.txt","cwd":"/home/user"}
permission.requested commandExecution requested
permission.resolved commandExecution accept_for_session
item.started itm_6 tool tool_result tool_result:
item.completed itm_6 tool tool_result tool_result:
item.started itm_7 assistant tool_call tool_call:shell{"command":"echo no \u003e no.txt","cwd":"/home/user"}
item.completed itm_7 assistant tool_call tool_call:shell{"command":"echo no \u003e no.txt","cwd":"/home/user"}
permission.requested commandExecution requested
permission.resolved commandExecution reject
item.started itm_8 tool tool_result tool_result:declined
item.completed itm_8 tool tool_result failed tool_result:declined
item.started itm_9 assistant tool_call tool_call:shell{"command":"exit 3","cwd":"/home/user"}
item.completed itm_9 assistant tool_call tool_call:shell{"command":"exit 3","cwd":"/home/user"}
permission.requested commandExecution requested
permission.resolved commandExecution accept
item.started itm_10 tool tool_result tool_result: json:{"exitCode":3}
item.completed itm_10 tool tool_result failed tool_result: json:{"exitCode":3}
item.started itm_11 assistant message
item.delta itm_11 "Done. "
item.completed itm_11 assistant message text:Done. `+`
turn.ended
`)
	want := `{"codexRequestKind":"commandExecution","command":"echo hi \u003e out.txt","cwd":"/home/user","itemId":"c1",` +
		`"reason":null,"threadId":"thread_1","turnId":"turn_1"}`
	if p := sessionstest.Data[sessions.Permission](t, &events[10]); p.ID != "turn_1-1" || string(p.Metadata) != want {
		t.Errorf("%s %s", p.ID, p.Metadata)
	}
}

func TestFileChanges(t *testing.T) {
	w := world(t, "patch.txt")
	w.MustCreate("s", "codex")
	w.MustSend("s", "patch")
	answer(w, 1, sessions.PermissionAccepted)
	answer(w, 2, sessions.PermissionRejected)
	answer(w, 3, sessions.PermissionAccepted)
	answer(w, 4, sessions.PermissionAccepted)
	var results []sessions.Event
	events := turns(w, 1)
	for _, e := range events {
		if e.Type == sessions.ItemCompleted &&
			sessionstest.Data[sessions.ItemData](t, &e).Item.Kind == sessions.KindToolResult {
			results = append(results, e)
		}
	}
	check(t, "the results", results, `
item.completed itm_3 tool tool_result tool_result: file_ref:/home/user/a.txt write "--- /dev/null\n+++ /home/user/a.txt\n@@ -0,0 +1,2 @@\n+one\n+two\n"
item.completed itm_5 tool tool_result failed tool_result:declined
item.completed itm_7 tool tool_result tool_result: file_ref:/home/user/a.txt patch "--- /home/user/a.txt\n+++ /home/user/c.txt\n@@ -1,2 +1,2 @@\n-one\n+ONE\n two\n" file_ref:/home/user/sub/b.txt write "--- /dev/null\n+++ /home/user/sub/b.txt\n@@ -0,0 +1,1 @@\n+b\n"
item.completed itm_9 tool tool_result tool_result: file_ref:/home/user/c.txt patch "--- /home/user/c.txt\n+++ /dev/null\n@@ -1,2 +0,0 @@\n-ONE\n-two\n"
`)
	var fields struct {
		Kind  string   `json:"codexRequestKind"`
		Item  string   `json:"itemId"`
		Path  string   `json:"path"`
		Paths []string `json:"paths"`
		Diff  string   `json:"diff"`
	}
	asked := w.Until("s", 1, nth(2, sessions.PermissionRequested))
	permission := sessionstest.Data[sessions.Permission](t, &asked[len(asked)-1])
	if err := json.Unmarshal(permission.Metadata, &fields); err != nil {
		t.Fatal(err)
	}
	if fields.Kind != "fileChange" || fields.Item != "c2" || fields.Path != "/home/user/a.txt" || len(fields.Paths) != 2 ||
		!strings.Contains(fields.Diff, "+ONE\n") {
		t.Errorf("%+v", fields)
	}
}

// Codex asks even for the changes that the user has allowed beforehand, and asks nothing in bypass mode.
func TestPermissionModes(t *testing.T) {
	for mode, name := range map[string]string{
		sessions.PermissionAcceptEdits: "accept_edits.txt", sessions.PermissionBypass: "bypass.txt",
	} {
		w := world(t, name)
		w.MustCreate("s", "codex", func(x *proto.AgentSession) { x.PermissionMode = mode })
		w.MustSend("s", "patch")
		events := turns(w, 1)
		text := show(t, events)
		if strings.Contains(text, "permission") || strings.Contains(text, "failed") ||
			!strings.Contains(text, "tool_result:") {
			t.Errorf("%s:\n%s", mode, text)
		}
	}
}

func TestQuestions(t *testing.T) {
	w := world(t, "question.txt")
	w.MustCreate("s", "codex")
	w.MustSend("s", "ask")
	reply(w, 2, 1, [][]string{{"L", "or M"}})
	reply(w, 2, 0, [][]string{{"Blue"}})
	check(t, "the questions", turns(w, 1)[3:7], `
question.requested Which color? [Red Blue] requested
question.requested Which size? [S L] requested
question.resolved Which size? [S L] answered
question.resolved Which color? [Red Blue] answered
`)
}

// A rejected question has no answer.
func TestRejectedQuestion(t *testing.T) {
	w := world(t, recording(t, begins+`< {"id":7,"method":"item/tool/requestUserInput","params":{"threadId":"thread_1",`+
		`"turnId":"turn_1","itemId":"q","questions":[{"id":"a","question":"A?"},{"id":"b","question":"B?"}]}}
> {"id":7,"result":{"answers":{"b":{"answers":["yes"]}}}}
`+ends))
	w.MustCreate("s", "codex")
	w.MustSend("s", "ask")
	reply(w, 2, 0, nil)
	reply(w, 2, 1, [][]string{{"yes"}})
	turns(w, 1)
}

func TestPlan(t *testing.T) {
	w := world(t, "plan.txt", "plan_approved.txt", "plan_again.txt")
	w.MustCreate("s", "codex", func(x *proto.AgentSession) { x.AgentMode = "plan" })
	w.MustSend("s", "plan")
	reply(w, 1, 0, [][]string{{"approve"}})
	answer(w, 1, sessions.PermissionAccepted)
	events := turns(w, 1)
	check(t, "an approved plan", events[5:], `
item.started itm_3 tool tool_result tool_result:declined: this session is in plan mode, in which nothing is changed
item.completed itm_3 tool tool_result failed tool_result:declined: this session is in plan mode, in which nothing is changed
item.started itm_4 assistant tool_call tool_call:apply_patch{"changes":[{"kind":"add","path":"/home/user/a.txt"}]}
item.completed itm_4 assistant tool_call tool_call:apply_patch{"changes":[{"kind":"add","path":"/home/user/a.txt"}]}
item.started itm_5 tool tool_result tool_result:declined: this session is in plan mode, in which nothing is changed
item.completed itm_5 tool tool_result failed tool_result:declined: this session is in plan mode, in which nothing is changed
item.started itm_6 assistant message
item.delta itm_6 "Here "
item.delta itm_6 "it "
item.delta itm_6 "is.\n"
item.started itm_7 assistant message
item.delta itm_7 "# "
item.delta itm_7 "Plan\n\n1. "
item.delta itm_7 "Do "
item.delta itm_7 "A\n"
item.completed itm_7 assistant message text:# Plan

1. Do A

item.completed itm_6 assistant message text:Here it is.

question.requested Approve plan execution? [approve reject] requested
question.resolved Approve plan execution? [approve reject] answered
item.started itm_8 assistant status status:Do A (inProgress)
item.completed itm_8 assistant status status:Do A (inProgress)
item.started itm_9 assistant tool_call tool_call:shell{"command":"echo yes \u003e yes.txt","cwd":"/home/user"}
item.completed itm_9 assistant tool_call tool_call:shell{"command":"echo yes \u003e yes.txt","cwd":"/home/user"}
permission.requested commandExecution requested
permission.resolved commandExecution accept
item.started itm_10 tool tool_result tool_result:
item.completed itm_10 tool tool_result tool_result:
item.started itm_11 assistant message
item.delta itm_11 "Done. "
item.completed itm_11 assistant message text:Done. `+`
turn.ended
`)
	w.MustSend("s", "another plan")
	reply(w, 2, 1, [][]string{{"reject"}})
	events = turns(w, 2)
	check(t, "a rejected plan", events[len(events)-3:], `
question.requested Approve plan execution? [approve reject] requested
question.resolved Approve plan execution? [approve reject] answered
turn.ended
`)
}

// An interrupt ends the turn while a plan waits for its approval.
func TestInterruptedPlan(t *testing.T) {
	w := world(t, "plan.txt")
	w.MustCreate("s", "codex", func(x *proto.AgentSession) { x.PermissionMode = sessions.PermissionPlan })
	w.MustSend("s", "plan")
	w.Until("s", 1, sessionstest.Is(sessions.QuestionRequested))
	if err := w.Interrupt(t.Context(), sessionstest.Org, "s"); err != nil {
		t.Fatal(err)
	}
	events := turns(w, 1)
	check(t, "the end", events[len(events)-3:], `
question.requested Approve plan execution? [approve reject] requested
question.resolved Approve plan execution? [approve reject] rejected
turn.ended {"interrupted":true}
`)
}

func TestInterrupt(t *testing.T) {
	w := world(t, "interrupt.txt", "interrupt_after.txt")
	w.MustCreate("s", "codex")
	w.MustSend("s", "sleep")
	answer(w, 1, sessions.PermissionAccepted)
	w.MustSend("s", "next")
	if err := w.Interrupt(t.Context(), sessionstest.Org, "s"); err != nil {
		t.Fatal(err)
	}
	check(t, "two turns", turns(w, 2)[9:], `
permission.resolved commandExecution accept
item.started itm_4 tool tool_result tool_result:the turn ended before the tool did
item.completed itm_4 tool tool_result failed tool_result:the turn ended before the tool did
turn.ended {"interrupted":true}
turn.started
item.started itm_5 user message text:next
item.completed itm_5 user message text:next
item.started itm_6 assistant message
item.delta itm_6 "After. "
item.completed itm_6 assistant message text:After. `+`
turn.ended
`)
}

// A second interrupt ends a turn even if Codex does not answer the first. The partial message is kept.
func TestSecondInterrupt(t *testing.T) {
	w := world(t, recording(t, begins+`
< {"method":"item/started","params":{"threadId":"thread_1","turnId":"turn_1","item":{"type":"agentMessage","id":"m"}}}
< {"method":"item/agentMessage/delta","params":{"threadId":"thread_1","turnId":"turn_1","itemId":"m","delta":"Hel"}}
> {"id":"turn/interrupt","params":{"threadId":"thread_1","turnId":"turn_1"}}
`))
	w.MustCreate("s", "codex")
	w.MustSend("s", "hi")
	w.Until("s", 1, sessionstest.Is(sessions.ItemDelta))
	for range 2 {
		if err := w.Interrupt(t.Context(), sessionstest.Org, "s"); err != nil {
			t.Fatal(err)
		}
	}
	check(t, "the turn", turns(w, 1)[3:], `
item.started itm_2 assistant message
item.delta itm_2 "Hel"
item.completed itm_2 assistant message failed text:Hel
turn.ended {"interrupted":true}
`)
}

func TestFailures(t *testing.T) {
	for _, c := range []struct{ recording, want string }{
		{"status_400.txt", `
error api_error: no null
turn.ended
`},
		{"status_429.txt", `
error responseTooManyFailedAttempts: exceeded retry limit, last status: 429 Too Many Requests {"status":429}
turn.ended
`},
		{"status_401.txt", `
item.started itm_2 assistant status status:Reconnecting... 1/2 (unexpected status 401 Unauthorized: no, url: http://models/openai/v1/responses)
item.completed itm_2 assistant status status:Reconnecting... 1/2 (unexpected status 401 Unauthorized: no, url: http://models/openai/v1/responses)
item.started itm_3 assistant status status:Reconnecting... 2/2 (unexpected status 401 Unauthorized: no, url: http://models/openai/v1/responses)
item.completed itm_3 assistant status status:Reconnecting... 2/2 (unexpected status 401 Unauthorized: no, url: http://models/openai/v1/responses)
error api_error: unexpected status 401 Unauthorized: no, url: http://models/openai/v1/responses null
turn.ended
`},
		{"failed.txt", `
item.started itm_2 assistant message
item.delta itm_2 "part "
item.completed itm_2 assistant message text:part ` + `
error usageLimitExceeded: Quota exceeded. Check your plan and billing details. null
turn.ended
`},
		{"cut.txt", `
item.started itm_2 assistant message
item.delta itm_2 "a "
item.delta itm_2 "b "
item.completed itm_2 assistant message text:a b ` + `
item.started itm_3 assistant status status:Reconnecting... 1/2 (stream disconnected before completion: stream closed before response.completed)
item.completed itm_3 assistant status status:Reconnecting... 1/2 (stream disconnected before completion: stream closed before response.completed)
item.started itm_4 assistant message
item.delta itm_4 "a "
item.delta itm_4 "b "
item.completed itm_4 assistant message text:a b ` + `
turn.ended
`},
	} {
		w := world(t, c.recording)
		w.MustCreate("s", "codex")
		w.MustSend("s", "hi")
		check(t, c.recording, turns(w, 1)[3:], c.want)
	}
}

func TestCrash(t *testing.T) {
	w := world(t, recording(t, begins+"exit 7 out of luck"))
	w.MustCreate("s", "codex")
	w.MustSend("s", "hi")
	events := w.Until("s", 1, sessionstest.Is(sessions.SessionEnded))
	check(t, "a crash", events[3:], `
session.ended error 7 "out of luck"
`)
	_, err := w.Send(t.Context(), sessionstest.Org, "s", sessions.Message{Text: "more"}, "")
	if e, ok := errors.AsType[*sessions.Error](err); !ok || e.Kind != sessions.AgentExited {
		t.Errorf("a message after the crash: %v", err)
	}
}

// idle waits until no process serves a session.
func idle(w *sessionstest.World) {
	w.T.Helper()
	for {
		x, err := w.Get(w.T.Context(), sessionstest.Org, "s")
		if err != nil {
			w.T.Fatal(err)
		}
		if !x.Active {
			return
		}
	}
}

func TestResume(t *testing.T) {
	w := world(t, "resume_first.txt", "resume.txt", "lost.txt")
	w.MustCreate("s", "codex")
	for i, text := range []string{"hi", "resumed", "lost"} {
		w.MustSend("s", text)
		turns(w, i+1)
		idle(w)
	}
	events := turns(w, 3)
	check(t, "the last turn", events[len(events)-7:], `
item.completed itm_5 user message text:lost
item.started itm_6 assistant status status:Codex has lost the earlier turns of this session (no rollout found for thread id thread_1)
item.completed itm_6 assistant status status:Codex has lost the earlier turns of this session (no rollout found for thread id thread_1)
item.started itm_7 assistant message
item.delta itm_7 "three "
item.completed itm_7 assistant message text:three `+`
turn.ended
`)
	if x, err := w.Get(t.Context(), sessionstest.Org, "s"); err != nil || x.Native != "thread_2" {
		t.Errorf("%+v, %v", x, err)
	}
}

func TestMCP(t *testing.T) {
	w := world(t, "mcp.txt")
	w.MustCreate("s", "codex", func(x *proto.AgentSession) {
		x.MCP = json.RawMessage(`{
			"ser.ver": {"type": "local", "command": "python3", "args": ["/home/user/server.py", "a \"b\"\n${x}'"],
				"env": {"A_B": "q\"'\n=x"}, "timeoutMs": 9000},
			"z er": {"type": "remote", "url": "http://127.0.0.1:1/", "bearerTokenEnvVar": "NOPE", "headers": {"x": "y"}}}`)
	})
	w.MustSend("s", "use tools")
	answer(w, 1, sessions.PermissionRejected)
	answer(w, 2, sessions.PermissionAlways)
	for i, text := range []string{"3", "red", "Bob", "true"} {
		reply(w, 4, i, [][]string{{text}})
	}
	check(t, "the tools", turns(w, 1)[3:], `
item.started itm_2 assistant tool_call tool_call:mcp__ser_ver__add{"a":1}
item.completed itm_2 assistant tool_call tool_call:mcp__ser_ver__add{"a":1}
item.started itm_3 tool tool_result tool_result:result of add
item.completed itm_3 tool tool_result tool_result:result of add
item.started itm_4 assistant tool_call tool_call:mcp__ser_ver__wipe{}
item.completed itm_4 assistant tool_call tool_call:mcp__ser_ver__wipe{}
permission.requested mcp__ser_ver__wipe requested
permission.resolved mcp__ser_ver__wipe reject
item.started itm_5 tool tool_result tool_result:user cancelled MCP tool call
item.completed itm_5 tool tool_result failed tool_result:user cancelled MCP tool call
item.started itm_6 assistant tool_call tool_call:mcp__ser_ver__wipe{}
item.completed itm_6 assistant tool_call tool_call:mcp__ser_ver__wipe{}
permission.requested mcp__ser_ver__wipe requested
permission.resolved mcp__ser_ver__wipe accept_for_session
item.started itm_7 tool tool_result tool_result:result of wipe
item.completed itm_7 tool tool_result failed tool_result:result of wipe
item.started itm_8 assistant tool_call tool_call:mcp__ser_ver__wipe{}
item.completed itm_8 assistant tool_call tool_call:mcp__ser_ver__wipe{}
permission.requested mcp__ser_ver__wipe requested
permission.resolved mcp__ser_ver__wipe accept_for_session
item.started itm_9 tool tool_result tool_result:result of wipe
item.completed itm_9 tool tool_result failed tool_result:result of wipe
item.started itm_10 assistant tool_call tool_call:mcp__ser_ver__elicit{}
item.completed itm_10 assistant tool_call tool_call:mcp__ser_ver__elicit{}
question.requested Who are you? (age) [] requested
question.requested Who are you? (color) [red blue] requested
question.requested Who are you? (Your name) [] requested
question.requested Who are you? (ok) [true false] requested
question.resolved Who are you? (age) [] answered
question.resolved Who are you? (color) [red blue] answered
question.resolved Who are you? (Your name) [] answered
question.resolved Who are you? (ok) [true false] answered
item.started itm_11 tool tool_result tool_result:{"action": "accept", "content": {"age": 3, "color": "red", "name": "Bob", "ok": true}}
item.completed itm_11 tool tool_result tool_result:{"action": "accept", "content": {"age": 3, "color": "red", "name": "Bob", "ok": true}}
item.started itm_12 assistant message
item.delta itm_12 "Done. "
item.completed itm_12 assistant message text:Done. `+`
turn.ended
`)
}

// An MCP server that Codex cannot use fails the turn.
func TestUnusableMCPServer(t *testing.T) {
	w := world(t, "text.txt")
	w.MustCreate("s", "codex", func(x *proto.AgentSession) {
		x.MCP = json.RawMessage(`{"a":{"type":"remote","url":"http://x","transport":"sse"}}`)
	})
	w.MustSend("s", "hi")
	check(t, "the turn", turns(w, 1)[3:], `
error agent_unavailable: the agent could not be reached: Codex cannot use MCP server a: its transport is sse; use one with http null
turn.ended
`)
}

// Codex gets the model and the effort of each message.
func TestModel(t *testing.T) {
	w := world(t, "model.txt")
	w.MustCreate("s", "codex", func(x *proto.AgentSession) { x.Model, x.Variant = "m1", "low" })
	for _, m := range []sessions.Message{
		{Text: "hi", Model: "m2", Variant: "bogus"}, {Text: "hi", Variant: "high"}, {Text: "hi"},
	} {
		if _, err := w.Send(t.Context(), sessionstest.Org, "s", m, ""); err != nil {
			t.Fatal(err)
		}
	}
	check(t, "an unknown effort", turns(w, 3)[3:5], "error agent_error: Codex refused turn/start: Invalid request: "+
		"unknown variant `bogus`, expected one of `none`, `minimal`, `low`, `medium`, `high`, `xhigh` null\nturn.ended\n")
}

func TestAttachments(t *testing.T) {
	w := world(t, recording(t, strings.Replace(begins, `"threadId":"thread_1"`, `"input":[`+
		`{"type":"text","text":"look\n\nAttachments:\n- notes.txt\n","text_elements":[]},`+
		`{"type":"localImage","path":"/home/user/a.png"},{"type":"localImage","path":"b"}]`, 1)+ends))
	w.MustCreate("s", "codex")
	m := sessions.Message{Text: "look", Attachments: []sessions.Attachment{
		{Path: "/home/user/a.png"}, {Path: "notes.txt"}, {Path: "b", MIME: "image/jpeg"},
	}}
	if _, err := w.Send(t.Context(), sessionstest.Org, "s", m, ""); err != nil {
		t.Fatal(err)
	}
	check(t, "the end", turns(w, 1)[3:], "turn.ended\n")
}

// Requests of two processes have different ids, although Codex numbers those of each from 0.
func TestRequestIDs(t *testing.T) {
	asks := func(turn string) string {
		return strings.ReplaceAll(begins+`< {"id":0,"method":"item/commandExecution/requestApproval","params":{`+
			`"threadId":"thread_1","turnId":"turn_1","itemId":"c","command":"rm x"}}
> {"id":0,"result":{"decision":"decline"}}
`+ends, "turn_1", turn)
	}
	second := strings.ReplaceAll(asks("turn_2"), "thread/start", "thread/resume")
	w := world(t, recording(t, asks("turn_1")), recording(t, second))
	w.MustCreate("s", "codex")
	w.MustSend("s", "one")
	first := answer(w, 1, sessions.PermissionRejected)
	turns(w, 1)
	idle(w)
	w.MustSend("s", "two")
	w.Until("s", 1, nth(2, sessions.PermissionRequested))
	if err := w.AnswerPermission(t.Context(), sessionstest.Org, "s", first, sessions.PermissionAccepted); err == nil {
		t.Error("the old permission can be answered")
	}
	answer(w, 2, sessions.PermissionRejected)
	turns(w, 2)
}

// What Codex prints is not trusted.
func TestHostileOutput(t *testing.T) {
	long := strings.Repeat("x", 1<<20)
	w := world(t, recording(t, begins+`< garbage
< ["a list"]
< {"method":7}
< {"method":"unknown","params":"text"}
< {"id":"x","result":{}}
< {"id":"a","method":"item/tool/call","params":{}}
> {"id":"a","error":{"code":-32601}}
< {"id":"b","method":"item/tool/requestUserInput","params":{"questions":[]}}
> {"id":"b","error":{"code":-32602}}
< {"id":"c","method":"item/permissions/requestApproval","params":{}}
> {"id":"c","error":{"code":-32601}}
< {"method":"item/started","params":{"threadId":"thread_1","item":{"type":"imageGeneration","id":"i","result":"text"}}}
< {"method":"item/started","params":{"threadId":"thread_1","item":{"type":"commandExecution","id":7}}}
< {"method":"item/started","params":{"threadId":"thread_1","item":"text"}}
< {"method":"item/completed","params":{"threadId":"thread_1","item":{"type":"fileChange","id":"f","changes":7}}}
< {"method":"item/agentMessage/delta","params":{"threadId":"thread_1","itemId":"none","delta":"text"}}
< {"method":"turn/completed","params":{"threadId":"other","turn":{"id":"turn_1","status":"completed"}}}
< {"method":"turn/completed","params":{"threadId":"thread_1","turn":{"id":"turn_0","status":"failed"}}}
< {"method":"item/started","params":{"threadId":"thread_1","item":{"type":"commandExecution","id":"c","command":"one"}}}
< {"method":"item/completed","params":{"threadId":"thread_1","item":{"type":"commandExecution","id":"c",`+
		`"status":"completed","aggregatedOutput":"`+long+`"}}}
< {"method":"item/completed","params":{"threadId":"thread_1","item":{"type":"commandExecution","id":"c","status":"failed"}}}
< {"method":"item/started","params":{"threadId":"thread_1","item":{"type":"commandExecution","id":"c","command":"two"}}}
`+ends))
	w.MustCreate("s", "codex")
	w.MustSend("s", "hi")
	events := turns(w, 1)
	got := strings.ReplaceAll(show(t, events[3:]), strings.Repeat("x", 256<<10), "(256 KiB)")
	want := strings.TrimPrefix(`
agent.unparsed codex.stdout
agent.unparsed codex.stdout
agent.unparsed codex.stdout
item.started itm_2 assistant tool_call tool_call:shell{"command":"one","cwd":""}
item.completed itm_2 assistant tool_call tool_call:shell{"command":"one","cwd":""}
item.started itm_3 tool tool_result tool_result:(256 KiB)
[shortened]
item.completed itm_3 tool tool_result tool_result:(256 KiB)
[shortened]
item.started itm_4 assistant tool_call tool_call:shell{"command":"two","cwd":""}
item.completed itm_4 assistant tool_call tool_call:shell{"command":"two","cwd":""}
item.started itm_5 tool tool_result tool_result:the turn ended before the tool did
item.completed itm_5 tool tool_result failed tool_result:the turn ended before the tool did
turn.ended
`, "\n")
	if got != want {
		t.Errorf("%s\nwant:\n%s", got, want)
	}
	for i := range events {
		if len(events[i].Raw) > 64<<10 {
			t.Errorf("event %d repeats a line of %d bytes", events[i].Sequence, len(events[i].Raw))
		}
	}
}
