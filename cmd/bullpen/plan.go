package main

import (
	"cmp"
	"context"
	"fmt"
	"iter"
	"strings"

	"github.com/bullpen-run/bullpen/client"
	"github.com/bullpen-run/bullpen/proto"
)

type planCommands struct {
	Create planCreateCommand `cmd:"" help:"Create a plan (global admin)."`
	List   planListCommand   `cmd:"" help:"List all plans (admin)."`
	Show   planShowCommand   `cmd:"" help:"Show a plan (admin)."`
	Update planUpdateCommand `cmd:"" help:"Change a plan, also a built-in one (global admin)."`
	Rm     planRmCommand     `cmd:"" help:"Remove a plan that no organisation and no valid key has (global admin)."`
}

// planFlags are the limits of a plan.
type planFlags struct {
	Title       *string `placeholder:"TITLE" help:"Name in messages. Default: the name."`
	Concurrent  *int    `placeholder:"N" help:"Concurrent executions of the organisation; 0 for no limit, the default."`
	Sandboxes   *int    `placeholder:"N" help:"Live sandboxes of the organisation that are active at once; 0 for no limit, the default."`
	MaxQueued   *int    `placeholder:"N" help:"Async executions of the organisation that wait; 0 for no limit, the default."`
	MaxTimeout  *int    `placeholder:"SECONDS" help:"Longest timeout that an execution may ask for; 0 for 86400, the default."`
	Weight      *int    `placeholder:"N" help:"Share of the slots, relative to organisations of weight 1. Default: 1."`
	RequestRate *int    `placeholder:"N" help:"Requests that each API key may send in a minute; 0 for no limit, the default."`
	Streaming   *bool   `negatable:"" help:"Whether executions may be streamed. Default: yes."`
	Async       *bool   `negatable:"" help:"Whether executions may be asynchronous. Default: yes."`
	Next        *string `placeholder:"PLAN" help:"Plan to suggest in messages when a limit is reached, if the server has an --upgrade-url. Empty for none, the default."`

	CPUSecondsSoft       *int64       `placeholder:"SECONDS" help:"CPU time in a month from which answers warn; 0 for no limit, the default."`
	CPUSecondsHard       *int64       `placeholder:"SECONDS" help:"The same, from which executions are refused."`
	MemoryMiBSecondsSoft *int64       `name:"memory-mib-seconds-soft" placeholder:"MIBSECONDS" help:"Memory times duration in a month from which answers warn."`
	MemoryMiBSecondsHard *int64       `name:"memory-mib-seconds-hard" placeholder:"MIBSECONDS" help:"The same, from which executions are refused."`
	SandboxSecondsSoft   *int64       `placeholder:"SECONDS" help:"Time for which live sandboxes run in a month from which answers warn."`
	SandboxSecondsHard   *int64       `placeholder:"SECONDS" help:"The same, from which sandboxes do not start."`
	StoredBytesSoft      *proto.Bytes `placeholder:"SIZE" help:"Bytes stored, such as 10GiB, from which answers warn."`
	StoredBytesHard      *proto.Bytes `placeholder:"SIZE" help:"The same, from which executions and new files are refused."`
}

func (f *planFlags) apply(p *proto.Plan) {
	set(&p.Title, f.Title)
	set(&p.Concurrent, f.Concurrent)
	set(&p.MaxQueued, f.MaxQueued)
	set(&p.Sandboxes, f.Sandboxes)
	set(&p.MaxTimeout, f.MaxTimeout)
	set(&p.Weight, f.Weight)
	set(&p.RequestRate, f.RequestRate)
	set(&p.Streaming, f.Streaming)
	set(&p.Async, f.Async)
	set(&p.Next, f.Next)
	m := &p.Monthly
	set(&m.CPUSeconds.Soft, f.CPUSecondsSoft)
	set(&m.CPUSeconds.Hard, f.CPUSecondsHard)
	set(&m.MemoryMiBSeconds.Soft, f.MemoryMiBSecondsSoft)
	set(&m.MemoryMiBSeconds.Hard, f.MemoryMiBSecondsHard)
	set(&m.SandboxSeconds.Soft, f.SandboxSecondsSoft)
	set(&m.SandboxSeconds.Hard, f.SandboxSecondsHard)
	set(&m.StoredBytes.Soft, (*int64)(f.StoredBytesSoft))
	set(&m.StoredBytes.Hard, (*int64)(f.StoredBytesHard))
}

type planCreateCommand struct {
	remote    `embed:""`
	planFlags `embed:""`
	Name      string `arg:"" help:"Name of the plan: a-z 0-9 _ -."`
}

func (*planCreateCommand) Help() string {
	return `Example:

  bullpen plan create small --concurrent 4 --max-queued 1000`
}

func (c *planCreateCommand) Run(ctx context.Context, s streams) error {
	wanted := &proto.Plan{Name: c.Name, Weight: 1, Streaming: true, Async: true}
	c.apply(wanted)
	return request(s, &c.remote, func(cl *client.Client) (*proto.Plan, error) {
		return cl.Admin().Plans.Create(ctx, wanted)
	}, func(p *page, plan *proto.Plan) { printPlans(p, *plan) })
}

type planListCommand struct {
	remote `embed:""`
}

func (c *planListCommand) Run(ctx context.Context, s streams) error {
	return list(s, &c.remote, func(cl *client.Client) iter.Seq2[proto.Plan, error] {
		return cl.Admin().Plans.List(ctx, "")
	}, func(p *page, plans []proto.Plan) { printPlans(p, plans...) })
}

type planShowCommand struct {
	remote `embed:""`
	Name   string `arg:"" help:"Name of the plan."`
}

func (c *planShowCommand) Run(ctx context.Context, s streams) error {
	return request(s, &c.remote, func(cl *client.Client) (*proto.Plan, error) {
		return cl.Admin().Plans.Get(ctx, c.Name)
	}, func(p *page, plan *proto.Plan) { printPlans(p, *plan) })
}

type planUpdateCommand struct {
	remote    `embed:""`
	planFlags `embed:""`
	Name      string `arg:"" help:"Name of the plan."`
}

func (*planUpdateCommand) Help() string {
	return "Changes what is given, and nothing if somebody else changes the plan at the same time. It applies to " +
		"requests from then on."
}

func (c *planUpdateCommand) Run(ctx context.Context, s streams) error {
	return request(s, &c.remote, func(cl *client.Client) (*proto.Plan, error) {
		return cl.Admin().Plans.Edit(ctx, c.Name, c.apply)
	}, func(p *page, plan *proto.Plan) { printPlans(p, *plan) })
}

type planRmCommand struct {
	remote `embed:""`
	Name   string `arg:"" help:"Name of the plan."`
}

func (*planRmCommand) Help() string {
	return "Removing a changed built-in plan restores its built-in form."
}

func (c *planRmCommand) Run(ctx context.Context, s streams) error {
	return request(s, &c.remote, func(cl *client.Client) (*proto.Plan, error) {
		return cl.Admin().Plans.Remove(ctx, c.Name)
	}, func(p *page, plan *proto.Plan) { p.textf("%s is removed\n", plan.Name) })
}

func printPlans(p *page, plans ...proto.Plan) {
	p.row("NAME", "TITLE", "CONCURRENT", "QUEUED", "TIMEOUT", "RATE", "WEIGHT", "STREAMING", "ASYNC", "NEXT")
	limit := func(n int) any {
		if n == 0 {
			return "-"
		}
		return n
	}
	for _, x := range plans {
		p.row(x.Name, x.Title, limit(x.Concurrent), limit(x.MaxQueued), limit(x.MaxTimeout), limit(x.RequestRate), x.Weight,
			x.Streaming, x.Async, cmp.Or(x.Next, "-"))
	}
	for _, x := range plans {
		for _, q := range x.Monthly.Uses(&proto.UsageMonth{}) {
			p.textf("%s, in a month: %s %s\n", x.Name, q.Name, limitsText(q.Soft, q.Hard))
		}
	}
}

// limitsText returns the limits of a quota; 0 is none.
func limitsText(soft, hard int64) string {
	var limits []string
	if soft > 0 {
		limits = append(limits, fmt.Sprint("warns from ", soft))
	}
	if hard > 0 {
		limits = append(limits, fmt.Sprint("ends at ", hard))
	}
	return strings.Join(limits, ", ")
}
