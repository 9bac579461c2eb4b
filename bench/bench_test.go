package main

import (
	"bytes"
	"errors"
	"io"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/bullpen-run/bullpen/proto"
)

const okResult = `{"type":"result","status":"success","result":{"success":true,"stdout":"ab\n","stderr":"",` +
	`"exit_code":0,"error":null},"seq":4}` + "\n"

func TestDecodeStream(t *testing.T) {
	status := `{"type":"status","trace_id":"trc_x","status":"running","seq":1}` + "\n"
	a := `{"type":"output","stream":"stdout","data":"a","seq":2}` + "\n"
	b := `{"type":"output","stream":"stdout","data":"b\n","seq":3}` + "\n"
	keepalive := `{"type":"keepalive","seq":2}` + "\n"
	s := &streamed{
		body: []byte(status + a + keepalive + b + okResult),
		marks: []mark{
			{len(status), 1},
			{len(status + a), 2},
			{len(status + a + keepalive + b), 3},
			{len(status+a+keepalive+b) + len(okResult), 4},
		},
	}
	e, err := s.decode()
	if err != nil {
		t.Fatal(err)
	}
	if string(e.output) != "ab\n" || e.outputs != 2 || e.result.Stdout != "ab\n" {
		t.Errorf("decoded %q in %d events", e.output, e.outputs)
	}
	if first, last, whole := s.arrived(e.firstEnd), s.arrived(e.lastEnd), s.arrived(len(s.body)); first != 2 ||
		last != 3 || whole != 4 {
		t.Errorf("arrived after %d, %d and %d, want 2, 3 and 4", first, last, whole)
	}
	for name, body := range map[string]string{
		"a lost event": status + b + okResult, "an event twice": status + a + a + b + okResult,
		"no result": status + a + b, "half a line": status + a[:20], "nothing": "",
	} {
		if _, err := (&streamed{body: []byte(body)}).decode(); err == nil {
			t.Errorf("%s was not noticed", name)
		}
	}
}

func TestBulkOutput(t *testing.T) {
	out := bulkOutput()
	if len(out) != bulkBytes || bytes.Count(out, []byte{'\n'}) != bulkLines || !bytes.HasSuffix(out, []byte("0100000\n")) {
		t.Errorf("the bulk output has %d bytes", len(out))
	}
	for _, b := range bulkPrograms {
		p, err := newProgram(t.TempDir(), b.language, b.code)
		if err != nil {
			t.Fatal(err)
		}
		p.output = string(out)
		if _, err := p.bare(t.Context()); err != nil {
			t.Errorf("%s: %v", b.name, err)
		}
	}
}

func TestBareProgramHasACleanEnvironment(t *testing.T) {
	t.Setenv("NODE_EXTRA_CA_CERTS", "/nowhere")
	p, err := newProgram(t.TempDir(), "bash", `echo "$NODE_EXTRA_CA_CERTS$BULLPEN_API_KEY$HOME"`)
	if err != nil {
		t.Fatal(err)
	}
	p.output = p.dir + "\n"
	if _, err := p.bare(t.Context()); err != nil {
		t.Error(err)
	}
	p.output = "something else"
	if _, err := p.bare(t.Context()); err == nil {
		t.Error("wrong output was not noticed")
	}
}

func TestOverheadExcludesTheJail(t *testing.T) {
	log := filepath.Join(t.TempDir(), "log")
	err := os.WriteFile(log, []byte(`not json
{"msg":"execution ended","trace_id":"trc_a","prepare_ms":4.5,"run_ms":2.25,"duration_ms":2}
{"msg":"request","trace_id":"trc_a","duration_ms":8.5}
{"msg":"request","trace_id":"trc_other","duration_ms":1}
{"msg":"request","trace_id":"trc_b","duration_ms":8.5}
{"msg":"execution ended","trace_id":"trc_c"`), 0o600)
	if err != nil {
		t.Fatal(err)
	}
	want := map[string]bool{"trc_a": true, "trc_b": true, "trc_c": true}
	lines, err := readLog(log, want)
	if err != nil {
		t.Fatal(err)
	}
	o := splitProfile(cell{Callers: 1, samples: []sample{
		{9 * time.Millisecond, "trc_a"}, {9 * time.Millisecond, "trc_b"}, {9 * time.Millisecond, "trc_c"},
	}}, lines)
	if o.Added.Runs != 1 || o.Unknown != 2 {
		t.Errorf("%d runs are known and %d are not, want 1 and 2", o.Added.Runs, o.Unknown)
	}
	if o.Added.P50 != 2.25 || o.Prepare.P50 != 4.5 || o.Run.P50 != 2.25 || o.Server.P50 != 1.75 || o.Client.P50 != .5 {
		t.Errorf("added %v, prepare %v, run %v, inside %v, outside %v", o.Added.P50, o.Prepare.P50, o.Run.P50, o.Server.P50,
			o.Client.P50)
	}
}

func TestParseStat(t *testing.T) {
	p, ok := parseStat([]byte("42 (a) b (c) Z 7 1 1 0"))
	if want := (process{42, 7, "a) b (c", true}); !ok || p != want {
		t.Errorf("parsed %+v, want %+v", p, want)
	}
	for _, bad := range []string{"", "42", "42 (a", "x (a) S 1", "42 (a) S"} {
		if _, ok := parseStat([]byte(bad)); ok {
			t.Errorf("%q was taken", bad)
		}
	}
	all := []process{{pid: 1}, {pid: 2, parent: 1}, {pid: 3, parent: 2}, {pid: 4, parent: 9}}
	if got := descendants(all, 1); len(got) != 2 || got[0].pid != 2 || got[1].pid != 3 {
		t.Errorf("below 1 there are %v", got)
	}
}

func TestBusyMachine(t *testing.T) {
	for load, want := range map[string]bool{"0.10 2.00 2.00 1/99 7": false, "1.20 0.10 0.10 1/99 7": true, "": false} {
		if got := (machine{Cores: 2, Load: load}).busy(); got != want {
			t.Errorf("load %q on 2 cores is busy: %v, want %v", load, got, want)
		}
	}
}

func TestParseMetrics(t *testing.T) {
	got := parseMetrics("# HELP go_goroutines N\ngo_goroutines 52\nx{a=\"b\"} 3\nprocess_resident_memory_bytes 3.6e+07\n")
	if want := map[string]float64{"go_goroutines": 52, "process_resident_memory_bytes": 3.6e7}; !maps.Equal(got, want) {
		t.Errorf("parsed %v, want %v", got, want)
	}
}

func TestLeaksAreGrownCounts(t *testing.T) {
	before := &look{kinds: map[string][]string{kindFile: {"socket", "socket"}, kindMount: {"/a"}}, goroutines: 5}
	after := &look{kinds: map[string][]string{kindFile: {"socket", "pipe", "pipe"}}, goroutines: 5}
	leaks := before.leaks(after)
	if len(leaks) != 1 || !leaks[kindFile] {
		t.Errorf("leaks are %v, want descriptors only", leaks)
	}
	var out strings.Builder
	before.printGrown(&out, after, kindFile)
	if out.String() != "  +2 pipe\n" {
		t.Errorf("printed %q", out.String())
	}
}

func TestReportListsMissingFigures(t *testing.T) {
	r := &report{
		OverheadUnknown: "no log",
		Throughput:      []throughput{{Program: "p", Bullpen: &summary{Errors: 1, FirstError: "lost"}}},
	}
	for _, f := range r.figures() {
		if f.verdict() != "not measured" || f.value() != "-" || f.Note == "" {
			t.Errorf("%+v", f)
		}
	}
	r = &report{
		Overhead:  []overhead{{Language: "bash", Added: &summary{Runs: 9, P50: 1.5}, Prepare: &summary{}, Run: &summary{}}},
		FirstLine: &firstLine{Bare: &summary{}, Bullpen: &summary{Runs: 1, P50: 29.9}}, Memory: &memory{IdleMB: 60},
		Throughput: []throughput{{Program: "p", Bullpen: &summary{Runs: 1, Errors: 1}, Result: &summary{}, BullpenMB: 99}},
		Timeouts:   &summary{Runs: 2, Min: 0, Max: 50},
		Webhooks: &webhooks{
			PerSecond: 1000, Latency: &summary{P99: 49}, DeadOnes: &summary{P99: 49 * 1.3}, PendingMB: 200, ResumeMillis: 4999,
		},
		Threads:  &threads{WarmAdds: 15, ChangeAdds: 39, ChangeBytes: 4000, RestoreMB: 150, ForkP50: 9, LargeMemory: 200},
		Pressure: &pressure{Submissions: &summary{Runs: 9}, PerSecond: 1500, StreamsMB: 100},
		Fairness: &fairness{
			Job: &summary{Runs: 9, P50: 100}, Orgs: &summary{Runs: 9, P99: 149},
			Keys: &summary{Runs: 9, P99: 150},
		},
		Batches: &batches{
			AcceptedS: 19, AcceptedMB: 300, Small: 2000, SmallS: 9, CallersS: 9, Requests: 201,
			Alone: &summary{Runs: 9, P99: 10}, Beside: &summary{Runs: 9, P99: 15},
		},
		Schedules: &schedules{
			Accepted: &summary{Runs: 9, P50: 5000, Max: 15_001}, Small: &summary{Runs: 9, P50: 5000},
			Started: &summary{Runs: 9},
		},
		Sandboxes: &sandboxes{
			Bare: &summary{P50: 1}, Inline: &summary{Runs: 9, P50: 10}, First: &summary{P50: 40}, Command: &summary{P50: 11},
			Idle: 200, IdleMiB: 16, IdleCPU: 1, Creates: &summary{Max: 1000}, DownloadS: 1, ResumeS: 1.6,
		},
		Contexts: &contexts{
			Import: &summary{P50: 100}, Fork: &summary{P50: 1}, First: &summary{Runs: 9, P50: 10}, Cell: &summary{P50: 3},
			Picture: &summary{P50: 11}, MemoryMiB: 20,
		},
		AgentSessions: &agentSessions{
			Alone: &summary{Runs: 9, P50: 5}, Many: &summary{}, PerSecond: 2000, MemoryMB: 300,
		},
	}
	want := []bool{
		false, true, false, true, false, true, true, false, false, true, false, true, false, true, true, false,
		true, false, true, false, true, false, true, false, true, false, true,
		true, false, true, false, true, true, false,
		true, true, true, false, true,
		false, true, false,
	}
	for i, f := range r.figures() {
		if verdict := map[bool]string{true: "met", false: "not met"}[want[i]]; f.verdict() != verdict {
			t.Errorf("%s: %s, want %s", f.Name, f.verdict(), verdict)
		}
	}
}

func TestTargetsAreMetOrNot(t *testing.T) {
	one := func(l proto.Language, callers int, bare, bullpen, perSecond float64) cell {
		c := cell{
			Language: l, Callers: callers, Bare: &summary{Runs: 1, P50: bare, PerSecond: 100},
			Bullpen: &summary{Runs: 1, P50: bullpen, PerSecond: perSecond},
		}
		c.Ratio = &ratios{P50: bullpen / bare, PerSecond: perSecond / 100}
		return c
	}
	r := &report{
		Cells: []cell{
			one(proto.Python, 1, 100, 35, 0), one(proto.Python, 8, 1, 1, 249), one(proto.Bash, 1, 1, 2, 0),
			one(proto.Bash, 8, 1, 1, 799),
			one(proto.Node, 1, 100, 46, 0), one(proto.Node, 8, 1, 1, 85),
		},
		Half: []halfLoad{
			{Language: proto.Python, Latency: &summary{Runs: 1}, Ratio: 5},
			{Language: proto.Node, Latency: &summary{Runs: 1, Errors: 1}, Ratio: 2},
			{Language: proto.Bash, Unavailable: "no bash"},
		},
		Memory: &memory{Jails: []jailMemory{{proto.Bash, 20, 20}, {proto.Python, 20, 11.9}}},
		Bursts: &summary{Runs: 3, P50: 400, Max: 401},
	}
	want := []string{
		"met", "not met", "met", "not met", "not met", "met", "met", "not met", "not measured", "met",
		"met", "not met",
	}
	var got []string
	for _, f := range r.targets() {
		got = append(got, f.verdict())
	}
	if !slices.Equal(got, want) {
		t.Errorf("the targets are %q, want %q", got, want)
	}
	for verdict, of := range map[string]*summary{"not measured": {}, "not met": {Errors: 1, FirstError: "lost"}} {
		r = &report{
			Cells:  []cell{{Language: proto.Python, Callers: 1, Bare: &summary{Runs: 1}, Bullpen: of, Ratio: &ratios{}}},
			Half:   []halfLoad{{Language: proto.Python, Latency: of}},
			Bursts: of,
		}
		for _, f := range r.targets() {
			want := verdict
			if strings.Contains(f.Note, "unavailable") || strings.HasPrefix(f.Note, "needs") {
				want = "not measured"
			}
			if f.verdict() != want || f.value() != "-" || f.Note == "" {
				t.Errorf("%+v is %s, want %s", f, f.verdict(), want)
			}
		}
	}
	r = &report{Cells: []cell{{Language: proto.Node, Unavailable: "no node"}}, Memory: &memory{}}
	for _, f := range r.targets() {
		if f.verdict() != "not measured" || f.Note == "" {
			t.Errorf("%+v", f)
		}
	}
}

func TestFlags(t *testing.T) {
	for _, bad := range [][]string{
		{"--url", "http://x"},
		{"--soak", "-1"},
		{"--duration", "-1s"},
		{"more"},
		{"--soak", "1", "--url", "http://x", "--key", "k"},
		{"--profile", "x", "--url", "http://x", "--key", "k"},
		{"--profile", "x", "--soak", "1"},
		{"--soak-for", "-1s"},
		{"--soak-for", "1h", "--soak", "1"},
		{"--soak-for", "1h", "--url", "http://x", "--key", "k"},
	} {
		t.Setenv("BULLPEN_API_KEY", "")
		if _, err := parse(bad, io.Discard); err == nil {
			t.Errorf("%v was taken", bad)
		}
	}
	o, err := parse([]string{"--quick"}, io.Discard)
	if err != nil || o.duration != quickCellDuration {
		t.Errorf("--quick gives %+v, %v", o, err)
	}
}

func TestReportIsWrittenWhole(t *testing.T) {
	path := filepath.Join(t.TempDir(), "out.json")
	r := &report{Memory: &memory{}}
	if err := r.save(path, io.Discard); err != nil {
		t.Fatal(err)
	}
	if _, err := os.Stat(path + ".tmp"); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("something was left beside the report: %v", err)
	}
	if err := r.print(io.Discard); err != nil {
		t.Error(err)
	}
}
