package responses

import (
	"context"
	"encoding/json"
	"fmt"
	"path"
	"slices"
	"strings"
	"time"
	"unicode/utf8"

	"github.com/bullpen-run/bullpen/agent"
	"github.com/bullpen-run/bullpen/proto/api"
)

// event is an event of a stream, without its number.
type event = map[string]any

// encoder makes the response, and the events of its stream.
type encoder struct {
	vendor    vendor
	response  *response
	container string          // the id of the container
	outputs   bool            // of the code interpreter are shown
	forModel  bool            // which has no use for pictures of earlier responses
	encrypted bool            // reasoning has what the model needs back
	custom    map[string]bool // names of custom tools
	codex     bool            // the client is Codex
	// send, if not nil, is called with each event.
	send func(e event) error
	err  error // of send; nothing is sent after it

	at   time.Time // of what is encoded
	ids  int       // of items that were made
	next int       // number of the next event
	// The last item, while it is not complete: its text, thinking or arguments are partial.
	text    *messageItem
	thought *reasoningItem
	client  any // a call of the client's tool
	partial strings.Builder
	input   inputReader    // of a custom tool
	open    map[string]int // the items of calls that have no result, by the ids of the calls
	results int
	paths   []string // of files that no message has cited
}

// newEncoder returns the encoder for the response to a request, with the run's id and time.
func newEncoder(v vendor, id string, created time.Time, req *request) *encoder {
	return &encoder{
		vendor: v, response: newResponse(v, id, created, req), outputs: slices.Contains(req.Include, includeOutputs),
		encrypted: slices.Contains(req.Include, includeReasoning) || !req.stored(),
		custom:    req.customTools(), codex: req.codex,
		at: created, open: map[string]int{},
	}
}

// itemID returns the id of the next item. Replaying a run's log yields the same ids.
func (e *encoder) itemID(prefix string) string {
	e.ids++
	return fmt.Sprintf("%s%s_%d", prefix, strings.TrimPrefix(e.response.ID, responsePrefix), e.ids)
}

// entry encodes an entry of a stored log.
func (e *encoder) entry(ctx context.Context, v *agent.Entry) error {
	switch e.at = v.At; {
	case v.Started != nil:
		e.start(v.Started.Container)
	case v.Event != nil:
		return e.Append(ctx, *v.Event)
	case v.Failed != nil:
		e.fail(v.Failed)
	case v.Cancelled:
		e.close()
		e.response.Status = statusCancelled
		e.emit("response.cancelled", "response", e.response)
	}
	return e.err
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
	if e.emit("response.created", "response", e.response); e.response.Status == statusQueued && e.vendor == openAI {
		e.emit("response.queued", "response", e.response)
	}
}

// start begins the output of a run whose calls use a container.
func (e *encoder) start(container string) {
	e.container, e.response.Status = container, statusInProgress
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
	case agent.EventThinking:
		if e.vendor == openAI {
			e.appendThought(v.Text)
		}
	case agent.EventThought:
		if e.vendor == openAI {
			e.endThought(v.Thought)
		}
	case agent.EventCallPart:
		e.callPart(v.Call, v.Text)
	case agent.EventTurn, agent.EventChange: // which this side's clients do not read
	case agent.EventEnd:
		if e.client != nil { // it was cut off
			e.endCall(statusIncomplete)
		}
		e.response.end(e.vendor, v.End, e.at)
		kind := "response.completed"
		if e.response.Status == statusIncomplete && e.vendor == openAI && !e.codex {
			kind = "response.incomplete" // Perplexity's clients know no such event
		}
		e.emit(kind, "response", e.response)
	}
	return e.err
}

// close ends the items that are not complete.
func (e *encoder) close() {
	if e.text != nil {
		if e.text.Status, e.text.Content = statusIncomplete,
			[]outputText{e.newText(e.partial.String())}; e.vendor == perplexity {
			e.text.Status = statusFailed // its items have no status for a part
		}
	}
	if e.thought != nil {
		e.thought.Status = statusIncomplete
	}
	switch item := e.client.(type) {
	case *functionItem:
		item.Status = statusIncomplete
	case *customItem:
		item.Status = statusIncomplete
	}
	for _, at := range e.open {
		switch item := e.response.Output[at].(type) {
		case *interpreterItem:
			item.Status = statusIncomplete
		case *sandboxItem:
			item.Status = statusFailed
		}
	}
}

// fail ends the response with an error.
func (e *encoder) fail(known *api.Error) {
	e.close()
	_, d := detailOf(known)
	code := "server_error"
	if d.Code != nil {
		code = *d.Code
	}
	e.response.Status, e.response.Error = statusFailed, &responseError{code, d.Message, d.Type}
	e.emit("response.failed", "response", e.response, "error", e.response.Error)
}

func (e *encoder) newText(text string) outputText {
	t := outputText{Type: "output_text", Text: text, Annotations: []fileCitation{}}
	if e.vendor == openAI {
		t.Logprobs = []json.RawMessage{}
	}
	return t
}

func (e *encoder) appendText(text string) {
	if e.text == nil {
		e.text = &messageItem{
			ID: e.itemID("msg_"), Type: "message", Role: "assistant", Status: statusInProgress,
			Content: []outputText{},
		}
		at := e.add(e.text)
		if e.vendor == openAI {
			e.emit("response.content_part.added", "item_id", e.text.ID, "output_index", at, "content_index", 0, "part",
				e.newText(""))
		}
	}
	e.partial.WriteString(text)
	e.emit("response.output_text.delta", "item_id", e.text.ID, "output_index", len(e.response.Output)-1, "content_index",
		0, "delta", text, "logprobs", []any{})
}

func (e *encoder) endText(text string) {
	if e.text == nil { // the log has the whole text only
		e.appendText(text)
	}
	item, at, part := e.text, len(e.response.Output)-1, e.newText(text)
	part.Annotations = e.citations(text)
	item.Status, item.Content = statusCompleted, []outputText{part}
	e.text = nil
	e.partial.Reset()
	e.emit("response.output_text.done", "item_id", item.ID, "output_index", at, "content_index", 0, "text", text,
		"logprobs", []any{})
	if e.vendor == openAI {
		for i, a := range part.Annotations {
			e.emit("response.output_text.annotation.added", "item_id", item.ID, "output_index", at, "content_index", 0,
				"annotation_index", i, "annotation", a)
		}
		e.emit("response.content_part.done", "item_id", item.ID, "output_index", at, "content_index", 0, "part", part)
	}
	e.done(at)
}

// citations returns the citations of the files passed to the client since the last message. They
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
			"container_file_citation", e.container, fileID(p), name, utf8.RuneCountInString(text[:start]),
			utf8.RuneCountInString(text[:end]),
		})
	}
	e.paths = nil
	return list
}

// appendThought adds to what the model thinks. Clients show it as its summary.
func (e *encoder) appendThought(text string) {
	if e.thought == nil {
		e.beginThought()
		e.emit("response.reasoning_summary_part.added", e.summary("part", summaryText{Type: "summary_text"})...)
	}
	e.partial.WriteString(text)
	e.emit("response.reasoning_summary_text.delta", e.summary("delta", text)...)
}

func (e *encoder) beginThought() {
	e.thought = &reasoningItem{
		ID: e.itemID("rs_"), Type: "reasoning", Summary: []summaryText{}, Status: statusInProgress,
	}
	e.add(e.thought)
}

// summary returns the members of an event of the summary.
func (e *encoder) summary(name string, value any) []any {
	return []any{
		"item_id", e.thought.ID, "output_index", len(e.response.Output) - 1, "summary_index", 0, name, value,
	}
}

func (e *encoder) endThought(thought *agent.Thinking) {
	switch {
	case e.thought != nil:
	case thought.Text == "": // it is redacted
		e.beginThought()
	default: // the log has the whole text only
		e.appendThought(thought.Text)
	}
	item := e.thought
	if e.partial.Len() > 0 {
		part := summaryText{"summary_text", e.partial.String()}
		item.Summary = append(item.Summary, part)
		e.emit("response.reasoning_summary_text.done", e.summary("text", part.Text)...)
		e.emit("response.reasoning_summary_part.done", e.summary("part", part)...)
	}
	if item.Status = statusCompleted; e.encrypted {
		item.Encrypted = encodeThought(thought)
	}
	e.thought = nil
	e.partial.Reset()
	e.done(len(e.response.Output) - 1)
}

// callPart adds to the arguments of a call of the client's tool.
func (e *encoder) callPart(call *agent.Call, arguments string) {
	if e.client == nil {
		if e.custom[call.Name] {
			e.client = &customItem{
				ID: e.itemID("ctc_"), Type: "custom_tool_call", CallID: call.ID, Name: call.Name, Status: statusInProgress,
			}
		} else {
			e.client = &functionItem{
				ID: e.itemID("fc_"), Type: "function_call", CallID: call.ID, Name: call.Name, Status: statusInProgress,
			}
		}
		e.input = inputReader{}
		e.add(e.client)
	}
	e.partial.WriteString(arguments)
	at := len(e.response.Output) - 1
	switch item := e.client.(type) {
	case *customItem:
		if text := e.input.add(arguments); text != "" {
			e.emit("response.custom_tool_call_input.delta", "item_id", item.ID, "output_index", at, "delta", text)
		}
	case *functionItem:
		if arguments != "" && e.vendor == openAI {
			e.emit("response.function_call_arguments.delta", "item_id", item.ID, "output_index", at, "delta", arguments)
		}
	}
}

// endCall ends the call of the client's tool.
func (e *encoder) endCall(status string) {
	at := len(e.response.Output) - 1
	switch item := e.client.(type) {
	case *customItem:
		item.Input, item.Status = inputOf(e.partial.String()), status
		e.emit("response.custom_tool_call_input.done", "item_id", item.ID, "output_index", at, "input", item.Input)
	case *functionItem:
		item.Arguments, item.Status = e.partial.String(), status
		if e.vendor == openAI {
			e.emit("response.function_call_arguments.done", "item_id", item.ID, "output_index", at, "name", item.Name,
				"arguments", item.Arguments)
		}
	}
	e.client = nil
	e.partial.Reset()
	e.done(at)
}

// call adds the item of a call, or completes it.
func (e *encoder) call(v *agent.Event) {
	call := v.Call
	if !v.Server {
		if e.client == nil || e.partial.Len() == 0 { // a tool without parameters may have no parts
			e.callPart(call, string(call.Arguments))
		}
		e.endCall(statusCompleted)
		return
	}
	switch call.Name {
	case interpreterName:
		item := &interpreterItem{
			ID: call.ID, Type: "code_interpreter_call", Status: statusInProgress, Code: new(""),
			ContainerID: e.container,
		}
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
			ID: e.itemID("sbx_"), Type: "sandbox_results", CallID: call.ID, ContainerID: e.container,
			Language: shownLanguage(in.Language), Code: in.Code,
			Status: statusInProgress, Results: []sandboxResult{},
		})
	case shellName:
		in, err := decodeArguments[shellArguments](call)
		if err != nil || in.Commands == nil {
			in = &shellArguments{Commands: []string{}}
		}
		item := &shellItem{
			ID: e.itemID("sh_"), Type: "shell_call", CallID: call.ID, Status: statusInProgress,
			Action:      &shellArguments{Commands: []string{}},
			Environment: containerUse{"container_reference", e.container},
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

// imagesOf returns the outputs of a code interpreter that are pictures.
func imagesOf(pictures []agent.Image) (list []interpreterOutput) {
	for _, p := range pictures {
		list = append(list, interpreterOutput{Type: "image", URL: "data:" + p.MediaType + ";base64," + p.Base64})
	}
	return list
}

// codeOf returns a call's arguments with a program, empty if they have the wrong types.
func codeOf(call *agent.Call) *codeArguments {
	in, err := decodeArguments[codeArguments](call)
	if err != nil {
		return &codeArguments{}
	}
	return in
}

// shownLanguage returns the language of a sandbox item, which always has one, even if the model
// named none that the sandbox has.
func shownLanguage(name string) string {
	if name != "bash" {
		return "python"
	}
	return name
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
	switch call.Name {
	case interpreterName:
		value := valueOf[interpreted](v.Outcome)
		item := e.response.Output[at].(*interpreterItem) //nolint:forcetypeassert // the item of this tool
		item.Status = value.Status
		if e.outputs {
			item.Outputs = []interpreterOutput{{Type: "logs", Logs: &value.Logs}}
			if !e.forModel {
				item.Outputs = append(item.Outputs, imagesOf(v.Outcome.Pictures)...)
			}
		}
		for _, p := range value.Paths {
			if !slices.Contains(e.paths, p) {
				e.paths = append(e.paths, p)
			}
		}
		e.emit("response.code_interpreter_call.completed", "item_id", item.ID, "output_index", at)
		e.done(at)
	case sandboxName:
		item := e.response.Output[at].(*sandboxItem) //nolint:forcetypeassert // the item of this tool
		item.Results = *valueOf[[]sandboxResult](v.Outcome)
		item.Status = item.Results[0].Status
		e.done(at)
	case shellName:
		value := valueOf[shelled](v.Outcome)
		item := &shellOutputItem{
			ID: e.itemID("sho_"), Type: "shell_call_output", CallID: call.ID, Status: statusInProgress,
			Output: []shellOutput{},
		}
		at = e.add(item)
		item.Status, item.Output = value.Status, value.Output
		for i, out := range value.Output {
			to := []any{"item_id", item.ID, "output_index", at, "command_index", i}
			e.emit("response.shell_call_output_content.delta",
				append(to, "delta", map[string]string{"stdout": out.Stdout, "stderr": out.Stderr})...)
			e.emit("response.shell_call_output_content.done", append(to, "output", []shellOutput{out})...)
		}
		e.done(at)
	}
}
