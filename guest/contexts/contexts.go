package contexts

import (
	"context"
	"crypto/rand"
	"encoding/base32"
	"errors"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"connectrpc.com/connect"

	"github.com/bullpen-run/bullpen/guest/account"
	"github.com/bullpen-run/bullpen/guest/cell"
	"github.com/bullpen-run/bullpen/guest/mask"
	"github.com/bullpen-run/bullpen/guest/process"
)

const (
	maxContexts = 32 // of a sandbox
	maxQueue    = 64 // runs of a context that wait
	maxKept     = 32 // runs of a context whose events are kept
	// startTimeout limits the start of an interpreter, with what it imports.
	startTimeout = 2 * time.Minute
	// obeyTimeout is how long an interrupted cell may go on.
	obeyTimeout = 5 * time.Second
)

// States of a context.
const (
	stateStarting = "starting"
	stateIdle     = "idle"
	stateRunning  = "running"
	stateLost     = "lost"
)

// Reasons of a lost context.
const (
	reasonExited         = "exited"
	reasonKilled         = "killed"
	reasonUninterrupted  = "not_interruptible"
	reasonSandboxStops   = "sandbox_stopping"
	reasonSandboxStarted = "sandbox_restarted"
)

// Error is an error for clients.
type Error struct {
	Status  int
	Code    string // context_not_found, context_lost, invalid or limit
	Message string
}

func (e *Error) Error() string { return e.Message }

func invalid(format string, args ...any) *Error {
	return &Error{http.StatusBadRequest, "invalid", fmt.Sprintf(format, args...)}
}

// Contexts are the contexts of a sandbox. The exported fields must be set before use. It is safe for concurrent use.
type Contexts struct {
	Table *process.Table
	User  account.User // who runs all of them
	// Interpreters are absolute paths by the names of runtimes. Others are looked up in PATH.
	Interpreters map[string]string
	// Runners is the directory of the runners.
	Runners string
	Preload []string // Python modules
	// Masks are secrets that no output contains.
	Masks *mask.Masks
	// Start is the number of the sandbox's start, from 1. Ids of contexts contain it.
	Start int

	memory memory
	forks  forks

	defaults   sync.Mutex        // held while a default context is looked up
	defaultIDs map[string]string // of contexts, by language

	mu   sync.Mutex
	list []*Context // in the order of their creation
}

// Context is an interpreter that keeps its state.
type Context struct {
	all      *Contexts
	id       string
	language cell.Language
	dir      string // absolute
	created  time.Time
	starting sync.Mutex // held while the interpreter starts

	mu          sync.Mutex
	turn        chan struct{} // closed when the last run has ended; nil before the first
	state       string
	reason      string // of a lost context
	message     string
	interpreter *interpreter // nil before the first start and when it is lost
	started     time.Time    // of the interpreter
	version     string       // of the interpreter
	name        string       // of what runs cells
	memory      int64        // bytes, after the last run
	count       int64        // of the cells that the interpreter has run
	runs        []*run       // the last ones, in the order of their requests
	lastRun     int64
	queued      int
	deleted     bool
}

// Info describes a context to clients.
type Info struct {
	ID        string     `json:"id"`
	Language  string     `json:"language"`
	Dir       string     `json:"cwd"`
	State     string     `json:"state"`
	Reason    string     `json:"reason,omitempty"`
	Message   string     `json:"message,omitempty"`
	CreatedAt time.Time  `json:"created_at"`
	StartedAt *time.Time `json:"started_at,omitempty"`
	Age       int64      `json:"age_ms"` // of the interpreter
	Runs      int64      `json:"runs"`
	Queued    int        `json:"queued"`
	Memory    int64      `json:"memory,omitempty"`
	Version   string     `json:"version,omitempty"`
	Name      string     `json:"interpreter,omitempty"`
}

func (c *Context) info() Info {
	c.mu.Lock()
	defer c.mu.Unlock()
	i := Info{
		ID: c.id, Language: c.language.Name, Dir: c.dir, State: c.state, Reason: c.reason, Message: c.message,
		CreatedAt: c.created.UTC(), Runs: c.count, Queued: c.queued, Memory: c.memory, Version: c.version, Name: c.name,
	}
	if !c.started.IsZero() {
		i.StartedAt = new(c.started.UTC())
	}
	if c.interpreter != nil {
		i.Age = time.Since(c.started).Milliseconds()
	}
	return i
}

// newID returns the id of a context: it says in which start of the sandbox it was created.
func (a *Contexts) newID(language string) string {
	var random [10]byte
	_, _ = rand.Read(random[:]) // never fails
	return fmt.Sprintf("%s-%d-%s", language, a.Start, strings.ToLower(base32.StdEncoding.EncodeToString(random[:])))
}

// Create creates a context and starts its interpreter.
func (a *Contexts) Create(ctx context.Context, language, dir string) (*Context, error) {
	c, err := a.add("", language, dir)
	if err != nil {
		return nil, err
	}
	if err := c.start(ctx); err != nil {
		a.remove(c)
		return nil, err
	}
	return c, nil
}

// add adds a context without an interpreter. The default of an id is a new one.
func (a *Contexts) add(id, language, dir string) (*Context, error) {
	if language == "" {
		language = "python"
	}
	l, ok := cell.LanguageOf(language)
	if !ok {
		var names []string
		for _, l := range cell.Languages() {
			names = append(names, l.Name)
		}
		return nil, invalid("language must be one of %s", strings.Join(names, ", "))
	}
	dir, err := a.Table.Directory(a.User, dir)
	if err != nil {
		return nil, refused(err)
	}
	if id == "" {
		id = a.newID(l.Name)
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	if len(a.list) >= maxContexts {
		return nil, &Error{
			http.StatusTooManyRequests, "limit",
			fmt.Sprintf("the sandbox has %d contexts, the most it can have; delete one", maxContexts),
		}
	}
	c := &Context{all: a, id: id, language: l, dir: dir, created: time.Now(), state: stateStarting}
	a.list = append(a.list, c)
	return c, nil
}

func (a *Contexts) remove(c *Context) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.list = slices.DeleteFunc(a.list, func(other *Context) bool { return other == c })
}

// All returns all contexts.
func (a *Contexts) All() []*Context {
	a.mu.Lock()
	defer a.mu.Unlock()
	return slices.Clone(a.list)
}

// Get returns the context with an id.
func (a *Contexts) Get(id string) (*Context, error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	for _, c := range a.list {
		if c.id == id {
			return c, nil
		}
	}
	if _, start, ok := a.parseID(id); ok && start < a.Start {
		return nil, lost(reasonSandboxStarted, "the sandbox has stopped since the context was created, and memory is not "+
			"kept; restart the context to start anew with the files that are saved")
	}
	return nil, &Error{http.StatusNotFound, "context_not_found", "there is no context of that id in this sandbox"}
}

// parseID returns what newID has put into an id.
func (*Contexts) parseID(id string) (language string, start int, ok bool) {
	parts := strings.Split(id, "-")
	if len(parts) != 3 || len(id) > 64 {
		return "", 0, false
	}
	start, err := strconv.Atoi(parts[1])
	_, known := cell.LanguageOf(parts[0])
	return parts[0], start, err == nil && start > 0 && known
}

func lost(reason, message string) *Error {
	return &Error{http.StatusGone, "context_lost", "the context's memory is gone (" + reason + "): " + message}
}

// Restart replaces the interpreter of a context by a new one, without its state. Waiting runs fail.
func (a *Contexts) Restart(ctx context.Context, id string) (*Context, error) {
	c, err := a.Get(id)
	if e, ok := errors.AsType[*Error](err); ok && e.Status == http.StatusGone {
		language, _, _ := a.parseID(id)
		if c, err = a.add(id, language, ""); err == nil {
			if err = c.start(ctx); err != nil {
				a.remove(c)
			}
		}
		return c, err
	}
	if err != nil {
		return nil, err
	}
	c.lose(ctx, reasonKilled, "it was restarted")
	return c, c.start(ctx)
}

// Delete ends a context for good, with its exit handlers.
func (a *Contexts) Delete(ctx context.Context, id string) error {
	c, err := a.Get(id)
	if err != nil {
		return err
	}
	a.remove(c)
	c.mu.Lock()
	i := c.interpreter
	c.deleted = true
	idle := c.state == stateIdle
	runs := c.runs
	c.runs = nil
	c.mu.Unlock()
	if i != nil && idle {
		_ = i.input.Close() // it runs its exit handlers
		timer := time.NewTimer(obeyTimeout)
		defer timer.Stop()
		select {
		case <-i.child.Done:
		case <-timer.C:
		case <-ctx.Done():
		}
	}
	c.lose(ctx, reasonKilled, "it was deleted")
	for _, r := range runs {
		r.events.forget()
	}
	return nil
}

// start starts the interpreter, unless there is one.
func (c *Context) start(ctx context.Context) error {
	c.starting.Lock()
	defer c.starting.Unlock()
	c.mu.Lock()
	started := c.interpreter != nil
	c.mu.Unlock()
	if started {
		return nil
	}
	ctx, cancel := context.WithTimeout(ctx, startTimeout)
	defer cancel()
	i, err := c.launch(ctx)
	if err != nil {
		return err
	}
	select {
	case <-i.ready:
	case <-i.child.Done:
		<-i.drained
		message := fmt.Sprintf("the %s interpreter ended at its start (%s)", c.language.Name, statusText(i.child.Status()))
		if said := strings.TrimSpace(i.said()); said != "" {
			message += ": " + said
		}
		return &Error{http.StatusBadRequest, "invalid", message}
	case <-ctx.Done():
		c.all.Table.Kill(context.WithoutCancel(ctx), i.child)
		return &Error{
			http.StatusServiceUnavailable, "not_started",
			fmt.Sprintf("the %s interpreter has not started within %s", c.language.Name, startTimeout),
		}
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.deleted {
		go c.all.Table.Kill(context.WithoutCancel(ctx), i.child)
		return &Error{http.StatusNotFound, "context_not_found", "the context was deleted"}
	}
	c.interpreter, c.state, c.reason, c.message = i, stateIdle, "", ""
	c.started, c.count, c.memory = time.Now(), 0, 0
	go c.watch(i)
	return nil
}

// watch marks the context as lost when its interpreter has ended.
func (c *Context) watch(i *interpreter) {
	<-i.child.Done
	<-i.drained
	status := i.child.Status()
	c.all.Table.Log.End(i.child.PID, status)
	reason, message := reasonExited, "the interpreter has ended ("+statusText(status)+"); restart the context"
	switch {
	case c.all.Table.Stopping():
		reason, message = reasonSandboxStops, "the sandbox is stopping"
	case status.Signaled() && status.Signal() == syscall.SIGKILL:
		reason = reasonKilled
		message = "the interpreter was killed, perhaps for the sandbox's memory limit; restart the context"
	}
	c.markLost(i, reason, message)
	close(i.over)
}

// markLost marks the context as lost, if it has an interpreter.
func (c *Context) markLost(i *interpreter, reason, message string) {
	i.mu.Lock()
	if i.lost == nil {
		i.lost = lost(reason, message)
	}
	i.mu.Unlock()
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.interpreter == i {
		c.interpreter, c.state, c.reason, c.message = nil, stateLost, reason, message
	}
}

func statusText(s syscall.WaitStatus) string {
	if s.Signaled() {
		return "signal: " + s.Signal().String()
	}
	return "exit status " + strconv.Itoa(s.ExitStatus())
}

// lose kills the interpreter, if there is one, and all that it has started.
func (c *Context) lose(ctx context.Context, reason, message string) {
	c.mu.Lock()
	i := c.interpreter
	c.mu.Unlock()
	if i == nil {
		return
	}
	c.markLost(i, reason, message)
	c.all.Table.Kill(context.WithoutCancel(ctx), i.child)
	select {
	case <-i.child.Done:
	case <-time.After(obeyTimeout): // it could not be killed
	}
}

// interpreter is a process of a runner.
type interpreter struct {
	child   *process.Child
	input   *os.File
	ready   chan struct{} // closed at the first frame
	drained chan struct{} // closed when its outputs have ended
	over    chan struct{} // closed when its context knows of its end

	mu    sync.Mutex
	lost  *Error // why it has ended
	run   *run   // that gets its output
	early []byte // beginning of what it has printed to standard error before it was ready
}

// lostError returns why the interpreter has ended.
func (i *interpreter) lostError() *Error {
	i.mu.Lock()
	defer i.mu.Unlock()
	return i.lost
}

// said returns what an interpreter that did not start has printed.
func (i *interpreter) said() string {
	i.mu.Lock()
	defer i.mu.Unlock()
	return strings.ToValidUTF8(string(i.early), "\uFFFD")
}

// launch starts a process of the runner.
func (c *Context) launch(ctx context.Context) (*interpreter, error) {
	path, err := c.all.interpreterOf(&c.language)
	if err != nil {
		return nil, err
	}
	p, err := openPipes(c.all.User)
	if err != nil {
		return nil, err
	}
	defer p.closeChild()
	nonce := strings.ToLower(rand.Text() + rand.Text())[:32]
	var child *process.Child
	if c.language.Forks {
		child, err = c.all.forks.fork(ctx, c.all, path, &c.language, nonce, c.dir, p.child)
	} else {
		child, err = c.startRunner(path, nonce, p.child)
	}
	if err != nil {
		p.closeParent()
		return nil, refused(err)
	}
	i := &interpreter{
		child: child, input: p.input, ready: make(chan struct{}),
		drained: make(chan struct{}), over: make(chan struct{}),
	}
	c.all.Table.Log.Start(child.PID, c.all.User.Name, "context "+c.id)
	go c.follow(i, nonce, p)
	return i, nil
}

// startRunner starts a process of a runner that does not fork. files are its standard input, output and error.
func (c *Context) startRunner(path, nonce string, files []*os.File) (*process.Child, error) {
	if c.language.Private {
		null, err := os.Open(os.DevNull)
		if err != nil {
			return nil, err
		}
		defer func() { _ = null.Close() }() // it was only passed on
		files = []*os.File{null, files[1], files[2], files[0], files[1], files[2]}
	}
	args := append([]string{filepath.Join(c.all.Runners, c.language.Runner)}, c.language.Args...)
	return c.all.Table.StartChild(&process.Command{
		User: c.all.User, Path: path, Args: args, Dir: c.dir, Env: map[string]string{cell.NonceEnv: nonce}, Files: files,
	})
}

// interpreterOf returns the path of a language's interpreter.
func (a *Contexts) interpreterOf(l *cell.Language) (string, error) {
	if path := a.Interpreters[l.Runtime]; path != "" {
		return path, nil
	}
	for _, name := range l.Commands {
		if path, err := a.Table.LookPath(a.User, name); err == nil {
			return path, nil
		}
	}
	return "", invalid("the sandbox has no interpreter of %s", l.Name)
}

// refused returns the error of a start for clients.
func refused(err error) error {
	if e, ok := errors.AsType[*connect.Error](err); ok {
		status := http.StatusServiceUnavailable
		switch e.Code() {
		case connect.CodeInvalidArgument:
			return invalid("%s", e.Message())
		case connect.CodeResourceExhausted:
			status = http.StatusTooManyRequests
		}
		return &Error{status, "limit", e.Message()}
	}
	return err
}

// pipes connect an interpreter.
type pipes struct {
	child          []*os.File
	input          *os.File
	stdout, stderr *os.File
}

// openPipes creates pipes whose ends belong to a user, so that its processes can open them by their paths in /proc.
func openPipes(user account.User) (p *pipes, err error) {
	p = &pipes{}
	defer func() {
		if err != nil {
			p.closeChild()
			p.closeParent()
		}
	}()
	read, write, err := os.Pipe()
	if err != nil {
		return nil, err
	}
	p.child, p.input = append(p.child, read), write
	for _, out := range []**os.File{&p.stdout, &p.stderr} {
		read, write, err := os.Pipe()
		if err != nil {
			return p, err
		}
		p.child, *out = append(p.child, write), read
	}
	for _, f := range p.child {
		if err := f.Chown(int(user.UID), int(user.GID)); err != nil {
			return p, err
		}
	}
	return p, nil
}

func (p *pipes) closeChild() {
	for _, f := range p.child {
		_ = f.Close()
	}
	p.child = nil
}

func (p *pipes) closeParent() {
	for _, f := range []*os.File{p.input, p.stdout, p.stderr} {
		if f != nil {
			_ = f.Close()
		}
	}
}
