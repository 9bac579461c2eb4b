package hostmemory

import (
	"math/rand/v2"
	"testing"
	"time"
)

// Each program of a trial takes what its function returns per tick, unless it is paused.
func TestTrial(t *testing.T) {
	const mib = 1 << 20
	steady := func(n float64) func(*rand.Rand) float64 { return func(*rand.Rand) float64 { return n * mib } }
	idle := steady(0)
	// What others of the host take, and the kernel frees.
	host := func(r *rand.Rand) float64 { return r.NormFloat64() * mib }
	for name, tt := range map[string]struct {
		takers, innocent int
		takes            func(*rand.Rand) float64
		host             func(*rand.Rand) float64
		ticks            int     // within which one of the takers is found
		missed           float64 // at most this share of trials ends without one
	}{
		"alone":            {1, 0, steady(6), idle, 12, 0.05},
		"among neighbours": {1, 7, steady(6), host, 20, 0.1},
		"fast":             {1, 7, steady(40), host, 40, 0.05},
		"in bursts": {
			1, 7, func(r *rand.Rand) float64 { return 20 * mib * float64(r.IntN(2)) }, host,
			MaxTicks, 0.35,
		},
		"slowly":           {1, 7, steady(2), host, MaxTicks, 0.35},
		"two":              {2, 6, steady(6), host, MaxTicks, 0.1},
		"nobody":           {0, 8, idle, host, MaxTicks, 1},
		"very slowly":      {1, 7, steady(0.5), host, 50 * MaxTicks, 0.05},
		"nobody, for long": {0, 8, idle, host, 50 * MaxTicks, 1},
		"not a program":    {0, 8, idle, func(r *rand.Rand) float64 { return 10 * mib * r.Float64() }, MaxTicks, 1},
		"not a program, bursts": {
			0, 8, idle, func(r *rand.Rand) float64 { return 100 * mib * float64(r.IntN(8)/7) },
			MaxTicks, 1,
		},
	} {
		t.Run(name, func(t *testing.T) {
			r := rand.New(rand.NewPCG(1, 2))
			const trials = 1000
			wrong, missed := 0, 0
			for range trials {
				guilty, found := simulate(r, tt.takers, tt.takers+tt.innocent, tt.ticks, tt.takes, tt.host)
				switch {
				case !found:
					missed++
				case guilty >= tt.takers:
					wrong++
				}
			}
			if wrong > trials/100 || float64(missed) > tt.missed*trials {
				t.Errorf("of %d trials %d found nobody, %d the wrong one", trials, missed, wrong)
			}
		})
	}
}

// simulate runs a trial of programs, of which the first are takers, and returns its verdict.
func simulate(r *rand.Rand, takers, programs, ticks int, takes, host func(*rand.Rand) float64) (int, bool) {
	before := host(r)
	for range takers {
		before += takes(r)
	}
	trial := New[int]()
	trial.Begin(int64(before))
	for range ticks {
		if trial.Ticks == MaxTicks { // the next search
			trial.Begin(int64(before))
		}
		ran := map[int]Ran{}
		growth := host(r)
		for p := range programs {
			allowed := trial.Share
			if p%4 == 1 { // a program with little CPU, which keeps some of it
				allowed = max(0.2, allowed)
			}
			if p >= takers && p%4 == 3 { // one that began after the growth, which is not disturbed
				ran[p] = Ran{time.Duration(r.Float64() * float64(100*time.Millisecond)), 1}
				continue
			}
			if r.Float64() < Running {
				share := allowed * (0.3 + 0.7*r.Float64()) // others want the cpu too
				ran[p] = Ran{time.Duration(share * float64(100*time.Millisecond)), allowed}
				if p < takers {
					growth += share * takes(r)
				}
			} else {
				ran[p] = Ran{time.Millisecond, allowed}
			}
		}
		trial.Observe(int64(growth), ran)
		trial.Adjust(int64(growth))
		if guilty, found := trial.Verdict(); found {
			return guilty, found
		}
	}
	return 0, false
}
