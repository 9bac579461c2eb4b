// Package cgroup makes, reads and removes the control groups of jails, version
// 1 and 2. It limits memory, pids and cpu, all three or none: a controller that
// cannot be used is an error that names it, never a silent fall-back.
//
// Groups lie below the worker's own, at bullpen/<instance>/<jail>, so that a
// limit on the worker's pod or unit counts its jails.
package cgroup

import (
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"
)

// parentName is the directory below the worker's own group that holds one
// directory per worker instance.
const parentName = "bullpen"

// periodMicros is the kernel's default bandwidth period, which every new group has
// (Documentation/scheduler/sched-bwc.rst).
const periodMicros = 100_000

// allowed is what to do about groups that cannot be made.
const allowed = "the worker must be allowed to make control groups below its own " +
	"(root, /sys/fs/cgroup mounted read-write, with systemd Delegate=yes)"

// minQuotaMicros is the least quota the kernel accepts.
const minQuotaMicros = 1_000

// Limits is what the members of a group share.
type Limits struct {
	Memory int64 // bytes; no swap beside it
	Tasks  int   // processes and threads
}

// Usage is what the members of a group used so far.
type Usage struct {
	CPUTime    time.Duration
	MemoryPeak int64 // bytes; 0 where the kernel does not say (version 2 before 5.19)
	OOMKills   int64 // processes the kernel killed for the memory limit
}

// Tree is where one worker instance has its groups.
type Tree struct {
	version  int
	instance string
	// dirs are the worker's own directories: on version 1 one per hierarchy, the
	// memory one first; on version 2 one.
	dirs []string
	ctl  controllers
	home *home // version 1
	// contained is as in location.
	contained bool
}

// controllers are the indexes into dirs, and Group.dirs, of each controller.
type controllers struct{ memory, pids, cpu, cpuacct int }

// Group is the group of one jail.
type Group struct {
	version int
	dirs    []string
	ctl     controllers
	home    *home // version 1
}

// Open finds the worker's own group and makes bullpen/<instance> below it. On
// version 2 it moves this process: into a leaf of that group, in a container with
// all that runs there, and before, out of a login session into a scope of
// systemd's (see leaveSession).
func Open(instance string) (*Tree, error) { return open("/", instance) }

// open is Open on a file system at root, for tests.
func open(root, instance string) (*Tree, error) {
	t := &Tree{instance: instance}
	if err := t.settle(root); err != nil {
		return nil, err
	}
	var err error
	if t.version == 1 {
		if t.home, err = openHome(t.dirs); err != nil {
			return nil, err
		}
	}
	// Another worker may remove the common directory, empty, while we are about
	// to use it.
	for range 10 {
		if err = t.makeDirs(); !errors.Is(err, fs.ErrNotExist) {
			break
		}
	}
	if err != nil {
		return nil, errors.Join(err, t.closeHome())
	}
	return t, nil
}

// settling keeps two trees of one process from moving it to different places.
var settling sync.Mutex

// settle finds the worker's own group, and on version 2 one that can have groups
// of jails below it.
func (t *Tree) settle(root string) error {
	settling.Lock()
	defer settling.Unlock()
	where, err := t.find(root)
	if err != nil || where.version == 1 {
		return err
	}
	err = t.delegate()
	if err == nil || !where.session {
		return err
	}
	if lerr := leaveSession(where); lerr != nil {
		return errors.Join(err, lerr)
	}
	if _, err := t.find(root); err != nil {
		return err
	}
	return t.delegate()
}

func (t *Tree) find(root string) (location, error) {
	where, err := locate(root)
	t.version, t.dirs, t.ctl, t.contained = where.version, where.dirs, where.ctl, where.contained
	return where, err
}

func (t *Tree) closeHome() error {
	if t.home == nil {
		return nil
	}
	return t.home.close()
}

func (t *Tree) makeDirs() error {
	for _, d := range t.dirs {
		for _, dir := range []string{filepath.Join(d, parentName), filepath.Join(d, parentName, t.instance)} {
			if err := os.Mkdir(dir, 0o750); err != nil && !errors.Is(err, fs.ErrExist) {
				return fmt.Errorf("cgroup: %w: %s", err, allowed)
			}
			if t.version == 1 {
				continue
			}
			if err := enable(dir); err != nil {
				return err
			}
		}
	}
	return nil
}

// Version is 1 or 2.
func (t *Tree) Version() int { return t.version }

// New makes a group below the tree, without limits.
func (t *Tree) New(name string) (*Group, error) {
	g := &Group{version: t.version, ctl: t.ctl, home: t.home}
	for _, d := range t.dirs {
		dir := filepath.Join(d, parentName, t.instance, name)
		if err := os.Mkdir(dir, 0o750); err != nil {
			return nil, errors.Join(fmt.Errorf("cgroup: make a group: %w", err), g.Remove())
		}
		g.dirs = append(g.dirs, dir)
	}
	return g, nil
}

// Limit sets the limits on memory and tasks.
func (g *Group) Limit(l Limits) error {
	if g.version == 1 {
		return g.limit1(l)
	}
	return g.limit2(l)
}

// Throttle sets the limit on cpu, in cores. It is apart from the others because
// what has used up its share stands still, whatever others wait for it to do.
func (g *Group) Throttle(cpu float64) error {
	q := strconv.FormatInt(quota(cpu), 10)
	if g.version == 2 {
		return write(g.dirs[0], "cpu.max", q+" "+strconv.Itoa(periodMicros))
	}
	return write(g.dirs[g.ctl.cpu], "cpu.cfs_quota_us", q)
}

// Unthrottle lifts the cpu limit: a process that has used up its quota would
// otherwise be killed only in the next period.
func (g *Group) Unthrottle() error {
	if g.version == 1 {
		return write(g.dirs[g.ctl.cpu], "cpu.cfs_quota_us", "-1")
	}
	return write(g.dirs[0], "cpu.max", "max")
}

// Yield lets the members have less of the cpu than those of other groups where
// there is not enough for all: a tenth. It is not less, because what is in the way of
// others now and then holds locks of the kernel that they need.
func (g *Group) Yield() error { return g.weigh("102", "10") }

// Claim ends Yield.
func (g *Group) Claim() error { return g.weigh("1024", "100") }

// weigh sets the weight against other groups, in the units of version 1 and of
// version 2.
func (g *Group) weigh(shares, weight string) error {
	if g.version == 1 {
		return write(g.dirs[g.ctl.cpu], "cpu.shares", shares)
	}
	return write(g.dirs[0], "cpu.weight", weight)
}

// Doors opens the files by which a process enters the group: one of a single thread
// that has them and writes 0 to each is in it. That it may, it owes to whoever
// opened them. The caller closes them.
func (g *Group) Doors() (doors []*os.File, err error) {
	file := "cgroup.procs"
	if g.version == 1 {
		file = "tasks"
	}
	for _, d := range g.dirs {
		fd, err := openFD(d, file, unix.O_WRONLY)
		if err != nil {
			for _, door := range doors {
				_ = door.Close()
			}
			return nil, err
		}
		doors = append(doors, os.NewFile(uintptr(fd), filepath.Join(d, file)))
	}
	return doors, nil
}

// Has reports whether a process is in the group.
func (g *Group) Has(pid int) (bool, error) {
	b, err := read(g.dirs[0], "cgroup.procs")
	if err != nil {
		return false, err
	}
	return slices.Contains(strings.Fields(string(b)), strconv.Itoa(pid)), nil
}

// Memory is what the members hold now, in bytes, without the page cache of files.
func (g *Group) Memory() (int64, error) {
	total, cache := "memory.current", "file"
	if g.version == 1 {
		total, cache = "memory.usage_in_bytes", "cache"
	}
	dir := g.dirs[g.ctl.memory]
	held, err := readInt(dir, total)
	if err != nil {
		return 0, err
	}
	n, err := readKeys(dir, "memory.stat", cache, "shmem")
	if err != nil {
		return 0, err
	}
	return max(0, held-n[0]+n[1]), nil // what is in a tmpfs counts as cache
}

// Usage reads the counters.
func (g *Group) Usage() (Usage, error) {
	if g.version == 1 {
		return g.usage1()
	}
	return g.usage2()
}

// Remove removes the group. What is still in it is killed first.
func (g *Group) Remove() error {
	var errs []error
	for _, d := range g.dirs {
		err := removeDir(d)
		if errors.Is(err, unix.EBUSY) {
			err = sweepGroup(d)
		}
		errs = append(errs, err)
	}
	return errors.Join(errs...)
}

// removeDir removes a group that is empty, or gone already.
func removeDir(dir string) error {
	// Not os.Remove: it would try unlink first, and tell of that.
	if err := unix.Rmdir(dir); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("cgroup: remove a group: %w", &os.PathError{Op: "rmdir", Path: dir, Err: err})
	}
	return nil
}

// Close removes the instance's directories, and the one above if this was the
// last instance.
func (t *Tree) Close() error {
	var errs []error
	for _, d := range t.dirs {
		if err := os.Remove(filepath.Join(d, parentName, t.instance)); err != nil && !errors.Is(err, fs.ErrNotExist) {
			errs = append(errs, fmt.Errorf("cgroup: remove the instance: %w", err))
		}
		// Fails while other instances are there, which is right.
		_ = os.Remove(filepath.Join(d, parentName))
	}
	errs = append(errs, t.closeHome())
	return errors.Join(errs...)
}

func quota(cpu float64) int64 { return max(int64(cpu*periodMicros), minQuotaMicros) }

// openFD opens a file of a group. It is no os.File, which the runtime would poll: two system calls more, of those that an execution
// waits for.
func openFD(dir, file string, flags int) (int, error) {
	path := filepath.Join(dir, file)
	fd, err := unix.Open(path, flags|unix.O_CLOEXEC, 0)
	if err != nil {
		return -1, fmt.Errorf("cgroup: %w", &os.PathError{Op: "open", Path: path, Err: err})
	}
	return fd, nil
}

// write writes value to a file of a group.
func write(dir, file, value string) error {
	// Not os.WriteFile: it would try to make a file that is missing, which a
	// control group answers with a refusal rather than with ENOENT.
	fd, err := openFD(dir, file, unix.O_WRONLY|unix.O_TRUNC)
	if err != nil {
		return err
	}
	if err = writeFD(fd, value); err != nil {
		err = fmt.Errorf("cgroup: write %q: %w", value, &os.PathError{Op: "write", Path: filepath.Join(dir, file), Err: err})
	}
	return errors.Join(err, unix.Close(fd))
}

// writeFD writes value whole. The kernel gives up the setting of some limits for a signal, and the runtime sends itself many.
func writeFD(fd int, value string) error {
	for {
		if _, err := unix.Write(fd, []byte(value)); !errors.Is(err, unix.EINTR) {
			return err
		}
	}
}

// read reads a file of a group whole.
func read(dir, file string) ([]byte, error) {
	fd, err := openFD(dir, file, unix.O_RDONLY)
	if err != nil {
		return nil, err
	}
	b := make([]byte, 0, 4096)
	for {
		n, err := unix.Read(fd, b[len(b):cap(b)])
		switch {
		case errors.Is(err, unix.EINTR):
		case err != nil:
			return nil, errors.Join(fmt.Errorf("cgroup: %w", &os.PathError{Op: "read", Path: filepath.Join(dir, file), Err: err}), unix.Close(fd))
		case n == 0:
			return b, unix.Close(fd)
		default:
			b = slices.Grow(b[:len(b)+n], 512)
		}
	}
}

func readInt(dir, file string) (int64, error) {
	b, err := read(dir, file)
	if err != nil {
		return 0, err
	}
	n, err := strconv.ParseInt(string(bytes.TrimSpace(b)), 10, 64)
	if err != nil {
		return 0, fmt.Errorf("cgroup: read %s: %w", file, err)
	}
	return n, nil
}

// readKey reads the number after key in a file of "key number" lines.
func readKey(dir, file, key string) (int64, error) {
	n, err := readKeys(dir, file, key)
	if err != nil {
		return 0, err
	}
	return n[0], nil
}

// readKeys reads the numbers after keys.
func readKeys(dir, file string, keys ...string) ([]int64, error) {
	b, err := read(dir, file)
	if err != nil {
		return nil, err
	}
	values := make([]int64, len(keys))
	missing := len(keys)
	for line := range bytes.Lines(b) {
		k, v, ok := bytes.Cut(bytes.TrimSpace(line), []byte{' '})
		i := slices.Index(keys, string(k))
		if !ok || i < 0 {
			continue
		}
		if values[i], err = strconv.ParseInt(string(v), 10, 64); err != nil {
			return nil, fmt.Errorf("cgroup: read %s of %s: %w", keys[i], file, err)
		}
		missing--
	}
	if missing > 0 {
		return nil, fmt.Errorf("cgroup: %s has not all of %v", file, keys)
	}
	return values, nil
}
