package storagetest

import (
	"fmt"
	"io"
	"net/http"
	"slices"
	"sync"
)

// Fault is what goes wrong with a request.
type Fault int

// Operations of blob stores: put, get, stat, delete, list.
const (
	None      Fault = iota
	Slow            // the first bytes arrive one by one
	Broken          // 500
	Throttled       // 503 SlowDown
	Silent          // no response
	Cut             // the connection ends after half of the request or the response
	Reset           // the connection is reset before a response
	Wrong           // a byte of the request or the response is changed
	Lost            // the request is carried out, but its response is lost
)

// Faults lists every fault.
func Faults() []Fault { return []Fault{Slow, Broken, Throttled, Silent, Cut, Reset, Wrong, Lost} }

// String names the fault.
func (f Fault) String() string {
	names := []string{"none", "slow", "500", "throttled", "silent", "cut", "reset", "wrong", "lost"}
	if f < 0 || int(f) >= len(names) {
		return fmt.Sprintf("Fault(%d)", int(f))
	}
	return names[f]
}

// maxHits is how many affected requests [Injector.Hit] buffers.
const maxHits = 1000

// Injector decides which requests fail, and how. The zero value injects no faults.
type Injector struct {
	mu       sync.Mutex
	kind     Fault
	skip     int
	left     int
	only     string
	hits     chan string
	hitCount int
	seen     []*http.Request
	rules    []*rule
	watch    func(r *http.Request, answered bool)
}

// rule is a fault of matching requests.
type rule struct {
	kind  Fault
	left  int
	match func(r *http.Request) bool
	hits  int
}

// Set makes the next requests fail after skip successful ones: times requests, or all if times is
// negative. If only is not empty, other operations are not affected. Set resets the counter of
// [Injector.Hits].
func (s *Injector) Set(kind Fault, times int, only string, skip int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.kind, s.left, s.only, s.skip, s.hitCount = kind, times, only, skip, 0
	s.hits = make(chan string, maxHits)
}

// Clear ends the fault. The counter stays.
func (s *Injector) Clear() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.left = 0
}

// Next returns the fault of the next request.
func (s *Injector) Next(op string) Fault {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.left == 0 || s.only != "" && s.only != op {
		return None
	}
	if s.skip > 0 {
		s.skip--
		return None
	}
	s.left--
	s.hitCount++
	select {
	case s.hits <- op:
	default: // the buffer is full
	}
	return s.kind
}

// Hits returns the number of affected requests since Set.
func (s *Injector) Hits() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.hitCount
}

// Hit returns a channel that receives the operation of each affected request since Set.
func (s *Injector) Hit() <-chan string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.hits
}

// Seen returns all HTTP requests so far, without their bodies.
func (s *Injector) Seen() []*http.Request {
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.Clone(s.seen)
}

// Inject makes the next matching HTTP requests fail: times requests, or all if times is negative.
// It takes precedence over Set. stop ends it and returns the number of affected requests.
func (s *Injector) Inject(kind Fault, times int, match func(r *http.Request) bool) (stop func() (hits int)) {
	added := &rule{kind: kind, left: times, match: match}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.rules = append(s.rules, added)
	return func() int {
		s.mu.Lock()
		defer s.mu.Unlock()
		s.rules = slices.DeleteFunc(s.rules, func(r *rule) bool { return r == added })
		return added.hits
	}
}

// Watch calls f when an HTTP request arrives and again when it was answered, and blocks the request
// meanwhile. A nil f ends that.
func (s *Injector) Watch(f func(r *http.Request, answered bool)) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.watch = f
}

func (s *Injector) notify(r *http.Request, answered bool) {
	s.mu.Lock()
	f := s.watch
	s.mu.Unlock()
	if f != nil {
		f(r, answered)
	}
}

// record records a request and returns its fault.
func (s *Injector) record(r *http.Request) Fault {
	s.mu.Lock()
	s.seen = append(s.seen, r)
	for _, rule := range s.rules {
		if rule.left != 0 && rule.match(r) {
			rule.left--
			rule.hits++
			s.mu.Unlock()
			return rule.kind
		}
	}
	s.mu.Unlock()
	return s.Next(Operation(r))
}

// slowBytes is how many bytes of a slow stream arrive one by one.
const slowBytes = 100

// FaultyReader is a stream of Size bytes with a fault: [Slow], [Cut] or [Wrong]. If cut, it ends
// early.
type FaultyReader struct {
	io.ReadCloser
	Kind Fault
	Size int64
	at   int64
}

func (s *FaultyReader) Read(p []byte) (int, error) {
	half := s.Size / 2
	if s.Kind == Cut {
		if s.at == half {
			return 0, io.EOF
		}
		p = p[:min(int64(len(p)), half-s.at)]
	}
	if s.Kind == Slow && s.at < slowBytes {
		p = p[:min(len(p), 1)]
	}
	n, err := s.ReadCloser.Read(p)
	if i := half - s.at; s.Kind == Wrong && i >= 0 && i < int64(n) {
		p[i] ^= 1
	}
	s.at += int64(n)
	return n, err
}
