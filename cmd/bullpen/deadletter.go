package main

import (
	"context"
	"fmt"
	"io"
	"maps"
	"slices"
	"strconv"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/bullpen-run/bullpen/cmd/internal/client"
	"github.com/bullpen-run/bullpen/proto"
)

type deadLetterCommands struct {
	List    deadLetterListCommand    `cmd:"" help:"List all dead letters, the newest first."`
	Show    deadLetterShowCommand    `cmd:"" help:"Show a dead letter: why it was set aside, and what it is about."`
	Requeue deadLetterRequeueCommand `cmd:"" help:"Run the job of a dead letter again, as a new execution."`
	Rm      deadLetterRmCommand      `cmd:"" help:"Remove a dead letter with the job in it."`
}

// deadLetterArg is the argument that names a dead letter.
type deadLetterArg struct {
	ID string `arg:"" name:"id" help:"The dead letter's id, as bullpen deadletter list shows it: that of an execution, or dead_…"`
}

// Validate checks the form of the id before anything is sent.
func (a *deadLetterArg) Validate() error {
	if !proto.ValidDeadLetterID(a.ID) {
		return fmt.Errorf("%q is not a dead letter's id: it is that of an execution, trc_…, or dead_ and a number", a.ID)
	}
	return nil
}

type deadLetterListCommand struct {
	remote `embed:""`
}

// Help tells what --help does not know by itself.
func (*deadLetterListCommand) Help() string {
	return `A dead letter is a job that three workers were lost with before they started its program, or a message that is no job. It is kept as long as
records of executions are.`
}

// Run carries the command out.
func (c *deadLetterListCommand) Run(ctx context.Context, io streams) error {
	api, err := c.client()
	if err != nil {
		return err
	}
	list, err := api.DeadLetters(ctx)
	if err != nil {
		return err
	}
	if c.JSON {
		return printJSON(io.out, list)
	}
	t := tabwriter.NewWriter(io.out, 0, 0, 2, ' ', 0)
	_, _ = fmt.Fprintln(t, "ID\tREASON\tSET ASIDE\tORG\tREQUEUED AS") // Flush gives the error
	for _, l := range list {
		_, _ = fmt.Fprintf(t, "%s\t%s\t%s\t%s\t%s\n", l.ID, l.Reason, l.SetAsideAt.Local().Format(timeLayout), orDash(l.Org), traceOrDash(l.RequeuedAs))
	}
	return t.Flush()
}

type deadLetterShowCommand struct {
	remote        `embed:""`
	deadLetterArg `embed:""`
}

// Help tells what --help does not know by itself.
func (*deadLetterShowCommand) Help() string {
	return "The program and the variables of a job are kept, but not shown."
}

// Run carries the command out.
func (c *deadLetterShowCommand) Run(ctx context.Context, io streams) error {
	api, err := c.client()
	if err != nil {
		return err
	}
	l, raw, err := api.DeadLetter(ctx, c.ID)
	if err != nil {
		return err
	}
	if c.JSON {
		return printRaw(io.out, raw)
	}
	return printDeadLetter(io.out, l)
}

func printDeadLetter(w io.Writer, l *client.DeadLetter) error {
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	row := func(name, value string) { _, _ = fmt.Fprintf(t, "%s\t%s\n", name, strings.Map(printable, value)) } // Flush gives the error
	row("dead letter", l.ID)
	row("reason", string(l.Reason))
	row("", l.Message)
	row("set aside", l.SetAsideAt.Local().Format(timeLayout))
	for _, worker := range l.Workers {
		row("lost worker", worker)
	}
	if x := l.Execution; x != nil {
		row("org", orDash(l.Org))
		row("key", orDash(l.KeyID))
		row("submitted", x.CreatedAt.Local().Format(timeLayout))
		row("attempt", fmt.Sprintf("%d of %d", *l.Attempt, x.MaxAttempts))
		row("program", fmt.Sprintf("%s, %d bytes", x.Language, x.CodeBytes))
		row("mode", string(x.Mode))
		row("timeout", (time.Duration(x.Timeout) * time.Second).String())
		row("sandbox", x.Sandbox)
		row("thread", orDash(x.ThreadID))
		row("webhook", orDash(x.WebhookURL))
		for _, name := range slices.Sorted(maps.Keys(x.Metadata)) {
			row("metadata", name+"="+x.Metadata[name])
		}
		row("requeued as", traceOrDash(l.RequeuedAs))
	}
	if l.RequeuedAt != nil {
		row("requeued", l.RequeuedAt.Local().Format(timeLayout))
	}
	if m := l.Malformed; m != nil {
		row("subject", m.Subject)
		for _, name := range slices.Sorted(maps.Keys(m.Headers)) {
			for _, value := range m.Headers[name] {
				row("header", name+": "+value)
			}
		}
		row("bytes", strconv.Itoa(m.Bytes))
		row("begins with", m.Data)
	}
	return t.Flush()
}

type deadLetterRequeueCommand struct {
	remote        `embed:""`
	deadLetterArg `embed:""`
}

// Help tells what --help does not know by itself.
func (*deadLetterRequeueCommand) Help() string {
	return `The execution that was set aside has ended, and stays as it did. The new one has an id of its own, which is printed, and which the dead
letter has from then on: asked again, the answer is the same and nothing runs twice. It has the same program, variables, sandbox, thread, metadata
and webhook, and the limits of the plan that its API key has now.`
}

// Run carries the command out.
func (c *deadLetterRequeueCommand) Run(ctx context.Context, io streams) error {
	api, err := c.client()
	if err != nil {
		return err
	}
	l, raw, err := api.Requeue(ctx, c.ID)
	if err != nil {
		return err
	}
	if c.JSON {
		return printRaw(io.out, raw)
	}
	_, err = fmt.Fprintln(io.out, traceOrDash(l.RequeuedAs))
	return err
}

type deadLetterRmCommand struct {
	remote        `embed:""`
	deadLetterArg `embed:""`
}

// Run carries the command out.
func (c *deadLetterRmCommand) Run(ctx context.Context, io streams) error {
	api, err := c.client()
	if err != nil {
		return err
	}
	if err := api.RemoveDeadLetter(ctx, c.ID); err != nil {
		return err
	}
	if c.JSON {
		return printJSON(io.out, map[string]string{"id": c.ID})
	}
	_, err = fmt.Fprintf(io.out, "%s is removed\n", c.ID)
	return err
}
