// Command bullpen runs untrusted programs: it is the server in all its roles, and the command line that speaks to one.
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

// The exit codes of bullpen itself. `bullpen run` has more of them, see its help.
const (
	exitOK      = 0
	exitFailure = 1
	exitUsage   = 2
)

// exitError ends the program with a code and no further words.
type exitError int

func (e exitError) Error() string { return fmt.Sprintf("exit code %d", int(e)) }

// usageError says that the command line, or a variable that stands in for a flag, is wrong.
type usageError struct{ error }

func usagef(format string, args ...any) error { return usageError{fmt.Errorf(format, args...)} }

// streams are where a command reads and writes.
type streams struct {
	in       io.Reader
	out, err io.Writer
	// watched says that somebody sits before err: only then is told what is of use while it lasts.
	watched bool
}

// note tells those who watch what goes on. Nothing of it is needed to understand the outcome.
func (s streams) note(format string, args ...any) {
	if s.watched {
		_, _ = fmt.Fprintf(s.err, "bullpen: "+format+"\n", args...)
	}
}

// isTerminal reports whether f is a device that shows characters.
func isTerminal(f *os.File) bool {
	info, err := f.Stat()
	return err == nil && info.Mode()&os.ModeCharDevice != 0
}

const description = `Run untrusted code in jails, on your own machines.

bullpen serve starts a server. The other commands speak to one, which they find by these variables:

  BULLPEN_URL      its address (http://127.0.0.1:8080)
  BULLPEN_API_KEY  the key; the first one is in bootstrap.key in the server's data directory

Exit codes: 0 it worked, 1 it did not, 2 the command line is wrong; bullpen run has that of the program.`

type commands struct {
	VersionFlag kong.VersionFlag `name:"version" hidden:""`

	Serve      serveCommand       `cmd:"" help:"Run the server: one process, no other service needed."`
	Run        runCommand         `cmd:"" help:"Run a program and stream its output."`
	Get        getCommand         `cmd:"" help:"Show an execution: how it stands, or its result."`
	Logs       logsCommand        `cmd:"" help:"Print the output of an execution."`
	Cancel     cancelCommand      `cmd:"" help:"End an execution."`
	Image      imageCommands      `cmd:"" help:"Build, import, list and remove images of sandboxes. Needs a key with all rights."`
	Key        keyCommands        `cmd:"" help:"Make, list and revoke API keys, with a key that has all rights; set the webhook of a key."`
	Sandbox    sandboxCommands    `cmd:"" help:"Make, show, list, replace and remove sandbox profiles. Needs a key with all rights."`
	Thread     threadCommands     `cmd:"" help:"List, fork, export, import and remove threads; list, get and put their files."`
	Webhook    webhookCommands    `cmd:"" help:"See what became of webhooks, send them again, test the key's URL, receive them for development."`
	DeadLetter deadLetterCommands `cmd:"" name:"deadletter" help:"List, show, run again and remove what was set aside: jobs that no worker lived to start. Needs a key with all rights."`
	Backup     backupCommand      `cmd:"" help:"Back up what a running server keeps in JetStream. Needs a key with all rights."`
	Restore    restoreCommand     `cmd:"" help:"Make an empty deployment hold what a backup does."`
	Doctor     doctorCommand      `cmd:"" help:"Check that this machine can run jobs, and say what to do where it cannot."`
	Version    versionCommand     `cmd:"" help:"Print the version."`
	Quickstart quickstartCommand  `cmd:"" hidden:"" help:"Start a server for a moment, run a program in each language, and stop."`
}

func main() {
	os.Exit(run(os.Args[1:], streams{in: os.Stdin, out: os.Stdout, err: os.Stderr, watched: isTerminal(os.Stderr)}))
}

func run(args []string, io streams) int {
	parser, err := kong.New(new(commands),
		kong.Name("bullpen"),
		kong.Description(description),
		kong.ConfigureHelp(kong.HelpOptions{Compact: true, NoExpandSubcommands: true, WrapUpperBound: 110}),
		kong.Writers(io.out, io.err),
		kong.Bind(io),
		kong.Vars{"version": "bullpen " + app.Version()},
	)
	if err != nil {
		return report(io, err)
	}
	if len(args) == 0 {
		args = []string{"--help"}
	}
	cmd, err := parser.Parse(args)
	if err != nil {
		_, _ = fmt.Fprintf(io.err, "bullpen: %v\nSee `bullpen --help`, and --help of each command.\n", err)
		return exitUsage
	}
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	context.AfterFunc(ctx, stop) // a second signal ends the program at once
	cmd.BindTo(ctx, (*context.Context)(nil))
	return report(io, cmd.Run())
}

// report says what went wrong, if anything, and gives the exit code.
func report(io streams, err error) int {
	var exit exitError
	var usage usageError
	switch {
	case err == nil:
		return exitOK
	case errors.As(err, &exit):
		return int(exit)
	case errors.Is(err, context.Canceled):
		return exitInterrupted
	case errors.As(err, &usage):
		_, _ = fmt.Fprintf(io.err, "bullpen: %v\nSee --help of the command.\n", err)
		return exitUsage
	default:
		_, _ = fmt.Fprintf(io.err, "bullpen: %v\n", explain(err))
		return exitFailure
	}
}
