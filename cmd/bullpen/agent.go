package main

import (
	"context"
	"fmt"
	"net"
	"net/http"
	"os"
	"time"

	"github.com/bullpen-run/bullpen/agent/script"
)

type agentCommands struct {
	Chat      agentChatCommand      `cmd:"" help:"Chat with a coding agent in the terminal."`
	Session   agentSessionCommands  `cmd:"" help:"Create sessions of coding agents and talk to them."`
	Install   agentInstallCommand   `cmd:"" help:"Install the program of a coding agent in a directory for workers."`
	Installed agentInstalledCommand `cmd:"" help:"List the programs of coding agents in a directory for workers."`
	Upstream  agentUpstreamCommand  `cmd:"" help:"Run a server that replies as a model would, from a script."`
}

type agentUpstreamCommand struct {
	Script string `required:"" placeholder:"FILE" help:"YAML file with the replies, see docs/guides/agents.md."`
	Listen string `default:"127.0.0.1:8090" placeholder:"HOST:PORT" help:"HTTP address. Port 0 takes a free port."`
}

// Run serves until ctx is done.
func (c *agentUpstreamCommand) Run(ctx context.Context, s streams) error {
	text, err := os.ReadFile(c.Script)
	if err != nil {
		return fmt.Errorf("read the script: %w", err)
	}
	rules, err := script.Parse(text)
	if err != nil {
		return fmt.Errorf("%s: %w", c.Script, err)
	}
	listener, err := net.Listen("tcp", c.Listen)
	if err != nil {
		return fmt.Errorf("listen: %w: choose another --listen", err)
	}
	_, _ = fmt.Fprintf(s.out, "http://%s\n", listener.Addr())
	server := &http.Server{
		Handler: &script.Server{Script: rules}, ReadHeaderTimeout: 10 * time.Second,
		BaseContext: func(net.Listener) context.Context { return ctx },
	}
	defer context.AfterFunc(ctx, func() { _ = server.Close() })()
	if err := server.Serve(listener); ctx.Err() == nil {
		return err
	}
	return nil
}
