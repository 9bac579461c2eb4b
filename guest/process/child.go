package process

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"syscall"

	"golang.org/x/sys/unix"

	"github.com/bullpen-run/bullpen/guest/account"
)

// Command is a process to start with descriptors of the caller's.
type Command struct {
	User account.User
	Path string // absolute
	Args []string
	Env  map[string]string // in addition to that of all processes
	Dir  string            // as in a request; empty for the default
	// Files are standard input, output and error, and further descriptors. The caller closes them.
	Files []*os.File
}

// Child is a process whose output is not kept here.
type Child struct {
	PID  int
	Done chan struct{} // closed when it has ended

	group  group
	status syscall.WaitStatus
}

// StartChild starts a process in a session of its own. It is not listed.
func (t *Table) StartChild(c *Command) (*Child, error) {
	dir, err := t.Directory(c.User, c.Dir)
	if err != nil {
		return nil, err
	}
	env := t.environment(c.User, c.Env, false)
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.stopping {
		return nil, errStopping
	}
	child := &Child{Done: make(chan struct{})}
	child.group.marker = t.newMarker()
	env[markerName] = child.group.marker
	files := make([]uintptr, len(c.Files))
	for i, f := range c.Files {
		files[i] = f.Fd()
	}
	child.PID, err = syscall.ForkExec(c.Path, append([]string{filepath.Base(c.Path)}, c.Args...), &syscall.ProcAttr{
		Dir: dir, Env: list(env), Files: files, Sys: &syscall.SysProcAttr{Setsid: true, Credential: credential(c.User)},
	})
	if err != nil {
		return nil, startError(c.Path, err)
	}
	child.group.leaders = []int{child.PID}
	if leader, err := readStat(child.PID); err == nil {
		child.group.since = leader.started
	}
	t.children = append(t.children, child)
	return child, nil
}

// newMarker returns the marker of another group. The lock must be held.
func (t *Table) newMarker() string {
	t.started++
	return t.marker + strconv.Itoa(t.started) + "."
}

// Environment returns the variables of a process that another one forks, with a new marker, by which
// [Table.Forked] finds what descends from it.
func (t *Table) Environment(user account.User) map[string]string {
	env := t.environment(user, nil, false)
	t.mu.Lock()
	defer t.mu.Unlock()
	env[markerName] = t.newMarker()
	return env
}

// Forked returns a process with an environment that a child says it has forked. It will lead a
// session. The caller closes Done when the process has ended. The error is for a process that is not
// the child's.
func (*Table) Forked(of *Child, pid int, env map[string]string) (*Child, error) {
	leader, err := readStat(pid)
	if err != nil || leader.parent != of.PID {
		return nil, fmt.Errorf("process %d is no child of process %d", pid, of.PID)
	}
	return &Child{PID: pid, Done: make(chan struct{}), group: group{
		leaders: []int{pid}, marker: env[markerName], since: leader.started,
	}}, nil
}

// Status returns the wait status of a child that has ended.
func (c *Child) Status() syscall.WaitStatus { return c.status }

// SetStatus sets the wait status of a forked process, before Done is closed.
func (c *Child) SetStatus(s syscall.WaitStatus) { c.status = s }

// Interrupt sends SIGINT to the process group of a child.
func (c *Child) Interrupt() {
	select {
	case <-c.Done: // the number may be another's by now
	default:
		_ = unix.Kill(-c.PID, unix.SIGINT) // it may be about to end
	}
}

// Kill kills a child and what descends from it. Close does that, too.
func (t *Table) Kill(ctx context.Context, c *Child) {
	t.mu.Lock()
	if t.stopping {
		t.mu.Unlock()
		return
	}
	t.kills.Add(1)
	t.mu.Unlock()
	defer t.kills.Done()
	ctx, cancel := context.WithTimeout(ctx, killTimeout)
	defer cancel()
	g := c.group
	select {
	case <-c.Done:
		g.leaders = nil
	default:
	}
	_, _ = g.kill(ctx, t.view()) // what is left ends with the sandbox
}

// collectChildren reaps the children that have ended. The lock must be held.
func (t *Table) collectChildren() {
	left := t.children[:0]
	for _, c := range t.children {
		pid, err := syscall.Wait4(c.PID, &c.status, syscall.WNOHANG, nil)
		if pid == c.PID || errors.Is(err, unix.ECHILD) {
			close(c.Done)
			continue
		}
		left = append(left, c)
	}
	clear(t.children[len(left):])
	t.children = left
}
