package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"

	"github.com/bullpen-run/bullpen/client"
	"github.com/bullpen-run/bullpen/cmd/internal/manifest"
)

type applyCommand struct {
	remote `embed:""`
	File   string `short:"f" required:"" placeholder:"FILE" help:"YAML file in the format of bullpen export; - for standard input."`
	DryRun bool   `help:"Print what would change, and change nothing."`
	NoTest bool   `help:"Store buckets that only workers can reach: the gateway does not test them."`
}

func (*applyCommand) Help() string {
	return `Creates and changes plans, organisations, sandbox profiles, storage connections and API keys to match the
file. Absent fields have their defaults. Objects that the file does not name stay. Organisation and name identify an
API key; a new one is printed once. Organisation and slug identify a storage connection, which is tested when it
changes; its secrets must exist.

The file is checked as a whole before anything changes. Prints how each object differs. A change that the server
refuses is reported at the end, and the others are made: the exit code is 1 then.

Example:

  bullpen apply --file bullpen.yaml`
}

// maxManifestBytes bounds the size of a manifest.
const maxManifestBytes = 16 << 20

// applied is the JSON form of a change.
type applied struct {
	Kind string `json:"kind"`
	Name string `json:"name"`
	New  bool   `json:"new"`
	Diff string `json:"diff"`
	Key  string `json:"key,omitempty"`
}

func (c *applyCommand) Run(ctx context.Context, s streams) error {
	text, err := readText(c.File, s.in, maxManifestBytes)
	if err != nil {
		return fmt.Errorf("read the file: %w", err)
	}
	m, err := manifest.Read([]byte(text))
	if err != nil {
		return fmt.Errorf("%s: %w", c.File, err)
	}
	api, err := c.client(s)
	if err != nil {
		return err
	}
	changes, err := m.Compare(ctx, api, !c.NoTest)
	if err != nil {
		return err
	}
	if !c.JSON && len(changes) == 0 {
		_, err := fmt.Fprintln(s.out, "nothing differs")
		return err
	}
	var failed []error
	for _, change := range changes {
		done := applied{Kind: change.Kind, Name: change.Name, New: change.New, Diff: change.Diff}
		if !c.DryRun {
			done.Key, err = change.Apply(ctx)
			if err != nil {
				err = fmt.Errorf("%s %s: %w", change.Kind, change.Name, err)
			}
			var refused *client.Error
			switch {
			case errors.As(err, &refused):
				failed = append(failed, err)
				continue
			case err != nil:
				return errors.Join(append(failed, err)...)
			}
		}
		if err := c.print(s, &done); err != nil {
			return errors.Join(append(failed, err)...)
		}
	}
	return errors.Join(failed...)
}

// print prints a change as soon as it is made, so that no new key is lost.
func (c *applyCommand) print(s streams, done *applied) error {
	if c.JSON {
		return json.NewEncoder(s.out).Encode(done)
	}
	verb := "changed"
	if done.New {
		verb = "created"
	}
	if c.DryRun {
		verb = "would be " + verb
	}
	line := fmt.Sprintf("%s%s %s: %s", done.Diff, done.Kind, done.Name, verb)
	if done.Key != "" {
		line += "; it is not shown again: " + done.Key
	}
	_, err := fmt.Fprintln(s.out, line)
	return err
}

type exportCommand struct {
	remote `embed:""`
}

func (*exportCommand) Help() string {
	return `Prints changed plans, organisations, sandbox profiles, storage connections and valid API keys as YAML for
bullpen apply. It contains no secrets, neither API keys, which are stored as hashes only, nor values of secrets. The
server's first key, the profile default and organisations that are being deleted are left out.

Example:

  bullpen export >bullpen.yaml`
}

func (c *exportCommand) Run(ctx context.Context, s streams) error {
	if c.JSON {
		return usagef("bullpen export prints YAML: leave out --json")
	}
	api, err := c.client(s)
	if err != nil {
		return err
	}
	text, err := manifest.Export(ctx, api)
	if err != nil {
		return err
	}
	_, err = s.out.Write(text)
	return err
}
