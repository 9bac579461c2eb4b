package main

import (
	"context"
	"errors"
	"fmt"
	"iter"
	"strings"

	"github.com/bullpen-run/bullpen/client"
	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/proto/api"
)

type secretCommands struct {
	Set       secretSetCommand       `cmd:"" help:"Store a secret of an organisation (admin)."`
	List      secretListCommand      `cmd:"" help:"List the secrets of an organisation, without their values (admin)."`
	Show      secretShowCommand      `cmd:"" help:"Show a secret, without its value (admin)."`
	Delete    secretDeleteCommand    `cmd:"" help:"Remove a secret (admin)."`
	RotateKey secretRotateKeyCommand `cmd:"" name:"rotate-key" help:"Rotate the operator's key, which protects all stored secrets (admin)."`
}

// ofOrg names the organisation of a secret.
type ofOrg struct {
	Org string `placeholder:"ORG" help:"Organisation of the secret. Default: the API key's."`
}

type secretSetCommand struct {
	remote `embed:""`
	ofOrg  `embed:""`
	Name   string   `arg:"" help:"Name of the secret: A-Z a-z 0-9 _ -."`
	File   string   `short:"f" default:"-" placeholder:"FILE" help:"File with the value; - for standard input, the default. A line break at the end is not part of the value."`
	Host   []string `sep:"none" placeholder:"HOST" help:"Host to whose requests the value is added as a header, so that programs never have it: example.com over HTTPS, *.example.com:8443, or http://example.com without encryption. Repeatable."`
	Header string   `placeholder:"NAME: TEMPLATE" help:"The header for --host, with {{value}} in the place of the value."`
}

func (*secretSetCommand) Help() string {
	return `Replaces a secret of the same name. Programs get it if their API key or its sandbox names it. The value is
never an argument, which other users of the machine could read.

With --host and --header, programs never get the value: the worker adds it to their requests to these hosts. A secret
keeps its hosts when it is replaced without them.

Examples:

  bullpen secret set TOKEN < token.txt
  bullpen secret set DEPLOY_KEY -f ~/.ssh/id_ed25519 --org acme
  bullpen secret set API_TOKEN --host api.example.com --header 'Authorization: Bearer {{value}}' < token.txt`
}

// injection returns the injection that the flags describe, or nil.
func (c *secretSetCommand) injection() (*proto.Injection, error) {
	if len(c.Host) == 0 && c.Header == "" {
		return nil, nil
	}
	header, template, ok := strings.Cut(c.Header, ":")
	if len(c.Host) == 0 || !ok {
		return nil, errors.New("--host and --header go together, as in --host api.example.com --header 'Authorization: " +
			"Bearer {{value}}'")
	}
	i := &proto.Injection{Hosts: c.Host, Header: strings.TrimSpace(header), Template: strings.TrimSpace(template)}
	return i, i.Check("injection")
}

func (c *secretSetCommand) Run(ctx context.Context, s streams) error {
	injection, err := c.injection()
	if err != nil {
		return err
	}
	value, err := readText(c.File, s.in, proto.MaxSecretBytes+2)
	if err != nil {
		return fmt.Errorf("read the value: %w", err)
	}
	value = strings.TrimSuffix(strings.TrimSuffix(value, "\n"), "\r")
	return request(s, &c.remote, func(cl *client.Client) (*api.Secret, error) {
		return cl.Admin().PutSecret(ctx, c.Org, c.Name, value, injection)
	}, func(p *page, secret *api.Secret) { printSecrets(p, *secret) })
}

type secretListCommand struct {
	remote `embed:""`
	ofOrg  `embed:""`
}

func (c *secretListCommand) Run(ctx context.Context, s streams) error {
	return list(s, &c.remote, func(cl *client.Client) iter.Seq2[api.Secret, error] {
		return cl.Admin().Secrets(ctx, c.Org)
	}, func(p *page, list []api.Secret) { printSecrets(p, list...) })
}

type secretShowCommand struct {
	remote `embed:""`
	ofOrg  `embed:""`
	Name   string `arg:"" help:"Name of the secret."`
}

func (c *secretShowCommand) Run(ctx context.Context, s streams) error {
	return request(s, &c.remote, func(cl *client.Client) (*api.Secret, error) {
		return cl.Admin().Secret(ctx, c.Org, c.Name)
	}, func(p *page, secret *api.Secret) { printSecrets(p, *secret) })
}

type secretDeleteCommand struct {
	remote `embed:""`
	ofOrg  `embed:""`
	Name   string `arg:"" help:"Name of the secret."`
}

func (*secretDeleteCommand) Help() string {
	return "API keys and sandbox profiles that name the secret execute nothing until there is one of that name again."
}

func (c *secretDeleteCommand) Run(ctx context.Context, s streams) error {
	cl, err := c.client(s)
	if err != nil {
		return err
	}
	return cl.Admin().DeleteSecret(ctx, c.Org, c.Name)
}

func printSecrets(p *page, list ...api.Secret) {
	p.row("NAME", "ORG", "BYTES", "CREATED", "UPDATED", "INJECTED")
	for _, s := range list {
		injected := "-"
		if s.Injection != nil {
			injected = s.Injection.Header + " of " + strings.Join(s.Injection.Hosts, ", ")
		}
		p.row(s.Name, s.Org, s.Bytes, s.CreatedAt, s.UpdatedAt, injected)
	}
}

type secretRotateKeyCommand struct {
	remote `embed:""`
}

func (*secretRotateKeyCommand) Help() string {
	return `Wraps the key that encrypts all secrets again, with the keys that the server finds in its --secrets-key now,
or with its --secrets-command. See docs/guides/secrets.md for the steps of a rotation.`
}

func (c *secretRotateKeyCommand) Run(ctx context.Context, s streams) error {
	return request(s, &c.remote, func(cl *client.Client) (*api.RotatedKey, error) {
		return cl.Admin().RotateSecretsKey(ctx)
	}, func(p *page, k *api.RotatedKey) { p.textf("wrapped for %s\n", k.WrappedFor) })
}
