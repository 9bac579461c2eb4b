package nsjail

import (
	"errors"
	"log/slog"
	"testing"
	"time"

	"github.com/bullpen-run/bullpen/worker/jail/hostmemory"
)

// A worker that has no file descriptor left for a moment watches the host's memory afterwards.
func TestWatchSurvivesFailedReadings(t *testing.T) {
	readings, n := make(chan int), 0
	m := &Maker{cfg: Config{Log: slog.New(slog.DiscardHandler)}}
	w := m.watchHost(func() (reading, error) {
		n++
		readings <- n
		if n <= 3 {
			return reading{}, errors.New("too many open files")
		}
		return reading{}, nil
	})
	s := &sandbox{}
	w.add(s)
	for want := range 6 {
		if got := <-readings; got != want+1 {
			t.Errorf("reading %d is number %d", want+1, got)
		}
	}
	w.remove(s)
	go func() {
		for range readings { // a last one may be under way
		}
	}()
	w.close()
	close(readings)
}

// simulatedHost is a host whose memory and programs a test controls. It has no clock: each tick is
// one of the watch.
type simulatedHost struct {
	t      *testing.T
	w      *hostWatch
	kernel int64 // uncharged, in bytes
	used   map[*sandbox]time.Duration
	reads  int // of CPU times
}

func simulateHost(t *testing.T) *simulatedHost {
	t.Helper()
	h := &simulatedHost{t: t, kernel: 1 << 30, used: map[*sandbox]time.Duration{}}
	m := &Maker{cfg: Config{Log: slog.New(slog.DiscardHandler)}}
	h.w = m.newHostWatch(
		func() (reading, error) { return reading{Host: hostmemory.Host{Kernel: h.kernel}}, nil },
		func(s *sandbox) (time.Duration, error) {
			h.reads++
			return h.used[s], nil
		})
	return h
}

// start starts programs, during which the kernel grows so far that they are suspects.
func (h *simulatedHost) start(n int) []*sandbox {
	h.t.Helper()
	programs := make([]*sandbox, n)
	for i := range programs {
		s := &sandbox{}
		s.spec.CPU = 1
		programs[i], h.used[s] = s, time.Millisecond
		h.w.add(s)
	}
	h.tick()
	for range 2 {
		h.kernel += suspect - 1
		h.tick()
	}
	return programs
}

func (h *simulatedHost) tick() {
	h.t.Helper()
	if err := h.w.check(); err != nil {
		h.t.Fatal(err)
	}
}

// idle lets programs do nothing but wake up now and then, for some ticks, in which the host takes
// some bytes each.
func (h *simulatedHost) idle(programs []*sandbox, ticks int, growth int64) {
	h.t.Helper()
	for i := range ticks {
		for j, s := range programs {
			if (i+j)%450 == 0 {
				h.used[s] += 200 * time.Microsecond
			}
		}
		h.kernel += growth
		if i%2 == 0 {
			h.kernel += 100 << 10
		} else {
			h.kernel -= 100 << 10
		}
		h.tick()
	}
}

// run lets a program run for a tick and take some bytes, unless it is paused. It returns false once
// it has been killed.
func (h *simulatedHost) run(s *sandbox, bytes int64) bool {
	h.t.Helper()
	p := h.w.running[s]
	if p == nil {
		return false
	}
	share := 1.
	if p.cpu > 0 {
		share = p.cpu
	}
	h.used[s] += time.Duration(share * float64(watchPeriod))
	h.kernel += int64(share * float64(bytes))
	h.tick()
	return true
}

// Many programs that do nothing cost few readings of their CPU time, although the host's memory
// varies.
func TestIdleProgramsAreRarelyRead(t *testing.T) {
	h := simulateHost(t)
	programs := h.start(50)
	h.idle(programs, 2*maxSkipped, 0)
	h.reads = 0
	const ticks = 20 * maxSkipped
	h.idle(programs, ticks, 0)
	if most := len(programs) * ticks / 10; h.reads > most || h.reads < len(programs) {
		t.Errorf("%d readings for %d programs in %d ticks, want at most %d", h.reads, len(programs), ticks, most)
	}
	h.w.remove(programs[0])
}

// Programs that were idle for long are not blamed for what the host takes meanwhile, however
// slowly.
func TestIdleProgramsAreNotBlamed(t *testing.T) {
	for name, growth := range map[string]int64{"slowly": 16 << 10, "steadily": 1 << 20, "fast": 4 << 20} {
		t.Run(name, func(t *testing.T) {
			h := simulateHost(t)
			programs := h.start(8)
			h.idle(programs, 2*maxSkipped, 0)
			h.idle(programs, int(300<<20/growth), growth)
			if h.w.searching {
				t.Error("the watch searches for a program that takes memory")
			}
		})
	}
}

// A program that takes memory after it was idle for long is found as fast as one that always ran,
// and so is one that takes it so slowly that its CPU time is read less often than it takes some.
func TestFoundAfterIdleness(t *testing.T) {
	const mib = 1 << 20
	for name, bytes := range map[string]int64{"fast": 12 * mib, "slowly": 2 * mib} {
		t.Run(name, func(t *testing.T) {
			h := simulateHost(t)
			programs := h.start(8)
			h.idle(programs, 4*maxSkipped, 0)
			guilty, before := programs[3], h.kernel
			for h.run(guilty, bytes) && h.kernel-before < 1<<30 {
				h.idle(programs, 1, 0)
			}
			if guilty.why != unchargedMemory || h.kernel-before > mostLost {
				t.Errorf("the program took %d MiB, and ended for reason %d", (h.kernel-before)/mib, guilty.why)
			}
			for _, s := range programs {
				if s != guilty && s.killed {
					t.Error("another program was killed")
				}
			}
		})
	}
}

// What a program takes in many small parts, with long sleeps in between, is not forgotten.
func TestGrowthBetweenReadingsIsNotForgotten(t *testing.T) {
	h := simulateHost(t)
	programs := h.start(8)
	h.idle(programs, 4*maxSkipped, 0)
	before := h.kernel
	for !h.w.searching && h.kernel-before < 1<<30 {
		h.run(programs[3], unread/2)
		h.idle(programs, maxSkipped/2, 0)
	}
	if grown := h.kernel - before; grown > tolerated+unread {
		t.Errorf("the search for a program begins after it took %d MiB", grown>>20)
	}
}
