package sandboxes

import (
	"cmp"
	"context"
	"crypto/hmac"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"net/http"
	"time"

	"github.com/bullpen-run/bullpen/gateway/web"
	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/proto/api"
	"github.com/bullpen-run/bullpen/proto/fault"
)

const (
	// startWait is how long a request waits for the guest of a sandbox beyond the wait for a worker.
	startWait = 10 * time.Second
	// stopWait is how long a request waits for a sandbox to stop: for its processes, and for its save.
	stopWait = 60 * time.Second
	// saveWait is how long a request waits for the save of a running sandbox.
	saveWait = 60 * time.Second
)

// Store stores live sandboxes.
type Store interface {
	// Create stores a new sandbox. It returns a [*proto.Rejection] if the organisation has too many, or
	// most that are active.
	Create(ctx context.Context, x *proto.LiveSandbox, most int) error
	// Resume is Change for a sandbox that becomes active. It returns a [*proto.Rejection] if the
	// organisation has most others that are active.
	Resume(ctx context.Context, org, id string, most int, change func(*proto.LiveSandbox) error) (
		proto.LiveSandbox, error)
	// Get returns a sandbox, or [proto.ErrNotFound].
	Get(ctx context.Context, org, id string) (*proto.LiveSandbox, error)
	// Find is Get from memory, which may be outdated for a moment.
	Find(ctx context.Context, org, id string) (proto.LiveSandbox, error)
	// Change stores the result of change, which may be called again, and returns it. It returns
	// [proto.ErrNotFound] if there is no such sandbox.
	Change(ctx context.Context, org, id string, change func(*proto.LiveSandbox) error) (proto.LiveSandbox, error)
	// Settle stores what has become of a sandbox whose execution has ended with a record.
	Settle(ctx context.Context, id string, rec *proto.Record) (proto.LiveSandbox, error)
	// Abandon stores that a sandbox did not start, since its execution was not accepted.
	Abandon(ctx context.Context, x *proto.LiveSandbox, message string) error
	web.Pages[proto.LiveSandbox] // the newest first
}

// Admission builds and submits the jobs of sandboxes. It refuses a request with a [*proto.Rejection],
// a [*proto.FieldError] or another error whose text is for clients.
type Admission interface {
	// SandboxJob returns the job that runs the guest of a sandbox, as its next execution.
	SandboxJob(ctx context.Context, x *proto.LiveSandbox, c proto.Caller, ticketHash [32]byte) (*proto.Job, error)
	// CheckSandboxTimeout rejects a timeout in seconds that the plan does not include.
	CheckSandboxTimeout(ctx context.Context, e *proto.Entitlement, timeout int) error
	// Submit submits a job and returns the id of its execution. Nothing of the job remains after an
	// error, except for [proto.ErrMayRun].
	Submit(ctx context.Context, sub *proto.Submission) (proto.TraceID, error)
}

// Jobs reads and ends executions.
type Jobs interface {
	// WaitStarted blocks until an execution has started or ended, and returns its record. It returns
	// the error of ctx if ctx is done first.
	WaitStarted(ctx context.Context, org string, id proto.TraceID) (*proto.Record, error)
	// Wait blocks until an execution has ended, and returns its record. It returns the error of ctx if
	// ctx is done first.
	Wait(ctx context.Context, org string, id proto.TraceID) (*proto.Record, error)
	// Lookup returns the record of an execution, or [proto.ErrNotFound].
	Lookup(ctx context.Context, org string, id proto.TraceID) (*proto.Record, error)
	// Cancel stores a request to end an execution, and returns the new record.
	Cancel(ctx context.Context, org string, id proto.TraceID) (*proto.Record, error)
}

// Submissions ends submissions that have not started.
type Submissions interface {
	// Withdraw ends a submission's execution if it has not started, and returns its record.
	Withdraw(ctx context.Context, sub *proto.Submission, reason string) (*proto.Record, error)
}

// Service creates, stops and reaches live sandboxes. It is safe for concurrent use.
type Service struct {
	*web.Core
	Store       Store
	Admission   Admission
	Jobs        Jobs
	Submissions Submissions
	Events      Events
	Tunnels     *Tunnels
	// TicketKey makes the tickets with which gateways identify themselves to workers. All gateways have
	// the same.
	TicketKey *[32]byte
}

// ticket returns the ticket of a sandbox for one execution.
func (s *Service) ticket(x *proto.LiveSandbox) string {
	mac := hmac.New(sha256.New, s.TicketKey[:])
	_, _ = fmt.Fprintf(mac, "%s\x00%s\x00%s", x.Org, x.ID, x.Execution)
	return hex.EncodeToString(mac.Sum(nil))
}

// NewSandbox returns a sandbox as a request of an API key asks for it.
func NewSandbox(r *api.SandboxRequest, c proto.Caller) *proto.LiveSandbox {
	x := &proto.LiveSandbox{
		ID: proto.NewSandboxID(), Org: c.Key.Org, Key: c.Key.ID, Name: r.Name, Profile: r.Profile, Metadata: r.Metadata,
		Env: r.Env, SubPaths: r.SubPaths, ThreadID: r.ThreadID, OnTimeout: cmp.Or(r.OnTimeout, proto.SandboxKill),
		Timeout: seconds(r.Timeout), IdleTimeout: seconds(r.IdleTimeout),
	}
	if x.ThreadID == "" {
		x.ThreadID, x.OwnHome = proto.OwnerSandbox.Thread(x.ID), true
	}
	return x
}

func seconds(n int) proto.Seconds { return proto.Seconds(time.Duration(n) * time.Second) }

// Create stores a sandbox, starts it, and returns when its guest answers.
func (s *Service) Create(ctx context.Context, i *web.Info, x *proto.LiveSandbox, c proto.Caller) error {
	begin(x)
	x.CreatedAt = x.StartedAt
	x.AddAct(proto.SandboxCreateAct, &c)
	job, err := s.job(ctx, x, c)
	if err != nil {
		return err
	}
	if err := s.Store.Create(ctx, x, proto.LimitOf(c.Entitlement.Sandboxes)); err != nil {
		return err
	}
	return s.start(ctx, i, x, job)
}

// begin sets what changes with each start of a sandbox.
func begin(x *proto.LiveSandbox) {
	now := time.Now().UTC()
	x.State, x.Reason, x.Message, x.Stopping, x.StoppedAt = proto.SandboxStarting, "", "", nil, time.Time{}
	x.Starts++
	x.Worker = ""
	x.Execution, x.StartedAt, x.ExpiresAt = proto.NewTraceID(), now, now.Add(time.Duration(x.Timeout))
}

func (s *Service) job(ctx context.Context, x *proto.LiveSandbox, c proto.Caller) (*proto.Job, error) {
	return s.Admission.SandboxJob(ctx, x, c, sha256.Sum256([]byte(s.ticket(x))))
}

// Resume starts a paused sandbox again, with another timeout unless that is 0, and returns when its
// guest answers. It returns a [*ConflictError] if the sandbox is not paused.
func (s *Service) Resume(
	ctx context.Context, i *web.Info, id string, timeout int, c proto.Caller,
) (*proto.LiveSandbox, error) {
	return s.resume(ctx, i, id, timeout, c, proto.SandboxPaused)
}

// Restart is Resume for a sandbox of interpreters, which has ended.
func (s *Service) Restart(
	ctx context.Context, i *web.Info, id string, timeout int, c proto.Caller,
) (*proto.LiveSandbox, error) {
	return s.resume(ctx, i, id, timeout, c, proto.SandboxEnded)
}

// resume starts a sandbox in a state again.
func (s *Service) resume(
	ctx context.Context, i *web.Info, id string, timeout int, c proto.Caller, from proto.SandboxState,
) (*proto.LiveSandbox, error) {
	var job *proto.Job
	most := proto.LimitOf(c.Entitlement.Sandboxes)
	changed, err := s.Store.Resume(ctx, c.Key.Org, id, most, func(x *proto.LiveSandbox) (err error) {
		if x.State != from {
			return &ConflictError{x.State, "resumed", string(from)}
		}
		if timeout > 0 {
			x.Timeout = seconds(timeout)
		}
		begin(x)
		x.Key = c.Key.ID
		x.AddAct(proto.SandboxResumeAct, &c)
		job, err = s.job(ctx, x, c)
		return err
	})
	if err != nil {
		return nil, err
	}
	return &changed, s.start(ctx, i, &changed, job)
}

// start submits the execution of a stored sandbox and waits for its guest.
func (s *Service) start(ctx context.Context, i *web.Info, x *proto.LiveSandbox, job *proto.Job) error {
	i.Trace = x.Execution
	i.AnswerHeader().Set("X-Trace-Id", string(x.Execution))
	fault.Here(fault.AfterSandboxBeforeJob)
	sub := &proto.Submission{Job: job, WaitUntil: job.QueueDeadline}
	_, err := s.Admission.Submit(ctx, sub)
	if err != nil && !errors.Is(err, proto.ErrMayRun) {
		abandoning, done := web.Detached(ctx)
		defer done()
		return errors.Join(web.SubmitError(i, x.Execution, err),
			s.Store.Abandon(abandoning, x, "The sandbox was not started: "+api.NewError(err).Message))
	}
	ctx, cancel := s.Until(ctx, job.QueueDeadline.Add(startWait))
	defer cancel()
	queued, stop := context.WithDeadline(ctx, job.QueueDeadline)
	defer stop()
	rec, err := s.Jobs.WaitStarted(queued, x.Org, x.Execution)
	if err != nil {
		if rec, err = s.giveUp(ctx, x, sub); err != nil {
			return err
		}
	}
	if rec.Status.Terminal() {
		return s.failed(ctx, x, rec)
	}
	if err := s.awaitGuest(ctx, x, rec.Worker); err != nil {
		return err
	}
	fault.Here(fault.AfterGuestBeforeRunning)
	running, err := s.running(ctx, x, rec.Worker)
	if err != nil {
		return fmt.Errorf("start sandbox %s: %w", x.ID, err)
	}
	*x = running
	return nil
}

// running stores that a sandbox runs on a worker.
func (s *Service) running(ctx context.Context, x *proto.LiveSandbox, worker string) (proto.LiveSandbox, error) {
	return s.Store.Change(ctx, x.Org, x.ID, func(now *proto.LiveSandbox) error {
		if now.State == proto.SandboxStarting && now.Execution == x.Execution {
			now.State, now.Worker = proto.SandboxRunning, worker
		}
		return nil
	})
}

// workerOf returns the worker of an active sandbox. It reads the record of the execution if no gateway
// has stored the worker, since that which started the sandbox may have died.
func (s *Service) workerOf(ctx context.Context, x *proto.LiveSandbox) (string, error) {
	if x.Worker != "" {
		return x.Worker, nil
	}
	rec, err := s.Jobs.WaitStarted(ctx, x.Org, x.Execution)
	if err != nil {
		return "", err
	}
	if rec.Status.Terminal() {
		return "", ErrNotReached
	}
	_, err = s.running(ctx, x, rec.Worker)
	return rec.Worker, err
}

// Target is what a request to a sandbox reaches.
type Target struct {
	Org, ID string
	Path    string // decoded
	RawPath string // encoded, empty for the default encoding of Path
	Port    int    // of the sandbox; 0 for its guest
	// UntilStop breaks the answer off when the sandbox begins to stop.
	UntilStop bool
}

// Serve passes a request on to the guest of a sandbox, or through it to a port. It calls unreachable if
// the sandbox is not running, or its guest cannot be reached. No answer has been written then.
func (s *Service) Serve(w http.ResponseWriter, r *http.Request, to Target, unreachable func(error)) {
	ctx := r.Context()
	x, err := s.Store.Find(ctx, to.Org, to.ID)
	if err == nil && x.State != proto.SandboxRunning && x.State != proto.SandboxStarting {
		err = &ConflictError{x.State, "used", "running"}
	}
	worker := ""
	if err == nil {
		worker, err = s.workerOf(ctx, &x)
	}
	if err != nil {
		unreachable(err)
		return
	}
	s.Tunnels.proxy(w, r, worker, s.ticket(&x), to, unreachable)
}

// Ping returns an error unless the guest of a running sandbox answers.
func (s *Service) Ping(ctx context.Context, org, id string) error {
	x, err := s.Store.Find(ctx, org, id)
	if err != nil {
		return err
	}
	worker, err := s.workerOf(ctx, &x)
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, setTimeout)
	defer cancel()
	return s.Tunnels.ping(ctx, worker, x.ID, s.ticket(&x))
}

// giveUp withdraws the execution of a sandbox for which no worker was free, and returns the error for
// the client. If a worker has started it at the last moment, giveUp returns the record.
func (s *Service) giveUp(
	ctx context.Context, x *proto.LiveSandbox, sub *proto.Submission,
) (started *proto.Record, err error) {
	ctx, done := web.Detached(ctx)
	defer done()
	rec, err := s.Submissions.Withdraw(ctx, sub, "No worker was free for the sandbox in time.")
	if err == nil && !rec.Status.Terminal() {
		return rec, nil
	}
	if err == nil {
		_, err = s.Store.Settle(ctx, x.ID, rec)
	}
	busy := api.Unavailable(1, "no worker was free for the sandbox in time; send the request again")
	if err != nil {
		return nil, fmt.Errorf("%w (and its execution was not withdrawn: %w)", busy, err)
	}
	return nil, busy
}

// failed stores that a sandbox ended before it was ready, and returns the error for the client.
func (s *Service) failed(ctx context.Context, x *proto.LiveSandbox, rec *proto.Record) error {
	settled, err := s.Store.Settle(ctx, x.ID, rec)
	if err != nil {
		return err
	}
	code := api.CodeInternal
	if rec.Result.ErrorCode != nil {
		switch proto.ErrorCode(*rec.Result.ErrorCode) {
		case proto.CodeStorageMount, proto.CodeVolumeMount: // the tenant's or its administrator's to mend
			code = api.CodeConflict
		}
	}
	return api.Errorf(code, "the sandbox was not started: %s", settled.Message)
}

// awaitGuest returns when the guest of a sandbox on a worker answers.
func (s *Service) awaitGuest(ctx context.Context, x *proto.LiveSandbox, worker string) error {
	err := s.Tunnels.ping(ctx, worker, x.ID, s.ticket(x))
	if err == nil {
		return nil
	}
	// The guest may have ended meanwhile, which its record explains.
	soon, cancel := context.WithTimeout(context.WithoutCancel(ctx), time.Second)
	defer cancel()
	if rec, errWait := s.Jobs.Wait(soon, x.Org, x.Execution); errWait == nil {
		return s.failed(soon, x, rec)
	}
	return fmt.Errorf("%w: %w", api.Errorf(api.CodeGatewayTimeout, "the sandbox started on a worker that this server "+
		"does not reach; its operator can look at --tunnel of the worker"), err)
}

// ConflictError means that a sandbox is not in the state that a request needs.
type ConflictError struct {
	State        proto.SandboxState
	change, need string
}

func (e *ConflictError) Error() string {
	return fmt.Sprintf("the sandbox is %s, and only a %s one can be %s", e.State, e.need, e.change)
}

// Conflict marks the text as meant for the client.
func (e *ConflictError) Conflict() {}

// Stop stops a sandbox as a client asks, and returns when it has stopped. It does nothing to one that
// is already stopped that way.
func (s *Service) Stop(
	ctx context.Context, id string, stop proto.SandboxStop, c proto.Caller,
) (*proto.LiveSandbox, error) {
	org, act, reason := c.Key.Org, proto.SandboxDeleteAct, proto.SandboxKilled
	if stop == proto.SandboxPause {
		act, reason = proto.SandboxPauseAct, proto.SandboxPausedByUser
	}
	x, err := s.Store.Change(ctx, org, id, func(x *proto.LiveSandbox) error {
		switch {
		case x.State.Active():
			if x.Stopping == nil || stop == proto.SandboxKill && x.Stopping.Stop != stop {
				x.State, x.Stopping = proto.SandboxStopping, &proto.SandboxStopped{Stop: stop, Reason: reason}
				x.AddAct(act, &c)
			}
		case stop == proto.SandboxPause:
			return &ConflictError{x.State, "paused", "running"}
		case x.State == proto.SandboxPaused:
			x.State, x.Reason, x.Message, x.StoppedAt = proto.SandboxEnded, reason, "", time.Now().UTC()
			x.AddAct(act, &c)
		}
		return nil
	})
	if err != nil || !x.State.Active() {
		return &x, err
	}
	fault.Here(fault.AfterStoppingBeforeCancel)
	stopping, cancel := s.Until(ctx, time.Now().Add(stopWait))
	defer cancel()
	if _, err := s.Jobs.Cancel(stopping, org, x.Execution); err != nil && !errors.Is(err, proto.ErrNotFound) {
		return &x, fmt.Errorf("stop sandbox %s: %w", id, err) // the leader repeats it
	}
	rec, err := s.Jobs.Wait(stopping, org, x.Execution)
	if err != nil {
		return &x, api.Errorf(api.CodeGatewayTimeout, "the sandbox has not stopped yet; look at it again")
	}
	x, err = s.Store.Settle(ctx, id, rec)
	return &x, err
}

// NotSavedError is why the home of a running sandbox was not saved.
type NotSavedError struct{ reason string }

func (e *NotSavedError) Error() string { return "the home was not saved: " + e.reason }

// Conflict marks the text as meant for the client.
func (e *NotSavedError) Conflict() {}

// Save stores the home of a running sandbox, which runs on, as the next version of its thread, and returns
// the number of the newest version. Files alone are stored. It returns a [*NotSavedError] if the home
// cannot be saved, and a [*ConflictError] if the sandbox does not run.
func (s *Service) Save(ctx context.Context, org, id string) (version int64, err error) {
	x, err := s.Store.Get(ctx, org, id)
	if err != nil {
		return 0, err
	}
	if x.State != proto.SandboxRunning {
		return 0, &ConflictError{x.State, "saved", "running"}
	}
	saving, cancel := s.Until(ctx, time.Now().Add(saveWait))
	defer cancel()
	worker, err := s.workerOf(saving, x)
	var saved proto.SandboxSave
	if err == nil {
		saved, err = s.Tunnels.save(saving, worker, x.ID, s.ticket(x))
	}
	switch {
	case errors.Is(err, ErrNotReached): // it is stopping by itself, which its record does not say yet
		return 0, &ConflictError{proto.SandboxStopping, "saved", "running"}
	case err != nil && saving.Err() != nil && ctx.Err() == nil:
		return 0, api.Errorf(api.CodeGatewayTimeout, "the home is not saved yet; save it again")
	case err != nil:
		return 0, err
	case saved.Refused != "":
		return 0, &NotSavedError{saved.Refused}
	}
	return saved.Version, nil
}

// Extend sets when the timeout of a running sandbox passes: in so many seconds, or in as many as at
// its last start if timeout is nil. It returns a [*ConflictError] if the sandbox does not run.
func (s *Service) Extend(ctx context.Context, id string, timeout *int, c proto.Caller) (*proto.LiveSandbox, error) {
	x, err := s.Store.Get(ctx, c.Key.Org, id)
	if err != nil {
		return nil, err
	}
	if x.State != proto.SandboxRunning {
		return nil, &ConflictError{x.State, "extended", "running"}
	}
	in := time.Duration(x.Timeout)
	if timeout != nil {
		if err := s.Admission.CheckSandboxTimeout(ctx, &c.Entitlement, *timeout); err != nil {
			return nil, err
		}
		in = time.Duration(*timeout) * time.Second
	}
	at := time.Now().Add(in).UTC()
	worker, err := s.workerOf(ctx, x)
	if err == nil {
		err = s.Tunnels.setExpiry(ctx, worker, x.ID, s.ticket(x), at)
	}
	if errors.Is(err, ErrNotReached) { // it is stopping by itself, which its record does not say yet
		err = &ConflictError{proto.SandboxStopping, "extended", "running"}
	}
	if err != nil {
		return nil, err
	}
	changed, err := s.Store.Change(ctx, x.Org, x.ID, func(now *proto.LiveSandbox) error {
		if now.Execution == x.Execution {
			now.ExpiresAt = at
			now.AddAct(proto.SandboxExtendAct, &c)
		}
		return nil
	})
	return &changed, err
}
