package responses

import (
	"context"
	"path"
	"slices"
	"strings"
	"unicode/utf8"

	"github.com/bullpen-run/bullpen/agent"
	"github.com/bullpen-run/bullpen/proto/api"
)

// event is an event of a stream, without its number.
type event = map[string]any

// encoder makes the response, and the events of its stream.
type encoder struct {
	run      *run
	response *response
	// send, if not nil, is called with each event.
	send func(e event) error
	err  error // of send; nothing is sent after it

	next    int          // number of the next event
	text    *messageItem // the last item, while its text is not complete
	partial strings.Builder
	open    map[string]int // the items of calls that have no result, by the ids of the calls
	results int
	paths   []string // of files that no message has cited
}

func newEncoder(r *run) *encoder {
	return &encoder{run: r, response: r.response, open: map[string]int{}}
}

// emit sends an event, with members in pairs of a name and a value.
func (e *encoder) emit(kind string, members ...any) {
	if e.send == nil || e.err != nil {
		return
	}
	v := event{"type": kind, "sequence_number": e.next}
	name := ""
	for i, m := range members {
		if i%2 == 0 {
			name = m.(string) //nolint:forcetypeassert // the callers are here
		} else {
			v[name] = m
		}
	}
	e.next++
	e.err = e.send(v)
}

// begin sends the events before all others.
func (e *encoder) begin() {
	e.emit("response.created", "response", e.response)
	e.emit("response.in_progress", "response", e.response)
}

// add adds an item to the output, and returns its place.
func (e *encoder) add(item any) int {
	e.response.Output = append(e.response.Output, item)
	at := len(e.response.Output) - 1
	e.emit("response.output_item.added", "output_index", at, "item", item)
	return at
}

func (e *encoder) done(at int) {
	e.emit("response.output_item.done", "output_index", at, "item", e.response.Output[at])
}

// Append implements [agent.Log].
func (e *encoder) Append(_ context.Context, v agent.Event) error {
	switch v.Kind {
	case agent.EventText:
		e.appendText(v.Text)
	case agent.EventTextEnd:
		e.endText(v.Text)
	case agent.EventCall:
		e.call(&v)
	case agent.EventResult:
		e.results++
		e.result(&v)
	case agent.EventEnd:
		e.response.end(e.run.vendor, v.End)
		kind := "response.completed"
		if e.response.Status == statusIncomplete && e.run.vendor == openAI {
			kind = "response.incomplete" // Perplexity's clients know no such event
		}
		e.emit(kind, "response", e.response)
	}
	return e.err
}

// fail ends the response with an error.
func (e *encoder) fail(known *api.Error) {
	if e.text != nil {
		e.text.Status, e.text.Content = statusIncomplete, []outputText{newText(e.partial.String())}
	}
	for _, at := range e.open {
		switch item := e.response.Output[at].(type) {
		case *interpreterItem:
			item.Status = statusIncomplete
		case *sandboxItem:
			item.Status = statusFailed
		}
	}
	d := detailOf(known)
	code := "server_error"
	if d.Code != nil {
		code = *d.Code
	}
	e.response.Status, e.response.Error = statusFailed, &responseError{code, d.Message, d.Type}
	e.emit("response.failed", "response", e.response, "error", e.response.Error)
}

func newText(text string) outputText {
	return outputText{Type: "output_text", Text: text, Annotations: []fileCitation{}, Logprobs: nil}
}

func (e *encoder) appendText(text string) {
	if e.text == nil {
		e.text = &messageItem{ID: "msg_" + newID(), Type: "message", Role: "assistant", Status: statusInProgress, Content: []outputText{}}
		at := e.add(e.text)
		if e.run.vendor == openAI {
			e.emit("response.content_part.added", "item_id", e.text.ID, "output_index", at, "content_index", 0, "part", newText(""))
		}
	}
	e.partial.WriteString(text)
	e.emit("response.output_text.delta", "item_id", e.text.ID, "output_index", len(e.response.Output)-1, "content_index", 0, "delta", text, "logprobs", []any{})
}

func (e *encoder) endText(text string) {
	item, at, part := e.text, len(e.response.Output)-1, newText(text)
	part.Annotations = e.citations(text)
	item.Status, item.Content = statusCompleted, []outputText{part}
	e.text = nil
	e.partial.Reset()
	e.emit("response.output_text.done", "item_id", item.ID, "output_index", at, "content_index", 0, "text", text, "logprobs", []any{})
	if e.run.vendor == openAI {
		for i, a := range part.Annotations {
			e.emit("response.output_text.annotation.added", "item_id", item.ID, "output_index", at, "content_index", 0, "annotation_index", i, "annotation", a)
		}
		e.emit("response.content_part.done", "item_id", item.ID, "output_index", at, "content_index", 0, "part", part)
	}
	e.done(at)
}

// citations returns the citations of the files that programs have left since the last message. They
// are where the text names the file, or at its end.
func (e *encoder) citations(text string) []fileCitation {
	list := []fileCitation{}
	for _, p := range e.paths {
		name := path.Base(p)
		start, end := strings.Index(text, name), len(text)
		if start < 0 {
			start = end
		} else {
			end = start + len(name)
		}
		list = append(list, fileCitation{
			"container_file_citation", e.run.container.ID, fileID(p), name, utf8.RuneCountInString(text[:start]), utf8.RuneCountInString(text[:end]),
		})
	}
	e.paths = nil
	return list
}

// call adds the item of a call.
func (e *encoder) call(v *agent.Event) {
	call := v.Call
	if !v.Server {
		item := &functionItem{ID: "fc_" + newID(), Type: "function_call", CallID: call.ID, Name: call.Name, Status: statusInProgress}
		at := e.add(item)
		item.Arguments, item.Status = string(call.Arguments), statusCompleted
		if e.run.vendor == openAI {
			e.emit("response.function_call_arguments.delta", "item_id", item.ID, "output_index", at, "delta", item.Arguments)
			e.emit("response.function_call_arguments.done", "item_id", item.ID, "output_index", at, "name", item.Name, "arguments", item.Arguments)
		}
		e.done(at)
		return
	}
	switch call.Name {
	case interpreterName:
		item := &interpreterItem{ID: call.ID, Type: "code_interpreter_call", Status: statusInProgress, Code: new(""), ContainerID: e.run.container.ID}
		at := e.add(item)
		item.Code = new(codeOf(call).Code)
		to := []any{"item_id", item.ID, "output_index", at}
		e.emit("response.code_interpreter_call.in_progress", to...)
		e.emit("response.code_interpreter_call_code.delta", append(to, "delta", *item.Code)...)
		e.emit("response.code_interpreter_call_code.done", append(to, "code", *item.Code)...)
		e.emit("response.code_interpreter_call.interpreting", to...)
		e.open[call.ID] = at
	case sandboxName:
		in := codeOf(call)
		e.open[call.ID] = e.add(&sandboxItem{
			ID: "sbx_" + newID(), Type: "sandbox_results", CallID: call.ID, ContainerID: e.run.container.ID, Language: in.Language, Code: in.Code,
			Status: statusInProgress, Results: []sandboxResult{},
		})
	case shellName:
		in, err := decodeArguments[shellArguments](call)
		if err != nil || in.Commands == nil {
			in = &shellArguments{Commands: []string{}}
		}
		item := &shellItem{
			ID: "sh_" + newID(), Type: "shell_call", CallID: call.ID, Status: statusInProgress, Action: &shellArguments{Commands: []string{}},
			Environment: containerUse{"container_reference", e.run.container.ID},
		}
		at := e.add(item)
		for i, command := range in.Commands {
			to := []any{"output_index", at, "command_index", i}
			e.emit("response.shell_call_command.added", append(to, "command", "")...)
			e.emit("response.shell_call_command.delta", append(to, "delta", command)...)
			e.emit("response.shell_call_command.done", append(to, "command", command)...)
		}
		item.Action, item.Status = in, statusCompleted
		e.done(at)
	}
}

// codeOf returns the arguments of a call with a program, empty if they have the wrong types.
func codeOf(call *agent.Call) *codeArguments {
	in, err := decodeArguments[codeArguments](call)
	if err != nil {
		return &codeArguments{}
	}
	return in
}

// result completes the item of a call, or adds the item of its result. A call that an earlier
// response has left gets an item of its own.
func (e *encoder) result(v *agent.Event) {
	call := v.Call
	at, known := e.open[call.ID]
	if !known && call.Name != shellName {
		e.call(v)
		at = e.open[call.ID]
	}
	delete(e.open, call.ID)
	switch value := v.Outcome.Value.(type) {
	case *interpreted:
		item := e.response.Output[at].(*interpreterItem) //nolint:forcetypeassert // the item of this tool
		item.Status = value.status
		if e.run.outputs {
			item.Outputs = []logsOutput{{"logs", value.logs}}
		}
		for _, p := range value.paths {
			if !slices.Contains(e.paths, p) {
				e.paths = append(e.paths, p)
			}
		}
		e.emit("response.code_interpreter_call.completed", "item_id", item.ID, "output_index", at)
		e.done(at)
	case []sandboxResult:
		item := e.response.Output[at].(*sandboxItem) //nolint:forcetypeassert // the item of this tool
		item.Status, item.Results = value[0].Status, value
		e.done(at)
	case *shelled:
		item := &shellOutputItem{ID: "sho_" + newID(), Type: "shell_call_output", CallID: call.ID, Status: statusInProgress, Output: []shellOutput{}}
		at = e.add(item)
		item.Status, item.Output = value.status, value.output
		for i, out := range value.output {
			to := []any{"item_id", item.ID, "output_index", at, "command_index", i}
			e.emit("response.shell_call_output_content.delta", append(to, "delta", map[string]string{"stdout": out.Stdout, "stderr": out.Stderr})...)
			e.emit("response.shell_call_output_content.done", append(to, "output", []shellOutput{out})...)
		}
		e.done(at)
	}
}
