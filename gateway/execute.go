package gateway

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"slices"
	"time"

	"github.com/bullpen-run/bullpen/gateway/web"
	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/proto/api"
)

const executeRoute = "POST /v1/sandbox/execute"

// admitted is an accepted execution that the request waits for.
type admitted struct {
	id      proto.TraceID
	request *web.Info // that waits
	// submission is nil unless this request submitted the execution. Only such an execution is
	// withdrawn when the request ends.
	submission    *proto.Submission
	queueDeadline time.Time // when the wait for a worker ends
	deadline      time.Time // when the answer is due
	// watch was opened before the submission. It is nil for an execution that this request did not
	// submit or does not wait for.
	watch Watch
}

func (s *Server) execute(w http.ResponseWriter, r *web.Request) (err error) {
	id := proto.NewTraceID()
	ctx, span := s.StartRequest(r, id, executeRoute)
	defer func() { web.EndRequest(ctx, r.Info, span, r.Status(), err) }()

	wait, err := waitOf(r.Header)
	if err != nil {
		return err
	}
	job, hash, err := s.readJob(w, r, id, wait)
	if err != nil {
		return err
	}
	idempotencyKey, err := web.IdempotencyKeyOf(r.Header)
	if err != nil {
		return err
	}
	var watch Watch
	if job.Mode == proto.ModeInline {
		if watch, err = s.Jobs.Watch(job.Org, id); err != nil {
			return err
		}
		defer watch.Close()
	}
	x, err := s.submit(ctx, r.Info, &proto.Submission{Job: job, IdempotencyKey: idempotencyKey, BodyHash: hash}, wait)
	s.Shrink(r.Info, web.RequestCost) // the program is stored, and the wait for its end needs little
	if err != nil {
		return err
	}
	if x.submission != nil {
		x.watch = watch
	}
	r.Trace = x.id
	w.Header().Set("X-Trace-Id", string(x.id))
	if wait > 0 {
		w.Header().Set("Preference-Applied", fmt.Sprintf("%s=%d", web.PreferWait, wait/time.Second))
	}
	switch job.Mode {
	case proto.ModeAsync:
		w.Header().Set("Location", "/v1/executions/"+string(x.id))
		w.Header().Set("Preference-Applied", web.PreferAsync)
		status := "running"
		if !job.RunAt.IsZero() {
			status = "queued"
		}
		return web.WriteValue(w, http.StatusAccepted, api.Accepted{TraceID: x.id, Status: status})
	case proto.ModeStreaming:
		err = s.answerStream(ctx, w, x, web.Preferred(r.Header, web.TypeNDJSON, web.TypeSSE) == web.TypeSSE)
	default:
		err = s.answerInline(ctx, w, x)
	}
	if err != nil {
		return waitError(x.id, err)
	}
	return nil
}

// errExpired is wrapped by [Server.noWorkerFree].
var errExpired = errors.New("expired in the queue")

// waitError returns the error to answer with when the wait for an accepted execution failed.
func waitError(id proto.TraceID, err error) error {
	switch {
	case errors.Is(err, errExpired):
		return err
	case errors.Is(err, web.ErrDeadline):
		return api.Errorf(api.CodeGatewayTimeout, "the execution did not end in time for an answer; it is recorded: %s",
			web.StatusHint(id))
	default:
		return web.AfterAcceptance(id, err)
	}
}

// readJob decodes the request, checks it against the plan, and returns its job and its hash. wait
// is the result of [waitOf].
func (s *Server) readJob(
	w http.ResponseWriter, r *web.Request, id proto.TraceID, wait time.Duration,
) (*proto.Job, string, error) {
	req, err := web.DecodeBody[api.ExecuteRequest](&s.Core, w, r)
	if err != nil {
		return nil, "", err
	}
	job, err := s.Admission.Job(r.Context(), req, web.CallerOf(r), modeOf(r.Header), id, s.queueWait(wait, req.Timeout))
	if err != nil {
		return nil, "", err
	}
	hash, err := req.Hash()
	return job, hash, err
}

// queueWait returns how long an inline or streaming execution waits for a worker. wait is the result of
// [waitOf]. A program that starts late has its timeout before the answer is due.
func (s *Server) queueWait(wait time.Duration, timeout int) time.Duration {
	return cmp.Or(wait, min(s.QueueWait, max(time.Duration(timeout)*time.Second, minQueueWait)))
}

// submit submits a job, or finds the execution of an earlier request with the same idempotency key.
// wait is the result of [waitOf].
func (s *Server) submit(
	ctx context.Context, i *web.Info, sub *proto.Submission, wait time.Duration,
) (*admitted, error) {
	job := sub.Job
	grace := max(answerGrace, wait+startGrace)
	x := &admitted{
		request: i, queueDeadline: job.QueueDeadline,
		deadline: job.CreatedAt.Add(time.Duration(job.Timeout)*time.Second + grace),
	}
	sub.WaitUntil = x.deadline
	var err error
	if x.id, err = s.Admission.Submit(ctx, sub); err != nil {
		if errors.Is(err, proto.ErrSubmissionPending) {
			return nil, api.Errorf(api.CodeGatewayTimeout,
				"the first request with this Idempotency-Key is still being accepted; send it again under that key")
		}
		return nil, web.SubmitError(i, job.TraceID, err)
	}
	if x.id == job.TraceID {
		x.submission = sub
	}
	return x, nil
}

func (s *Server) answerInline(ctx context.Context, w http.ResponseWriter, x *admitted) error {
	record, err := s.await(ctx, x)
	if err != nil {
		return err
	}
	if record.ExpiredInQueue() {
		return s.expiredInQueue(ctx, x)
	}
	result := record.Result
	return web.WriteOutput(w, len(result.Stdout)+len(result.Stderr), func(w io.Writer) error {
		return proto.WriteResult(w, result)
	})
}

// await waits for the end of an execution. An execution of this request is withdrawn if it is still
// queued at its queue deadline.
func (s *Server) await(ctx context.Context, x *admitted) (*proto.Record, error) {
	if x.submission != nil {
		record, err := s.waitUntil(ctx, x.request.Key.Org, x.id, x.watch, x.queueDeadline)
		switch {
		case err == nil:
			return record, nil
		case ctx.Err() != nil:
			return nil, s.clientGone(ctx, x)
		case !errors.Is(err, web.ErrDeadline):
			return nil, err
		}
		record, err = s.Submissions.Withdraw(ctx, x.submission, s.withdrawReason(x))
		if err == nil && record.Status.Terminal() {
			return record, nil
		}
		if err != nil { // it may still start, so wait for its end
			s.Log.WarnContext(ctx, "withdraw failed", "trace_id", x.id, "error", err)
		}
	}
	return s.waitUntil(ctx, x.request.Key.Org, x.id, x.watch, x.deadline)
}

func (s *Server) withdrawReason(x *admitted) string {
	if s.HasLeft() {
		return "The server was shut down before a worker was free, so the execution was withdrawn."
	}
	return fmt.Sprintf("No slot was free for it within %s, so the execution was withdrawn.",
		x.queueDeadline.Sub(x.submission.Job.CreatedAt))
}

// clientGone withdraws an execution of this request that has not started.
func (s *Server) clientGone(ctx context.Context, x *admitted) error {
	if x.submission == nil {
		return ctx.Err()
	}
	_, err := s.Submissions.Withdraw(ctx, x.submission, "The client went away before a worker was free.")
	return errors.Join(ctx.Err(), err)
}

// waitUntil waits for the end of an execution, with watch if it is not nil. It returns errDeadline
// at the deadline, and when the server shuts down.
func (s *Server) waitUntil(
	ctx context.Context, org string, id proto.TraceID, watch Watch, deadline time.Time,
) (record *proto.Record, err error) {
	limited, cancel := s.Until(ctx, deadline)
	defer cancel()
	if watch != nil {
		record, err = watch.Wait(limited)
	} else {
		record, err = s.Jobs.Wait(limited, org, id)
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
func (s *Server) expiredInQueue(ctx context.Context, x *admitted) error {
	err := s.noWorkerFree(ctx, x)
	if x.submission == nil {
		return err
	}
	if errRelease := s.Submissions.Release(ctx, x.submission); errRelease != nil {
		return fmt.Errorf("%w (and its idempotency key stays bound: %w)", err, errRelease)
	}
	return err
}

// noWorkerFree returns the error for a client whose execution was withdrawn. It matches errExpired.
func (s *Server) noWorkerFree(ctx context.Context, x *admitted) error {
	ctx, cancel := context.WithTimeout(ctx, readyTimeout)
	defer cancel()
	stats, err := s.Jobs.Stats(ctx)
	if err != nil {
		s.Log.WarnContext(ctx, "statistics of the queue missing, Retry-After is a guess", "error", err)
	}
	org := x.request.Key.Org
	worker := "worker"
	if x.submission != nil && x.submission.Job.Architecture != "" {
		worker = x.submission.Job.Architecture + " worker"
	}
	message := "no " + worker + " was free in time; the execution was withdrawn and will not run; send it again"
	if x.submission != nil {
		if missing := s.Capabilities.Missing(&x.submission.Job.Meta); missing != nil {
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
