package pool

import (
	"math"
	"time"
)

// horizon is how far back the rate of what is asked for looks.
const horizon = 5 * time.Second

// Rate is how often something is asked for. Zero is never.
type Rate struct{ asked faded }

// Ask counts one that is asked for now.
func (r *Rate) Ask(now time.Time) { r.asked.add(now, horizon) }

// At is how many are asked for in a second, over about the last five.
func (r *Rate) At(now time.Time) float64 { return r.asked.count(now, horizon) / horizon.Seconds() }

// Last is when one was asked for last; zero before the first.
func (r *Rate) Last() time.Time { return r.asked.last }

// faded is a number of events, of which each counts less the longer it was ago.
type faded struct {
	last time.Time
	n    float64 // at last
}

func (f *faded) add(now time.Time, horizon time.Duration) { f.n, f.last = f.count(now, horizon)+1, now }

func (f *faded) count(now time.Time, horizon time.Duration) float64 {
	return f.n * math.Exp(-now.Sub(f.last).Seconds()/horizon.Seconds())
}
