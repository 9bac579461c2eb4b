package main

import (
	"cmp"
	"context"
	"iter"

	"github.com/bullpen-run/bullpen/client"
	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/proto/api"
)

type orgCommands struct {
	Create orgCreateCommand `cmd:"" help:"Create an organisation (global admin)."`
	List   orgListCommand   `cmd:"" help:"List the organisations that the API key may see (admin)."`
	Show   orgShowCommand   `cmd:"" help:"Show an organisation (admin)."`
	Update orgUpdateCommand `cmd:"" help:"Change an organisation (global admin)."`
	Data   orgDataCommand   `cmd:"" help:"List the stored data of an organisation (global admin)."`
	Delete orgDeleteCommand `cmd:"" help:"Delete an organisation with all its data (global admin)."`
}

// orgFlags are the settings of an organisation.
type orgFlags struct {
	Title *string `placeholder:"TITLE" help:"Name for people."`
	Plan  *string `placeholder:"PLAN" help:"Plan, which limits all API keys of the organisation together: see bullpen plan list."`
}

func (f *orgFlags) apply(o *api.OrgRequest) {
	set(&o.Title, f.Title)
	set(&o.Plan, f.Plan)
}

// set stores the value of a flag, if it was given.
func set[T any](to, flag *T) {
	if flag != nil {
		*to = *flag
	}
}

type orgCreateCommand struct {
	remote   `embed:""`
	orgFlags `embed:""`
	Name     string `arg:"" help:"Name of the organisation: a-z 0-9 _ -."`
}

func (*orgCreateCommand) Help() string {
	return `Without --plan, the organisation has no limits of its own.

Example:

  bullpen org create acme --title 'Acme Ltd' --plan small`
}

func (c *orgCreateCommand) Run(ctx context.Context, s streams) error {
	wanted := &api.OrgRequest{Name: c.Name}
	c.apply(wanted)
	return request(s, &c.remote, func(cl *client.Client) (*api.Org, error) {
		return cl.Admin().Orgs.Create(ctx, wanted)
	}, func(p *page, o *api.Org) { printOrgs(p, *o) })
}

type orgListCommand struct {
	remote `embed:""`
}

func (c *orgListCommand) Run(ctx context.Context, s streams) error {
	return list(s, &c.remote, func(cl *client.Client) iter.Seq2[api.Org, error] {
		return cl.Admin().Orgs.List(ctx, "")
	}, func(p *page, orgs []api.Org) { printOrgs(p, orgs...) })
}

type orgShowCommand struct {
	remote `embed:""`
	Name   string `arg:"" help:"Name of the organisation."`
}

func (*orgShowCommand) Help() string {
	return "Also shows what the organisation has used of the monthly quotas of its plan; --json does not: see bullpen " +
		"usage --org."
}

func (c *orgShowCommand) Run(ctx context.Context, s streams) error {
	var usage *api.Usage
	return request(s, &c.remote, func(cl *client.Client) (*api.Org, error) {
		if !c.JSON {
			var err error
			if usage, err = cl.Usage(ctx, client.UsageFilter{Org: c.Name, GroupBy: []proto.UsageGroup{}}); err != nil {
				return nil, err
			}
		}
		return cl.Admin().Orgs.Get(ctx, c.Name)
	}, func(p *page, o *api.Org) {
		printOrgs(p, *o)
		printQuotas(p, usage.Quotas)
	})
}

type orgUpdateCommand struct {
	remote    `embed:""`
	orgFlags  `embed:""`
	Suspended *bool  `negatable:"" help:"Refuse all requests of the organisation's API keys, or with --no-suspended accept them again."`
	Name      string `arg:"" help:"Name of the organisation."`
}

func (*orgUpdateCommand) Help() string {
	return "Changes what is given, and nothing if somebody else changes the organisation at the same time. What was " +
		"accepted before goes on."
}

func (c *orgUpdateCommand) Run(ctx context.Context, s streams) error {
	return request(s, &c.remote, func(cl *client.Client) (*api.Org, error) {
		return cl.Admin().Orgs.Edit(ctx, c.Name, func(o *api.OrgRequest) {
			c.apply(o)
			set(&o.Suspended, c.Suspended)
		})
	}, func(p *page, o *api.Org) { printOrgs(p, *o) })
}

func printOrgs(p *page, orgs ...api.Org) {
	p.row("NAME", "TITLE", "PLAN", "SUSPENDED", "CREATED")
	for _, o := range orgs {
		var suspended any = o.Suspended
		if o.DeletingAt != nil {
			suspended = "being deleted"
		}
		p.row(o.Name, cmp.Or(o.Title, "-"), o.Plan, suspended, o.CreatedAt)
	}
}
