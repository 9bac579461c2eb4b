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

// The faults. Requests are those of blob stores: put, get, stat, delete, list.
const (
	None      Fault = iota
	Slow            // its first bytes come one by one
	Broken          // 500
	Throttled       // 503 SlowDown
	Silent          // no answer
	Cut             // half of what is sent or answered, and then the end of the connection
	Reset           // the connection is reset before an answer
	Wrong           // another byte in what is sent or answered
	Lost            // it is done, but the answer is lost
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

// maxTold is how many requests that met a fault can wait on [Switch.Hit].
const maxTold = 1000

// Switch says which of the coming requests go wrong, and how. Its zero value lets all go well.
type Switch struct {
	mu    sync.Mutex
	kind  Fault
	skip  int
	left  int
	only  string
	told  chan string
	count int
	seen  []*http.Request
	rules []*rule
	watch func(r *http.Request, answered bool)
}

// rule is a fault of some requests.
type rule struct {
	kind  Fault
	left  int
	match func(r *http.Request) bool
	hits  int
}

// Set lets the next requests go wrong, that many times, or all for less than 0; only those of an operation (put, get, stat, delete, list)
// unless that is empty. skip of them go well before. It begins counting anew.
func (s *Switch) Set(kind Fault, times int, only string, skip int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.kind, s.left, s.only, s.skip, s.count = kind, times, only, skip, 0
	s.told = make(chan string, maxTold)
}

// Clear lets all requests go well again. What was counted stays.
func (s *Switch) Clear() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.left = 0
}

// Take gives the fault of the next request.
func (s *Switch) Take(op string) Fault {
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
	s.count++
	select {
	case s.told <- op:
	default: // nobody wants so many
	}
	return s.kind
}

// Hits tells how many requests met the fault since it was set.
func (s *Switch) Hits() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.count
}

// Hit is told of each request that meets the fault that was set last, as it does so.
func (s *Switch) Hit() <-chan string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.told
}

// Seen gives all requests that have come over HTTP, without their bodies.
func (s *Switch) Seen() []*http.Request {
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.Clone(s.seen)
}

// Spoil lets the next requests over HTTP go wrong that match, that many times, or all for less than 0. It stands beside what was set, and
// before it. heal ends it, and tells how many requests met the fault.
func (s *Switch) Spoil(kind Fault, times int, match func(r *http.Request) bool) (heal func() (hits int)) {
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

// Watch has f called as each request over HTTP arrives, and again when it was answered; nil ends that. What happens to the request waits for f.
func (s *Switch) Watch(f func(r *http.Request, answered bool)) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.watch = f
}

func (s *Switch) tell(r *http.Request, answered bool) {
	s.mu.Lock()
	f := s.watch
	s.mu.Unlock()
	if f != nil {
		f(r, answered)
	}
}

// see notes a request, and gives its fault.
func (s *Switch) see(r *http.Request) Fault {
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
	return s.Take(Operation(r))
}

// slowBytes is how many bytes of something slow come one by one.
const slowBytes = 100

// Spoilt is a stream of Size bytes with a fault: [Slow], [Cut] or [Wrong]. One that is cut ends early.
type Spoilt struct {
	io.ReadCloser
	Kind Fault
	Size int64
	at   int64
}

func (s *Spoilt) Read(p []byte) (int, error) {
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
