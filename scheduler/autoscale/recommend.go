package autoscale

import (
	"math"
	"time"
)

const (
	// assumedSeconds is the mean run time while none is known.
	assumedSeconds = 1
	// maxGrowth limits the growth of a pool, as a factor of its live slots, because a job waits too
	// long. More would order workers while the first ones still start.
	maxGrowth = 2
	// maxElapsed is the fraction of a delay that may pass between two evaluations. So neither
	// stepping the clock forward nor suspending the autoscaler shrinks a pool immediately.
	maxElapsed = 4
)

// Demand is the work of a pool at the time of an evaluation.
type Demand struct {
	// Pool is the name of the pool.
	Pool string
	// Queued are the jobs that would start if slots were free. Jobs that wait for a limit of their
	// organisation or for their thread do not count, because more workers would not help.
	Queued int
	// Running are the programs on workers that are not draining.
	Running int
	// MeanSeconds is the mean run time of recent programs, 0 if unknown.
	MeanSeconds float64
	// OldestWait is how long the oldest of the Queued jobs has waited.
	OldestWait time.Duration
	// Slots are the slots of live workers that are not draining.
	Slots int
}

// Reason is why a pool has the recommended size.
type Reason string

// The reasons of a recommendation.
const (
	// ReasonDemand means that the jobs need this many workers.
	ReasonDemand Reason = "demand"
	// ReasonWait means that the oldest job waits longer than the target.
	ReasonWait Reason = "wait"
	// ReasonTolerance means that the demand differs too little for a change.
	ReasonTolerance Reason = "tolerance"
	// ReasonCoolDown means that fewer workers are enough, but not yet for long enough.
	ReasonCoolDown Reason = "cool_down"
	// ReasonMin and ReasonMax mean that the policy allows no fewer or no more workers.
	ReasonMin Reason = "min_workers"
	ReasonMax Reason = "max_workers"
)

// State carries knowledge from one evaluation to the next. The zero State is a pool that was never
// evaluated: the evaluation starts from the live slots.
type State struct {
	// At is the time of the last evaluation.
	At time.Time `json:"at"`
	// Workers is the last recommendation.
	Workers int `json:"workers"`
	// Slots are the slots that the demand needed, before tolerance, cool-down and bounds.
	Slots int `json:"slots"`
	// Reason is why Workers was recommended.
	Reason Reason `json:"reason"`
	// LowFor is for how long fewer workers have been enough, and LowWorkers how many in that time,
	// 0 if Workers are needed.
	LowFor     time.Duration `json:"low_for"`
	LowWorkers int           `json:"low_workers"`
	// IdleFor is for how long there has been no job.
	IdleFor time.Duration `json:"idle_for"`
}

// Recommend returns how many workers the pool should have, and the state for the next evaluation.
// Draining workers do not count. Within the policy's Max, there are at least as many slots as
// running programs. The policy must be valid.
func (p *Policy) Recommend(d Demand, last State, now time.Time) (workers int, next State) {
	d.Queued, d.Running, d.Slots = max(d.Queued, 0), max(d.Running, 0), max(d.Slots, 0)
	if last.At.IsZero() {
		last = State{At: now, Workers: p.workersFor(float64(d.Slots))}
	}
	level := min(max(last.Workers, p.Min), p.Max)
	next = State{At: now, LowFor: last.LowFor, LowWorkers: last.LowWorkers}
	elapsed := max(now.Sub(last.At), 0)

	need, late := p.slots(d)
	if need == 0 && last.Slots == 0 {
		next.IdleFor = last.IdleFor + min(elapsed, time.Duration(p.ScaleToZeroAfter)/maxElapsed)
	}
	idle := need == 0 && next.IdleFor >= time.Duration(p.ScaleToZeroAfter)
	next.Slots = int(min(need, float64(MaxWorkers*MaxSlotsPerWorker)))
	wanted := p.workersFor(need)
	if wanted == 0 && level > 0 && !idle {
		wanted = 1
	}
	bounded := min(max(wanted, p.Min), p.Max)
	next.Reason = ReasonDemand
	switch slots := float64(level * p.SlotsPerWorker); {
	case bounded > level && (late || level == 0 || need > slots*(1+p.Tolerance)):
		level = bounded
		if late {
			next.Reason = ReasonWait
		}
		next.LowFor, next.LowWorkers = 0, 0
	case bounded < level && idle:
		level = bounded
		next.LowFor, next.LowWorkers = 0, 0
	case bounded < level && need < slots*(1-p.Tolerance):
		if next.LowWorkers > 0 {
			next.LowFor += min(elapsed, time.Duration(p.ScaleDownAfter)/maxElapsed)
		}
		next.LowWorkers = max(next.LowWorkers, bounded)
		next.Reason = ReasonCoolDown
		if next.LowFor >= time.Duration(p.ScaleDownAfter) {
			level, next.Reason = next.LowWorkers, ReasonDemand
			next.LowFor, next.LowWorkers = 0, bounded
		}
	default:
		next.LowFor, next.LowWorkers = 0, 0
		if bounded != level {
			next.Reason = ReasonTolerance
		}
	}
	// Workers started by others may run more programs than the level has slots.
	if busy := min(p.workersFor(float64(d.Running)), p.Max); level < busy {
		level, next.Reason = busy, ReasonDemand
	}
	switch {
	case level == p.Max && wanted > p.Max:
		next.Reason = ReasonMax
	case level == p.Min && wanted < p.Min:
		next.Reason = ReasonMin
	}
	next.Workers = level
	return level, next
}

// slots returns how many slots the demand needs, between the number of running programs and the
// number of jobs. late reports that the oldest job waits longer than the target.
func (p *Policy) slots(d Demand) (need float64, late bool) {
	jobs, target := float64(d.Queued)+float64(d.Running), time.Duration(p.TargetWait).Seconds()
	mean := d.MeanSeconds
	if !(mean > 0) || math.IsInf(mean, 1) {
		mean = assumedSeconds
	}
	need = max(jobs*mean/target, float64(d.Running))
	if d.Queued > 0 {
		need = max(need, 1)
		if growth := min(d.OldestWait.Seconds()/target, maxGrowth); growth > 1 {
			need, late = max(need, float64(d.Slots)*growth), true
		}
	}
	return math.Ceil(min(need, jobs)), late
}

// workersFor returns the number of workers for that many slots, at most one more than MaxWorkers.
func (p *Policy) workersFor(slots float64) int {
	return int(min(math.Ceil(slots/float64(p.SlotsPerWorker)), MaxWorkers+1))
}
