package main

import (
	"context"
	"iter"

	"github.com/bullpen-run/bullpen/client"
	"github.com/bullpen-run/bullpen/proto/api"
)

type sessionCommands struct {
	List sessionListCommand `cmd:"" help:"List the sessions of browsers (admin)."`
	End  sessionEndCommand  `cmd:"" help:"End a session (admin)."`
}

type sessionListCommand struct {
	remote `embed:""`
	inOrg  `embed:""`
}

func (c *sessionListCommand) Run(ctx context.Context, s streams) error {
	return list(s, &c.remote, func(cl *client.Client) iter.Seq2[api.Session, error] {
		return cl.Admin().Sessions(ctx, c.Org)
	}, func(p *page, list []api.Session) {
		p.row("ID", "ORG", "NAME", "CREATED", "USED", "EXPIRES", "BROWSER")
		for _, s := range list {
			p.row(s.ID, s.Org, s.Name, s.CreatedAt, s.UsedAt, s.ExpiresAt, s.UserAgent)
		}
	})
}

type sessionEndCommand struct {
	remote `embed:""`
	ID     string `arg:"" help:"Id of the session: see bullpen session list."`
}

func (*sessionEndCommand) Help() string {
	return `Every gateway refuses the session within a second. A person whose role should end, too, is removed with
bullpen member rm.

Example:

  bullpen session end ses_0123456789abcdef01`
}

func (c *sessionEndCommand) Run(ctx context.Context, s streams) error {
	cl, err := c.client(s)
	if err != nil {
		return err
	}
	return cl.Admin().EndSession(ctx, c.ID)
}

// inOrg is the organisation flag of lists.
type inOrg struct {
	Org string `placeholder:"ORG" help:"Only those of this organisation."`
}
