package thread

import "slices"

// lru is a cache that evicts the least recently used values while their total cost exceeds limit.
type lru[V any] struct {
	limit   int64
	cost    int64
	entries []lruEntry[V] // the most recently used is the last
}

type lruEntry[V any] struct {
	key   string
	value V
	cost  int64
}

func (c *lru[V]) index(key string) int {
	return slices.IndexFunc(c.entries, func(e lruEntry[V]) bool { return e.key == key })
}

func (c *lru[V]) get(key string) (v V, ok bool) {
	i := c.index(key)
	if i < 0 {
		return v, false
	}
	e := c.entries[i]
	c.entries = append(slices.Delete(c.entries, i, i+1), e)
	return e.value, true
}

func (c *lru[V]) put(key string, v V, cost int64) {
	if cost > c.limit || c.index(key) >= 0 {
		return
	}
	c.entries = append(c.entries, lruEntry[V]{key, v, cost})
	for c.cost += cost; c.cost > c.limit; c.entries = slices.Delete(c.entries, 0, 1) {
		c.cost -= c.entries[0].cost
	}
}
