package events

import "context"

// Evict does at once what happens a while after an execution has ended.
func (w *Writer) Evict(ctx context.Context) { w.eviction()(ctx) }
