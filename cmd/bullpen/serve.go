package main

import (
	"context"
	"fmt"

	"github.com/bullpen-run/bullpen/cmd/internal/app"
)

type serveCommand struct {
	app.Config `embed:""`
}

// Help tells what --help does not know by itself.
func (*serveCommand) Help() string {
	return `Needs root and nsjail; bullpen doctor says whether all is there. Sandboxes without an image have the runtimes of this machine, which is
meant for trying out. Started in a login session of systemd, it moves to a scope of its own, as by systemd-run --scope -p Delegate=yes.

Every flag is also an environment variable, shown with it, and a key of the --config file. The flag wins over the variable, the
variable over the file.

BULLPEN_BOOTSTRAP_KEY, or bootstrap-key in the file, sets the first API key: sk-REGION-TOKEN, all rights. Without it one is
made at the first start and written to bootstrap.key in the data directory.

SIGTERM and Ctrl-C drain: nothing new is accepted, running programs may end (--drain). A second one ends at once. Exit code 0: it
stopped because it was told to, and all went well.

Examples:

  bullpen serve --data /var/lib/bullpen
  bullpen serve --roles gateway --listen 0.0.0.0:8080 --nats nats://nats.internal:4222 --store s3://bucket/prefix
  bullpen serve --roles worker --nats nats://nats.internal:4222 --store s3://bucket/prefix`
}

// Run carries the command out.
func (c *serveCommand) Run(ctx context.Context) error { return app.Run(ctx, &c.Config) }

type versionCommand struct {
	JSON bool `name:"json" help:"Print JSON for programs."`
}

// Run carries the command out.
func (c *versionCommand) Run(io streams) error {
	if c.JSON {
		return printJSON(io.out, map[string]string{"version": app.Version()})
	}
	_, err := fmt.Fprintln(io.out, "bullpen", app.Version())
	return err
}
