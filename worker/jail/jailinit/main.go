// Command jailinit is PID 1 inside a jail. It waits for one program on its
// control socket (package wire), with its interpreter started already if the worker
// says so, runs it as another uid without a single capability, reaps what the program leaves behind, and reports how it ended.
// It is not a supervisor: one program, one report, and it is gone.
//
// Its argument says which jail it is in. With none it is one for a program. With
// "zygote" it is one that others are made within, for which it is not under the
// filter, which forbids to make namespaces: it is the first of these itself, as a
// copy of itself that has become what it is with no argument. The interpreter that it
// runs there, if any, is ours, sees nothing of a tenant's, makes jails where a fork of
// it is to wait, and keeps the capabilities to map uids for that. With "fork" it is the
// first of such a jail.
//
// It is started, by nsjail or from within a parent's jail, with the few capabilities it needs to become the
// program's uid, to kill, and to empty the bounding set. It runs under the
// memory limit of the program it serves, and may be the only thing alive when
// that program has eaten every pid. It is there for each jail anew, so it does without
// Go's runtime: one thread, no heap, and system calls as they are, see entry_amd64.s.
package main

import (
	"golang.org/x/sys/unix"

	"github.com/bullpen-run/bullpen/worker/jail/filter"
	"github.com/bullpen-run/bullpen/worker/jail/wire"
)

// Exit statuses of the init; nobody but a reader of nsjail's log sees them.
const (
	exitOK      = 0
	exitOrphan  = 2 // the worker's end of the control socket is closed
	exitConfine = 3 // the init could not prepare itself
	exitFrame   = 4 // the worker sent something that is not the protocol
	exitAhead   = 5 // the interpreter that was started ahead died
)

// Descriptors that come with an order: stdout and stderr, and for the interpreter that
// others are forked from what it takes its own orders from. With one for a jail there
// are more.
const (
	outputs         = 2
	outputsOrders   = 3
	mostDescriptors = 16
)

// softFiles is the program's soft limit of open files. It is what interactive
// systems give: select(2) breaks above it, and programs that close every
// possible descriptor are slow above it. The hard limit is the
// one nsjail was told.
const softFiles = 1024

// mostSignals is how many signals and timers a program can have queued. The kernel counts
// them for whoever made the jail's user namespace as well, which is one for all jails.
const mostSignals = 1024

// main is where the runtime begins. The init does not, see entry_amd64.s.
func main() {
	panic("the init has no use for Go's runtime: build it with `make init`, for amd64 or arm64")
}

// run is all of the init.
func run(kind string) {
	what, errno := confine(kind)
	if errno != 0 {
		logError(what, errno)
		exit(exitConfine)
	}
	died, errno := deaths()
	if errno != 0 || died < wire.ControlFD { // one of the first three is not open: it would be taken for the program's
		logError("make a descriptor", errno)
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
	a := first(kind, &o)
	p := program{pid: begin(&o, a), died: died}
	free(o.memory)
	sendEmpty(wire.Started)
	p.end()
	exit(exitOK)
}

// logError says on stderr what could not be done. It is nsjail's log, and what the
// parent's interpreter says.
func logError(what string, errno unix.Errno) {
	var line [128]byte
	n := copy(line[:], "jailinit: ")
	n += copy(line[n:], what)
	n += copy(line[n:], ": errno ")
	n += putNumber(line[n:], int(errno))
	n += copy(line[n:], "\n")
	_, _ = write(2, line[:n])
}

// putNumber writes a number that is not negative, and returns how long it is.
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

// first receives the order to start the program, and returns the interpreter that waits
// for it, if one does.
func first(kind string, o *order) interpreter {
	var ahead interpreter
	if kind == wire.Fork {
		ahead = interpreter{pid: wire.ForkPID, link: wire.ForkFD}
		ahead.awaitFirst()
	} else {
		o.receive(outputs)
		if o.typ != wire.Ahead {
			return ahead
		}
		ahead = startAhead(o)
	}
	ahead.await(o)
	return ahead
}

// begin starts the program, as its own process or in the one that waits.
func begin(o *order, ahead interpreter) (pid int) {
	writeFiles(o)
	switch {
	case o.typ == wire.GoOn && ahead.pid != 0:
		return ahead.goOn(o)
	case o.typ == wire.Start:
		if ahead.pid != 0 {
			ahead.kill()
		}
		return launch(o)
	default:
		exit(exitFrame)
		return 0
	}
}

// confine makes this process unreadable for the program, unable to
// hand on a capability, and subject to the filter. In a parent's jail it hands
// on those that map uids, and there is no filter; what is made within is under it
// already. It returns what it could not do.
func confine(kind string) (what string, errno unix.Errno) {
	// Not dumpable: /proc/1 and pidfd_getfd are closed even to our own uid.
	if errno := prctl(unix.PR_SET_DUMPABLE, 0); errno != 0 {
		return "be unreadable", errno
	}
	name := [...]byte{'i', 'n', 'i', 't', 0}
	if errno := setName(&name[0]); errno != 0 {
		return "be called init", errno
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
	// One byte, not none: a host that pipes core dumps to a program does so at a
	// limit of 0, and does not at 1 (core(5)). Into a file, neither is enough. The
	// worker sees to it that 0 is not the most where it matters.
	if errno := lower(unix.RLIMIT_CORE, 1); errno != 0 {
		return "limit core dumps", errno
	}
	if errno := dropCapabilities(kind == wire.Zygote); errno != 0 {
		return "give up capabilities", errno
	}
	if kind == wire.Zygote { // all jails have together what it may; where the kernel refuses their namespaces, it is no parent
		return noNamespaces, tryNamespaces()
	}
	if errno := lower(unix.RLIMIT_SIGPENDING, mostSignals); errno != 0 {
		return "limit signals", errno
	}
	if kind != "" {
		return "", 0
	}
	return "filter system calls (the kernel needs CONFIG_SECCOMP_FILTER)", filter.Install()
}

// lower makes a limit, soft and hard, no more than most.
func lower(resource int, most uint64) unix.Errno {
	var limit unix.Rlimit
	if errno := prlimit(resource, nil, &limit); errno != 0 {
		return errno
	}
	limit.Max = min(most, limit.Max)
	limit.Cur = limit.Max
	return prlimit(resource, &limit, nil)
}

// dropCapabilities leaves this process those that nsjail gives an init, permitted and
// effective, which die with setresuid in the child; and empties the inheritable,
// ambient and bounding sets, the last but for what a parent needs.
func dropCapabilities(parent bool) unix.Errno {
	// nsjail sets no-setuid-fixup; with it the child would keep our capabilities.
	if errno := prctl(unix.PR_SET_SECUREBITS, 0); errno != 0 {
		return errno
	}
	if errno := prctl(unix.PR_CAP_AMBIENT, unix.PR_CAP_AMBIENT_CLEAR_ALL); errno != 0 {
		return errno
	}
	for c := range uintptr(64) {
		if parent && (c == unix.CAP_SETUID || c == unix.CAP_SETGID) {
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
	const own = 1<<unix.CAP_KILL | 1<<unix.CAP_SETGID | 1<<unix.CAP_SETUID | 1<<unix.CAP_SETPCAP
	kept := data[0].Permitted & own
	data[0], data[1] = unix.CapUserData{Effective: kept, Permitted: kept}, unix.CapUserData{}
	return capset(&header, &data)
}
