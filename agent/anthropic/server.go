// Package anthropic serves Anthropic's Messages API with its code execution tool, and its Files
// API, to programs written for them: they only need another base URL and this server's API key. The
// model is the operator's, and the programs run in this server's sandboxes.
package anthropic

import (
	"encoding/json"
	"log/slog"
	"net/http"

	"github.com/bullpen-run/bullpen/agent"
	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/proto/api"
)

// KeyHeader is the header in which clients send the API key.
const KeyHeader = "X-Api-Key"

// requestIDHeader is the header with the id of a request in answers.
const requestIDHeader = "Request-Id"

// Server serves the routes. Its fields are set before its use.
type Server struct {
	Upstream agent.Upstream
	// Host returns the host of a request.
	Host func(r *http.Request) agent.RequestHost
	// Runs stores the runs of batches.
	Runs agent.Store
	Log  *slog.Logger
}

// Prefix is the path below which all routes are.
const Prefix = "/anthropic"

// Routes returns the routes. Those that cannot collide with another API of this server are at the
// root, too.
func (s *Server) Routes() []agent.Route {
	const execute, files = proto.ScopeExecute, proto.ScopeFiles
	var list []agent.Route
	add := func(method, path, id, summary string, scope proto.Scope,
		handle func(http.ResponseWriter, *http.Request) error,
	) {
		route := api.Route{Method: method, Path: path, ID: id, Summary: summary, Scope: scope, Vendor: "Anthropic"}
		list = append(list, agent.Route{Route: route, Handle: handle})
	}
	starts := func() { list[len(list)-1].Starts = true }
	for prefix, at := range map[string]string{Prefix: "", "": "AtRoot"} {
		messages, batch := prefix+"/v1/messages", prefix+"/v1/messages/batches/{id}"
		add(http.MethodPost, messages, "anthropicCreateMessage"+at, "Create a message", execute, s.createMessage)
		starts()
		add(http.MethodPost, messages+"/count_tokens", "anthropicCountTokens"+at, "Count the tokens of a message", execute,
			s.countTokens)
		add(http.MethodPost, messages+"/batches", "anthropicCreateBatch"+at, "Create a batch of messages", execute,
			s.createBatch)
		starts()
		add(http.MethodGet, messages+"/batches", "anthropicListBatches"+at, "List batches of messages", execute,
			s.listBatches)
		add(http.MethodGet, batch, "anthropicGetBatch"+at, "Look at a batch of messages", execute, s.getBatch)
		add(http.MethodDelete, batch, "anthropicDeleteBatch"+at, "Delete a batch of messages", execute, s.deleteBatch)
		add(http.MethodPost, batch+"/cancel", "anthropicCancelBatch"+at, "Cancel a batch of messages", execute, s.cancelBatch)
		add(http.MethodGet, batch+"/results", "anthropicGetBatchResults"+at, "Read the results of a batch of messages",
			execute, s.getResults)
	}
	stored, models := Prefix+"/v1/files", Prefix+"/v1/models"
	add(http.MethodPost, stored, "anthropicUploadFile", "Upload a file", files, s.uploadFile)
	add(http.MethodGet, stored, "anthropicListFiles", "List files", files, s.listFiles)
	add(http.MethodGet, stored+"/{id}", "anthropicGetFile", "Look at a file", files, s.getFile)
	add(http.MethodGet, stored+"/{id}/content", "anthropicGetFileContent", "Download a file", files, s.getContent)
	add(http.MethodDelete, stored+"/{id}", "anthropicDeleteFile", "Delete a file", files, s.deleteFile)
	add(http.MethodGet, models, "anthropicListModels", "List models", execute, s.ListModels)
	add(http.MethodGet, models+"/*", "anthropicGetModel", "Look at a model", execute, s.GetModel)
	return list
}

// errorBody is the body of an error, and the data of an error event.
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

// retryHeader tells the SDKs whether to retry.
const retryHeader = "X-Should-Retry"

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

// statusOf returns the status and the type of an error's answer. Programs that repeat requests after a
// limit or a failure end their turn at once without permission.
func statusOf(e *api.Error) (status int, kind string) {
	status = e.Code.Status()
	switch e.Code {
	case api.CodeUnauthorized, api.CodeRateLimited, api.CodeInternal:
		if e.Permanent && e.Reason != api.ReasonCallsMade {
			status = http.StatusForbidden
		}
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
	body := errorBody{
		Type: "error", Error: errorDetail{Type: kind, Message: e.Message},
		RequestID: w.Header().Get("X-Request-Id"),
	}
	if e.Reason != "" {
		body.Error.Details = map[string]string{"error_code": string(e.Reason)}
	}
	w.Header().Set(requestIDHeader, body.RequestID)
	if e.Permanent {
		w.Header().Set(retryHeader, "false")
	}
	if e.Reason == api.ReasonCallsMade { // not all clients read the header, and none retries after this status
		status = http.StatusFailedDependency
	}
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
