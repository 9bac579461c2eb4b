package gateway

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strings"
	"time"

	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/codes"
	"go.opentelemetry.io/otel/propagation"
	"go.opentelemetry.io/otel/trace"

	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/proto/api"
)

const executeRoute = "POST /v1/sandbox/execute"

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
	ctx, span := s.Tracer.Start(proto.ContextWithTraceID(r.Context(), id), executeRoute, spanOptions(r)...)
	defer func() {
		if err != nil {
			span.SetStatus(codes.Error, err.Error())
		}
		span.End()
	}()

	job, hash, err := s.readJob(w, r, id)
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
	x, err := s.submit(ctx, &proto.Submission{Job: job, IdempotencyKey: idempotencyKey, BodyHash: hash})
	s.shrink(infoOf(ctx), requestCost) // the program is stored, and the wait for its end needs little
	if err != nil {
		return err
	}
	if x.submission != nil {
		x.watch = watch
	}
	infoOf(ctx).trace = x.id
	span.SetAttributes(attribute.String("bullpen.trace_id", string(x.id)))
	w.Header().Set("X-Trace-Id", string(x.id))
	switch job.Mode {
	case proto.ModeAsync:
		w.Header().Set("Location", "/v1/executions/"+string(x.id))
		w.Header().Set("Preference-Applied", preferAsync)
		return writeValue(w, http.StatusAccepted, api.Accepted{TraceID: x.id, Status: "running"})
	case proto.ModeStreaming:
		err = s.answerStream(ctx, w, x)
	default:
		err = s.answerInline(ctx, w, x)
	}
	switch {
	case err == nil || errors.Is(err, errExpired):
		return err
	case errors.Is(err, errDeadline):
		return api.Errorf(api.CodeGatewayTimeout, "the execution did not end in time for an answer; it is recorded: %s", lookUp(x.id))
	default:
		return afterAcceptance(x.id, err)
	}
}

// spanOptions starts a new trace for an execution, because the ids of trace and execution are
// derived from each other. The client's trace is linked.
func spanOptions(r *http.Request) []trace.SpanStartOption {
	options := []trace.SpanStartOption{trace.WithNewRoot(), trace.WithSpanKind(trace.SpanKindServer)}
	remote := propagation.TraceContext{}.Extract(r.Context(), propagation.HeaderCarrier(r.Header))
	if client := trace.SpanContextFromContext(remote); client.IsValid() {
		options = append(options, trace.WithLinks(trace.Link{SpanContext: client}))
	}
	return options
}

// readJob decodes the request, checks it against the plan, and returns its job and its hash.
func (s *Server) readJob(w http.ResponseWriter, r *http.Request, id proto.TraceID) (*proto.Job, string, error) {
	req, err := decodeBody[api.ExecuteRequest](s, w, r)
	if err != nil {
		return nil, "", err
	}
	now := time.Now() // after the body was read: a slow upload is not time in the queue
	i := infoOf(r.Context())
	mode := modeOf(r.Header)
	if len(req.SubPaths) > 0 {
		return nil, "", notImplemented("sub_paths is", "leave it out")
	}
	if err := checkPlan(i.plan, mode, req.Timeout, s.UpgradeURL); err != nil {
		return nil, "", err
	}
	profile, err := s.profileOf(r.Context(), &i.key)
	if err != nil {
		return nil, "", err
	}
	sandbox, err := s.resolve(r.Context(), &profile, req.Language)
	if err != nil {
		return nil, "", err
	}
	env, err := proto.MergeEnv(profile.Env, req.Env)
	if err != nil {
		return nil, "", err
	}
	hash, err := req.Hash()
	if err != nil {
		return nil, "", err
	}
	webhookURL, err := s.webhookURL(r.Context(), req, mode, &i.key)
	if err != nil {
		return nil, "", err
	}
	wait := s.QueueWait
	if mode == proto.ModeAsync {
		wait = s.QueueExpiry
	}
	job := &proto.Job{
		Meta: proto.Meta{
			TraceID: id, Org: i.key.Org, Key: i.key.ID, Mode: mode, Profile: profile.Name,
			Image: sandbox.Image, Network: sandbox.Network.Policy, Disk: sandbox.OnDisk(),
			WebhookURL: webhookURL, RequestID: i.requestID,
			ClientID: clientText(r.Header, "X-Client-Id"), UserAgent: clientText(r.Header, "User-Agent"),
			CreatedAt: now.UTC(), QueueDeadline: now.Add(wait).UTC(),
			Concurrent: i.plan.Concurrent, MaxQueued: i.plan.MaxQueued, Weight: i.plan.Weight, KeyConcurrent: i.key.Concurrent,
		},
		Env: env, Sandbox: sandbox,
	}
	req.FillJob(job)
	return job, hash, nil
}

// clientText returns a header in which clients describe themselves, cut to size and in valid UTF-8.
func clientText(h http.Header, name string) string {
	text := h.Get(name)
	return strings.ToValidUTF8(text[:min(len(text), maxClientText)], "")
}

// checkPlan refuses a mode or timeout that the plan does not include. Nothing is reduced silently.
func checkPlan(plan proto.Plan, mode proto.Mode, timeout int, upgradeURL string) error {
	kind, included := "", true
	switch mode {
	case proto.ModeStreaming:
		kind, included = "Streaming", plan.Streaming
	case proto.ModeAsync:
		kind, included = "Async", plan.Async
	}
	upgrade := ""
	if upgradeURL != "" {
		upgrade = ". Upgrade at " + upgradeURL
	}
	if !included {
		return api.Errorf(api.CodeRateLimited, "%s execution requires %s plan%s", kind, plansWith(mode), upgrade)
	}
	if timeout <= plan.MaxTimeout {
		return nil
	}
	message := fmt.Sprintf("timeout is above the maximum of %d seconds of the %s plan", plan.MaxTimeout, plan.Title)
	next, upgradable := proto.PlanByName(plan.Next)
	if !upgradable {
		return api.Errorf(api.CodeRateLimited, "%s; ask for less", message)
	}
	return api.Errorf(api.CodeRateLimited, "%s; upgrade to %s for up to %d seconds, or ask for less%s", message, next.Title, next.MaxTimeout, upgrade)
}

// plansWith lists the plans that include a mode, such as "a Pro or Enterprise".
func plansWith(mode proto.Mode) string {
	var titles []string
	for _, p := range proto.Plans() {
		if (mode == proto.ModeStreaming && p.Streaming) || (mode == proto.ModeAsync && p.Async) {
			titles = append(titles, p.Title)
		}
	}
	return "a " + strings.Join(titles, " or ")
}

// submit submits a job, or finds the execution of an earlier request with the same idempotency key.
func (s *Server) submit(ctx context.Context, sub *proto.Submission) (*admitted, error) {
	job := sub.Job
	x := &admitted{deadline: job.CreatedAt.Add(time.Duration(job.Timeout)*time.Second + answerGrace)}
	x.queueDeadline = job.QueueDeadline
	if x.deadline.Before(x.queueDeadline) {
		x.queueDeadline = x.deadline
	}
	sub.WaitUntil = x.deadline
	var err error
	if x.id, err = s.Submissions.Submit(ctx, sub); err != nil {
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
		record, err = s.Submissions.Withdraw(ctx, x.submission, s.withdrawReason())
		if err == nil && record.Status.Terminal() {
			return record, nil
		}
		if err != nil { // it may still start, so wait for its end
			s.Log.WarnContext(ctx, "withdraw failed", "trace_id", x.id, "error", err)
		}
	}
	return s.waitUntil(ctx, x.id, x.watch, x.deadline)
}

func (s *Server) withdrawReason() string {
	if s.leaving.Err() != nil {
		return "The server was shut down before a worker was free, so the execution was withdrawn."
	}
	return fmt.Sprintf("No worker was free within %s, so the execution was withdrawn.", s.QueueWait)
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
	if x.submission == nil {
		return errExpired
	}
	if err := s.Submissions.Release(ctx, x.submission); err != nil {
		return fmt.Errorf("%w (and its idempotency key stays bound: %w)", errExpired, err)
	}
	return errExpired
}
