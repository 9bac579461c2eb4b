package simulation

import (
	"context"
	"errors"
	"math"
	"sort"

	"github.com/bullpen-run/bullpen/scheduler/autoscale"
)

// Report compares an autoscaled pool with pools of a fixed size.
type Report struct {
	Autoscaled Result `json:"autoscaled"`
	// SameHours is a fixed pool with about as many worker hours.
	SameHours Fixed `json:"fixed_same_worker_hours"`
	// SameWait is the smallest fixed pool with no longer 99th percentile of waits, if one within
	// the policy's maximum exists.
	SameWait *Fixed `json:"fixed_same_p99"`
}

// Fixed is the simulation of a pool of a fixed size.
type Fixed struct {
	Workers int `json:"workers"`
	Result
}

// Report runs the simulation, and simulations of fixed pools.
func (s *Simulation) Report(ctx context.Context) (*Report, error) {
	autoscaled, err := s.Run(ctx)
	if err != nil {
		return nil, err
	}
	r := &Report{Autoscaled: *autoscaled}
	hours := max(autoscaled.Hours, math.SmallestNonzeroFloat64)
	same := min(max(int(math.Round(autoscaled.WorkerHours/hours)), 1), autoscale.MaxWorkers)
	fixed, err := s.fixed(ctx, same)
	if err != nil {
		return nil, err
	}
	r.SameHours = *fixed

	sort.Search(s.Policy.Max, func(i int) bool {
		if err != nil {
			return false
		}
		fixed, err = s.fixed(ctx, i+1)
		if errors.Is(err, errTooFewWorkers) {
			err = nil
			return false
		}
		enough := err == nil && fixed.Waits.P99 <= autoscaled.Waits.P99
		if enough {
			r.SameWait = fixed // the search goes on with fewer workers
		}
		return enough
	})
	if err != nil {
		return nil, err
	}
	return r, nil
}

// fixed simulates a pool of a fixed size.
func (s *Simulation) fixed(ctx context.Context, workers int) (*Fixed, error) {
	fixed := Simulation{Jobs: s.Jobs, Policy: s.Policy, Every: maxSimulated} // there is nothing to evaluate
	fixed.Policy.Min, fixed.Policy.Max = workers, workers
	result, err := fixed.Run(ctx)
	if err != nil {
		return nil, err
	}
	result.Samples = nil
	return &Fixed{Workers: workers, Result: *result}, nil
}
