package codex

import (
	"fmt"
	"regexp"
	"time"

	"github.com/bullpen-run/bullpen/agent/sessions"
	"github.com/bullpen-run/bullpen/proto"
)

// invalidInName matches what Codex does not accept in the name of an MCP server.
var invalidInName = regexp.MustCompile(`[^a-zA-Z0-9_-]`)

// configOf returns the MCP servers of a session, by name, as Codex configures them.
func configOf(x *proto.AgentSession) (map[string]any, error) {
	list, err := sessions.MCPServers(x)
	if err != nil {
		return nil, err
	}
	servers := map[string]any{}
	for i := range list {
		s := &list[i]
		if s.Transport == "sse" {
			return nil, &sessions.Error{
				Kind: sessions.InvalidRequest, Agent: x.Agent,
				Message: fmt.Sprintf("Codex cannot use MCP server %s: its transport is sse; use one with http", s.Name),
			}
		}
		name := invalidInName.ReplaceAllString(s.Name, "_")
		for servers[name] != nil {
			name += "_"
		}
		servers[name] = serverConfig(s)
	}
	return servers, nil
}

// serverConfig returns a server as Codex configures it.
func serverConfig(s *sessions.MCPServer) map[string]any {
	config := map[string]any{}
	set := func(name string, value any, wanted bool) {
		if wanted {
			config[name] = value
		}
	}
	if s.URL != "" {
		config["url"] = s.URL
		set("http_headers", s.Headers, len(s.Headers) > 0)
		set("env_http_headers", s.EnvHeaders, len(s.EnvHeaders) > 0)
		set("bearer_token_env_var", s.BearerTokenEnv, s.BearerTokenEnv != "")
	} else {
		config["command"], config["args"] = "", []string{}
		if len(s.Command) > 0 {
			config["command"], config["args"] = s.Command[0], s.Command[1:]
		}
		set("env", s.Env, len(s.Env) > 0)
		set("cwd", s.Dir, s.Dir != "")
	}
	set("tool_timeout_sec", (time.Duration(s.TimeoutMS) * time.Millisecond).Seconds(), s.TimeoutMS > 0)
	return config
}
