package batches

import (
	"cmp"
	"slices"
	"time"

	"github.com/bullpen-run/bullpen/proto"
)

// At most baseWindow and two items per slot are in the queue, so that a batch of a higher priority
// need not wait for long.
const baseWindow = 64

// entry is what the queue knows of a batch.
type entry struct {
	batch *proto.Batch      // nil if it was removed, or is not known yet
	state *proto.BatchState // nil if there is none
}

// exists reports whether anything is stored of the batch.
func (e *entry) exists() bool { return e.batch != nil || e.state != nil }

// stateOf returns s if it is the state of b, otherwise a zero state. s may be nil.
func stateOf(b *proto.Batch, s *proto.BatchState) *proto.BatchState {
	if s != nil && s.Content == b.Content.Index.Key {
		return s
	}
	return new(proto.BatchState)
}

// due returns when a batch needs work.
func (r *Runner) due(e *entry) (at time.Time, ok bool) {
	b := e.batch
	if b == nil {
		return at, false
	}
	switch s := stateOf(b, e.state); {
	case b.Removed:
		return at, true
	case b.Finished(s):
		return s.EndedAt.Add(r.Retention), true
	case idle(b, s):
		return b.ExpiresAt, !b.ExpiresAt.IsZero()
	default:
		return at, true
	}
}

// idle reports whether a paused batch has nothing to do before it expires.
func idle(b *proto.Batch, s *proto.BatchState) bool {
	return b.Paused && !b.Cancelled && s.Stopped == "" && s.EndedAt.IsZero() && s.Counts.Queued+s.Counts.Running == 0
}

// urgent reports whether the batch is ending or being removed, which running batches do not delay.
func (e *entry) urgent() bool {
	return e.batch.Removed || e.batch.Expired(time.Now()) || e.batch.Finished(stateOf(e.batch, e.state))
}

// byPriority orders batches: the highest priority first, then the oldest.
func byPriority(x, y *proto.Batch) int {
	return cmp.Or(cmp.Compare(y.Priority, x.Priority), x.CreatedAt.Compare(y.CreatedAt), cmp.Compare(x.ID, y.ID))
}

// window returns how many batch items an organisation may have queued or running: part of its
// plan's allowance, so that other executions are not refused, and no more than keeps the slots
// busy.
func window(concurrent, queued, slots int) int {
	return max(1, min(concurrent-max(1, concurrent/4), queued/2, baseWindow+2*slots))
}

// demand is how many items a batch could have in the queue.
type demand struct{ priority, want int }

// divide divides left among demands in priority order: evenly among those of the highest priority
// until they are met, then those of the next.
func divide(left int, demands []demand) []int {
	shares := make([]int, len(demands))
	for begin := 0; begin < len(demands); {
		end := begin
		for end < len(demands) && demands[end].priority == demands[begin].priority {
			end++
		}
		// The smallest demands first: what they do not need is for the others.
		order := make([]int, 0, end-begin)
		for i := begin; i < end; i++ {
			order = append(order, i)
		}
		slices.SortStableFunc(order, func(x, y int) int { return cmp.Compare(demands[x].want, demands[y].want) })
		for n, i := range order {
			others := len(order) - n
			shares[i] = min(demands[i].want, (left+others-1)/others)
			left -= shares[i]
		}
		begin = end
	}
	return shares
}
