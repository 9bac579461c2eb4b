// Package admission decides whether a job is accepted, and builds the job: from an API key and a
// request, or from the definition of a schedule, a batch or a pipeline. HTTP, MCP, agents and the
// scheduler's engines call it.
//
// A job is a snapshot, taken at admission, of the plan narrowed by the key, the sandbox profile,
// the variables, the secrets, the mounts and the webhook. Admission rejects a request with a
// [*proto.Rejection], a [*proto.FieldError] or an error whose text is for clients, and leaves the
// wording to the surface. [proto.Final] reports whether a rejection is permanent. Package submit
// stores the job that admission builds.
package admission

import (
	"context"
	"log/slog"
	"strings"
	"time"

	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/codes"
	semconv "go.opentelemetry.io/otel/semconv/v1.43.0"
	"go.opentelemetry.io/otel/trace"

	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/proto/api"
)

// maxDelay is how far ahead an execution may be accepted. Its sandbox, limits and variables are
// those at acceptance. The server's retention is another limit, since a large program is stored no
// longer than that.
const maxDelay = 30 * 24 * time.Hour

// Submitter stores jobs.
type Submitter interface {
	// Submit accepts a job and returns the id of its execution. If an earlier request had the same
	// idempotency key, Submit returns the id of the earlier execution.
	Submit(ctx context.Context, sub *proto.Submission) (proto.TraceID, error)
	// Accepted returns the execution accepted under an API key's idempotency key, or
	// [proto.ErrNotFound].
	Accepted(ctx context.Context, org, key, idempotencyKey string) (proto.TraceID, error)
	// Requeue submits the job that build makes from a dead letter's job.
	Requeue(ctx context.Context, letter string, id proto.TraceID, build func(*proto.Job) (*proto.Job, error)) (
		*proto.DeadLetter, error)
}

// Keys finds API keys.
type Keys interface {
	// Key returns the key with an id, even if it is revoked.
	Key(id string) (key *proto.Key, ok bool)
}

// Members finds the people who may sign in.
type Members interface {
	// Member returns the member of an id.
	Member(id string) (m proto.Member, ok bool)
}

// Admission admits jobs. Its fields are set before its first use. All but QuotaReached and UpgradeURL
// are required. It is safe for concurrent use.
type Admission struct {
	Submitter   Submitter
	Keys        Keys
	Members     Members
	Orgs        Orgs
	Plans       Plans
	Usage       Usage
	Profiles    Profiles
	Images      Images // of profiles
	Secrets     Secrets
	Connections Connections
	Buckets     Buckets // of connections
	Threads     Threads // of volumes
	Files       Files   // of volumes
	Transfers   Transfers
	Webhooks    Webhooks
	URLs        URLs // of webhooks

	Default     proto.Profile // the sandbox of keys that are bound to no profile
	QueueExpiry time.Duration // the longest wait of async executions for a worker
	Retention   time.Duration // of records
	UpgradeURL  string        // where users change their plan, for messages; empty for none
	// QuotaReached, if not nil, is called once per process for each limit that an organisation
	// reaches in a month.
	QuotaReached func(proto.Crossing)

	Log    *slog.Logger
	Tracer trace.Tracer

	crossings crossings
}

// Job returns the job of a request as execution id, which is empty for a mere check. wait is how
// long an inline or streaming execution waits for a worker.
func (a *Admission) Job(
	ctx context.Context, req *api.ExecuteRequest, c proto.Caller, mode proto.Mode, id proto.TraceID, wait time.Duration,
) (*proto.Job, error) {
	now := time.Now() // after the body was read: a slow upload is not time in the queue
	if err := checkKillGrace(req.KillGrace, mode); err != nil {
		return nil, err
	}
	if err := a.checkPlan(ctx, &c.Entitlement, mode, req.Timeout, req.KillGrace); err != nil {
		return nil, err
	}
	runAt, err := a.runAt(req, mode, now)
	if err != nil {
		return nil, err
	}
	profile, err := a.ProfileFor(ctx, c.Key, req.Profile)
	if err != nil {
		return nil, err
	}
	if err := a.chooseImage(ctx, c.Key, &profile, req.Image); err != nil {
		return nil, err
	}
	sandbox, err := a.Sandbox(ctx, &profile, req.Language)
	if err != nil {
		return nil, err
	}
	env, err := proto.MergeEnv(profile.Env, c.Key.Env, req.Env)
	if err != nil {
		return nil, err
	}
	bound, err := proto.MergeSecrets(profile.Secrets, c.Key.Secrets)
	if err != nil {
		return nil, err
	}
	mounts, err := a.mountsOf(ctx, c.Key, req.SubPaths)
	if err != nil {
		return nil, err
	}
	webhookURL, err := a.WebhookURL(ctx, req.WebhookURL, mode, c.Key)
	if err != nil {
		return nil, err
	}
	if mode == proto.ModeAsync {
		wait = a.QueueExpiry
	}
	job := &proto.Job{
		Meta: proto.Meta{
			TraceID: id, Org: c.Key.Org, Key: c.Key.ID, Mode: mode, Profile: profile.Name,
			Image: sandbox.Image, Network: sandbox.Network.Policy, NetworkExtended: sandbox.Network.Extended(),
			Disk: sandbox.OnDisk(), Architecture: sandbox.Architecture,
			WebhookURL: webhookURL, RequestID: c.RequestID, ClientID: c.ClientID, UserAgent: c.UserAgent,
			CreatedAt: now.UTC(), RunAt: runAt,
		},
		Env: env, Sandbox: sandbox, Bound: bound,
	}
	setLimits(job, &c.Entitlement)
	job.SetMounts(mounts)
	if err := a.sealSecrets(ctx, job, req.Env); err != nil {
		return nil, err
	}
	if id != "" { // batches skip this lookup: it would hit the store once per item
		if err := a.checkSubPaths(ctx, c.Key.Org, mounts, req.SubPaths); err != nil {
			return nil, err
		}
	}
	job.QueueDeadline = job.QueuedAt().Add(wait)
	req.FillJob(job)
	return job, nil
}

// setLimits sets the job's limits for the queue.
func setLimits(job *proto.Job, e *proto.Entitlement) {
	job.Concurrent, job.MaxQueued = proto.LimitOf(e.Concurrent), proto.LimitOf(e.MaxQueued)
	job.Weight, job.KeyConcurrent = e.Weight, e.KeyConcurrent
}

// checkKillGrace checks the kill_grace of a request. A client that waits for the answer is limited
// to less, because the answer is due soon after the timeout.
func checkKillGrace(grace *proto.Seconds, mode proto.Mode) error {
	if grace == nil || mode == proto.ModeAsync || time.Duration(*grace) <= proto.MaxWaitingKillGrace {
		return nil
	}
	return proto.FieldErrorf("kill_grace", "must be 0 to %g seconds in inline and streaming executions; "+
		"with the header Prefer: respond-async, it may be up to %g",
		proto.MaxWaitingKillGrace.Seconds(), proto.MaxKillGrace.Seconds())
}

// runAt returns when to queue the execution of a request, zero for immediately. A repeated request
// may arrive after that.
func (a *Admission) runAt(req *api.ExecuteRequest, mode proto.Mode, now time.Time) (at time.Time, err error) {
	field := "run_at"
	switch {
	case req.RunAt != nil:
		at = req.RunAt.UTC()
	case req.Delay > 0:
		field, at = "delay", now.Add(time.Duration(req.Delay)).UTC()
	default:
		return at, nil
	}
	switch most := min(maxDelay, a.Retention); {
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

// Submit submits a job, unless its organisation has used up a monthly quota. It still returns an
// execution accepted earlier under the same idempotency key. A rejection about a limit of the plan
// includes the plan to suggest.
func (a *Admission) Submit(ctx context.Context, sub *proto.Submission) (proto.TraceID, error) {
	var quotas []proto.QuotaName
	if sub.Job.SandboxID != "" {
		quotas = proto.QuotaNames()
	}
	sub.Admit = func() error { return a.CheckQuota(ctx, sub.Job.Org, quotas...) }
	id, err := a.Submitter.Submit(ctx, sub)
	return id, a.suggest(ctx, err, sub.Job.Key)
}

// Principal returns the API key with an id, or the one for the member with that id.
func (a *Admission) Principal(id string) (*proto.Key, bool) {
	if !strings.HasPrefix(id, proto.MemberPrefix) {
		return a.Keys.Key(id)
	}
	m, ok := a.Members.Member(id)
	if !ok {
		return nil, false
	}
	return new(m.Key()), true
}

// ValidKey returns the API key for work without a request, with its entitlement.
func (a *Admission) ValidKey(ctx context.Context, id string) (*proto.Key, proto.Entitlement, error) {
	key, ok := a.Principal(id)
	if !ok || !key.Valid(time.Now()) {
		return nil, proto.Entitlement{}, &proto.Rejection{Reason: proto.RejectedKey, Name: id}
	}
	if !key.Has(proto.ScopeExecute) {
		return nil, proto.Entitlement{}, &proto.Rejection{Reason: proto.RejectedScope, Name: id}
	}
	e, err := a.Entitlement(ctx, key)
	return key, e, err
}

var newTrace = []trace.SpanStartOption{trace.WithNewRoot()}

// startSpan starts the span of an execution that no request submits. Its trace is a new one.
func (a *Admission) startSpan(
	ctx context.Context, id proto.TraceID, name, org, key string,
) (context.Context, trace.Span) {
	ctx, span := a.Tracer.Start(proto.ContextWithTraceID(ctx, id), name, newTrace...)
	if span.IsRecording() {
		span.SetAttributes(attribute.String("bullpen.org", org), attribute.String("bullpen.key", key),
			attribute.String("bullpen.trace_id", string(id)))
	}
	return ctx, span
}

// endSpan ends the span of [Admission.startSpan].
func endSpan(span trace.Span, err error) {
	if err != nil && span.IsRecording() {
		span.SetAttributes(semconv.ErrorType(err))
		span.SetStatus(codes.Error, err.Error())
	}
	span.End()
}

// settle returns the text of a final refusal, or an error that may pass. Both are empty without an
// error.
func settle(err error) (refused string, _ error) {
	if proto.Final(err) {
		return api.NewError(err).Message, nil
	}
	return "", err
}
