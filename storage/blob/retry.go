package blob

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/cenkalti/backoff/v4"

	"github.com/bullpen-run/bullpen/proto"
)

// RetryPolicy bounds the retries of requests whose [Error] is retryable.
type RetryPolicy struct {
	Attempts int // including the first; at least 1
	// MinWait and MaxWait bound the pauses. Each pause is twice the previous one, plus or minus
	// half of it.
	MinWait, MaxWait time.Duration
	// OnError, if not nil, is called concurrently with the [Error.Op] of each attempt that failed
	// in the store or returned wrong content.
	OnError    func(operation string)
	MaxElapsed time.Duration // no attempt begins later than this after the first; 0 for no limit
}

// DefaultRetry makes eight attempts with pauses of about 11 s in total, and begins none after 20 s,
// because a client is waiting.
func DefaultRetry() RetryPolicy {
	return RetryPolicy{
		Attempts: 8, MinWait: 100 * time.Millisecond, MaxWait: 5 * time.Second,
		MaxElapsed: 20 * time.Second,
	}
}

// Do calls f until it succeeds or the policy is exhausted. It returns the error of the last call,
// marked as not retryable, so that callers that retry larger operations do not repeat it. If ctx is
// done, the error also wraps the cause of ctx.
func (p RetryPolicy) Do(ctx context.Context, f func() error) error {
	waits := backoff.NewExponentialBackOff(backoff.WithInitialInterval(p.MinWait), backoff.WithMaxInterval(p.MaxWait),
		backoff.WithMultiplier(2), backoff.WithRandomizationFactor(0.5), backoff.WithMaxElapsedTime(p.MaxElapsed))
	attempts := 0
	var last error
	err := backoff.Retry(func() error {
		attempts++
		last = f()
		if failed, ok := errors.AsType[*Error](last); ok && p.OnError != nil &&
			(errors.Is(failed.Kind, ErrUnavailable) || errors.Is(failed.Kind, proto.ErrCorrupt)) {
			p.OnError(failed.Op)
		}
		if last == nil || isRetryable(last) && attempts < p.Attempts {
			return last
		}
		return backoff.Permanent(last)
	}, backoff.WithContext(waits, ctx))
	if err == nil {
		return nil
	}
	if e, ok := errors.AsType[*Error](last); ok && e.Retryable {
		final := *e
		final.Retryable = false
		if attempts > 1 {
			final.Err = fmt.Errorf("%w (tried %d times)", e.Err, attempts)
		}
		last = &final
	}
	if ctx.Err() != nil {
		return fmt.Errorf("%w: %w", context.Cause(ctx), last)
	}
	return last
}

func isRetryable(err error) bool {
	e, ok := errors.AsType[*Error](err)
	return ok && e.Retryable
}
