package main_test

import (
	"bufio"
	"bytes"
	"encoding/json"
	"fmt"
	"maps"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"

	"github.com/bullpen-run/bullpen/guest/cell"
)

// newContexts returns a sandbox with the runners of cells.
func newContexts(t *testing.T, more map[string]any) *sandbox {
	t.Helper()
	s := prepare(t)
	check(t, os.Mkdir(s.path("cells"), 0o755))
	for name, content := range cell.Files() {
		check(t, os.WriteFile(filepath.Join(s.path("cells"), name), content, 0o644))
	}
	config := map[string]any{"runners": s.path("cells"), "start": 1}
	maps.Copy(config, more)
	s.configUsers(config)
	s.start(s.command())
	return s
}

// contextInfo is a context as the guest describes it.
type contextInfo struct {
	ID, Language, State, Reason, Message, Cwd string
	Runs, Memory                              int64
}

// callJSON sends a request with a JSON body and decodes the answer. It returns the status.
func (s *sandbox) callJSON(method, path string, body, into any, headers ...string) int {
	s.t.Helper()
	var sent bytes.Buffer
	if body != nil {
		check(s.t, json.NewEncoder(&sent).Encode(body))
	}
	code, _, text := s.do(s.request(method, path, &sent, headers...))
	if into != nil {
		if err := json.Unmarshal([]byte(text), into); err != nil {
			s.t.Fatalf("%s %s: %d %s", method, path, code, text)
		}
	}
	return code
}

func (s *sandbox) newContext(language string) string {
	s.t.Helper()
	var c contextInfo
	if code := s.callJSON("POST", "/contexts", map[string]string{"language": language}, &c); code != 201 {
		s.t.Fatalf("create a context: %d %+v", code, c)
	}
	return c.ID
}

// event is an event of a run.
type event struct {
	Type, Text, Name, Value, Status, Message string
	Seq, Run, Count, First, Last             int64
	Data                                     map[string]json.RawMessage
	Result                                   bool
	Truncated                                []string
}

// cellRun reads the events of a run.
type cellRun struct {
	t        *testing.T
	response *http.Response
	lines    *bufio.Reader
	seq      int64
	number   int64 // of the run
}

func (s *sandbox) openRun(r *http.Request) *cellRun {
	s.t.Helper()
	ctx, _ := s.context()
	response, err := s.http.Do(r.WithContext(ctx))
	check(s.t, err)
	s.t.Cleanup(func() { _ = response.Body.Close() })
	if response.StatusCode != http.StatusOK {
		s.t.Fatalf("%s: status %d", r.URL.Path, response.StatusCode)
	}
	return &cellRun{t: s.t, response: response, lines: bufio.NewReader(response.Body)}
}

// beginCell runs a cell with some more fields in the request.
func (s *sandbox) beginCell(id, code string, more ...any) *cellRun {
	s.t.Helper()
	body := map[string]any{"code": code}
	for i := 0; i < len(more); i += 2 {
		body[more[i].(string)] = more[i+1]
	}
	b, err := json.Marshal(body)
	check(s.t, err)
	return s.openRun(s.request("POST", "/contexts/"+id+"/execute", bytes.NewReader(b)))
}

// next returns the next event.
func (r *cellRun) next() event {
	r.t.Helper()
	line, err := r.lines.ReadBytes('\n')
	if err != nil {
		r.t.Fatalf("read an event: %v", err)
	}
	var e event
	check(r.t, json.Unmarshal(line, &e))
	if e.Type == "gap" {
		r.seq = e.Last
	} else if e.Seq != r.seq+1 {
		r.t.Fatalf("event %d comes after %d", e.Seq, r.seq)
	}
	r.seq, r.number = max(r.seq, e.Seq), max(r.number, e.Run)
	return e
}

// until returns the events up to the first one of a type.
func (r *cellRun) until(kind string) (all []event) {
	r.t.Helper()
	for {
		e := r.next()
		all = append(all, e)
		if e.Type == kind {
			return all
		}
	}
}

// shown describes the events of a run in short.
func shown(events []event) string {
	var parts []string
	for _, e := range events {
		part := e.Type
		switch e.Type {
		case "start":
			continue
		case "stdout", "stderr":
			if n := len(parts); n > 0 && strings.HasPrefix(parts[n-1], e.Type+" ") {
				parts[n-1] += e.Text
				continue
			}
			part += " " + e.Text
		case "display":
			for _, kind := range slices.Sorted(func(yield func(string) bool) {
				for k := range e.Data {
					if !yield(k) {
						return
					}
				}
			}) {
				part += " " + kind
			}
			if text, ok := e.Data["text/plain"]; ok {
				part += " " + string(text)
			}
		case "error":
			part += " " + e.Name + ": " + e.Value
		case "end":
			part += fmt.Sprintf(" %s %d", e.Status, e.Count)
		}
		parts = append(parts, part)
	}
	return strings.Join(parts, " | ")
}

func (s *sandbox) cell(id, code string, more ...any) string {
	s.t.Helper()
	return shown(s.beginCell(id, code, more...).until("end"))
}

// TestContexts runs cells in contexts of each language, which keep their state.
func TestContexts(t *testing.T) {
	for language, cells := range map[string][][2]string{
		"python": {
			{"x = 41", "end ok 1"},
			{"print(x + 1)\nx * 2", "stdout 42\n | display text/plain \"82\" | end ok 2"},
			{"1/0", "error ZeroDivisionError: division by zero | end error 3"},
			{"import os; os.environ['HOME']", "display text/plain \"'HOME'\" | end ok 4"},
			{"import sys; print('é', file=sys.stderr)", "stderr é\n | end ok 5"},
		},
		"javascript": {
			{"const x = 41", "end ok 1"},
			{"const x = 42; console.log(x); x * 2", "stdout 42\n | display text/plain \"84\" | end ok 2"},
			{"await Promise.resolve(7)", "display text/plain \"7\" | end ok 3"},
			{"throw new RangeError('no')", "error RangeError: no | end error 4"},
		},
		"bash": {
			{"x=41; cd /tmp", "end ok 1"},
			{"echo $((x + 1)) $PWD", "stdout 42 /tmp\n | end ok 2"},
			{"echo oops >&2", "stderr oops\n | end ok 3"},
		},
	} {
		t.Run(language, func(t *testing.T) {
			s := newContexts(t, nil)
			id := s.newContext(language)
			for _, c := range cells {
				want := strings.ReplaceAll(c[1], "'HOME'", "'"+s.home+"'")
				if got := s.cell(id, c[0]); got != want {
					t.Errorf("%s:\n%s\nwant\n%s", c[0], got, want)
				}
			}
			other := s.newContext(language)
			if got := s.cell(other, map[string]string{
				"python": "x", "javascript": "x", "bash": "echo [$x]",
			}[language]); strings.Contains(got, "4") {
				t.Errorf("another context has the variable: %s", got)
			}
			var info contextInfo
			s.callJSON("GET", "/contexts/"+id, nil, &info)
			if info.State != "idle" || info.Runs != int64(len(cells)) || info.Memory == 0 || info.Cwd != s.home {
				t.Errorf("%+v", info)
			}
		})
	}
}

// TestContextEnv has variables for one run.
func TestContextEnv(t *testing.T) {
	s := newContexts(t, map[string]any{"env": map[string]string{"KEPT": "sandbox"}})
	for language, code := range map[string]string{
		"python":     "import os; print(os.environ.get('KEPT'), os.environ.get('ONCE'))",
		"javascript": "console.log(process.env.KEPT, process.env.ONCE)",
		"bash":       "echo $KEPT $ONCE",
	} {
		id := s.newContext(language)
		env := map[string]string{"KEPT": "run", "ONCE": "é\n'"}
		if got := s.cell(id, code, "env_vars", env); !strings.Contains(got, "run é") {
			t.Errorf("%s: %s", language, got)
		}
		if got := s.cell(id, code); !strings.Contains(got, "sandbox") || strings.Contains(got, "é") {
			t.Errorf("%s, afterwards: %s", language, got)
		}
	}
}

// endless are cells that do not end, with what they print when they run.
var endless = map[string]string{
	"python": "x = 1\nprint('on')\nwhile True: pass", "javascript": "var x = 1; console.log('on'); while (true);",
	"bash": "x=1; echo on; while true; do sleep 0.01; done",
}

// TestInterrupt interrupts cells in each way. The state is kept.
func TestInterrupt(t *testing.T) {
	s := newContexts(t, nil)
	for language, code := range endless {
		id := s.newContext(language)
		ask := map[string]string{"python": "print(x)", "javascript": "console.log(x)", "bash": "echo $x"}[language]
		check := func(what, status string, run *cellRun) {
			t.Helper()
			if got := run.until("end"); got[len(got)-1].Status != status {
				t.Errorf("%s, %s: %s", language, what, shown(got))
			}
			if got := s.cell(id, ask); !strings.Contains(got, "stdout 1") {
				t.Errorf("%s, after %s: %s", language, what, got)
			}
		}
		run := s.beginCell(id, code)
		run.until("stdout")
		s.callJSON("POST", "/contexts/"+id+"/interrupt", nil, nil)
		check("interrupt", "interrupted", run)

		check("timeout", "timeout", s.beginCell(id, code, "timeout", 1))

		run = s.beginCell(id, code, "interrupt_on_close", true)
		run.until("stdout")
		_ = run.response.Body.Close()
		check("leaving", "interrupted", s.openRun(s.request("GET", fmt.Sprintf("/contexts/%s/runs/%d", id, run.number), nil)))

		// Without that, the cell runs on.
		run = s.beginCell(id, code)
		run.until("stdout")
		_ = run.response.Body.Close()
		again := s.openRun(s.request("GET", fmt.Sprintf("/contexts/%s/runs/%d?after=1", id, run.number), nil))
		again.seq = 1
		again.until("stdout")
		var answer struct{ Interrupted bool }
		s.callJSON("POST", "/contexts/"+id+"/interrupt", nil, &answer)
		if !answer.Interrupted {
			t.Error("nothing was interrupted")
		}
		check("reading on", "interrupted", again)
		s.callJSON("POST", "/contexts/"+id+"/interrupt", nil, &answer)
		if answer.Interrupted {
			t.Error("an idle context was interrupted")
		}
	}
}

// TestContextLost ends interpreters in all ways. The next cell is told, until a restart.
func TestContextLost(t *testing.T) {
	s := newContexts(t, nil)
	for _, c := range []struct{ language, code, reason string }{
		{"python", "import os; print(1, flush=True); os._exit(3)", "exited"},
		{"python", "import os, signal; os.kill(os.getpid(), signal.SIGKILL)", "killed"},
		{
			"python", "import signal, time\nsignal.signal(signal.SIGINT, signal.SIG_IGN)\nwhile True: time.sleep(1)",
			"not_interruptible",
		},
		{"javascript", "process.exit(3)", "exited"},
		{"bash", "exit 3", "exited"},
		{"bash", "kill -9 $$", "killed"},
	} {
		id := s.newContext(c.language)
		run := s.beginCell(id, c.code, "timeout", 1)
		// Another cell has the same interpreter in mind, whether it waits or comes too late.
		code, _, waited := s.do(s.request("POST", "/contexts/"+id+"/execute", strings.NewReader(`{"code":"1"}`)))
		end := run.until("end")
		if last := end[len(end)-1]; last.Status != "lost" || !strings.Contains(last.Message, c.reason) {
			t.Errorf("%s: %s: %+v", c.language, c.code, last)
		}
		if code != http.StatusGone && !strings.Contains(waited, `"status":"lost"`) {
			t.Errorf("a waiting cell: %d %s", code, waited)
		}
		var refused struct{ Error, Message string }
		if code := s.callJSON("POST", "/contexts/"+id+"/execute", map[string]string{"code": "1"}, &refused); code != 410 ||
			refused.Error != "context_lost" || !strings.Contains(refused.Message, c.reason) {
			t.Errorf("%d %+v", code, refused)
		}
		var info contextInfo
		if s.callJSON("GET", "/contexts/"+id, nil, &info); info.State != "lost" || info.Reason != c.reason {
			t.Errorf("%+v", info)
		}
		if code := s.callJSON("POST", "/contexts/"+id+"/restart", nil, &info); code != 200 || info.State != "idle" {
			t.Errorf("%d %+v", code, info)
		}
		if got := s.cell(id, "echo"); !strings.Contains(got, "end") || strings.Contains(got, "lost") {
			t.Errorf("after the restart: %s", got)
		}
	}
	// A context of an earlier start of the sandbox.
	if code := s.callJSON("GET", "/contexts/python-0-aaaaaaaaaaaaaaaa", nil, nil); code != 404 {
		t.Errorf("status %d", code)
	}
}

// TestEarlierStart asks for contexts from before a pause.
func TestEarlierStart(t *testing.T) {
	s := newContexts(t, map[string]any{"start": 3})
	const id = "python-2-aaaaaaaaaaaaaaaa"
	var refused struct{ Error, Message string }
	if code := s.callJSON("POST", "/contexts/"+id+"/execute", map[string]string{"code": "1"}, &refused); code != 410 ||
		!strings.Contains(refused.Message, "restart the context") {
		t.Errorf("%d %+v", code, refused)
	}
	if code := s.callJSON("DELETE", "/contexts/python-3-aaaaaaaaaaaaaaaa", nil, nil); code != 404 {
		t.Errorf("status %d", code)
	}
	if code := s.callJSON("POST", "/contexts/"+id+"/restart", nil, nil); code != 200 {
		t.Errorf("status %d", code)
	}
	if got := s.cell(id, "1 + 1"); got != `display text/plain "2" | end ok 1` {
		t.Error(got)
	}
}

// TestContextQueue sends many cells at once. They run one after another, in the order of their requests.
func TestContextQueue(t *testing.T) {
	s := newContexts(t, nil)
	id := s.newContext("python")
	s.cell(id, "running, most, order = 0, 0, []")
	var runs []*cellRun
	for i := range 20 {
		runs = append(runs, s.beginCell(id, fmt.Sprintf(
			"running += 1; most = max(most, running); order.append(%d)\nimport time; time.sleep(0.01)\nrunning -= 1", i)))
	}
	var ended sync.WaitGroup
	for _, r := range runs {
		ended.Go(func() {
			if got := shown(r.until("end")); !strings.HasPrefix(got, "end ok") {
				t.Error(got)
			}
		})
	}
	ended.Wait()
	if got := s.cell(id, "most, order == list(range(20))"); !strings.Contains(got, "(1, True)") {
		t.Error(got)
	}
}

// TestContextDelete runs exit handlers, and leaves no process.
func TestContextDelete(t *testing.T) {
	s := newContexts(t, nil)
	id := s.newContext("python")
	s.cell(id, "import atexit, subprocess\natexit.register(lambda: open('left', 'w').write('x'))\n"+
		"p = subprocess.Popen(['setsid', 'sleep', '1000'])")
	pids := s.cell(id, "import os; print(os.getpid(), p.pid)")
	if code := s.callJSON("DELETE", "/contexts/"+id, nil, nil); code != 204 {
		t.Errorf("status %d", code)
	}
	if _, _, body := s.download("", "left"); body != "x" {
		t.Error("the exit handler has not run")
	}
	for _, pid := range strings.Fields(strings.TrimPrefix(pids, "stdout "))[:2] {
		if alive(t, pid) {
			t.Errorf("process %s is alive", pid)
		}
	}
	if code := s.callJSON("GET", "/contexts/"+id, nil, nil); code != 404 {
		t.Errorf("status %d", code)
	}
}

// TestParentKilled kills what forks contexts. They are lost, and new ones can be created.
func TestParentKilled(t *testing.T) {
	s := newContexts(t, nil)
	id := s.newContext("python")
	got := s.cell(id, "import os; print(os.getppid())")
	parent, _ := strconv.Atoi(strings.Fields(got)[1])
	if parent < 2 {
		t.Fatal(got)
	}
	run := s.beginCell(id, fmt.Sprintf("import os, signal, time\nos.kill(%d, signal.SIGKILL)\ntime.sleep(1000)", parent))
	if end := run.until("end"); end[len(end)-1].Status != "lost" {
		t.Error(shown(end))
	}
	if got := s.cell(s.newContext("python"), "1"); !strings.Contains(got, "end ok 1") {
		t.Error(got)
	}
}

// TestFlood prints much while the client reads nothing, and then everything. What the guest keeps is limited.
func TestFlood(t *testing.T) {
	s := newContexts(t, nil)
	id := s.newContext("python")
	run := s.beginCell(id, "for i in range(300_000): print('0123456789012345678901234567890123456789')")
	other := s.newContext("python")
	// Nobody reads these: the oldest events are dropped.
	left := s.beginCell(other, "for i in range(300_000): print('0123456789012345678901234567890123456789')")
	_ = left.response.Body.Close()
	bytes := 0
	for _, e := range run.until("end") {
		if e.Type == "gap" {
			t.Error("a reader has missed events")
		}
		bytes += len(e.Text)
	}
	if bytes != 300_000*41 {
		t.Errorf("%d bytes", bytes)
	}
	again := s.openRun(s.request("GET", "/contexts/"+other+"/runs/1", nil))
	events := again.until("end")
	if events[0].Type != "gap" {
		t.Errorf("the first event is %s", events[0].Type)
	}
	if kib := s.memory(); kib > 60<<10 {
		t.Errorf("the guest has %d KiB of memory", kib)
	}
}

// TestForgedFrames has a program that writes frames itself, unfinished and too large ones, too.
func TestForgedFrames(t *testing.T) {
	s := newContexts(t, nil)
	id := s.newContext("python")
	const forge = `
import os, gc, re
nonces = {m for o in gc.get_objects() for m in re.findall(r"\b[a-z0-9]{32}\b", repr(o)[:2000]) if type(o) in (dict, str)}
for o in gc.get_objects():
    n = getattr(o, "nonce", None)
    if isinstance(n, (str, bytes)): nonce = n if isinstance(n, bytes) else n.encode()
`
	if got := s.cell(id, forge+"print(len(nonce))"); !strings.Contains(got, "stdout 32") {
		t.Fatal(got)
	}
	for what, code := range map[string]string{
		"unfinished":      `os.write(1, b"\x1b_" + nonce + b";1;" + b"x" * 4000 + b"\x1b\\")`,
		"without an end":  `os.write(1, b"\x1b_" + nonce + b";0;" + b"x" * 100)`,
		"no JSON":         `os.write(1, b"\x1b_" + nonce + b";0;{\x1b\\")`,
		"unknown type":    `os.write(1, b"\x1b_" + nonce + b';0;{"type":"x"}\x1b\\')`,
		"a wrong number":  `os.write(1, b"\x1b_" + nonce + b';0;{"type":"end","run":99,"sync":1}\x1b\\')`,
		"sync from afar":  `os.write(1, b"\x1b_" + nonce + b';0;{"type":"display","sync":99999,"data":{}}\x1b\\')`,
		"another's nonce": `os.write(1, b"\x1b_" + b"0" * 32 + b';0;{"type":"end"}\x1b\\')`,
		"too large":       `[os.write(1, b"\x1b_" + nonce + b";1;" + b"x" * 4000 + b"\x1b\\") for _ in range(3000)]; None`,
	} {
		if got := s.cell(id, code); !strings.Contains(got, "end ok") {
			t.Errorf("%s: %s", what, got)
		}
	}
	if got := s.cell(id, "1 + 1"); !strings.HasSuffix(got, `display text/plain "2" | end ok 10`) {
		t.Error(got)
	}
}

// TestContextLimits refuses what is too much or makes no sense.
func TestContextLimits(t *testing.T) {
	s := newContexts(t, nil)
	for body, code := range map[string]int{
		`{"language":"cobol"}`: 400, `{"cwd":"/nowhere"}`: 400, `{"language":7}`: 400, `x`: 400, ``: 201,
	} {
		if got, _, text := s.do(s.request("POST", "/contexts", strings.NewReader(body))); got != code {
			t.Errorf("%s: %d %s", body, got, text)
		}
	}
	for range 31 {
		s.newContext("python")
	}
	if code := s.callJSON("POST", "/contexts", nil, nil); code != 429 {
		t.Errorf("status %d", code)
	}
	var all struct{ Contexts []contextInfo }
	if s.callJSON("GET", "/contexts", nil, &all); len(all.Contexts) != 32 {
		t.Errorf("%d contexts", len(all.Contexts))
	}
	id := all.Contexts[0].ID
	for body, code := range map[string]int{
		`{"code":"1","timeout":-1}`: 400, `{"code":"1","env_vars":{"a=b":"c"}}`: 400, `{`: 400,
		`{"code":"` + strings.Repeat("x", 5<<20) + `"}`: 413,
	} {
		if got, _, text := s.do(s.request("POST", "/contexts/"+id+"/execute", strings.NewReader(body))); got != code {
			t.Errorf("%.40s: %d %s", body, got, text)
		}
	}
	if code := s.callJSON("GET", "/contexts/"+id+"/runs/7", nil, nil); code != 404 {
		t.Errorf("status %d", code)
	}
}

// TestLargeCells has many large cells wait.
func TestLargeCells(t *testing.T) {
	s := newContexts(t, nil)
	id := s.newContext("python")
	s.beginCell(id, "import time; time.sleep(1000)").until("start")
	large := "'" + strings.Repeat("x", 1<<20) + "'"
	refused := 0
	for range 20 {
		body, err := json.Marshal(map[string]string{"code": large})
		check(t, err)
		ctx, cancel := s.context()
		response, err := s.http.Do(s.request("POST", "/contexts/"+id+"/execute", bytes.NewReader(body)).WithContext(ctx))
		check(t, err)
		if response.StatusCode == http.StatusTooManyRequests {
			refused++
		}
		_ = response.Body.Close()
		cancel()
	}
	if kib := s.memory(); refused < 8 || kib > 48<<10 {
		t.Errorf("%d were refused, and the guest has %d KiB of memory", refused, kib)
	}
}

// TestE2BCells sends what E2B's clients send to their port for cells.
func TestE2BCells(t *testing.T) {
	s := newContexts(t, nil)
	headers := []string{"E2b-Sandbox-Id", "x", "E2b-Sandbox-Port", "49999"}
	execute := func(body map[string]any) (kinds string, lines []map[string]any) {
		t.Helper()
		b, err := json.Marshal(body)
		check(t, err)
		code, _, text := s.do(s.request("POST", "/execute", bytes.NewReader(b), headers...))
		if code != 200 {
			t.Fatalf("%d %s", code, text)
		}
		for line := range strings.Lines(text) {
			if strings.ContainsFunc(line, func(c rune) bool { return c > 126 }) {
				t.Errorf("%q is not ASCII", line)
			}
			var decoded map[string]any
			check(t, json.Unmarshal([]byte(line), &decoded))
			if decoded["type"] != "keepalive" {
				lines = append(lines, decoded)
				kinds += decoded["type"].(string) + " "
			}
		}
		return kinds, lines
	}
	kinds, _ := execute(map[string]any{"code": "x = 'é😀'", "context_id": nil, "language": nil, "env_vars": nil})
	if kinds != "number_of_executions end_of_execution " {
		t.Error(kinds)
	}
	kinds, lines := execute(map[string]any{"code": "print(x)\nx"})
	if kinds != "stdout result number_of_executions end_of_execution " || lines[0]["text"] != "é😀\n" ||
		lines[1]["text"] != "é😀" || lines[1]["is_main_result"] != true {
		t.Errorf("%s %v", kinds, lines)
	}
	if kinds, lines = execute(map[string]any{"code": "1/0"}); lines[0]["name"] != "ZeroDivisionError" {
		t.Errorf("%s %v", kinds, lines)
	}
	if kinds, lines = execute(map[string]any{"code": "1 + 1", "language": "js"}); lines[0]["text"] != "2" {
		t.Errorf("%s %v", kinds, lines)
	}
	var list []struct{ ID, Language, Cwd string }
	if code := s.callJSON("GET", "/contexts", nil, &list, headers...); code != 200 || len(list) != 2 {
		t.Errorf("%d %v", code, list)
	}
	var made struct{ ID, Language, Cwd string }
	code := s.callJSON("POST", "/contexts", map[string]any{"cwd": "/tmp", "language": nil}, &made, headers...)
	if code != 200 ||
		made.Cwd != "/tmp" || made.Language != "python" {
		t.Errorf("%d %+v", code, made)
	}
	_, lines = execute(map[string]any{"code": "import os; os.getcwd()", "context_id": made.ID})
	if lines[0]["text"] != "/tmp" {
		t.Errorf("%v", lines)
	}
	// A crash is an error of the run, and the next one finds a new interpreter.
	execute(map[string]any{"code": "y = 1", "context_id": made.ID})
	_, lines = execute(map[string]any{"code": "os._exit(1)", "context_id": made.ID})
	if lines[0]["name"] != "ContextRestarting" {
		t.Errorf("%v", lines)
	}
	if _, lines = execute(map[string]any{"code": "y", "context_id": made.ID}); lines[0]["name"] != "ContextRestarting" {
		t.Errorf("%v", lines)
	}
	if _, lines = execute(map[string]any{"code": "y", "context_id": made.ID}); lines[0]["name"] != "NameError" {
		t.Errorf("%v", lines)
	}
	for path, code := range map[string]int{
		"POST /contexts/" + made.ID + "/restart": 200, "DELETE /contexts/" + made.ID: 200,
	} {
		method, path, _ := strings.Cut(path, " ")
		if got := s.callJSON(method, path, nil, nil, headers...); got != code {
			t.Errorf("%s %s: %d", method, path, got)
		}
	}
	for body, code := range map[string]int{
		`{"code":"1","context_id":"nope"}`: 404, `{"code":"1","context_id":"a","language":"python"}`: 400,
	} {
		if got, _, text := s.do(s.request("POST", "/execute", strings.NewReader(body), headers...)); got != code {
			t.Errorf("%s: %d %s", body, got, text)
		}
	}
}

// TestContextMasks has cells show a secret in every way.
func TestContextMasks(t *testing.T) {
	const secret = "sesame-öffne"
	s := newContexts(t, map[string]any{"masks": []string{secret}, "env": map[string]string{"SECRET": secret}})
	id := s.newContext("python")
	for _, code := range []string{
		"import os, sys, time\nfor c in os.environ['SECRET']: sys.stdout.write(c); sys.stdout.flush(); time.sleep(0.01)",
		"print(os.environ['SECRET'], file=sys.stderr)",
		"os.environ['SECRET']",
		"raise ValueError(os.environ['SECRET'])",
		"class T:\n  def _repr_json_(self): return {os.environ['SECRET']: [os.environ['SECRET']]}\nT()",
	} {
		code, _, text := s.do(s.request("POST", "/contexts/"+id+"/execute",
			strings.NewReader(fmt.Sprintf(`{"code":%s}`, strconv.Quote(code)))))
		decoded := strings.ReplaceAll(text, `\u00f6`, "ö")
		if code != 200 || !strings.Contains(text, "***") || strings.Contains(decoded, secret) {
			t.Errorf("%d %s", code, text)
		}
	}
}
