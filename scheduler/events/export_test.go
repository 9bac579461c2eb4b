package events

import "context"

// Evict evicts events at once instead of after evictAfter.
func (w *Writer) Evict(ctx context.Context) { w.eviction()(ctx) }
