package nsjail

import (
	"context"
	"errors"
	"fmt"
	"syscall"

	"golang.org/x/sys/unix"

	"github.com/bullpen-run/bullpen/worker/jail"
	"github.com/bullpen-run/bullpen/worker/jail/disk"
	"github.com/bullpen-run/bullpen/worker/jail/wire"
)

// interpreter is an interpreter that waits in a jail for its program.
type interpreter struct {
	program jail.Program // as which it was started
	outputs outputs
}

// prewarm starts the spec's interpreter and returns when it waits.
func (s *sandbox) prewarm(ctx context.Context) error {
	p := *s.spec.Prewarm
	frame, err := encode(wire.Prewarm, p, s.spec.Guest)
	if err != nil {
		return err
	}
	executable, err := s.executable()
	if err != nil {
		return err
	}
	out, err := s.order(frame, executable...)
	if err != nil {
		return fmt.Errorf("prewarm %s: %w", p.Argv[0], err)
	}
	s.prewarmed = &interpreter{p, out}
	return s.awaitWaiting(ctx)
}

// executable returns the descriptor of the executable of a guest, if the jail is for one.
func (s *sandbox) executable() ([]int, error) {
	if !s.spec.Guest {
		return nil, nil
	}
	guest, err := s.m.guest()
	if err != nil {
		return nil, err
	}
	return []int{int(guest.Fd())}, nil
}

// ofGuest returns the descriptors that p needs as a guest, if it is one.
func ofGuest(p jail.Program) []int {
	if p.Listener == nil {
		return nil
	}
	return []int{int(p.Listener.Fd()), int(p.Heartbeat.Fd())}
}

// awaitWaiting blocks until the interpreter waits.
func (s *sandbox) awaitWaiting(ctx context.Context) error {
	p := *s.spec.Prewarm
	stop := cancelReads(ctx, s.conn)
	typ, payload, err := s.receive()
	switch {
	case !stop():
		return fmt.Errorf("prewarm %s: %w", p.Argv[0], context.Cause(ctx))
	case err != nil:
		return fmt.Errorf("prewarm %s: the init died: %w: %s", p.Argv[0], err, s.diagnostics())
	case typ == wire.Waiting:
		return nil
	}
	if f, ok := wire.ParseFailed(payload); typ == wire.Failed && ok {
		return fmt.Errorf("prewarm %s: %s: %w", p.Argv[0], f.Step, syscall.Errno(f.Errno))
	}
	return fmt.Errorf("prewarm %s: the init sent an unknown frame %q", p.Argv[0], typ)
}

// Load sends p to the waiting interpreter; see jail.Jail.
func (s *sandbox) Load(ctx context.Context, p jail.Program) error {
	stop := context.AfterFunc(ctx, s.kill)
	err := s.load(p)
	if !stop() {
		err = context.Cause(ctx)
	}
	if err != nil {
		return fmt.Errorf("load a program into a jail: %w", err)
	}
	return nil
}

// load does nothing if no interpreter can continue with p. It returns no error if the jail is dead;
// Run detects that.
func (s *sandbox) load(p jail.Program) error {
	if p.Interception != nil {
		if s.link == nil {
			return errors.New("intercept the program's connections: the jail has no network")
		}
		s.link.Intercept(p.Interception)
	}
	if s.prewarmed == nil || s.loaded {
		return nil
	}
	added, ok := p.Continues(s.prewarmed.program)
	if !ok {
		return nil
	}
	p.Argv, p.Env = nil, added
	frame, err := encode(wire.Load, p, s.spec.Guest)
	if err != nil {
		return err
	}
	s.loaded = true
	return ignoreEnd(writeFrame(s.conn, frame, ofGuest(p)))
}

// MountHome mounts a home; see jail.Jail.
func (s *sandbox) MountHome(ctx context.Context, h jail.Home) error {
	if !s.spec.MountHomeLater || s.spec.Home != nil {
		return errors.New("mount a home in a jail: the jail was not prepared for one, or has one")
	}
	s.spec.Home = h
	attach, err := s.mountHome(ctx)
	if err != nil {
		return fmt.Errorf("mount a home in a jail: %w", err)
	}
	return attach(s.initFD, s.m.cfg.Home)
}

// BindHome mounts a directory of the home at another path; see jail.Jail.
func (s *sandbox) BindHome(ctx context.Context, dir, target string) error {
	if err := context.Cause(ctx); err != nil {
		return err
	}
	return disk.Bind(s.initFD, s.m.cfg.Home, dir, target)
}

// Alive reports whether the init is alive; it dies with the prewarmed interpreter. A
// forked jail must no longer be used once its zygote is closed, which lives as long as the jail.
func (s *sandbox) Alive() bool {
	if s.zygote != nil && s.zygote.isClosing() {
		return false
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.initFD <= 0 {
		return false
	}
	n, err := unix.Poll([]unix.PollFd{{Fd: int32(s.initFD), Events: unix.POLLIN}}, 0)
	return n == 0 && (err == nil || errors.Is(err, unix.EINTR))
}

// Memory returns the memory charged to the jail, without page cache.
func (s *sandbox) Memory() (int64, error) { return s.group.Memory() }
