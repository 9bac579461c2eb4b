package gateway

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"time"

	"github.com/cenkalti/backoff/v4"

	"github.com/bullpen-run/bullpen/proto"
)

// bindingGrace is how long a binding without an execution is taken for one whose request is still under way. After that its
// server is taken to have died between binding and submission.
const bindingGrace = 10 * time.Second

// errNotYet says that another request with the same key is under way and its execution is not known yet.
var errNotYet = errors.New("the first request with this Idempotency-Key is still being accepted")

// idempotencyKeyOf gives the request's Idempotency-Key, empty for none.
func idempotencyKeyOf(h http.Header) (string, error) {
	values := h.Values("Idempotency-Key")
	if len(values) == 0 {
		return "", nil
	}
	if key := values[0]; len(values) == 1 && key != "" && len(key) <= proto.MaxIdempotencyKeyLen && printable(key) {
		return key, nil
	}
	return "", &proto.FieldError{
		Field:   "Idempotency-Key",
		Message: fmt.Sprintf("Idempotency-Key must be one value of 1 to %d printable ASCII characters", proto.MaxIdempotencyKeyLen),
	}
}

// admit submits the job, unless an earlier request with the same idempotency key did so: then the answer is that one's.
// The key is bound before the job is submitted, so that of two requests at once only one submits.
func (s *Server) admit(ctx context.Context, job *proto.Job, idempotencyKey, hash string) (*admitted, error) {
	if idempotencyKey == "" {
		return s.submit(ctx, job)
	}
	scope := job.Key
	own := proto.Binding{Trace: job.TraceID, BodyHash: hash, BoundAt: job.CreatedAt}
	var earlier *admitted
	claim := func() (err error) {
		own, earlier, err = s.claim(ctx, job, scope, idempotencyKey, own)
		if err != nil && !errors.Is(err, errNotYet) {
			return backoff.Permanent(err)
		}
		return err
	}
	limit := job.CreatedAt.Add(time.Duration(job.Timeout)*time.Second + answerGrace)
	limited, cancel := context.WithDeadline(ctx, limit)
	defer cancel()
	waits := backoff.NewExponentialBackOff(
		backoff.WithInitialInterval(5*time.Millisecond), backoff.WithMaxInterval(500*time.Millisecond), backoff.WithMaxElapsedTime(0))
	if err := backoff.Retry(claim, backoff.WithContext(waits, limited)); err != nil {
		if limited.Err() != nil && ctx.Err() == nil {
			return nil, errNoAnswerInTime
		}
		return nil, err
	}
	if earlier != nil {
		return earlier, nil
	}

	release := func(ctx context.Context) error {
		if err := s.Bindings.Release(ctx, scope, idempotencyKey, own); err != nil {
			return fmt.Errorf("release idempotency key: %w", err)
		}
		return nil
	}
	x, err := s.submit(ctx, job)
	if _, notTaken := errors.AsType[*notTakenError](err); notTaken {
		store, cancel := detached(ctx)
		defer cancel()
		if releaseErr := release(store); releaseErr != nil {
			s.Log.WarnContext(ctx, "refused", "trace_id", job.TraceID, "error", releaseErr)
		}
	}
	if err != nil {
		return nil, err
	}
	x.release = release
	return x, nil
}

// claim binds the key to own, or finds the execution that it stands for already. Its error is errNotYet while that one is
// not known yet.
func (s *Server) claim(ctx context.Context, job *proto.Job, scope, key string, own proto.Binding) (
	proto.Binding, *admitted, error,
) {
	own.BoundAt = time.Now() // not that of the request, whose body may have been long in coming
	holds, bound, err := s.Bindings.Bind(ctx, scope, key, own)
	if err != nil {
		return own, nil, fmt.Errorf("bind idempotency key: %w", err)
	}
	if bound {
		return holds, nil, nil
	}
	if holds.BodyHash != own.BodyHash {
		return own, nil, errIdempotency
	}
	record, err := s.Jobs.Lookup(ctx, holds.Trace)
	switch {
	case err == nil && !expired(record):
		return own, s.follow(job, holds.Trace), nil
	case err != nil && !errors.Is(err, proto.ErrNotFound):
		return own, nil, fmt.Errorf("look up %s: %w", holds.Trace, err)
	case err != nil && time.Since(holds.BoundAt) < bindingGrace:
		return own, nil, errNotYet
	}
	// Its execution never was or will never run, so the key is free for this one.
	unknown := err != nil
	replaced, err := s.Bindings.Replace(ctx, scope, key, holds, own)
	if errors.Is(err, proto.ErrConflict) {
		return own, nil, errNotYet // somebody else was first
	}
	if err != nil {
		return own, nil, fmt.Errorf("take over idempotency key: %w", err)
	}
	if unknown {
		s.unlock(ctx, job, holds.Trace) // its server may have locked the thread before it died
	}
	return replaced, nil, nil
}
