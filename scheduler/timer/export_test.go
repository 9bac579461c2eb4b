package timer

import "github.com/alicebob/miniredis/v2"

// ShortLife replaces the embedded Redis after n timers. Call it before Run.
func (t *Timers) ShortLife(n int64) { t.embedded.life = n }

// Embedded returns the current embedded Redis.
func (t *Timers) Embedded() *miniredis.Miniredis {
	t.embedded.mu.Lock()
	defer t.embedded.mu.Unlock()
	return t.embedded.redis
}

// Remembered returns the number of timers that this process expects to fire.
func (t *Timers) Remembered() int {
	t.mu.Lock()
	defer t.mu.Unlock()
	return len(t.set)
}
