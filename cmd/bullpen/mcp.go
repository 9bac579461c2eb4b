package main

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"sync"

	"github.com/modelcontextprotocol/go-sdk/jsonrpc"
	"github.com/modelcontextprotocol/go-sdk/mcp"

	"github.com/bullpen-run/bullpen/cmd/internal/app"
	gatewaymcp "github.com/bullpen-run/bullpen/gateway/mcp"
)

type mcpCommand struct {
	URL string `name:"url" env:"BULLPEN_URL" default:"http://127.0.0.1:8080" placeholder:"URL" help:"URL of the server."`
	Key string `name:"key" env:"BULLPEN_API_KEY" placeholder:"KEY" help:"API key. Prefer the environment variable: other users of this machine can read flags."`
}

func (*mcpCommand) Help() string {
	return `Speaks the Model Context Protocol on standard input and output, for clients that start their servers as
programs, and passes every call on to the server's /mcp. It ends with its input. Messages for people go to standard
error. The example is a client's settings.

Example:

  {"mcpServers": {"bullpen": {"command": "bullpen", "args": ["mcp"],
    "env": {"BULLPEN_URL": "https://bullpen.example.com", "BULLPEN_API_KEY": "sk-…"}}}}`
}

func (c *mcpCommand) Run(ctx context.Context, s streams) error {
	api, err := (&remote{URL: c.URL, Key: c.Key}).client(s)
	if err != nil {
		return err
	}
	b := &mcpBridge{progress: map[string]func(*mcp.ProgressNotificationParams){}}
	self := &mcp.Implementation{Name: "bullpen", Version: app.Version()}
	client := mcp.NewClient(self, &mcp.ClientOptions{ProgressNotificationHandler: b.report})
	address, http := api.MCP()
	if b.server, err = client.Connect(ctx, &mcp.StreamableClientTransport{
		Endpoint: address, HTTPClient: http, DisableStandaloneSSE: true,
	}, nil); err != nil {
		return fmt.Errorf("connect to the server: %w", err)
	}
	defer func() { _ = b.server.Close() }() // there is no session to end
	options := &mcp.ServerOptions{Capabilities: &mcp.ServerCapabilities{Tools: &mcp.ToolCapabilities{}}}
	if about := b.server.InitializeResult(); about != nil {
		options.Instructions = about.Instructions
	}
	server := mcp.NewServer(self, options)
	for tool, err := range b.server.Tools(ctx, nil) {
		if err != nil {
			return fmt.Errorf("list the server's tools: %w", err)
		}
		server.AddTool(tool, b.call)
	}
	pipe := &mcpPipe{in: bufio.NewReader(s.in), out: s.out}
	err = server.Run(ctx, &mcp.IOTransport{Reader: io.NopCloser(pipe), Writer: unclosed{pipe}})
	if errors.Is(err, io.EOF) {
		return nil
	}
	return err
}

// mcpPipe is the standard input and output, on which each line is a message. It keeps the text of ids.
type mcpPipe struct {
	in   *bufio.Reader
	left []byte // of a line that was read
	ids  gatewaymcp.IDs

	mu  sync.Mutex
	out io.Writer
}

// Read implements [io.Reader].
func (p *mcpPipe) Read(to []byte) (int, error) {
	for len(p.left) == 0 {
		line, err := p.in.ReadBytes('\n')
		if len(line) == 0 {
			return 0, err
		}
		if p.left, err = p.ids.Hide(line, ""); err != nil {
			if err := p.write(gatewaymcp.InvalidResponse()); err != nil {
				return 0, err
			}
			continue
		}
		p.left = append(bytes.TrimSuffix(p.left, []byte("\n")), '\n')
	}
	n := copy(to, p.left)
	p.left = p.left[n:]
	return n, nil
}

// Write implements [io.Writer]. It is called with one message at a time.
func (p *mcpPipe) Write(message []byte) (int, error) {
	if restored := p.ids.Restore(message); len(restored) > 0 {
		if err := p.write(restored); err != nil {
			return 0, err
		}
	}
	return len(message), nil
}

func (p *mcpPipe) write(line []byte) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	_, err := p.out.Write(line)
	return err
}

// unclosed is a writer that is not closed.
type unclosed struct{ io.Writer }

// Close implements [io.Closer].
func (unclosed) Close() error { return nil }

// mcpBridge passes calls of tools on to a server.
type mcpBridge struct {
	server *mcp.ClientSession

	mu       sync.Mutex
	calls    int
	progress map[string]func(*mcp.ProgressNotificationParams) // by the token of a call that is passed on
}

// call passes a call on. The end of ctx cancels it.
func (b *mcpBridge) call(ctx context.Context, req *mcp.CallToolRequest) (*mcp.CallToolResult, error) {
	params := &mcp.CallToolParams{Name: req.Params.Name}
	if len(req.Params.Arguments) > 0 {
		params.Arguments = req.Params.Arguments
	}
	if theirs := req.Params.GetProgressToken(); theirs != nil {
		token, done := b.follow(func(p *mcp.ProgressNotificationParams) {
			p.ProgressToken = theirs
			_ = req.Session.NotifyProgress(ctx, p) // a broken output ends the session
		})
		defer done()
		params.SetProgressToken(token)
	}
	result, err := b.server.CallTool(ctx, params)
	if wire, ok := errors.AsType[*jsonrpc.Error](err); ok {
		return nil, wire
	}
	if err != nil {
		return nil, explain(err)
	}
	return result, nil
}

// follow passes progress notifications with a new token to f until done is called.
func (b *mcpBridge) follow(f func(*mcp.ProgressNotificationParams)) (token string, done func()) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.calls++
	token = fmt.Sprint(b.calls)
	b.progress[token] = f
	return token, func() {
		b.mu.Lock()
		defer b.mu.Unlock()
		delete(b.progress, token)
	}
}

// report passes a progress notification of the server on.
func (b *mcpBridge) report(_ context.Context, r *mcp.ProgressNotificationClientRequest) {
	token, _ := r.Params.ProgressToken.(string)
	b.mu.Lock()
	f := b.progress[token]
	b.mu.Unlock()
	if f != nil {
		f(r.Params)
	}
}
