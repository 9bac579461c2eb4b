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

// MaxForks is the maximum of Config.Forks: the kernel limits an id map to one page.
const MaxForks = 128

// zygoteMemory is how much more memory, in bytes, a zygote may use than a program: the kernel frees
// the memory of namespaces some time after they are gone.
const zygoteMemory = 256 << 20

// childID returns the id in a zygote's jail that is root in its i-th child. The next id is the
// program's.
func childID(i int) int { return 10_000 + 2*i }

// zygote is a jail in which others are created. Its interpreter creates jails in which a fork of it
// waits; its init creates all others.
type zygote struct {
	jail   *sandbox
	orders *net.UnixConn // to its interpreter; nil if it has none

	ordering sync.Mutex // guards writes of frames to its init

	mu      sync.Mutex
	free    []int // unused indexes into jail.childUIDs
	living  int   // number of forked jails
	lost    int   // number of jails that failed to start; their uids are not reused
	closing bool
	gone    chan struct{} // closed when all resources are released; then err is set
	err     error
}

var errClosed = errors.New("the zygote is closed")

// Zygote creates a jail to fork others from, for programs in jails of the spec. spec.Prewarm is its
// interpreter, as from jail.Source.Zygote, if it has one.
func (m *Maker) Zygote(ctx context.Context, spec jail.Spec) (jail.Zygote, error) {
	if err := m.tree.CheckEntry(); err != nil {
		return nil, fmt.Errorf("no jail can be forked: %w", err)
	}
	s, err := m.admit(spec)
	if err != nil {
		return nil, err
	}
	p := &zygote{jail: s, gone: make(chan struct{})}
	if err := p.prepare(ctx); err != nil {
		return nil, errors.Join(fmt.Errorf("prepare a zygote: %w", err), p.Close())
	}
	if !m.remember(s) {
		return nil, errors.Join(errClosing, p.Close())
	}
	return p, nil
}

// prepare creates the jail and starts the interpreter.
func (p *zygote) prepare(ctx context.Context) (err error) {
	s := p.jail
	if s.uids, err = s.m.uids.acquire(); err != nil {
		return err
	}
	for i := range s.m.cfg.Forks {
		pair, err := s.m.uids.acquire()
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
	if s.spec.Prewarm != nil {
		// Until the imports are done, programs do the same ones themselves.
		if err := s.group.ResetWeight(); err != nil {
			return err
		}
		if err := p.start(ctx); err != nil {
			return err
		}
	}
	s.ready = true
	return nil
}

// start starts the interpreter and returns when it accepts orders. The interpreter is the program
// of its jail, and root there.
func (p *zygote) start(ctx context.Context) error {
	calls, err := filter.Bytes(p.jail.spec.SystemCalls)
	if err != nil {
		return err
	}
	orders, theirs, err := socketPair("orders", unix.SOCK_SEQPACKET)
	if err != nil {
		return err
	}
	p.orders = orders
	program := *p.jail.spec.Prewarm
	program.Env = append(slices.Clone(program.Env),
		fmt.Sprintf("BULLPEN_ZYGOTE=%d,%d,%d,%x", unix.SYS_CLONE, unix.SYS_UNSHARE, unix.SYS_SECCOMP, calls))
	frame := (&wire.StartFrame{Argv: program.Argv, Env: program.Env, Dir: program.Dir, Stdin: wire.NoInput}).
		Encode(wire.Start)
	out, err := p.jail.order(frame, int(theirs.Fd()))
	if err = errors.Join(err, theirs.Close()); err != nil {
		return fmt.Errorf("start %s: %w", program.Argv[0], err)
	}
	p.jail.prewarmed = &interpreter{program, out}
	stop := cancelReads(ctx, p.orders)
	var b [1]byte
	n, err := p.orders.Read(b[:])
	switch {
	case !stop():
		return fmt.Errorf("start %s: %w", program.Argv[0], context.Cause(ctx))
	case err != nil || n == 0:
		return fmt.Errorf("%s cannot be a zygote: %s", program.Argv[0], p.interpreterStderr())
	}
	return nil
}

// Fork creates a jail; see jail.Zygote.
func (p *zygote) Fork(ctx context.Context, spec jail.Spec) (jail.Jail, error) {
	s, err := p.jail.m.admit(spec)
	if err != nil {
		return nil, err
	}
	i, err := p.reserveIndex()
	if err != nil {
		s.m.forget(s)
		return nil, fmt.Errorf("fork a jail: %w", err)
	}
	s.zygote, s.uids = p, p.jail.childUIDs[i]
	if err := s.fork(ctx, i); err != nil {
		return nil, s.abandon("fork a jail", err)
	}
	if !s.m.remember(s) {
		return nil, errors.Join(errClosing, s.Close())
	}
	return s, nil
}

// fork creates the jail as its zygote's i-th child. It returns when the interpreter waits, if any.
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
	case s.prewarmed != nil: // forked together with the jail
		err = s.awaitWaiting(ctx)
	case s.spec.Prewarm != nil:
		err = s.prewarm(ctx)
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

// orderFork orders the zygote to create the jail: its interpreter if a fork of it will wait there,
// otherwise its init.
func (s *sandbox) orderFork(i int) error {
	theirs, err := s.connect()
	if err != nil {
		return err
	}
	defer func() { _ = theirs.Close() }()
	entryFiles, err := s.group.OpenEntryFiles()
	if err != nil {
		return err
	}
	defer func() {
		for _, f := range entryFiles {
			_ = f.Close()
		}
	}()
	fds := []int{int(theirs.Fd()), int(s.uids.lock.Fd())}
	for _, f := range entryFiles {
		fds = append(fds, int(f.Fd()))
	}
	order := wire.JailFrame{
		Root: uint32(childID(i)), Program: jail.ProgramID, Processes: uint32(s.spec.Pids),
		Mounts: s.mounts(),
	}
	if interpreter := s.zygote.jail.spec.Prewarm; s.spec.Prewarm != nil && interpreter != nil &&
		slices.Equal(s.spec.Prewarm.Argv, interpreter.Argv) {
		s.creatorLog = s.zygote.interpreterStderr
		err = s.orderInterpreter(&order, fds)
	} else {
		before := s.zygote.jail.logSize()
		s.creatorLog = func() string { return s.zygote.jail.logSince(before) }
		err = s.zygote.orderInit(&order, fds)
	}
	if err != nil {
		return fmt.Errorf("send the order to the zygote: %w: %s", err, s.diagnostics())
	}
	return nil
}

// orderInit orders the zygote's init to create a jail.
func (p *zygote) orderInit(order *wire.JailFrame, fds []int) error {
	p.ordering.Lock()
	defer p.ordering.Unlock()
	return writeFrame(p.jail.conn, order.Encode(), fds)
}

// orderInterpreter orders the zygote's interpreter to create the jail.
func (s *sandbox) orderInterpreter(order *wire.JailFrame, fds []int) error {
	text := fmt.Appendf(nil, "%d\x00%d\x00%d\x00%d\x00", order.Root, order.Program, order.Processes, len(order.Mounts))
	for _, m := range order.Mounts {
		text = fmt.Appendf(text, "%s\x00%s\x00%s\x00%d\x00%s\x00", m.Source, m.Target, m.Type, m.Flags, m.Options)
	}
	out, err := s.withPipes(func(ends []int) error {
		all := slices.Concat([]int{int(s.m.init.Fd())}, fds, ends)
		_, _, err := s.zygote.orders.WriteMsgUnix(text, unix.UnixRights(all...), nil)
		return err
	})
	if err == nil {
		s.prewarmed = &interpreter{*s.spec.Prewarm, out}
	}
	return err
}

// mounts returns what nsjail mounts in other jails.
func (s *sandbox) mounts() []wire.Mount {
	const safe = unix.MS_NOSUID | unix.MS_NODEV | unix.MS_NOEXEC
	all := []wire.Mount{
		{Source: "proc", Target: "/proc", Type: "proc", Flags: safe},
		// The mount is read-only, not the file system. A read-only mount rejects a write after the
		// permission check, a read-only file system before it.
		{Target: "/proc", Flags: safe | unix.MS_REMOUNT | unix.MS_BIND | unix.MS_RDONLY},
	}
	// A bind mount inherits the flags of its source's mount.
	for _, m := range (layout{home: s.m.cfg.Home, proc: s.m.proc, spec: s.spec}).own("") {
		flags := uint32(unix.MS_NOSUID | unix.MS_NODEV)
		switch {
		case m.fstype == "":
			flags = unix.MS_BIND
		case m.device:
			flags = unix.MS_NOSUID | unix.MS_NOEXEC
		}
		all = append(all, wire.Mount{Source: m.source, Target: m.target, Type: m.fstype, Flags: flags, Options: m.options})
	}
	return all
}

// reserveIndex returns an unused index into the children's uids.
func (p *zygote) reserveIndex() (int, error) {
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

// release returns the uids of a jail. Processes of a jail that failed to start may still be alive,
// so its uids are not reused.
func (p *zygote) release(pair *uidSet, clean bool) {
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

// Memory returns the memory that the zygote uses; see jail.Zygote.
func (p *zygote) Memory() (int64, error) { return p.jail.Memory() }

// Close closes the zygote; see jail.Zygote.
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

// end kills the jail with all its forks and releases all resources. It is called once.
func (p *zygote) end() {
	defer close(p.gone)
	if p.orders != nil {
		p.err = p.orders.Close()
	}
	p.err = errors.Join(p.err, p.jail.Close())
}

// interpreterStderr returns the interpreter's stderr output since the last call, on one line.
func (p *zygote) interpreterStderr() string {
	b := make([]byte, maxLog)
	n := 0
	conn, err := p.jail.prewarmed.outputs[1].SyscallConn()
	if err == nil {
		err = conn.Read(func(fd uintptr) bool {
			n, _ = unix.Read(int(fd), b)
			return true // one read is enough: do not wait for more
		})
	}
	if err != nil || n <= 0 {
		return "its stderr is empty"
	}
	return "its stderr: " + strings.Join(strings.Fields(string(b[:n])), " ")
}
