package nsjail

import (
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/bullpen-run/bullpen/worker/jail"
)

// hierarchies returns the number of hierarchies with the controllers that limit a jail: 1 on
// version 2.
func hierarchies(t *testing.T, m *Maker) int {
	t.Helper()
	if m.CgroupVersion() == 2 {
		return 1
	}
	b, err := os.ReadFile("/proc/self/cgroup")
	if err != nil {
		t.Fatal(err)
	}
	n := 0
	for line := range strings.Lines(string(b)) {
		if f := strings.Split(line, ":"); strings.Contains(","+f[1]+",", ",memory,") ||
			strings.Contains(","+f[1]+",", ",pids,") ||
			strings.Contains(","+f[1]+",", ",cpu,") || strings.Contains(","+f[1]+",", ",cpuacct,") {
			n++
		}
	}
	return n
}

// memberships counts the hierarchies in which the process is in group name of m. It reads the
// host's /proc, because the jail's own namespace hides the groups.
func memberships(t *testing.T, m *Maker, pid int, name string) int {
	t.Helper()
	b, err := os.ReadFile(procPath(pid, "cgroup"))
	if err != nil {
		t.Fatal(err)
	}
	return strings.Count(string(b), "/bullpen/"+filepath.Base(m.dir)+"/"+name+"\n")
}

// children returns the pids of a process's children. Only one of its threads may fork.
func children(t *testing.T, pid int) []int {
	t.Helper()
	files, err := filepath.Glob(procPath(pid, "task/*/children"))
	if err != nil {
		t.Fatal(err)
	}
	var pids []int
	for _, f := range files {
		b, err := os.ReadFile(f)
		if err != nil {
			t.Fatal(err)
		}
		for p := range strings.FieldsSeq(string(b)) {
			n, err := strconv.Atoi(p)
			if err != nil {
				t.Fatal(err)
			}
			pids = append(pids, n)
		}
	}
	return pids
}

// limitFiles returns the contents that files of a jail's group must have before its program is
// known.
func limitFiles(m *Maker, spec jail.Spec) map[string]string {
	memory, tasks := strconv.FormatInt(spec.Memory+nsjailMemory, 10), strconv.Itoa(spec.Pids+ownTasks)
	quota := strconv.Itoa(int(spec.CPU * 100_000))
	if m.CgroupVersion() == 2 {
		return map[string]string{"memory.max": memory, "pids.max": tasks, "cpu.max": quota + " 100000"}
	}
	return map[string]string{
		"memory.limit_in_bytes": memory, "pids.max": tasks, "cpu.cfs_quota_us": quota,
		"cpu.cfs_period_us": "100000",
	}
}

func TestAllProcessesAreInTheGroup(t *testing.T) {
	m := newMaker(t)
	spec := testSpec()
	s := prepare(t, m, spec).(*sandbox)
	name := strconv.FormatUint(m.seq.Load(), 10)
	want := hierarchies(t, m)
	for who, pid := range map[string]int{"nsjail": s.proc.Pid, "init": s.initPID} {
		if n := memberships(t, m, pid, name); n != want {
			t.Errorf("before the start %s is in %d groups of %d", who, n, want)
		}
	}
	found := map[string]string{}
	for _, d := range ownGroups(t) {
		for f := range limitFiles(m, spec) {
			if b, err := os.ReadFile(filepath.Join(d, "bullpen", filepath.Base(m.dir), name, f)); err == nil {
				found[f] = strings.TrimSpace(string(b))
			}
		}
	}
	if want := limitFiles(m, spec); fmt.Sprint(found) != fmt.Sprint(want) {
		t.Errorf("limits before the start %v, want %v", found, want)
	}
	done := runSleeper(t, s)
	programs := children(t, s.initPID)
	if len(programs) != 1 {
		t.Errorf("programs %v", programs)
	}
	for _, pid := range programs {
		if n := memberships(t, m, pid, name); n != want {
			t.Errorf("the program is in %d groups of %d", n, want)
		}
	}
	// The kernel's OOM killer chooses the program before nsjail.
	for pid, want := range map[int]string{
		s.initPID: oomScore, programs[0]: oomScore, s.proc.Pid: readTrimmed(t, "/proc/self/oom_score_adj"),
	} {
		if got := readTrimmed(t, procPath(pid, "oom_score_adj")); got != want {
			t.Errorf("oom_score_adj %s, want %s", got, want)
		}
	}
	if err := s.Close(); err != nil {
		t.Error(err)
	}
	if err := <-done; err != nil {
		t.Error(err)
	}
}

// A program that nobody waits for has a tenth of the CPU weight of others.
func TestLowWeight(t *testing.T) {
	m := newMaker(t)
	for _, low := range []bool{false, true} {
		s := prepare(t, m, testSpec())
		p := program(t, "bash", "echo up; sleep 600")
		p.LowWeight = low
		done := sleeper(t, s, p)
		wantWeight(t, m, low)
		if err := errors.Join(s.Close(), <-done); err != nil {
			t.Error(err)
		}
	}
}

// The modules of a zygote are imported at the CPU weight of a program.
func TestWeightOfImports(t *testing.T) {
	m := newMaker(t)
	spec := testSpec()
	spec.Root = withModules(t, m, map[string]string{"waits": "open('/opt/gate').read()\n"})
	gate := filepath.Join(spec.Root, "opt", "gate")
	if err := errors.Join(makeDirs(spec.Root, "opt"), unix.Mkfifo(gate, 0o644)); err != nil {
		t.Fatal(err)
	}
	weighed := make(chan struct{})
	go func() {
		defer close(weighed)
		importing, err := os.OpenFile(gate, os.O_WRONLY, 0) // blocks until the module opens it
		if err != nil {
			t.Error(err)
			return
		}
		wantWeight(t, m, false)
		if err := importing.Close(); err != nil {
			t.Error(err)
		}
	}()
	zygoteOf(t, m, spec, "waits")
	<-weighed
}

// wantWeight checks the CPU weight of the newest jail.
func wantWeight(t *testing.T, m *Maker, low bool) {
	t.Helper()
	want := map[string]string{"cpu.shares": "1024", "cpu.weight": "100"}
	if low {
		want = map[string]string{"cpu.shares": "102", "cpu.weight": "10"}
	}
	name, found := strconv.FormatUint(m.seq.Load(), 10), 0
	for _, d := range ownGroups(t) {
		for file, weight := range want {
			b, err := os.ReadFile(filepath.Join(d, "bullpen", filepath.Base(m.dir), name, file))
			if errors.Is(err, fs.ErrNotExist) {
				continue
			}
			if found++; err != nil || strings.TrimSpace(string(b)) != weight {
				t.Errorf("low %v: %s is %q, %v", low, file, b, err)
			}
		}
	}
	if found != 1 {
		t.Errorf("%d weights found", found)
	}
}

func readTrimmed(t *testing.T, path string) string {
	t.Helper()
	b, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	return strings.TrimSpace(string(b))
}

// Threads of the worker enter groups to start jails. All of them must return to their own group.
func TestThreadsReturnToTheirGroups(t *testing.T) {
	m := newMaker(t)
	jails := make([]jail.Jail, 50)
	var wg sync.WaitGroup
	for i := range jails {
		wg.Go(func() { jails[i] = prepare(t, m, testSpec()) })
	}
	wg.Wait()
	want, err := os.ReadFile("/proc/self/cgroup")
	if err != nil {
		t.Fatal(err)
	}
	threads, err := filepath.Glob("/proc/self/task/*/cgroup")
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range threads {
		if got, err := os.ReadFile(f); err == nil && !bytes.Equal(got, want) {
			t.Errorf("%s: %s", f, got)
		}
	}
	for _, j := range jails {
		if err := j.Close(); err != nil {
			t.Error(err)
		}
	}
}

// Memory that the jail itself uses counts neither towards the program's limit nor in its usage.
func TestUsageExcludesBullpensProcesses(t *testing.T) {
	m := newMaker(t)
	spec := testSpec()
	memory(2)(&spec)
	spec.CPU = 0.01
	p := jail.Program{Argv: []string{"true"}, Dir: "/", Timeout: patience}
	runProgram(t, m, spec, p).want(t, jail.Exited, "")
	s := prepare(t, m, testSpec()).(*sandbox)
	if s.before.CPUTime <= 0 || s.before.OOMKills != 0 {
		t.Errorf("before the program: %+v", s.before)
	}
	if o, err := s.Run(t.Context(), p); err != nil || o.CPUTime <= 0 || o.MemoryPeak <= 0 {
		t.Errorf("%+v, %v", o, err)
	}
}
