package main

import (
	"context"
	"errors"
	"slices"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/bullpen-run/bullpen/client/load"
)

func TestSummariseSortsFirst(t *testing.T) {
	got := summarise([]float64{5, 1, 3})
	if want := (summary{Runs: 3, P50: 3, P99: 5, P999: 5, Min: 1, Max: 5}); *got != want {
		t.Errorf("summary is %+v, want %+v", *got, want)
	}
}

func TestRatioToZero(t *testing.T) {
	if got := ratio(1, 0); got != 0 {
		t.Errorf("1 to 0 is %v, want 0", got)
	}
}

func TestFailedRunsAreNoSamples(t *testing.T) {
	broken := errors.New("broken")
	var s series
	s.once(t.Context(), func(context.Context) (sample, error) { return sample{id: "a", took: time.Second}, nil })
	s.once(t.Context(), func(context.Context) (sample, error) { return sample{took: time.Minute}, broken })
	s.elapsed = 2 * time.Second
	got := s.summary()
	want := summary{
		Runs: 1, Errors: 1, FirstError: "broken", P50: 1000, P99: 1000, P999: 1000, Min: 1000, Max: 1000,
		PerSecond: .5, Seconds: 2,
	}
	if *got != want {
		t.Errorf("summary is %+v, want %+v", *got, want)
	}
}

func TestAbortedRunHasNoResult(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	var s series
	s.once(ctx, func(context.Context) (sample, error) { cancel(); return sample{}, context.Canceled })
	if len(s.samples) != 0 || s.errors != 0 {
		t.Errorf("%d samples and %d errors, want none", len(s.samples), s.errors)
	}
}

func TestAlternateTakesTurns(t *testing.T) {
	var order []string
	turn := func(name string) *side {
		return &side{run: func(context.Context) (sample, error) {
			if n := len(order); n == 0 || order[n-1] != name {
				order = append(order, name)
			}
			time.Sleep(time.Millisecond)
			return sample{}, nil
		}}
	}
	a, b := turn("a"), turn("b")
	alternate(t.Context(), 20*time.Millisecond, 10*time.Millisecond, 1, a, b)
	if len(order) != 4 || order[0] != "a" || order[1] != "b" || order[2] != "a" {
		t.Errorf("the turns were %v, want a b a b", order)
	}
	if a.elapsed < 20*time.Millisecond || len(a.samples) == 0 {
		t.Errorf("a had %s and %d samples", a.elapsed, len(a.samples))
	}
}

func TestBlockUsesAllCallers(t *testing.T) {
	const callers = 4
	var inside, most atomic.Int32
	all := make(chan struct{})
	var s series
	s.block(t.Context(), time.Nanosecond, callers, func(context.Context) (sample, error) {
		if n := inside.Add(1); n == callers {
			close(all)
		}
		<-all
		most.Store(max(most.Load(), inside.Load()))
		return sample{}, nil
	})
	if most.Load() != callers || len(s.samples) != callers {
		t.Errorf("%d callers at once and %d samples, want %d", most.Load(), len(s.samples), callers)
	}
}

func TestStallCountsForAllDueRequests(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		stalled := time.After(time.Second)
		serving := make(chan struct{}, 1) // serves one at a time, and the first for a second
		var s series
		s.open(t.Context(), load.Steady(10, 2*time.Second), func(context.Context) (sample, error) {
			serving <- struct{}{}
			defer func() { <-serving }()
			if stalled != nil {
				<-stalled
				stalled = nil
			}
			return sample{took: time.Nanosecond}, nil
		})
		var waited []time.Duration
		for _, one := range s.samples {
			waited = append(waited, one.took)
		}
		slices.Sort(waited)
		for i, took := range waited[10:] {
			if want := time.Duration(i+1) * 100 * time.Millisecond; took != want {
				t.Errorf("one of those that came in the stall took %s, want %s", took, want)
			}
		}
		if len(waited) != 20 || waited[9] > time.Nanosecond || s.elapsed != 1900*time.Millisecond {
			t.Errorf("%d runs in %s took %s", len(waited), s.elapsed, waited)
		}
	})
}

func TestNoSampleStartsAfterTheEnd(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ctx, cancel := context.WithCancel(t.Context())
		var runs atomic.Int32
		var s series
		s.open(ctx, load.Steady(1, time.Hour), func(context.Context) (sample, error) {
			if runs.Add(1) == 3 {
				cancel()
			}
			return sample{}, nil
		})
		if runs.Load() != 3 || s.elapsed != 2*time.Second {
			t.Errorf("%d runs in %s, want 3 in 2s", runs.Load(), s.elapsed)
		}
	})
}

func TestLatencyIsMeasuredFromTheDueTime(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var s series
		s.open(t.Context(), slices.Values([]time.Duration{-time.Second}), func(context.Context) (sample, error) {
			return sample{took: 1}, nil
		})
		if len(s.samples) != 1 || s.samples[0].took != time.Second {
			t.Errorf("the samples are %v, want one of 1s", s.samples)
		}
	})
}
