package mock

import (
	"encoding/json"
	"fmt"
	"strings"

	"github.com/bullpen-run/bullpen/agent/sessions"
)

// prompts are the scripts for the messages of the original's tests. Keys are in lower case.
var prompts = map[string]func(*writer){
	"reply with exactly the single word ok.":     says("ok", "OK"),
	"reply with exactly the word first.":         says("first", "FIRST"),
	"reply with exactly the word second.":        says("second", "SECOND"),
	"answer briefly and include your reasoning.": (*writer).rich,
	"provide a short status update.":             (*writer).status,

	"list files in the current directory using available tools.": (*writer).list,
	"use the bash tool to run `ls` in the current directory. do not answer without using the tool.": func(w *writer) {
		w.list()
		w.tool()
	},
	"use the askuserquestion tool to ask exactly one yes/no question, then wait for a reply. " +
		"do not answer yourself.": (*writer).proceed,
	"call the askuserquestion tool with exactly one yes/no question and wait for a reply. " +
		"do not answer yourself.": (*writer).proceed,
}

// commands are the scripts for messages that begin with a command. Keys are in lower case.
var commands = map[string]func(*writer){
	"help":     says("help", help),
	"demo":     (*writer).demo,
	"markdown": (*writer).markdown,
	"tool":     (*writer).tool, "tools": (*writer).tool, "tooling": (*writer).tool,
	"status":     (*writer).status,
	"image":      (*writer).image,
	"unknown":    (*writer).unknown,
	"permission": (*writer).permissions, "permissions": (*writer).permissions,
	"question": (*writer).questions, "questions": (*writer).questions,
	"error":    (*writer).failure,
	"unparsed": (*writer).unparsed,
	"end":      (*writer).end, "ended": (*writer).end, "session.end": (*writer).end,
}

const help = `Mock agent commands:
- demo: run a full UI coverage sequence with markers.
- markdown: streaming markdown fixture.
- tool: tool call + tool result with file refs.
- status: status item updates.
- image: message with image content part.
- unknown: item.kind=unknown example.
- permission: permission requests (pending).
- question: question requests (pending).
- error: error + agent.unparsed events.
- unparsed: emit agent.unparsed only.
- end: emit session.ended.

Any other text will be echoed as an assistant message.`

// markdownPieces are the deltas of the markdown message. Joined, they are its text.
var markdownPieces = []string{
	"# Markdown Demo\n\n**Bo",
	"ld**, *ita",
	"lic*, ***bold-",
	"italic***, and ~~stri",
	"kethrough~~.\n\nInline code: `const x = 1`.\n\n## Lists\n- Item one\n  - Nested item\n- Item two\n\n1.",
	" First\n2. Second\n\n> Blockquote with **bold** text.\n\n## Code\n```t",
	"s\nconst answer: number = 42;\nconsole.log(answer);\n```\n\n## Table\n| Column A | Column B |\n" +
		"|:---------|---------:|\n| Left",
	"     | Right    |\n| Alpha    | Beta     |\n\n## Link\n[Example](https://example.com)\n\n---\n\n" +
		"End of markdown demo.",
}

// script returns the events of a turn; none for an empty message.
func script(prefix, text string) []sessions.Native {
	if text == "" {
		return nil
	}
	w := &writer{prefix: prefix}
	w.item("user", sessions.KindMessage, sessions.RoleUser, sessions.Text(text))
	words := strings.Fields(text)
	command, rest := strings.ToLower(words[0]), strings.Join(words[1:], " ")
	write := says("reply", text)
	switch {
	case prompts[strings.ToLower(text)] != nil:
		write = prompts[strings.ToLower(text)]
	case commands[command] != nil:
		write = commands[command]
	case (command == "echo" || command == "say") && rest != "":
		write = says("echo", rest)
	case command == "echo" || command == "say":
		write = says("echo", "Tell me what to say after `echo`.")
	}
	write(w)
	w.events[len(w.events)-1].Cursor = prefix
	return w.events
}

// writer writes a script.
type writer struct {
	prefix string // of ids
	events []sessions.Native
}

func (w *writer) id(name string) string { return w.prefix + "_" + name }

func (w *writer) add(kind sessions.EventType, data any) {
	w.events = append(w.events, sessions.Native{Type: kind, Data: data})
}

// addSynthetic adds an event that the agent did not cause.
func (w *writer) addSynthetic(kind sessions.EventType, data any, raw json.RawMessage) {
	w.events = append(w.events, sessions.Native{Type: kind, Data: data, Synthetic: true, Raw: raw})
}

// item adds the start and the completion of an item.
func (w *writer) item(name string, kind sessions.ItemKind, role sessions.Role, content ...sessions.Part) {
	w.start(name, kind, role, content...)
	w.complete(name, kind, role, sessions.Completed, content...)
}

func (w *writer) start(name string, kind sessions.ItemKind, role sessions.Role, content ...sessions.Part) {
	w.add(sessions.ItemStarted, w.itemData(name, kind, role, sessions.InProgress, content))
}

func (w *writer) complete(
	name string, kind sessions.ItemKind, role sessions.Role, status sessions.ItemStatus, content ...sessions.Part,
) {
	w.add(sessions.ItemCompleted, w.itemData(name, kind, role, status, content))
}

func (w *writer) itemData(
	name string, kind sessions.ItemKind, role sessions.Role, status sessions.ItemStatus, content []sessions.Part,
) sessions.ItemData {
	return sessions.ItemData{Item: sessions.Item{
		NativeID: new(w.id(name)), Kind: kind, Role: &role, Content: content, Status: status,
	}}
}

func (w *writer) delta(name, text string) {
	w.add(sessions.ItemDelta, sessions.Delta{NativeItemID: new(w.id(name)), Delta: text})
}

// says returns a script that is a message of the assistant.
func says(name, text string) func(*writer) {
	return func(w *writer) { w.item(name, sessions.KindMessage, sessions.RoleAssistant, sessions.Text(text)) }
}

func (w *writer) rich() {
	const name = "assistant_rich"
	content := []sessions.Part{
		sessions.Text("Mock assistant response with rich content."),
		{Type: sessions.PartReasoning, Text: "Public reasoning for display.", Visibility: "public"},
		{Type: sessions.PartReasoning, Text: "Private reasoning hidden by default.", Visibility: "private"},
		{Type: sessions.PartJSON, JSON: json.RawMessage(`{"stage":"analysis","ok":true}`)},
	}
	w.start(name, sessions.KindMessage, sessions.RoleAssistant, content...)
	w.delta(name, "Mock assistant ")
	w.delta(name, "streaming delta.")
	w.complete(name, sessions.KindMessage, sessions.RoleAssistant, sessions.Completed, content...)
}

func (w *writer) status() {
	part := func(detail string) sessions.Part {
		return sessions.Part{Type: sessions.PartStatus, Label: "Indexing", Detail: &detail}
	}
	w.start("status", sessions.KindStatus, sessions.RoleAssistant, part("2 files"))
	w.complete("status", sessions.KindStatus, sessions.RoleAssistant, sessions.Completed, part("Done"))
}

func (w *writer) markdown() {
	const name = "markdown"
	w.start(name, sessions.KindMessage, sessions.RoleAssistant, sessions.Text("Markdown demo (streaming follows)..."))
	for _, piece := range markdownPieces {
		w.delta(name, piece)
	}
	w.complete(name, sessions.KindMessage, sessions.RoleAssistant, sessions.Completed,
		sessions.Text(strings.Join(markdownPieces, "")))
}

// tool writes a tool call and its result. The result is a failure, so that clients can test showing
// one.
func (w *writer) tool() {
	call := w.id("call")
	w.item("tool_call", sessions.KindToolCall, sessions.RoleAssistant, sessions.Part{
		Type: sessions.PartToolCall, Name: "mock.search", Arguments: `{"query":"example"}`, CallID: call,
	})
	result := []sessions.Part{
		{Type: sessions.PartToolResult, CallID: call, Output: "mock search results"},
		{Type: sessions.PartFileRef, Path: w.prefix + "/readme.md", Action: "read"},
		{Type: sessions.PartFileRef, Path: w.prefix + "/output.txt", Action: "write", Diff: new("+mock output\n")},
		{
			Type: sessions.PartFileRef, Path: w.prefix + "/patch.txt", Action: "patch",
			Diff: new("@@ -1,1 +1,1 @@\n-old\n+new\n"),
		},
	}
	w.start("tool_result", sessions.KindToolResult, sessions.RoleTool, result...)
	w.complete("tool_result", sessions.KindToolResult, sessions.RoleTool, sessions.Failed, result...)
}

func (w *writer) image() {
	w.item("image", sessions.KindMessage, sessions.RoleAssistant,
		sessions.Text("Here is a mock image output."),
		sessions.Part{Type: sessions.PartImage, Path: w.prefix + "/image.png", MIME: new("image/png")})
}

func (w *writer) unknown() {
	w.item("unknown", sessions.KindUnknown, sessions.RoleAssistant, sessions.Text("Unknown item kind example."))
}

func (w *writer) permission(name, action, metadata string) {
	w.add(sessions.PermissionRequested, sessions.Permission{
		ID: w.id(name), Action: action, Status: sessions.PermissionPending, Metadata: json.RawMessage(metadata),
	})
}

func (w *writer) list() {
	w.permission("permission", "command_execution", `{"codexRequestKind":"commandExecution","command":"ls"}`)
}

func (w *writer) permissions() {
	w.permission("permission", "command_execution", `{"codexRequestKind":"commandExecution","command":"echo mock"}`)
	w.permission("permission_denied", "file_change",
		fmt.Sprintf(`{"codexRequestKind":"fileChange","path":"%s/deny.txt"}`, w.prefix))
}

func (w *writer) question(name, prompt string, options ...string) {
	w.add(sessions.QuestionRequested, sessions.Question{
		ID: w.id(name), Prompt: prompt, Options: options, Status: sessions.QuestionPending,
	})
}

func (w *writer) proceed() { w.question("question", "Proceed?", "Yes", "No") }

func (w *writer) questions() {
	w.question("question", "Choose a color", "Red", "Blue")
	w.question("question_reject", "Allow mock experiment?", "Yes", "No")
}

func (w *writer) failure() {
	w.addSynthetic(sessions.ErrorEvent, sessions.Failure{
		Message: "Mock error event.", Code: new("mock_error"), Details: json.RawMessage(`{"mock":true}`),
	}, nil)
	w.unparsed()
}

func (w *writer) unparsed() {
	w.addSynthetic(sessions.Unparsed, sessions.UnparsedOutput{
		Error: "unsupported payload", Location: "mock.stream",
	}, json.RawMessage(`{"raw":"mock"}`))
}

func (w *writer) end() {
	w.addSynthetic(sessions.SessionEnded, sessions.Ended{
		Reason: sessions.EndCompleted, TerminatedBy: sessions.FromAgent,
	}, nil)
}

// demo writes most scripts, each after a message that announces it.
func (w *writer) demo() {
	system := func(w *writer) {
		w.item("system", sessions.KindSystem, sessions.RoleSystem, sessions.Text("System ready for mock events."))
	}
	for i, part := range []struct {
		announce string
		write    func(*writer)
	}{
		{"system message (system role).", system},
		{"assistant message with deltas, reasoning, and JSON content parts.", (*writer).rich},
		{"status item updates.", (*writer).status},
		{"markdown rendering + streaming markdown deltas.", (*writer).markdown},
		{"tool call item.", (*writer).tool},
		{"image output content part.", (*writer).image},
		{"unknown item kind.", (*writer).unknown},
		{"permission requests (pending).", (*writer).permissions},
		{"question requests (pending).", (*writer).questions},
		{"error and agent.unparsed events.", (*writer).failure},
	} {
		says(fmt.Sprintf("marker_%d", i+1), "Next: "+part.announce)(w)
		part.write(w)
	}
}
