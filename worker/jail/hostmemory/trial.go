package hostmemory

import (
	"maps"
	"math"
	"time"
)

// A trial convicts a program of growth with these bounds.
const (
	// minTicks is for how many ticks a program is observed at least.
	minTicks = 12
	// MaxTicks is how long a search makes sense before more memory is at stake.
	MaxTicks = 60
	// minScore is how many standard errors must lie between zero and a program's growth per time,
	// after an unlimited observation. scoreOfFew, divided by the number of ticks, is added to it,
	// because few ticks estimate the error badly. Of trials with eight programs, at most one in 100
	// finds a wrong one (TestTrial).
	minScore, scoreOfFew = 4, 45
	// noise is the standard deviation of a tick's growth on an idle host, in bytes.
	noise = 128 << 10
	// Slow is the most growth per tick, in bytes, at which a trial does not throttle programs.
	Slow = 8 << 20
	// minShare is the minimum share of its CPU for a program that is not paused.
	minShare = 1. / 32
	// recovery is the factor by which the share grows in a tick without fast growth.
	recovery = 1.05
	// Running is the probability with which a program runs in a tick.
	Running = 1. / 2
)

// Trial finds the program that makes the kernel's memory grow. It pauses programs at random, and
// records the kernel's growth per tick and how long each program ran. Only growth caused by a
// program correlates with its time. If growth is fast, programs run less, so that little is lost
// until the verdict. Begin resumes an interrupted trial.
type Trial[Program comparable] struct {
	Ticks int // since Begin
	// Share is the fraction of its CPU limit that an unpaused program gets.
	Share    float64
	programs map[Program]*sums
}

// New returns a trial that has observed nothing.
func New[Program comparable]() *Trial[Program] {
	return &Trial[Program]{programs: map[Program]*sums{}}
}

// Begin continues the trial after a tick in which the kernel grew by a number of bytes.
func (t *Trial[Program]) Begin(growth int64) {
	t.Ticks, t.Share = 0, 1
	if growth > Slow { // it may have begun in the midst of the tick, and often gets faster
		growth *= 2
	}
	t.Adjust(growth)
}

// Adjust reduces the programs' share if the kernel grew fast in a tick, and otherwise restores part
// of it.
func (t *Trial[Program]) Adjust(growth int64) {
	if growth > Slow {
		t.Share = max(minShare, t.Share*Slow/float64(growth))
	} else {
		t.Share = min(1, t.Share*recovery)
	}
}

// Retain forgets the programs for which runs returns false.
func (t *Trial[Program]) Retain(runs func(Program) bool) {
	maps.DeleteFunc(t.programs, func(p Program, _ *sums) bool { return !runs(p) })
}

// sums are over ticks: of a program's run time x in seconds, of the growth y in bytes, and of the variance
// of the growth on an idle host.
type sums struct{ n, x, y, xx, xy, yy, noise float64 }

// Ran is what a program did in a tick.
type Ran struct {
	Time  time.Duration // CPU time
	Share float64       // of its CPU that it had, or would have had if it had not been paused
}

// Observe adds a tick in which the kernel grew by a number of bytes. ran has all programs that existed for
// the whole tick.
//
// Time and growth are divided by the share. Otherwise fast growth, which lowers the share and so everyone's
// time, would correlate with the time of every program.
func (t *Trial[Program]) Observe(growth int64, ran map[Program]Ran) {
	t.Ticks++
	for p, r := range ran {
		s := t.programs[p]
		if s == nil {
			s = &sums{}
			t.programs[p] = s
		}
		x, y, idle := r.Time.Seconds()/r.Share, float64(growth)/r.Share, noise/r.Share
		s.n, s.x, s.y, s.xx, s.xy, s.yy = s.n+1, s.x+x, s.y+y, s.xx+x*x, s.xy+x*y, s.yy+y*y
		s.noise += idle * idle
	}
}

// Verdict returns the program that causes growth, if the evidence suffices.
func (t *Trial[Program]) Verdict() (guilty Program, found bool) {
	var best float64
	for p, s := range t.programs {
		if score := s.score(); score > best && score >= minScore+scoreOfFew/s.n {
			guilty, found, best = p, true, score
		}
	}
	return guilty, found
}

// score returns how many standard errors lie between zero and the slope of the growth over the
// program's run time, in a linear regression.
func (s *sums) score() float64 {
	if s.n < minTicks {
		return 0
	}
	xx, xy, yy := s.xx-s.x*s.x/s.n, s.xy-s.x*s.y/s.n, s.yy-s.y*s.y/s.n
	if xx <= 0 {
		return 0
	}
	slope := xy / xx
	variance := max(0, yy-slope*xy)/(s.n-2) + s.noise/s.n
	return slope * math.Sqrt(xx/variance)
}
