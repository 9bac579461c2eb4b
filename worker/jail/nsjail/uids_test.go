package nsjail

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/bullpen-run/bullpen/worker/jail"
)

func TestUIDsAreNeverShared(t *testing.T) {
	dir := t.TempDir()
	u := UIDs{First: 5000, Count: 9}
	var pools [2]*uidPool
	for i := range pools {
		p, err := openUIDPool(u, dir)
		if err != nil {
			t.Fatal(err)
		}
		pools[i] = p
	}
	seen := map[int]*uidSet{}
	for i := range 4 {
		pair, err := pools[i%2].acquire()
		if err != nil {
			t.Fatal(err)
		}
		if seen[pair.first] != nil || pair.first < u.First || pair.first+1 >= u.First+u.Count {
			t.Fatalf("pair %d of %v", pair.first, seen)
		}
		seen[pair.first] = pair
	}
	for _, p := range pools {
		if pair, err := p.acquire(); err == nil {
			t.Fatalf("a fifth pair: %d", pair.first)
		}
	}
	pools[1].release(seen[5002])
	if _, err := pools[0].acquire(); err == nil {
		t.Error("acquired a pair that another worker holds")
	}
	if err := pools[1].close(); err != nil {
		t.Fatal(err)
	}
	pair, err := pools[0].acquire()
	if err != nil || pair.first != 5002 {
		t.Fatalf("got %v, %v", pair, err)
	}
	for _, p := range seen {
		_ = p.lock.Close()
	}
	_ = pair.lock.Close()
	for _, u := range []UIDs{{First: 0, Count: 10}, {First: 10, Count: 1}, {First: 1<<31 - 4, Count: 10}} {
		if _, err := openUIDPool(u, dir); err == nil {
			t.Errorf("range %+v accepted", u)
		}
	}
}

// A range that has no uids for a writable root says what is missing.
func TestRangeWithoutRoots(t *testing.T) {
	for count, want := range map[int]string{
		2: "at least 10240", PairUIDs: "at least 10240", PairUIDs + RootUIDs - 1: "at least 10240", PairUIDs + RootUIDs: "",
	} {
		p := &uidPool{UIDs: UIDs{First: 5000, Count: count}.rest(), size: RootUIDs, dir: t.TempDir()}
		set, err := p.acquire()
		switch {
		case want == "" && err == nil:
			p.release(set)
			if err := p.close(); err != nil {
				t.Error(err)
			}
		case want == "" || err == nil || !strings.Contains(err.Error(), want):
			t.Errorf("%d uids: %v, want %q", count, err, want)
		}
	}
}

// No two processes hold a pair while others create and remove the files of its locks.
func TestUIDLocksAreRemoved(t *testing.T) {
	dir := t.TempDir()
	if err := os.WriteFile(filepath.Join(dir, "7000"), nil, 0o600); err != nil { // of a dead worker
		t.Fatal(err)
	}
	u := UIDs{First: 5000, Count: 4}
	var holders [2]atomic.Int32
	var wg sync.WaitGroup
	for range 8 {
		wg.Go(func() {
			for range 200 {
				p, err := openUIDPool(u, dir)
				if err != nil {
					t.Error(err)
					return
				}
				pair, err := p.acquire()
				if err != nil {
					continue // all are in use
				}
				n := &holders[(pair.first-u.First)/2]
				if n.Add(1) != 1 {
					t.Error("two have the same pair")
				}
				n.Add(-1)
				p.release(pair)
				if err := p.close(); err != nil {
					t.Error(err)
				}
			}
		})
	}
	wg.Wait()
	if left, err := os.ReadDir(dir); err != nil || len(left) != 0 {
		t.Errorf("left: %v, %v", left, err)
	}
}

// A zygote, which takes many pairs, leaves the files of none.
func TestZygoteRemovesUIDLocks(t *testing.T) {
	m := openMaker(t, Config{UIDLocks: t.TempDir()})
	p := newZygote(t, m, testSpec())
	runIn(t, fork(t, p, testSpec()), program(t, "python", "print(1)")).want(t, jail.Exited, "1")
	closeZygote(t, p)
	m.jails.Wait()
	left, err := os.ReadDir(m.cfg.UIDLocks)
	if err != nil || len(left) != len(m.uids.free) {
		t.Errorf("%d files for %d pairs, %v", len(left), len(m.uids.free), err)
	}
}

// openUIDPool returns a pool of pairs.
func openUIDPool(u UIDs, dir string) (*uidPool, error) {
	return &uidPool{UIDs: u, size: 2, dir: dir}, errors.Join(u.check(), openUIDLocks(dir))
}
