package gateway

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"strconv"

	"github.com/bullpen-run/bullpen/proto"
)

// The codes of the error envelope.
const (
	codeValidation         = "validation_error"
	codeUnauthorized       = "unauthorized"
	codeForbidden          = "forbidden"
	codeNotFound           = "not_found"
	codeMethodNotAllowed   = "method_not_allowed"
	codeConflict           = "conflict"
	codeLengthRequired     = "length_required"
	codePayloadTooLarge    = "payload_too_large"
	codeUnsupportedMedia   = "unsupported_media_type"
	codeRange              = "range_not_satisfiable"
	codeIdempotency        = "idempotency_mismatch"
	codeRateLimited        = "rate_limited"
	codeInternal           = "internal"
	codeNotImplemented     = "not_implemented"
	codeServiceUnavailable = "service_unavailable"
	codeGatewayTimeout     = "gateway_timeout"
)

var (
	errUnauthorized   = errors.New("the API key is missing or not valid; send it as Authorization: Bearer sk-…")
	errForbidden      = errors.New("this route needs an API key with all rights")
	errNoRoute        = errors.New("there is nothing at this path; see /docs")
	errMethod         = errors.New("this path does not take that method; see the Allow header")
	errDraining       = errors.New("this server is shutting down; send the request again")
	errExpired        = errors.New("no worker was free in time; the execution was withdrawn and will not run; send it again")
	errNoAnswerInTime = errors.New("the execution did not end in time for an answer")
	errEncoded        = errors.New("a body with a Content-Encoding is not read; send it as it is")
	errIdempotency    = errors.New("this Idempotency-Key was used with another request; use a new key for a new request")
	errPending        = errors.New("the webhook is pending: it can be sent again once it was delivered or has failed")
	errNoDispatcher   = errors.New("no process that sends webhooks is ready, or has heard of this URL yet; send the request again")
	errThreadExists   = errors.New("there is a thread of that id already; choose another, or remove that one first")
	errBadURL         = errors.New("this URL was not made by this server for this method; ask for one at /v1/files/upload_url or download_url")
	errOldURL         = errors.New("this URL has expired, or the API key that asked for it was revoked; ask for another at /v1/files/upload_url or download_url")
	errLength         = errors.New("a file is sent with its Content-Length")
	errOverloaded     = errors.New("too many requests are open here; send the request again")
	errTransfers      = errors.New("too many files and archives of this organisation are on their way; send the request again")
	errRange          = errors.New("the range begins after the end of the file")
	errNoJob          = errors.New("this dead letter is a message that is no job, so there is nothing in it to run again; remove it when nobody needs it any more")
	errKeyRevoked     = errors.New("the API key that this job was submitted with was revoked, so it is not run again; whoever wants it has to submit it with another")
	errNotYet         = errors.New("the first request with this Idempotency-Key is still being accepted")
	errUnknownState   = errors.New("the queue did not confirm the execution in time; it was withdrawn; send it again")
)

// absentError says what is not there, and what to do.
type absentError string

func (e absentError) Error() string { return string(e) }

const (
	errNoWebhook    = absentError("the execution has no webhook: it asked for none, and its API key has no URL")
	errNoSettings   = absentError("this API key has no webhook settings; PUT them at /v1/webhook")
	errNoThread     = absentError("there is no thread of that id; see /v1/threads")
	errNoVersion    = absentError("there is no such thread, or it does not have that version; see /v1/threads/{id}")
	errNoFile       = absentError("there is no file at this path of the thread, or no such thread; links are not followed; see /v1/files/list")
	errNoDeadLetter = absentError("there is no dead letter of that id; see /v1/admin/dead-letters")
	errNoEndpoint   = absentError("deliveries to this URL do not fail; see /v1/webhook/endpoints for those that do")
)

// planError refuses what the plan of the key does not include. Waiting does not help.
type planError struct{ message string }

func (e *planError) Error() string { return e.message }

// bodyTooLargeError refuses a body above the cap, in bytes.
type bodyTooLargeError struct{ limit int64 }

func (e *bodyTooLargeError) Error() string {
	return fmt.Sprintf("body must be at most %d bytes", e.limit)
}

// unimplementedError refuses what the contract has and this version cannot act upon: nothing is accepted and then ignored.
type unimplementedError struct {
	what    string // with its verb
	instead string // what to do
}

func (e *unimplementedError) Error() string {
	return e.what + " not implemented by this server yet; " + e.instead
}

// disabledURLError refuses what would be delivered to a URL that nothing is delivered to any more.
type disabledURLError struct{ url string }

func (e *disabledURLError) Error() string {
	return "deliveries to " + e.url + " are disabled; once it answers again, POST its URL to /v1/webhook/endpoints/enable"
}

// acceptedError is a failure on our side after an execution was accepted. It may run, so no answer may make a client send it
// again, as 503 would.
type acceptedError struct{ err error }

func (e *acceptedError) Error() string { return "after acceptance: " + e.err.Error() }
func (e *acceptedError) Unwrap() error { return e.err }

// answer is how an error is told to a client.
type answer struct {
	status     int
	code       string
	message    string
	retryAfter int // seconds; 0 for no Retry-After
}

// answerTo is the one place that turns an error into an HTTP status. The plan is that of the key, for the words of refusals; id is the
// execution that the answer is about, empty for none.
func answerTo(err error, plan proto.Plan, id proto.TraceID) answer {
	var (
		field         *proto.FieldError
		refusal       *proto.Refusal
		overPlan      *planError
		tooLarge      *bodyTooLargeError
		unimplemented *unimplementedError
		accepted      *acceptedError
		bound         *proto.BoundError
		used          *usedImageError
		broken        *brokenSandboxError
		disabled      *disabledURLError
		busy          *proto.BusyError
		staged        *proto.StagedError
		room          *proto.RoomError
		absent        absentError
	)
	switch {
	case errors.As(err, &accepted):
		return answer{http.StatusInternalServerError, codeInternal, "something failed on our side after the execution was " +
			"accepted; it may run: " + lookUp(id), 0}
	case errors.Is(err, errNoDispatcher): // before what it wraps
		return answer{http.StatusServiceUnavailable, codeServiceUnavailable, errNoDispatcher.Error(), 1}
	case errors.As(err, &field):
		return answer{http.StatusBadRequest, codeValidation, field.Message, 0}
	case errors.Is(err, errUnauthorized):
		return answer{http.StatusUnauthorized, codeUnauthorized, errUnauthorized.Error(), 0}
	case errors.Is(err, errForbidden):
		return answer{http.StatusForbidden, codeForbidden, errForbidden.Error(), 0}
	case errors.Is(err, errBadURL):
		return answer{http.StatusForbidden, codeForbidden, errBadURL.Error(), 0}
	case errors.Is(err, errOldURL):
		return answer{http.StatusForbidden, codeForbidden, errOldURL.Error(), 0}
	case errors.Is(err, errNoRoute):
		return answer{http.StatusNotFound, codeNotFound, errNoRoute.Error(), 0}
	case errors.As(err, &absent):
		return answer{http.StatusNotFound, codeNotFound, absent.Error(), 0}
	case errors.Is(err, proto.ErrNotFound):
		return answer{http.StatusNotFound, codeNotFound, "nothing of that id is known to this API key", 0}
	case errors.Is(err, errMethod):
		return answer{http.StatusMethodNotAllowed, codeMethodNotAllowed, errMethod.Error(), 0}
	case errors.Is(err, errPending):
		return answer{http.StatusConflict, codeConflict, errPending.Error(), 0}
	case errors.Is(err, errThreadExists):
		return answer{http.StatusConflict, codeConflict, errThreadExists.Error(), 0}
	case errors.Is(err, errNoJob):
		return answer{http.StatusConflict, codeConflict, errNoJob.Error(), 0}
	case errors.Is(err, errKeyRevoked):
		return answer{http.StatusConflict, codeConflict, errKeyRevoked.Error(), 0}
	case errors.As(err, &busy):
		return answer{http.StatusConflict, codeConflict, busy.Error() + "; wait until that has ended, cancel it, or use another thread", 0}
	case errors.As(err, &staged):
		return answer{http.StatusConflict, codeConflict, staged.Error() + "; run one first", 0}
	case errors.As(err, &room):
		return answer{http.StatusConflict, codeConflict, room.Error() + "; remove files in an execution first, or upload less in their place", 0}
	case errors.As(err, &disabled):
		return answer{http.StatusConflict, codeConflict, disabled.Error(), 0}
	case errors.Is(err, proto.ErrConflict):
		return answer{http.StatusConflict, codeConflict, "somebody else changed this at the same time; send the request again", 0}
	case errors.Is(err, proto.ErrExists):
		return answer{http.StatusConflict, codeConflict, "there is one of that name already; choose another, or replace it", 0}
	case errors.As(err, &bound):
		return answer{http.StatusConflict, codeConflict, bound.Error(), 0}
	case errors.As(err, &used):
		return answer{http.StatusConflict, codeConflict, used.Error(), 0}
	case errors.Is(err, errLength):
		return answer{http.StatusLengthRequired, codeLengthRequired, errLength.Error(), 0}
	case errors.As(err, &tooLarge):
		return answer{http.StatusRequestEntityTooLarge, codePayloadTooLarge, tooLarge.Error(), 0}
	case errors.Is(err, errEncoded):
		return answer{http.StatusUnsupportedMediaType, codeUnsupportedMedia, errEncoded.Error(), 0}
	case errors.Is(err, errRange):
		return answer{http.StatusRequestedRangeNotSatisfiable, codeRange, errRange.Error(), 0}
	case errors.Is(err, errIdempotency):
		return answer{http.StatusUnprocessableEntity, codeIdempotency, errIdempotency.Error(), 0}
	case errors.Is(err, errTransfers):
		return answer{http.StatusTooManyRequests, codeRateLimited, errTransfers.Error(), 1}
	case errors.As(err, &overPlan):
		return answer{http.StatusTooManyRequests, codeRateLimited, overPlan.message, 0}
	case errors.As(err, &refusal):
		return answerToRefusal(refusal, plan)
	case errors.As(err, &broken):
		return answer{http.StatusInternalServerError, codeInternal, broken.Error(), 0}
	case errors.As(err, &unimplemented):
		return answer{http.StatusNotImplemented, codeNotImplemented, unimplemented.Error(), 0}
	case errors.Is(err, errOverloaded):
		return answer{http.StatusServiceUnavailable, codeServiceUnavailable, errOverloaded.Error(), 1}
	case errors.Is(err, errDraining):
		return answer{http.StatusServiceUnavailable, codeServiceUnavailable, errDraining.Error(), 2}
	case errors.Is(err, errExpired):
		return answer{http.StatusServiceUnavailable, codeServiceUnavailable, errExpired.Error(), 1}
	case errors.Is(err, errUnknownState):
		return answer{http.StatusServiceUnavailable, codeServiceUnavailable, errUnknownState.Error(), 2}
	case errors.Is(err, errNotYet):
		return answer{http.StatusGatewayTimeout, codeGatewayTimeout, errNotYet.Error() + "; send it again under that key", 0}
	case errors.Is(err, errNoAnswerInTime):
		return answer{http.StatusGatewayTimeout, codeGatewayTimeout, errNoAnswerInTime.Error() + "; it is recorded: " + lookUp(id), 0}
	case errors.Is(err, context.DeadlineExceeded):
		return answer{http.StatusServiceUnavailable, codeServiceUnavailable, "the queue does not answer; send the request again", 2}
	default:
		return answer{http.StatusInternalServerError, codeInternal, "something failed on our side; the server's log tells more " +
			"under this X-Request-Id", 0}
	}
}

// lookUp tells how to find out about an execution, also whoever keeps the body of an answer without its headers.
func lookUp(id proto.TraceID) string { return "ask for it at /v1/executions/" + string(id) }

func answerToRefusal(r *proto.Refusal, plan proto.Plan) answer {
	next, upgradable := proto.PlanByName(plan.Next)
	switch r.Reason {
	case proto.RefusedConcurrency:
		message := fmt.Sprintf("concurrent execution limit reached (%d/%d).", r.Used, r.Limit)
		if upgradable {
			message += fmt.Sprintf(" Upgrade to %s for %d concurrent executions.", next.Title, next.Concurrent)
		}
		return answer{http.StatusTooManyRequests, codeRateLimited, message, 1}
	case proto.RefusedKeyConcurrency:
		message := fmt.Sprintf("concurrent execution limit of this API key reached (%d/%d).", r.Used, r.Limit)
		return answer{http.StatusTooManyRequests, codeRateLimited, message, 1}
	case proto.RefusedQueueFull:
		message := fmt.Sprintf("queued execution limit reached (%d/%d).", r.Used, r.Limit)
		if upgradable {
			message += fmt.Sprintf(" Upgrade to %s for %d queued executions.", next.Title, next.MaxQueued)
		}
		return answer{http.StatusTooManyRequests, codeRateLimited, message, 5}
	default:
		return answer{http.StatusServiceUnavailable, codeServiceUnavailable, "the queue cannot take this now; send it again", 2}
	}
}

// writeError answers with the error envelope of the execute API.
func (s *Server) writeError(w http.ResponseWriter, r *http.Request, err error) {
	info := infoOf(r.Context())
	info.err = err
	a := answerTo(err, info.plan, info.trace)
	h := w.Header()
	switch a.status {
	case http.StatusUnauthorized:
		h.Set("WWW-Authenticate", "Bearer")
	case http.StatusRequestEntityTooLarge:
		h.Set("Connection", "close") // the rest of the body is not worth reading
	}
	if a.retryAfter > 0 {
		h.Set("Retry-After", strconv.Itoa(a.retryAfter))
	}
	body := proto.AppendJSONString([]byte(`{"error":`), a.code)
	body = proto.AppendJSONString(append(body, `,"message":`...), a.message)
	writeJSON(w, a.status, append(body, '}'))
}

// handle makes a handler of a function that gives what went wrong. After the answer has begun, an error can only be told by
// breaking the connection off, so that nobody takes half an answer for a whole one.
func (s *Server) handle(f func(w http.ResponseWriter, r *http.Request) error) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		err := f(w, r)
		if err == nil {
			return
		}
		info := infoOf(r.Context())
		// The context of a request also ends when the deadline for its body passes; that client gets its answer.
		var field *proto.FieldError
		gone := r.Context().Err() != nil && !errors.As(err, &field)
		if info.rec.status != 0 || gone {
			info.err = err
			panic(http.ErrAbortHandler)
		}
		s.writeError(w, r, err)
	}
}

// writeJSON answers with body and a line break, so that answers look right on a terminal.
func writeJSON(w http.ResponseWriter, status int, body []byte) {
	body = append(body, '\n')
	jsonHeader(w.Header())
	w.Header().Set("Content-Length", strconv.Itoa(len(body)))
	w.WriteHeader(status)
	_, _ = w.Write(body) // a client that is gone is none of our errors
	// At once: the client need not wait for what is logged and counted of the request.
	_ = http.NewResponseController(w).Flush()
}

func jsonHeader(h http.Header) {
	h.Set("Content-Type", typeJSON)
	h.Set("X-Content-Type-Options", "nosniff")
	h.Set("Cache-Control", "no-store")
}
