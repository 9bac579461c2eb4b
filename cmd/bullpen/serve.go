package main

import (
	"context"

	"github.com/bullpen-run/bullpen/cmd/internal/app"
)

type serveCommand struct {
	app.Config `embed:""`
}

func (*serveCommand) Help() string {
	return `By default one process has all roles and needs no other service. The worker role needs root and nsjail:
bullpen doctor checks the machine. Sandboxes without an image use the runtimes of this machine, which is meant for
trying bullpen out.

Every flag is also an environment variable and a key of the --config file. Flags override variables, variables
override the file.

BULLPEN_BOOTSTRAP_KEY, or bootstrap-key in the file, sets the first API key, sk-REGION-TOKEN, a global
administrator's. Without it, the first start generates a key and writes it to bootstrap.key in the data directory.

SIGTERM or Ctrl-C drains the server: it accepts no new work and lets running programs finish, for at most --drain. A
second signal stops it at once. The exit code is 0 after an orderly stop.

In a login session of systemd, the server moves to a scope of its own, as systemd-run --scope -p Delegate=yes would.

Examples:

  bullpen serve --data /var/lib/bullpen
  bullpen serve --roles gateway --listen 0.0.0.0:8080 --nats nats://nats.internal:4222 --store s3://bucket/prefix
  bullpen serve --roles worker --nats nats://nats.internal:4222 --store s3://bucket/prefix`
}

func (c *serveCommand) Run(ctx context.Context) error { return app.Run(ctx, &c.Config) }

type versionCommand struct {
	JSON bool `name:"json" help:"Print JSON."`
}

func (*versionCommand) Help() string {
	return `Example:

  bullpen version --json`
}

func (c *versionCommand) Run(s streams) error {
	return show(s, c.JSON, app.BuildInfo(), func(p *page, b app.Build) {
		p.textf("bullpen %s\n", b.Version)
		p.row("commit", b.Commit)
		p.row("date", b.Date)
		p.row("go", b.Go)
		p.row("platform", b.Platform)
	})
}
