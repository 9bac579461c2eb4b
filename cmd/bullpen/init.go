package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"slices"

	"github.com/bullpen-run/bullpen/client"
	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/proto/api"
	"github.com/bullpen-run/bullpen/storage/image"
)

const (
	e2bProfile   = "base" // the template of E2B's clients that name none
	e2bRecipe    = "e2b"  // and the name of the image
	e2bTerminals = 16
	e2bMemory    = 2 * proto.GiB
	e2bRoot      = 8 * proto.GiB
	e2bInodes    = 1 << 19 // npm's packages are many small files
)

type initCommand struct {
	remote `embed:""`
	E2B    bool     `name:"e2b" required:"" help:"For E2B's clients: an image, the sandbox profile base with it, and an API key."`
	Org    string   `default:"default" placeholder:"ORG" help:"Organisation of the API key. Default: ${default}."`
	Name   string   `default:"e2b" placeholder:"NAME" help:"Name of the API key, for people. Default: ${default}."`
	Image  *string  `placeholder:"IMAGE" help:"Image of the profile, instead of building one. Empty: the runtimes of the workers' hosts, which root cannot change."`
	Mirror []string `placeholder:"SOURCE" help:"A mirror of Debian for the image, as for bullpen image build."`
}

func (*initCommand) Help() string {
	return `Creates what E2B's clients need, unless it exists: the image e2b (bullpen image build --from e2b, some
minutes), and the sandbox profile base, with that image, a network, terminals, 2 GiB of memory, and a root file
system that root may change, for apt and pip. Then creates a new API key in E2B's form that is bound to the profile.
Prints the variables that E2B's clients read, so that a shell can evaluate them:

  eval "$(bullpen init --e2b)"

The server cannot show the key again. Building an image needs mmdebstrap; --image names another one.`
}

// e2bEnv are the variables that E2B's clients read.
type e2bEnv struct {
	Key     string `json:"E2B_API_KEY"`
	API     string `json:"E2B_API_URL"`
	Sandbox string `json:"E2B_SANDBOX_URL"`
}

func (c *initCommand) Run(ctx context.Context, s streams) error {
	return request(s, &c.remote, func(cl *client.Client) (*e2bEnv, error) {
		if err := c.ensureProfile(ctx, s, cl); err != nil {
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

// ensureProfile creates the profile of E2B's clients, and its image, unless they exist.
func (c *initCommand) ensureProfile(ctx context.Context, s streams, cl *client.Client) error {
	_, err := cl.Admin().Profile(ctx, e2bProfile)
	failed, ok := errors.AsType[*client.Error](err)
	switch {
	case err == nil:
		s.errorf("the sandbox profile %s exists and stays as it is", e2bProfile)
		return nil
	case !ok || failed.Status != http.StatusNotFound:
		return err
	}
	name := e2bRecipe
	if c.Image != nil {
		name = *c.Image
	} else if err := c.ensureImage(ctx, s, cl); err != nil {
		return err
	}
	profile := map[string]any{
		"name": e2bProfile, "terminals": e2bTerminals, "network": proto.Network{Policy: proto.NetworkUnrestricted},
		"memory": e2bMemory,
		"env": map[string]string{
			// Debian's pip would refuse to install beside its packages; E2B's does not.
			"PIP_BREAK_SYSTEM_PACKAGES": "1", "PIP_ROOT_USER_ACTION": "ignore",
		},
	}
	if name != "" {
		profile["image"], profile["disk"] = name, map[string]any{"root": e2bRoot, "inodes": e2bInodes}
	}
	p, err := json.Marshal(profile)
	if err != nil {
		return fmt.Errorf("encode the profile: %w", err)
	}
	if _, err := cl.Admin().CreateProfile(ctx, json.RawMessage(p)); err != nil {
		return err
	}
	s.errorf("created the sandbox profile %s", e2bProfile)
	return nil
}

// ensureImage builds the image of E2B's clients unless it exists.
func (c *initCommand) ensureImage(ctx context.Context, s streams, cl *client.Client) error {
	images, err := client.Collect(cl.Admin().Images(ctx))
	if err != nil {
		return err
	}
	if slices.ContainsFunc(images, func(i api.Image) bool { return i.Name == e2bRecipe }) {
		return nil
	}
	b, err := (&imageBuildCommand{
		remote: c.remote, imageName: imageName{e2bRecipe}, From: e2bRecipe, Mirror: c.Mirror,
	}).build(s)
	if err != nil {
		return err
	}
	if _, err := storeImage(ctx, cl, s, e2bRecipe, func(t *image.Tree) error { return b.run(ctx, t) }); err != nil {
		return fmt.Errorf("build the image %s (--image names another one): %w", e2bRecipe, err)
	}
	return nil
}
