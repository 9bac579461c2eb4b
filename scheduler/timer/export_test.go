package timer

import "github.com/alicebob/miniredis/v2"

// ShortLife makes the embedded Redis be replaced after n timers. Run must not have begun.
func (t *Timers) ShortLife(n int64) { t.embedded.life = n }

// Embedded is the embedded Redis as it is now.
func (t *Timers) Embedded() *miniredis.Miniredis {
	t.embedded.mu.Lock()
	defer t.embedded.mu.Unlock()
	return t.embedded.redis
}

// Remembered is how many timers this process believes are to come.
func (t *Timers) Remembered() int {
	t.mu.Lock()
	defer t.mu.Unlock()
	return len(t.set)
}
