package cgroup

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"
)

// StartProcess is os.StartProcess for a process that is a member of the group from its first
// instruction. On version 2 the kernel starts it there (Linux 5.7). On version 1, a thread of this
// process enters the group, forks, and returns.
//
// Moving the process after the fork would cost 4 to 12 ms: to move a process that is not the
// calling thread, the kernel stops all forks of the host and waits for an RCU grace period.
func (g *Group) StartProcess(name string, argv []string, attr *os.ProcAttr) (*os.Process, error) {
	if g.version == 1 {
		return g.startFromInside(false, func() (*os.Process, error) { return os.StartProcess(name, argv, attr) })
	}
	dir, err := unix.Open(g.dirs[0], unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, fmt.Errorf("cgroup: %w", &os.PathError{Op: "open", Path: g.dirs[0], Err: err})
	}
	defer func() { _ = unix.Close(dir) }()
	into, sys := *attr, syscall.SysProcAttr{}
	if attr.Sys != nil {
		sys = *attr.Sys
	}
	sys.UseCgroupFD, sys.CgroupFD = true, dir
	into.Sys = &sys
	return os.StartProcess(name, argv, &into)
}

// StartConfined is StartProcess for a process that cannot gain privileges by executing programs
// (no_new_privs).
func (g *Group) StartConfined(name string, argv []string, attr *os.ProcAttr) (p *os.Process, err error) {
	start := func() (*os.Process, error) {
		// The process inherits this from the forking thread, which keeps it and ends.
		if err := unix.Prctl(unix.PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0); err != nil {
			return nil, fmt.Errorf("set no_new_privs: %w", err)
		}
		if g.version == 1 {
			return os.StartProcess(name, argv, attr)
		}
		return g.StartProcess(name, argv, attr)
	}
	if g.version == 1 {
		return g.startFromInside(true, start)
	}
	onOwnThread(func() { p, err = start() })
	return p, err
}

// onOwnThread calls f on a thread that ends afterwards, and is not the main thread.
func onOwnThread(f func()) {
	done := make(chan struct{})
	go func() {
		defer close(done)
		runtime.LockOSThread()
		if unix.Gettid() == unix.Getpid() {
			onOwnThread(f)
			runtime.UnlockOSThread()
			return
		}
		f()
	}()
	<-done
}

// startFromInside calls start on a thread that is a member of the group. With discard, the thread
// ends afterwards.
//
// The group is charged for what the thread does meanwhile. If the group's limits made the thread
// wait, all forks of this process would wait for it. So Limit is called after the start, and the
// thread does nothing else.
func (g *Group) startFromInside(discard bool, start func() (*os.Process, error)) (p *os.Process, err error) {
	done := make(chan struct{})
	go func() {
		defer close(done)
		// No other goroutine uses a locked thread, and the runtime does not create threads from it,
		// which would start in the group.
		runtime.LockOSThread()
		if unix.Gettid() == unix.Getpid() {
			// The main thread must not move: all memory of the process is charged to its group. While it is
			// locked here, another goroutine gets another thread.
			p, err = g.startFromInside(discard, start)
			runtime.UnlockOSThread()
			return
		}
		wasHome := g.home.here()
		if err = g.enter(); err == nil {
			p, err = start()
		}
		if wasHome && g.home.enter(len(g.dirs)) == nil && !discard {
			runtime.UnlockOSThread()
		}
		// The runtime ends a thread that is still locked when its goroutine returns. So no thread in a
		// wrong group is reused.
	}()
	<-done
	return p, err
}

// enter moves the calling thread into the group in every hierarchy.
func (g *Group) enter() error {
	for _, d := range g.dirs {
		// 0 is the calling thread.
		if err := write(d, "tasks", "0"); err != nil {
			return err
		}
	}
	return nil
}

// home is the group of this process's threads on version 1.
type home struct {
	groups []byte // /proc/thread-self/cgroup of a thread in it
	tasks  []int  // open tasks files, in reverse order of Tree.dirs
}

func threadGroups() ([]byte, error) { return os.ReadFile("/proc/thread-self/cgroup") }

// openHome opens this process's current groups. If they are not below dirs, as in containers that
// do not see their own groups, here always returns false.
func openHome(dirs []string) (*home, error) {
	h := &home{}
	groups, err := threadGroups()
	if err != nil {
		return nil, fmt.Errorf("cgroup: %w", err)
	}
	self := strconv.Itoa(unix.Getpid())
	for _, d := range slices.Backward(dirs) {
		members, err := os.ReadFile(filepath.Join(d, "tasks"))
		if err != nil {
			return nil, errors.Join(fmt.Errorf("cgroup: %w", err), h.close())
		}
		if !slices.Contains(strings.Fields(string(members)), self) {
			return h, nil
		}
		path := filepath.Join(d, "tasks")
		fd, err := unix.Open(path, unix.O_WRONLY|unix.O_CLOEXEC, 0)
		if err != nil {
			return nil, errors.Join(fmt.Errorf("cgroup: %w", &os.PathError{Op: "open", Path: path, Err: err}), h.close())
		}
		h.tasks = append(h.tasks, fd)
	}
	h.groups = groups
	return h, nil
}

// here reports whether the calling thread is at home in all hierarchies. The worker may have been
// moved since openHome.
func (h *home) here() bool {
	groups, err := threadGroups()
	return err == nil && len(h.groups) > 0 && bytes.Equal(groups, h.groups)
}

// enter moves the calling thread home in the hierarchies of the first dirs of Tree.dirs.
func (h *home) enter(dirs int) error {
	for _, fd := range h.tasks[max(0, len(h.tasks)-dirs):] {
		if err := writeFD(fd, "0"); err != nil {
			return err
		}
	}
	return nil
}

func (h *home) close() error {
	var errs []error
	for _, fd := range h.tasks {
		errs = append(errs, unix.Close(fd))
	}
	h.tasks, h.groups = nil, nil
	return errors.Join(errs...)
}
