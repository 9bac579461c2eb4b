package proto

import "context"

// ReadLimit limits a request's reads from the store: how many run at the same time, and how much
// memory they keep. Otherwise readers of one organisation's large results would delay every other
// tenant's messages.
type ReadLimit interface {
	// BeginRead blocks until the request may read. end must be called after the read.
	BeginRead(ctx context.Context) (end func(), err error)
	// ReserveRead reserves memory for n bytes until the request ends.
	ReserveRead(n int) error
}

type readLimitKey struct{}

// WithReadLimit returns a context whose store reads l limits.
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
