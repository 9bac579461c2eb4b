package rest

import (
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"strconv"

	"github.com/bullpen-run/bullpen/agent/sessions"
	"github.com/bullpen-run/bullpen/proto/api"
)

// The codes of errors that are not a [sessions.Kind].
const (
	codeTokenInvalid     = "token_invalid"
	codePermissionDenied = "permission_denied"
	codeInstallFailed    = "install_failed"
	codeTimeout          = "timeout"
)

// statusOf returns the HTTP status of a kind of error.
func statusOf(kind sessions.Kind) int {
	switch kind {
	case sessions.AgentNotInstalled, sessions.SessionNotFound:
		return http.StatusNotFound
	case sessions.SessionExists:
		return http.StatusConflict
	case sessions.AgentExited:
		return http.StatusInternalServerError
	default:
		return http.StatusBadRequest
	}
}

// writeProblem writes an error as the response.
func writeProblem(w http.ResponseWriter, p *sessions.Problem) {
	body, err := json.Marshal(p)
	if err != nil {
		panic(err) // details are texts and numbers
	}
	h := w.Header()
	h.Set("Content-Type", "application/json")
	h.Set("Content-Length", strconv.Itoa(len(body)))
	h.Set("Cache-Control", "no-store")
	w.WriteHeader(p.Status)
	_, _ = w.Write(body) // the client may be gone
}

// textError is an error with a plain-text body, for a request that cannot be decoded.
type textError struct {
	status  int
	message string
}

func textErrorf(status int, format string, args ...any) error {
	return &textError{status, fmt.Sprintf(format, args...)}
}

// Error implements error.
func (e *textError) Error() string { return e.message }

// answerError writes an error of this API as the response. It returns any other error, which the
// gateway logs and passes to WriteError.
func answerError(w http.ResponseWriter, err error) error {
	if wrong, ok := errors.AsType[*textError](err); ok {
		writeText(w, wrong.status, wrong.message)
		return nil
	}
	if known, ok := errors.AsType[*sessions.Problem](err); ok {
		writeProblem(w, known)
		return nil
	}
	if known, ok := errors.AsType[*sessions.Error](err); ok {
		p := sessions.NewProblem(string(known.Kind), statusOf(known.Kind), known.Message)
		p.Agent, p.Session, p.Details = known.Agent, known.Session, known.Details
		writeProblem(w, p)
		return nil
	}
	if errors.Is(err, sessions.ErrLogFull) {
		writeProblem(w, sessions.NewProblem(string(sessions.InvalidRequest), http.StatusBadRequest,
			"invalid request: "+sessions.ErrLogFull.Error()))
		return nil
	}
	return err
}

// WriteError writes an error of the gateway as the response, in this API's form.
func WriteError(w http.ResponseWriter, _ *http.Request, e *api.Error) {
	status := e.Code.Status()
	p := sessions.NewProblem(string(e.Code), status, e.Message)
	message := func(code, detail, message string) {
		p = sessions.NewProblem(code, status, detail)
		p.Details = map[string]any{"message": message}
	}
	switch e.Code {
	case api.CodeNotFound: // an unknown path: handlers return errors of their own
		writeText(w, status, "404 Not Found\n\n"+banner)
		return
	case api.CodeUnauthorized:
		message(codeTokenInvalid, "token invalid", "missing or invalid token")
	case api.CodeForbidden:
		message(codePermissionDenied, "permission denied", e.Message)
	case api.CodeValidation:
		p = sessions.NewProblem(string(sessions.InvalidRequest), status, "invalid request: "+e.Message)
	case api.CodeGatewayTimeout, api.CodeRequestTimeout:
		message(codeTimeout, codeTimeout, e.Message)
	}
	if e.Reason != "" || e.Permanent {
		if p.Details == nil {
			p.Details = map[string]any{}
		}
		if e.Reason != "" {
			p.Details["reason"] = e.Reason
		}
		if e.Permanent {
			p.Details["permanent"] = true
			w.Header().Set("X-Should-Retry", "false")
		}
	}
	writeProblem(w, p)
}
