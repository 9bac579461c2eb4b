package opencode_test

import (
	"context"
	"encoding/json"
	"errors"
	"testing"

	"github.com/bullpen-run/bullpen/agent/sessions"
	"github.com/bullpen-run/bullpen/agent/sessions/opencode"
	"github.com/bullpen-run/bullpen/proto"
)

// noStart is a sandbox that starts no program.
type noStart struct {
	sessions.Sandbox
	program *sessions.Program
}

func (*noStart) Home() string { return "/home/user" }
func (*noStart) Dir() string  { return "/home/user/project" }
func (*noStart) Models() sessions.Models {
	return sessions.Models{URL: "http://127.0.0.1:1", Token: "token"}
}
func (*noStart) WriteFile(context.Context, string, []byte) error { return nil }

func (b *noStart) Start(_ context.Context, p *sessions.Program) (sessions.Process, error) {
	b.program = p
	return nil, errors.New("no program")
}

// start returns the program that a session would run.
func start(t *testing.T, x *proto.AgentSession) *sessions.Program {
	t.Helper()
	box := &noStart{}
	installed := sessions.Installation{Dir: "/opencode"}
	a := &opencode.Agent{Installed: func() sessions.Installation { return installed }, Ripgrep: "/rg"}
	if _, err := a.Start(t.Context(), &sessions.Start{Session: x, Sandbox: box}); err == nil || box.program == nil {
		t.Fatalf("started %v, %v", box.program, err)
	}
	return box.program
}

func TestConfiguration(t *testing.T) {
	p := start(t, &proto.AgentSession{AgentMode: "build", Model: "large", MCP: json.RawMessage(`{
		"files": {"type":"local","command":["npx","files"],"args":["-v"],"env":{"A":"b"},"timeoutMs":5000,"cwd":"/srv"},
		"off":   {"type":"local","command":"off","enabled":false},
		"web":   {"type":"remote","url":"https://mcp.example/","headers":{"X":"y"},
			"bearerTokenEnvVar":"TOKEN","envHeaders":{"Z":"ZED"}}
	}`)})
	var config struct {
		Providers []string       `json:"enabled_providers"`
		Model     string         `json:"model"`
		Provider  map[string]any `json:"provider"`
		MCP       any            `json:"mcp"`
	}
	if err := json.Unmarshal([]byte(p.Env["OPENCODE_CONFIG_CONTENT"]), &config); err != nil {
		t.Fatal(err)
	}
	servers, err := json.Marshal(config.MCP)
	if err != nil {
		t.Fatal(err)
	}
	check(t, "the servers of tools", string(servers)+"\n", `
{"files":{"command":["npx","files","-v"],"cwd":"/srv","enabled":true,"environment":{"A":"b"},"timeout":5000,`+
		`"type":"local"},"web":{"enabled":true,"headers":{"Authorization":"Bearer {env:TOKEN}","X":"y","Z":"{env:ZED}"},`+
		`"oauth":false,"type":"remote","url":"https://mcp.example/"}}
`)
	if config.Model != "bullpen/large" || len(config.Providers) != 1 || config.Provider["bullpen"] == nil {
		t.Errorf("the configuration has %+v", config)
	}
	if got := p.Env["XDG_DATA_HOME"]; got != "/home/user/.agent/opencode/data" {
		t.Errorf("the data is in %s", got)
	}
	again := start(t, &proto.AgentSession{AgentMode: "build"})
	const password = "OPENCODE_SERVER_PASSWORD"
	if p.Env[password] == "" || p.Env[password] == again.Env[password] {
		t.Error("two programs have the same password")
	}
}
