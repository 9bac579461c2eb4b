// Package cgroup creates, reads and removes the control groups of jails, in version 1 and 2. It
// needs the controllers for memory, pids and cpu: if one is unusable, the error names it, and there
// is no fallback.
//
// Groups are below the worker's own group, at bullpen/<instance>/<jail>. So a limit on the worker's
// pod or unit counts its jails.
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

// parentName is the directory below the worker's own group with one directory per worker instance.
const parentName = "bullpen"

// periodMicros is the kernel's default bandwidth period of a group
// (Documentation/scheduler/sched-bwc.rst).
const periodMicros = 100_000

// allowed is the remedy for missing permissions.
const allowed = "the worker must be allowed to make control groups below its own " +
	"(root, /sys/fs/cgroup mounted read-write, with systemd Delegate=yes)"

// minQuotaMicros is the smallest quota that the kernel accepts.
const minQuotaMicros = 1_000

// Limits are shared by all members of a group.
type Limits struct {
	Memory int64 // bytes; swap is disabled
	Tasks  int   // processes and threads
}

// Usage is the consumption of a group so far.
type Usage struct {
	CPUTime    time.Duration
	MemoryPeak int64 // bytes; 0 if the kernel does not report it (version 2 before 5.19)
	OOMKills   int64 // processes that the kernel's OOM killer killed, for whatever limit, or for the host
	// LimitOOMs is how often the group ran out of memory at its own limit. It is 0 on version 1,
	// where an OOMWatch counts instead.
	LimitOOMs int64
}

// Tree holds the groups of one worker instance.
type Tree struct {
	version  int
	instance string
	// dirs are the directories of the instance: one per hierarchy on version 1, memory first; a single
	// one on version 2.
	dirs []string
	// limits is the number of dirs, the first ones, that limit jails. On version 1 the last directory may
	// be there for the freezer alone.
	limits int
	ctl    controllers
	home   *home      // version 1
	oom    oomCounter // version 1: of the directory of the instance, which has no limit of its own
	// contained is as in location.
	contained bool

	mu      sync.Mutex
	retired []string // empty memory groups still charged for page cache, oldest first
}

// controllers are the indexes of the controllers in Tree.dirs and Group.dirs. That of the freezer is -1 if
// there is none.
type controllers struct{ memory, pids, cpu, cpuacct, freezer int }

// Group is the group of one jail.
type Group struct {
	version int
	tree    *Tree
	dirs    []string
	ctl     controllers
	home    *home // version 1
}

// Open finds the worker's own group and creates bullpen/<instance> below it. On version 2 it moves
// this process into a leaf of its own group; in a container it moves all other processes of the
// group too. A process in a login session is first moved to a scope of systemd, see leaveSession.
func Open(instance string) (*Tree, error) { return open("/", instance) }

// open is Open with another root directory, for tests.
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
	// Another worker may remove the shared directory while it is empty.
	for range 10 {
		if err = t.makeDirs(); !errors.Is(err, fs.ErrNotExist) {
			break
		}
	}
	if err == nil && t.version == 1 {
		err = t.oom.open(t.instanceDir(t.ctl.memory))
	}
	if err != nil {
		return nil, errors.Join(err, t.closeHome())
	}
	return t, nil
}

// instanceDir returns the directory of the instance in the i-th hierarchy.
func (t *Tree) instanceDir(i int) string { return filepath.Join(t.dirs[i], parentName, t.instance) }

// settleMu prevents two trees of one process from moving it to different groups.
var settleMu sync.Mutex

// settle finds the worker's own group. On version 2 it makes sure that jails can have groups below
// it.
func (t *Tree) settle(root string) error {
	settleMu.Lock()
	defer settleMu.Unlock()
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
	t.limits = len(t.dirs)
	if t.ctl.freezer = slices.Index(t.dirs, where.freezer); t.ctl.freezer < 0 && where.freezer != "" {
		t.ctl.freezer = len(t.dirs)
		t.dirs = append(t.dirs, where.freezer)
	}
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

// Version returns 1 or 2.
func (t *Tree) Version() int { return t.version }

// New creates a group without limits, which can be frozen if freezable is true and the host allows it. No
// other group of the tree may ever have had its name.
func (t *Tree) New(name string, freezable bool) (*Group, error) {
	g := &Group{version: t.version, tree: t, ctl: t.ctl, home: t.home}
	dirs := t.dirs
	if !freezable {
		dirs = dirs[:t.limits]
	}
	for _, d := range dirs {
		dir := filepath.Join(d, parentName, t.instance, name)
		if err := os.Mkdir(dir, 0o750); err != nil {
			return nil, errors.Join(fmt.Errorf("cgroup: make a group: %w", err), g.Remove())
		}
		g.dirs = append(g.dirs, dir)
	}
	return g, nil
}

// Limit sets the limits of memory and tasks.
func (g *Group) Limit(l Limits) error {
	if g.version == 1 {
		return g.limit1(l)
	}
	return g.limit2(l)
}

// Throttle limits the CPU to a number of cores. It is separate from Limit because a process over
// its quota stops, even if others wait for it.
func (g *Group) Throttle(cpu float64) error {
	q := strconv.FormatInt(quota(cpu), 10)
	if g.version == 2 {
		return write(g.dirs[0], "cpu.max", q+" "+strconv.Itoa(periodMicros))
	}
	return write(g.dirs[g.ctl.cpu], "cpu.cfs_quota_us", q)
}

// Unthrottle removes the cpu limit. A killed process over its quota would otherwise die only in the
// next period.
func (g *Group) Unthrottle() error {
	if g.version == 1 {
		return write(g.dirs[g.ctl.cpu], "cpu.cfs_quota_us", "-1")
	}
	return write(g.dirs[0], "cpu.max", "max")
}

// LowerWeight reduces the group's share of a busy cpu to a tenth. It is not lower because members
// may hold kernel locks that other groups wait for.
func (g *Group) LowerWeight() error { return g.setWeight("102", "10") }

// ResetWeight undoes LowerWeight.
func (g *Group) ResetWeight() error { return g.setWeight("1024", "100") }

// setWeight sets the cpu weight in the units of version 1 and 2.
func (g *Group) setWeight(shares, weight string) error {
	if g.version == 1 {
		return write(g.dirs[g.ctl.cpu], "cpu.shares", shares)
	}
	return write(g.dirs[0], "cpu.weight", weight)
}

// CheckEntry returns why no process of another user than the worker's can enter a group (see
// OpenEntryFiles), or nil if one can.
func (t *Tree) CheckEntry() error {
	if t.version != 1 {
		return nil
	}
	// It belongs to the host's root, including in a user namespace that does not map it.
	var sys unix.Stat_t
	if err := unix.Stat("/proc/sys", &sys); err != nil {
		return &fs.PathError{Op: "stat", Path: "/proc/sys", Err: err}
	}
	if int(sys.Uid) != os.Geteuid() {
		return errors.New("on control groups of version 1, the kernel lets the host's root alone move processes of other " +
			"users: use version 2")
	}
	return nil
}

// OpenEntryFiles opens the control files through which a process enters the group: a
// single-threaded process that writes 0 to each of them is a member. The kernel checks the
// permissions of the process that opened them. The caller closes the files.
func (g *Group) OpenEntryFiles() (files []*os.File, err error) {
	file := "cgroup.procs"
	if g.version == 1 {
		file = "tasks"
	}
	for _, d := range g.dirs {
		fd, err := openFD(d, file, unix.O_WRONLY)
		if err != nil {
			for _, f := range files {
				_ = f.Close()
			}
			return nil, err
		}
		files = append(files, os.NewFile(uintptr(fd), filepath.Join(d, file)))
	}
	return files, nil
}

// Has reports whether a process is a member.
func (g *Group) Has(pid int) (bool, error) {
	b, err := read(g.dirs[0], "cgroup.procs")
	if err != nil {
		return false, err
	}
	return slices.Contains(strings.Fields(string(b)), strconv.Itoa(pid)), nil
}

// Memory returns the current memory of the members in bytes, without the page cache of files.
func (g *Group) Memory() (int64, error) {
	file := "memory.current"
	if g.version == 1 {
		file = "memory.usage_in_bytes"
	}
	dir := g.dirs[g.ctl.memory]
	used, err := readInt(dir, file)
	if err != nil {
		return 0, err
	}
	cache, err := pageCache(g.version, dir)
	return max(0, used-cache), err
}

// Sockets returns the buffers of sockets that the members are charged for, in bytes.
func (g *Group) Sockets() (int64, error) {
	if g.version == 1 {
		return readInt(g.dirs[g.ctl.memory], "memory.kmem.tcp.usage_in_bytes")
	}
	return readKey(g.dirs[0], "memory.stat", "sock")
}

// Kernel returns the kernel memory in bytes charged to all groups below the worker's own, including
// other instances', without socket buffers. On version 2 it excludes reclaimable memory, and before
// Linux 5.18 pipes and kinds that the kernel does not report. Kernels before 5.11 return 0 on
// version 1.
func (t *Tree) Kernel() (int64, error) {
	dir := filepath.Join(t.dirs[t.ctl.memory], parentName)
	if t.version == 1 {
		return readInt(dir, "memory.kmem.usage_in_bytes")
	}
	all, missing, err := findKeys(dir, "memory.stat", "kernel", "slab_reclaimable")
	if err != nil {
		return 0, err
	}
	if missing == 0 {
		return all[0] - all[1], nil
	}
	kinds, _, err := findKeys(dir, "memory.stat", "slab_unreclaimable", "kernel_stack", "pagetables", "percpu", "vmalloc")
	if err != nil {
		return 0, err
	}
	var total int64
	for _, n := range kinds {
		total += n
	}
	return total, nil
}

// CPUTime returns the CPU time used so far.
func (g *Group) CPUTime() (time.Duration, error) {
	if g.version == 1 {
		n, err := readInt(g.dirs[g.ctl.cpuacct], "cpuacct.usage")
		return time.Duration(n), err
	}
	n, err := readKey(g.dirs[0], "cpu.stat", "usage_usec")
	return time.Duration(n) * time.Microsecond, err
}

// Usage returns the consumption so far.
func (g *Group) Usage() (Usage, error) {
	if g.version == 1 {
		return g.usage1()
	}
	return g.usage2()
}

// Remove kills the members and removes the group, or the tree does so later, see [Tree.retire].
func (g *Group) Remove() error {
	var errs []error
	for i, d := range g.dirs {
		if i == g.ctl.memory {
			cache, err := g.tree.pageCache(d)
			if errs = append(errs, err); cache > 0 {
				errs = append(errs, killMembers(d), g.tree.retire(d))
				continue
			}
		}
		err := removeDir(d)
		if errors.Is(err, unix.EBUSY) {
			err = errors.Join(killMembers(d), removeDir(d))
		}
		errs = append(errs, err)
	}
	return errors.Join(errs...)
}

// removeDir removes an empty group. It is no error if the group does not exist.
func removeDir(dir string) error {
	// Not os.Remove, which tries unlink first and returns its error.
	if err := unix.Rmdir(dir); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("cgroup: remove a group: %w", &os.PathError{Op: "rmdir", Path: dir, Err: err})
	}
	return nil
}

// Close removes the instance's directories, whose groups are empty, and the parent directory if
// this was the last instance.
func (t *Tree) Close() error {
	errs := []error{t.removeRetired()}
	for _, d := range t.dirs {
		if err := os.Remove(filepath.Join(d, parentName, t.instance)); err != nil && !errors.Is(err, fs.ErrNotExist) {
			errs = append(errs, fmt.Errorf("cgroup: remove the instance: %w", err))
		}
		// Fails while there are other instances.
		_ = os.Remove(filepath.Join(d, parentName))
	}
	errs = append(errs, t.oom.close(), t.closeHome())
	return errors.Join(errs...)
}

func quota(cpu float64) int64 { return max(int64(cpu*periodMicros), minQuotaMicros) }

// openFD opens a file of a group. It avoids os.File, whose poller costs two more system calls per
// execution.
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
	// Not os.WriteFile: for a missing file, O_CREATE fails with EACCES instead of ENOENT.
	fd, err := openFD(dir, file, unix.O_WRONLY|unix.O_TRUNC)
	if err != nil {
		return err
	}
	if err = writeFD(fd, value); err != nil {
		err = fmt.Errorf("cgroup: write %q: %w", value, &os.PathError{Op: "write", Path: filepath.Join(dir, file), Err: err})
	}
	return errors.Join(err, unix.Close(fd))
}

// writeFD writes all of value. Signals, which the runtime sends often, interrupt the setting of
// some limits.
func writeFD(fd int, value string) error {
	for {
		if _, err := unix.Write(fd, []byte(value)); !errors.Is(err, unix.EINTR) {
			return err
		}
	}
}

// read returns the content of a file of a group.
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
			return nil, errors.Join(fmt.Errorf(
				"cgroup: %w", &os.PathError{Op: "read", Path: filepath.Join(dir, file), Err: err}), unix.Close(fd))
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

// readKey returns the number after key in a file of "key number" lines.
func readKey(dir, file, key string) (int64, error) {
	n, err := readKeys(dir, file, key)
	if err != nil {
		return 0, err
	}
	return n[0], nil
}

// readKeys returns the numbers after keys. It is an error if one is missing.
func readKeys(dir, file string, keys ...string) ([]int64, error) {
	values, missing, err := findKeys(dir, file, keys...)
	if err == nil && missing > 0 {
		return nil, fmt.Errorf("cgroup: %s has not all of %v", file, keys)
	}
	return values, err
}

// findKeys returns the numbers after keys, 0 for missing ones, and how many are missing.
func findKeys(dir, file string, keys ...string) (values []int64, missing int, err error) {
	b, err := read(dir, file)
	if err != nil {
		return nil, 0, err
	}
	values, missing = make([]int64, len(keys)), len(keys)
	for line := range bytes.Lines(b) {
		k, v, ok := bytes.Cut(bytes.TrimSpace(line), []byte{' '})
		i := slices.Index(keys, string(k))
		if !ok || i < 0 {
			continue
		}
		if values[i], err = strconv.ParseInt(string(v), 10, 64); err != nil {
			return nil, 0, fmt.Errorf("cgroup: read %s of %s: %w", keys[i], file, err)
		}
		missing--
	}
	return values, missing, nil
}
