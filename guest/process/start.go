package process

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"

	"connectrpc.com/connect"
	"golang.org/x/sys/unix"

	"github.com/bullpen-run/bullpen/guest/account"
	"github.com/bullpen-run/bullpen/guest/processpb"
)

// Limits of what a process is started with.
const (
	maxArgument  = 128<<10 - 1 // the kernel's
	maxArguments = 1 << 20     // bytes of all arguments and variables, with what the kernel adds to each
	maxTag       = 1 << 10
)

const defaultPath = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

var (
	errNoSelector = errors.New("process: neither pid nor tag is given")
	errStopping   = connect.NewError(connect.CodeUnavailable, errors.New("the sandbox is stopping"))
)

// running is a process that runs, or whose pipes are still open.
type running struct {
	table  *Table
	pid    int
	tag    string
	config *processpb.ProcessConfig
	size   int // bytes of config
	group  group
	out    *output

	input *input   // standard input or terminal; nil if there is none
	pty   *os.File // nil without a terminal

	// signalled is closed when the group has been sent a signal that ends processes: the end of the
	// leader is then the end, whoever has its pipes.
	signalled     chan struct{}
	markSignalled func()
	leaderDone    chan struct{} // closed when the leader is a zombie
	exited        bool          // the same; guarded by the table's lock
	done          chan struct{} // closed when event is set
	event         *processpb.ProcessEvent_EndEvent
	deadline      *time.Timer
}

// start starts a process for a user. If timeout is not zero, its group is killed after that time.
func (t *Table) start(user account.User, r *processpb.StartRequest, timeout time.Duration) (*running, *reader, error) {
	config := r.GetProcess()
	if config.GetCmd() == "" {
		return nil, nil, invalid("process.cmd is empty")
	}
	if len(r.GetTag()) > maxTag {
		return nil, nil, invalid("tag is longer than %d bytes", maxTag)
	}
	dir, err := t.Directory(user, config.GetCwd())
	if err != nil {
		return nil, nil, err
	}
	env := t.environment(user, config.GetEnvs(), r.GetPty() != nil)
	size, err := checkArguments(config, env)
	if err != nil {
		return nil, nil, err
	}
	path, err := lookPath(config.GetCmd(), dir, env["PATH"])
	if err != nil {
		return nil, nil, err
	}

	t.mu.Lock()
	defer t.mu.Unlock()
	switch {
	case t.stopping:
		return nil, nil, errStopping
	case len(t.running) >= maxRunning:
		return nil, nil, exhausted("%d processes are running, the most a sandbox can have", maxRunning)
	case t.configs+size > maxConfigs:
		return nil, nil, exhausted("arguments and variables of the running processes take more than %d bytes", maxConfigs)
	}
	p := &running{
		table: t, tag: r.GetTag(), config: config, size: size,
		signalled: make(chan struct{}), leaderDone: make(chan struct{}), done: make(chan struct{}),
	}
	p.markSignalled = sync.OnceFunc(func() { close(p.signalled) })
	p.group.marker = t.newMarker()
	env[markerName] = p.group.marker
	files, err := openFiles(r, user)
	if err != nil {
		return nil, nil, err
	}
	attr := &syscall.ProcAttr{Dir: dir, Env: list(env), Files: files.child(), Sys: &syscall.SysProcAttr{
		Setsid: true, Setctty: files.terminal, Ctty: 0, Credential: credential(user),
	}}
	if user.Capable {
		attr.Sys.AmbientCaps = t.Capabilities
	}
	p.pid, err = syscall.ForkExec(path, append([]string{config.GetCmd()}, config.GetArgs()...), attr)
	files.closeChild()
	if err != nil {
		files.closeParent()
		return nil, nil, startError(path, err)
	}
	p.group.leaders = []int{p.pid}
	if leader, err := readStat(p.pid); err == nil {
		p.group.since = leader.started
	}
	p.out = t.outputs.add()
	reader := p.out.readAll()
	p.pty = files.pty
	if files.input != nil {
		p.input = &input{file: files.input, turn: make(chan struct{}, 1)}
	}
	t.Log.start(p.pid, user.Name, config)
	t.running = append(t.running, p)
	t.configs += size
	if timeout > 0 {
		p.deadline = time.AfterFunc(timeout, p.expire)
	}
	go p.follow(files)
	return p, reader, nil
}

// expire ends the process at its deadline.
func (p *running) expire() {
	p.markSignalled()
	ctx, cancel := context.WithTimeout(context.Background(), killTimeout)
	defer cancel()
	// What is still alive after that could not be killed by another attempt either.
	_, _ = p.group.kill(ctx, p.table.view())
}

// follow keeps the output of a process until its end.
func (p *running) follow(files *files) {
	var pumps sync.WaitGroup
	for _, o := range files.outputs {
		pumps.Go(func() { pump(p.out, o, &Lines{log: p.table.Log, pid: p.pid, from: o.from}) })
	}
	closed := make(chan struct{})
	go func() {
		pumps.Wait()
		close(closed)
	}()
	<-p.leaderDone
	select {
	case <-closed:
	case <-p.signalled:
		// Processes that survive may have the pipes, but what they write no longer counts.
		limit := time.Now().Add(drainTime)
		for _, o := range files.outputs {
			_ = o.file.SetReadDeadline(limit)
		}
		timer := time.NewTimer(2 * drainTime)
		select {
		case <-closed:
		case <-timer.C: // a reader of the output is slow
		}
		timer.Stop()
		p.out.stopWaiting()
		<-closed
	}
	if p.deadline != nil {
		p.deadline.Stop()
	}
	p.table.retire(p)
	close(p.done)
	files.closeParent()
}

// reap removes the zombie and returns its status.
func (p *running) reap() syscall.WaitStatus {
	var status syscall.WaitStatus
	for {
		_, err := syscall.Wait4(p.pid, &status, 0, nil)
		if err != syscall.EINTR {
			return status
		}
	}
}

// Directory returns where a process of a user starts that names a directory, or none.
func (t *Table) Directory(user account.User, cwd string) (string, error) {
	dir := cwd
	switch {
	case cwd == "" && t.Dir != "":
		dir = t.Dir
	case cwd == "" || cwd == "~":
		dir = user.Home
	case strings.HasPrefix(cwd, "~/"):
		dir = filepath.Join(user.Home, cwd[2:])
	case !filepath.IsAbs(cwd):
		dir = filepath.Join(user.Home, cwd)
	}
	if strings.IndexByte(dir, 0) >= 0 {
		return "", invalid("cwd contains a zero byte")
	}
	info, err := os.Stat(dir)
	if err != nil {
		if cwd == "" && errors.Is(err, os.ErrNotExist) && dir != user.Home {
			return t.Directory(user, "~")
		}
		return "", invalid("cwd: %v", err)
	}
	if !info.IsDir() {
		return "", invalid("cwd: %s is not a directory", dir)
	}
	return dir, nil
}

// environment returns the variables of a process.
func (t *Table) environment(user account.User, request map[string]string, pty bool) map[string]string {
	env := map[string]string{"PATH": defaultPath, "HOME": user.Home, "USER": user.Name, "LOGNAME": user.Name}
	if pty {
		env["TERM"] = "xterm-256color"
	}
	maps.Copy(env, t.Env)
	maps.Copy(env, request)
	return env
}

// list returns variables in the form of execve, sorted.
func list(env map[string]string) []string {
	all := make([]string, 0, len(env))
	for name, value := range env {
		all = append(all, name+"="+value)
	}
	slices.Sort(all)
	return all
}

// checkArguments checks arguments and variables against the limits and returns their size.
func checkArguments(config *processpb.ProcessConfig, env map[string]string) (int, error) {
	const pointer = 8
	size := 0
	add := func(what string, n int) error {
		if n > maxArgument {
			return exhausted("%s is longer than %d bytes", what, maxArgument)
		}
		if size += n + 1 + pointer; size > maxArguments {
			return exhausted("arguments and variables take more than %d bytes", maxArguments)
		}
		return nil
	}
	for i, arg := range append([]string{config.GetCmd()}, config.GetArgs()...) {
		if strings.IndexByte(arg, 0) >= 0 {
			return 0, invalid("argument %d contains a zero byte", i)
		}
		if err := add(fmt.Sprintf("argument %d", i), len(arg)); err != nil {
			return 0, err
		}
	}
	for name, value := range env {
		if name == "" || strings.ContainsAny(name, "=\x00") || strings.IndexByte(value, 0) >= 0 {
			return 0, invalid("variable %q: the name is empty or contains =, or there is a zero byte", name)
		}
		if err := add("variable "+name, len(name)+1+len(value)); err != nil {
			return 0, err
		}
	}
	return size, nil
}

// LookPath returns the path of a program that a user has in PATH.
func (t *Table) LookPath(user account.User, name string) (string, error) {
	return lookPath(name, user.Home, t.environment(user, nil, false)["PATH"])
}

// lookPath returns the program that a name means to a process: one with a slash is a path, which may be
// relative to dir; others are looked for in PATH.
func lookPath(name, dir, path string) (string, error) {
	executable := func(file string) bool {
		info, err := os.Stat(file)
		return err == nil && info.Mode().IsRegular() && info.Mode()&0o111 != 0
	}
	if strings.Contains(name, "/") {
		if !filepath.IsAbs(name) {
			name = filepath.Join(dir, name)
		}
		if _, err := os.Stat(name); err != nil {
			return "", invalid("process.cmd: %v", err)
		}
		return name, nil // execve knows more about whether it can be executed
	}
	for _, p := range filepath.SplitList(path) {
		if !filepath.IsAbs(p) {
			p = filepath.Join(dir, p)
		}
		if file := filepath.Join(p, name); executable(file) {
			return file, nil
		}
	}
	return "", invalid("process.cmd: there is no program %q in PATH", name)
}

// credential returns the ids that a process is to have, or nil if it has them anyway.
func credential(user account.User) *syscall.Credential {
	if user.Current() {
		return nil
	}
	// A user namespace that an unprivileged user created may forbid setgroups.
	setgroups, err := os.ReadFile("/proc/self/setgroups")
	return &syscall.Credential{
		Uid: user.UID, Gid: user.GID,
		NoSetGroups: err == nil && strings.TrimSpace(string(setgroups)) == "deny",
	}
}

// startError tells a fault of the request from a lack of something.
func startError(path string, err error) error {
	switch {
	case errors.Is(err, unix.EAGAIN):
		return exhausted("start %s: the sandbox has as many processes and threads as it can have: %v", path, err)
	case errors.Is(err, unix.EMFILE), errors.Is(err, unix.ENFILE), errors.Is(err, unix.ENOMEM):
		return exhausted("start %s: %v", path, err)
	case errors.Is(err, unix.E2BIG):
		return exhausted("start %s: arguments and variables are too long: %v", path, err)
	}
	return invalid("start %s: %v", path, err)
}

func invalid(format string, args ...any) error {
	return connect.NewError(connect.CodeInvalidArgument, fmt.Errorf(format, args...))
}

func exhausted(format string, args ...any) error {
	return connect.NewError(connect.CodeResourceExhausted, fmt.Errorf(format, args...))
}
