package main

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"strings"
	"time"

	"github.com/bullpen-run/bullpen/cmd/internal/client"
)

// orgDataKept says what a list of an organisation's data does not have.
const orgDataKept = `The list does not have: the audit record and the server's log, which name the organisation; backups that were made before; copies of
files in the caches of workers, until they are evicted; objects that the blob store itself keeps, such as old versions in a bucket
with versioning. See docs/admin.md.`

type orgDataCommand struct {
	remote `embed:""`
	Name   string `arg:"" help:"Name of the organisation, which need not exist."`
}

func (*orgDataCommand) Help() string {
	return "Counts in the stores themselves. After the deletion of an organisation nothing is left, which proves it.\n\n" + orgDataKept
}

func (c *orgDataCommand) Run(ctx context.Context, s streams) error {
	return request(s, &c.remote, func(api *client.Client) (*client.OrgData, json.RawMessage, error) {
		return api.OrgData(ctx, c.Name)
	}, printOrgData)
}

func printOrgData(p *page, d *client.OrgData) {
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
	return `Shows what is stored of the organisation, asks for its name, and deletes it with all its data: its API keys are refused at once, its
executions are cancelled, and everything that is stored of it is removed. This cannot be undone. Without a terminal to ask on, give --yes.

` + orgDataKept
}

// orgDeletePause is the time between two looks at what is left.
const orgDeletePause = time.Second

func (c *orgDeleteCommand) Run(ctx context.Context, s streams) error {
	api, err := c.client(s)
	if err != nil {
		return err
	}
	var org client.Org
	tag, err := api.ReadObject(ctx, client.OrgsPath+"/"+c.Name, &org)
	if err != nil {
		return err
	}
	data, _, err := api.OrgData(ctx, c.Name)
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
	deleting, err := api.DeleteOrg(ctx, c.Name, tag)
	switch {
	case err != nil:
		return err
	case c.Wait:
		return c.follow(ctx, s, api)
	default:
		return show(s, c.JSON, deleting, func(p *page, o *client.Org) {
			p.textf("%s is being deleted; see bullpen org data %s\n", o.Name, o.Name)
		})
	}
}

// confirm asks for the name of the organisation, unless the user has said yes.
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
func (c *orgDeleteCommand) follow(ctx context.Context, s streams, api *client.Client) error {
	last := int64(-1)
	for {
		data, _, err := api.OrgData(ctx, c.Name)
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
