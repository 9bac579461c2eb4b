package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"strconv"
	"strings"

	"github.com/bullpen-run/bullpen/client"
	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/proto/api"
)

type getCommand struct {
	remote   `embed:""`
	traceArg `embed:""`
}

func (*getCommand) Help() string {
	return `Example:

  bullpen get trc_NQnZRv1DhR0GTb1ZlnDc --json`
}

func (c *getCommand) Run(ctx context.Context, s streams) error {
	return request(s, &c.remote, func(cl *client.Client) (*api.Execution, error) {
		return cl.Get(ctx, c.id())
	}, printExecution)
}

func printExecution(p *page, e *api.Execution) {
	p.row("trace", e.TraceID)
	p.row("status", e.Status)
	p.waiting(e.WaitingFor)
	p.row("language", e.Language)
	p.optional("profile", e.Profile)
	p.optional("thread", e.ThreadID)
	p.optional("schedule", e.ScheduleID)
	if e.Batch != nil {
		p.row("batch", fmt.Sprintf("%s, item %d", e.Batch.ID, e.Batch.Index))
	}
	p.optional("pipeline", e.PipelineID)
	p.optional("step", e.Step)
	p.optional("exit code", e.ExitCode)
	p.optional("error", e.ErrorCode)
	p.optional("", e.ErrorMessage)
	p.row("created", e.CreatedAt)
	p.optional("run at", e.RunAt)
	p.optional("completed", e.CompletedAt)
	p.row("queued", milliseconds(e.QueuedMS))
	p.row("duration", milliseconds(e.DurationMS))
	p.row("timeout", strconv.Itoa(e.Timeout)+"s")
	p.row("attempt", e.Attempt)
	if e.Network != nil {
		p.row("network", fmt.Sprintf("%d bytes in, %d out", e.Network.BytesIn, e.Network.BytesOut))
		for _, b := range e.Network.BlockedConnections {
			p.row("blocked", formatBlocked(b))
		}
		if e.Network.BlockedTotal > int64(len(e.Network.BlockedConnections)) {
			p.row("blocked", fmt.Sprintf("%d in all", e.Network.BlockedTotal))
		}
	}
	if e.WebhookURL != nil {
		p.row("webhook", cell(e.WebhookDeliveryStatus)+", "+*e.WebhookURL)
	}
	p.metadata(e.Metadata)
	printOutput(p, "stdout", e.Stdout, e.StdoutTruncated)
	printOutput(p, "stderr", e.Stderr, e.StderrTruncated)
	printResults(p, e.Results, e.ResultsTruncated)
	if e.StdoutInvalidUTF8 || e.StderrInvalidUTF8 {
		p.textf("--- the output has bytes that are not UTF-8: `bullpen logs %s` prints them as they are\n", e.TraceID)
	}
	if e.OutputBudgetExceeded {
		p.textf("--- less output was kept than the sandbox allows: the organisation's output budget was used up\n")
	}
}

func printOutput(p *page, name string, text *string, truncated bool) {
	if text != nil && *text != "" {
		p.textf("\n--- %s\n%s\n", name, strings.TrimSuffix(*text, "\n"))
	}
	if truncated {
		p.textf("--- %s is truncated: the program wrote more than the result keeps\n", name)
	}
}

// formatBlocked describes a blocked connection in one line: protocol, destination, reason.
func formatBlocked(b api.BlockedConnection) string {
	to := b.Host
	switch {
	case to == "":
		to = b.Address
	case b.Address != "":
		to += " (" + b.Address + ")"
	}
	if b.Port != 0 {
		to += " port " + strconv.Itoa(b.Port)
	}
	return fmt.Sprintf("%s %s: %s", b.Protocol, to, b.Reason)
}

type logsCommand struct {
	remote   `embed:""`
	Follow   bool  `short:"f" help:"Continue until the program ends, and exit with its exit code."`
	AfterSeq int64 `name:"after-seq" placeholder:"N" help:"Skip events up to this sequence number, as --json prints it."`
	traceArg `embed:""`
}

func (*logsCommand) Help() string {
	return `Prints the output so far, byte for byte, standard output and standard error each on the same stream here.
--json prints the events, one JSON object per line.

Without --follow, the exit code is 0 if the output could be read.

Exit codes with --follow: ` + exitCodesHelp + `

Examples:

  bullpen logs trc_Dh--7j-V0wlyHpZI_3sX
  bullpen logs --follow --after-seq 42 trc_Dh--7j-V0wlyHpZI_3sX`
}

func (c *logsCommand) Run(ctx context.Context, s streams) error {
	cl, err := c.client(s)
	if err != nil {
		return err
	}
	printer := &eventPrinter{streams: s, json: c.JSON, lastSeq: c.AfterSeq}
	var result *proto.Result
	event := func(e *client.Event) error {
		result = e.Result
		return printer.event(e)
	}
	if c.Follow {
		if err := each(cl.Follow(ctx, c.id(), c.AfterSeq), event); err != nil {
			return unknownOutcome(err)
		}
		return resultOutcome(c.id(), result)
	}
	if err := each(cl.Output(ctx, c.id(), c.AfterSeq), event); err != nil {
		return err
	}
	switch {
	case result == nil:
		s.errorf("%s is not finished; --follow waits for it", c.ID)
	case result.ErrorCode != nil:
		s.errorf("%v", platformError(c.id(), *result.ErrorCode, result.ErrorMessage))
	}
	return nil
}

type waitCommand struct {
	remote `embed:""`
	Batch  string    `placeholder:"ID" help:"Wait for the end of this batch instead, and show its progress."`
	Traces []traceID `arg:"" optional:"" name:"trace" help:"Ids of executions: trc_…"`
}

// traceID is the id of an execution in a list of arguments.
type traceID proto.TraceID

// UnmarshalText checks the form of the id.
func (t *traceID) UnmarshalText(text []byte) error {
	arg := traceArg{string(text)}
	*t = traceID(text)
	return arg.Validate()
}

func (*waitCommand) Help() string {
	return `Prints the id, status and exit code of each execution when it has ended, in the order of the arguments.
--json prints each as bullpen get does. Interrupting the command does not cancel the executions.

With several executions, the exit code is the exit code of the first one that did not succeed, or 0.

Exit codes: ` + exitCodesHelp + `

Exit codes with --batch:
` + batchExitCodesHelp + `

Examples:

  bullpen wait trc_Dh--7j-V0wlyHpZI_3sX
  bullpen wait --batch bat_abcdefghijklmnopqrstuvwxyz
  bullpen wait $(bullpen run --async test.py)`
}

// Validate checks that there is something to wait for.
func (c *waitCommand) Validate() error {
	switch {
	case (c.Batch == "") == (len(c.Traces) == 0):
		return errors.New("give the ids of executions, or --batch")
	case c.Batch != "":
		return (&batchArg{c.Batch}).Validate()
	}
	return nil
}

func (c *waitCommand) Run(ctx context.Context, s streams) error {
	if c.Batch != "" {
		return (&batchWaiter{remote: &c.remote, streams: s, id: c.Batch, json: c.JSON}).run(ctx)
	}
	cl, last, err := c.recorded(s)
	if err != nil {
		return err
	}
	exitCode := exitOK
	for _, id := range c.Traces {
		e, err := cl.Wait(ctx, proto.TraceID(id))
		if err != nil {
			return unknownOutcome(err)
		}
		if c.JSON {
			err = last.print(s.out)
		} else {
			_, err = fmt.Fprintf(s.out, "%s %s %s\n", e.TraceID, e.Status, cell(e.ExitCode))
		}
		if err != nil {
			return unknownOutcome(err)
		}
		exit, _ := errors.AsType[exitError](outcome(e.TraceID, e.ExitCode, e.ErrorCode, e.ErrorMessage))
		if exit.err != nil {
			s.errorf("%v", exit.err)
		}
		exitCode = cmp.Or(exitCode, exit.code)
	}
	if exitCode != exitOK {
		return exitError{code: exitCode}
	}
	return nil
}

type cancelCommand struct {
	remote   `embed:""`
	traceArg `embed:""`
}

func (*cancelCommand) Help() string {
	return `Example:

  bullpen cancel trc_NQnZRv1DhR0GTb1ZlnDc`
}

func (c *cancelCommand) Run(ctx context.Context, s streams) error {
	return request(s, &c.remote, func(cl *client.Client) (*api.Cancelled, error) {
		return cl.Cancel(ctx, c.id())
	}, func(p *page, a *api.Cancelled) { p.textf("%s %s\n", a.TraceID, a.Status) })
}
