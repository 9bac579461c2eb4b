package worker

import (
	"context"
	"slices"
	"time"

	"github.com/bullpen-run/bullpen/proto"
)

// finishGrace limits the writing of a result after a shutdown.
const finishGrace = 5 * time.Second

// finishError is why the result of an attempt was not stored: another process ended the execution,
// or the store did not answer before the worker had to stop.
type finishError struct{ err error }

func (e *finishError) Error() string { return e.err.Error() }
func (e *finishError) Unwrap() error { return e.err }

// finish stores the result, during a shutdown too, and returns the terminal record. Its error is a [*finishError].
func (a *attempt) finish(ctx context.Context, out Outcome) (*proto.Record, error) {
	write, cancel := context.WithCancel(context.WithoutCancel(ctx))
	defer cancel()
	stop := context.AfterFunc(ctx, func() { time.AfterFunc(finishGrace, cancel) })
	defer stop()
	rec, err := a.lease.Finish(write, out)
	if err != nil {
		return nil, &finishError{err}
	}
	return rec, nil
}

// committed returns rec, an attempt's final record, if this worker stored it after commits.
func (o *Outcome) committed(rec *proto.Record) *proto.Record {
	if o.Commit == nil && len(o.Volumes) == 0 {
		return nil
	}
	return rec
}

// endedAs reports whether an execution ended with one of some error codes.
func endedAs(rec *proto.Record, codes ...proto.ErrorCode) bool {
	return rec.Result.ErrorCode != nil && slices.Contains(codes, proto.ErrorCode(*rec.Result.ErrorCode))
}
