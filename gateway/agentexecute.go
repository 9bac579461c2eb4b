package gateway

import (
	"context"
	"errors"
	"time"

	"github.com/cenkalti/backoff/v4"

	"github.com/bullpen-run/bullpen/gateway/web"
	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/proto/api"
)

// maxAgentTimeout is the longest time that a tool call of an agent may run, in seconds.
const maxAgentTimeout = 300

// Execute runs a program as the execution of an id and returns its record. If ctx is done first, the
// execution is cancelled; in the background only if the run has ended, and goes on otherwise. A
// timeout of 0 is the longest that the plan allows, up to maxAgentTimeout.
func (a *Agent) Execute(
	ctx context.Context, id proto.TraceID, req *api.ExecuteRequest,
) (record *proto.Record, err error) {
	ctx, span := a.s.StartBackgroundSpan(ctx, id, "agent call", a.i.Key.Org, a.i.Key.ID)
	defer func() { web.EndBackgroundSpan(span, err) }()
	if req.Timeout == 0 {
		req.Timeout = min(maxAgentTimeout, proto.LimitOf(a.i.Plan.MaxTimeout), proto.LimitOf(a.i.Plan.KeyTimeout))
	}
	execute := a.executeNow
	if a.r == nil {
		execute = a.executeInBackground
	}
	if record, err = execute(ctx, id, req); err != nil {
		return nil, a.public(err)
	}
	kept := min(len(record.Result.Stdout), api.MaxToolOutput) + min(len(record.Result.Stderr), api.MaxToolOutput)
	if !a.s.Reserve(a.i, int64(kept)*toolOutputCost) {
		return nil, a.public(api.Unavailable(
			1, "the execution has ended, but too many requests are open here for its output: "+web.StatusHint(id)))
	}
	return record, nil
}

func (a *Agent) executeNow(ctx context.Context, id proto.TraceID, req *api.ExecuteRequest) (*proto.Record, error) {
	s := a.s
	if s.IsDraining() {
		return nil, web.ErrDraining
	}
	// The wait for a slot is not part of the call's timeout.
	job, err := s.Admission.Job(ctx, req, web.CallerOf(a.r), proto.ModeInline, id, s.QueueWait)
	if err != nil {
		return nil, err
	}
	job.ThreadID, job.Container = ownThread(req.ThreadID), true
	watch, err := s.Jobs.Watch(a.org(), id)
	if err != nil {
		return nil, err
	}
	defer watch.Close()
	x, err := s.submit(ctx, a.i, &proto.Submission{Job: job}, s.QueueWait)
	if _, rejected := errors.AsType[*proto.Rejection](err); !rejected {
		a.i.Calls.Store(true)
	}
	if err != nil {
		return nil, err
	}
	x.watch, a.i.Trace = watch, x.id
	record, err := s.await(ctx, x)
	if err == nil && record.ExpiredInQueue() {
		return nil, s.expiredInQueue(ctx, x)
	}
	if err != nil {
		if errors.Is(err, context.Canceled) {
			err = errors.Join(err, toolCalls{s}.cancelCall(ctx, a.org(), x.id))
		}
		return nil, waitError(x.id, err)
	}
	return record, nil
}

// maxBackgroundTries is how long a run in the background tries to submit an execution.
const maxBackgroundTries = 10 * time.Minute

// maxUnconfirmed is how often an execution is submitted again that the queue has not confirmed.
const maxUnconfirmed = 3

// executeInBackground runs a program as an execution that is queued for as long as an asynchronous one.
// If the queue does not confirm it, nothing of it runs, and the next one has an id that follows from
// the first.
func (a *Agent) executeInBackground(
	ctx context.Context, id proto.TraceID, req *api.ExecuteRequest,
) (record *proto.Record, err error) {
	for range maxUnconfirmed {
		record, err = a.executeOnce(ctx, id, req)
		if !errors.Is(err, proto.ErrNotConfirmed) && (err != nil || !record.NotConfirmed()) {
			break
		}
		id = proto.DerivedTraceID("again " + string(id))
	}
	if err == nil && record.ExpiredInQueue() {
		err = api.Unavailable(1, *record.Result.ErrorMessage)
	}
	return record, err
}

func (a *Agent) executeOnce(
	ctx context.Context, id proto.TraceID, req *api.ExecuteRequest,
) (record *proto.Record, err error) {
	defer func() {
		if err != nil && over(ctx) {
			err = errors.Join(err, toolCalls{a.s}.cancelCall(ctx, a.org(), id))
		}
	}()
	submitted := false
	if a.resumed {
		_, err := a.s.Jobs.Summary(ctx, a.org(), id)
		if submitted = err == nil; err != nil && !errors.Is(err, proto.ErrNotFound) {
			return nil, err
		}
	}
	if !submitted {
		tries := backoff.WithContext(backoff.NewExponentialBackOff(backoff.WithMaxElapsedTime(maxBackgroundTries)), ctx)
		if err := backoff.Retry(func() error { return a.submitInBackground(ctx, id, req) }, tries); err != nil {
			return nil, err
		}
	}
	return a.s.Jobs.Wait(ctx, a.org(), id)
}

// submitInBackground submits an execution. Its error is permanent unless another execution has the
// thread or the queue has no room.
func (a *Agent) submitInBackground(ctx context.Context, id proto.TraceID, req *api.ExecuteRequest) error {
	key, plan, err := a.validKey(ctx)
	if err != nil {
		return permanentIfFinal(err)
	}
	job, err := a.s.Admission.Job(ctx, req, proto.Caller{Key: key, Entitlement: plan, RequestID: a.i.RequestID},
		proto.ModeAsync, id, 0)
	if err != nil {
		return permanentIfFinal(err)
	}
	job.ThreadID, job.Container = ownThread(req.ThreadID), true
	if missing := a.s.Capabilities.Missing(&job.Meta); missing != nil && !missing.Expected {
		return backoff.Permanent(api.NoWorker(missing)) // the model reads it, and the run goes on
	}
	job.WebhookURL = "" // the run has one
	_, err = a.s.Admission.Submit(ctx, &proto.Submission{Job: job})
	if errors.Is(err, proto.ErrNotConfirmed) {
		return backoff.Permanent(err) // the next submission has another id
	}
	return permanentIfFinal(err) // submitting it again is the same submission
}

// permanentIfFinal marks an error after which a submission is not repeated.
func permanentIfFinal(err error) error {
	if proto.Final(err) {
		return backoff.Permanent(err)
	}
	return err
}
