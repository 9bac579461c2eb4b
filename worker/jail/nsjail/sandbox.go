package nsjail

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/bullpen-run/bullpen/worker/jail"
	"github.com/bullpen-run/bullpen/worker/jail/cgroup"
	"github.com/bullpen-run/bullpen/worker/jail/disk"
	"github.com/bullpen-run/bullpen/worker/jail/egress"
)

// sandbox is one jail. One goroutine prepares it, then one uses it.
type sandbox struct {
	m         *Maker
	uids      *uidSet
	childUIDs []*uidSet // of the jails that are forked from this one; nil if there are none
	group     *cgroup.Group
	zygote    *zygote // the jail was forked from it; nil if nsjail created the jail
	// creatorLog returns the log since the order of the process that forked the jail.
	creatorLog func() string
	proc       *os.Process // nsjail
	log        *os.File    // nsjail's
	conn       *net.UnixConn
	frames     *bufio.Reader    // reads from conn, after the first frame
	oom        *cgroup.OOMWatch // nil on version 2
	volumes    []*disk.Volume
	root       *os.File     // the writable root; nil if the jail has none
	link       *egress.Link // nil if the network is blocked
	data       jail.Data    // nil if there are no mounts
	spec       jail.Spec
	prewarmed  *interpreter // nil if none waits
	loaded     bool         // the program was sent to prewarmed
	before     cgroup.Usage // what nsjail and the init had used when ready
	ready      bool         // the init is ready and the limits are in force
	initPID    int
	initFD     int // pidfd; 0 before the init exists, -1 after

	mu     sync.Mutex
	used   bool // by Run or Close
	why    reason
	cause  error // cause of reason stopped
	killed bool
	thaw   func() // ends WhileFrozen; nil if it was never called
	// ended means that the init has reported how the program ended; graceful, that it got SIGTERM
	// before, and is killed when kills fires.
	ended, graceful bool
	kills           *time.Timer
	// uncharged is the memory in bytes for which the jail was killed, of reason unchargedMemory.
	uncharged int64
}

// reason is why the worker ends a program or kills a jail, if it does.
type reason int

const (
	notEnded reason = iota
	timedOut
	cancelled
	stopped // by the context of Run, or by Close
	oomEvent
	unchargedMemory
)

var errUsed = errors.New("run in jail: this jail has been used: prepare another")

// markUsed reports whether the jail was unused, and marks it used.
func (s *sandbox) markUsed() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	unused := !s.used
	s.used = true
	return unused
}

// Run runs p; see jail.Jail.
func (s *sandbox) Run(ctx context.Context, p jail.Program) (jail.Outcome, error) {
	if !s.markUsed() {
		return jail.Outcome{}, errUsed
	}
	r := run{sandbox: s, program: p, sent: make(chan struct{}), over: make(chan struct{})}
	o, err := r.run(ctx)
	// Only nsjail's own exit remains. No caller has to wait for it.
	go func() {
		if err := s.release(); err != nil {
			s.m.cfg.Log.Error("jail cleanup failed", "error", err)
		}
	}()
	if err != nil {
		return jail.Outcome{}, fmt.Errorf("run in jail: %w", err)
	}
	return o, nil
}

// Close kills the jail. A concurrent Run returns that it was cancelled.
func (s *sandbox) Close() error {
	if !s.markUsed() {
		s.stop(stopped, errors.New("the jail was closed"))
		return nil
	}
	s.kill()
	return s.release()
}

// stop kills the jail and records the reason, unless one is recorded already. Memory that a program
// takes after SIGTERM is a reason of its own.
func (s *sandbox) stop(why reason, cause error) {
	s.mu.Lock()
	if s.why == notEnded || s.graceful && (why == oomEvent || why == unchargedMemory) {
		s.why, s.cause = why, cause
	}
	s.mu.Unlock()
	s.kill()
}

// stopForHost kills the jail because it holds a number of uncharged bytes of the host's memory.
func (s *sandbox) stopForHost(bytes int64) {
	s.mu.Lock()
	s.uncharged = bytes
	s.mu.Unlock()
	s.stop(unchargedMemory, nil)
}

// throttle limits the jail to a number of cores. It does nothing if the jail is being killed.
func (s *sandbox) throttle(cpu float64) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if !s.killed && s.initFD > 0 {
		_ = s.group.Throttle(cpu)
	}
}

// kill kills the init. The kernel then kills everything in its namespace. Processes that wait for a
// mount die once it is aborted.
func (s *sandbox) kill() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.killed = true
	if s.thaw != nil { // on version 1 of control groups, frozen processes do not die
		s.thaw()
	}
	if s.data != nil {
		s.data.Abort()
	}
	if s.initFD > 0 {
		if s.ready {
			_ = s.group.Unthrottle()
		}
		_ = unix.PidfdSendSignal(s.initFD, unix.SIGKILL, nil, 0)
	} else if s.proc != nil {
		_ = s.proc.Kill()
	}
}

// release waits for nsjail to exit and releases all resources.
func (s *sandbox) release() error {
	var errs []error
	if s.conn != nil {
		errs = append(errs, s.conn.Close())
	}
	errs = append(errs, s.awaitDeath())
	s.mu.Lock()
	if s.initFD > 0 {
		errs = append(errs, unix.Close(s.initFD))
	}
	s.initFD = -1
	s.mu.Unlock()
	if s.oom != nil {
		errs = append(errs, s.oom.Close())
	}
	if s.root != nil {
		errs = append(errs, s.root.Close())
	}
	for _, v := range s.volumes { // before the group, which their page cache is charged to
		errs = append(errs, v.Close())
	}
	if s.group != nil {
		errs = append(errs, s.group.Remove())
	}
	if s.link != nil {
		s.link.Close()
	}
	if s.prewarmed != nil {
		errs = append(errs, s.prewarmed.outputs.close())
	}
	if s.log != nil {
		errs = append(errs, s.log.Close())
	}
	switch {
	case s.uids == nil:
	case s.zygote != nil:
		s.zygote.release(s.uids, s.ready)
	case s.ready:
		s.uidPool().release(s.uids)
	default:
		// Processes of a jail that failed to start may still be dying. They hold the lock that is
		// closed here.
		errs = append(errs, s.uidPool().discard(s.uids))
	}
	for _, pair := range s.childUIDs { // not reused: other workers may need so many
		errs = append(errs, s.m.uids.discard(pair))
	}
	s.m.forget(s)
	return errors.Join(errs...)
}

// reminder is the time between two signals to an nsjail that must end.
const reminder = time.Second

// remind makes nsjail check for its child's death until stop is called. nsjail misses a death just before it begins
// to wait, and would otherwise notice by an alarm every second, which is blocked.
func remind(nsjail *os.Process) (stop func()) {
	over := make(chan struct{})
	go func() {
		tick := time.NewTicker(reminder)
		defer tick.Stop()
		for {
			select {
			case <-over:
				return
			case <-tick.C:
				_ = nsjail.Signal(unix.SIGCHLD) // it may have ended
			}
		}
	}()
	return func() { close(over) }
}

// awaitDeath waits until nsjail, the init and all processes that the kernel kills with the init are
// dead. The caller must already have killed them.
func (s *sandbox) awaitDeath() (err error) {
	if s.proc != nil {
		stop := remind(s.proc)
		_, err = s.proc.Wait()
		stop()
		s.mu.Lock()
		s.proc = nil
		s.mu.Unlock()
	}
	if s.initFD <= 0 {
		return err
	}
	// The init is dead already, since nsjail outlives it, unless nsjail itself was killed.
	for {
		_, perr := unix.Poll([]unix.PollFd{{Fd: int32(s.initFD), Events: unix.POLLIN}}, -1)
		if !errors.Is(perr, unix.EINTR) {
			return errors.Join(err, perr)
		}
	}
}
