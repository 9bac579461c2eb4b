package engine

import "sync"

// Slots limits concurrency, in total and per key, such as an organisation. A key never has more
// slots than it leaves free for others. It is safe for concurrent use.
type Slots[K comparable] struct {
	Total int
	Each  int // under a key

	mu    sync.Mutex
	taken map[K]int
	all   int
}

// Acquire takes a slot under a key, if one is free. It reports whether it did.
func (s *Slots[K]) Acquire(key K) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.taken[key] >= min(s.Each, s.Total-s.all) {
		return false
	}
	if s.taken == nil {
		s.taken = map[K]int{}
	}
	s.taken[key]++
	s.all++
	return true
}

// Release gives a slot back.
func (s *Slots[K]) Release(key K) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.taken[key]--; s.taken[key] == 0 {
		delete(s.taken, key)
	}
	s.all--
}
