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

type lsCommand struct {
	remote    `embed:""`
	Status    *string  `short:"s" placeholder:"STATUS" help:"Only executions with this status: queued, running, success, failed, timeout, oom, seccomp or cancelled."`
	Language  *string  `name:"lang" short:"l" placeholder:"LANG" help:"Only programs in this language."`
	Mode      *string  `placeholder:"MODE" help:"Only executions submitted in this mode: inline, streaming or webhook, which is async."`
	Thread    *string  `short:"t" placeholder:"THREAD" help:"Only executions in this thread."`
	KeyID     *string  `name:"key-id" placeholder:"KEY" help:"Only executions under the API key of this id."`
	Schedule  *string  `placeholder:"SCHEDULE" help:"Only executions that this schedule started."`
	Batch     *string  `placeholder:"BATCH" help:"Only executions of this batch."`
	Pipeline  *string  `placeholder:"RUN" help:"Only executions of this run of a pipeline."`
	RequestID *string  `name:"request-id" placeholder:"ID" help:"Only executions that this request submitted."`
	Metadata  []string `short:"m" sep:"none" placeholder:"NAME=VALUE" help:"Only executions with this metadata. Repeatable."`
	After     moment   `placeholder:"TIME" help:"Only executions created at this time or later: RFC 3339, or how long ago, such as 2h."`
	Before    moment   `placeholder:"TIME" help:"Only executions created before this time, likewise."`
	Limit     int      `short:"n" default:"20" placeholder:"N" help:"Number of executions. Default: ${default}."`
	Watch     bool     `help:"Print the list every 2 seconds until interrupted."`
}

// moment is a time, absolute or relative to now.
type moment struct{ time.Time }

// UnmarshalText parses a time of RFC 3339, or how long it is ago.
func (m *moment) UnmarshalText(text []byte) (err error) {
	if ago, err := proto.ParseDuration(string(text)); err == nil && ago >= 0 {
		m.Time = time.Now().Add(-ago)
		return nil
	}
	if m.Time, err = time.Parse(time.RFC3339Nano, string(text)); err != nil {
		return fmt.Errorf("%q is neither a time such as 2026-11-23T20:00:00Z nor how long ago, such as 2h", text)
	}
	return nil
}

// Validate checks the flags before anything is sent.
func (c *lsCommand) Validate() error {
	if c.Limit < 1 {
		return fmt.Errorf("--limit must be at least 1")
	}
	return nil
}

func (*lsCommand) Help() string {
	return `Lists the executions of the organisation, the newest first. All filters must match.

Examples:

  bullpen ls --status failed --after 24h
  bullpen ls --metadata customer=c-17 --metadata env=prod --limit 100
  bullpen wait $(bullpen ls --status running --json | jq -r '.executions[].trace_id')`
}

// filter returns the filter for the flags. It refuses an empty value, which may come from an unset
// variable in a script.
func (c *lsCommand) filter() (client.ExecutionFilter, error) {
	f := client.ExecutionFilter{CreatedAfter: c.After.Time, CreatedBefore: c.Before.Time}
	var err error
	if f.Metadata, err = nameValues("-m", c.Metadata); err != nil {
		return f, err
	}
	for _, flag := range []struct {
		name  string
		value *string
		to    *string
	}{
		{"--status", c.Status, (*string)(&f.Status)},
		{"--lang", c.Language, (*string)(&f.Language)},
		{"--mode", c.Mode, (*string)(&f.Mode)},
		{"--thread", c.Thread, &f.ThreadID},
		{"--key-id", c.KeyID, &f.KeyID},
		{"--schedule", c.Schedule, &f.Schedule},
		{"--batch", c.Batch, &f.Batch},
		{"--pipeline", c.Pipeline, &f.Pipeline},
		{"--request-id", c.RequestID, &f.RequestID},
	} {
		if flag.value != nil && *flag.value == "" {
			return f, usagef("%s is empty", flag.name)
		}
		set(flag.to, flag.value)
	}
	return f, nil
}

func (c *lsCommand) Run(ctx context.Context, s streams) error {
	filter, err := c.filter()
	if err != nil {
		return err
	}
	for {
		err := compose(s, &c.remote, func(cl *client.Client) (*api.Executions, error) {
			list, err := cl.Executions(ctx, filter, c.Limit)
			if err == nil && c.Watch {
				err = s.clear()
			}
			if err == nil && !list.Complete {
				s.errorf("the index of executions is behind; the newest changes may be missing")
			}
			return list, err
		}, printExecutions)
		if err != nil || !c.Watch {
			return err
		}
		select {
		case <-ctx.Done():
			return context.Cause(ctx)
		case <-time.After(watchEvery):
		}
	}
}

func printExecutions(p *page, list *api.Executions) {
	p.row("TRACE", "STATUS", "EXIT", "LANGUAGE", "CREATED", "DURATION", "THREAD", "ERROR")
	for i := range list.Executions {
		e := &list.Executions[i]
		problem := cell(e.ErrorCode)
		if e.WaitingFor != nil {
			problem = "no worker with " + strings.Join(e.WaitingFor.Capabilities, ", ")
		}
		p.row(e.TraceID, e.Status, e.ExitCode, e.Language, e.CreatedAt, milliseconds(e.DurationMS), e.ThreadID, problem)
	}
}
