package stream

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"time"

	"github.com/cenkalti/backoff/v4"
	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
)

// readTimeout bounds the reading of a message where the caller's context does not.
const readTimeout = 5 * time.Second

// readLast reads the last message on a subject of st.
func readLast(ctx context.Context, st jetstream.Stream, subject string) (*jetstream.RawStreamMsg, error) {
	return ask(ctx, func(ctx context.Context) (*jetstream.RawStreamMsg, error) {
		return st.GetLastMsgForSubject(ctx, subject)
	})
}

// readAt reads the message of st with sequence number seq, or as opts say.
func readAt(ctx context.Context, st jetstream.Stream, seq uint64, opts ...jetstream.GetMsgOpt) (*jetstream.RawStreamMsg, error) {
	return ask(ctx, func(ctx context.Context) (*jetstream.RawStreamMsg, error) { return st.GetMsg(ctx, seq, opts...) })
}

// Bare reads the message of st with sequence number seq, without a body that is stored apart. Its error may be one that [Missing] knows.
func (s *Set) Bare(ctx context.Context, st jetstream.Stream, seq uint64) (*jetstream.RawStreamMsg, error) {
	return readAt(ctx, st, seq)
}

// Next reads the first message of st on a subject whose sequence number is from or later. Its error may be one that [Missing] knows.
func (s *Set) Next(ctx context.Context, st jetstream.Stream, from uint64, subject string) (*jetstream.RawStreamMsg, error) {
	return readAt(ctx, st, from, jetstream.WithGetMsgSubject(subject))
}

// ask reads something, again when nobody has answered for a moment or the answer is that nobody can now: on a cluster that is so until there
// is another leader.
func ask[T any](ctx context.Context, read func(context.Context) (T, error)) (T, error) {
	if _, bounded := ctx.Deadline(); !bounded {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(ctx, readTimeout)
		defer cancel()
	}
	m, err := again(ctx, read)
	return m, unanswered(err)
}

// again is [ask] until ctx ends, with errors as they are.
func again[T any](ctx context.Context, read func(context.Context) (T, error)) (T, error) {
	wait := backoff.NewExponentialBackOff(backoff.WithInitialInterval(retryFirst), backoff.WithMaxInterval(retryMost), backoff.WithMaxElapsedTime(0))
	return backoff.RetryWithData(func() (T, error) {
		try, cancel := context.WithTimeout(ctx, getTimeout)
		defer cancel()
		m, err := read(try)
		if err != nil && !Passing(err) {
			err = backoff.Permanent(err)
		}
		return m, err
	}, backoff.WithContext(wait, ctx))
}

// Passing reports whether what failed may do better in a moment.
func Passing(err error) bool {
	if api, ok := errors.AsType[*jetstream.APIError](err); ok {
		return api.Code >= http.StatusInternalServerError
	}
	return !Missing(err) && !errors.Is(err, nats.ErrConnectionClosed) && !errors.Is(err, context.Canceled)
}

// unanswered makes errors that say in many ways that nobody was there to answer be [context.DeadlineExceeded] too.
func unanswered(err error) error {
	if err == nil || !Passing(err) || errors.Is(err, context.DeadlineExceeded) {
		return err
	}
	return fmt.Errorf("%w: %w", context.DeadlineExceeded, err)
}
