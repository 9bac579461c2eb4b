package executions

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/bullpen-run/bullpen/gateway/web"
	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/proto/api"
)

const (
	// answerGrace is the time for an inline answer beyond the execution's timeout. The SDK stops
	// waiting two seconds later and sends the request again.
	answerGrace = 8 * time.Second
	// startGrace is the part of that for everything except the wait for a worker.
	startGrace = 5 * time.Second
	// minQueueWait is the default wait for a worker if the timeout is shorter.
	minQueueWait = 5 * time.Second
	// statsTimeout bounds the look at the queue for an error.
	statsTimeout = time.Second
)

// Admission builds and submits jobs. It refuses a request with a [*proto.Rejection], a
// [*proto.FieldError] or another error whose text is for clients.
type Admission interface {
	// Job returns the job of a request as execution id, which is empty for a mere check. wait is
	// how long an inline or streaming execution waits for a worker.
	Job(ctx context.Context, req *api.ExecuteRequest, c proto.Caller, mode proto.Mode, id proto.TraceID,
		wait time.Duration) (*proto.Job, error)
	// Submit submits a job and returns the id of its execution. If an earlier request had the same
	// idempotency key, Submit returns the id of the earlier execution. Nothing of the job remains after
	// an error, except for [proto.ErrMayRun]. Its errors include [proto.ErrKeyReused],
	// [proto.ErrSubmissionPending], [proto.ErrNotConfirmed] and [*proto.BusyError].
	Submit(ctx context.Context, sub *proto.Submission) (proto.TraceID, error)
}

// Submissions ends submissions that have not started.
type Submissions interface {
	// Withdraw ends a submission's execution if it has not started, and then frees its idempotency
	// key. It returns the record, and continues if ctx is cancelled.
	Withdraw(ctx context.Context, sub *proto.Submission, reason string) (*proto.Record, error)
	// Release frees the idempotency key of a submission that did not start. It continues if ctx is
	// cancelled.
	Release(ctx context.Context, sub *proto.Submission) error
}

// Jobs reads and cancels executions.
type Jobs interface {
	// Lookup returns the record of an execution, or [proto.ErrNotFound].
	Lookup(ctx context.Context, org string, id proto.TraceID) (*proto.Record, error)
	// Summary is Lookup without the outputs of the result.
	Summary(ctx context.Context, org string, id proto.TraceID) (*proto.Record, error)
	// Submitted is Lookup with the request, if the execution keeps it.
	Submitted(ctx context.Context, org string, id proto.TraceID) (*proto.Record, error)
	// Wait blocks until the execution has ended. It returns ctx.Err() if ctx is done first.
	Wait(ctx context.Context, org string, id proto.TraceID) (*proto.Record, error)
	// Watch subscribes to the end of an execution before its submission, so that waiting needs no
	// reads.
	Watch(org string, id proto.TraceID) (Watch, error)
	// Cancel stores a request to end the execution, and returns the new record.
	Cancel(ctx context.Context, org string, id proto.TraceID) (*proto.Record, error)
	// Stats returns the state of the queue.
	Stats(ctx context.Context) (proto.QueueStats, error)
}

// Watch listens for the end of one execution.
type Watch interface {
	// Wait blocks until the execution has ended. It returns ctx.Err() if ctx is done first, and may
	// be called again.
	Wait(ctx context.Context) (*proto.Record, error)
	// Close releases the watch.
	Close()
}

// Events reads the output of executions, from their start and live.
type Events interface {
	// Follow reads the events of an execution with sequence numbers above after, and always the
	// result event.
	Follow(ctx context.Context, org string, id proto.TraceID, after int64) (web.Tail, error)
	// Last returns the sequence number of the current last event of an attempt, without the result;
	// 0 if there is none.
	Last(ctx context.Context, org string, id proto.TraceID, attempt int) (int64, error)
}

// Capabilities knows what workers can run.
type Capabilities interface {
	// Missing returns what live workers lack to run an execution, nil if one of them can. It reads
	// memory only.
	Missing(m *proto.Meta) *proto.Missing
}

// Runner runs programs for requests that wait for their end.
type Runner struct {
	*web.Core
	Admission    Admission
	Submissions  Submissions
	Jobs         Jobs
	Events       Events
	Capabilities Capabilities
	// QueueWait is the longest wait of inline and streaming executions for a worker, unless the
	// client sets another.
	QueueWait time.Duration
}

// Run is an accepted execution that a request waits for.
type Run struct {
	*Runner
	ID      proto.TraceID
	request *web.Info // that waits
	// submission is nil unless this request submitted the execution. Only such an execution is
	// withdrawn when the request ends.
	submission    *proto.Submission
	queueDeadline time.Time // when the wait for a worker ends
	deadline      time.Time // when the answer is due
	// watch was opened before the submission. It is nil unless this request submitted an inline
	// execution.
	watch Watch
}

// Job returns the job of a request as execution id. wait is how long the client lets it wait for a
// worker, 0 if unspecified. The answer's deadline leaves a program that starts late its full
// timeout.
func (x *Runner) Job(
	ctx context.Context, req *api.ExecuteRequest, c proto.Caller, mode proto.Mode, id proto.TraceID, wait time.Duration,
) (*proto.Job, error) {
	byDefault := min(x.QueueWait, max(time.Duration(req.Timeout)*time.Second, minQueueWait))
	return x.Admission.Job(ctx, req, c, mode, id, cmp.Or(wait, byDefault))
}

// Start submits a job for a request, or finds the execution of an earlier request with the same
// idempotency key. wait is as in [Runner.Job]. The run must be closed.
func (x *Runner) Start(
	ctx context.Context, i *web.Info, sub *proto.Submission, wait time.Duration,
) (run *Run, err error) {
	job := sub.Job
	grace := max(answerGrace, wait+startGrace)
	accepted := &Run{
		Runner: x, request: i, queueDeadline: job.QueueDeadline,
		deadline: job.CreatedAt.Add(time.Duration(job.Timeout)*time.Second + grace),
	}
	if job.Mode == proto.ModeInline {
		if accepted.watch, err = x.Jobs.Watch(job.Org, job.TraceID); err != nil {
			return nil, err
		}
	}
	defer func() {
		if run == nil {
			accepted.Close()
		}
	}()
	sub.WaitUntil = accepted.deadline
	accepted.ID, err = x.Admission.Submit(ctx, sub)
	if _, rejected := errors.AsType[*proto.Rejection](err); !rejected {
		i.Calls.Store(true)
	}
	switch {
	case errors.Is(err, proto.ErrSubmissionPending):
		return nil, api.Errorf(api.CodeGatewayTimeout,
			"the first request with this Idempotency-Key is still being accepted; send it again under that key")
	case err != nil:
		return nil, web.SubmitError(i, job.TraceID, err)
	case accepted.ID == job.TraceID:
		accepted.submission = sub
	default:
		accepted.Close()
	}
	i.Trace = accepted.ID
	return accepted, nil
}

// Close releases the run's resources. The execution continues.
func (x *Run) Close() {
	if x.watch != nil {
		x.watch.Close()
		x.watch = nil
	}
}

// Cancel ends an execution, if it exists and has not ended. It continues if ctx is done.
func (x *Runner) Cancel(ctx context.Context, org string, id proto.TraceID) error {
	ctx, done := web.Detached(ctx)
	defer done()
	record, err := x.Jobs.Summary(ctx, org, id)
	if err == nil && !record.Status.Terminal() {
		_, err = x.Jobs.Cancel(ctx, org, id)
	}
	if err != nil && !errors.Is(err, proto.ErrNotFound) {
		return fmt.Errorf("cancel %s: %w", id, err)
	}
	return nil
}

// ReserveOutput reserves memory for the part of an execution's output that a model reads. Its error
// is for the client.
func (x *Runner) ReserveOutput(i *web.Info, id proto.TraceID, result *proto.Result) error {
	read := min(len(result.Stdout), api.MaxToolOutput) + min(len(result.Stderr), api.MaxToolOutput)
	if !x.ReserveText(i, int64(read)) {
		return api.Unavailable(1, "the execution has ended, but too many requests are open here for its output: "+
			web.StatusHint(id))
	}
	return nil
}

// Wait waits for the end of the execution. Its error is for the client.
func (x *Run) Wait(ctx context.Context) (*proto.Record, error) {
	record, err := x.await(ctx)
	if err == nil && record.ExpiredInQueue() {
		err = x.expiredInQueue(ctx)
	}
	return record, waitError(x.ID, err)
}

// errExpired is wrapped by [Run.noWorkerFree].
var errExpired = errors.New("expired in the queue")

// waitError returns the error to answer with when the wait for an accepted execution failed.
func waitError(id proto.TraceID, err error) error {
	switch {
	case err == nil:
		return nil
	case errors.Is(err, errExpired):
		return err
	case errors.Is(err, web.ErrDeadline):
		return api.Errorf(api.CodeGatewayTimeout, "the execution did not end in time for an answer; it is recorded: %s",
			web.StatusHint(id))
	default:
		return web.AfterAcceptance(id, err)
	}
}

// await waits for the end of an execution. If it was submitted by this request and is still queued
// at its queue deadline, await withdraws it.
func (x *Run) await(ctx context.Context) (*proto.Record, error) {
	if x.submission != nil {
		record, err := x.waitUntil(ctx, x.request.Key.Org, x.ID, x.watch, x.queueDeadline)
		switch {
		case err == nil:
			return record, nil
		case ctx.Err() != nil:
			return nil, x.clientGone(ctx)
		case !errors.Is(err, web.ErrDeadline):
			return nil, err
		}
		record, err = x.Submissions.Withdraw(ctx, x.submission, x.withdrawReason())
		if err == nil && record.Status.Terminal() {
			return record, nil
		}
		if err != nil { // it may still start, so wait for its end
			x.Log.WarnContext(ctx, "withdraw failed", "trace_id", x.ID, "error", err)
		}
	}
	return x.waitUntil(ctx, x.request.Key.Org, x.ID, x.watch, x.deadline)
}

func (x *Run) withdrawReason() string {
	if x.HasLeft() {
		return "The server was shut down before a worker was free, so the execution was withdrawn."
	}
	return fmt.Sprintf("No slot was free for it within %s, so the execution was withdrawn.",
		x.queueDeadline.Sub(x.submission.Job.CreatedAt))
}

// clientGone withdraws an execution of this request that has not started.
func (x *Run) clientGone(ctx context.Context) error {
	if x.submission == nil {
		return ctx.Err()
	}
	_, err := x.Submissions.Withdraw(ctx, x.submission, "The client went away before a worker was free.")
	return errors.Join(ctx.Err(), err)
}

// waitUntil waits for the end of an execution, using watch unless it is nil. It returns
// [web.ErrDeadline] at the deadline, and when the server shuts down.
func (x *Runner) waitUntil(
	ctx context.Context, org string, id proto.TraceID, watch Watch, deadline time.Time,
) (record *proto.Record, err error) {
	limited, cancel := x.Until(ctx, deadline)
	defer cancel()
	if watch != nil {
		record, err = watch.Wait(limited)
	} else {
		record, err = x.Jobs.Wait(limited, org, id)
	}
	switch {
	case err == nil:
		return record, nil
	case ctx.Err() != nil:
		return nil, ctx.Err()
	case limited.Err() != nil:
		return nil, web.ErrDeadline
	default:
		return nil, fmt.Errorf("wait for %s: %w", id, err)
	}
}

// expiredInQueue frees the idempotency key of an execution that never ran, and returns the error
// for the client.
func (x *Run) expiredInQueue(ctx context.Context) error {
	err := x.noWorkerFree(ctx)
	if x.submission == nil {
		return err
	}
	if errRelease := x.Submissions.Release(ctx, x.submission); errRelease != nil {
		return fmt.Errorf("%w (and its idempotency key stays bound: %w)", err, errRelease)
	}
	return err
}

// noWorkerFree returns the error for a client whose execution was withdrawn. It matches errExpired.
func (x *Run) noWorkerFree(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, statsTimeout)
	defer cancel()
	stats, err := x.Jobs.Stats(ctx)
	if err != nil {
		x.Log.WarnContext(ctx, "statistics of the queue missing, Retry-After is a guess", "error", err)
	}
	org := x.request.Key.Org
	worker := "worker"
	if x.submission != nil && x.submission.Job.Architecture != "" {
		worker = x.submission.Job.Architecture + " worker"
	}
	message := "no " + worker + " was free in time; the execution was withdrawn and will not run; send it again"
	if x.submission != nil {
		if missing := x.Capabilities.Missing(&x.submission.Job.Meta); missing != nil {
			e := api.NoWorker(missing)
			if missing.Expected {
				e.Permanent, e.RetryAfter = false, stats.RetryAfter(org)
			}
			e.Message += "; the execution was withdrawn and will not run"
			return fmt.Errorf("%w: %w", e, errExpired)
		}
	}
	if slices.Contains(stats.AtShare, org) {
		message = "other organisations submit executions too, and this one has all slots that it may have meanwhile; " +
			"the execution was withdrawn and will not run; send it again when another one has ended"
	}
	return fmt.Errorf("%w: %w", api.Unavailable(stats.RetryAfter(org), message), errExpired)
}
