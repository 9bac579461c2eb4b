package cgroup

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// Sweep kills and removes the groups of instances for which dead returns true. It returns their
// names.
func (t *Tree) Sweep(dead func(instance string) bool) ([]string, error) {
	swept := map[string]bool{}
	var errs []error
	for i, d := range t.dirs {
		parent := filepath.Join(d, parentName)
		entries, err := os.ReadDir(parent)
		if err != nil {
			errs = append(errs, fmt.Errorf("cgroup: sweep: %w", err))
			continue
		}
		for _, e := range entries {
			if !e.IsDir() || e.Name() == t.instance {
				continue
			}
			if !swept[e.Name()] && !dead(e.Name()) {
				continue
			}
			if !swept[e.Name()] {
				t.thawInstance(e.Name())
			}
			swept[e.Name()] = true
			errs = append(errs, t.sweepInstance(filepath.Join(parent, e.Name()), i == t.ctl.memory))
		}
	}
	var names []string
	for n := range swept {
		names = append(names, n)
	}
	return names, errors.Join(errs...)
}

// sweepInstance kills the members of all groups of an instance and removes the groups. memory
// reports whether page cache may be charged to them.
func (t *Tree) sweepInstance(dir string, memory bool) error {
	entries, err := os.ReadDir(dir)
	if err != nil {
		return fmt.Errorf("cgroup: sweep: %w", err)
	}
	var errs []error
	var groups []string
	for _, e := range entries {
		if e.IsDir() {
			groups = append(groups, filepath.Join(dir, e.Name()))
		}
	}
	// A program waiting for the process that serves its mount dies only after that process.
	for _, group := range groups {
		errs = append(errs, signalMembers(group))
	}
	for _, group := range groups {
		if errs = append(errs, killMembers(group)); memory {
			errs = append(errs, t.reclaim(group))
		}
		errs = append(errs, removeDir(group))
	}
	if err := os.Remove(dir); err != nil && !errors.Is(err, fs.ErrNotExist) {
		errs = append(errs, fmt.Errorf("cgroup: sweep: %w", err))
	}
	return errors.Join(errs...)
}

// signalMembers sends SIGKILL to the members of a group, and does not wait for their deaths.
func signalMembers(dir string) error {
	pids, err := members(dir)
	for _, pid := range pids {
		if pid == unix.Getpid() {
			continue
		}
		fd, errOpen := kill(pid)
		if errOpen == nil {
			errOpen = unix.Close(fd)
		}
		if errOpen != nil && !errors.Is(errOpen, unix.ESRCH) {
			err = errors.Join(err, fmt.Errorf("cgroup: sweep: kill %d: %w", pid, errOpen))
		}
	}
	return err
}

// killMembers kills the members of a group and waits for their deaths.
func killMembers(dir string) error {
	for {
		pids, err := members(dir)
		if err != nil || len(pids) == 0 {
			return err
		}
		for _, pid := range pids {
			if pid == unix.Getpid() {
				err = awaitOwnThreads(dir)
			} else {
				err = killAndWait(pid)
			}
			if err != nil {
				return fmt.Errorf("cgroup: sweep: kill %d: %w", pid, err)
			}
		}
	}
}

// members returns the members of a group, none if the group does not exist.
func members(dir string) (pids []int, err error) {
	b, err := os.ReadFile(filepath.Join(dir, "cgroup.procs"))
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("cgroup: sweep: %w", err)
	}
	for text := range strings.FieldsSeq(string(b)) {
		pid, err := strconv.Atoi(text)
		if err != nil {
			return nil, fmt.Errorf("cgroup: sweep: %w", err)
		}
		pids = append(pids, pid)
	}
	return pids, nil
}

// awaitOwnThreads waits until no thread of this process is in a group of version 1. Threads are
// there only for a moment; one that could not leave is dying (see Group.startFromInside). There is
// no notification of its death.
func awaitOwnThreads(dir string) error {
	self := strconv.Itoa(unix.Getpid())
	for range 1000 {
		b, err := os.ReadFile(filepath.Join(dir, "cgroup.procs"))
		if err != nil || !slices.Contains(strings.Fields(string(b)), self) {
			return err
		}
		time.Sleep(time.Millisecond)
	}
	return errors.New("a thread of this process does not leave the group")
}

// kill kills a process, and returns a pidfd of it. It returns [unix.ESRCH] if there is none.
func kill(pid int) (fd int, err error) {
	if fd, err = unix.PidfdOpen(pid, 0); err != nil {
		return -1, err
	}
	if err := unix.PidfdSendSignal(fd, unix.SIGKILL, nil, 0); err != nil {
		return -1, errors.Join(err, unix.Close(fd))
	}
	return fd, nil
}

// killAndWait kills a process and waits until it is dead.
func killAndWait(pid int) error {
	fd, err := kill(pid)
	if errors.Is(err, unix.ESRCH) {
		return nil
	}
	if err != nil {
		return err
	}
	defer func() { _ = unix.Close(fd) }()
	for {
		_, err := unix.Poll([]unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}, -1)
		if !errors.Is(err, unix.EINTR) {
			return err
		}
	}
}
