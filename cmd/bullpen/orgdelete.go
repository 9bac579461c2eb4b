package main

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"os"
	"strings"
	"time"

	"github.com/bullpen-run/bullpen/client"
	"github.com/bullpen-run/bullpen/proto/api"
)

// orgDataKept describes what a list of an organisation's data omits.
const orgDataKept = `Not in the list: audit records and log lines, which name the organisation; earlier backups;
copies in the caches of workers, until they are evicted; old versions in a bucket with versioning. See
docs/guides/admin.md.`

type orgDataCommand struct {
	remote `embed:""`
	Name   string `arg:"" help:"Name of the organisation, which need not exist."`
}

func (*orgDataCommand) Help() string {
	return "Counts in the stores themselves. After the deletion of an organisation nothing is left, which " +
		"proves it.\n\n" + orgDataKept
}

func (c *orgDataCommand) Run(ctx context.Context, s streams) error {
	return request(s, &c.remote, func(cl *client.Client) (*api.OrgData, error) {
		return cl.Admin().OrgData(ctx, c.Name)
	}, printOrgData)
}

func printOrgData(p *page, d *api.OrgData) {
	p.row("KIND", "COUNT", "BYTES")
	for _, kind := range d.Data {
		var bytes any = "-"
		if kind.Bytes > 0 {
			bytes = kind.Bytes
		}
		p.row(kind.Kind, kind.Count, bytes)
	}
	p.row("total", d.Total, "")
}

type orgDeleteCommand struct {
	remote `embed:""`
	Yes    bool   `xor:"mode" help:"Do not ask."`
	DryRun bool   `xor:"mode" help:"Show what would be deleted, and delete nothing."`
	Wait   bool   `help:"Wait until everything is gone, and show that."`
	Name   string `arg:"" help:"Name of the organisation."`
}

func (*orgDeleteCommand) Help() string {
	return `Shows the stored data, asks for the name of the organisation, and deletes it: API keys are refused at once,
executions cancelled, and all data removed. This cannot be undone. Without a terminal, --yes is required.

` + orgDataKept
}

// orgDeletePause is the time between two looks at what is left.
const orgDeletePause = time.Second

func (c *orgDeleteCommand) Run(ctx context.Context, s streams) error {
	cl, err := c.client(s)
	if err != nil {
		return err
	}
	_, tag, err := cl.Admin().OrgTag(ctx, c.Name)
	if err != nil {
		return err
	}
	data, err := cl.Admin().OrgData(ctx, c.Name)
	if err != nil {
		return err
	}
	if !c.JSON || c.DryRun {
		if err := show(s, c.JSON, data, printOrgData); err != nil {
			return err
		}
	}
	if c.DryRun {
		return nil
	}
	if err := c.confirm(s); err != nil {
		return err
	}
	deleting, err := cl.Admin().DeleteOrg(ctx, c.Name, tag)
	switch {
	case err != nil:
		return err
	case c.Wait:
		return c.follow(ctx, s, cl)
	default:
		return show(s, c.JSON, deleting, func(p *page, o *api.Org) {
			p.textf("%s is being deleted; see bullpen org data %s\n", o.Name, o.Name)
		})
	}
}

// confirm asks for the name of the organisation, unless --yes is given.
func (c *orgDeleteCommand) confirm(s streams) error {
	if c.Yes {
		return nil
	}
	if f, ok := s.in.(*os.File); !ok || !isTerminal(f) || !s.terminal {
		return errors.New("nothing was deleted: there is no terminal to ask on; give --yes")
	}
	_, _ = fmt.Fprintf(s.err, "This cannot be undone. Type the name of the organisation to delete it: ")
	answer, err := bufio.NewReader(s.in).ReadString('\n')
	if err != nil || strings.TrimSpace(answer) != c.Name {
		return errors.New("nothing was deleted: that was not the name")
	}
	return nil
}

// follow waits until nothing is left, and shows that.
func (c *orgDeleteCommand) follow(ctx context.Context, s streams, cl *client.Client) error {
	last := int64(-1)
	for {
		data, err := cl.Admin().OrgData(ctx, c.Name)
		if err != nil {
			return err
		}
		if data.Total == 0 {
			return show(s, c.JSON, data, printOrgData)
		}
		if data.Total != last {
			s.progressf("%d left", data.Total)
			last = data.Total
		}
		select {
		case <-ctx.Done():
			return context.Cause(ctx)
		case <-time.After(orgDeletePause):
		}
	}
}
