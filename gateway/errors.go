package gateway

import (
	"context"
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
	errNoRoute    = api.Errorf(api.CodeNotFound, "there is nothing at this path; see /docs")
	errDraining   = api.Unavailable(2, "this server is shutting down; send the request again")
	errOverloaded = api.Unavailable(1, "too many requests are open here; send the request again")
	errDiskFull   = &api.Error{Code: api.CodeDiskFull, Message: "the server's disk is full; send the request again later", RetryAfter: 30}
	errNoWebhook  = api.Errorf(api.CodeNotFound, "the execution has no webhook: it asked for none, and its API key has no URL")
	// errHeadOnly ends the handling of a HEAD request whose answer has begun.
	errHeadOnly = errors.New("the headers are the whole answer")
	// errExpired is wrapped by [Server.noWorkerFree].
	errExpired = errors.New("expired in the queue")
	// errDeadline is returned by waits that reach their deadline, or end because the server shuts
	// down. Clients never see it.
	errDeadline = errors.New("the execution did not end in time")
)

func unauthorized() error {
	return api.Errorf(api.CodeUnauthorized, "the API key is missing or not valid; send it as Authorization: Bearer sk-…")
}

func bodyTooLarge(limit int64) error {
	return api.Errorf(api.CodePayloadTooLarge, "body must be at most %d bytes", limit)
}

// notImplemented refuses a part of the API that this version does not support. what ends with its
// verb.
func notImplemented(what, instead string) error {
	return api.Errorf(api.CodeNotImplemented, "%s not implemented by this server yet; %s", what, instead)
}

// statusHint returns the part of a message that names the path of an execution. It contains the id
// for clients that keep only the body.
func statusHint(id proto.TraceID) string { return "ask for it at /v1/executions/" + string(id) }

// afterAcceptance wraps a failure after an execution was accepted. The execution may run, so the
// answer must not invite the client to send the request again, as 503 would.
func afterAcceptance(id proto.TraceID, err error) error {
	return fmt.Errorf("%w: %w", api.Errorf(api.CodeInternal,
		"something failed on our side after the execution was accepted; it may run: %s", statusHint(id)), err)
}

// toAPI returns the error that a client sees. The messages about limits name the next plan after
// plan.
func toAPI(err error, plan *entitlement) *api.Error {
	var (
		known     *api.Error
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
		return api.Errorf(api.CodeValidation, "%s", field.Message)
	case errors.As(err, &rejection):
		return rejectionToAPI(rejection, plan)
	case errors.As(err, &history):
		return api.Unavailable(historyRetry, "the list of executions cannot be read now: "+history.Reason+"; executions go on, and each can be read by its trace id")
	case errors.As(err, &conflict):
		return api.Errorf(api.CodeConflict, "%s", conflict.Error())
	case errors.Is(err, proto.ErrNotFound):
		return api.Errorf(api.CodeNotFound, "nothing of that id is known to this API key")
	case errors.Is(err, proto.ErrConflict):
		return api.Errorf(api.CodeConflict, "somebody else changed this at the same time; send the request again")
	case errors.Is(err, proto.ErrExists):
		return api.Errorf(api.CodeConflict, "there is one of that name already; choose another, or replace it")
	case errors.Is(err, context.DeadlineExceeded):
		return api.Unavailable(2, "the queue does not answer; send the request again")
	default:
		return api.Errorf(api.CodeInternal, "something failed on our side; the server's log has the cause under this X-Request-Id")
	}
}

func rejectionToAPI(r *proto.Rejection, plan *entitlement) *api.Error {
	limited := func(retryAfter int, kind, upgrade string) *api.Error {
		e := api.Errorf(api.CodeRateLimited, "%s reached (%d/%d).%s", kind, r.Used, r.Limit, upgrade)
		e.RetryAfter = retryAfter
		return e
	}
	upgrade := func(limit func(*proto.Plan) int, kind string) string {
		if plan.next == nil {
			return ""
		}
		if n := limit(plan.next); n > 0 {
			return fmt.Sprintf(" Upgrade to %s for %d %s executions.", plan.next.Title, n, kind)
		}
		return fmt.Sprintf(" Upgrade to %s for any number of %s executions.", plan.next.Title, kind)
	}
	switch r.Reason {
	case proto.RejectedConcurrency:
		return limited(1, "concurrent execution limit", upgrade(func(p *proto.Plan) int { return p.Concurrent }, "concurrent"))
	case proto.RejectedKeyConcurrency:
		return limited(1, "concurrent execution limit of this API key", "")
	case proto.RejectedQueueFull:
		return limited(5, "queued execution limit", upgrade(func(p *proto.Plan) int { return p.MaxQueued }, "queued"))
	case proto.RejectedPipelines:
		return limited(30, "limit of pipelines that run at the same time", "")
	case proto.RejectedDiskFull:
		return errDiskFull
	default:
		return api.Unavailable(2, "the queue cannot take this now; send it again")
	}
}

// writeError answers with the error's status and body.
func (s *Server) writeError(w http.ResponseWriter, r *http.Request, err error) {
	info := infoOf(r.Context())
	info.err = err
	e := toAPI(err, &info.plan)
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
	if info.writeError != nil {
		info.writeError(w, e)
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
	writeJSON(w, status, append(body, '}'))
}

// handle turns a function that returns an error into a handler. An error after the answer has begun
// breaks the connection off, so that no client takes a part of an answer for the whole. Parameters
// in the query that are given twice or are malformed are refused: a proxy in front may read another
// one.
func (s *Server) handle(f func(w http.ResponseWriter, r *http.Request) error) http.HandlerFunc {
	return s.answered(func(w http.ResponseWriter, r *http.Request) error {
		if err := checkQuery(r.URL.RawQuery); err != nil {
			return err
		}
		return f(w, r)
	})
}

// answered is handle without the check of the query.
func (s *Server) answered(f func(w http.ResponseWriter, r *http.Request) error) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		err := f(w, r)
		if err == nil || errors.Is(err, errHeadOnly) {
			return
		}
		info := infoOf(r.Context())
		// The request's context is also cancelled when the deadline for the body passes; that
		// client still gets an answer.
		var late *api.Error
		gone := r.Context().Err() != nil && (!errors.As(err, &late) || late.Code != api.CodeRequestTimeout)
		if info.rec.status != 0 || gone {
			info.err = err
			panic(http.ErrAbortHandler)
		}
		s.writeError(w, r, err)
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

// writeValue answers with the JSON form of v.
func writeValue(w http.ResponseWriter, status int, v any) error {
	body, err := json.Marshal(v)
	if err != nil {
		return fmt.Errorf("encode answer: %w", err)
	}
	writeJSON(w, status, body)
	return nil
}

// writeJSON answers with body and a line break.
func writeJSON(w http.ResponseWriter, status int, body []byte) {
	body = append(body, '\n')
	jsonHeader(w.Header())
	w.Header().Set("Content-Length", strconv.Itoa(len(body)))
	w.WriteHeader(status)
	_, _ = w.Write(body) // the client may be gone
	// Flush now: the client need not wait for logging and metrics.
	_ = http.NewResponseController(w).Flush()
}

func jsonHeader(h http.Header) {
	h.Set("Content-Type", typeJSON)
	h.Set("Cache-Control", "no-store")
}
