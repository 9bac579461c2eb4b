// Package codex drives Codex. It speaks the protocol of the app server of version 0.116.0: JSON-RPC in lines,
// without the field jsonrpc. One process serves the turns of a session until one of them is interrupted or makes
// a plan.
package codex

import (
	"context"
	"encoding/json"
	"fmt"
	"path"
	"sync"

	"github.com/bullpen-run/bullpen/agent/sessions"
	"github.com/bullpen-run/bullpen/proto"
)

// Agent is Codex. Its fields must be set before use.
type Agent struct {
	// Installed describes the program that workers have.
	Installed func() sessions.Installation
}

// Info implements [sessions.Agent].
func (a *Agent) Info() *sessions.Info {
	installed := a.Installed()
	return &sessions.Info{
		ID: "codex", Installation: installed, Sandboxed: true, Credentials: installed.Missing == "",
		SkillsDir: sessions.StateDir + "/codex/skills",
		Modes: []sessions.Mode{
			{ID: "build", Name: "Build", Description: "Default build mode"},
			{ID: "plan", Name: "Plan", Description: "Plan mode: tools that change something are refused"},
		},
		PermissionModes: []string{
			sessions.PermissionDefault, sessions.PermissionPlan, sessions.PermissionBypass, sessions.PermissionAcceptEdits,
		},
		Capabilities: sessions.Capabilities{
			PlanMode: true, Permissions: true, Questions: true, ToolCalls: true, ToolResults: true, TextMessages: true,
			Images: true, FileAttachments: true, ErrorEvents: true, Reasoning: true, Status: true, CommandExecution: true,
			FileChanges: true, MCPTools: true, StreamingDeltas: true, ItemStarted: true,
		},
	}
}

// conversation is a conversation with Codex.
type conversation struct {
	launch  func() (sessions.Process, error)
	session *proto.AgentSession
	dir     string         // in which Codex works
	servers map[string]any // of the Model Context Protocol, as Codex configures them
	report  func(sessions.Native) error
	work    sync.WaitGroup // of all goroutines that report

	mu      sync.Mutex
	thread  string   // Codex's id of the conversation; empty if it has none yet
	program *program // nil if none runs
	turn    *turn    // nil if none is in progress
}

// Start implements [sessions.Agent].
func (a *Agent) Start(ctx context.Context, s *sessions.Start) (sessions.Conversation, error) {
	servers, err := configOf(s.Session)
	if err != nil {
		return nil, err
	}
	home := path.Join(s.Sandbox.Home(), sessions.StateDir, "codex")
	// Codex refuses to start if its directory is missing.
	err = s.Sandbox.WriteFile(ctx, path.Join(home, "config.toml"), []byte("# The command line has the settings.\n"))
	if err != nil {
		return nil, fmt.Errorf("create the directory of Codex: %w", err)
	}
	c := &conversation{
		launch: func() (sessions.Process, error) {
			return s.Sandbox.Start(ctx, command(a.Installed().Dir, home, s.Sandbox.Models()))
		},
		session: s.Session, dir: s.Sandbox.Dir(), servers: servers, report: s.Report, thread: s.Native,
	}
	return c, c.start()
}

// tokenVariable is the variable with the token for the models.
const tokenVariable = "BULLPEN_MODELS_TOKEN"

// command returns the command line of Codex, whose files are in dir. home is its own directory.
func command(dir, home string, models sessions.Models) *sessions.Program {
	vendor := dir + "/vendor/x86_64-unknown-linux-musl"
	args := []string{
		// Codex searches files with rg, which comes with it.
		"/bin/sh", "-c", `PATH="$PATH:$0" exec "$@"`, vendor + "/path",
		vendor + "/codex/codex", "app-server",
	}
	for _, setting := range []string{
		`model_provider="bullpen"`,
		fmt.Sprintf(`model_providers.bullpen={name="bullpen",base_url=%q,env_key=%q,wire_api="responses",`+
			`request_max_retries=0,stream_max_retries=2,supports_websockets=false}`, models.URL+"/openai/v1", tokenVariable),
		`web_search="disabled"`,
		`allow_login_shell=false`, // a login shell replaces PATH
		fmt.Sprintf(`shell_environment_policy.exclude=[%q]`, tokenVariable),
		// The commands of unified_exec, and the agents of multi_agent, go on after the turn.
		`features.unified_exec=false`,
		`features.multi_agent=false`,
		// It allows questions outside of plan mode.
		`features.default_mode_request_user_input=true`,
		`suppress_unstable_features_warning=true`,
	} {
		args = append(args, "-c", setting)
	}
	return &sessions.Program{Args: args, Env: map[string]string{
		"CODEX_HOME": home, tokenVariable: models.Token,
		// Its databases only repeat what its transcripts contain, and grow with what it logs: the home need not have them.
		"CODEX_SQLITE_HOME": "/tmp/codex",
	}}
}

// start starts the program. It requires c.mu, or that nobody else has c.
func (c *conversation) start() error {
	process, err := c.launch()
	if err != nil {
		return fmt.Errorf("start Codex: %w", err)
	}
	c.program = &program{conversation: c, process: process}
	c.work.Go(c.program.read)
	return c.program.initialize()
}

// Resumed implements [sessions.Conversation]. It returns false, because Codex ends the turn in which it was killed.
func (c *conversation) Resumed() bool { return false }

// Send implements [sessions.Conversation].
func (c *conversation) Send(_ context.Context, m *sessions.Message) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	x := c.session
	c.turn = &turn{
		input: inputOf(m), model: m.Model, effort: m.Variant, items: map[string]*item{}, natives: map[string]bool{},
		plan: x.AgentMode == "plan" || x.PermissionMode == sessions.PermissionPlan, requests: map[string]*request{},
	}
	if c.turn.model == "" {
		c.turn.model = x.Model
	}
	if c.turn.effort == "" {
		c.turn.effort = x.Variant
	}
	return c.proceed()
}

// proceed passes the input of the turn to Codex. It requires c.mu.
func (c *conversation) proceed() error {
	if c.program == nil {
		if err := c.start(); err != nil {
			return err
		}
	}
	if !c.program.open {
		return c.program.openThread(c.thread)
	}
	return c.program.startTurn()
}

// interrupted is the metadata of an interrupted turn.
var interrupted = sessions.Turn{Metadata: json.RawMessage(`{"interrupted":true}`)} // read only

// Interrupt implements [sessions.Conversation]. A repeated interrupt kills Codex.
func (c *conversation) Interrupt(context.Context) error {
	c.mu.Lock()
	t, p := c.turn, c.program
	if t == nil {
		c.mu.Unlock()
		return nil
	}
	again := t.interrupted
	t.interrupted = true
	switch {
	case t.question != "":
		if !t.asked { // the reader ends the turn
			break
		}
		c.turn = nil
		c.reportLater(sessions.TurnEnded, interrupted)
	case p != nil && !again && t.native != "":
		p.interruptTurn()
	}
	c.mu.Unlock()
	if again && p != nil {
		p.process.Close() // without c.mu, which the reader may need
	}
	return nil
}

// reportLater reports without waiting, as methods that the runner calls must.
func (c *conversation) reportLater(kind sessions.EventType, data any) {
	c.work.Go(func() {
		_ = c.report(sessions.Native{Type: kind, Data: data}) // the conversation may be closed
	})
}

// Close implements [sessions.Conversation].
func (c *conversation) Close() {
	c.mu.Lock()
	p := c.program
	c.mu.Unlock()
	if p != nil {
		p.process.Close()
	}
	c.work.Wait()
}

// turn is a turn in progress.
type turn struct {
	input       []map[string]any
	model       string // empty for Codex's default
	effort      string // empty for the model's default
	plan        bool   // whether Codex only plans
	planned     bool   // whether Codex has made a plan
	native      string // Codex's id of the turn; empty until it is known
	interrupted bool
	// question is the id of the question whether to carry out the plan; empty if there is none without an answer. asked is
	// set once it is reported.
	question string
	asked    bool
	requests map[string]*request // without an answer, by the ids of their permissions and questions

	// The reader alone uses these.

	items   map[string]*item // the last ones by Codex's ids, which can repeat
	order   []*item
	natives map[string]bool // the ids of items
	asks    int             // number of permissions and questions
}
