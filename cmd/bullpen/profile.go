package main

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"iter"
	"strings"

	"github.com/goccy/go-yaml"

	"github.com/bullpen-run/bullpen/client"
	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/proto/api"
)

type profileCommands struct {
	Create  profileCreateCommand  `cmd:"" help:"Create a sandbox profile."`
	List    profileListCommand    `cmd:"" help:"List all sandbox profiles."`
	Show    profileShowCommand    `cmd:"" help:"Print a sandbox profile as YAML."`
	Replace profileReplaceCommand `cmd:"" help:"Replace a sandbox profile."`
	Rm      profileRmCommand      `cmd:"" help:"Remove a sandbox profile that no valid key uses."`
}

// profileFlags describe a profile.
type profileFlags struct {
	File string `short:"f" placeholder:"FILE" help:"Read the profile from this YAML file, in the format of bullpen profile show; - for standard input. Excludes the flags below."`

	Image       *string      `placeholder:"IMAGE" help:"Root file system: the name of an image, or an absolute directory on the workers. Default: the server's --default-image, else the hosts' runtimes."`
	CPU         *float64     `name:"cpu" placeholder:"CORES" help:"CPU cores, 0.05 to 64."`
	Memory      *proto.Bytes `placeholder:"SIZE" help:"Memory, 32MiB to 1024GiB."`
	Pids        *int         `placeholder:"N" help:"Processes and threads, 16 to 32768."`
	OpenFiles   *int         `placeholder:"N" help:"Open files of each process, 256 to 4096. Default: 1024."`
	DiskHome    *proto.Bytes `placeholder:"SIZE" help:"Size of the home directory, 1MiB to 1024GiB."`
	DiskTmp     *proto.Bytes `placeholder:"SIZE" help:"Size of /tmp, 1MiB to 1024GiB."`
	DiskRoot    *proto.Bytes `placeholder:"SIZE" help:"What root in a live sandbox may change of the image's file system, 1MiB to 1024GiB; lost when the sandbox stops. Default: nothing."`
	DiskInodes  *int         `placeholder:"N" help:"Files and directories in the home directory, in /tmp and of changes to the root, 256 to 16777216 each."`
	Network     *string      `placeholder:"POLICY" help:"Network policy: blocked, unrestricted or allowlist."`
	Allow       []string     `sep:"none" placeholder:"HOST[:PORTS]" help:"Allowlist entry: a name such as pypi.org or *.example.com:443, an address or a range. Repeatable."`
	Private     []string     `sep:"none" placeholder:"HOST:PORTS" help:"Destination in your private network that programs may reach too: a name such as mirror.example.com:443, or an address. Repeatable."`
	Bandwidth   *proto.Bytes `placeholder:"SIZE" help:"Bytes per second that a sandbox may receive, and as many that it may send, 16KiB to 1024GiB. Default: not limited."`
	OpenRate    *int         `name:"connection-rate" placeholder:"N" help:"New connections per second of a sandbox, 1 to 300."`
	Env         []string     `short:"e" sep:"none" placeholder:"NAME=VALUE" help:"Environment variable of every program. The request's variables override it. Repeatable."`
	Secret      []string     `sep:"none" placeholder:"NAME[=VARIABLE]" help:"Secret of the executing organisation for programs, as a variable or, without =VARIABLE, as a file. A ! at the end masks it in the output. Repeatable."`
	Output      *proto.Bytes `placeholder:"SIZE" help:"Output that a result keeps of each stream, up to 256MiB."`
	Isolation   *string      `placeholder:"HOW" help:"strict starts a new Python interpreter for each execution. Default: the worker may fork one."`
	Preload     []string     `sep:"none" placeholder:"MODULE" help:"Python module to import before an interpreter is forked, such as numpy. Repeatable."`
	SystemCalls []string     `name:"system-call" sep:"none" placeholder:"NAME" help:"System call to allow beyond the usual ones, such as landlock_create_ruleset. Repeatable."`
	Terminals   *int         `placeholder:"N" help:"Pseudo-terminals of a program at a time, 0 to 64. Default: 0."`
	Prepare     *bool        `name:"prepare-agents" negatable:"" help:"Start the sandbox of an agent session and the agent's program when the session is created, not with its first message."`
}

// profileHelp is the --help text of commands that store a profile.
const profileHelp = `Absent settings have the values of the profile named default: see bullpen profile show default.
If --memory is given, the default home directory and /tmp are at most a half and a quarter of it. Prints the complete
profile.`

// profileFile is a sandbox profile in a YAML file. The server fills in nil fields and checks all
// others, so their values keep their YAML types.
type profileFile struct {
	Name        string          `json:"name,omitempty" yaml:"name"`
	Image       any             `json:"image,omitempty" yaml:"image"`
	CPU         any             `json:"cpu,omitempty" yaml:"cpu"`
	Memory      any             `json:"memory,omitempty" yaml:"memory"`
	Pids        any             `json:"pids,omitempty" yaml:"pids"`
	OpenFiles   any             `json:"open_files,omitempty" yaml:"open_files"`
	Disk        *profileDisk    `json:"disk,omitempty" yaml:"disk"`
	Network     *profileNetwork `json:"network,omitempty" yaml:"network"`
	Env         any             `json:"env,omitempty" yaml:"env"`
	Secrets     any             `json:"secrets,omitempty" yaml:"secrets"`
	Output      any             `json:"output,omitempty" yaml:"output"`
	Isolation   any             `json:"isolation,omitempty" yaml:"isolation"`
	Preload     any             `json:"preload,omitempty" yaml:"preload"`
	SystemCalls any             `json:"system_calls,omitempty" yaml:"system_calls"`
	Terminals   any             `json:"terminals,omitempty" yaml:"terminals"`
	Prepare     any             `json:"prepare_agents,omitempty" yaml:"prepare_agents"`
}

// profileDisk is the disk of a [profileFile].
type profileDisk struct {
	Home   any `json:"home,omitempty" yaml:"home"`
	Tmp    any `json:"tmp,omitempty" yaml:"tmp"`
	Root   any `json:"root,omitempty" yaml:"root"`
	Inodes any `json:"inodes,omitempty" yaml:"inodes"`
}

// profileNetwork is the network of a [profileFile].
type profileNetwork struct {
	Policy         any `json:"policy,omitempty" yaml:"policy"`
	Allow          any `json:"allow,omitempty" yaml:"allow"`
	Private        any `json:"private,omitempty" yaml:"private"`
	Bandwidth      any `json:"bandwidth,omitempty" yaml:"bandwidth"`
	ConnectionRate any `json:"connection_rate,omitempty" yaml:"connection_rate"`
}

// maxProfileBytes bounds the size of a profile file.
const maxProfileBytes = 1 << 20

// profile returns the profile to store. Its name is the argument, or in the file.
func (f *profileFlags) profile(stdin io.Reader, name string) (*profileFile, error) {
	s, err := f.flags()
	if err != nil {
		return nil, err
	}
	if f.File != "" {
		if *s != (profileFile{}) {
			return nil, usagef("give --file or the other flags, not both")
		}
		if s, err = readProfile(f.File, stdin); err != nil {
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

func (f *profileFlags) flags() (*profileFile, error) {
	s := new(profileFile)
	setFlag(&s.Image, f.Image)
	setFlag(&s.CPU, f.CPU)
	setFlag(&s.Memory, f.Memory)
	setFlag(&s.Pids, f.Pids)
	setFlag(&s.OpenFiles, f.OpenFiles)
	setFlag(&s.Terminals, f.Terminals)
	setFlag(&s.Prepare, f.Prepare)
	setFlag(&s.Output, f.Output)
	setFlag(&s.Isolation, f.Isolation)
	setList(&s.Preload, f.Preload)
	setList(&s.SystemCalls, f.SystemCalls)
	var disk profileDisk
	setFlag(&disk.Home, f.DiskHome)
	setFlag(&disk.Tmp, f.DiskTmp)
	setFlag(&disk.Root, f.DiskRoot)
	setFlag(&disk.Inodes, f.DiskInodes)
	if disk != (profileDisk{}) {
		s.Disk = &disk
	}
	var network profileNetwork
	setFlag(&network.Policy, f.Network)
	setList(&network.Allow, f.Allow)
	setList(&network.Private, f.Private)
	setFlag(&network.Bandwidth, f.Bandwidth)
	setFlag(&network.ConnectionRate, f.OpenRate)
	if network != (profileNetwork{}) {
		s.Network = &network
	}
	if len(f.Env) > 0 {
		env, err := nameValues("-e", f.Env)
		if err != nil {
			return nil, err
		}
		s.Env = &env
	}
	setList(&s.Secrets, f.Secret)
	return s, nil
}

// setFlag stores the value of a flag, if it was given.
func setFlag[T any](to *any, flag *T) {
	if flag != nil {
		*to = *flag
	}
}

// setList stores the values of a repeatable flag, if it was given.
func setList(to *any, flags []string) {
	if len(flags) > 0 {
		*to = flags
	}
}

// readProfile reads a file with one profile. Unknown keys are errors: one may be a misspelt limit.
func readProfile(path string, stdin io.Reader) (*profileFile, error) {
	text, err := readText(path, stdin, maxProfileBytes)
	if err != nil {
		return nil, fmt.Errorf("read the profile: %w", err)
	}
	s := new(profileFile)
	decoder := yaml.NewDecoder(bytes.NewReader([]byte(text)), yaml.DisallowUnknownField())
	if err := decoder.Decode(s); err != nil && !errors.Is(err, io.EOF) {
		return nil, fmt.Errorf("%s: %w", path, err)
	}
	if err := decoder.Decode(new(any)); !errors.Is(err, io.EOF) {
		return nil, fmt.Errorf("%s: must have one profile, in one YAML document", path)
	}
	return s, nil
}

func printProfile(p *page, profile *proto.Profile) {
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

type profileCreateCommand struct {
	remote       `embed:""`
	profileFlags `embed:""`
	Name         string `arg:"" optional:"" help:"Name of the profile: a-z 0-9 . _ -."`
}

func (*profileCreateCommand) Help() string {
	return profileHelp + `

Example:

  bullpen profile create data --image python-data --memory 1GiB --network allowlist --allow pypi.org:443`
}

func (c *profileCreateCommand) Run(ctx context.Context, s streams) error {
	profile, err := c.profile(s.in, c.Name)
	if err != nil {
		return err
	}
	return request(s, &c.remote, func(cl *client.Client) (*proto.Profile, error) {
		return cl.Admin().CreateProfile(ctx, profile)
	}, printProfile)
}

type profileReplaceCommand struct {
	remote       `embed:""`
	profileFlags `embed:""`
	Name         string `arg:"" optional:"" help:"Name of the profile."`
}

func (*profileReplaceCommand) Help() string {
	return profileHelp + `

The old settings are discarded. Executions that were accepted before keep them.`
}

func (c *profileReplaceCommand) Run(ctx context.Context, s streams) error {
	profile, err := c.profile(s.in, c.Name)
	if err != nil {
		return err
	}
	return request(s, &c.remote, func(cl *client.Client) (*proto.Profile, error) {
		return cl.Admin().ReplaceProfile(ctx, profile.Name, profile)
	}, printProfile)
}

type profileListCommand struct {
	remote `embed:""`
}

func (c *profileListCommand) Run(ctx context.Context, s streams) error {
	return list(s, &c.remote, func(cl *client.Client) iter.Seq2[proto.Profile, error] {
		return cl.Admin().Profiles(ctx)
	}, func(p *page, profiles []proto.Profile) {
		p.row("NAME", "IMAGE", "CPU", "MEMORY", "PIDS", "HOME", "TMP", "NETWORK", "OUTPUT")
		for _, x := range profiles {
			p.row(x.Name, cmp.Or(x.Image, "-"), x.CPU, x.Memory, x.Pids, x.Disk.Home, x.Disk.Tmp, x.Network.Policy, x.Output)
		}
	})
}

type profileShowCommand struct {
	remote `embed:""`
	Name   string `arg:"" help:"Name of the profile."`
}

func (*profileShowCommand) Help() string {
	return `If a worker could not import the modules of preload in the last 24 hours, a comment says why.`
}

func (c *profileShowCommand) Run(ctx context.Context, s streams) error {
	preload := new(api.ProfilePreload)
	return request(s, &c.remote, func(cl *client.Client) (*proto.Profile, error) {
		profile, err := cl.Admin().Profile(ctx, c.Name)
		if err == nil && !c.JSON && len(profile.Preload) > 0 {
			preload, err = cl.Admin().ProfilePreload(ctx, c.Name)
		}
		return profile, err
	}, func(p *page, profile *proto.Profile) {
		printProfile(p, profile)
		if preload.Error != nil {
			p.textf("# preload failed at %s on %s: %s\n", cell(*preload.At), cell(preload.Worker),
				cell(strings.Join(strings.Fields(*preload.Error), " ")))
		}
	})
}

type profileRmCommand struct {
	remote `embed:""`
	Name   string `arg:"" help:"Name of the profile."`
}

func (c *profileRmCommand) Run(ctx context.Context, s streams) error {
	return request(s, &c.remote, func(cl *client.Client) (*proto.Profile, error) {
		return cl.Admin().RemoveProfile(ctx, c.Name)
	}, func(p *page, profile *proto.Profile) { p.textf("%s is removed\n", profile.Name) })
}
