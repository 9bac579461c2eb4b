package main

import (
	"golang.org/x/sys/unix"

	"github.com/bullpen-run/bullpen/worker/jail/wire"
)

// program is the init's direct child.
type program struct {
	pid  int
	died int  // readable when a child has died
	dead bool // it has been reaped: its pid may mean another process
}

// hear carries out what the worker has said. If there is nothing else to do it blocks
// until there is, or until a child has died.
func (p *program) hear(block bool) {
	if listen(p.died, block) {
		p.obey()
	}
}

// listen reports whether the worker has said something, and takes the word that a child
// has died. Where it may block, it does until there is one of these.
func listen(died int, block bool) bool {
	from := [...]unix.PollFd{{Fd: wire.ControlFD, Events: unix.POLLIN}, {Fd: int32(died), Events: unix.POLLIN}}
	poll(from[:], block)
	if from[1].Revents != 0 {
		var b [128]byte // struct signalfd_siginfo
		_, _ = read(died, b[:])
	}
	return from[0].Revents != 0
}

// obey carries out a frame of the worker's; when the worker is gone this process ends,
// and with it the jail. The worker writes a frame at once, and small ones come whole.
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

// end returns when the program has ended and nothing but this process is left in the
// jail, and has told the worker of both.
func (p *program) end() {
	var last [wire.ExitedSize + wire.HeaderSize]byte
	exited := p.wait().Encode()
	empty := wire.Header(wire.Empty, 0)
	told := 0
	copy(last[copy(last[:], exited[:]):], empty[:])
	if !alone() {
		// The clock stops now, however long it takes to kill what is left.
		told = len(exited)
		_ = send(last[:told])
		p.killRest()
	}
	_ = send(last[told:])
}

// wait reaps children, orphans among them, until the program itself ends.
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
			p.hear(false) // however many orphans there are
		}
	}
}

// killedBySeccomp reports whether the program, dead but not yet reaped, died of a
// system call that a filter kills for, and not of a SIGSYS that somebody sent: the
// kernel has then marked the thread that made it (mode 3, since Linux 5.17). Of
// threads only the first is left to ask; a call by another is told as the signal.
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

// alone reports whether nothing is left in the jail but this process.
func alone() bool { return kill(-1, 0) == unix.ESRCH }

// killRest kills everything but this process and returns when it is reaped.
// kill(-1) goes through all of the namespace under one lock and a process with
// a pending SIGKILL cannot fork, so it cannot be outrun; it is repeated only
// for children that a dying parent hands over.
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
