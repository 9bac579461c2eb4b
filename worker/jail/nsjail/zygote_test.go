package nsjail

import (
	"errors"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/bullpen-run/bullpen/worker/jail"
)

// zygoteOf makes a zygote and closes it when the test ends.
func zygoteOf(tb testing.TB, m *Maker, spec jail.Spec, modules ...string) jail.Zygote {
	tb.Helper()
	p := newZygote(tb, m, spec, modules...)
	tb.Cleanup(func() { closeZygote(tb, p) })
	return p
}

func closeZygote(tb testing.TB, p jail.Zygote) {
	tb.Helper()
	if err := p.Close(); err != nil {
		tb.Error(err)
	}
}

// newZygote makes a zygote for jails with this spec.
func newZygote(tb testing.TB, m *Maker, spec jail.Spec, modules ...string) jail.Zygote {
	tb.Helper()
	p, err := jail.Source{Home: m.Home()}.Zygote(modules)
	if err != nil {
		tb.Fatal(err)
	}
	spec.Prewarm = &p
	parent, err := m.Zygote(tb.Context(), spec)
	if err != nil {
		tb.Fatal(err)
	}
	return parent
}

// fork makes a jail with a prewarmed python.
func fork(tb testing.TB, p jail.Zygote, spec jail.Spec) jail.Jail {
	tb.Helper()
	return forkFor(tb, p, spec, "python")
}

// forkFor makes a jail with a prewarmed interpreter of a language.
func forkFor(tb testing.TB, p jail.Zygote, spec jail.Spec, language string) jail.Jail {
	tb.Helper()
	spec.Prewarm = prewarmed(tb, language)
	j, err := p.Fork(tb.Context(), spec)
	if err != nil {
		tb.Fatal(err)
	}
	tb.Cleanup(func() {
		if err := j.Close(); err != nil {
			tb.Error(err)
		}
	})
	return j
}

// identity is a program that prints its namespaces and the contents of its jail.
const identity = `
import os, sys
for ns in sorted(os.listdir("/proc/self/ns")):
    print(ns, os.readlink("/proc/self/ns/" + ns))
print(os.listdir("/tmp"), os.listdir("/dev/shm"), os.listdir("."), len([p for p in os.listdir("/proc") if p.isdigit()]))
for mark in ("/tmp/mark", "/dev/shm/mark", "mark"):
    open(mark, "w").close()
`

// Executions that are forked from one interpreter share only its initial state. Jails that the
// zygote's init makes share nothing.
func TestForksAreIsolated(t *testing.T) {
	t.Parallel()
	m := newMaker(t)
	p := zygoteOf(t, m, testSpec())
	const count = 6
	var jails [count]jail.Jail
	uids := map[int]bool{}
	for i := range jails { // all exist at once
		jails[i] = forkFor(t, p, testSpec(), []string{"python", "bash"}[i%2])
		uids[jails[i].(*sandbox).uids.first] = true
	}
	if len(uids) != count {
		t.Errorf("%d jails have only %d pairs of uids", count, len(uids))
	}
	seen := map[string]bool{}
	for _, j := range jails {
		r := runIn(t, j, program(t, "python", identity))
		if r.Kind != jail.Exited || r.ExitCode != 0 || !strings.Contains(r.stdout, "[] [] ['main.py'] 2\n") {
			t.Fatalf("%+v", r)
		}
		for line := range strings.Lines(r.stdout) {
			if strings.Contains(line, ":[") && !strings.HasPrefix(line, "time") {
				if seen[line] && !strings.Contains(line, "_for_children") {
					t.Errorf("two jails have the namespace %s", line)
				}
				seen[line] = true
			}
		}
	}
	// The kinds are cgroup, ipc, mnt, net, pid, user and uts; pid_for_children counts once more.
	if kinds := len(seen) / count; kinds < 7 {
		t.Errorf("only %d kinds of namespaces in %v", kinds, seen)
	}
}

// Random values differ between forks, even if a module was seeded before the fork.
func TestForksAreSeeded(t *testing.T) {
	t.Parallel()
	m := newMaker(t)
	p := zygoteOf(t, m, testSpec(), "random", "uuid", "tempfile", "ssl", "secrets")
	seen := map[string]bool{}
	for range 5 {
		r := runIn(t, fork(t, p, testSpec()), program(t, "python", `
import random, uuid, tempfile, ssl, secrets, os
print(random.random(), random.SystemRandom().random())
print(uuid.uuid4()); print(uuid.uuid1())
print(next(tempfile._get_candidate_names()))
print(ssl.RAND_bytes(16)); print(secrets.token_hex()); print(os.urandom(8))
`))
		if r.Kind != jail.Exited || r.ExitCode != 0 {
			t.Fatalf("%+v", r)
		}
		for line := range strings.Lines(r.stdout) {
			if seen[line] {
				t.Errorf("twice: %s", line)
			}
			seen[line] = true
		}
	}
	hash := func(p jail.Zygote) string {
		return runIn(t, fork(t, p, testSpec()), program(t, "python", "print(hash('x'))")).stdout
	}
	if hash(p) == hash(zygoteOf(t, m, testSpec())) {
		t.Error("two zygotes have the same hash seed")
	}
}

// Modules that the profile preloads are present. Modules that forking needs are absent and work
// when they are imported.
func TestModulesOfAFork(t *testing.T) {
	t.Parallel()
	m := newMaker(t)
	const imported = "import sys; print([m in sys.modules for m in ('decimal', 'ctypes', '_ctypes', 'gc', '_socket', " +
		"'random')])\n"
	for modules, want := range map[string]string{
		"": "[False, False, False, False, False, False]", "decimal": "[True, False, False, False, False, False]",
	} {
		p := zygoteOf(t, m, testSpec(), strings.Fields(modules)...)
		r := runIn(t, fork(t, p, testSpec()), program(t, "python", imported+`
import ctypes, socket, gc, resource
libc = ctypes.CDLL(None)
print(libc.getpid(), ctypes.c_int(7).value, socket.socketpair()[0].family.name, gc.isenabled())
class P(ctypes.Structure):
    _fields_ = [("x", ctypes.c_int)]
print(P(3).x, resource.getrlimit(resource.RLIMIT_NPROC))
`))
		r.want(t, jail.Exited, want+"\n2 7 AF_UNIX True\n3 (256, 256)")
	}
	spec := testSpec()
	program, err := jail.Source{Home: m.Home()}.Zygote([]string{"no_such_module"})
	if err != nil {
		t.Fatal(err)
	}
	spec.Prewarm = &program
	if _, err := m.Zygote(t.Context(), spec); err == nil ||
		!strings.Contains(err.Error(), "No module named 'no_such_module'") {
		t.Errorf("a module that is not there: %v", err)
	}
}

// withModules makes an image from the host's /usr plus Python modules by name.
func withModules(tb testing.TB, m *Maker, modules map[string]string) string {
	tb.Helper()
	site := strings.TrimSpace(runCode(tb, m, "python", "import site; print(site.getsitepackages()[0])").stdout)
	dir := tempDir(tb, "")
	for name, code := range modules {
		write(tb, filepath.Join(dir, "more"), strings.TrimPrefix(site, "/usr/")+"/"+name+".py", []byte(code), 0o644)
	}
	image := filepath.Join(dir, "image")
	if err := makeDirs(image, "usr"); err != nil {
		tb.Fatal(err)
	}
	for _, name := range systemDirs {
		if target, err := os.Readlink("/" + name); err == nil {
			if err := os.Symlink(target, filepath.Join(image, name)); err != nil {
				tb.Fatal(err)
			}
		}
	}
	usr := filepath.Join(image, "usr")
	if err := unix.Mount("overlay", usr, "overlay", unix.MS_RDONLY, "lowerdir="+dir+"/more:/usr"); err != nil {
		tb.Fatal(err)
	}
	tb.Cleanup(func() {
		if err := unix.Unmount(usr, unix.MNT_DETACH); err != nil {
			tb.Error(err)
		}
	})
	return image
}

// A module may write to the home and to /tmp when it is imported, as matplotlib does. A fork has a
// home and a /tmp of its own, wherever they are.
func TestPreloadedModuleWritesFiles(t *testing.T) {
	t.Parallel()
	m := openMaker(t, Config{VolumeDir: diskDir(t)})
	image := withModules(t, m, map[string]string{"writes_files": `
import os, tempfile
config = os.path.join(os.path.expanduser("~"), ".config", "writes_files")
os.makedirs(config)
for name in os.path.join(config, "cache"), os.path.join(tempfile.mkdtemp(), "x"), os.path.join(os.environ["TMPDIR"], "x"):
    with open(name, "w") as f: f.write("x" * 100_000)
`})
	for name, change := range map[string]func(*jail.Spec){
		"in memory":     func(*jail.Spec) {},
		"on disk":       func(s *jail.Spec) { s.HomeBytes, s.TmpBytes = s.Memory, s.Memory },
		"of the caller": func(s *jail.Spec) { s.MountHomeLater = true },
	} {
		t.Run(name, func(t *testing.T) {
			spec := testSpec()
			spec.Root = image
			change(&spec)
			j := fork(t, zygoteOf(t, m, spec, "writes_files"), spec)
			if spec.MountHomeLater {
				if err := j.MountHome(t.Context(), newThread(t, nil)); err != nil {
					t.Fatal(err)
				}
			}
			runIn(t, j, program(t, "python", `
import os, sys
print("writes_files" in sys.modules, os.listdir("/tmp"), os.listdir(os.environ["HOME"]), os.stat("/tmp").st_uid, os.stat(".").st_uid)
open("x", "w").close(); open("/tmp/x", "w").close()
`)).want(t, jail.Exited, "True [] ['main.py'] 1000 1000")
		})
	}
}

// A module whose thread does not stop before a fork is rejected with an error: a fork would lack
// the thread.
func TestPreloadedModulesHaveNoThreads(t *testing.T) {
	t.Parallel()
	m := newMaker(t)
	spec := testSpec()
	spec.Root = withModules(t, m, map[string]string{
		"keeps_a_thread": "import threading\nthreading.Thread(target=threading.Event().wait, daemon=True).start()\n",
		"ends_its_thread": `
import os, threading
end = threading.Event()
threading.Thread(target=end.wait).start()
def stop():
    end.set()
    while len(os.listdir("/proc/self/task")) > 1:
        pass
os.register_at_fork(before=stop)
`,
	})
	runIn(t, fork(t, zygoteOf(t, m, spec, "ends_its_thread"), spec),
		program(t, "python", "import sys; print('ends_its_thread' in sys.modules)")).
		want(t, jail.Exited, "True")
	program, err := jail.Source{Home: m.Home()}.Zygote([]string{"decimal", "keeps_a_thread"})
	if err != nil {
		t.Fatal(err)
	}
	spec.Prewarm = &program
	if _, err := m.Zygote(t.Context(), spec); err == nil ||
		!strings.Contains(err.Error(),
			"what is preloaded has threads: leave out the module that starts them, of decimal,keeps_a_thread") {
		t.Errorf("a module that keeps a thread: %v", err)
	}
}

// Finalizers and exit handlers of preloaded modules run in a fork as they do elsewhere.
func TestPreloadedModulesAreFinalized(t *testing.T) {
	t.Parallel()
	m := newMaker(t)
	spec := testSpec()
	spec.Root = withModules(t, m, map[string]string{"has_an_end": "class C:\n  def __del__(self): print('gone')\nc = C()"})
	for code, modules := range map[string][]string{
		"pass": {"has_an_end"},
		`
import logging.handlers, sys
logging.getLogger().addHandler(logging.handlers.MemoryHandler(100, target=logging.StreamHandler(sys.stdout)))
logging.warning("gone")`: {"logging"},
	} {
		runIn(t, fork(t, zygoteOf(t, m, spec, modules...), spec), program(t, "python", code)).want(t, jail.Exited, "gone")
	}
}

// A fork that is killed harms neither the zygote nor the other forks.
func TestKilledForkHarmsNoOther(t *testing.T) {
	t.Parallel()
	m := newMaker(t)
	spec := testSpec()
	spec.Memory, spec.HomeBytes, spec.TmpBytes, spec.Pids = 256<<20, 8<<20, 8<<20, 20
	p := zygoteOf(t, m, spec)
	other := fork(t, p, spec)
	for code, kind := range map[string]jail.Kind{
		"x = bytearray(1 << 30)": jail.OutOfMemory,
		"import os\nwhile True:\n    try: os.fork()\n    except OSError: pass": jail.TimedOut,
		"import os; os.kill(os.getpid(), 9)":                                   jail.Signaled,
		"import os; os.closerange(0, 1000); os.abort()":                        jail.Signaled,
	} {
		program := program(t, "python", code)
		if kind == jail.TimedOut {
			program.Timeout = time.Second
		}
		if r := runIn(t, fork(t, p, spec), program); r.Kind != kind {
			t.Errorf("%s: %+v", code, r)
		}
	}
	runIn(t, other, program(t, "python", "print(1)")).want(t, jail.Exited, "1")
	runIn(t, fork(t, p, spec), program(t, "python", "print(2)")).want(t, jail.Exited, "2")
}

func TestForksDieWithTheirZygote(t *testing.T) {
	t.Parallel()
	m := newMaker(t)
	p := zygoteOf(t, m, testSpec())
	j := fork(t, p, testSpec())
	if !p.Alive() || !j.Alive() {
		t.Error("live jails are reported dead")
	}
	if err := unix.Kill(inJail(t, p.(*zygote).jail, "python"), unix.SIGKILL); err != nil {
		t.Fatal(err)
	}
	for _, fd := range []int{p.(*zygote).jail.initFD, j.(*sandbox).initFD} {
		if !exits(t, fd) {
			t.Error("an init did not exit")
		}
	}
	if p.Alive() || j.Alive() {
		t.Error("dead jails are reported alive")
	}
	if _, err := p.Fork(t.Context(), prewarmSpec(t, "python")); err == nil {
		t.Error("Fork of a dead zygote succeeded")
	}
}

// A closed zygote ends with its last fork and releases everything.
func TestZygoteClose(t *testing.T) {
	t.Parallel()
	m := newMaker(t)
	p := newZygote(t, m, testSpec())
	j := fork(t, p, testSpec())
	closed := make(chan error)
	go func() { closed <- p.Close() }()
	for p.Alive() {
		runtime.Gosched()
	}
	if j.Alive() {
		t.Error("an unused fork of a closed zygote is reported alive")
	}
	if _, err := p.Fork(t.Context(), prewarmSpec(t, "python")); !errors.Is(err, errClosed) {
		t.Errorf("fork of a closed zygote: %v", err)
	}
	runIn(t, j, program(t, "python", "print(1)")).want(t, jail.Exited, "1")
	if err := <-closed; err != nil {
		t.Error(err)
	}
	m.nothingLeft(t)
}

func TestMaximumOfForks(t *testing.T) {
	t.Parallel()
	m := newMaker(t)
	p := zygoteOf(t, m, testSpec())
	var all []jail.Jail
	for range DefaultForks {
		all = append(all, fork(t, p, testSpec()))
	}
	if _, err := p.Fork(t.Context(), prewarmSpec(t, "python")); !errors.Is(err, jail.ErrFull) || !p.Alive() {
		t.Errorf("one more: %v", err)
	}
	if err := all[0].Close(); err != nil {
		t.Fatal(err)
	}
	runIn(t, fork(t, p, testSpec()), program(t, "python", "print(1)")).want(t, jail.Exited, "1")
}

// A fork supports what other jails do: a thread's home and directories on disk.
func TestForkWithHome(t *testing.T) {
	t.Parallel()
	m := openMaker(t, Config{VolumeDir: diskDir(t)})
	th := newThread(t, map[string]string{"old": "1", strings.TrimPrefix(userSite(t), "/") + "/own.py": "x = 5"})
	spec := testSpec()
	spec.MountHomeLater = true
	spec.TmpBytes = spec.Memory // on disk
	j := fork(t, zygoteOf(t, m, spec), spec)
	if err := j.MountHome(t.Context(), th); err != nil {
		t.Fatal(err)
	}
	r := runIn(t, j, program(t, "python", `
import os, own
print(sorted(os.listdir()), own.x, [l.split()[2] for l in open("/proc/mounts") if l.split()[1] == "/tmp"])
open("new", "w").write("2"); open("/tmp/x", "w").write("x")
`))
	r.want(t, jail.Exited, "['.local', 'main.py', 'old'] 5 ['ext4']")
	if err := th.save(); err != nil {
		t.Fatal(err)
	}
	if b, err := os.ReadFile(filepath.Join(th.lower, "new")); err != nil || string(b) != "2" {
		t.Errorf("what the program wrote: %q, %v", b, err)
	}
}

// A fork exits without freeing the pages that it shares if nothing in its program can observe the
// end. Freeing would copy them. The test counts page faults of child processes that end in the same
// way.
func TestForkExitsFast(t *testing.T) {
	t.Parallel()
	m := newMaker(t)
	j := fork(t, zygoteOf(t, m, testSpec()), testSpec())
	runIn(t, j, program(t, "python", `
import os, resource
faults = [0]
for leave in ("x = [1, {}]", "class C:\n  def __del__(self): pass\nc = C()"):
    if os.fork() == 0:
        exec(leave)
        break
    if os.wait()[1]: print("failed")
    faults.append(resource.getrusage(resource.RUSAGE_CHILDREN).ru_minflt)
else:
    soon, clearing = faults[1], faults[2] - faults[1]
    print(2 * soon < clearing or (soon, clearing))
`)).want(t, jail.Exited, "True")
}

// The memory of a zygote and of a waiting fork, in bytes, stays within the figures in
// docs/explanation/sandbox.md.
func TestMemoryOfForks(t *testing.T) {
	m := newMaker(t)
	p := zygoteOf(t, m, testSpec())
	fork(t, p, testSpec()) // loads the pages that all forks share
	j := fork(t, p, testSpec())
	for what, of := range map[string]interface{ Memory() (int64, error) }{"a parent": p, "a fork": j} {
		if n, err := of.Memory(); err != nil || n < 1<<18 || n > 12<<20 {
			t.Errorf("%s: %d KiB, %v", what, n>>10, err)
		} else {
			t.Logf("%s: %d KiB", what, n>>10)
		}
	}
}

// confinement is a program that prints what it is allowed to do.
const confinement = `
import ctypes, os, re, resource, signal, stat
status = open("/proc/self/status").read()
for name in ("Umask", "Uid", "Gid", "Groups", "NoNewPrivs", "Seccomp", "Seccomp_filters", "CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb",
             "SigBlk", "SigIgn", "SigCgt", "Threads", "TracerPid", "CoreDumping"):
    print(re.search("^" + name + ":.*", status, re.M)[0])
print(open("/proc/self/limits").read())
libc = ctypes.CDLL(None)
print([libc.prctl(option, 0, 0, 0, 0) for option in (3, 7, 27, 39)])  # dumpable, keepcaps, securebits, no_new_privs
print(open("/proc/self/cgroup").read().count(":/\n"), open("/proc/self/oom_score_adj").read(), os.nice(0), os.getpriority(os.PRIO_PROCESS, 0))
me = os.getpid()
print(os.sched_getscheduler(0), os.getsid(0) == me, os.getpgid(0) == me, os.getppid(), os.path.exists("/dev/tty") and "tty")
for fd in range(1024):
    try: s = os.fstat(fd)
    except OSError: continue
    print(fd, stat.filemode(s.st_mode), os.readlink("/proc/self/fd/%d" % fd).split(":")[0])
inits = ["/proc/1/task/%s/status" % task for task in os.listdir("/proc/1/task")]
print(sorted({" ".join(re.findall("^(?:Uid|Cap[PEB]|Seccomp:|NoNewPrivs).*", open(init).read(), re.M)) for init in inits}))
for place in ("/proc/1/mem", "/proc/1/environ", "/proc/1/root", "/proc/1/fd", "/proc/1/maps"):
    try: print(place, os.readlink(place) if place.endswith("root") else os.listdir(place) if place.endswith("fd") else open(place).read(1))
    except OSError as e: print(place, e.errno)
`

// A fork is confined in every respect like a program that was started.
func TestForkIsConfined(t *testing.T) {
	t.Parallel()
	m := newMaker(t)
	p := program(t, "python", confinement)
	want := runIn(t, prepare(t, m, testSpec()), p)
	if want.ExitCode != 0 || !strings.Contains(want.stdout, "CapBnd:\t0000000000000000\n") {
		t.Fatalf("%+v", want)
	}
	parent, bare := zygoteOf(t, m, testSpec()), bareZygote(t, m, testSpec())
	for name, j := range map[string]jail.Jail{
		"of an interpreter": fork(t, parent, testSpec()), "of its init": forkFor(t, parent, testSpec(), "bash"),
		"of an init alone": fork(t, bare, testSpec()),
	} {
		if got := runIn(t, j, p); got.stdout != want.stdout {
			t.Errorf("output of a fork %s\n%s%s\nand another jail\n%s", name, got.stdout, got.stderr, want.stdout)
		}
	}
}

// bareZygote makes a zygote without an interpreter and closes it when the test ends.
func bareZygote(t *testing.T, m *Maker, spec jail.Spec) jail.Zygote {
	t.Helper()
	p, err := m.Zygote(t.Context(), spec)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { closeZygote(t, p) })
	return p
}

// A zygote works even where no interpreter can be forked, as in an image that has none.
func TestZygoteWithoutInterpreter(t *testing.T) {
	t.Parallel()
	m := newMaker(t)
	p := bareZygote(t, m, testSpec())
	for language, code := range map[string]string{
		"bash": "echo $$ $((6*7))", "node": "console.log(process.pid, 6*7)",
		"python": "import os; print(os.getpid(), 6*7)",
	} {
		j := forkFor(t, p, testSpec(), language)
		runIn(t, j, program(t, language, code)).want(t, jail.Exited, "2 42")
	}
	spec := testSpec()
	spec.Prewarm = nil
	j, err := p.Fork(t.Context(), spec)
	if err != nil {
		t.Fatal(err)
	}
	runIn(t, j, program(t, "bash", "exit 7")).want(t, jail.Exited, "")
	if n, err := p.Memory(); err != nil || n < 1<<18 || n > 4<<20 {
		t.Errorf("the zygote uses %d KiB, %v", n>>10, err)
	}
	if !p.Alive() {
		t.Error("the zygote is dead")
	}
}

// The kernel counts queued signals for all jails together. A program that queues as many as it can
// does not stop other jails from being made and forked, and their programs can queue as many.
func TestQueuedSignalsAreLimitedPerJail(t *testing.T) {
	t.Parallel()
	m := newMaker(t)
	p := program(t, "python", `
import ctypes, os, signal
libc, rt = ctypes.CDLL(None), 40
signal.pthread_sigmask(signal.SIG_BLOCK, [rt])
queued = 0
while queued < 1 << 20 and libc.sigqueue(os.getpid(), rt, None) == 0:
    queued += 1
print(queued, flush=True)
if "HOLD" in os.environ:
    signal.pause()
`)
	one, other := zygoteOf(t, m, testSpec()), zygoteOf(t, m, testSpec())
	held := make(chan error, 2)
	holders := []jail.Jail{prepare(t, m, testSpec()), fork(t, one, testSpec())}
	for _, j := range holders {
		out, p := newLines(), p
		p.Env, p.Stdout = append(slices.Clone(p.Env), "HOLD=1"), out
		go func() {
			_, err := j.Run(t.Context(), p)
			held <- err
		}()
		if n := out.next(t); n != "1024" {
			t.Errorf("a program has %s signals queued", n)
		}
	}
	for _, j := range []jail.Jail{
		prepare(t, m, testSpec()), fork(t, other, testSpec()), fork(t, one, testSpec()),
		forkFor(t, one, testSpec(), "bash"),
	} {
		runIn(t, j, p).want(t, jail.Exited, "1024")
	}
	for _, j := range holders {
		if err := errors.Join(j.Close(), <-held); err != nil {
			t.Error(err)
		}
	}
}

// A fork that fails harms neither the zygote nor the other forks.
func TestForkFails(t *testing.T) {
	t.Parallel()
	m := newMaker(t)
	p := zygoteOf(t, m, testSpec())
	running := fork(t, p, testSpec())
	own := p.(*zygote).jail
	// The pid is of the process that makes jails for the language.
	for language, pid := range map[string]int{"python": inJail(t, own, "python"), "bash": own.initPID} {
		most := unix.Rlimit{}
		if err := unix.Prlimit(pid, unix.RLIMIT_NPROC, nil, &most); err != nil {
			t.Fatal(err)
		}
		if err := unix.Prlimit(pid, unix.RLIMIT_NPROC, &unix.Rlimit{Cur: 1, Max: most.Max}, nil); err != nil {
			t.Fatal(err)
		}
		if _, err := p.Fork(t.Context(), prewarmSpec(t, language)); err == nil ||
			!strings.Contains(err.Error(), "make the namespaces of a jail") {
			t.Errorf("with no process left for %s: %v", language, err)
		}
		if err := unix.Prlimit(pid, unix.RLIMIT_NPROC, &most, nil); err != nil {
			t.Fatal(err)
		}
		runIn(t, forkFor(t, p, testSpec(), language), program(t, "python", "print(2)")).want(t, jail.Exited, "2")
	}
	runIn(t, running, program(t, "python", "print(1)")).want(t, jail.Exited, "1")
}
