package app

import (
	"context"
	"fmt"
	"net/http"
	"time"

	"github.com/bullpen-run/bullpen/agent/sessions"
	"github.com/bullpen-run/bullpen/agent/sessions/acp"
	"github.com/bullpen-run/bullpen/agent/sessions/amp"
	"github.com/bullpen-run/bullpen/agent/sessions/claude"
	"github.com/bullpen-run/bullpen/agent/sessions/codex"
	"github.com/bullpen-run/bullpen/agent/sessions/mock"
	"github.com/bullpen-run/bullpen/agent/sessions/opencode"
	"github.com/bullpen-run/bullpen/gateway"
	"github.com/bullpen-run/bullpen/gateway/agentsandboxes"
	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/scheduler/agentlogs"
	"github.com/bullpen-run/bullpen/scheduler/agentsessions"
	"github.com/bullpen-run/bullpen/scheduler/deliveries"
)

// sessionLogs adapts the logs of agent sessions to the interface of their package.
type sessionLogs struct{ *agentlogs.Logs }

func (l sessionLogs) Follow(org, id string) (sessions.Follower, error) { return l.Logs.Follow(org, id) }

// serveAgentSessions adds the APIs of agent sessions to server, and the parts that they need to r.
func (s *system) serveAgentSessions(ctx context.Context, server *gateway.Server, r *roles) error {
	stored, err := agentsessions.Open(ctx, s.store, s.log)
	if err != nil {
		return err
	}
	logs := sessionLogs{&stored.Logs}
	service := &sessions.Service{Records: stored, Logs: logs, Agents: s.sessionAgents()}
	boxes := &agentsandboxes.Sandboxes{
		Live: s.live, Keys: s.admission, Threads: s.threads, Versions: s.versions(), Log: s.log,
		Server: http.HandlerFunc(func(w http.ResponseWriter, request *http.Request) { r.api.ServeHTTP(w, request) }),
	}
	s.serveSandboxAgent(server, service, boxes)
	configs, err := agentsessions.OpenConfigs(ctx, s.store, s.log)
	if err != nil {
		return err
	}
	s.serveACP(server, &acp.Server{Sessions: service, Logs: logs, Configs: configs}, boxes)
	runner := &sessions.Runner{
		Logs: logs, Records: stored, Agent: service.Agent, CheckKey: s.admission.CheckKey,
		Notify: s.notifySession, Log: s.log, KeepAlive: s.cfg.AgentIdle,
		WideAlways: s.cfg.AgentWideAlways,
		Sandboxes:  sessionSandboxes{boxes},
	}
	engine := stored.Engine(runner.CarryOut, s.cfg.Retention, s.instance, s.log)
	r.base = append(r.base, part{"agent sessions", stored.Run}, part{"configurations of agents' tools", configs.Run})
	r.work = append(r.work, part{"work of agent sessions", engine.Run})
	return nil
}

// sessionAgents returns the agents in the order of lists. Clients expect all agents of the API there,
// including those that this server cannot run.
func (s *system) sessionAgents() []sessions.Agent {
	return []sessions.Agent{
		&claude.Agent{Installed: s.installed("claude")}, &codex.Agent{Installed: s.installed("codex")},
		&opencode.Agent{Installed: s.installed("opencode")}, &amp.Agent{Installed: s.installed("amp")},
		&mock.Agent{Delay: s.cfg.AgentMockDelay},
	}
}

// sessionHook is the body of the webhook of an event of a session.
type sessionHook struct {
	Event     string `json:"event"`
	Session   string `json:"session_id"`
	Agent     string `json:"agent"`
	Sequence  int64  `json:"sequence"` // of the event
	Timestamp string `json:"timestamp"`
}

// notifySession creates the webhook of an event of a session, if its API key has a URL.
func (s *system) notifySession(ctx context.Context, x *proto.AgentSession, n sessions.Notice) error {
	url := s.webhooks.settings.Webhook(x.Org, x.Key).URL
	if url == "" {
		return nil
	}
	now := time.Now()
	body := sessionHook{
		proto.EventSessionPrefix + string(n.Type), x.ID, x.Agent, n.Sequence, now.UTC().Format(proto.TimeLayout),
	}
	name := fmt.Sprintf("event %d of %s.%s of %s", n.Sequence, x.Org, x.LogID(), x.CreatedAt)
	delivery, err := proto.NewEventDelivery(name, x.Org, x.Key, url, body, now)
	if err != nil {
		return err
	}
	return (&deliveries.Store{Store: s.store}).Create(ctx, delivery)
}
