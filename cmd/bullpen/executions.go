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
	"unicode"

	"github.com/bullpen-run/bullpen/cmd/internal/client"
	"github.com/bullpen-run/bullpen/proto"
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
	if e.Sandbox != nil {
		row("sandbox", *e.Sandbox)
	}
	if e.ThreadID != nil {
		row("thread", *e.ThreadID)
	}
	if e.ExitCode != nil {
		row("exit code", strconv.Itoa(*e.ExitCode))
	}
	if e.ErrorCode != nil {
		row("error", *e.ErrorCode)
	}
	if e.ErrorMessage != nil {
		row("", *e.ErrorMessage)
	}
	row("created", e.CreatedAt.Local().Format(timeLayout))
	if e.CompletedAt != nil {
		row("completed", e.CompletedAt.Local().Format(timeLayout))
	}
	if e.QueuedMS != nil {
		row("queued", milliseconds(*e.QueuedMS))
	}
	row("duration", milliseconds(e.DurationMS))
	row("timeout", strconv.Itoa(e.Timeout)+"s")
	row("attempt", strconv.Itoa(e.Attempt))
	if e.Network != nil {
		row("network", fmt.Sprintf("%d bytes in, %d out", e.Network.BytesIn, e.Network.BytesOut))
		for _, b := range e.Network.BlockedConnections {
			row("blocked", blocked(b))
		}
	}
	if e.WebhookURL != nil {
		row("webhook", orDash(e.WebhookDeliveryStatus)+", "+*e.WebhookURL)
	}
	for _, name := range slices.Sorted(maps.Keys(e.Metadata)) {
		row("metadata "+name, e.Metadata[name])
	}
	if err := t.Flush(); err != nil {
		return err
	}
	for _, out := range []struct {
		name      string
		text      *string
		truncated bool
	}{{"stdout", e.Stdout, e.StdoutTruncated}, {"stderr", e.Stderr, e.StderrTruncated}} {
		if out.text != nil && *out.text != "" {
			if _, err := fmt.Fprintf(w, "\n--- %s\n%s\n", out.name, strings.TrimSuffix(*out.text, "\n")); err != nil {
				return err
			}
		}
		if out.truncated {
			if _, err := fmt.Fprintf(w, "--- %s is not whole: the program wrote more than is kept\n", out.name); err != nil {
				return err
			}
		}
	}
	return nil
}

// blocked writes a refused connection as one line: what, where, and why.
func blocked(b proto.BlockedConnection) string {
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
	return strings.Map(printable, fmt.Sprintf("%s %s: %s", b.Protocol, to, b.Reason))
}

// printable keeps the program, which chose the name, from writing to the terminal that it is shown on.
func printable(r rune) rune {
	if unicode.IsPrint(r) {
		return r
	}
	return unicode.ReplacementChar
}

// timeLayout is that of times for people, who are told the zone.
const timeLayout = "2006-01-02 15:04:05 MST"

func milliseconds(n int64) string { return (time.Duration(n) * time.Millisecond).String() }

type logsCommand struct {
	remote   `embed:""`
	Follow   bool  `short:"f" help:"Go on until the program ends."`
	AfterSeq int64 `name:"after-seq" placeholder:"N" help:"Leave out the events up to this number; see the seq of --json."`
	trace    `embed:""`
}

// Help tells what --help does not know by itself.
func (*logsCommand) Help() string {
	return `Prints what the program has written up to now, each of its streams to the same one here. The exit code says only whether the output
could be read. --json prints the events, one JSON object a line.

Examples:

  bullpen logs trc_Dh--7j-V0wlyHpZI_3sX
  bullpen logs --follow --after-seq 42 trc_Dh--7j-V0wlyHpZI_3sX`
}

// Run carries the command out.
func (c *logsCommand) Run(ctx context.Context, io streams) error {
	api, err := c.client()
	if err != nil {
		return err
	}
	api.Retrying = retryNotes(io)
	p := &printer{io: io, json: c.JSON, last: c.AfterSeq}
	read := api.Output
	if c.Follow {
		read = api.Follow
	}
	ended := false
	err = read(ctx, c.id(), c.AfterSeq, func(e *client.Event) error {
		ended = e.Type == proto.EventResult
		if err := p.event(e); err != nil || !ended {
			return err
		}
		tellEnd(io, c.id(), e.Result)
		return nil
	})
	if err == nil && !ended {
		_, err = fmt.Fprintf(io.err, "bullpen: %s has not ended; --follow goes on with it\n", c.ID)
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
