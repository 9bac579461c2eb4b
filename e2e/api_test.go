package e2e

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"net"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/bullpen-run/bullpen/proto"
)

// testPrograms runs programs of each language and checks that they behave like the file run
// directly.
func testPrograms(t *testing.T, a *api) {
	for _, c := range []struct {
		name           string
		program        request
		stdout, stderr string // expected end of stderr
		exitCode       int
	}{
		{"python", python("import sys; print(6 * 7); print('é', file=sys.stderr)"), "42\n", "é\n", 0},
		{
			"python is the default",
			request{"code": "import sys; print(__file__, __name__, sys.argv)"},
			"/home/baponi/main.py __main__ ['/home/baponi/main.py']\n", "", 0,
		},
		{"python exit code", python("import sys; sys.exit(3)"), "", "", 3},
		{
			"python traceback", python("print('before')\n# a comment\nraise ValueError('no')"), "before\n",
			"Traceback (most recent call last):\n  File \"/home/baponi/main.py\", line 3, in <module>\n    raise " +
				"ValueError('no')\nValueError: no\n", 1,
		},
		{"python syntax error", python("x = = 1"), "", "SyntaxError: invalid syntax\n", 1},
		{"python atexit", python("import atexit; atexit.register(print, 'last'); print('first')"), "first\nlast\n", "", 0},
		{"python stdin", python("import sys; print(repr(sys.stdin.read()))"), "''\n", "", 0},
		{"node", request{"language": "node", "code": "console.log(6 * 7); console.error('é')"}, "42\n", "é\n", 0},
		{
			"node file",
			request{"language": "node", "code": "console.log(__filename, process.argv.slice(1))"},
			"/home/baponi/main.js [ '/home/baponi/main.js' ]\n", "", 0,
		},
		{"node exit code", request{"language": "node", "code": "process.exitCode = 4"}, "", "", 4},
		{"bash", bash("echo $((6 * 7)); echo é >&2"), "42\n", "é\n", 0},
		{"bash sees only the user's files", bash("pwd; ls -A"), "/home/baponi\n", "", 0},
		{"bash exit code", bash("exit 7"), "", "", 7},
		{"bash with CRLF", bash("if true; then\r\n  cat <<X\r\nb\r\nX\r\nfi\r\n"), "b\n", "", 0},
		{"bash with CRLF and LF", bash("printf '%q ' 'a\r'\r\necho b\n"), "$'a\\r\\r' b\n", "", 0},
		{"bash with a byte order mark", bash("\ufeffecho b"), "b\n", "", 0},
		{
			"python with a byte order mark", python("\ufeffprint(open('main.py').read())"),
			"print(open('main.py').read())\n", "", 0,
		},
		{
			"python with a byte order mark, in a thread", python("\ufeffprint(len(open('main.py').read()))").of("marked"),
			"34\n", "", 0,
		},
		{
			"node with a byte order mark",
			request{"language": "node", "code": "\ufeffconsole.log(require('fs').readFileSync('main.js', 'utf8'))"},
			"console.log(require('fs').readFileSync('main.js', 'utf8'))\n", "", 0,
		},
		{"bash stdin", bash("read -r x || echo end of file"), "end of file\n", "", 0},
		{"killed by itself", bash("kill -TERM $$"), "", "", 128 + 15},
		{"segmentation fault", python("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)"), "", "", 128 + 11},
		{"environment", bash("echo $A-$B").and("env_vars", request{"A": "x y", "B": "ü\n"}), "x y-ü\n", "", 0},
		{
			"arguments and stdin",
			python("import sys; print(sys.argv[1:], repr(sys.stdin.read()))").and("args", []string{"-x", "a b"}, "stdin", "é\n"),
			"['-x', 'a b'] 'é\\n'\n", "", 0,
		},
		{
			"arguments and stdin in a thread",
			bash("echo $1; cat").and("args", []string{"a"}, "stdin", "b\n", "thread_id", "arguments-and-stdin"), "a\nb\n", "", 0,
		},
		{"the most of stdin", bash("wc -c").and("stdin", strings.Repeat("x", proto.MaxStdinBytes)), "1048576\n", "", 0},
		{"NUL and bad UTF-8", bash(`printf 'a\0b\377c\n'`), "a\x00b\ufffdc\n", "", 0},
	} {
		t.Run(c.name, func(t *testing.T) {
			r := a.in(t).inline(c.program)
			if r.Stdout != c.stdout || !strings.HasSuffix(r.Stderr, c.stderr) || c.stderr == "" && r.Stderr != "" ||
				r.ExitCode != c.exitCode || r.Success != (c.exitCode == 0) || r.Error != nil || r.ErrorCode != nil {
				t.Errorf("got %+v\nwant exit code %d, stdout %q, stderr ending in %q", r, c.exitCode, c.stdout, c.stderr)
			}
		})
	}
}

// testWaysToDie has the platform end programs. The response is still a result with the output so
// far.
func testWaysToDie(t *testing.T, a *api) {
	for _, c := range []struct {
		name                      string
		program                   request
		err, code, status, stream string
	}{
		{
			"timeout", bash("echo so far; sleep 600").and("timeout", 1), "execution timed out after 1s", "timeout",
			"timeout", "timeout",
		},
		{
			"memory", python("print('so far')\nx = bytearray(3 << 30)"), "memory_limit_exceeded", "memory_limit_exceeded",
			"oom", "failed",
		},
		{
			"seccomp", python("print('so far')\nimport ctypes; ctypes.CDLL(None).swapoff(b'/nothing')"),
			"security_policy_violation", "security_policy_violation", "seccomp", "failed",
		},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			a := a.in(t)
			answer := a.execute(c.program)
			r := answer.result(t)
			if r.ExitCode != -1 || r.Success || r.Stdout != "so far\n" || display(r.Error) != strconv.Quote(c.err) ||
				display(r.ErrorCode) != strconv.Quote(c.code) || r.ErrorMessage == nil || r.Stderr != "" {
				t.Errorf("got %s, want exit code -1, error %q, code %q and the output so far", answer, c.err, c.code)
			}
			id := answer.trace(t)
			a.record(id).failed(t, c.status, c.code, "")
			if _, _, last := checkEvents(t, a.output(id, 0), 0); last.Status != c.stream {
				t.Errorf("the result event has status %s, want %s", last.Status, c.stream)
			}
		})
	}
}

// testLiveOutput runs a program that holds, and releases it once the client has its first output.
func testLiveOutput(t *testing.T, a *api, program func(hold) request) {
	h := newHold()
	resp, err := a.open(t.Context(), http.MethodPost, executePath, program(h), accept, ndjson)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = resp.Body.Close() }()
	lines := bufio.NewScanner(resp.Body)
	var seen []string
	for lines.Scan() {
		var e event
		if err := json.Unmarshal(lines.Bytes(), &e); err != nil {
			t.Fatal(err)
		}
		seen = append(seen, strings.TrimSpace(e.Type+" "+e.Data))
		if strings.TrimSpace(e.Data) == "held" {
			h.reached(t, 1) // the client has the line before the program ends
			h.release(t)
		}
	}
	if err := lines.Err(); err != nil {
		t.Fatal(err)
	}
	if want := []string{"status", "output held", "output woken", "result"}; !slices.Equal(
		without(seen, "output", "Terminated"), want) {
		t.Errorf("got %q, want %q", seen, want)
	}
}

func testStreaming(t *testing.T, a *api) {
	t.Run("contents", func(t *testing.T) {
		a := a.in(t)
		code := "import sys\nfor i in range(3):\n print(i)\n print(-i, file=sys.stderr, flush=True)\nprint('no newline', " +
			"end='')\n"
		answer := a.execute(python(code), accept, ndjson)
		if got := answer.header.Get("Content-Type"); answer.status != http.StatusOK || got != ndjson ||
			answer.header.Get("Cache-Control") != "no-store" || answer.header.Get("X-Accel-Buffering") != "no" {
			t.Fatalf("got %s with %v", answer, answer.header)
		}
		events := answer.events(t)
		stdout, stderr, last := checkEvents(t, events, 0)
		if id := answer.trace(t); events[0].TraceID != id || events[0].Status != "running" || last.TraceID != id {
			t.Errorf("X-Trace-Id is %s, the events say %s %s and %s", id, events[0].TraceID, events[0].Status, last.TraceID)
		}
		if stdout != "0\n1\n2\nno newline" || stderr != "0\n-1\n-2\n" || last.Status != "success" || *last.OutputTruncated ||
			last.Result.Stdout != stdout || last.Result.Stderr != stderr {
			t.Errorf("got stdout %q, stderr %q, and last %+v", stdout, stderr, last)
		}
	})
	for name, program := range map[string]func(h hold) request{
		"as it happens": func(h hold) request { return bash(h.code()) },
		"as it happens, from a program that Bash starts": func(h hold) request {
			return bash("python3 -c 'import os\nprint(\"held\")\nos.system(\"sleep " + h.seconds + "\")\nprint(\"woken\")'")
		},
		"as it happens, without a line's end": func(h hold) request {
			return bash("printf 'held\\r'; sleep "+h.seconds+"; echo woken").and("stream_partial", true)
		},
	} {
		t.Run(name, func(t *testing.T) { testLiveOutput(t, a.in(t), program) })
	}
	t.Run("the client leaves", func(t *testing.T) {
		a, h := a.in(t), newHold()
		ctx, leave := context.WithCancel(t.Context())
		defer leave()
		resp, err := a.open(ctx, http.MethodPost, executePath, bash(h.code()), accept, ndjson)
		if err != nil {
			t.Fatal(err)
		}
		h.reached(t, 1)
		leave()
		_ = resp.Body.Close()
		h.release(t)
		a.ended(resp.Header.Get("X-Trace-Id")).succeeded(t, "held\nwoken\n")
	})
	t.Run("without loss", func(t *testing.T) {
		stdout, _, _ := checkEvents(t, a.in(t).stream(python("for i in range(30000): print(i)")), 0)
		if n := strings.Count(stdout, "\n"); n != 30000 || !strings.HasSuffix(stdout, "\n29999\n") {
			t.Errorf("got %d lines, the last %q", n, stdout[max(0, len(stdout)-20):])
		}
	})
	// The lines have 100 bytes each, and the client reads as fast as it can.
	t.Run("10 MB without loss", func(t *testing.T) {
		const lines = 100_000
		code := fmt.Sprintf("import sys\nfor i in range(%d): sys.stdout.write('%%099d\\n' %% i)", lines)
		seq := int64(0) // not decoded as JSON, which is slow under the race detector
		for line := range bytes.Lines(a.in(t).execute(python(code), accept, ndjson).body) {
			seq++
			if end := fmt.Sprintf(`"seq":%d}`+"\n", seq); !bytes.HasSuffix(line, []byte(end)) {
				t.Fatalf("event %d is %s", seq, short(string(line)))
			}
		}
		if seq != lines+2 {
			t.Errorf("got %d events, want the status, %d lines and the result", seq, lines)
		}
	})
}

// without returns words without those that have this prefix and contain this substring.
func without(words []string, begins, contains string) []string {
	return slices.DeleteFunc(slices.Clone(words), func(s string) bool {
		return strings.HasPrefix(s, begins) && strings.Contains(s, contains)
	})
}

// testEviction prints more lines than are kept for reconnection. Exactly the last 10,000 must be
// kept.
func testEviction(t *testing.T, a *api) {
	const printed, kept = 12000, proto.MaxEvents
	id := a.submit(python(fmt.Sprintf("for i in range(%d): print(i)", printed)))
	rec := a.ended(id)
	if rec.Status != "success" || !rec.OutputTruncated || strings.Count(*rec.Stdout, "\n") != printed {
		t.Errorf("got %s with output_truncated %v", rec, rec.OutputTruncated)
	}
	// The status is event 1, line i is event i+2, and the result follows the last line.
	check := func(t *testing.T, events []event, first, gone int64) {
		t.Helper()
		if gone > 0 {
			if len(events) == 0 || events[0].Missing == nil || *events[0].Missing != (missing{gone, first - 1}) ||
				events[0].Seq != gone-1 {
				t.Fatalf("got %+v, want that %d to %d are missing", events[:min(1, len(events))], gone, first-1)
			}
			events = events[1:]
		}
		if len(events) == 0 || events[len(events)-1].Type != "result" ||
			*events[len(events)-1].OutputTruncated != (gone > 0) || events[len(events)-1].Seq != printed+2 {
			t.Fatalf("got %d events, the last %+v", len(events), events[max(0, len(events)-1):])
		}
		lines := events[:len(events)-1]
		if int64(len(lines)) != printed+2-first {
			t.Fatalf("got %d output events, want %d", len(lines), printed+2-first)
		}
		for i, e := range lines {
			if want := first + int64(i); e.Seq != want || e.Data != strconv.FormatInt(want-2, 10)+"\n" {
				t.Fatalf("output event %d is %+v, want seq %d", i, e, want)
			}
		}
	}
	const oldest = printed - kept + 2
	t.Run("from the beginning", func(t *testing.T) {
		events := a.in(t).output(id, 0)
		if events[0].Type != "status" || events[0].Seq != 1 || events[0].TraceID != id {
			t.Fatalf("the first event is %+v", events[0])
		}
		check(t, events[1:], oldest, 2)
	})
	t.Run("from what is gone", func(t *testing.T) { check(t, a.in(t).output(id, 17), oldest, 18) })
	t.Run("from what is kept", func(t *testing.T) { check(t, a.in(t).output(id, 5000), 5001, 0) })
	t.Run("from the end", func(t *testing.T) { check(t, a.in(t).output(id, printed+2), printed+2, 0) })
	t.Run("from beyond", func(t *testing.T) { check(t, a.in(t).output(id, 1<<40), printed+2, 0) })
	t.Run("as server-sent events", func(t *testing.T) {
		answer := a.in(t).get(execution(id, "output"), accept, sse)
		sent := serverSent(t, answer)
		for _, e := range sent {
			if e.id != e.event.Seq {
				t.Fatalf("the event with seq %d has id %d: who reconnects with it goes on at the wrong place", e.event.Seq, e.id)
			}
		}
		events := make([]event, len(sent))
		for i, e := range sent {
			events[i] = e.event
		}
		check(t, events[1:], oldest, 2)
	})
}

// sent is one server-sent event.
type sent struct {
	id    int64
	event event
}

func serverSent(t testing.TB, r *reply) []sent {
	t.Helper()
	if got := r.header.Get("Content-Type"); r.status != http.StatusOK || got != sse {
		t.Fatalf("got %s as %q", r, got)
	}
	var all []sent
	for block := range strings.SplitSeq(strings.TrimSuffix(string(r.body), "\n\n"), "\n\n") {
		var s sent
		head, data, ok := strings.Cut(block, "\ndata: ")
		id, isID := strings.CutPrefix(head, "id: ")
		n, err := strconv.ParseInt(id, 10, 64)
		if !ok || !isID || err != nil {
			t.Fatalf("not an event: %q", block)
		}
		s.id = n
		if err := json.Unmarshal([]byte(data), &s.event); err != nil {
			t.Fatalf("%v in %q", err, block)
		}
		if s.event.Type != "keepalive" || s.event.Missing != nil {
			all = append(all, s)
		}
	}
	return all
}

func testSSE(t *testing.T, a *api) {
	h := newHold()
	id := a.submit(bash("echo one\necho two\n" + h.code()))
	h.reached(t, 1)
	live := a.follow(id, 1, accept, sse)                          // opened while the program runs
	resumed := a.follow(id, 1, accept, sse, "Last-Event-ID", "3") // the header overrides the query
	h.release(t)
	a.ended(id)
	for _, c := range []struct {
		from  *pending
		after int64
	}{{live, 1}, {resumed, 3}} {
		var events []event
		for _, s := range serverSent(t, c.from.answer(t)) {
			if s.id != s.event.Seq {
				t.Errorf("id %d for seq %d", s.id, s.event.Seq)
			}
			events = append(events, s.event)
		}
		checkEvents(t, events, c.after)
	}
}

func testAsync(t *testing.T, a *api) {
	h := newHold()
	answer := a.execute(bash(h.code()), "Prefer", "wait=10, respond-async", accept, ndjson)
	id := answer.trace(t)
	if want := fmt.Sprintf(`{"trace_id":%q,"status":"running"}`+"\n", id); answer.status != http.StatusAccepted ||
		string(answer.body) != want ||
		answer.header.Get("Location") != "/v1/executions/"+id || answer.header.Get("Preference-Applied") != "respond-async" {
		t.Fatalf("got %s with %v, want %s", answer, answer.header, want)
	}
	h.reached(t, 1)
	eventually(t, "the output so far, without following", func() (bool, any) {
		r := a.get(execution(id, "output") + "?follow=false")
		return strings.HasSuffix(string(r.body), `"data":"held\n","seq":2}`+"\n"), r
	})
	if rec := a.record(id); rec.Status != "running" || rec.ExitCode != nil || rec.Stdout != nil || rec.Stderr != nil ||
		rec.DurationMS == nil ||
		rec.CompletedAt != nil || rec.DeliveryMode != "webhook" {
		t.Errorf("while it runs: %s", rec)
	}
	if r := a.get(execution(id) + "?wait=1"); !strings.Contains(string(r.body), `"status":"running"`) {
		t.Errorf("a wait that is over: %s", r)
	}
	waits := a.begin(http.MethodGet, execution(id)+"?wait=60", nil)
	h.release(t)
	var rec record
	waits.answer(t).into(t, &rec)
	rec.succeeded(t, "held\nwoken\n")
	events := a.output(id, 0)
	stdout, _, last := checkEvents(t, events, 0)
	if stdout != "held\nwoken\n" || last.Result.Stdout != stdout {
		t.Errorf("the output is %q, the result's %q", stdout, last.Result.Stdout)
	}
	for after := range last.Seq + 2 { // resuming at every position
		checkEvents(t, a.output(id, after), after)
	}
	for _, wait := range []string{"61", "-1", "1.5", "x"} {
		a.get(execution(id)+"?wait="+wait).rejection(t, http.StatusBadRequest, "validation_error")
	}
	a.get(execution(id, "output")+"?after_seq=-1").rejection(t, http.StatusBadRequest, "validation_error")
}

// testRecord compares a record and a result member by member.
func testRecord(t *testing.T, a *api) {
	before := time.Now().UTC().Truncate(time.Millisecond)
	answer := a.execute(bash("echo out; echo err >&2; exit 3").and("metadata", request{"team": "blue"}, "timeout", 17,
		"surplus", 1),
		"X-Request-Id", "my-request-1")
	id := answer.trace(t)
	if got := answer.header.Get("X-Request-Id"); got != "my-request-1" {
		t.Errorf("X-Request-Id is %q", got)
	}
	got := map[string]any{}
	answer.into(t, &got)
	removeVarying(t, got, "duration_ms")
	checkEqual(t, "the result", got, map[string]any{
		"success": false, "stdout": "out\n", "stderr": "err\n", "exit_code": 3.0, "error": nil, "error_code": nil,
		"error_message":    nil,
		"stdout_truncated": false, "stderr_truncated": false,
	})

	read := a.get(execution(id))
	if read.status != http.StatusOK || read.trace(t) != id || read.header.Get("X-Request-Id") == "" {
		t.Errorf("got %s with %v", read, read.header)
	}
	got = map[string]any{}
	read.into(t, &got)
	for _, at := range []string{"created_at", "completed_at"} {
		text, _ := got[at].(string)
		when, err := time.Parse("2006-01-02T15:04:05.000Z", text)
		if err != nil || when.Before(before) || when.After(time.Now().Add(time.Second)) {
			t.Errorf("%s is %q: %v", at, got[at], err)
		}
		delete(got, at)
	}
	var names []string
	steps, _ := got["steps"].([]any)
	for _, step := range steps {
		name, _ := step.(map[string]any)["name"].(string)
		names = append(names, name)
	}
	if !slices.Equal(names, []string{"queue", "jail", "program"}) {
		t.Errorf("the steps are %v", got["steps"])
	}
	delete(got, "steps")
	removeVarying(t, got, "duration_ms", "queued_ms")
	checkEqual(t, "the record", got, map[string]any{
		"trace_id": id, "status": "failed", "exit_code": 3.0, "stdout": "out\n", "stderr": "err\n", "error": nil,
		"delivery_mode": "inline",
		"webhook_url":   nil, "webhook_delivery_status": nil, "error_code": nil, "error_message": nil, "language": "bash",
		"timeout":   17.0,
		"thread_id": nil, "metadata": map[string]any{"team": "blue"}, "attempt": 1.0, "stdout_truncated": false,
		"stderr_truncated": false, "output_truncated": false, "profile": "default",
	})
	if mode := a.record(a.execute(bash("true"), accept, ndjson).trace(t)).DeliveryMode; mode != "streaming" {
		t.Errorf("the delivery mode of a stream is %q", mode)
	}
	if rid := a.get("/healthz").header.Get("X-Request-Id"); rid == "" {
		t.Error("no X-Request-Id is made")
	}
}

// removeVarying removes durations in milliseconds, after checking that they are present.
func removeVarying(t testing.TB, got map[string]any, names ...string) {
	t.Helper()
	for _, name := range names {
		if n, ok := got[name].(float64); !ok || n < 0 {
			t.Errorf("%s is %v", name, got[name])
		}
		delete(got, name)
	}
}

func checkEqual(t testing.TB, what string, got, want map[string]any) {
	t.Helper()
	for _, name := range slices.Sorted(maps.Keys(want)) {
		value, ok := got[name]
		if !ok || fmt.Sprintf("%#v", value) != fmt.Sprintf("%#v", want[name]) {
			t.Errorf("%s of %s is %#v, want %#v", name, what, value, want[name])
		}
		delete(got, name)
	}
	if len(got) > 0 {
		t.Errorf("%s has more than what is documented: %v", what, got)
	}
}

func testCancel(t *testing.T, a *api) {
	h := newHold()
	p := a.start(bash(h.code()).and("max_attempts", 3), "Idempotency-Key", "cancelled "+h.seconds)
	h.reached(t, 1)
	// The same key in async mode finds the running execution. This is how an inline caller can
	// cancel.
	id := a.submit(bash(h.code()).and("max_attempts", 3), "Idempotency-Key", "cancelled "+h.seconds)
	r := a.do(http.MethodPost, execution(id, "cancel"), nil, "Content-Type", "application/json")
	if want := fmt.Sprintf(`{"trace_id":%q,"status":"cancelling"}`+"\n", id); r.status != http.StatusAccepted ||
		string(r.body) != want {
		t.Errorf("got %s, want %s", r, want)
	}
	h.reached(t, 0)
	res := p.answer(t).result(t)
	if display(res.Error) != `"Cancelled by user"` || display(res.ErrorCode) != `"cancelled"` || res.ExitCode != -1 ||
		res.Stdout != "held\n" {
		t.Errorf("got %+v", res)
	}
	a.ended(id).failed(t, "cancelled", "cancelled", "")
	if _, _, last := checkEvents(t, a.output(id, 0), 0); last.Status != "cancelled" {
		t.Errorf("the result event has status %q", last.Status)
	}
	r = a.do(http.MethodPost, execution(id, "cancel"), []byte("no JSON"))
	if want := fmt.Sprintf(`{"trace_id":%q,"status":"cancelled"}`+"\n", id); r.status != http.StatusOK ||
		string(r.body) != want {
		t.Errorf("a second time: got %s, want %s", r, want)
	}
}

// testOutputLimit checks that 2 MiB of each output stream are kept.
func testOutputLimit(t *testing.T, a *api) {
	const limit = 2 << 20
	code := "import sys\nline = 'é' * 499 + '\\n'\nsys.stdout.write('xx')\nfor i in range(2500): " +
		"sys.stdout.write(line)\nprint('short', file=sys.stderr)"
	answer := a.execute(python(code))
	r := answer.result(t)
	// The limit falls in the middle of a character, which is dropped.
	if !r.StdoutTruncated || len(r.Stdout) != limit-1 || r.StderrTruncated || r.Stderr != "short\n" || !r.Success {
		t.Errorf("got %d bytes of stdout (truncated %v), %d of stderr (truncated %v)", len(r.Stdout), r.StdoutTruncated,
			len(r.Stderr), r.StderrTruncated)
	}
	if rec := a.record(answer.trace(t)); *rec.Stdout != r.Stdout || !rec.StdoutTruncated || rec.StderrTruncated {
		t.Errorf("the record has %d bytes of stdout (truncated %v), the answer %d", len(*rec.Stdout), rec.StdoutTruncated,
			len(r.Stdout))
	}
	exact := a.inline(python(fmt.Sprintf("import sys; sys.stdout.write('x' * %d)", limit)))
	if exact.StdoutTruncated || len(exact.Stdout) != limit {
		t.Errorf("exactly the limit: %d bytes, truncated %v", len(exact.Stdout), exact.StdoutTruncated)
	}
}

// testLarge sends requests that do not fit into a queue message and receives results of that size.
func testLarge(t *testing.T, a *api) {
	const size = proto.MaxCodeBytes
	head := "import sys; code = open(__file__).read(); print(len(code)); sys.stderr.write('y' * 1500000)\n#"
	code := head + strings.Repeat("x", size-len(head))
	id := a.submit(python(code))
	rec := a.ended(id)
	rec.succeeded(t, strconv.Itoa(size)+"\n")
	if len(*rec.Stderr) != 1500000 {
		t.Errorf("stderr has %d bytes", len(*rec.Stderr))
	}
	if _, stderr, last := checkEvents(t, a.output(id, 0), 0); len(stderr) != 1500000 ||
		len(last.Result.Stderr) != 1500000 {
		t.Errorf("the events have %d bytes of stderr, the result event %d", len(stderr), len(last.Result.Stderr))
	}
	if r := a.inline(python(code)); len(r.Stderr) != 1500000 {
		t.Errorf("stderr inline has %d bytes", len(r.Stderr))
	}
	if _, _, last := checkEvents(t, a.stream(python(code)), 0); len(last.Result.Stderr) != 1500000 {
		t.Errorf("stderr streamed has %d bytes", len(last.Result.Stderr))
	}
	message := a.execute(python(code+"x")).rejection(t, http.StatusBadRequest, "validation_error")
	if message != "code must be between 1 byte and 1 MB" {
		t.Errorf("one byte more: %q", message)
	}
}

// testOrganisations checks that one organisation cannot see what belongs to another.
func testOrganisations(t *testing.T, a *api) {
	secret, _ := a.newKey("stranger", "enterprise")
	stranger, h := a.with(secret), newHold()
	running, ended := a.submit(bash(h.code()), "Idempotency-Key", "shared word"), a.submit(bash("echo mine"))
	a.ended(ended).succeeded(t, "mine\n")
	for _, id := range []string{
		running, ended, string(proto.NewTraceID()), "trc_x", "nonsense", "trc_*",
		"trc_%3E", "%2e%2e",
	} {
		for _, route := range []string{"", "?wait=1", "/output", "/output?after_seq=2"} {
			r := stranger.get(execution(id) + route)
			r.rejection(t, http.StatusNotFound, "not_found")
			if r.header.Get("X-Trace-Id") != "" {
				t.Errorf("%s%s returns a trace id", id, route)
			}
		}
		stranger.do(http.MethodPost, execution(id, "cancel"), nil).rejection(t, http.StatusNotFound, "not_found")
	}
	stranger.get("/v1/admin/keys").rejection(t, http.StatusForbidden, "forbidden")
	stranger.do(http.MethodPost, "/v1/admin/keys", request{"name": "n", "org": "stranger", "plan": "free"}).rejection(
		t, http.StatusForbidden, "forbidden")
	stranger.do(http.MethodDelete, "/v1/admin/keys/key_bootstrap", nil).rejection(t, http.StatusForbidden, "forbidden")
	// Another organisation may use the same idempotency key for a different request.
	other := stranger.submit(bash("echo yours"), "Idempotency-Key", "shared word")
	stranger.ended(other).succeeded(t, "yours\n")
	a.get(execution(other)).rejection(t, http.StatusNotFound, "not_found")
	if rec := a.record(running); rec.Status != "running" {
		t.Errorf("the stranger stopped it: %s", rec)
	}
	h.release(t)
	a.ended(running)
}

func testKeys(t *testing.T, a *api) {
	secret, id := a.newKey("keys", "pro")
	mine := a.with(secret)
	if r := mine.inline(bash("echo hi")); r.Stdout != "hi\n" {
		t.Fatalf("got %+v", r)
	}
	list := a.get("/v1/admin/keys?org=keys")
	var keys struct{ Keys []map[string]any }
	list.into(t, &keys)
	at := slices.IndexFunc(keys.Keys, func(k map[string]any) bool { return k["id"] == id })
	if at < 0 {
		t.Fatalf("the new key is not listed in %s", list)
	}
	listed := keys.Keys[at]
	if listed["org"] != "keys" || listed["plan"] != nil || fmt.Sprint(listed["scopes"]) != "[execute read files]" ||
		listed["revoked_at"] != nil || listed["created_at"] == "" {
		t.Errorf("listed as %v", listed)
	}
	if strings.Contains(string(list.body), secret) || strings.Contains(string(list.body), a.key) {
		t.Error("the list shows a key")
	}
	for _, wrong := range []string{
		"", "sk-local-", secret[:len(secret)-1], secret + "x", strings.ToUpper(secret),
		"x" + secret,
	} {
		a.with(wrong).get(execution("trc_x")).rejection(t, http.StatusUnauthorized, "unauthorized")
	}
	for _, header := range []string{secret, "Basic " + secret, "Bearer", "Bearer " + secret + " " + secret} {
		a.with("").get(execution("trc_x"), "Authorization", header).rejection(t, http.StatusUnauthorized, "unauthorized")
	}
	for _, body := range []request{
		{"name": "", "org": "o", "plan": "free"},
		{"name": "n", "org": "O", "plan": "free"},
		{"name": "n", "org": "o", "plan": "gold"},
		{"name": "n", "org": "o", "plan": "free", "scopes": []string{"some"}},
		{"name": 1, "org": "o", "plan": "free"},
	} {
		a.do(http.MethodPost, "/v1/admin/keys", body).rejection(t, http.StatusBadRequest, "validation_error")
	}
	a.do(http.MethodDelete, "/v1/admin/keys/key_none", nil).rejection(t, http.StatusNotFound, "not_found")
	if r := a.do(http.MethodDelete, "/v1/admin/keys/"+id, nil); r.status != http.StatusOK ||
		!strings.Contains(string(r.body), `"revoked_at":"2`) {
		t.Fatalf("revoke: %s", r)
	}
	mine.get(execution("trc_x")).rejection(t, http.StatusUnauthorized, "unauthorized") // this gateway applies it at once
}

// upgradeURL is where users of the shared deployments change their plan.
const upgradeURL = "https://bullpen.example/plans"

// testFreePlan exceeds every limit of the free plan.
func testFreePlan(t *testing.T, a *api) {
	secret, _ := a.newKey("free-plan", "free")
	a = a.with(secret)
	for _, c := range []struct {
		header, value, word string
	}{{accept, ndjson, "Streaming"}, {"Prefer", "respond-async", "Async"}} {
		r := a.execute(bash("true"), c.header, c.value)
		want := c.word + " execution requires a Pro or Enterprise plan. Upgrade at " + upgradeURL
		if got := r.rejection(t, http.StatusTooManyRequests, "rate_limited"); got != want ||
			r.header.Get("Retry-After") != "" {
			t.Errorf("got %q, Retry-After %q, want %q", got, r.header.Get("Retry-After"), want)
		}
	}
	r := a.execute(bash("true").and("timeout", 61))
	if got := r.rejection(t, http.StatusTooManyRequests, "rate_limited"); !strings.Contains(got, "60") ||
		!strings.Contains(strings.ToLower(got), "upgrade") ||
		r.header.Get("Retry-After") != "" {
		t.Errorf("timeout 61: %q", got)
	}
	h := newHold()
	var running []*pending
	for range 5 {
		running = append(running, a.start(bash(h.code()).and("timeout", 60)))
	}
	h.reached(t, 5)
	r = a.execute(bash("true"))
	want := "concurrent execution limit reached (5/5). Upgrade to Pro for 100 concurrent executions."
	if got := r.rejection(t, http.StatusTooManyRequests, "rate_limited"); got != want {
		t.Errorf("the sixth: %q, want %q", got, want)
	}
	r.retryAfter(t)
	h.release(t)
	for _, p := range running {
		if res := p.answer(t).result(t); res.Stdout != "held\nwoken\n" {
			t.Errorf("got %+v", res)
		}
	}
	eventually(t, "requests are accepted again", func() (bool, any) {
		r := a.execute(bash("true"))
		return r.status == http.StatusOK, r
	})
}

func testIdempotency(t *testing.T, a *api) {
	const key = "Idempotency-Key"
	word := newHold().seconds
	first := a.execute(python("import uuid; print(uuid.uuid4())"), key, word)
	id, res := first.trace(t), first.result(t)
	again := a.execute([]byte(`{"timeout": 60, "language":null, "code":"import uuid; print(uuid.uuid4())"}`), key, word)
	if again.trace(t) != id || again.result(t).Stdout != res.Stdout {
		t.Errorf("the same request again: %s %s, want %s", again.trace(t), again, id)
	}
	events := a.execute(python("import uuid; print(uuid.uuid4())"), key, word, accept, ndjson)
	if stdout, _, _ := checkEvents(t, events.events(t), 0); events.trace(t) != id || stdout != res.Stdout {
		t.Errorf("as a stream: %s", events)
	}
	if got := a.submit(python("import uuid; print(uuid.uuid4())"), key, word); got != id {
		t.Errorf("async: %s, want %s", got, id)
	}
	a.execute(python("print(2)"), key, word).rejection(t, http.StatusUnprocessableEntity, "idempotency_mismatch")
	for _, bad := range []string{strings.Repeat("k", 256), "é"} {
		a.execute(python("print(1)"), key, bad).rejection(t, http.StatusBadRequest, "validation_error")
	}
	if r := a.execute(python("print(1)"), key, strings.Repeat("k", 255)); r.status != http.StatusOK {
		t.Errorf("255 characters: %s", r)
	}
}

// testIdempotencyAtOnce sends one request several times before the first gets a response.
func testIdempotencyAtOnce(t *testing.T, a *api) {
	h := newHold()
	var calls []*pending
	for range 4 {
		calls = append(calls, a.start(bash(h.code()), "Idempotency-Key", "at once "+h.seconds))
	}
	h.reached(t, 1)
	asyncID := a.submit(bash(h.code()), "Idempotency-Key", "at once "+h.seconds)
	if pids := h.pids(t); len(pids) != 1 {
		t.Errorf("%d programs run", len(pids))
	}
	h.release(t)
	for _, p := range calls {
		r := p.answer(t)
		if res := r.result(t); res.Stdout != "held\nwoken\n" || r.trace(t) != asyncID {
			t.Errorf("got %s of %s, want the response of %s", r, r.trace(t), asyncID)
		}
	}
}

func testHealth(t *testing.T, a *api) {
	nobody := a.with("")
	for _, path := range []string{"/healthz", "/readyz", "/openapi.json", "/docs", "/metrics"} {
		if r := nobody.get(path); r.status != http.StatusOK || len(r.body) == 0 {
			t.Errorf("%s: %s", path, r)
		}
	}
	var doc struct {
		OpenAPI string `json:"openapi"`
	}
	nobody.get("/openapi.json").into(t, &doc)
	if !strings.HasPrefix(doc.OpenAPI, "3.1") {
		t.Errorf("openapi is %q", doc.OpenAPI)
	}
	for _, figure := range []string{"bullpen_slots ", "bullpen_queue_depth ", "bullpen_http_requests_total"} {
		if !strings.Contains(string(nobody.get("/metrics").body), figure) {
			t.Errorf("no %s in /metrics", figure)
		}
	}
}

// testRoutes requests missing routes and sends malformed requests.
func testRoutes(t *testing.T, a *api) {
	for _, path := range []string{
		"/v1", "/v1/", "/v1/nothing", "/v2/sandbox/execute", "/v1/sandbox/execute/",
		"/v1//executions/x", "/favicon.ico",
	} {
		a.get(path).rejection(t, http.StatusNotFound, "not_found")
	}
	for path, methods := range map[string][]string{
		executePath: {"GET", "PUT", "DELETE", "PATCH"}, execution("trc_x"): {"POST", "DELETE"},
		execution("trc_x", "cancel"): {"GET", "PUT"},
		execution("trc_x", "output"): {"POST"}, "/v1/admin/keys": {"PUT"}, "/v1/admin/keys/key_x": {"PATCH", "POST"},
		"/healthz": {"POST"},
	} {
		for _, method := range methods {
			r := a.do(method, path, nil)
			r.rejection(t, http.StatusMethodNotAllowed, "method_not_allowed")
			if r.header.Get("Allow") == "" {
				t.Errorf("%s %s: no Allow", method, path)
			}
		}
	}
	for _, body := range []string{
		"", " ", "null", "[]", "1", `"code"`, "{", `{"code":`, `{"code":"x"}{}`, `{"code":"x"} x`, `{"code":1}`,
		`{"code":""}`, `{"code":null}`, `{}`,
		"{\"code\":\"\xff\"}", `{"code":"\ud800"}`, `{"code":"x","timeout":"1"}`, `{"code":"x","timeout":0}`,
		`{"code":"x","timeout":1.5}`,
		`{"code":"x","language":"cobol"}`, `{"code":"x","env_vars":{"PATH":"x"}}`, `{"code":"x","env_vars":{"a":"x"}}`,
		`{"code":"x","metadata":{"k":1}}`,
		`{"code":"x","max_attempts":0}`, `{"code":"x","max_attempts":11}`, `{"code":"x","thread_id":"-"}`,
		`{"code":"x","webhook_url":"http://x"}`,
		`{"code":"x","sub_paths":["/data/a/../b"]}`,
	} {
		message := a.execute([]byte(body)).rejection(t, http.StatusBadRequest, "validation_error")
		if message == "" {
			t.Errorf("no message for %s", body)
		}
	}
	a.execute([]byte(`{"code":"x","sub_paths":["/data/a/b"]}`), "Prefer", "respond-async").rejection(
		t, http.StatusForbidden, "forbidden")
}

// testBigBody announces a body of 100 MB and sends it. The server must reject it before reading all
// of it.
func testBigBody(t *testing.T, a *api) {
	const size = 100 << 20
	for _, head := range []string{fmt.Sprintf("Content-Length: %d\r\n", size), "Transfer-Encoding: chunked\r\n"} {
		conn := dial(t, a)
		sendRaw(t, conn, "POST %s HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer %s\r\n%s\r\n", executePath, a.key, head)
		var sending sync.WaitGroup
		sending.Go(func() {
			piece := []byte(strings.Repeat(" ", 1<<20))
			if strings.HasPrefix(head, "T") {
				piece = fmt.Appendf(nil, "%x\r\n%s\r\n", len(piece), piece)
			}
			for range size >> 20 {
				if _, err := conn.Write(piece); err != nil {
					return // the server has read enough
				}
			}
		})
		resp, err := http.ReadResponse(bufio.NewReader(conn), nil)
		if err != nil {
			t.Fatal(err)
		}
		body, err := io.ReadAll(resp.Body)
		if err != nil {
			t.Fatal(err)
		}
		(&reply{resp.StatusCode, resp.Header, body}).rejection(t, http.StatusRequestEntityTooLarge, "payload_too_large")
		_ = conn.Close()
		sending.Wait()
	}
}

func dial(t testing.TB, a *api) net.Conn {
	t.Helper()
	conn, err := (&net.Dialer{Timeout: patience}).DialContext(t.Context(), "tcp", strings.TrimPrefix(a.base, "http://"))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = conn.Close() })
	if err := conn.SetDeadline(time.Now().Add(patience)); err != nil {
		t.Fatal(err)
	}
	return conn
}

func sendRaw(t testing.TB, conn net.Conn, format string, args ...any) {
	t.Helper()
	if _, err := fmt.Fprintf(conn, format, args...); err != nil {
		t.Fatal(err)
	}
}

// testHalfClosed closes the client's side of the connection after the request. The answer must
// still come, in each mode, and also if a stream has already begun.
func testHalfClosed(t *testing.T, a *api) {
	body := `{"language":"bash","code":"sleep 0.5; echo hi"}`
	for _, c := range []struct {
		head  string
		begun bool // close when the response has begun
	}{
		{},
		{head: "Accept: " + ndjson + "\r\n"},
		{head: "Accept: " + ndjson + "\r\n", begun: true},
		{head: "Prefer: respond-async\r\n"},
	} {
		conn := dial(t, a)
		sendRaw(t, conn, "POST %s HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer %s\r\n%sContent-Length: %d\r\n\r\n%s",
			executePath, a.key, c.head, len(body), body)
		closeWrite := func() {
			if err := conn.(*net.TCPConn).CloseWrite(); err != nil {
				t.Fatal(err)
			}
		}
		if !c.begun {
			closeWrite()
		}
		from := bufio.NewReader(conn)
		resp, err := http.ReadResponse(from, nil)
		for err == nil && resp.StatusCode == http.StatusContinue {
			resp, err = http.ReadResponse(from, nil)
		}
		if err != nil {
			t.Fatalf("%+v: %v", c, err)
		}
		if c.begun {
			closeWrite()
		}
		text, err := io.ReadAll(resp.Body)
		if err != nil || resp.StatusCode >= http.StatusBadRequest || resp.StatusCode == http.StatusOK &&
			!strings.Contains(string(text), `"hi\n"`) {
			t.Errorf("%+v: %s %s: %v", c, resp.Status, text, err)
		}
		_ = conn.Close()
	}
}

// testSlowHeaders sends headers so slowly that they never end. The server must close the connection
// and keep serving others.
func testSlowHeaders(t *testing.T, a *api) {
	conn := dial(t, a)
	cut := make(chan error, 1)
	go func() {
		_, err := io.ReadAll(conn)
		cut <- err
	}()
	sendRaw(t, conn, "POST %s HTTP/1.1\r\nHost: x\r\n", executePath)
	tick := time.NewTicker(200 * time.Millisecond)
	defer tick.Stop()
	for n := 0; ; n++ {
		select {
		case err := <-cut:
			var netErr net.Error
			if errors.As(err, &netErr) && netErr.Timeout() {
				t.Error("the connection was not cut")
			}
			return
		case <-tick.C:
			if _, err := fmt.Fprintf(conn, "X-%d: y\r\n", n); err != nil && !errors.Is(err, syscall.EPIPE) &&
				!errors.Is(err, syscall.ECONNRESET) {
				t.Fatal(err)
			}
		}
	}
}

// testBigHeaders sends more headers than any request needs. The server must not read all of them.
func testBigHeaders(t *testing.T, a *api) {
	for name, rest := range map[string]string{
		"one": "X-Long: " + strings.Repeat("x", 1<<20) + "\r\n", "many": strings.Repeat("X-Y: z\r\n", 1<<17),
	} {
		conn := dial(t, a)
		var sending sync.WaitGroup
		sending.Go(func() {
			// the server may reject the request before the end
			_, _ = fmt.Fprintf(conn, "POST %s HTTP/1.1\r\nHost: x\r\n%s\r\n", executePath, rest)
		})
		resp, err := http.ReadResponse(bufio.NewReader(conn), nil)
		switch {
		case errors.Is(err, syscall.ECONNRESET): // closed before the response was read
		case err != nil:
			t.Fatalf("%s: %v", name, err)
		case resp.StatusCode != http.StatusRequestHeaderFieldsTooLarge || !resp.Close:
			t.Errorf("%s: %v", name, resp)
		default:
			_ = resp.Body.Close()
		}
		_ = conn.Close()
		sending.Wait()
	}
}

// testManyAtOnce runs 50 programs at once, in all languages and modes. Each must return its own
// output.
func testManyAtOnce(t *testing.T, a *api) {
	var all sync.WaitGroup
	for i := range 50 {
		all.Go(func() {
			word := fmt.Sprintf("word %d", i)
			program := []request{
				python("print('" + word + "')"), bash("echo " + word), {"language": "node", "code": "console.log('" + word + "')"},
			}[i%3]
			word += "\n"
			switch i / 3 % 3 {
			case 0: // waits for a slot by retrying, as clients do
				var r *reply
				eventually(t, "an inline answer", func() (bool, any) {
					var err error
					r, err = a.try(context.Background(), http.MethodPost, executePath, program)
					return err == nil && r.status != http.StatusServiceUnavailable, fmt.Sprint(r, err)
				})
				if res := r.result(t); res.Stdout != word {
					t.Errorf("inline: got %+v, want %q", res, word)
				}
			case 1:
				var r *reply
				eventually(t, "a stream", func() (bool, any) {
					var err error
					r, err = a.try(context.Background(), http.MethodPost, executePath, program, accept, ndjson)
					return err == nil && r.status != http.StatusServiceUnavailable, fmt.Sprint(r, err)
				})
				if stdout, _, _ := checkEvents(t, r.events(t), 0); stdout != word {
					t.Errorf("stream: got %q, want %q", stdout, word)
				}
			default:
				a.ended(a.submit(program)).succeeded(t, word)
			}
		})
	}
	all.Wait()
}
