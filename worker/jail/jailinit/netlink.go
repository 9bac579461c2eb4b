//nolint:gosec // the kernel is given pointers
package main

import (
	"unsafe"

	"golang.org/x/sys/unix"
)

// The kernel does not charge for messages in the receive buffers of netlink sockets. A program that
// sends requests and reads no answers could therefore use up the host's memory. So the init creates
// a program's netlink sockets, at most maxNetlink at a time, each with buffers of netlinkBytes. The
// filter lets no program make them larger.
const (
	maxNetlink   = 64
	netlinkBytes = 104 << 10 // the kernel doubles it, to its usual size
)

// openProtocols opens the file in which the kernel counts sockets.
func openProtocols() (int32, unix.Errno) {
	path := [...]byte{
		'/', 'p', 'r', 'o', 'c', '/', 's', 'e', 'l', 'f', '/', 'n', 'e', 't', '/', 'p', 'r', 'o', 't', 'o',
		'c', 'o', 'l', 's', 0,
	}
	fd, errno := open(&path[0], unix.O_RDONLY, 0)
	return int32(fd), errno
}

// createNetlink creates a socket of a type for routing messages. The filter stops calls for other
// protocols earlier.
func (s *supervisor) createNetlink(kind uintptr) (int, unix.Errno) {
	if sockets, ok := s.countSockets("NETLINK"); !ok || sockets >= maxNetlink {
		return -1, unix.ENOBUFS
	}
	fd, _, errno := unix.RawSyscall(unix.SYS_SOCKET, unix.AF_NETLINK, kind|unix.SOCK_CLOEXEC, unix.NETLINK_ROUTE)
	if errno != 0 {
		return -1, errno
	}
	size := int32(netlinkBytes)
	for _, option := range [...]uintptr{unix.SO_RCVBUF, unix.SO_SNDBUF} {
		_, _, errno = unix.RawSyscall6(unix.SYS_SETSOCKOPT, fd, unix.SOL_SOCKET, option, uintptr(unsafe.Pointer(&size)),
			unsafe.Sizeof(size), 0)
		if errno != 0 {
			closeFD(int(fd))
			return -1, errno
		}
	}
	return int(fd), 0
}

// countSockets returns the number of sockets of a protocol in the jail's network namespace. It is
// false if that is unknown. The kernel counts a socket until its last descriptor is closed,
// wherever that is, and a connection from its first packet on. A line of the file is: name, size,
// sockets.
func (s *supervisor) countSockets(protocol string) (int, bool) {
	var text [16 << 10]byte
	size := 0
	for {
		got, _, errno := unix.RawSyscall6(
			unix.SYS_PREAD64, uintptr(s.protocols), uintptr(unsafe.Pointer(&text[size])), uintptr(len(text)-1-size),
			uintptr(size), 0, 0,
		)
		if errno != 0 || got == 0 {
			break
		}
		size += int(got)
	}
	for i := 1; i+len(protocol) < size; i++ {
		if text[i-1] != '\n' || string(text[i:i+len(protocol)]) != protocol || text[i+len(protocol)] != ' ' {
			continue
		}
		_, rest := number(text[i+len(protocol) : size])
		sockets, _ := number(rest)
		return sockets, true
	}
	return 0, false
}

// number parses the number at the start of b, after spaces. It returns what follows.
func number(b []byte) (n int, rest []byte) {
	for len(b) > 0 && b[0] == ' ' {
		b = b[1:]
	}
	for len(b) > 0 && b[0] >= '0' && b[0] <= '9' {
		n = 10*n + int(b[0]-'0')
		b = b[1:]
	}
	return n, b
}
