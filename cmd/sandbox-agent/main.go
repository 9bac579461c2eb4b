// Command sandbox-agent serves the Sandbox Agent API with an embedded bullpen server. It has the
// original's command line, so clients that start a server only need SANDBOX_AGENT_BIN.
package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"syscall"

	"github.com/alecthomas/kong"

	"github.com/bullpen-run/bullpen/cmd/internal/app"
)

// The exit codes.
const (
	exitFailure = 1
	exitUsage   = 2
)

const description = `Serve or call the Sandbox Agent API. The server is an embedded bullpen server.

  sandbox-agent server --token "$TOKEN"
  SANDBOX_AGENT_BIN=$(command -v sandbox-agent) node app.js    # for SandboxAgent.start()`

// access holds the token that a client and a server share.
type access struct {
	Token   string `short:"t" placeholder:"TOKEN" help:"Token for requests."`
	NoToken bool   `short:"n" help:"Requests need no token."`
}

type commands struct {
	VersionFlag kong.VersionFlag `name:"version" short:"V" help:"Print the version."`
	access      `embed:""`

	Server serverCommand `cmd:"" help:"Run a server."`
	API    apiCommands   `cmd:"" name:"api" help:"Call a server."`

	Opencode     unsupportedCommand `cmd:"" hidden:"" passthrough:""`
	Daemon       unsupportedCommand `cmd:"" hidden:"" passthrough:""`
	InstallAgent unsupportedCommand `cmd:"" hidden:"" passthrough:""`
	Credentials  unsupportedCommand `cmd:"" hidden:"" passthrough:""`
}

// unsupportedCommand is a command of the original that this program does not have.
type unsupportedCommand struct {
	Args []string `arg:"" optional:""`
}

func (unsupportedCommand) Run(k *kong.Context) error {
	return fmt.Errorf("%s is not a command of bullpen's sandbox-agent: it has server and api", k.Selected().Name)
}

func main() {
	// The worker starts this for each execution with mounts. Skipping the command parser saves
	// time.
	if len(os.Args) == 3 && os.Args[1] == app.MountServer {
		if app.ServeMounts(os.Args[2]) != nil { // nobody reads the error; the worker sees the process exit
			os.Exit(exitFailure)
		}
		return
	}
	os.Exit(run(os.Args[1:], os.Stdout, os.Stderr))
}

func run(args []string, stdout, stderr io.Writer) int {
	all := new(commands)
	parser, err := kong.New(all,
		kong.Name("sandbox-agent"),
		kong.Description(description),
		kong.ConfigureHelp(kong.HelpOptions{Compact: true, NoExpandSubcommands: true, WrapUpperBound: 110}),
		kong.Writers(stdout, stderr),
		kong.BindTo(stdout, (*io.Writer)(nil)),
		kong.Bind(&all.access),
		kong.Vars{"version": "sandbox-agent of bullpen " + app.Version(), "endpoint": defaultEndpoint},
	)
	if err != nil {
		return report(stderr, err)
	}
	if len(args) == 0 {
		args = []string{"--help"}
	}
	cmd, err := parser.Parse(args)
	if err != nil {
		_, _ = fmt.Fprintf(stderr, "sandbox-agent: %v\nSee --help of the command.\n", err)
		return exitUsage
	}
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop() // not earlier: at Ctrl-C in a terminal, a parent process sends a second signal
	cmd.BindTo(ctx, (*context.Context)(nil))
	return report(stderr, cmd.Run())
}

// report prints err and returns the exit code for it.
func report(stderr io.Writer, err error) int {
	if err == nil {
		return 0
	}
	if !errors.Is(err, context.Canceled) {
		_, _ = fmt.Fprintf(stderr, "sandbox-agent: %v\n", err)
	}
	return exitFailure
}
