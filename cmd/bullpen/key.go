package main

import (
	"context"
	"fmt"
	"io"
	"strconv"
	"text/tabwriter"

	"github.com/bullpen-run/bullpen/cmd/internal/client"
	"github.com/bullpen-run/bullpen/proto"
)

type keyCommands struct {
	Create keyCreateCommand `cmd:"" help:"Make an API key. It is shown once."`
	List   keyListCommand   `cmd:"" help:"List all API keys, without the keys themselves."`
	Revoke keyRevokeCommand `cmd:"" help:"Make an API key invalid, for good."`

	Webhook keyWebhookCommands `cmd:"" help:"Show, set, rotate and remove the webhook of the key that asks."`
}

type keyCreateCommand struct {
	remote     `embed:""`
	Name       string       `required:"" placeholder:"NAME" help:"What people call the key."`
	Org        string       `required:"" placeholder:"ORG" help:"The organisation it belongs to: a-z 0-9 _ -."`
	Plan       string       `required:"" enum:"free,pro,enterprise" placeholder:"PLAN" help:"Its limits: free, pro or enterprise."`
	Rights     proto.Rights `default:"execute" enum:"execute,all" placeholder:"RIGHTS" help:"What it may do: execute, or all, which adds the administration (${default})."`
	Concurrent *int         `placeholder:"N" help:"How many executions may run at once with it, at most what the plan allows the organisation. Without it, only that limit holds."`
	Sandbox    string       `placeholder:"NAME" help:"The sandbox profile it is bound to, see bullpen sandbox. Without it, the one named default."`
}

// Run carries the command out.
func (c *keyCreateCommand) Run(ctx context.Context, io streams) error {
	api, err := c.client()
	if err != nil {
		return err
	}
	k, err := api.CreateKey(ctx, client.NewKey{Name: c.Name, Org: c.Org, Plan: c.Plan, Rights: c.Rights, Sandbox: c.Sandbox, Concurrent: c.Concurrent})
	if err != nil {
		return err
	}
	if c.JSON {
		return printJSON(io.out, k)
	}
	_, _ = fmt.Fprintf(io.err, "Key %s of %s (%s, %s, sandbox %s). It is not shown again:\n", k.ID, k.Org, k.Plan, k.Rights, k.Sandbox)
	_, err = fmt.Fprintln(io.out, k.Secret)
	return err
}

type keyListCommand struct {
	remote `embed:""`
}

// Run carries the command out.
func (c *keyListCommand) Run(ctx context.Context, io streams) error {
	api, err := c.client()
	if err != nil {
		return err
	}
	keys, err := api.Keys(ctx)
	if err != nil {
		return err
	}
	if c.JSON {
		return printJSON(io.out, append([]client.Key{}, keys...)) // an empty list rather than null
	}
	return printKeys(io.out, keys)
}

type keyRevokeCommand struct {
	remote `embed:""`
	ID     string `arg:"" help:"The key's id, as bullpen key list shows it."`
}

// Run carries the command out.
func (c *keyRevokeCommand) Run(ctx context.Context, io streams) error {
	api, err := c.client()
	if err != nil {
		return err
	}
	k, err := api.RevokeKey(ctx, c.ID)
	if err != nil {
		return err
	}
	if c.JSON {
		return printJSON(io.out, k)
	}
	return printKeys(io.out, []client.Key{*k})
}

func printKeys(w io.Writer, keys []client.Key) error {
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	_, _ = fmt.Fprintln(t, "ID\tNAME\tORG\tPLAN\tRIGHTS\tSANDBOX\tCONCURRENT\tKEY\tCREATED\tREVOKED") // Flush gives the error
	for _, k := range keys {
		revoked := "-"
		if k.RevokedAt != nil {
			revoked = k.RevokedAt.Local().Format(timeLayout)
		}
		concurrent := "-"
		if k.Concurrent != nil {
			concurrent = strconv.Itoa(*k.Concurrent)
		}
		_, _ = fmt.Fprintf(t, "%s\t%s\t%s\t%s\t%s\t%s\t%s\t%s\t%s\t%s\n", k.ID, k.Name, k.Org, k.Plan, k.Rights, k.Sandbox, concurrent, k.Hint,
			k.CreatedAt.Local().Format(timeLayout), revoked)
	}
	return t.Flush()
}
