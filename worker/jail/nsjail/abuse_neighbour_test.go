package nsjail

import (
	"context"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/bullpen-run/bullpen/worker/jail"
)

// mostSlower is by which factor the median call beside an attack may be slower than the median call
// without one, in the same run. It was 5.5 beside a flood of packets before floods had a limit, and
// is about 2 beside these attacks on two cores.
const mostSlower = 5

// besideCalls returns an attack from one jail, beside calls of another key. Each call must succeed,
// and calls must not become much slower. calls is how many are made in each of some rounds, unless the
// attack ends before, which it does in one of the given ways. Calls with and without the attack take
// turns, so that a busy machine slows both down.
func besideCalls(
	name string, limits func(*testing.T, *jail.Spec), code string, rounds, calls int, ends ...jail.Kind,
) attack {
	return attack{
		name: name + ", beside calls of another key", want: jail.Outcome{Kind: ends[0]},
		run: func(t *testing.T, m *Maker) {
			watching.Lock()
			defer watching.Unlock()
			var idle, beside phase
			for range rounds * max(1, repeats(3)) {
				for range 12 / rounds {
					idle.call(t, m)
				}
				spec := testSpec()
				limits(t, &spec)
				out := newLines()
				p := program(t, "python", code)
				p.Stdout, p.Timeout = out, 0
				ctx, cancel := context.WithCancel(t.Context())
				ended := make(chan jail.Outcome, 1)
				j := prepare(t, m, spec)
				go func() {
					defer close(ended)
					o, err := j.Run(ctx, p)
					if err != nil {
						t.Error(err)
					}
					ended <- o
				}()
				out.next(t)
				for n := 0; n == 0 || n < calls && len(ended) == 0; n++ { // the watch may be faster than one call
					beside.call(t, m)
				}
				cancel()
				if o := <-ended; !slices.Contains(ends, o.Kind) {
					t.Errorf("the attack ended as %+v, want one of %v", o, ends)
				}
			}
			factor := float64(beside.median()) / float64(idle.median())
			t.Logf("%d calls took %v, %d beside the attack %v (median), %.1f times as much; at most %v and %v",
				len(idle), idle.median(), len(beside), beside.median(), factor, slices.Max(idle), slices.Max(beside))
			if factor > mostSlower {
				t.Errorf("calls took %.1f times as much beside the attack", factor)
			}
		},
	}
}

// phase has the latencies of the calls with or without an attack.
type phase []time.Duration

// call makes a call and records it.
func (p *phase) call(t *testing.T, m *Maker) {
	t.Helper()
	began := time.Now()
	runCode(t, m, "python", "print(sum(range(100000)))").want(t, jail.Exited, "4999950000")
	*p = append(*p, time.Since(began))
}

func (p *phase) median() time.Duration { return slices.Sorted(slices.Values(*p))[len(*p)/2] }

// detectsSplitLocks reports whether the processor detects locks across cache lines, so that the
// kernel can slow a program down that repeats them.
func detectsSplitLocks(t *testing.T) bool {
	t.Helper()
	b, err := os.ReadFile("/proc/cpuinfo")
	if err != nil {
		t.Fatal(err)
	}
	return strings.Contains(string(b), " split_lock_detect")
}

func neighbourAttacks() []attack {
	quarter := func(_ *testing.T, s *jail.Spec) { quarterCore(s) }
	flood := func(_ *testing.T, s *jail.Spec) {
		quarterCore(s)
		unrestricted(s)
	}
	inHome := func(t *testing.T, s *jail.Spec) {
		th := newThread(t, threadFiles())
		t.Cleanup(th.close)
		th.large(quarterCore)(s)
	}
	return []attack{
		besideCalls("a flood of packets", flood, errnos+`
s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
s.connect(('192.0.2.1', 80))
print('up', flush=True)
while True: no(s.send, b'x')`, 6, 2, jail.Killed),
		besideCalls("memory of the kernel in locks of files", quarter, locks+"lock(1000)\ntime.sleep(600)", 1, 40,
			jail.OutOfMemory, jail.HostOutOfMemory, jail.Killed),
		besideCalls("memory of the kernel in open directories", inHome, openDirectories, 1, 40, jail.OutOfMemory,
			jail.HostOutOfMemory, jail.Killed),
		{
			name: "locks across cache lines, beside calls of another key", want: jail.Outcome{Kind: jail.Killed},
			run: func(t *testing.T, m *Maker) {
				if !detectsSplitLocks(t) {
					return // nothing can bound them: bullpen doctor says so
				}
				besideCalls("", quarter, machine+"print('up', flush=True)\nwhile True: "+splitLocks+"(1000000)", 6, 2,
					jail.Killed).run(t, m)
			},
		},
	}
}
