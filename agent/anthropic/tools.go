package anthropic

import (
	"bytes"
	"context"
	"crypto/rand"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"path"
	"slices"
	"strings"
	"unicode/utf8"

	"github.com/bullpen-run/bullpen/agent"
	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/proto/api"
)

// The revisions of the code execution tool. From replTool on, Python code runs in an interpreter that keeps its state.
// They also have programmatic calls, which this server does not support.
const (
	pythonTool  = "code_execution_20250522"
	bashTool    = "code_execution_20250825"
	replTool    = "code_execution_20260120"
	cellTool    = "code_execution_20260521" // a program that runs too long is a result
	toolName    = "code_execution"
	pythonName  = "code_execution"
	bashName    = "bash_code_execution"
	editorName  = "text_editor_code_execution"
	timeoutCode = 124 // of coreutils' timeout
)

// tool is a tool in a request.
type tool struct {
	Type           string          `json:"type"`
	Name           string          `json:"name"`
	Description    string          `json:"description"`
	InputSchema    json.RawMessage `json:"input_schema"`
	AllowedCallers []string        `json:"allowed_callers"`
	Cache          json.RawMessage `json:"cache_control"`
}

// toolSet are the tools of a request.
type toolSet struct {
	revision string // of the code execution tool, empty without one
	clients  []agent.Tool
}

func (r *request) toolSet() (*toolSet, error) {
	set := &toolSet{}
	names := map[string]bool{}
	for i, raw := range r.Tools {
		field := fmt.Sprintf("tools.%d", i)
		var t tool
		if err := json.Unmarshal(raw, &t); err != nil {
			return nil, proto.FieldErrorf(field, "is not a tool: %v", err)
		}
		taken := []string{t.Name}
		if slices.Contains([]string{bashTool, replTool, cellTool}, t.Type) {
			taken = append(taken, bashName, editorName)
		}
		for _, name := range taken {
			if names[name] {
				return nil, proto.FieldErrorf(field, "has the name %q of another tool", proto.Shorten(name))
			}
			names[name] = true
		}
		switch t.Type {
		case pythonTool, bashTool, replTool, cellTool:
			if t.Name != toolName {
				return nil, proto.FieldErrorf(field+".name", "must be %s", toolName)
			}
			if len(t.AllowedCallers) > 0 && !slices.Equal(t.AllowedCallers, []string{"direct"}) {
				return nil, proto.FieldErrorf(field+".allowed_callers",
					"must be direct alone: programs cannot call tools on this server")
			}
			set.revision = t.Type
		case "", "custom":
			if t.Name == "" || len(t.InputSchema) == 0 {
				return nil, proto.FieldErrorf(field, "must have a name and an input_schema")
			}
			if len(t.AllowedCallers) > 0 && !slices.Contains(t.AllowedCallers, "direct") {
				return nil, proto.FieldErrorf(field+".allowed_callers",
					"must have direct: programs cannot call tools on this server")
			}
			set.clients = append(set.clients,
				agent.Tool{Definition: agent.Definition{
					Name: t.Name, Description: t.Description, Schema: t.InputSchema, Cache: ifSet(t.Cache),
				}})
		default:
			return nil, proto.FieldErrorf(field+".type",
				"is %q; this server has %s, %s and later revisions, and tools of the client", proto.Shorten(t.Type),
				pythonTool, bashTool)
		}
	}
	return set, nil
}

// all returns the tools for the model. Those of the code execution tool run in a container.
func (set *toolSet) all(c *container) []agent.Tool {
	switch set.revision {
	case "":
		return set.clients
	case pythonTool:
		return append(set.clients, c.Placed(c.tool(agent.Definition{
			Name: pythonName, Schema: json.RawMessage(
				`{"type":"object","properties":{"code":{"type":"string","description":"The program."}},"required":["code"]}`),
			Description: "Runs a Python 3 program in a sandbox and returns its output and exit code. Each call is a new " +
				"process. Files in the working directory are kept for later calls; " +
				"files that a call creates or changes there are given to the user. Print what you need to know.",
		}, c.python), false))
	}
	list := set.clients
	if hasInterpreter(set.revision) {
		list = append(list, c.Placed(c.tool(agent.Definition{
			Name: pythonName, Schema: json.RawMessage(
				`{"type":"object","properties":{"code":{"type":"string","description":"The code."}},"required":["code"]}`),
			Description: "Runs Python 3 code in an interpreter, as a cell of a notebook, and returns what it prints, and the " +
				"value of its last expression. Variables, imports and functions are kept for later calls. If they are lost, " +
				"the result says so. Files that a call creates or changes directly in the working directory, which is the home " +
				"directory, and pictures that it shows, such as figures of matplotlib, are given to the user.",
		}, c.cell), true))
	}
	return append(list, c.Placed(c.tool(agent.Definition{
		Name: bashName, Schema: json.RawMessage(
			`{"type":"object","properties":{"command":{"type":"string","description":"The command."}},"required":["command"]}`),
		Description: "Runs a Bash command in a sandbox and returns its output and exit code. Each call is a new shell in " +
			"the home directory. Files in the home directory and in /tmp are kept for later calls, others are not. " +
			"Files that are saved in the directory $OUTPUT_DIR are given to the user, and are removed from it before the " +
			"next call.",
	}, c.bash), false), c.editor(agent.Definition{
		Name: editorName, Schema: json.RawMessage(
			`{"type":"object","properties":{"command":{"type":"string","enum":["view","create","str_replace"]},` +
				`"path":{"type":"string","description":"A path in the home directory, relative to it."},` +
				`"file_text":{"type":"string","description":"With create: the whole text of the file."},` +
				`"old_str":{"type":"string","description":"With str_replace: text that occurs once in the file."},` +
				`"new_str":{"type":"string","description":"With str_replace: the text in its place."},` +
				`"view_range":{"type":"array","items":{"type":"integer"},"description":"With view: the first and the last line, ` +
				`from 1; -1 for the last line of the file."}},"required":["command","path"]}`),
		Description: "Views, creates and edits text files in the home directory of the sandbox in which Bash commands run.",
	}))
}

// hasInterpreter reports whether a revision of the code execution tool has an interpreter.
func hasInterpreter(revision string) bool { return revision == replTool || revision == cellTool }

// container is where the calls of a request are carried out.
type container struct {
	agent.Container
	revision string
	expired  bool // calls fail
}

// tool returns a tool of this side.
func (c *container) tool(
	d agent.Definition, execute func(ctx context.Context, call *agent.Call) (any, error),
) agent.Tool {
	return agent.Tool{
		Definition: d,
		Execute: func(ctx context.Context, call *agent.Call) (*agent.Outcome, error) {
			if c.expired {
				return c.failure(call.Name, "container_expired", nil), nil
			}
			value, err := execute(ctx, call)
			o, err := c.outcomeOf(ctx, call.Name, value, err)
			if p, ok := value.(*programResult); ok && err == nil {
				o.Pictures = p.pictures
			}
			return o, err
		},
		Malformed: func(call *agent.Call) *agent.Outcome { return c.failure(call.Name, "invalid_tool_input", nil) },
	}
}

// editor returns the text editor.
func (c *container) editor(d agent.Definition) agent.Tool {
	t := c.tool(d, nil)
	t.Execute = func(ctx context.Context, call *agent.Call) (*agent.Outcome, error) {
		value, change, err := c.edit(ctx, call)
		o, errOutcome := c.outcomeOf(ctx, call.Name, value, err)
		if err == nil {
			o.Change = change
		}
		return o, errOutcome
	}
	t.Apply = func(ctx context.Context, call *agent.Call, planned *agent.Outcome) (*agent.Outcome, error) {
		err := c.apply(ctx, call, planned.Change)
		return c.outcomeOf(ctx, call.Name, planned.Value, err)
	}
	return t
}

// outcomeOf returns the outcome of a call that ended with a value or an error.
func (c *container) outcomeOf(ctx context.Context, name string, value any, err error) (*agent.Outcome, error) {
	switch {
	case err == nil:
		return outcome(value, false), nil
	case ctx.Err() != nil:
		return nil, ctx.Err()
	default:
		return c.failed(name, err), nil
	}
}

// outcome returns the outcome that is the content of a result block.
func outcome(value any, failed bool) *agent.Outcome {
	text, err := json.Marshal(value)
	if err != nil {
		panic(err) // the types here have only text and numbers
	}
	return &agent.Outcome{Text: string(text), Failed: failed, Value: text}
}

// failure returns the outcome of a call of a tool that was not carried out.
func (c *container) failure(name, code string, message *string) *agent.Outcome {
	return outcome(&resultError{Type: name + "_tool_result_error", ErrorCode: code, ErrorMessage: message}, true)
}

// failed returns the outcome for an error.
func (c *container) failed(name string, err error) *agent.Outcome {
	var input inputError
	edit, isEdit := errors.AsType[*agent.EditError](err)
	known, isKnown := errors.AsType[*api.Error](err)
	_, isField := errors.AsType[*proto.FieldError](err)
	switch {
	case errors.As(err, &input), isField:
		return c.failure(name, "invalid_tool_input", messageFor(name, err))
	case isEdit && edit.NotFound:
		return c.failure(name, "file_not_found", &edit.Message)
	case isEdit:
		return c.failure(name, "invalid_tool_input", &edit.Message)
	// the model may find another way
	case isKnown && (known.Reason == api.ReasonNoWorker || known.Reason == api.ReasonMissing):
		return c.failure(name, "unavailable", &known.Message)
	case isKnown && (known.Code == api.CodeRateLimited || known.Code == api.CodeConflict):
		return c.failure(name, "too_many_requests", messageFor(name, known))
	default:
		return c.failure(name, "unavailable", nil)
	}
}

// messageFor returns the message of an error, if the errors of a tool have one.
func messageFor(name string, err error) *string {
	if name != editorName {
		return nil
	}
	return new(err.Error())
}

// inputError is an error in the arguments of a call.
type inputError string

func (e inputError) Error() string { return string(e) }

// arguments decodes the arguments of a call.
func arguments[T any](call *agent.Call) (*T, error) {
	var v T
	if err := json.Unmarshal(call.Arguments, &v); err != nil {
		return nil, inputError("the arguments have the wrong types")
	}
	return &v, nil
}

func (c *container) python(ctx context.Context, call *agent.Call) (any, error) {
	return c.runCode(ctx, call, c.Python)
}

// cell runs code in the interpreter. The pictures that it shows are files for the client.
func (c *container) cell(ctx context.Context, call *agent.Call) (any, error) {
	return c.runCode(ctx, call, func(ctx context.Context, id, code string) (*agent.Output, error) {
		out, err := c.Cell(ctx, id, code)
		if err != nil {
			return nil, err
		}
		return out, c.LeavePictures(ctx, id, out)
	})
}

// runCode carries out a call with Python code.
func (c *container) runCode(
	ctx context.Context, call *agent.Call, run func(ctx context.Context, call, code string) (*agent.Output, error),
) (any, error) {
	in, err := arguments[struct {
		Code string `json:"code"`
	}](call)
	if err != nil {
		return nil, err
	}
	out, err := run(ctx, call.ID, in.Code)
	if err != nil {
		return nil, err
	}
	return c.result(call.Name, out), nil
}

func (c *container) bash(ctx context.Context, call *agent.Call) (any, error) {
	in, err := arguments[struct {
		Command string `json:"command"`
	}](call)
	if err != nil {
		return nil, err
	}
	if in.Command == "" {
		return nil, inputError("command is missing")
	}
	out, err := c.Bash(ctx, call.ID, in.Command, 0)
	if err != nil {
		return nil, err
	}
	return c.result(call.Name, out), nil
}

// result returns the content of the result block of a program.
func (c *container) result(name string, out *agent.Output) any {
	r := out.Record.Result
	code := ""
	if r.ErrorCode != nil {
		code = *r.ErrorCode
	}
	switch proto.ErrorCode(code) {
	case proto.CodeTimeout:
		switch c.revision {
		case pythonTool:
			return &resultError{Type: name + "_tool_result_error", ErrorCode: "code_execution_exceeded"}
		case cellTool:
		default:
			return &resultError{Type: name + "_tool_result_error", ErrorCode: "execution_time_exceeded"}
		}
	case proto.CodeCancelled:
		return &resultError{Type: name + "_tool_result_error", ErrorCode: "unavailable"}
	}
	p := &programResult{
		Type: name + "_result", Stdout: agent.Shortened(r.Stdout, r.StdoutTruncated),
		Stderr:     agent.Shortened(r.Stderr, r.StderrTruncated),
		ReturnCode: r.ExitCode, Content: []outputFile{}, pictures: out.Pictures,
	}
	if code != "" { // the platform ended the program
		p.Stderr = strings.TrimLeft(p.Stderr+"\n"+*r.ErrorMessage, "\n")
		if p.ReturnCode = timeoutCode; proto.ErrorCode(code) != proto.CodeTimeout {
			p.ReturnCode = 1
		}
	}
	if out.Note != "" {
		p.ReturnCode = max(1, p.ReturnCode)
		p.Stderr = strings.TrimLeft(p.Stderr+"\n"+out.Note, "\n")
	}
	for _, f := range out.Files {
		p.Content = append(p.Content, outputFile{name + "_output", f.ID})
	}
	return p
}

// editInput are the arguments of a call of the text editor.
type editInput struct {
	Command   string  `json:"command"`
	Path      string  `json:"path"`
	FileText  *string `json:"file_text"`
	OldStr    *string `json:"old_str"`
	NewStr    string  `json:"new_str"`
	ViewRange []int   `json:"view_range"`
}

// edit returns the result of a call of the text editor. If the returned change is not nil, it must
// be applied first.
func (c *container) edit(ctx context.Context, call *agent.Call) (any, *agent.Change, error) {
	in, err := arguments[editInput](call)
	if err != nil {
		return nil, nil, err
	}
	switch {
	case in.Path == "":
		return nil, nil, inputError("path is missing")
	case in.Command == "view":
		view, err := c.view(ctx, in.Path, in.ViewRange)
		return view, nil, err
	case in.Command == "create" && in.FileText == nil:
		return nil, nil, inputError("file_text is missing")
	case in.Command == "str_replace" && (in.OldStr == nil || *in.OldStr == ""):
		return nil, nil, inputError("old_str is missing")
	case in.Command != "create" && in.Command != "str_replace":
		return nil, nil, inputError("command must be view, create or str_replace")
	}
	f, err := c.OpenText(ctx, in.Path)
	if err != nil {
		return nil, nil, err
	}
	text, result, err := in.change(f)
	if err != nil {
		return nil, nil, err
	}
	change, err := f.Plan(text)
	return result, change, err
}

// apply applies the change of a call, unless it is already applied.
func (c *container) apply(ctx context.Context, call *agent.Call, change *agent.Change) error {
	in, err := arguments[editInput](call)
	if err != nil {
		return err
	}
	return c.ApplyChange(ctx, in.Path, change, func(f *agent.TextFile) ([]byte, error) {
		text, _, err := in.change(f)
		return text, err
	})
}

// change returns the text of a file after a call, and the call's result.
func (in *editInput) change(f *agent.TextFile) (text []byte, result any, err error) {
	if in.Command == "create" {
		return []byte(*in.FileText), &createResult{"text_editor_code_execution_create_result", f.State != ""}, nil
	}
	if f.Err != nil {
		return nil, nil, f.Err
	}
	return replace(string(f.Text), *in.OldStr, in.NewStr)
}

// fileTypes are the types of files that are no text, by extension.
var fileTypes = map[string]string{
	".png": "image", ".jpg": "image", ".jpeg": "image", ".gif": "image", ".webp": "image",
	".pdf": "pdf",
}

func (c *container) view(ctx context.Context, name string, lines []int) (any, error) {
	const kind = "text_editor_code_execution_view_result"
	f, err := c.OpenText(ctx, name)
	if err != nil {
		return nil, err
	}
	if f.Err != nil && f.Err.NotFound {
		if names, err := c.ListDirectory(ctx, name); err == nil && len(names) > 0 {
			return &viewResult{Type: kind, FileType: "text", Content: strings.Join(names, "\n")}, nil
		}
	}
	if f.Err != nil {
		return nil, f.Err
	}
	raw := f.Text
	if other := fileTypes[strings.ToLower(path.Ext(name))]; other != "" {
		return &viewResult{Type: kind, FileType: other, Content: base64.StdEncoding.EncodeToString(raw)}, nil
	}
	if !utf8.Valid(raw) {
		return nil, inputError("the file is no text; use a command")
	}
	total := bytes.Count(raw, []byte("\n"))
	if len(raw) > 0 && raw[len(raw)-1] != '\n' {
		total++
	}
	first, end := 1, total
	if len(lines) > 0 {
		if len(lines) != 2 || lines[0] < 1 || lines[1] != -1 && lines[1] < lines[0] {
			return nil, inputError("view_range must have the numbers of the first and the last line")
		}
		first = min(lines[0], total+1)
		if lines[1] != -1 {
			end = min(lines[1], total)
		}
	}
	n := max(0, end-first+1)
	part := raw[afterLines(raw, first-1):]
	part = part[:afterLines(part, n)]
	if len(part) > api.MaxToolOutput {
		return nil, inputError(fmt.Sprintf("these lines have more than %d bytes; view a part of them", api.MaxToolOutput))
	}
	return &viewResult{
		Type: kind, FileType: "text", Content: string(part), NumLines: &n, StartLine: &first,
		TotalLines: &total,
	}, nil
}

// afterLines returns the position after the first n lines of a text. A list of all lines would take
// 16 times the memory of a file of line breaks.
func afterLines(text []byte, n int) int {
	at := 0
	for range n {
		i := bytes.IndexByte(text[at:], '\n')
		if i < 0 {
			return len(text)
		}
		at += i + 1
	}
	return at
}

// replace returns a text with a part replaced, and the result for the model.
func replace(text, before, after string) (replaced []byte, result any, err error) {
	if n := strings.Count(text, before); n != 1 {
		return nil, nil, inputError(fmt.Sprintf("old_str occurs %d times in the file; it must occur once", n))
	}
	start := strings.Count(text[:strings.Index(text, before)], "\n") + 1
	r := &replaceResult{Type: "text_editor_code_execution_str_replace_result", OldStart: &start, NewStart: &start}
	old, fresh := strings.Split(before, "\n"), strings.Split(after, "\n")
	r.OldLines, r.NewLines = new(len(old)), new(len(fresh))
	for _, line := range old {
		r.Lines = append(r.Lines, "-"+line)
	}
	for _, line := range fresh {
		r.Lines = append(r.Lines, "+"+line)
	}
	return []byte(strings.Replace(text, before, after, 1)), r, nil
}

// newCallID returns the id of a call.
func newCallID(t *agent.Tool) string {
	if t.Execute != nil {
		return "srvtoolu_" + rand.Text()
	}
	return "toolu_" + rand.Text()
}
