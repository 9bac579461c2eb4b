package acp

import (
	"context"
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"

	"github.com/bullpen-run/bullpen/agent/sessions"
	"github.com/bullpen-run/bullpen/proto"
)

// The methods of clients.
const (
	methodInitialize   = "initialize"
	methodAuthenticate = "authenticate"
	methodNew          = "session/new"
	methodLoad         = "session/load"
	methodResume       = "session/resume"
	methodList         = "session/list"
	methodPrompt       = "session/prompt"
	methodCancel       = "session/cancel"
	methodClose        = "session/close"
	methodSetMode      = "session/set_mode"
	methodSetModel     = "session/set_model"
	methodSetOption    = "session/set_config_option"
)

// protocolVersion is the version of the agent client protocol.
const protocolVersion = 1

// mockAgent is the id of the agent for tests of clients.
const mockAgent = "mock"

// params are the parameters of all methods.
type params struct {
	SessionID  string          `json:"sessionId"`
	CWD        string          `json:"cwd"`
	MCPServers []mcpServer     `json:"mcpServers"`
	Prompt     []block         `json:"prompt"`
	ModeID     string          `json:"modeId"`
	ModelID    string          `json:"modelId"`
	ConfigID   string          `json:"configId"`
	Value      json.RawMessage `json:"value"`
}

// decodeParams decodes the parameters of a request.
func (c *call) decodeParams() (p params, err error) {
	if len(c.Params) == 0 {
		return p, nil
	}
	if err := json.Unmarshal(c.Params, &p); err != nil {
		return p, invalidf("invalid request: the parameters of %s are malformed: %v", proto.Shorten(c.Method), err)
	}
	return p, nil
}

// call executes a request other than a prompt. created is the id of a session that it created;
// empty for none.
func (s *Server) call(ctx context.Context, c *call) (result any, created string, err error) {
	agent, err := s.Sessions.FindAgent(c.log.state.Agent)
	if err != nil {
		return nil, "", err
	}
	if c.Method == methodInitialize {
		return s.initialize(agent.Info()), "", nil
	}
	p, err := c.decodeParams()
	if err != nil {
		return nil, "", err
	}
	switch c.Method {
	case methodAuthenticate:
		return struct{}{}, "", nil
	case methodNew:
		return s.newSession(ctx, c, &p, agent.Info())
	case methodLoad, methodResume:
		result, err = s.loadSession(ctx, c, &p, agent.Info())
	case methodList:
		result = s.listSessions(c)
	case methodCancel, methodClose:
		result, err = s.cancel(ctx, c)
	case methodSetMode:
		result, err = s.configure(ctx, c, &p, optionMode, p.ModeID)
		if err == nil {
			result = struct{}{}
		}
	case methodSetModel:
		result, err = s.configure(ctx, c, &p, optionModel, p.ModelID)
		if err == nil {
			result = struct{}{}
		}
	case methodSetOption:
		value := ""
		if err := json.Unmarshal(p.Value, &value); err != nil {
			return nil, "", invalidf("invalid request: value must be a text")
		}
		result, err = s.configure(ctx, c, &p, p.ConfigID, value)
	default:
		err = &rpcError{
			Code: codeNoMethod, Message: "the agent " + agent.Info().ID + " has no method " + proto.Shorten(c.Method),
		}
	}
	return result, "", err
}

func (s *Server) initialize(info *sessions.Info) any {
	return map[string]any{
		"protocolVersion": protocolVersion,
		"agentCapabilities": map[string]any{
			"loadSession":         true,
			"promptCapabilities":  map[string]bool{"image": false, "audio": false, "embeddedContext": true},
			"mcpCapabilities":     map[string]bool{"http": true, "sse": true},
			"sessionCapabilities": map[string]any{"list": struct{}{}, "resume": struct{}{}, "close": struct{}{}},
		},
		"agentInfo":   map[string]string{"name": "bullpen-" + info.ID, "title": info.ID, "version": s.Version},
		"authMethods": []any{},
	}
}

// mcpServer is an MCP server, as clients describe it.
type mcpServer struct {
	Type    string `json:"type"`
	Name    string `json:"name"`
	Command string `json:"command"`
	Args    []string
	Env     []pair `json:"env"`
	URL     string `json:"url"`
	Headers []pair `json:"headers"`
}

type pair struct {
	Name  string `json:"name"`
	Value string `json:"value"`
}

func pairs(list []pair) map[string]string {
	m := make(map[string]string, len(list))
	for _, p := range list {
		m[p.Name] = p.Value
	}
	return m
}

// config returns the description that sessions store.
func (m *mcpServer) config() any {
	if m.Command != "" {
		return map[string]any{"type": "local", "command": m.Command, "args": m.Args, "env": pairs(m.Env)}
	}
	transport := m.Type
	if transport == "" {
		transport = "http"
	}
	return map[string]any{"type": "remote", "url": m.URL, "headers": pairs(m.Headers), "transport": transport}
}

// setTools sets the MCP servers and the skills of a session: those in its request, and those
// configured for its directory.
func (s *Server) setTools(x *proto.AgentSession, servers []mcpServer) (err error) {
	mcp, skills := map[string]any{}, []json.RawMessage{}
	for _, c := range s.Configs.Configs(x.Org) {
		switch {
		case c.Directory != x.Directory:
		case c.Kind == proto.AgentConfigMCP:
			mcp[c.Name] = c.Value
		default:
			var value struct {
				Sources []json.RawMessage `json:"sources"`
			}
			if err := json.Unmarshal(c.Value, &value); err != nil {
				return fmt.Errorf("decode the skills %q: %w", c.Name, err)
			}
			skills = append(skills, value.Sources...)
		}
	}
	for _, m := range servers {
		if m.Name == "" || m.Command == "" && m.URL == "" {
			return invalidf("invalid request: each of mcpServers must have a name, and a command or a url")
		}
		mcp[m.Name] = m.config()
	}
	if len(mcp) > 0 {
		if x.MCP, err = encode(mcp); err != nil {
			return err
		}
	}
	if len(skills) > 0 {
		x.Skills, err = encode(map[string]any{"sources": skills})
	}
	return err
}

// newSession creates a session.
func (s *Server) newSession(ctx context.Context, c *call, p *params, info *sessions.Info) (any, string, error) {
	x := &proto.AgentSession{
		Org: c.org, Key: c.key, ID: "acp_" + strings.ToLower(rand.Text()), Agent: info.ID, Directory: p.CWD,
	}
	if err := s.setTools(x, p.MCPServers); err != nil {
		return nil, "", err
	}
	profile, err := c.host.Profile(ctx)
	if err != nil {
		return nil, "", err
	}
	x.Prepare = profile.PrepareAgents
	if err := s.Sessions.Create(ctx, x); err != nil {
		return nil, "", err
	}
	result := settings(info, x)
	result["sessionId"] = x.ID
	return result, x.ID, nil
}

// settings returns the fields of a result that describe the settings of a session.
func settings(info *sessions.Info, x *proto.AgentSession) map[string]any {
	return map[string]any{
		"configOptions": ConfigOptions(info, x),
		"modes":         map[string]any{"currentModeId": x.AgentMode, "availableModes": info.Modes},
	}
}

// find returns a session. It returns an error if the session's agent is not the server's.
func (s *Server) find(ctx context.Context, c *call, id string) (*sessions.Session, error) {
	x, err := s.Sessions.Get(ctx, c.org, id)
	if err == nil && x.Agent != c.log.state.Agent {
		err = &rpcError{Code: codeNotFound, Message: "session not found: " + proto.Shorten(id)}
	}
	return x, err
}

// preparedPrompt is a prompt before it is sent. key is its idempotency key, and after the number of
// the last entry of its session.
type preparedPrompt struct {
	prompt
	key   string
	after uint64
}

// preparePrompt returns a prompt with its message.
func (s *Server) preparePrompt(ctx context.Context, c *call) (*preparedPrompt, sessions.Message, error) {
	var m sessions.Message
	p, err := c.decodeParams()
	if err != nil {
		return nil, m, err
	}
	if err := s.checkRoom(ctx, c); err != nil {
		return nil, m, err
	}
	x, err := s.find(ctx, c, p.SessionID)
	if err != nil {
		return nil, m, err
	}
	if m.Text, err = promptText(p.Prompt); err != nil {
		return nil, m, err
	}
	if c.log.state.Agent == mockAgent {
		m.Text = mockText(m.Text)
	}
	key := fmt.Sprintf("acp\x00%s\x00%d\x00%s", c.server, c.log.state.Connection, c.ID)
	keyed := m
	if err := keyed.SetKey(key); err != nil {
		return nil, m, err
	}
	return &preparedPrompt{prompt{ID: c.ID, Session: p.SessionID, Key: keyed.Key}, key, x.At}, m, nil
}

// promptText returns the text of a prompt.
func promptText(blocks []block) (string, error) {
	var parts []string
	for _, b := range blocks {
		switch b.Type {
		case "text":
			parts = append(parts, b.Text)
		case "resource_link":
			parts = append(parts, "["+b.Name+"]("+b.URI+")")
		case "resource":
			if b.Resource == nil || b.Resource.Text == "" {
				return "", invalidf("invalid request: prompt: only resources with a text are supported")
			}
			parts = append(parts, "<resource uri="+strconv.Quote(b.Resource.URI)+">\n"+b.Resource.Text+"\n</resource>")
		default:
			return "", invalidf("invalid request: prompt: blocks of the type %q are not supported", proto.Shorten(b.Type))
		}
	}
	if len(parts) == 0 {
		return "", invalidf("invalid request: prompt: must not be empty")
	}
	return strings.Join(parts, "\n"), nil
}

// mockPrompts are the prompts that the mock agent receives unchanged, in lower case.
var mockPrompts = []string{
	"list files in the current directory using available tools.",
	"use the bash tool to run `ls` in the current directory. do not answer without using the tool.",
	"use the askuserquestion tool to ask exactly one yes/no question, then wait for a reply. do not answer yourself.",
	"call the askuserquestion tool with exactly one yes/no question and wait for a reply. do not answer yourself.",
}

// mockCommand is the prefix of a prompt that selects a script of the mock agent, such as "/mock
// tool".
const mockCommand = "/mock "

// mockText returns the message for the mock agent. Clients of this protocol expect an echo.
func mockText(text string) string {
	if command, ok := strings.CutPrefix(text, mockCommand); ok {
		return command
	}
	if slices.Contains(mockPrompts, strings.ToLower(strings.TrimSpace(text))) {
		return text
	}
	return "echo mock: " + text
}

// cancel interrupts all turns of a session.
func (s *Server) cancel(ctx context.Context, c *call) (any, error) {
	p, err := c.decodeParams()
	if err != nil {
		return nil, err
	}
	if _, err := s.find(ctx, c, p.SessionID); err != nil {
		return nil, err
	}
	return struct{}{}, s.Sessions.InterruptAll(ctx, c.org, p.SessionID)
}

// configure changes a setting of a session.
func (s *Server) configure(ctx context.Context, c *call, p *params, option, value string) (any, error) {
	agent, err := s.Sessions.FindAgent(c.log.state.Agent)
	if err != nil {
		return nil, err
	}
	if _, err := s.find(ctx, c, p.SessionID); err != nil {
		return nil, err
	}
	if err := checkOption(agent.Info(), option, value); err != nil {
		return nil, err
	}
	x, err := s.Sessions.Configure(ctx, c.org, p.SessionID, func(x *proto.AgentSession) { setOption(x, option, value) })
	if err != nil {
		return nil, err
	}
	return map[string]any{"configOptions": ConfigOptions(agent.Info(), x)}, nil
}

// maxReplay bounds the events that become one entry of a replay, in bytes.
const maxReplay = 256 << 10

// loadSession adds a session to the server. With session/load, the client also receives the
// session's earlier messages. With session/resume, it does not.
func (s *Server) loadSession(ctx context.Context, c *call, p *params, info *sessions.Info) (any, error) {
	x, err := s.find(ctx, c, p.SessionID)
	if err != nil {
		return nil, err
	}
	from := x.Sequence
	if c.Method == methodLoad {
		from = 0
	}
	r, err := s.Sessions.Read(ctx, c.org, p.SessionID, from)
	if err != nil {
		return nil, err
	}
	defer r.Close()
	replayed, last := &session{}, x.State
	for more := true; more; {
		if err := s.checkRoom(ctx, c); err != nil {
			return nil, err
		}
		var batch []*sessions.Entry
		limited, release := c.host.LimitReads(ctx)
		for size := 0; size < maxReplay; {
			e, err := r.Next(limited, false)
			if err != nil {
				release()
				return nil, err
			}
			if more = e != nil; !more {
				break
			}
			for i := range e.Events {
				size += len(e.Events[i].Data)
			}
			batch, last = append(batch, e), e.State
		}
		var next *session
		err := c.log.append(ctx, func(e *entry) (bool, error) {
			copied := *replayed
			copied.Thoughts, copied.Calls = maps.Clone(replayed.Thoughts), slices.Clone(replayed.Calls)
			t := &translator{state: &e.State, id: p.SessionID, session: &copied, replay: true}
			for _, x := range batch {
				if err := t.entry(x); err != nil {
					return false, err
				}
			}
			if copied.After = r.After(); !more {
				if err := t.resume(&last); err != nil {
					return false, err
				}
			}
			next = &copied
			e.Messages = t.out
			return len(t.out) > 0 || !more, nil
		})
		if release(); err != nil {
			return nil, err
		}
		replayed = next
	}
	return settings(info, &x.AgentSession), nil
}

// resume makes the server translate the further events of a session that has a turn in progress or
// in its queue. It sends requests for the pending permissions and questions.
func (t *translator) resume(x *sessions.State) error {
	if t.state.Sessions[t.id] != nil || !x.Running && x.Queued() == 0 {
		return nil
	}
	t.Loaded, t.state.Sessions[t.id] = x.Messages, t.session
	for _, p := range x.Pending {
		var err error
		if p.Permission != nil {
			err = t.permission(p.Permission)
		} else {
			err = t.question(p.Question)
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// sessionInfo describes a session.
type sessionInfo struct {
	ID        string `json:"sessionId"`
	CWD       string `json:"cwd"`
	Title     string `json:"title,omitempty"`
	UpdatedAt string `json:"updatedAt"`
}

// listSessions returns the sessions of the server's agent.
func (s *Server) listSessions(c *call) any {
	list := []sessionInfo{}
	for _, x := range s.Sessions.Records.List(c.org) {
		if x.Agent == c.log.state.Agent {
			list = append(list, sessionInfo{x.ID, x.Directory, x.Title, x.UpdatedAt.Format(proto.TimeLayout)})
		}
	}
	return map[string]any{"sessions": list}
}

// answers returns the answers that an option represents; nil if it represents none.
func (r *request) answers(option string) [][]string {
	text, ok := strings.CutPrefix(option, answerPrefix)
	if !ok {
		return nil
	}
	i, err := strconv.Atoi(text)
	if err != nil || i < 0 || i >= len(r.Options) {
		return nil
	}
	return [][]string{{r.Options[i]}}
}

// removeSessions removes the sessions that were created for a server, with their files.
func (s *Server) removeSessions(ctx context.Context, host Host, id string) error {
	org, _ := host.Caller()
	for after := uint64(0); ; {
		limited, release := host.LimitReads(ctx)
		message, at, err := s.Logs.Next(limited, org, id, after)
		release()
		if errors.Is(err, proto.ErrNotFound) || err == nil && message == nil {
			return nil
		}
		if err != nil {
			return err
		}
		e, err := decodeEntry(message)
		if err != nil {
			return err
		}
		after = at
		if e.Created == "" {
			continue
		}
		if err := s.removeSession(ctx, host, e.Created); err != nil {
			return err
		}
	}
}

// removeSession removes the files of a session first, because they cannot be removed without a
// session.
func (s *Server) removeSession(ctx context.Context, host Host, id string) error {
	org, _ := host.Caller()
	err := s.Sessions.Terminate(ctx, org, id)
	if err == nil {
		x := proto.AgentSession{ID: id}
		err = host.RemoveHome(ctx, x.ThreadID())
	}
	if err == nil {
		err = s.Sessions.Remove(ctx, org, id)
	}
	if e, ok := errors.AsType[*sessions.Error](err); ok && e.Kind == sessions.SessionNotFound {
		return nil
	}
	return err
}
