// Command jailinit is PID 1 inside a jail. It waits for one program on its control socket (package
// wire), and starts an interpreter in advance if the worker asks for one. It runs the program as
// another uid without any capability, reaps the processes that the program leaves behind, and
// reports how the program ended. It is not a supervisor: it exits after one program and one report.
//
// Its first argument is the kind of its jail. If that is empty or missing, the jail is for one
// program. An init that nsjail starts has two more: the maximum numbers of inotify instances and of
// watches in its user namespace and those below.
//
// A program is under the filter (package filter), the init is not: it answers the calls that
// the filter passes on.
//
// With "zygote", other jails are created in the jail. The init of each new jail is a fork of this
// process that continues as without an argument. A zygote may have an interpreter, which runs only
// bullpen's code and sees no data of a tenant. The interpreter creates the jails in which a fork of
// it waits, and keeps the capabilities to map uids for that. With "fork", the init is the first
// process of such a jail.
//
// nsjail, or a process in the zygote's jail, starts the init with few capabilities: those needed to
// become the program's uid, to kill, and to empty the bounding set. It runs under the memory limit
// of the program. It may be the only process alive when the program has used up every pid. Each
// jail starts a new init, so it does without Go's runtime: one thread, no heap, and raw system
// calls, see entry_amd64.s.
package main

import (
	"golang.org/x/sys/unix"

	"github.com/bullpen-run/bullpen/worker/jail/wire"
)

// Exit statuses of the init. They are visible only in nsjail's log.
const (
	exitOK        = 0
	exitOrphan    = 2 // the worker's end of the control socket is closed
	exitConfine   = 3 // the init could not prepare itself
	exitFrame     = 4 // the worker violated the protocol
	exitPrewarmed = 5 // the interpreter that was started in advance died
)

// Numbers of descriptors that come with an order: stdout and stderr, and for a zygote's interpreter
// the socket of its own orders. An order for a jail has more.
const (
	outputs        = 2
	outputsOrders  = 3
	ofGuest        = 2 // the socket on which a guest listens, and the heartbeat of its worker
	outputsGuest   = 5 // also a guest's, and its executable
	maxDescriptors = 16
)

// softFiles is the program's soft limit of open files, the usual one of interactive systems.
// select(2) breaks above it, and programs that close every possible descriptor become slow. The
// hard limit is the one in nsjail's configuration.
const softFiles = 1024

// maxQueuedSignals is the maximum number of queued signals and timers of a program. The kernel also
// counts them for the creator of the jail's user namespace, who is the same for all jails.
const maxQueuedSignals = 1024

// main is where the runtime would begin. The init does not use it, see entry_amd64.s.
func main() {
	panic("the init has no use for Go's runtime: build it with `make init`, for amd64 or arm64")
}

// run is the whole init.
func run(kind string) {
	what, errno := confine(kind)
	if errno != 0 {
		logError(what, errno)
		exit(exitConfine)
	}
	died, errno := deaths()
	if errno != 0 || died < wire.ControlFD { // a standard stream is closed, and died has its number
		logError("make a descriptor", errno)
		exit(exitConfine)
	}
	s := supervisor{listener: -1}
	if s.protocols, errno = openProtocols(); errno != 0 { // before the worker hides it
		logError("open /proc/net/protocols", errno)
		exit(exitConfine)
	}
	ready := [...]byte{wire.Version}
	h := wire.Header(wire.Ready, len(ready))
	var frame [len(h) + len(ready)]byte
	copy(frame[copy(frame[:], h[:]):], ready[:])
	if send(frame[:]) != 0 {
		exit(exitOrphan)
	}
	if kind == wire.Zygote {
		serve(died)
	}
	var o order
	a := first(kind, &o, &s)
	p := program{pid: begin(&o, a), died: died, supervisor: &s, guest: kind == wire.Guest}
	free(o.memory)
	sendEmpty(wire.Started)
	p.end()
	exit(exitOK)
}

// logError writes a failure to stderr. stderr is nsjail's log, or in a zygote's jail also the
// stderr of the interpreter.
func logError(what string, errno unix.Errno) {
	var line [128]byte
	n := copy(line[:], "jailinit: ")
	n += copy(line[n:], what)
	n += copy(line[n:], ": errno ")
	n += putNumber(line[n:], int(errno))
	n += copy(line[n:], "\n")
	_, _ = write(2, line[:n])
}

// putNumber writes a non-negative number and returns its length.
func putNumber(b []byte, number int) int {
	var digits [20]byte
	i := len(digits)
	for ok := true; ok; ok = number > 0 {
		i--
		digits[i] = byte('0' + number%10)
		number /= 10
	}
	return copy(b, digits[i:])
}

// first receives the order to start the program. It returns the interpreter that waits for the
// program, if any.
func first(kind string, o *order, s *supervisor) interpreter {
	prewarmed := interpreter{supervisor: s, guest: kind == wire.Guest}
	if kind == wire.Fork {
		prewarmed.pid, prewarmed.link = wire.ForkPID, wire.ForkFD
		prewarmed.awaitFirst()
	} else {
		o.receive(prewarmed.guest)
		if o.typ != wire.Prewarm {
			return prewarmed
		}
		prewarmed.start(o)
	}
	prewarmed.await(o)
	return prewarmed
}

// begin starts the program, in a new process or in the waiting interpreter.
func begin(o *order, prewarmed interpreter) (pid int) {
	switch {
	case o.typ == wire.Load && prewarmed.pid != 0:
		writeFiles(o)
		return prewarmed.load(o)
	case o.typ == wire.Start:
		if prewarmed.pid != 0 {
			prewarmed.kill()
		}
		writeFiles(o) // when no other interpreter can open them
		return launch(o, prewarmed.supervisor)
	default:
		exit(exitFrame)
		return 0
	}
}

// prepare completes the jail that nsjail has made, which shares the network namespace of the worker
// so far. The kernel counts inotify for the owner of the user namespace too, who is the same for all
// jails. /proc is writable for that, and becomes read-only unless this process will map the ids of
// other jails there.
func prepare(readOnly bool, instances, watches []byte) {
	if errno := makeNetwork(); errno != 0 {
		logError(stepNetwork, errno)
		exit(exitConfine)
	}
	errno := limitInotify(instances, watches)
	if errno == 0 && readOnly {
		errno = remountReadOnly("/proc\x00")
	}
	if errno != 0 {
		logError("limit inotify", errno)
		exit(exitConfine)
	}
}

// limitInotify limits each user of this user namespace, and all users of each namespace in it together.
func limitInotify(instances, watches []byte) unix.Errno {
	if errno := writeFileAt("/proc/sys/user/max_inotify_instances\x00", instances); errno != 0 {
		return errno
	}
	return writeFileAt("/proc/sys/user/max_inotify_watches\x00", watches)
}

// limit limits what all users of a jail can have together, and executes nsjail to create the jail in this
// user namespace. The kernel counts inotify, queues and signals for the creator of a namespace as well. For
// all jails that is the host's root, so that without this namespace a jail with many users could take
// what all jails have.
func limit(instances, watches, queues []byte, path *byte, argv *uintptr) {
	errno := limitInotify(instances, watches)
	if errno == 0 {
		bytes, _ := number(queues)
		errno = lower(unix.RLIMIT_MSGQUEUE, uint64(bytes))
	}
	if errno == 0 {
		errno = lower(unix.RLIMIT_SIGPENDING, maxQueuedSignals)
	}
	if errno == 0 {
		errno = executeNsjail(path, argv)
	}
	logError("limit the users of the jail", errno)
	exit(exitConfine)
}

// executeNsjail executes nsjail with the signal blocked by which it wakes up every second. nsjail only
// waits for its child, which has no signal blocked.
func executeNsjail(path *byte, argv *uintptr) unix.Errno {
	if errno := setMask(1 << (unix.SIGALRM - 1)); errno != 0 {
		return errno
	}
	var env uintptr
	return execve(path, argv, &env)
}

// confine makes this process unreadable for the program, and unable to pass on a capability. In a
// zygote's jail it passes on the capabilities to map uids. On an error, confine returns what
// failed.
func confine(kind string) (what string, errno unix.Errno) {
	// Not dumpable: /proc/1 and pidfd_getfd are closed even to the init's own uid.
	if errno := prctl(unix.PR_SET_DUMPABLE, 0); errno != 0 {
		return "set PR_SET_DUMPABLE", errno
	}
	name := [...]byte{'i', 'n', 'i', 't', 0}
	if errno := setName(&name[0]); errno != 0 {
		return "set the name of the init", errno
	}
	_ = call(unix.SYS_UMASK, 0o022, 0, 0)
	for _, fd := range [...]uintptr{wire.ControlFD, wire.LockFD, wire.ForkFD} {
		_ = call(unix.SYS_FCNTL, fd, unix.F_SETFD, unix.FD_CLOEXEC)
	}
	var files unix.Rlimit
	if errno := prlimit(unix.RLIMIT_NOFILE, nil, &files); errno != 0 {
		return "limit open files", errno
	}
	files.Cur = min(softFiles, files.Max)
	if errno := prlimit(unix.RLIMIT_NOFILE, &files, nil); errno != 0 {
		return "limit open files", errno
	}
	// One byte, not zero: a host that pipes core dumps to a program does so at a limit of 0, but not
	// at 1 (core(5)). Either limit prevents dumps to a file. The worker ensures that the hard limit is
	// not 0 where this matters.
	if errno := lower(unix.RLIMIT_CORE, 1); errno != 0 {
		return "limit core dumps", errno
	}
	if errno := programFilter.load(); errno != 0 {
		return "read the filter of system calls", errno
	}
	if errno := dropCapabilities(kind); errno != 0 {
		return "drop capabilities", errno
	}
	if kind == wire.Zygote {
		// Signals are not limited here: all forked jails together share this limit. If the kernel
		// refuses their namespaces, this jail cannot be a zygote.
		return stepNamespaces, tryNamespaces()
	}
	if errno := lower(unix.RLIMIT_SIGPENDING, maxQueuedSignals); errno != 0 {
		return "limit signals", errno
	}
	return "filter system calls (the kernel needs CONFIG_SECCOMP_FILTER)", tryFilters()
}

// lower reduces a limit, soft and hard, to at most most.
func lower(resource int, most uint64) unix.Errno {
	var limit unix.Rlimit
	if errno := prlimit(resource, nil, &limit); errno != 0 {
		return errno
	}
	limit.Max = min(most, limit.Max)
	limit.Cur = limit.Max
	return prlimit(resource, &limit, nil)
}

// guestCapabilities are the capabilities of a guest: it starts processes as other users, ends them,
// and handles their files. With a writable root, root's processes have them too.
const guestCapabilities = 1<<unix.CAP_KILL | 1<<unix.CAP_SETGID | 1<<unix.CAP_SETUID | 1<<unix.CAP_CHOWN |
	1<<unix.CAP_DAC_OVERRIDE | 1<<unix.CAP_FOWNER | 1<<unix.CAP_FSETID

// grantGuest makes this process, which will execute a guest, pass the guest's capabilities on, but
// only once: with SECBIT_NOROOT even root gets none by an execve, except those in the ambient set,
// which the guest clears.
func grantGuest() unix.Errno {
	const noRoot = 1<<0 | 1<<1 // SECBIT_NOROOT and its lock, from linux/securebits.h
	if errno := prctl(unix.PR_SET_SECUREBITS, noRoot); errno != 0 {
		return errno
	}
	header := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
	const all = guestCapabilities | 1<<unix.CAP_SETPCAP
	data := [2]unix.CapUserData{{Effective: all, Permitted: all, Inheritable: guestCapabilities}}
	if errno := capset(&header, &data); errno != 0 {
		return errno
	}
	for c := range uintptr(32) {
		if guestCapabilities&(1<<c) == 0 {
			continue
		}
		errno := prctl2(unix.PR_CAP_AMBIENT, unix.PR_CAP_AMBIENT_RAISE, c)
		if errno == 0 {
			errno = prctl(unix.PR_CAPBSET_DROP, c) // it was needed for the inheritable set
		}
		if errno != 0 {
			return errno
		}
	}
	data[0].Effective, data[0].Permitted = guestCapabilities, guestCapabilities
	return capset(&header, &data)
}

// dropCapabilities keeps the capabilities that nsjail gives an init, permitted and effective. These
// end with setresuid in the child. It empties the inheritable, ambient and bounding sets; a zygote
// keeps what it needs in the bounding set.
func dropCapabilities(kind string) unix.Errno {
	// nsjail sets no-setuid-fixup, with which the child would keep the capabilities.
	if errno := prctl(unix.PR_SET_SECUREBITS, 0); errno != 0 {
		return errno
	}
	if errno := prctl(unix.PR_CAP_AMBIENT, unix.PR_CAP_AMBIENT_CLEAR_ALL); errno != 0 {
		return errno
	}
	for c := range uintptr(64) {
		if kind == wire.Zygote && (c == unix.CAP_SETUID || c == unix.CAP_SETGID) ||
			kind == wire.Guest && guestCapabilities&(1<<c) != 0 {
			continue
		}
		if errno := prctl(unix.PR_CAPBSET_DROP, c); errno == unix.EINVAL {
			break // past the last capability of this kernel
		} else if errno != 0 {
			return errno
		}
	}
	header := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
	var data [2]unix.CapUserData
	if errno := capget(&header, &data); errno != 0 {
		return errno
	}
	own := uint32(1<<unix.CAP_KILL | 1<<unix.CAP_SETGID | 1<<unix.CAP_SETUID | 1<<unix.CAP_SETPCAP)
	if kind == wire.Guest {
		own |= guestCapabilities
	}
	kept := data[0].Permitted & own
	data[0], data[1] = unix.CapUserData{Effective: kept, Permitted: kept}, unix.CapUserData{}
	return capset(&header, &data)
}
