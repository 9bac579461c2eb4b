package gateway

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"slices"
	"strings"
	"time"

	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/proto/api"
)

const executeRoute = "POST /v1/sandbox/execute"

// maxDelay is how far ahead an execution may be accepted. Its sandbox, its limits and its variables
// are those of the moment of the acceptance. The server's retention is another limit, since a large
// program is stored no longer than that.
const maxDelay = 30 * 24 * time.Hour

// maxClientText is the number of bytes that are kept of headers in which clients describe
// themselves.
const maxClientText = 256

// admitted is an accepted execution that the request waits for.
type admitted struct {
	id proto.TraceID
	// submission is nil unless this request submitted the execution. Only such an execution is
	// withdrawn when the request ends.
	submission    *proto.Submission
	queueDeadline time.Time // when the wait for a worker ends
	deadline      time.Time // when the answer is due
	// watch was opened before the submission. It is nil for an execution that this request did not
	// submit or does not wait for.
	watch Watch
}

func (s *Server) execute(w http.ResponseWriter, r *http.Request) (err error) {
	id := proto.NewTraceID()
	ctx, span := s.startRequest(r, id, executeRoute)
	defer func() { endRequest(ctx, span, infoOf(ctx).rec.status, err) }()

	wait, err := waitOf(r.Header)
	if err != nil {
		return err
	}
	job, hash, err := s.readJob(w, r, id, wait)
	if err != nil {
		return err
	}
	idempotencyKey, err := idempotencyKeyOf(r.Header)
	if err != nil {
		return err
	}
	var watch Watch
	if job.Mode == proto.ModeInline {
		if watch, err = s.Jobs.Watch(id); err != nil {
			return err
		}
		defer watch.Close()
	}
	x, err := s.submit(ctx, &proto.Submission{Job: job, IdempotencyKey: idempotencyKey, BodyHash: hash}, wait)
	s.shrink(infoOf(ctx), requestCost) // the program is stored, and the wait for its end needs little
	if err != nil {
		return err
	}
	if x.submission != nil {
		x.watch = watch
	}
	infoOf(ctx).trace = x.id
	w.Header().Set("X-Trace-Id", string(x.id))
	if wait > 0 {
		w.Header().Set("Preference-Applied", fmt.Sprintf("%s=%d", preferWait, wait/time.Second))
	}
	switch job.Mode {
	case proto.ModeAsync:
		w.Header().Set("Location", "/v1/executions/"+string(x.id))
		w.Header().Set("Preference-Applied", preferAsync)
		status := "running"
		if !job.RunAt.IsZero() {
			status = "queued"
		}
		return writeValue(w, http.StatusAccepted, api.Accepted{TraceID: x.id, Status: status})
	case proto.ModeStreaming:
		err = s.answerStream(ctx, w, x, preferred(r.Header, typeNDJSON, typeSSE) == typeSSE)
	default:
		err = s.answerInline(ctx, w, x)
	}
	if err != nil {
		return waitError(x.id, err)
	}
	return nil
}

// waitError returns the error to answer with when the wait for an accepted execution failed.
func waitError(id proto.TraceID, err error) error {
	switch {
	case errors.Is(err, errExpired):
		return err
	case errors.Is(err, errDeadline):
		return api.Errorf(api.CodeGatewayTimeout, "the execution did not end in time for an answer; it is recorded: %s", statusHint(id))
	default:
		return afterAcceptance(id, err)
	}
}

// readJob decodes the request, checks it against the plan, and returns its job and its hash. wait
// is the result of [waitOf].
func (s *Server) readJob(w http.ResponseWriter, r *http.Request, id proto.TraceID, wait time.Duration) (*proto.Job, string, error) {
	req, err := decodeBody[api.ExecuteRequest](s, w, r)
	if err != nil {
		return nil, "", err
	}
	job, err := s.newJob(r.Context(), req, clientOf(r), modeOf(r.Header), id, wait)
	if err != nil {
		return nil, "", err
	}
	hash, err := req.Hash()
	return job, hash, err
}

// client describes who asks for an execution.
type client struct {
	key                      *proto.Key
	plan                     entitlement
	requestID, id, userAgent string
}

// clientOf describes the client of a request.
func clientOf(r *http.Request) client {
	i := infoOf(r.Context())
	return client{&i.key, i.plan, i.requestID, clientText(r.Header, "X-Client-Id"), clientText(r.Header, "User-Agent")}
}

// newJob returns the job of a request as execution id, which is empty for a check alone. It checks
// the request against the plan. wait is the result of [waitOf].
func (s *Server) newJob(ctx context.Context, req *api.ExecuteRequest, c client, mode proto.Mode, id proto.TraceID, wait time.Duration) (*proto.Job, error) {
	now := time.Now() // after the body was read: a slow upload is not time in the queue
	if err := s.checkPlan(ctx, &c.plan, mode, req.Timeout); err != nil {
		return nil, err
	}
	runAt, err := s.runAt(req, mode, now)
	if err != nil {
		return nil, err
	}
	profile, err := s.profileOf(ctx, c.key)
	if err != nil {
		return nil, err
	}
	sandbox, err := s.resolve(ctx, &profile, req.Language)
	if err != nil {
		return nil, err
	}
	env, err := proto.MergeEnv(profile.Env, c.key.Env, req.Env)
	if err != nil {
		return nil, err
	}
	bound, err := proto.MergeSecrets(profile.Secrets, c.key.Secrets)
	if err != nil {
		return nil, err
	}
	mounts, err := s.mountsOf(ctx, c.key, req.SubPaths)
	if err != nil {
		return nil, err
	}
	webhookURL, err := s.webhookURL(ctx, req, mode, c.key)
	if err != nil {
		return nil, err
	}
	switch {
	case mode == proto.ModeAsync:
		wait = s.QueueExpiry
	case wait == 0: // a program that starts late has its timeout before the answer is due
		wait = min(s.QueueWait, max(time.Duration(req.Timeout)*time.Second, minQueueWait))
	}
	job := &proto.Job{
		Meta: proto.Meta{
			TraceID: id, Org: c.key.Org, Key: c.key.ID, Mode: mode, Profile: profile.Name,
			Image: sandbox.Image, Network: sandbox.Network.Policy, Disk: sandbox.OnDisk(), Architecture: sandbox.Architecture,
			WebhookURL: webhookURL, RequestID: c.requestID, ClientID: c.id, UserAgent: c.userAgent,
			CreatedAt: now.UTC(), RunAt: runAt,
			Concurrent: proto.LimitOf(c.plan.Concurrent), MaxQueued: proto.LimitOf(c.plan.MaxQueued), Weight: c.plan.Weight, KeyConcurrent: c.plan.keyConcurrent,
		},
		Env: env, Sandbox: sandbox, Bound: bound,
	}
	job.SetMounts(mounts)
	if err := s.sealSecrets(ctx, job, req.Env); err != nil {
		return nil, err
	}
	if id != "" { // the store is not asked for each item of a batch at once
		if err := s.checkSubPaths(ctx, c.key.Org, mounts, req.SubPaths); err != nil {
			return nil, err
		}
	}
	job.QueueDeadline = job.QueuedAt().Add(wait)
	req.FillJob(job)
	return job, nil
}

// runAt returns when the execution of a request is queued, zero for at once. A repeated request may
// come later than that.
func (s *Server) runAt(req *api.ExecuteRequest, mode proto.Mode, now time.Time) (at time.Time, err error) {
	field := "run_at"
	switch {
	case req.RunAt != nil:
		at = req.RunAt.UTC()
	case req.Delay > 0:
		field, at = "delay", now.Add(time.Duration(req.Delay)).UTC()
	default:
		return at, nil
	}
	switch most := min(maxDelay, s.Retention); {
	case mode != proto.ModeAsync:
		return at, proto.FieldErrorf(field, "must be used with an async execution: send the header Prefer: respond-async")
	case at.Sub(now) > most:
		return at, proto.FieldErrorf(field, "must be at most %s ahead", most)
	case !at.After(now):
		return time.Time{}, nil
	default:
		return at, nil
	}
}

// clientText returns a header in which clients describe themselves, cut to size and in valid UTF-8.
func clientText(h http.Header, name string) string {
	text := h.Get(name)
	return strings.ToValidUTF8(text[:min(len(text), maxClientText)], "")
}

// submit submits a job, or finds the execution of an earlier request with the same idempotency key.
// wait is the result of [waitOf].
func (s *Server) submit(ctx context.Context, sub *proto.Submission, wait time.Duration) (*admitted, error) {
	job := sub.Job
	grace := max(answerGrace, wait+startGrace)
	x := &admitted{queueDeadline: job.QueueDeadline, deadline: job.CreatedAt.Add(time.Duration(job.Timeout)*time.Second + grace)}
	sub.WaitUntil = x.deadline
	var err error
	if x.id, err = s.submitNew(ctx, sub); err != nil {
		if errors.Is(err, proto.ErrSubmissionPending) {
			return nil, api.Errorf(api.CodeGatewayTimeout, "the first request with this Idempotency-Key is still being accepted; send it again under that key")
		}
		return nil, s.submitError(ctx, job.TraceID, err)
	}
	if x.id == job.TraceID {
		x.submission = sub
	}
	return x, nil
}

// submitError returns the error to answer with when the submission of execution id failed.
func (s *Server) submitError(ctx context.Context, id proto.TraceID, err error) error {
	switch {
	case errors.Is(err, proto.ErrMayRun):
		i := infoOf(ctx)
		i.trace = id
		i.rec.Header().Set("X-Trace-Id", string(id))
		return afterAcceptance(id, err)
	case errors.Is(err, proto.ErrNotConfirmed):
		return fmt.Errorf("%w: %w", api.Unavailable(2, "the queue did not confirm the execution in time; it was withdrawn; send it again"), err)
	case errors.Is(err, proto.ErrKeyReused):
		return api.Errorf(api.CodeIdempotency, "this Idempotency-Key was used with another request; use a new key for a new request")
	default:
		return err
	}
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
	return writeOutput(w, len(result.Stdout)+len(result.Stderr), func(w io.Writer) error { return proto.WriteResult(w, result) })
}

// await waits for the end of an execution. An execution of this request is withdrawn if it is still
// queued at its queue deadline.
func (s *Server) await(ctx context.Context, x *admitted) (*proto.Record, error) {
	if x.submission != nil {
		record, err := s.waitUntil(ctx, x.id, x.watch, x.queueDeadline)
		switch {
		case err == nil:
			return record, nil
		case ctx.Err() != nil:
			return nil, s.clientGone(ctx, x)
		case !errors.Is(err, errDeadline):
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
	return s.waitUntil(ctx, x.id, x.watch, x.deadline)
}

func (s *Server) withdrawReason(x *admitted) string {
	if s.leaving.Err() != nil {
		return "The server was shut down before a worker was free, so the execution was withdrawn."
	}
	return fmt.Sprintf("No slot was free for it within %s, so the execution was withdrawn.", x.queueDeadline.Sub(x.submission.Job.CreatedAt))
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
func (s *Server) waitUntil(ctx context.Context, id proto.TraceID, watch Watch, deadline time.Time) (record *proto.Record, err error) {
	limited, cancel := s.until(ctx, deadline)
	defer cancel()
	if watch != nil {
		record, err = watch.Wait(limited)
	} else {
		record, err = s.Jobs.Wait(limited, id)
	}
	switch {
	case err == nil:
		return record, nil
	case ctx.Err() != nil:
		return nil, ctx.Err()
	case limited.Err() != nil:
		return nil, errDeadline
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
	org := infoOf(ctx).key.Org
	worker := "worker"
	if x.submission != nil && x.submission.Job.Architecture != "" {
		worker = x.submission.Job.Architecture + " worker"
	}
	message := "no " + worker + " was free in time; the execution was withdrawn and will not run; send it again"
	if slices.Contains(stats.AtShare, org) {
		message = "other organisations submit executions too, and this one has all slots that it may have meanwhile; " +
			"the execution was withdrawn and will not run; send it again when another one has ended"
	}
	return fmt.Errorf("%w: %w", api.Unavailable(stats.RetryAfter(org), message), errExpired)
}
