package acp

import (
	"context"
	"encoding/json"
	"io"
	"log/slog"
	"net/http"
	"net/url"
	"slices"
	"strings"
	"time"

	"github.com/go-chi/chi/v5"

	"github.com/bullpen-run/bullpen/agent"
	"github.com/bullpen-run/bullpen/agent/sessions"
	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/proto/api"
)

// Prefix is the path below which the routes are served.
const Prefix = "/sandbox-agent"

// DefaultWait is how long a POST waits for the response to its prompt. Later, the response comes
// over the stream.
const DefaultWait = 20 * time.Second

// Logs stores the logs of servers.
type Logs interface {
	sessions.Logs
	// IDs returns the ids of the logs of an organisation that begin with a prefix.
	IDs(ctx context.Context, org, prefix string) ([]string, error)
}

// Configs stores the tool configurations of directories.
type Configs interface {
	// PutConfig stores a configuration. It returns a [*proto.QuotaError] if the organisation has
	// too many.
	PutConfig(ctx context.Context, c *proto.AgentConfig) error
	// Config returns a configuration. It returns [proto.ErrNotFound] if there is none.
	Config(ctx context.Context, org string, kind proto.AgentConfigKind, directory, name string) (*proto.AgentConfig, error)
	// RemoveConfig removes a configuration, if there is one.
	RemoveConfig(ctx context.Context, org string, kind proto.AgentConfigKind, directory, name string) error
	// Configs returns the configurations of an organisation, ordered by their keys.
	Configs(org string) []proto.AgentConfig
}

// Host gives a request access to the gateway.
type Host interface {
	// Caller returns the organisation and the id of the API key of the request.
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
	// LimitReads returns a context with its own limits for reads of the store, which may outlive the
	// request. release releases the memory of what was read.
	LimitReads(ctx context.Context) (limited context.Context, release func())
	// UntilDrain returns a context that is cancelled when this server begins to shut down.
	UntilDrain(ctx context.Context) (context.Context, context.CancelFunc)
	// RemoveHome removes the thread that holds a session's files, if it exists.
	RemoveHome(ctx context.Context, thread string) error
}

// Server serves the routes. Its exported fields must be set before use.
type Server struct {
	Sessions *sessions.Service
	Logs     Logs
	Configs  Configs
	// Host returns the [Host] of a request.
	Host    func(r *http.Request) Host
	Version string        // of this program
	Wait    time.Duration // see [DefaultWait]
	Log     *slog.Logger

	projectors projectors
}

// Routes returns the routes below [Prefix] or at the root.
func (s *Server) Routes(atRoot bool) []agent.Route {
	const get, post, put, remove = http.MethodGet, http.MethodPost, http.MethodPut, http.MethodDelete
	const read, execute = proto.ScopeRead, proto.ScopeExecute
	prefix, suffix := Prefix, ""
	if atRoot {
		prefix, suffix = "", "AtRoot"
	}
	var list []agent.Route
	add := func(method, path, id, summary string, scope proto.Scope,
		handle func(http.ResponseWriter, *http.Request) error,
	) {
		route := api.Route{
			Method: method, Path: prefix + path, ID: "sandboxAgent" + id + suffix, Summary: summary, Scope: scope,
			Vendor: "the Sandbox Agent API",
		}
		if strings.Contains(path, "{") {
			route.PathDoc = "The id, which the client chooses, percent-encoded."
		}
		list = append(list, agent.Route{Route: route, Handle: handle})
	}
	const server = "/v1/acp/{server}"
	add(get, "/v1/acp", "ListServers", "List servers of the agent client protocol", read, s.list)
	add(post, server, "PostMessage", "Send a message of the agent client protocol", execute, s.post)
	add(get, server, "StreamMessages", "Follow the messages of a server of the agent client protocol", read, s.stream)
	add(remove, server, "DeleteServer", "Delete a server of the agent client protocol with its sessions", execute,
		s.remove)
	for _, c := range configKinds {
		path := "/v1/config/" + string(c.kind)
		add(put, path, "Put"+c.name, "Store the configuration of "+c.article+" of a directory", execute, s.putConfig(&c))
		add(get, path, "Get"+c.name, "Show the configuration of "+c.article+" of a directory", read, s.getConfig(&c))
		add(remove, path, "Delete"+c.name, "Delete the configuration of "+c.article+" of a directory", execute,
			s.deleteConfig(&c))
	}
	for _, m := range unsupported {
		for _, method := range []string{get, post, remove} {
			verb := method[:1] + strings.ToLower(method[1:])
			add(method, m.path, m.id+verb, "Not implemented", read, m.handle)
		}
	}
	return list
}

// unsupported are the parts of the API that this server does not implement.
var unsupported = []unsupportedPart{
	{"/v1/desktop/*", "Desktop", "this server's sandboxes have no desktop"},
	{"/v1/processes", "Processes", noProcesses},
	{"/v1/processes/*", "Process", noProcesses},
}

const noProcesses = "this server runs programs as executions and in live sandboxes, not as processes beside an agent"

type unsupportedPart struct{ path, id, message string }

func (m *unsupportedPart) handle(w http.ResponseWriter, _ *http.Request) error {
	return writeProblem(w, http.StatusNotImplemented, "not_implemented", m.message)
}

// serverID returns the id of the server in the path of a request.
func serverID(r *http.Request) (string, error) {
	id := chi.URLParam(r, "server")
	if r.URL.RawPath != "" { // the router matches the path as it was sent
		var err error
		if id, err = url.PathUnescape(id); err != nil {
			return "", api.Errorf(api.CodeValidation, "invalid request: the server's id is malformed")
		}
	}
	if id == "" || len(id) > proto.MaxAgentSessionID {
		return "", api.Errorf(api.CodeValidation, "invalid request: the server's id must have 1 to %d bytes",
			proto.MaxAgentSessionID)
	}
	return id, nil
}

// writeProblem writes an error as the response.
func writeProblem(w http.ResponseWriter, status int, code, detail string) error {
	h := w.Header()
	h.Set("Content-Type", "application/problem+json")
	h.Set("Cache-Control", "no-store")
	w.WriteHeader(status)
	_ = json.NewEncoder(w).Encode(sessions.NewProblem(code, status, detail)) // the client may be gone
	return nil
}

// invalid writes the response to an invalid request.
func invalid(w http.ResponseWriter, status int, detail string) error {
	return writeProblem(w, status, "invalid_request", "invalid request: "+detail)
}

// maxRefused bounds the part of a rejected request's body that is read, in bytes. A client that is
// still writing when the connection is closed does not see the response.
const maxRefused = 64 << 20

// WriteError writes an error as the response. For a posted message, it is a JSON-RPC response with
// status 200, because clients give up after any other. Only an invalid API key has the status 401.
func (s *Server) WriteError(w http.ResponseWriter, r *http.Request, e *api.Error) {
	if r.Method == http.MethodPost && strings.Contains(r.URL.Path, "/v1/acp/") && e.Code != api.CodeUnauthorized {
		m := peek(io.LimitReader(r.Body, maxRefused))
		_, _ = io.Copy(io.Discard, io.LimitReader(r.Body, maxRefused))
		s.answer(w, &m, e)
		return
	}
	status, code := e.Code.Status(), string(e.Code)
	switch e.Code {
	case api.CodeUnauthorized:
		code = "token_invalid"
	case api.CodeValidation:
		code = "invalid_request"
	case api.CodeForbidden:
		code = "permission_denied"
	}
	_ = writeProblem(w, status, code, e.Message)
}

// answer responds to a message that failed.
func (s *Server) answer(w http.ResponseWriter, m *received, err error) {
	if !m.isRequest() {
		w.WriteHeader(http.StatusAccepted)
		return
	}
	out, encodeErr := response(m.ID, nil, err)
	if encodeErr != nil {
		s.Log.Warn("agent client protocol: error not encoded", "error", encodeErr)
		w.WriteHeader(http.StatusAccepted)
		return
	}
	writeResponse(w, out.Data)
}

// writeResponse writes JSON as the response.
func writeResponse(w http.ResponseWriter, data []byte) {
	h := w.Header()
	h.Set("Content-Type", "application/json")
	h.Set("Cache-Control", "no-store")
	w.WriteHeader(http.StatusOK)
	_, _ = w.Write(data) //nolint:gosec // it is JSON; the client may be gone
}

func writeJSON(w http.ResponseWriter, v any) error {
	data, err := encode(v)
	if err != nil {
		return err
	}
	writeResponse(w, data)
	return nil
}

// accepts reports whether a client accepts a media type.
func accepts(r *http.Request, kind, sub string) bool {
	values := r.Header.Values("Accept")
	if len(values) == 0 {
		return true
	}
	for item := range strings.SplitSeq(strings.Join(values, ","), ",") {
		name, _, _ := strings.Cut(item, ";")
		switch strings.ToLower(strings.TrimSpace(name)) {
		case "", "*/*", kind + "/*", kind + "/" + sub:
			return true
		}
	}
	return false
}

// serverInfo describes a server.
type serverInfo struct {
	ID        string `json:"serverId"`
	Agent     string `json:"agent"`
	CreatedAt int64  `json:"createdAtMs"`
}

// list returns the servers of the organisation, oldest first.
func (s *Server) list(w http.ResponseWriter, r *http.Request) error {
	org, _ := s.Host(r).Caller()
	ids, err := s.Logs.IDs(r.Context(), org, logPrefix)
	if err != nil {
		return err
	}
	servers := make([]serverInfo, 0, len(ids))
	for _, id := range ids {
		l := serverLog{logs: s.Logs, org: org, id: id}
		if err := l.load(r.Context()); err != nil {
			return err
		}
		if l.state.Server != "" {
			servers = append(servers, serverInfo{l.state.Server, l.state.Agent, l.state.CreatedAt.UnixMilli()})
		}
	}
	slices.SortFunc(servers, func(a, b serverInfo) int {
		if a.CreatedAt != b.CreatedAt {
			return int(a.CreatedAt - b.CreatedAt)
		}
		return strings.Compare(a.ID, b.ID)
	})
	return writeJSON(w, map[string]any{"servers": servers})
}

// remove removes a server with the sessions that were created for it.
func (s *Server) remove(w http.ResponseWriter, r *http.Request) error {
	id, err := serverID(r)
	if err != nil {
		return err
	}
	host := s.Host(r)
	org, _ := host.Caller()
	// Clients wait only two seconds, so the removal continues without them.
	ctx, cancel := context.WithTimeout(context.WithoutCancel(r.Context()), removeTimeout)
	defer cancel()
	if err := s.removeSessions(ctx, host, logID(id)); err != nil {
		return err
	}
	if err := s.Logs.Remove(ctx, org, logID(id)); err != nil {
		return err
	}
	w.WriteHeader(http.StatusNoContent)
	return nil
}

const removeTimeout = 30 * time.Second
