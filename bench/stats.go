package main

import (
	"context"
	"iter"
	"slices"
	"sync"
	"time"

	"github.com/bullpen-run/bullpen/client/load"
	"github.com/bullpen-run/bullpen/proto/plot"
)

// errorPause is the pause after a failed run, so that a failing side does not spin.
const errorPause = 50 * time.Millisecond

// sample is one successful run.
type sample struct {
	took time.Duration
	id   string // execution id, if any
}

// series holds the runs of one side of a comparison. It may be read only once it is complete.
type series struct {
	mu       sync.Mutex
	samples  []sample
	errors   int
	firstErr error
	elapsed  time.Duration // total of all blocks
}

// runner runs a program once. If the sample has no time, the duration of the call counts.
type runner func(ctx context.Context) (sample, error)

// block has callers run one program after the other until d is over. Each caller completes at least
// one run.
func (s *series) block(ctx context.Context, d time.Duration, callers int, run runner) {
	began := time.Now()
	var all sync.WaitGroup
	for range callers {
		all.Go(func() {
			for {
				s.once(ctx, run)
				if ctx.Err() != nil || time.Since(began) >= d {
					return
				}
			}
		})
	}
	all.Wait()
	s.elapsed += time.Since(began)
}

// open starts a run at each of the due times, even if earlier runs have not ended, and waits for
// all. Each duration counts from the due time.
func (s *series) open(ctx context.Context, due iter.Seq[time.Duration], run runner) {
	opened := load.Open(ctx, due, 0, func(due load.Due) {
		s.once(ctx, func(ctx context.Context) (sample, error) {
			one, err := run(ctx)
			one.took = time.Since(due.At)
			return one, err
		})
	})
	s.elapsed += time.Since(opened.Start)
}

// once performs one run and records the outcome. A run that ctx interrupts does not count.
func (s *series) once(ctx context.Context, run runner) {
	began := time.Now()
	one, err := run(ctx)
	if one.took == 0 {
		one.took = time.Since(began)
	}
	switch {
	case ctx.Err() != nil:
	case err == nil:
		s.mu.Lock()
		s.samples = append(s.samples, one)
		s.mu.Unlock()
	default:
		s.mu.Lock()
		s.errors++
		if s.firstErr == nil {
			s.firstErr = err
		}
		s.mu.Unlock()
		time.Sleep(errorPause)
	}
}

// side is one side of a comparison.
type side struct {
	series
	run runner
}

// alternate measures the sides in turn, one block each, until each has run for total.
func alternate(ctx context.Context, total, block time.Duration, callers int, sides ...*side) {
	for spent := time.Duration(0); spent < total && ctx.Err() == nil; spent += block {
		for _, s := range sides {
			s.block(ctx, min(block, total-spent), callers, s.run)
		}
	}
}

// summary summarises a series, in milliseconds.
type summary struct {
	Runs       int     `json:"runs"`
	Errors     int     `json:"errors"`
	FirstError string  `json:"first_error,omitempty"`
	P50        float64 `json:"p50_ms"`
	P99        float64 `json:"p99_ms"`
	P999       float64 `json:"p99_9_ms"`
	Min        float64 `json:"min_ms"`
	Max        float64 `json:"max_ms"`
	PerSecond  float64 `json:"runs_per_second,omitempty"`
	Seconds    float64 `json:"seconds,omitempty"` // measured time
}

func (s *series) summary() *summary {
	took := make([]float64, len(s.samples))
	for i, one := range s.samples {
		took[i] = millis(one.took)
	}
	sum := summarise(took)
	sum.Errors, sum.Seconds = s.errors, s.elapsed.Seconds()
	if s.firstErr != nil {
		sum.FirstError = s.firstErr.Error()
	}
	if sum.Seconds > 0 {
		sum.PerSecond = float64(sum.Runs) / sum.Seconds
	}
	return sum
}

// summarise sorts values, which may be empty, and summarises them.
func summarise(values []float64) *summary {
	slices.Sort(values)
	sum := &summary{
		Runs: len(values), P50: plot.Percentile(values, 50), P99: plot.Percentile(values, 99),
		P999: plot.Percentile(values, 99.9),
	}
	if len(values) > 0 {
		sum.Min, sum.Max = values[0], values[len(values)-1]
	}
	return sum
}

func millis(d time.Duration) float64 { return float64(d) / float64(time.Millisecond) }

// ratio returns a divided by b, or 0 if that is undefined.
func ratio(a, b float64) float64 {
	if b == 0 {
		return 0
	}
	return a / b
}
