package nsjail

import (
	"testing"
)

func TestUIDsAreNeverShared(t *testing.T) {
	dir := t.TempDir()
	u := UIDs{First: 5000, Count: 9}
	var pools [2]*uidPool
	for i := range pools {
		p, err := newUIDPool(u, dir)
		if err != nil {
			t.Fatal(err)
		}
		pools[i] = p
	}
	seen := map[int]*uidPair{}
	for i := range 4 {
		pair, err := pools[i%2].take()
		if err != nil {
			t.Fatal(err)
		}
		if seen[pair.first] != nil || pair.first < u.First || pair.first+1 >= u.First+u.Count {
			t.Fatalf("pair %d of %v", pair.first, seen)
		}
		seen[pair.first] = pair
	}
	for _, p := range pools {
		if pair, err := p.take(); err == nil {
			t.Fatalf("a fifth pair: %d", pair.first)
		}
	}
	pools[1].put(seen[5002])
	if _, err := pools[0].take(); err == nil {
		t.Error("took a pair that another worker keeps")
	}
	if err := pools[1].close(); err != nil {
		t.Fatal(err)
	}
	pair, err := pools[0].take()
	if err != nil || pair.first != 5002 {
		t.Fatalf("got %v, %v", pair, err)
	}
	for _, p := range seen {
		_ = p.lock.Close()
	}
	_ = pair.lock.Close()
	for _, u := range []UIDs{{First: 0, Count: 10}, {First: 10, Count: 1}, {First: 1<<31 - 4, Count: 10}} {
		if _, err := newUIDPool(u, dir); err == nil {
			t.Errorf("range %+v accepted", u)
		}
	}
}
