package load_test

import (
	"context"
	"slices"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/bullpen-run/bullpen/client/load"
)

func TestSteadyKeepsTheRate(t *testing.T) {
	for _, c := range []struct {
		rate   float64
		d      time.Duration
		n      int
		second time.Duration
		last   time.Duration
	}{
		{10, time.Second, 10, 100 * time.Millisecond, 900 * time.Millisecond},
		// a third of a second is not a whole number of nanoseconds
		{3, time.Hour, 10_800, 333_333_333, time.Hour - 333_333_334},
		{.5, 6 * time.Second, 3, 2 * time.Second, 4 * time.Second},
	} {
		at := slices.Collect(load.Steady(c.rate, c.d))
		if len(at) != c.n || at[0] != 0 || at[1] != c.second || at[len(at)-1] != c.last {
			t.Errorf("%v/s for %s: %d, the second after %s, the last after %s", c.rate, c.d, len(at), at[1], at[len(at)-1])
		}
	}
	if at := slices.Collect(load.Steady(.1, time.Second)); len(at) != 1 || at[0] != 0 {
		t.Errorf("less than one is %v, want one at once", at)
	}
}

func TestRandomIsRepeatable(t *testing.T) {
	first, again := slices.Collect(load.Random(50, time.Minute, 3)), slices.Collect(load.Random(50, time.Minute, 3))
	if !slices.Equal(first, again) || !slices.IsSorted(first) || len(first) < 2700 || len(first) > 3300 ||
		first[len(first)-1] >= time.Minute {
		t.Errorf("%d times, and %d again", len(first), len(again))
	}
	if other := slices.Collect(load.Random(50, time.Minute, 4)); slices.Equal(first, other) {
		t.Error("another seed has the same times")
	}
}

func TestOpenDoesNotWaitForCalls(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var calls, late atomic.Int64
		opened := load.Open(t.Context(), load.Steady(10, time.Second), 0, func(d load.Due) {
			calls.Add(1)
			if time.Since(d.At) > 0 || d.Since != time.Duration(d.N)*100*time.Millisecond {
				late.Add(1)
			}
			time.Sleep(5 * time.Second)
		})
		if calls.Load() != 10 || late.Load() != 0 || opened.Unsent != 0 || time.Since(opened.Start) != 5900*time.Millisecond {
			t.Errorf("%d calls, %d late, %+v, after %s", calls.Load(), late.Load(), opened, time.Since(opened.Start))
		}
	})
}

func TestOpenLimitsCallsInFlight(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var calls atomic.Int64
		opened := load.Open(t.Context(), load.Steady(10, time.Second), 2, func(load.Due) {
			calls.Add(1)
			time.Sleep(250 * time.Millisecond)
		})
		if calls.Load() != 7 || opened.Unsent != 3 {
			t.Errorf("%d calls and %d unsent, want 7 and 3", calls.Load(), opened.Unsent)
		}
	})
}

func TestOpenEndsWithItsContext(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ctx, cancel := context.WithCancel(t.Context())
		load.Open(ctx, load.Steady(1, time.Hour), 0, func(d load.Due) {
			if d.N == 2 {
				cancel()
			}
			if d.N > 2 {
				t.Errorf("call %d after the end", d.N)
			}
		})
	})
}
