package main

import (
	"context"
	"fmt"
	"io"
	"strconv"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/bullpen-run/bullpen/cmd/internal/client"
	"github.com/bullpen-run/bullpen/proto"
)

type webhookCommands struct {
	Show      webhookShowCommand      `cmd:"" help:"Show what became of the webhook of an execution."`
	Replay    webhookReplayCommand    `cmd:"" help:"Send the webhook of an execution again, or all that failed since a time."`
	Test      webhookTestCommand      `cmd:"" help:"Send a test to the key's URL, and show what came of it."`
	Endpoints webhookEndpointsCommand `cmd:"" help:"List the URLs that webhooks fail at, and those that are disabled."`
	Enable    webhookEnableCommand    `cmd:"" help:"Deliver to a disabled URL again."`
	Listen    webhookListenCommand    `cmd:"" help:"Be a receiver for development: verify and print the webhooks that come."`
}

type webhookShowCommand struct {
	remote `embed:""`
	trace  `embed:""`
}

// Run carries the command out.
func (c *webhookShowCommand) Run(ctx context.Context, io streams) error {
	api, err := c.client()
	if err != nil {
		return err
	}
	d, raw, err := api.Delivery(ctx, c.id())
	if err != nil {
		return err
	}
	if c.JSON {
		return printRaw(io.out, raw)
	}
	return printDelivery(io.out, d)
}

func printDelivery(w io.Writer, d *client.Delivery) error {
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	row := func(name, value string) { _, _ = fmt.Fprintf(t, "%s\t%s\n", name, value) } // Flush gives the error
	row("trace", string(d.TraceID))
	row("webhook id", d.WebhookID)
	row("url", d.URL)
	row("status", string(d.Status))
	if d.Reason != nil {
		row("", strings.Map(printable, *d.Reason))
	}
	if d.CreatedAt != nil {
		row("created", d.CreatedAt.Local().Format(timeLayout))
	}
	if d.NextAt != nil {
		row("next attempt", d.NextAt.Local().Format(timeLayout))
	}
	row("attempts", strconv.Itoa(d.AttemptsMade))
	if err := t.Flush(); err != nil {
		return err
	}
	if len(d.Attempts) == 0 {
		return nil
	}
	if _, err := fmt.Fprintln(w); err != nil {
		return err
	}
	return printAttempts(w, d.Attempts)
}

// printAttempts prints attempts as a table, and the last answer below it.
func printAttempts(w io.Writer, attempts []client.DeliveryAttempt) error {
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	_, _ = fmt.Fprintln(t, "NO\tBEGAN\tSTATUS\tERROR\tTOTAL\tDNS\tCONNECT\tTLS\tFIRST BYTE\tADDRESS") // Flush gives the error
	for _, a := range attempts {
		status := "-"
		if a.Status != nil {
			status = strconv.Itoa(*a.Status)
		}
		_, _ = fmt.Fprintf(t, "%d\t%s\t%s\t%s\t%s\t%s\t%s\t%s\t%s\t%s\n", a.Number, a.At.Local().Format(timeLayout), status, orDash(a.Error),
			took(a.Timings.Total), took(a.Timings.DNS), took(a.Timings.Connect), took(a.Timings.TLS), took(a.Timings.FirstByte), orDash(a.RemoteAddr))
	}
	if err := t.Flush(); err != nil {
		return err
	}
	last := attempts[len(attempts)-1]
	if last.Detail != nil {
		if _, err := fmt.Fprintf(w, "\n%s\n", strings.Map(printable, *last.Detail)); err != nil {
			return err
		}
	}
	if last.Response == nil {
		return nil
	}
	text := strings.TrimRight(strings.ReplaceAll(*last.Response, "\r\n", "\n"), "\n")
	_, err := fmt.Fprintf(w, "\n--- the last answer\n%s\n", strings.Map(printableLine, text))
	return err
}

// printableLine is printable for text of several lines.
func printableLine(r rune) rune {
	if r == '\n' || r == '\t' {
		return r
	}
	return printable(r)
}

// took writes a number of milliseconds.
func took(ms float64) string {
	if ms == 0 {
		return "-"
	}
	return secondsOf(ms / 1000).Round(100 * time.Microsecond).String()
}

type webhookReplayCommand struct {
	remote `embed:""`
	Failed bool   `help:"All that failed, of the key's organisation, since the time that --since gives."`
	Since  string `placeholder:"TIME" help:"With --failed: the time, as RFC 3339 or as a time ago: 2026-11-20T12:00:00Z, or 24h."`
	ID     string `arg:"" optional:"" name:"trace" help:"The execution's id: trc_…"`
}

// Help tells what --help does not know by itself.
func (*webhookReplayCommand) Help() string {
	return `A webhook that is sent again keeps its webhook-id and begins its attempts anew. The answer comes at once: see bullpen webhook show.

Examples:

  bullpen webhook replay trc_Dh--7j-V0wlyHpZI_3sX
  bullpen webhook replay --failed --since 2h`
}

// Run carries the command out.
func (c *webhookReplayCommand) Run(ctx context.Context, io streams) error {
	if c.Failed == (c.ID != "") || c.Failed != (c.Since != "") {
		return usagef("give either an execution's id, or --failed with --since")
	}
	if c.Failed {
		return c.replayFailed(ctx, io)
	}
	id := trace{c.ID}
	if err := id.Validate(); err != nil {
		return usageError{err}
	}
	api, err := c.client()
	if err != nil {
		return err
	}
	d, raw, err := api.Replay(ctx, id.id())
	if err != nil {
		return err
	}
	if c.JSON {
		return printRaw(io.out, raw)
	}
	_, err = fmt.Fprintf(io.out, "%s %s\n", d.TraceID, d.Status)
	return err
}

// replayFailed has failed webhooks sent again, some at a time, and shows how far it has come.
func (c *webhookReplayCommand) replayFailed(ctx context.Context, io streams) error {
	since, err := timeOf(c.Since, time.Now())
	if err != nil {
		return usagef("--since: %w", err)
	}
	api, err := c.client()
	if err != nil {
		return err
	}
	all := 0
	var after proto.TraceID
	for {
		r, err := api.ReplayFailed(ctx, since, after)
		if err != nil {
			if all > 0 {
				err = fmt.Errorf("after %d webhooks: %w", all, err)
			}
			return err
		}
		all += r.Replayed
		progress(io, all, all+r.Left, r.Next == nil)
		if r.Next == nil {
			break
		}
		after = *r.Next
	}
	if c.JSON {
		return printJSON(io.out, map[string]int{"replayed": all})
	}
	_, err = fmt.Fprintf(io.out, "%d failed webhooks are sent again\n", all)
	return err
}

// timeOf reads a time, or one that is so long before now.
func timeOf(text string, now time.Time) (time.Time, error) {
	if at, err := time.Parse(time.RFC3339, text); err == nil {
		return at, nil
	}
	ago, err := time.ParseDuration(text)
	if err != nil || ago < 0 {
		return time.Time{}, fmt.Errorf("%q is not a time: write 2026-11-20T12:00:00Z, or 24h for a day ago", text)
	}
	return now.Add(-ago), nil
}

// progress shows how much of a whole is done: as a bar in one line to who watches, else in a line of its own.
func progress(io streams, done, of int, last bool) {
	const width = 40
	if !io.watched {
		_, _ = fmt.Fprintf(io.err, "bullpen: %d of %d\n", done, of)
		return
	}
	filled := width
	if of > 0 {
		filled = width * done / of
	}
	end := ""
	if last {
		end = "\n"
	}
	_, _ = fmt.Fprintf(io.err, "\r[%s%s] %d of %d\x1b[K%s", strings.Repeat("#", filled), strings.Repeat(".", width-filled), done, of, end)
}

type webhookTestCommand struct {
	remote `embed:""`
}

// Help tells what --help does not know by itself.
func (*webhookTestCommand) Help() string {
	return "Sends the event webhook.test once. The exit code is 0 where the receiver took it."
}

// Run carries the command out.
func (c *webhookTestCommand) Run(ctx context.Context, io streams) error {
	api, err := c.client()
	if err != nil {
		return err
	}
	a, raw, err := api.TestWebhook(ctx)
	if err != nil {
		return err
	}
	if c.JSON {
		err = printRaw(io.out, raw)
	} else {
		err = printAttempts(io.out, []client.DeliveryAttempt{*a})
	}
	if err == nil && a.Error != nil {
		err = exitError(exitFailure)
	}
	return err
}

type webhookEndpointsCommand struct {
	remote `embed:""`
}

// Run carries the command out.
func (c *webhookEndpointsCommand) Run(ctx context.Context, io streams) error {
	api, err := c.client()
	if err != nil {
		return err
	}
	list, raw, err := api.Endpoints(ctx)
	if err != nil {
		return err
	}
	if c.JSON {
		return printRaw(io.out, raw)
	}
	t := tabwriter.NewWriter(io.out, 0, 0, 2, ' ', 0)
	_, _ = fmt.Fprintln(t, "URL\tFAILING SINCE\tDISABLED\tREASON") // Flush gives the error
	for _, e := range list {
		disabled := "-"
		if e.DisabledAt != nil {
			disabled = e.DisabledAt.Local().Format(timeLayout)
		}
		_, _ = fmt.Fprintf(t, "%s\t%s\t%s\t%s\n", e.URL, e.FailingSince.Local().Format(timeLayout), disabled, strings.Map(printable, orDash(e.Reason)))
	}
	return t.Flush()
}

type webhookEnableCommand struct {
	remote `embed:""`
	Target string `arg:"" name:"target" help:"The URL, as bullpen webhook endpoints shows it."`
}

// Help tells what --help does not know by itself.
func (*webhookEnableCommand) Help() string {
	return "What failed meanwhile is sent again only when it is replayed: see bullpen webhook replay --failed."
}

// Run carries the command out.
func (c *webhookEnableCommand) Run(ctx context.Context, io streams) error {
	api, err := c.client()
	if err != nil {
		return err
	}
	if err := api.EnableEndpoint(ctx, c.Target); err != nil {
		return err
	}
	if c.JSON {
		return printJSON(io.out, map[string]string{"url": c.Target})
	}
	_, err = fmt.Fprintf(io.out, "%s is delivered to again\n", c.Target)
	return err
}
