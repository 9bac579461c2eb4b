package proto

import "context"

// ReadLimit bounds what a request reads from the store: how much at the same time, and how much it
// keeps in memory. Without it, the readers of one organisation's large results would delay
// everybody's messages.
type ReadLimit interface {
	// BeginRead blocks until the request may read. end must be called after the read.
	BeginRead(ctx context.Context) (end func(), err error)
	// ReserveRead reserves the memory of n bytes that are read, until the request ends.
	ReserveRead(n int) error
}

type readLimitKey struct{}

// WithReadLimit returns a context whose reads from the store l bounds.
func WithReadLimit(ctx context.Context, l ReadLimit) context.Context {
	return context.WithValue(ctx, readLimitKey{}, l)
}

// BeginRead is [ReadLimit.BeginRead] of the limit in ctx. Without a limit it never blocks.
func BeginRead(ctx context.Context) (end func(), err error) {
	if l, ok := ctx.Value(readLimitKey{}).(ReadLimit); ok {
		return l.BeginRead(ctx)
	}
	return func() {}, nil
}

// ReserveRead is [ReadLimit.ReserveRead] of the limit in ctx. Without a limit it reserves nothing.
func ReserveRead(ctx context.Context, n int) error {
	if l, ok := ctx.Value(readLimitKey{}).(ReadLimit); ok {
		return l.ReserveRead(n)
	}
	return nil
}
