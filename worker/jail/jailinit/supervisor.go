//nolint:gosec // the kernel is given pointers
package main

import (
	"runtime"
	"unsafe"

	"golang.org/x/sys/unix"
)

// supervisor answers the calls that the filter passes on (seccomp_unotify(2)): those that create
// netlink sockets or begin to listen, and those that no program may make. It ends the program for
// the first of the latter. A filter that kills would not: a program could have one child after
// another killed, and each death is a line in the host's audit log.
type supervisor struct {
	listener  int32 // the descriptor that filter.install returned; -1 if there is none
	protocols int32 // /proc/net/protocols, which the worker hides from the program
	attacked  bool  // a process of the program made a forbidden call
}

// receiveListener reads from the socket of a process that starts. A first message may carry the
// descriptor on which its calls are received; receiveListener then returns the next one.
func (s *supervisor) receiveListener(from int, b []byte) (int, unix.Errno) {
	for {
		var fds [maxDescriptors]int32
		got, count, errno := receive(from, b, 1, &fds)
		switch {
		case errno == unix.EINTR:
		case count == 1:
			s.listenTo(fds[0])
		default:
			return got, errno
		}
	}
}

// listenTo replaces the descriptor on which calls are received.
func (s *supervisor) listenTo(listener int32) {
	if s.listener >= 0 {
		closeFD(int(s.listener))
	}
	s.listener = listener
}

// Structs of linux/seccomp.h.
type (
	notification struct { // struct seccomp_notif
		id             uint64
		pid, flags     uint32
		number         int32
		arch           uint32
		instructionPtr uint64
		arguments      [6]uint64
	}
	reply struct { // struct seccomp_notif_resp
		id    uint64
		value int64
		errno int32
		flags uint32
	}
	addition struct { // struct seccomp_notif_addfd
		id                        uint64
		flags, source, fd, fdFlag uint32
	}
)

const notifAddFD = 0x40182103

// answer answers one call, after poll has returned events for the listener.
func (s *supervisor) answer(events int16) {
	if events&unix.POLLIN == 0 {
		s.listenTo(-1) // no process is left that could call
		return
	}
	var c notification
	if ioctl(int(s.listener), unix.SECCOMP_IOCTL_NOTIF_RECV, unsafe.Pointer(&c)) != 0 {
		return // the caller is dead, or was interrupted and calls again
	}
	switch {
	case c.arch == nativeArch() && c.number == unix.SYS_SOCKET:
		s.answerSocket(&c)
	case c.arch == nativeArch() && c.number == unix.SYS_LISTEN:
		s.answerListen(&c)
	default:
		s.attacked = true
		_ = kill(-1, uint32(unix.SIGKILL)) // the call never returns
	}
}

// answerSocket answers a call that creates a netlink socket.
func (s *supervisor) answerSocket(c *notification) {
	kind := uintptr(uint32(c.arguments[1]))
	fd, errno := s.createNetlink(kind)
	if errno == 0 {
		a := addition{
			id: c.id, flags: unix.SECCOMP_ADDFD_FLAG_SEND, source: uint32(fd),
			fdFlag: uint32(kind & unix.SOCK_CLOEXEC),
		}
		errno = ioctl(int(s.listener), notifAddFD, unsafe.Pointer(&a))
		closeFD(fd)
	}
	if errno != 0 {
		s.reply(&reply{id: c.id, errno: -int32(errno)})
	}
}

// maxSockets is how many TCP sockets a jail may have when a socket begins to listen. The kernel
// does not charge for connections that a listening socket has not accepted, so the number of
// listening sockets must be limited.
const maxSockets = 256

// answerListen answers a call of listen(2), which the program itself makes. Between the count and
// the kernel, at most one call per thread of the program may slip through.
func (s *supervisor) answerListen(c *notification) {
	sockets, _ := s.countSockets("TCP")
	sockets6, _ := s.countSockets("TCPv6") // none on a kernel without IPv6
	r := reply{id: c.id, flags: unix.SECCOMP_USER_NOTIF_FLAG_CONTINUE}
	if sockets+sockets6 >= maxSockets {
		r = reply{id: c.id, errno: -int32(unix.ENOBUFS)}
	}
	s.reply(&r)
}

// reply ends a call. An error means that the caller is dead.
func (s *supervisor) reply(r *reply) {
	_ = ioctl(int(s.listener), unix.SECCOMP_IOCTL_NOTIF_SEND, unsafe.Pointer(r))
}

// answerPending answers one call if there is one.
func (s *supervisor) answerPending() {
	from := [...]unix.PollFd{{Fd: s.listener, Events: unix.POLLIN}}
	poll(from[:], false)
	if from[0].Revents != 0 {
		s.answer(from[0].Revents)
	}
}

// nativeArch returns the architecture of calls through the usual entry, as notifications have it.
func nativeArch() uint32 {
	if runtime.GOARCH == "arm64" {
		return unix.AUDIT_ARCH_AARCH64
	}
	return unix.AUDIT_ARCH_X86_64
}
