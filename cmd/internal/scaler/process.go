package scaler

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os/exec"
	"runtime"
	"slices"
	"sync"
	"syscall"
	"time"

	"github.com/bullpen-run/bullpen/proto"
)

const (
	// checkEvery is how often a process driver looks for workers that have drained.
	checkEvery = 500 * time.Millisecond
	// A process that ends within quickly of its start is restarted after a pause, which doubles
	// each time up to maxPause.
	quickly  = 10 * time.Second
	minPause = time.Second
	maxPause = 30 * time.Second
)

// Workers are the live workers.
type Workers interface {
	// Workers returns all live workers by name.
	Workers(ctx context.Context) ([]proto.Worker, error)
	// Drain makes a worker stop or resume taking jobs.
	Drain(ctx context.Context, name string, drain bool) (proto.Worker, error)
}

// Process is a [Driver] that runs one pool's workers as processes on this machine. A surplus worker
// drains, and is stopped when its programs have ended.
type Process struct {
	Pool string
	// Most bounds the processes.
	Most int
	// Command returns the command and the name of a worker. Numbers are unique among the running
	// processes.
	Command func(number int) (cmd *exec.Cmd, name string, err error)
	Workers Workers
	// Grace is how long processes have to end when Run ends. Then they are killed.
	Grace  time.Duration
	Failed func(pool string) // is called when a process cannot be started, or ends unexpectedly
	Log    *slog.Logger

	mu      sync.Mutex
	target  int
	changed chan struct{}
	once    sync.Once

	// Owned by Run.
	children []*child
	ended    chan *child
	pause    time.Duration
	retryAt  time.Time
}

// child is a worker process.
type child struct {
	number   int
	name     string
	cmd      *exec.Cmd
	started  time.Time
	draining bool // it was asked to drain
	stopping bool // it was sent SIGTERM
	err      error
}

func (p *Process) init() {
	p.once.Do(func() { p.changed, p.ended = make(chan struct{}, 1), make(chan *child) })
}

// Scale implements [Driver]. It does not wait for the workers.
func (p *Process) Scale(_ context.Context, pool proto.Pool) error {
	if pool.Name != p.Pool {
		return nil
	}
	p.init()
	p.mu.Lock()
	p.target = min(pool.Desired.Workers, p.Most)
	p.mu.Unlock()
	select {
	case p.changed <- struct{}{}:
	default:
	}
	return nil
}

// Run starts and stops workers until ctx is done, and then stops all. If this process is killed,
// the kernel sends SIGTERM to the workers, which then drain. It always returns nil.
func (p *Process) Run(ctx context.Context) error {
	p.init()
	runtime.LockOSThread() // the kernel watches the thread that started a child, not the process
	defer runtime.UnlockOSThread()
	tick := time.NewTicker(checkEvery)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			p.stopAll()
			return nil
		case c := <-p.ended:
			p.remove(c)
		case <-p.changed:
		case <-tick.C:
			if !p.unsettled() {
				continue
			}
		}
		p.reconcile(ctx)
	}
}

// unsettled reports whether something is left to do without a further change.
func (p *Process) unsettled() bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.active() != p.target ||
		slices.ContainsFunc(p.children, func(c *child) bool { return c.draining && !c.stopping })
}

// active returns the number of workers that take jobs.
func (p *Process) active() (n int) {
	for _, c := range p.children {
		if !c.draining {
			n++
		}
	}
	return n
}

// reconcile starts, drains or stops workers.
func (p *Process) reconcile(ctx context.Context) {
	p.mu.Lock()
	missing := p.target - p.active()
	p.mu.Unlock()
	draining := slices.ContainsFunc(p.children, func(c *child) bool { return c.draining && !c.stopping })
	live := map[string]proto.Worker{}
	if draining || missing < 0 {
		list, err := p.Workers.Workers(ctx)
		if err != nil {
			p.Log.Warn("workers unknown, will retry", "error", err)
			return
		}
		for _, w := range list {
			live[w.Name] = w
		}
	}
	for _, c := range p.children {
		if missing > 0 && c.draining && !c.stopping && p.drain(ctx, c, false) {
			missing--
		}
	}
	for ; missing > 0 && !time.Now().Before(p.retryAt); missing-- {
		p.start()
	}
	for ; missing < 0; missing++ {
		if c := p.idlest(live); c == nil || !p.drain(ctx, c, true) {
			break // a worker that is starting is drained once it is live
		}
	}
	for _, c := range p.children {
		if w, ok := live[c.name]; c.draining && !c.stopping && ok && w.Draining && w.Running == 0 {
			p.stop(c)
		}
	}
}

// idlest returns the live worker that runs the fewest programs, or nil.
func (p *Process) idlest(live map[string]proto.Worker) (best *child) {
	for _, c := range p.children {
		if _, ok := live[c.name]; ok && !c.draining && (best == nil || live[c.name].Running < live[best.name].Running) {
			best = c
		}
	}
	return best
}

// drain makes a worker drain or resume taking jobs, and reports whether it does.
func (p *Process) drain(ctx context.Context, c *child, drain bool) bool {
	if _, err := p.Workers.Drain(ctx, c.name, drain); err != nil {
		p.Log.Warn("worker not drained, will retry", "worker", c.name, "drain", drain, "error", err)
		return false
	}
	c.draining = drain
	return true
}

// start starts a worker. After a failure it is tried again later.
func (p *Process) start() {
	number := 0
	for slices.ContainsFunc(p.children, func(c *child) bool { return c.number == number }) {
		number++
	}
	cmd, name, err := p.Command(number)
	if err == nil {
		// A group of its own: an interrupt from a terminal is for this process alone.
		cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGTERM}
		err = cmd.Start()
	}
	if err != nil {
		p.backOff(fmt.Errorf("start worker %d: %w", number, err))
		return
	}
	c := &child{number: number, name: name, cmd: cmd, started: time.Now()}
	p.children = append(p.children, c)
	p.Log.Info("worker started", "worker", name, "pid", cmd.Process.Pid)
	go func() {
		c.err = cmd.Wait()
		p.ended <- c
	}()
}

func (p *Process) backOff(err error) {
	p.pause = min(max(2*p.pause, minPause), maxPause)
	p.retryAt = time.Now().Add(p.pause)
	p.Failed(p.Pool)
	p.Log.Error("worker process failed, will start another", "error", err, "in_ms", p.pause.Milliseconds())
}

// remove forgets a process that has ended.
func (p *Process) remove(c *child) {
	p.children = slices.DeleteFunc(p.children, func(other *child) bool { return other == c })
	switch {
	case c.stopping && c.err == nil:
		p.Log.Info("worker stopped", "worker", c.name)
		return
	case time.Since(c.started) >= quickly:
		p.pause = 0
	}
	p.backOff(fmt.Errorf("worker %s ended: %w", c.name, exitError(c.err)))
}

// exitError returns the error with which a process ended.
func exitError(err error) error {
	if err == nil {
		return errors.New("without an error")
	}
	return err
}

// stop sends SIGTERM to a worker, which ends.
func (p *Process) stop(c *child) {
	c.stopping = true
	_ = c.cmd.Process.Signal(syscall.SIGTERM) // fails if it has ended, which is reported
}

// stopAll stops all workers and waits for them. Their programs have the time of --drain.
func (p *Process) stopAll() {
	for _, c := range p.children {
		p.stop(c)
	}
	kill := time.NewTimer(p.Grace)
	defer kill.Stop()
	for len(p.children) > 0 {
		select {
		case c := <-p.ended:
			p.children = slices.DeleteFunc(p.children, func(other *child) bool { return other == c })
		case <-kill.C:
			for _, c := range p.children {
				p.Log.Error("worker does not stop, killing it", "worker", c.name)
				_ = c.cmd.Process.Kill()
			}
		}
	}
}
