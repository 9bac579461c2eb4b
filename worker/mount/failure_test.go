package mount_test

import (
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/storage/storagetest"
	"github.com/bullpen-run/bullpen/worker/jail"
	"github.com/bullpen-run/bullpen/worker/jail/nsjail"
	"github.com/bullpen-run/bullpen/worker/mount"
)

// signals returns a directory mount, through which the test and a program wait for each other: the
// program prints a line, and waits for the file go.
func (w *world) signals() (m proto.Mount, release func()) {
	w.t.Helper()
	m, path := w.directory(fmt.Sprintf("signals%d", time.Now().UnixNano()))
	m.Slug = "signals"
	return m, func() {
		if err := os.WriteFile(path+"/go", nil, 0o600); err != nil {
			w.t.Error(err)
		}
	}
}

// awaitSignal is Python for waiting for the test.
const awaitSignal = `
import os, time, errno, sys
def wait():
    print("ready", flush=True)
    while not os.path.exists("/data/signals/go"): time.sleep(0.01)
def no(f, *a):
    try: f(*a); return "done"
    except OSError as e: return errno.errorcode[e.errno]
`

func TestStoreDiesInTheMiddle(t *testing.T) {
	inEachModeOrOne(t, func(w *world, mode string) {
		p := unique("die", mode)
		w.put(map[string]string{p + "/a": strings.Repeat("a", 12<<20), p + "/b": "b"})
		front := newFront(t, w.endpoint)
		m := w.s3("f", p)
		m.S3.Endpoint = front.URL
		sync, release := w.signals()
		w.onLine = func(string) { front.dead.Store(true); release() }
		r := w.run(mode, awaitSignal+`
f = open("/data/f/a", "rb"); f.read(10)
g = open("/data/f/new", "w"); g.write("lost"); g.flush()
wait()
def write(): open("/data/f/b", "a").write("x")
def rest(): f.seek(11 << 20); f.read()
print(no(rest), no(open, "/data/f/b2"), no(write), no(g.close))
sys.exit(7)
`, m, sync)
		if r.Kind != jail.Exited || r.ExitCode != 7 || r.stdout != "ready\nEIO EIO EIO EIO\n" {
			t.Errorf("got %+v, %q, %s", r.Outcome, r.stdout, r.stderr)
		}
		if _, ok := errors.AsType[*mount.WriteError](r.finish); !ok ||
			!strings.Contains(r.finish.Error(), `"/data/f/new" (input/output error)`) ||
			strings.Contains(r.finish.Error(), "127.0.0.1") {
			t.Errorf("finish: %v", r.finish)
		}
	})
}

// A program must not make the worker read a report as long as it likes.
func TestFewOfTheFilesThatWereNotStoredAreNamed(t *testing.T) {
	w := newWorld(t)
	front := newFront(t, w.endpoint)
	m := w.s3("f", "many")
	m.S3.Endpoint = front.URL
	sync, release := w.signals()
	w.onLine = func(string) { front.dead.Store(true); release() }
	r := w.run("cold", awaitSignal+`
files = [open("/data/f/%03d" % i + "\u200b" * 80, "w") for i in range(4)]
for f in files: f.write("lost"); f.flush()
wait()
os._exit(0)
`, m, sync)
	if r.finish == nil || !strings.HasSuffix(r.finish.Error(), " and 1 more.") || len(r.finish.Error()) > 4096 {
		t.Errorf("finish: %v", r.finish)
	}
}

// A server that never answers must not keep a jail alive. A request to it takes longer than the
// program may.
func TestStoreThatHangs(t *testing.T) {
	inEachModeOrOne(t, func(w *world, mode string) {
		l, err := net.Listen("tcp", "127.0.0.1:0")
		must(t, err)
		defer func() { must(t, l.Close()) }()
		m := w.s3("f", "p")
		m.S3.Endpoint = "http://" + l.Addr().String()
		r := w.runFor(mode, `
import threading, os
for i in range(4): threading.Thread(target=lambda: os.listdir("/data/f")).start()
open("/data/f/x")
`, 3*time.Second, m)
		if r.Kind != jail.TimedOut || r.finish != nil {
			t.Errorf("got %+v, %v", r.Outcome, r.finish)
		}
		w.nothingLeft()
	})
}

// What a program has closed or synced before it is killed is stored.
func TestStoredBeforeKill(t *testing.T) {
	inEachModeOrOne(t, func(w *world, mode string) {
		p, kill := unique("kill", mode), make(chan struct{})
		w.kill, w.onLine = kill, func(string) { close(kill) }
		r := w.run(mode, `
import os, time
with open("/data/f/closed", "w") as f: f.write("closed")
g = open("/data/f/synced", "w"); g.write("synced"); g.flush(); os.fsync(g.fileno())
print("written", flush=True)
time.sleep(1000)
`, w.s3("f", p))
		if r.Kind != jail.Killed || r.stdout != "written\n" || r.finish != nil {
			t.Errorf("got %+v, %q, %v", r.Outcome, r.stdout, r.finish)
		}
		for _, name := range []string{"closed", "synced"} {
			if got := w.object(p + "/" + name); got != name {
				t.Errorf("%s has %q", name, got)
			}
		}
	})
}

// A serving process that hangs must not keep a jail alive, nor the worker.
func TestServingProcessThatHangs(t *testing.T) {
	w := newWorld(t)
	w.onLine = func(string) {
		for _, pid := range servingProcesses(t) {
			must(t, syscall.Kill(pid, syscall.SIGSTOP))
		}
	}
	r := w.runFor("cold", `
import os, time
open("/data/f/x", "w").write("x")
print("up", flush=True)
while True: os.path.exists("/data/f/y"); time.sleep(0.001)
`, 2*time.Second, w.s3("f", "p"))
	if r.Kind != jail.TimedOut {
		t.Errorf("got %+v", r.Outcome)
	}
	w.nothingLeft()
}

func TestServingProcessThatDies(t *testing.T) {
	w := newWorld(t)
	sync, release := w.signals()
	w.onLine = func(string) {
		for _, pid := range servingProcesses(t) {
			kill(t, pid)
		}
		release()
	}
	r := w.run("cold", awaitSignal+`
f = open("/data/f/x", "w"); f.write("x"); f.flush()
wait()
print(no(os.listdir, "/data/f") in ("ENOTCONN", "ECONNABORTED"), no(f.close) in ("ENOTCONN", "ECONNABORTED"))
`, w.s3("f", "p"), sync)
	if r.Kind != jail.Exited || r.stdout != "ready\nTrue True\n" {
		t.Errorf("got %+v, %q, %s", r.Outcome, r.stdout, r.stderr)
	}
	if _, ok := errors.AsType[*mount.WriteError](r.finish); !ok {
		t.Errorf("finish: %v", r.finish)
	}
}

// kill kills a process and returns when it is dead: until then, it may answer one request more.
func kill(t *testing.T, pid int) {
	t.Helper()
	fd, err := unix.PidfdOpen(pid, 0)
	must(t, err)
	defer func() { _ = unix.Close(fd) }()
	must(t, unix.PidfdSendSignal(fd, unix.SIGKILL, nil, 0))
	for {
		n, err := unix.Poll([]unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}, -1)
		if n == 1 {
			return
		}
		if err != unix.EINTR {
			t.Fatal(err)
		}
	}
}

func TestRevokedCredentials(t *testing.T) {
	w := newWorld(t)
	w.put(map[string]string{"p/a": "a"})
	value, err := json.Marshal(proto.S3Credentials{AccessKeyID: "nobody", SecretAccessKey: "wrong"})
	must(t, err)
	w.secret = map[string][]byte{"key": value}
	r := w.run("cold", awaitSignal+`
def write(): open("/data/f/x", "w").write("x")
print(no(open, "/data/f/a"), no(os.listdir, "/data/f"), no(write), no(os.mkdir, "/data/f/d"))`, w.s3("f", "p"))
	if r.stdout != "EACCES EACCES EACCES EACCES\n" {
		t.Errorf("got %q, %s", r.stdout, r.stderr)
	}
}

// A file that was written through a map, or by a process that was killed, is stored as well.
func TestWhatIsNotClosedIsStored(t *testing.T) {
	inEachMode(t, func(w *world, mode string) {
		p := unique("open", mode)
		w.want(w.run(mode, `
import os, mmap, signal, time
f = open("/data/f/mapped", "w+b"); f.truncate(10); m = mmap.mmap(f.fileno(), 10); f.close()
g = open("/data/f/open", "w"); g.write("open"); g.flush()
r, wr = os.pipe()
if os.fork() == 0:
    os.setsid(); h = open("/data/f/child", "w"); h.write("child"); h.flush(); os.write(wr, b"x"); time.sleep(600)
os.read(r, 1)
m[0:6] = b"mapped"
os.kill(os.getpid(), 0)
os._exit(0)
`, w.s3("f", p)), "")
		for name, content := range map[string]string{"mapped": "mapped\x00\x00\x00\x00", "open": "open", "child": "child"} {
			if got := w.object(p + "/" + name); got != content {
				t.Errorf("%s has %q, want %q", name, got, content)
			}
		}
	})
}

func TestDirectoryIsRefused(t *testing.T) {
	w := newWorld(t)
	m, path := w.directory("shared")
	must(t, os.Symlink("/etc", path+"/link"))
	must(t, os.Chown(path+"/link", 1234, 1234))
	must(t, os.Mkdir(path+"/other", 0o755))
	must(t, unix.Mount("tmpfs", path+"/other", "tmpfs", 0, ""))
	defer func() { must(t, unix.Unmount(path+"/other", unix.MNT_DETACH)) }()
	must(t, os.Mkdir(w.root+"/roots", 0o755))
	for name, change := range map[string]func(*proto.Mount){
		"outside": func(m *proto.Mount) { m.Directory = "/etc" }, "beside": func(m *proto.Mount) {
			m.Directory = w.root + "x"
		},
		"missing": func(m *proto.Mount) { m.Directory = w.root + "/missing" }, "a link": func(m *proto.Mount) {
			m.Prefix = "link"
		},
		"below a link": func(m *proto.Mount) { m.Prefix = "link/ssl" }, "another mount": func(m *proto.Mount) {
			m.Prefix = "other"
		},
		"of root":               func(m *proto.Mount) { m.Directory = w.root + "/roots" },
		"missing and read-only": func(m *proto.Mount) { m.Prefix, m.ReadOnly = "new", true },
	} {
		refused := m
		change(&refused)
		set, err := w.opener.Open([]proto.Mount{refused})
		must(t, err)
		mounts, err := set.Mount(5000, 5000)
		if _, ok := errors.AsType[*mount.Error](err); !ok || len(mounts) != 0 {
			t.Errorf("%s: %v", name, err)
		}
		must(t, set.Close())
	}
	for _, invalid := range []proto.Mount{
		{Slug: "..", Kind: m.Kind, Directory: path},
		{Slug: "a/b", Kind: m.Kind, Directory: path},
		{Slug: "a", Kind: m.Kind, Directory: path + "/../x"},
		{Slug: "a", Kind: m.Kind, Directory: path, Prefix: "../x"},
		{Slug: "a", Kind: m.Kind, Directory: path, Prefix: "/x"},
		{Slug: "a", Kind: "volume"},
	} {
		if set, err := w.opener.Open([]proto.Mount{invalid}); err == nil {
			t.Errorf("%+v was accepted", invalid)
			must(t, set.Close())
		}
	}
	suid := tempDir(t, "/var/tmp")
	if _, err := mount.Open(mount.Config{Maker: w.maker, Roots: []string{suid}, SpoolDir: w.spool}); err == nil ||
		!strings.Contains(err.Error(), "nosuid") {
		t.Errorf("a root with set-uid programs: %v", err)
	}
}

// servingProcesses returns the processes that serve mounts, children of this process.
func servingProcesses(tb testing.TB) (pids []int) {
	tb.Helper()
	return servingProcessesOf(tb, os.Getpid())
}

func servingProcessesOf(tb testing.TB, parent int) (pids []int) {
	tb.Helper()
	lines, err := filepath.Glob("/proc/[0-9]*/cmdline")
	must(tb, err)
	for _, file := range lines {
		line, err := os.ReadFile(file)
		if err != nil || string(line) != "bullpen\x00"+serverCommand+"\x00" {
			continue
		}
		pid, err := strconv.Atoi(filepath.Base(filepath.Dir(file)))
		must(tb, err)
		stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
		if err == nil && strings.Fields(string(stat))[3] == strconv.Itoa(parent) {
			pids = append(pids, pid)
		}
	}
	return pids
}

// nothingLeft checks that no mount, process or file of a spool is left.
func (w *world) nothingLeft() {
	w.t.Helper()
	if pids := servingProcesses(w.t); len(pids) > 0 {
		w.t.Errorf("processes left: %v", pids)
	}
	mounts, err := os.ReadFile("/proc/self/mountinfo")
	must(w.t, err)
	if strings.Contains(string(mounts), "fuse.storage") {
		w.t.Errorf("mounts left: %s", mounts)
	}
	files, err := os.ReadDir(w.spool)
	must(w.t, err)
	if len(files) > 0 {
		w.t.Errorf("files left: %v", files)
	}
	fds, err := filepath.Glob("/proc/self/fd/*")
	must(w.t, err)
	for _, fd := range fds {
		if to, err := os.Readlink(fd); err == nil && (to == "/dev/fuse" || strings.Contains(to, w.spool)) {
			w.t.Errorf("an open descriptor of %s is left", to)
		}
	}
}

func TestNothingIsLeft(t *testing.T) {
	w := newWorld(t)
	m, _ := w.directory("shared")
	runs := 50
	if testing.Short() {
		runs = 12
	}
	for i := range runs {
		mode := modes[i%len(modes)]
		switch r := w.run(mode, fmt.Sprintf(
			"open('/data/f/x%d', 'w').write('x')\nopen('/data/f/../shared/x', 'w').write('x')\nprint(%d)", i, i),
			w.s3("f", "p"), m); {
		case r.stdout != fmt.Sprintf("%d\n", i) || r.finish != nil:
			t.Fatalf("run %d: %+v", i, r)
		}
	}
	w.nothingLeft()
}

// front forwards requests to a server, until it is dead.
type front struct {
	*httptest.Server
	dead   atomicBool
	refuse string // a method that fails

	mu       sync.Mutex
	requests map[string]int // by method; LIST for lists of objects
}

// taken returns the requests since the last call.
func (f *front) taken() map[string]int {
	f.mu.Lock()
	defer f.mu.Unlock()
	taken := f.requests
	f.requests = map[string]int{}
	return taken
}

func (f *front) count(r *http.Request) {
	method := r.Method
	if r.URL.Query().Has("list-type") {
		method = "LIST"
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	f.requests[method]++
}

func newFront(t *testing.T, endpoint string) *front {
	t.Helper()
	f := &front{requests: map[string]int{}}
	f.Server = httptest.NewServer(http.HandlerFunc(func(rw http.ResponseWriter, r *http.Request) {
		if f.dead.Load() || r.Method == f.refuse {
			panic(http.ErrAbortHandler)
		}
		f.count(r)
		forward(endpoint, rw, r)
	}))
	f.Config.ErrorLog = discardLog
	t.Cleanup(f.Close)
	return f
}

// TestDeadWorker kills a worker with kill -9 while a program uses mounts. The next worker finds
// nothing of it.
func TestDeadWorker(t *testing.T) {
	w := newWorld(t)
	runDir, spool := tempDir(t, "/dev/shm"), tempDir(t, "/var/tmp")
	cmd := exec.Command("/proc/self/exe")
	cmd.Env = append(os.Environ(),
		fmt.Sprintf("%s=%s,%s,%s,%s,%s", victimEnv, nsjailPath(t), runDir, spool, w.endpoint, w.root))
	cmd.Stderr = os.Stderr
	out, err := cmd.StdoutPipe()
	must(t, err)
	must(t, cmd.Start())
	if _, err := out.Read(make([]byte, 1)); err != nil {
		t.Fatal(err)
	}
	pids := servingProcessesOf(t, cmd.Process.Pid)
	if len(pids) != 1 {
		t.Fatalf("serving processes: %v", pids)
	}
	pidfd, err := unix.PidfdOpen(pids[0], 0)
	must(t, err)
	defer func() { must(t, unix.Close(pidfd)) }()
	must(t, syscall.Kill(pids[0], syscall.SIGSTOP)) // even one that does not notice
	must(t, cmd.Process.Kill())
	_ = cmd.Wait()
	next := openMaker(t, nsjailPath(t), runDir)
	must(t, next.Close())
	if n, err := unix.Poll([]unix.PollFd{{Fd: int32(pidfd), Events: unix.POLLIN}}, 0); n != 1 || err != nil {
		t.Errorf("the serving process of a dead worker is alive: %v", err)
	}
	files, err := os.ReadDir(spool)
	must(t, err)
	if len(files) > 0 {
		t.Errorf("files left: %v", files)
	}
}

// victim is a worker that runs a program for ever.
func victim() {
	f := strings.Split(os.Getenv(victimEnv), ",")
	tb := &panicTB{}
	w := &world{t: tb, spool: f[2], endpoint: f[3], maker: openMaker(tb, f[0], f[1])}
	var err error
	w.opener, err = mount.Open(
		mount.Config{Maker: w.maker, SpoolDir: f[2], SpoolBytes: spoolBytes, Command: []string{"bullpen", serverCommand}})
	must(tb, err)
	id, key := storagetest.Credentials()
	value, err := json.Marshal(proto.S3Credentials{AccessKeyID: id, SecretAccessKey: key})
	must(tb, err)
	w.secret = map[string][]byte{"key": value}
	w.onLine = func(string) { fmt.Print("x") }
	w.run("cold", "import time\nf = open('/data/f/x', 'w'); f.write('x'); f.flush()\nprint('up', "+
		"flush=True)\ntime.sleep(600)", w.s3("f", "p"))
}

// TestServingProcessHasNoPrivileges checks what a server that takes over the serving process would
// have.
func TestServingProcessHasNoPrivileges(t *testing.T) {
	w := newWorld(t)
	w.put(map[string]string{"p/a": "a"})
	sync, release := w.signals()
	w.onLine = func(string) {
		defer release()
		for _, pid := range servingProcesses(t) {
			status, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
			if err != nil {
				t.Error(err)
				return
			}
			fields := map[string]string{}
			for line := range strings.Lines(string(status)) {
				name, value, _ := strings.Cut(strings.TrimSpace(line), ":")
				fields[name] = strings.Join(strings.Fields(value), " ")
			}
			uid := strings.Fields(fields["Uid"])[0]
			for name, want := range map[string]string{
				"CapEff": "0000000000000000", "CapPrm": "0000000000000000", "CapAmb": "0000000000000000", "NoNewPrivs": "1",
				"Groups": "",
				"Uid":    strings.Repeat(uid+" ", 3) + uid, "Gid": strings.Repeat(uid+" ", 3) + uid,
			} {
				if fields[name] != want {
					t.Errorf("%s is %q, want %q", name, fields[name], want)
				}
			}
			if n, err := strconv.Atoi(uid); err != nil || n < nsjail.DefaultUIDs.First {
				t.Errorf("its user is %s", uid)
			}
			for _, file := range []string{"environ", "cmdline"} {
				text, err := os.ReadFile(fmt.Sprintf("/proc/%d/%s", pid, file))
				if err != nil || strings.Contains(string(text), "not-a-secret") || strings.Contains(string(text), w.endpoint) {
					t.Errorf("its %s: %q, %v", file, text, err)
				}
			}
		}
	}
	w.want(w.run("cold", awaitSignal+"open('/data/f/a').read(); wait()", w.s3("f", "p"), sync), "ready\n")
}
