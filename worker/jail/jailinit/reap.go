package main

import (
	"bytes"
	"strconv"
	"sync"

	"golang.org/x/sys/unix"

	"github.com/bullpen-run/bullpen/worker/jail/wire"
)

// program is the init's direct child.
type program struct {
	pid int

	mu   sync.Mutex
	dead bool // it has been reaped: its pid may mean another process
}

// obey carries out the worker's frames until the worker is gone; then this
// process ends, and with it the jail.
func (p *program) obey() {
	for {
		typ, payload := receive()
		switch typ {
		case wire.Signal:
			n, ok := wire.ParseSignal(payload)
			if !ok {
				unix.Exit(exitFrame)
			}
			p.signal(unix.Signal(n))
		case wire.Kill:
			_ = unix.Kill(-1, unix.SIGKILL)
		default:
			unix.Exit(exitFrame)
		}
	}
}

func (p *program) signal(s unix.Signal) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if !p.dead {
		_ = unix.Kill(p.pid, s)
	}
}

// wait reaps children, orphans among them, until the program itself ends.
func (p *program) wait() wire.ExitedFrame {
	for {
		var info unix.Siginfo
		// WNOWAIT first, so that the pid is still the program's while the lock
		// is taken.
		if err := unix.Waitid(unix.P_ALL, 0, &info, unix.WEXITED|unix.WNOWAIT, nil); err == unix.EINTR {
			continue
		}
		bySeccomp := p.killedBySeccomp()
		p.mu.Lock()
		var st unix.WaitStatus
		var ru unix.Rusage
		pid, err := unix.Wait4(-1, &st, unix.WNOHANG, &ru)
		if pid == p.pid {
			p.dead = true
		}
		p.mu.Unlock()
		if err == unix.ECHILD {
			return wire.ExitedFrame{Signal: int32(unix.SIGKILL)}
		}
		if pid == p.pid {
			return exited(st, &ru, bySeccomp)
		}
	}
}

// killedBySeccomp reports whether the program, dead but not yet reaped, died of a
// system call that a filter kills for, and not of a SIGSYS that somebody sent: the
// kernel has then marked the thread that made it (mode 3, since Linux 5.17). Of
// threads only the first is left to ask; a call by another is told as the signal.
func (p *program) killedBySeccomp() bool {
	var info unix.Siginfo
	err := unix.Waitid(unix.P_PID, p.pid, &info, unix.WEXITED|unix.WNOWAIT|unix.WNOHANG, nil)
	const killed, dumped = 2, 3 // CLD_KILLED, CLD_DUMPED
	if err != nil || info.Signo == 0 || (info.Code != killed && info.Code != dumped) {
		return false
	}
	fd, err := unix.Open("/proc/"+strconv.Itoa(p.pid)+"/status", unix.O_RDONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		return false
	}
	defer func() { _ = unix.Close(fd) }()
	var status [4096]byte
	n, _ := unix.Read(fd, status[:])
	return bytes.Contains(status[:max(n, 0)], []byte("\nSeccomp:\t3\n"))
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
func alone() bool { return unix.Kill(-1, 0) == unix.ESRCH }

// killRest kills everything but this process and returns when it is reaped.
// kill(-1) goes through all of the namespace under one lock and a process with
// a pending SIGKILL cannot fork, so it cannot be outrun; it is repeated only
// for children that a dying parent hands over.
func killRest() {
	for {
		_ = unix.Kill(-1, unix.SIGKILL)
		for {
			_, err := unix.Wait4(-1, nil, 0, nil)
			if err == unix.ECHILD {
				break
			}
		}
		if alone() {
			return
		}
	}
}
