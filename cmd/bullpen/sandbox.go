package main

import (
	"context"
	"fmt"
	"iter"
	"slices"
	"strings"
	"time"

	"github.com/bullpen-run/bullpen/client"
	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/proto/api"
)

type sandboxCommands struct {
	Create sandboxCreateCommand `cmd:"" help:"Create a sandbox and start it."`
	List   sandboxListCommand   `cmd:"" help:"List the organisation's sandboxes."`
	Show   sandboxShowCommand   `cmd:"" help:"Show a sandbox."`
	Exec   sandboxExecCommand   `cmd:"" help:"Run a command in a running sandbox."`
	Cp     sandboxCpCommand     `cmd:"" help:"Copy a file to or from a running sandbox."`
	Extend sandboxExtendCommand `cmd:"" help:"Set when a running sandbox expires."`
	Logs   sandboxLogsCommand   `cmd:"" help:"Print what the processes of a sandbox have printed."`
	Pause  sandboxPauseCommand  `cmd:"" help:"Stop a sandbox and keep its home."`
	Save   sandboxSaveCommand   `cmd:"" help:"Save the home of a running sandbox."`
	Resume sandboxResumeCommand `cmd:"" help:"Start a paused sandbox again."`
	Rm     sandboxRmCommand     `cmd:"" help:"End a sandbox for good."`
}

// wholeSeconds returns a duration of a flag in seconds, 0 if the flag is not given.
func wholeSeconds(flag string, d *duration) (int, error) {
	if d == nil {
		return 0, nil
	}
	n := time.Duration(*d)
	if n < time.Second || n%time.Second != 0 {
		return 0, usagef("%s %s: give whole seconds, at least 1", flag, n)
	}
	return int(n / time.Second), nil
}

// sandboxArg is the argument that names a sandbox.
type sandboxArg struct {
	ID string `arg:"" name:"sandbox" help:"Id of the sandbox: i…"`
}

// Validate checks the id before anything is sent.
func (a *sandboxArg) Validate() error { return checkSandboxID(a.ID) }

func checkSandboxID(id string) error {
	if !proto.ValidSandboxID(id) {
		return fmt.Errorf("%q is not a sandbox's id", id)
	}
	return nil
}

func printSandbox(p *page, x *api.LiveSandbox) {
	p.row("sandbox", x.ID)
	if x.Name != "" {
		p.row("name", x.Name)
	}
	p.row("state", x.State)
	p.optional("reason", x.Reason)
	p.optional("message", x.Message)
	if x.Profile != "" {
		p.row("profile", x.Profile)
	}
	p.row("key", x.KeyID)
	p.optional("thread", x.ThreadID)
	p.row("on timeout", x.OnTimeout)
	if x.IdleTimeout != nil {
		p.row("idle timeout", time.Duration(*x.IdleTimeout)*time.Second)
	}
	p.row("starts", x.Starts)
	p.row("execution", x.TraceID)
	p.row("created", x.CreatedAt)
	p.row("started", x.StartedAt)
	if x.StoppedAt == nil {
		p.row("expires", x.ExpiresAt)
	} else {
		p.row("stopped", x.StoppedAt)
	}
	p.metadata(x.Metadata)
}

type sandboxCreateCommand struct {
	remote      `embed:""`
	Name        string    `short:"n" placeholder:"NAME" help:"Name of the sandbox, for people."`
	Timeout     *duration `short:"t" placeholder:"DURATION" help:"Stop the sandbox after this time, such as 90 (seconds) or 1h. It can be extended. Default: the server's, 5m."`
	IdleTimeout *duration `placeholder:"DURATION" help:"Stop the sandbox after this time without a request to it."`
	OnTimeout   string    `placeholder:"kill|pause" help:"What the end of a timeout leaves: nothing (kill), or the home, so that the sandbox can be resumed (pause). Default: kill."`
	Env         []string  `short:"e" sep:"none" placeholder:"NAME=VALUE" help:"Environment variable of all processes. Repeatable."`
	Metadata    []string  `short:"m" sep:"none" placeholder:"NAME=VALUE" help:"Metadata to store with the sandbox. Repeatable."`
	Thread      string    `placeholder:"ID" help:"Use the home directory of this thread, which stays when the sandbox ends. Default: a home that is removed with the sandbox."`
	Profile     string    `placeholder:"NAME" help:"Sandbox profile to run in, one that the API key may choose. Default: the key's own."`
	Quiet       bool      `short:"q" help:"Print only the id."`
}

func (*sandboxCreateCommand) Help() string {
	return `Returns when commands can be run in the sandbox.

Examples:

  bullpen sandbox create -n build -t 1h --on-timeout pause
  id=$(bullpen sandbox create -q --idle-timeout 10m)`
}

// request returns the request that the flags describe.
func (c *sandboxCreateCommand) request() (*api.SandboxRequest, error) {
	r := &api.SandboxRequest{
		Name: c.Name, Profile: c.Profile, OnTimeout: proto.SandboxStop(c.OnTimeout), ThreadID: c.Thread,
	}
	var err error
	if r.Timeout, err = wholeSeconds("--timeout", c.Timeout); err != nil {
		return nil, err
	}
	if r.IdleTimeout, err = wholeSeconds("--idle-timeout", c.IdleTimeout); err != nil {
		return nil, err
	}
	if r.Env, err = nameValues("-e", c.Env); err != nil {
		return nil, err
	}
	if r.Metadata, err = nameValues("-m", c.Metadata); err != nil {
		return nil, err
	}
	if c.OnTimeout != "" && !slices.Contains(proto.SandboxStops(), r.OnTimeout) {
		return nil, usagef("--on-timeout %q: give kill or pause", c.OnTimeout)
	}
	if c.Thread != "" {
		if err := proto.CheckThreadID("--thread", c.Thread); err != nil {
			return nil, usageError{err}
		}
	}
	return r, nil
}

func (c *sandboxCreateCommand) Run(ctx context.Context, s streams) error {
	r, err := c.request()
	if err != nil {
		return err
	}
	err = request(s, &c.remote, func(cl *client.Client) (*api.LiveSandbox, error) {
		return cl.CreateSandbox(ctx, r)
	}, func(p *page, x *api.LiveSandbox) {
		if c.Quiet {
			p.textf("%s\n", x.ID)
			return
		}
		printSandbox(p, x)
	})
	return uncertain(err, "see bullpen sandbox list")
}

type sandboxListCommand struct {
	remote `embed:""`
	State  string `short:"s" placeholder:"STATE" help:"Only sandboxes in this state: starting, running, stopping, paused or ended."`
	Name   string `short:"n" placeholder:"NAME" help:"Only sandboxes of this name."`
}

func (*sandboxListCommand) Help() string {
	return `The newest comes first. Sandboxes that have ended stay in the list for a day.

Examples:

  bullpen sandbox list --state running
  bullpen sandbox rm $(bullpen sandbox list --name build --json | jq -r '.[].id')`
}

func (c *sandboxListCommand) Run(ctx context.Context, s streams) error {
	filter := client.SandboxFilter{State: proto.SandboxState(c.State), Name: c.Name}
	if c.State != "" && !slices.Contains(proto.SandboxStates(), filter.State) {
		return usagef("--state %q: give starting, running, stopping, paused or ended", c.State)
	}
	return list(s, &c.remote, func(cl *client.Client) iter.Seq2[api.LiveSandbox, error] {
		return cl.Sandboxes(ctx, filter)
	}, func(p *page, list []api.LiveSandbox) {
		p.row("ID", "NAME", "STATE", "REASON", "STARTED", "EXPIRES")
		for i := range list {
			x := &list[i]
			expires := "-"
			if x.StoppedAt == nil {
				expires = cell(x.ExpiresAt)
			}
			p.row(x.ID, x.Name, x.State, x.Reason, x.StartedAt, expires)
		}
	})
}

type sandboxShowCommand struct {
	remote     `embed:""`
	sandboxArg `embed:""`
}

func (c *sandboxShowCommand) Run(ctx context.Context, s streams) error {
	return request(s, &c.remote, func(cl *client.Client) (*api.LiveSandbox, error) {
		return cl.Sandbox(ctx, c.ID)
	}, printSandbox)
}

type sandboxExtendCommand struct {
	remote     `embed:""`
	sandboxArg `embed:""`
	Timeout    *duration `short:"t" placeholder:"DURATION" help:"Time from now. Default: the timeout with which the sandbox was started last."`
}

func (c *sandboxExtendCommand) Run(ctx context.Context, s streams) error {
	timeout, err := wholeSeconds("--timeout", c.Timeout)
	if err != nil {
		return err
	}
	return request(s, &c.remote, func(cl *client.Client) (*api.LiveSandbox, error) {
		return cl.ExtendSandbox(ctx, c.ID, timeout)
	}, printSandbox)
}

type sandboxLogsCommand struct {
	remote     `embed:""`
	sandboxArg `embed:""`
}

func (*sandboxLogsCommand) Help() string {
	return `Prints the output of the processes that clients have started since the last start of the sandbox, each line
with the id of its process. Logs are kept as long as results of executions, also when the sandbox has ended.`
}

func (c *sandboxLogsCommand) Run(ctx context.Context, s streams) error {
	return request(s, &c.remote, func(cl *client.Client) (*api.SandboxLogs, error) {
		return cl.SandboxLogs(ctx, c.ID)
	}, func(p *page, logs *api.SandboxLogs) {
		for i := range logs.Entries {
			e := &logs.Entries[i]
			switch e.Type {
			case "start":
				p.textf("%d  $ %s\n", e.PID, e.Command)
			case "output":
				p.textf("%d  %s\n", e.PID, strings.TrimSuffix(e.Text, "\n"))
			case "end":
				p.textf("%d  exit code %d\n", e.PID, *e.ExitCode)
			case "dropped":
				p.textf("--- %d entries are missing\n", e.Count)
			}
		}
		if logs.Truncated {
			p.textf("--- the log was too long, and has not all of the output\n")
		}
	})
}

type sandboxPauseCommand struct {
	remote     `embed:""`
	sandboxArg `embed:""`
}

func (*sandboxPauseCommand) Help() string {
	return `Processes get SIGTERM, and SIGKILL after 5 seconds. Returns when the home is saved.`
}

func (c *sandboxPauseCommand) Run(ctx context.Context, s streams) error {
	return request(s, &c.remote, func(cl *client.Client) (*api.LiveSandbox, error) {
		return cl.PauseSandbox(ctx, c.ID)
	}, printSandbox)
}

type sandboxSaveCommand struct {
	remote     `embed:""`
	sandboxArg `embed:""`
}

func (*sandboxSaveCommand) Help() string {
	return `Stores the files of the home, and no processes. The processes stand still for a moment, at most 2 seconds,
and run on. If the sandbox's worker is lost, a resume starts with these files.`
}

func (c *sandboxSaveCommand) Run(ctx context.Context, s streams) error {
	return request(s, &c.remote, func(cl *client.Client) (*api.SandboxSave, error) {
		return cl.SaveSandbox(ctx, c.ID)
	}, func(p *page, saved *api.SandboxSave) { p.textf("saved as version %d\n", saved.Version) })
}

type sandboxResumeCommand struct {
	remote     `embed:""`
	sandboxArg `embed:""`
	Timeout    *duration `short:"t" placeholder:"DURATION" help:"Stop the sandbox after this time. Default: the timeout of its last start."`
}

func (c *sandboxResumeCommand) Run(ctx context.Context, s streams) error {
	timeout, err := wholeSeconds("--timeout", c.Timeout)
	if err != nil {
		return err
	}
	return request(s, &c.remote, func(cl *client.Client) (*api.LiveSandbox, error) {
		return cl.ResumeSandbox(ctx, c.ID, timeout)
	}, printSandbox)
}

type sandboxRmCommand struct {
	remote `embed:""`
	IDs    []string `arg:"" name:"sandbox" help:"Ids of the sandboxes: i…"`
}

func (*sandboxRmCommand) Help() string {
	return `Its home is removed with it, unless it is that of a thread that was given when the sandbox was created.`
}

// Validate checks the ids before anything is sent.
func (c *sandboxRmCommand) Validate() error {
	for _, id := range c.IDs {
		if err := checkSandboxID(id); err != nil {
			return err
		}
	}
	return nil
}

func (c *sandboxRmCommand) Run(ctx context.Context, s streams) error {
	return compose(s, &c.remote, func(cl *client.Client) (ended []api.LiveSandbox, err error) {
		for _, id := range c.IDs {
			x, err := cl.DeleteSandbox(ctx, id)
			if err != nil {
				return nil, err
			}
			ended = append(ended, *x)
		}
		return ended, nil
	}, func(p *page, ended []api.LiveSandbox) {
		for i := range ended {
			p.textf("%s is removed\n", ended[i].ID)
		}
	})
}
