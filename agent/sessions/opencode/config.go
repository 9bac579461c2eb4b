package opencode

import (
	"encoding/json"
	"fmt"
	"path"

	"github.com/bullpen-run/bullpen/agent/sessions"
)

const (
	// provider is the id of this server as a provider of models.
	provider = "bullpen"
	// contextTokens and outputTokens are the limits of a model. OpenCode summarises the conversation
	// before it reaches the first, and requests at most the second from the model.
	contextTokens = 128_000
	outputTokens  = 16_384
)

type object = map[string]any

// Actions of OpenCode's permission rules.
const (
	allow = "allow"
	ask   = "ask"
	deny  = "deny"
)

// config returns the configuration of OpenCode. The messages API is used because this server has it for
// all model servers, and chat completions only for some.
func (c *conversation) config(model string) (string, error) {
	servers, err := mcpServers(c.start)
	if err != nil {
		return "", err
	}
	box := c.start.Sandbox
	name := provider + "/" + model
	text, err := json.Marshal(object{
		"enabled_providers": []string{provider},
		"provider": object{provider: object{
			"npm": "@ai-sdk/anthropic", "name": provider,
			"options": object{"baseURL": box.Models().URL + "/anthropic/v1", "apiKey": box.Models().Token},
			"models": object{model: object{
				"limit":      object{"context": contextTokens, "output": outputTokens},
				"modalities": object{"input": []string{"text", "image", "pdf"}, "output": []string{"text"}},
				"attachment": true, "tool_call": true, "reasoning": true,
			}},
		}},
		"model": name, "small_model": name,
		"permission": permissions(),
		"agent": object{modePlan: object{
			"permission": object{"edit": deny, "bash": deny, "task": object{"general": deny}},
		}},
		// Otherwise the rejection of one of several permissions, or of a question, ends the turn.
		"experimental": object{"continue_loop_on_deny": true},
		// OpenCode does not look for these if it ignores the project's configuration.
		"instructions": []string{path.Join(box.Dir(), "AGENTS.md"), path.Join(box.Dir(), "CLAUDE.md")},
		"mcp":          servers, "share": "disabled", "autoupdate": false, "snapshot": false,
	})
	if err != nil {
		return "", fmt.Errorf("encode the configuration of OpenCode: %w", err)
	}
	return string(text), nil
}

// permissions are the rules for tools. The user is asked about all that are not known to only read, such
// as those of MCP servers.
func permissions() object {
	rules := object{
		"*":    ask,
		"read": object{"*": allow, "*.env": ask, "*.env.*": ask, "*.env.example": allow},
	}
	for _, tool := range []string{"glob", "grep", "list", "lsp", "question", "skill", "task", "todoread", "todowrite"} {
		rules[tool] = allow
	}
	return rules
}

// sessionRules are the permission rules of the session, which win over those of any configuration. OpenCode
// applies the denials to subagents, too.
func (c *conversation) sessionRules() []object {
	action := ask
	if isPlan(c.start.Session) {
		action = deny
	}
	var rules []object
	for _, tool := range []string{"bash", "edit"} {
		rules = append(rules, object{"permission": tool, "pattern": "*", "action": action})
	}
	return rules
}

// mcpServers returns the session's servers in the form of OpenCode's configuration.
func mcpServers(s *sessions.Start) (object, error) {
	list, err := sessions.MCPServers(s.Session)
	if err != nil {
		return nil, err
	}
	servers := object{}
	for i := range list {
		x := &list[i]
		server := object{"enabled": true}
		if x.TimeoutMS > 0 {
			server["timeout"] = x.TimeoutMS
		}
		if x.URL == "" {
			server["type"], server["command"], server["environment"] = "local", x.Command, orEmpty(x.Env)
			if x.Dir != "" {
				server["cwd"] = x.Dir
			}
		} else {
			headers := orEmpty(x.Headers)
			if x.BearerTokenEnv != "" {
				headers["Authorization"] = "Bearer {env:" + x.BearerTokenEnv + "}"
			}
			for header, variable := range x.EnvHeaders {
				headers[header] = "{env:" + variable + "}"
			}
			server["type"], server["url"], server["headers"], server["oauth"] = "remote", x.URL, headers, false
		}
		servers[x.Name] = server
	}
	return servers, nil
}

func orEmpty(m map[string]string) map[string]string {
	if m == nil {
		return map[string]string{}
	}
	return m
}

// env returns the environment of the program.
func (c *conversation) env(password, config string) map[string]string {
	env := map[string]string{
		"OPENCODE_SERVER_PASSWORD": password,
		"OPENCODE_CONFIG_CONTENT":  config,
		"OPENCODE_PURE":            "1", // no plugins, which are code that the user did not approve
	}
	// The project's configuration could grant permissions and run programs.
	for _, name := range []string{
		"AUTOUPDATE", "DEFAULT_PLUGINS", "LSP_DOWNLOAD", "MODELS_FETCH", "PROJECT_CONFIG", "SHARE",
	} {
		env["OPENCODE_DISABLE_"+name] = "1"
	}
	for name, dir := range map[string]string{
		"XDG_CACHE_HOME": "cache", "XDG_CONFIG_HOME": "config", "XDG_DATA_HOME": "data", "XDG_STATE_HOME": "state",
	} {
		env[name] = path.Join(c.stateDir(), dir)
	}
	return env
}

// stateDir returns the directory of OpenCode's own files.
func (c *conversation) stateDir() string {
	return path.Join(c.start.Sandbox.Home(), sessions.StateDir, "opencode")
}

// preventInstall makes OpenCode's directory of plugins look installed. Otherwise OpenCode downloads 60 MB
// of packages into the session's home.
func (c *conversation) preventInstall() error {
	dir := path.Join(c.stateDir(), "config", "opencode")
	lock := `{"packages":{"":{"dependencies":{"@opencode-ai/plugin":"*"}}}}`
	if err := c.start.Sandbox.WriteFile(c.context, path.Join(dir, "package-lock.json"), []byte(lock)); err != nil {
		return err
	}
	return c.start.Sandbox.WriteFile(c.context, path.Join(dir, "node_modules", "empty"), nil)
}
