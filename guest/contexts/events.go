package contexts

import (
	"encoding/json"
	"slices"
	"sync"
	"time"

	"golang.org/x/sys/unix"
)

// What is kept of the events of runs, in bytes. Large events lie outside of Go's heap.
const (
	maxRunEvents = 6 << 20
	maxAllEvents = 12 << 20
	eventCost    = 64 // of each event in addition to its line
	largeEvent   = 16 << 10
	// stallAfter is how long the output of a run waits for a reader that has stopped reading.
	stallAfter = time.Minute
)

// memory is what all runs of a sandbox have for their events. Its lock guards these, too.
type memory struct {
	mu   sync.Mutex
	used int
	runs []*events // in the order of their start
}

// reserve takes n bytes for something else than an event.
func (m *memory) reserve(n int) bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.reclaim(n, nil)
	if m.used+n > maxAllEvents {
		return false
	}
	m.used += n
	return true
}

func (m *memory) release(n int) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.used -= n
}

// reclaim drops events that nobody reads until n bytes are free: first of runs that have ended, the oldest first.
func (m *memory) reclaim(n int, but *events) {
	for _, ended := range []bool{true, false} {
		for _, e := range m.runs {
			over := m.used + n - maxAllEvents
			if over <= 0 {
				return
			}
			if e != but && e.ended == ended && len(e.readers) == 0 {
				e.dropTo(max(e.bytes-over, 0))
			}
		}
	}
}

// event is an event of a run, as the line that clients read.
type event struct {
	line   []byte
	mapped bool // line is not in Go's heap
}

func (e *event) cost() int { return len(e.line) + eventCost }

// events are the events of a run.
type events struct {
	memory *memory

	// The lock of memory guards what follows.
	list    []event
	first   int64 // number of the oldest event that is kept, from 1
	bytes   int
	ended   bool
	readers map[*reader]struct{}
	changed chan struct{} // closed when anything above changes
}

// reader reads the events of a run.
type reader struct {
	of      *events
	next    int64 // number of the event to read next
	stalled bool  // the writer no longer waits for it
}

func (m *memory) newEvents() *events {
	e := &events{memory: m, first: 1, readers: map[*reader]struct{}{}, changed: make(chan struct{})}
	m.mu.Lock()
	defer m.mu.Unlock()
	m.runs = append(m.runs, e)
	return e
}

// forget drops all events.
func (e *events) forget() {
	e.memory.mu.Lock()
	defer e.memory.mu.Unlock()
	e.dropTo(0)
	if i := slices.Index(e.memory.runs, e); i >= 0 {
		e.memory.runs = slices.Delete(e.memory.runs, i, i+1)
	}
}

// dropTo drops the oldest events until n bytes are left at most.
func (e *events) dropTo(n int) {
	for e.bytes > n {
		e.dropOldest()
	}
}

// dropOldest drops the oldest event.
func (e *events) dropOldest() {
	oldest := &e.list[0]
	e.bytes -= oldest.cost()
	e.memory.used -= oldest.cost()
	if oldest.mapped {
		_ = unix.Munmap(oldest.line)
	}
	e.list = e.list[1:]
	e.first++
}

// add appends an event. While there is no room, it waits for readers that are behind, but not for
// longer than stallAfter without any progress; then the oldest events are dropped. fill returns the
// event's line for its number.
func (e *events) add(last bool, fill func(seq int64) any) {
	e.memory.mu.Lock()
	defer e.memory.mu.Unlock()
	if e.ended {
		return
	}
	seq := e.first + int64(len(e.list))
	line, err := json.Marshal(fill(seq))
	if err != nil {
		line, _ = json.Marshal(base{Type: "gap", Seq: seq}) // it was no JSON
	}
	added := hold(append(line, '\n'))
	e.makeRoom(added.cost())
	e.list = append(e.list, added)
	e.bytes += added.cost()
	e.memory.used += added.cost()
	e.ended = last
	e.announce()
}

// makeRoom makes room for an event of n bytes.
func (e *events) makeRoom(n int) {
	for {
		if e.memory.used+n > maxAllEvents {
			e.memory.reclaim(n, e)
		}
		over := max(e.bytes+n-maxRunEvents, e.memory.used+n-maxAllEvents)
		if over <= 0 || e.bytes == 0 {
			return
		}
		// A reader may wait at the event after the oldest, so that only one is dropped at a time.
		if !e.awaitReaders() {
			e.dropOldest()
		}
	}
}

// hold returns an event with a line.
func hold(line []byte) event {
	if len(line) > largeEvent {
		const protection, flags = unix.PROT_READ | unix.PROT_WRITE, unix.MAP_ANON | unix.MAP_PRIVATE
		if mapped, err := unix.Mmap(-1, 0, len(line), protection, flags); err == nil {
			copy(mapped, line)
			return event{mapped, true}
		}
	}
	return event{line, false}
}

func (e *events) announce() {
	close(e.changed)
	e.changed = make(chan struct{})
}

// awaitReaders waits, without the lock, until a reader of the oldest event reads or leaves. It returns
// false if there is none to wait for.
func (e *events) awaitReaders() bool {
	behind := func(r *reader) bool { return !r.stalled && r.next <= e.first }
	waits := false
	for r := range e.readers {
		waits = waits || behind(r)
	}
	if !waits {
		return false
	}
	changed := e.changed
	e.memory.mu.Unlock()
	timer := time.NewTimer(stallAfter)
	defer timer.Stop()
	late := false
	select {
	case <-changed:
	case <-timer.C:
		late = true
	}
	e.memory.mu.Lock()
	for r := range e.readers {
		r.stalled = r.stalled || late && behind(r)
	}
	return true
}

// read returns a reader of the events with numbers above after.
func (e *events) read(after int64) *reader {
	e.memory.mu.Lock()
	defer e.memory.mu.Unlock()
	r := &reader{of: e, next: after + 1}
	e.readers[r] = struct{}{}
	return r
}

// close ends the reading.
func (r *reader) close() {
	r.of.memory.mu.Lock()
	defer r.of.memory.mu.Unlock()
	delete(r.of.readers, r)
	r.of.announce()
}

// gap is an event of a client that has missed some.
type gap struct {
	base
	First int64 `json:"first"` // numbers of events
	Last  int64 `json:"last"`
}

// line returns the line of the next event, or nil if there is none yet. ended reports that none will
// follow. changed is closed when there may be another.
func (r *reader) line() (line []byte, ended bool, changed <-chan struct{}) {
	e := r.of
	e.memory.mu.Lock()
	defer e.memory.mu.Unlock()
	if r.next < e.first {
		missed := gap{base{Type: "gap", Seq: e.first - 1}, r.next, e.first - 1}
		r.next, r.stalled = e.first, false
		e.announce()
		line, _ = json.Marshal(missed)
		return append(line, '\n'), false, nil
	}
	at := r.next - e.first
	if at >= int64(len(e.list)) {
		return nil, e.ended, e.changed
	}
	r.next++
	r.stalled = false
	line = slices.Clone(e.list[at].line) // it may be dropped while it is sent
	e.announce()
	return line, false, nil
}
