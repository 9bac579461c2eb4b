// Package anthropic serves Anthropic's Messages API with its code execution tool, and its Files API,
// to programs that were written for these: they need another base URL and this server's API key. The
// model is the operator's, and the programs run in this server's sandboxes.
package anthropic

import (
	"context"
	"encoding/json"
	"log/slog"
	"net/http"
	"time"

	"github.com/bullpen-run/bullpen/agent"
	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/proto/api"
)

// KeyHeader is the header in which clients send the API key.
const KeyHeader = "X-Api-Key"

// requestIDHeader is the header with the id of a request in answers.
const requestIDHeader = "Request-Id"

// Host carries out what a request needs.
type Host interface {
	agent.Host
	// ReadBody reads the body of the request.
	ReadBody(w http.ResponseWriter) ([]byte, error)
	// ReadUpload reads the form that is the body of the request, with its file. A form with the field
	// instead, unless that is empty, may have no file. The result must be closed.
	ReadUpload(w http.ResponseWriter, instead string) (*proto.AgentUpload, error)
	// Files returns the files of the organisation that have not expired, the newest first.
	Files() []proto.AgentFile
	// RemoveFile removes a file. The code of its error is [api.CodeNotFound] if there is none.
	RemoveFile(ctx context.Context, id string) error
	BatchStore
}

// BatchStore stores batches of requests for messages.
type BatchStore interface {
	// BaseURL returns the address of this server for its clients, without a slash at its end.
	BaseURL() (string, error)
	// CreateBatch stores a batch of requests to an API: those in a member of the body's object. The
	// batch expires after life. check is called with each request.
	CreateBatch(w http.ResponseWriter, api, member string, life time.Duration, check func(item []byte) error) (*proto.BatchAndState, error)
	// Batches returns the batches, the newest first.
	Batches() []proto.BatchAndState
	// Batch returns a batch. The code of its error is [api.CodeNotFound] if there is none.
	Batch(ctx context.Context, id string) (*proto.BatchAndState, error)
	// CancelBatch cancels a batch unless it has ended, and returns it.
	CancelBatch(ctx context.Context, id string) (*proto.BatchAndState, error)
	// RemoveBatch removes a batch. The code of its error is [api.CodeConflict] if it has not ended.
	RemoveBatch(ctx context.Context, id string) error
	// BatchItems calls each with the items of a batch in order: what was uploaded, the status, and the
	// id of the run.
	BatchItems(ctx context.Context, b *proto.Batch, each func(item []byte, status proto.ItemStatus, run string) error) error
}

// Server serves the routes. Its fields are set before its use.
type Server struct {
	Upstream agent.Upstream
	// Host returns the host of a request.
	Host func(r *http.Request) Host
	// Runs stores the runs of batches.
	Runs agent.Store
	Log  *slog.Logger
}

// Route is a route of the server.
type Route struct {
	Method, Path string
	Scope        proto.Scope // that the API key needs
	Starts       bool        // it starts executions
	Handle       func(w http.ResponseWriter, r *http.Request) error
}

// Prefix is the path below which all routes are.
const Prefix = "/anthropic"

// Routes returns the routes. Those that no other API of this server could have are at the root too.
func (s *Server) Routes() []Route {
	var list []Route
	for _, prefix := range []string{Prefix, ""} {
		list = append(list,
			Route{http.MethodPost, prefix + "/v1/messages", proto.ScopeExecute, true, s.createMessage},
			Route{http.MethodPost, prefix + "/v1/messages/count_tokens", proto.ScopeExecute, false, s.countTokens},
			Route{http.MethodPost, prefix + "/v1/messages/batches", proto.ScopeExecute, true, s.createBatch},
			Route{http.MethodGet, prefix + "/v1/messages/batches", proto.ScopeExecute, false, s.listBatches},
			Route{http.MethodGet, prefix + "/v1/messages/batches/{id}", proto.ScopeExecute, false, s.getBatch},
			Route{http.MethodDelete, prefix + "/v1/messages/batches/{id}", proto.ScopeExecute, false, s.deleteBatch},
			Route{http.MethodPost, prefix + "/v1/messages/batches/{id}/cancel", proto.ScopeExecute, false, s.cancelBatch},
			Route{http.MethodGet, prefix + "/v1/messages/batches/{id}/results", proto.ScopeExecute, false, s.getResults},
		)
	}
	return append(list,
		Route{http.MethodPost, Prefix + "/v1/files", proto.ScopeFiles, false, s.uploadFile},
		Route{http.MethodGet, Prefix + "/v1/files", proto.ScopeFiles, false, s.listFiles},
		Route{http.MethodGet, Prefix + "/v1/files/{id}", proto.ScopeFiles, false, s.getFile},
		Route{http.MethodGet, Prefix + "/v1/files/{id}/content", proto.ScopeFiles, false, s.getContent},
		Route{http.MethodDelete, Prefix + "/v1/files/{id}", proto.ScopeFiles, false, s.deleteFile},
		Route{http.MethodGet, Prefix + "/v1/models", proto.ScopeExecute, false, s.ListModels},
		Route{http.MethodGet, Prefix + "/v1/models/*", proto.ScopeExecute, false, s.GetModel},
	)
}

// errorBody is the body of an error, and the data of the event of one.
type errorBody struct {
	Type      string      `json:"type"`
	Error     errorDetail `json:"error"`
	RequestID string      `json:"request_id,omitempty"`
}

type errorDetail struct {
	Type    string            `json:"type"`
	Message string            `json:"message"`
	Details map[string]string `json:"details,omitempty"`
}

const statusOverloaded = 529

// errorTypes are the types of errors by status. Other statuses below 500 are invalid requests.
var errorTypes = map[int]string{
	http.StatusUnauthorized:          "authentication_error",
	http.StatusForbidden:             "permission_error",
	http.StatusNotFound:              "not_found_error",
	http.StatusRequestEntityTooLarge: "request_too_large",
	http.StatusTooManyRequests:       "rate_limit_error",
	http.StatusInternalServerError:   "api_error",
	http.StatusGatewayTimeout:        "timeout_error",
	statusOverloaded:                 "overloaded_error",
}

// statusOf returns the status and the type with which an error is answered.
func statusOf(e *api.Error) (status int, kind string) {
	status = e.Code.Status()
	switch e.Code {
	case api.CodeServiceUnavailable, api.CodeDiskFull:
		status = statusOverloaded
	case api.CodeConflict, api.CodeRequestTimeout:
		status = http.StatusBadRequest
	}
	if kind = errorTypes[status]; kind == "" {
		kind = "invalid_request_error"
		if status >= http.StatusInternalServerError {
			kind = "api_error"
		}
	}
	return status, kind
}

// WriteError answers with an error.
func WriteError(w http.ResponseWriter, _ *http.Request, e *api.Error) {
	status, kind := statusOf(e)
	body := errorBody{Type: "error", Error: errorDetail{Type: kind, Message: e.Message}, RequestID: w.Header().Get("X-Request-Id")}
	if e.Reason != "" {
		body.Error.Details = map[string]string{"error_code": string(e.Reason)}
	}
	w.Header().Set(requestIDHeader, body.RequestID)
	writeJSON(w, status, &body)
}

// writeJSON answers with the JSON form of v.
func writeJSON(w http.ResponseWriter, status int, v any) {
	h := w.Header()
	h.Set(requestIDHeader, h.Get("X-Request-Id"))
	h.Set("Content-Type", "application/json")
	h.Set("Cache-Control", "no-store")
	w.WriteHeader(status)
	_ = json.NewEncoder(w).Encode(v) // the client may be gone
}
