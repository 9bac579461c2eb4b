package cgroup

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// leafName is the group that a worker moves itself into. On version 2 a group that delegates
// controllers may have no member processes.
const leafName = "bullpen-worker"

// needed are the controllers that jails need on version 2.
var needed = [...]string{"memory", "pids", "cpu"} // read only

// delegate enables the controllers for children of the worker's own group. It moves the worker into
// a leaf if necessary.
func (t *Tree) delegate() error {
	own := t.dirs[0]
	b, err := os.ReadFile(filepath.Join(own, "cgroup.controllers"))
	if err != nil {
		return fmt.Errorf("cgroup: %w", err)
	}
	for _, c := range needed {
		if !hasWord(string(b), c) {
			return fmt.Errorf("cgroup: controller %q is not available in %s: let the group above delegate it "+
				"(systemd: Delegate=yes in the unit, or `systemd-run --scope -p Delegate=yes` in front of the command; "+
				"container: a private cgroup namespace and a writable /sys/fs/cgroup)", c, own)
		}
	}
	err = enable(own)
	if err == nil {
		return nil
	}
	leaf := filepath.Join(own, leafName)
	if merr := os.Mkdir(leaf, 0o750); merr != nil && !errors.Is(merr, fs.ErrExist) {
		return fmt.Errorf("%w: %s", errors.Join(err, fmt.Errorf("cgroup: %w", merr)), allowed)
	}
	// 0 is the calling process.
	if merr := write(leaf, "cgroup.procs", "0"); merr != nil {
		return errors.Join(err, merr)
	}
	if err = enable(own); err != nil && t.contained {
		err = evacuate(own, leaf)
	}
	if err != nil {
		// Another worker of the group may be in the leaf.
		_ = errors.Join(write(own, "cgroup.procs", "0"), unix.Rmdir(leaf))
		return fmt.Errorf("%w: other processes are in %s: start the worker in a group of its own "+
			"(a systemd unit with Delegate=yes, or a container with a private cgroup namespace)", err, own)
	}
	return nil
}

// evacuate enables the controllers of a container's own group. It first moves all of the
// container's processes, such as a shell or a debugger, into the leaf.
func evacuate(own, leaf string) error {
	err := error(unix.EBUSY)
	// Processes may be started while we look.
	for range 10 {
		if !errors.Is(err, unix.EBUSY) {
			break
		}
		procs, rerr := os.ReadFile(filepath.Join(own, "cgroup.procs"))
		if rerr != nil {
			return fmt.Errorf("cgroup: %w", rerr)
		}
		for pid := range strings.FieldsSeq(string(procs)) {
			// 0 is a process outside of the container's pid namespace; others may have ended.
			if pid == "0" {
				continue
			}
			if werr := write(leaf, "cgroup.procs", pid); werr != nil && !errors.Is(werr, unix.ESRCH) {
				return werr
			}
		}
		err = enable(own)
	}
	return err
}

// enable enables the needed controllers for the children of dir.
func enable(dir string) error {
	b, err := os.ReadFile(filepath.Join(dir, "cgroup.subtree_control"))
	if err != nil {
		return fmt.Errorf("cgroup: %w", err)
	}
	var missing []string
	for _, c := range needed {
		if !hasWord(string(b), c) {
			missing = append(missing, "+"+c)
		}
	}
	if len(missing) == 0 {
		return nil
	}
	return write(dir, "cgroup.subtree_control", strings.Join(missing, " "))
}

func hasWord(list, word string) bool {
	for f := range strings.FieldsSeq(list) {
		if f == word {
			return true
		}
	}
	return false
}

func (g *Group) limit2(l Limits) error {
	dir := g.dirs[0]
	if err := write(dir, "memory.max", strconv.FormatInt(l.Memory, 10)); err != nil {
		return err
	}
	// Missing if the kernel does not account swap.
	if err := write(dir, "memory.swap.max", "0"); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	if err := write(dir, "memory.oom.group", "1"); err != nil {
		return err
	}
	return write(dir, "pids.max", strconv.Itoa(l.Tasks))
}

func (g *Group) usage2() (Usage, error) {
	dir := g.dirs[0]
	micros, err := readKey(dir, "cpu.stat", "usage_usec")
	if err != nil {
		return Usage{}, err
	}
	events, err := readKeys(dir, "memory.events", "oom", "oom_kill")
	if err != nil {
		return Usage{}, err
	}
	peak, err := readInt(dir, "memory.peak")
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return Usage{}, err
	}
	return Usage{
		CPUTime: time.Duration(micros) * time.Microsecond, MemoryPeak: peak, LimitOOMs: events[0],
		OOMKills: events[1],
	}, nil
}
