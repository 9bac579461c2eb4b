package main

import (
	"bytes"
	"errors"
	"fmt"

	"golang.org/x/sys/unix"
)

// prewarmEnv is set for a guest that is started before its sandbox is known. Descriptor 3 is then a
// stream socket, on which the guest waits: it writes one byte when it is ready. It reads two bytes
// with the listening socket and the heartbeat, strings that end with a zero byte, which it ignores,
// an empty one, and a byte begin. Only then does the config exist.
const prewarmEnv = "BULLPEN_PREWARM"

// begin is the byte on which a guest that waits begins to serve.
const begin = 'N'

// awaitSandbox returns the listening socket and the heartbeat when the sandbox has begun.
func awaitSandbox() (listener, heartbeat int, err error) {
	defer func() { err = errors.Join(err, unix.Close(listenFD)) }()
	if _, err := unix.Write(listenFD, []byte{'.'}); err != nil {
		return 0, 0, err
	}
	if listener, err = receiveDescriptor(listenFD); err != nil {
		return 0, 0, err
	}
	if heartbeat, err = receiveDescriptor(listenFD); err != nil {
		return 0, 0, err
	}
	return listener, heartbeat, awaitBegin(listenFD)
}

// receiveDescriptor reads one byte with a descriptor.
func receiveDescriptor(from int) (int, error) {
	var first [1]byte
	control := make([]byte, unix.CmsgSpace(4))
	var n, size int
	var err error
	for {
		if n, size, _, _, err = unix.Recvmsg(from, first[:], control, unix.MSG_CMSG_CLOEXEC); !errors.Is(err, unix.EINTR) {
			break
		}
	}
	if err != nil || n == 0 {
		return -1, errors.Join(errors.New("the socket was closed"), err)
	}
	messages, err := unix.ParseSocketControlMessage(control[:size])
	if err != nil || len(messages) != 1 {
		return -1, errors.Join(errors.New("no descriptor came"), err)
	}
	fds, err := unix.ParseUnixRights(&messages[0])
	if err != nil || len(fds) != 1 {
		return -1, errors.Join(errors.New("no descriptor came"), err)
	}
	return fds[0], nil
}

// awaitBegin reads strings up to an empty one, and the byte begin.
func awaitBegin(from int) error {
	var text []byte
	buffer := make([]byte, 1024)
	for {
		n, err := unix.Read(from, buffer)
		switch {
		case errors.Is(err, unix.EINTR):
			continue
		case err != nil:
			return err
		case n == 0:
			return errors.New("the socket was closed")
		}
		text = append(text, buffer[:n]...)
		_, order, whole := bytes.Cut(text, []byte{0, 0})
		if !whole || len(order) == 0 {
			continue
		}
		if len(order) != 1 || order[0] != begin {
			return fmt.Errorf("%q came instead of the order to begin", order)
		}
		return nil
	}
}
