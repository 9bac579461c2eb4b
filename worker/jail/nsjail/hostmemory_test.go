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

// uncharged makes a an attack that takes memory of the kernel's which no group is charged for, and
// which nothing refuses. The watch must find it beside a program that makes as many system calls,
// which goes on. Where others leave it little of the processors, its time may be over first, or it
// is evicted. The host must lose as little in any case. If home, it is in the home of a thread.
func uncharged(a attack, home bool) attack {
	limits := a.limits
	a.run = func(t *testing.T, m *Maker) {
		if home {
			th := newThread(t, threadFiles())
			defer th.close()
			a.limits = th.large(limits)
		}
		watching.Lock()
		defer watching.Unlock()
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
		loss := watchHostMemory(t)
		r := a.attempt(t, m)
		lost, both := loss()
		t.Logf("the host lost %d MiB, by both figures %d, and the program ended as %s, for %d MiB", lost>>20, both>>20, r.Kind, r.Uncharged>>20)
		if lost >= mostLost {
			t.Errorf("the host lost %d MiB", lost>>20)
		}
		convicted := r.Kind == jail.OutOfMemory && r.Uncharged >= tolerated
		if !convicted && r.Kind != jail.HostOutOfMemory && r.Kind != jail.TimedOut || r.stdout != a.stdout+"\n" {
			t.Errorf("got %+v, want it to be killed for what the host holds", r)
		}
		cancel()
		if o := <-ended; o.Kind != jail.Killed {
			t.Errorf("the neighbour ended: %+v", o)
		}
	}
	return a
}
