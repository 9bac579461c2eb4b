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
	// minScore is how many standard errors must lie between zero and the growth that goes with the
	// time of a program that was observed for ever. scoreOfFew, divided by the number of ticks, is
	// added to it, because few ticks estimate the error badly. Of trials with eight programs, at
	// most one in 100 finds a wrong one (TestTrial).
	minScore, scoreOfFew = 4, 45
	// noise is the standard deviation of the growth of a tick on a host where nothing happens, in
	// bytes.
	noise = 128 << 10
	// Slow is the most growth of a tick, in bytes, that does not make a trial slow programs down.
	Slow = 8 << 20
	// minShare is the least part of its CPU that a program has while it is not paused.
	minShare = 1. / 32
	// recovery is the factor by which the share grows in a tick without fast growth.
	recovery = 1.05
	// Running is the probability with which a program runs in a tick.
	Running = 1. / 2
)

// Trial finds the program that makes the kernel's memory grow. Programs are paused at random. The
// trial records by how much the kernel has grown in each tick, and for how long each program ran.
// Only growth that a program causes goes with its time. If the growth is fast, programs run less,
// so that little is lost until the verdict. A trial can be interrupted: Begin goes on with it.
type Trial[Program comparable] struct {
	Ticks int // since Begin
	// Share is the part of its CPU that each program that is not paused is to have.
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

// Adjust reduces the share that programs have if the kernel grew fast in a tick, and otherwise restores
// a part of it.
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

// sums are those of the time x, in seconds, that a program ran in a tick, and of the growth y, in
// bytes, and of the variance of the growth where nothing happens.
type sums struct{ n, x, y, xx, xy, yy, noise float64 }

// Observe adds a tick in which the kernel grew by a number of bytes, and programs had a share of their
// CPU. ran has the CPU time of all programs that existed for the whole tick.
//
// Time and growth count as if the share had been 1. Otherwise growth that no program causes would go with
// the time of all: fast growth ends the ticks in which programs run for long.
func (t *Trial[Program]) Observe(growth int64, share float64, ran map[Program]time.Duration) {
	t.Ticks++
	for p, time := range ran {
		s := t.programs[p]
		if s == nil {
			s = &sums{}
			t.programs[p] = s
		}
		x, y, unsure := time.Seconds()/share, float64(growth)/share, noise/share
		s.n, s.x, s.y, s.xx, s.xy, s.yy = s.n+1, s.x+x, s.y+y, s.xx+x*x, s.xy+x*y, s.yy+y*y
		s.noise += unsure * unsure
	}
}

// Verdict returns the program that causes growth, if there is one for sure.
func (t *Trial[Program]) Verdict() (guilty Program, found bool) {
	var best float64
	for p, s := range t.programs {
		if score := s.score(); score > best && score >= minScore+scoreOfFew/s.n {
			guilty, found, best = p, true, score
		}
	}
	return guilty, found
}

// score returns how many standard errors lie between zero and the slope of the growth over the time
// that the program ran, in a linear regression.
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
