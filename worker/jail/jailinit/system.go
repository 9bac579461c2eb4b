//nolint:gosec // the kernel is given pointers
package main

import (
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/bullpen-run/bullpen/worker/jail/wire"
)

// Raw system calls. The functions of packages unix and syscall copy strings and inform the runtime
// of calls that may block. Paths here end with a zero byte.

func call(number, a, b, c uintptr) unix.Errno {
	_, _, errno := unix.RawSyscall(number, a, b, c)
	return errno
}

func exit(status int) {
	for {
		_ = call(unix.SYS_EXIT_GROUP, uintptr(status), 0, 0)
	}
}

func read(fd int, b []byte) (int, unix.Errno) {
	n, _, errno := unix.RawSyscall(unix.SYS_READ, uintptr(fd), uintptr(unsafe.Pointer(unsafe.SliceData(b))),
		uintptr(len(b)))
	return int(n), errno
}

// readAt reads from a file, whose offset other processes share.
func readAt(fd int, b []byte, offset int) (int, unix.Errno) {
	n, _, errno := unix.RawSyscall6(
		unix.SYS_PREAD64, uintptr(fd), uintptr(unsafe.Pointer(unsafe.SliceData(b))), uintptr(len(b)), uintptr(offset), 0, 0,
	)
	return int(n), errno
}

func write(fd int, b []byte) (int, unix.Errno) {
	n, _, errno := unix.RawSyscall(unix.SYS_WRITE, uintptr(fd), uintptr(unsafe.Pointer(unsafe.SliceData(b))),
		uintptr(len(b)))
	return int(n), errno
}

func closeFD(fd int) { _ = call(unix.SYS_CLOSE, uintptr(fd), 0, 0) }

// sendAll writes all of b to a socket whose other end may be closed.
func sendAll(fd int, b []byte) unix.Errno {
	for len(b) > 0 {
		n, _, errno := unix.RawSyscall6(
			unix.SYS_SENDTO, uintptr(fd), uintptr(unsafe.Pointer(unsafe.SliceData(b))), uintptr(len(b)), unix.MSG_NOSIGNAL, 0, 0,
		)
		if errno == unix.EINTR {
			continue
		}
		if errno != 0 {
			return errno
		}
		b = b[n:]
	}
	return 0
}

// setReceiveTimeout makes reads of a socket that block for longer than seconds fail.
func setReceiveTimeout(fd int, seconds int64) unix.Errno {
	timeout := unix.Timeval{Sec: seconds}
	_, _, errno := unix.RawSyscall6(
		unix.SYS_SETSOCKOPT, uintptr(fd), unix.SOL_SOCKET, unix.SO_RCVTIMEO, uintptr(unsafe.Pointer(&timeout)),
		unsafe.Sizeof(timeout), 0,
	)
	return errno
}

// rights is a control message with descriptors (SCM_RIGHTS).
type rights struct {
	unix.Cmsghdr
	fds [maxDescriptors]int32 // whole words
}

// receive reads from a socket, with at most most descriptors. It returns the number of bytes. If
// anything else comes with them, the number of descriptors is -1.
func receive(from int, b []byte, most int, fds *[maxDescriptors]int32) (n, count int, errno unix.Errno) {
	var oob rights
	v := unix.Iovec{Base: &b[0]}
	v.SetLen(len(b))
	m := unix.Msghdr{Iov: &v, Control: (*byte)(unsafe.Pointer(&oob))}
	m.SetIovlen(1)
	m.SetControllen(unix.CmsgSpace(most * 4))
	r, _, errno := unix.RawSyscall(unix.SYS_RECVMSG, uintptr(from), uintptr(unsafe.Pointer(&m)), unix.MSG_CMSG_CLOEXEC)
	if errno != 0 || m.Controllen == 0 {
		return int(r), 0, errno
	}
	count = (int(oob.Len) - unix.CmsgLen(0)) / 4
	if oob.Level != unix.SOL_SOCKET || oob.Type != unix.SCM_RIGHTS || m.Flags&unix.MSG_CTRUNC != 0 || count > most {
		return int(r), -1, 0
	}
	copy(fds[:], oob.fds[:])
	return int(r), count, 0
}

// sendDescriptor sends one byte and a descriptor over a socket.
func sendDescriptor(to, fd int) unix.Errno {
	b := [1]byte{'.'}
	oob := rights{
		Cmsghdr: unix.Cmsghdr{Level: unix.SOL_SOCKET, Type: unix.SCM_RIGHTS},
		fds:     [maxDescriptors]int32{int32(fd)},
	}
	oob.SetLen(unix.CmsgLen(4))
	v := unix.Iovec{Base: &b[0]}
	v.SetLen(len(b))
	m := unix.Msghdr{Iov: &v, Control: (*byte)(unsafe.Pointer(&oob))}
	m.SetIovlen(1)
	m.SetControllen(unix.CmsgSpace(4))
	return call(unix.SYS_SENDMSG, uintptr(to), uintptr(unsafe.Pointer(&m)), unix.MSG_NOSIGNAL)
}

func open(path *byte, flags int, mode uint32) (int, unix.Errno) {
	at := unix.AT_FDCWD
	fd, _, errno := unix.RawSyscall6(
		unix.SYS_OPENAT, uintptr(at), uintptr(unsafe.Pointer(path)), uintptr(flags|unix.O_CLOEXEC|unix.O_LARGEFILE),
		uintptr(mode), 0, 0,
	)
	return int(fd), errno
}

// openProc opens the file /proc/<pid><name>.
func openProc(pid int, name string, flags int) (int, unix.Errno) {
	var path [64]byte
	n := copy(path[:], "/proc/")
	n += putNumber(path[n:], pid)
	copy(path[n:len(path)-1], name)
	return open(&path[0], flags, 0)
}

func ioctl(fd int, request uintptr, argument unsafe.Pointer) unix.Errno {
	return call(unix.SYS_IOCTL, uintptr(fd), request, uintptr(argument))
}

func mkdir(path *byte, mode uint32) unix.Errno {
	at := unix.AT_FDCWD
	_, _, errno := unix.RawSyscall(unix.SYS_MKDIRAT, uintptr(at), uintptr(unsafe.Pointer(path)), uintptr(mode))
	return errno
}

func stat(path *byte, st *unix.Stat_t) unix.Errno {
	at := unix.AT_FDCWD
	_, _, errno := unix.RawSyscall6(unix.SYS_NEWFSTATAT, uintptr(at), uintptr(unsafe.Pointer(path)),
		uintptr(unsafe.Pointer(st)), 0, 0, 0)
	return errno
}

func chdir(path *byte) unix.Errno {
	_, _, errno := unix.RawSyscall(unix.SYS_CHDIR, uintptr(unsafe.Pointer(path)), 0, 0)
	return errno
}

func execve(path *byte, argv, env *uintptr) unix.Errno {
	_, _, errno := unix.RawSyscall(unix.SYS_EXECVE, uintptr(unsafe.Pointer(path)), uintptr(unsafe.Pointer(argv)),
		uintptr(unsafe.Pointer(env)))
	return errno
}

func pipe(ends *[2]int32) unix.Errno {
	_, _, errno := unix.RawSyscall(unix.SYS_PIPE2, uintptr(unsafe.Pointer(ends)), unix.O_CLOEXEC, 0)
	return errno
}

func socketpair(ends *[2]int32) unix.Errno {
	_, _, errno := unix.RawSyscall6(
		unix.SYS_SOCKETPAIR, unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0, uintptr(unsafe.Pointer(ends)), 0, 0,
	)
	return errno
}

// fork forks this process, with the given new namespaces, if any. It returns 0 in the new process.
func fork(namespaces uintptr) (int, unix.Errno) {
	pid, _, errno := unix.RawSyscall6(unix.SYS_CLONE, namespaces|uintptr(unix.SIGCHLD), 0, 0, 0, 0, 0)
	return int(pid), errno
}

func mount(m *wire.OrderMount) unix.Errno {
	_, _, errno := unix.RawSyscall6(
		unix.SYS_MOUNT, uintptr(unsafe.Pointer(&m.Source[0])), uintptr(unsafe.Pointer(&m.Target[0])),
		uintptr(unsafe.Pointer(&m.Type[0])),
		uintptr(m.Flags), uintptr(unsafe.Pointer(&m.Options[0])), 0,
	)
	return errno
}

// remountReadOnly makes a mount of nsjail's read-only.
func remountReadOnly(path string) unix.Errno {
	const flags = unix.MS_REMOUNT | unix.MS_BIND | unix.MS_RDONLY | unix.MS_NOSUID | unix.MS_NODEV | unix.MS_NOEXEC
	_, _, errno := unix.RawSyscall6(unix.SYS_MOUNT, 0, uintptr(unsafe.Pointer(unsafe.StringData(path))), 0, flags, 0, 0)
	return errno
}

// writeFileAt writes a file that exists.
func writeFileAt(path string, content []byte) unix.Errno {
	fd, errno := open(unsafe.StringData(path), unix.O_WRONLY, 0)
	if errno == 0 {
		_, errno = write(fd, content)
		closeFD(fd)
	}
	return errno
}

func kill(pid int, signal uint32) unix.Errno {
	return call(unix.SYS_KILL, uintptr(pid), uintptr(signal), 0)
}

// wait reaps the child pid, or any child if pid is -1.
func wait(pid int, st *unix.WaitStatus, options int, ru *unix.Rusage) (int, unix.Errno) {
	for {
		got, _, errno := unix.RawSyscall6(
			unix.SYS_WAIT4, uintptr(pid), uintptr(unsafe.Pointer(st)), uintptr(options), uintptr(unsafe.Pointer(ru)), 0, 0,
		)
		if errno != unix.EINTR {
			return int(got), errno
		}
	}
}

// died returns the pid of a dead child that is not reaped, or 0.
func died() (pid int, errno unix.Errno) {
	return changed(unix.P_ALL, 0, unix.WEXITED|unix.WNOWAIT)
}

// stopped reports whether a child has been stopped by a signal since the last call.
func stopped(child int) bool {
	pid, errno := changed(unix.P_PID, child, unix.WSTOPPED)
	return errno == 0 && pid == child
}

// changed returns the pid of a child whose state has changed, or 0.
func changed(kind, id, options int) (pid int, errno unix.Errno) {
	var d struct { // siginfo_t
		_   [4]int32
		pid int32
		_   [128 - 5*4]byte
	}
	_, _, errno = unix.RawSyscall6(
		unix.SYS_WAITID, uintptr(kind), uintptr(id), uintptr(unsafe.Pointer(&d)), uintptr(options|unix.WNOHANG), 0, 0,
	)
	return int(d.pid), errno
}

// poll polls the descriptors. If block is set, it waits until one of them is ready.
func poll(of []unix.PollFd, block bool) {
	var now unix.Timespec
	timeout := &now
	if block {
		timeout = nil
	}
	for {
		_, _, errno := unix.RawSyscall6(
			unix.SYS_PPOLL, uintptr(unsafe.Pointer(unsafe.SliceData(of))), uintptr(len(of)),
			uintptr(unsafe.Pointer(timeout)), 0, 0, 0,
		)
		switch errno {
		case 0:
			return
		case unix.EINTR:
		default:
			exit(exitOrphan) // the worker can no longer be read
		}
	}
}

// deaths blocks SIGCHLD and returns a descriptor that is readable when a child has died.
func deaths() (int, unix.Errno) {
	set := uint64(1) << (unix.SIGCHLD - 1)
	setDisposition(uintptr(unix.SIGCHLD)) // if it were ignored, children would vanish
	if errno := setMask(set); errno != 0 {
		return 0, errno
	}
	here := -1
	fd, _, errno := unix.RawSyscall6(
		unix.SYS_SIGNALFD4, uintptr(here), uintptr(unsafe.Pointer(&set)), unsafe.Sizeof(set),
		unix.SFD_CLOEXEC|unix.SFD_NONBLOCK, 0, 0,
	)
	return int(fd), errno
}

// setMask sets the blocked signals.
func setMask(set uint64) unix.Errno {
	_, _, errno := unix.RawSyscall6(unix.SYS_RT_SIGPROCMASK, unix.SIG_SETMASK, uintptr(unsafe.Pointer(&set)), 0,
		unsafe.Sizeof(set), 0, 0)
	return errno
}

// setDisposition resets a signal to its default.
func setDisposition(signal uintptr) {
	var act [4]uint64 // handler SIG_DFL, no flags, no restorer, empty mask
	_, _, _ = unix.RawSyscall6(unix.SYS_RT_SIGACTION, signal, uintptr(unsafe.Pointer(&act)), 0, 8, 0, 0)
}

func prctl(option int, a uintptr) unix.Errno { return prctl2(option, a, 0) }

func prctl2(option int, a, b uintptr) unix.Errno {
	_, _, errno := unix.RawSyscall6(unix.SYS_PRCTL, uintptr(option), a, b, 0, 0, 0)
	return errno
}

// setName sets the name of this process in process listings.
func setName(name *byte) unix.Errno {
	_, _, errno := unix.RawSyscall6(unix.SYS_PRCTL, unix.PR_SET_NAME, uintptr(unsafe.Pointer(name)), 0, 0, 0, 0)
	return errno
}

func prlimit(resource int, set, was *unix.Rlimit) unix.Errno {
	_, _, errno := unix.RawSyscall6(unix.SYS_PRLIMIT64, 0, uintptr(resource), uintptr(unsafe.Pointer(set)),
		uintptr(unsafe.Pointer(was)), 0, 0)
	return errno
}

func capget(header *unix.CapUserHeader, data *[2]unix.CapUserData) unix.Errno {
	_, _, errno := unix.RawSyscall(unix.SYS_CAPGET, uintptr(unsafe.Pointer(header)), uintptr(unsafe.Pointer(data)), 0)
	return errno
}

func capset(header *unix.CapUserHeader, data *[2]unix.CapUserData) unix.Errno {
	_, _, errno := unix.RawSyscall(unix.SYS_CAPSET, uintptr(unsafe.Pointer(header)), uintptr(unsafe.Pointer(data)), 0)
	return errno
}

// allocate returns n bytes of page-aligned memory.
func allocate(n int) ([]byte, unix.Errno) {
	nowhere := -1
	at, _, errno := unix.RawSyscall6(
		unix.SYS_MMAP, 0, uintptr(n), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS,
		uintptr(nowhere), 0,
	)
	if errno != 0 {
		return nil, errno
	}
	return unsafe.Slice(*(**byte)(unsafe.Pointer(&at)), n), 0 // not Go's memory
}

func free(b []byte) {
	_, _, _ = unix.RawSyscall(unix.SYS_MUNMAP, uintptr(unsafe.Pointer(unsafe.SliceData(b))), uintptr(len(b)), 0)
}

// words returns b as memory for pointers. address returns a pointer to b, which must not move.
func words(b []byte) []uintptr {
	return unsafe.Slice((*uintptr)(unsafe.Pointer(unsafe.SliceData(b))), len(b)/int(unsafe.Sizeof(uintptr(0))))
}

func address(b []byte) uintptr { return uintptr(unsafe.Pointer(unsafe.SliceData(b))) }
