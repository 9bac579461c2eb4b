package proto

import (
	"errors"
	"fmt"
	"time"
)

// Submission is a request to run a job.
type Submission struct {
	Job            *Job
	IdempotencyKey string    // empty for none
	BodyHash       string    // of the request; unused without an idempotency key
	WaitUntil      time.Time // when to stop waiting for another request with the same idempotency key
	// Admit, if not nil, is called once the execution is known to be new. Submit returns its error,
	// and nothing of the job remains.
	Admit func() error
	// Binding is set when the idempotency key was bound to this job.
	Binding Binding
}

// Errors of submissions.
var (
	// ErrKeyReused is returned if an idempotency key was used with another body.
	ErrKeyReused = errors.New("the idempotency key was used with another body")
	// ErrSubmissionPending is returned while another request with the same idempotency key or dead
	// letter is being accepted.
	ErrSubmissionPending = fmt.Errorf("another request is still being accepted: %w", ErrConflict)
	// ErrNotConfirmed is returned if the queue did not confirm a job, which is then withdrawn.
	ErrNotConfirmed = errors.New("the queue did not confirm the execution in time")
	// ErrMayRun is returned if it is unknown whether a job was accepted.
	ErrMayRun = errors.New("the execution may have been accepted")
	// ErrNoJob is returned if a dead letter is not about a job.
	ErrNoJob = errors.New("the dead letter is no job")
)

// NotConfirmed reports whether an execution was withdrawn because the queue did not confirm it.
// Nothing of it ran, and its queue time has not expired.
func (r *Record) NotConfirmed() bool {
	return r.Attempt == 0 && r.ExpiredInQueue() && r.CompletedAt != nil && r.CompletedAt.Before(r.QueueDeadline)
}

// ExpiredInQueue reports whether an execution ended without having started.
func (r *Record) ExpiredInQueue() bool {
	return r.Result != nil && r.Result.ErrorCode != nil && *r.Result.ErrorCode == string(CodeExpiredInQueue)
}
