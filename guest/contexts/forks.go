package contexts

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"syscall"

	"golang.org/x/sys/unix"

	"github.com/bullpen-run/bullpen/guest/cell"
	"github.com/bullpen-run/bullpen/guest/process"
)

// maxForkMessage is the size of a message of the parent.
const maxForkMessage = 64 << 10

// forks is the process from which contexts are forked.
type forks struct {
	mu     sync.Mutex // held while a context is forked
	parent *parent
}

// parent is a runner with --serve.
type parent struct {
	child *process.Child
	conn  *net.UnixConn
	ready chan struct{} // closed when it can fork
	pids  chan cell.Forked

	mu     sync.Mutex
	forked map[int]*process.Child
	ended  map[int]int // wait statuses of contexts that ended before they were known
	gone   bool
}

// fork forks a context. It starts the parent if there is none.
func (f *forks) fork(
	ctx context.Context, a *Contexts, path string, l *cell.Language, nonce, dir string, files []*os.File,
) (*process.Child, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	p, err := f.ensure(ctx, a, path, l)
	if err != nil {
		return nil, err
	}
	env := a.Table.Environment(a.User)
	message, err := json.Marshal(cell.Fork{Nonce: nonce, Dir: dir, Env: env})
	if err != nil {
		return nil, err
	}
	fds := make([]int, len(files))
	for i, file := range files {
		fds[i] = int(file.Fd())
	}
	if _, _, err := p.conn.WriteMsgUnix(message, unix.UnixRights(fds...), nil); err != nil {
		return nil, fmt.Errorf("ask the parent of contexts: %w", err)
	}
	select {
	case answer := <-p.pids:
		if answer.Error != "" {
			return nil, invalid("the context could not be forked: %s", answer.Error)
		}
		return p.adopt(a, answer.PID, env)
	case <-p.child.Done:
		return nil, errors.New("the parent of contexts has ended")
	case <-ctx.Done():
		a.Table.Kill(context.WithoutCancel(ctx), p.child) // a later answer would be taken for that of another context
		return nil, ctx.Err()
	}
}

// ensure returns the parent when it is ready.
func (f *forks) ensure(ctx context.Context, a *Contexts, path string, l *cell.Language) (*parent, error) {
	if f.parent != nil {
		select {
		case <-f.parent.child.Done:
			f.parent = nil
		default:
		}
	}
	if f.parent == nil {
		p, err := startParent(a, path, l)
		if err != nil {
			return nil, err
		}
		f.parent = p
	}
	p := f.parent
	select {
	case <-p.ready:
		return p, nil
	case <-p.child.Done:
		return nil, invalid("%s ended at its start (%s)", filepath.Base(path), statusText(p.child.Status()))
	case <-ctx.Done():
		return nil, ctx.Err()
	}
}

// startParent starts the parent. What it prints is discarded.
func startParent(a *Contexts, path string, l *cell.Language) (*parent, error) {
	pair, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, fmt.Errorf("create the socket of the parent of contexts: %w", err)
	}
	own, theirs := os.NewFile(uintptr(pair[0]), "own"), os.NewFile(uintptr(pair[1]), "theirs")
	defer func() { _, _ = own.Close(), theirs.Close() }()
	null, err := os.OpenFile(os.DevNull, os.O_RDWR, 0)
	if err != nil {
		return nil, err
	}
	defer func() { _ = null.Close() }()
	c, err := net.FileConn(own)
	if err != nil {
		return nil, fmt.Errorf("use the socket of the parent of contexts: %w", err)
	}
	conn, _ := c.(*net.UnixConn)
	args := append([]string{filepath.Join(a.Runners, l.Runner), "--serve"}, l.Args...)
	env := map[string]string{}
	if len(a.Preload) > 0 {
		env[cell.PreloadEnv] = strings.Join(a.Preload, ",")
	}
	child, err := a.Table.StartChild(&process.Command{
		User: a.User, Path: path, Args: args, Dir: "/", Env: env, Files: []*os.File{theirs, null, null},
	})
	if err != nil {
		_ = conn.Close()
		return nil, err
	}
	p := &parent{
		child: child, conn: conn, ready: make(chan struct{}), pids: make(chan cell.Forked, 1),
		forked: map[int]*process.Child{}, ended: map[int]int{},
	}
	go p.read(a)
	return p, nil
}

// read reads the messages of the parent until it ends.
func (p *parent) read(a *Contexts) {
	defer func() { _ = p.conn.Close() }()
	buffer := make([]byte, maxForkMessage)
	for {
		n, err := p.conn.Read(buffer)
		if err != nil || n == 0 {
			break
		}
		var m cell.Forked
		if json.Unmarshal(buffer[:n], &m) != nil {
			continue
		}
		switch {
		case m.Ready:
			select {
			case <-p.ready:
			default:
				close(p.ready)
			}
		case m.Exited != 0:
			p.end(m.Exited, m.Status)
		default:
			select {
			case p.pids <- m:
			default: // nobody has asked
			}
		}
	}
	// Its contexts live on without it, but nobody learns of their ends.
	p.mu.Lock()
	p.gone = true
	left := p.forked
	p.forked = nil
	p.mu.Unlock()
	for _, c := range left {
		a.Table.Kill(context.Background(), c)
		c.SetStatus(syscall.WaitStatus(syscall.SIGKILL))
		close(c.Done)
	}
}

// adopt returns a forked context.
func (p *parent) adopt(a *Contexts, pid int, env map[string]string) (*process.Child, error) {
	c, err := a.Table.Forked(p.child, pid, env)
	if err != nil {
		return nil, err
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	status, ended := p.ended[pid]
	switch {
	case ended:
		delete(p.ended, pid)
		c.SetStatus(syscall.WaitStatus(status))
		close(c.Done)
	case p.gone:
		c.SetStatus(syscall.WaitStatus(syscall.SIGKILL))
		close(c.Done)
	default:
		p.forked[pid] = c
	}
	return c, nil
}

// end marks a forked context as ended.
func (p *parent) end(pid, status int) {
	p.mu.Lock()
	defer p.mu.Unlock()
	c := p.forked[pid]
	if c == nil {
		if len(p.ended) < maxContexts {
			p.ended[pid] = status
		}
		return
	}
	delete(p.forked, pid)
	c.SetStatus(syscall.WaitStatus(status))
	close(c.Done)
}
