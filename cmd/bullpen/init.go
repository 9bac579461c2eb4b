package main

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"net/http"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/bullpen-run/bullpen/client"
	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/proto/api"
	"github.com/bullpen-run/bullpen/storage/image"
)

const (
	dataMemory   = 2 * proto.GiB
	e2bTerminals = 16
	e2bMemory    = 2 * proto.GiB
	e2bRoot      = 8 * proto.GiB
	e2bInodes    = 1 << 19 // npm's packages are many small files
	agentsMemory = 2 * proto.GiB
)

type initCommand struct {
	remote     `embed:""`
	Data       bool     `help:"For data analysis: Python with pandas, matplotlib, IPython and others."`
	E2B        bool     `name:"e2b" help:"For E2B's clients."`
	Agents     bool     `help:"For coding agents."`
	Org        string   `default:"default" placeholder:"ORG" help:"Organisation of the API keys. Default: ${default}."`
	Name       string   `placeholder:"NAME" help:"Name of the API key, for people. Default: data, e2b or agents."`
	Image      *string  `placeholder:"IMAGE" help:"Image of the profile, instead of building one. Empty: the runtimes of the workers' hosts, which root cannot change."`
	Mirror     []string `placeholder:"SOURCE" help:"A mirror of Debian for the image, as for bullpen image build."`
	StaleIndex bool     `help:"Accept an expired index of a mirror."`
}

func (*initCommand) Help() string {
	return `Creates what a kind of work needs: an image (bullpen image build, some minutes), a sandbox profile with it, and
an API key that is bound to the profile. On a terminal it asks for which kinds. What exists stays as it is, so a second
run changes nothing.

  --data    the image data (recipe python-data), and the profile data with 2 GiB of memory and no network
  --e2b     the image e2b, and the profile base with a network, terminals, 2 GiB of memory, and a root file system that
            root may change, for apt and pip
  --agents  the image agents (recipe default, with git and ripgrep), and the profile coding with 2 GiB of memory and no
            network

Prints the variables with the new keys, so that a shell can evaluate them. The server cannot show a key again.

Building an image needs mmdebstrap; --image names another one.

Example:

  eval "$(bullpen init --data)"`
}

// starter is what a kind of work needs.
type starter struct {
	name     string // of the image and of the API key
	question string
	build    imageBuildCommand
	profile  string // its name
	format   proto.KeyFormat
	settings func(profile map[string]any, image string)
	env      func(key, url string) map[string]string // variables for clients
	next     string                                  // what to try, for a program's name
}

// starters returns the kinds of work.
func starters() (data, e2b, agents starter) {
	data = starter{
		name: "data", question: "Analyse data and draw plots with Python?",
		build: imageBuildCommand{From: "python-data"}, profile: "data",
		settings: func(p map[string]any, _ string) { p["memory"] = dataMemory },
		env: func(key, url string) map[string]string {
			return map[string]string{"BULLPEN_API_KEY": key, "BULLPEN_URL": url}
		},
		next: "a first plot:\n\n  echo 'import matplotlib.pyplot as plt; plt.plot([1, 4, 9, 16]); plt.show()' | " +
			"%s run --profile data --rich -\n",
	}
	e2b = starter{
		name: "e2b", question: "Run programs written for E2B's sandboxes?",
		build: imageBuildCommand{From: "e2b"}, profile: "base", // the template of E2B's clients that name none
		format: proto.KeyFormatE2B,
		settings: func(p map[string]any, image string) {
			p["memory"], p["terminals"] = e2bMemory, e2bTerminals
			p["network"] = proto.Network{Policy: proto.NetworkUnrestricted}
			// Debian's pip would refuse to install beside its packages; E2B's does not.
			p["env"] = map[string]string{"PIP_BREAK_SYSTEM_PACKAGES": "1", "PIP_ROOT_USER_ACTION": "ignore"}
			if image != "" {
				p["disk"] = map[string]any{"root": e2bRoot, "inodes": e2bInodes}
			}
		},
		env: func(key, url string) map[string]string {
			return map[string]string{"E2B_API_KEY": key, "E2B_API_URL": url, "E2B_SANDBOX_URL": url}
		},
		next: "a first E2B sandbox:\n\n  pip install e2b\n" +
			"  python3 -c 'from e2b import Sandbox; print(Sandbox.create().commands.run(\"uname -a\").stdout)'\n",
	}
	agents = starter{
		name: "agents", question: "Run coding agents, such as Claude Code?",
		build: imageBuildCommand{From: "default", Package: []string{"git", "procps", "ripgrep"}}, profile: "coding",
		settings: func(p map[string]any, _ string) { p["memory"] = agentsMemory },
		env: func(key, url string) map[string]string {
			return map[string]string{"BULLPEN_AGENTS_API_KEY": key, "BULLPEN_URL": url}
		},
		next: "a coding agent. Restart the server with its program and a model:\n\n" +
			"  %[1]s agent install claude --dir agents\n" +
			"  %[1]s serve --agents agents --agent-upstream URL\n" +
			"  BULLPEN_API_KEY=$BULLPEN_AGENTS_API_KEY %[1]s agent chat claude\n",
	}
	return data, e2b, agents
}

func (c *initCommand) Run(ctx context.Context, s streams) error {
	wanted, err := c.wanted(ctx, s)
	if err != nil {
		return err
	}
	if len(wanted) > 1 && (c.Image != nil || c.Name != "") {
		return usagef("--image and --name need exactly one of --data, --e2b and --agents")
	}
	cl, err := c.client(s)
	if err != nil {
		return err
	}
	env := map[string]string{}
	for _, w := range wanted {
		if err := c.ensureProfile(ctx, s, cl, &w); err != nil {
			return err
		}
		key, err := c.ensureKey(ctx, s, cl, &w)
		if err != nil {
			return err
		}
		if key != "" {
			maps.Copy(env, w.env(key, c.URL))
		}
	}
	err = show(s, c.JSON, env, func(p *page, env map[string]string) {
		for _, name := range slices.Sorted(maps.Keys(env)) {
			p.textf("export %s=%s\n", name, shellWord(env[name]))
		}
	})
	for _, w := range wanted {
		_, _ = fmt.Fprintf(s.err, "\nNext, "+strings.ReplaceAll(w.next, "%s", "%[1]s"), os.Args[0])
	}
	return err
}

// wanted returns the kinds of work that the flags name or, without flags, those that the person at the terminal
// chooses.
func (c *initCommand) wanted(ctx context.Context, s streams) (wanted []starter, err error) {
	data, e2b, agents := starters()
	choices := []struct {
		flag bool
		of   starter
	}{{c.Data, data}, {c.E2B, e2b}, {c.Agents, agents}}
	ask := !c.Data && !c.E2B && !c.Agents
	in, ok := s.in.(*os.File)
	if ask && (!ok || !isTerminal(in) || !s.terminal) {
		return nil, usagef("choose with --data, --e2b and --agents: questions need a terminal")
	}
	lines := bufio.NewReader(s.in)
	for _, choice := range choices {
		yes := choice.flag
		if ask {
			if yes, err = confirm(ctx, s, lines, choice.of.question); err != nil {
				return nil, err
			}
		}
		if yes {
			wanted = append(wanted, choice.of)
		}
	}
	if len(wanted) == 0 {
		return nil, errors.New("nothing was chosen, so nothing is created")
	}
	return wanted, nil
}

// confirm asks a question until the answer is yes or no. An empty answer is no.
func confirm(ctx context.Context, s streams, lines *bufio.Reader, question string) (bool, error) {
	for {
		_, _ = fmt.Fprintf(s.err, "%s [y/N] ", question)
		type answer struct {
			line string
			err  error
		}
		answers := make(chan answer, 1)
		go func() {
			line, err := lines.ReadString('\n')
			answers <- answer{line, err}
		}()
		select {
		case <-ctx.Done():
			return false, ctx.Err()
		case a := <-answers:
			if a.err != nil {
				return false, fmt.Errorf("read the answer: %w", a.err)
			}
			switch strings.ToLower(strings.TrimSpace(a.line)) {
			case "y", "yes":
				return true, nil
			case "", "n", "no":
				return false, nil
			}
		}
	}
}

// ensureProfile creates the profile of w and its image, unless they exist.
func (c *initCommand) ensureProfile(ctx context.Context, s streams, cl *client.Client, w *starter) error {
	_, err := cl.Admin().Profile(ctx, w.profile)
	failed, ok := errors.AsType[*client.Error](err)
	switch {
	case err == nil:
		s.errorf("the sandbox profile %s exists and stays as it is", w.profile)
		return nil
	case !ok || failed.Status != http.StatusNotFound:
		return err
	}
	name := w.name
	if c.Image != nil {
		name = *c.Image
	} else if err := c.ensureImage(ctx, s, cl, w); err != nil {
		return err
	}
	profile := map[string]any{"name": w.profile}
	if name != "" {
		profile["image"] = name
	}
	w.settings(profile, name)
	p, err := json.Marshal(profile)
	if err != nil {
		return fmt.Errorf("encode the profile: %w", err)
	}
	if _, err := cl.Admin().CreateProfile(ctx, json.RawMessage(p)); err != nil {
		return err
	}
	s.errorf("created the sandbox profile %s", w.profile)
	return nil
}

// ensureImage builds the image of w unless it exists.
func (c *initCommand) ensureImage(ctx context.Context, s streams, cl *client.Client, w *starter) error {
	stored, err := client.Collect(cl.Admin().Images(ctx))
	if err != nil {
		return err
	}
	if slices.ContainsFunc(stored, func(i api.Image) bool { return i.Name == w.name }) {
		s.errorf("the image %s exists and stays as it is", w.name)
		return nil
	}
	command := w.build
	command.remote, command.imageName = c.remote, imageName{w.name}
	command.Mirror, command.StaleIndex = c.Mirror, c.StaleIndex
	b, err := command.build(s)
	if err != nil {
		return err
	}
	if _, err := storeImage(ctx, cl, s, w.name, func(t *image.Tree) error { return b.run(ctx, t) }); err != nil {
		return fmt.Errorf("build the image %s (--image names another one): %w", w.name, err)
	}
	s.errorf("built the image %s", w.name)
	return nil
}

// ensureKey returns a new API key for w, or "" if there is one already, whose secret cannot be shown again.
func (c *initCommand) ensureKey(ctx context.Context, s streams, cl *client.Client, w *starter) (string, error) {
	name := w.name
	if c.Name != "" {
		name = c.Name
	}
	keys, err := client.Collect(cl.Admin().Keys.List(ctx, ""))
	if err != nil {
		return "", err
	}
	for _, k := range keys {
		expired := k.ExpiresAt != nil && time.Now().After(k.ExpiresAt.Time)
		if k.Name == name && k.Org == c.Org && k.Profile == w.profile && k.RevokedAt == nil && !expired {
			s.errorf("the API key %s (%s) exists and stays as it is: `bullpen key rotate %[2]s` gives it a new secret",
				name, k.ID)
			return "", nil
		}
	}
	key, err := cl.Admin().Keys.Create(ctx, &api.KeyRequest{
		Org: c.Org, Profile: w.profile, Format: string(w.format), KeySettings: api.KeySettings{Name: name},
	})
	if err != nil {
		return "", uncertain(err, "see `bullpen key list`")
	}
	s.errorf("created the API key %s (%s)", name, key.ID)
	return key.Secret, nil
}
