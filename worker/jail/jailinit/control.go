package main

import (
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/bullpen-run/bullpen/worker/jail/wire"
)

// send writes a whole frame to the worker.
func send(b []byte) unix.Errno { return sendAll(wire.ControlFD, b) }

// sendEmpty sends a frame without a payload.
func sendEmpty(typ byte) {
	h := wire.Header(typ, 0)
	if send(h[:]) != 0 {
		exit(exitOrphan)
	}
}

// fail reports to the worker what failed, and exits. The object, if there is one, ends with a zero
// byte.
func fail(verb string, object []byte, errno unix.Errno) {
	var b [wire.MaxToWorker]byte
	_ = send(wire.PutFailed(&b, verb, object[:max(len(object)-1, 0)], uint32(errno)))
	exit(exitOK)
}

// order is a frame that starts a process.
type order struct {
	wire.Order
	typ     byte
	fds     [mostDescriptors]int32 // received with the frame
	n       int                    // number of fds
	memory  []byte                 // holds the payload and room
	payload []byte                 // part of memory
	room    []byte                 // part of memory: space for the strings of Order and pointers to them
}

// receive reads a frame and the descriptors that come with its first byte: descriptors of them, or
// none with GoOn. On any error it exits, and the jail dies: the worker is gone or violates the
// protocol.
func (o *order) receive(descriptors int) {
	o.take(descriptors)
	switch o.typ {
	case wire.GoOn:
		o.parse(0)
	case wire.Ahead, wire.Start:
		o.parse(descriptors)
		if o.Argv.N == 0 {
			exit(exitFrame)
		}
	default:
		exit(exitFrame)
	}
}

// take reads a frame of any type and at most most descriptors.
func (o *order) take(most int) {
	var h [wire.HeaderSize]byte
	n := o.receiveRights(h[:], most)
	fill(h[n:])
	typ, size, ok := wire.ParseHeader(h, wire.MaxToInit)
	if !ok {
		exit(exitFrame)
	}
	const word = 8
	at := (size + word - 1) &^ (word - 1)
	strings := size / 5 // at most: each has a length and a terminator
	memory, errno := allocate(at + (strings+2)*word)
	if errno != 0 {
		fail("make room for an order", nil, errno)
	}
	o.typ, o.memory, o.payload, o.room = typ, memory, memory[:size], memory[at:]
	fill(o.payload)
}

// parse parses the frame of a process to start, which must have come with descriptors descriptors.
func (o *order) parse(descriptors int) {
	var ok bool
	if o.Order, ok = wire.ParseOrder(o.payload); !ok || o.n != descriptors {
		exit(exitFrame)
	}
}

// awaitBegin blocks until the program may begin.
func awaitBegin() {
	var h [wire.HeaderSize]byte
	fill(h[:])
	if typ, n, ok := wire.ParseHeader(h, wire.MaxToInit); !ok || typ != wire.Begin || n != 0 {
		exit(exitFrame)
	}
}

// receiveRights reads the first bytes of a frame and at most most descriptors. It returns the
// number of descriptors.
func (o *order) receiveRights(first []byte, most int) int {
	var oob struct {
		unix.Cmsghdr
		fds [mostDescriptors]int32 // whole words
	}
	v := unix.Iovec{Base: &first[0]}
	v.SetLen(len(first))
	m := unix.Msghdr{Iov: &v, Control: (*byte)(unsafe.Pointer(&oob))} //nolint:gosec // the kernel writes a struct
	m.SetIovlen(1)
	m.SetControllen(unix.CmsgSpace(most * 4))
	for {
		n, errno := recvmsg(wire.ControlFD, &m)
		if errno == unix.EINTR {
			continue
		}
		if errno != 0 || n == 0 {
			exit(exitOrphan)
		}
		o.n = 0
		if m.Controllen == 0 {
			return n
		}
		o.n = (int(oob.Len) - unix.CmsgLen(0)) / 4
		if oob.Level != unix.SOL_SOCKET || oob.Type != unix.SCM_RIGHTS || m.Flags&unix.MSG_CTRUNC != 0 || o.n > most {
			exit(exitFrame)
		}
		copy(o.fds[:], oob.fds[:])
		return n
	}
}

// fill reads len(b) bytes from the worker. It exits on an error.
func fill(b []byte) {
	for len(b) > 0 {
		n, errno := read(wire.ControlFD, b)
		if errno == unix.EINTR {
			continue
		}
		if errno != 0 || n == 0 {
			exit(exitOrphan)
		}
		b = b[n:]
	}
}
