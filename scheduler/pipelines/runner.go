package pipelines

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"time"

	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/proto/fault"
	"github.com/bullpen-run/bullpen/scheduler/leader"
	"github.com/bullpen-run/bullpen/scheduler/store"
)

const (
	scanEvery  = 200 * time.Millisecond
	handlers   = 32 // runs that are handled at the same time
	runTimeout = 2 * time.Minute
	sweepEvery = time.Minute
	trimEvery  = time.Second // while an organisation has too many runs
)

// Executions starts and reads the executions of steps.
type Executions interface {
	// StartStep starts the execution of a cell in a thread, unless it was started before, and
	// returns its id. refused is the reason why it will never start, empty if it did. After an error
	// it may have started.
	StartStep(ctx context.Context, p *proto.Pipeline, step, cell int, thread string) (id proto.TraceID, refused string, err error)
	// StepSpace returns the largest size of the home of a cell. refused is the reason why the cell
	// will never start, empty if it may.
	StepSpace(ctx context.Context, p *proto.Pipeline, step, cell int) (most proto.Space, refused string, err error)
	// Lookup returns the record of an execution, or [proto.ErrNotFound].
	Lookup(ctx context.Context, id proto.TraceID) (*proto.Record, error)
	// Cancel stores a request to end an execution.
	Cancel(ctx context.Context, id proto.TraceID) (*proto.Record, error)
}

// Runner runs all pipelines while it leads, and removes runs that ended long ago.
type Runner struct {
	Pipelines  *Pipelines
	Executions Executions
	Threads    Threads
	Store      *store.Store
	Retention  time.Duration // how long runs are kept after their end
	Instance   string        // unique to this process
	Log        *slog.Logger

	mu      sync.Mutex
	handled map[string]bool     // runs that are being handled now
	known   map[string]knownRun // runs that have not ended
}

// knownRun is what a process keeps of a run that it handles.
type knownRun struct {
	*proto.Pipeline
	// deadline is the state's deadline when this process first handled the run. It has a monotonic
	// clock reading, so that a step of the wall clock ends a run neither early nor late.
	deadline time.Time
}

// Run campaigns and runs pipelines until ctx is done. It always returns nil.
func (r *Runner) Run(ctx context.Context) error {
	r.handled, r.known = map[string]bool{}, map[string]knownRun{}
	elector := leader.Elector{Store: r.Store, Name: "pipelines", Instance: r.Instance, Log: r.Log}
	elector.Run(ctx, func(ctx context.Context, _ *leader.Term) error {
		var running sync.WaitGroup
		defer running.Wait()
		free := make(chan struct{}, handlers)
		tick := time.NewTicker(scanEvery)
		defer tick.Stop()
		var swept, trimmed time.Time
		for {
			if time.Since(swept) >= sweepEvery {
				swept, trimmed = time.Now(), time.Time{}
				running.Go(func() {
					if err := r.removeOrphans(ctx); err != nil && ctx.Err() == nil {
						r.Log.Warn("remains of pipelines not removed, will retry", "error", err)
					}
				})
			}
			for _, x := range r.tasks(&trimmed) {
				if !r.begin(x.run.ID) {
					continue
				}
				select {
				case <-ctx.Done():
					r.end(x.run.ID)
					return nil
				case free <- struct{}{}:
				}
				running.Go(func() {
					defer func() { <-free }()
					defer r.end(x.run.ID)
					taskCtx, cancel := context.WithTimeout(ctx, runTimeout)
					defer cancel()
					if err := x.do(taskCtx, x.run); err != nil && ctx.Err() == nil {
						r.Log.Warn("pipeline not handled, will retry", "run", x.run.ID, "org", x.run.Org, "error", err)
					}
				})
			}
			select {
			case <-ctx.Done():
				return nil
			case <-tick.C:
			}
		}
	})
	return nil
}

// task is something to do for a run.
type task struct {
	run *proto.PipelineState
	do  func(context.Context, *proto.PipelineState) error
}

// tasks returns what to do now. trimmed is when runs were removed last, zero for long ago.
func (r *Runner) tasks(trimmed *time.Time) (list []task) {
	kept, tooMany := map[string]int{}, false // by organisation
	for _, s := range r.Pipelines.states.All() {
		switch {
		case s.Status == proto.PipelineRunning:
			list = append(list, task{s, r.handle})
		case s.HasSecrets:
			list = append(list, task{s, r.Pipelines.forgetSecrets})
		}
		kept[s.Org]++
		tooMany = tooMany || kept[s.Org] > proto.MaxPipelines
	}
	if !trimmed.IsZero() && (!tooMany || time.Since(*trimmed) < trimEvery) {
		return list
	}
	*trimmed = time.Now()
	for _, s := range r.expired() {
		list = append(list, task{s, r.remove})
	}
	return list
}

// removeOrphans removes what processes left that died while they created a run.
func (r *Runner) removeOrphans(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, runTimeout)
	defer cancel()
	list, err := r.Pipelines.orphans(ctx)
	for _, p := range list {
		err = errors.Join(err, r.removeThread(ctx, p.Org, p.ID))
		if err == nil {
			err = r.Pipelines.removeDefinition(ctx, p.Org, p.ID)
		}
	}
	return err
}

// expired returns the runs to remove: those whose retention is over, and the oldest ones of
// organisations with too many.
func (r *Runner) expired() (list []*proto.PipelineState) {
	orgs := map[string]bool{}
	for _, s := range r.Pipelines.states.All() {
		orgs[s.Org] = true
	}
	for org := range orgs {
		for i, s := range r.Pipelines.List(org) {
			if s.Status != proto.PipelineRunning && (i >= proto.MaxPipelines || late(&s, r.Retention)) {
				list = append(list, &s)
			}
		}
	}
	return list
}

// begin reports whether a run is not being handled.
func (r *Runner) begin(id string) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.handled[id] {
		return false
	}
	r.handled[id] = true
	return true
}

func (r *Runner) end(id string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	delete(r.handled, id)
}

// handle takes a run as far as it gets now.
func (r *Runner) handle(ctx context.Context, s *proto.PipelineState) error {
	p, err := r.knownRun(ctx, s)
	if errors.Is(err, proto.ErrNotFound) {
		return r.endLost(ctx, s)
	}
	if err != nil {
		return err
	}
	for {
		again, err := r.step(ctx, p)
		if store.IsConflict(err) {
			return nil // changed by another process; the next scan reads it
		}
		if err != nil || !again {
			return err
		}
	}
}

func (r *Runner) knownRun(ctx context.Context, s *proto.PipelineState) (knownRun, error) {
	r.mu.Lock()
	known, ok := r.known[s.ID]
	r.mu.Unlock()
	if ok {
		return known, nil
	}
	p, err := r.Pipelines.Definition(ctx, s.Org, s.ID)
	if err != nil {
		return known, err
	}
	known = knownRun{p, time.Now().Add(time.Until(s.Deadline))}
	r.mu.Lock()
	defer r.mu.Unlock()
	r.known[s.ID] = known
	return known, nil
}

// endLost ends a run whose definition is gone, since its steps are not known any more. If the clocks
// of two gateways differ, the run may have looked as if it were never created.
func (r *Runner) endLost(ctx context.Context, s *proto.PipelineState) error {
	for i := range s.Cells {
		if id := s.Cells[i].TraceID; id != "" && !s.Cells[i].Status.Ended() {
			if _, err := r.Executions.Cancel(ctx, id); err != nil && !errors.Is(err, proto.ErrNotFound) {
				return fmt.Errorf("cancel %s: %w", id, err)
			}
		}
	}
	_, err := r.Pipelines.states.Update(ctx, stateKey(s.Org, s.ID), func(old *proto.PipelineState) (*proto.PipelineState, error) {
		if old == nil || old.Status != proto.PipelineRunning {
			return nil, nil
		}
		lost, now := clone(old), time.Now().UTC()
		lost.Status, lost.EndedAt, lost.Reason = proto.PipelineFailed, now, "the definition of the run is gone from the store of this server"
		for i := range lost.Cells {
			if c := &lost.Cells[i]; !c.Status.Ended() {
				c.Status, c.EndedAt = proto.StepCancelled, now
			}
		}
		return lost, nil
	})
	return err
}

// step stores what has happened to a run since its state was stored. It reports whether there was
// something.
func (r *Runner) step(ctx context.Context, known knownRun) (changed bool, err error) {
	p := known.Pipeline
	key := stateKey(p.Org, p.ID)
	old, revision, err := r.Pipelines.states.Read(ctx, key)
	if err != nil || old.Status != proto.PipelineRunning {
		return false, err
	}
	s, at := clone(old), cellIndexes(p)
	var failed error // of one cell, which must not stop the others
	for i := range s.Cells {
		if s.Cells[i].Status != proto.StepRunning {
			continue
		}
		moved, err := r.cell(ctx, p, s, i, at)
		changed = changed || moved
		_, full := errors.AsType[*proto.Rejection](err) // the queue, as it may be for long
		if err != nil && !full && failed == nil {
			failed = fmt.Errorf("cell %d: %w", i, err)
		}
	}
	if decide(p, s, time.Now().UTC(), known.deadline) {
		changed = true
	}
	if !changed {
		return false, failed
	}
	if _, err := r.Pipelines.states.Replace(ctx, key, s, revision); err != nil {
		return false, err
	}
	if s.Status != proto.PipelineRunning {
		fault.Here(fault.AfterEndBeforeForget)
		r.mu.Lock()
		delete(r.known, p.ID)
		r.mu.Unlock()
		r.Log.Info("pipeline ended", "run", p.ID, "org", p.Org, "status", s.Status, "cells", len(s.Cells),
			"duration_ms", s.EndedAt.Sub(s.CreatedAt).Milliseconds())
	}
	return true, failed
}

// cell starts the execution of a cell, or applies its end to the state.
func (r *Runner) cell(ctx context.Context, p *proto.Pipeline, s *proto.PipelineState, i int, at []cellIndex) (changed bool, err error) {
	c := &s.Cells[i]
	if c.TraceID == "" {
		return r.start(ctx, p, s, i, at)
	}
	record, err := r.Executions.Lookup(ctx, c.TraceID)
	switch {
	case errors.Is(err, proto.ErrNotFound):
		r.fail(c, "the record of the execution is gone")
		return true, nil
	case err != nil:
		return false, fmt.Errorf("look up %s: %w", c.TraceID, err)
	}
	record = record.Public()
	if !record.Status.Terminal() {
		if s.Cancelling && !record.Cancelling {
			if _, err := r.Executions.Cancel(ctx, c.TraceID); err != nil && !errors.Is(err, proto.ErrNotFound) {
				return false, fmt.Errorf("cancel %s: %w", c.TraceID, err)
			}
		}
		if record.StartedAt != nil && c.StartedAt.IsZero() {
			c.StartedAt = *record.StartedAt
			return true, nil
		}
		return false, nil
	}
	thread, err := r.keep(ctx, p, i, at[i], record.Status == proto.StatusSuccess)
	refused, isRefused := errors.AsType[*refusedError](err)
	if err != nil && !isRefused {
		return false, err
	}
	fault.Here(fault.AfterKeepBeforeState)
	c.Thread = thread
	applyRecord(c, record)
	if isRefused && c.Status == proto.StepSuccess {
		c.Status, c.Reason = proto.StepFailed, refused.reason
	}
	return true, nil
}

// applyRecord sets what follows from an execution that has ended.
func applyRecord(c *proto.CellState, record *proto.Record) {
	c.Status = proto.StepFailed
	switch record.Status {
	case proto.StatusSuccess:
		c.Status = proto.StepSuccess
	case proto.StatusCancelled:
		c.Status = proto.StepCancelled
	}
	if record.StartedAt != nil {
		c.StartedAt = *record.StartedAt
	}
	c.EndedAt = time.Now().UTC()
	if record.CompletedAt != nil {
		c.EndedAt = *record.CompletedAt
	}
	if record.Result != nil {
		c.ExitCode = &record.Result.ExitCode
		if record.Result.ErrorMessage != nil {
			c.Reason = *record.Result.ErrorMessage
		} else if !record.Result.Success {
			c.Reason = fmt.Sprintf("the program exited with code %d", record.Result.ExitCode)
		}
	}
}

// start starts the execution of a cell. A process that died may have started it already.
func (r *Runner) start(ctx context.Context, p *proto.Pipeline, s *proto.PipelineState, i int, at []cellIndex) (changed bool, err error) {
	c := &s.Cells[i]
	step := &p.Steps[at[i].step]
	if !s.Cancelling {
		err := r.prepare(ctx, p, s, i, at)
		if refused, ok := errors.AsType[*refusedError](err); ok {
			r.fail(c, refused.reason)
			return true, nil
		}
		if err != nil {
			return false, err
		}
		fault.Here(fault.AfterPrepareBeforeStep)
	}
	id, refused, err := r.Executions.StartStep(ctx, p, at[i].step, at[i].cell, workspace(p, step, i))
	if _, full := errors.AsType[*proto.Rejection](err); full && s.Cancelling { // so it was not started before
		c.Status, c.EndedAt = proto.StepCancelled, time.Now().UTC()
		return true, nil
	}
	if err != nil {
		return false, fmt.Errorf("start: %w", err)
	}
	if refused != "" {
		r.fail(c, refused)
		return true, nil
	}
	fault.Here(fault.AfterStepBeforeState)
	c.TraceID = id
	return true, nil
}

func (r *Runner) fail(c *proto.CellState, reason string) {
	c.Status, c.Reason, c.EndedAt = proto.StepFailed, reason, time.Now().UTC()
}

// remove removes a run with its threads.
func (r *Runner) remove(ctx context.Context, s *proto.PipelineState) error {
	p := &proto.Pipeline{ID: s.ID}
	threads := []string{s.ID}
	for i := range s.Cells {
		threads = append(threads, kept(p, i))
	}
	for _, thread := range threads {
		if err := r.removeThread(ctx, s.Org, thread); err != nil {
			return fmt.Errorf("remove thread %s of run %s: %w", thread, s.ID, err)
		}
	}
	return r.Pipelines.remove(ctx, s)
}
