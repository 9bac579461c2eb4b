package store

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"slices"
	"time"

	"github.com/cenkalti/backoff/v4"
	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
)

const (
	retryTimeout  = 5 * time.Second
	retryMinPause = 20 * time.Millisecond
	retryMaxPause = 500 * time.Millisecond
)

// Retry is the policy by which requests to NATS are repeated. The zero value is ready to use.
type Retry struct {
	// Timeout bounds one attempt, 5 s if zero. A request on its way to a server that dies is never
	// answered.
	Timeout time.Duration
	// Pause is the time between attempts. If zero, pauses grow from 20 to 500 ms.
	Pause time.Duration
	// Transient reports whether another attempt may succeed. It is [IsTransient] if nil.
	Transient func(error) bool
	// OnRetry, if not nil, is called with the error of each attempt that will be repeated.
	OnRetry func(err error, pause time.Duration)

	// leader names what answers the request. Its next change ends the current attempt, or the
	// pause after it, at once. No leader is watched if leaders is nil.
	leader  string
	leaders *Leaders
}

// Do calls try until it succeeds, fails with an error that is not transient, or ctx is done.
// It returns ctx.Err() in the last case.
func (r Retry) Do(ctx context.Context, try func(context.Context) error) error {
	transient := r.Transient
	if transient == nil {
		transient = IsTransient
	}
	pauses := backoff.NewExponentialBackOff(
		backoff.WithInitialInterval(retryMinPause), backoff.WithMaxInterval(retryMaxPause), backoff.WithMaxElapsedTime(0))
	for {
		changed, err := r.attempt(ctx, try)
		if err == nil {
			return nil
		}
		if final, ok := errors.AsType[*backoff.PermanentError](err); ok {
			return final.Err
		}
		if !transient(err) && !errors.Is(err, context.Canceled) { // which is how a change of leader ends an attempt
			return err
		}
		if ctx.Err() != nil {
			return ctx.Err()
		}
		pause := r.Pause
		if pause == 0 {
			pause = pauses.NextBackOff()
		}
		if r.OnRetry != nil {
			r.OnRetry(err, pause)
		}
		timer := time.NewTimer(pause)
		select {
		case <-ctx.Done():
		case <-timer.C:
		case <-changed:
			pauses.Reset()
		}
		timer.Stop()
		if ctx.Err() != nil {
			return ctx.Err()
		}
	}
}

// attempt calls try once. It returns the channel that reports the next change of leader since.
func (r Retry) attempt(ctx context.Context, try func(context.Context) error) (changed <-chan struct{}, err error) {
	timeout := r.Timeout
	if timeout == 0 {
		timeout = retryTimeout
	}
	if r.leaders == nil {
		ctx, cancel := context.WithTimeout(ctx, timeout)
		defer cancel()
		return nil, try(ctx)
	}
	changed = r.leaders.Changed(r.leader)
	ctx, cancel := r.leaders.Attempt(ctx, r.leader, timeout)
	defer cancel()
	return changed, try(ctx)
}

// Update calls attempt, which reads a value and writes a new one on condition that the value still
// has the revision that was read. It repeats that until no other writer interferes, attempt fails,
// or ctx is done.
func Update(ctx context.Context, attempt func() error) error {
	for {
		if err := attempt(); !IsConflict(err) {
			return err
		}
		if ctx.Err() != nil {
			return fmt.Errorf("change a value that others keep changing: %w", context.Cause(ctx))
		}
	}
}

// transient are the errors that waiting resolves: no answer, or a change of the connection or leader.
// All others are final, so that a refused request is not retried until a timeout.
var transient = []error{ // read only
	context.DeadlineExceeded, io.EOF, io.ErrUnexpectedEOF,
	nats.ErrTimeout, nats.ErrNoResponders, nats.ErrDisconnected, nats.ErrConnectionReconnecting,
	nats.ErrReconnectBufExceeded,
	nats.ErrStaleConnection, nats.ErrNoServers, nats.ErrSlowConsumer, nats.ErrBadSubscription,
	nats.ErrMaxConnectionsExceeded, nats.ErrMaxAccountConnectionsExceeded,
	jetstream.ErrNoStreamResponse, jetstream.ErrNoHeartbeat, jetstream.ErrConsumerDeleted,
	jetstream.ErrConsumerLeadershipChanged,
	jetstream.ErrServerShutdown, jetstream.ErrMsgIteratorClosed, jetstream.ErrOrderedConsumerReset,
	jetstream.ErrConsumerCreationResponseEmpty, jetstream.ErrInvalidJSAck, jetstream.ErrAsyncPublishTimeout,
	errWatchEnded, errDisconnected, errBehind, errIncompleteBody,
}

// IsTransient reports whether the request that failed with err may succeed in a moment.
func IsTransient(err error) bool {
	if api, ok := errors.AsType[*jetstream.APIError](err); ok {
		return api.Code >= http.StatusInternalServerError
	}
	if network, ok := errors.AsType[net.Error](err); ok && !errors.Is(err, context.Canceled) {
		return network != nil
	}
	return slices.ContainsFunc(transient, func(known error) bool { return errors.Is(err, known) })
}

// IsRejected reports whether err is the server's answer that it cannot do what was asked, as
// opposed to no answer or a conflict.
func IsRejected(err error) bool {
	_, ok := errors.AsType[*jetstream.APIError](err)
	return ok && !IsConflict(err)
}

// IsNotFound reports whether err means that nothing is stored under a name.
func IsNotFound(err error) bool {
	return errors.Is(err, jetstream.ErrMsgNotFound) || errors.Is(err, jetstream.ErrKeyNotFound) ||
		errors.Is(err, jetstream.ErrObjectNotFound)
}

// IsConflict reports whether err means that a value did not have the expected revision.
func IsConflict(err error) bool {
	api, ok := errors.AsType[*jetstream.APIError](err)
	return ok && (api.ErrorCode == jetstream.JSErrCodeStreamWrongLastSequence || isUndecided(err))
}

// isUndecided reports whether err means that another write on the subject is in progress, which
// takes a cluster some time. It may be the same write, whose answer was lost, or somebody else's,
// which may yet fail.
func isUndecided(err error) bool {
	api, ok := errors.AsType[*jetstream.APIError](err)
	return ok && api.ErrorCode == jetstream.JSErrCodeStreamWrongLastSequenceConstant
}

// isForming reports whether a stream that could not be created may be in a moment, because the
// servers of a cluster have not all met yet.
func isForming(err error) bool {
	const noPeers jetstream.ErrorCode = 10005 // too few servers to keep the stream on
	api, ok := errors.AsType[*jetstream.APIError](err)
	return IsTransient(err) || ok && api.ErrorCode == noPeers
}

// AnyError makes every error transient. It is a value for the field Transient of [Retry].
func AnyError(error) bool { return true }

// markUnanswered makes the errors of NATS that mean "no answer" match [context.DeadlineExceeded] too.
func markUnanswered(err error) error {
	if err == nil || !IsTransient(err) || errors.Is(err, context.DeadlineExceeded) {
		return err
	}
	return fmt.Errorf("%w: %w", context.DeadlineExceeded, err)
}
