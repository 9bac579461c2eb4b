package main

import (
	"golang.org/x/sys/unix"

	"github.com/bullpen-run/bullpen/worker/jail/wire"
)

// interpreter is a prewarmed interpreter.
type interpreter struct {
	pid        int // 0 if there is none
	link       int // the init's end of the socket on which the interpreter waits, see wire.PrewarmFD
	supervisor *supervisor
	guest      bool
}

// start starts the interpreter and returns when it waits.
func (a *interpreter) start(o *order) {
	var ends [2]int32
	if errno := socketpair(&ends); errno != 0 {
		fail("make a socket", nil, errno)
	}
	o.fds[o.n], o.fds[outputs] = o.fds[outputs], ends[1] // a guest's executable comes after the socket
	o.n++
	a.pid, a.link = launch(o, a.supervisor), int(ends[0])
	free(o.memory)
	a.awaitFirst()
}

// awaitFirst returns when the interpreter waits.
func (a interpreter) awaitFirst() {
	if a.workerReadable() {
		exit(exitOrphan) // the worker sends nothing yet, so this is its end
	}
	var b [1]byte
	if n, errno := a.supervisor.receiveListener(a.link, b[:]); errno != 0 || n != 1 {
		fail("wait in the interpreter", nil, unix.ECHILD)
	}
	sendEmpty(wire.Waiting)
}

// workerReadable blocks until there is something to read from the worker or the interpreter,
// including the end of the stream. It returns false for the interpreter.
func (a interpreter) workerReadable() bool {
	for {
		from := [...]unix.PollFd{
			{Fd: wire.ControlFD, Events: unix.POLLIN},
			{Fd: int32(a.link), Events: unix.POLLIN},
			{Fd: a.supervisor.listener, Events: unix.POLLIN},
		}
		poll(from[:], true)
		if from[2].Revents != 0 {
			a.supervisor.answer(from[2].Revents)
		}
		if from[0].Revents != 0 || from[1].Revents != 0 {
			return from[0].Revents != 0
		}
	}
}

// await blocks until the next order arrives, and receives it. It exits if the interpreter dies.
func (a interpreter) await(o *order) {
	if !a.workerReadable() {
		// The interpreter sends nothing more: it is dead or dying.
		exit(exitPrewarmed)
	}
	o.receive(a.guest)
}

// load makes the interpreter continue as the program.
func (a interpreter) load(o *order) int {
	for _, fd := range o.fds[:o.n] {
		if errno := sendDescriptor(a.link, int(fd)); errno != 0 {
			fail("send a descriptor to the waiting guest", nil, errno)
		}
		closeFD(int(fd))
	}
	settings := o.buffer[:copy(o.buffer, o.Dir)]
	settings = o.buffer[:len(settings)+copy(o.buffer[len(settings):], o.Stdin)]
	for v := o.Env.Next(); v != nil; v = o.Env.Next() {
		settings = o.buffer[:len(settings)+copy(o.buffer[len(settings):], v)]
	}
	settings = o.buffer[:len(settings)+1]
	settings[len(settings)-1] = 0
	if errno := sendAll(a.link, settings); errno != 0 {
		fail("send the program to the waiting interpreter", nil, errno)
	}
	awaitBegin()
	begin := [...]byte{wire.Begin}
	if errno := sendAll(a.link, begin[:]); errno != 0 {
		fail("start the program in the waiting interpreter", nil, errno)
	}
	closeFD(a.link)
	return a.pid
}

// kill kills the interpreter and returns when it is dead, so that another process can take its
// place.
func (a interpreter) kill() {
	_ = kill(a.pid, uint32(unix.SIGKILL))
	_, _ = wait(a.pid, nil, 0, nil)
	closeFD(a.link)
}
