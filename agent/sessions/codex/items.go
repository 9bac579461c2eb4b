package codex

import (
	"encoding/json"
	"fmt"
	"regexp"
	"strings"

	"github.com/bullpen-run/bullpen/agent/sessions"
)

// Limits of what events contain of an item, in bytes.
const (
	maxText = 256 << 10 // of an output, a partial message, a command, or the diffs of a result
	maxDiff = 16 << 10  // of a diff in the request for a permission
)

// The types of Codex's items. Others are ignored.
const (
	typeMessage    = "agentMessage"
	typePlan       = "plan"
	typeReasoning  = "reasoning"
	typeCommand    = "commandExecution"
	typeFileChange = "fileChange"
	typeMCP        = "mcpToolCall"
	typeImage      = "imageView"
	typeCompaction = "contextCompaction"
)

// item is an item of the turn in progress.
type item struct {
	native string // unique in the turn
	kind   string
	done   bool
	text   []byte // of a message so far, at most maxText

	// What requests for permissions refer to.

	command string
	tool    string // name of an MCP tool
	changes []change
	refused bool // whether it was declined because of plan mode
}

// nativeItem has the fields of all types of items.
type nativeItem struct {
	Type string `json:"type"`
	ID   string `json:"id"`
}

type commandItem struct {
	Command string  `json:"command"`
	CWD     string  `json:"cwd"`
	Status  string  `json:"status"`
	Output  *string `json:"aggregatedOutput"`
	Exit    *int    `json:"exitCode"`
}

type fileItem struct {
	Changes []change `json:"changes"`
	Status  string   `json:"status"`
}

type change struct {
	Path string `json:"path"`
	Kind struct {
		Type string `json:"type"` // add, delete or update
		Move string `json:"move_path"`
	} `json:"kind"`
	Diff string `json:"diff"` // the content, unless Kind is update
}

type mcpItem struct {
	Server    string          `json:"server"`
	Tool      string          `json:"tool"`
	Arguments json.RawMessage `json:"arguments"`
	Status    string          `json:"status"`
	Result    *struct {
		Content []struct {
			Type string `json:"type"`
			Text string `json:"text"`
		} `json:"content"`
	} `json:"result"`
	Error *struct {
		Message string `json:"message"`
	} `json:"error"`
}

// add adds an item to the turn.
func (t *turn) add(n *nativeItem) *item {
	x := &item{native: n.ID, kind: n.Type}
	for i := 2; t.natives[x.native]; i++ {
		x.native = fmt.Sprintf("%s_%d", n.ID, i)
	}
	t.natives[x.native], t.items[n.ID] = true, x
	t.order = append(t.order, x)
	return x
}

// itemStarted reports the start of a message, or a tool call.
func (p *program) itemStarted(t *turn, raw json.RawMessage) bool {
	var n nativeItem
	if json.Unmarshal(raw, &n) != nil {
		return true
	}
	switch n.Type {
	case typeMessage, typePlan:
		return p.sendItem(sessions.ItemStarted, message(t.add(&n), "", sessions.InProgress))
	case typeCommand:
		var c commandItem
		if json.Unmarshal(raw, &c) != nil {
			return true
		}
		x := t.add(&n)
		x.command = c.Command
		return p.call(x, "shell", map[string]any{"command": scriptOf(c.Command), "cwd": c.CWD})
	case typeFileChange:
		var f fileItem
		if json.Unmarshal(raw, &f) != nil {
			return true
		}
		x := t.add(&n)
		x.changes = f.Changes
		return p.call(x, "apply_patch", map[string]any{"changes": summary(f.Changes)})
	case typeMCP:
		var m mcpItem
		if json.Unmarshal(raw, &m) != nil {
			return true
		}
		x := t.add(&n)
		x.tool = "mcp__" + m.Server + "__" + m.Tool
		return p.call(x, x.tool, m.Arguments)
	case typeImage:
		var i struct {
			Path string `json:"path"`
		}
		return json.Unmarshal(raw, &i) != nil || p.call(t.add(&n), "view_image", i)
	}
	return true
}

// shellCommand matches the command lines in which Codex runs scripts.
var shellCommand = regexp.MustCompile(`(?s)^/(?:usr/)?bin/(?:ba|z)?sh -l?c (.+)$`)

// quoted matches the parts of a quoted word: in single quotes, in double quotes, and without any.
var quoted = regexp.MustCompile(`(?s)^(?:'([^']*)'|"((?:[^"\\]|\\.)*)"|([a-zA-Z0-9_@%+=:,./~!^-]+))`)

// escaped matches an escaped character in double quotes.
var escaped = regexp.MustCompile(`(?s)\\(.)`)

// scriptOf returns the script that a command line runs with a shell, or else the command line.
func scriptOf(command string) string {
	call := shellCommand.FindStringSubmatch(command)
	if call == nil {
		return command
	}
	var script strings.Builder
	for rest := call[1]; rest != ""; {
		part := quoted.FindStringSubmatch(rest)
		if part == nil {
			return command
		}
		script.WriteString(part[1] + escaped.ReplaceAllString(part[2], "$1") + part[3])
		rest = rest[len(part[0]):]
	}
	return script.String()
}

// summary returns the paths of changes, and what happens to them.
func summary(changes []change) []map[string]string {
	list := []map[string]string{}
	for i := range changes {
		c := map[string]string{"path": changes[i].Path, "kind": changes[i].Kind.Type}
		if to := changes[i].Kind.Move; to != "" {
			c["move_path"] = to
		}
		list = append(list, c)
	}
	return list
}

func (p *program) sendItem(kind sessions.EventType, x *sessions.Item) bool {
	return p.send(kind, sessions.ItemData{Item: *x})
}

func message(x *item, text string, status sessions.ItemStatus) *sessions.Item {
	m := &sessions.Item{
		NativeID: &x.native, Kind: sessions.KindMessage, Role: new(sessions.RoleAssistant), Content: []sessions.Part{},
		Status: status,
	}
	if text != "" {
		m.Content = append(m.Content, sessions.Text(text))
	}
	return m
}

// call reports a tool call.
func (p *program) call(x *item, name string, arguments any) bool {
	text, err := json.Marshal(arguments)
	if err != nil {
		return true // it was decoded from JSON
	}
	return p.sendItem(sessions.ItemCompleted, &sessions.Item{
		NativeID: &x.native, Kind: sessions.KindToolCall, Role: new(sessions.RoleAssistant), Status: sessions.Completed,
		Content: []sessions.Part{{
			Type: sessions.PartToolCall, Name: name, Arguments: string(text), CallID: x.native,
		}},
	})
}

// result reports the result of a tool call.
func (p *program) result(x *item, failed bool, output string, parts ...sessions.Part) bool {
	r := &sessions.Item{
		NativeID: new(x.native + "_result"), ParentID: &x.native, Kind: sessions.KindToolResult,
		Role: new(sessions.RoleTool), Status: sessions.Completed,
	}
	if failed {
		r.Status = sessions.Failed
	}
	x.done = true
	output = shorten(output, maxText)
	r.Content = append([]sessions.Part{{Type: sessions.PartToolResult, CallID: x.native, Output: output}}, parts...)
	return p.sendItem(sessions.ItemCompleted, r)
}

// shorten cuts a text that is longer than limit.
func shorten(text string, limit int) string {
	if len(text) <= limit {
		return text
	}
	return strings.ToValidUTF8(text[:limit], "") + "\n[shortened]"
}

// itemDelta reports the next piece of a message.
func (p *program) itemDelta(t *turn, id, delta string) bool {
	x := t.items[id]
	if x == nil || x.done || x.kind != typeMessage && x.kind != typePlan {
		return true
	}
	x.text = append(x.text, delta[:min(len(delta), maxText-len(x.text))]...)
	return p.send(sessions.ItemDelta, sessions.Delta{NativeItemID: &x.native, Delta: delta})
}

// itemCompleted reports the end of an item. Codex repeats it if a tool call was declined.
func (p *program) itemCompleted(t *turn, raw json.RawMessage) bool {
	var n nativeItem
	if json.Unmarshal(raw, &n) != nil {
		return true
	}
	switch n.Type {
	case typeReasoning:
		return p.reasoning(t.add(&n), raw)
	case typeCompaction:
		return p.status("Context compacted", "")
	}
	if t.items[n.ID] == nil && !p.itemStarted(t, raw) {
		return false
	}
	x := t.items[n.ID]
	if x == nil || x.done || x.kind != n.Type {
		return true
	}
	switch n.Type {
	case typeMessage, typePlan:
		var m struct {
			Text string `json:"text"`
		}
		_ = json.Unmarshal(raw, &m) // another form has no text
		x.done = true
		t.planned = t.planned || n.Type == typePlan
		return p.sendItem(sessions.ItemCompleted, message(x, m.Text, sessions.Completed))
	case typeCommand:
		return p.commandCompleted(x, raw)
	case typeFileChange:
		return p.fileChangeCompleted(x, raw)
	case typeMCP:
		return p.mcpCompleted(x, raw)
	default:
		var i struct {
			Path string `json:"path"`
		}
		_ = json.Unmarshal(raw, &i) // another form has no path
		return p.result(x, false, "", sessions.Part{Type: sessions.PartImage, Path: i.Path})
	}
}

func (p *program) reasoning(x *item, raw json.RawMessage) bool {
	var r struct {
		Summary []string `json:"summary"`
		Content []string `json:"content"`
	}
	x.done = true
	if json.Unmarshal(raw, &r) != nil || len(r.Summary)+len(r.Content) == 0 {
		return true
	}
	i := &sessions.Item{
		NativeID: &x.native, Kind: sessions.KindStatus, Role: new(sessions.RoleAssistant), Status: sessions.Completed,
	}
	for _, text := range r.Summary {
		i.Content = append(i.Content, sessions.Part{Type: sessions.PartReasoning, Text: text, Visibility: "public"})
	}
	for _, text := range r.Content {
		i.Content = append(i.Content, sessions.Part{Type: sessions.PartReasoning, Text: text, Visibility: "private"})
	}
	return p.sendItem(sessions.ItemCompleted, i)
}

const refusedByPlan = "declined: this session is in plan mode, in which nothing is changed"

func (p *program) commandCompleted(x *item, raw json.RawMessage) bool {
	var c commandItem
	if json.Unmarshal(raw, &c) != nil {
		return true
	}
	output := ""
	switch {
	case c.Status == "declined" && x.refused:
		output = refusedByPlan
	case c.Status == "declined":
		output = "declined"
	case c.Output != nil:
		output = *c.Output
	}
	var parts []sessions.Part
	if c.Exit != nil && *c.Exit != 0 {
		parts = append(parts, sessions.Part{
			Type: sessions.PartJSON, JSON: json.RawMessage(fmt.Sprintf(`{"exitCode":%d}`, *c.Exit)),
		})
	}
	return p.result(x, c.Status != "completed", output, parts...)
}

func (p *program) fileChangeCompleted(x *item, raw json.RawMessage) bool {
	var f fileItem
	if json.Unmarshal(raw, &f) != nil {
		return true
	}
	if f.Status != "completed" {
		output := f.Status
		if f.Status == "declined" && x.refused {
			output = refusedByPlan
		}
		return p.result(x, true, output)
	}
	var files []sessions.Part
	left := maxText
	for i := range f.Changes {
		c := &f.Changes[i]
		file := sessions.Part{Type: sessions.PartFileRef, Path: c.Path, Action: "patch"}
		if c.Kind.Type == "add" {
			file.Action = "write"
		}
		diff := c.unified()
		if left -= len(diff); left >= 0 {
			file.Diff = &diff
		}
		files = append(files, file)
	}
	return p.result(x, false, "", files...)
}

// unified returns a change as a unified diff.
func (c *change) unified() string {
	from, to := c.Path, c.Path
	hunks := c.Diff
	switch c.Kind.Type {
	case "add":
		from, hunks = "/dev/null", hunk(c.Diff, "-0,0 +1,%d", "+")
	case "delete":
		to, hunks = "/dev/null", hunk(c.Diff, "-1,%d +0,0", "-")
	default:
		if c.Kind.Move != "" {
			to = c.Kind.Move
			hunks = strings.TrimSuffix(hunks, "\n\nMoved to: "+to) // Codex adds it
		}
	}
	return "--- " + from + "\n+++ " + to + "\n" + hunks
}

// hunk returns the hunk of a diff that adds or removes all lines of a text. lines is the format of their numbers.
func hunk(text, lines, sign string) string {
	if text == "" {
		return ""
	}
	var b strings.Builder
	n := 0
	for line := range strings.Lines(text) {
		b.WriteString(sign + line)
		n++
	}
	if !strings.HasSuffix(text, "\n") {
		b.WriteString("\n\\ No newline at end of file\n")
	}
	return "@@ " + fmt.Sprintf(lines, n) + " @@\n" + b.String()
}

func (p *program) mcpCompleted(x *item, raw json.RawMessage) bool {
	var m mcpItem
	if json.Unmarshal(raw, &m) != nil {
		return true
	}
	var texts []string
	if m.Result != nil {
		for _, c := range m.Result.Content {
			if c.Type == "text" {
				texts = append(texts, c.Text)
			}
		}
	}
	if m.Error != nil {
		texts = append(texts, m.Error.Message)
	}
	return p.result(x, m.Status != "completed", strings.Join(texts, "\n"))
}

// closeItems reports the end of the items that Codex has not completed.
func (p *program) closeItems(t *turn) bool {
	p.raw = nil
	for _, x := range t.order {
		switch {
		case x.done:
			continue
		case x.kind == typeMessage || x.kind == typePlan:
			x.done = true
			partial := message(x, strings.ToValidUTF8(string(x.text), ""), sessions.Failed)
			if !p.sendItem(sessions.ItemCompleted, partial) {
				return false
			}
		case !p.result(x, true, "the turn ended before the tool did"):
			return false
		}
	}
	return true
}
