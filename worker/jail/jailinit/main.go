// Command jailinit is PID 1 inside a jail. It waits for one program on its
// control socket (package wire), with its interpreter started already if the worker
// says so, runs it as another uid without a single capability, reaps what the program leaves behind, and reports how it ended.
// It is not a supervisor: one program, one report, and it is gone.
//
// Its argument says which jail it is in. With none it is one for a program. With
// "parent" it is one that others are forked from: what it runs there is ours, sees
// nothing of a tenant's, keeps the capabilities to map uids, and is not under the
// filter, which forbids to make namespaces. With "fork" it is one where a fork of a
// parent's interpreter waits already.
//
// It is started, by nsjail or from within a parent's jail, with the few capabilities it needs to become the
// program's uid, to kill, and to empty the bounding set. It runs under the
// memory limit of the program it serves, and may be the only thing alive when
// that program has eaten every pid, so after the start it allocates little and
// needs no new thread.
package main

import (
	"errors"
	"os"
	"runtime"
	"syscall"
	"unsafe"

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
// others are forked from what it takes its own orders from.
const (
	outputs       = 2
	outputsOrders = 3
)

// softFiles is the program's soft limit of open files. It is what interactive
// systems give: select(2) breaks above it, and programs that close every
// possible descriptor are slow above it. The hard limit is the
// one nsjail was told.
const softFiles = 1024

// mostSignals is how many signals and timers a program can have queued. The kernel counts
// them for whoever made the jail's user namespace as well, which is one for all jails.
const mostSignals = 1024

func main() {
	// Credentials are per thread on Linux; everything below, and the fork,
	// happens on this one.
	runtime.LockOSThread()
	kind := ""
	if len(os.Args) > 1 {
		kind = os.Args[1]
	}
	if err := confine(kind == wire.Parent); err != nil {
		_, _ = unix.Write(2, []byte("jailinit: "+err.Error()+"\n")) // which is nsjail's log, and what the parent's interpreter says
		unix.Exit(exitConfine)
	}
	if send(wire.Frame(wire.Ready, []byte{wire.Version})) != nil {
		unix.Exit(exitOrphan)
	}
	typ, order, out, ahead := first(kind)
	p := &program{pid: begin(typ, order, out, ahead)}
	if send(wire.Frame(wire.Started, nil)) != nil {
		unix.Exit(exitOrphan)
	}
	go p.obey()
	e := p.wait()
	last := e.Encode()
	if !alone() {
		// The clock stops now, however long it takes to kill what is left.
		_ = send(last)
		last = nil
		killRest()
	}
	_ = send(append(last, wire.Frame(wire.Empty, nil)...))
	unix.Exit(exitOK)
}

// first returns the order to start the program, and the interpreter that waits for
// it, if one does.
func first(kind string) (byte, wire.StartFrame, []int, *interpreter) {
	var ahead *interpreter
	switch kind {
	case wire.Fork:
		ahead = &interpreter{pid: wire.ForkPID, link: wire.ForkFD}
		ahead.awaitFirst()
	case wire.Parent:
		typ, order, fds := receiveOrder(outputsOrders)
		return typ, order, fds, nil
	default:
		typ, order, out := receiveOrder(outputs)
		if typ != wire.Ahead {
			return typ, order, out, nil
		}
		ahead = startAhead(order, out)
	}
	typ, order, out := ahead.await()
	return typ, order, out, ahead
}

// begin starts the program, as its own process or in the one that waits, or says
// why not and ends this process.
func begin(typ byte, order wire.StartFrame, out []int, ahead *interpreter) (pid int) {
	failed := furnish(order)
	switch {
	case failed != nil:
	case typ == wire.GoOn && ahead != nil:
		pid, failed = ahead.goOn(order)
	case typ == wire.Start:
		if ahead != nil {
			ahead.kill()
		}
		pid, failed = launch(order, out)
	default:
		unix.Exit(exitFrame)
	}
	if failed != nil {
		fail(failed)
	}
	return pid
}

// fail tells the worker what could not be done, and ends this process.
func fail(f *wire.FailedFrame) {
	_ = send(f.Encode())
	unix.Exit(exitOK)
}

// confine makes this process unreadable for the program, this thread unable to
// hand on a capability, and both subject to the filter. In a parent's jail it hands
// on those that map uids, and there is no filter.
func confine(parent bool) error {
	// Not dumpable: /proc/1 and pidfd_getfd are closed even to our own uid.
	if err := unix.Prctl(unix.PR_SET_DUMPABLE, 0, 0, 0, 0); err != nil {
		return err
	}
	name := []byte("init\x00")
	if err := unix.Prctl(unix.PR_SET_NAME, uintptr(unsafe.Pointer(&name[0])), 0, 0, 0); err != nil { //nolint:gosec // the kernel reads a string
		return err
	}
	unix.Umask(0o022)
	for _, fd := range []int{wire.ControlFD, wire.LockFD, wire.ForkFD} {
		unix.CloseOnExec(fd)
	}
	resetIgnored()
	var files unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_NOFILE, &files); err != nil {
		return err
	}
	files.Cur = min(softFiles, files.Max)
	if err := unix.Setrlimit(unix.RLIMIT_NOFILE, &files); err != nil {
		return err
	}
	// One byte, not none: a host that pipes core dumps to a program does so at a
	// limit of 0, and does not at 1 (core(5)). Into a file, neither is enough. The
	// worker sees to it that 0 is not the most where it matters.
	if err := lower(unix.RLIMIT_CORE, 1); err != nil {
		return err
	}
	if err := dropInheritable(parent); err != nil || parent { // of a parent all jails have together what it may
		return err
	}
	if err := lower(unix.RLIMIT_SIGPENDING, mostSignals); err != nil {
		return err
	}
	return filter.Install()
}

// lower makes a limit, soft and hard, no more than most.
func lower(resource int, most uint64) error {
	var limit unix.Rlimit
	if err := unix.Getrlimit(resource, &limit); err != nil {
		return err
	}
	limit.Max = min(most, limit.Max)
	limit.Cur = limit.Max
	return unix.Setrlimit(resource, &limit)
}

// resetIgnored gives SIGHUP and SIGINT, the signals the Go runtime leaves
// ignored, their default back: a worker under nohup does not hand on its choice.
func resetIgnored() {
	var act [4]uint64 // handler SIG_DFL, no flags, no restorer, empty mask
	for _, sig := range []uintptr{1, 2} {
		_, _, _ = unix.RawSyscall6(unix.SYS_RT_SIGACTION, sig, uintptr(unsafe.Pointer(&act[0])), 0, 8, 0, 0) //nolint:gosec // the kernel reads a struct
	}
}

// dropInheritable empties the inheritable, ambient and bounding sets of this
// thread, the last but for what a parent needs. What it keeps, permitted and
// effective, dies with setuid in the child.
func dropInheritable(parent bool) error {
	// nsjail sets no-setuid-fixup; with it the child would keep our capabilities.
	if err := unix.Prctl(unix.PR_SET_SECUREBITS, 0, 0, 0, 0); err != nil {
		return err
	}
	if err := unix.Prctl(unix.PR_CAP_AMBIENT, unix.PR_CAP_AMBIENT_CLEAR_ALL, 0, 0, 0); err != nil {
		return err
	}
	for c := range uintptr(64) {
		if parent && (c == unix.CAP_SETUID || c == unix.CAP_SETGID) {
			continue
		}
		if err := unix.Prctl(unix.PR_CAPBSET_DROP, c, 0, 0, 0); err == unix.EINVAL {
			break // past the last capability of this kernel
		} else if err != nil {
			return err
		}
	}
	hdr := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
	var data [2]unix.CapUserData
	if err := unix.Capget(&hdr, &data[0]); err != nil {
		return err
	}
	data[0].Inheritable, data[1].Inheritable = 0, 0
	return unix.Capset(&hdr, &data[0])
}

func errno(err error) uint32 {
	if e, ok := errors.AsType[syscall.Errno](err); ok {
		return uint32(e)
	}
	return uint32(syscall.EIO)
}
