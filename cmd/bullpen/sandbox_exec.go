package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"path"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"github.com/bullpen-run/bullpen/client"
	"github.com/bullpen-run/bullpen/proto"
)

// guestFlags are the flags of commands that call the guest of a sandbox.
type guestFlags struct {
	User string `short:"u" placeholder:"USER" help:"User of the sandbox: user or root. Default: user."`
}

// guestFailure makes an error of a guest printable: tenants choose its text.
func guestFailure(err error) error {
	if failed, ok := errors.AsType[*client.GuestError](err); ok {
		return fmt.Errorf("%s (%s)", strings.Map(printableLine, failed.Message), failed.Code)
	}
	return err
}

type sandboxExecCommand struct {
	remote     `embed:""`
	guestFlags `embed:""`
	sandboxArg `embed:""`
	Dir        string    `name:"cwd" short:"C" placeholder:"DIRECTORY" help:"Working directory, absolute or relative to the home. Default: the home."`
	Env        []string  `short:"e" sep:"none" placeholder:"NAME=VALUE" help:"Environment variable of the command. Repeatable."`
	Timeout    *duration `short:"t" placeholder:"DURATION" help:"Kill the command and what it has started after this time, such as 90 (seconds) or 10m. Default: no limit."`
	Input      bool      `name:"stdin" short:"i" help:"Pass standard input to the command."`
	Args       []string  `arg:"" name:"command" help:"The command and its arguments, after --."`
}

func (*sandboxExecCommand) Help() string {
	return `Streams stdout and stderr of the command byte for byte. Reconnects without losing or repeating output. Ctrl-C
ends the command, which gets SIGTERM, and SIGKILL after 5 seconds; after a second Ctrl-C it may run on.

Exit codes: the command's own, 128+N if signal N ended it, or

  124  the command exceeded its timeout
  125  the command could not run, or its outcome is unknown
  130  the command was interrupted
  2    wrong usage

--json prints the output as events, one JSON object per line. The last one says how the command ended.

Examples:

  bullpen sandbox exec ID -- python3 -c 'print(6 * 7)'
  bullpen sandbox exec ID -C project -e CI=1 -t 10m -- make test
  tar -c project | bullpen sandbox exec ID -i -- tar -x`
}

func (c *sandboxExecCommand) Run(ctx context.Context, s streams) error {
	command := &client.Command{Args: c.Args, Dir: c.Dir, Stdout: s.out, Stderr: s.err}
	if c.JSON {
		printer := &outputEvents{w: s.out}
		command.Stdout, command.Stderr = printer.of(proto.Stdout), printer.of(proto.Stderr)
	}
	var err error
	if command.Env, err = nameValues("-e", c.Env); err != nil {
		return err
	}
	if c.Timeout != nil {
		if command.Timeout = time.Duration(*c.Timeout); command.Timeout < time.Millisecond {
			return usagef("--timeout %s: give at least 1ms", command.Timeout)
		}
	}
	if c.Input {
		command.Stdin = s.in
	}
	cl, err := c.client(s)
	if err != nil {
		return unknownOutcome(err)
	}
	signal.Ignore(syscall.SIGPIPE) // which would end this program before the command
	exit, err := cl.Guest(c.ID, c.User).Exec(ctx, command)
	switch {
	case ctx.Err() != nil:
		return exitError{code: exitInterrupted}
	case errors.Is(err, syscall.EPIPE):
		return exitError{code: exitSignal + int(syscall.SIGPIPE)}
	case err != nil:
		return unknownOutcome(guestFailure(err))
	}
	if c.JSON {
		result := commandResult{proto.EventResult, exit.Code, exit.Signal, exit.TimedOut, exit.Lost}
		if err := printJSON(s.out, result); err != nil {
			return unknownOutcome(err)
		}
	} else if exit.Lost > 0 {
		s.errorf("%d bytes of the output are missing", exit.Lost)
	}
	switch {
	case exit.TimedOut:
		return exitError{exitTimeout, fmt.Errorf("the command exceeded its timeout of %s", command.Timeout)}
	case exit.Signal > 0:
		return exitError{code: exitSignal + exit.Signal}
	case exit.Code < 0:
		return unknownOutcome(errors.New("the sandbox did not say how the command ended"))
	case exit.Code > 0:
		return exitError{code: exit.Code}
	default:
		return nil
	}
}

// exitSignal is what shells add to the number of the signal that ended a command.
const exitSignal = 128

// commandResult is the last event of a command, as --json prints it.
type commandResult struct {
	Type     proto.EventType `json:"type"`
	ExitCode int             `json:"exit_code"` // -1 if the command did not exit
	Signal   int             `json:"signal"`    // that ended the command; 0 for none
	TimedOut bool            `json:"timed_out"`
	Lost     uint64          `json:"lost_bytes"` // of output
}

// outputEvents prints output as events.
type outputEvents struct {
	w   io.Writer
	seq int64
}

// of returns the writer for a stream.
func (o *outputEvents) of(stream proto.Stream) io.Writer { return outputEventsOf{o, stream} }

type outputEventsOf struct {
	*outputEvents
	stream proto.Stream
}

// Write implements [io.Writer].
func (o outputEventsOf) Write(p []byte) (int, error) {
	o.seq++
	if _, err := o.w.Write(proto.AppendOutputEvent(nil, o.stream, p, o.seq)); err != nil {
		return 0, err
	}
	return len(p), nil
}

type sandboxCpCommand struct {
	remote     `embed:""`
	guestFlags `embed:""`
	From       string `arg:"" help:"A local file, - for standard input, or ID:PATH, with PATH absolute or relative to the home."`
	To         string `arg:"" help:"The same, - for standard output; one of the two is in a sandbox. With a trailing slash, or if it is a local directory, the file keeps its own name there."`
}

func (*sandboxCpCommand) Help() string {
	return `Copies one file. Missing directories are created in the sandbox, and a file that exists is replaced. New files
have the mode 0644 and belong to the user.

Examples:

  bullpen sandbox cp input.csv ID:data/
  bullpen sandbox cp ID:result.json .
  bullpen sandbox cp ID:/var/log/app.log -

Directories go through tar:

  tar -c project | bullpen sandbox exec ID -i -- tar -x
  bullpen sandbox exec ID -- tar -c results | tar -x`
}

// sandboxPath is a path in a sandbox.
type sandboxPath struct{ id, path string }

// parseSandboxPath parses ID:PATH. ok is false for any other text.
func parseSandboxPath(text string) (at sandboxPath, ok bool) {
	id, path, found := strings.Cut(text, ":")
	if !found || !proto.ValidSandboxID(id) {
		return at, false
	}
	return sandboxPath{id, path}, true
}

func (c *sandboxCpCommand) Run(ctx context.Context, s streams) error {
	from, fromSandbox := parseSandboxPath(c.From)
	to, toSandbox := parseSandboxPath(c.To)
	if fromSandbox == toSandbox {
		return usagef("one of %q and %q must be a local file, and the other ID:PATH with the id of a sandbox", c.From, c.To)
	}
	cl, err := c.client(s)
	if err != nil {
		return err
	}
	var size int64
	if fromSandbox {
		size, err = c.download(ctx, s, cl, from)
	} else {
		size, err = c.upload(ctx, s, cl, to)
	}
	if err != nil {
		return guestFailure(err)
	}
	if c.To == "-" {
		return nil
	}
	return show(s, c.JSON, copied{Files: 1, Bytes: size}, func(p *page, done copied) {
		p.textf("copied %s to %s, %s\n", c.From, c.To, countOf(done))
	})
}

// download copies a file of a sandbox to a local one, which appears once it is complete.
func (c *sandboxCpCommand) download(
	ctx context.Context, s streams, cl *client.Client, from sandboxPath,
) (int64, error) {
	local := c.To
	if info, err := os.Stat(local); err == nil && info.IsDir() || strings.HasSuffix(local, "/") {
		name := path.Base(from.path)
		if !proto.ValidSegment(name) {
			return 0, usagef("%s does not name a file", c.From)
		}
		local = filepath.Join(local, name)
	}
	var size int64
	output := outputFlag{Output: local}
	err := output.write(s, func(w io.Writer) error {
		counted := &countingWriter{w: w}
		err := cl.Guest(from.id, c.User).Download(ctx, from.path, counted)
		size = counted.n
		return err
	})
	return size, err
}

// upload copies a local file to one of a sandbox.
func (c *sandboxCpCommand) upload(ctx context.Context, s streams, cl *client.Client, to sandboxPath) (int64, error) {
	guest := cl.Guest(to.id, c.User)
	keepsName := to.path == "" || strings.HasSuffix(to.path, "/")
	if c.From == "-" {
		if keepsName {
			return 0, usagef("%s does not name a file", c.To)
		}
		counted := &countingReader{r: s.in}
		err := guest.Upload(ctx, to.path, counted, -1)
		return counted.n, err
	}
	f, err := os.Open(c.From)
	if err != nil {
		return 0, err
	}
	defer f.Close() //nolint:errcheck // only read
	info, err := f.Stat()
	switch {
	case err != nil:
		return 0, err
	case info.IsDir():
		return 0, fmt.Errorf("%s is a directory: pack it with tar, as the help shows", c.From)
	case keepsName:
		to.path += filepath.Base(c.From)
	}
	counted, size := &countingReader{r: f}, int64(-1)
	if info.Mode().IsRegular() {
		size = info.Size()
	}
	err = guest.Upload(ctx, to.path, counted, size)
	return counted.n, err
}

type countingReader struct {
	r io.Reader
	n int64
}

// Read implements [io.Reader].
func (c *countingReader) Read(p []byte) (int, error) {
	n, err := c.r.Read(p)
	c.n += int64(n)
	return n, err
}
