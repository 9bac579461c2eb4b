package agentruns

import (
	"context"
	"errors"
	"log/slog"
	"time"

	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/scheduler/engine"
)

const (
	// maxRunning and maxRunningOrg limit the concurrent runs: in total, and per organisation.
	// Others wait.
	maxRunning    = 256
	maxRunningOrg = 64
	conflictPause = 200 * time.Millisecond
	restartPause  = 5 * time.Second
)

var errInactive = errors.New("the run is not active any more")

// carryOut carries out an active run until it has ended or ctx is done. The cause is
// [proto.ErrRunCancelled] if a client cancelled the run. After an error, the run can be continued.
type carryOut = func(ctx context.Context, run proto.ActiveAgentRun) error

// NewEngine returns an engine that carries out a queue's active runs.
func NewEngine(
	queue *engine.Queue[proto.ActiveAgentRun], run carryOut, log *slog.Logger,
) *engine.Engine[proto.ActiveAgentRun] {
	return &engine.Engine[proto.ActiveAgentRun]{
		Queue: queue, Name: "agent-runs", Log: log,
		Due: func(a *proto.ActiveAgentRun) (at time.Time, ok bool) { return at, true },
		Handle: func(ctx context.Context, _ engine.Item, a proto.ActiveAgentRun) error {
			err := run(ctx, a)
			if errors.Is(err, proto.ErrConflict) || errors.Is(err, context.Canceled) { // it goes on soon, or elsewhere
				return nil
			}
			return err
		},
		Order:     func(a, b *proto.ActiveAgentRun) int { return rank(a).Compare(rank(b)) },
		Interrupt: interrupt,
		Pause:     conflictPause, RetryAfter: restartPause, Handlers: maxRunning, HandlersOfOrg: maxRunningOrg,
	}
}

// rank orders runs: cancelled ones first, then by age.
func rank(a *proto.ActiveAgentRun) time.Time {
	if a.Cancelled {
		return time.Time{}
	}
	return a.CreatedAt
}

// interrupt returns why an active run must end.
func interrupt(a *proto.ActiveAgentRun) error {
	switch {
	case a.ID == "":
		return errInactive
	case a.Cancelled:
		return proto.ErrRunCancelled
	default:
		return nil
	}
}

// Engine returns an engine that carries out the active runs in a process with this name.
func (r *Runs) Engine(run carryOut, instance string, log *slog.Logger) *engine.Engine[proto.ActiveAgentRun] {
	e := NewEngine(&r.queue, run, log)
	e.Store, e.Instance = r.Store, instance
	return e
}
