package main

import (
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/bullpen-run/bullpen/worker/jail/wire"
)

// namespaces are the new namespaces of a jail inside another one. The jail creates two itself: its
// network namespace (see makeNetwork) and, after it has joined its control groups, its cgroup
// namespace.
const namespaces = unix.CLONE_NEWNS | unix.CLONE_NEWUTS | unix.CLONE_NEWIPC | unix.CLONE_NEWUSER | unix.CLONE_NEWPID

const stepNamespaces = "make the namespaces of a jail"

// serve is the main loop of a zygote's init. It creates jails, and starts the interpreter, which
// creates the jails in which a fork of it waits. When the interpreter exits, the init exits, and
// all forked jails die.
func serve(died int) {
	started := 0 // the interpreter
	none := supervisor{listener: -1}
	for {
		for {
			pid, errno := wait(-1, nil, unix.WNOHANG, nil)
			if errno != 0 || pid == 0 {
				break
			}
			if pid == started {
				exit(exitPrewarmed)
			}
		}
		if !listen(died, &none, true) {
			continue
		}
		var o order
		o.readFrame(maxDescriptors)
		switch {
		case o.typ == wire.Start && started == 0:
			o.parse(outputsOrders)
			writeFiles(&o)
			started = launch(&o, nil)
		case o.typ == wire.Jail:
			makeJail(&o)
		default:
			exit(exitFrame)
		}
		free(o.memory)
	}
}

// tryNamespaces checks that the namespaces of a jail can be created inside this one.
func tryNamespaces() unix.Errno {
	pid, errno := fork(namespaces | unix.CLONE_NEWNET)
	if errno != 0 {
		return errno
	}
	if pid == 0 {
		exit(exitOK)
	}
	_, errno = wait(pid, nil, 0, nil)
	return errno
}

// makeJail creates a jail inside this one and closes the order's descriptors. A failure does not
// end this process: it is logged, and the worker reads the log.
func makeJail(o *order) {
	j, ok := wire.ParseJail(o.payload)
	if !ok || o.n <= wire.JailCgroups {
		exit(exitFrame)
	}
	if errno := makeNamespaces(o, &j); errno != 0 {
		logError(stepNamespaces, errno)
	}
	for _, fd := range o.fds[:o.n] {
		closeFD(int(fd))
	}
}

func makeNamespaces(o *order, j *wire.JailOrder) unix.Errno {
	var ends [2]int32
	if errno := pipe(&ends); errno != 0 {
		return errno
	}
	pid, errno := fork(namespaces)
	if pid == 0 && errno == 0 {
		closeFD(int(ends[1]))
		if what, errno := enter(o, j, int(ends[0])); errno != 0 {
			logError(what, errno)
			exit(exitConfine)
		}
		run("")
	}
	closeFD(int(ends[0]))
	if errno == 0 {
		errno = mapIDs(pid, j)
	}
	if errno == 0 {
		_, errno = write(int(ends[1]), []byte{'.'})
	}
	closeFD(int(ends[1]))
	return errno
}

// mapIDs maps root and the program of a new jail to their ids in this one.
func mapIDs(pid int, j *wire.JailOrder) unix.Errno {
	var lines [96]byte
	n := 0
	for _, line := range [...][2]uint32{{0, j.Root}, {j.Program, j.Root + 1}} {
		for _, id := range line {
			n += putNumber(lines[n:], int(id))
			n += copy(lines[n:], " ")
		}
		n += copy(lines[n:], "1\n")
	}
	for _, file := range [...]string{"/gid_map", "/uid_map"} {
		fd, errno := openProc(pid, file, unix.O_WRONLY)
		if errno == 0 {
			_, errno = write(fd, lines[:n])
			closeFD(fd)
		}
		if errno != 0 {
			return errno
		}
	}
	return 0
}

// enter turns this process, a fork of the zygote's init, into the first process of a jail, with its
// descriptors: the state in which nsjail starts an init. mapped is a pipe on which enter is
// notified when the ids are mapped. On an error, enter returns what failed.
func enter(o *order, j *wire.JailOrder, mapped int) (what string, errno unix.Errno) {
	var b [1]byte
	if n, errno := read(mapped, b[:]); errno != 0 || n != 1 {
		exit(exitOrphan)
	}
	for _, c := range [...][4]uintptr{{unix.SYS_SETGROUPS}, {unix.SYS_SETRESGID}, {unix.SYS_SETRESUID}} {
		if errno := call(c[0], c[1], c[2], c[3]); errno != 0 {
			return "become root of the jail", errno
		}
	}
	if errno := makeNetwork(); errno != 0 {
		return stepNetwork, errno
	}
	for _, group := range o.fds[wire.JailCgroups:o.n] {
		if _, errno := write(int(group), []byte{'0'}); errno != 0 {
			return "join a control group", errno
		}
	}
	if errno := call(unix.SYS_UNSHARE, unix.CLONE_NEWCGROUP, 0, 0); errno != 0 {
		return "make a namespace of control groups", errno
	}
	mounts := j.Mounts
	for m, ok := mounts.Next(); ok; m, ok = mounts.Next() {
		if errno := mount(&m); errno != 0 {
			return "mount", errno
		}
	}
	processes := unix.Rlimit{Cur: uint64(j.Processes), Max: uint64(j.Processes)}
	if errno := prlimit(unix.RLIMIT_NPROC, &processes, nil); errno != 0 {
		return "limit processes", errno
	}
	for i, fd := range [...]uintptr{wire.JailControl: wire.ControlFD, wire.JailLock: wire.LockFD} {
		if errno := call(unix.SYS_DUP3, uintptr(o.fds[i]), fd, 0); errno != 0 {
			return "duplicate a descriptor", errno
		}
	}
	return "close the descriptors of the zygote",
		call(unix.SYS_CLOSE_RANGE, max(wire.ControlFD, wire.LockFD)+1, uintptr(^uint32(0)), 0)
}

const stepNetwork = "make the network namespace"

// makeNetwork creates the jail's network namespace. The ids of the jail must be mapped: the kernel
// makes root of the jail the owner of the namespace's files in /proc only if it has an id by then,
// and otherwise the host's root. In a user namespace without the host's root, the worker could not
// hide those (see hideHostSockets in package nsjail).
func makeNetwork() unix.Errno {
	if errno := call(unix.SYS_UNSHARE, unix.CLONE_NEWNET, 0, 0); errno != 0 {
		return errno
	}
	return bringUpLoopback()
}

func bringUpLoopback() unix.Errno {
	fd, _, errno := unix.RawSyscall(unix.SYS_SOCKET, unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if errno != 0 {
		return errno
	}
	var request struct { // struct ifreq
		name  [unix.IFNAMSIZ]byte
		flags uint16
		_     [22]byte
	}
	copy(request.name[:], "lo")
	request.flags = unix.IFF_UP
	errno = call(unix.SYS_IOCTL, fd, unix.SIOCSIFFLAGS,
		uintptr(unsafe.Pointer(&request))) //nolint:gosec // the kernel reads a struct
	closeFD(int(fd))
	return errno
}
