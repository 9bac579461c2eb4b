package queue

import (
	"math"
	"time"
)

// rateMemory is the time after which a measurement of a startRate has lost most of its weight.
const rateMemory = 10 * time.Second

// startRate measures how many jobs start per second while others are queued. While none is queued,
// starts are limited by demand, not by slots.
type startRate struct {
	started int // since the last update
	at      time.Time
	starts  float64 // each less by e^(-age/rateMemory)
	seconds float64 // in which they were made, weighted alike
}

// update ends a period. waiting reports that jobs are queued at its end.
func (r *startRate) update(now time.Time, waiting bool) {
	period, started := now.Sub(r.at).Seconds(), r.started
	first := r.at.IsZero()
	r.at, r.started = now, 0
	if first || !waiting {
		return
	}
	decay := math.Exp(-period / rateMemory.Seconds())
	r.starts, r.seconds = r.starts*decay+float64(started), r.seconds*decay+period
}

// perSecond returns the rate, 0 if nothing was measured.
func (r *startRate) perSecond() float64 {
	if r.seconds <= 0 {
		return 0
	}
	return r.starts / r.seconds
}
