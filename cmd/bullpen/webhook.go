package main

import (
	"context"
	"fmt"
	"strings"
	"time"

	"github.com/bullpen-run/bullpen/client"
	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/proto/api"
)

type webhookCommands struct {
	Show      webhookShowCommand      `cmd:"" help:"Show the webhook delivery of an execution."`
	Replay    webhookReplayCommand    `cmd:"" help:"Send a webhook again, or all failed webhooks."`
	Test      webhookTestCommand      `cmd:"" help:"Send a test event to the key's webhook URL."`
	Endpoints webhookEndpointsCommand `cmd:"" help:"List failing and disabled webhook URLs."`
	Enable    webhookEnableCommand    `cmd:"" help:"Enable a disabled webhook URL."`
	Listen    webhookListenCommand    `cmd:"" help:"Receive, verify and print webhooks, for development."`
}

type webhookShowCommand struct {
	remote   `embed:""`
	traceArg `embed:""`
}

func (c *webhookShowCommand) Run(ctx context.Context, s streams) error {
	return request(s, &c.remote, func(cl *client.Client) (*api.Delivery, error) {
		return cl.Delivery(ctx, c.id())
	}, printDelivery)
}

func printDelivery(p *page, d *api.Delivery) {
	p.row("trace", d.TraceID)
	p.row("webhook id", d.WebhookID)
	p.row("url", d.URL)
	p.row("status", d.Status)
	p.optional("", d.Reason)
	p.optional("created", d.CreatedAt)
	p.optional("next attempt", d.NextAt)
	p.row("attempts", d.AttemptsMade)
	if len(d.Attempts) > 0 {
		p.textf("\n")
		printAttempts(p, d.Attempts)
	}
}

// printAttempts prints attempts as a table, and the last response below it.
func printAttempts(p *page, attempts []api.DeliveryAttempt) {
	p.row("NO", "STARTED", "STATUS", "ERROR", "TOTAL", "DNS", "CONNECT", "TLS", "FIRST BYTE", "ADDRESS")
	for _, a := range attempts {
		t := a.Timings
		p.row(a.Number, a.At, a.Status, a.Error, formatTiming(t.Total), formatTiming(t.DNS), formatTiming(t.Connect),
			formatTiming(t.TLS),
			formatTiming(t.FirstByte), a.RemoteAddr)
	}
	last := attempts[len(attempts)-1]
	if last.Detail != nil {
		p.textf("\n%s\n", cell(last.Detail))
	}
	if last.Response != nil {
		text := strings.TrimRight(strings.ReplaceAll(*last.Response, "\r\n", "\n"), "\n")
		p.textf("\n--- last response\n%s\n", strings.Map(printableLine, text))
	}
}

// formatTiming formats milliseconds; 0 is "-".
func formatTiming(ms float64) string {
	if ms == 0 {
		return "-"
	}
	return secondsOf(ms / 1000).Round(100 * time.Microsecond).String()
}

type webhookReplayCommand struct {
	remote `embed:""`
	Failed bool   `help:"Send all failed webhooks of the organisation again. Needs --since."`
	Since  string `placeholder:"TIME" help:"With --failed: only those that failed since this time, such as 2026-11-20T12:00:00Z, or 24h for the last day."`
	ID     string `arg:"" optional:"" name:"trace" help:"Id of the execution: trc_…"`
}

func (*webhookReplayCommand) Help() string {
	return `The webhook keeps its webhook-id and starts with its first attempt. The command does not wait for the
delivery: see bullpen webhook show.

Examples:

  bullpen webhook replay trc_Dh--7j-V0wlyHpZI_3sX
  bullpen webhook replay --failed --since 2h`
}

func (c *webhookReplayCommand) Run(ctx context.Context, s streams) error {
	if c.Failed == (c.ID != "") || c.Failed != (c.Since != "") {
		return usagef("give either an execution's id, or --failed with --since")
	}
	if c.Failed {
		return c.replayFailed(ctx, s)
	}
	arg := traceArg{c.ID}
	if err := arg.Validate(); err != nil {
		return usageError{err}
	}
	return request(s, &c.remote, func(cl *client.Client) (*api.Delivery, error) {
		return cl.ReplayDelivery(ctx, arg.id())
	}, func(p *page, d *api.Delivery) { p.textf("%s %s\n", d.TraceID, d.Status) })
}

// replayFailed resends failed webhooks, page by page, and shows its progress.
func (c *webhookReplayCommand) replayFailed(ctx context.Context, s streams) error {
	since, err := parseTime(c.Since, time.Now())
	if err != nil {
		return usagef("--since: %w", err)
	}
	return compose(s, &c.remote, func(cl *client.Client) (map[string]int, error) {
		total := 0
		after := ""
		for {
			r, err := cl.ReplayFailed(ctx, since, after)
			if err != nil && total > 0 {
				err = fmt.Errorf("after %d webhooks: %w", total, err)
			}
			if err != nil {
				return nil, err
			}
			total += r.Replayed
			showProgress(s, total, total+r.Left, r.Next == nil)
			if r.Next == nil {
				return map[string]int{"replayed": total}, nil
			}
			after = *r.Next
		}
	}, func(p *page, done map[string]int) { p.textf("%d failed webhooks are sent again\n", done["replayed"]) })
}

// parseTime parses a time, or a duration before now.
func parseTime(text string, now time.Time) (time.Time, error) {
	if at, err := time.Parse(time.RFC3339, text); err == nil {
		return at, nil
	}
	ago, err := proto.ParseDuration(text)
	if err != nil || ago < 0 {
		return time.Time{}, fmt.Errorf("%q is not a time: write 2026-11-20T12:00:00Z, or 24h for a day ago", text)
	}
	return now.Add(-ago), nil
}

// showProgress shows a bar that is redrawn on a terminal, and a line otherwise.
func showProgress(s streams, done, total int, last bool) {
	const width = 40
	if !s.terminal {
		s.errorf("%d of %d", done, total)
		return
	}
	filled := width
	if total > 0 {
		filled = width * done / total
	}
	end := ""
	if last {
		end = "\n"
	}
	_, _ = fmt.Fprintf(s.err, "\r[%s%s] %d of %d\x1b[K%s", strings.Repeat("#", filled), strings.Repeat(".", width-filled),
		done, total, end)
}

type webhookTestCommand struct {
	remote `embed:""`
}

func (*webhookTestCommand) Help() string {
	return "Sends one webhook.test event and prints the attempt. The exit code is 0 if the receiver accepted it."
}

func (c *webhookTestCommand) Run(ctx context.Context, s streams) error {
	failed := false
	err := request(s, &c.remote, func(cl *client.Client) (*api.DeliveryAttempt, error) {
		a, err := cl.TestWebhook(ctx)
		failed = err == nil && a.Error != nil
		return a, err
	}, func(p *page, a *api.DeliveryAttempt) { printAttempts(p, []api.DeliveryAttempt{*a}) })
	if err == nil && failed {
		return exitError{code: exitFailure}
	}
	return err
}

type webhookEndpointsCommand struct {
	remote `embed:""`
}

func (c *webhookEndpointsCommand) Run(ctx context.Context, s streams) error {
	return request(s, &c.remote, func(cl *client.Client) (*api.Endpoints, error) {
		return cl.Endpoints(ctx)
	}, func(p *page, list *api.Endpoints) {
		p.row("URL", "FAILING SINCE", "DISABLED", "REASON")
		for _, e := range list.Endpoints {
			p.row(e.URL, e.FailingSince, e.DisabledAt, e.Reason)
		}
	})
}

type webhookEnableCommand struct {
	remote `embed:""`
	Target string `arg:"" name:"target" help:"The URL, as bullpen webhook endpoints prints it."`
}

func (*webhookEnableCommand) Help() string {
	return "Webhooks that failed in the meantime are not sent again: see bullpen webhook replay --failed."
}

func (c *webhookEnableCommand) Run(ctx context.Context, s streams) error {
	return compose(s, &c.remote, func(cl *client.Client) (map[string]string, error) {
		return map[string]string{"url": c.Target}, cl.EnableEndpoint(ctx, c.Target)
	}, func(p *page, _ map[string]string) { p.textf("%s is enabled\n", c.Target) })
}
