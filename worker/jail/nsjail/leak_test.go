package nsjail

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"github.com/bullpen-run/bullpen/worker/jail"
)

func TestManyAtOnce(t *testing.T) {
	t.Parallel()
	m := newMaker(t)
	spec := testSpec()
	memory(64)(&spec)
	var wg sync.WaitGroup
	for i := range 50 {
		wg.Go(func() {
			r := runProgram(t, m, spec,
				program(t, "bash", fmt.Sprintf("echo %d; grep -c . /proc/mounts; id -u; ls -A; exit %d", i, i)))
			r.want(t, jail.Exited, fmt.Sprintf("%d\n%d\n1000", i, 12+len(m.proc.mounts(""))))
			if r.ExitCode != i {
				t.Errorf("exit code %d, want %d", r.ExitCode, i)
			}
		})
	}
	wg.Wait()
}

// footprint counts the resources that this process and the host hold for m.
func footprint(t *testing.T, m *Maker) map[string]int {
	t.Helper()
	f := map[string]int{"descriptors": 0, "children": 0}
	descriptors, err := filepath.Glob("/proc/self/fd/*")
	if err != nil {
		t.Fatal(err)
	}
	for _, d := range descriptors {
		// The watch of the host's memory may still read for a moment when the last program has ended.
		if file, err := os.Readlink(d); err == nil && file != "/proc/meminfo" && file != "/proc/zoneinfo" {
			f["descriptors"]++
		}
	}
	mounts, err := os.ReadFile("/proc/self/mounts")
	if err != nil {
		t.Fatal(err)
	}
	for line := range strings.Lines(string(mounts)) { // other tests on this host also mount
		if strings.Contains(line, m.cfg.RunDir) || m.cfg.VolumeDir != "" && strings.Contains(line, m.cfg.VolumeDir) {
			f["mounts"]++
		}
	}
	f["groups"] = len(groups(t, m))
	tasks, err := filepath.Glob("/proc/self/task/*/children")
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range tasks {
		b, err := os.ReadFile(c)
		if err == nil {
			f["children"] += len(strings.Fields(string(b)))
		}
	}
	return f
}

func TestNothingIsLeftOnTheHost(t *testing.T) {
	m := newMaker(t)
	spec := testSpec()
	p := program(t, "bash", "setsid sleep 600 & echo x")
	// The first run creates what persists: locks on uids, the poller.
	once := func() {
		runProgram(t, m, spec, p).want(t, jail.Exited, "x")
	}
	once()
	m.jails.Wait()
	before := footprint(t, m)
	for i := range repeats(300) {
		switch i % 10 {
		case 0:
			if err := prepare(t, m, spec).Close(); err != nil {
				t.Fatal(err)
			}
		case 1:
			ctx, cancel := context.WithCancel(t.Context())
			cancel()
			if _, err := m.Prepare(ctx, spec); err == nil {
				t.Fatal("prepared with a done context")
			}
		default:
			once()
		}
		m.jails.Wait()
	}
	if after := footprint(t, m); fmt.Sprint(after) != fmt.Sprint(before) {
		t.Errorf("before %v, after %v", before, after)
	}
}

func TestClose(t *testing.T) {
	t.Parallel()
	m, err := Open(Config{NsjailPath: nsjailPath(t), RunDir: runDir(t)})
	if err != nil {
		t.Fatal(err)
	}
	idle := prepare(t, m, testSpec())
	busy := prepare(t, m, testSpec())
	out := newLines()
	p := program(t, "bash", "echo up; sleep 600")
	p.Stdout = out
	type end struct {
		o   jail.Outcome
		err error
	}
	done := make(chan end, 1)
	go func() {
		o, err := busy.Run(t.Context(), p)
		done <- end{o, err}
	}()
	out.next(t)
	if err := m.Close(); err != nil {
		t.Error(err)
	}
	if e := <-done; e.err != nil || e.o.Kind != jail.Killed {
		t.Errorf("got %+v", e)
	}
	if err := idle.Close(); err != nil {
		t.Error(err)
	}
	if _, err := m.Prepare(t.Context(), testSpec()); err == nil {
		t.Error("prepared after Close")
	}
	if left, _ := filepath.Glob(m.cfg.RunDir + "/workers/*"); len(left) != 0 {
		t.Errorf("left %q", left)
	}
}

func TestOpenErrors(t *testing.T) {
	t.Parallel()
	for name, tt := range map[string]struct {
		cfg  Config
		want string
	}{
		"nsjail": {Config{NsjailPath: "/nonexistent", RunDir: runDir(t)}, "deploy/fetch.sh nsjail"},
		"home":   {Config{NsjailPath: nsjailPath(t), RunDir: runDir(t), Home: "home"}, "absolute path"},
		"uids":   {Config{NsjailPath: nsjailPath(t), RunDir: runDir(t), UIDs: UIDs{First: 0, Count: 2}}, "uid range"},
	} {
		if m, err := Open(tt.cfg); err == nil || !strings.Contains(err.Error(), tt.want) {
			t.Errorf("%s: %v, %v", name, m, err)
		}
	}
	m := newMaker(t)
	spec := testSpec()
	spec.Pids = 0
	if _, err := m.Prepare(t.Context(), spec); err == nil {
		t.Error("a jail without a limit on pids")
	}
	spec = testSpec()
	spec.CPU = 1e12
	if _, err := m.Prepare(t.Context(), spec); err == nil || !strings.Contains(err.Error(), "cgroup") {
		t.Errorf("got %v", err)
	}
	m.pids = 100
	if _, err := m.Prepare(t.Context(), testSpec()); err == nil || !strings.Contains(err.Error(), "RLIMIT_NPROC") {
		t.Errorf("got %v", err)
	}
	m.pids = 1000
	m.cfg.NsjailPath = "/bin/false"
	if _, err := m.Prepare(t.Context(), testSpec()); err == nil ||
		!strings.Contains(err.Error(), "the init did not start with ") {
		t.Errorf("got %v", err)
	}
}
