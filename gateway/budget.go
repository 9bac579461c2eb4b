package gateway

import (
	"net/http"
	"sync"
)

const (
	// requestCost is the memory of an open request in bytes: connection, goroutines, buffers and
	// state. An idle stream was measured at 50 to 60 KiB, garbage included.
	requestCost = 64 << 10
	// bodyCost is the number of copies of a body until its job is stored: read, decoded, encoded
	// and sent.
	bodyCost = 4
	// An upload is buffered whole if it is small, and otherwise in three parts of 8 MiB, or of more
	// if there would be more than 10,000 parts: see packages blob and s3.
	uploadParts    = 3
	uploadPart     = 8 << 20
	maxUploadParts = 10_000
	// orgShare divides the budget: one organisation gets at most half, so that it cannot keep the
	// others out.
	orgShare = 2
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
	if b.used+n > limit || b.byOrg[org]+n > limit/orgShare {
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

// uploadMemory returns the memory of an upload of size bytes. A growing buffer may be twice as
// large as its content.
func uploadMemory(size int64) int64 {
	return requestCost + min(2*size, uploadParts*max(uploadPart, size/maxUploadParts))
}

// limitMemory reserves the memory of a request while it is open, and refuses the request if there
// is none.
func (s *Server) limitMemory(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		i := infoOf(r.Context())
		if !s.reserve(i, requestCost) {
			s.writeError(w, r, errOverloaded)
			return
		}
		defer s.shrink(i, 0)
		next.ServeHTTP(w, r)
	})
}

// reserve reserves n more bytes for a request. It reports whether they fit.
func (s *Server) reserve(i *info, n int64) bool {
	if !s.budget.reserve(i.key.Org, n, s.Memory) {
		return false
	}
	i.reserved += n
	return true
}

// shrink releases the reserved bytes of a request beyond n.
func (s *Server) shrink(i *info, n int64) {
	if i.reserved > n {
		s.budget.release(i.key.Org, i.reserved-n)
		i.reserved = n
	}
}
