package agents

import (
	"context"
	"errors"
	"time"

	"github.com/cenkalti/backoff/v4"

	"github.com/bullpen-run/bullpen/gateway/web"
	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/proto/api"
)

// maxTimeout is the longest run time of an agent's tool call, in seconds.
const maxTimeout = 300

// Execute runs a program as execution id and returns its record. If ctx is done first, the
// execution is cancelled. In the background this happens only if the run has ended; otherwise the
// execution continues. A timeout of 0 is the longest that the plan allows, up to maxTimeout.
func (a *Agent) Execute(
	ctx context.Context, id proto.TraceID, req *api.ExecuteRequest,
) (record *proto.Record, err error) {
	ctx, span := a.m.StartBackgroundSpan(ctx, id, "agent call", a.i.Key.Org, a.i.Key.ID)
	defer func() { web.EndBackgroundSpan(span, err) }()
	if req.Timeout == 0 {
		req.Timeout = a.timeout()
	}
	execute := a.executeNow
	if a.r == nil {
		execute = a.executeInBackground
	}
	if record, err = execute(ctx, id, req); err != nil {
		return nil, a.public(err)
	}
	if err := a.m.ReserveOutput(a.i, id, record.Result); err != nil {
		return nil, a.public(err)
	}
	return record, nil
}

func (a *Agent) executeNow(ctx context.Context, id proto.TraceID, req *api.ExecuteRequest) (*proto.Record, error) {
	m := a.m
	if m.IsDraining() {
		return nil, web.ErrDraining
	}
	// The wait for a slot is not part of the call's timeout.
	job, err := m.Job(ctx, req, web.CallerOf(a.r), proto.ModeInline, id, m.QueueWait)
	if err != nil {
		return nil, err
	}
	job.ThreadID, job.Container = ownThread(req.ThreadID), true
	run, err := m.Start(ctx, a.i, &proto.Submission{Job: job}, m.QueueWait)
	if err != nil {
		return nil, err
	}
	defer run.Close()
	record, err := run.Wait(ctx)
	if errors.Is(err, context.Canceled) {
		err = errors.Join(err, m.Cancel(ctx, a.org(), run.ID))
	}
	return record, err
}

// maxBackgroundTries is how long a run in the background tries to submit an execution.
const maxBackgroundTries = 10 * time.Minute

// maxUnconfirmed is how often an execution is resubmitted after the queue did not confirm it.
const maxUnconfirmed = 3

// executeInBackground runs a program as an execution that is queued for as long as an asynchronous
// one. If the queue does not confirm it, nothing of it runs, and the next one's id is derived from
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
			err = errors.Join(err, a.m.Cancel(ctx, a.org(), id))
		}
	}()
	submitted := false
	if a.resumed {
		_, err := a.m.Jobs.Summary(ctx, a.org(), id)
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
	return a.m.Jobs.Wait(ctx, a.org(), id)
}

// submitInBackground submits an execution. Its error is permanent unless another execution has the
// thread or the queue has no room.
func (a *Agent) submitInBackground(ctx context.Context, id proto.TraceID, req *api.ExecuteRequest) error {
	key, plan, err := a.validKey(ctx)
	if err != nil {
		return permanentIfFinal(err)
	}
	job, err := a.m.Admission.Job(ctx, req, proto.Caller{Key: key, Entitlement: plan, RequestID: a.i.RequestID},
		proto.ModeAsync, id, 0)
	if err != nil {
		return permanentIfFinal(err)
	}
	job.ThreadID, job.Container = ownThread(req.ThreadID), true
	if missing := a.m.Capabilities.Missing(&job.Meta); missing != nil && !missing.Expected {
		return backoff.Permanent(api.NoWorker(missing)) // the model reads it, and the run goes on
	}
	job.WebhookURL = "" // the run has one
	_, err = a.m.Admission.Submit(ctx, &proto.Submission{Job: job})
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
