package pipelines

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"time"

	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/proto/fault"
	"github.com/bullpen-run/bullpen/scheduler/engine"
	"github.com/bullpen-run/bullpen/scheduler/store"
)

const (
	scanEvery  = 200 * time.Millisecond // the records of a run
	runTimeout = 2 * time.Minute
	// handlers is the number of runs handled at the same time, handlersOfOrg that of one
	// organisation: its steps may be slow to start, and its files large.
	handlers      = 256
	handlersOfOrg = 16
	trimEvery     = time.Second // while an organisation has too many runs
)

// Executions starts and reads the executions of steps.
type Executions interface {
	// StartStep starts the execution of a cell in a thread, unless it was started before, and
	// returns its id. refused is the reason if it will never start, otherwise empty. After an error
	// it may have started.
	StartStep(ctx context.Context, p *proto.Pipeline, step, cell int, thread string) (
		id proto.TraceID, refused string, err error)
	// StepSpace returns the maximum size of a cell's home. refused is the reason if the cell will
	// never start, otherwise empty.
	StepSpace(ctx context.Context, p *proto.Pipeline, step, cell int) (most proto.Space, refused string, err error)
	// Lookup returns the record of an execution, or [proto.ErrNotFound].
	Lookup(ctx context.Context, org string, id proto.TraceID) (*proto.Record, error)
	// Cancel stores a request to end an execution.
	Cancel(ctx context.Context, org string, id proto.TraceID) (*proto.Record, error)
}

// Runner runs all pipelines while it leads, and removes expired runs.
type Runner struct {
	Pipelines  *Pipelines
	Executions Executions
	Threads    Threads
	Store      *store.Store
	Retention  time.Duration // how long runs are kept after their end
	Instance   string        // unique to this process
	Log        *slog.Logger

	copies chan struct{} // one for each copy of files
}

// knownRun is the leader's memory of an active run.
type knownRun struct {
	*proto.Pipeline
	// deadline is the state's deadline when this process first handled the run. It has a monotonic
	// clock reading, so that stepping the wall clock ends a run neither early nor late.
	deadline time.Time
}

func (r *Runner) init() { r.copies = make(chan struct{}, maxCopies) }

// entry is what the queue knows of a run.
type entry struct {
	state  *proto.PipelineState
	excess bool      // to be removed, since its organisation has too many
	known  *knownRun // nil before it is handled; it may have secrets
}

// set sets the state, nil if it was removed.
func (e *entry) set(state *proto.PipelineState) (keep bool) {
	if e.state = state; state != nil && state.Status != proto.PipelineRunning {
		e.known = nil
	}
	return state != nil
}

// Run campaigns and runs pipelines until ctx is done. It always returns nil.
func (r *Runner) Run(ctx context.Context) error {
	r.init()
	e := engine.Engine[entry]{
		Queue: &r.Pipelines.queue, Store: r.Store, Name: "pipelines", Instance: r.Instance, Log: r.Log,
		Due: r.due, Handle: r.handleItem, Forget: func(e *entry) { e.known = nil },
		Beside: []func(context.Context){engine.Every(trimEvery, r.trim)},
		Pause:  scanEvery, Timeout: runTimeout, Handlers: handlers, HandlersOfOrg: handlersOfOrg,
	}
	return e.Run(ctx)
}

// due returns when a run needs work.
func (r *Runner) due(e *entry) (at time.Time, ok bool) {
	switch s := e.state; {
	case s == nil:
		return at, false
	case s.Creating:
		return s.CreatedAt.Add(creationTimeout), true
	case s.Status == proto.PipelineRunning, s.HasSecrets, e.excess:
		return at, true
	default:
		return s.EndedAt.Add(r.Retention), true
	}
}

// handleItem does what is due for a run.
func (r *Runner) handleItem(ctx context.Context, _ engine.Item, e entry) error {
	switch s := e.state; {
	case !s.Creating && s.Status == proto.PipelineRunning:
		return r.handle(ctx, s)
	case !s.Creating && s.HasSecrets:
		return r.Pipelines.forgetSecrets(ctx, s)
	default:
		return r.remove(ctx, s)
	}
}

// trim schedules the removal of the oldest runs of organisations with too many.
func (r *Runner) trim(context.Context) {
	for _, org := range r.Pipelines.states.Orgs(proto.MaxPipelines) {
		list := r.Pipelines.List(org)
		for _, s := range list[min(len(list), proto.MaxPipelines):] {
			if s.Status != proto.PipelineRunning {
				r.Pipelines.queue.Change(engine.Item{Org: org, ID: s.ID}, func(e *entry) bool {
					e.excess = true
					return e.state != nil
				})
			}
		}
	}
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

func (r *Runner) knownRun(ctx context.Context, s *proto.PipelineState) (*knownRun, error) {
	x := engine.Item{Org: s.Org, ID: s.ID}
	if known := r.Pipelines.queue.Get(x).known; known != nil {
		return known, nil
	}
	p, err := r.Pipelines.Definition(ctx, s.Org, s.ID)
	if err != nil {
		return nil, err
	}
	known := &knownRun{p, time.Now().Add(time.Until(s.Deadline))}
	r.Pipelines.queue.Change(x, func(e *entry) bool {
		e.known = known
		return e.state != nil
	})
	return known, nil
}

// endLost ends a run whose definition, and thus its steps, is gone. If the clocks of two gateways
// differ, the run may have looked abandoned during its creation.
func (r *Runner) endLost(ctx context.Context, s *proto.PipelineState) error {
	for i := range s.Cells {
		if id := s.Cells[i].TraceID; id != "" && !s.Cells[i].Status.Ended() {
			if _, err := r.Executions.Cancel(ctx, s.Org, id); err != nil && !errors.Is(err, proto.ErrNotFound) {
				return fmt.Errorf("cancel %s: %w", id, err)
			}
		}
	}
	_, err := r.Pipelines.states.Update(ctx, stateKey(s.Org, s.ID),
		func(old *proto.PipelineState) (*proto.PipelineState, error) {
			if old == nil || old.Status != proto.PipelineRunning {
				return nil, nil
			}
			lost, now := clone(old), time.Now().UTC()
			lost.Status, lost.EndedAt, lost.Reason = proto.PipelineFailed, now,
				"the definition of the run is gone from the store of this server"
			for i := range lost.Cells {
				if c := &lost.Cells[i]; !c.Status.Ended() {
					c.Status, c.EndedAt = proto.StepCancelled, now
				}
			}
			return lost, nil
		})
	return err
}

// step stores a run's progress since its state was stored. It reports whether there was any.
func (r *Runner) step(ctx context.Context, known *knownRun) (changed bool, err error) {
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
		r.Log.Info("pipeline ended", "run", p.ID, "org", p.Org, "status", s.Status, "cells", len(s.Cells),
			"duration_ms", s.EndedAt.Sub(s.CreatedAt).Milliseconds())
	}
	return true, failed
}

// cell starts the execution of a cell, or applies its end to the state.
func (r *Runner) cell(
	ctx context.Context, p *proto.Pipeline, s *proto.PipelineState, i int, at []cellIndex,
) (changed bool, err error) {
	c := &s.Cells[i]
	if c.TraceID == "" {
		return r.start(ctx, p, s, i, at)
	}
	record, err := r.Executions.Lookup(ctx, p.Org, c.TraceID)
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
			if _, err := r.Executions.Cancel(ctx, p.Org, c.TraceID); err != nil && !errors.Is(err, proto.ErrNotFound) {
				return false, fmt.Errorf("cancel %s: %w", c.TraceID, err)
			}
		}
		if record.StartedAt != nil && c.StartedAt.IsZero() {
			c.StartedAt = *record.StartedAt
			return true, nil
		}
		return false, nil
	}
	thread, err := r.keep(ctx, p, c, i, at[i], record.Status == proto.StatusSuccess)
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

// applyRecord applies the outcome of a finished execution.
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
func (r *Runner) start(
	ctx context.Context, p *proto.Pipeline, s *proto.PipelineState, i int, at []cellIndex,
) (changed bool, err error) {
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
	threads := []string{proto.RunThread(s.ID)}
	for i := range s.Cells {
		threads = append(threads, proto.CellThread(s.ID, i))
	}
	for _, thread := range threads {
		if err := r.removeThread(ctx, s.Org, thread); err != nil {
			return fmt.Errorf("remove thread %s of run %s: %w", thread, s.ID, err)
		}
	}
	return r.Pipelines.remove(ctx, s)
}
