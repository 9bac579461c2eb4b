package nsjail

import (
	"errors"
	"fmt"
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
		return nil, fmt.Errorf("uid range %d+%d is not usable: give a range of at least 2 unprivileged uids", u.First, u.Count)
	}
	for _, file := range []string{"/proc/self/uid_map", "/proc/self/gid_map"} {
		if err := u.mapped(file); err != nil {
			return nil, err
		}
	}
	if err := makeDir(dir, 0o700); err != nil {
		return nil, err
	}
	return &uidPool{UIDs: u, dir: dir}, nil
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
	return fmt.Errorf("uid range %d+%d is not in %s: the worker's user namespace has no such ids, give a range that it has", u.First, u.Count, file)
}

// take returns an unused pair.
func (p *uidPool) take() (*uidPair, error) {
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
	return nil, fmt.Errorf("all %d pairs of uids from %d are taken: give the workers of this host a larger range", pairs, p.First)
}

// lock locks the pair that starts at first. It returns nil if another process holds the pair.
func (p *uidPool) lock(first int) (*uidPair, error) {
	// A lock belongs to an open file. Opening the file again, in this or another worker, therefore
	// conflicts with a lock that is held.
	f, err := os.OpenFile(filepath.Join(p.dir, strconv.Itoa(first)), os.O_RDONLY|os.O_CREATE, 0o600)
	if err != nil {
		return nil, fmt.Errorf("lock uid %d: %w", first, err)
	}
	err = unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB)
	if err == nil {
		return &uidPair{first: first, lock: f}, nil
	}
	_ = f.Close()
	if errors.Is(err, unix.EWOULDBLOCK) {
		return nil, nil
	}
	return nil, fmt.Errorf("lock uid %d: %w", first, err)
}

// put returns a pair to the pool. No process of the jail that used it may be alive.
func (p *uidPool) put(pair *uidPair) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.free = append(p.free, pair)
}

// close unlocks all pairs that are not in use.
func (p *uidPool) close() error {
	p.mu.Lock()
	defer p.mu.Unlock()
	var errs []error
	for _, pair := range p.free {
		errs = append(errs, pair.lock.Close())
	}
	p.free = nil
	return errors.Join(errs...)
}
