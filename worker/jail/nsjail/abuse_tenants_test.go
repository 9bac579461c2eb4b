package nsjail

import (
	"fmt"
	"testing"

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
			"print(libc.syscall(248, b'user', b'secret', b'x', 1, -4), ctypes.get_errno(), libc.syscall(250, 0, -4, 1), ctypes.get_errno())", "-1 1 -1 1",
			"print(libc.syscall(249, b'user', b'secret', None, -4), ctypes.get_errno(), len(open('/proc/keys').read()))", "-1 1 0",
		)},
		{name: "processes of the one who had the uids before", run: sameUIDs(
			"if os.fork() == 0: os.setsid(); time.sleep(600)\nprint(1)", "1",
			"print([p for p in os.listdir('/proc') if p.isdigit() and int(p) not in (1, os.getpid())])", "[]",
		)},
		{name: "locks of the one who had the uids before", run: sameUIDs(
			"import fcntl; f = open('/usr/bin/env'); fcntl.flock(f, fcntl.LOCK_EX)\nif os.fork() == 0: time.sleep(600)\nprint(1)", "1",
			"import fcntl; print(no(fcntl.flock, open('/usr/bin/env'), fcntl.LOCK_EX | fcntl.LOCK_NB))", "done",
		)},
		{name: "stdin and devices of the one before", run: stdinAndDevices},
		{name: "a live neighbour's processes, files and sockets", run: neighbours},
		{name: "the neighbour's numbers at random", run: func(t *testing.T, m *Maker) {
			seen := map[string]bool{}
			for range 5 {
				r := runCode(t, m, "python", "import random, uuid, os; print(random.random(), hash('x'), uuid.uuid4(), os.urandom(8).hex(), open('/proc/sys/kernel/random/uuid').read())")
				r2 := runCode(t, m, "node", "console.log(Math.random(), require('crypto').randomUUID())")
				seen[r.stdout], seen[r2.stdout] = true, true
			}
			if len(seen) != 10 {
				t.Errorf("alike: %v", seen)
			}
		}},
		{name: "taking all a host has, beside a quiet neighbour", run: noisy, want: jail.Outcome{Kind: jail.Killed}},
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
			if i > 0 {
				s = prepare(t, m, testSpec()).(*sandbox)
			}
			if s.uids.first != uids {
				t.Fatalf("uids %d after %d", s.uids.first, uids)
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
			m.awaitGiven(t, s)
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
				j := prepareBy(t, m, parent, mode, testSpec(), language)
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

// noisy runs a quiet program beside three programs that use all the resources they can. The quiet
// one must end first; otherwise the test hangs.
func noisy(t *testing.T, m *Maker) {
	done := make(chan jail.Outcome)
	var stop []jail.Jail
	for range 3 {
		out := newLines()
		p := program(t, "python", `
import os
try:
    for i in range(6): os.fork()
except BlockingIOError: pass
print('up', flush=True)
while True: open('/tmp/%d' % os.getpid(), 'wb').write(bytes(100000))`)
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
