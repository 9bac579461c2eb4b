package nsjail

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"strconv"
	"sync"
	"testing"
	"time"

	"github.com/bullpen-run/bullpen/worker/jail"
	"github.com/bullpen-run/bullpen/worker/jail/hostmemory"
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
				runProgram(t, m, spec, program(t, "python", "print('first', flush=True)\nx = bytearray(300 << 20)")).want(t, jail.OutOfMemory, "first")
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

// oneTaker makes attacks that the watch has to find run one at a time: the others of a worker see
// the sum of what they take.
var oneTaker sync.Mutex

// uncharged makes a an attack that takes memory of the kernel's which no group is charged for, and
// which nothing refuses. The watch must find it beside a program that makes as many system calls,
// which goes on. If home, the attack is in the home of a thread.
func uncharged(a attack, home bool) attack {
	limits := a.limits
	a.run = func(t *testing.T, m *Maker) {
		if home {
			th := newThread(t, threadFiles())
			defer th.close()
			a.limits = func(s *jail.Spec) {
				limits(s)
				s.HomeBytes, s.Inodes, s.Home = 512<<20, 65_536, th
			}
		}
		oneTaker.Lock()
		defer oneTaker.Unlock()
		out := newLines()
		p := program(t, "bash", "echo up; while :; do read -r x < /proc/self/stat; done")
		p.Stdout, p.Timeout = out, 0
		ctx, cancel := context.WithCancel(t.Context())
		defer cancel()
		ended := make(chan jail.Outcome, 1)
		j := prepare(t, m, testSpec())
		go func() {
			o, err := j.Run(ctx, p)
			if err != nil {
				t.Error(err)
			}
			ended <- o
		}()
		out.next(t)
		for left := 3; ; left-- { // others use the host too, so that one of three attempts decides
			loss := watchObjects(t)
			r := a.attempt(t, m)
			lost := loss()
			a.check(t, r)
			if lost < mostLost && r.Uncharged >= tolerated {
				break
			}
			t.Logf("the host lost %d MiB; killed for %d bytes, 0 if by its own memory limit", lost>>20, r.Uncharged)
			if left == 1 {
				t.Errorf("in no attempt was it killed for what the host holds before the host lost %d MiB", mostLost>>20)
				break
			}
		}
		cancel()
		if o := <-ended; o.Kind != jail.Killed {
			t.Errorf("the neighbour ended: %+v", o)
		}
	}
	return a
}

// watchObjects returns a function that ends the watch and returns by how many bytes the objects of
// the host's kernel grew meanwhile at most.
func watchObjects(t testing.TB) (loss func() int64) {
	t.Helper()
	read := func() int64 {
		h, err := hostmemory.Read()
		if err != nil {
			t.Error(err)
		}
		return h.Objects
	}
	before := read()
	stop, lost := make(chan struct{}), make(chan int64)
	go func() {
		most := before
		for tick := time.Tick(20 * time.Millisecond); ; {
			most = max(most, read())
			select {
			case <-tick:
			case <-stop:
				lost <- most - before
				return
			}
		}
	}()
	return func() int64 {
		close(stop)
		return <-lost
	}
}
