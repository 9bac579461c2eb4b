package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"strconv"
	"text/tabwriter"

	"github.com/goccy/go-yaml"

	"github.com/bullpen-run/bullpen/cmd/internal/client"
	"github.com/bullpen-run/bullpen/proto"
)

type sandboxCommands struct {
	Create  sandboxCreateCommand  `cmd:"" help:"Make a sandbox profile, and print it complete."`
	List    sandboxListCommand    `cmd:"" help:"List all sandbox profiles."`
	Show    sandboxShowCommand    `cmd:"" help:"Print a sandbox profile, complete, as YAML."`
	Replace sandboxReplaceCommand `cmd:"" help:"Replace a sandbox profile as a whole, and print it complete."`
	Rm      sandboxRmCommand      `cmd:"" help:"Remove a sandbox profile that no valid key is bound to."`
}

// sandboxFlags say what a profile is to be.
type sandboxFlags struct {
	File string `short:"f" placeholder:"FILE" help:"The profile as YAML, in the form that bullpen sandbox show prints; - for standard input. It stands alone: the flags below do not go with it."`

	Image      *string      `placeholder:"IMAGE" help:"Root file system: the name of an image, or an absolute directory of the workers. Without it, the hosts' own runtimes."`
	CPU        *float64     `name:"cpu" placeholder:"CORES" help:"Cores, also fractions: 0.05 to 64."`
	Memory     *proto.Bytes `placeholder:"SIZE" help:"Memory, such as 512MiB: 32MiB to 1024GiB."`
	Pids       *int         `placeholder:"N" help:"Processes and threads: 16 to 32768."`
	DiskHome   *proto.Bytes `placeholder:"SIZE" help:"Size of the home directory: 1MiB to 1024GiB."`
	DiskTmp    *proto.Bytes `placeholder:"SIZE" help:"Size of /tmp: 1MiB to 1024GiB."`
	DiskInodes *int         `placeholder:"N" help:"Files and directories in each of the two: 256 to 16777216."`
	Network    *string      `placeholder:"POLICY" help:"What programs reach: blocked, unrestricted or allowlist."`
	Allow      []string     `sep:"none" placeholder:"HOST[:PORTS]" help:"Entry of the allowlist: a name such as pypi.org or *.example.com:443, an address or a range. May be repeated."`
	Env        []string     `short:"e" sep:"none" placeholder:"NAME=VALUE" help:"Environment variable of every program; the request's own win. May be repeated."`
	Output     *proto.Bytes `placeholder:"SIZE" help:"What a result keeps of each output stream: up to 256MiB."`
	Isolation  *string      `placeholder:"HOW" help:"With strict, every execution of python gets an interpreter that was started for it alone. Without it, the worker chooses."`
	Preload    []string     `sep:"none" placeholder:"MODULE" help:"Python module that the warm interpreter of a key imports before it is forked from, such as numpy. May be repeated."`
}

// sandboxHelp is what --help of those who take a profile says besides.
const sandboxHelp = `What is left out is as in the profile named default, see bullpen sandbox show default; home and /tmp are then no more than a half
and a quarter of the memory. What is printed is the whole profile.`

// maxSandboxFile bounds what is read of a file, in bytes.
const maxSandboxFile = 1 << 20

// profile gives the profile that was asked for under name, which a file may have instead.
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
		return nil, usagef("%s has the name %q, the command line %q: give one of them", f.File, s.Name, name)
	}
	if s.Name == "" {
		return nil, usagef("the profile has no name: give it as an argument, or in the file")
	}
	return s, nil
}

func (f *sandboxFlags) flags() (*client.Sandbox, error) {
	s := new(client.Sandbox)
	given(&s.Image, f.Image)
	given(&s.CPU, f.CPU)
	given(&s.Memory, f.Memory)
	given(&s.Pids, f.Pids)
	given(&s.Output, f.Output)
	given(&s.Isolation, f.Isolation)
	if len(f.Preload) > 0 {
		s.Preload = f.Preload
	}
	var disk client.SandboxDisk
	given(&disk.Home, f.DiskHome)
	given(&disk.Tmp, f.DiskTmp)
	given(&disk.Inodes, f.DiskInodes)
	if disk != (client.SandboxDisk{}) {
		s.Disk = &disk
	}
	if f.Network != nil || len(f.Allow) > 0 {
		s.Network = new(client.SandboxNetwork)
		given(&s.Network.Policy, f.Network)
		if len(f.Allow) > 0 {
			s.Network.Allow = f.Allow
		}
	}
	if len(f.Env) > 0 {
		env, err := pairs("-e", f.Env)
		if err != nil {
			return nil, err
		}
		s.Env = &env
	}
	return s, nil
}

// given stores the value of a flag that was given.
func given[T any](to *any, flag *T) {
	if flag != nil {
		*to = *flag
	}
}

// readSandbox reads the one profile of a YAML file. A key that is not of a profile is an error: it may be a limit, written wrongly.
func readSandbox(path string, stdin io.Reader) (*client.Sandbox, error) {
	in := stdin
	if path != "-" {
		f, err := os.Open(path)
		if err != nil {
			return nil, fmt.Errorf("read the profile: %w", err)
		}
		defer func() { _ = f.Close() }() // it was only read
		in = f
	}
	text, err := io.ReadAll(io.LimitReader(in, maxSandboxFile+1))
	if err != nil {
		return nil, fmt.Errorf("read the profile: %w", err)
	}
	if len(text) > maxSandboxFile {
		return nil, fmt.Errorf("%s: a profile is at most %d bytes long", path, maxSandboxFile)
	}
	s := new(client.Sandbox)
	decoder := yaml.NewDecoder(bytes.NewReader(text), yaml.DisallowUnknownField())
	if err := decoder.Decode(s); err != nil && !errors.Is(err, io.EOF) {
		return nil, fmt.Errorf("%s: %w", path, err)
	}
	if err := decoder.Decode(new(any)); !errors.Is(err, io.EOF) {
		return nil, fmt.Errorf("%s: must have one profile, in one YAML document", path)
	}
	return s, nil
}

func printSandbox(w io.Writer, asJSON bool, p *proto.Profile) error {
	if asJSON {
		return printJSON(w, p)
	}
	text, err := json.Marshal(p)
	if err == nil {
		text, err = yaml.JSONToYAML(text)
	}
	if err != nil {
		return fmt.Errorf("write the profile: %w", err)
	}
	_, err = w.Write(text)
	return err
}

type sandboxCreateCommand struct {
	remote       `embed:""`
	sandboxFlags `embed:""`
	Name         string `arg:"" optional:"" help:"The profile's name: a-z 0-9 . _ -."`
}

// Help tells what --help does not know by itself.
func (*sandboxCreateCommand) Help() string { return sandboxHelp }

// Run carries the command out.
func (c *sandboxCreateCommand) Run(ctx context.Context, io streams) error {
	return c.putSandbox(ctx, io, &c.sandboxFlags, c.Name, (*client.Client).CreateSandbox)
}

// putSandbox has a profile stored in one of the client's ways, and prints it.
func (r *remote) putSandbox(
	ctx context.Context, io streams, flags *sandboxFlags, name string,
	put func(*client.Client, context.Context, *client.Sandbox) (*proto.Profile, error),
) error {
	wanted, err := flags.profile(io.in, name)
	if err != nil {
		return err
	}
	api, err := r.client()
	if err != nil {
		return err
	}
	p, err := put(api, ctx, wanted)
	if err != nil {
		return err
	}
	return printSandbox(io.out, r.JSON, p)
}

type sandboxReplaceCommand struct {
	remote       `embed:""`
	sandboxFlags `embed:""`
	Name         string `arg:"" optional:"" help:"The profile's name."`
}

// Help tells what --help does not know by itself.
func (*sandboxReplaceCommand) Help() string {
	return sandboxHelp + `

Nothing of the old profile stays. Executions that are accepted from now on have the new one; others go on with what they had.`
}

// Run carries the command out.
func (c *sandboxReplaceCommand) Run(ctx context.Context, io streams) error {
	return c.putSandbox(ctx, io, &c.sandboxFlags, c.Name, (*client.Client).ReplaceSandbox)
}

type sandboxListCommand struct {
	remote `embed:""`
}

// Run carries the command out.
func (c *sandboxListCommand) Run(ctx context.Context, io streams) error {
	api, err := c.client()
	if err != nil {
		return err
	}
	list, err := api.Sandboxes(ctx)
	if err != nil {
		return err
	}
	if c.JSON {
		return printJSON(io.out, append([]proto.Profile{}, list...)) // an empty list rather than null
	}
	t := tabwriter.NewWriter(io.out, 0, 0, 2, ' ', 0)
	_, _ = fmt.Fprintln(t, "NAME\tIMAGE\tCPU\tMEMORY\tPIDS\tHOME\tTMP\tNETWORK\tOUTPUT") // Flush gives the error
	for _, p := range list {
		image := p.Image
		if image == "" {
			image = "-"
		}
		_, _ = fmt.Fprintf(t, "%s\t%s\t%s\t%s\t%d\t%s\t%s\t%s\t%s\n", p.Name, image, strconv.FormatFloat(p.CPU, 'f', -1, 64),
			p.Memory, p.Pids, p.Disk.Home, p.Disk.Tmp, p.Network.Policy, p.Output)
	}
	return t.Flush()
}

type sandboxShowCommand struct {
	remote `embed:""`
	Name   string `arg:"" help:"The profile's name; default is that of keys that are bound to none."`
}

// Run carries the command out.
func (c *sandboxShowCommand) Run(ctx context.Context, io streams) error {
	api, err := c.client()
	if err != nil {
		return err
	}
	p, err := api.Sandbox(ctx, c.Name)
	if err != nil {
		return err
	}
	return printSandbox(io.out, c.JSON, p)
}

type sandboxRmCommand struct {
	remote `embed:""`
	Name   string `arg:"" help:"The profile's name."`
}

// Run carries the command out.
func (c *sandboxRmCommand) Run(ctx context.Context, io streams) error {
	api, err := c.client()
	if err != nil {
		return err
	}
	p, err := api.RemoveSandbox(ctx, c.Name)
	if err != nil {
		return err
	}
	if c.JSON {
		return printJSON(io.out, p)
	}
	_, err = fmt.Fprintf(io.out, "%s is removed\n", p.Name)
	return err
}
