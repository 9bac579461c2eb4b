package cgroup

import (
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"strconv"
	"sync"

	"golang.org/x/sys/unix"
)

// oomCounter counts how often a group of version 1, or an ancestor, ran out of memory at its limit.
// The kernel reports each time to an eventfd, before it kills
// (Documentation/admin-guide/cgroup-v1/memory.rst, "OOM Control").
type oomCounter struct {
	event *os.File

	mu sync.Mutex
	n  int64
}

func (c *oomCounter) open(dir string) error {
	efd, err := unix.Eventfd(0, unix.EFD_CLOEXEC|unix.EFD_NONBLOCK)
	if err != nil {
		return fmt.Errorf("cgroup: watch for oom: %w", err)
	}
	c.event = os.NewFile(uintptr(efd), "oom event")
	ctl, err := openFD(dir, "memory.oom_control", unix.O_RDONLY)
	if err != nil {
		return errors.Join(err, c.close())
	}
	defer func() { _ = unix.Close(ctl) }()
	if err := write(dir, "cgroup.event_control", strconv.Itoa(efd)+" "+strconv.Itoa(ctl)); err != nil {
		return errors.Join(err, c.close())
	}
	return nil
}

func (c *oomCounter) close() error {
	if c.event == nil {
		return nil
	}
	return c.event.Close()
}

// read adds the eventfd's count. It reports whether that was not zero.
func (c *oomCounter) read(fd uintptr) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	var b [8]byte
	if n, err := unix.Read(int(fd), b[:]); err != nil || n != len(b) {
		return false
	}
	c.n += int64(binary.NativeEndian.Uint64(b[:]))
	return true
}

// count returns the number of times so far.
func (c *oomCounter) count() int64 {
	if conn, err := c.event.SyscallConn(); err == nil {
		_ = conn.Control(func(fd uintptr) { c.read(fd) })
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.n
}

// await blocks until there is one more time. It returns an error once the counter is closed.
func (c *oomCounter) await() error {
	conn, err := c.event.SyscallConn()
	if err != nil {
		return err
	}
	return conn.Read(c.read)
}

// OOMWatch reports when a group of version 1 has no memory left within its own limit. Its methods
// may be called concurrently.
type OOMWatch struct {
	group  oomCounter
	above  *oomCounter // of the groups above
	before int64       // count of above when the watch began
}

// WatchOOM watches the group. It returns nil on version 2, where the kernel kills the whole group
// and counts its reasons, see Usage. The caller closes the watch.
func (g *Group) WatchOOM() (*OOMWatch, error) {
	if g.version == 2 {
		return nil, nil
	}
	w := &OOMWatch{above: &g.tree.oom}
	w.before = w.above.count()
	if err := w.group.open(g.dirs[g.ctl.memory]); err != nil {
		return nil, err
	}
	return w, nil
}

// Reached reports whether the group had no memory left within its own limit.
func (w *OOMWatch) Reached() bool {
	n := w.group.count()
	// Read second: the kernel reports to the groups from the top down.
	return n > w.above.count()-w.before
}

// Await blocks until Reached, and returns false if the watch was closed before.
func (w *OOMWatch) Await() bool {
	for !w.Reached() {
		if w.group.await() != nil {
			return false
		}
	}
	return true
}

// Close ends the watch.
func (w *OOMWatch) Close() error { return w.group.close() }
