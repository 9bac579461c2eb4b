package worker

import (
	"context"
)

// claim is a recorded claim.
type claim struct {
	running   context.Context // is cancelled when the program must be killed
	cancelled <-chan struct{} // is closed when a client cancels the execution
	base      int64           // sequence number of the last event of earlier attempts
}

// claimError is why a job could not be claimed. Its program must not be started.
type claimError struct{ err error }

func (e *claimError) Error() string { return e.err.Error() }
func (e *claimError) Unwrap() error { return e.err }

// claim records that the program starts. Until wanted is done, it calls giveUp if the program must
// no longer start. Its error is a [*claimError].
func (a *attempt) claim(ctx, wanted context.Context, giveUp func()) (*claim, error) {
	running, base, err := a.lease.Claim(ctx)
	if err != nil {
		giveUp()
		return nil, &claimError{err}
	}
	c := &claim{running, a.lease.Cancelled(), base}
	go func() {
		select {
		case <-c.cancelled:
		case <-running.Done():
		case <-wanted.Done():
		}
		giveUp()
	}()
	return c, nil
}
