package main

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"
	"unicode/utf8"

	"github.com/bullpen-run/bullpen/cmd/internal/client"
	"github.com/bullpen-run/bullpen/proto"
)

// The exit codes of `bullpen run` besides those of programs, as shells and container tools have them.
const (
	exitTimeout     = 124
	exitOurs        = 125
	exitInterrupted = 130
	exitMemory      = 137
	exitSeccomp     = 159
)

// cancelGrace is how long the request to end a program may take when the user is waiting for it.
const cancelGrace = 10 * time.Second

// queuedNote is how long a program may wait before those who watch are told that it does.
const queuedNote = 2 * time.Second

// retryNotes tells those who watch why a request is sent again, each reason once. A stream and the request to end its program may
// both be on their way.
func retryNotes(io streams) func(error) {
	var mu sync.Mutex
	var last string
	return func(err error) {
		mu.Lock()
		defer mu.Unlock()
		why := err.Error()
		if refused, ok := errors.AsType[*client.Error](err); ok {
			why = refused.Message // without the id of the request, which is another one each time
		}
		if why != last {
			io.note("trying again: %s", why)
		}
		last = why
	}
}

type runCommand struct {
	remote   `embed:""`
	Language string   `name:"lang" short:"l" placeholder:"LANG" help:"python, node or bash. Without it, what the file's name or its first line says; python for standard input."`
	Timeout  *int     `short:"t" placeholder:"SECONDS" help:"Time after which the program is killed (the server's default: 60)."`
	Env      []string `short:"e" sep:"none" placeholder:"NAME=VALUE" help:"Environment variable for the program. May be repeated."`
	Metadata []string `short:"m" sep:"none" placeholder:"NAME=VALUE" help:"Note to keep with the execution. May be repeated."`
	Thread   string   `placeholder:"ID" help:"Run in this thread: the program finds the home directory that the one before left there. The first makes it."`
	Async    bool     `help:"Print the execution's id and leave; see bullpen get and bullpen logs."`
	File     string   `arg:"" help:"The program, or - for standard input."`
}

// Help tells what --help does not know by itself.
func (*runCommand) Help() string {
	return `Standard output and standard error of the program come out as they are, as they come. A connection that breaks is made again and
nothing is lost or doubled. Ctrl-C ends the program on the server; a second one leaves at once.

Exit codes: that of the program, 128+N when signal N ended it, or
  124  it ran longer than its timeout
  125  it could not be run, or its outcome is not known
  130  it was cancelled
  137  it used more memory than it may
  159  it made a system call that is not allowed
  2    the command line is wrong

--json prints the execution's events, one JSON object a line, the result last.

Examples:

  bullpen run hello.py
  bullpen run -t 10 -e NAME=you greet.sh
  bullpen run --thread notebook-1 cell.py
  echo 'print(6 * 7)' | bullpen run -
  bullpen run --async long.py`
}

// Run carries the command out.
func (c *runCommand) Run(ctx context.Context, io streams) error {
	req, err := c.request(io.in)
	if err != nil {
		return ours(io, err)
	}
	api, err := c.client()
	if err != nil {
		return ours(io, err)
	}
	api.Retrying = retryNotes(io)
	if c.Async {
		return c.submit(ctx, io, api, req)
	}
	follower := &follower{api: api, out: printer{io: io, json: c.JSON}}
	follower.queued = time.AfterFunc(queuedNote, func() { io.note("waiting for a free slot") })
	defer follower.queued.Stop()
	err = follower.run(ctx, func(ctx context.Context) error { return api.Stream(ctx, req, follower.take) })
	var refused *client.Error
	if errors.As(err, &refused) && refused.Status == http.StatusTooManyRequests && refused.RetryAfter == 0 {
		// The plan has no streaming, or it is the plan that refuses something else, which inline says as well.
		return c.inline(ctx, io, api, req)
	}
	return finish(ctx, io, follower, err)
}

func (c *runCommand) submit(ctx context.Context, io streams, api *client.Client, req client.Request) error {
	a, err := api.Submit(ctx, req)
	if err != nil {
		return ours(io, err)
	}
	if c.JSON {
		return printJSON(io.out, a)
	}
	_, err = fmt.Fprintln(io.out, a.TraceID)
	return err
}

func (c *runCommand) inline(ctx context.Context, io streams, api *client.Client, req client.Request) error {
	result, id, err := api.Execute(ctx, req)
	if ctx.Err() != nil {
		_, _ = fmt.Fprintln(io.err, "bullpen: left; without streaming a program that has started runs on until it ends or its timeout")
		return exitError(exitInterrupted)
	}
	if err != nil {
		return ours(io, err)
	}
	p := printer{io: io, json: c.JSON}
	if err := p.whole(id, result); err != nil {
		return err
	}
	return outcome(io, id, result)
}

// request reads the program and what goes with it.
func (c *runCommand) request(stdin io.Reader) (client.Request, error) {
	var none client.Request
	env, err := pairs("-e", c.Env)
	if err != nil {
		return none, err
	}
	metadata, err := pairs("-m", c.Metadata)
	if err != nil {
		return none, err
	}
	timeout := 0
	if c.Timeout != nil {
		if timeout = *c.Timeout; timeout < 1 {
			return none, usagef("-t %d: give a whole number of seconds, at least 1", timeout)
		}
	}
	if c.Thread != "" {
		if err := proto.CheckThreadID("--thread", c.Thread); err != nil {
			return none, usageError{err}
		}
	}
	if c.Language != "" && !slices.Contains(proto.Languages(), proto.Language(c.Language)) {
		return none, usagef("-l %q: give python, node or bash", c.Language)
	}
	var code []byte
	if c.File == "-" {
		code, err = io.ReadAll(io.LimitReader(stdin, proto.MaxCodeBytes+1))
	} else {
		code, err = readProgram(c.File)
	}
	switch {
	case err != nil:
		return none, fmt.Errorf("read the program: %w", err)
	case len(code) == 0 || len(code) > proto.MaxCodeBytes:
		return none, fmt.Errorf("%s: a program is 1 byte to %d bytes long", c.File, proto.MaxCodeBytes)
	case !utf8.Valid(code):
		return none, fmt.Errorf("%s: not a text in UTF-8", c.File)
	}
	language, err := c.language(code)
	if err != nil {
		return none, err
	}
	return client.Request{Code: string(code), Language: language, Timeout: timeout, ThreadID: c.Thread, Env: env, Metadata: metadata}, nil
}

func readProgram(path string) ([]byte, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	code, err := io.ReadAll(io.LimitReader(f, proto.MaxCodeBytes+1))
	return code, errors.Join(err, f.Close())
}

var interpreter = regexp.MustCompile(`^#!.*?\b(python|node|bash|sh)[0-9.]*(\s|$)`)

// language gives what was asked for, else what the file's name says, else its first line.
func (c *runCommand) language(code []byte) (proto.Language, error) {
	if c.Language != "" {
		return proto.Language(c.Language), nil
	}
	switch strings.ToLower(filepath.Ext(c.File)) {
	case ".py":
		return proto.Python, nil
	case ".js", ".mjs", ".cjs":
		return proto.Node, nil
	case ".sh", ".bash":
		return proto.Bash, nil
	}
	line, _, _ := bufio.ScanLines(code, true) // the offset to the next line
	if m := interpreter.FindSubmatch(code[:line]); m != nil {
		if name := string(m[1]); name != "sh" {
			return proto.Language(name), nil
		}
		return proto.Bash, nil
	}
	if c.File == "-" {
		return proto.Python, nil
	}
	return "", usagef("%s: neither its name nor its first line says which language it is in: give -l python, node or bash", c.File)
}

func pairs(flag string, items []string) (map[string]string, error) {
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

// follower prints the events of an execution and ends it when the user says so.
type follower struct {
	api *client.Client
	out printer

	queued *time.Timer                   // tells after a while that the program has not started
	id     atomic.Pointer[proto.TraceID] // once it is known
	result *proto.Result                 // once it has come
}

func (f *follower) take(e *client.Event) error {
	f.queued.Stop()
	if e.TraceID != "" {
		f.id.Store(&e.TraceID)
	}
	f.result = e.Result
	return f.out.event(e)
}

// run calls stream with a context that outlives ctx, so that what a cancelled program did is still told: when ctx is done the
// program is ended on the server, whose result then ends the stream. Where the execution is not known yet, leaving is enough:
// the server withdraws a program that nobody waits for and that has not started.
func (f *follower) run(ctx context.Context, stream func(context.Context) error) error {
	streamCtx, leave := context.WithCancelCause(context.WithoutCancel(ctx))
	defer leave(nil)
	stop := context.AfterFunc(ctx, func() {
		id := f.id.Load()
		if id == nil {
			leave(context.Canceled)
			return
		}
		cancelCtx, done := context.WithTimeout(streamCtx, cancelGrace)
		defer done()
		if _, err := f.api.Cancel(cancelCtx, *id); err != nil {
			leave(fmt.Errorf("cancel %s: %w", *id, err))
		}
	})
	defer stop()
	return stream(streamCtx)
}

// finish turns the end of a stream into an exit code.
func finish(ctx context.Context, io streams, f *follower, err error) error {
	switch {
	case err == nil:
		var id proto.TraceID
		if p := f.id.Load(); p != nil {
			id = *p
		}
		return outcome(io, id, f.result)
	case ctx.Err() != nil && errors.Is(err, context.Canceled):
		return exitError(exitInterrupted)
	default:
		return ours(io, err)
	}
}

// outcome gives the exit code of a result, and says so on standard error where it was the platform that ended the program.
func outcome(io streams, id proto.TraceID, r *proto.Result) error {
	if r.ErrorCode == nil {
		if r.ExitCode == 0 {
			return nil
		}
		return exitError(r.ExitCode)
	}
	tellEnd(io, id, r)
	switch proto.ErrorCode(*r.ErrorCode) {
	case proto.CodeTimeout:
		return exitError(exitTimeout)
	case proto.CodeCancelled:
		return exitError(exitInterrupted)
	case proto.CodeMemory:
		return exitError(exitMemory)
	case proto.CodeSeccomp:
		return exitError(exitSeccomp)
	default:
		return exitError(exitOurs)
	}
}

// tellEnd says on standard error what ended a program where that was not the program.
func tellEnd(io streams, id proto.TraceID, r *proto.Result) {
	if r.ErrorCode == nil {
		return
	}
	message := *r.ErrorCode
	if r.ErrorMessage != nil {
		message += ": " + *r.ErrorMessage
	}
	_, _ = fmt.Fprintf(io.err, "bullpen: %s: %s\n", id, message)
}

// ours reports an error that is not the program's with the exit code for it.
func ours(io streams, err error) error {
	if errors.Is(err, context.Canceled) {
		return exitError(exitInterrupted)
	}
	if _, ok := errors.AsType[usageError](err); ok {
		return err
	}
	_, _ = fmt.Fprintf(io.err, "bullpen: %v\n", explain(err))
	return exitError(exitOurs)
}
