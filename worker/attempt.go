package worker

import (
	"context"
	"errors"
	"log/slog"
	"sync"
	"time"

	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/proto/fault"
	"github.com/bullpen-run/bullpen/worker/jail"
	"github.com/bullpen-run/bullpen/worker/live"
)

// attempt is one attempt at a job, which goes through stages. Each has a type for its failures:
//
//	take      none: it fails only with its context
//	prepare   [*prepareError], [*programError]
//	claim     [*claimError]
//	run       [*runError]
//	collect   [*collectError]
//	save      [*saveError]
//	finish    [*finishError]
//
// Some failures are part of a result. After the others, which are those of claim, run and finish, the attempt
// ends without one, and the dispatcher decides what follows.
type attempt struct {
	*Worker
	lease Lease
	job   *proto.Job
	log   *slog.Logger
	spent timings

	// The stage prepare sets what follows.
	file    string // name of the program's file, if it is in the home
	nonce   string // of the frames of a program that runs as a cell; empty for others
	program jail.Program
	live    *live.Sandbox // nil if the job is no live sandbox
}

// attempt makes an attempt at a job and logs one wide line.
func (w *Worker) attempt(ctx context.Context, lease Lease) {
	job := lease.Job()
	a := &attempt{
		Worker: w, lease: lease, job: job, log: w.Log.With("trace_id", job.TraceID, "attempt", lease.Attempt()),
		spent: timings{steps: proto.Steps{AssignedAt: time.Now().UTC()}},
	}
	ctx, spans := startTrace(ctx, job, lease.Attempt())
	rec, err := a.execute(ctx)
	spans.end(ctx, rec, err)
	if err != nil {
		lease.Release()
		a.log.WarnContext(ctx, "execution abandoned", "error", err)
		return
	}
	w.Done(rec)
	a.logEnd(ctx, rec)
}

// execute runs the stages of an attempt with one program, and returns the terminal record. After an
// error this worker no longer holds the job.
func (a *attempt) execute(ctx context.Context) (rec *proto.Record, err error) {
	defer a.admit(ctx)()
	idle := sync.OnceFunc(a.pool.Busy())
	defer idle()
	if err := a.addLive(); err != nil { // before the claim, after which gateways may look for it
		return nil, &runError{err}
	}
	defer a.removeLive(ctx)
	// The claim is written while the sandbox is being prepared: it must be durable before the program starts, not
	// before its sandbox is ready.
	wanted, giveUp := context.WithCancel(ctx)
	defer giveUp()
	preparing := a.startPreparing(wanted)
	fault.Here(fault.AfterTakeBeforeClaim)
	c, errClaim := a.claim(ctx, wanted, giveUp)
	p := <-preparing
	a.spent.prepared(p.sandbox)
	if a.job.Live != nil {
		idle() // nobody waits for the end of the guest
	}
	var out Outcome
	defer func() { a.release(ctx, p.sandbox, out.committed(rec)) }()
	switch {
	case errClaim != nil:
		return nil, errClaim
	case p.err != nil:
		out, err = a.unstarted(ctx, c, p.err)
	default:
		out, err = a.runProgram(ctx, c, p.sandbox)
	}
	if err != nil {
		return nil, err
	}
	return a.finish(ctx, out)
}

// admit blocks until the job may start alongside others. The caller calls release when it has
// ended.
func (a *attempt) admit(ctx context.Context) (release func()) {
	if a.job.Class() == proto.ClassBackground {
		return a.limiter.acquire(ctx)
	}
	a.limiter.onInteractive()
	return func() {}
}

// runProgram runs the program in a prepared sandbox, and returns its outcome.
func (a *attempt) runProgram(ctx context.Context, c *claim, b *sandbox) (Outcome, error) {
	e, err := a.run(ctx, c, b)
	if err != nil {
		return Outcome{}, err
	}
	out := a.collect(e)
	if err := a.collectMounts(c.running, b); err != nil {
		a.log.ErrorContext(ctx, "storage write failed", "error", err)
		out.Result = out.Result.Unwritten(err.message())
	}
	if !errors.Is(context.Cause(c.running), ErrShutdown) && e.outcome.Kind != jail.HostOutOfMemory {
		a.save(ctx, b, &out)
	}
	return out, nil
}

// unstarted returns the outcome of an attempt whose program err prevented from starting.
func (a *attempt) unstarted(ctx context.Context, c *claim, err error) (Outcome, error) {
	out := Outcome{LastSeq: c.base, Steps: &a.spent.steps}
	failed, sandboxFailed := errors.AsType[*prepareError](err)
	switch {
	case !sandboxFailed: // a *programError
		out.Result = proto.Failure(proto.CodeSandboxStart, err.Error())
	case errors.Is(context.Cause(c.running), proto.ErrLost):
		return Outcome{}, &runError{context.Cause(c.running)}
	case isClosed(c.cancelled):
		out.Result = proto.Cancelled()
	case c.running.Err() != nil:
		out.Result = resultOf(a.job, jail.Outcome{Kind: jail.Killed})
	case a.retriable(err):
		return Outcome{}, &runError{err}
	default:
		a.log.ErrorContext(ctx, "sandbox preparation failed", "error", err)
		if failed.part == partJail {
			a.health.markUnhealthy()
		}
		out.Result = failed.result()
	}
	return out, nil
}

// retriable reports whether err means that the host lacks memory and the job has attempts left. The
// dispatcher starts the next one when this one's lease has ended.
func (a *attempt) retriable(err error) bool {
	return errors.Is(err, jail.ErrHostOutOfMemory) && a.lease.Attempt() < a.job.MaxAttempts
}

// release closes the sandbox of an attempt. committed is its record, if this worker stored that after commits.
func (a *attempt) release(ctx context.Context, b *sandbox, committed *proto.Record) {
	closeSandbox := func() {
		if err := b.close(committed); err != nil {
			a.log.ErrorContext(ctx, "sandbox removal failed", "error", err)
		}
	}
	if b.saving == nil {
		closeSandbox()
		return
	}
	a.log.ErrorContext(ctx, "thread save does not end, sandbox is removed when it does", "threads", a.job.Threads())
	go func() {
		<-b.saving
		closeSandbox()
	}()
}

// logEnd logs the end of an execution.
func (a *attempt) logEnd(ctx context.Context, rec *proto.Record) {
	job, spent := a.job, &a.spent
	line := []any{
		"org", job.Org, "key", job.Key, "language", job.Language, "mode", job.Mode, "status", rec.Status,
		"exit_code", rec.Result.ExitCode, "duration_ms", rec.Result.DurationMS, "request_id", job.RequestID,
		"stdout_bytes", len(rec.Result.Stdout), "stderr_bytes", len(rec.Result.Stderr),
		"start", spent.start, "prepare_ms", millis(spent.prepare), "run_ms", millis(spent.run),
	}
	if job.ThreadID != "" {
		line = append(line, "thread", job.ThreadID)
	}
	if job.ThreadID != "" || job.HasVolumes {
		line = append(line, "check_out_ms", millis(spent.checkOut), "save_ms", millis(spent.save))
	}
	if len(job.Mounts) > 0 {
		line = append(line, "mounts", len(job.Mounts), "store_ms", millis(spent.store))
	}
	if rec.StartedAt != nil {
		line = append(line, "queued_ms", rec.StartedAt.Sub(job.QueuedAt()).Milliseconds())
	}
	if rec.Result.OutputBudgetExceeded {
		line = append(line, "output_budget_exceeded", true)
	}
	if rec.Usage != nil {
		line = append(line, "cpu_ms", rec.Usage.CPUMS, "memory_peak", rec.Usage.MemoryPeak)
	}
	if rec.Result.ErrorCode != nil {
		line = append(line, "error_code", *rec.Result.ErrorCode, "detail", *rec.Result.ErrorMessage)
	}
	a.log.InfoContext(ctx, "execution ended", line...)
}

// timings are the durations of an execution's steps, for the log and the record.
type timings struct {
	steps                        proto.Steps
	start                        Start
	checkOut, prepare, run, save time.Duration
	store                        time.Duration // from the program's end until its writes to mounts were stored
}

func millis(d time.Duration) float64 { return float64(d.Microseconds()) / 1000 }

// isClosed reports whether a channel is closed that never receives anything.
func isClosed(c <-chan struct{}) bool {
	select {
	case <-c:
		return true
	default:
		return false
	}
}
