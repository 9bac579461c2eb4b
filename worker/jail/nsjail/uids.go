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

	"golang.org/x/sys/unix"
)

// UIDs is a range of the host's uids (and gids of the same numbers) that nothing else on the host
// uses. A jail takes two.
type UIDs struct {
	First int // not 0
	Count int // at least 2
}

// DefaultUIDs is above every range that distributions and systemd use. It is enough for 4,096 jails
// at a time on one host.
var DefaultUIDs = UIDs{First: 1_900_000_000, Count: 8192} // read only

// uidPool allocates pairs of uids. Each pair is locked in a directory that all workers of the host
// share.
type uidPool struct {
	UIDs
	dir string

	mu   sync.Mutex
	free []*uidPair // locked by this process, oldest first
	next int        // first pair this process has not tried yet
}

// uidPair is two uids. They are reserved as long as lock, or a duplicate of it in an init, is open.
type uidPair struct {
	first int
	lock  *os.File
}

func newUIDPool(u UIDs, dir string) (*uidPool, error) {
	if u.First <= 0 || u.Count < 2 || u.First+u.Count > 1<<31-2 {
		return nil, fmt.Errorf("uid range %d+%d is not usable: give a range of at least 2 unprivileged uids",
			u.First, u.Count)
	}
	for _, file := range []string{"/proc/self/uid_map", "/proc/self/gid_map"} {
		if err := u.mapped(file); err != nil {
			return nil, err
		}
	}
	if err := makeDir(dir, 0o700); err != nil {
		return nil, err
	}
	if err := removeUnused(dir); err != nil {
		return nil, err
	}
	return &uidPool{UIDs: u, dir: dir}, nil
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

// acquire returns an unused pair.
func (p *uidPool) acquire() (*uidPair, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if len(p.free) > 0 {
		pair := p.free[0]
		p.free = p.free[1:]
		return pair, nil
	}
	pairs := p.Count / 2
	for range pairs {
		i := p.next
		p.next = (p.next + 1) % pairs
		pair, err := p.lock(p.First + 2*i)
		if pair != nil || err != nil {
			return pair, err
		}
	}
	return nil, fmt.Errorf("all %d pairs of uids from %d are in use: give the workers of this host a larger range",
		pairs, p.First)
}

// lock locks the pair that starts at first. It returns nil if another process holds the pair.
func (p *uidPool) lock(first int) (*uidPair, error) {
	f, err := tryLock(filepath.Join(p.dir, strconv.Itoa(first)))
	if f == nil || err != nil {
		return nil, err
	}
	return &uidPair{first: first, lock: f}, nil
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

// release returns a pair to the pool. No process of the jail that used it may be alive.
func (p *uidPool) release(pair *uidPair) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.free = append(p.free, pair)
}

// discard unlocks a pair that this process does not reuse. Dying processes of its jail may still
// hold the lock, and the file stays for others to remove.
func (p *uidPool) discard(pair *uidPair) error {
	return errors.Join(pair.lock.Close(), removeLock(pair.lock.Name()))
}

// close unlocks all pairs that are not in use.
func (p *uidPool) close() error {
	p.mu.Lock()
	defer p.mu.Unlock()
	var errs []error
	for _, pair := range p.free {
		errs = append(errs, p.discard(pair))
	}
	p.free = nil
	return errors.Join(errs...)
}
