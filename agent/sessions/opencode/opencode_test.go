package opencode_test

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/bullpen-run/bullpen/agent/sessions"
	"github.com/bullpen-run/bullpen/agent/sessions/opencode"
	"github.com/bullpen-run/bullpen/agent/sessions/sessionstest"
	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/scheduler/storetest"
)

func TestMain(m *testing.M) { sessionstest.Main(m) }

// replays returns sandboxes in which OpenCode replays recordings.
func replays(t *testing.T, recordings ...string) *sessionstest.Sandboxes {
	t.Helper()
	sandboxes := &sessionstest.Sandboxes{T: t, Path: t.TempDir()}
	for _, name := range recordings {
		sandboxes.Recordings = append(sandboxes.Recordings, replay(t, sandboxes, name))
	}
	return sandboxes
}

// world returns a gateway with sandboxes. The sessions are driven until stop is called.
func world(t *testing.T, sandboxes sessions.Sandboxes) (w *sessionstest.World, stop func()) {
	t.Helper()
	installed := sessions.Installation{Dir: "/opencode"}
	w = sessionstest.New(t, storetest.Open(t, storetest.Server(t)),
		&opencode.Agent{Installed: func() sessions.Installation { return installed }})
	w.Sandboxes = sandboxes
	return w, w.Lead()
}

// show describes events in lines. Items that are complete at once have one line.
func show(t *testing.T, events []sessions.Event) string {
	t.Helper()
	var b strings.Builder
	for i := range events {
		e := &events[i]
		if i+1 < len(events) && e.Type == sessions.ItemStarted && events[i+1].Type == sessions.ItemCompleted {
			continue
		}
		fmt.Fprint(&b, e.Type)
		switch e.Type {
		case sessions.ItemStarted, sessions.ItemCompleted:
			d, err := sessions.DataOf[sessions.ItemData](e)
			if err != nil {
				t.Fatal(err)
			}
			fmt.Fprintf(&b, " %s %s %s", *d.Item.Role, d.Item.Kind, d.Item.Status)
			for j := range d.Item.Content {
				fmt.Fprint(&b, " ", showPart(&d.Item.Content[j]))
			}
		case sessions.ItemDelta:
			d, err := sessions.DataOf[sessions.Delta](e)
			if err != nil {
				t.Fatal(err)
			}
			fmt.Fprintf(&b, " %q", d.Delta)
		case sessions.PermissionRequested, sessions.PermissionResolved:
			d, err := sessions.DataOf[sessions.Permission](e)
			if err != nil {
				t.Fatal(err)
			}
			fmt.Fprintf(&b, " %s %s", d.Action, d.Status)
			if e.Type == sessions.PermissionRequested {
				fmt.Fprintf(&b, " %s", d.Metadata)
			}
		case sessions.QuestionRequested, sessions.QuestionResolved:
			d, err := sessions.DataOf[sessions.Question](e)
			if err != nil {
				t.Fatal(err)
			}
			fmt.Fprintf(&b, " %q %v %s", d.Prompt, d.Options, d.Status)
		case sessions.ErrorEvent:
			d, err := sessions.DataOf[sessions.Failure](e)
			if err != nil {
				t.Fatal(err)
			}
			fmt.Fprintf(&b, " %s: %q", *d.Code, d.Message)
			if string(d.Details) != "null" {
				fmt.Fprintf(&b, " %s", d.Details)
			}
		case sessions.TurnEnded:
			d, err := sessions.DataOf[sessions.Turn](e)
			if err != nil {
				t.Fatal(err)
			}
			if d.Metadata != nil {
				fmt.Fprintf(&b, " %s", d.Metadata)
			}
		case sessions.SessionEnded:
			d, err := sessions.DataOf[sessions.Ended](e)
			if err != nil {
				t.Fatal(err)
			}
			fmt.Fprintf(&b, " %s %d %q", d.Reason, *d.ExitCode, d.Stderr.Head)
		}
		fmt.Fprintln(&b)
	}
	return b.String()
}

// showPart describes a part of an item.
func showPart(p *sessions.Part) string {
	text := fmt.Sprintf("%s:%s", p.Type, strconv.Quote(p.Text+p.Name+p.Arguments+p.Output+p.Label))
	if p.Detail != nil {
		text += "=" + *p.Detail
	}
	if p.Type == sessions.PartFileRef {
		text = fmt.Sprintf("%s:%s:%s", p.Type, p.Action, p.Path)
		if p.Diff != nil {
			_, hunks, _ := strings.Cut(*p.Diff, "@@")
			text += fmt.Sprintf("%q", hunks)
		}
	}
	return text
}

// steps describes events in lines, without messages.
func steps(t *testing.T, events []sessions.Event) string {
	t.Helper()
	lines := slices.Collect(strings.Lines(show(t, events)))
	return strings.Join(slices.DeleteFunc(lines, func(line string) bool {
		return strings.HasPrefix(line, "item.delta") || strings.Contains(line, " message ")
	}), "")
}

func check(t *testing.T, what, got, want string) {
	t.Helper()
	want = strings.TrimPrefix(want, "\n")
	if got != want {
		t.Errorf("%s:\n%s\nwant:\n%s", what, got, want)
	}
}

// turns sends messages and returns the events until all their turns have ended. It calls on with each event
// before.
func turns(t *testing.T, w *sessionstest.World, on func(*sessions.Event), messages ...string) (all []sessions.Event) {
	t.Helper()
	for _, text := range messages {
		w.MustSend("s", text)
	}
	offset := int64(1)
	for range messages {
		events := w.Until("s", offset, func(e *sessions.Event) bool {
			if on != nil {
				on(e)
			}
			return e.Type == sessions.TurnEnded || e.Type == sessions.SessionEnded
		})
		all, offset = append(all, events...), events[len(events)-1].Sequence
	}
	return all
}

// answer answers the permission that an event requests.
func answer(t *testing.T, w *sessionstest.World, e *sessions.Event, status sessions.PermissionStatus) {
	t.Helper()
	p, err := sessions.DataOf[sessions.Permission](e)
	if err != nil {
		t.Fatal(err)
	}
	if err := w.AnswerPermission(t.Context(), sessionstest.Org, "s", p.ID, status); err != nil {
		t.Fatal(err)
	}
}

// answers returns a function that answers permissions in their order. It leaves those alone whose answer is
// empty.
func answers(t *testing.T, w *sessionstest.World, list ...sessions.PermissionStatus) func(*sessions.Event) {
	t.Helper()
	return func(e *sessions.Event) {
		if e.Type != sessions.PermissionRequested {
			return
		}
		if list[0] != "" {
			answer(t, w, e, list[0])
		}
		list = list[1:]
	}
}

func mode(name string) func(*proto.AgentSession) {
	return func(x *proto.AgentSession) { x.AgentMode = name }
}

func TestText(t *testing.T) {
	w, _ := world(t, replays(t, "text.txt"))
	w.MustCreate("s", "opencode")
	check(t, "the session", show(t, turns(t, w, nil, "think about it", "again")), `
turn.started
item.completed user message completed text:"think about it"
item.completed assistant status completed reasoning:"Let me see."
item.started assistant message in_progress
item.delta "Hello"
item.delta " there."
item.completed assistant message completed text:"Hello there."
turn.ended
turn.started
item.completed user message completed text:"again"
item.started assistant message in_progress
item.delta "Hello"
item.delta " there."
item.completed assistant message completed text:"Hello there."
turn.ended
`)
	if x, err := w.Get(t.Context(), sessionstest.Org, "s"); err != nil || x.Native != "ses_1" || x.Running {
		t.Errorf("%+v, %v", x, err)
	}
}

const writeHi = `tool bash {"command":"echo hi > out.txt; cat out.txt","description":"Writes"}`

func TestPermissions(t *testing.T) {
	w, _ := world(t, replays(t, "permissions.txt"))
	w.MustCreate("s", "opencode")
	on := answers(t, w, sessions.PermissionAccepted, sessions.PermissionAlways, "", sessions.PermissionRejected,
		sessions.PermissionAccepted, sessions.PermissionAccepted)
	events := turns(t, w, on, writeHi, writeHi, writeHi,
		`tool write {"filePath":"a.txt","content":"one\n"}`, `tool write {"filePath":"a.txt","content":"one\n"}`,
		`tool edit {"filePath":"a.txt","oldString":"one","newString":"two"}`)
	const call = `item.completed assistant tool_call completed tool_call:` +
		`"bash{\"command\":\"echo hi > out.txt; cat out.txt\",\"description\":\"Writes\"}"
permission.requested bash requested {"command":"echo hi \u003e out.txt; cat out.txt",` +
		`"patterns":["echo hi \u003e out.txt","cat out.txt"],"permission":"bash"}
`
	diff := `{"diff":"Index: /home/user/a.txt\n` + strings.Repeat("=", 67) + `\n` +
		`--- /home/user/a.txt\n+++ /home/user/a.txt\n`
	const file = `","filepath":"/home/user/a.txt","patterns":["home/user/a.txt"],"permission":"edit"}`
	check(t, "the session", steps(t, events), `
turn.started
`+call+`permission.resolved bash accept
item.completed tool tool_result completed tool_result:"hi\n"
turn.ended
turn.started
`+call+`permission.resolved bash accept_for_session
item.completed tool tool_result completed tool_result:"hi\n"
turn.ended
turn.started
`+call+`permission.resolved bash accept_for_session
item.completed tool tool_result completed tool_result:"hi\n"
turn.ended
turn.started
item.completed assistant tool_call completed tool_call:"write{\"filePath\":\"a.txt\",\"content\":\"one\\n\"}"
permission.requested edit requested `+diff+`@@ -0,0 +1,1 @@\n+one\n`+file+`
permission.resolved edit reject
item.completed tool tool_result failed tool_result:"The user rejected permission to use this specific tool call `+
		`with the following feedback: the user refused the permission"
turn.ended
turn.started
item.completed assistant tool_call completed tool_call:"write{\"filePath\":\"a.txt\",\"content\":\"one\\n\"}"
permission.requested edit requested `+diff+`@@ -0,0 +1,1 @@\n+one\n`+file+`
permission.resolved edit accept
item.completed tool tool_result completed tool_result:"Wrote file successfully." `+
		`file_ref:write:/home/user/a.txt" -0,0 +1,1 @@\n+one\n"
turn.ended
turn.started
item.completed assistant tool_call completed `+
		`tool_call:"edit{\"filePath\":\"a.txt\",\"oldString\":\"one\",\"newString\":\"two\"}"
permission.requested edit requested `+diff+`@@ -1,1 +1,1 @@\n-one\n+two\n`+file+`
permission.resolved edit accept
item.completed tool tool_result completed tool_result:"Edit applied successfully." `+
		`file_ref:patch:/home/user/a.txt" -1,1 +1,1 @@\n-one\n+two\n"
turn.ended
`)
}

// OpenCode rejects all permissions of a session together with one. The user's other answers must count.
func TestParallelPermissions(t *testing.T) {
	w, _ := world(t, replays(t, "parallel.txt"))
	w.MustCreate("s", "opencode")
	var first *sessions.Event
	on := func(e *sessions.Event) {
		switch {
		case e.Type != sessions.PermissionRequested:
		case first == nil:
			first = e
		default:
			answer(t, w, first, sessions.PermissionRejected)
			answer(t, w, e, sessions.PermissionAccepted)
		}
	}
	events := turns(t, w, on,
		`tools [["bash",{"command":"echo a","description":"d"}],["bash",{"command":"echo b","description":"d"}]]`)
	check(t, "the turn", steps(t, events), `
turn.started
item.completed assistant tool_call completed tool_call:"bash{\"command\":\"echo a\",\"description\":\"d\"}"
item.completed assistant tool_call completed tool_call:"bash{\"command\":\"echo b\",\"description\":\"d\"}"
permission.requested bash requested {"command":"echo a","patterns":["echo a"],"permission":"bash"}
permission.requested bash requested {"command":"echo b","patterns":["echo b"],"permission":"bash"}
permission.resolved bash reject
permission.resolved bash accept
item.completed tool tool_result failed tool_result:"The user rejected permission to use this specific tool call `+
		`with the following feedback: the user refused the permission"
item.completed tool tool_result completed tool_result:"b\n"
turn.ended
`)
}

func TestSubagentAndTodos(t *testing.T) {
	w, _ := world(t, replays(t, "subagent.txt"))
	w.MustCreate("s", "opencode")
	events := turns(t, w, answers(t, w, sessions.PermissionAccepted),
		`tool task {"description":"x","prompt":"tool bash {\"command\":\"echo hi\",\"description\":\"d\"}",`+
			`"subagent_type":"general"}`,
		`tool todowrite {"todos":[{"content":"A","status":"pending","priority":"high"},`+
			`{"content":"B","status":"completed","priority":"low"}]}`)
	check(t, "the turns", steps(t, events), `
turn.started
item.completed assistant tool_call completed tool_call:"task{\"description\":\"x\",\"prompt\":\"tool bash `+
		`{\\\"command\\\":\\\"echo hi\\\",\\\"description\\\":\\\"d\\\"}\",\"subagent_type\":\"general\"}"
permission.requested bash requested {"command":"echo hi","patterns":["echo hi"],"permission":"bash"}
permission.resolved bash accept
item.completed tool tool_result completed tool_result:"<task id=\"ses_2\" state=\"completed\">\n<task_result>\n`+
		`Done now.\n</task_result>\n</task>"
turn.ended
turn.started
item.completed assistant status completed status:"A"=pending status:"B"=completed
item.completed assistant tool_call completed tool_call:"todowrite{\"todos\":[{\"content\":\"A\",\"status\":`+
		`\"pending\",\"priority\":\"high\"},{\"content\":\"B\",\"status\":\"completed\",\"priority\":\"low\"}]}"
item.completed tool tool_result completed tool_result:"[\n  {\n    \"content\": \"A\",\n    \"status\": \"pending\",\n`+
		`    \"priority\": \"high\"\n  },\n  {\n    \"content\": \"B\",\n    \"status\": \"completed\",\n`+
		`    \"priority\": \"low\"\n  }\n]"
turn.ended
`)
}

func TestQuestions(t *testing.T) {
	w, _ := world(t, replays(t, "questions.txt"))
	w.MustCreate("s", "opencode")
	replies := [][][]string{{{"Blue"}, {"A", "B"}}, nil}
	on := func(e *sessions.Event) {
		if e.Type != sessions.QuestionRequested {
			return
		}
		q, err := sessions.DataOf[sessions.Question](e)
		if err != nil {
			t.Fatal(err)
		}
		if err := w.AnswerQuestion(t.Context(), sessionstest.Org, "s", q.ID, replies[0]); err != nil {
			t.Fatal(err)
		}
		replies = replies[1:]
	}
	const questions = `{"questions":[{"question":"Which?","header":"W","options":[{"label":"Red","description":"r"},` +
		`{"label":"Blue","description":"b"}]},{"question":"Letters?","header":"L","multiple":true,"options":` +
		`[{"label":"A","description":"a"},{"label":"B","description":"b"}]}]}`
	call := "item.completed assistant tool_call completed tool_call:" + strconv.Quote("question"+questions) + "\n"
	check(t, "the turns", steps(t, turns(t, w, on, "tool question "+questions, "tool question "+questions)), `
turn.started
`+call+`question.requested "Which?\nLetters? [A, B]" [Red Blue] requested
question.resolved "Which?\nLetters? [A, B]" [Red Blue] answered
item.completed tool tool_result completed tool_result:"User has answered your questions: \"Which?\"=\"Blue\", `+
		`\"Letters?\"=\"A, B\". You can now continue with the user's answers in mind."
turn.ended
turn.started
`+call+`question.requested "Which?\nLetters? [A, B]" [Red Blue] requested
question.resolved "Which?\nLetters? [A, B]" [Red Blue] rejected
item.completed tool tool_result failed tool_result:"The user dismissed this question"
turn.ended
`)
}

func TestPlan(t *testing.T) {
	w, _ := world(t, replays(t, "plan.txt"))
	w.MustCreate("s", "opencode", mode("plan"))
	const refusal = `Model tried to call unavailable tool 'bash'. ` +
		`Available tools: glob, grep, invalid, question, read, skill, task, todowrite, webfetch.`
	check(t, "the turn", steps(t, turns(t, w, nil, writeHi)), `
turn.started
item.completed assistant tool_call completed tool_call:"bash{\"tool\":\"bash\",\"error\":\"`+refusal+`\"}"
item.completed tool tool_result failed tool_result:"The arguments provided to the tool are invalid: `+refusal+`"
turn.ended
`)
}

func TestInterrupt(t *testing.T) {
	w, _ := world(t, replays(t, "interrupt.txt"))
	w.MustCreate("s", "opencode")
	interrupts := 0
	on := func(e *sessions.Event) {
		if e.Type == sessions.PermissionRequested || e.Type == sessions.ItemDelta && interrupts == 0 {
			interrupts++
			if err := w.Interrupt(t.Context(), sessionstest.Org, "s"); err != nil {
				t.Fatal(err)
			}
		}
	}
	check(t, "the turns", show(t, turns(t, w, on, "slow 200", writeHi, "ok")), `
turn.started
item.completed user message completed text:"slow 200"
item.started assistant message in_progress
item.delta "w0 "
item.delta "w1 "
item.completed assistant message completed text:"w0 w1 "
turn.ended {"interrupted":true}
turn.started
item.completed user message completed text:"tool bash `+
		`{\"command\":\"echo hi > out.txt; cat out.txt\",\"description\":\"Writes\"}"
item.started assistant message in_progress
item.delta "I will."
item.completed assistant message completed text:"I will."
item.completed assistant tool_call completed tool_call:`+
		`"bash{\"command\":\"echo hi > out.txt; cat out.txt\",\"description\":\"Writes\"}"
permission.requested bash requested {"command":"echo hi \u003e out.txt; cat out.txt",`+
		`"patterns":["echo hi \u003e out.txt","cat out.txt"],"permission":"bash"}
item.completed tool tool_result failed tool_result:"Tool execution aborted"
permission.resolved bash reject
turn.ended {"interrupted":true}
turn.started
`+helloThere)
}

// helloThere describes the rest of a turn with the message ok.
const helloThere = `item.completed user message completed text:"ok"
item.started assistant message in_progress
item.delta "Hello"
item.delta " there."
item.completed assistant message completed text:"Hello there."
turn.ended
`

func TestErrors(t *testing.T) {
	w, _ := world(t, replays(t, "errors.txt"))
	w.MustCreate("s", "opencode")
	check(t, "the turns", show(t, turns(t, w, nil, "err 400 invalid_request_error", "ok")), `
turn.started
item.completed user message completed text:"err 400 invalid_request_error"
error api_error: "no luck" {"status":400}
turn.ended
turn.started
`+helloThere)
}

func TestRetries(t *testing.T) {
	w, _ := world(t, replays(t, "retries.txt"))
	w.MustCreate("s", "opencode")
	check(t, "the turns", show(t, turns(t, w, nil, "ok", "err 500 api_error", "ok")), `
turn.started
`+helloThere+`turn.started
item.completed user message completed text:"err 500 api_error"
item.completed assistant status completed status:"retry"=attempt 1 failed: no luck
item.completed assistant status completed status:"retry"=attempt 2 failed: no luck
item.completed assistant status completed status:"retry"=attempt 3 failed: no luck
item.completed assistant status completed status:"retry"=attempt 4 failed: no luck
item.completed assistant status completed status:"retry"=attempt 5 failed: no luck
error model_unavailable: "the model failed 5 times: no luck"
turn.ended
turn.started
`+helloThere)
}

func TestUnknownAgent(t *testing.T) {
	w, _ := world(t, replays(t, "agent.txt"))
	w.MustCreate("s", "opencode", mode("nosuch"))
	check(t, "the turn", steps(t, turns(t, w, nil, "hi")), `
turn.started
error unknown_agent: "OpenCode has no agent \"nosuch\""
turn.ended
`)
}

func TestReconnect(t *testing.T) {
	for name, lost := range map[string]string{
		"reconnect.txt": "", "reconnect_late.txt": "item.delta \"w5 \"\nitem.delta \"w6 \"\nitem.delta \"w7 \"\n",
	} {
		w, _ := world(t, replays(t, name))
		w.MustCreate("s", "opencode")
		want := `
turn.started
item.completed user message completed text:"slow 8"
item.started assistant message in_progress
item.delta "w0 "
item.delta "w1 "
item.delta "w2 "
item.delta "w3 "
item.delta "w4 "
item.delta "w5 "
item.delta "w6 "
item.delta "w7 "
item.completed assistant message completed text:"w0 w1 w2 w3 w4 w5 w6 w7 "
turn.ended
turn.started
` + helloThere
		check(t, name, show(t, turns(t, w, nil, "slow 8", "ok")), strings.Replace(want, lost, "", 1))
	}
}

// The program is killed while it waits for a permission.
func TestResume(t *testing.T) {
	w, stop := world(t, replays(t, "killed.txt", "resumed.txt"))
	w.MustCreate("s", "opencode")
	w.MustSend("s", writeHi)
	events := w.Until("s", 1, sessionstest.Is(sessions.PermissionRequested))
	stop()
	w.Lead()
	after := events[len(events)-1].Sequence
	events = w.Until("s", after, sessionstest.Is(sessions.TurnEnded))
	after = events[len(events)-1].Sequence
	w.MustSend("s", "ok")
	events = append(events, w.Until("s", after, sessionstest.Is(sessions.TurnEnded))...)
	check(t, "the session", show(t, events), `
error turn_interrupted: "the server that ran the agent was stopped during this turn; send the message again"
permission.resolved bash reject
turn.ended
turn.started
`+helloThere)
}

// A message with another model makes the program start again. A missing attachment is an error of OpenCode
// that does not end the turn.
func TestAttachmentsAndModels(t *testing.T) {
	w, _ := world(t, replays(t, "attachment.txt", "model.txt"))
	w.MustCreate("s", "opencode")
	for _, m := range []sessions.Message{
		{Text: "ok", Attachments: []sessions.Attachment{
			{Path: "note 1?.txt"}, {Path: "/elsewhere/nosuch.txt", Filename: "n"},
		}},
		{Text: "ok", Model: "other", Variant: "high"},
	} {
		if _, err := w.Send(t.Context(), sessionstest.Org, "s", m, ""); err != nil {
			t.Fatal(err)
		}
	}
	ended := 0
	events := w.Until("s", 1, func(e *sessions.Event) bool {
		if e.Type == sessions.TurnEnded {
			ended++
		}
		return ended == 2
	})
	check(t, "the session", show(t, events), "turn.started\n"+helloThere+"turn.started\n"+helloThere)
}

func TestCrash(t *testing.T) {
	program := filepath.Join(t.TempDir(), "crash")
	if err := os.WriteFile(program, []byte("args serve\nexit 7 out of luck\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	w, _ := world(t, &sessionstest.Sandboxes{T: t, Recordings: []string{program}})
	w.MustCreate("s", "opencode")
	check(t, "the session", steps(t, turns(t, w, nil, "hi")), `
turn.started
session.ended error 7 "out of luck"
`)
}

// A program of the tenant can send anything.
func TestHostileEvents(t *testing.T) {
	events := []string{
		`nonsense`,
		`{"type":"todo.updated","properties":{"sessionID":"ses_1","todos":"` + strings.Repeat("x", 5<<20) + `"}}`,
		`{"type":7,"properties":[]}`,
		`{"type":"message.updated","properties":{"sessionID":"ses_1","info":{"id":"m","sessionID":"ses_1",` +
			`"role":"assistant","parentID":{},"time":[]}}}`,
		`{"type":"message.part.updated","properties":{"part":{"id":"p","sessionID":"ses_1","messageID":"m","type":"tool",` +
			`"tool":"apply_patch","callID":"c","state":{"status":"completed","input":3,"metadata":{"files":7}}}}}`,
		`{"type":"message.part.updated","properties":{"part":{"id":"q","sessionID":"ses_1","messageID":"m","type":"text",` +
			`"time":{"end":1},"text":"` + strings.Repeat("x", 1<<20) + `"}}}`,
		`{"type":"permission.asked","properties":{"id":"r","sessionID":"other","permission":"x","metadata":null}}`,
		`{"type":"question.asked","properties":{"id":"` + strings.Repeat("x", 300) + `","questions":[{}]}}`,
		`{"type":"session.status","properties":{"sessionID":"ses_1","status":{"type":"busy"}}}`,
		`{"type":"session.error","properties":{"sessionID":"ses_1","error":{"data":"x"}}}`,
		`{"type":"session.idle","properties":{"sessionID":"ses_1"}}`,
		`{"type":"session.idle","properties":{"sessionID":"ses_1"}}`,
	}
	recording := `> GET /event
! {"type":"server.connected"}
> POST /session
< 200 {"id":"ses_1"}
> POST /session/ses_1/prompt_async
< 204
! ` + strings.Join(events, "\n! ") + `
> POST /permission/r/reply {"reply":"reject"}
< 404 {}
`
	sandboxes := &sessionstest.Sandboxes{T: t, Path: t.TempDir()}
	sandboxes.Recordings = []string{serve(t, sandboxes, "hostile", recording)}
	w, _ := world(t, sandboxes)
	w.MustCreate("s", "opencode")
	got := steps(t, turns(t, w, nil, "hi"))
	if len(got) > 1000 {
		got = got[:1000]
	}
	check(t, "the turn", got, `
turn.started
agent.unparsed
agent.unparsed
item.completed assistant tool_call completed tool_call:"apply_patch3"
item.completed tool tool_result completed tool_result:""
permission.requested x requested {"patterns":[],"permission":"x"}
error UnknownError: "OpenCode failed"
permission.resolved x reject
turn.ended
`)
}

// A permission for the session covers the directory that the user was asked about, and no others.
func TestAlwaysCoversOneDirectory(t *testing.T) {
	asked := func(id, directory string) string {
		return `! {"type":"permission.asked","properties":{"id":"` + id + `","sessionID":"ses_1",` +
			`"permission":"external_directory","patterns":["` + directory + `"],"always":["` + directory + `"]}}` + "\n"
	}
	once := func(id string) string {
		return "> POST /permission/" + id + `/reply {"reply":"once"}` + "\n< 200 true\n"
	}
	recording := `> GET /event
! {"type":"server.connected"}
> POST /session
< 200 {"id":"ses_1"}
> POST /session/ses_1/prompt_async
< 204
! {"type":"session.status","properties":{"sessionID":"ses_1","status":{"type":"busy"}}}
` + asked("per_1", "/etc/*") + once("per_1") + asked("per_2", "/etc/*") + once("per_2") + asked("per_3", "/srv/*") +
		once("per_3") + `! {"type":"session.idle","properties":{"sessionID":"ses_1"}}
! {"type":"session.idle","properties":{"sessionID":"ses_1"}}
`
	sandboxes := &sessionstest.Sandboxes{T: t, Path: t.TempDir()}
	sandboxes.Recordings = []string{serve(t, sandboxes, "directories", recording)}
	w, _ := world(t, sandboxes)
	w.MustCreate("s", "opencode")
	on := answers(t, w, sessions.PermissionAlways, "", sessions.PermissionAccepted)
	check(t, "the turn", steps(t, turns(t, w, on, "hi")), `
turn.started
permission.requested external_directory requested {"patterns":["/etc/*"],"permission":"external_directory"}
permission.resolved external_directory accept_for_session
permission.requested external_directory requested {"patterns":["/etc/*"],"permission":"external_directory"}
permission.resolved external_directory accept_for_session
permission.requested external_directory requested {"patterns":["/srv/*"],"permission":"external_directory"}
permission.resolved external_directory accept
turn.ended
`)
}
