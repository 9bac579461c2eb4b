package main

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"

	"github.com/bullpen-run/bullpen/agent/sessions"
	"github.com/bullpen-run/bullpen/client"
)

// ask is a permission or question of the agent. Exactly one of them is set.
type ask struct {
	permission *client.AgentPermission
	question   *client.AgentQuestion

	isShown bool // whether the user can see it above the prompt
	isCut   bool // whether only a part of it is shown
	isFull  bool // whether the user wants to see all of it
}

// decodeAsk returns the permission or question of an event.
func decodeAsk(e *client.AgentEvent) (*ask, error) {
	switch sessions.EventType(e.Type) {
	case sessions.PermissionRequested, sessions.PermissionResolved:
		data, err := decodeData[client.AgentPermission](e)
		return &ask{permission: &data}, err
	default:
		data, err := decodeData[client.AgentQuestion](e)
		return &ask{question: &data}, err
	}
}

func (a *ask) id() string {
	if a.permission != nil {
		return a.permission.ID
	}
	return a.question.ID
}

func (a *ask) kind() string {
	if a.permission != nil {
		return "permission"
	}
	return "question"
}

// same reports whether two are the same permission or question.
func (a *ask) same(other *ask) bool { return a.kind() == other.kind() && a.id() == other.id() }

// String returns it as one line: a permission with its command, its path or whatever comes first.
func (a *ask) String() string {
	if a.question != nil {
		return oneLine(a.question.Prompt)
	}
	text := a.permission.Action
	if fields, _ := fieldsOf(a.permission.Metadata); len(fields) > 0 {
		text += " " + textOf(fields[sortedFields(fields)[0]])
	}
	return oneLine(text)
}

// resolution returns how it was resolved, as one line.
func (a *ask) resolution() string {
	if a.question != nil {
		text := a.question.Status + ": " + a.String()
		if a.question.Response != nil {
			text += " " + *a.question.Response
		}
		return text
	}
	status := map[string]string{
		string(sessions.PermissionAccepted): "allowed", string(sessions.PermissionAlways): "allowed for the session",
	}[a.permission.Status]
	if status == "" {
		status = "rejected"
	}
	return status + ": " + a.String()
}

// isPlan reports whether the question is whether to carry out a plan.
func (a *ask) isPlan() bool {
	return a.question != nil && slices.Equal(a.question.Options, []string{planApprove, planReject})
}

// The options of the question whether to carry out a plan.
const (
	planApprove = "approve"
	planReject  = "reject"
)

// maxAskLines is how many lines of each part of a permission are shown at first.
const maxAskLines = 40

// show asks the user.
func (a *ask) show(p *chatPrinter) {
	if !a.isShown {
		a.describe(p)
	}
	a.isShown = true
	switch {
	case a.permission != nil && a.isCut:
		p.prompt("[y] once  [a] always in this session  [n] no  [d] show all of it: ")
	case a.permission != nil:
		p.prompt("[y] once  [a] always in this session  [n] no: ")
	case a.isPlan():
		p.prompt("[y] approve  [n] reject, or say what to change: ")
	case len(a.question.Options) > 0:
		p.prompt("Number, several as 1,3, your own words, or /reject: ")
	default:
		p.prompt("Your answer, or /reject: ")
	}
}

// describe prints what is asked.
func (a *ask) describe(p *chatPrinter) {
	if a.permission != nil {
		limit := maxAskLines
		if a.isFull || p.details {
			limit = 0
		}
		p.heading("The agent asks for a permission:")
		p.lines(styleNone, 4, oneLine(a.permission.Action))
		a.isCut = p.fields(a.permission.Metadata, limit)
		return
	}
	p.heading("The agent asks:")
	p.lines(styleNone, 4, a.question.Prompt)
	if a.isPlan() {
		return
	}
	for i, option := range a.question.Options {
		p.lines(styleNone, 4, strconv.Itoa(i+1)+") "+option)
	}
}

// reply is the answer to a permission or question.
type reply struct {
	permission client.AgentReply // empty to reject
	answers    []string          // none to reject
}

// parse returns the answer in a line of the user. It returns nil if there is none, so that the user is asked
// again.
func (a *ask) parse(text string) *reply {
	text = strings.TrimSpace(text)
	key := strings.ToLower(text)
	switch {
	case text == "":
		return nil
	case a.permission != nil:
		switch key {
		case "y", "yes", "once":
			return &reply{permission: client.AllowOnce}
		case "a", "always":
			return &reply{permission: client.AllowAlways}
		case "n", "no":
			return &reply{permission: client.Reject}
		case "d":
			a.isFull, a.isShown = true, false
		}
		return nil
	case a.isPlan() && (key == "y" || key == "yes"):
		return &reply{answers: []string{planApprove}}
	case a.isPlan() && (key == "n" || key == "no"):
		return &reply{answers: []string{planReject}}
	case key == "/reject":
		return &reply{}
	default:
		return a.choose(text)
	}
}

// choose returns the options that a text has the numbers of, or the text itself as the answer. It returns nil
// if there is no option with a number.
func (a *ask) choose(text string) *reply {
	var chosen []string
	for field := range strings.SplitSeq(text, ",") {
		n, err := strconv.Atoi(strings.TrimSpace(field))
		if err != nil || len(a.question.Options) == 0 || a.isPlan() {
			return &reply{answers: []string{text}}
		}
		if n < 1 || n > len(a.question.Options) {
			return nil
		}
		chosen = append(chosen, a.question.Options[n-1])
	}
	return &reply{answers: chosen}
}

// send sends the answer to the server.
func (a *ask) send(ctx context.Context, cl *client.Client, session string, r *reply) error {
	if a.question != nil {
		return cl.AnswerAgentQuestion(ctx, session, a.question.ID, r.answers...)
	}
	if r.permission == "" {
		r.permission = client.Reject
	}
	return cl.AnswerAgentPermission(ctx, session, a.permission.ID, r.permission)
}

// hiddenFields of a permission's metadata are about the agent's protocol, or repeat the action. A tool's input has
// none of them.
var hiddenFields = []string{
	"codexRequestKind", "threadId", "turnId", "itemId", "toolName", "tool_name", "permissionSuggestions", "permission",
	"tool",
}

// firstFields of a permission or a tool call are shown before the others, and the bulky lastFields after them.
var (
	firstFields = []string{
		"command", "cwd", "path", "file_path", "filePath", "filepath", "paths", "blockedPath", "url", "reason",
	}
	lastFields = []string{"diff", "old_string", "new_string", "content"}
)

// fieldsOf returns the metadata of a permission without hidden fields. The input of a tool is in fields of its
// own. ok is false if the metadata is no object.
func fieldsOf(metadata json.RawMessage) (fields map[string]any, ok bool) {
	d := json.NewDecoder(bytes.NewReader(metadata))
	d.UseNumber()
	if d.Decode(&fields) != nil || fields == nil {
		return nil, false
	}
	for _, name := range hiddenFields {
		delete(fields, name)
	}
	if input, ok := fields["input"].(map[string]any); ok {
		delete(fields, "input")
		for name, value := range input {
			if _, ok := fields[name]; ok {
				name = "input." + name
			}
			fields[name] = value
		}
	}
	maps.DeleteFunc(fields, func(_ string, value any) bool { return value == nil })
	return fields, true
}

// textOf returns the value of a field.
func textOf(value any) string {
	if text, ok := value.(string); ok {
		return text
	}
	return compactJSON(value)
}

// fields prints the metadata of a permission. It reports whether it has shown only a part.
func (p *chatPrinter) fields(metadata json.RawMessage, limit int) (isCut bool) {
	fields, ok := fieldsOf(metadata)
	if !ok {
		return p.part(styleNone, "", string(metadata), limit)
	}
	for _, name := range sortedFields(fields) {
		isCut = p.field(name, fields[name], limit) || isCut
	}
	return isCut
}

// sortedFields returns the names of fields in the order in which they are shown.
func sortedFields[T any](fields map[string]T) []string {
	rank := func(name string) int {
		if i := slices.Index(firstFields, name); i >= 0 {
			return i - len(firstFields)
		}
		return slices.Index(lastFields, name) + 1
	}
	names := slices.Sorted(maps.Keys(fields))
	slices.SortStableFunc(names, func(a, b string) int { return rank(a) - rank(b) })
	return names
}

// field prints a field of the metadata. It reports whether it has shown only a part.
func (p *chatPrinter) field(name string, value any, limit int) (isCut bool) {
	_, isText := value.(string)
	text := textOf(value)
	switch {
	case name == "command":
		if words, ok := value.([]any); ok {
			text = commandOf(words)
		}
		return p.part(styleBold, "$ ", text, limit)
	case name == "diff" && isText:
		return p.diff(text, limit)
	case name == "old_string" && isText:
		return p.diff(prefixLines("-", text), limit)
	case (name == "new_string" || name == "content") && isText:
		return p.diff(prefixLines("+", text), limit)
	default:
		return p.part(styleNone, strings.Map(printable, name)+": ", text, limit)
	}
}

// part prints a text with a label. It reports whether it has shown only a part.
func (p *chatPrinter) part(s style, label, text string, limit int) (isCut bool) {
	text, isCut = excerpt(text, limit)
	p.lines(s, 4, label+strings.ReplaceAll(text, "\n", "\n"+strings.Repeat(" ", len([]rune(label)))))
	return isCut
}

// commandOf returns a command that is given as a list of words.
func commandOf(words []any) string {
	var list []string
	for _, word := range words {
		text := textOf(word)
		if !plainWord.MatchString(text) {
			text = "'" + strings.ReplaceAll(text, "'", `'\''`) + "'"
		}
		list = append(list, text)
	}
	return strings.Join(list, " ")
}

func compactJSON(value any) string {
	var b strings.Builder
	enc := json.NewEncoder(&b)
	enc.SetEscapeHTML(false)
	if err := enc.Encode(value); err != nil {
		return fmt.Sprint(value)
	}
	return strings.TrimSuffix(b.String(), "\n")
}

func prefixLines(prefix, text string) string {
	return prefix + strings.ReplaceAll(strings.TrimSuffix(text, "\n"), "\n", "\n"+prefix)
}
