package app

import (
	"context"
	"io"
	"net/http"

	"github.com/bullpen-run/bullpen/agent/sessions"
	"github.com/bullpen-run/bullpen/agent/sessions/acp"
	"github.com/bullpen-run/bullpen/agent/sessions/rest"
	"github.com/bullpen-run/bullpen/gateway"
	"github.com/bullpen-run/bullpen/gateway/agents"
	"github.com/bullpen-run/bullpen/gateway/agentsandboxes"
	gatewaysandboxes "github.com/bullpen-run/bullpen/gateway/sandboxes"
	"github.com/bullpen-run/bullpen/gateway/web"
	"github.com/bullpen-run/bullpen/proto"
)

// sessionHost adapts the agent of a request to [rest.Host] and [acp.Host].
type sessionHost struct {
	*agents.Agent
	request   *web.Request
	sandboxes *agentsandboxes.Sandboxes
}

// Home returns the files of a thread: as a sandbox has them if one runs, and else as they are stored.
func (h sessionHost) Home(thread string) rest.Home {
	stored := h.Agent.Home(thread)
	org, _ := h.Caller()
	running, err := h.sandboxes.Home(org, thread)
	if err != nil || running == nil {
		return sessionHome{stored, h, thread}
	}
	return liveHome{running, sessionHome{stored, h, thread}}
}

// sessionHome is the stored home of a session.
type sessionHome struct {
	*agents.Home
	host   sessionHost
	thread string
}

// Remove removes the thread. It first stops the sandbox that uses it, if there is one.
func (h sessionHome) Remove(ctx context.Context) error {
	org, key := h.host.Caller()
	if err := h.host.sandboxes.Stop(ctx, org, key, h.thread); err != nil {
		return err
	}
	return h.Home.Remove(ctx)
}

// liveHome is the home of a session whose sandbox runs.
type liveHome struct {
	*gatewaysandboxes.Home
	stored sessionHome
}

// PutBody implements [rest.Home].
func (h liveHome) PutBody(_ http.ResponseWriter, name string) (int64, error) {
	limit, err := h.stored.host.HomeLimit()
	if err != nil {
		return 0, err
	}
	return h.Home.PutBody(h.stored.host.request, name, limit)
}

// UnpackBody implements [rest.Home].
func (h liveHome) UnpackBody(w http.ResponseWriter, dir string, each func(path string)) error {
	return h.stored.host.OpenBody(w, func(body io.Reader) error {
		return h.Unpack(h.stored.host.request.Context(), body, dir, each)
	})
}

// Remove implements [rest.Home].
func (h liveHome) Remove(ctx context.Context) error { return h.stored.Remove(ctx) }

func newSessionHost(server *gateway.Server, boxes *agentsandboxes.Sandboxes, r *http.Request) sessionHost {
	return sessionHost{server.Agents().ForRequest(r), web.RequestOf(r), boxes}
}

// HomePath returns the path of the home in the sandboxes of sessions.
func (sessionHost) HomePath() string { return proto.SandboxHome }

// CleanPath returns a path relative to that home. The error for an absolute path outside of it is for clients.
func (sessionHost) CleanPath(name string) (string, error) {
	return agents.CleanPath(proto.SandboxHome, name)
}

// RemoveHome removes the thread that holds a session's files, if it exists.
func (h sessionHost) RemoveHome(ctx context.Context, thread string) error {
	return h.Home(thread).Remove(ctx)
}

// serveSandboxAgent adds the routes of the Sandbox Agent API to server.
func (s *system) serveSandboxAgent(
	server *gateway.Server, service *sessions.Service, boxes *agentsandboxes.Sandboxes,
) {
	routes := &rest.Server{
		Service: service, Log: s.log,
		Host: func(r *http.Request) rest.Host { return newSessionHost(server, boxes, r) },
	}
	surface := web.Surface{
		WriteError: rest.WriteError, Key: rest.Token, Cookies: true, Prefixes: []string{rest.Prefix + "/"},
	}
	list := routes.Routes(false)
	if s.cfg.AgentSessionsAtRoot {
		list = append(list, routes.Routes(true)...)
		surface.Prefixes = append(surface.Prefixes, rest.RootPrefixes()...)
	}
	for _, route := range list {
		surface.Routes = append(surface.Routes, web.SurfaceRow(route))
	}
	server.Surfaces = append(server.Surfaces, surface)
}

// serveACP adds the routes of the agent client protocol to server.
func (s *system) serveACP(server *gateway.Server, routes *acp.Server, boxes *agentsandboxes.Sandboxes) {
	routes.Version, routes.Wait, routes.Log = Version(), acp.DefaultWait, s.log
	routes.Host = func(r *http.Request) acp.Host { return newSessionHost(server, boxes, r) }
	surface := web.Surface{WriteError: routes.WriteError, Key: rest.Token}
	list := routes.Routes(false)
	if s.cfg.AgentSessionsAtRoot {
		list = append(list, routes.Routes(true)...)
	}
	for _, route := range list {
		surface.Routes = append(surface.Routes, web.SurfaceRow(route))
	}
	server.Surfaces = append(server.Surfaces, surface)
}
