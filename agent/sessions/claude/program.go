package claude

import (
	"crypto/sha256"
	"encoding/json"
	"fmt"
	"maps"
	"strconv"
	"strings"

	"github.com/bullpen-run/bullpen/agent/sessions"
	"github.com/bullpen-run/bullpen/proto"
)

// defaultModel leaves the choice of the model to Claude Code.
const defaultModel = "default"

// disallowedTools start turns by themselves, or move the session to another directory, by which Claude
// Code finds the conversation again.
const disallowedTools = "CronCreate,CronDelete,CronList,ScheduleWakeup,EnterWorktree,ExitWorktree"

// program returns the command line and the environment.
func (a *Agent) program(s *sessions.Start) (*sessions.Program, error) {
	args := []string{
		"node", a.Installed().Dir + "/cli.js", "-p", "--output-format", "stream-json", "--input-format", "stream-json",
		"--verbose", "--include-partial-messages", "--permission-prompt-tool", "stdio",
		// The settings of a repository can allow tools and run commands as hooks, so they are not read. Its
		// CLAUDE.md is, see CLAUDE_CODE_ADDITIONAL_DIRECTORIES_CLAUDE_MD.
		"--setting-sources", "user", "--add-dir", s.Sandbox.Dir(),
		"--disallowedTools", disallowedTools, "--strict-mcp-config",
	}
	if model := s.Session.Model; model != "" && model != defaultModel {
		args = append(args, "--model", model)
	}
	if s.Native != "" { // Claude Code has stored a transcript with this id
		args = append(args, "--resume", s.Native)
	} else {
		args = append(args, "--session-id", sessionUUID(s.Session, s.Turns))
	}
	switch mode := s.Session.PermissionMode; {
	case isPlan(s.Session):
		args = append(args, "--permission-mode", "plan")
	case mode == sessions.PermissionAcceptEdits:
		args = append(args, "--permission-mode", "acceptEdits")
	case mode == sessions.PermissionBypass:
		args = append(args, "--dangerously-skip-permissions")
	}
	env := environment(s.Sandbox)
	servers, err := sessions.MCPServers(s.Session)
	if err != nil {
		return nil, err
	}
	if len(servers) > 0 {
		config, timeout, err := mcpConfig(servers)
		if err != nil {
			return nil, err
		}
		args = append(args, "--mcp-config", config)
		if timeout > 0 {
			env["MCP_TOOL_TIMEOUT"] = strconv.FormatInt(timeout, 10)
		}
	}
	return &sessions.Program{Args: args, Env: env}, nil
}

// environment returns the environment, which has no access but to the models of the sandbox.
func environment(b sessions.Sandbox) map[string]string {
	models := b.Models()
	return map[string]string{
		"CLAUDE_CONFIG_DIR":    b.Home() + "/" + sessions.StateDir + "/claude",
		"ANTHROPIC_BASE_URL":   models.URL + "/anthropic",
		"ANTHROPIC_AUTH_TOKEN": models.Token,
		"ANTHROPIC_API_KEY":    "", // it would be sent, too

		// The default is 10 attempts over minutes.
		"CLAUDE_CODE_MAX_RETRIES": "2",
		// A model that sends nothing for 5 minutes has failed.
		"CLAUDE_ENABLE_STREAM_WATCHDOG": "1", "CLAUDE_STREAM_IDLE_TIMEOUT_MS": "300000",

		"CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
		"DISABLE_AUTOUPDATER":                      "1",
		"DISABLE_TELEMETRY":                        "1",
		"DISABLE_ERROR_REPORTING":                  "1",

		// The ends of background commands and timers start turns.
		"CLAUDE_CODE_DISABLE_BACKGROUND_TASKS":  "1",
		"CLAUDE_CODE_DISABLE_CRON":              "1",
		"CLAUDE_CODE_EMIT_SESSION_STATE_EVENTS": "1", // see conversation.state

		"CLAUDE_CODE_ADDITIONAL_DIRECTORIES_CLAUDE_MD": "1",
		"IS_SANDBOX": "1", // allows to bypass permissions as root
	}
}

// sessionUUID returns the id of a new transcript. It depends on the number of the turn, because
// Claude Code refuses an existing id, such as that of a first turn whose process died.
func sessionUUID(x *proto.AgentSession, turn int64) string {
	sum := sha256.Sum256(fmt.Appendf(nil, "%s\x00%s\x00%d", x.Org, x.ID, turn))
	sum[6], sum[8] = sum[6]&0x0f|0x40, sum[8]&0x3f|0x80
	return fmt.Sprintf("%x-%x-%x-%x-%x", sum[:4], sum[4:6], sum[6:8], sum[8:10], sum[10:16])
}

// mcpServer is a server in the configuration of Claude Code, which replaces ${NAME} by variables.
type mcpServer struct {
	Type    string            `json:"type"`
	Command string            `json:"command,omitempty"`
	Args    []string          `json:"args,omitempty"`
	Env     map[string]string `json:"env,omitempty"`
	URL     string            `json:"url,omitempty"`
	Headers map[string]string `json:"headers,omitempty"`
}

// mcpConfig returns the configuration of servers, and the longest of their timeouts in milliseconds.
// Claude Code has one timeout for all.
func mcpConfig(servers []sessions.MCPServer) (config string, timeout int64, err error) {
	list := map[string]mcpServer{}
	for i := range servers {
		s := &servers[i]
		timeout = max(timeout, s.TimeoutMS)
		if s.URL != "" {
			list[s.Name] = remoteServer(s)
			continue
		}
		if len(s.Command) == 0 || s.Command[0] == "" {
			return "", 0, sessions.Invalidf("mcp: the server %s has no command and no url", proto.Shorten(s.Name))
		}
		command := s.Command
		if s.Dir != "" {
			command = append([]string{"sh", "-c", `cd -- "$0" && exec "$@"`, s.Dir}, command...)
		}
		list[s.Name] = mcpServer{Type: "stdio", Command: command[0], Args: command[1:], Env: s.Env}
	}
	text, err := json.Marshal(map[string]any{"mcpServers": list})
	if err != nil {
		return "", 0, fmt.Errorf("encode the MCP servers: %w", err)
	}
	return string(text), timeout, nil
}

func remoteServer(s *sessions.MCPServer) mcpServer {
	remote := mcpServer{Type: "http", URL: s.URL, Headers: map[string]string{}}
	if strings.EqualFold(s.Transport, "sse") {
		remote.Type = "sse"
	}
	maps.Copy(remote.Headers, s.Headers)
	for name, variable := range s.EnvHeaders {
		remote.Headers[name] = "${" + variable + "}"
	}
	if s.BearerTokenEnv != "" {
		remote.Headers["Authorization"] = "Bearer ${" + s.BearerTokenEnv + "}"
	}
	return remote
}
