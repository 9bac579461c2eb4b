package autoscale_test

import (
	"math"
	"testing"
	"time"

	"pgregory.net/rapid"

	"github.com/bullpen-run/bullpen/proto"
	. "github.com/bullpen-run/bullpen/scheduler/autoscale"
)

var start = time.Date(2026, 3, 29, 0, 0, 0, 0, time.UTC)

// testPolicy has a target wait of 10 s, a cool-down of 5 minutes, and 4 slots per worker.
func testPolicy(minWorkers, maxWorkers int) *Policy {
	p := DefaultPolicy()
	p.Min, p.Max = minWorkers, maxWorkers
	return &p
}

func TestRecommend(t *testing.T) {
	running := func(workers int) State { return State{At: start.Add(-10 * time.Second), Workers: workers} }
	for name, c := range map[string]struct {
		min, max int
		demand   Demand
		last     State
		want     int
		reason   Reason
	}{
		"nothing to do":                 {0, 10, Demand{}, State{}, 0, ReasonDemand},
		"nothing to do, with a minimum": {2, 10, Demand{}, State{}, 2, ReasonMin},
		"from zero at once":             {0, 10, Demand{Queued: 1}, running(0), 1, ReasonDemand},
		"from zero in the first call":   {0, 10, Demand{Queued: 1, MeanSeconds: 0.01}, State{}, 1, ReasonDemand},
		"the formula": {
			0, 10,
			Demand{Queued: 100, Running: 4, MeanSeconds: 2, Slots: 4},
			running(1), 6,
			ReasonDemand,
		},
		"no more slots than jobs": {
			0, 10,
			Demand{Queued: 3, Running: 4, MeanSeconds: 600, Slots: 4},
			running(1), 2,
			ReasonDemand,
		},
		"no fewer slots than programs": {
			0, 10,
			Demand{Running: 17, MeanSeconds: 0.1, Slots: 20},
			running(1), 5,
			ReasonDemand,
		},
		"the maximum": {0, 10, Demand{Queued: 100_000, MeanSeconds: 5}, running(0), 10, ReasonMax},
		"an endless queue": {
			0, MaxWorkers,
			Demand{Queued: math.MaxInt, Running: math.MaxInt, MeanSeconds: math.MaxFloat64},
			running(0),
			MaxWorkers, ReasonMax,
		},
		"more programs than the maximum": {0, 2, Demand{Running: 40, MeanSeconds: 5, Slots: 40}, State{}, 2, ReasonMax},
		"within the tolerance": {
			0, 50,
			Demand{Queued: 220, MeanSeconds: 2, Slots: 40},
			running(10), 10,
			ReasonTolerance,
		},
		"beyond the tolerance": {
			0, 50,
			Demand{Queued: 221, MeanSeconds: 2, Slots: 40},
			running(10), 12,
			ReasonDemand,
		},
		"the tolerance does not hold it": {
			0, 50, Demand{Queued: 220, MeanSeconds: 2, Slots: 40, OldestWait: 11 * time.Second}, running(10), 11, ReasonWait,
		},
		"the oldest job": {
			0, 50,
			Demand{Queued: 90, Running: 40, MeanSeconds: 1, Slots: 40, OldestWait: 15 * time.Second},
			running(10), 15,
			ReasonWait,
		},
		"the oldest job, at most double": {
			0, 50,
			Demand{Queued: 90, Running: 40, MeanSeconds: 1, Slots: 40, OldestWait: time.Hour},
			running(10), 20,
			ReasonWait,
		},
		"the oldest of few jobs": {
			0, 50,
			Demand{Queued: 2, Running: 40, MeanSeconds: 1, Slots: 40, OldestWait: time.Hour},
			running(10), 11,
			ReasonWait,
		},
		"a wait without workers": {
			0, 50,
			Demand{Queued: 40, MeanSeconds: 1, OldestWait: time.Hour},
			running(0), 1,
			ReasonWait,
		},
		"shrinks later": {
			0, 10,
			Demand{Running: 4, MeanSeconds: 1, Slots: 40},
			running(10), 10,
			ReasonCoolDown,
		},
		"idle, but not yet for long":   {0, 10, Demand{Slots: 4, MeanSeconds: 1}, running(1), 1, ReasonDemand},
		"the live slots, in the first": {0, 10, Demand{Running: 4, Slots: 20, MeanSeconds: 1}, State{}, 5, ReasonCoolDown},
		"a mean of 0":                  {0, 10, Demand{Queued: 80}, running(0), 2, ReasonDemand},
		"a mean that is not a number":  {0, 10, Demand{Queued: 80, MeanSeconds: math.NaN()}, running(0), 2, ReasonDemand},
		"an infinite mean":             {0, 10, Demand{Queued: 80, MeanSeconds: math.Inf(1)}, running(0), 2, ReasonDemand},
		"a negative mean":              {0, 10, Demand{Queued: 80, MeanSeconds: -3}, running(0), 2, ReasonDemand},
		"negative counts": {
			0, 10,
			Demand{Queued: -1, Running: -1, Slots: -1, OldestWait: -1},
			running(0), 0,
			ReasonDemand,
		},
		"a policy with a smaller maximum": {
			0, 3,
			Demand{Queued: 1000, Running: 12, MeanSeconds: 1, Slots: 40},
			running(10),
			3, ReasonMax,
		},
		"a policy with a larger minimum": {4, 10, Demand{Queued: 1, MeanSeconds: 1, Slots: 4}, running(1), 4, ReasonMin},
	} {
		t.Run(name, func(t *testing.T) {
			got, next := testPolicy(c.min, c.max).Recommend(c.demand, c.last, start)
			if got != c.want || next.Reason != c.reason || next.Workers != got {
				t.Fatalf("%d workers, %+v; want %d because of %s", got, next, c.want, c.reason)
			}
		})
	}
}

// step is an evaluation at an offset from the start, and what it is to return.
type step struct {
	at     time.Duration
	demand Demand
	want   int
}

// TestRecommendOverTime follows a pool that is evaluated several times. Slots follow the
// recommendation at once.
func TestRecommendOverTime(t *testing.T) {
	busy := func(running int) Demand { return Demand{Running: running, MeanSeconds: 1} }
	every := func(from, to time.Duration, d Demand, want int) (list []step) {
		for at := from; at <= to; at += 10 * time.Second {
			list = append(list, step{at, d, want})
		}
		return list
	}
	join := func(lists ...[]step) (all []step) {
		for _, list := range lists {
			all = append(all, list...)
		}
		return all
	}
	minutes := func(n float64) time.Duration { return time.Duration(n * float64(time.Minute)) }
	const second = time.Second
	for name, steps := range map[string][]step{
		"shrinks to the largest need of the cool-down": join(
			every(0, 0, busy(40), 10),
			every(10*second, minutes(2), busy(4), 10),
			every(minutes(2)+10*second, minutes(3), busy(12), 10),
			every(minutes(3)+10*second, minutes(5), busy(4), 10),
			every(minutes(5)+10*second, minutes(9), busy(4), 3),
			every(minutes(10)+10*second, minutes(11), busy(4), 1)),
		"a peak starts the cool-down again": join(
			every(0, 0, busy(40), 10),
			every(10*second, minutes(4), busy(4), 10),
			every(minutes(4)+10*second, minutes(4)+10*second, busy(40), 10),
			every(minutes(4)+20*second, minutes(9)+10*second, busy(4), 10),
			every(minutes(9)+20*second, minutes(10), busy(4), 1)),
		"to zero": join(
			every(0, 0, busy(8), 2),
			every(10*second, minutes(5), Demand{}, 2),
			every(minutes(5)+10*second, minutes(9.8), Demand{}, 1),
			every(minutes(10)+10*second, minutes(11), Demand{}, 0),
			every(minutes(11)+10*second, minutes(11)+10*second, Demand{Queued: 1}, 1)),
		"the clock is set forward by a day": join(
			every(0, 10*second, busy(40), 10),
			every(24*time.Hour, 24*time.Hour+minutes(3.6), busy(4), 10)),
		"the clock is set back by a day": join(
			every(24*time.Hour, 24*time.Hour+minutes(2), busy(40), 10),
			every(0, minutes(4.8), busy(4), 10),
			every(minutes(5), minutes(6), busy(4), 1)),
	} {
		t.Run(name, func(t *testing.T) {
			p, state := testPolicy(0, 10), State{}
			for _, s := range steps {
				s.demand.Slots = state.Workers * p.SlotsPerWorker
				got, next := p.Recommend(s.demand, state, start.Add(s.at))
				if got != s.want {
					t.Fatalf("after %v: %d workers, %+v; want %d", s.at, got, next, s.want)
				}
				state = next
			}
		})
	}
}

func drawPolicy(t *rapid.T) *Policy {
	p := DefaultPolicy()
	p.Max = rapid.IntRange(1, 200).Draw(t, "max")
	p.Min = rapid.IntRange(0, p.Max).Draw(t, "min")
	p.SlotsPerWorker = rapid.IntRange(1, 64).Draw(t, "slots per worker")
	p.TargetWait = proto.Seconds(rapid.Int64Range(int64(time.Millisecond), int64(time.Hour)).Draw(t, "target wait"))
	p.ScaleDownAfter = proto.Seconds(rapid.Int64Range(0, int64(10*time.Minute)).Draw(t, "scale down after"))
	p.ScaleToZeroAfter = p.ScaleDownAfter +
		proto.Seconds(rapid.Int64Range(0, int64(10*time.Minute)).Draw(t, "scale to zero after"))
	p.Tolerance = rapid.Float64Range(0, 0.9).Draw(t, "tolerance")
	if err := p.Validate(); err != nil {
		t.Fatal(err)
	}
	return &p
}

func drawDemand(t *rapid.T) Demand {
	return Demand{
		Queued:      rapid.OneOf(rapid.IntRange(0, 50), rapid.IntRange(0, math.MaxInt)).Draw(t, "queued"),
		Running:     rapid.IntRange(0, 500).Draw(t, "running"),
		MeanSeconds: rapid.OneOf(rapid.Float64Range(0, 100), rapid.Float64()).Draw(t, "mean"),
		OldestWait:  time.Duration(rapid.Int64Range(0, int64(2*time.Hour)).Draw(t, "oldest wait")),
		Slots:       rapid.IntRange(0, 1000).Draw(t, "slots"),
	}
}

// TestRecommendProperties holds for all policies, demands and clocks.
func TestRecommendProperties(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		p, state, now := drawPolicy(t), State{}, start
		for range rapid.IntRange(1, 20).Draw(t, "evaluations") {
			now = now.Add(time.Duration(rapid.Int64Range(-int64(time.Minute), int64(5*time.Minute)).Draw(t, "later")))
			d := drawDemand(t)
			got, next := p.Recommend(d, state, now)
			if got < p.Min || got > p.Max {
				t.Fatalf("%d workers are not within %d and %d", got, p.Min, p.Max)
			}
			if got < p.Max && got*p.SlotsPerWorker < d.Running {
				t.Fatalf("%d workers of %d slots for %d programs", got, p.SlotsPerWorker, d.Running)
			}
			if got == 0 && d.Queued > 0 {
				t.Fatalf("no worker for %d jobs", d.Queued)
			}
			more := d
			more.Queued = rapid.IntRange(d.Queued, math.MaxInt).Draw(t, "more queued")
			if workers, _ := p.Recommend(more, state, now); workers < got {
				t.Fatalf("%d workers for %d queued jobs, %d for %d", got, d.Queued, workers, more.Queued)
			}
			state = next
		}
	})
}

// TestRecommendDoesNotFlap follows constant demand. The pool grows for a while, or it shrinks, and
// then it stays.
func TestRecommendDoesNotFlap(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		p, d, state, now := drawPolicy(t), drawDemand(t), State{}, start
		grew, shrank := 0, 0
		for i := range 200 {
			got, next := p.Recommend(d, state, now)
			if i > 0 && got > state.Workers {
				grew++
			}
			if i > 0 && got < state.Workers {
				shrank++
			}
			if grew > 0 && shrank > 0 {
				t.Fatalf("from %d to %d workers after %d increases and %d decreases", state.Workers, got, grew, shrank)
			}
			state, d.Slots, now = next, got*p.SlotsPerWorker, now.Add(15*time.Second)
		}
	})
}

func TestParsePolicy(t *testing.T) {
	p, err := ParsePolicy([]byte(`{"max_workers": 3, "target_wait": 0.5, "tolerance": 0}`))
	want := DefaultPolicy()
	want.Max, want.TargetWait, want.Tolerance = 3, proto.Seconds(500*time.Millisecond), 0
	if err != nil || p != want {
		t.Fatalf("%+v, %v", p, err)
	}
	for text, message := range map[string]string{
		``:                     `parse autoscaling policy: EOF`,
		`null`:                 `parse autoscaling policy: it is null`,
		`{} {}`:                `parse autoscaling policy: there is more than one JSON value`,
		`{"max": 3}`:           `parse autoscaling policy: json: unknown field "max"`,
		`{"max_workers": 0}`:   "autoscaling policy: max_workers must be between 1 and 100000",
		`{"min_workers": 11}`:  "autoscaling policy: min_workers must be between 0 and max_workers",
		`{"min_workers": -1}`:  "autoscaling policy: min_workers must be between 0 and max_workers",
		`{"target_wait": 0}`:   "autoscaling policy: target_wait must be between 1ms and 24h0m0s",
		`{"tolerance": 1}`:     "autoscaling policy: tolerance must be at least 0 and less than 1",
		`{"tolerance": -0.01}`: "autoscaling policy: tolerance must be at least 0 and less than 1",
		`{"slots_per_worker": 10001, "scale_to_zero_after": 60}`: "autoscaling policy: slots_per_worker must be between 1 " +
			"and 10000\n" +
			"scale_to_zero_after must be at least scale_down_after",
	} {
		if _, err := ParsePolicy([]byte(text)); err == nil || err.Error() != message {
			t.Errorf("%s: %v, want %s", text, err, message)
		}
	}
}
