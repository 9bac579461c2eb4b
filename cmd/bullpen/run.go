package main

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strings"
	"sync/atomic"
	"time"
	"unicode/utf8"

	"github.com/bullpen-run/bullpen/client"
	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/proto/api"
)

const (
	// cancelTimeout bounds the request that cancels a program when the command is interrupted.
	cancelTimeout = 10 * time.Second
	// queuedAfter is how long a program waits in the queue before a progress message reports it.
	queuedAfter = 2 * time.Second
)

// programFlags describe a program to run.
type programFlags struct {
	Language  string         `name:"lang" short:"l" placeholder:"LANG" help:"Language: ${languages}. Default: from the file name, then from the first line; python for standard input."`
	Timeout   *int           `short:"t" placeholder:"SECONDS" help:"Kill the program after this time. Default: the server's, 60."`
	KillGrace *time.Duration `name:"kill-grace" placeholder:"DURATION" help:"Time between SIGTERM and SIGKILL, such as 1.5s; at most 3s, async 30s. Default: 2s after a cancel, none after the timeout."`
	Env       []string       `short:"e" sep:"none" placeholder:"NAME=VALUE" help:"Environment variable of the program. Repeatable."`
	Metadata  []string       `short:"m" sep:"none" placeholder:"NAME=VALUE" help:"Metadata to store with the execution. Repeatable."`
	Profile   string         `placeholder:"NAME" help:"Sandbox profile to run in, one that the API key may choose. Default: the key's own."`
	Image     string         `placeholder:"IMAGE" help:"Image to run in instead of the profile's (global admin)."`
	Thread    string         `placeholder:"ID" help:"Run in this thread, with the home directory that its last execution left. Created if it does not exist."`
	Stdin     string         `placeholder:"FILE" help:"Standard input of the program, up to 1 MiB: a file, or - for standard input. Empty by default."`
	File      string         `arg:"" help:"The program, or - for standard input."`
	Args      []string       `arg:"" optional:"" name:"args" help:"Arguments of the program, after --."`
}

type runCommand struct {
	remote         `embed:""`
	programFlags   `embed:""`
	Rich           bool          `help:"Run the Python program as one cell of a notebook, and show its results: values, tables, pictures."`
	SaveResults    string        `name:"save-results" placeholder:"DIR" help:"With --rich: save pictures in this directory. Default: the current one."`
	Async          bool          `help:"Print the execution's id and exit. See bullpen wait and bullpen logs."`
	WebhookURL     string        `name:"webhook-url" placeholder:"URL" help:"With --async: send the result to this URL."`
	IdempotencyKey string        `placeholder:"KEY" help:"With --async: repeating the command with the same key returns the first execution."`
	At             time.Time     `name:"at" placeholder:"TIME" help:"With --async: run at this time, such as 2026-01-31T12:00:00Z."`
	Delay          time.Duration `placeholder:"DURATION" help:"With --async: run after this time, such as 10m."`
	Quiet          bool          `short:"q" help:"Do not print the execution's id or progress on standard error."`
}

func (*runCommand) Help() string {
	return `Streams stdout and stderr of the program byte for byte, and prints the execution's id on stderr. Reconnects
without losing or repeating output. Ctrl-C cancels the program, which gets SIGTERM; a second Ctrl-C exits at once.

Exit codes: ` + exitCodesHelp + `

--rich prints the value of the program's last expression, and saves each picture that the program shows, such as a
figure of matplotlib, as PROGRAM-1.png, PROGRAM-2.png and so on. It replaces files of these names. Terminals that can
show pictures (kitty, Ghostty, iTerm2, WezTerm, mintty, foot and others) also show them.

--json prints the execution's events, one JSON object per line, and saves no pictures. The last is the result.

Examples:

  bullpen run hello.py
  bullpen run -t 10 -e NAME=you greet.sh
  bullpen run --stdin data.csv sum.py -- --column 3
  bullpen run --thread notebook-1 cell.py
  bullpen run --image slim hello.py
  bullpen run --rich --save-results pictures plot.py
  echo 'print(6 * 7)' | bullpen run -
  bullpen run --async --webhook-url https://example.com/hook long.py
  bullpen run --async --delay 10m report.py`
}

func (c *runCommand) Run(ctx context.Context, s streams) error {
	if err := c.checkFlags(); err != nil {
		return unknownOutcome(err)
	}
	req, err := c.request(s.in)
	if err != nil {
		return unknownOutcome(err)
	}
	req.WebhookURL, req.Rich = c.WebhookURL, c.Rich
	req.Delay = proto.Seconds(c.Delay)
	if !c.At.IsZero() {
		req.RunAt = &api.Time{Time: c.At}
	}
	s.terminal = s.terminal && !c.Quiet
	cl, err := c.client(s)
	if err != nil {
		return unknownOutcome(err)
	}
	if c.Async {
		return unknownOutcome(c.submit(ctx, s, cl, req))
	}
	f := &follower{api: cl, printer: eventPrinter{streams: s, json: c.JSON}, announce: !c.Quiet && !c.JSON}
	if c.Rich && !c.JSON {
		f.printer.results = newResultPrinter(s, c.SaveResults, c.File)
		f.printer.results.quiet = c.Quiet
	}
	f.queued = time.AfterFunc(queuedAfter, func() { s.progressf("waiting for a free slot") })
	defer f.queued.Stop()
	err = f.run(ctx, func(ctx context.Context) error { return each(cl.Stream(ctx, req), f.event) })
	refused, ok := errors.AsType[*client.Error](err)
	if ok && refused.Status == http.StatusTooManyRequests && refused.RetryAfter == 0 {
		// The plan forbids streaming, or forbids something that an inline request reports as well.
		return c.inline(ctx, f, req)
	}
	if err != nil {
		return unknownOutcome(err)
	}
	return resultOutcome(f.trace(), f.result)
}

func (c *runCommand) submit(ctx context.Context, s streams, cl *client.Client, req api.ExecuteRequest) error {
	a, err := cl.Submit(ctx, req, c.IdempotencyKey)
	if err != nil {
		return err
	}
	return show(s, c.JSON, a, func(p *page, a *api.Accepted) { p.textf("%s\n", a.TraceID) })
}

// inline runs the program without streaming.
func (c *runCommand) inline(ctx context.Context, f *follower, req api.ExecuteRequest) error {
	result, err := f.api.Execute(ctx, req)
	if ctx.Err() != nil {
		err := errors.New("interrupted; without streaming, a started program runs until it ends or exceeds its timeout")
		return exitError{exitInterrupted, err}
	}
	if err != nil {
		return unknownOutcome(err)
	}
	id := result.TraceID
	f.started(id)
	if !c.JSON {
		if err := exactOutputs(ctx, f.api, id, &result.Result); err != nil {
			return unknownOutcome(err)
		}
	}
	if err := f.printer.result(id, &result.Result); err != nil {
		return unknownOutcome(err)
	}
	return resultOutcome(id, &result.Result)
}

// exactOutputs replaces a result's outputs that are not UTF-8 by their exact bytes.
func exactOutputs(ctx context.Context, cl *client.Client, id proto.TraceID, r *proto.Result) error {
	for _, o := range []struct {
		inexact bool
		of      proto.Stream
		text    *string
	}{{r.StdoutInvalidUTF8, proto.Stdout, &r.Stdout}, {r.StderrInvalidUTF8, proto.Stderr, &r.Stderr}} {
		if !o.inexact {
			continue
		}
		raw, err := cl.RawOutput(ctx, id, o.of)
		if err != nil {
			return err
		}
		*o.text = string(raw)
	}
	return nil
}

// checkFlags checks the flags that need others.
func (c *runCommand) checkFlags() error {
	switch {
	case c.SaveResults != "" && (!c.Rich || c.Async || c.JSON):
		return usagef("--save-results needs --rich, without --async and --json")
	case !c.Async && c.WebhookURL != "":
		return usagef("--webhook-url needs --async")
	case !c.Async && c.IdempotencyKey != "":
		return usagef("--idempotency-key needs --async")
	case !c.Async && !c.At.IsZero():
		return usagef("--at needs --async")
	case !c.Async && c.Delay != 0:
		return usagef("--delay needs --async")
	case c.Delay < 0:
		return usagef("--delay must not be negative")
	case c.Delay > 0 && !c.At.IsZero():
		return usagef("--at and --delay exclude each other")
	default:
		return nil
	}
}

// request returns the request that the flags and arguments describe.
func (c *programFlags) request(stdin io.Reader) (api.ExecuteRequest, error) {
	req := api.ExecuteRequest{Profile: c.Profile, Image: c.Image, ThreadID: c.Thread, Args: c.Args}
	var err error
	if err = c.check(); err != nil {
		return req, err
	}
	if req.Env, err = nameValues("-e", c.Env); err != nil {
		return req, err
	}
	if req.Metadata, err = nameValues("-m", c.Metadata); err != nil {
		return req, err
	}
	if c.Timeout != nil {
		req.Timeout = *c.Timeout
	}
	if c.KillGrace != nil {
		req.KillGrace = new(proto.Seconds(*c.KillGrace))
	}
	if req.Code, err = readText(c.File, stdin, proto.MaxCodeBytes); err != nil {
		return req, fmt.Errorf("read the program: %w", err)
	}
	if req.Code == "" {
		return req, fmt.Errorf("read the program: %s is empty", c.File)
	}
	if c.Stdin != "" {
		if req.Stdin, err = readText(c.Stdin, stdin, proto.MaxStdinBytes); err != nil {
			return req, fmt.Errorf("read --stdin: %w", err)
		}
	}
	req.Language, err = c.language([]byte(req.Code))
	return req, err
}

// check checks the flags that need no file.
func (c *programFlags) check() error {
	switch {
	case c.Timeout != nil && *c.Timeout < 1:
		return usagef("-t %d: give a whole number of seconds, at least 1", *c.Timeout)
	case c.KillGrace != nil && *c.KillGrace < 0:
		return usagef("--kill-grace must not be negative")
	case c.Language != "" && !slices.Contains(proto.Languages(), proto.Language(c.Language)):
		return usagef("-l %q: give %s", c.Language, languageNames())
	case c.Stdin == "-" && c.File == "-":
		return usagef("standard input is either the program or, with --stdin -, its input")
	}
	if c.Thread != "" {
		if err := proto.CheckThreadID("--thread", c.Thread); err != nil {
			return usageError{err}
		}
	}
	return nil
}

// readText reads a file of UTF-8 text, at most limit bytes; - is stdin.
func readText(path string, stdin io.Reader, limit int) (string, error) {
	in := stdin
	if path != "-" {
		f, err := os.Open(path)
		if err != nil {
			return "", err
		}
		defer f.Close() //nolint:errcheck // only read
		in = f
	}
	text, err := io.ReadAll(io.LimitReader(in, int64(limit)+1))
	switch {
	case err != nil:
		return "", err
	case len(text) > limit:
		return "", fmt.Errorf("%s is longer than %d bytes", path, limit)
	case !utf8.Valid(text):
		return "", fmt.Errorf("%s is not UTF-8 text", path)
	}
	return string(text), nil
}

// language returns the flag's language, otherwise the file name's, otherwise the first line's.
func (c *programFlags) language(code []byte) (proto.Language, error) {
	if c.Language != "" {
		return proto.Language(c.Language), nil
	}
	extension := strings.ToLower(filepath.Ext(c.File))
	for _, r := range proto.Runtimes() {
		if slices.Contains(r.Extensions, extension) {
			return r.Language, nil
		}
	}
	line, _, _ := bufio.ScanLines(code, true) // the offset to the next line
	if l, ok := shebangLanguage(string(code[:line])); ok {
		return l, nil
	}
	if c.File == "-" {
		return proto.Python, nil
	}
	return "", usagef("%s: its name and its first line do not show its language: give -l %s", c.File, languageNames())
}

// shebangLanguage returns the language of the interpreter in a program's first line.
func shebangLanguage(line string) (proto.Language, bool) {
	command, ok := strings.CutPrefix(line, "#!")
	if !ok {
		return "", false
	}
	for field := range strings.FieldsSeq(command) {
		name := strings.TrimRight(path.Base(field), "0123456789.")
		for _, r := range proto.Runtimes() {
			if name == string(r.Language) || slices.Contains(r.Interpreters, name) ||
				name != "" && slices.Contains(r.Extensions, "."+name) {
				return r.Language, true
			}
		}
	}
	return "", false
}

// languageNames lists the languages for an error.
func languageNames() string {
	var names []string
	for _, l := range proto.Languages() {
		names = append(names, string(l))
	}
	last := len(names) - 1
	return strings.Join(names[:last], ", ") + " or " + names[last]
}

// nameValues parses the NAME=VALUE items of a flag.
func nameValues(flag string, items []string) (map[string]string, error) {
	m := make(map[string]string, len(items))
	for _, item := range items {
		name, value, ok := strings.Cut(item, "=")
		if !ok || name == "" {
			return nil, usagef("%s %q: write NAME=VALUE", flag, item)
		}
		if _, twice := m[name]; twice {
			return nil, usagef("%s %q: %s is given twice", flag, item, name)
		}
		m[name] = value
	}
	return m, nil
}

// follower prints the events of an execution and cancels it when the command is interrupted.
type follower struct {
	api      *client.Client
	printer  eventPrinter
	announce bool        // print the execution's id when it is known
	queued   *time.Timer // prints a message while the program has not started

	id     atomic.Pointer[proto.TraceID] // nil until it is known
	result *proto.Result                 // nil until the program ended
}

func (f *follower) event(e *client.Event) error {
	f.queued.Stop()
	if e.TraceID != "" {
		f.started(e.TraceID)
	}
	f.result = e.Result
	return f.printer.event(e)
}

// started stores the execution's id and, the first time, prints it.
func (f *follower) started(id proto.TraceID) {
	if f.id.Swap(&id) == nil && f.announce {
		f.printer.errorf("execution %s", id)
	}
}

// trace returns the execution's id, or "" if it is not known.
func (f *follower) trace() proto.TraceID {
	if id := f.id.Load(); id != nil {
		return *id
	}
	return ""
}

// run calls stream with a context that outlives ctx, so that the output of a cancelled program is
// still printed. When ctx is done, run cancels the execution, whose result then ends the stream. If
// its id is not known yet, run only disconnects: the server withdraws a program that has not
// started and has no client.
func (f *follower) run(ctx context.Context, stream func(context.Context) error) error {
	streamCtx, disconnect := context.WithCancelCause(context.WithoutCancel(ctx))
	defer disconnect(nil)
	stop := context.AfterFunc(ctx, func() {
		id := f.trace()
		if id == "" {
			disconnect(context.Canceled)
			return
		}
		cancelCtx, done := context.WithTimeout(streamCtx, cancelTimeout)
		defer done()
		if _, err := f.api.Cancel(cancelCtx, id); err != nil {
			disconnect(fmt.Errorf("cancel %s: %w", id, err))
		}
	})
	defer stop()
	return stream(streamCtx)
}
