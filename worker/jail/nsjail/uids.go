package nsjail

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"

	"golang.org/x/sys/unix"

	"github.com/bullpen-run/bullpen/worker/jail"
)

// UIDs is a range of the host's uids (and gids of the same numbers) that nothing else on the host
// uses. A jail takes two of the first PairUIDs. One with a writable root takes RootUIDs of the rest.
type UIDs struct {
	First int // not 0
	Count int // at least 2
}

const (
	// PairUIDs is how many uids at the start of a range are for jails with two of them.
	PairUIDs = 8192
	// RootUIDs is how many uids a jail with a writable root has: those from 0 on, for a system's users and
	// more than 1,000 others, and nobody's. Where a pod has 65,536, there are enough for 23 such jails.
	RootUIDs = 2048
	nobody   = 65534
)

// DefaultUIDs is above every range that distributions and systemd use. It is enough for 4,096 jails
// at a time on one host, and 256 with a writable root.
var DefaultUIDs = UIDs{First: 1_900_000_000, Count: PairUIDs + 256*RootUIDs} // read only

// pairs returns the uids of jails with two of them.
func (u UIDs) pairs() UIDs { return UIDs{u.First, min(u.Count, PairUIDs)} }

// rest returns the uids of jails with a writable root.
func (u UIDs) rest() UIDs { return UIDs{u.First + PairUIDs, max(0, u.Count-PairUIDs)} }

// check returns an error if the worker cannot map the uids.
func (u UIDs) check() error {
	if u.First <= 0 || u.Count < 2 || u.First+u.Count > 1<<31-2 {
		return fmt.Errorf("uid range %d+%d is not usable: give a range of at least 2 unprivileged uids",
			u.First, u.Count)
	}
	if err := u.mapped("/proc/self/uid_map"); err != nil {
		return err
	}
	return u.mapped("/proc/self/gid_map")
}

// uidPool allocates sets of size consecutive uids. Each set is locked in a directory that all workers of
// the host share.
type uidPool struct {
	UIDs
	size int
	dir  string

	mu   sync.Mutex
	free []*uidSet // locked by this process, oldest first
	next int       // first set this process has not tried yet
}

// uidSet is the uids of a jail: two, or RootUIDs. They are reserved as long as lock, or a duplicate of it in
// an init, is open.
type uidSet struct {
	first, size int
	lock        *os.File
}

// program returns the program's uid outside of the jail.
func (s *uidSet) program() int {
	if s.size == RootUIDs {
		return s.first + jail.ProgramID
	}
	return s.first + 1
}

// around returns the mappings of the user namespace around a jail with a writable root: the worker's user,
// who executes nsjail, and then the uids of the set.
func (s *uidSet) around() []syscall.SysProcIDMap {
	return []syscall.SysProcIDMap{{Size: 1}, {ContainerID: 1, HostID: s.first, Size: s.size}}
}

// openUIDLocks creates the directory of locks, and removes those of dead workers.
func openUIDLocks(dir string) error {
	if err := makeDir(dir, 0o700); err != nil {
		return err
	}
	return removeUnused(dir)
}

// removeUnused removes the locks that dead workers left in dir.
func removeUnused(dir string) error {
	entries, err := os.ReadDir(dir)
	if err != nil {
		return err
	}
	for _, e := range entries {
		if _, err := strconv.Atoi(e.Name()); err != nil {
			continue // not a lock
		}
		if err := removeLock(filepath.Join(dir, e.Name())); err != nil {
			return err
		}
	}
	return nil
}

// mapped checks that the worker's own user namespace has all ids of u: the worker can map no
// others.
func (u UIDs) mapped(file string) error {
	b, err := os.ReadFile(file)
	if err != nil {
		return err
	}
	for line := range strings.Lines(string(b)) {
		var inside, outside, count int
		if n, err := fmt.Sscan(line, &inside, &outside, &count); err != nil || n != 3 {
			return fmt.Errorf("unreadable line %q in %s", line, file)
		}
		if inside <= u.First && u.First+u.Count <= inside+count {
			return nil
		}
	}
	return fmt.Errorf("uid range %d+%d is not in %s: the worker's user namespace has no such ids, give a range "+
		"that it has", u.First, u.Count, file)
}

// acquire returns an unused set.
func (p *uidPool) acquire() (*uidSet, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if len(p.free) > 0 {
		set := p.free[0]
		p.free = p.free[1:]
		return set, nil
	}
	sets := p.Count / p.size
	if sets == 0 {
		return nil, fmt.Errorf("a writable root takes %d uids beyond the first %d, which the uid range of this worker does "+
			"not have: give it a range of at least %d", p.size, PairUIDs, PairUIDs+p.size)
	}
	for range sets {
		i := p.next
		p.next = (p.next + 1) % sets
		set, err := p.lock(p.First + p.size*i)
		if set != nil || err != nil {
			return set, err
		}
	}
	return nil, fmt.Errorf("all %d sets of %d uids from %d are in use: give the workers of this host a larger uid range",
		sets, p.size, p.First)
}

// lock locks the set that starts at first. It returns nil if another process holds the set.
func (p *uidPool) lock(first int) (*uidSet, error) {
	f, err := tryLock(filepath.Join(p.dir, strconv.Itoa(first)))
	if f == nil || err != nil {
		return nil, err
	}
	return &uidSet{first, p.size, f}, nil
}

// tryLock locks the file at path. It returns nil if another process holds the lock. The holder may
// remove the file after others have opened it, and their lock then excludes no one. So tryLock
// starts over if the locked file is no longer at path.
func tryLock(path string) (*os.File, error) {
	for {
		// A lock belongs to an open file. Opening the file again, in this or another worker, therefore
		// conflicts with a lock that is held.
		f, err := flock(path, unix.LOCK_EX|unix.LOCK_NB)
		if errors.Is(err, unix.EWOULDBLOCK) {
			return nil, nil
		}
		if err != nil {
			return nil, err
		}
		same, err := isAt(f, path)
		if same {
			return f, nil
		}
		if err := errors.Join(err, f.Close()); err != nil {
			return nil, err
		}
	}
}

// isAt reports whether f is the file at path.
func isAt(f *os.File, path string) (bool, error) {
	opened, err := f.Stat()
	if err != nil {
		return false, err
	}
	current, err := os.Stat(path)
	if errors.Is(err, fs.ErrNotExist) {
		return false, nil
	}
	return err == nil && os.SameFile(opened, current), err
}

// removeLock removes the file at path unless a process holds its lock.
func removeLock(path string) error {
	f, err := tryLock(path)
	if f == nil || err != nil {
		return err
	}
	return errors.Join(os.Remove(path), f.Close())
}

// release returns a set to the pool. No process of the jail that used it may be alive.
func (p *uidPool) release(set *uidSet) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.free = append(p.free, set)
}

// discard unlocks a set that this process does not reuse. Dying processes of its jail may still
// hold the lock, and the file stays for others to remove.
func (p *uidPool) discard(set *uidSet) error {
	return errors.Join(set.lock.Close(), removeLock(set.lock.Name()))
}

// close unlocks all sets that are not in use.
func (p *uidPool) close() error {
	p.mu.Lock()
	defer p.mu.Unlock()
	var errs []error
	for _, set := range p.free {
		errs = append(errs, p.discard(set))
	}
	p.free = nil
	return errors.Join(errs...)
}
