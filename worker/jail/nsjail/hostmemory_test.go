package nsjail

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"strconv"
	"testing"

	"github.com/bullpen-run/bullpen/worker/jail"
)

// limitHost limits the memory of all jails of m together. For their control groups, that is a host
// that has no more.
func limitHost(t *testing.T, m *Maker, bytes int64) {
	t.Helper()
	limit := "memory.limit_in_bytes"
	if m.CgroupVersion() == 2 {
		limit = "memory.max"
	}
	for _, d := range ownGroups(t) {
		file := filepath.Join(d, "bullpen", filepath.Base(m.dir), limit)
		if _, err := os.Stat(file); err != nil {
			continue
		}
		if err := os.WriteFile(file, []byte(strconv.FormatInt(bytes, 10)), 0); err != nil {
			t.Fatal(err)
		}
		return
	}
	t.Fatal("no group has a memory limit")
}

// A program that the kernel kills although it is within its own limit did nothing wrong, and what
// runs beside it goes on. One that exceeds its own limit still did.
func TestHostOutOfMemory(t *testing.T) {
	for _, mode := range modes {
		t.Run(mode, func(t *testing.T) {
			t.Parallel()
			m := newMaker(t)
			setStartMode(t, m, mode)
			neighbour := prepare(t, m, testSpec())
			done := runSleeper(t, neighbour)
			limitHost(t, m, 160<<20)
			r := runProgram(t, m, testSpec(), program(t, "python", "print('first', flush=True)\nx = bytearray(300 << 20)"))
			r.want(t, jail.HostOutOfMemory, "first")
			spec := testSpec()
			memory(64)(&spec)
			if mode != forked { // its zygote needs more
				runProgram(t, m, spec, program(t, "python", "print('first', flush=True)\nx = bytearray(300 << 20)")).want(
					t, jail.OutOfMemory, "first")
			}
			if !neighbour.Alive() {
				t.Error("the neighbour is dead")
			}
			if err := errors.Join(neighbour.Close(), <-done); err != nil {
				t.Error(err)
			}
		})
	}
}

// uncharged makes a an attack that takes memory of the kernel's which no group is charged for, and
// which nothing refuses. The watch must find it beside neighbours, which go on. Where others leave it
// little of the processors, its time may be over first. The host must lose as little in any case. If
// home, it is in the home of a thread.
func uncharged(a attack, home bool) attack {
	limits := a.limits
	a.run = func(t *testing.T, m *Maker) {
		if home {
			th := newThread(t, threadFiles())
			defer th.close()
			a.limits = th.large(limits)
		}
		r, lost := attemptBeside(t, m, a)
		t.Logf("the host lost %d MiB, and the program ended as %s after %v, for %d MiB", lost>>20, r.Kind, r.Duration,
			r.Uncharged>>20)
		if lost >= mostLost {
			t.Errorf("the host lost %d MiB", lost>>20)
		}
		convicted := r.Kind == jail.OutOfMemory && r.Uncharged >= tolerated
		if !convicted && r.Kind != jail.TimedOut || r.stdout != a.stdout+"\n" {
			t.Errorf("got %+v, want it to be killed for what the host holds", r)
		}
	}
	return a
}

// busyNeighbours are programs that use the kernel's memory as programs may: a reader of /proc, and
// programs that fill pipes and sockets and empty them again, take and release locks of files, send
// through connections, and start processes.
var busyNeighbours = []struct{ language, code string }{ // read only
	{"bash", "echo up; while :; do read -r x < /proc/self/stat; done"},
	{"python", `
import os, socket
print('up', flush=True)
while True:
    ends = [os.pipe() for i in range(100)]
    pairs = [socket.socketpair() for i in range(20)]
    for r, w in ends: os.write(w, bytes(65536))
    for a, b in pairs: a.send(bytes(100000))
    for a, b in pairs: b.recv(100000)
    for r, w in ends: os.read(r, 65536)
    for e in ends: os.close(e[0]); os.close(e[1])
    for a, b in pairs: a.close(); b.close()`},
	{"python", `
import fcntl, socket, struct
print('up', flush=True)
f = open('/tmp/locked', 'w')
l = socket.create_server(('127.0.0.1', 0))
while True:
    for start in range(0, 20000, 2): fcntl.fcntl(f, fcntl.F_SETLK, struct.pack('hhqqi', fcntl.F_WRLCK, 0, start, 1, 0))
    fcntl.fcntl(f, fcntl.F_SETLK, struct.pack('hhqqi', fcntl.F_UNLCK, 0, 0, 0, 0))
    for n in range(20):
        a = socket.create_connection(l.getsockname())
        b, _ = l.accept()
        for k in range(20):
            a.sendall(bytes(60000))
            left = 60000
            while left: left -= len(b.recv(left))
        a.close(); b.close()`},
	{"python", `
import os, tempfile
print('up', flush=True)
while True:
    children = []
    for i in range(20):
        child = os.fork()
        if not child:
            x = bytearray(4 << 20)
            os._exit(0)
        children.append(child)
    for child in children: os.waitpid(child, 0)
    with tempfile.TemporaryDirectory() as d:
        for i in range(500): open(f'{d}/{i}', 'w').close()
        os.listdir(d)`},
}

// attemptBeside makes the attack beside busy neighbours, with -short beside the first of them, which
// must go on. It returns how many bytes the host lost meanwhile.
func attemptBeside(t *testing.T, m *Maker, a attack) (r result, lost int64) {
	t.Helper()
	watching.Lock()
	defer watching.Unlock()
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	beside := busyNeighbours
	if testing.Short() {
		beside = beside[:1]
	}
	ended := make(chan jail.Outcome, len(beside))
	for _, n := range beside {
		out := newLines()
		p := program(t, n.language, n.code)
		p.Stdout, p.Timeout = out, 0
		j := prepare(t, m, testSpec())
		go func() {
			o, err := j.Run(ctx, p)
			if err != nil {
				t.Error(err)
			}
			ended <- o
		}()
		out.next(t)
	}
	loss := watchHostMemory(t, m)
	r = a.attempt(t, m)
	lost = loss()
	cancel()
	for range beside {
		if o := <-ended; o.Kind != jail.Killed {
			t.Errorf("a neighbour ended: %+v", o)
		}
	}
	return r, lost
}
