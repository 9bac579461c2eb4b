package main

import (
	"golang.org/x/sys/unix"

	"github.com/bullpen-run/bullpen/worker/jail/wire"
)

// send writes a whole frame to the worker.
func send(b []byte) error {
	for len(b) > 0 {
		n, err := unix.Write(wire.ControlFD, b)
		if err == unix.EINTR {
			continue
		}
		if err != nil {
			return err
		}
		b = b[n:]
	}
	return nil
}

// receive reads one frame, or ends this process: a worker that is gone or out
// of its mind means the jail dies.
func receive() (byte, []byte) {
	var h [wire.HeaderSize]byte
	fill(h[:])
	typ, n, ok := wire.ParseHeader(h, wire.MaxToInit)
	if !ok {
		unix.Exit(exitFrame)
	}
	payload := make([]byte, n)
	fill(payload)
	return typ, payload
}

// receiveOrder reads a frame that starts something, and the descriptors that come
// with its first byte: so many, or none with GoOn.
func receiveOrder(descriptors int) (byte, wire.StartFrame, []int) {
	var h [wire.HeaderSize]byte
	oob := make([]byte, unix.CmsgSpace(descriptors*4))
	var n, oobn int
	var err error
	for {
		n, oobn, _, _, err = unix.Recvmsg(wire.ControlFD, h[:], oob, unix.MSG_CMSG_CLOEXEC)
		if err != unix.EINTR {
			break
		}
	}
	if err != nil || n == 0 {
		unix.Exit(exitOrphan)
	}
	fill(h[n:])
	typ, size, ok := wire.ParseHeader(h, wire.MaxToInit)
	if !ok {
		unix.Exit(exitFrame)
	}
	payload := make([]byte, size)
	fill(payload)
	s, ok := wire.ParseStart(payload)
	fds := rights(oob[:oobn])
	switch typ {
	case wire.GoOn:
		ok = ok && len(fds) == 0
	case wire.Ahead, wire.Start:
		ok = ok && len(fds) == descriptors && len(s.Argv) > 0
	default:
		ok = false
	}
	if !ok {
		unix.Exit(exitFrame)
	}
	return typ, s, fds
}

func rights(oob []byte) []int {
	msgs, err := unix.ParseSocketControlMessage(oob)
	if err != nil || len(msgs) != 1 {
		return nil
	}
	fds, err := unix.ParseUnixRights(&msgs[0])
	if err != nil {
		return nil
	}
	return fds
}

// fill reads len(b) bytes from the worker, or ends this process.
func fill(b []byte) {
	for len(b) > 0 {
		n, err := unix.Read(wire.ControlFD, b)
		if err == unix.EINTR {
			continue
		}
		if err != nil || n == 0 {
			unix.Exit(exitOrphan)
		}
		b = b[n:]
	}
}
