package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"time"

	"github.com/bullpen-run/bullpen/cmd/internal/app"
)

type backupCommand struct {
	remote `embed:""`
	File   string `arg:"" name:"file" help:"Where to write it; - for standard output. A file comes to be when it is whole, for its owner alone."`
}

// Help tells what --help does not know by itself.
func (*backupCommand) Help() string {
	return `Everything goes on meanwhile. The backup has what is in JetStream: executions with their output, queued ones too, API keys, sandbox profiles,
images, webhooks, the heads of threads. It does not have the files of threads, which are in the store: back that up after this. What was
accepted before the backup began is in it; of what came meanwhile, some may be.

It has secrets: those of webhooks, and the hashes of API keys with what is needed to sign URLs of files.

Needs a key with all rights. docs/operations.md tells more.

Examples:

  bullpen backup bullpen.backup
  bullpen backup - | age -r RECIPIENT > bullpen.backup.age`
}

// Run carries the command out.
func (c *backupCommand) Run(ctx context.Context, to streams) error {
	api, err := c.client()
	if err != nil {
		return err
	}
	var made app.BackupSummary
	out := outputFlag{Output: c.File}
	err = out.write(to, func(w io.Writer) error {
		answer, err := api.Backup(ctx)
		if err != nil {
			return err
		}
		made, err = app.CheckBackup(io.TeeReader(answer, w))
		if err := errors.Join(err, answer.Close()); err != nil {
			return fmt.Errorf("%w\nNothing of it is of use: run the command again", err)
		}
		return nil
	})
	if err != nil {
		return err
	}
	return tell(to, c.JSON, c.File != "-", "backed up", made)
}

type restoreCommand struct {
	File       string `arg:"" name:"file" help:"The backup; - for standard input."`
	JSON       bool   `name:"json" help:"Print JSON for programs."`
	app.Config `embed:""`
}

// Help tells what --help does not know by itself.
func (*restoreCommand) Help() string {
	return `Takes the settings of the bullpen serve that is to run there: --data for the NATS inside, --nats and --replicas for another. Nothing of
bullpen may be there yet, and nothing may run. A restore that did not come to its end is run again; until then no server starts there.

Executions that were queued when the backup was made run when a server starts, unless they have waited longer than --queue-expiry by then;
those that ran then are worker_lost, or run again if max_attempts allows. So restore a backup once, or what was queued runs in each place.
The store of threads' files has to be there as it was, or as it became since.

Examples:

  bullpen restore bullpen.backup --data /var/lib/bullpen
  age -d -i KEY bullpen.backup.age | bullpen restore - --nats nats://nats.internal:4222 --replicas 3`
}

// Run carries the command out.
func (c *restoreCommand) Run(ctx context.Context, io streams) error {
	in := io.in
	if c.File != "-" {
		f, err := os.Open(c.File)
		if err != nil {
			return fmt.Errorf("read the backup: %w", err)
		}
		defer func() { _ = f.Close() }() // it was only read
		in = f
	}
	restored, err := app.Restore(ctx, &c.Config, in)
	if err != nil {
		return err
	}
	return tell(io, c.JSON, true, "restored", restored)
}

// tell says what became of a backup, unless its own place is where that would go.
func tell(to streams, asJSON, free bool, done string, s app.BackupSummary) error {
	switch {
	case !free:
		return nil
	case asJSON:
		return printJSON(to.out, map[string]any{"made_at": s.MadeAt, "version": s.Version, "messages": s.Messages})
	}
	_, err := fmt.Fprintf(to.out, "%s: %d messages, made %s by bullpen %s\n", done, s.Messages, s.MadeAt.Format(time.RFC3339), s.Version)
	return err
}
