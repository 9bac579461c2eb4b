package schedules

import (
	"fmt"
	"slices"
	"time"

	"github.com/bullpen-run/bullpen/proto"
)

const (
	// missedAfter is how late a tick must be to count as missed.
	missedAfter = time.Minute
	// missedSince is the maximum age of a missed tick that is still made up for.
	missedSince = 24 * time.Hour
)

// decision is the pending work of a schedule. Its state must be stored after that.
type decision struct {
	state  proto.ScheduleState
	start  []time.Time // ticks whose executions start
	cancel bool        // the last execution, before
}

// decide returns what to do at a time. busy reports whether the last execution has not ended. ok is
// false if there is nothing to do.
func decide(s *proto.Schedule, t *ticker, old proto.ScheduleState, busy bool, now time.Time) (d decision, ok bool) {
	d.state = old
	if !old.TimedAt.Equal(s.TimedAt) {
		// Ticks start at the next look: the state must name a tick before that starts.
		d.dropWaiting(now)
		d.state.TimedAt, d.state.Error = s.TimedAt, ""
		advance(&d.state, t, s.TimedAt)
		return d, true
	}
	if s.Paused {
		return d, ok
	}
	if !busy && len(d.state.Waiting) > 0 {
		d.start, d.state.Waiting = slices.Clone(d.state.Waiting[:1]), d.state.Waiting[1:]
		busy, ok = true, true
	}
	for _, tick := range d.dueTicks(s, t, now) {
		ok = true
		switch {
		case !busy:
			d.start, busy = append(d.start, tick), true
		case s.Overlap == proto.OverlapReplace:
			for _, earlier := range d.start {
				d.add(earlier, now, proto.RunSkipped, "the next tick was due as well")
			}
			d.start, d.cancel = []time.Time{tick}, true
		case s.Overlap == proto.OverlapQueue && len(d.state.Waiting) < proto.MaxScheduleRuns:
			d.state.Waiting = append(slices.Clip(d.state.Waiting), tick)
		case s.Overlap == proto.OverlapQueue:
			d.add(tick, now, proto.RunSkipped,
				fmt.Sprintf("%d ticks wait for the end of the previous execution", proto.MaxScheduleRuns))
		default:
			d.add(tick, now, proto.RunSkipped, "the previous execution had not ended")
		}
	}
	return d, ok
}

// dueTicks returns the ticks to handle, and moves the state beyond them. Missed ticks are left out
// or kept as the schedule wants.
func (d *decision) dueTicks(s *proto.Schedule, t *ticker, now time.Time) []time.Time {
	var missed, due []time.Time
	dropped := 0
	var lastDropped time.Time
	drop := func(tick time.Time) { dropped, lastDropped = dropped+1, tick }
	if oldest := now.Add(-missedSince); !d.state.Next.IsZero() && d.state.Next.Before(oldest) {
		drop(d.state.Next)
		advance(&d.state, t, oldest)
	}
	for ; !d.state.Next.IsZero() && !t.due(d.state.Next).After(now); advance(&d.state, t, d.state.Next) {
		tick := d.state.Next
		if now.Sub(t.due(tick)) <= missedAfter {
			due = append(due, tick)
			continue
		}
		keep := map[proto.MissedPolicy]int{proto.MissedLast: 1, proto.MissedAll: proto.MaxScheduleRuns}[s.Missed]
		missed = append(missed, tick)
		if len(missed) > keep {
			drop(missed[0])
			missed = missed[1:]
		}
	}
	if dropped > 0 {
		reason := "no server could start it in time"
		if dropped > 1 {
			reason += ", nor ticks before it"
		}
		d.add(lastDropped, now, proto.RunMissed, reason)
	}
	return append(missed, due...)
}

// advance moves a state to the first tick after a time. If that cannot be computed, the schedule
// has no further ticks until its timing changes.
func advance(state *proto.ScheduleState, t *ticker, after time.Time) {
	var err error
	if state.Next, err = t.next(after); err != nil {
		state.Next, state.Error = time.Time{}, err.Error()
	}
}

// dropWaiting drops the ticks that wait. The history tells of the last one.
func (d *decision) dropWaiting(now time.Time) {
	if n := len(d.state.Waiting); n > 0 {
		reason := "the timing of the schedule was changed while it waited"
		if n > 1 {
			reason += fmt.Sprintf(", as did %d ticks before it", n-1)
		}
		d.add(d.state.Waiting[n-1], now, proto.RunSkipped, reason)
	}
	d.state.Waiting = nil
}

func (d *decision) add(tick, now time.Time, outcome proto.RunOutcome, reason string) {
	d.state.Add(proto.ScheduleRun{Tick: tick, At: now.UTC(), Outcome: outcome, Reason: reason})
}
