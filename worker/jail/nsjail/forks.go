package nsjail

import (
	"context"
	"errors"
	"fmt"
	"net"
	"slices"
	"strings"
	"sync"

	"golang.org/x/sys/unix"

	"github.com/bullpen-run/bullpen/worker/jail"
	"github.com/bullpen-run/bullpen/worker/jail/filter"
	"github.com/bullpen-run/bullpen/worker/jail/wire"
)

// MostForks is the most Config.Forks can be: the kernel takes a map of ids of a page.
const MostForks = 128

// forksMemory, in bytes, is what a parent may hold beside what a program may: what the
// kernel keeps for namespaces that have gone, before it comes to clear them away.
const forksMemory = 256 << 20

// childID is the id within a parent's jail that is root in its i-th child; the
// next one up is the program's.
func childID(i int) int { return 10_000 + 2*i }

// parent is a jail that others are made within: by its interpreter where a fork of
// that is to wait, else by its init.
type zygote struct {
	jail   *sandbox
	orders *net.UnixConn // its interpreter takes orders from; nil where it has none

	ordering sync.Mutex // of frames to its init

	mu      sync.Mutex
	free    []int // indexes into jail.childUIDs that no jail has
	living  int   // jails that were forked
	lost    int   // that did not come up, whose uids are not used again
	closing bool
	gone    chan struct{} // closed when all has been given back; err is set then
	err     error
}

var errClosed = errors.New("the parent is closed")

// Zygote makes a jail to fork others from, for programs in jails of the spec;
// spec.Ahead is its interpreter, as by jail.Source.Zygote, if it has one.
func (m *Maker) Zygote(ctx context.Context, spec jail.Spec) (jail.Zygote, error) {
	s, err := m.admit(spec)
	if err != nil {
		return nil, err
	}
	p := &zygote{jail: s, gone: make(chan struct{})}
	if err := p.prepare(ctx); err != nil {
		return nil, errors.Join(fmt.Errorf("prepare a jail to fork from: %w", err), p.Close())
	}
	if !m.remember(s) {
		return nil, errors.Join(errClosing, p.Close())
	}
	return p, nil
}

// prepare makes the jail and starts the interpreter.
func (p *zygote) prepare(ctx context.Context) (err error) {
	s := p.jail
	if s.uids, err = s.m.uids.take(); err != nil {
		return err
	}
	for i := range s.m.cfg.Forks {
		pair, err := s.m.uids.take()
		if err != nil {
			return err
		}
		s.childUIDs = append(s.childUIDs, pair)
		p.free = append(p.free, i)
	}
	if err := s.build(ctx, s.makeGroup()); err != nil {
		return err
	}
	if err := s.open(); err != nil {
		return err
	}
	if s.spec.Ahead != nil {
		if err := p.start(ctx); err != nil {
			return err
		}
		if err := s.group.ResetWeight(); err != nil {
			return err
		}
	}
	s.ready = true
	return nil
}

// start starts the interpreter, and returns when it takes orders. It is the program
// of its jail, and root there.
func (p *zygote) start(ctx context.Context) error {
	calls, err := filter.Bytes()
	if err != nil {
		return err
	}
	orders, theirs, err := socketPair("orders", unix.SOCK_SEQPACKET)
	if err != nil {
		return err
	}
	p.orders = orders
	program := *p.jail.spec.Ahead
	program.Env = append(slices.Clone(program.Env), fmt.Sprintf("BULLPEN_FORKS=%d,%d,%x", unix.SYS_CLONE, unix.SYS_UNSHARE, calls))
	frame := (&wire.StartFrame{Argv: program.Argv, Env: program.Env, Dir: program.Dir, Stdin: wire.NoInput}).Encode(wire.Start)
	out, err := p.jail.order(frame, int(theirs.Fd()))
	if err = errors.Join(err, theirs.Close()); err != nil {
		return fmt.Errorf("start %s: %w", program.Argv[0], err)
	}
	p.jail.ahead = &interpreter{program, out}
	stop := giveUpWith(ctx, p.orders)
	var b [1]byte
	n, err := p.orders.Read(b[:])
	switch {
	case !stop():
		return fmt.Errorf("start %s: %w", program.Argv[0], context.Cause(ctx))
	case err != nil || n == 0:
		return fmt.Errorf("%s cannot be forked from: %s", program.Argv[0], p.interpreterStderr())
	}
	return nil
}

// Fork makes a jail; see jail.Zygote.
func (p *zygote) Fork(ctx context.Context, spec jail.Spec) (jail.Jail, error) {
	s, err := p.jail.m.admit(spec)
	if err != nil {
		return nil, err
	}
	i, err := p.take()
	if err != nil {
		s.m.forget(s)
		return nil, fmt.Errorf("fork a jail: %w", err)
	}
	s.zygote, s.uids = p, p.jail.childUIDs[i]
	if err := s.fork(ctx, i); err != nil {
		s.kill()
		return nil, errors.Join(fmt.Errorf("fork a jail: %w", err), s.release())
	}
	if !s.m.remember(s) {
		return nil, errors.Join(errClosing, s.Close())
	}
	return s, nil
}

// fork makes the jail as its parent's i-th child, and returns when the interpreter waits.
func (s *sandbox) fork(ctx context.Context, i int) error {
	err := s.setUpVolumes(ctx, func() error {
		if err := <-s.makeGroup(); err != nil {
			return err
		}
		if err := s.limit(); err != nil {
			return err
		}
		if err := s.orderFork(i); err != nil {
			return err
		}
		return s.awaitReady(ctx)
	})
	if err != nil {
		return err
	}
	switch {
	case s.ahead != nil: // forked along
		err = s.awaitWaiting(ctx)
	case s.spec.Ahead != nil:
		err = s.startAhead(ctx)
	}
	if err != nil {
		return err
	}
	if err := s.group.Throttle(s.spec.CPU); err != nil {
		return err
	}
	s.ready = true
	return nil
}

// orderFork tells the parent to make the jail: its interpreter if a fork of that is to
// wait there, else its init.
func (s *sandbox) orderFork(i int) error {
	theirs, err := s.connect()
	if err != nil {
		return err
	}
	defer func() { _ = theirs.Close() }()
	doors, err := s.group.OpenEntryFiles()
	if err != nil {
		return err
	}
	defer func() {
		for _, d := range doors {
			_ = d.Close()
		}
	}()
	fds := []int{int(theirs.Fd()), int(s.uids.lock.Fd())}
	for _, d := range doors {
		fds = append(fds, int(d.Fd()))
	}
	order := wire.JailFrame{Root: uint32(childID(i)), Program: jail.ProgramID, Processes: uint32(s.spec.Pids), Mounts: s.mounts()}
	if interpreter := s.zygote.jail.spec.Ahead; s.spec.Ahead != nil && interpreter != nil && slices.Equal(s.spec.Ahead.Argv, interpreter.Argv) {
		s.said = s.zygote.interpreterStderr
		err = s.orderInterpreter(&order, fds)
	} else {
		before := s.zygote.jail.logged()
		s.said = func() string { return s.zygote.jail.saidSince(before) }
		err = s.zygote.orderInit(&order, fds)
	}
	if err != nil {
		return fmt.Errorf("tell the parent: %w: %s", err, s.diagnostics())
	}
	return nil
}

// orderInit tells the parent's init to make a jail.
func (p *zygote) orderInit(order *wire.JailFrame, fds []int) error {
	p.ordering.Lock()
	defer p.ordering.Unlock()
	return writeFrame(p.jail.conn, order.Encode(), fds)
}

// orderInterpreter tells the parent's interpreter to make the jail.
func (s *sandbox) orderInterpreter(order *wire.JailFrame, fds []int) error {
	text := fmt.Appendf(nil, "%d\x00%d\x00%d\x00", order.Root, order.Program, order.Processes)
	for _, m := range order.Mounts {
		text = fmt.Appendf(text, "%s\x00%s\x00%s\x00%d\x00%s\x00", m.Source, m.Target, m.Type, m.Flags, m.Options)
	}
	out, err := s.withPipes(func(ends []int) error {
		all := slices.Concat([]int{int(s.m.init.Fd())}, fds, ends)
		_, _, err := s.zygote.orders.WriteMsgUnix(text, unix.UnixRights(all...), nil)
		return err
	})
	if err == nil {
		s.ahead = &interpreter{*s.spec.Ahead, out}
	}
	return err
}

// mounts are what nsjail mounts in other jails.
func (s *sandbox) mounts() []wire.Mount {
	const safe = unix.MS_NOSUID | unix.MS_NODEV | unix.MS_NOEXEC
	all := []wire.Mount{
		{Source: "proc", Target: "/proc", Type: "proc", Flags: safe},
		// The mount is read-only, not the file system: the one says so after it has
		// looked at who may write, the other before.
		{Target: "/proc", Flags: safe | unix.MS_REMOUNT | unix.MS_BIND | unix.MS_RDONLY},
	}
	// The root's own /sys is empty. What is bound has the flags of where it is.
	for _, m := range (layout{home: s.m.cfg.Home, masks: s.m.masks, spec: s.spec}).own("/sys") {
		flags := uint32(unix.MS_NOSUID | unix.MS_NODEV)
		if m.fstype == "" {
			flags = unix.MS_BIND
		}
		all = append(all, wire.Mount{Source: m.source, Target: m.target, Type: m.fstype, Flags: flags, Options: m.options})
	}
	return all
}

// take returns the index of uids for another jail.
func (p *zygote) take() (int, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	switch {
	case p.closing:
		return 0, errClosed
	case len(p.free) == 0:
		return 0, jail.ErrFull
	}
	i := p.free[0]
	p.free = p.free[1:]
	p.living++
	return i, nil
}

// release gives uids back that a jail had. Of one that did not come up something
// may still live, so its uids are not used again.
func (p *zygote) release(pair *uidPair, clean bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.living--
	if clean {
		p.free = append(p.free, slices.Index(p.jail.childUIDs, pair))
	} else {
		p.lost++
	}
	if p.closing && p.living == 0 {
		go p.end()
	}
}

func (p *zygote) isClosing() bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.closing
}

// Alive reports whether jails can be forked.
func (p *zygote) Alive() bool {
	p.mu.Lock()
	can := !p.closing && 2*p.lost < len(p.jail.childUIDs)
	p.mu.Unlock()
	return can && p.jail.Alive()
}

// Memory is what the parent holds; see jail.Zygote.
func (p *zygote) Memory() (int64, error) { return p.jail.Memory() }

// Close ends the parent; see jail.Zygote.
func (p *zygote) Close() error {
	p.mu.Lock()
	first := !p.closing
	p.closing = true
	if first && p.living == 0 {
		go p.end()
	}
	p.mu.Unlock()
	<-p.gone
	return p.err
}

// end kills the jail, and with it all that was forked from it, and gives everything back. It is called once.
func (p *zygote) end() {
	defer close(p.gone)
	if p.orders != nil {
		p.err = p.orders.Close()
	}
	p.err = errors.Join(p.err, p.jail.Close())
}

// interpreterStderr is what the interpreter has said since it was asked last, on one line.
func (p *zygote) interpreterStderr() string {
	b := make([]byte, maxLog)
	n := 0
	said, err := p.jail.ahead.outputs[1].SyscallConn()
	if err == nil {
		err = said.Read(func(fd uintptr) bool {
			n, _ = unix.Read(int(fd), b)
			return true // whatever there is: nobody waits for more
		})
	}
	if err != nil || n <= 0 {
		return "it says nothing"
	}
	return "it says: " + strings.Join(strings.Fields(string(b[:n])), " ")
}
