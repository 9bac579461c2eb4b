package agent

import (
	"errors"
	"fmt"

	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/proto/api"
)

// ClientError returns an error that clients see through [Public], while the log gets all of it.
func ClientError(err error) error {
	if _, ok := errors.AsType[*api.Error](err); ok || err == nil {
		return err
	}
	return fmt.Errorf("%w: %w", Public(err), err)
}

// Public returns the error of a run for its client.
func Public(err error) *api.Error {
	if known, ok := errors.AsType[*api.Error](err); ok {
		return known
	}
	if field, ok := errors.AsType[*proto.FieldError](err); ok {
		return api.Errorf(api.CodeValidation, "%s", field.Message)
	}
	if errors.Is(err, proto.ErrConflict) { // only a log has conflicts
		return api.Errorf(api.CodeConflict, "the run was removed")
	}
	up, ok := errors.AsType[*UpstreamError](err)
	if !ok {
		return api.Errorf(api.CodeInternal,
			"something failed on our side; the server's log has the cause under this request id")
	}
	e := api.Errorf(api.CodeInternal, "%s", up.Message)
	e.RetryAfter = up.RetryAfter
	switch up.Kind {
	case UpstreamRejected:
		e.Code = api.CodeValidation
	case UpstreamTooLong:
		e.Code, e.Reason = api.CodeValidation, api.ReasonTooLong
	case UpstreamNoModel:
		e.Code = api.CodeNotFound
	case UpstreamRateLimited:
		e.Code, e.RetryAfter = api.CodeRateLimited, max(1, up.RetryAfter)
	case UpstreamOverloaded:
		e.Code, e.RetryAfter = api.CodeServiceUnavailable, max(1, up.RetryAfter)
	case UpstreamTimeout:
		e.Code = api.CodeGatewayTimeout
	case UpstreamDenied:
		e.Permanent = true // until its operator has changed the key
	case UpstreamFailed:
	}
	return e
}
