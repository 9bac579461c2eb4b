package main

import (
	"cmp"
	"context"
	"iter"

	"github.com/bullpen-run/bullpen/client"
	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/proto/api"
)

type memberCommands struct {
	Add    memberAddCommand    `cmd:"" help:"Add a member to an organisation (admin)."`
	List   memberListCommand   `cmd:"" help:"List members (admin)."`
	Update memberUpdateCommand `cmd:"" help:"Change the role of a member (admin)."`
	Remove memberRemoveCommand `cmd:"" name:"rm" help:"Remove a member (admin)."`
}

// Flags of members.
type (
	roleFlag struct {
		Role proto.Role `required:"" placeholder:"ROLE" help:"What the person may do: viewer, operator or administrator."`
	}
	globalMemberFlag struct {
		Global bool `help:"Make the administrator one of all organisations and of the server (global admin)."`
	}
	inOrg struct {
		Org string `placeholder:"ORG" help:"Only those of this organisation."`
	}
)

type memberAddCommand struct {
	remote           `embed:""`
	roleFlag         `embed:""`
	globalMemberFlag `embed:""`
	Org              string `required:"" placeholder:"ORG" help:"Organisation of the member."`
	Email            string `xor:"person" required:"" placeholder:"ADDRESS" help:"Address of the person, which the identity provider must have verified."`
	Subject          string `xor:"person" required:"" placeholder:"ID" help:"The person's id at the identity provider, for one that does not verify addresses."`
}

func (*memberAddCommand) Help() string {
	return "The member is the person who signs in first with the address, also if the provider gives the address to " +
		"another one later."
}

func (c *memberAddCommand) Run(ctx context.Context, s streams) error {
	return request(s, &c.remote, func(cl *client.Client) (*api.Member, error) {
		return cl.Admin().Members.Create(ctx, &api.MemberRequest{
			Org: c.Org, Email: c.Email, Subject: c.Subject, MemberSettings: api.MemberSettings{Role: c.Role, Global: c.Global},
		})
	}, func(p *page, m *api.Member) { printMembers(p, *m) })
}

type memberListCommand struct {
	remote `embed:""`
	inOrg  `embed:""`
}

func (c *memberListCommand) Run(ctx context.Context, s streams) error {
	return list(s, &c.remote, func(cl *client.Client) iter.Seq2[api.Member, error] {
		return cl.Admin().Members.List(ctx, c.Org)
	}, func(p *page, list []api.Member) { printMembers(p, list...) })
}

type memberUpdateCommand struct {
	remote           `embed:""`
	roleFlag         `embed:""`
	globalMemberFlag `embed:""`
	ID               string `arg:"" help:"Id of the member: see bullpen member list."`
}

func (*memberUpdateCommand) Help() string { return "Sessions have the new role from then on." }

func (c *memberUpdateCommand) Run(ctx context.Context, s streams) error {
	return request(s, &c.remote, func(cl *client.Client) (*api.Member, error) {
		return cl.Admin().Members.Edit(ctx, c.ID, func(m *api.MemberSettings) { m.Role, m.Global = c.Role, c.Global })
	}, func(p *page, m *api.Member) { printMembers(p, *m) })
}

type memberRemoveCommand struct {
	remote `embed:""`
	ID     string `arg:"" help:"Id of the member: see bullpen member list."`
}

func (*memberRemoveCommand) Help() string {
	return "The member's sessions end, and nothing starts that the member has scheduled. Executions that run go on."
}

func (c *memberRemoveCommand) Run(ctx context.Context, s streams) error {
	return request(s, &c.remote, func(cl *client.Client) (*api.Member, error) {
		return cl.Admin().Members.Remove(ctx, c.ID)
	}, func(p *page, m *api.Member) { printMembers(p, *m) })
}

func printMembers(p *page, list ...api.Member) {
	p.row("ID", "ORG", "EMAIL", "SUBJECT", "ROLE", "CREATED")
	for _, m := range list {
		role := string(m.Role)
		if m.Global {
			role = "global " + role
		}
		p.row(m.ID, m.Org, orDash(m.Email), orDash(m.Subject), role, m.CreatedAt)
	}
}

// orDash returns a text that may be absent.
func orDash(s *string) string {
	if s == nil {
		return "-"
	}
	return cmp.Or(*s, "-")
}
