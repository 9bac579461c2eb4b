package main

import (
	"golang.org/x/sys/unix"

	"github.com/bullpen-run/bullpen/worker/jail/wire"
)

// program is the init's direct child.
type program struct {
	pid        int
	died       int // readable when a child has died
	supervisor *supervisor
	dead       bool // it has been reaped: its pid may belong to another process
	guest      bool // it is the guest of a live sandbox, which must answer or end
}

// handleFrames handles the worker's frames. If block is set, it first blocks until there is a
// frame or a child has died.
func (p *program) handleFrames(block bool) {
	if listen(p.died, p.supervisor, block) {
		p.handleFrame()
	}
}

// listen reports whether there is something to read from the worker. It clears the notification of
// a child's death, and answers a call of the program. If block is set, it blocks until there is one
// of these.
func listen(died int, s *supervisor, block bool) bool {
	from := [...]unix.PollFd{
		{Fd: wire.ControlFD, Events: unix.POLLIN},
		{Fd: int32(died), Events: unix.POLLIN},
		{Fd: s.listener, Events: unix.POLLIN},
	}
	poll(from[:], block)
	if from[1].Revents != 0 {
		var b [128]byte // struct signalfd_siginfo
		_, _ = read(died, b[:])
	}
	if from[2].Revents != 0 {
		s.answer(from[2].Revents)
	}
	return from[0].Revents != 0
}

// handleFrame handles one frame. If the worker is gone, this process exits, and the jail dies
// with it. The worker writes a frame at once, and small frames arrive whole.
func (p *program) handleFrame() {
	var h [wire.HeaderSize]byte
	fill(h[:])
	typ, n, ok := wire.ParseHeader(h, wire.MaxToInit)
	var b [4]byte
	switch {
	case ok && typ == wire.Signal && n == len(b):
		fill(b[:])
		signal, _ := wire.ParseSignal(b[:])
		if !p.dead {
			_ = kill(-p.pid, signal) // its process group: it leads a session, and cannot leave the group
		}
	case ok && typ == wire.Kill && n == 0:
		_ = kill(-1, uint32(unix.SIGKILL))
	default:
		exit(exitFrame)
	}
}

// end returns when the program has ended, no other process is left in the jail, and both have been
// reported to the worker.
func (p *program) end() {
	var last [wire.ExitedSize + wire.HeaderSize]byte
	exited := p.wait().Encode()
	empty := wire.Header(wire.Empty, 0)
	reported := 0
	copy(last[copy(last[:], exited[:]):], empty[:])
	if !isAlone() {
		// The worker's clock stops now, however long killing the remaining processes takes.
		reported = len(exited)
		_ = send(last[:reported])
		p.killRest()
	}
	_ = send(last[reported:])
}

// wait reaps children, including orphans, until the program itself ends.
func (p *program) wait() wire.ExitedFrame {
	for {
		pid, errno := died()
		switch {
		case errno == unix.ECHILD:
			p.dead = true
			return wire.ExitedFrame{Signal: int32(unix.SIGKILL)}
		case errno != 0 || pid == 0:
			if p.guest && stopped(p.pid) { // root of the sandbox can do that
				_ = kill(p.pid, uint32(unix.SIGKILL))
			}
			p.handleFrames(true)
		case pid == p.pid:
			p.supervisor.answerPending() // of a child, before the program ended
			var st unix.WaitStatus
			var ru unix.Rusage
			_, _ = wait(pid, &st, 0, &ru)
			p.dead = true
			if p.supervisor.attacked {
				return wire.ExitedFrame{Signal: int32(unix.SIGSYS), BySeccomp: true, MaxRSSKiB: uint64(ru.Maxrss)}
			}
			return exited(st, &ru)
		default:
			_, _ = wait(pid, nil, 0, nil)
			p.handleFrames(false) // even while many orphans are reaped
		}
	}
}

func exited(st unix.WaitStatus, ru *unix.Rusage) wire.ExitedFrame {
	e := wire.ExitedFrame{MaxRSSKiB: uint64(ru.Maxrss)}
	if st.Signaled() {
		e.Signal = int32(st.Signal())
	} else {
		e.Code = int32(st.ExitStatus())
	}
	return e
}

// isAlone reports whether this process is the last one in the jail.
func isAlone() bool { return kill(-1, 0) == unix.ESRCH }

// killRest kills every other process and returns when all are reaped. kill(-1) visits the whole
// namespace under one lock, and a process with a pending SIGKILL cannot fork, so that no process
// escapes. It is repeated only for children that are reparented by a dying parent.
func (p *program) killRest() {
	for {
		_ = kill(-1, uint32(unix.SIGKILL))
		for {
			pid, errno := wait(-1, nil, unix.WNOHANG, nil)
			p.handleFrames(errno == 0 && pid == 0)
			if errno == unix.ECHILD {
				break
			}
		}
		if isAlone() {
			return
		}
	}
}
