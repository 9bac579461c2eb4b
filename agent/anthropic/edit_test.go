package anthropic_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"strings"
	"testing"

	"github.com/bullpen-run/bullpen/agent"
	"github.com/bullpen-run/bullpen/agent/agenttest"
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

var (
	errKilled    = errors.New("this process is gone")
	errOvertaken = errors.New("another process has appended to the log")
)

// process is one process that carries out the run.
type process struct {
	*editRun
	appended int // the length of the log as this process knows it
}

// Append implements [agent.Log].
func (r *process) Append(_ context.Context, e agent.Event) error {
	if r.appended != len(r.log) {
		return errOvertaken
	}
	if r.dies != nil && r.dies(&e, false) {
		return errKilled
	}
	message, err := json.Marshal(e)
	if err != nil {
		return err
	}
	r.appended++
	if r.log = append(r.log, message); r.dies != nil && r.dies(&e, true) {
		return errKilled
	}
	return nil
}

// growing are edits that cannot be applied twice: the second time, the first one finds the file, the next one adds
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
		`{"model":"m","max_tokens":99,"tools":[{"type":"code_execution_20250825","name":"code_execution"}],` +
			`"messages":[{"role":"user","content":"x"}]}`,
	)}
	return r
}

// carryOut carries out the run in one process, from what the log has.
func (r *editRun) carryOut() error { return r.carryOutOn(r.host) }

func (r *editRun) carryOutOn(host agent.Host) error {
	r.t.Helper()
	run, start, err := r.routes.Prepare(r.t.Context(), host, r.record, r.started)
	if err != nil {
		r.t.Fatal(err)
	}
	r.started = start
	run.History = r.events()
	return agent.Continue(r.t.Context(), r.routes.Upstream, run, &process{r, len(r.log)})
}

// interrupted is a host of a process in which something happens before each write of an edit, counted
// from 1. The write fails if that returns an error.
type interrupted struct {
	*agenttest.Host
	before func(write int) error
	writes int
}

// ReplaceFile implements [agent.Host].
func (h *interrupted) ReplaceFile(ctx context.Context, thread, path, tag string, size int64, body io.Reader) error {
	h.writes++
	if err := h.before(h.writes); err != nil {
		return err
	}
	return h.Host.ReplaceFile(ctx, thread, path, tag, size, body)
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
	return strings.Join(list, "\n") + fmt.Sprintf("\n%d files: %q, %q", len(r.host.Homes), r.file("a.txt"),
		r.file("b/c.txt"))
}

func (r *editRun) file(name string) string { return string(r.host.Homes[r.started.Container+"/"+name]) }

// Edits of a run whose processes are killed, before or after they have stored any event, are applied once.
func TestEditsAreAppliedOnce(t *testing.T) {
	plain := newEditRun(t, growing)
	if err := plain.carryOut(); err != nil {
		t.Fatal(err)
	}
	want := plain.outcome()
	for _, part := range []string{
		`7:{"type":"text_editor_code_execution_create_result","is_file_update":false}`, `"lines":["-x","+xy"]`,
		"old_str occurs 0 times", `"is_file_update":true`,
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

// A process that is frozen before a write, while another one carries the run to its end, changes nothing
// afterwards.
func TestEditsOfFrozenProcess(t *testing.T) {
	plain := newEditRun(t, growing)
	if err := plain.carryOut(); err != nil {
		t.Fatal(err)
	}
	for frozen := range len(plain.host.Puts) {
		r := newEditRun(t, growing)
		err := r.carryOutOn(&interrupted{Host: r.host, before: func(write int) error {
			if write == frozen+1 {
				return r.carryOut()
			}
			return nil
		}})
		if got, want := r.outcome(), plain.outcome(); got != want || !errors.Is(err, errOvertaken) {
			t.Errorf("frozen before write %d: %v\n%s\nwant\n%s", frozen+1, err, got, want)
		}
		if len(r.host.Puts) != len(plain.host.Puts) {
			t.Errorf("frozen before write %d: %q were stored; without that %q", frozen+1, r.host.Puts, plain.host.Puts)
		}
	}
}

const (
	replaceX = `{rules: [{role: user, calls: [{name: text_editor_code_execution, arguments: {command: str_replace, ` +
		`path: a.txt, old_str: x, new_str: xy}}]}, {text: ok}]}`
	createX = `{rules: [{role: user, calls: [{name: text_editor_code_execution, arguments: {command: create, path: ` +
		`a.txt, file_text: x}}]}, {text: ok}]}`
	failed = `"error_code":"invalid_tool_input","error_message":"the file was changed by somebody else during this ` +
		`call; view it before you try again"`
)

// newEditOfOne returns a run with one edit of a.txt. With replaceX the file has the text x.
func newEditOfOne(t *testing.T, rules string) *editRun {
	t.Helper()
	r := newEditRun(t, rules)
	r.started = &agent.Start{Container: "container_1"}
	if rules == replaceX {
		r.host.Homes["container_1/a.txt"] = []byte("x")
	}
	return r
}

// A file that changes, appears or goes between the check and the write of an edit stays as it is.
func TestFileChangesBeforeWrite(t *testing.T) {
	for _, rules := range []string{replaceX, createX} {
		for _, text := range []string{"somebody else's x", ""} {
			r := newEditOfOne(t, rules)
			puts := len(r.host.Puts)
			err := r.carryOutOn(&interrupted{Host: r.host, before: func(int) error {
				if r.host.Homes["container_1/a.txt"] = []byte(text); text == "" && rules == replaceX {
					return r.host.DeleteFile(t.Context(), "container_1", "a.txt")
				}
				return nil
			}})
			if got := r.outcome(); err != nil || !strings.Contains(got, failed) || r.file("a.txt") != text ||
				len(r.host.Puts) != puts {
				t.Errorf("%v: %s", err, got)
			}
		}
	}
}

// The text of a file decides whether somebody else has changed it, and not how it is stored.
func TestFileIsStoredAnew(t *testing.T) {
	for _, always := range []bool{false, true} {
		r := newEditOfOne(t, replaceX)
		host := &interrupted{Host: r.host, before: func(write int) error {
			if write == 1 || always {
				return &proto.FileChangedError{}
			}
			return nil
		}}
		if err := r.carryOutOn(host); err != nil {
			t.Fatal(err)
		}
		got := r.outcome()
		if !always && (!strings.Contains(got, `"lines":["-x","+xy"]`) || r.file("a.txt") != "xy" || host.writes != 2) {
			t.Errorf("stored anew once: %d writes, %s", host.writes, got)
		}
		if always && (!strings.Contains(got, failed) || r.file("a.txt") != "x") {
			t.Errorf("stored anew before each write: %s", got)
		}
	}
}

// A file that has its old text again after a crash looks as if it was never edited, so it is edited
// again.
func TestFileHasItsOldTextAgain(t *testing.T) {
	r := newEditOfOne(t, replaceX)
	r.dies = func(e *agent.Event, _ bool) bool { return e.Kind == agent.EventResult }
	if err := r.carryOut(); !errors.Is(err, errKilled) || r.file("a.txt") != "xy" {
		t.Fatalf("%v: %q", err, r.file("a.txt"))
	}
	r.host.Homes["container_1/a.txt"], r.dies = []byte("x"), nil
	if err := r.carryOut(); err != nil || r.file("a.txt") != "xy" {
		t.Errorf("%v: %s", err, r.outcome())
	}
	// The first process is frozen, while the second one edits the file and restores its old text.
	r = newEditOfOne(t, strings.Replace(replaceX, "}}]}",
		"}}, {name: text_editor_code_execution, arguments: {command: create, path: a.txt, file_text: x}}]}", 1))
	r.host.Homes["container_1/a.txt"] = []byte("x")
	err := r.carryOutOn(&interrupted{Host: r.host, before: func(int) error { return r.carryOut() }})
	if !errors.Is(err, errOvertaken) || r.file("a.txt") != "xy" {
		t.Errorf("%v: %s", err, r.outcome())
	}
}

// An edit of a file that somebody else changes during the call is not applied, or not applied again. The
// result for the model says so.
func TestEditsOfFilesThatOthersChange(t *testing.T) {
	for _, rules := range []string{replaceX, createX} {
		for _, killed := range []string{"never", "before the write", "after the write"} {
			r := newEditOfOne(t, rules)
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
	for _, part := range []string{
		"3:{", "the file has 1048577 bytes", "4:{", "the text has 1048577 bytes",
		`5:{"type":"text_editor_code_execution_create_result","is_file_update":true}`, `"x", ""`,
	} {
		if !strings.Contains(got, part) {
			t.Errorf("no %s in\n%s", part, got)
		}
	}
	if len(r.host.Puts) != 1 {
		t.Errorf("%d files were stored", len(r.host.Puts))
	}
}
