package proto

import (
	"context"
	"errors"
	"fmt"
)

// Reason is why a job is not accepted. Each surface words it for its clients.
type Reason string

// The reasons of the queue.
const (
	RejectedConcurrency    Reason = "concurrency"     // the organisation runs as many executions as its plan allows
	RejectedKeyConcurrency Reason = "key_concurrency" // the API key runs as many executions as its own limit allows
	RejectedQueueFull      Reason = "queue_full"      // the organisation has as many queued as its plan allows
	RejectedSandboxes      Reason = "sandboxes"       // the organisation has as many sandboxes as it may
	RejectedPipelines      Reason = "pipelines"       // the organisation runs as many pipelines as it may
	// the queue cannot accept jobs now: no dispatcher, no memory, draining
	RejectedUnavailable Reason = "unavailable"
	RejectedNoWorker    Reason = "no_worker" // no worker can run the job, and none that can is expected
	RejectedDiskFull    Reason = "disk_full" // the disk of the data directory is full up to its reserve
)

// The reasons of admission. Name names what the reason is about.
const (
	RejectedKey          Reason = "key"           // the API key or member is revoked, removed or has expired
	RejectedScope        Reason = "scope"         // the API key or member has no longer the scope execute
	RejectedNoOrg        Reason = "no_org"        // the organisation does not exist
	RejectedDeleted      Reason = "deleted"       // the organisation is being deleted
	RejectedSuspended    Reason = "suspended"     // the organisation is suspended
	RejectedNoPlan       Reason = "no_plan"       // the plan does not exist
	RejectedMode         Reason = "mode"          // the plan does not include the mode
	RejectedTimeout      Reason = "timeout"       // the timeout is above the maximum of the plan
	RejectedKeyTimeout   Reason = "key_timeout"   // the timeout is above the maximum of the API key
	RejectedQuota        Reason = "quota"         // the organisation has used up a monthly quota
	RejectedNoProfile    Reason = "no_profile"    // the sandbox profile does not exist
	RejectedNoImage      Reason = "no_image"      // the image of the sandbox profile does not exist
	RejectedNoConnection Reason = "no_connection" // the storage connection does not exist
	RejectedNoSecret     Reason = "no_secret"     // the secret does not exist
	RejectedProfile      Reason = "profile"       // the API key may not choose the sandbox profile
	RejectedImage        Reason = "image"         // the API key may not choose an image
	RejectedSubPath      Reason = "sub_path"      // the API key does not have the path of a storage connection
	RejectedLostMount    Reason = "lost_mount"    // the API key no longer has the part of a storage connection
	RejectedCredentials  Reason = "credentials"   // the bucket of the storage connection no longer accepts its credentials
	RejectedStorage      Reason = "storage"       // the bucket of the storage connection cannot be asked now
)

// Rejection is the error of a job that was not accepted. Nothing of the job remains.
type Rejection struct {
	Reason Reason `json:"reason"`
	Limit  int    `json:"limit,omitempty"` // the limit that was reached
	Used   int    `json:"used,omitempty"`  // the number that reached it
	Detail string `json:"detail,omitempty"`
	// Missing is set for [RejectedNoWorker].
	Missing *Missing `json:"missing,omitempty"`

	Name    string     `json:"-"`
	Profile string     `json:"-"` // the sandbox profile that names an image
	Allowed []string   `json:"-"` // for [RejectedProfile] and [RejectedImage], the profiles that the API key may choose
	Plan    *PlanLimit `json:"-"` // nil if the reason is not about a plan, or the plan is unknown
}

// PlanLimit describes a plan that does not allow a request, and which plans would.
type PlanLimit struct {
	Title      string
	Mode       Mode      // for [RejectedMode]
	Larger     []string  // titles of the larger plans that include the mode
	KillGrace  bool      // the limit is for the sum of timeout and kill_grace
	Quota      *QuotaUse // for [RejectedQuota]
	Next       *Plan     // the plan to suggest; nil for none
	UpgradeURL string    // where users change their plan; empty for none
}

func (r *Rejection) Error() string {
	switch {
	case r.Missing != nil:
		return fmt.Sprintf("job refused: %s", r.Missing.Message)
	case r.Name != "":
		return fmt.Sprintf("job refused: %s (%s) %s", r.Reason, r.Name, r.Detail)
	default:
		return fmt.Sprintf("job refused: %s (%d of %d) %s", r.Reason, r.Used, r.Limit, r.Detail)
	}
}

// Final reports whether the same submission would always be refused, so that retrying is pointless.
// It is false if waiting helps, and if err is a server failure, after which the job may have been
// accepted.
//
// Only a person can lift a final refusal, by changing the request, the key, the plan or whatever
// they refer to.
func Final(err error) bool {
	if err == nil || mayPass(err) {
		return false
	}
	if rejection, ok := errors.AsType[*Rejection](err); ok {
		return rejection.Reason.final()
	}
	if _, ok := errors.AsType[*FieldError](err); ok {
		return true
	}
	_, conflict := errors.AsType[conflictError](err)
	return conflict || errors.Is(err, ErrKeyReused) || errors.Is(err, ErrNoJob)
}

// conflictError is an error about an object's state whose text is meant for the client.
type conflictError interface {
	error
	Conflict()
}

// mayPass reports whether err is not known to be a refusal, or may resolve without a change.
func mayPass(err error) bool {
	for _, again := range []error{
		ErrMayRun, ErrSubmissionPending, ErrNotConfirmed, context.DeadlineExceeded, context.Canceled,
	} {
		if errors.Is(err, again) {
			return true
		}
	}
	_, busy := errors.AsType[*BusyError](err)
	_, removing := errors.AsType[*RemovingError](err)
	return busy || removing
}

// final reports whether waiting is pointless. An unknown reason comes from a newer process and may
// pass.
func (r Reason) final() bool {
	switch r {
	case RejectedNoWorker, RejectedKey, RejectedScope, RejectedNoOrg, RejectedDeleted, RejectedSuspended, RejectedNoPlan,
		RejectedMode, RejectedTimeout,
		RejectedKeyTimeout, RejectedQuota, RejectedNoProfile, RejectedNoImage, RejectedNoConnection, RejectedNoSecret,
		RejectedProfile, RejectedImage, RejectedSubPath,
		RejectedLostMount, RejectedCredentials:
		return true
	default:
		return false
	}
}
