package api

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"time"

	"github.com/bullpen-run/bullpen/proto"
)

// historyRetry is after how many seconds a list of executions that failed may succeed.
const historyRetry = 5

// NewError returns the error that a client sees. An unknown error is a failure of the server, whose
// text is not for clients.
func NewError(err error) *Error {
	var (
		known     *Error
		field     *proto.FieldError
		rejection *proto.Rejection
		history   *proto.HistoryError
		conflict  interface {
			error
			Conflict()
		}
	)
	switch {
	case errors.As(err, &known):
		return known
	case errors.As(err, &field):
		return Errorf(CodeValidation, "%s", field.Message)
	case errors.As(err, &rejection):
		return newRejection(rejection)
	case errors.As(err, &history):
		return Unavailable(historyRetry, "the list of executions cannot be read now: "+history.Reason+"; executions go "+
			"on, and each can be read by its trace id")
	case errors.As(err, &conflict):
		return Errorf(CodeConflict, "%s", conflict.Error())
	case errors.Is(err, proto.ErrNotFound):
		return Errorf(CodeNotFound, "nothing of that id is known to this API key")
	case errors.Is(err, proto.ErrConflict):
		return Errorf(CodeConflict, "somebody else changed this at the same time; send the request again")
	case errors.Is(err, proto.ErrExists):
		return Errorf(CodeConflict, "there is one of that name already; choose another, or replace it")
	case errors.Is(err, context.DeadlineExceeded):
		return Unavailable(2, "the queue does not answer; send the request again")
	default:
		return Errorf(CodeInternal, "something failed on our side; the server's log has the cause under this X-Request-Id")
	}
}

// Who can create what an API key names and does not exist.
const (
	ofServer = "the operator of this server"
	ofOrg    = "an administrator of this organisation"
)

// newRejection words a rejection.
func newRejection(r *proto.Rejection) *Error {
	missing := func(repairer, format string, args ...any) *Error {
		return &Error{
			Code: CodeConflict, Reason: ReasonMissing, Permanent: true,
			Message: fmt.Sprintf(format, args...) + ", so nothing runs under this API key; " + repairer + " can create it " +
				"again; or use another key",
		}
	}
	switch r.Reason {
	case proto.RejectedConcurrency:
		upgrade := upgradeTo(r, func(p *proto.Plan) int { return p.Concurrent }, "concurrent")
		return limitReached(1, r, "concurrent execution limit", upgrade)
	case proto.RejectedKeyConcurrency:
		return limitReached(1, r, "concurrent execution limit of this API key", "")
	case proto.RejectedQueueFull:
		upgrade := upgradeTo(r, func(p *proto.Plan) int { return p.MaxQueued }, "queued")
		return limitReached(5, r, "queued execution limit", upgrade)
	case proto.RejectedSandboxes:
		return limitReached(30, r, "limit of live sandboxes", "")
	case proto.RejectedPipelines:
		return limitReached(30, r, "limit of pipelines that run at the same time", "")
	case proto.RejectedNoWorker:
		return NoWorker(r.Missing)
	case proto.RejectedDiskFull:
		return DiskFull()
	case proto.RejectedKey:
		return Errorf(CodeForbidden, "the API key or member %s, under which this runs, is revoked, removed or has "+
			"expired; create it again with another one", r.Name)
	case proto.RejectedScope:
		return Errorf(CodeForbidden, "the API key or member %s, under which this runs, has lost the scope execute; "+
			"create it again with another one", r.Name)
	case proto.RejectedNoOrg:
		return Errorf(CodeInternal, "the organisation %q does not exist, so nothing is done under its API keys; ask the "+
			"administrator of this server to create it", r.Name)
	case proto.RejectedDeleted:
		message := "the organisation " + r.Name + " is being deleted; use an API key of another one"
		return &Error{Code: CodeForbidden, Reason: ReasonDeleted, Message: message}
	case proto.RejectedSuspended:
		message := "the organisation " + r.Name + " is suspended; ask its administrator"
		return &Error{Code: CodeForbidden, Reason: ReasonSuspended, Message: message}
	case proto.RejectedNoPlan:
		return Errorf(CodeInternal, "the plan %q does not exist, so nothing is done under the API keys that have it; "+
			"ask the administrator of this server to create it", r.Name)
	case proto.RejectedMode:
		return modeNotInPlan(r.Plan)
	case proto.RejectedTimeout, proto.RejectedKeyTimeout:
		return timeoutNotInPlan(r)
	case proto.RejectedQuota:
		return quotaUsedUp(r.Plan)
	case proto.RejectedNoProfile:
		return missing(ofServer, "the profile %q does not exist", r.Name)
	case proto.RejectedNoImage:
		return missing(ofServer, "the image %q of the profile %q does not exist", r.Name, r.Profile)
	case proto.RejectedNoConnection:
		return missing(ofOrg, "the storage connection %q of this organisation does not exist", r.Name)
	case proto.RejectedNoSecret:
		return missing(ofOrg, "the secret %q of this organisation does not exist", r.Name)
	case proto.RejectedProfile:
		message := fmt.Sprintf("the profile %q is not allowed for this API key, which may use %s; an administrator can add "+
			"it to the profiles of the key", proto.Shorten(r.Name), strings.Join(r.Allowed, ", "))
		return &Error{Code: CodeForbidden, Reason: ReasonProfile, Message: message}
	case proto.RejectedImage:
		message := fmt.Sprintf("requests with this API key may not choose an image, only one of its profiles, %s; an "+
			"administrator can create a profile with the image %q and add it to the profiles of the key",
			strings.Join(r.Allowed, ", "), r.Name)
		return &Error{Code: CodeForbidden, Reason: ReasonImage, Message: message}
	case proto.RejectedSubPath:
		return Errorf(CodeForbidden, "sub_paths must be in the parts of storage connections that the API key has; %q is "+
			"not", proto.Shorten(r.Name))
	case proto.RejectedLostMount:
		return Errorf(CodeConflict, "the API key does not have the part of the storage connection %s any more that the "+
			"execution had", r.Name)
	case proto.RejectedCredentials:
		return Errorf(CodeConflict, "the credentials of the storage connection %s are not accepted any more; the "+
			"administrator can replace them", r.Name)
	case proto.RejectedStorage:
		return Unavailable(2, "the storage connection "+r.Name+" could not be asked whether a path of sub_paths exists, "+
			"so nothing was accepted; send the request again")
	default:
		return Unavailable(2, "the queue cannot take this now; send it again")
	}
}

// limitReached returns the error about a limit that ends by waiting.
func limitReached(retryAfter int, r *proto.Rejection, kind, upgrade string) *Error {
	e := Errorf(CodeRateLimited, "%s reached (%d/%d).%s", kind, r.Used, r.Limit, upgrade)
	e.RetryAfter = retryAfter
	return e
}

// upgradeTo returns the sentence that suggests the next plan, empty if there is none.
func upgradeTo(r *proto.Rejection, limit func(*proto.Plan) int, kind string) string {
	if r.Plan == nil || r.Plan.Next == nil {
		return ""
	}
	if n := limit(r.Plan.Next); n > 0 {
		return fmt.Sprintf(" Upgrade to %s for %d %s executions.", r.Plan.Next.Title, n, kind)
	}
	return fmt.Sprintf(" Upgrade to %s for any number of %s executions.", r.Plan.Next.Title, kind)
}

// upgradeAt returns the end of a message that says where plans are changed.
func upgradeAt(p *proto.PlanLimit) string {
	if p.UpgradeURL == "" {
		return ""
	}
	return ". Upgrade at " + p.UpgradeURL
}

func modeNotInPlan(p *proto.PlanLimit) *Error {
	kind := "Async"
	if p.Mode == proto.ModeStreaming {
		kind = "Streaming"
	}
	if len(p.Larger) == 0 {
		return NotInPlan("%s execution is not part of the %s plan", kind, p.Title)
	}
	return NotInPlan("%s execution requires a %s plan%s", kind, strings.Join(p.Larger, " or "), upgradeAt(p))
}

func timeoutNotInPlan(r *proto.Rejection) *Error {
	subject := "timeout is"
	if r.Plan.KillGrace { // the program may run as long
		subject = "timeout and kill_grace together are"
	}
	if r.Reason == proto.RejectedKeyTimeout {
		return NotInPlan("%s above the maximum of %d seconds of this API key; ask for less", subject, r.Limit)
	}
	message := fmt.Sprintf("%s above the maximum of %d seconds of the %s plan", subject, r.Limit, r.Plan.Title)
	next := r.Plan.Next
	if next == nil {
		return NotInPlan("%s; ask for less", message)
	}
	return NotInPlan("%s; upgrade to %s for up to %d seconds, or ask for less%s", message, next.Title,
		next.LongestTimeout(), upgradeAt(r.Plan))
}

func quotaUsedUp(p *proto.PlanLimit) *Error {
	use := p.Quota
	message := fmt.Sprintf("the %s plan includes %d %s in a month, and the organisation has used %s; the month ends "+
		"at %s",
		p.Title, use.Hard, use.Name, Quantity(use.Used), use.Ends.Format(time.RFC3339))
	if use.Name == proto.QuotaStored {
		message += "; or remove threads, which counts within an hour"
	}
	if p.Next != nil {
		message += ". Upgrade to " + p.Next.Title + " at " + p.UpgradeURL
	}
	return NotInPlan("%s", message)
}

// Quantity formats an amount of a quota.
func Quantity(n float64) string { return strconv.FormatFloat(n, 'f', -1, 64) }
