package process

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"os"
	"os/signal"
	"slices"
	"sync"
	"syscall"
	"time"

	"connectrpc.com/connect"
	"golang.org/x/sys/unix"

	"github.com/bullpen-run/bullpen/guest/account"
	"github.com/bullpen-run/bullpen/guest/processpb"
)

// Limits of the processes of a sandbox.
const (
	maxRunning  = 256              // processes that run
	maxEnded    = 256              // ended processes that are kept
	maxConfigs  = 8 << 20          // bytes of arguments and environments of processes that run
	maxStreams  = 256              // clients connected to processes
	maxInputs   = 32               // streams of input
	keepEnded   = 10 * time.Minute // how long ended processes are kept
	stallAfter  = time.Minute      // see outputs
	killTimeout = 5 * time.Second  // how long the caller waits for a group to die
	drainTime   = 100 * time.Millisecond
)

// Table holds the processes of a sandbox.
type Table struct {
	Users *account.Users
	Lane  *account.Lane     // for looking at processes
	Env   map[string]string // of all processes
	Log   *Log              // of what processes print; may be nil
	Dir   string            // where processes start that name no directory; empty means the user's home
	// Capabilities are those of processes of capable users.
	Capabilities []uintptr

	outputs outputs
	marker  string // prefix of the markers of all processes
	since   uint64 // when the guest was started, in ticks since the boot
	stop    func()

	mu       sync.Mutex
	started  int
	stopping bool
	running  []*running
	children []*Child
	kills    sync.WaitGroup // of children
	ended    []*ended       // in the order of their end
	configs  int            // bytes, see maxConfigs
	streams  int
	inputs   int
}

// ended is a process that has ended and whose pipes are closed.
type ended struct {
	pid    int
	tag    string
	group  group
	out    *output
	event  *processpb.ProcessEvent_EndEvent
	expiry *time.Timer
}

// Open starts to collect the ends of processes, until Close.
func (t *Table) Open() {
	t.marker = rand.Text() + "."
	if self, err := readStat(os.Getpid()); err == nil {
		t.since = self.started
	}
	t.outputs.stallAfter = stallAfter
	children := make(chan os.Signal, 1)
	signal.Notify(children, unix.SIGCHLD)
	done := make(chan struct{})
	go func() {
		for {
			select {
			case <-children:
				t.collect()
			case <-done:
				return
			}
		}
	}()
	t.stop = sync.OnceFunc(func() {
		signal.Stop(children)
		close(done)
	})
}

// Close ends all processes: with SIGTERM, and those that live on after grace with SIGKILL. Afterwards
// no process can be started.
func (t *Table) Close(grace time.Duration) {
	defer t.stop()
	t.mu.Lock()
	t.stopping = true
	all := group{marker: t.marker, since: t.since}
	for _, p := range t.running {
		all.leaders = append(all.leaders, p.pid)
		p.markSignalled()
	}
	for _, c := range t.children {
		all.leaders = append(all.leaders, c.PID)
	}
	t.mu.Unlock()
	ctx, cancel := context.WithTimeout(context.Background(), grace)
	defer cancel()
	_, _ = all.terminate(ctx, t.view())
	t.awaitDeath(ctx, all)
	hard, cancelHard := context.WithTimeout(context.Background(), killTimeout)
	defer cancelHard()
	// What cannot be killed remains for the init of the sandbox.
	_, _ = all.kill(hard, t.view())
	t.awaitEnds(hard)
	t.kills.Wait()
	t.mu.Lock()
	defer t.mu.Unlock()
	for _, e := range t.ended {
		e.expiry.Stop()
	}
}

// Stopping reports whether Close was called.
func (t *Table) Stopping() bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.stopping
}

// awaitDeath waits until no process of a group is alive.
func (t *Table) awaitDeath(ctx context.Context, g group) {
	tick := time.NewTicker(10 * time.Millisecond)
	defer tick.Stop()
	for g.alive(t.view()) {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
	}
}

// awaitEnds waits until the ends of all processes are recorded.
func (t *Table) awaitEnds(ctx context.Context) {
	t.mu.Lock()
	all := slices.Clone(t.running)
	t.mu.Unlock()
	for _, p := range all {
		select {
		case <-p.done:
		case <-ctx.Done():
			return
		}
	}
}

func (t *Table) view() view { return view{t.Users, t.Lane} }

// collect looks which leaders have exited. It leaves them as zombies, so that their pids stay taken
// while they are listed.
func (t *Table) collect() {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.collectChildren()
	for _, p := range t.running {
		if p.exited {
			continue
		}
		var info unix.Siginfo
		err := unix.Waitid(unix.P_PID, p.pid, &info, unix.WEXITED|unix.WNOHANG|unix.WNOWAIT, nil)
		if err == nil && info.Signo == int32(unix.SIGCHLD) || errors.Is(err, unix.ECHILD) {
			p.exited = true
			close(p.leaderDone)
		}
	}
}

// retire moves a process to those that have ended.
func (t *Table) retire(p *running) {
	t.mu.Lock()
	defer t.mu.Unlock()
	status := p.reap()
	t.running = slices.DeleteFunc(t.running, func(other *running) bool { return other == p })
	t.configs -= p.size
	e := &ended{pid: p.pid, tag: p.tag, group: p.group, out: p.out, event: endEvent(status)}
	e.group.leaders = nil
	p.event = e.event
	p.out.end()
	t.Log.end(p.pid, e.event)
	t.ended = append(t.ended, e)
	e.expiry = time.AfterFunc(keepEnded, func() { t.forget(e) })
	if len(t.ended) > maxEnded {
		oldest := t.ended[0]
		t.ended = t.ended[1:]
		oldest.expiry.Stop()
		t.outputs.remove(oldest.out)
	}
}

func (t *Table) forget(e *ended) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.ended = slices.DeleteFunc(t.ended, func(other *ended) bool { return other == e })
	t.outputs.remove(e.out)
}

// endEvent describes the end of a process.
func endEvent(s syscall.WaitStatus) *processpb.ProcessEvent_EndEvent {
	e := &processpb.ProcessEvent_EndEvent{ExitCode: -1}
	switch {
	case s.Exited():
		e.Exited, e.ExitCode = true, int32(s.ExitStatus())
		e.Status = fmt.Sprintf("exit status %d", s.ExitStatus())
	case s.Signaled():
		e.Status = "signal: " + s.Signal().String()
		if s.CoreDump() {
			e.Status += " (core dumped)"
		}
	default:
		e.Status = "unknown"
	}
	if e.ExitCode != 0 {
		e.Error = &e.Status
	}
	return e
}

// find returns the process that a selector means: one that runs, or else the one that ended last.
func (t *Table) find(s *processpb.ProcessSelector) (*running, *ended, error) {
	var match func(pid int, tag string) bool
	var name string
	switch s := s.GetSelector().(type) {
	case *processpb.ProcessSelector_Pid:
		match = func(pid int, _ string) bool { return uint32(pid) == s.Pid }
		name = fmt.Sprintf("pid %d", s.Pid)
	case *processpb.ProcessSelector_Tag:
		match = func(_ int, tag string) bool { return tag == s.Tag && tag != "" }
		name = fmt.Sprintf("tag %q", s.Tag)
	default:
		return nil, nil, connect.NewError(connect.CodeInvalidArgument, errNoSelector)
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	for _, p := range slices.Backward(t.running) {
		if match(p.pid, p.tag) {
			return p, nil, nil
		}
	}
	for _, e := range slices.Backward(t.ended) {
		if match(e.pid, e.tag) {
			return nil, e, nil
		}
	}
	return nil, nil, connect.NewError(connect.CodeNotFound, fmt.Errorf("there is no process with %s", name))
}

// findRunning returns the running process that a selector means.
func (t *Table) findRunning(s *processpb.ProcessSelector) (*running, error) {
	p, e, err := t.find(s)
	if err != nil {
		return nil, err
	}
	if e != nil {
		return nil, connect.NewError(connect.CodeNotFound, fmt.Errorf("process %d has ended", e.pid))
	}
	return p, nil
}

// acquire counts something that is limited, until release is called.
func (t *Table) acquire(count *int, limit int, what string) (release func(), err error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if *count >= limit {
		return nil, connect.NewError(connect.CodeResourceExhausted,
			fmt.Errorf("the sandbox has %d %s, the most it can have", limit, what))
	}
	*count++
	return func() {
		t.mu.Lock()
		defer t.mu.Unlock()
		*count--
	}, nil
}
