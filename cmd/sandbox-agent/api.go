package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"os"
	"strconv"
	"strings"
)

const defaultEndpoint = "http://127.0.0.1:2468"

// apiCommands are the commands that call a server. Each sends one request and prints the response.
type apiCommands struct {
	Agents struct {
		List    agentListCommand    `cmd:"" help:"List agents."`
		Install agentInstallCommand `cmd:"" help:"Check that an agent is installed."`
		Modes   agentModesCommand   `cmd:"" help:"List the modes of an agent."`
		Models  agentModelsCommand  `cmd:"" help:"List the models of an agent."`
	} `cmd:"" help:"List agents, their modes and models."`
	Sessions struct {
		List              sessionListCommand       `cmd:"" help:"List sessions."`
		Create            sessionCreateCommand     `cmd:"" help:"Create a session."`
		SendMessage       sendMessageCommand       `cmd:"" help:"Send a message."`
		SendMessageStream sendMessageStreamCommand `cmd:"" help:"Send a message and print the events of its turn."`
		Terminate         terminateCommand         `cmd:"" help:"End a session."`
		Events            eventsCommand            `cmd:"" aliases:"get-messages" help:"Print the events of a session."`
		EventsSSE         eventsSSECommand         `cmd:"" name:"events-sse" help:"Print the events of a session as they happen."`
		ReplyQuestion     replyQuestionCommand     `cmd:"" help:"Answer a question."`
		RejectQuestion    rejectQuestionCommand    `cmd:"" help:"Reject a question."`
		ReplyPermission   replyPermissionCommand   `cmd:"" help:"Grant or reject a permission."`
	} `cmd:"" help:"Create sessions and talk to their agents."`
}

// endpoint is the server that a command calls.
type endpoint struct {
	URL string `name:"endpoint" short:"e" default:"${endpoint}" placeholder:"URL" help:"The server. Default: ${endpoint}."`
}

// call sends a request and prints the response: JSON indented, events as they arrive.
func (e *endpoint) call(ctx context.Context, a *access, out io.Writer, method, path string, body any) error {
	var content io.Reader
	if body != nil {
		text, err := json.Marshal(body)
		if err != nil {
			return fmt.Errorf("encode the request: %w", err)
		}
		content = bytes.NewReader(text)
	}
	r, err := http.NewRequestWithContext(ctx, method, strings.TrimRight(e.URL, "/")+path, content)
	if err != nil {
		return fmt.Errorf("make the request: %w", err)
	}
	if body != nil {
		r.Header.Set("Content-Type", "application/json")
	}
	if a.Token != "" && !a.NoToken {
		r.Header.Set("Authorization", "Bearer "+a.Token)
	}
	resp, err := http.DefaultClient.Do(r)
	if err != nil {
		return err
	}
	defer resp.Body.Close() //nolint:errcheck // only read
	if strings.HasPrefix(resp.Header.Get("Content-Type"), "text/event-stream") {
		_, err := io.Copy(out, resp.Body)
		return err
	}
	answer, err := io.ReadAll(resp.Body)
	if err != nil {
		return fmt.Errorf("read the response: %w", err)
	}
	if resp.StatusCode/100 != 2 {
		return fmt.Errorf("the server answers with %s: %s", resp.Status, bytes.TrimSpace(answer))
	}
	if len(answer) == 0 {
		return nil
	}
	var indented bytes.Buffer
	if err := json.Indent(&indented, answer, "", "  "); err != nil {
		return fmt.Errorf("decode the response: %w", err)
	}
	_, err = fmt.Fprintln(out, indented.String())
	return err
}

// agentArg is the argument that names an agent.
type agentArg struct {
	Agent string `arg:"" help:"Name of the agent, such as mock."`
}

func (a *agentArg) path(below string) string { return "/v1/agents/" + url.PathEscape(a.Agent) + below }

type agentListCommand struct {
	endpoint `embed:""`
}

func (c *agentListCommand) Run(ctx context.Context, a *access, out io.Writer) error {
	return c.call(ctx, a, out, http.MethodGet, "/v1/agents", nil)
}

type agentInstallCommand struct {
	endpoint  `embed:""`
	agentArg  `embed:""`
	Reinstall bool `short:"r" help:"Install the agent again."`
}

func (c *agentInstallCommand) Run(ctx context.Context, a *access, out io.Writer) error {
	return c.call(ctx, a, out, http.MethodPost, c.path("/install"), map[string]bool{"reinstall": c.Reinstall})
}

type agentModesCommand struct {
	endpoint `embed:""`
	agentArg `embed:""`
}

func (c *agentModesCommand) Run(ctx context.Context, a *access, out io.Writer) error {
	return c.call(ctx, a, out, http.MethodGet, c.path("/modes"), nil)
}

type agentModelsCommand struct {
	endpoint `embed:""`
	agentArg `embed:""`
}

func (c *agentModelsCommand) Run(ctx context.Context, a *access, out io.Writer) error {
	return c.call(ctx, a, out, http.MethodGet, c.path("/models"), nil)
}

// sessionArg is the argument that names a session.
type sessionArg struct {
	Session string `arg:"" name:"session-id" help:"Id of the session."`
}

func (s *sessionArg) path(below string) string {
	return "/v1/sessions/" + url.PathEscape(s.Session) + below
}

type sessionListCommand struct {
	endpoint `embed:""`
}

func (c *sessionListCommand) Run(ctx context.Context, a *access, out io.Writer) error {
	return c.call(ctx, a, out, http.MethodGet, "/v1/sessions", nil)
}

type sessionCreateCommand struct {
	endpoint       `embed:""`
	sessionArg     `embed:""`
	Agent          string   `short:"a" required:"" help:"Name of the agent, such as mock."`
	AgentMode      string   `short:"g" help:"Mode of the agent, such as build or plan."`
	PermissionMode string   `short:"p" help:"What the agent may do without asking, such as default or bypass."`
	Model          string   `short:"m" help:"Model of the agent."`
	Variant        string   `short:"v" help:"Variant of the model."`
	AgentVersion   string   `short:"A" help:"Version of the agent."`
	MCPConfig      string   `name:"mcp-config" placeholder:"FILE" help:"JSON file with MCP servers by their names."`
	Skill          []string `sep:"none" placeholder:"PATH" help:"Directory of a skill in the session's home. Repeatable."`
}

func (c *sessionCreateCommand) Run(ctx context.Context, a *access, out io.Writer) error {
	body := map[string]any{"agent": c.Agent}
	for name, value := range map[string]string{
		"agentMode": c.AgentMode, "permissionMode": c.PermissionMode, "model": c.Model, "variant": c.Variant,
		"agentVersion": c.AgentVersion,
	} {
		if value != "" {
			body[name] = value
		}
	}
	if c.MCPConfig != "" {
		text, err := os.ReadFile(c.MCPConfig)
		if err != nil {
			return err
		}
		if !json.Valid(text) {
			return fmt.Errorf("%s is not JSON", c.MCPConfig)
		}
		body["mcp"] = json.RawMessage(text)
	}
	if len(c.Skill) > 0 {
		sources := []map[string]string{}
		for _, path := range c.Skill {
			sources = append(sources, map[string]string{"type": "local", "source": path})
		}
		body["skills"] = map[string]any{"sources": sources}
	}
	return c.call(ctx, a, out, http.MethodPost, c.path(""), body)
}

// message is the message of a command.
type message struct {
	Message string `short:"m" required:"" help:"The message."`
}

func (m *message) body() any { return map[string]string{"message": m.Message} }

type sendMessageCommand struct {
	endpoint   `embed:""`
	sessionArg `embed:""`
	message    `embed:""`
}

func (c *sendMessageCommand) Run(ctx context.Context, a *access, out io.Writer) error {
	return c.call(ctx, a, out, http.MethodPost, c.path("/messages"), c.body())
}

// raw is the flag for the agent's own output.
type raw struct {
	IncludeRaw bool `help:"Include the agent's own output."`
}

// query returns the query of a request. It omits numbers that are nil.
func (r *raw) query(numbers map[string]*uint64) string {
	query := url.Values{}
	for name, n := range numbers {
		if n != nil {
			query.Set(name, strconv.FormatUint(*n, 10))
		}
	}
	if r.IncludeRaw {
		query.Set("include_raw", "true")
	}
	return "?" + query.Encode()
}

type sendMessageStreamCommand struct {
	endpoint   `embed:""`
	sessionArg `embed:""`
	message    `embed:""`
	raw        `embed:""`
}

func (c *sendMessageStreamCommand) Run(ctx context.Context, a *access, out io.Writer) error {
	return c.call(ctx, a, out, http.MethodPost, c.path("/messages/stream")+c.query(nil), c.body())
}

type terminateCommand struct {
	endpoint   `embed:""`
	sessionArg `embed:""`
}

func (c *terminateCommand) Run(ctx context.Context, a *access, out io.Writer) error {
	return c.call(ctx, a, out, http.MethodPost, c.path("/terminate"), nil)
}

type eventsCommand struct {
	endpoint   `embed:""`
	sessionArg `embed:""`
	raw        `embed:""`
	Offset     *uint64 `short:"o" placeholder:"N" help:"Only events after this sequence number."`
	Limit      *uint64 `short:"l" placeholder:"N" help:"Maximum number of events."`
}

func (c *eventsCommand) Run(ctx context.Context, a *access, out io.Writer) error {
	query := c.query(map[string]*uint64{"offset": c.Offset, "limit": c.Limit})
	return c.call(ctx, a, out, http.MethodGet, c.path("/events")+query, nil)
}

type eventsSSECommand struct {
	endpoint   `embed:""`
	sessionArg `embed:""`
	raw        `embed:""`
	Offset     *uint64 `short:"o" placeholder:"N" help:"Only events after this sequence number."`
}

func (c *eventsSSECommand) Run(ctx context.Context, a *access, out io.Writer) error {
	query := c.query(map[string]*uint64{"offset": c.Offset})
	return c.call(ctx, a, out, http.MethodGet, c.path("/events/sse")+query, nil)
}

// requestArg is the argument that names a question or a permission.
type requestArg struct {
	ID string `arg:"" help:"Id of the question or permission, as in the event."`
}

func (r *requestArg) path(s *sessionArg, kind, below string) string {
	return s.path("/" + kind + "/" + url.PathEscape(r.ID) + below)
}

type replyQuestionCommand struct {
	endpoint   `embed:""`
	sessionArg `embed:""`
	requestArg `embed:""`
	Answers    string `short:"a" required:"" placeholder:"JSON" help:"A list of answers for each question, such as [[\"Yes\"]]."`
}

func (c *replyQuestionCommand) Run(ctx context.Context, a *access, out io.Writer) error {
	var answers [][]string
	if err := json.Unmarshal([]byte(c.Answers), &answers); err != nil {
		return errors.New(`--answers is not a list of lists of texts, such as [["Yes"]]`)
	}
	path := c.requestArg.path(&c.sessionArg, "questions", "/reply")
	return c.call(ctx, a, out, http.MethodPost, path, map[string]any{"answers": answers})
}

type rejectQuestionCommand struct {
	endpoint   `embed:""`
	sessionArg `embed:""`
	requestArg `embed:""`
}

func (c *rejectQuestionCommand) Run(ctx context.Context, a *access, out io.Writer) error {
	return c.call(ctx, a, out, http.MethodPost, c.requestArg.path(&c.sessionArg, "questions", "/reject"), nil)
}

type replyPermissionCommand struct {
	endpoint   `embed:""`
	sessionArg `embed:""`
	requestArg `embed:""`
	Reply      string `short:"r" required:"" enum:"once,always,reject" help:"once, always or reject."`
}

func (c *replyPermissionCommand) Run(ctx context.Context, a *access, out io.Writer) error {
	path := c.requestArg.path(&c.sessionArg, "permissions", "/reply")
	return c.call(ctx, a, out, http.MethodPost, path, map[string]string{"reply": c.Reply})
}
