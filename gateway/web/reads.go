package web

import (
	"context"

	"github.com/bullpen-run/bullpen/proto"
)

const (
	// maxReads is how many messages with their bodies an organisation may read from the store at a
	// time, per process. All organisations share a connection to the store, where everything else
	// queues behind pending reads.
	maxReads = 4
	// smallRead is the size in bytes up to which requestCost covers a read.
	smallRead = 64 << 10
)

// requestReads implements [proto.ReadLimit] for a request.
type requestReads struct {
	c *Core
	i *Info
}

// BeginRead implements [proto.ReadLimit].
func (r requestReads) BeginRead(ctx context.Context) (end func(), err error) {
	return r.c.reads.Acquire(ctx, r.i.Key.Org, maxReads)
}

// ReserveRead implements [proto.ReadLimit].
func (r requestReads) ReserveRead(n int) error {
	if n <= smallRead {
		return nil
	}
	if !r.c.budget.reserve(r.i.Key.Org, int64(n), r.c.Memory) {
		return ErrOverloaded
	}
	r.i.read.Add(int64(n))
	return nil
}

// LimitReads returns ctx with the request's limits on store reads. release must be called when the
// request no longer holds the data, and may be called earlier.
func (c *Core) LimitReads(ctx context.Context, i *Info) (limited context.Context, release func()) {
	return proto.WithReadLimit(ctx, requestReads{c, i}), func() { c.ReleaseReads(i) }
}

// ReleaseReads releases the memory of a request's store reads.
func (c *Core) ReleaseReads(i *Info) {
	if n := i.read.Swap(0); n > 0 {
		c.budget.release(i.Key.Org, n)
	}
}
