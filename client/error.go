package client

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strconv"
	"strings"
	"time"

	"github.com/bullpen-run/bullpen/proto"
)

// maxErrorBody is the largest part of an error's body that is read, in bytes.
const maxErrorBody = 64 << 10

// ErrUnknownOutcome is wrapped by the error of a request whose connection broke before the answer:
// the server may have carried it out.
var ErrUnknownOutcome = errors.New("the server may have carried out the request")

// Error is an answer with an error status.
type Error struct {
	Status     int           // HTTP status
	Code       string        // of the API, such as validation_error; empty if something other than bullpen answered
	Message    string        // what is wrong, and what to do about it
	TraceID    proto.TraceID // of the execution, if the request is about one
	RequestID  string        // of the request, as the server's log has it
	RetryAfter time.Duration // after which the server wants to be asked again; 0 if it does not say
}

// Error returns the message with the status, the code and the ids.
func (e *Error) Error() string {
	var b strings.Builder
	fmt.Fprintf(&b, "%s (HTTP %d", e.Message, e.Status)
	for _, s := range []string{e.Code, string(e.TraceID), e.RequestID} {
		if s != "" {
			b.WriteString(", " + s)
		}
	}
	return b.String() + ")"
}

// temporary reports whether the same request may succeed later. A 429 without a time is a limit of
// the plan, which waiting does not change.
func (e *Error) temporary() bool {
	return e.Status == http.StatusServiceUnavailable || e.Status == http.StatusTooManyRequests && e.RetryAfter > 0
}

// UnreachableError is returned if no connection to the server could be made.
type UnreachableError struct {
	URL string // of the server
	Err error
}

// Error names the server and the cause.
func (e *UnreachableError) Error() string { return fmt.Sprintf("cannot reach %s: %v", e.URL, e.Err) }

// Unwrap returns the cause.
func (e *UnreachableError) Unwrap() error { return e.Err }

// LostError is returned if the server became unreachable while an execution was followed. The
// execution may continue: see [Client.Follow].
type LostError struct {
	ID    proto.TraceID
	After int64 // number of the last event that was returned
	Err   error
}

// Error names the execution and the cause.
func (e *LostError) Error() string {
	return fmt.Sprintf("lost the server while following %s: %v", e.ID, e.Err)
}

// Unwrap returns the cause.
func (e *LostError) Unwrap() error { return e.Err }

func readError(resp *http.Response) *Error {
	e := &Error{
		Status:    resp.StatusCode,
		TraceID:   proto.TraceID(resp.Header.Get("X-Trace-Id")),
		RequestID: resp.Header.Get("X-Request-Id"),
	}
	if s, err := strconv.Atoi(resp.Header.Get("Retry-After")); err == nil && s >= 0 {
		e.RetryAfter = time.Duration(s) * time.Second
	}
	var envelope struct {
		Error   string `json:"error"`
		Message string `json:"message"`
		Type    string `json:"type"` // of the Sandbox Agent API's errors, with the code at its end
		Detail  string `json:"detail"`
	}
	body, err := io.ReadAll(io.LimitReader(resp.Body, maxErrorBody))
	if err == nil {
		err = json.Unmarshal(body, &envelope)
	}
	if code, ok := strings.CutPrefix(envelope.Type, "urn:sandbox-agent:error:"); ok {
		envelope.Error, envelope.Message = code, envelope.Detail
	}
	if err != nil || envelope.Error == "" {
		e.Message = "the answer is not one of bullpen's: check the URL, and the proxies on the way"
		return e
	}
	e.Code, e.Message = envelope.Error, envelope.Message
	return e
}
