package main

import (
	"context"
	"encoding/json"
	"fmt"
	"strings"
	"time"

	"github.com/bullpen-run/bullpen/cmd/internal/client"
	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/proto/api"
)

type keyCommands struct {
	Create keyCreateCommand `cmd:"" help:"Create an API key (admin)."`
	List   keyListCommand   `cmd:"" help:"List all API keys (admin)."`
	Revoke keyRevokeCommand `cmd:"" help:"Revoke an API key (admin)."`

	Webhook keyWebhookCommands `cmd:"" help:"Manage the webhook settings of the API key in use."`
}

type keyCreateCommand struct {
	remote     `embed:""`
	Name       string        `required:"" placeholder:"NAME" help:"Name of the key, for people."`
	Org        string        `required:"" placeholder:"ORG" help:"Organisation of the key: a-z 0-9 _ -."`
	Plan       string        `required:"" enum:"free,pro,enterprise" placeholder:"PLAN" help:"Plan of the organisation: free, pro or enterprise."`
	Scopes     []proto.Scope `default:"execute,read,files" enum:"execute,read,files,admin" placeholder:"SCOPE,…" help:"What the key may do: execute, read, files, admin. admin administers the organisation. Default: ${default}."`
	Global     bool          `help:"The scope admin holds for all organisations and for the server."`
	Concurrent *int          `placeholder:"N" help:"Concurrent executions of this key. Default: the limit of the plan."`
	Sandbox    string        `placeholder:"NAME" help:"Sandbox profile of the key. Default: the profile named default."`
	ExpiresIn  time.Duration `placeholder:"DURATION" help:"How long the key works, such as 720h. Default: until it is revoked."`
	Env        []string      `short:"e" sep:"none" placeholder:"NAME=VALUE" help:"Environment variable of every program. It overrides the sandbox profile's, and the request's variables override it. Repeatable."`
	Secret     []string      `sep:"none" placeholder:"NAME[=VARIABLE]" help:"Secret of the organisation that programs get, as a variable or else as a file. A ! at the end masks it in the output. Repeatable."`
}

func (*keyCreateCommand) Help() string {
	return "Prints the key on standard output. The server stores only a hash and cannot show it again."
}

func (c *keyCreateCommand) Run(ctx context.Context, s streams) error {
	env, err := nameValues("-e", c.Env)
	if err != nil {
		return err
	}
	wanted := client.NewKey{
		Name: c.Name, Org: c.Org, Plan: c.Plan, Scopes: c.Scopes, Global: c.Global, Sandbox: c.Sandbox, Concurrent: c.Concurrent, Env: env, Secrets: c.Secret,
	}
	if c.ExpiresIn < 0 {
		return usagef("--expires-in must be positive")
	}
	if c.ExpiresIn > 0 {
		wanted.ExpiresAt = &api.Time{Time: time.Now().Add(c.ExpiresIn)}
	}
	return request(s, &c.remote, func(api *client.Client) (*client.Key, json.RawMessage, error) {
		return decoded(api.CreateKey(ctx, wanted))
	}, func(p *page, k *client.Key) {
		_, _ = fmt.Fprintf(s.err, "Key %s of %s (%s, %s, sandbox %s). It is not shown again:\n", k.ID, k.Org, k.Plan, scopesOf(k), k.Sandbox)
		p.textf("%s\n", k.Secret)
	})
}

// scopesOf returns the scopes of a key for people.
func scopesOf(k *client.Key) string {
	var scopes []string
	for _, s := range k.Scopes {
		if s == proto.ScopeAdmin && k.Global {
			s = "global-admin"
		}
		scopes = append(scopes, string(s))
	}
	return strings.Join(scopes, ",")
}

type keyListCommand struct {
	remote `embed:""`
	Org    string `placeholder:"ORG" help:"Keys of this organisation alone."`
}

func (c *keyListCommand) Run(ctx context.Context, s streams) error {
	return request(s, &c.remote, func(api *client.Client) ([]client.Key, json.RawMessage, error) {
		return decoded(api.Keys(ctx, c.Org))
	}, func(p *page, keys []client.Key) { printKeys(p, keys...) })
}

type keyRevokeCommand struct {
	remote `embed:""`
	ID     string `arg:"" help:"Id of the key, as bullpen key list prints it."`
}

func (c *keyRevokeCommand) Run(ctx context.Context, s streams) error {
	return request(s, &c.remote, func(api *client.Client) (*client.Key, json.RawMessage, error) {
		return decoded(api.RevokeKey(ctx, c.ID))
	}, func(p *page, k *client.Key) { printKeys(p, *k) })
}

func printKeys(p *page, keys ...client.Key) {
	p.row("ID", "NAME", "ORG", "PLAN", "SCOPES", "SANDBOX", "CONCURRENT", "KEY", "CREATED", "EXPIRES", "REVOKED")
	for _, k := range keys {
		p.row(k.ID, k.Name, k.Org, k.Plan, scopesOf(&k), k.Sandbox, k.Concurrent, k.Hint, k.CreatedAt, k.ExpiresAt, k.RevokedAt)
	}
}
