package main

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"strings"

	"github.com/goccy/go-yaml"

	"github.com/bullpen-run/bullpen/cmd/internal/client"
	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/proto/api"
)

type sandboxCommands struct {
	Create  sandboxCreateCommand  `cmd:"" help:"Create a sandbox profile."`
	List    sandboxListCommand    `cmd:"" help:"List all sandbox profiles."`
	Show    sandboxShowCommand    `cmd:"" help:"Print a sandbox profile as YAML."`
	Replace sandboxReplaceCommand `cmd:"" help:"Replace a sandbox profile."`
	Rm      sandboxRmCommand      `cmd:"" help:"Remove a sandbox profile that no valid key uses."`
}

// sandboxFlags describe a profile.
type sandboxFlags struct {
	File string `short:"f" placeholder:"FILE" help:"Read the profile from this YAML file, in the format of bullpen sandbox show; - for standard input. Excludes the flags below."`

	Image       *string      `placeholder:"IMAGE" help:"Root file system: the name of an image, or an absolute directory on the workers. Default: the server's --default-image, else the hosts' runtimes."`
	CPU         *float64     `name:"cpu" placeholder:"CORES" help:"CPU cores, 0.05 to 64."`
	Memory      *proto.Bytes `placeholder:"SIZE" help:"Memory, 32MiB to 1024GiB."`
	Pids        *int         `placeholder:"N" help:"Processes and threads, 16 to 32768."`
	OpenFiles   *int         `placeholder:"N" help:"Open files of each process, 256 to 4096. Default: 1024."`
	DiskHome    *proto.Bytes `placeholder:"SIZE" help:"Size of the home directory, 1MiB to 1024GiB."`
	DiskTmp     *proto.Bytes `placeholder:"SIZE" help:"Size of /tmp, 1MiB to 1024GiB."`
	DiskInodes  *int         `placeholder:"N" help:"Files and directories in the home directory and in /tmp, 256 to 16777216 each."`
	Network     *string      `placeholder:"POLICY" help:"Network policy: blocked, unrestricted or allowlist."`
	Allow       []string     `sep:"none" placeholder:"HOST[:PORTS]" help:"Allowlist entry: a name such as pypi.org or *.example.com:443, an address or a range. Repeatable."`
	Env         []string     `short:"e" sep:"none" placeholder:"NAME=VALUE" help:"Environment variable of every program. The request's variables override it. Repeatable."`
	Secret      []string     `sep:"none" placeholder:"NAME[=VARIABLE]" help:"Secret of the executing organisation that programs get, as a variable or else as a file. A ! at the end masks it in the output. Repeatable."`
	Output      *proto.Bytes `placeholder:"SIZE" help:"Output that a result keeps of each stream, up to 256MiB."`
	Isolation   *string      `placeholder:"HOW" help:"strict starts a new Python interpreter for each execution. Default: the worker may fork one."`
	Preload     []string     `sep:"none" placeholder:"MODULE" help:"Python module to import before an interpreter is forked, such as numpy. Repeatable."`
	SystemCalls []string     `name:"system-call" sep:"none" placeholder:"NAME" help:"System call to allow beyond the usual ones, such as landlock_create_ruleset. Repeatable."`
}

// sandboxHelp is the --help text of commands that store a profile.
const sandboxHelp = `Absent settings have the values of the profile named default: see bullpen sandbox show default. If --memory is given, the default home
directory and /tmp are at most a half and a quarter of it. Prints the complete profile.`

// maxProfileBytes bounds the size of a profile file.
const maxProfileBytes = 1 << 20

// profile returns the profile to store. Its name is the argument, or in the file.
func (f *sandboxFlags) profile(stdin io.Reader, name string) (*client.Sandbox, error) {
	s, err := f.flags()
	if err != nil {
		return nil, err
	}
	if f.File != "" {
		if *s != (client.Sandbox{}) {
			return nil, usagef("give --file or the other flags, not both")
		}
		if s, err = readSandbox(f.File, stdin); err != nil {
			return nil, err
		}
	}
	switch {
	case s.Name == "":
		s.Name = name
	case name != "" && name != s.Name:
		return nil, usagef("%s has the name %q, the command line %q: give one name", f.File, s.Name, name)
	}
	if s.Name == "" {
		return nil, usagef("the profile has no name: give it as an argument or in the file")
	}
	return s, nil
}

func (f *sandboxFlags) flags() (*client.Sandbox, error) {
	s := new(client.Sandbox)
	setFlag(&s.Image, f.Image)
	setFlag(&s.CPU, f.CPU)
	setFlag(&s.Memory, f.Memory)
	setFlag(&s.Pids, f.Pids)
	setFlag(&s.OpenFiles, f.OpenFiles)
	setFlag(&s.Output, f.Output)
	setFlag(&s.Isolation, f.Isolation)
	if len(f.Preload) > 0 {
		s.Preload = f.Preload
	}
	if len(f.SystemCalls) > 0 {
		s.SystemCalls = f.SystemCalls
	}
	var disk client.SandboxDisk
	setFlag(&disk.Home, f.DiskHome)
	setFlag(&disk.Tmp, f.DiskTmp)
	setFlag(&disk.Inodes, f.DiskInodes)
	if disk != (client.SandboxDisk{}) {
		s.Disk = &disk
	}
	if f.Network != nil || len(f.Allow) > 0 {
		s.Network = new(client.SandboxNetwork)
		setFlag(&s.Network.Policy, f.Network)
		if len(f.Allow) > 0 {
			s.Network.Allow = f.Allow
		}
	}
	if len(f.Env) > 0 {
		env, err := nameValues("-e", f.Env)
		if err != nil {
			return nil, err
		}
		s.Env = &env
	}
	if len(f.Secret) > 0 {
		s.Secrets = f.Secret
	}
	return s, nil
}

// setFlag stores the value of a flag, if it was given.
func setFlag[T any](to *any, flag *T) {
	if flag != nil {
		*to = *flag
	}
}

// readSandbox reads a file with one profile. Unknown keys are errors: one may be a misspelt limit.
func readSandbox(path string, stdin io.Reader) (*client.Sandbox, error) {
	text, err := readText(path, stdin, maxProfileBytes)
	if err != nil {
		return nil, fmt.Errorf("read the profile: %w", err)
	}
	s := new(client.Sandbox)
	decoder := yaml.NewDecoder(bytes.NewReader([]byte(text)), yaml.DisallowUnknownField())
	if err := decoder.Decode(s); err != nil && !errors.Is(err, io.EOF) {
		return nil, fmt.Errorf("%s: %w", path, err)
	}
	if err := decoder.Decode(new(any)); !errors.Is(err, io.EOF) {
		return nil, fmt.Errorf("%s: must have one profile, in one YAML document", path)
	}
	return s, nil
}

func printSandbox(p *page, profile *proto.Profile) {
	text, err := json.Marshal(profile)
	if err == nil {
		text, err = yaml.JSONToYAML(text)
	}
	if err != nil {
		p.err = fmt.Errorf("encode the profile: %w", err)
		return
	}
	p.textf("%s", text)
}

type sandboxCreateCommand struct {
	remote       `embed:""`
	sandboxFlags `embed:""`
	Name         string `arg:"" optional:"" help:"Name of the profile: a-z 0-9 . _ -."`
}

func (*sandboxCreateCommand) Help() string { return sandboxHelp }

func (c *sandboxCreateCommand) Run(ctx context.Context, s streams) error {
	profile, err := c.profile(s.in, c.Name)
	if err != nil {
		return err
	}
	return request(s, &c.remote, func(api *client.Client) (*proto.Profile, json.RawMessage, error) {
		return decoded(api.CreateSandbox(ctx, profile))
	}, printSandbox)
}

type sandboxReplaceCommand struct {
	remote       `embed:""`
	sandboxFlags `embed:""`
	Name         string `arg:"" optional:"" help:"Name of the profile."`
}

func (*sandboxReplaceCommand) Help() string {
	return sandboxHelp + `

The old settings are discarded. Executions that were accepted before keep them.`
}

func (c *sandboxReplaceCommand) Run(ctx context.Context, s streams) error {
	profile, err := c.profile(s.in, c.Name)
	if err != nil {
		return err
	}
	return request(s, &c.remote, func(api *client.Client) (*proto.Profile, json.RawMessage, error) {
		return decoded(api.ReplaceSandbox(ctx, profile))
	}, printSandbox)
}

type sandboxListCommand struct {
	remote `embed:""`
}

func (c *sandboxListCommand) Run(ctx context.Context, s streams) error {
	return request(s, &c.remote, func(api *client.Client) ([]proto.Profile, json.RawMessage, error) {
		return decoded(api.Sandboxes(ctx))
	}, func(p *page, profiles []proto.Profile) {
		p.row("NAME", "IMAGE", "CPU", "MEMORY", "PIDS", "HOME", "TMP", "NETWORK", "OUTPUT")
		for _, x := range profiles {
			p.row(x.Name, cmp.Or(x.Image, "-"), x.CPU, x.Memory, x.Pids, x.Disk.Home, x.Disk.Tmp, x.Network.Policy, x.Output)
		}
	})
}

type sandboxShowCommand struct {
	remote `embed:""`
	Name   string `arg:"" help:"Name of the profile."`
}

func (*sandboxShowCommand) Help() string {
	return `If a worker could not import the modules of preload in the last 24 hours, a comment says why.`
}

func (c *sandboxShowCommand) Run(ctx context.Context, s streams) error {
	preload := new(api.SandboxPreload)
	return request(s, &c.remote, func(api *client.Client) (*proto.Profile, json.RawMessage, error) {
		profile, err := api.Sandbox(ctx, c.Name)
		if err == nil && len(profile.Preload) > 0 {
			preload, err = api.SandboxPreload(ctx, c.Name)
		}
		return decoded(profile, err)
	}, func(p *page, profile *proto.Profile) {
		printSandbox(p, profile)
		if preload.Error != nil {
			p.textf("# preload failed at %s on %s: %s\n", cell(*preload.At), cell(preload.Worker), cell(strings.Join(strings.Fields(*preload.Error), " ")))
		}
	})
}

type sandboxRmCommand struct {
	remote `embed:""`
	Name   string `arg:"" help:"Name of the profile."`
}

func (c *sandboxRmCommand) Run(ctx context.Context, s streams) error {
	return request(s, &c.remote, func(api *client.Client) (*proto.Profile, json.RawMessage, error) {
		return decoded(api.RemoveSandbox(ctx, c.Name))
	}, func(p *page, profile *proto.Profile) { p.textf("%s is removed\n", profile.Name) })
}
