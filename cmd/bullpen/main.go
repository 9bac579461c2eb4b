// Command bullpen runs untrusted programs. It is both the server, in all its roles, and the
// command-line client.
package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"strings"
	"syscall"

	"github.com/alecthomas/kong"
	"golang.org/x/sys/unix"

	"github.com/bullpen-run/bullpen/cmd/internal/app"
	"github.com/bullpen-run/bullpen/proto/api"
	"github.com/bullpen-run/bullpen/worker/agents"
)

// The exit codes of every command. `bullpen run`, `logs --follow` and `wait` have more, see
// outcome.go.
const (
	exitOK          = 0
	exitFailure     = 1
	exitUsage       = 2
	exitInterrupted = 130
)

// exitError ends the program with a code. Its error, if any, is printed.
type exitError struct {
	code int
	err  error
}

func (e exitError) Error() string { return fmt.Sprintf("exit code %d: %v", e.code, e.err) }

// usageError is an error in the command line, or in a variable that stands in for a flag.
type usageError struct{ error }

func usagef(format string, args ...any) error { return usageError{fmt.Errorf(format, args...)} }

// streams are the standard streams of a command.
type streams struct {
	in       io.Reader
	out, err io.Writer
	// terminal reports whether err is a terminal. Progress is shown only there.
	terminal bool
}

// errorf prints a message on standard error.
func (s streams) errorf(format string, args ...any) {
	_, _ = fmt.Fprintf(s.err, "bullpen: "+format+"\n", args...)
}

// progressf prints a progress message if standard error is a terminal.
func (s streams) progressf(format string, args ...any) {
	if s.terminal {
		s.errorf(format, args...)
	}
}

// clearScreen moves to the upper left corner of a terminal and clears it.
const clearScreen = "\x1b[H\x1b[J"

// clear clears the screen if standard output is a terminal.
func (s streams) clear() (err error) {
	if f, ok := s.out.(*os.File); ok && isTerminal(f) {
		_, err = io.WriteString(f, clearScreen)
	}
	return err
}

func isTerminal(f *os.File) bool {
	_, err := unix.IoctlGetTermios(int(f.Fd()), unix.TCGETS)
	return err == nil
}

const description = `Run untrusted code in jails, on your own machines.

Start a server with bullpen serve. The other commands are clients of a server. They read these variables:

  BULLPEN_URL      URL of the server (default http://127.0.0.1:8080)
  BULLPEN_API_KEY  API key; a new server writes the first one to bootstrap.key in its data directory

Commands marked (admin) need a key with the scope admin; those about the whole server, a global administrator's.

Exit codes: 0 success, 1 failure, 2 wrong usage, 130 interrupted. bullpen run, logs --follow, wait and sandbox exec
exit with the program's exit code, bullpen batch run as its help says.`

// memberCommands manage the members of organisations.
type memberCommands = resourceCommands[api.Member, api.MemberRequest, api.MemberSettings]

type commands struct {
	Serve      serveCommand       `cmd:"" help:"Run a server."`
	Up         upCommand          `cmd:"" help:"Start a deployment of many processes on this machine, for tests and demonstrations."`
	Init       initCommand        `cmd:"" help:"Create an image, a sandbox profile and an API key for data analysis, E2B's clients or coding agents (global admin)."`
	Run        runCommand         `cmd:"" help:"Run a program and stream its output."`
	Get        getCommand         `cmd:"" help:"Show an execution."`
	Ls         lsCommand          `cmd:"" help:"List executions."`
	Trace      traceCommand       `cmd:"" help:"Show when the steps of an execution happened."`
	Logs       logsCommand        `cmd:"" help:"Print the output of an execution."`
	Wait       waitCommand        `cmd:"" help:"Wait until executions end."`
	Cancel     cancelCommand      `cmd:"" help:"Cancel an execution."`
	Queue      queueCommand       `cmd:"" help:"Show what is queued and running, and queue positions."`
	Usage      usageCommand       `cmd:"" help:"Show what executions used."`
	Batch      batchCommands      `cmd:"" help:"Run many programs as one batch."`
	CI         ciCommands         `cmd:"" name:"ci" help:"Run pipelines: steps that depend on each other."`
	Image      imageCommands      `cmd:"" help:"Manage sandbox images (admin)."`
	Secret     secretCommands     `cmd:"" help:"Manage secrets of organisations (admin)."`
	Connection connectionCommands `cmd:"" help:"Manage storage connections of organisations (admin)."`
	Volume     volumeCommands     `cmd:"" help:"Manage volumes, storage connections in the server's own store (admin)."`
	Org        orgCommands        `cmd:"" help:"Manage organisations (admin)."`
	Plan       planCommands       `cmd:"" help:"Manage plans, the limits of organisations (admin)."`
	Member     memberCommands     `cmd:"" help:"Manage the people who sign in to organisations with a browser (admin)."`
	Session    sessionCommands    `cmd:"" help:"List and end the sessions of browsers (admin)."`
	Agent      agentCommands      `cmd:"" help:"Talk to coding agents, and try out agents without a model."`
	Apply      applyCommand       `cmd:"" help:"Create and update plans, organisations, sandbox profiles and API keys from a file (global admin)."`
	Export     exportCommand      `cmd:"" help:"Print plans, organisations, sandbox profiles and API keys as a file for apply (global admin)."`
	Key        keyCommands        `cmd:"" help:"Manage API keys (admin) and the webhook settings of a key."`
	MCP        mcpCommand         `cmd:"" name:"mcp" help:"Offer the server's tools to a language model, over standard input and output."`
	Sandbox    sandboxCommands    `cmd:"" help:"Create live sandboxes and run commands in them."`
	Schedule   scheduleCommands   `cmd:"" help:"Run programs at set times."`
	Profile    profileCommands    `cmd:"" help:"Manage sandbox profiles (admin)."`
	Thread     threadCommands     `cmd:"" help:"Manage threads and their files."`
	Files      filesCommands      `cmd:"" help:"List, copy, delete and rename files of threads and storage connections."`
	Webhook    webhookCommands    `cmd:"" help:"Inspect, replay, test and receive webhooks."`
	Workers    workersCommands    `cmd:"" help:"List and drain workers (admin)."`
	DeadLetter deadLetterCommands `cmd:"" name:"deadletter" help:"Manage dead letters: jobs that no worker could start (admin)."`
	Audit      auditCommands      `cmd:"" help:"Read and verify the log of administrative acts (admin)."`
	Autoscale  autoscaleCommands  `cmd:"" help:"Try out autoscaling policies."`
	Backup     backupCommand      `cmd:"" help:"Back up the JetStream data of a running server (admin)."`
	Restore    restoreCommand     `cmd:"" help:"Restore a backup into an empty deployment."`
	Bench      benchCommands      `cmd:"" help:"Measure a server."`
	Top        topCommand         `cmd:"" help:"Watch the queue, workers, executions and webhooks in the terminal."`
	Doctor     doctorCommand      `cmd:"" help:"Check that this machine can run jobs."`
	Version    versionCommand     `cmd:"" help:"Print the version."`
	Completion completionCommand  `cmd:"" help:"Print a completion script for a shell."`
	Man        manCommand         `cmd:"" help:"Print the manual page."`
	Complete   completeCommand    `cmd:"" name:"__complete" hidden:"" passthrough:""`
	NATS       natsCommand        `cmd:"" name:"__nats" hidden:""`
	Redis      redisCommand       `cmd:"" name:"__redis" hidden:""`
	Quickstart quickstartCommand  `cmd:"" hidden:"" help:"Start a temporary server and run a program in each language."`
}

func main() {
	// Started for each execution with mounts, so it starts without the parser of commands.
	if len(os.Args) == 3 && os.Args[1] == app.MountServer {
		if app.ServeMounts(os.Args[2]) != nil { // errors have no reader; the worker sees the end of the process
			os.Exit(exitFailure)
		}
		return
	}
	os.Exit(run(os.Args[1:], streams{in: os.Stdin, out: os.Stdout, err: os.Stderr, terminal: isTerminal(os.Stderr)}))
}

func newParser(s streams) (*kong.Kong, error) {
	return kong.New(&commands{Member: commandsOf(api.MemberResource)},
		kong.Name("bullpen"),
		kong.Description(description),
		kong.ConfigureHelp(kong.HelpOptions{Compact: true, NoExpandSubcommands: true, WrapUpperBound: 110}),
		kong.ValueFormatter(flagHelp),
		app.Durations(),
		kong.PostBuild(func(k *kong.Kong) error {
			k.Model.HelpFlag.Help = "Show this help."
			return completeHelp(k)
		}),
		kong.Writers(s.out, s.err),
		kong.Bind(s),
		kong.Vars{"languages": languageNames(), "agents": strings.Join(agents.Names(), ",")},
	)
}

// flagHelp returns the help of a flag or argument with its default and environment variable.
func flagHelp(value *kong.Value) string {
	var details []string
	if value.HasDefault && !strings.Contains(value.Help, "Default: ") {
		details = append(details, "default "+value.Default)
	}
	if value.Tag != nil {
		for _, env := range value.Tag.Envs {
			details = append(details, "$"+env)
		}
	}
	if len(details) == 0 {
		return value.Help
	}
	return value.Help + " [" + strings.Join(details, ", ") + "]"
}

func run(args []string, s streams) int {
	parser, err := newParser(s)
	if err != nil {
		return report(s, err)
	}
	switch {
	case len(args) == 0:
		args = []string{"--help"}
	case args[0] == "--version": // not a flag of the parser: commands have one of the same name
		args = []string{"version"}
	}
	cmd, err := parser.Parse(args)
	if err != nil {
		_, _ = fmt.Fprintf(s.err, "bullpen: %v\nSee `bullpen --help`, or --help of the command.\n", err)
		return exitUsage
	}
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	context.AfterFunc(ctx, stop) // a second signal ends the program at once
	cmd.BindTo(ctx, (*context.Context)(nil))
	return report(s, cmd.Run())
}

// report prints err and returns the exit code for it.
func report(s streams, err error) int {
	code := exitFailure
	if exit, ok := errors.AsType[exitError](err); ok {
		code, err = exit.code, exit.err
	} else if err == nil {
		return exitOK
	}
	_, usage := errors.AsType[usageError](err)
	switch {
	case err == nil:
	case errors.Is(err, context.Canceled):
		return exitInterrupted
	case usage:
		s.errorf("%v\nSee --help of the command.", err)
		return exitUsage
	default:
		s.errorf("%v", explain(err))
	}
	return code
}
