package blob

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/cenkalti/backoff/v4"
)

// Policy says how often and how long requests are made again that failed and may succeed then: those whose [Error] says Again.
type Policy struct {
	Tries       int           // of one request, the first among them; at least 1
	First, Most time.Duration // how long the first wait is, and the longest; each is twice the one before, give or take a half
	Within      time.Duration // the beginning of the first try in which others begin; 0 for no limit
}

// DefaultPolicy tries eight times, with waits of about 11 s together, and begins no try when 20 s are over: somebody waits for what it is for.
func DefaultPolicy() Policy {
	return Policy{Tries: 8, First: 100 * time.Millisecond, Most: 5 * time.Second, Within: 20 * time.Second}
}

// Do calls f until it succeeds, as the policy says. Its error is that of the last call, which then no longer says Again, so that nobody
// makes the request again who makes a larger one of it; where ctx ended, it wraps the cause of that as well.
func (p Policy) Do(ctx context.Context, f func() error) error {
	waits := backoff.NewExponentialBackOff(backoff.WithInitialInterval(p.First), backoff.WithMaxInterval(p.Most),
		backoff.WithMultiplier(2), backoff.WithRandomizationFactor(0.5), backoff.WithMaxElapsedTime(p.Within))
	tries := 0
	var last error
	err := backoff.Retry(func() error {
		tries++
		last = f()
		var e *Error
		if last == nil || errors.As(last, &e) && e.Again && tries < p.Tries {
			return last
		}
		return backoff.Permanent(last)
	}, backoff.WithContext(waits, ctx))
	if err == nil {
		return nil
	}
	var e *Error
	if errors.As(last, &e) && e.Again {
		final := *e
		final.Again = false
		if tries > 1 {
			final.Err = fmt.Errorf("%w (tried %d times)", e.Err, tries)
		}
		last = &final
	}
	if ctx.Err() != nil {
		return fmt.Errorf("%w: %w", context.Cause(ctx), last)
	}
	return last
}
