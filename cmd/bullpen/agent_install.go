package main

import (
	"context"
	"fmt"
	"strings"
	"time"

	"github.com/bullpen-run/bullpen/worker/agents"
)

// installTimeout is the time limit of a download.
const installTimeout = 30 * time.Minute

// agentDirectory is the operator's directory with the programs of agents.
type agentDirectory struct {
	Dir string `required:"" env:"BULLPEN_AGENTS" placeholder:"DIR" help:"Directory with the programs of agents, which workers get with --agents."`
}

type agentInstallCommand struct {
	agentDirectory `embed:""`
	Agent          string `arg:"" enum:"${agents}" help:"The agent: ${agents}."`
	Version        string `placeholder:"VERSION" help:"Version of the agent. Default: the one with which bullpen was tested."`
	Integrity      string `placeholder:"HASH" help:"SHA-512 of the package, as package-lock.json has it: sha512-BASE64. Default: for the default version the one that is built in, for others the one that the registry states."`
	Registry       string `placeholder:"URL" help:"Registry of npm packages. Default: npm_config_registry of the environment, or npm's own."`
}

func (*agentInstallCommand) Help() string {
	var text strings.Builder
	for _, name := range agents.Names() {
		_, _ = fmt.Fprintf(&text, "  - %s %s\n", name, agents.DefaultVersion(name))
	}
	return `Downloads the npm package with the agent's program, compares it with its hash, and unpacks it into
DIR/AGENT/VERSION. Runs nothing of it, and needs neither npm nor root. Start the workers with --agents DIR: they mount
the program read-only into the sandboxes of its sessions. A worker reads the directory when it starts.

Does nothing if the version is there already.

Default versions:

` + text.String() + `
claude and amp are not free software. Node.js, which runs both, comes from the image of the sandbox or from the worker's
machine.

Examples:

  bullpen agent install claude --dir /var/lib/bullpen/agents
  bullpen agent install codex --version 0.117.0 --dir /var/lib/bullpen/agents`
}

func (c *agentInstallCommand) Run(ctx context.Context, s streams) error {
	ctx, cancel := context.WithTimeout(ctx, installTimeout)
	defer cancel()
	if note := agents.License(c.Agent); note != "" {
		_, _ = fmt.Fprintln(s.err, note)
	}
	x, err := agents.Install(ctx, c.Dir, agents.Request{
		Agent: c.Agent, Version: c.Version, Integrity: c.Integrity, Registry: c.Registry,
	})
	if err != nil {
		return err
	}
	switch {
	case x.Existed:
		_, _ = fmt.Fprintf(s.err, "%s %s was there already.\n", x.Agent, x.Version)
	case x.Unpinned:
		_, _ = fmt.Fprintf(s.err, "The hash of %s %s is the registry's own. To pin it: --integrity %s\n", x.Agent, x.Version,
			x.Integrity)
	}
	_, err = fmt.Fprintln(s.out, x.Dir)
	return err
}

type agentInstalledCommand struct {
	agentDirectory `embed:""`
	JSON           bool `name:"json" help:"Print JSON."`
}

func (*agentInstalledCommand) Help() string {
	return `Looks at the directory as a worker on this machine would. The newest version of an agent is the default of its
sessions.

Exits with 1 if an entry cannot be used.`
}

// installedAgent is an entry of the operator's directory.
type installedAgent struct {
	Agent   string `json:"agent"`
	Version string `json:"version"`
	Dir     string `json:"dir"`
	Default bool   `json:"default"`
	Problem string `json:"problem,omitempty"` // why workers cannot use it
}

func (c *agentInstalledCommand) Run(s streams) error {
	found, err := agents.List(c.Dir)
	if err != nil {
		return err
	}
	list, unusable, seen := []installedAgent{}, 0, map[string]bool{}
	for _, i := range found {
		one := installedAgent{Agent: i.Agent, Version: i.Version, Dir: i.Dir}
		if i.Err != nil {
			one.Problem = i.Err.Error()
			unusable++
		} else {
			one.Default = !seen[i.Agent]
			seen[i.Agent] = true
		}
		list = append(list, one)
	}
	err = show(s, c.JSON, list, func(p *page, list []installedAgent) {
		p.row("AGENT", "VERSION", "STATE")
		for _, one := range list {
			state := one.Problem
			if state == "" && one.Default {
				state = "default"
			}
			p.row(one.Agent, one.Version, state)
		}
	})
	if err == nil && unusable > 0 {
		err = fmt.Errorf("%d of %d entries cannot be used", unusable, len(list))
	}
	return err
}
