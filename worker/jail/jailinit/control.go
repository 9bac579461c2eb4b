package main

import (
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
	fds     [maxDescriptors]int32 // received with the frame
	n       int                   // number of fds
	guest   bool                  // the process is a guest
	memory  []byte                // holds the payload and buffer
	payload []byte                // part of memory
	buffer  []byte                // part of memory: space for the strings of Order and pointers to them
}

// receive reads a frame for a program or a guest, and the descriptors that come with its first
// byte. On any error it exits, and the jail dies: the worker is gone or violates the protocol.
func (o *order) receive(guest bool) {
	o.guest = guest
	o.readFrame(descriptors(wire.Start, guest))
	switch o.typ {
	case wire.Load:
		o.parse(descriptors(o.typ, guest))
	case wire.Prewarm, wire.Start:
		o.parse(descriptors(o.typ, guest))
		if o.Argv.N == 0 {
			exit(exitFrame)
		}
	default:
		exit(exitFrame)
	}
}

// descriptors returns how many descriptors come with an order. A guest that waits gets its own with
// Load.
func descriptors(typ byte, guest bool) int {
	switch {
	case typ == wire.Load && !guest:
		return 0
	case typ == wire.Load:
		return ofGuest
	case !guest:
		return outputs
	case typ == wire.Prewarm:
		return outputsGuest - ofGuest
	default:
		return outputsGuest
	}
}

// readFrame reads a frame of any type and at most maxRights descriptors.
func (o *order) readFrame(maxRights int) {
	var h [wire.HeaderSize]byte
	n := o.receiveRights(h[:], maxRights)
	limitReads()
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
		fail("allocate memory for an order", nil, errno)
	}
	o.typ, o.memory, o.payload, o.buffer = typ, memory, memory[:size], memory[at:]
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

// receiveRights reads the first bytes of a frame and at most maxRights descriptors. It returns the
// number of descriptors.
func (o *order) receiveRights(first []byte, maxRights int) int {
	for {
		n, count, errno := receive(wire.ControlFD, first, maxRights, &o.fds)
		if errno == unix.EINTR {
			continue
		}
		if errno != 0 || n == 0 {
			exit(exitOrphan)
		}
		if count < 0 {
			exit(exitFrame)
		}
		o.n = count
		return n
	}
}

// limitReads makes this process exit if it waits in fill for longer than wire.OrderSeconds.
func limitReads() {
	if errno := setReceiveTimeout(wire.ControlFD, wire.OrderSeconds); errno != 0 {
		fail("limit the time for an order", nil, errno)
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
