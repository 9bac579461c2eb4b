package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"iter"
	"os"
	"strings"
	"time"

	"github.com/bullpen-run/bullpen/client"
)

type agentSessionCommands struct {
	Create  agentSessionCreateCommand  `cmd:"" help:"Create a session of a coding agent."`
	List    agentSessionListCommand    `cmd:"" help:"List the organisation's sessions."`
	Show    agentSessionShowCommand    `cmd:"" help:"Show a session with its pending permissions and questions."`
	Send    agentSessionSendCommand    `cmd:"" help:"Send a message and print the answer as it arrives."`
	Events  agentSessionEventsCommand  `cmd:"" help:"Print the events of a session."`
	Approve agentSessionApproveCommand `cmd:"" help:"Grant or reject a permission."`
	Answer  agentSessionAnswerCommand  `cmd:"" help:"Answer or reject a question."`
	End     agentSessionEndCommand     `cmd:"" help:"End a session and keep its events."`
	Rm      agentSessionRmCommand      `cmd:"" help:"End sessions and remove them with their files."`
}

// agentSessionArg is the argument that names a session.
type agentSessionArg struct {
	ID string `arg:"" name:"session" help:"Id of the session."`
}

// agentSettings are the flags that describe a new session.
type agentSettings struct {
	Mode           string `placeholder:"MODE" help:"Mode of the agent, such as build or plan. Default: build."`
	PermissionMode string `placeholder:"MODE" help:"What the agent may do without asking: default, plan, acceptEdits or bypass. Default: default."`
	Model          string `placeholder:"MODEL" help:"Model of the agent. Default: the agent's default."`
	Variant        string `placeholder:"NAME" help:"Variant of the model."`
	Dir            string `name:"cwd" short:"C" placeholder:"DIRECTORY" help:"Working directory of the agent, absolute or relative to the home. Default: the home."`
	Title          string `placeholder:"TEXT" help:"Title of the session."`
	MCP            string `name:"mcp" placeholder:"FILE" help:"JSON file with servers of the Model Context Protocol, such as .mcp.json."`
}

// request returns the request for a session of an agent.
func (a *agentSettings) request(agent string) (*client.AgentSessionRequest, error) {
	r := &client.AgentSessionRequest{
		Agent: agent, AgentMode: a.Mode, PermissionMode: a.PermissionMode, Model: a.Model, Variant: a.Variant,
		Directory: a.Dir, Title: a.Title,
	}
	if a.MCP == "" {
		return r, nil
	}
	text, err := os.ReadFile(a.MCP)
	if err == nil {
		r.MCP, err = mcpServers(text)
	}
	if err != nil {
		return nil, fmt.Errorf("read the MCP servers: %w", err)
	}
	return r, nil
}

// mcpServers returns the servers of a file in the form of the API. Files of other programs have them in the
// field mcpServers, and often leave out the type.
func mcpServers(text []byte) (json.RawMessage, error) {
	var file struct {
		Servers map[string]map[string]any `json:"mcpServers"`
	}
	if err := json.Unmarshal(text, &file); err != nil {
		return nil, err
	}
	if file.Servers == nil {
		if err := json.Unmarshal(text, &file.Servers); err != nil {
			return nil, err
		}
	}
	for _, server := range file.Servers {
		switch kind := server["type"]; {
		case kind == nil && server["command"] != nil:
			server["type"] = "local"
		case kind == nil && server["url"] != nil:
			server["type"] = "remote"
		case kind == "sse":
			server["type"], server["transport"] = "remote", "sse"
		}
	}
	return json.Marshal(file.Servers)
}

type agentSessionCreateCommand struct {
	remote        `embed:""`
	agentSettings `embed:""`
	ID            string `arg:"" optional:"" name:"session" help:"Id of the session. Default: the server chooses one."`
	Agent         string `short:"a" required:"" placeholder:"NAME" help:"The agent, such as mock or claude."`
}

func (*agentSessionCreateCommand) Help() string {
	return `Prints the id of the session.

Examples:

  bullpen agent session create --agent mock demo
  id=$(bullpen agent session create --agent claude --permission-mode acceptEdits)`
}

func (c *agentSessionCreateCommand) Run(ctx context.Context, s streams) error {
	r, err := c.request(c.Agent)
	if err != nil {
		return err
	}
	err = compose(s, &c.remote, func(cl *client.Client) (*client.CreatedAgentSession, error) {
		return cl.CreateAgentSession(ctx, c.ID, r)
	}, func(p *page, created *client.CreatedAgentSession) { p.textf("%s\n", cell(created.ID)) })
	return uncertain(err, "see bullpen agent session list")
}

type agentSessionListCommand struct {
	remote `embed:""`
}

func (*agentSessionListCommand) Help() string { return `The newest comes first.` }

func (c *agentSessionListCommand) Run(ctx context.Context, s streams) error {
	return list(s, &c.remote, func(cl *client.Client) iter.Seq2[client.AgentSession, error] {
		return cl.AgentSessions(ctx)
	}, func(p *page, list []client.AgentSession) {
		p.row("ID", "AGENT", "STATE", "EVENTS", "UPDATED", "TITLE")
		for i := range list {
			x := &list[i]
			p.row(x.ID, x.Agent, agentSessionState(x), x.Events, time.UnixMilli(x.UpdatedAt), x.Title)
		}
	})
}

// agentSessionState returns the state of a session, for display.
func agentSessionState(x *client.AgentSession) string {
	if x.Ended {
		return "ended"
	}
	return "open"
}

type agentSessionShowCommand struct {
	remote          `embed:""`
	agentSessionArg `embed:""`
}

func (c *agentSessionShowCommand) Run(ctx context.Context, s streams) error {
	return request(s, &c.remote, func(cl *client.Client) (*client.AgentSession, error) {
		return cl.AgentSession(ctx, c.ID)
	}, printAgentSession)
}

func printAgentSession(p *page, x *client.AgentSession) {
	p.row("session", x.ID)
	p.optional("title", x.Title)
	p.row("agent", x.Agent)
	p.row("mode", x.AgentMode)
	p.row("permissions", x.PermissionMode)
	p.optional("model", x.Model)
	p.optional("variant", x.Variant)
	p.optional("directory", x.Directory)
	p.row("state", agentSessionState(x))
	p.row("events", x.Events)
	p.row("created", time.UnixMilli(x.CreatedAt))
	p.row("updated", time.UnixMilli(x.UpdatedAt))
	p.textf("%s", pendingText(x))
}

// pendingText returns the pending permissions and questions of a session, with the commands that answer
// them.
func pendingText(x *client.AgentSession) (text string) {
	for i := range x.Permissions {
		text += permissionText(x.ID, &x.Permissions[i])
	}
	for i := range x.Questions {
		text += questionText(x.ID, &x.Questions[i])
	}
	return text
}

type agentSessionSendCommand struct {
	remote          `embed:""`
	agentSessionArg `embed:""`
	Message         []string `arg:"" help:"The message. - reads it from standard input."`
	Attach          []string `sep:"none" placeholder:"PATH" help:"File in the session's home for the agent to look at. Repeatable."`
	Model           string   `placeholder:"MODEL" help:"Model for this message. Default: the session's."`
	Async           bool     `help:"Do not wait for the answer."`
}

func (*agentSessionSendCommand) Help() string {
	return `Prints the agent's text to standard output as it arrives, and its other actions to standard error. Returns when
the turn ends or the agent asks for a permission or an answer. In that case, it prints the commands that answer.
Reconnects without losing or repeating text. Interrupting the command does not end the turn.

A message sent during a turn waits until that turn has ended.

--json prints the events, one JSON object per line.

Exit codes: 0 the turn ended or waits for an answer, 1 failure of the command or the agent, 2 wrong usage, 130
interrupted.

Examples:

  bullpen agent session send demo 'List the files here.'
  git diff | bullpen agent session send demo -`
}

// maxAgentMessage is the maximum size of a message from standard input, in bytes.
const maxAgentMessage = 1 << 20

// agentMessage returns the message that the arguments are, or standard input if they are "-".
func agentMessage(s streams, words []string) (string, error) {
	text := strings.Join(words, " ")
	if text != "-" {
		return text, nil
	}
	text, err := readText("-", s.in, maxAgentMessage)
	if err != nil {
		return "", fmt.Errorf("read the message: %w", err)
	}
	return text, nil
}

func (c *agentSessionSendCommand) Run(ctx context.Context, s streams) error {
	text, err := agentMessage(s, c.Message)
	if err != nil {
		return err
	}
	m := &client.AgentMessage{Text: text, Model: c.Model}
	for _, path := range c.Attach {
		m.Attachments = append(m.Attachments, client.AgentAttachment{Path: path})
	}
	cl, err := c.client(s)
	if err != nil {
		return err
	}
	if c.Async {
		return uncertain(cl.SendAgentMessage(ctx, c.ID, m), "see bullpen agent session events")
	}
	if !c.JSON {
		x, err := cl.AgentSession(ctx, c.ID)
		if err != nil {
			return err
		}
		if text := pendingText(x); text != "" {
			_, _ = fmt.Fprintf(s.err, "%sThe message waits until you answer.\n", text)
		}
	}
	p := &turnPrinter{streams: s, session: c.ID, json: c.JSON}
	err = each(cl.StreamAgentMessage(ctx, c.ID, m), p.event)
	return errors.Join(err, p.end())
}

type agentSessionEventsCommand struct {
	remote          `embed:""`
	agentSessionArg `embed:""`
	Follow          bool  `short:"f" help:"Continue until the session ends."`
	After           int64 `placeholder:"N" help:"Skip events up to this sequence number, the first column."`
}

func (*agentSessionEventsCommand) Help() string {
	return `--json prints the events as the server sends them, one JSON object per line.

Examples:

  bullpen agent session events demo
  bullpen agent session events demo --follow --after 12 --json`
}

func (c *agentSessionEventsCommand) Run(ctx context.Context, s streams) error {
	cl, err := c.client(s)
	if err != nil {
		return err
	}
	events := cl.AgentSessionEvents(ctx, c.ID, c.After)
	if c.Follow {
		events = cl.FollowAgentSession(ctx, c.ID, c.After)
	}
	return each(events, (&agentEventPrinter{s, c.JSON}).event)
}

type agentSessionApproveCommand struct {
	remote          `embed:""`
	agentSessionArg `embed:""`
	Permission      string `arg:"" help:"Id of the permission."`
	Always          bool   `xor:"reply" help:"Grant it for the rest of the session."`
	Reject          bool   `xor:"reply" help:"Reject it."`
}

func (c *agentSessionApproveCommand) Run(ctx context.Context, s streams) error {
	reply := client.AllowOnce
	switch {
	case c.Always:
		reply = client.AllowAlways
	case c.Reject:
		reply = client.Reject
	}
	return act(s, &c.remote, func(cl *client.Client) error {
		return cl.AnswerAgentPermission(ctx, c.ID, c.Permission, reply)
	})
}

type agentSessionAnswerCommand struct {
	remote          `embed:""`
	agentSessionArg `embed:""`
	Question        string   `arg:"" help:"Id of the question."`
	Answers         []string `arg:"" optional:"" name:"answer" help:"The answer. Several, if the question allows them."`
	Reject          bool     `help:"Reject the question instead."`
}

func (c *agentSessionAnswerCommand) Run(ctx context.Context, s streams) error {
	if c.Reject != (len(c.Answers) == 0) {
		return usagef("give either an answer or --reject")
	}
	return act(s, &c.remote, func(cl *client.Client) error {
		return cl.AnswerAgentQuestion(ctx, c.ID, c.Question, c.Answers...)
	})
}

type agentSessionEndCommand struct {
	remote          `embed:""`
	agentSessionArg `embed:""`
}

func (*agentSessionEndCommand) Help() string {
	return `Interrupts a running turn. The session accepts no more messages. Its events remain readable.`
}

func (c *agentSessionEndCommand) Run(ctx context.Context, s streams) error {
	return act(s, &c.remote, func(cl *client.Client) error { return cl.EndAgentSession(ctx, c.ID) })
}

type agentSessionRmCommand struct {
	remote `embed:""`
	IDs    []string `arg:"" name:"session" help:"Ids of the sessions."`
}

func (c *agentSessionRmCommand) Run(ctx context.Context, s streams) error {
	return compose(s, &c.remote, func(cl *client.Client) (gone []removed, err error) {
		for _, id := range c.IDs {
			if err := cl.DeleteAgentSession(ctx, id); err != nil {
				return nil, err
			}
			gone = append(gone, removed{id})
		}
		return gone, nil
	}, func(p *page, gone []removed) {
		for _, r := range gone {
			printRemoved(p, r)
		}
	})
}

// act calls the server and prints nothing.
func act(s streams, r *remote, call func(*client.Client) error) error {
	cl, err := r.client(s)
	if err != nil {
		return err
	}
	return call(cl)
}
