package nsjail

import (
	"bytes"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/bullpen-run/bullpen/worker/jail"
)

// attack is one entry of the abuse list: a hostile program and its required outcome.
type attack struct {
	name           string // what it tries, in a few words; appears in docs/reference/attacks.md
	language, code string
	limits         func(*jail.Spec) // modifies testSpec
	timeout        time.Duration    // defaults to patience
	grace          time.Duration    // if not 0, the program is cancelled with this grace when it has printed a line
	timeoutGrace   time.Duration
	want           jail.Outcome // Kind (default Exited), ExitCode and Signal
	stdout         string       // expected output when contained, with surrounding spaces trimmed
	starved        bool         // its memory limit is too small for a prewarmed interpreter
	long           bool         // not with -short
	also           func(testing.TB, result)
	// run replaces code for an attack that needs more than one program.
	run func(*testing.T, *Maker)
	// call holds the arguments of systemCall, for an attack that makes one system call. Such attacks
	// share a program.
	call string
}

// group is a part of the abuse list.
type group struct {
	name, about string
	attacks     []attack
}

// abuse returns the abuse list. Package e2e has the attacks on the control plane from outside of
// jails, under the same name.
func abuse() []group {
	return []group{
		{"processes", "Too many processes, and processes that refuse to end", processAttacks()},
		{
			"memory", "Memory is charged to the program or refused, except as in [SECURITY.md](../../SECURITY.md)",
			memoryAttacks(),
		},
		{
			"queues", "A queued byte pins at most one page of the host, and the watch finds programs that queue many",
			queueAttacks(),
		},
		{"time", "The worker's clock decides", timeAttacks()},
		{"endings", "Programs that misuse the grace period after SIGTERM", endingAttacks()},
		{"disk", "Home, /tmp and /dev/shm have limits, and end with the jail", diskAttacks()},
		{"output", "Output is complete and unaltered, and cannot block anything", outputAttacks()},
		{"files", "Links, special files and names", fileAttacks()},
		{"homes", "A thread's home is saved and becomes the base of the next one", homeAttacks()},
		{"kernel", "Kernel features that programs do not need", kernelAttacks()},
		{"log", "The kernel's log cannot be filled", logAttacks()},
		{"network", "Policy `blocked`: only its own loopback", networkAttacks()},
		{
			"unrestricted", "Policy `unrestricted`: the public internet, but not the host's network",
			unrestrictedAttacks(),
		},
		{
			"allowlist", "Policy `allowlist`: the listed part, but never the host's network",
			allowlistAttacks(),
		},
		{"tenants", "Programs cannot reach each other", tenantAttacks()},
		{"neighbours", "Calls of another key continue at about the same speed", neighbourAttacks()},
		{"outcome", "A program cannot lie about how it ended", outcomeAttacks()},
		{"control", "Code and variables arrive unaltered", controlAttacks()},
	}
}

// TestAbuse runs each attack in each start mode, or with -short in one of them. It checks that the
// attack is contained, is reported correctly and leaves nothing behind. The attack must not harm a
// jail that waits meanwhile, nor the next jail, which reuses its uids.
func TestAbuse(t *testing.T) {
	network := openNetwork(t) // at most one per process
	for _, g := range abuse() {
		for n, mode := range modes {
			var attacks []attack
			for i, a := range g.attacks {
				if a.long && testing.Short() {
					continue
				}
				if a.starved && mode == cold || !a.starved && (!testing.Short() || i%len(modes) == n) {
					attacks = append(attacks, a)
				}
			}
			if len(attacks) == 0 {
				continue
			}
			t.Run(g.name+"/"+mode, func(t *testing.T) {
				t.Parallel()
				m := openMaker(t, Config{VolumeDir: diskDir(t), Network: network})
				setStartMode(t, m, mode)
				runAttacks(t, m, attacks)
			})
		}
	}
}

// runAttacks runs attacks one after the other in jails of m. The jail that waits during an attack
// has the uids of the attack before.
func runAttacks(t *testing.T, m *Maker, attacks []attack) {
	t.Helper()
	waiting := prepare(t, m, testSpec())
	for _, a := range joinCalls(attacks) {
		t.Run(a.name, func(t *testing.T) {
			a.test(t, m)
			m.canary(t, waiting)
			m.awaitReleased(t)
			waiting = prepare(t, m, testSpec())
		})
	}
	m.canary(t, waiting)
	closeSharedZygote(t, m)
	m.nothingLeft(t)
}

// joinCalls replaces the attacks that make one system call with one attack that makes all of them,
// each in a process of its own.
func joinCalls(attacks []attack) []attack {
	all := attack{name: "system calls", language: "python", code: systemCall}
	var rest []attack
	for _, a := range attacks {
		if a.call == "" {
			rest = append(rest, a)
			continue
		}
		all.code += fmt.Sprintf("print(%q, sc(%s))\n", a.name, a.call)
		all.stdout += a.name + " " + a.stdout + "\n"
	}
	if all.stdout != "" {
		rest = append(rest, all)
	}
	return rest
}

// awaitReleased waits until all jails of m are released, except its shared zygote.
func (m *Maker) awaitReleased(t testing.TB) {
	t.Helper()
	deadline := time.After(patience)
	for tick := time.Tick(time.Millisecond); ; {
		m.mu.Lock()
		left := len(m.live)
		m.mu.Unlock()
		if _, shared := sharedZygotes.Load(m); shared {
			left--
		}
		if left == 0 {
			return
		}
		select {
		case <-tick:
		case <-deadline:
			t.Fatalf("%d jails are not released", left)
		}
	}
}

// test makes the attack and checks that it is contained.
func (a *attack) test(t *testing.T, m *Maker) {
	t.Helper()
	if a.run != nil {
		a.run(t, m)
	} else {
		a.check(t, a.attempt(t, m))
	}
}

func (a *attack) attempt(t testing.TB, m *Maker) result {
	t.Helper()
	spec := testSpec()
	if a.limits != nil {
		a.limits(&spec)
	}
	p := program(t, a.language, a.code)
	if a.timeout != 0 {
		p.Timeout, p.TimeoutGrace = a.timeout, a.timeoutGrace
	}
	if a.grace != 0 {
		p = cancelledAtFirstLine(p)
		p.CancelGrace = a.grace
	}
	return runProgram(t, m, spec, p)
}

func (a *attack) check(t testing.TB, r result) {
	t.Helper()
	want := a.want
	if want.Kind == "" {
		want.Kind = jail.Exited
	}
	if r.Kind != want.Kind || r.ExitCode != want.ExitCode || r.Signal != want.Signal {
		t.Errorf("%s: got %+v, want %s with exit code %d and signal %d\nstderr %s",
			a.name, r.Outcome, want.Kind, want.ExitCode, want.Signal, r.stderr)
	}
	if strings.TrimSpace(r.stdout) != strings.TrimSpace(a.stdout) {
		t.Errorf("%s: %+v\nstdout %q\nwant   %q\nstderr %s", a.name, r.Outcome, r.stdout, a.stdout, r.stderr)
	}
	if want.Kind == jail.TimedOut && (r.Duration < a.timeout || r.Duration > a.timeout+20*time.Second) {
		t.Errorf("%s: lasted %v with a timeout of %v", a.name, r.Duration, a.timeout)
	}
	if a.also != nil {
		a.also(t, r)
	}
}

// canary runs a program that uses a little of every resource and checks that its jail is fresh.
func (m *Maker) canary(t testing.TB, j jail.Jail) {
	t.Helper()
	p := program(t, "bash", `ls -A ~ /tmp /dev/shm; [ $(id -u) = 1000 ] && echo me
for d in ~ /tmp /dev/shm; do echo $d > $d/x && cat $d/x; done; (exit 7) & wait $!; echo $? >&2; ls -d /proc/[0-9]* | wc -l | grep -q '^[1-9]$' && exit 42`)
	var stdout, stderr bytes.Buffer
	p.Stdout, p.Stderr = &stdout, &stderr
	o, err := j.Run(t.Context(), p)
	want := "/dev/shm:\n\n/home/baponi:\n\n/tmp:\nme\n/home/baponi\n/tmp\n/dev/shm\n"
	if err != nil || o.Kind != jail.Exited || o.ExitCode != 42 || stdout.String() != want || stderr.String() != "7\n" {
		t.Errorf("canary in another jail: %+v, %v\nstdout %q\nstderr %q", o, err, stdout.String(), stderr.String())
	}
}

// nothingLeft waits until all jails of m are released and checks that they left nothing on the
// host.
func (m *Maker) nothingLeft(t testing.TB) {
	t.Helper()
	m.jails.Wait()
	m.uids.mu.Lock()
	free := slices.Clone(m.uids.free)
	m.uids.mu.Unlock()
	var ours []int
	for _, pair := range free {
		ours = append(ours, pair.first, pair.first+1)
	}
	if pids := processesOf(t, ours); len(pids) != 0 {
		t.Errorf("processes left: %q", pids)
	}
	if left := groups(t, m); len(left) != 0 {
		t.Errorf("groups left: %q", left)
	}
	mounts, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil {
		t.Error(err)
	}
	if bytes.Contains(mounts, []byte(m.cfg.RunDir)) {
		t.Errorf("mounts left:\n%s", mounts)
	}
	if files, _ := filepath.Glob(m.dir + "/*"); len(files) != 2 {
		t.Errorf("files left: %q", files)
	}
}

// awaitUIDsReleased waits until the uids of a finished jail are available again.
func (m *Maker) awaitUIDsReleased(t testing.TB, s *sandbox) {
	t.Helper()
	deadline := time.After(patience)
	for tick := time.Tick(time.Millisecond); ; {
		m.uids.mu.Lock()
		free := slices.Contains(m.uids.free, s.uids)
		m.uids.mu.Unlock()
		if free {
			return
		}
		select {
		case <-tick:
		case <-deadline:
			t.Fatal("the uids are not released")
		}
	}
}

// processesOf returns the host's live processes of these users, with their names.
func processesOf(t testing.TB, uids []int) []string {
	t.Helper()
	return slices.DeleteFunc(usersOf(t, uids), func(found string) bool {
		dir, _, _ := strings.Cut(found, " ")
		return exiting(t, dir)
	})
}

// usersOf returns the host's processes of these users, with their names. It includes processes that
// are exiting.
func usersOf(t testing.TB, uids []int) []string {
	t.Helper()
	files, err := filepath.Glob("/proc/[0-9]*/status")
	if err != nil {
		t.Fatal(err)
	}
	var found []string
	for _, f := range files {
		b, err := os.ReadFile(f)
		if err != nil {
			continue // it has ended
		}
		_, after, _ := strings.Cut(string(b), "\nUid:\t")
		word, _, _ := strings.Cut(after, "\t")
		if uid, err := strconv.Atoi(word); err == nil && slices.Contains(uids, uid) {
			name, _, _ := strings.Cut(string(b), "\n")
			found = append(found, filepath.Dir(f)+" "+name)
		}
	}
	return found
}

// exiting reports whether the process has executed its last instruction. Such a process has closed
// its files or is about to, which releases the lock on its uids. It can still be visible after its
// uids were reused: for example, a process of a jail that another test process failed to start.
func exiting(t testing.TB, dir string) bool {
	t.Helper()
	b, err := os.ReadFile(filepath.Join(dir, "stat"))
	if err != nil {
		return true // it has ended
	}
	// pid (comm) state ppid pgrp session tty tpgid flags
	fields := strings.Fields(string(b[bytes.LastIndexByte(b, ')')+1:]))
	flags, err := strconv.ParseUint(fields[6], 10, 64)
	if err != nil {
		t.Fatal(err)
	}
	const pfExiting = 4 // PF_EXITING of linux/sched.h
	return flags&pfExiting != 0
}

// openMaker opens a Maker with a uid range of its own and closes it when the test ends. cfg may set
// other fields.
func openMaker(t testing.TB, cfg Config) *Maker {
	t.Helper()
	cfg.NsjailPath, cfg.RunDir = nsjailPath(t), runDir(t)
	cfg.Log = slog.New(slog.NewTextHandler(t.Output(), nil))
	m, err := Open(cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := m.Close(); err != nil {
			t.Error(err)
		}
	})
	return m
}

// small lowers the limits that an attack would take long to reach.
func small(s *jail.Spec) { s.HomeBytes, s.TmpBytes, s.Inodes = 4<<20, 4<<20, 100 }

// terminals returns a change that gives n terminals.
func terminals(n int) func(*jail.Spec) {
	return func(s *jail.Spec) { s.Terminals = n }
}

// memory returns a change that limits memory to n MiB and adjusts the limits that depend on it.
func memory(n int64) func(*jail.Spec) {
	return func(s *jail.Spec) { s.Memory, s.HomeBytes, s.TmpBytes = n<<20, n<<19, n<<18 }
}

// errnos is Python that defines no, which returns the error name of a failed call.
const errnos = `
import ctypes, errno, os, socket, sys, time
libc = ctypes.CDLL(None, use_errno=True)
def no(f, *a):
    try: f(*a)
    except OSError as e: return errno.errorcode[e.errno]
    return 'done'
`

// tried returns Python that prints the results of calls.
func tried(calls ...string) string {
	code := errnos
	for _, c := range calls {
		code += fmt.Sprintf("print(no(%s))\n", c)
	}
	return code
}
