// Package simulation replays a day's arrivals with workers that start and stop under an autoscaling
// policy. Time is virtual: a day takes about a second.
package simulation

import (
	"container/heap"
	"context"
	"fmt"
	"slices"
	"time"

	"github.com/bullpen-run/bullpen/proto/plot"
	"github.com/bullpen-run/bullpen/scheduler/autoscale"
)

const (
	// maxSimulated limits the simulated time, which too few workers could make endless.
	maxSimulated = 366 * 24 * time.Hour
	// maxSamples bounds Result.Samples. Two samples become one when there are more.
	maxSamples = 8192
)

// errTooFewWorkers is the error of a simulation that takes longer than maxSimulated.
var errTooFewWorkers = fmt.Errorf("the jobs take longer than %.0f days: max_workers is too small for the trace",
	maxSimulated.Hours()/24)

// epoch is the virtual time at which traces start.
var epoch = time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC)

// Simulation is what is replayed.
type Simulation struct {
	Jobs   []Job // in the order of their arrival
	Policy autoscale.Policy
	// StartDelay is the time from the recommendation of a worker until it runs programs.
	StartDelay time.Duration
	// Every is the time between evaluations.
	Every time.Duration
}

// Waits are seconds for which jobs waited for a slot.
type Waits struct {
	P50 float64 `json:"p50"`
	P90 float64 `json:"p90"`
	P99 float64 `json:"p99"`
	Max float64 `json:"max"`
}

// Result is how a simulation ended.
type Result struct {
	Jobs int `json:"jobs"`
	// Hours is the time until the last job ended and the pool had shrunk to its minimum.
	Hours float64 `json:"hours"`
	Waits Waits   `json:"wait_seconds"`
	// WorkerHours are counted from the recommendation of a worker until it has drained.
	WorkerHours float64 `json:"worker_hours"`
	// Utilization is the fraction of these slot hours in which programs ran.
	Utilization float64 `json:"utilization"`
	PeakWorkers int     `json:"peak_workers"`
	ScaleOuts   int     `json:"scale_outs"`
	ScaleIns    int     `json:"scale_ins"`
	// ZeroHours is how long there was no worker at all.
	ZeroHours float64 `json:"zero_hours"`
	// Samples are the evaluations' figures, merged to the largest if there were many.
	Samples []Sample `json:"-"`
}

// Sample is the state of a pool at an evaluation.
type Sample struct {
	At     time.Duration // since the start of the trace
	Demand autoscale.Demand
	Need   int // slots that the demand needs
}

// worker is a simulated worker.
type worker struct {
	started  time.Duration // when it was recommended
	ready    bool
	draining bool
	gone     bool
	busy     int // slots with programs
}

// The kinds of events. Arrivals are no events: they are read from the trace.
const (
	eventEvaluate = iota
	eventReady
	eventEnd
)

type event struct {
	at     time.Duration
	number int // in the order of creation
	kind   int
	worker *worker
	run    time.Duration // of the program that ends
}

// events is a heap.
type events []event

func (e events) Len() int { return len(e) }
func (e events) Less(i, j int) bool {
	return e[i].at < e[j].at || e[i].at == e[j].at && e[i].number < e[j].number
}
func (e events) Swap(i, j int) { e[i], e[j] = e[j], e[i] }
func (e *events) Push(x any)   { *e = append(*e, x.(event)) }
func (e *events) Pop() any {
	old := *e
	last := old[len(old)-1]
	*e = old[:len(old)-1]
	return last
}

// run is a simulation that runs.
type run struct {
	*Simulation
	now              time.Duration
	events           events
	created          int // events
	workers          []*worker
	arrived, started int // jobs; those in between wait
	ended            int
	free             int // slots of ready workers that do not drain
	mean             autoscale.Mean
	state            autoscale.State
	waits            []time.Duration
	evaluations      int
	stride           int           // evaluations in a sample
	zero             time.Duration // without a worker
	result           Result
}

// Run runs the simulation until all jobs have ended and the pool has shrunk to its minimum.
func (s *Simulation) Run(ctx context.Context) (*Result, error) {
	r := run{Simulation: s, waits: make([]time.Duration, 0, len(s.Jobs)), stride: 1}
	r.scale(s.Policy.Min)
	for _, w := range r.workers { // the first ones are there at the start
		r.makeReady(w)
	}
	r.state.Workers = s.Policy.Min
	r.schedule(event{kind: eventEvaluate})
	for step := 0; r.ended < len(s.Jobs) || len(r.workers) > s.Policy.Min; step++ {
		if step%4096 == 0 && ctx.Err() != nil {
			return nil, context.Cause(ctx)
		}
		if r.now > maxSimulated {
			return nil, errTooFewWorkers
		}
		if r.arrived < len(s.Jobs) && s.Jobs[r.arrived].At <= r.events[0].at {
			r.advance(s.Jobs[r.arrived].At)
			r.arrived++
		} else {
			r.handle(heap.Pop(&r.events).(event))
		}
		r.assign()
	}
	for _, w := range r.workers {
		r.remove(w)
	}
	return r.finish(), nil
}

func (r *run) schedule(e event) {
	r.created++
	e.number = r.created
	heap.Push(&r.events, e)
}

// advance moves the clock.
func (r *run) advance(to time.Duration) {
	if len(r.workers) == 0 {
		r.zero += to - r.now
	}
	r.now = to
}

func (r *run) handle(e event) {
	r.advance(e.at)
	switch w := e.worker; e.kind {
	case eventEvaluate:
		r.evaluate()
		r.schedule(event{at: r.now + r.Every, kind: eventEvaluate})
	case eventReady:
		if !w.gone {
			r.makeReady(w)
		}
	case eventEnd:
		r.ended++
		r.mean.Add(epoch.Add(r.now), e.run.Seconds())
		if w.busy--; !w.draining {
			r.free++
		} else if w.busy == 0 {
			r.remove(w)
			r.dropGone()
		}
	}
}

// assign starts waiting jobs, each on the worker with the most free slots.
func (r *run) assign() {
	for r.free > 0 && r.started < r.arrived {
		var best *worker
		for _, w := range r.workers {
			if w.ready && !w.draining && w.busy < r.Policy.SlotsPerWorker && (best == nil || w.busy < best.busy) {
				best = w
			}
		}
		job := r.Jobs[r.started]
		r.waits = append(r.waits, r.now-job.At)
		r.schedule(event{at: r.now + job.Run, kind: eventEnd, worker: best, run: job.Run})
		best.busy++
		r.started++
		r.free--
	}
}

// evaluate scales the pool as the policy recommends.
func (r *run) evaluate() {
	d := autoscale.Demand{Queued: r.arrived - r.started, MeanSeconds: r.mean.Value()}
	if d.Queued > 0 {
		d.OldestWait = r.now - r.Jobs[r.started].At
	}
	for _, w := range r.workers {
		if w.ready && !w.draining {
			d.Running, d.Slots = d.Running+w.busy, d.Slots+r.Policy.SlotsPerWorker
		}
	}
	before := r.state.Workers
	workers, state := r.Policy.Recommend(d, r.state, epoch.Add(r.now))
	r.state = state
	switch {
	case workers > before:
		r.result.ScaleOuts++
	case workers < before:
		r.result.ScaleIns++
	}
	r.sample(Sample{At: r.now, Demand: d, Need: state.Slots})
	r.scale(workers)
}

// sample adds a sample.
func (r *run) sample(s Sample) {
	list := r.result.Samples
	if r.evaluations%r.stride != 0 {
		list[len(list)-1].merge(s)
	} else {
		list = append(list, s)
	}
	r.evaluations++
	if r.evaluations == maxSamples*r.stride {
		for i := range maxSamples / 2 {
			list[i] = list[2*i]
			list[i].merge(list[2*i+1])
		}
		list, r.stride = list[:maxSamples/2], r.stride*2
	}
	r.result.Samples = list
}

// merge makes s the largest figures of both.
func (s *Sample) merge(t Sample) {
	d, e := &s.Demand, t.Demand
	d.Queued, d.Running, d.Slots = max(d.Queued, e.Queued), max(d.Running, e.Running), max(d.Slots, e.Slots)
	d.OldestWait, s.Need = max(d.OldestWait, e.OldestWait), max(s.Need, t.Need)
}

// scale starts workers, or drains the easiest to drain: workers that are not ready, then those with
// the fewest programs.
func (r *run) scale(to int) {
	var active []*worker
	for _, w := range r.workers {
		if !w.draining {
			active = append(active, w)
		}
	}
	for range to - len(active) {
		w := &worker{started: r.now}
		r.workers = append(r.workers, w)
		r.schedule(event{at: r.now + r.StartDelay, kind: eventReady, worker: w})
	}
	r.result.PeakWorkers = max(r.result.PeakWorkers, len(r.workers))
	if to >= len(active) {
		return
	}
	effort := func(w *worker) int {
		if !w.ready {
			return -1
		}
		return w.busy
	}
	slices.SortStableFunc(active, func(a, b *worker) int { return effort(a) - effort(b) })
	for _, w := range active[:len(active)-to] {
		if w.draining = true; w.ready {
			r.free -= r.Policy.SlotsPerWorker - w.busy
		}
		if w.busy == 0 {
			r.remove(w)
		}
	}
	r.dropGone()
}

func (r *run) makeReady(w *worker) {
	if !w.ready {
		w.ready = true
		r.free += r.Policy.SlotsPerWorker
	}
}

// remove ends a worker.
func (r *run) remove(w *worker) {
	w.gone = true
	r.result.WorkerHours += (r.now - w.started).Hours()
}

// dropGone drops the workers that were removed.
func (r *run) dropGone() {
	r.workers = slices.DeleteFunc(r.workers, func(w *worker) bool { return w.gone })
}

func (r *run) finish() *Result {
	x := &r.result
	x.Jobs, x.Hours, x.ZeroHours = len(r.Jobs), r.now.Hours(), r.zero.Hours()
	ran := 0.0 // hours
	for _, job := range r.Jobs {
		ran += job.Run.Hours()
	}
	if x.WorkerHours > 0 {
		x.Utilization = ran / (x.WorkerHours * float64(r.Policy.SlotsPerWorker))
	}
	slices.Sort(r.waits)
	percentile := func(p float64) float64 { return plot.Percentile(r.waits, p).Seconds() }
	x.Waits = Waits{P50: percentile(50), P90: percentile(90), P99: percentile(99), Max: percentile(100)}
	return x
}
