package api

import (
	"fmt"
	"maps"
	"net/http"

	"github.com/bullpen-run/bullpen/proto"
)

// Code is the code of an error. It decides the HTTP status.
type Code string

// The codes. The list may only grow.
const (
	CodeValidation         Code = "validation_error"
	CodeUnauthorized       Code = "unauthorized"
	CodeForbidden          Code = "forbidden"
	CodeNotFound           Code = "not_found"
	CodeMethodNotAllowed   Code = "method_not_allowed"
	CodeRequestTimeout     Code = "request_timeout"
	CodeConflict           Code = "conflict"
	CodeContextLost        Code = "context_lost"
	CodeLengthRequired     Code = "length_required"
	CodePayloadTooLarge    Code = "payload_too_large"
	CodeUnsupportedMedia   Code = "unsupported_media_type"
	CodeRange              Code = "range_not_satisfiable"
	CodePreconditionFailed Code = "precondition_failed"
	CodeIdempotency        Code = "idempotency_mismatch"
	CodeRateLimited        Code = "rate_limited"
	CodeInternal           Code = "internal"
	CodeNotImplemented     Code = "not_implemented"
	CodeServiceUnavailable Code = "service_unavailable"
	CodeDiskFull           Code = "disk_full"
	CodeGatewayTimeout     Code = "gateway_timeout"
)

// CodeInfo documents a code.
type CodeInfo struct {
	Code    Code
	Status  int
	Title   string // the name in the OpenAPI document
	Doc     string
	Example string // a message
	headers object // of the answer, in the OpenAPI document
}

// Codes returns all codes by status.
func Codes() []CodeInfo {
	header := func(name, doc string, schema object) object {
		return object{name: object{"description": doc, "schema": schema}}
	}
	retryAfter := header("Retry-After", "Seconds, if waiting helps.",
		object{"type": "integer", "minimum": 1, "maximum": 30})
	limited := header("X-Should-Retry", "Set if the plan does not include this, or a monthly quota is used up.",
		object{"type": "string", "const": "false"})
	maps.Copy(limited, retryAfter)
	unavailable := header("X-Should-Retry", "Set if no worker offers what the execution needs.",
		object{"type": "string", "const": "false"})
	maps.Copy(unavailable, retryAfter)
	return []CodeInfo{
		{
			CodeValidation, http.StatusBadRequest, "BadRequest",
			"The request is not valid; the message names the field.",
			"code must be between 1 byte and 1 MB", nil,
		},
		{
			CodeUnauthorized, http.StatusUnauthorized, "Unauthorized",
			"The API key is missing or not valid, or the session has ended.",
			"the API key is missing or not valid; send it as Authorization: Bearer sk-…",
			header("WWW-Authenticate", "The scheme to use.", object{"type": "string", "const": "Bearer"}),
		},
		{
			CodeForbidden, http.StatusForbidden, "Forbidden",
			"The API key does not have the scope that the body names, or is not a global administrator's; or it is not for " +
				"requests from this address; or it may not choose the sandbox profile or the image; or the signed URL has " +
				"expired, or is for another method; or a page of another origin sent a request with a session; or the login " +
				"was refused.",
			"this needs an API key with the scope files", nil,
		},
		{
			CodeNotFound, http.StatusNotFound, "NotFound",
			"The API key's organisation has nothing with this id.",
			"nothing of that id is known to this API key", nil,
		},
		{
			CodeMethodNotAllowed, http.StatusMethodNotAllowed, "MethodNotAllowed",
			"The path does not take this method; the header Allow lists the methods that it takes.",
			"this path does not take that method; see the Allow header", nil,
		},
		{
			CodeRequestTimeout, http.StatusRequestTimeout, "RequestTimeout",
			"The body stalled, or took longer than 30 seconds; uploads and images may take longer, if they do not stall.",
			"body did not arrive within 30s", nil,
		},
		{
			CodeConflict, http.StatusConflict, "Conflict",
			"Another request changed the same thing at the same time, or the state of something else forbids the request; " +
				"the message says which. " +
				"With the reason missing_reference, the API key or its sandbox names something that does not exist, and the " +
				"message says who can create it.",
			"somebody else changed this at the same time; send the request again",
			header("X-Should-Retry", "Set if the request will be refused until somebody creates what the message names.",
				object{"type": "string", "const": "false"}),
		},
		{
			CodeContextLost, http.StatusGone, "ContextLost",
			"The memory of a context is gone; the message says why. Restart the context.",
			"the context's memory is gone (exited): the interpreter has ended (exit status 3); restart the context", nil,
		},
		{
			CodeLengthRequired, http.StatusLengthRequired, "LengthRequired",
			"The body has no Content-Length.",
			"a file is sent with its Content-Length", nil,
		},
		{
			CodePayloadTooLarge, http.StatusRequestEntityTooLarge, "TooLarge",
			"The body is larger than 8 MiB; an image, larger than 4 GiB; an upload, larger than its URL allows.",
			"body must be at most 8388608 bytes", nil,
		},
		{
			CodeUnsupportedMedia, http.StatusUnsupportedMediaType, "UnsupportedMedia",
			"The body has a Content-Encoding. Bodies must not be compressed.",
			"a body with a Content-Encoding is not read; send it as it is",
			header("Accept-Encoding", "The encodings that are read.",
				object{"type": "string", "enum": []string{"identity", "gzip, zstd"}}),
		},
		{
			CodeRange, http.StatusRequestedRangeNotSatisfiable, "RangeNotSatisfiable",
			"The range begins after the end of the file.",
			"the range begins after the end of the file",
			header("Content-Range", "The length of the file.", object{"type": "string"}),
		},
		{
			CodePreconditionFailed, http.StatusPreconditionFailed, "PreconditionFailed",
			"If-Match does not name the present ETag: the object was changed since it was read.",
			`this was changed since it was read: its ETag is "c1f26d0b3ea5" now; read it again, then send the change again`, nil,
		},
		{
			CodeIdempotency, http.StatusUnprocessableEntity, "IdempotencyMismatch",
			"The Idempotency-Key was used with another request.",
			"this Idempotency-Key was used with another request; use a new key for a new request", nil,
		},
		{
			CodeRateLimited, http.StatusTooManyRequests, "TooManyRequests",
			"The plan does not include this, or the organisation has used up a monthly quota of it; or its limit of " +
				"concurrent or queued executions or the request rate of the API key is reached, or 16 files, archives and " +
				"reports of the " +
				"organisation are being transferred, or it makes too many administrative requests. A limit that ends by waiting " +
				"has a Retry-After. What the plan does not include has X-Should-Retry: " +
				"false, and permanent and the reason plan_limit in the body.",
			"concurrent execution limit reached (5/5). Upgrade to Pro for 100 concurrent executions.",
			limited,
		},
		{
			CodeInternal, http.StatusInternalServerError, "Internal",
			"A failure of the server.",
			"something failed on our side; the server's log has the cause under this X-Request-Id", nil,
		},
		{
			CodeNotImplemented, http.StatusNotImplemented, "NotImplemented",
			"A valid field or route that this server does not support yet.",
			"source volume is not implemented by this server yet; use source thread", nil,
		},
		{
			CodeServiceUnavailable, http.StatusServiceUnavailable, "Unavailable",
			"No worker was free in time, too much is open or queued, or the server is shutting down. Without a Retry-After " +
				"and with the reason no_capable_worker: no worker offers what the execution needs, as the message says.",
			"no worker was free in time; the execution was withdrawn and will not run; send it again", unavailable,
		},
		{
			CodeDiskFull, http.StatusServiceUnavailable, "DiskFull",
			"The server's disk has less free space than it keeps in reserve.",
			"the server's disk is full; send the request again later", retryAfter,
		},
		{
			CodeGatewayTimeout, http.StatusGatewayTimeout, "GatewayTimeout",
			"No result within the timeout and 8 s, or the timeout, N and 5 s with Prefer: wait=N; the execution goes on and " +
				"is recorded.",
			"the execution did not end in time for an answer; it is recorded: ask for it at /v1/executions/" + exampleTrace, nil,
		},
	}
}

// Status returns the HTTP status of a code.
func (c Code) Status() int {
	for _, info := range Codes() {
		if info.Code == c {
			return info.Status
		}
	}
	return http.StatusInternalServerError
}

// Error is the body of every answer that is not a success, and the error that becomes one.
type Error struct {
	_ struct{} `doc:"The body of every error."`

	Code       Code        `json:"error"`
	Message    string      `json:"message" doc:"What is wrong, and what to do about it."`
	Permanent  bool        `json:"permanent,omitempty" doc:"Retrying does not help: the request will be refused until the plan changes, until the month in the message ends, or until the missing object in the message is created. The header X-Should-Retry is false. An extension of the public contract."`
	Reason     Reason      `json:"reason,omitempty" doc:"Distinguishes errors of the same code. An extension of the public contract."`
	Scope      proto.Scope `json:"scope,omitempty" doc:"The scope that the API key needs."`
	RetryAfter int         `json:"-"` // seconds for the header Retry-After; 0 for none
}

func (e *Error) Error() string { return e.Message }

// Reason distinguishes errors of the same code. The public contract has no such field, and its codes
// are too few.
type Reason string

// The reasons.
const (
	ReasonScope  Reason = "insufficient_scope"    // the key does not have a scope
	ReasonGlobal Reason = "global_admin_required" // the key is not a global administrator's
	ReasonPlan   Reason = "plan_limit"            // the plan does not include the request

	ReasonSuspended Reason = "organisation_suspended"
	ReasonDeleted   Reason = "organisation_deleted"
	ReasonSession   Reason = "session_organisation" // X-Bullpen-Org does not name the organisation of the session
	ReasonAddress   Reason = "address_not_allowed"  // the key is not for requests from this address
	ReasonProfile   Reason = "profile_not_allowed"  // requests with the key may not choose the sandbox profile
	ReasonImage     Reason = "image_not_allowed"    // requests with the key may not choose an image
	ReasonNoWorker  Reason = "no_capable_worker"    // no worker offers what the execution needs
	ReasonMissing   Reason = "missing_reference"    // the key, or its sandbox, names something that does not exist

	// ReasonCallsMade is the reason of an error of an agent's request that has carried out calls. A
	// client that repeats the request carries them out again.
	ReasonCallsMade Reason = "calls_carried_out"
	// ReasonTooLong is the reason of an error of a conversation that is longer than its model can read.
	ReasonTooLong Reason = "context_length_exceeded"
)

// MissingScope returns an [Error] about an API key without a scope.
func MissingScope(s proto.Scope) *Error {
	return &Error{
		Code: CodeForbidden, Reason: ReasonScope, Scope: s,
		Message: "this needs an API key with the scope " + string(s),
	}
}

// NotGlobal returns an [Error] about something that only a global administrator may do.
func NotGlobal(format string, args ...any) *Error {
	return &Error{Code: CodeForbidden, Reason: ReasonGlobal, Message: fmt.Sprintf(format, args...)}
}

// Errorf returns an [Error].
func Errorf(code Code, format string, args ...any) *Error {
	return &Error{Code: code, Message: fmt.Sprintf(format, args...)}
}

// NotInPlan returns an [Error] about a request that the plan does not include.
func NotInPlan(format string, args ...any) *Error {
	return &Error{Code: CodeRateLimited, Reason: ReasonPlan, Message: fmt.Sprintf(format, args...), Permanent: true}
}

// NoWorker returns an [Error] about an execution that no worker can run, and none that can is expected.
func NoWorker(missing *proto.Missing) *Error {
	return &Error{Code: CodeServiceUnavailable, Reason: ReasonNoWorker, Message: missing.Message, Permanent: true}
}

// DiskFull returns an [Error] about a server without space.
func DiskFull() *Error {
	return &Error{Code: CodeDiskFull, Message: "the server's disk is full; send the request again later", RetryAfter: 30}
}

// Unavailable returns an [Error] that asks the client to try again after a number of seconds.
func Unavailable(retryAfter int, message string) *Error {
	return &Error{Code: CodeServiceUnavailable, Message: message, RetryAfter: retryAfter}
}
