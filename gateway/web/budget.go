package web

import (
	"net/http"
	"sync"

	"github.com/bullpen-run/bullpen/proto/api"
)

const (
	// RequestCost is the memory of an open request in bytes: connection, goroutines, buffers and
	// state. An idle stream was measured at 50 to 60 KiB, garbage included.
	RequestCost = 64 << 10
	// bodyCost is the number of copies of a body until its job is stored: read, decoded, encoded
	// and sent.
	bodyCost = 4
	// An upload is buffered whole if it is small. Otherwise it is buffered in three parts of 8 MiB,
	// or larger ones to stay within 10,000 parts: see packages blob and s3.
	uploadParts    = 3
	uploadPart     = 8 << 20
	maxUploadParts = 10_000
	// messageCost is how many more copies a model client's message takes than other bodies.
	// textCost is the number of copies of an answer's escaped text.
	messageCost, textCost = 4, 8
	// valueCost is the memory of a value in such a message, in bytes.
	valueCost = 1 << 10
	// OrgShare divides the budget: an organisation gets at most half, so that it cannot starve
	// others.
	OrgShare = 2
)

// budget bounds the memory of requests, in bytes. It is safe for concurrent use. The zero value is
// empty.
type budget struct {
	mu    sync.Mutex
	used  int64
	byOrg map[string]int64 // without zeros
}

// reserve reserves n bytes of limit for an organisation. It reports whether they fit.
func (b *budget) reserve(org string, n, limit int64) bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.used+n > limit || b.byOrg[org]+n > limit/OrgShare {
		return false
	}
	if b.byOrg == nil {
		b.byOrg = make(map[string]int64)
	}
	b.used += n
	b.byOrg[org] += n
	return true
}

// release releases n reserved bytes.
func (b *budget) release(org string, n int64) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.used -= n
	if b.byOrg[org] -= n; b.byOrg[org] == 0 {
		delete(b.byOrg, org)
	}
}

// UploadMemory returns the memory of an upload of size bytes. A growing buffer may be twice as
// large as its content.
func UploadMemory(size int64) int64 {
	return RequestCost + min(2*size, uploadParts*max(uploadPart, size/maxUploadParts))
}

// limitMemory reserves the memory of a request while it is open, and refuses the request if there
// is none.
func (c *Core) limitMemory(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		i := infoOf(r.Context())
		if !c.Reserve(i, RequestCost) {
			c.writeError(w, r, ErrOverloaded)
			return
		}
		defer c.Shrink(i, 0)
		ctx, release := c.LimitReads(r.Context(), i)
		defer release()
		next.ServeHTTP(w, r.WithContext(ctx))
	})
}

// ReserveFor reserves n bytes for an organisation apart from a request. It reports whether they fit.
func (c *Core) ReserveFor(org string, n int64) bool { return c.budget.reserve(org, n, c.Memory) }

// Release releases n bytes of [Core.reserveFor].
func (c *Core) Release(org string, n int64) { c.budget.release(org, n) }

// Reserve reserves n more bytes for a request. It reports whether they fit.
func (c *Core) Reserve(i *Info, n int64) bool {
	if !c.budget.reserve(i.Key.Org, n, c.Memory) {
		return false
	}
	i.reserved += n
	return true
}

// Shrink releases the reserved bytes of a request beyond n.
func (c *Core) Shrink(i *Info, n int64) {
	if i.reserved > n {
		c.budget.release(i.Key.Org, i.reserved-n)
		i.reserved = n
	}
}

// ReserveMessage reserves memory for a model client's message while it is decoded and handled.
func (c *Core) ReserveMessage(i *Info, message []byte) error {
	values, err := api.CountValues(message)
	if err != nil {
		return err
	}
	if !c.Reserve(i, int64(len(message))*messageCost+int64(values)*valueCost) {
		return ErrOverloaded
	}
	return nil
}

// ReserveText reserves memory for n bytes of text until the request ends. It reports whether they
// fit.
func (c *Core) ReserveText(i *Info, n int64) bool { return c.Reserve(i, n*textCost) }
