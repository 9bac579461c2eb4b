package nsjail

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"sync"

	"golang.org/x/sys/unix"
)

// UIDs is a range of the host's uids (and gids of the same numbers) that nothing
// else on the host uses. A jail takes two.
type UIDs struct {
	First int // not 0
	Count int // at least 2
}

// DefaultUIDs lie above every range that distributions and systemd hand out, and
// are enough for 4,096 jails at a time on one host.
var DefaultUIDs = UIDs{First: 1_900_000_000, Count: 8192} // read only

// uidPool hands out pairs of uids, each locked in a directory that all workers
// of the host share.
type uidPool struct {
	UIDs
	dir string

	mu   sync.Mutex
	free []*uidPair // locked by this process, oldest first
	next int        // first pair this process has not tried yet
}

// uidPair is two uids that are ours for as long as lock, or a duplicate of it in
// an init, is open.
type uidPair struct {
	first int
	lock  *os.File
}

func newUIDPool(u UIDs, dir string) (*uidPool, error) {
	if u.First <= 0 || u.Count < 2 || u.First+u.Count > 1<<31-2 {
		return nil, fmt.Errorf("uid range %d+%d is not usable: give a range of at least 2 unprivileged uids", u.First, u.Count)
	}
	if err := makeDir(dir, 0o700); err != nil {
		return nil, err
	}
	return &uidPool{UIDs: u, dir: dir}, nil
}

// take returns a pair nobody else has.
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

// lock returns nil if another holds the pair.
func (p *uidPool) lock(first int) (*uidPair, error) {
	// A lock belongs to an open file, so opening it again, here or in another
	// worker, conflicts with one that is held.
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

// put gives a pair back. Nothing of the jail that had it may be alive.
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
