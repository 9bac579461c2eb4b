package main

import (
	"context"
	"encoding/json"

	"github.com/bullpen-run/bullpen/cmd/internal/client"
)

type secretCommands struct {
	RotateKey secretRotateKeyCommand `cmd:"" name:"rotate-key" help:"Rotate the operator's key, which protects all stored secrets (admin)."`
}

type secretRotateKeyCommand struct {
	remote `embed:""`
}

func (*secretRotateKeyCommand) Help() string {
	return `Wraps the key that encrypts all secrets again, with the keys that the server finds in its --secrets-key now, or with its
--secrets-command. See docs/secrets.md for the steps of a rotation.`
}

func (c *secretRotateKeyCommand) Run(ctx context.Context, s streams) error {
	return request(s, &c.remote, func(api *client.Client) (*client.RotatedKey, json.RawMessage, error) {
		return decoded(api.RotateSecretsKey(ctx))
	}, func(p *page, k *client.RotatedKey) { p.textf("wrapped for %s\n", k.WrappedFor) })
}
