package gateway

import (
	"net/http"
	"sync"
)

const (
	// requestCost is what an open request is taken to need, in bytes: connection, goroutines, buffers, what is known of it. A stream
	// that nothing happens on was measured with 50 to 60 KiB, garbage included.
	requestCost = 64 << 10
	// bodyCost is how often the bytes of a body are taken to be there until the job is stored: as it is read, decoded, encoded, and on
	// its way.
	bodyCost = 4
	// orgShare is the part of the budget that one organisation may have: none can keep the others out.
	orgShare = 2
)

// budget bounds the memory that requests take, in bytes. It is safe for concurrent use; the zero value has taken nothing.
type budget struct {
	mu   sync.Mutex
	used int64
	of   map[string]int64 // by organisation; none of them 0
}

// take takes n bytes of most for an organisation, and reports whether there is room for them.
func (b *budget) take(org string, n, most int64) bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.used+n > most || b.of[org]+n > most/orgShare {
		return false
	}
	if b.of == nil {
		b.of = make(map[string]int64)
	}
	b.used += n
	b.of[org] += n
	return true
}

// give gives back n bytes that were taken.
func (b *budget) give(org string, n int64) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.used -= n
	if b.of[org] -= n; b.of[org] == 0 {
		delete(b.of, org)
	}
}

// occupy counts a request while it is open, and refuses it where too many are.
func (s *Server) occupy(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		i := infoOf(r.Context())
		if !s.hold(i, requestCost) {
			s.writeError(w, r, errOverloaded)
			return
		}
		defer s.shrink(i, 0)
		next.ServeHTTP(w, r)
	})
}

// hold takes n bytes more for a request, and reports whether there is room for them.
func (s *Server) hold(i *info, n int64) bool {
	if !s.budget.take(i.key.Org, n, s.Memory) {
		return false
	}
	i.held += n
	return true
}

// shrink gives back what a request holds beyond n bytes.
func (s *Server) shrink(i *info, n int64) {
	if i.held > n {
		s.budget.give(i.key.Org, i.held-n)
		i.held = n
	}
}
