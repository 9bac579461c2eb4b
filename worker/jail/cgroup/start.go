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

// StartProcess is os.StartProcess for a process that is in the group before its
// first instruction. On version 2 the kernel makes it there (Linux 5.7); on
// version 1 a thread of ours goes into the group, forks, and goes back.
//
// Moving the process afterwards would do as well and is what everybody does, but
// costs 4 to 12 ms: to move a process that is not the thread asking, the kernel
// stops all forks of the host, and waits for an RCU grace period to do so. It
// spares a thread that moves itself.
func (g *Group) StartProcess(name string, argv []string, attr *os.ProcAttr) (*os.Process, error) {
	if g.version == 1 {
		return g.startFromInside(func() (*os.Process, error) { return os.StartProcess(name, argv, attr) })
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

// startFromInside calls start on a thread that is in the group meanwhile.
//
// What the thread does there is charged to the group, and what it would be made
// to wait for by the group's limits, all forks of this process would wait for:
// so Limit comes after the start, and the thread does nothing else.
func (g *Group) startFromInside(start func() (*os.Process, error)) (p *os.Process, err error) {
	done := make(chan struct{})
	go func() {
		defer close(done)
		// While it is locked no other goroutine runs on this thread, nor does the
		// runtime make threads from it, which would be born in the group.
		runtime.LockOSThread()
		if unix.Gettid() == unix.Getpid() {
			// Never the first thread: all memory of a process is charged to where
			// that one is. As long as we hold it, another goroutine has another.
			p, err = g.startFromInside(start)
			runtime.UnlockOSThread()
			return
		}
		wasHome := g.home.here()
		if err = g.enter(); err == nil {
			p, err = start()
		}
		if wasHome && g.home.enter() == nil {
			runtime.UnlockOSThread()
		}
		// A thread that is still locked when its goroutine ends is ended as well:
		// none that may be in a wrong group is used again.
	}()
	<-done
	return p, err
}

// enter moves the calling thread into the group, in every hierarchy.
func (g *Group) enter() error {
	for _, d := range g.dirs {
		// 0 is the thread that writes.
		if err := write(d, "tasks", "0"); err != nil {
			return err
		}
	}
	return nil
}

// home is where the threads of this process belong on version 1.
type home struct {
	groups []byte // what threadGroups says of a thread that is there
	tasks  []int  // the tasks files, open, in the reverse of Tree.dirs
}

func threadGroups() ([]byte, error) { return os.ReadFile("/proc/thread-self/cgroup") }

// openHome returns where this process is. If that is not in dirs, which happens
// in containers that do not see their own groups, no thread is ever at home.
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

// here reports whether the calling thread is at home, in all hierarchies: the
// worker may have been moved since.
func (h *home) here() bool {
	groups, err := threadGroups()
	return err == nil && len(h.groups) > 0 && bytes.Equal(groups, h.groups)
}

// enter moves the calling thread home.
func (h *home) enter() error {
	for _, fd := range h.tasks {
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
