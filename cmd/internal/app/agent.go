package app

import (
	"context"
	"fmt"
	"net/http"
	"net/url"
	"os"
	"strings"
	"time"

	"github.com/bullpen-run/bullpen/agent"
	"github.com/bullpen-run/bullpen/agent/anthropic"
	"github.com/bullpen-run/bullpen/agent/responses"
	"github.com/bullpen-run/bullpen/agent/upstream"
	"github.com/bullpen-run/bullpen/gateway"
	"github.com/bullpen-run/bullpen/gateway/web"
	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/proto/api"
	"github.com/bullpen-run/bullpen/scheduler/agentruns"
	"github.com/bullpen-run/bullpen/scheduler/deliveries"
)

// agentKey returns the key of the model's server, empty if it has none.
func (c *Config) agentKey() (string, error) {
	if c.AgentKeyFile == "" {
		return "", nil
	}
	text, err := os.ReadFile(c.AgentKeyFile)
	if err != nil {
		return "", fmt.Errorf("--agent-key-file: %w", err)
	}
	key := strings.TrimSpace(string(text))
	if key == "" {
		return "", fmt.Errorf("--agent-key-file: %s is empty: write the key into it, or leave the setting out for a "+
			"server without keys", c.AgentKeyFile)
	}
	return key, nil
}

func (c *Config) validateAgent() error {
	if err := setting("agent-mock-delay", c.AgentMockDelay >= 0, "must not be negative"); err != nil {
		return err
	}
	if c.AgentUpstream == "" {
		return setting("agent-upstream", c.AgentKeyFile == "" && len(c.AgentModels) == 0,
			"must be set for --agent-key-file and --agent-models")
	}
	u, err := url.Parse(c.AgentUpstream)
	if err := setting("agent-upstream", err == nil && (u.Scheme == "http" || u.Scheme == "https") && u.Hostname() != "" &&
		u.User == nil && u.RawQuery == "" && !strings.HasSuffix(c.AgentUpstream, "/"),
		"must be an http or https URL, without a user, a query and a slash at its end"); err != nil {
		return err
	}
	if err := setting("agent-retries", c.AgentRetries >= 0, "must not be negative"); err != nil {
		return err
	}
	return positive("agent-timeout", c.AgentTimeout)
}

// serveAgents opens the runs of agents, which the batch runner needs in every gateway. If the
// operator has set a model server, it adds the agent surfaces to server, and the parts they need.
func (s *system) serveAgents(ctx context.Context, server *gateway.Server, r *roles) error {
	runs, err := agentruns.Open(ctx, s.store, s.log)
	if err != nil {
		return err
	}
	runs.Rejects = s.rejects
	s.agentRuns = runs
	r.base = append(r.base, part{"runs of agents", runs.Run})
	c := s.cfg
	if c.AgentUpstream == "" {
		return nil
	}
	if _, err := c.agentKey(); err != nil {
		return err
	}
	server.AgentBatches = batchStore{s.batches, anthropic.API}
	transport := http.DefaultTransport.(*http.Transport).Clone() //nolint:forcetypeassert // it is one
	transport.MaxIdleConnsPerHost = 100
	up := &upstream.Client{
		Protocol: upstream.Protocol(c.AgentProtocol), URL: c.AgentUpstream, Key: c.agentKey, Models: c.AgentModels,
		Timeout: c.AgentTimeout, Retries: c.AgentRetries,
		HTTP: &http.Client{
			Transport: transport,
			// A redirect would take the key elsewhere.
			CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse },
		},
	}
	surface := web.Surface{
		WriteError: anthropic.WriteError, KeyHeader: anthropic.KeyHeader,
		Prefixes: []string{anthropic.Prefix + "/"},
	}
	messages := &anthropic.Server{Upstream: up, Host: func(r *http.Request) agent.RequestHost {
		return modelHost(server, r)
	}, Runs: runs, Log: s.log}
	for _, route := range messages.Routes() {
		surface.Routes = append(surface.Routes, web.SurfaceRow(route))
	}
	others := web.Surface{
		WriteError: responses.WriteError,
		Prefixes:   []string{responses.OpenAIPrefix + "/", responses.PerplexityPrefix + "/"},
	}
	answers := &responses.Server{
		Upstream: up, Host: func(r *http.Request) agent.RequestHost { return modelHost(server, r) },
		Runs: runs, Log: s.log,
		Notify: func(ctx context.Context, org, key, name string, body any) error {
			url := s.webhooks.settings.Webhook(org, key).URL
			if url == "" {
				return nil
			}
			delivery, err := proto.NewEventDelivery(name, org, key, url, body, time.Now())
			if err != nil {
				return err
			}
			return (&deliveries.Store{Store: s.store}).Create(ctx, delivery)
		},
	}
	if up.Protocol == upstream.OpenAI {
		answers.Completions = up
	}
	for _, route := range answers.Routes() {
		others.Routes = append(others.Routes, web.SurfaceRow(route))
	}
	server.Surfaces = append(server.Surfaces, surface, others, rootModels(messages, answers))
	background := &agent.Background{
		Store: runs, Upstream: up,
		APIs: map[string]agent.API{"openai": answers, "perplexity": answers, anthropic.API: messages}, Log: s.log,
		Host: func(org, id string) agent.BackgroundHost { return server.Agents().InBackground(org, id) },
	}
	engine := runs.Engine(background.CarryOut, s.instance, s.log)
	r.work = append(r.work, part{"agent runs in the background", engine.Run})
	return nil
}

// rootModels returns the surface for models at the root, where both APIs have them. Requests with
// an Anthropic header go to that API, all others to OpenAI's.
func rootModels(messages *anthropic.Server, answers *responses.Server) web.Surface {
	isAnthropic := func(r *http.Request) bool {
		return r.Header.Get(anthropic.KeyHeader) != "" || r.Header.Get("Anthropic-Version") != ""
	}
	choose := func(theirs, others func(http.ResponseWriter, *http.Request) error) func(
		http.ResponseWriter, *http.Request) error {
		return func(w http.ResponseWriter, r *http.Request) error {
			if isAnthropic(r) {
				return theirs(w, r)
			}
			return others(w, r)
		}
	}
	model := func(path, id, summary string) api.Route {
		return api.Route{
			Method: http.MethodGet, Path: path, ID: id, Summary: summary, Scope: proto.ScopeExecute,
			Vendor: "OpenAI, or Anthropic for a request with one of its headers,",
		}
	}
	return web.Surface{
		KeyHeader: anthropic.KeyHeader,
		WriteError: func(w http.ResponseWriter, r *http.Request, e *api.Error) {
			if isAnthropic(r) {
				anthropic.WriteError(w, r, e)
			} else {
				responses.WriteError(w, r, e)
			}
		},
		Routes: []web.SurfaceRow{
			{
				Route:  model("/v1/models", "rootListModels", "List models"),
				Handle: choose(messages.ListModels, answers.ListModels),
			},
			{
				Route:  model("/v1/models/*", "rootGetModel", "Look at a model"),
				Handle: choose(messages.GetModel, answers.GetModel),
			},
		},
	}
}
