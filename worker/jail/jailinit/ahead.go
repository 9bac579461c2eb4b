package main

import (
	"golang.org/x/sys/unix"

	"github.com/bullpen-run/bullpen/worker/jail/wire"
)

// interpreter is one that was started before its program is known.
type interpreter struct {
	pid  int
	link int // our end of what it waits on, see wire.AheadFD
}

// startAhead starts it and returns when it waits.
func startAhead(s wire.StartFrame, out []int) *interpreter {
	ends, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		fail(&wire.FailedFrame{Step: "make a socket", Errno: errno(err)})
	}
	pid, failed := launch(s, append(out, ends[1]))
	if failed != nil {
		fail(failed)
	}
	a := &interpreter{pid: pid, link: ends[0]}
	a.awaitFirst()
	return a
}

// awaitFirst returns when it waits.
func (a *interpreter) awaitFirst() {
	if a.hears() {
		unix.Exit(exitOrphan) // the worker has nothing to say yet: it is gone
	}
	var b [1]byte
	if n, err := unix.Read(a.link, b[:]); err != nil || n != 1 {
		fail(&wire.FailedFrame{Step: "wait in the interpreter", Errno: uint32(unix.ECHILD)})
	}
	if send(wire.Frame(wire.Waiting, nil)) != nil {
		unix.Exit(exitOrphan)
	}
}

// hears waits until there is something from the worker, or from the interpreter:
// then it is false. Their ends are something, too.
func (a *interpreter) hears() bool {
	from := []unix.PollFd{{Fd: wire.ControlFD, Events: unix.POLLIN}, {Fd: int32(a.link), Events: unix.POLLIN}}
	for {
		if _, err := unix.Poll(from, -1); err != unix.EINTR {
			return from[0].Revents != 0
		}
	}
}

// await waits for what becomes of the interpreter.
func (a *interpreter) await() (byte, wire.StartFrame, []int) {
	if !a.hears() {
		// It has nothing to say any more: it is dead, or as good as that.
		unix.Exit(exitAhead)
	}
	return receiveOrder(outputs)
}

// goOn makes the interpreter the program.
func (a *interpreter) goOn(s wire.StartFrame) (int, *wire.FailedFrame) {
	told := append([]byte(s.Dir), 0)
	for _, v := range s.Env {
		told = append(append(told, v...), 0)
	}
	told = append(told, 0)
	for len(told) > 0 {
		// Not a signal when it is dead: this process has no such disposition.
		n, err := unix.SendmsgN(a.link, told, nil, nil, unix.MSG_NOSIGNAL)
		if err == unix.EINTR {
			continue
		}
		if err != nil {
			return 0, &wire.FailedFrame{Step: "go on in the interpreter that waits", Errno: errno(err)}
		}
		told = told[n:]
	}
	if typ, _ := receive(); typ != wire.Begin {
		unix.Exit(exitFrame)
	}
	_ = unix.Close(a.link)
	return a.pid, nil
}

// kill makes room for another process.
func (a *interpreter) kill() {
	_ = unix.Close(a.link)
	_ = unix.Kill(a.pid, unix.SIGKILL)
	for {
		if _, err := unix.Wait4(a.pid, nil, 0, nil); err != unix.EINTR {
			return
		}
	}
}
