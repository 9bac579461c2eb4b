// Package rest serves sessions through the Sandbox Agent API 0.1.11. It is stateless: requests
// become calls of a [sessions.Service], and streams are read from the logs of sessions.
package rest

import (
	"context"
	"encoding/base64"
	"io"
	"log/slog"
	"net/http"
	"net/url"
	"strings"
	"unicode/utf8"

	"github.com/go-chi/chi/v5"

	"github.com/bullpen-run/bullpen/agent"
	"github.com/bullpen-run/bullpen/agent/sessions"
	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/proto/api"
)

// Host gives a request access to the gateway. Its errors are [*api.Error].
type Host interface {
	// Caller returns the organisation and the id of the API key.
	Caller() (org, key string)
	// ReadBody reads the body of the request and calls decode with it. It returns the error of
	// decode.
	ReadBody(w http.ResponseWriter, decode func(body []byte) error) error
	// AllowStored returns an error if the server or the organisation has no room to store more.
	AllowStored(ctx context.Context, background bool) error
	// Profile returns the sandbox profile of the API key.
	Profile(ctx context.Context) (proto.Profile, error)
	// CheckCaller returns an error if the API key has become invalid since the request began.
	CheckCaller() error
	// UntilDrain returns a context that is cancelled when the server begins to shut down.
	UntilDrain(ctx context.Context) (context.Context, context.CancelFunc)
	// ReleaseMemory releases the memory reserved for the body and for reads from the store.
	ReleaseMemory()
	// HomePath returns the path of homes in sandboxes.
	HomePath() string
	// CleanPath returns a path relative to the home. It returns an error for an absolute path
	// outside the home.
	CleanPath(name string) (string, error)
	// Home returns the files of a thread. The thread need not exist.
	Home(thread string) Home
}

// Home gives access to the files of a thread. Paths are cleaned and relative to the home. Links are
// not followed. Errors are [*api.Error], with [api.CodeNotFound] if there is nothing at a path.
type Home interface {
	// List calls each for the entries of a directory. In a thread that does not exist, every
	// directory exists and is empty.
	List(ctx context.Context, dir string, each func(proto.File) error) error
	Open(ctx context.Context, name string) (*proto.FileContent, error)
	// PutBody stores the body of the request as a file, and returns its size.
	PutBody(w http.ResponseWriter, name string) (size int64, err error)
	// MakeDirectory creates a directory and its parents, unless they exist.
	MakeDirectory(ctx context.Context, dir string) error
	// UnpackBody unpacks the body of the request, a tar, into a directory. It calls each with the
	// path of every entry.
	UnpackBody(w http.ResponseWriter, dir string, each func(path string)) error
	// Delete deletes the file or directory at a path. A directory that is not empty needs
	// recursive.
	Delete(ctx context.Context, name string, recursive bool) error
	// Move renames a file or directory. It creates the parents of the new path.
	Move(ctx context.Context, from, to string) error
	// Remove removes the thread, if it exists.
	Remove(ctx context.Context) error
}

// Server serves the routes. Its fields must be set before use.
type Server struct {
	Service *sessions.Service
	// Host returns the [Host] of a request.
	Host func(r *http.Request) Host
	Log  *slog.Logger
}

// Prefix is the path below which the routes are served.
const Prefix = "/sandbox-agent"

// banner is the response to a request for the API's root, and part of the response for an unknown
// path.
const banner = `This is bullpen, with the Sandbox Agent API 0.1.11:
  - GET  /           - this text
  - GET  /v1/health  - health
  - GET  /v1/agents  - agents
See docs/guides/sandbox-agent.md.
`

// RootPrefixes returns the path prefixes of the routes at the root.
func RootPrefixes() []string {
	return []string{"/v1/agents", "/v1/sessions", "/v1/fs/", "/v1/health"}
}

// Routes returns the routes below [Prefix] or at the root. There is no banner at the root, because
// the gateway serves that path itself.
func (s *Server) Routes(atRoot bool) []agent.Route {
	const get, post, read, execute = http.MethodGet, http.MethodPost, proto.ScopeRead, proto.ScopeExecute
	var list []agent.Route
	prefix, suffix := Prefix, ""
	if atRoot {
		prefix, suffix = "", "AtRoot"
	}
	add := func(method, path, id, summary string, scope proto.Scope, handle handler) *agent.Route {
		route := api.Route{
			Method: method, Path: prefix + path, ID: "sandboxAgent" + id + suffix, Summary: summary, Scope: scope,
			Public: scope == "", Vendor: "the Sandbox Agent API",
		}
		if strings.Contains(path, "{") {
			route.PathDoc = "The name or the id, percent-encoded."
		}
		list = append(list, agent.Route{Route: route, Handle: handle.serve})
		return &list[len(list)-1]
	}
	if !atRoot {
		add(get, "", "Banner", "Show that this is a server of the Sandbox Agent API", "", s.banner)
		add(get, "/", "BannerSlash", "Show that this is a server of the Sandbox Agent API", "", s.banner)
	}
	add(get, "/v1/health", "Health", "Show that the server is there", "", s.health)

	add(get, "/v1/agents", "ListAgents", "List agents", read, s.listAgents)
	add(get, "/v1/agents/{agent}", "GetAgent", "Show an agent", read, s.getAgent)
	add(post, "/v1/agents/{agent}/install", "InstallAgent", "Check that an agent is installed", execute, s.install)
	add(get, "/v1/agents/{agent}/modes", "ListModes", "List the modes of an agent", read, s.listModes)
	add(get, "/v1/agents/{agent}/models", "ListModels", "List the models of an agent", read, s.listModels)

	const all, one = "/v1/sessions", "/v1/sessions/{id}"
	add(get, all, "ListSessions", "List sessions", read, s.listSessions)
	add(post, all, "CreateSession", "Create a session with an id of the server's", execute, s.createSession).Starts = true
	add(post, all+"/", "CreateSessionSlash", "Create a session with an id of the server's", execute,
		s.createSession).Starts = true
	add(post, one, "CreateSessionByID", "Create a session", execute, s.createSession).Starts = true
	add(get, one, "GetSession", "Show a session, with its pending questions and permissions", read, s.getSession)
	add(http.MethodDelete, one, "DeleteSession", "End a session and delete it with its files", execute, s.deleteSession)
	add(post, one+"/messages", "SendMessage", "Send a message", execute, s.sendMessage).Starts = true
	add(post, one+"/messages/stream", "StreamMessage", "Send a message and follow its turn", execute,
		s.streamMessage).Starts = true
	add(post, one+"/interrupt", "InterruptSession", "Interrupt the turn in progress", execute, s.interruptSession)
	add(post, one+"/terminate", "TerminateSession", "End a session", execute, s.terminateSession)
	add(get, one+"/events", "ListEvents", "List the events of a session", read, s.listEvents)
	add(get, one+"/events/sse", "StreamEvents", "Follow the events of a session", read,
		s.streamEvents).Starts = true // a draining server would end the stream at once
	add(post, one+"/questions/{question}/reply", "AnswerQuestion", "Answer a question", execute, s.answerQuestion)
	add(post, one+"/questions/{question}/reject", "RejectQuestion", "Reject a question", execute, s.rejectQuestion)
	add(post, one+"/permissions/{permission}/reply", "AnswerPermission", "Grant or reject a permission", execute,
		s.answerPermission)

	const files = proto.ScopeFiles
	add(get, "/v1/fs/entries", "ListFiles", "List a directory", files, s.listFiles)
	add(get, "/v1/fs/file", "ReadFile", "Read a file", files, s.readFile)
	add(http.MethodPut, "/v1/fs/file", "WriteFile", "Write a file", files, s.writeFile)
	add(http.MethodDelete, "/v1/fs/entry", "DeleteFile", "Delete a file or directory", files, s.deleteFile)
	add(post, "/v1/fs/mkdir", "MakeDirectory", "Create a directory", files, s.makeDirectory)
	add(post, "/v1/fs/move", "MoveFile", "Move a file or directory", files, s.moveFile)
	add(get, "/v1/fs/stat", "StatFile", "Show a file or directory", files, s.statFile)
	add(post, "/v1/fs/upload-batch", "UploadFiles", "Unpack a tar", files, s.uploadFiles)
	return list
}

// handler serves a request. It returns an error only before it has written anything.
type handler func(w http.ResponseWriter, r *http.Request) error

// serve calls a handler and writes its error as the response, if it is an error of this API.
func (h handler) serve(w http.ResponseWriter, r *http.Request) error {
	err := h(w, r)
	if err == nil {
		return nil
	}
	return answerError(w, err)
}

// Token returns the token of a request; empty for none. It accepts the schemes Bearer, Token and
// Basic. The token of Basic is the password, or the whole text if it contains no colon.
func Token(r *http.Request) string {
	scheme, rest, _ := strings.Cut(strings.TrimSpace(r.Header.Get("Authorization")), " ")
	rest = strings.TrimSpace(rest)
	switch strings.ToLower(scheme) {
	case "bearer", "token":
		return rest
	case "basic":
		for _, encoding := range []*base64.Encoding{
			base64.StdEncoding, base64.RawStdEncoding, base64.URLEncoding, base64.RawURLEncoding,
		} {
			decoded, err := encoding.DecodeString(rest)
			if err != nil || !utf8.Valid(decoded) {
				continue
			}
			if _, password, ok := strings.Cut(string(decoded), ":"); ok {
				return password
			}
			return string(decoded)
		}
	}
	return ""
}

// param returns a decoded parameter of the path of a request.
func param(r *http.Request, name string) (string, error) {
	value := chi.URLParam(r, name)
	if r.URL.RawPath != "" { // the router matches RawPath, if it is set
		var err error
		if value, err = url.PathUnescape(value); err != nil {
			return "", textErrorf(http.StatusBadRequest, "Invalid URL: %v", err)
		}
	}
	if !utf8.ValidString(value) {
		return "", textErrorf(http.StatusBadRequest, "Invalid URL: Invalid UTF-8 in `%s`", name)
	}
	return value, nil
}

func (s *Server) banner(w http.ResponseWriter, _ *http.Request) error {
	writeText(w, http.StatusOK, banner)
	return nil
}

func (s *Server) health(w http.ResponseWriter, _ *http.Request) error {
	return writeJSON(w, map[string]string{"status": "ok"})
}

func writeText(w http.ResponseWriter, status int, body string) {
	w.Header().Set("Content-Type", "text/plain; charset=utf-8")
	w.Header().Set("Cache-Control", "no-store")
	w.WriteHeader(status)
	_, _ = io.WriteString(w, body) // the client may be gone
}

func noContent(w http.ResponseWriter) error {
	w.WriteHeader(http.StatusNoContent)
	return nil
}
