package usage

import "time"

// Forget drops months that are over from memory.
func (u *Usage) Forget(now time.Time) { u.forget(now) }

// Held returns the number of months of organisations in memory.
func (u *Usage) Held() int { return len(u.months.All()) }
