package load

import (
	"context"
	"iter"
	"math"
	"math/rand/v2"
	"sync"
	"time"
)

// Steady returns due times at a fixed rate per second, for d, starting immediately. Each is
// computed from its index, so that rounding errors do not add up.
func Steady(rate float64, d time.Duration) iter.Seq[time.Duration] {
	return func(yield func(time.Duration) bool) {
		for i := range max(1, int(math.Round(rate*d.Seconds()))) {
			if !yield(time.Duration(float64(i) / rate * float64(time.Second))) {
				return
			}
		}
	}
}

// Random returns due times of a Poisson process with a mean rate per second, for d. The same seed
// gives the same times.
func Random(rate float64, d time.Duration, seed uint64) iter.Seq[time.Duration] {
	return func(yield func(time.Duration) bool) {
		random := rand.New(rand.NewPCG(seed, seed)) //nolint:gosec // a load that can be repeated
		for due := time.Duration(0); ; {
			due += time.Duration(random.ExpFloat64() / rate * float64(time.Second))
			if due >= d || !yield(due) {
				return
			}
		}
	}
}

// Due is one call of [Open].
type Due struct {
	N     int           // its number, from 0 on
	Since time.Duration // since the start
	At    time.Time     // the due time: measure from it
}

// Opened is how a load was started.
type Opened struct {
	Start  time.Time
	Unsent int           // calls skipped because too many were in flight
	Late   time.Duration // by how much the latest call was late, because this machine was busy
}

// Open calls run at each due time in a goroutine of its own, even if earlier calls have not
// returned, and waits for all. Due times count from its start. It skips a call while inFlight calls
// are in flight; 0 means no limit. If ctx is done, Open makes no more calls.
func Open(ctx context.Context, due iter.Seq[time.Duration], inFlight int, run func(Due)) Opened {
	if inFlight == 0 {
		inFlight = math.MaxInt
	}
	o := Opened{Start: time.Now()}
	var mu sync.Mutex
	running := 0
	take := func() bool {
		mu.Lock()
		defer mu.Unlock()
		if running == inFlight {
			return false
		}
		running++
		return true
	}
	var all sync.WaitGroup
	defer all.Wait()
	timer := time.NewTimer(0)
	defer timer.Stop()
	n := 0
	for since := range due {
		next := Due{n, since, o.Start.Add(since)}
		n++
		timer.Reset(time.Until(next.At))
		select {
		case <-ctx.Done():
		case <-timer.C:
		}
		switch {
		case ctx.Err() != nil:
			return o
		case !take():
			o.Unsent++
			continue
		}
		o.Late = max(o.Late, time.Since(next.At))
		all.Go(func() {
			run(next)
			mu.Lock()
			defer mu.Unlock()
			running--
		})
	}
	return o
}
