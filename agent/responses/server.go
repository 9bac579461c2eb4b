// Package responses serves OpenAI's Responses API with its code interpreter and shell tools, and
// Perplexity's Agent API with its sandbox tool, to programs written for them: they only need
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

	"github.com/bullpen-run/bullpen/agent"
	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/proto/api"
)

// Server serves the routes. Its fields are set before its use.
type Server struct {
	Upstream agent.Upstream
	// Host returns the host of a request.
	Host func(r *http.Request) agent.RequestHost
	// Completions asks for chat completions, which are passed on. It is nil if the model's server has
	// another protocol; then Upstream is asked.
	Completions Completions
	// Runs stores responses.
	Runs agent.Store
	// Notify sends a webhook about a response to an API key's endpoint, if it has one. A webhook
	// name is sent at most once.
	Notify func(ctx context.Context, org, key, name string, body any) error
	Log    *slog.Logger
}

// vendor is whose API a request is written for.
type vendor string

const (
	openAI     vendor = "openai"
	perplexity vendor = "perplexity"
	// byTools selects Perplexity for a request with its sandbox tool, which OpenAI does not have,
	// and OpenAI for all others.
	byTools vendor = ""
)

// The paths below which the routes are. The vendors' own clients have them in base URLs.
const (
	OpenAIPrefix     = "/openai"
	PerplexityPrefix = "/perplexity"

	openAIPrefix     = OpenAIPrefix + "/v1"
	perplexityPrefix = PerplexityPrefix + "/v1"
)

// Routes returns the routes. Those that cannot collide with another API of this server are at the
// root, too.
func (s *Server) Routes() []agent.Route {
	const execute, files = proto.ScopeExecute, proto.ScopeFiles
	var list []agent.Route
	add := func(method, path, id, summary string, scope proto.Scope,
		handle func(http.ResponseWriter, *http.Request) error,
	) {
		route := api.Route{Method: method, Path: path, ID: id, Summary: summary, Scope: scope, Vendor: "OpenAI"}
		if strings.HasPrefix(id, "perplexity") || strings.HasPrefix(id, "rootAgent") {
			route.Vendor = "Perplexity"
		}
		list = append(list, agent.Route{Route: route, Handle: handler(handle)})
	}
	for _, surface := range []struct {
		path, id string
		vendor   vendor
	}{
		{openAIPrefix + "/responses", "openai", openAI},
		{perplexityPrefix + "/responses", "perplexity", perplexity},
		{perplexityPrefix + "/agent", "perplexityAgent", perplexity},
		{"/v1/responses", "root", byTools},
		{"/v1/agent", "rootAgent", perplexity},
	} {
		of := func(handle func(v vendor, w http.ResponseWriter, r *http.Request) error) func(
			http.ResponseWriter, *http.Request) error {
			return func(w http.ResponseWriter, r *http.Request) error { return handle(surface.vendor, w, r) }
		}
		one := surface.path + "/{id}"
		add(http.MethodPost, surface.path, surface.id+"CreateResponse", "Create a response", execute, of(s.create))
		list[len(list)-1].Starts = true
		add(http.MethodGet, one, surface.id+"GetResponse", "Look at a response", execute, of(s.get))
		add(http.MethodPost, one+"/cancel", surface.id+"CancelResponse", "Cancel a response", execute, of(s.cancel))
		if surface.vendor != perplexity {
			add(http.MethodDelete, one, surface.id+"DeleteResponse", "Delete a response", execute, of(s.delete))
			add(http.MethodGet, one+"/input_items", surface.id+"ListInputItems", "List the input of a response", execute,
				of(s.listInputItems))
		}
		if surface.vendor == perplexity && surface.path != "/v1/agent" {
			add(http.MethodGet, one+"/files", surface.id+"ListSharedFiles", "List the files of a response", files, s.listShared)
			add(http.MethodGet, one+"/files/{file}/content", surface.id+"GetSharedFile", "Download a file of a response", files,
				s.getShared)
		}
	}
	for prefix, id := range map[string]string{openAIPrefix: "openai", PerplexityPrefix: "perplexity", "/v1": "root"} {
		add(http.MethodPost, prefix+"/chat/completions", id+"CreateChatCompletion", "Complete a chat", execute,
			s.completeChat)
	}
	for prefix, id := range map[string]string{openAIPrefix: "openai", perplexityPrefix: "perplexity"} {
		add(http.MethodGet, prefix+"/models", id+"ListModels", "List models", execute, s.ListModels)
		add(http.MethodGet, prefix+"/models/*", id+"GetModel", "Look at a model", execute, s.GetModel)
	}
	upload, container := openAIPrefix+"/files", openAIPrefix+"/containers/{id}"
	add(http.MethodPost, upload, "openaiUploadFile", "Upload a file", files, s.uploadFile)
	add(http.MethodGet, upload, "openaiListFiles", "List files", files, s.listUploads)
	add(http.MethodGet, upload+"/{id}", "openaiGetFile", "Look at a file", files, s.getUpload)
	add(http.MethodGet, upload+"/{id}/content", "openaiGetFileContent", "Download a file", files, s.getUploadContent)
	add(http.MethodDelete, upload+"/{id}", "openaiDeleteFile", "Delete a file", files, s.deleteUpload)
	add(http.MethodPost, openAIPrefix+"/containers", "openaiCreateContainer", "Create a container", files,
		s.createContainer)
	add(http.MethodGet, openAIPrefix+"/containers", "openaiListContainers", "List containers", files, s.listContainers)
	add(http.MethodGet, container, "openaiGetContainer", "Look at a container", files, s.getContainer)
	add(http.MethodDelete, container, "openaiDeleteContainer", "Delete a container", files, s.deleteContainer)
	add(http.MethodPost, container+"/files", "openaiAddContainerFile", "Add a file to a container", files, s.addFile)
	add(http.MethodGet, container+"/files", "openaiListContainerFiles", "List the files of a container", files,
		s.listFiles)
	add(http.MethodGet, container+"/files/{file}", "openaiGetContainerFile", "Look at a file of a container",
		files, s.getFile)
	add(http.MethodDelete, container+"/files/{file}", "openaiDeleteContainerFile", "Delete a file of a container", files,
		s.deleteFile)
	add(http.MethodGet, container+"/files/{file}/content", "openaiGetContainerFileContent",
		"Download a file of a container", files, s.getContent)
	return list
}

// handler answers requests with invalid fields with the name of the field.
func handler(handle func(w http.ResponseWriter, r *http.Request) error) func(http.ResponseWriter, *http.Request) error {
	return func(w http.ResponseWriter, r *http.Request) error {
		err := handle(w, r)
		if field, ok := errors.AsType[*proto.FieldError](err); ok {
			writeError(w, r, agent.Public(field), &field.Field)
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

// refused reports whether an error is final in spite of its code: programs end their turn at once.
func refused(e *api.Error) bool {
	switch e.Code {
	case api.CodeUnauthorized, api.CodeForbidden, api.CodeRateLimited, api.CodeInternal:
		return e.Permanent && e.Reason != api.ReasonCallsMade
	default:
		return false
	}
}

// detailOf returns the status and the form of an error. Programs that repeat requests after most errors,
// such as Codex, end at once after a used-up quota.
func detailOf(e *api.Error) (status int, d errorDetail) {
	status, d = e.Code.Status(), errorDetail{Message: e.Message, Type: "invalid_request_error"}
	switch {
	case refused(e):
		status, d.Type, d.Code = http.StatusTooManyRequests, "insufficient_quota", new("insufficient_quota")
	case status == http.StatusUnauthorized:
		d.Code = new("invalid_api_key")
	case status == http.StatusTooManyRequests:
		d.Type, d.Code = "rate_limit_error", new("rate_limit_exceeded")
	case status >= http.StatusInternalServerError:
		d.Type, d.Code = "server_error", new("server_error")
	case e.Reason != "":
		d.Code = new(string(e.Reason))
	}
	return status, d
}

// chatError returns the status and the form of an error of a chat completion. Its clients repeat requests
// after a used-up quota.
func chatError(e *api.Error) (status int, d errorDetail) {
	if !refused(e) {
		return detailOf(e)
	}
	d = errorDetail{Message: e.Message, Type: "permission_error", Code: new("permission_denied")}
	if e.Reason != "" {
		d.Code = new(string(e.Reason))
	}
	return http.StatusForbidden, d
}

// WriteError answers with an error.
func WriteError(w http.ResponseWriter, r *http.Request, e *api.Error) { writeError(w, r, e, nil) }

func writeError(w http.ResponseWriter, r *http.Request, e *api.Error, param *string) {
	status, detail := detailOf(e)
	switch {
	case strings.HasSuffix(r.URL.Path, "/chat/completions"):
		status, detail = chatError(e)
	case isCodex(r) && refused(e): // it shows the message of this status alone
		status = http.StatusBadRequest
	case isCodex(r) && status == http.StatusTooManyRequests: // after which it does not send a request again
		status = http.StatusServiceUnavailable
	}
	if detail.Param = param; param != nil && strings.HasPrefix(*param, "body") {
		detail.Param = nil
	}
	if e.Permanent {
		w.Header().Set("X-Should-Retry", "false")
	}
	if e.Reason == api.ReasonCallsMade { // not all clients read the header, and none retries after this status
		detail.Code, status = new(string(e.Reason)), http.StatusFailedDependency
	}
	writeJSON(w, status, &errorBody{detail})
}

// isCodex reports whether a request is one of Codex, which alone has this header.
func isCodex(r *http.Request) bool { return r.Header.Get("Originator") != "" }

// writeJSON answers with the JSON form of v.
func writeJSON(w http.ResponseWriter, status int, v any) {
	h := w.Header()
	h.Set("Content-Type", "application/json")
	h.Set("Cache-Control", "no-store")
	w.WriteHeader(status)
	_ = json.NewEncoder(w).Encode(v) // the client may be gone
}
