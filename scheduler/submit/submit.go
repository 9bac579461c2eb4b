// Package submit turns a job into an accepted execution. It owns the whole sequence and its
// rollback:
//
//  1. Claim: the idempotency key is bound to the execution, or the dead letter is marked with it,
//     by compare-and-set. Of several requests one continues. The others return its execution.
//  2. Lock: the job's thread and the volumes that it can change are locked for the execution, all or
//     none.
//  3. Store: the queue stores the job. If the queue does not confirm it, the execution is
//     withdrawn.
//
// If a step fails, the steps before it are undone, last first. Nothing is undone while the job may
// run. A process that dies between the steps leaves a claim, and perhaps a lock, whose execution
// does not exist. The next request with the same claim takes both over after claimGrace. It first
// stores that the execution has ended: the process may live, with a clock that is behind.
package submit

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"time"

	"github.com/cenkalti/backoff/v4"

	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/proto/fault"
)

const (
	// claimGrace is how long a claim without an execution counts as a request in progress.
	claimGrace = 10 * time.Second
	// stepTimeout limits locking and storing together, withdrawing, and each step of the rollback.
	// They complete even if the client is gone. Storing and withdrawing, with the second in which
	// the queue itself undoes a job, take no longer than the shortest time for an inline answer.
	stepTimeout = 4 * time.Second

	minClaimWait = 5 * time.Millisecond // between two attempts to claim
	maxClaimWait = 500 * time.Millisecond
)

// Jobs is the queue.
type Jobs interface {
	// Submit stores a job. It returns a [*proto.Rejection] if nothing of the job remains. After any
	// other error the job may be stored.
	Submit(ctx context.Context, job *proto.Job) error
	// Lookup returns the record of an execution, or [proto.ErrNotFound].
	Lookup(ctx context.Context, org string, id proto.TraceID) (*proto.Record, error)
	// Abandon stores that the execution described by m has expired, so that it never starts, even if
	// its job is stored later. It returns [proto.ErrConflict] if the execution has a record.
	Abandon(ctx context.Context, m *proto.Meta, reason string) error
	// Withdraw ends an execution with result r if it has not started. It returns the record.
	Withdraw(ctx context.Context, org string, id proto.TraceID, r proto.Result) (*proto.Record, error)
}

// Bindings stores the executions of idempotency keys. The scope of a key is the API key that it came with.
type Bindings interface {
	// Bind binds key to b. If key is bound already, it returns that binding, and bound is false.
	Bind(ctx context.Context, org, scope, key string, b proto.Binding) (have proto.Binding, bound bool, err error)
	// Bound returns the binding of key, or [proto.ErrNotFound].
	Bound(ctx context.Context, org, scope, key string) (proto.Binding, error)
	// Replace rebinds key from old to b. It returns [proto.ErrConflict] if key is not bound to old.
	Replace(ctx context.Context, org, scope, key string, old, b proto.Binding) (proto.Binding, error)
	// Release deletes the binding b. It does nothing if key is not bound to b.
	Release(ctx context.Context, org, scope, key string, b proto.Binding) error
}

// Threads locks threads.
type Threads interface {
	// Lock locks a thread for an execution until that has ended, and creates the thread if
	// necessary. It returns the worker that may have the home in its cache, or "". It returns a
	// [*proto.BusyError] if another execution holds the thread, and a [*proto.RemovingError] if it
	// is being removed. After any other error the thread may be locked.
	Lock(ctx context.Context, org, thread string, id proto.TraceID) (head *proto.Thread, prefer string, err error)
	// Unlock unlocks a thread. It does nothing if the execution does not hold it.
	Unlock(ctx context.Context, org, thread string, id proto.TraceID) error
}

// DeadLetters stores dead letters.
type DeadLetters interface {
	// Get returns a dead letter and its content, or [proto.ErrNotFound].
	Get(ctx context.Context, id string) (*proto.DeadLetter, *proto.DeadContent, error)
	// Mark stores a dead letter's new execution, and sets the letter's revision. It returns
	// [proto.ErrConflict] if that was stale.
	Mark(ctx context.Context, letter *proto.DeadLetter) error
}

// Submitter submits jobs.
type Submitter struct {
	Jobs        Jobs
	Bindings    Bindings
	Threads     Threads
	DeadLetters DeadLetters
	Log         *slog.Logger
}

// Submit accepts a job and returns the id of its execution. If an earlier request had the same
// idempotency key, it returns that request's execution.
//
// Nothing of the job remains after an error, except for [proto.ErrMayRun]. The other errors include
// [proto.ErrKeyReused], [proto.ErrSubmissionPending], [proto.ErrNotConfirmed], [*proto.BusyError],
// [*proto.Rejection] and those of sub.Admit.
func (s *Submitter) Submit(ctx context.Context, sub *proto.Submission) (proto.TraceID, error) {
	id := sub.Job.TraceID
	if sub.IdempotencyKey == "" {
		return id, s.accept(ctx, sub.Job, sub.Admit, nil)
	}
	c := &keyClaim{bindings: s.Bindings, sub: sub}
	bounded, cancel := context.WithDeadline(ctx, sub.WaitUntil)
	defer cancel()
	holder, err := s.claim(bounded, c, id)
	switch {
	case err != nil && bounded.Err() != nil && ctx.Err() == nil:
		return "", proto.ErrSubmissionPending
	case err != nil || holder != "":
		return holder, err
	}
	return id, s.accept(ctx, sub.Job, sub.Admit, c)
}

// Accepted returns the execution accepted under an API key's idempotency key. It returns
// [proto.ErrNotFound] if there is none, and [proto.ErrSubmissionPending] if a request with that key
// may be in progress.
func (s *Submitter) Accepted(ctx context.Context, org, key, idempotencyKey string) (proto.TraceID, error) {
	binding, err := s.Bindings.Bound(ctx, org, key, idempotencyKey)
	if err != nil {
		return "", err
	}
	rec, err := s.Jobs.Lookup(ctx, org, binding.Trace)
	switch {
	case errors.Is(err, proto.ErrNotFound) && time.Since(binding.BoundAt) < claimGrace:
		return "", proto.ErrSubmissionPending
	case err != nil:
		return "", err
	case rec.NotConfirmed(): // and the key was not released
		return "", fmt.Errorf("execution %s was not accepted: %w", binding.Trace, proto.ErrNotFound)
	}
	return binding.Trace, nil
}

// Requeue submits the job of a dead letter as execution id, unless an earlier request has done so.
// It returns the dead letter, which names the execution. build makes the job from the dead
// letter's. Requeue continues if ctx is cancelled. Its errors are those of build and
// [Submitter.Submit], [proto.ErrNotFound] and [proto.ErrNoJob].
func (s *Submitter) Requeue(
	ctx context.Context, letterID string, id proto.TraceID, build func(dead *proto.Job) (*proto.Job, error),
) (*proto.DeadLetter, error) {
	c := &letterClaim{letters: s.DeadLetters, id: letterID, build: build}
	bounded, cancel := context.WithTimeout(context.WithoutCancel(ctx), claimGrace+2*stepTimeout)
	defer cancel()
	holder, err := s.claim(bounded, c, id)
	if err != nil {
		return nil, err
	}
	if holder == "" {
		err = s.accept(ctx, c.job, nil, c)
	}
	return c.letter, err
}

// Withdraw ends a submission's execution if it has not started, and then frees its idempotency key.
// It returns the record, and continues if ctx is cancelled.
func (s *Submitter) Withdraw(ctx context.Context, sub *proto.Submission, reason string) (*proto.Record, error) {
	rec, err := s.withdraw(ctx, sub.Job, reason)
	if err == nil && rec.ExpiredInQueue() {
		err = s.Release(ctx, sub)
	}
	return rec, err
}

// Release frees the idempotency key of a submission that did not start. It continues if ctx is
// cancelled.
func (s *Submitter) Release(ctx context.Context, sub *proto.Submission) error {
	if sub.IdempotencyKey == "" {
		return nil
	}
	ctx, cancel := detach(ctx)
	defer cancel()
	return (&keyClaim{bindings: s.Bindings, sub: sub}).release(ctx)
}

// accept calls admit unless it is nil, locks the threads and stores the job. If nothing of the job
// remains, it also releases the claim, which may be nil.
func (s *Submitter) accept(ctx context.Context, job *proto.Job, admit func() error, c claim) error {
	var err error
	if admit != nil {
		err = admit()
	}
	if err == nil {
		err = s.store(ctx, job)
	}
	if err == nil {
		fault.Here(fault.AfterAcceptBeforeAnswer)
		return nil
	}
	if errors.Is(err, proto.ErrMayRun) {
		return err
	}
	if _, busy := errors.AsType[*proto.BusyError](err); !busy {
		s.unlock(ctx, job, job.Threads())
	}
	if c != nil {
		ctx, cancel := detach(ctx)
		defer cancel()
		if err := c.release(ctx); err != nil { // taken over after claimGrace
			s.Log.WarnContext(ctx, "release claim failed", "trace_id", job.TraceID, "error", err)
		}
	}
	return err
}

// store locks the threads and stores the job. It returns nil if the job is stored, and
// [proto.ErrMayRun] if that is unknown.
func (s *Submitter) store(ctx context.Context, job *proto.Job) error {
	bounded, cancel := detach(ctx)
	defer cancel()
	if err := s.lock(bounded, job); err != nil {
		return err
	}
	err := s.Jobs.Submit(bounded, job)
	if _, refused := errors.AsType[*proto.Rejection](err); refused || err == nil {
		return err
	}
	rec, errWithdraw := s.withdraw(ctx, job, "The queue did not confirm the execution.")
	switch {
	case errWithdraw == nil && !rec.ExpiredInQueue():
		return nil // stored and started
	case errWithdraw == nil || errors.Is(errWithdraw, proto.ErrNotFound):
		return fmt.Errorf("%w: %w", proto.ErrNotConfirmed, err)
	default:
		return fmt.Errorf("submit %s: %w: %w", job.TraceID, proto.ErrMayRun, errors.Join(err, errWithdraw))
	}
}

func (s *Submitter) withdraw(ctx context.Context, job *proto.Job, reason string) (*proto.Record, error) {
	ctx, cancel := detach(ctx)
	defer cancel()
	rec, err := s.Jobs.Withdraw(ctx, job.Org, job.TraceID, proto.Failure(proto.CodeExpiredInQueue, reason))
	if err != nil {
		return nil, fmt.Errorf("withdraw %s: %w", job.TraceID, err)
	}
	return rec, nil
}

// lock locks the job's threads in ascending order, and sets the preferred worker: the one that may
// have the home cached, or else the first volume. If it returns a [*proto.BusyError], none is
// locked.
func (s *Submitter) lock(ctx context.Context, job *proto.Job) error {
	ids := job.Threads()
	for i, id := range ids {
		_, worker, err := s.Threads.Lock(ctx, job.Org, id, job.TraceID)
		if err != nil {
			if _, busy := errors.AsType[*proto.BusyError](err); busy {
				s.unlock(ctx, job, ids[:i])
			}
			return fmt.Errorf("lock thread %s: %w", id, err)
		}
		if id == job.ThreadID || job.Prefer == "" {
			job.Prefer = worker
		}
	}
	return nil
}

// unlock unlocks some of the threads that the job holds. A lock that cannot be removed expires, since
// its execution does not exist.
func (s *Submitter) unlock(ctx context.Context, job *proto.Job, ids []string) {
	ctx, cancel := detach(ctx)
	defer cancel()
	for _, id := range ids {
		if err := s.Threads.Unlock(ctx, job.Org, id, job.TraceID); err != nil {
			s.Log.WarnContext(ctx, "unlock thread failed", "thread_id", id, "trace_id", job.TraceID, "error", err)
		}
	}
}

func detach(ctx context.Context) (context.Context, context.CancelFunc) {
	return context.WithTimeout(context.WithoutCancel(ctx), stepTimeout)
}

// claim names at most one execution: an idempotency key or a dead letter.
type claim interface {
	// acquire stores id. If the claim belongs to another execution, it returns that and the time at
	// which it was stored.
	acquire(ctx context.Context, id proto.TraceID) (holder proto.TraceID, since time.Time, err error)
	// replace stores id instead of the holder that acquire returned. It returns [proto.ErrConflict]
	// if the claim has changed since.
	replace(ctx context.Context, id proto.TraceID) error
	// release removes the id that was stored.
	release(ctx context.Context) error
	// meta describes the executions of the claim, except for their ids.
	meta() proto.Meta
}

// claim acquires c for execution id, waiting while another request is in progress. holder is c's
// earlier execution; empty if c was acquired.
func (s *Submitter) claim(ctx context.Context, c claim, id proto.TraceID) (holder proto.TraceID, err error) {
	waits := backoff.NewExponentialBackOff(backoff.WithInitialInterval(minClaimWait),
		backoff.WithMaxInterval(maxClaimWait), backoff.WithMaxElapsedTime(claimGrace+stepTimeout))
	err = backoff.Retry(func() (err error) {
		holder, err = s.tryClaim(ctx, c, id)
		if err != nil && !errors.Is(err, proto.ErrConflict) {
			return backoff.Permanent(err)
		}
		return err
	}, backoff.WithContext(waits, ctx))
	return holder, err
}

func (s *Submitter) tryClaim(ctx context.Context, c claim, id proto.TraceID) (holder proto.TraceID, err error) {
	holder, since, err := c.acquire(ctx, id)
	if err != nil || holder == "" {
		return "", err
	}
	m := c.meta()
	m.TraceID = holder
	rec, err := s.Jobs.Lookup(ctx, m.Org, holder)
	unknown := errors.Is(err, proto.ErrNotFound)
	switch {
	case err == nil && !rec.ExpiredInQueue():
		return holder, nil
	case err != nil && !unknown:
		return "", fmt.Errorf("look up %s: %w", holder, err)
	case unknown && time.Since(since) < claimGrace:
		return "", proto.ErrSubmissionPending
	case unknown:
		if err := s.Jobs.Abandon(
			ctx, &m, "The request was not accepted in time, and another one took its place."); err != nil {
			return "", err
		}
		s.Log.WarnContext(ctx, "submission abandoned", "trace_id", holder, "replaced_by", id)
	}
	return "", c.replace(ctx, id)
}

// keyClaim is the idempotency key of a submission.
type keyClaim struct {
	bindings Bindings
	sub      *proto.Submission
	have     proto.Binding // found by acquire
}

func (c *keyClaim) binding(id proto.TraceID) proto.Binding {
	return proto.Binding{Trace: id, BodyHash: c.sub.BodyHash, BoundAt: time.Now()}
}

func (c *keyClaim) acquire(ctx context.Context, id proto.TraceID) (proto.TraceID, time.Time, error) {
	have, bound, err := c.bindings.Bind(ctx, c.sub.Job.Org, c.sub.Job.Key, c.sub.IdempotencyKey, c.binding(id))
	switch {
	case err != nil:
		return "", time.Time{}, fmt.Errorf("bind idempotency key: %w", err)
	case bound:
		c.sub.Binding = have
		return "", time.Time{}, nil
	case have.BodyHash != c.sub.BodyHash:
		return "", time.Time{}, proto.ErrKeyReused
	}
	c.have = have
	return have.Trace, have.BoundAt, nil
}

func (c *keyClaim) replace(ctx context.Context, id proto.TraceID) (err error) {
	job := c.sub.Job
	c.sub.Binding, err = c.bindings.Replace(ctx, job.Org, job.Key, c.sub.IdempotencyKey, c.have, c.binding(id))
	if err != nil {
		return fmt.Errorf("take over idempotency key: %w", err)
	}
	return nil
}

func (c *keyClaim) meta() proto.Meta { return c.sub.Job.Meta }

func (c *keyClaim) release(ctx context.Context) error {
	job := c.sub.Job
	if err := c.bindings.Release(ctx, job.Org, job.Key, c.sub.IdempotencyKey, c.sub.Binding); err != nil {
		return fmt.Errorf("release idempotency key: %w", err)
	}
	return nil
}

// letterClaim is a dead letter that is requeued.
type letterClaim struct {
	letters DeadLetters
	id      string
	build   func(dead *proto.Job) (*proto.Job, error)
	dead    *proto.Job
	letter  *proto.DeadLetter // read by acquire
	job     *proto.Job        // built for the execution
}

func (c *letterClaim) acquire(ctx context.Context, id proto.TraceID) (proto.TraceID, time.Time, error) {
	letter, content, err := c.letters.Get(ctx, c.id)
	if err != nil {
		return "", time.Time{}, err
	}
	if content.Job == nil {
		return "", time.Time{}, proto.ErrNoJob
	}
	c.letter, c.dead = letter, content.Job
	if letter.Requeued != "" {
		return letter.Requeued, *letter.RequeuedAt, nil
	}
	return "", time.Time{}, c.replace(ctx, id)
}

func (c *letterClaim) replace(ctx context.Context, id proto.TraceID) (err error) {
	if c.job, err = c.build(c.dead); err != nil {
		return err
	}
	c.letter.Requeued, c.letter.RequeuedAt = id, &c.job.CreatedAt
	return c.letters.Mark(ctx, c.letter)
}

func (c *letterClaim) meta() proto.Meta { return c.dead.Meta }

func (c *letterClaim) release(ctx context.Context) error {
	c.letter.Requeued, c.letter.RequeuedAt = "", nil
	return c.letters.Mark(ctx, c.letter)
}
