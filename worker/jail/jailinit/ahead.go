package main

import (
	"golang.org/x/sys/unix"

	"github.com/bullpen-run/bullpen/worker/jail/wire"
)

// interpreter is one that was started before its program is known.
type interpreter struct {
	pid  int // 0 where none was
	link int // our end of what it waits on, see wire.AheadFD
}

// startAhead starts it and returns when it waits.
func startAhead(o *order) interpreter {
	var ends [2]int32
	if errno := socketpair(&ends); errno != 0 {
		fail("make a socket", nil, errno)
	}
	o.fds[o.n] = ends[1]
	o.n++
	a := interpreter{pid: launch(o), link: int(ends[0])}
	free(o.memory)
	a.awaitFirst()
	return a
}

// awaitFirst returns when it waits.
func (a interpreter) awaitFirst() {
	if a.workerSpoke() {
		exit(exitOrphan) // the worker has nothing to say yet: it is gone
	}
	var b [1]byte
	if n, errno := read(a.link, b[:]); errno != 0 || n != 1 {
		fail("wait in the interpreter", nil, unix.ECHILD)
	}
	sendEmpty(wire.Waiting)
}

// workerSpoke waits until there is something from the worker, or from the interpreter:
// then it is false. Their ends are something, too.
func (a interpreter) workerSpoke() bool {
	from := [...]unix.PollFd{{Fd: wire.ControlFD, Events: unix.POLLIN}, {Fd: int32(a.link), Events: unix.POLLIN}}
	poll(from[:], true)
	return from[0].Revents != 0
}

// await waits for what becomes of the interpreter.
func (a interpreter) await(o *order) {
	if !a.workerSpoke() {
		// It has nothing to say any more: it is dead, or as good as that.
		exit(exitAhead)
	}
	o.receive(outputs)
}

// goOn makes the interpreter the program.
func (a interpreter) goOn(o *order) int {
	told := o.room[:copy(o.room, o.Dir)]
	told = o.room[:len(told)+copy(o.room[len(told):], o.Stdin)]
	for v := o.Env.Next(); v != nil; v = o.Env.Next() {
		told = o.room[:len(told)+copy(o.room[len(told):], v)]
	}
	told = o.room[:len(told)+1]
	told[len(told)-1] = 0
	if errno := sendAll(a.link, told); errno != 0 {
		fail("go on in the interpreter that waits", nil, errno)
	}
	awaitBegin()
	closeFD(a.link)
	return a.pid
}

// kill makes room for another process.
func (a interpreter) kill() {
	closeFD(a.link)
	_ = kill(a.pid, uint32(unix.SIGKILL))
	_, _ = wait(a.pid, nil, 0, nil)
}
