package schedules

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
	// retryAfter is the least time between two looks at the same schedule.
	retryAfter  = 500 * time.Millisecond
	tickTimeout = 10 * time.Second
	// handlers is the number of schedules handled at the same time, handlersOfOrg that of one
	// organisation: its ticks may be slow, such as those that resolve a webhook's host.
	handlers      = 256
	handlersOfOrg = 64
)

// Executions starts the executions of schedules.
type Executions interface {
	// StartScheduled starts the execution of a tick, unless it was started before, and returns its
	// id. refused is the reason if it will never start, otherwise empty. After an error it may have
	// started.
	StartScheduled(ctx context.Context, s *proto.Schedule, tick time.Time) (id proto.TraceID, refused string, err error)
	// StartedTick returns the execution that was started for a tick, or [proto.ErrNotFound].
	StartedTick(ctx context.Context, s *proto.Schedule, tick time.Time) (proto.TraceID, error)
	// ReportFailed stores the webhook of a refused tick. It may be called again for the same tick.
	ReportFailed(ctx context.Context, s *proto.Schedule, run proto.ScheduleRun) error
	// Lookup returns the record of an execution, or [proto.ErrNotFound].
	Lookup(ctx context.Context, org string, id proto.TraceID) (*proto.Record, error)
	// Cancel stores a request to end an execution.
	Cancel(ctx context.Context, org string, id proto.TraceID) (*proto.Record, error)
}

// Runner starts the executions of all schedules while it leads.
type Runner struct {
	Schedules  *Schedules
	Executions Executions
	Store      *store.Store
	Instance   string // unique to this process
	Log        *slog.Logger
}

// Run campaigns and starts executions until ctx is done. It always returns nil.
func (r *Runner) Run(ctx context.Context) error {
	e := engine.Engine[entry]{
		Queue: &r.Schedules.queue, Store: r.Store, Name: "schedules", Instance: r.Instance, Log: r.Log,
		Due: (*entry).due, Forget: func(e *entry) { e.recovered = nil }, Handle: r.handle,
		Beside: []func(context.Context){func(ctx context.Context) {
			store.CollectMarkers(ctx, r.Store, r.Store.Schedules, r.Log)
		}},
		Pause: retryAfter, Timeout: tickTimeout, Handlers: handlers, HandlersOfOrg: handlersOfOrg,
	}
	return e.Run(ctx)
}

// entry is what the queue knows of a schedule.
type entry struct {
	definition *definition          // nil if it was removed, or is not known yet
	state      *proto.ScheduleState // nil if there is none
	// recovered is the definition for which the leader has looked for started ticks that were not
	// stored.
	recovered *definition
}

// exists reports whether anything is stored of the schedule.
func (e *entry) exists() bool { return e.definition != nil || e.state != nil }

// due returns when decide has something to do.
func (e *entry) due() (at time.Time, ok bool) {
	switch d, s := e.definition, e.state; {
	case d == nil:
		return at, false
	case s == nil || !s.TimedAt.Equal(d.TimedAt):
		return at, true
	case d.Paused:
		return at, false
	case len(s.Waiting) > 0: // until the last execution has ended
		return at, true
	default:
		return d.ticker.due(s.Next), !s.Next.IsZero()
	}
}

// handle starts the due ticks of a schedule, and stores its state.
func (r *Runner) handle(ctx context.Context, x engine.Item, known entry) (err error) {
	d := known.definition
	key := stateKey(d.Org, d.ID)
	old, revision, err := r.Schedules.states.Read(ctx, key)
	if errors.Is(err, proto.ErrNotFound) {
		old, err = new(proto.ScheduleState), nil
	}
	if err != nil {
		return err
	}
	now, state, recovered := time.Now(), *old, false
	if known.recovered != d {
		if recovered, err = r.recoverTicks(ctx, d, &state, now); err != nil {
			return err
		}
	}
	defer func() {
		r.Schedules.queue.Change(x, func(e *entry) bool {
			if e.recovered = d; err != nil {
				e.recovered = nil // a tick may have started
			}
			return e.exists()
		})
	}()
	busy, err := r.busy(ctx, d.Org, state.Last)
	if err != nil {
		return err
	}
	next, ok := decide(&d.Schedule, d.ticker, state, busy, now)
	if !ok && !recovered {
		return nil
	}
	if next.state.Error != "" && old.Error == "" {
		r.Log.Error("schedule has no further ticks", "schedule", d.ID, "org", d.Org, "error", next.state.Error)
	}
	if next.cancel && state.Last != "" {
		if _, err := r.Executions.Cancel(ctx, d.Org, state.Last); err != nil && !errors.Is(err, proto.ErrNotFound) {
			return fmt.Errorf("cancel %s: %w", state.Last, err)
		}
	}
	for _, tick := range next.start {
		fault.Here(fault.AfterDueBeforeTick)
		run := proto.ScheduleRun{Tick: tick, At: now.UTC(), Outcome: proto.RunStarted}
		if run.TraceID, run.Reason, err = r.Executions.StartScheduled(ctx, &d.Schedule, tick); err != nil {
			return fmt.Errorf("start the execution of %s: %w", tick.Format(time.RFC3339), err)
		}
		if run.Reason != "" {
			run.Outcome = proto.RunFailed
			if err := r.Executions.ReportFailed(ctx, &d.Schedule, run); err != nil {
				return fmt.Errorf("report the failure of %s: %w", tick.Format(time.RFC3339), err)
			}
			r.Log.Warn("execution of a schedule refused", "schedule", d.ID, "org", d.Org, "tick", tick, "reason", run.Reason)
			fault.Here(fault.AfterRefusalBeforeState)
		} else {
			fault.Here(fault.AfterTickBeforeState)
		}
		next.state.Add(run)
	}
	_, err = r.Schedules.states.Replace(ctx, key, &next.state, revision)
	if err == nil && len(next.start) > 0 {
		fault.Here(fault.AfterStateBeforeNextTick)
	}
	if err == nil && r.Schedules.definitions.Get(definitionKey(d.Org, d.ID)) == nil { // removed meanwhile
		_, err = r.Schedules.states.Remove(ctx, key, nil)
	}
	if store.IsConflict(err) || errors.Is(err, proto.ErrNotFound) {
		return nil // by another process; the next scan reads it
	}
	return err
}

// recoverTicks adds ticks to a state whose executions started before the state was stored, and
// reports whether there are any. Otherwise the history would lose a tick that will no longer be
// started because the schedule was changed or is late.
func (r *Runner) recoverTicks(
	ctx context.Context, d *definition, state *proto.ScheduleState, now time.Time,
) (found bool, err error) {
	started := func(tick time.Time) (bool, error) {
		id, err := r.Executions.StartedTick(ctx, &d.Schedule, tick)
		if errors.Is(err, proto.ErrNotFound) {
			return false, nil
		}
		if err != nil {
			return false, fmt.Errorf("look up the execution of %s: %w", tick.Format(time.RFC3339), err)
		}
		state.Add(proto.ScheduleRun{Tick: tick, At: now.UTC(), Outcome: proto.RunStarted, TraceID: id})
		return true, nil
	}
	if len(state.Waiting) > 0 {
		if found, err = started(state.Waiting[0]); err != nil {
			return false, err
		}
		if found {
			state.Waiting = state.Waiting[1:]
		}
	}
	if state.Next.IsZero() || state.Next.After(now) {
		return found, nil
	}
	first, err := started(state.Next)
	if first {
		advance(state, d.ticker, state.Next)
	}
	return found || first, err
}

// busy reports whether an execution has not ended.
func (r *Runner) busy(ctx context.Context, org string, id proto.TraceID) (bool, error) {
	if id == "" {
		return false, nil
	}
	record, err := r.Executions.Lookup(ctx, org, id)
	switch {
	case errors.Is(err, proto.ErrNotFound): // past its retention
		return false, nil
	case err != nil:
		return false, fmt.Errorf("look up %s: %w", id, err)
	default:
		return !record.Status.Terminal(), nil
	}
}
