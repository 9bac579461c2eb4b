package main

import (
	"golang.org/x/sys/unix"

	"github.com/bullpen-run/bullpen/worker/jail/wire"
)

// interpreter is one that was started before its program is known.
type interpreter struct {
	pid  int // 0 if there is none
	link int // the init's end of the socket on which the interpreter waits, see wire.AheadFD
}

// startAhead starts an interpreter and returns when it waits.
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

// awaitFirst returns when the interpreter waits.
func (a interpreter) awaitFirst() {
	if a.workerSpoke() {
		exit(exitOrphan) // the worker sends nothing yet, so this is its end
	}
	var b [1]byte
	if n, errno := read(a.link, b[:]); errno != 0 || n != 1 {
		fail("wait in the interpreter", nil, unix.ECHILD)
	}
	sendEmpty(wire.Waiting)
}

// workerSpoke blocks until there is something to read from the worker or the interpreter, including
// the end of the stream. It returns false for the interpreter.
func (a interpreter) workerSpoke() bool {
	from := [...]unix.PollFd{{Fd: wire.ControlFD, Events: unix.POLLIN}, {Fd: int32(a.link), Events: unix.POLLIN}}
	poll(from[:], true)
	return from[0].Revents != 0
}

// await blocks until the next order arrives, and receives it. It exits if the interpreter dies.
func (a interpreter) await(o *order) {
	if !a.workerSpoke() {
		// The interpreter sends nothing any more: it is dead or dying.
		exit(exitAhead)
	}
	o.receive(outputs)
}

// goOn makes the interpreter continue as the program.
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

// kill kills the interpreter, so that another process can take its place.
func (a interpreter) kill() {
	closeFD(a.link)
	_ = kill(a.pid, uint32(unix.SIGKILL))
	_, _ = wait(a.pid, nil, 0, nil)
}
