package schedules

import (
	"container/heap"
	"strings"
	"sync"
	"time"

	"github.com/bullpen-run/bullpen/proto"
)

// index knows all schedules by organisation, and when each has something to do next. It is safe for
// concurrent use.
type index struct {
	mu    sync.Mutex
	orgs  map[string]map[string]*entry
	wakes wakeHeap
}

// entry is a schedule in the index.
type entry struct {
	definition *definition          // nil if it was removed, or is not known yet
	state      *proto.ScheduleState // nil if there is none
	wake       time.Time            // when there is something to do
	taken      bool                 // it is being handled, so it is not in the heap
	position   int                  // in the heap, or notInHeap
}

const notInHeap = -1

// wakeHeap implements [heap.Interface]. The next schedule is the first.
type wakeHeap []*entry

func (h wakeHeap) Len() int           { return len(h) }
func (h wakeHeap) Less(a, b int) bool { return h[a].wake.Before(h[b].wake) }

func (h wakeHeap) Swap(a, b int) {
	h[a], h[b] = h[b], h[a]
	h[a].position, h[b].position = a, b
}

// Push implements [heap.Interface].
func (h *wakeHeap) Push(x any) {
	e := x.(*entry)
	e.position = len(*h)
	*h = append(*h, e)
}

// Pop implements [heap.Interface].
func (h *wakeHeap) Pop() any {
	last := len(*h) - 1
	e := (*h)[last]
	(*h)[last] = nil
	*h, e.position = (*h)[:last], notInHeap
	return e
}

// setDefinition is called when a definition has changed; current is nil if it was removed.
func (x *index) setDefinition(key string, _, current *definition) {
	x.change(strings.TrimPrefix(key, definitionPrefix), func(e *entry) { e.definition = current })
}

// setState is called when a state has changed; current is nil if it was removed.
func (x *index) setState(key string, _, current *proto.ScheduleState) {
	x.change(strings.TrimPrefix(key, statePrefix), func(e *entry) { e.state = current })
}

// change changes the entry of a schedule. name is its organisation and its id.
func (x *index) change(name string, change func(*entry)) {
	org, id, _ := strings.Cut(name, ".")
	x.mu.Lock()
	defer x.mu.Unlock()
	e := x.orgs[org][id]
	if e == nil {
		e = &entry{position: notInHeap}
		if x.orgs[org] == nil {
			x.orgs[org] = map[string]*entry{}
		}
		x.orgs[org][id] = e
	}
	change(e)
	if e.definition == nil && e.state == nil {
		if delete(x.orgs[org], id); len(x.orgs[org]) == 0 {
			delete(x.orgs, org)
		}
	}
	x.place(e, time.Time{})
}

// place puts an entry where it belongs in the heap, if anywhere. It is not due before notBefore.
func (x *index) place(e *entry, notBefore time.Time) {
	wake, ok := e.nextWake()
	if wake.Before(notBefore) {
		wake = notBefore
	}
	e.wake = wake
	switch in := e.position != notInHeap; {
	case !ok || e.taken:
		if in {
			heap.Remove(&x.wakes, e.position)
		}
	case in:
		heap.Fix(&x.wakes, e.position)
	default:
		heap.Push(&x.wakes, e)
	}
}

// nextWake returns when decide has something to do, as far as the index knows. ok is false if that
// needs a change first.
func (e *entry) nextWake() (at time.Time, ok bool) {
	switch d, s := e.definition, e.state; {
	case d == nil:
		return at, false
	case s == nil || !s.UpdatedAt.Equal(d.UpdatedAt):
		return at, true
	case d.Paused:
		return at, false
	case len(s.Waiting) > 0: // until the last execution has ended
		return at, true
	default:
		return d.ticker.due(s.Next), !s.Next.IsZero()
	}
}

// take returns the schedules that have something to do, the first one first. They are not returned
// again before they are put back.
func (x *index) take(now time.Time) (due []*definition) {
	x.mu.Lock()
	defer x.mu.Unlock()
	for len(x.wakes) > 0 && !x.wakes[0].wake.After(now) {
		e := heap.Pop(&x.wakes).(*entry)
		e.taken = true
		due = append(due, e.definition)
	}
	return due
}

// put puts a schedule back. It is not due before notBefore.
func (x *index) put(d *definition, notBefore time.Time) {
	x.mu.Lock()
	defer x.mu.Unlock()
	if e := x.orgs[d.Org][d.ID]; e != nil && e.taken {
		e.taken = false
		x.place(e, notBefore)
	}
}

// putAll puts all schedules back.
func (x *index) putAll() {
	x.mu.Lock()
	defer x.mu.Unlock()
	for _, entries := range x.orgs {
		for _, e := range entries {
			if e.taken {
				e.taken = false
				x.place(e, time.Time{})
			}
		}
	}
}

// list returns the schedules of an organisation in no particular order.
func (x *index) list(org string) []proto.Schedule {
	x.mu.Lock()
	defer x.mu.Unlock()
	list := []proto.Schedule{}
	for _, e := range x.orgs[org] {
		if e.definition != nil {
			list = append(list, e.definition.Schedule)
		}
	}
	return list
}

// turns holds schedules that are due. Organisations take turns.
type turns struct {
	waiting map[string][]*definition
	orgs    []string // with waiting schedules, in the order of their turns
	running map[string]int
}

func newTurns() *turns { return &turns{waiting: map[string][]*definition{}, running: map[string]int{}} }

func (t *turns) add(d *definition) {
	if len(t.waiting[d.Org]) == 0 {
		t.orgs = append(t.orgs, d.Org)
	}
	t.waiting[d.Org] = append(t.waiting[d.Org], d)
}

// next returns the schedule to handle next, nil if there is none, or if all organisations with one
// have most running. It counts as running until done is called.
func (t *turns) next(most int) *definition {
	for i, org := range t.orgs {
		if t.running[org] >= most {
			continue
		}
		d := t.waiting[org][0]
		t.waiting[org] = t.waiting[org][1:]
		t.orgs = append(t.orgs[:i], t.orgs[i+1:]...)
		if len(t.waiting[org]) > 0 {
			t.orgs = append(t.orgs, org)
		} else {
			delete(t.waiting, org)
		}
		t.running[org]++
		return d
	}
	return nil
}

func (t *turns) done(d *definition) {
	if t.running[d.Org]--; t.running[d.Org] == 0 {
		delete(t.running, d.Org)
	}
}
