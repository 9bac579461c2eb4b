package store

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
func (s *Store) readLast(ctx context.Context, st jetstream.Stream, subject string) (*jetstream.RawStreamMsg, error) {
	return ask(ctx, s.news, nameOf(st), func(ctx context.Context) (*jetstream.RawStreamMsg, error) {
		return st.GetLastMsgForSubject(ctx, subject)
	})
}

// readAt reads the message of st with sequence number seq, or as opts say.
func (s *Store) readAt(ctx context.Context, st jetstream.Stream, seq uint64, opts ...jetstream.GetMsgOpt) (*jetstream.RawStreamMsg, error) {
	return ask(ctx, s.news, nameOf(st), func(ctx context.Context) (*jetstream.RawStreamMsg, error) { return st.GetMsg(ctx, seq, opts...) })
}

func nameOf(st jetstream.Stream) string { return st.CachedInfo().Config.Name }

// Bare reads the message of st with sequence number seq, without a body that is stored apart. Its error may be one that [IsNotFound] knows.
func (s *Store) AtWithoutBody(ctx context.Context, st jetstream.Stream, seq uint64) (*jetstream.RawStreamMsg, error) {
	return s.readAt(ctx, st, seq)
}

// Next reads the first message of st on a subject whose sequence number is from or later. Its error may be one that [IsNotFound] knows.
func (s *Store) Next(ctx context.Context, st jetstream.Stream, from uint64, subject string) (*jetstream.RawStreamMsg, error) {
	return s.readAt(ctx, st, from, jetstream.WithGetMsgSubject(subject))
}

// ask reads something of a stream, again when nobody has answered for a moment or the answer is that nobody can now: on a cluster that is so until there
// is another leader.
func ask[T any](ctx context.Context, n *news, of string, read func(context.Context) (T, error)) (T, error) {
	if _, bounded := ctx.Deadline(); !bounded {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(ctx, readTimeout)
		defer cancel()
	}
	m, err := again(ctx, n, of, read)
	return m, unanswered(err)
}

// again is [ask] until ctx ends, with errors as they are.
func again[T any](ctx context.Context, n *news, of string, read func(context.Context) (T, error)) (T, error) {
	return insist(ctx, n, of, getTimeout, func(try context.Context) (T, error) {
		m, err := read(try)
		if err != nil && !IsTransient(err) && !errors.Is(err, context.Canceled) {
			err = backoff.Permanent(err)
		}
		return m, err
	})
}

// insist tries until ctx ends or an error is permanent. A try ends after that time at most, and at news of who is named it and the pause
// after it do at once.
func insist[T any](ctx context.Context, n *news, of string, most time.Duration, try func(context.Context) (T, error)) (T, error) {
	wait := backoff.NewExponentialBackOff(backoff.WithInitialInterval(retryFirst), backoff.WithMaxInterval(retryMost), backoff.WithMaxElapsedTime(0))
	for {
		told := n.next(of).Done()
		once, cancel := n.try(ctx, of, most)
		v, err := try(once)
		cancel()
		if err == nil {
			return v, nil
		}
		if final, ok := errors.AsType[*backoff.PermanentError](err); ok {
			return v, final.Err
		}
		pause := time.NewTimer(wait.NextBackOff())
		select {
		case <-ctx.Done():
		case <-pause.C:
		case <-told:
			wait.Reset()
		}
		pause.Stop()
		if ctx.Err() != nil {
			return v, ctx.Err()
		}
	}
}

// Passing reports whether what failed may do better in a moment.
func IsTransient(err error) bool {
	if api, ok := errors.AsType[*jetstream.APIError](err); ok {
		return api.Code >= http.StatusInternalServerError
	}
	return !IsNotFound(err) && !errors.Is(err, nats.ErrConnectionClosed) && !errors.Is(err, context.Canceled)
}

// unanswered makes errors that say in many ways that nobody was there to answer be [context.DeadlineExceeded] too.
func unanswered(err error) error {
	if err == nil || !IsTransient(err) || errors.Is(err, context.DeadlineExceeded) {
		return err
	}
	return fmt.Errorf("%w: %w", context.DeadlineExceeded, err)
}
