package anthropic_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"strings"
	"testing"

	"github.com/bullpen-run/bullpen/agent"
	"github.com/bullpen-run/bullpen/proto"
)

// editRun is a message in the background, whose process can be killed at any event of its log.
type editRun struct {
	*world
	record  *proto.AgentRun
	started *agent.Start
	log     [][]byte // the events, as they are stored
	// dies, if not nil, is called with each event before it is stored, and again after that. The process
	// dies if it returns true.
	dies func(e *agent.Event, stored bool) bool
}

var errKilled = errors.New("this process is gone")

// Append implements [agent.Log].
func (r *editRun) Append(_ context.Context, e agent.Event) error {
	if r.dies != nil && r.dies(&e, false) {
		return errKilled
	}
	message, err := json.Marshal(e)
	if err != nil {
		return err
	}
	if r.log = append(r.log, message); r.dies != nil && r.dies(&e, true) {
		return errKilled
	}
	return nil
}

// growing are edits that cannot be made twice: the second time, the first one finds the file, the next one adds
// more, and the others have nothing to replace.
const growing = `{rules: [{role: user, calls: [
	{name: text_editor_code_execution, arguments: {command: create, path: a.txt, file_text: "x\n"}},
	{name: text_editor_code_execution, arguments: {command: str_replace, path: a.txt, old_str: x, new_str: xy}},
	{name: text_editor_code_execution, arguments: {command: str_replace, path: a.txt, old_str: xy, new_str: "z<>"}},
	{name: text_editor_code_execution, arguments: {command: str_replace, path: a.txt, old_str: gone, new_str: x}},
	{name: text_editor_code_execution, arguments: {command: create, path: a.txt, file_text: "xxz<>"}},
	{name: text_editor_code_execution, arguments: {command: create, path: b/c.txt, file_text: ""}},
	{name: text_editor_code_execution, arguments: {command: view, path: a.txt}}]}, {text: ok}]}`

func newEditRun(t *testing.T, rules string) *editRun {
	t.Helper()
	r := &editRun{world: newWorld(t, strings.ReplaceAll(rules, "\t", " "))}
	r.record = &proto.AgentRun{Org: "acme", ID: "msg_1", Request: json.RawMessage(
		`{"model":"m","max_tokens":99,"tools":[{"type":"code_execution_20250825","name":"code_execution"}],"messages":[{"role":"user","content":"x"}]}`,
	)}
	return r
}

// carryOut carries out the run in one process, from what the log has.
func (r *editRun) carryOut() error {
	r.t.Helper()
	run, start, err := r.routes.Prepare(r.t.Context(), r.host, r.record, r.started)
	if err != nil {
		r.t.Fatal(err)
	}
	r.started = start
	run.History = r.events()
	return agent.Continue(r.t.Context(), r.routes.Upstream, run, r)
}

func (r *editRun) events() []agent.Event {
	var list []agent.Event
	for _, message := range r.log {
		var e agent.Event
		if err := json.Unmarshal(message, &e); err != nil {
			r.t.Fatal(err)
		}
		list = append(list, e)
	}
	return list
}

// outcome returns the results with their places in the output, the end and the files.
func (r *editRun) outcome() string {
	var list []string
	for _, e := range r.events() {
		switch e.Kind {
		case agent.EventResult:
			list = append(list, fmt.Sprintf("%d:%s", e.Item, e.Outcome.Text))
		case agent.EventEnd:
			list = append(list, fmt.Sprintf("%s after %d calls", e.End.Reason, e.End.Calls))
		case agent.EventText, agent.EventTextEnd, agent.EventTurn, agent.EventCall, agent.EventChange:
		}
	}
	return strings.Join(list, "\n") + fmt.Sprintf("\n%d files: %q, %q", len(r.host.Homes), r.file("a.txt"), r.file("b/c.txt"))
}

func (r *editRun) file(name string) string { return string(r.host.Homes[r.started.Container+"/"+name]) }

// Edits of a run whose processes are killed, before or after they have stored any event, are made once.
func TestEditsAreMadeOnce(t *testing.T) {
	plain := newEditRun(t, growing)
	if err := plain.carryOut(); err != nil {
		t.Fatal(err)
	}
	want := plain.outcome()
	for _, part := range []string{
		`7:{"type":"text_editor_code_execution_create_result","is_file_update":false}`, `"lines":["-x","+xy"]`, "old_str occurs 0 times", `"is_file_update":true`,
		`"content":"xxz\u003c\u003e"`, "\ndone after 7 calls\n", `2 files: "xxz<>", ""`,
	} {
		if !strings.Contains(want, part) {
			t.Fatalf("no %s in\n%s", part, want)
		}
	}
	check := func(t *testing.T, r *editRun) {
		t.Helper()
		if got := r.outcome(); got != want {
			t.Errorf("got\n%s\nwant\n%s", got, want)
		}
		if len(r.host.Puts) != len(plain.host.Puts) {
			t.Errorf("%q were stored; without a crash %q", r.host.Puts, plain.host.Puts)
		}
	}
	for at := range plain.log {
		for _, after := range []bool{false, true} {
			r := newEditRun(t, growing)
			r.dies = func(_ *agent.Event, stored bool) bool {
				if after {
					return stored && len(r.log) == at+1
				}
				return len(r.log) == at
			}
			if err := r.carryOut(); !errors.Is(err, errKilled) {
				t.Fatalf("%d %t: %v", at, after, err)
			}
			if r.dies = nil; !after || at < len(plain.log)-1 { // otherwise its end is stored
				if err := r.carryOut(); err != nil {
					t.Fatalf("%d %t: %v", at, after, err)
				}
			}
			check(t, r)
		}
	}
	// No process comes further than to the write of one edit, or than to its plan.
	for _, fatal := range []func(e *agent.Event, stored bool) bool{
		func(e *agent.Event, stored bool) bool { return e.Kind == agent.EventResult && !stored },
		func(e *agent.Event, stored bool) bool { return e.Kind == agent.EventChange && stored },
	} {
		r := newEditRun(t, growing)
		died := map[int]int{} // by the number of events
		r.dies = func(e *agent.Event, stored bool) bool {
			died[len(r.log)]++
			return fatal(e, stored) && died[len(r.log)] < 4
		}
		processes, err := 1, r.carryOut()
		for ; errors.Is(err, errKilled); processes++ {
			err = r.carryOut()
		}
		if check(t, r); err != nil || processes < 6 {
			t.Errorf("%v after %d processes", err, processes)
		}
	}
}

// An edit of a file that somebody else changes during the call is not made, or not made again. The model
// is told so.
func TestEditsOfFilesThatOthersChange(t *testing.T) {
	const failed = `"error_code":"invalid_tool_input","error_message":"the file was changed by somebody else during this call; view it before you try again"`
	for _, rules := range []string{
		`{rules: [{role: user, calls: [{name: text_editor_code_execution, arguments: {command: str_replace, path: a.txt, old_str: x, new_str: xy}}]}, {text: ok}]}`,
		`{rules: [{role: user, calls: [{name: text_editor_code_execution, arguments: {command: create, path: a.txt, file_text: x}}]}, {text: ok}]}`,
	} {
		for _, killed := range []string{"never", "before the write", "after the write"} {
			r := newEditRun(t, rules)
			r.started = &agent.Start{Container: "container_1"}
			if strings.Contains(rules, "str_replace") {
				r.host.Homes["container_1/a.txt"] = []byte("x")
			}
			change := func() { r.host.Homes["container_1/a.txt"] = []byte("somebody else's x") }
			r.dies = func(e *agent.Event, stored bool) bool {
				planned := e.Kind == agent.EventChange && stored
				if planned && killed == "never" {
					change()
				}
				return killed == "before the write" && planned || killed == "after the write" && e.Kind == agent.EventResult
			}
			if err := r.carryOut(); errors.Is(err, errKilled) == (killed == "never") || killed == "never" && err != nil {
				t.Fatalf("%s: %v", killed, err)
			}
			if killed != "never" {
				change()
				r.dies = nil
				if err := r.carryOut(); err != nil {
					t.Fatalf("%s: %v", killed, err)
				}
			}
			if got := r.outcome(); !strings.Contains(got, failed) || r.file("a.txt") != "somebody else's x" {
				t.Errorf("killed %s: %s", killed, got)
			}
		}
	}
}

// A file that is too large for the editor can be replaced by a new one, and no edit makes such a file.
func TestEditsOfLargeFiles(t *testing.T) {
	long := strings.Repeat("x", agent.MaxEditBytes+1)
	r := newEditRun(t, `{rules: [{role: user, calls: [
		{name: text_editor_code_execution, arguments: {command: str_replace, path: a.txt, old_str: x, new_str: xy}},
		{name: text_editor_code_execution, arguments: {command: create, path: a.txt, file_text: "`+long+`"}},
		{name: text_editor_code_execution, arguments: {command: create, path: a.txt, file_text: x}}]}, {text: ok}]}`)
	r.started = &agent.Start{Container: "container_1"}
	r.host.Homes["container_1/a.txt"] = []byte(long)
	if err := r.carryOut(); err != nil {
		t.Fatal(err)
	}
	got := r.outcome()
	for _, part := range []string{"3:{", "the file has 1048577 bytes", "4:{", "the text has 1048577 bytes", `5:{"type":"text_editor_code_execution_create_result","is_file_update":true}`, `"x", ""`} {
		if !strings.Contains(got, part) {
			t.Errorf("no %s in\n%s", part, got)
		}
	}
	if len(r.host.Puts) != 1 {
		t.Errorf("%d files were stored", len(r.host.Puts))
	}
}
