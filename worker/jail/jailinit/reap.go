package main

import (
	"golang.org/x/sys/unix"

	"github.com/bullpen-run/bullpen/worker/jail/wire"
)

// program is the init's direct child.
type program struct {
	pid  int
	died int  // readable when a child has died
	dead bool // it has been reaped: its pid may belong to another process
}

// hear carries out the worker's frames. If block is set, it first blocks until there is a frame or
// a child has died.
func (p *program) hear(block bool) {
	if listen(p.died, block) {
		p.obey()
	}
}

// listen reports whether there is something to read from the worker. It clears the notification of
// a child's death. If block is set, it blocks until there is either.
func listen(died int, block bool) bool {
	from := [...]unix.PollFd{{Fd: wire.ControlFD, Events: unix.POLLIN}, {Fd: int32(died), Events: unix.POLLIN}}
	poll(from[:], block)
	if from[1].Revents != 0 {
		var b [128]byte // struct signalfd_siginfo
		_, _ = read(died, b[:])
	}
	return from[0].Revents != 0
}

// obey carries out one frame. If the worker is gone, this process exits, and the jail dies with it.
// The worker writes a frame at once, and small frames arrive whole.
func (p *program) obey() {
	var h [wire.HeaderSize]byte
	fill(h[:])
	typ, n, ok := wire.ParseHeader(h, wire.MaxToInit)
	var b [4]byte
	switch {
	case ok && typ == wire.Signal && n == len(b):
		fill(b[:])
		signal, _ := wire.ParseSignal(b[:])
		if !p.dead {
			_ = kill(p.pid, signal)
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
	told := 0
	copy(last[copy(last[:], exited[:]):], empty[:])
	if !alone() {
		// The worker's clock stops now, however long it takes to kill the remaining processes.
		told = len(exited)
		_ = send(last[:told])
		p.killRest()
	}
	_ = send(last[told:])
}

// wait reaps children, including orphans, until the program itself ends.
func (p *program) wait() wire.ExitedFrame {
	for {
		d, errno := died()
		pid := int(d.pid)
		switch {
		case errno == unix.ECHILD:
			p.dead = true
			return wire.ExitedFrame{Signal: int32(unix.SIGKILL)}
		case errno != 0 || pid == 0:
			p.hear(true)
		case pid == p.pid:
			bySeccomp := d.killedBySeccomp()
			var st unix.WaitStatus
			var ru unix.Rusage
			_, _ = wait(pid, &st, 0, &ru)
			p.dead = true
			return exited(st, &ru, bySeccomp)
		default:
			_, _ = wait(pid, nil, 0, nil)
			p.hear(false) // even while many orphans are reaped
		}
	}
}

// killedBySeccomp reports whether a filter killed the program, which is dead but not yet reaped. A
// SIGSYS that a process sent does not count. Since Linux 5.17 the kernel marks the thread that made
// the forbidden call (mode 3). Only the first thread can still be examined; a call by another
// thread is reported as the signal.
func (d *death) killedBySeccomp() bool {
	const killed, dumped = 2, 3 // CLD_KILLED, CLD_DUMPED
	if d.code != killed && d.code != dumped {
		return false
	}
	fd, errno := openProc(int(d.pid), "/status", unix.O_RDONLY)
	if errno != 0 {
		return false
	}
	var status [4096]byte
	n, _ := read(fd, status[:])
	closeFD(fd)
	const mark = "\nSeccomp:\t3\n"
	for i := 0; i+len(mark) <= n; i++ {
		if string(status[i:i+len(mark)]) == mark {
			return true
		}
	}
	return false
}

func exited(st unix.WaitStatus, ru *unix.Rusage, bySeccomp bool) wire.ExitedFrame {
	e := wire.ExitedFrame{MaxRSSKiB: uint64(ru.Maxrss), BySeccomp: bySeccomp && st.Signal() == unix.SIGSYS}
	if st.Signaled() {
		e.Signal = int32(st.Signal())
	} else {
		e.Code = int32(st.ExitStatus())
	}
	return e
}

// alone reports whether this process is the last one in the jail.
func alone() bool { return kill(-1, 0) == unix.ESRCH }

// killRest kills every other process and returns when all are reaped. kill(-1) visits the whole
// namespace under one lock, and a process with a pending SIGKILL cannot fork, so that no process
// escapes. It is repeated only for children that are reparented by a dying parent.
func (p *program) killRest() {
	for {
		_ = kill(-1, uint32(unix.SIGKILL))
		for {
			pid, errno := wait(-1, nil, unix.WNOHANG, nil)
			p.hear(errno == 0 && pid == 0)
			if errno == unix.ECHILD {
				break
			}
		}
		if alone() {
			return
		}
	}
}
