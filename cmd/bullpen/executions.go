package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"strconv"
	"text/tabwriter"
	"time"

	"github.com/bullpen-run/bullpen/cmd/internal/client"
)

type getCommand struct {
	remote `embed:""`
	trace  `embed:""`
}

// Run carries the command out.
func (c *getCommand) Run(ctx context.Context, io streams) error {
	api, err := c.client()
	if err != nil {
		return err
	}
	e, raw, err := api.Get(ctx, c.id())
	if err != nil {
		return err
	}
	if c.JSON {
		return printRaw(io.out, raw)
	}
	return printExecution(io.out, e)
}

func printExecution(w io.Writer, e *client.Execution) error {
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	row := func(name, value string) { _, _ = fmt.Fprintf(t, "%s\t%s\n", name, value) } // Flush gives the error
	row("trace", string(e.TraceID))
	row("status", string(e.Status))
	row("language", string(e.Language))
	if e.ExitCode != nil {
		row("exit code", strconv.Itoa(*e.ExitCode))
	}
	if e.ErrorCode != nil {
		row("error", *e.ErrorCode)
	}
	if e.ErrorMessage != nil {
		row("", *e.ErrorMessage)
	}
	row("created", e.CreatedAt.Local().Format(time.DateTime))
	if e.CompletedAt != nil {
		row("completed", e.CompletedAt.Local().Format(time.DateTime))
	}
	if e.QueuedMS != nil {
		row("queued", milliseconds(*e.QueuedMS))
	}
	row("duration", milliseconds(e.DurationMS))
	row("timeout", strconv.Itoa(e.Timeout)+"s")
	row("attempt", strconv.Itoa(e.Attempt))
	for name, value := range e.Metadata {
		row("metadata "+name, value)
	}
	if err := t.Flush(); err != nil {
		return err
	}
	for _, out := range []struct {
		name string
		text *string
	}{{"stdout", e.Stdout}, {"stderr", e.Stderr}} {
		if out.text != nil && *out.text != "" {
			if _, err := fmt.Fprintf(w, "\n--- %s\n%s", out.name, *out.text); err != nil {
				return err
			}
		}
	}
	return nil
}

func milliseconds(n int64) string { return (time.Duration(n) * time.Millisecond).String() }

// settle is how long `bullpen logs` without --follow waits for one more event of a program that still runs: what is there
// already comes at once.
const settle = time.Second

type logsCommand struct {
	remote   `embed:""`
	Follow   bool  `short:"f" help:"Go on until the program ends."`
	AfterSeq int64 `name:"after-seq" placeholder:"N" help:"Leave out the events up to this number; see the seq of --json."`
	trace    `embed:""`
}

// Help tells what --help does not know by itself.
func (*logsCommand) Help() string {
	return `Prints what the program wrote, each of its streams to the same one here. The exit code says only whether the output could be read.
--json prints the events, one JSON object a line.`
}

var errSettled = errors.New("the output so far is printed")

// Run carries the command out.
func (c *logsCommand) Run(ctx context.Context, io streams) error {
	api, err := c.client()
	if err != nil {
		return err
	}
	p := &printer{io: io, json: c.JSON, last: c.AfterSeq}
	if c.Follow {
		return api.Follow(ctx, c.id(), c.AfterSeq, p.event)
	}
	e, _, err := api.Get(ctx, c.id())
	if err != nil {
		return err
	}
	if e.Status.Terminal() {
		return api.Follow(ctx, c.id(), c.AfterSeq, p.event)
	}
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	timer := time.AfterFunc(settle, func() { cancel(errSettled) })
	defer timer.Stop()
	err = api.Follow(ctx, c.id(), c.AfterSeq, func(e *client.Event) error {
		timer.Reset(settle)
		return p.event(e)
	})
	if errors.Is(err, errSettled) {
		_, err = fmt.Fprintf(io.err, "bullpen: %s is %s; --follow goes on with it\n", c.ID, e.Status)
	}
	return err
}

type cancelCommand struct {
	remote `embed:""`
	trace  `embed:""`
}

// Run carries the command out.
func (c *cancelCommand) Run(ctx context.Context, io streams) error {
	api, err := c.client()
	if err != nil {
		return err
	}
	a, err := api.Cancel(ctx, c.id())
	if err != nil {
		return err
	}
	if c.JSON {
		return printJSON(io.out, a)
	}
	_, err = fmt.Fprintf(io.out, "%s %s\n", a.TraceID, a.Status)
	return err
}
