package main

import (
	"context"
	"fmt"
	"iter"
	"maps"
	"slices"
	"time"

	"github.com/bullpen-run/bullpen/client"
	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/proto/api"
)

type deadLetterCommands struct {
	List    deadLetterListCommand    `cmd:"" help:"List all dead letters, newest first."`
	Show    deadLetterShowCommand    `cmd:"" help:"Show a dead letter."`
	Requeue deadLetterRequeueCommand `cmd:"" help:"Run the job of a dead letter as a new execution."`
	Rm      deadLetterRmCommand      `cmd:"" help:"Remove a dead letter and its job."`
}

type deadLetterArg struct {
	ID string `arg:"" name:"id" help:"Id of the dead letter: trc_… or dead_…"`
}

func (a *deadLetterArg) Validate() error {
	if !proto.ValidDeadLetterID(a.ID) {
		return fmt.Errorf("%q is not a dead letter's id: write trc_… or dead_ and a number", a.ID)
	}
	return nil
}

type deadLetterListCommand struct {
	remote `embed:""`
}

func (*deadLetterListCommand) Help() string {
	return `A dead letter is a job that three workers were lost with before they started its program, or a malformed
message among the jobs. The server keeps it for as long as records of executions (--retention).`
}

func (c *deadLetterListCommand) Run(ctx context.Context, s streams) error {
	return list(s, &c.remote, func(cl *client.Client) iter.Seq2[api.DeadLetter, error] {
		return cl.Admin().DeadLetters(ctx)
	}, func(p *page, letters []api.DeadLetter) {
		p.row("ID", "REASON", "CREATED", "ORG", "REQUEUED AS")
		for _, l := range letters {
			p.row(l.ID, l.Reason, l.SetAsideAt, l.Org, l.RequeuedAs)
		}
	})
}

type deadLetterShowCommand struct {
	remote        `embed:""`
	deadLetterArg `embed:""`
}

func (*deadLetterShowCommand) Help() string {
	return "The program and environment variables of the job are stored, but not shown."
}

func (c *deadLetterShowCommand) Run(ctx context.Context, s streams) error {
	return request(s, &c.remote, func(cl *client.Client) (*api.WholeDeadLetter, error) {
		return cl.Admin().DeadLetter(ctx, c.ID)
	}, printDeadLetter)
}

func printDeadLetter(p *page, l *api.WholeDeadLetter) {
	p.row("dead letter", l.ID)
	p.row("reason", l.Reason)
	p.row("", l.Message)
	p.row("created", l.SetAsideAt)
	for _, worker := range l.Workers {
		p.row("lost worker", worker)
	}
	if x := l.Execution; x != nil {
		p.row("org", l.Org)
		p.row("key", l.KeyID)
		p.row("submitted", x.CreatedAt)
		p.row("attempt", fmt.Sprintf("%s of %d", cell(l.Attempt), x.MaxAttempts))
		p.row("program", fmt.Sprintf("%s, %d bytes", x.Language, x.CodeBytes))
		p.row("mode", x.Mode)
		p.row("timeout", time.Duration(x.Timeout)*time.Second)
		p.row("profile", x.Profile)
		p.row("thread", x.ThreadID)
		p.row("webhook", x.WebhookURL)
		p.metadata(x.Metadata)
		p.row("requeued as", l.RequeuedAs)
	}
	p.optional("requeued", l.RequeuedAt)
	if m := l.Malformed; m != nil {
		p.row("subject", m.Subject)
		for _, name := range slices.Sorted(maps.Keys(m.Headers)) {
			for _, value := range m.Headers[name] {
				p.row("header", name+": "+value)
			}
		}
		p.row("bytes", m.Bytes)
		p.row("data", m.Data)
	}
}

type deadLetterRequeueCommand struct {
	remote        `embed:""`
	deadLetterArg `embed:""`
}

func (*deadLetterRequeueCommand) Help() string {
	return `Prints the id of the new execution, which is the old one under the present limits of its API key. The old
execution keeps its result. Repeating the command prints the same id and does not run the job twice.

Example:

  bullpen deadletter requeue trc_NQnZRv1DhR0GTb1ZlnDc`
}

func (c *deadLetterRequeueCommand) Run(ctx context.Context, s streams) error {
	return request(s, &c.remote, func(cl *client.Client) (*api.DeadLetter, error) {
		return cl.Admin().Requeue(ctx, c.ID)
	}, func(p *page, l *api.DeadLetter) { p.row(l.RequeuedAs) })
}

type deadLetterRmCommand struct {
	remote        `embed:""`
	deadLetterArg `embed:""`
}

func (c *deadLetterRmCommand) Run(ctx context.Context, s streams) error {
	return compose(s, &c.remote, func(cl *client.Client) (removed, error) {
		return removed{c.ID}, cl.Admin().RemoveDeadLetter(ctx, c.ID)
	}, printRemoved)
}
