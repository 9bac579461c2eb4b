package agent

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"runtime/debug"
	"time"

	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/proto/api"
	"github.com/bullpen-run/bullpen/proto/fault"
)

// maxTries is how long a run that cannot begin is retried.
const maxTries = time.Hour

// Active is a [Store] that tracks the unfinished background runs.
type Active interface {
	Store
	// Finish makes a run not active. It is no error if it is not.
	Finish(ctx context.Context, org, id string) error
}

// BackgroundHost carries out what a run in the background needs.
type BackgroundHost interface {
	Host
	// Begin returns the context for the calls of the run, with the rights and limits of its API
	// key. If that is done before the run has ended, its cause ends the run. resumed is set if the
	// run has started before, so that a call may have been carried out.
	Begin(ctx context.Context, run *proto.AgentRun, resumed bool) (context.Context, error)
	// Release ends that, and releases what was reserved.
	Release()
}

// API is an API whose requests run in the background.
type API interface {
	// Prepare returns the run of a stored request. If the run has not started yet, started is nil,
	// and Prepare returns the start, too. Its error ends the run.
	Prepare(ctx context.Context, host Host, run *proto.AgentRun, started *Start) (*Run, *Start, error)
	// Ended is called with the last entry of a run. It may be called again if it returns an error.
	Ended(ctx context.Context, run *proto.AgentRun, last *Entry) error
}

// Background carries out runs in the background. Its fields are set before its use.
type Background struct {
	Store    Active
	Upstream Upstream
	// Host returns the host of a run, before that is read.
	Host func(org, id string) BackgroundHost
	APIs map[string]API // by [proto.AgentRun.API]
	Log  *slog.Logger
}

var errTryAgain = errors.New("the run cannot go on now")

// CarryOut carries out an active run until it has ended or ctx is done. It returns
// [proto.ErrConflict] if another process continues the run, or if the log was removed. The run can
// be continued after an error.
func (b *Background) CarryOut(ctx context.Context, a proto.ActiveAgentRun) error {
	host := b.Host(a.Org, a.ID)
	defer host.Release()
	if err := host.Reserve(a.Bytes); err != nil {
		return err
	}
	run, at, err := b.Store.Get(ctx, a.Org, a.ID)
	if errors.Is(err, proto.ErrNotFound) { // it was removed
		return b.Store.Finish(ctx, a.Org, a.ID)
	}
	if err != nil {
		return err
	}
	log := &StoredLog{Store: b.Store, Run: run}
	p, err := readHistory(ctx, &Reader{Store: b.Store, Org: a.Org, ID: a.ID, At: at, Reserve: host.Reserve})
	if err != nil {
		return err
	}
	if log.At, log.last = p.at, p.last; log.last == nil || !log.last.Ended() {
		if err := b.end(ctx, a, host, log, p); err != nil {
			return err
		}
	}
	fault.Here(fault.AfterAgentEndBeforeWebhook)
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), endTimeout)
	defer cancel()
	if surface := b.APIs[run.API]; surface != nil {
		if err := surface.Ended(ctx, run, log.last); err != nil {
			return err
		}
	}
	fault.Here(fault.AfterAgentWebhookBeforeFinish)
	return b.Store.Finish(ctx, run.Org, run.ID)
}

// end continues a run until its end, and stores that.
func (b *Background) end(
	ctx context.Context, a proto.ActiveAgentRun, host BackgroundHost, log *StoredLog, p *history,
) error {
	run, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	if a.Cancelled { // it replays up to the call that another process has started, which then ends
		cancel(proto.ErrRunCancelled)
	}
	err := b.resume(run, host, log, p)
	cancelled := err != nil && errors.Is(context.Cause(run), proto.ErrRunCancelled)
	switch {
	case cancelled && log.last == nil: // a run that has not begun is cancelled even if it cannot be prepared
		err = context.Canceled
	case errors.Is(err, errTryAgain), errors.Is(err, proto.ErrConflict): // another process goes on, or the log was removed
		return err
	case cancelled:
		err = context.Canceled
	case ctx.Err() != nil:
		return ctx.Err()
	case err != nil:
		b.Log.WarnContext(ctx, "agent run failed", "run", a.ID, "org", a.Org, "error", err)
	}
	return log.End(ctx, err)
}

func (b *Background) resume(ctx context.Context, host BackgroundHost, log *StoredLog, p *history) (err error) {
	defer func() { // a request that crashes its process would crash all gateways, one after another
		if cause := recover(); cause != nil {
			err = fmt.Errorf("panic: %v\n%s", cause, debug.Stack())
		}
	}()
	surface := b.APIs[log.Run.API]
	if surface == nil {
		return api.Errorf(api.CodeValidation, "this server has no API %q any more", log.Run.API)
	}
	hosted, err := host.Begin(ctx, log.Run, p.started != nil)
	if err != nil {
		return b.retry(log.Run, err)
	}
	run, start, err := surface.Prepare(hosted, host, log.Run, p.started)
	if err != nil {
		return b.retry(log.Run, err)
	}
	if p.started == nil {
		if err := log.Start(ctx, start); err != nil {
			return err
		}
		p.began = log.last.At
	}
	run.Began, run.History = p.began, p.events
	err = Continue(hosted, b.Upstream, run, log)
	if err != nil && hosted.Err() != nil {
		err = context.Cause(hosted)
	}
	return err
}

// retry returns an error that makes the run retry if it could not begin because of this server,
// until maxTries is over.
func (b *Background) retry(run *proto.AgentRun, err error) error {
	code := Public(err).Code
	if (code == api.CodeInternal || code == api.CodeServiceUnavailable) && time.Since(run.CreatedAt) < maxTries {
		return fmt.Errorf("%w: %w", errTryAgain, err)
	}
	return err
}

// history is what a log has of a run.
type history struct {
	started *Start
	began   time.Time
	events  []Event
	last    *Entry // nil for none
	at      uint64 // the number of the last message
}

func readHistory(ctx context.Context, r *Reader) (*history, error) {
	p := &history{}
	for {
		e, err := r.Next(ctx)
		if err != nil {
			return nil, err
		}
		if e == nil {
			p.at = r.At
			return p, nil
		}
		if p.last = e; e.Started != nil {
			p.started, p.began = e.Started, e.At
		}
		if e.Event != nil {
			p.events = append(p.events, *e.Event)
		}
	}
}
