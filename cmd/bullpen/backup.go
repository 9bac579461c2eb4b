package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"time"

	"github.com/bullpen-run/bullpen/cmd/internal/app"
)

type backupCommand struct {
	remote     `embed:""`
	outputFlag `embed:""`
	File       string `arg:"" optional:"" name:"file" help:"Alternative to --output. A backup is readable only by its owner."`
}

func (*backupCommand) Help() string {
	return `The server keeps working. A backup has everything in JetStream that was accepted before it began: executions
with their output, queued jobs, API keys, profiles, image names, webhooks and the heads of threads. Back up the store
with the files of threads and images after this.

The backup is confidential: it has the code, the variables and the output of all executions. The secrets of webhooks
and the secret behind API keys are encrypted in it, unless the server has no --secrets-key. See
docs/guides/secrets.md.

Examples:

  bullpen backup -o bullpen.backup
  bullpen backup | age -r RECIPIENT > bullpen.backup.age`
}

func (c *backupCommand) Run(ctx context.Context, s streams) error {
	api, err := c.client(s)
	if err != nil {
		return err
	}
	var summary app.BackupSummary
	if c.File != "" && c.Output != "-" {
		return usagef("--output and the argument name two files: give one of them")
	}
	out := outputFlag{Output: cmp.Or(c.File, c.Output)}
	err = out.write(s, func(w io.Writer) error {
		body, err := api.Admin().Backup(ctx)
		if err != nil {
			return err
		}
		summary, err = app.CheckBackup(io.TeeReader(body, w))
		if err := errors.Join(err, body.Close()); err != nil {
			return fmt.Errorf("%w\nThe backup is not usable: run the command again", err)
		}
		return nil
	})
	if err != nil || out.Output == "-" {
		return err
	}
	return showBackup(s, c.JSON, "backed up", summary)
}

type restoreCommand struct {
	File       string `arg:"" name:"file" help:"The backup; - for standard input."`
	JSON       bool   `name:"json" help:"Print JSON."`
	app.Config `embed:""`
}

func (*restoreCommand) Help() string {
	return `Takes the settings of the future server: --data for the embedded NATS, --nats and --replicas for another. The
deployment must have no data and no running server. If a restore fails, run it again; until it succeeds no server
starts there.

Queued executions of the backup run when a server starts, unless they waited longer than --queue-expiry. Executions
that were running become worker_lost, or run again if max_attempts allows. Restore a backup in one place only, or its
queued executions run in each. The store with the files of threads and images must have its state of the backup or a
later one.

Examples:

  bullpen restore bullpen.backup --data /var/lib/bullpen
  age -d -i KEY bullpen.backup.age | bullpen restore - --nats nats://nats.internal:4222 --replicas 3`
}

func (c *restoreCommand) Run(ctx context.Context, s streams) error {
	in := s.in
	if c.File != "-" {
		f, err := os.Open(c.File)
		if err != nil {
			return fmt.Errorf("read the backup: %w", err)
		}
		defer f.Close() //nolint:errcheck // only read
		in = f
	}
	summary, err := app.Restore(ctx, &c.Config, in)
	if err != nil {
		return err
	}
	return showBackup(s, c.JSON, "restored", summary)
}

func showBackup(s streams, asJSON bool, done string, b app.BackupSummary) error {
	if asJSON {
		return printJSON(s.out, map[string]any{"made_at": b.MadeAt, "version": b.Version, "messages": b.Messages})
	}
	_, err := fmt.Fprintf(s.out, "%s: %d messages, created %s by bullpen %s\n", done, b.Messages,
		b.MadeAt.Format(time.RFC3339), b.Version)
	return err
}
