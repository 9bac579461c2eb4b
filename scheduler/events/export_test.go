package events

import (
	"context"
	"time"

	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/scheduler/store"
)

// Evict evicts events at once instead of after evictAfter. It reports whether that was possible.
func (w *Writer) Evict(ctx context.Context) bool { return w.eviction()(ctx) }

// NewWriterWithLimits returns a writer of a first attempt that retries a message only for timeout,
// and keeps kept bytes of excess.
func NewWriterWithLimits(
	ctx context.Context, st *store.Store, org string, id proto.TraceID, limit int64, timeout time.Duration, kept int,
) *Writer {
	w := &Writer{timeout: timeout, maxKept: kept}
	w.start(ctx, st, org, id, 1, 0, limit)
	return w
}
