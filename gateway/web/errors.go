package web

import (
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"net/url"
	"strconv"

	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/proto/api"
)

// Errors that several handlers return or compare with. All other errors are made where they occur.
var (
	ErrNoRoute    = api.Errorf(api.CodeNotFound, "there is nothing at this path; see /docs")
	ErrDraining   = api.Unavailable(2, "this server is shutting down; send the request again")
	ErrOverloaded = api.Unavailable(1, "too many requests are open here; send the request again")
	// ErrHeadOnly ends the handling of a HEAD request whose answer has begun.
	ErrHeadOnly = errors.New("the headers are the whole answer")
	// ErrDeadline is returned by waits that reach their deadline, or end because the server shuts
	// down. Clients never see it.
	ErrDeadline = errors.New("the execution did not end in time")
)

// Unauthorized returns the error about a request without a valid API key.
func Unauthorized() error {
	return api.Errorf(api.CodeUnauthorized, "the API key is missing or not valid; send it as Authorization: Bearer sk-…")
}

// BodyTooLarge returns the error about a body of more than limit bytes.
func BodyTooLarge(limit int64) error {
	return api.Errorf(api.CodePayloadTooLarge, "body must be at most %d bytes", limit)
}

// NotImplemented refuses a part of the API that this version does not support. what ends with its
// verb.
func NotImplemented(what, instead string) error {
	return api.Errorf(api.CodeNotImplemented, "%s not implemented by this server yet; %s", what, instead)
}

// StatusHint returns the part of a message that names the path of an execution. It contains the id
// for clients that keep only the body.
func StatusHint(id proto.TraceID) string { return "ask for it at /v1/executions/" + string(id) }

// AfterAcceptance wraps a failure after an execution was accepted. The execution may run, so the
// answer must not invite the client to send the request again, as 503 would.
func AfterAcceptance(id proto.TraceID, err error) error {
	return fmt.Errorf("%w: %w", api.Errorf(api.CodeInternal,
		"something failed on our side after the execution was accepted; it may run: %s", StatusHint(id)), err)
}

// SubmitError returns the error to answer with when the submission of execution id failed.
func SubmitError(i *Info, id proto.TraceID, err error) error {
	switch {
	case errors.Is(err, proto.ErrMayRun):
		i.Trace = id
		i.AnswerHeader().Set("X-Trace-Id", string(id))
		return AfterAcceptance(id, err)
	case errors.Is(err, proto.ErrNotConfirmed):
		return fmt.Errorf("%w: %w",
			api.Unavailable(2, "the queue did not confirm the execution in time; it was withdrawn; send it again"), err)
	case errors.Is(err, proto.ErrKeyReused):
		return api.Errorf(api.CodeIdempotency,
			"this Idempotency-Key was used with another request; use a new key for a new request")
	default:
		return err
	}
}

// ThreadError wraps an error of an operation on a thread. ErrNotFound gets the message for a thread.
func ThreadError(operation, id string, err error) error {
	if errors.Is(err, proto.ErrNotFound) {
		return api.Errorf(api.CodeNotFound, "there is no thread of that id; see /v1/threads")
	}
	return fmt.Errorf("%s thread %s: %w", operation, id, err)
}

// writeError answers with the error's status and body.
func (c *Core) writeError(w http.ResponseWriter, r *http.Request, err error) {
	info := infoOf(r.Context())
	info.Err = err
	e := api.NewError(err)
	status := e.Code.Status()
	h := w.Header()
	switch status {
	case http.StatusUnauthorized:
		h.Set("WWW-Authenticate", "Bearer")
	case http.StatusRequestEntityTooLarge:
		h.Set("Connection", "close") // the rest of the body is not read
	}
	if e.RetryAfter > 0 {
		h.Set("Retry-After", strconv.Itoa(e.RetryAfter))
	}
	if info.WriteError != nil {
		info.WriteError(w, e)
		return
	}
	body := proto.AppendJSONString([]byte(`{"error":`), string(e.Code))
	body = proto.AppendJSONString(append(body, `,"message":`...), e.Message)
	if e.Permanent {
		h.Set("X-Should-Retry", "false") // client libraries respect it
		body = append(body, `,"permanent":true`...)
	}
	if e.Reason != "" {
		body = proto.AppendJSONString(append(body, `,"reason":`...), string(e.Reason))
	}
	if e.Scope != "" {
		body = proto.AppendJSONString(append(body, `,"scope":`...), string(e.Scope))
	}
	WriteJSON(w, status, append(body, '}'))
}

// Handle turns a function that returns an error into a handler. An error after the answer has begun
// breaks the connection off, so that no client takes a part of an answer for the whole. Parameters
// in the query that are given twice or are malformed are refused: a proxy in front may read another
// one.
func (c *Core) Handle(f func(w http.ResponseWriter, r *Request) error) http.HandlerFunc {
	return c.Answered(func(w http.ResponseWriter, r *Request) error {
		if err := checkQuery(r.URL.RawQuery); err != nil {
			return err
		}
		return f(w, r)
	})
}

// Answered is handle without the check of the query.
func (c *Core) Answered(f func(w http.ResponseWriter, r *Request) error) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		request := RequestOf(r)
		err := f(w, request)
		if err == nil || errors.Is(err, ErrHeadOnly) {
			return
		}
		info := request.Info
		// The request's context is also cancelled when the deadline for the body passes; that
		// client still gets an answer.
		var late *api.Error
		gone := r.Context().Err() != nil && (!errors.As(err, &late) || late.Code != api.CodeRequestTimeout)
		if info.Rec.status != 0 || gone {
			info.Err = err
			panic(http.ErrAbortHandler)
		}
		c.writeError(w, r, err)
	}
}

// checkQuery refuses a query with a malformed or repeated parameter.
func checkQuery(raw string) error {
	query, err := url.ParseQuery(raw)
	if err != nil {
		return proto.FieldErrorf("query", "is malformed: %v", err)
	}
	for name, values := range query {
		if len(values) > 1 {
			return proto.FieldErrorf(proto.Shorten(name), "must be given only once")
		}
	}
	return nil
}

// WriteValue answers with the JSON form of v.
func WriteValue(w http.ResponseWriter, status int, v any) error {
	body, err := json.Marshal(v)
	if err != nil {
		return fmt.Errorf("encode answer: %w", err)
	}
	WriteJSON(w, status, body)
	return nil
}

// WriteJSON answers with body and a line break.
func WriteJSON(w http.ResponseWriter, status int, body []byte) {
	body = append(body, '\n')
	JSONHeader(w.Header())
	w.Header().Set("Content-Length", strconv.Itoa(len(body)))
	w.WriteHeader(status)
	_, _ = w.Write(body) // the client may be gone
	// Flush now: the client need not wait for logging and metrics.
	_ = http.NewResponseController(w).Flush()
}

// StreamHeader sets the headers of an answer that is sent piece by piece.
func StreamHeader(h http.Header, mediaType string) {
	h.Set("Content-Type", mediaType)
	h.Set("Cache-Control", "no-store")
	h.Set("X-Accel-Buffering", "no")
}

// JSONHeader sets the headers of an answer that is JSON.
func JSONHeader(h http.Header) {
	h.Set("Content-Type", TypeJSON)
	h.Set("Cache-Control", "no-store")
}
