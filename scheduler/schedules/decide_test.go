package schedules

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/bullpen-run/bullpen/proto"
)

var noon = time.Date(2026, 11, 20, 12, 0, 0, 0, time.UTC)

// TestDecisions describes what happens to a schedule with a tick each minute. Minutes count from
// its creation.
func TestDecisions(t *testing.T) {
	start := time.Date(2026, 11, 20, 12, 0, 0, 0, time.UTC)
	minutes := func(list []time.Time) string {
		var b []string
		for _, at := range list {
			b = append(b, fmt.Sprint(at.Sub(start).Minutes()))
		}
		return strings.Join(b, " ")
	}
	at := func(m ...float64) (list []time.Time) {
		for _, m := range m {
			list = append(list, start.Add(time.Duration(m*float64(time.Minute))))
		}
		return list
	}
	full := make([]float64, proto.MaxScheduleRuns)
	for _, c := range []struct {
		name    string
		overlap proto.OverlapPolicy
		missed  proto.MissedPolicy
		paused  bool
		next    float64 // the first tick that is not handled; -1 before the first decision
		waiting []float64
		busy    bool
		now     float64

		start  string
		cancel bool
		wait   string // the ticks that wait then
		runs   string // the outcomes that are recorded, newest first
		left   float64
	}{
		{name: "before the first tick", next: -1, now: 0.5, left: 1},
		{name: "created while no process ran: stored before it starts", next: -1, now: 1.5, left: 1},
		{name: "not due", next: 2, now: 1.9, left: 2},
		{name: "due", next: 2, now: 2, start: "2", left: 3},
		{name: "paused", paused: true, next: 2, now: 5, left: 2},
		{name: "skip", overlap: proto.OverlapSkip, next: 2, busy: true, now: 2, runs: "skipped", left: 3},
		{name: "replace", overlap: proto.OverlapReplace, next: 2, busy: true, now: 2, start: "2", cancel: true, left: 3},
		{name: "queue", overlap: proto.OverlapQueue, next: 2, busy: true, now: 2, wait: "2", left: 3},
		{
			name: "queue, later", overlap: proto.OverlapQueue, next: 4, waiting: []float64{2, 3}, now: 3.5, start: "2",
			wait: "3", left: 4,
		},
		{
			name: "queue, later, and another one due", overlap: proto.OverlapQueue, next: 4, waiting: []float64{2, 3}, now: 4,
			start: "2", wait: "3 4", left: 5,
		},
		{
			name: "queue, behind those that wait", overlap: proto.OverlapQueue, next: 4, waiting: []float64{2, 3}, busy: true,
			now: 4, wait: "2 3 4", left: 5,
		},
		{
			name: "queue, full", overlap: proto.OverlapQueue, next: 4, waiting: full, busy: true, now: 4,
			wait: minutes(at(full...)), runs: "skipped", left: 5,
		},
		{name: "missed, none", missed: proto.MissedNone, next: 2, now: 9.5, start: "9", runs: "missed", left: 10},
		{
			name: "missed, the last", missed: proto.MissedLast, overlap: proto.OverlapQueue, next: 2, now: 9.5, start: "8",
			wait: "9", runs: "missed", left: 10,
		},
		{
			name: "missed, all", missed: proto.MissedAll, overlap: proto.OverlapQueue, next: 2, now: 5.5, start: "2",
			wait: "3 4 5", left: 6,
		},
		{
			name: "missed, all of too many", missed: proto.MissedAll, overlap: proto.OverlapReplace, next: 2, now: 2880,
			start: "2880", cancel: true, runs: strings.TrimSpace(strings.Repeat("skipped ", 50)), left: 2881,
		},
		{
			name: "missed long ago", missed: proto.MissedNone, next: 2, now: 1e6, start: "999999", wait: "1e+06", runs: "missed",
			overlap: proto.OverlapQueue, left: 1e6 + 1,
		},
	} {
		t.Run(c.name, func(t *testing.T) {
			s := &proto.Schedule{
				Every: proto.Seconds(time.Minute), Overlap: c.overlap, Missed: c.missed, Paused: c.paused,
				CreatedAt: start, TimedAt: start,
			}
			ticker, err := newTicker(s)
			if err != nil {
				t.Fatal(err)
			}
			old := proto.ScheduleState{TimedAt: start, Waiting: at(c.waiting...)}
			if c.next < 0 {
				old.TimedAt = time.Time{}
			} else {
				old.Next = at(c.next)[0]
			}
			d, ok := decide(s, ticker, old, c.busy, at(c.now)[0])
			var runs []string
			for _, r := range d.state.Runs {
				runs = append(runs, string(r.Outcome))
			}
			if got := strings.Join(runs, " "); minutes(d.start) != c.start || d.cancel != c.cancel ||
				minutes(d.state.Waiting) != c.wait || got != c.runs {
				t.Errorf("starts %q, cancels %v, waiting %q, recorded %q", minutes(d.start), d.cancel,
					minutes(d.state.Waiting), got)
			}
			if left := d.state.Next.Sub(start).Minutes(); left != c.left {
				t.Errorf("the next tick is at %v", left)
			}
			if nothing := c.start == "" && c.runs == "" && c.next >= 0 && c.wait == minutes(old.Waiting); ok == nothing {
				t.Errorf("something to do: %v", ok)
			}
		})
	}
}

// TestNoTickIsLostOrDoubled lets two leaders at once handle a schedule, while the clock is stepped
// and leaders die between the start of executions and the storing of the state. The state is
// stored by compare-and-set.
func TestNoTickIsLostOrDoubled(t *testing.T) {
	type leader struct {
		read    bool
		state   proto.ScheduleState
		version int
	}
	for seed := range uint64(200) {
		random := rand.New(rand.NewPCG(seed, 0))
		s := &proto.Schedule{
			Every: proto.Seconds(time.Minute), Overlap: proto.OverlapQueue, Missed: proto.MissedAll,
			CreatedAt: noon, TimedAt: noon,
		}
		ticker, err := newTicker(s)
		if err != nil {
			t.Fatal(err)
		}
		var stored proto.ScheduleState
		version, now := 0, noon
		history := map[time.Time]int{} // how often each tick was recorded
		leaders := []*leader{{}, {}}
		for range 500 {
			switch step := random.IntN(40); step {
			case 0:
				now = now.Add(-time.Duration(random.IntN(600)) * time.Second)
			case 1:
				now = now.Add(time.Duration(random.IntN(1200)) * time.Second)
			default:
				now = now.Add(time.Duration(step) * time.Second)
			}
			l := leaders[random.IntN(len(leaders))]
			if !l.read {
				*l = leader{true, stored, version}
				continue
			}
			l.read = false
			d, ok := decide(s, ticker, l.state, random.IntN(4) == 0, now)
			if !ok {
				continue
			}
			if random.IntN(5) == 0 || l.version != version {
				continue // it died, or the other one was first
			}
			for _, tick := range d.start {
				history[tick]++
			}
			for _, r := range d.state.Runs {
				history[r.Tick]++
			}
			d.state.Runs = nil
			stored, version = d.state, version+1
		}
		for tick := noon.Add(time.Minute); tick.Before(stored.Next); tick = tick.Add(time.Minute) {
			waits := 0
			if slices.ContainsFunc(stored.Waiting, tick.Equal) {
				waits = 1
			}
			if history[tick]+waits != 1 {
				t.Errorf("seed %d: %s is %d times in the history, and %d wait", seed, tick, history[tick], waits)
			}
			delete(history, tick)
		}
		if len(history) > 0 {
			t.Errorf("seed %d: in the history before they were due: %v", seed, history)
		}
	}
}
