// Package responses serves OpenAI's Responses API with its code interpreter and shell tools, and
// Perplexity's Agent API with its sandbox tool, to programs that were written for these: they need
// another base URL and this server's API key. The model is the operator's, and the programs run in
// this server's sandboxes.
package responses

import (
	"context"
	"encoding/json"
	"errors"
	"log/slog"
	"net/http"
	"strings"
	"time"

	"github.com/bullpen-run/bullpen/agent"
	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/proto/api"
)

// Host carries out what a request needs.
type Host interface {
	agent.Host
	// ReadBody reads the body of the request.
	ReadBody(w http.ResponseWriter) ([]byte, error)
	// ReadUpload reads the form that is the body of the request, with its file. A form with the field
	// instead, unless that is empty, may have no file. The result must be closed.
	ReadUpload(w http.ResponseWriter, instead string) (*proto.AgentUpload, error)
	// CreateThread creates a thread without files.
	CreateThread(ctx context.Context, id string) error
	// RemoveThread removes a thread with its files. The code of its error is [api.CodeConflict] while
	// an execution uses it.
	RemoveThread(ctx context.Context, id string) error
	// AllowStored refuses a run that is to be stored, or to go on in the background, if the server or
	// the API key has no room for it.
	AllowStored(ctx context.Context, background bool) error
	// Caller returns the organisation and the id of the API key of the request.
	Caller() (org, key string)
	// UsedThreads returns the threads whose ids have a prefix and that were used since a time, in the
	// order of their ids. It returns an error if they are too many.
	UsedThreads(ctx context.Context, prefix string, since time.Time) ([]proto.ThreadSummary, error)
	// Profile returns the sandbox profile of the API key.
	Profile(ctx context.Context) (proto.Profile, error)
	// DeleteFile deletes a file in a thread's home. The code of its error is [api.CodeNotFound] if
	// there is none.
	DeleteFile(ctx context.Context, thread, path string) error
	// Files returns the files of the organisation that have not expired, the newest first.
	Files() []proto.AgentFile
	// RemoveFile removes a file of the organisation. The code of its error is [api.CodeNotFound] if
	// there is none.
	RemoveFile(ctx context.Context, id string) error
}

// Server serves the routes. Its fields are set before its use.
type Server struct {
	Upstream agent.Upstream
	// Host returns the host of a request.
	Host func(r *http.Request) Host
	// Runs stores responses.
	Runs agent.Store
	// Notify sends a webhook about a response to the endpoint of an API key, if it has one. The webhook
	// of a name is sent once.
	Notify func(ctx context.Context, org, key, name string, body any) error
	Log    *slog.Logger
}

// Route is a route of the server.
type Route struct {
	Method, Path string
	Scope        proto.Scope // that the API key needs
	Starts       bool        // it starts executions
	Handle       func(w http.ResponseWriter, r *http.Request) error
}

// vendor is whose API a request is written for.
type vendor string

const (
	openAI     vendor = "openai"
	perplexity vendor = "perplexity"
	// byTools is Perplexity for a request with its sandbox tool, which OpenAI does not have, and
	// OpenAI for all others.
	byTools vendor = ""
)

// The paths below which the routes are, as the vendors' own clients have them in base URLs.
const (
	openAIPrefix     = "/openai/v1"
	perplexityPrefix = "/perplexity/v1"
)

// Routes returns the routes. Those that no other API of this server could have are at the root too.
func (s *Server) Routes() []Route {
	var list []Route
	for path, v := range map[string]vendor{
		openAIPrefix + "/responses": openAI, perplexityPrefix + "/responses": perplexity, perplexityPrefix + "/agent": perplexity,
		"/v1/responses": byTools, "/v1/agent": perplexity,
	} {
		of := func(handle func(v vendor, w http.ResponseWriter, r *http.Request) error) func(http.ResponseWriter, *http.Request) error {
			return handler(func(w http.ResponseWriter, r *http.Request) error { return handle(v, w, r) })
		}
		list = append(list,
			Route{http.MethodPost, path, proto.ScopeExecute, true, of(s.create)},
			Route{http.MethodGet, path + "/{id}", proto.ScopeExecute, false, of(s.get)},
			Route{http.MethodPost, path + "/{id}/cancel", proto.ScopeExecute, false, of(s.cancel)},
		)
		if v != perplexity {
			list = append(list, Route{http.MethodDelete, path + "/{id}", proto.ScopeExecute, false, of(s.delete)})
		}
	}
	for _, prefix := range []string{openAIPrefix, perplexityPrefix} {
		list = append(list,
			Route{http.MethodGet, prefix + "/models", proto.ScopeExecute, false, handler(s.ListModels)},
			Route{http.MethodGet, prefix + "/models/*", proto.ScopeExecute, false, handler(s.GetModel)},
		)
	}
	for _, prefix := range []string{perplexityPrefix + "/responses", perplexityPrefix + "/agent"} {
		list = append(list,
			Route{http.MethodGet, prefix + "/{id}/files", proto.ScopeFiles, false, handler(s.listShared)},
			Route{http.MethodGet, prefix + "/{id}/files/{file}/content", proto.ScopeFiles, false, handler(s.getShared)},
		)
	}
	return append(list,
		Route{http.MethodPost, openAIPrefix + "/files", proto.ScopeFiles, false, handler(s.uploadFile)},
		Route{http.MethodGet, openAIPrefix + "/files", proto.ScopeFiles, false, handler(s.listUploads)},
		Route{http.MethodGet, openAIPrefix + "/files/{id}", proto.ScopeFiles, false, handler(s.getUpload)},
		Route{http.MethodDelete, openAIPrefix + "/files/{id}", proto.ScopeFiles, false, handler(s.deleteUpload)},
		Route{http.MethodPost, openAIPrefix + "/containers", proto.ScopeFiles, false, handler(s.createContainer)},
		Route{http.MethodGet, openAIPrefix + "/containers", proto.ScopeFiles, false, handler(s.listContainers)},
		Route{http.MethodDelete, openAIPrefix + "/containers/{id}", proto.ScopeFiles, false, handler(s.deleteContainer)},
		Route{http.MethodPost, openAIPrefix + "/containers/{id}/files", proto.ScopeFiles, false, handler(s.addFile)},
		Route{http.MethodGet, openAIPrefix + "/containers/{id}", proto.ScopeFiles, false, handler(s.getContainer)},
		Route{http.MethodGet, openAIPrefix + "/containers/{id}/files", proto.ScopeFiles, false, handler(s.listFiles)},
		Route{http.MethodGet, openAIPrefix + "/containers/{id}/files/{file}", proto.ScopeFiles, false, handler(s.getFile)},
		Route{http.MethodDelete, openAIPrefix + "/containers/{id}/files/{file}", proto.ScopeFiles, false, handler(s.deleteFile)},
		Route{http.MethodGet, openAIPrefix + "/containers/{id}/files/{file}/content", proto.ScopeFiles, false, handler(s.getContent)},
	)
}

// handler answers requests whose fields are not valid with the name of the field.
func handler(handle func(w http.ResponseWriter, r *http.Request) error) func(http.ResponseWriter, *http.Request) error {
	return func(w http.ResponseWriter, r *http.Request) error {
		err := handle(w, r)
		if field, ok := errors.AsType[*proto.FieldError](err); ok {
			writeError(w, agent.Public(field), &field.Field)
			return nil
		}
		return err
	}
}

// errorBody is the body of an error. OpenAI documents this form, and Perplexity none.
type errorBody struct {
	Error errorDetail `json:"error"`
}

type errorDetail struct {
	Message string  `json:"message"`
	Type    string  `json:"type"`
	Param   *string `json:"param"`
	Code    *string `json:"code"`
}

// detailOf returns the form of an error.
func detailOf(e *api.Error) errorDetail {
	d := errorDetail{Message: e.Message, Type: "invalid_request_error"}
	switch status := e.Code.Status(); {
	case status == http.StatusUnauthorized:
		d.Code = new("invalid_api_key")
	case status == http.StatusTooManyRequests:
		d.Type, d.Code = "rate_limit_error", new("rate_limit_exceeded")
	case status >= http.StatusInternalServerError:
		d.Type, d.Code = "server_error", new("server_error")
	case e.Reason != "":
		d.Code = new(string(e.Reason))
	}
	return d
}

// WriteError answers with an error.
func WriteError(w http.ResponseWriter, _ *http.Request, e *api.Error) { writeError(w, e, nil) }

func writeError(w http.ResponseWriter, e *api.Error, param *string) {
	body := errorBody{detailOf(e)}
	if body.Error.Param = param; param != nil && strings.HasPrefix(*param, "body") {
		body.Error.Param = nil
	}
	writeJSON(w, e.Code.Status(), &body)
}

// writeJSON answers with the JSON form of v.
func writeJSON(w http.ResponseWriter, status int, v any) {
	h := w.Header()
	h.Set("Content-Type", "application/json")
	h.Set("Cache-Control", "no-store")
	w.WriteHeader(status)
	_ = json.NewEncoder(w).Encode(v) // the client may be gone
}
