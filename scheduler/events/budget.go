package events

import (
	"context"
	"math"
	"sync"
	"time"
)

const (
	// minOutput is how many bytes of each output in the result, and of the last events, an
	// execution keeps without a budget.
	minOutput = 64 << 10
	// minExcess replaces maxKept without a budget. It is larger than minOutput because each trim of
	// the excess searches the stream.
	minExcess = 1 << 20
	// A reservation is at least minReserve bytes and doubles from one to the next up to maxReserve.
	minReserve = 128 << 10
	maxReserve = 4 << 20
	// reserveTimeout is how long a program waits for a reservation while no dispatcher answers.
	reserveTimeout = 5 * time.Second
)

// Budget limits the bytes of output that an organisation stores.
type Budget interface {
	// ReserveOutput reserves want bytes, or fewer but at least need. It returns the number of bytes
	// reserved: 0 if need bytes are not left, [math.MaxInt64] without a limit.
	ReserveOutput(ctx context.Context, org string, need, want int64) (int64, error)
	// SettleOutput adds n, which may be negative, to the organisation's use.
	SettleOutput(org string, n int64) error
}

// reservation is one attempt's reserved part of its organisation's budget. It is safe for
// concurrent use.
type reservation struct {
	mu        sync.Mutex
	reserved  int64 // bytes
	used      int64 // bytes of those
	refused   bool
	unlimited bool
}

// consume uses n bytes, and reserves more if needed. It reports whether the budget suffices. After
// a rejection it reserves no more. If no dispatcher answers, the attempt is not limited: the
// organisation is not at fault, and its other limits remain.
func (r *reservation) consume(n int64, reserve func(need, want int64) (int64, error)) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.unlimited || r.refused {
		return r.unlimited
	}
	if need := r.used + n - r.reserved; need > 0 {
		more, err := reserve(need, max(need, min(max(r.reserved, minReserve), maxReserve)))
		if r.unlimited = err != nil || more == math.MaxInt64; r.unlimited {
			return true
		}
		if r.refused = more < need; r.refused {
			return false
		}
		r.reserved += more
	}
	r.used += n
	return true
}

// consumeBudget uses n bytes of the budget. If too few are left, it shortens the kept output and
// returns false.
func (w *Writer) consumeBudget(n int64) bool {
	if n <= 0 || w.Budget == nil || w.reservation.consume(n, w.reserve) {
		return true
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	w.overBudget, w.maxKept = true, min(w.maxKept, minExcess)
	for s := range w.limits {
		w.limits[s] = min(w.limits[s], max(w.inResult[s], minOutput))
	}
	return false
}

// settle corrects the budget by bytes stored without a reservation, or reserved and unused.
func (w *Writer) settle() {
	r := &w.reservation
	if w.Budget == nil || r.unlimited || w.outputs == 0 {
		return
	}
	stored := w.held + int64(w.kept)
	if w.overBudget {
		stored = w.tail
	}
	for _, n := range w.inResult {
		stored += n
	}
	_ = w.Budget.SettleOutput(w.org, stored-r.reserved) // a lost one is forgotten within the hour
}
