package app

import (
	"context"
	"net/http"

	"github.com/bullpen-run/bullpen/agent/sessions"
	"github.com/bullpen-run/bullpen/agent/sessions/acp"
	"github.com/bullpen-run/bullpen/agent/sessions/rest"
	"github.com/bullpen-run/bullpen/gateway"
	"github.com/bullpen-run/bullpen/gateway/agents"
	"github.com/bullpen-run/bullpen/gateway/web"
)

// sessionHost adapts the agent of a request to [rest.Host] and [acp.Host].
type sessionHost struct{ *agents.Agent }

func (h sessionHost) Home(thread string) rest.Home { return h.Agent.Home(thread) }

// RemoveHome removes the thread that holds a session's files, if it exists.
func (h sessionHost) RemoveHome(ctx context.Context, thread string) error {
	return h.Home(thread).Remove(ctx)
}

// serveSandboxAgent adds the routes of the Sandbox Agent API to server.
func (s *system) serveSandboxAgent(server *gateway.Server, service *sessions.Service) {
	routes := &rest.Server{
		Service: service, Log: s.log,
		Host: func(r *http.Request) rest.Host { return sessionHost{server.Agents().ForRequest(r)} },
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
func (s *system) serveACP(server *gateway.Server, routes *acp.Server) {
	routes.Version, routes.Wait, routes.Log = Version(), acp.DefaultWait, s.log
	routes.Host = func(r *http.Request) acp.Host { return sessionHost{server.Agents().ForRequest(r)} }
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
