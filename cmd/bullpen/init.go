package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"

	"github.com/bullpen-run/bullpen/client"
	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/proto/api"
)

const (
	e2bProfile   = "base" // the template of E2B's clients that name none
	e2bTerminals = 16
)

type initCommand struct {
	remote `embed:""`
	E2B    bool   `name:"e2b" required:"" help:"For E2B's clients: the sandbox profile base, with a network and terminals, and an API key."`
	Org    string `default:"default" placeholder:"ORG" help:"Organisation of the API key. Default: ${default}."`
	Name   string `default:"e2b" placeholder:"NAME" help:"Name of the API key, for people. Default: ${default}."`
}

func (*initCommand) Help() string {
	return `Creates the sandbox profile base unless there is one, and a new API key in E2B's form that is bound to it.
Prints the variables that E2B's clients read, so that a shell can evaluate them:

  eval "$(bullpen init --e2b)"

The server cannot show the key again. Sandboxes have the programs of the workers' hosts, or of --default-image; for
others, build an image (bullpen image build) and name it in the profile.`
}

// e2bEnv are the variables that E2B's clients read.
type e2bEnv struct {
	Key     string `json:"E2B_API_KEY"`
	API     string `json:"E2B_API_URL"`
	Sandbox string `json:"E2B_SANDBOX_URL"`
}

func (c *initCommand) Run(ctx context.Context, s streams) error {
	return request(s, &c.remote, func(cl *client.Client) (*e2bEnv, error) {
		if err := c.ensureProfile(ctx, s, cl.Admin()); err != nil {
			return nil, err
		}
		key, err := cl.Admin().Keys.Create(ctx, &api.KeyRequest{
			Org: c.Org, Profile: e2bProfile, Format: string(proto.KeyFormatE2B), KeySettings: api.KeySettings{Name: c.Name},
		})
		if err != nil {
			return nil, uncertain(err, "see `bullpen key list`")
		}
		return &e2bEnv{key.Secret, c.URL, c.URL}, nil
	}, func(p *page, e *e2bEnv) {
		p.textf("export E2B_API_KEY=%s\nexport E2B_API_URL=%s\nexport E2B_SANDBOX_URL=%s\n", e.Key, e.API, e.Sandbox)
	})
}

// ensureProfile creates the profile of E2B's clients unless it exists.
func (c *initCommand) ensureProfile(ctx context.Context, s streams, admin *client.Admin) error {
	p, err := json.Marshal(map[string]any{
		"name": e2bProfile, "terminals": e2bTerminals, "network": proto.Network{Policy: proto.NetworkUnrestricted},
	})
	if err != nil {
		return fmt.Errorf("encode the profile: %w", err)
	}
	_, err = admin.CreateProfile(ctx, json.RawMessage(p))
	failed, ok := errors.AsType[*client.Error](err)
	switch {
	case ok && failed.Status == http.StatusConflict:
		s.errorf("the sandbox profile %s exists and stays as it is", e2bProfile)
		return nil
	case err != nil:
		return err
	default:
		s.errorf("created the sandbox profile %s, with a network and terminals", e2bProfile)
		return nil
	}
}
