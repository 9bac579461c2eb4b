package mock_test

import (
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"go.uber.org/goleak"

	"github.com/bullpen-run/bullpen/agent/sessions"
	"github.com/bullpen-run/bullpen/agent/sessions/mock"
	"github.com/bullpen-run/bullpen/proto"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// talk is a conversation whose reports a test reads.
type talk struct {
	*testing.T
	sessions.Conversation
	reports chan sessions.Native
}

// start starts a conversation, which is closed when the test ends.
func start(t *testing.T, agent *mock.Agent, s sessions.Start) *talk {
	t.Helper()
	reports, closed := make(chan sessions.Native), make(chan struct{})
	s.Session = &proto.AgentSession{ID: "s", Agent: "mock"}
	s.Report = func(n sessions.Native) error {
		select {
		case reports <- n:
			return nil
		case <-closed:
			return fmt.Errorf("closed")
		}
	}
	c, err := agent.Start(t.Context(), &s)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { close(closed); c.Close() })
	return &talk{t, c, reports}
}

func (c *talk) send(number int64, text string) {
	c.Helper()
	if err := c.Send(c.Context(), &sessions.Message{Number: number, Text: text}); err != nil {
		c.Fatal(err)
	}
}

// answer answers the question or permission with an id.
func (c *talk) answer(id string) {
	c.Helper()
	a := &sessions.Answer{Permission: &sessions.Permission{ID: id}}
	if strings.Contains(id, "question") {
		a = &sessions.Answer{Question: &sessions.Question{ID: id}}
	}
	if err := c.Answer(c.Context(), a); err != nil {
		c.Fatal(err)
	}
}

// line returns what a test compares of an event.
func line(n sessions.Native) string {
	var mark string
	if n.Synthetic {
		mark = "*"
	}
	switch data := n.Data.(type) {
	case sessions.ItemData:
		x := data.Item
		text := fmt.Sprintf("%s %s %s %s %s", n.Type, *x.NativeID, x.Kind, *x.Role, x.Status)
		for _, p := range x.Content {
			text += " " + encode(p)
		}
		return text + mark
	case sessions.Delta:
		return fmt.Sprintf("%s %s %q%s", n.Type, *data.NativeItemID, data.Delta, mark)
	case sessions.Turn:
		return fmt.Sprintf("%s%s%s", n.Type, data.Metadata, mark)
	default:
		return fmt.Sprintf("%s %s%s%s", n.Type, encode(data), n.Raw, mark)
	}
}

func encode(x any) string {
	encoded, err := json.Marshal(x)
	if err != nil {
		return err.Error()
	}
	return string(encoded)
}

// next returns the next event, if it is not the last of a turn.
func (c *talk) next() (n sessions.Native, more bool) {
	n = <-c.reports
	return n, n.Type != sessions.TurnEnded && n.Type != sessions.SessionEnded
}

// turn returns the events until the end of the turn, answering all questions and permissions.
func (c *talk) turn() (lines []string) {
	c.Helper()
	for {
		n, more := c.next()
		lines = append(lines, line(n))
		switch data := n.Data.(type) {
		case sessions.Permission:
			c.answer(data.ID)
		case sessions.Question:
			c.answer(data.ID)
		}
		if !more {
			return lines
		}
	}
}

// message returns the events of a message with a content.
func message(id, kind, role, content string) []string {
	return item(id, kind, role, content, content, "completed")
}

func item(id, kind, role, before, after, status string) []string {
	return []string{
		fmt.Sprintf("item.started %s %s %s in_progress %s", id, kind, role, before),
		fmt.Sprintf("item.completed %s %s %s %s %s", id, kind, role, status, after),
	}
}

func text(t string) string { return encode(sessions.Text(t)) }

const markdown = "# Markdown Demo\n\n**Bold**, *italic*, ***bold-italic***, and ~~strikethrough~~.\n\n" +
	"Inline code: `const x = 1`.\n\n## Lists\n- Item one\n  - Nested item\n- Item two\n\n1. First\n2. Second\n\n" +
	"> Blockquote with **bold** text.\n\n## Code\n```ts\nconst answer: number = 42;\nconsole.log(answer);\n```\n\n" +
	"## Table\n| Column A | Column B |\n|:---------|---------:|\n| Left     | Right    |\n| Alpha    | Beta     |\n\n" +
	"## Link\n[Example](https://example.com)\n\n---\n\nEnd of markdown demo."

// scripts returns the scripts for message number 7 without the user's item and the end of the turn.
func scripts() map[string][]string {
	says := func(name, t string) []string { return message("mock_7_"+name, "message", "assistant", text(t)) }
	rich := item("mock_7_assistant_rich", "message", "assistant", richContent, richContent, "completed")
	rich = slices.Insert(rich, 1, `item.delta mock_7_assistant_rich "Mock assistant "`,
		`item.delta mock_7_assistant_rich "streaming delta."`)
	status := item("mock_7_status", "status", "assistant", `{"detail":"2 files","label":"Indexing","type":"status"}`,
		`{"detail":"Done","label":"Indexing","type":"status"}`, "completed")
	md := item("mock_7_markdown", "message", "assistant", text("Markdown demo (streaming follows)..."), text(markdown),
		"completed")
	for i, piece := range pieces {
		md = slices.Insert(md, i+1, fmt.Sprintf("item.delta mock_7_markdown %q", piece))
	}
	call := `{"arguments":"{\"query\":\"example\"}","call_id":"mock_7_call","name":"mock.search","type":"tool_call"}`
	tool := slices.Concat(message("mock_7_tool_call", "tool_call", "assistant", call),
		item("mock_7_tool_result", "tool_result", "tool", resultContent, resultContent, "failed"))
	image := message("mock_7_image", "message", "assistant",
		text("Here is a mock image output.")+` {"mime":"image/png","path":"mock_7/image.png","type":"image"}`)
	unknown := message("mock_7_unknown", "unknown", "assistant", text("Unknown item kind example."))
	list := []string{
		permission("permission", "command_execution", `{"codexRequestKind":"commandExecution","command":"ls"}`),
	}
	permissions := []string{
		permission("permission", "command_execution", `{"codexRequestKind":"commandExecution","command":"echo mock"}`),
		permission("permission_denied", "file_change", `{"codexRequestKind":"fileChange","path":"mock_7/deny.txt"}`),
	}
	proceed := []string{question("question", "Proceed?", "Yes", "No")}
	questions := []string{
		question("question", "Choose a color", "Red", "Blue"),
		question("question_reject", "Allow mock experiment?", "Yes", "No"),
	}
	unparsed := []string{
		`agent.unparsed {"error":"unsupported payload","location":"mock.stream","raw_hash":null}{"raw":"mock"}*`,
	}
	failure := append([]string{`error {"message":"Mock error event.","code":"mock_error","details":{"mock":true}}*`},
		unparsed...)
	end := []string{`session.ended {"reason":"completed","terminated_by":"agent"}*`}
	demo := slices.Concat(
		says("marker_1", "Next: system message (system role)."),
		message("mock_7_system", "system", "system", text("System ready for mock events.")),
		says("marker_2", "Next: assistant message with deltas, reasoning, and JSON content parts."), rich,
		says("marker_3", "Next: status item updates."), status,
		says("marker_4", "Next: markdown rendering + streaming markdown deltas."), md,
		says("marker_5", "Next: tool call item."), tool,
		says("marker_6", "Next: image output content part."), image,
		says("marker_7", "Next: unknown item kind."), unknown,
		says("marker_8", "Next: permission requests (pending)."), permissions,
		says("marker_9", "Next: question requests (pending)."), questions,
		says("marker_10", "Next: error and agent.unparsed events."), failure,
	)
	return map[string][]string{
		"Reply with exactly the single word OK.":     says("ok", "OK"),
		"reply with EXACTLY the single word ok.":     says("ok", "OK"),
		"Reply with exactly the word FIRST.":         says("first", "FIRST"),
		"Reply with exactly the word SECOND.":        says("second", "SECOND"),
		"Answer briefly and include your reasoning.": rich,
		"Provide a short status update.":             status,

		"List files in the current directory using available tools.": list,
		"Use the bash tool to run `ls` in the current directory. Do not answer without using the tool.": slices.Concat(
			list, tool),

		"Use the AskUserQuestion tool to ask exactly one yes/no question, then wait for a reply. " +
			"Do not answer yourself.": proceed,
		"Call the AskUserQuestion tool with exactly one yes/no question and wait for a reply. " +
			"Do not answer yourself.": proceed,

		"help": says("help", helpText), "HELP me": says("help", helpText),
		"demo": demo, "markdown": md, "tool": tool, "tools": tool, "tooling": tool, "status": status, "image": image,
		"unknown": unknown, "permission": permissions, "permissions": permissions, "question": questions,
		"questions": questions, "error": failure, "unparsed": unparsed, "end": end, "ended": end, "session.end": end,
		"echo": says("echo", "Tell me what to say after `echo`."), "say": says("echo", "Tell me what to say after `echo`."),
		"say  two   words": says("echo", "two words"), "Echo end": says("echo", "end"),
		"anything  else, that is": says("reply", "anything  else, that is"), "demos": says("reply", "demos"),
	}
}

const richContent = `{"text":"Mock assistant response with rich content.","type":"text"} ` +
	`{"text":"Public reasoning for display.","type":"reasoning","visibility":"public"} ` +
	`{"text":"Private reasoning hidden by default.","type":"reasoning","visibility":"private"} ` +
	`{"json":{"stage":"analysis","ok":true},"type":"json"}`

const resultContent = `{"call_id":"mock_7_call","output":"mock search results","type":"tool_result"} ` +
	`{"action":"read","diff":null,"path":"mock_7/readme.md","type":"file_ref"} ` +
	`{"action":"write","diff":"+mock output\n","path":"mock_7/output.txt","type":"file_ref"} ` +
	`{"action":"patch","diff":"@@ -1,1 +1,1 @@\n-old\n+new\n","path":"mock_7/patch.txt","type":"file_ref"}`

const helpText = "Mock agent commands:\n" +
	"- demo: run a full UI coverage sequence with markers.\n" +
	"- markdown: streaming markdown fixture.\n" +
	"- tool: tool call + tool result with file refs.\n" +
	"- status: status item updates.\n" +
	"- image: message with image content part.\n" +
	"- unknown: item.kind=unknown example.\n" +
	"- permission: permission requests (pending).\n" +
	"- question: question requests (pending).\n" +
	"- error: error + agent.unparsed events.\n" +
	"- unparsed: emit agent.unparsed only.\n" +
	"- end: emit session.ended.\n\n" +
	"Any other text will be echoed as an assistant message."

// pieces are the deltas of the markdown.
var pieces = []string{
	markdown[:21], markdown[21:31], markdown[31:45], markdown[45:66],
	markdown[66:159], markdown[159:223], markdown[223:341], markdown[341:],
}

func permission(name, action, metadata string) string {
	return fmt.Sprintf(
		`permission.requested {"permission_id":"mock_7_%s","action":"%s","status":"requested","metadata":%s}`,
		name, action, metadata)
}

func question(name, prompt string, options ...string) string {
	return fmt.Sprintf(
		`question.requested {"question_id":"mock_7_%s","prompt":"%s","options":%s,"response":null,"status":"requested"}`,
		name, prompt, encode(options))
}

// Each message has the original's script.
func TestScripts(t *testing.T) {
	for prompt, script := range scripts() {
		t.Run(prompt, func(t *testing.T) {
			c := start(t, &mock.Agent{}, sessions.Start{})
			want := slices.Concat(message("mock_7_user", "message", "user", text(prompt)), script)
			if !strings.HasPrefix(want[len(want)-1], "session.ended") {
				want = append(want, "turn.ended*")
			}
			c.send(7, "  "+prompt+"\n")
			if got := c.turn(); !slices.Equal(got, want) {
				t.Errorf("%s\nwant\n%s", strings.Join(got, "\n"), strings.Join(want, "\n"))
			}
		})
	}
}

// The paths of attachments are part of the text.
func TestAttachments(t *testing.T) {
	c := start(t, &mock.Agent{}, sessions.Start{})
	if err := c.Send(t.Context(), &sessions.Message{
		Number: 1, Text: "echo", Attachments: []sessions.Attachment{{Path: "notes.txt"}},
	}); err != nil {
		t.Fatal(err)
	}
	want := slices.Concat(message("mock_1_user", "message", "user", text("echo\n\nAttachments:\n- notes.txt")),
		message("mock_1_echo", "message", "assistant", text("Attachments: - notes.txt")), []string{"turn.ended*"})
	if got := c.turn(); !slices.Equal(got, want) {
		t.Errorf("%q", got)
	}
}

func TestEmptyMessage(t *testing.T) {
	c := start(t, &mock.Agent{}, sessions.Start{})
	for number, text := range []string{"", " \n\t"} {
		c.send(int64(number), text)
		if got := c.turn(); !slices.Equal(got, []string{"turn.ended*"}) {
			t.Errorf("%q: %q", text, got)
		}
	}
}

// The turn goes on until the last answer.
func TestTurnWaitsForAnswers(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := start(t, &mock.Agent{}, sessions.Start{})
		c.send(7, "question")
		for range 4 {
			c.next()
		}
		for _, id := range []string{"mock_7_question", "mock_7_question", "mock_6_question_reject"} {
			c.answer(id)
			if synctest.Wait(); len(c.pendingReports()) != 0 {
				t.Error("the turn has ended before all answers")
			}
		}
		c.answer("mock_7_question_reject")
		if got := c.turn(); !slices.Equal(got, []string{"turn.ended*"}) {
			t.Errorf("%q", got)
		}
	})
}

// pendingReports returns the reports that wait for a reader.
func (c *talk) pendingReports() (list []sessions.Native) {
	select {
	case n := <-c.reports:
		return append(list, n)
	default:
		return nil
	}
}

// A turn can be interrupted between two events, and while it waits for an answer. The next one is not.
func TestInterrupt(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := start(t, &mock.Agent{Delay: time.Hour}, sessions.Start{})
		const interrupted = `turn.ended{"interrupted":true}*`
		if err := c.Interrupt(t.Context()); err != nil { // no turn is in progress
			t.Fatal(err)
		}
		c.send(1, "hello")
		c.next()
		if err := c.Interrupt(t.Context()); err != nil {
			t.Fatal(err)
		}
		if got := c.turn(); !slices.Equal(got, []string{interrupted}) {
			t.Errorf("between two events: %q", got)
		}
		c.send(2, "List files in the current directory using available tools.")
		for range 3 {
			c.next()
		}
		if err := c.Interrupt(t.Context()); err != nil {
			t.Fatal(err)
		}
		if got := c.turn(); !slices.Equal(got, []string{interrupted}) {
			t.Errorf("while it waits: %q", got)
		}
		c.send(3, "hello")
		if got := c.turn(); len(got) != 5 || got[4] != "turn.ended*" {
			t.Errorf("the next turn: %q", got)
		}
	})
}

// Events come with the delay between them.
func TestDelay(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := start(t, &mock.Agent{Delay: 200 * time.Millisecond}, sessions.Start{})
		begin := time.Now()
		c.send(1, "hello")
		if c.turn(); time.Since(begin) != 3*200*time.Millisecond {
			t.Errorf("4 events of a script took %s", time.Since(begin))
		}
	})
}

// A turn can be continued once its whole script is in the log.
func TestResume(t *testing.T) {
	first := start(t, &mock.Agent{}, sessions.Start{})
	first.send(7, "permission")
	var cursor string
	for range 4 {
		if n, _ := first.next(); n.Cursor != "" {
			cursor = n.Cursor
		}
	}
	pending := []sessions.Pending{{Permission: &sessions.Permission{ID: "mock_7_permission_denied"}}}

	waiting := start(t, &mock.Agent{}, sessions.Start{Running: true, Turns: 7, Cursor: cursor, Pending: pending})
	waiting.answer("mock_7_permission_denied")
	if got := waiting.turn(); !waiting.Resumed() || !slices.Equal(got, []string{"turn.ended*"}) {
		t.Errorf("a turn that waits for an answer: resumed %t, %q", waiting.Resumed(), got)
	}
	waiting.send(8, "hello")
	if got := waiting.turn(); len(got) != 5 {
		t.Errorf("the turn after it: %q", got)
	}
	answered := start(t, &mock.Agent{}, sessions.Start{Running: true, Turns: 7, Cursor: cursor})
	if got := answered.turn(); !answered.Resumed() || !slices.Equal(got, []string{"turn.ended*"}) {
		t.Errorf("a turn that was answered meanwhile: resumed %t, %q", answered.Resumed(), got)
	}
	for name, s := range map[string]sessions.Start{
		"a turn in the middle of its script": {Running: true, Turns: 8, Cursor: cursor, Pending: pending},
		"no turn":                            {Turns: 7, Cursor: cursor},
	} {
		if c := start(t, &mock.Agent{}, s); c.Resumed() {
			t.Errorf("%s was resumed", name)
		}
	}
}
