package engine

import "sync"

// Slots bounds what is done at the same time, in total and under each key, such as an organisation. There is
// never more under a key than there is room left for others. It is safe for concurrent use.
type Slots[K comparable] struct {
	Total int
	Each  int // under a key

	mu    sync.Mutex
	taken map[K]int
	all   int
}

// Acquire takes a slot under a key, if there is room. It reports whether it did.
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
