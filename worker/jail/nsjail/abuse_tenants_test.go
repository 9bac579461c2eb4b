package nsjail

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"testing"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/bullpen-run/bullpen/worker/jail"
)

func tenantAttacks() []attack {
	return []attack{
		{name: "files, queues and sockets of the one who had the uids before", run: sameUIDs(`
for d in ('/tmp', '/dev/shm', os.environ['HOME']): open(d + '/secret', 'w').write('x')
print(libc.shmget(77, 4096, 0o1666) >= 0, libc.msgget(77, 0o1666) >= 0, libc.semget(77, 1, 0o1666) >= 0)
s = socket.socket(socket.AF_UNIX); s.bind('\0secret'); s.listen()`, "True True True", `
print([os.path.exists(d + '/secret') for d in ('/tmp', '/dev/shm', os.environ['HOME'])])
print(libc.shmget(77, 4096, 0), libc.msgget(77, 0), libc.semget(77, 1, 0))
print(no(socket.socket(socket.AF_UNIX).connect, '\0secret'))`, "[False, False, False]\n-1 -1 -1\nECONNREFUSED")},
		{name: "POSIX queues of the one who had the uids before", run: sameUIDs(`
rt = ctypes.CDLL('librt.so.1', use_errno=True)
print(rt.mq_open(b'/secret', 0o102, 0o666, None) >= 0)`, "True", `
rt = ctypes.CDLL('librt.so.1', use_errno=True)
print(rt.mq_open(b'/secret', 2), ctypes.get_errno())`, "-1 2")},
		{name: "keyrings of the one who had the uids before", run: sameUIDs(
			"print(libc.syscall(248, b'user', b'secret', b'x', 1, -4), ctypes.get_errno(), libc.syscall(250, 0, -4, 1), "+
				"ctypes.get_errno())", "-1 1 -1 1",
			"print(libc.syscall(249, b'user', b'secret', None, -4), ctypes.get_errno(), len(open('/proc/keys').read()))",
			"-1 1 0",
		)},
		{name: "processes of the one who had the uids before", run: sameUIDs(
			"if os.fork() == 0: os.setsid(); time.sleep(600)\nprint(1)", "1",
			"print([p for p in os.listdir('/proc') if p.isdigit() and int(p) not in (1, os.getpid())])", "[]",
		)},
		{name: "locks of the one who had the uids before", run: sameUIDs(
			"import fcntl; f = open('/usr/bin/env'); fcntl.flock(f, fcntl.LOCK_EX)\nif os.fork() == 0: "+
				"time.sleep(600)\nprint(1)", "1",
			"import fcntl; print(no(fcntl.flock, open('/usr/bin/env'), fcntl.LOCK_EX | fcntl.LOCK_NB))", "done",
		)},
		{name: "stdin and devices of the one before", run: stdinAndDevices},
		{name: "a live neighbour's processes, files and sockets", run: neighbours},
		{name: "the neighbour's numbers at random", run: func(t *testing.T, m *Maker) {
			seen := map[string]bool{}
			for range 5 {
				r := runCode(t, m, "python",
					"import random, uuid, os; print(random.random(), hash('x'), uuid.uuid4(), os.urandom(8).hex(), "+
						"open('/proc/sys/kernel/random/uuid').read())")
				r2 := runCode(t, m, "node", "console.log(Math.random(), require('crypto').randomUUID())")
				seen[r.stdout], seen[r2.stdout] = true, true
			}
			if len(seen) != 10 {
				t.Errorf("alike: %v", seen)
			}
		}},
		{
			name: "taking all inotify instances, watches and message queues, beside a neighbour and root", run: hostTables,
			want: jail.Outcome{Kind: jail.Killed},
		},
		besideNeighbour("taking all a host has", "import os", "open('/tmp/%d' % os.getpid(), 'wb').write(bytes(100000))"),
		besideNeighbour("locks across cache lines", machine,
			"os.fork() or ("+splitLocks+"(1000000), os._exit(0)); os.wait()"),
		besideNeighbour("barriers on all processors", errnos, "[libc.syscall(324, 1 << i, 0, 0) for i in range(9)]"),
		besideNeighbour("writing back and evicting shared files", errnos+"f = os.open('/usr/bin/env', os.O_RDONLY)",
			"[os.sync(), os.fsync(f), os.posix_fadvise(f, 0, 0, os.POSIX_FADV_DONTNEED), libc.syncfs(f), "+
				"libc.sync_file_range(f, 0, 0, 7)]"),
		{name: "evicting files that others read", run: evicting},
		{name: "hidden behind 20 that start at the same time", run: func(t *testing.T, m *Maker) {
			outputs := make(chan result)
			for range 20 {
				go func() { outputs <- runCode(t, m, "bash", "cd /proc/self/fd; echo *; env | grep -c BULLPEN; ls -A ~") }()
			}
			for range 20 {
				(<-outputs).want(t, jail.Exited, "0 1 2 255 3\n1")
			}
		}},
	}
}

// sameUIDs runs two programs one after the other with the same uids. The first runs leave and the
// second runs look.
func sameUIDs(leave, left, look, found string) func(*testing.T, *Maker) {
	return func(t *testing.T, m *Maker) {
		first := prepare(t, m, testSpec()).(*sandbox)
		uids := first.uids.first
		for i, step := range []struct{ code, want string }{{leave, left}, {look, found}} {
			s := first
			for i > 0 && (s == first || s.uids.first != uids) {
				s = prepare(t, m, testSpec()).(*sandbox)
				if s.uids.first != uids { // kept, so that the next jail gets others
					defer func() { _ = s.Close() }()
				}
			}
			p := program(t, "python", errnos+step.code)
			var stdout, stderr beginning
			p.Stdout, p.Stderr = &stdout, &stderr
			o, err := s.Run(t.Context(), p)
			if err != nil {
				t.Fatal(err)
			}
			result{Outcome: o, stdout: string(stdout.kept), stderr: string(stderr.kept)}.want(t, jail.Exited, step.want)
			// A prepared jail that is still waiting keeps its uids.
			m.awaitUIDsReleased(t, s)
		}
	}
}

// stdinAndDevices changes open files and devices that programs may share, then checks that the next
// program sees no change. It does so for every way to start an interpreter.
func stdinAndDevices(t *testing.T, m *Maker) {
	const leave = errnos + `
import fcntl, glob, stat
fcntl.flock(0, fcntl.LOCK_EX)
fcntl.fcntl(0, fcntl.F_SETFL, os.O_NONBLOCK | os.O_APPEND)
fcntl.fcntl(0, fcntl.F_SETSIG, 42)
devices = [p for p in glob.glob('/dev/*') + glob.glob('/proc/*') if os.path.exists(p) and stat.S_ISCHR(os.stat(p).st_mode)]
print(len(devices) > 5, {no(os.utime, f) for f in [0, *devices]})`
	const look = errnos + `
import fcntl
print(fcntl.fcntl(0, fcntl.F_GETFL) == fcntl.fcntl(os.open('/dev/null', os.O_RDONLY), fcntl.F_GETFL), fcntl.fcntl(0, fcntl.F_GETSIG))
fcntl.flock(open('/dev/null'), fcntl.LOCK_EX) # which others that live may have for a moment
print('free')`
	in := map[string]string{
		"python": "%s", "bash": "code=$(cat <<'END'\n%s\nEND\n)\npython3 -c \"$code\"",
		"node": "require('child_process').spawnSync('python3', ['-c', String.raw`%s`], {stdio: 'inherit'})",
	}
	parent := newZygote(t, m, testSpec())
	defer closeZygote(t, parent)
	for language, form := range in {
		for _, mode := range modes {
			for _, step := range []struct{ code, want string }{{leave, "True {'EROFS'}"}, {look, "True 0\nfree"}} {
				j := prepareMode(t, m, parent, mode, testSpec(), language)
				runIn(t, j, program(t, language, fmt.Sprintf(form, step.code))).want(t, jail.Exited, step.want)
				if t.Failed() {
					return // the other programs would block on the same lock
				}
			}
		}
	}
}

// neighbours checks that a program cannot see or reach another live jail.
func neighbours(t *testing.T, m *Maker) {
	out := newLines()
	p := program(t, "python", `
import os, socket, time
open('/tmp/secret', 'w').write('x'); s = socket.socket(socket.AF_UNIX); s.bind('\0secret'); s.listen()
l = socket.create_server(('127.0.0.1', 7777)); print('up'); time.sleep(600)`)
	p.Stdout = out
	j := prepare(t, m, testSpec())
	done := make(chan error, 1)
	go func() {
		_, err := j.Run(t.Context(), p)
		done <- err
	}()
	out.next(t)
	runCode(t, m, "python", errnos+`
print(os.path.exists('/tmp/secret'), no(socket.socket(socket.AF_UNIX).connect, '\0secret'), no(socket.create_connection, ('127.0.0.1', 7777), 5))
print(sorted(p for p in os.listdir('/proc') if p.isdigit())[0], len([p for p in os.listdir('/proc') if p.isdigit()]), no(os.kill, os.getpid() + 100, 0))`).
		want(t, jail.Exited, "False ECONNREFUSED ECONNREFUSED\n1 2 ESRCH")
	if err := j.Close(); err != nil {
		t.Error(err)
	}
	if err := <-done; err != nil {
		t.Error(err)
	}
}

// takeTables is Python that takes all it can of what the kernel also counts for the worker's user.
const takeTables = errnos + `
rt = ctypes.CDLL('librt.so.1', use_errno=True)
def checked(r):
    if r < 0: raise OSError(ctypes.get_errno(), 'failed')
    return r
instances = watches = queues = 0
def instance():
    global instances
    while True: checked(libc.inotify_init()); instances += 1
def watch():
    global watches
    for top, dirs, files in os.walk('/usr'):
        # IN_OPEN, IN_DONT_FOLLOW; another name of a watched file gets the same number
        for name in dirs + files: watches = max(watches, checked(libc.inotify_add_watch(3, os.path.join(top, name).encode(), 0x20 | 0x02000000)))
def queue():
    global queues
    while True: checked(rt.mq_open(b'/%d' % queues, 0o102, 0o600, None)); queues += 1
os.closerange(3, 10)
print(no(instance), instances, no(watch), watches, no(queue), queues, flush=True)
`

// hostTables checks that a program which takes all it can leaves as much to another one, and enough
// to root on the host.
func hostTables(t *testing.T, m *Maker) {
	mode := cold
	if by, ok := startModes.Load(m); ok {
		mode = by.(string)
	}
	want := fmt.Sprintf("EMFILE %d ENOSPC %d EMFILE 1", m.share.instances, m.share.watches)
	start := func() (lines *lines, stop func()) {
		var parent jail.Zygote
		if mode == forked {
			parent = newZygote(t, m, testSpec())
		}
		lines = newLines()
		p := program(t, "python", takeTables+"time.sleep(600)")
		p.Stdout = lines
		j := prepareMode(t, m, parent, mode, testSpec(), "python")
		done := make(chan error)
		go func() {
			_, err := j.Run(t.Context(), p)
			done <- err
		}()
		return lines, func() {
			if err := errors.Join(j.Close(), <-done); err != nil {
				t.Error(err)
			}
			if parent != nil {
				closeZygote(t, parent)
			}
		}
	}
	for range 2 {
		lines, stop := start()
		defer stop()
		if got := lines.next(t); got != want {
			t.Errorf("a program got %s, want %s", got, want)
		}
	}
	fd, err := unix.InotifyInit1(unix.IN_CLOEXEC)
	if err != nil {
		t.Fatal(err)
	}
	_, err = unix.InotifyAddWatch(fd, t.TempDir(), unix.IN_CREATE)
	if err := errors.Join(err, unix.Close(fd)); err != nil {
		t.Error(err)
	}
	name := []byte("bullpen-test-" + strconv.Itoa(os.Getpid()) + "\x00")
	queue, _, errno := unix.Syscall6(unix.SYS_MQ_OPEN, uintptr(unsafe.Pointer(&name[0])),
		unix.O_RDWR|unix.O_CREAT|unix.O_CLOEXEC, 0o600, 0, 0, 0)
	if errno != 0 {
		t.Fatal(errno)
	}
	_, _, errno = unix.Syscall(unix.SYS_MQ_UNLINK, uintptr(unsafe.Pointer(&name[0])), 0, 0)
	if err := unix.Close(int(queue)); err != nil || errno != 0 {
		t.Error(err, errno)
	}
}

// besideNeighbour returns an attack that repeats Python code in many processes of three jails,
// beside a quiet program. The quiet one must end first; otherwise the test hangs.
func besideNeighbour(name, setup, code string) attack {
	return attack{
		name: name + ", beside a quiet neighbour", want: jail.Outcome{Kind: jail.Killed},
		run: func(t *testing.T, m *Maker) { noisy(t, m, setup, code) },
	}
}

func noisy(t *testing.T, m *Maker, setup, code string) {
	done := make(chan jail.Outcome)
	var stop []jail.Jail
	for range 3 {
		out := newLines()
		p := program(t, "python", setup+`
try:
    for i in range(4): os.fork()
except BlockingIOError: pass
print('up', flush=True)
while True: `+code)
		p.Stdout = out
		j := prepare(t, m, testSpec())
		stop = append(stop, j)
		go func() {
			o, err := j.Run(t.Context(), p)
			if err != nil {
				t.Error(err)
			}
			done <- o
		}()
		out.next(t)
	}
	runCode(t, m, "python", "print(sum(range(100000)))").want(t, jail.Exited, "4999950000")
	for _, j := range stop {
		if err := j.Close(); err != nil {
			t.Error(err)
		}
	}
	for range stop {
		if o := <-done; o.Kind != jail.Killed {
			t.Errorf("a noisy one ended before the quiet one: %+v", o)
		}
	}
}

// evicting checks that a program cannot evict a file of the host, which others read, from memory.
func evicting(t *testing.T, m *Maker) {
	path := sharedFile(t)
	content, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	a := attack{name: "evicting", language: "python", stdout: "done", code: errnos + fmt.Sprintf(`
import mmap
f = os.open(%q, os.O_RDONLY)
for advice in range(6): no(os.posix_fadvise, f, 0, 0, advice)
with mmap.mmap(f, 0, mmap.MAP_PRIVATE, mmap.PROT_READ) as b:
    for advice in range(26): # also MADV_REMOVE, MADV_FREE, MADV_COLD and MADV_PAGEOUT
        no(b.madvise, advice)
print('done')`, path)}
	a.check(t, a.attempt(t, m))
	if pages := residentPages(t, path); pages < len(content)/os.Getpagesize() {
		t.Errorf("%d pages of %s are left in memory, of %d bytes", pages, path, len(content))
	}
}

// sharedFile returns a file that programs can read and no process maps.
func sharedFile(t *testing.T) string {
	t.Helper()
	var found string
	err := filepath.WalkDir("/usr/share", func(path string, d fs.DirEntry, err error) error {
		if err != nil || !d.Type().IsRegular() {
			return nil //nolint:nilerr // another file will do
		}
		if info, err := d.Info(); err == nil && info.Size() > 100<<10 && info.Size() < 10<<20 && info.Mode()&0o004 != 0 {
			found = path
			return fs.SkipAll
		}
		return nil
	})
	if err != nil || found == "" {
		t.Fatalf("no file to evict below /usr/share: %v", err)
	}
	return found
}

// residentPages returns how many pages of a file the kernel keeps in memory.
func residentPages(t *testing.T, path string) (n int) {
	t.Helper()
	f, err := os.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = f.Close() }()
	info, err := f.Stat()
	if err != nil {
		t.Fatal(err)
	}
	b, err := unix.Mmap(int(f.Fd()), 0, int(info.Size()), unix.PROT_READ, unix.MAP_SHARED)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = unix.Munmap(b) }()
	pages := make([]byte, (len(b)+os.Getpagesize()-1)/os.Getpagesize())
	if _, _, e := unix.Syscall(unix.SYS_MINCORE, uintptr(unsafe.Pointer(&b[0])), uintptr(len(b)),
		uintptr(unsafe.Pointer(&pages[0]))); e != 0 {
		t.Fatal(e)
	}
	for _, p := range pages {
		n += int(p & 1)
	}
	return n
}
