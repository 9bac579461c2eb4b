package sessions

import (
	"encoding/json"
	"fmt"
	"maps"
	"slices"

	"github.com/bullpen-run/bullpen/proto"
)

// StateDir is the directory of the agents' own files, relative to the home of a session. Each agent has a
// directory in it.
const StateDir = ".agent"

// MCPServer is a server of the Model Context Protocol whose tools an agent can use.
type MCPServer struct {
	Name string
	// Command runs a local server, which communicates over its standard input and output. It is empty for
	// a remote one.
	Command []string
	Env     map[string]string
	Dir     string // the working directory of Command; empty for that of the session

	// URL is that of a remote server.
	URL       string
	Transport string            // http or sse; empty for http
	Headers   map[string]string // of all requests
	// BearerTokenEnv names a variable of the sandbox that contains the token of requests. EnvHeaders names
	// such variables by header.
	BearerTokenEnv string
	EnvHeaders     map[string]string

	TimeoutMS int64 // 0 for the agent's own
}

// storedServer is a server in the record of a session.
type storedServer struct {
	Command        json.RawMessage   `json:"command"`
	Args           []string          `json:"args"`
	Env            map[string]string `json:"env"`
	CWD            string            `json:"cwd"`
	URL            string            `json:"url"`
	Headers        map[string]string `json:"headers"`
	BearerTokenEnv string            `json:"bearerTokenEnvVar"`
	EnvHeaders     map[string]string `json:"envHeaders"`
	Enabled        *bool             `json:"enabled"`
	TimeoutMS      int64             `json:"timeoutMs"`
	Transport      string            `json:"transport"`
}

// MCPServers returns the servers of a session that are enabled, ordered by name.
func MCPServers(x *proto.AgentSession) (list []MCPServer, err error) {
	if len(x.MCP) == 0 {
		return nil, nil
	}
	var stored map[string]storedServer
	if err := json.Unmarshal(x.MCP, &stored); err != nil {
		return nil, fmt.Errorf("decode the MCP servers of session %s: %w", x.ID, err)
	}
	for _, name := range slices.Sorted(maps.Keys(stored)) {
		s := stored[name]
		if s.Enabled != nil && !*s.Enabled {
			continue
		}
		server := MCPServer{
			Name: name, Env: s.Env, Dir: s.CWD, URL: s.URL, Transport: s.Transport, Headers: s.Headers,
			BearerTokenEnv: s.BearerTokenEnv, EnvHeaders: s.EnvHeaders, TimeoutMS: s.TimeoutMS,
		}
		if s.URL == "" {
			var command string
			if json.Unmarshal(s.Command, &command) == nil {
				server.Command = []string{command}
			} else if err := json.Unmarshal(s.Command, &server.Command); err != nil {
				return nil, fmt.Errorf("decode the command of MCP server %s: %w", name, err)
			}
			server.Command = append(server.Command, s.Args...)
		}
		list = append(list, server)
	}
	return list, nil
}
