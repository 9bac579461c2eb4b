package engine

import (
	"container/heap"
	"sync"
	"time"
)

// Item names what an engine handles.
type Item struct{ Org, ID string }

// Queue knows all items and, while an [Engine] leads, when each is due. It is safe for concurrent use.
type Queue[T any] struct {
	mu      sync.Mutex
	entries map[Item]*entry[T]
	due     func(*T) (at time.Time, ok bool) // nil while no engine leads
	heap    dueHeap[T]
}

// entry is an item in the queue.
type entry[T any] struct {
	Item
	value    T
	at       time.Time // when it is due
	taken    bool      // it is being handled or waits for its turn, so it is not in the heap
	position int       // in the heap, or notInHeap
}

const notInHeap = -1

// dueHeap implements [heap.Interface]. The item that is due first is the first.
type dueHeap[T any] []*entry[T]

func (h dueHeap[T]) Len() int           { return len(h) }
func (h dueHeap[T]) Less(a, b int) bool { return h[a].at.Before(h[b].at) }

func (h dueHeap[T]) Swap(a, b int) {
	h[a], h[b] = h[b], h[a]
	h[a].position, h[b].position = a, b
}

// Push implements [heap.Interface].
func (h *dueHeap[T]) Push(x any) {
	e := x.(*entry[T])
	e.position = len(*h)
	*h = append(*h, e)
}

// Pop implements [heap.Interface].
func (h *dueHeap[T]) Pop() any {
	last := len(*h) - 1
	e := (*h)[last]
	(*h)[last] = nil
	*h, e.position = (*h)[:last], notInHeap
	return e
}

// Change changes what the queue knows of an item, which is zero at first. The item is forgotten if
// change returns false.
func (q *Queue[T]) Change(item Item, change func(*T) (keep bool)) {
	q.mu.Lock()
	defer q.mu.Unlock()
	e := q.entries[item]
	if e == nil {
		e = &entry[T]{Item: item, position: notInHeap}
		if q.entries == nil {
			q.entries = map[Item]*entry[T]{}
		}
		q.entries[item] = e
	}
	keep := change(&e.value)
	if !keep {
		delete(q.entries, item)
	}
	q.place(e, keep, time.Time{})
}

// Get returns what the queue knows of an item.
func (q *Queue[T]) Get(item Item) (value T) {
	q.mu.Lock()
	defer q.mu.Unlock()
	if e := q.entries[item]; e != nil {
		value = e.value
	}
	return value
}

// place puts an item where it belongs in the heap, if anywhere. It is not due before notBefore.
func (q *Queue[T]) place(e *entry[T], keep bool, notBefore time.Time) {
	var ok bool
	if keep && q.due != nil && !e.taken {
		if e.at, ok = q.due(&e.value); e.at.Before(notBefore) {
			e.at = notBefore
		}
	}
	switch in := e.position != notInHeap; {
	case in && !ok:
		heap.Remove(&q.heap, e.position)
	case in:
		heap.Fix(&q.heap, e.position)
	case ok:
		heap.Push(&q.heap, e)
	}
}

// begin makes items due for a leader.
func (q *Queue[T]) begin(due func(*T) (at time.Time, ok bool)) {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.due = due
	for _, e := range q.entries {
		q.place(e, true, time.Time{})
	}
}

// end is called when the leader has stopped. It calls forget, if not nil, with what the queue knows of
// each item.
func (q *Queue[T]) end(forget func(*T)) {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.due, q.heap = nil, nil
	for _, e := range q.entries {
		e.taken, e.position = false, notInHeap
		if forget != nil {
			forget(&e.value)
		}
	}
}

// take returns the items that are due, the first one first. They are not returned again before they are
// put back.
func (q *Queue[T]) take(now time.Time) (due []Item) {
	q.mu.Lock()
	defer q.mu.Unlock()
	for len(q.heap) > 0 && !q.heap[0].at.After(now) {
		e := heap.Pop(&q.heap).(*entry[T])
		e.taken = true
		due = append(due, e.Item)
	}
	return due
}

// put puts an item back. It is not due before notBefore.
func (q *Queue[T]) put(item Item, notBefore time.Time) {
	q.mu.Lock()
	defer q.mu.Unlock()
	if e := q.entries[item]; e != nil && e.taken {
		e.taken = false
		q.place(e, true, notBefore)
	}
}

// turns holds items that are due. Organisations take turns.
type turns struct {
	waiting map[string][]Item
	orgs    []string // with waiting items, in the order of their turns
	running map[string]int
}

func newTurns() *turns { return &turns{waiting: map[string][]Item{}, running: map[string]int{}} }

func (t *turns) add(x Item) {
	if len(t.waiting[x.Org]) == 0 {
		t.orgs = append(t.orgs, x.Org)
	}
	t.waiting[x.Org] = append(t.waiting[x.Org], x)
}

// next returns the item to handle next. ok is false if there is none, or if all organisations with one
// have most running. The item counts as running until done is called.
func (t *turns) next(most int) (x Item, ok bool) {
	for i, org := range t.orgs {
		if t.running[org] >= most {
			continue
		}
		x := t.waiting[org][0]
		t.waiting[org] = t.waiting[org][1:]
		t.orgs = append(t.orgs[:i], t.orgs[i+1:]...)
		if len(t.waiting[org]) > 0 {
			t.orgs = append(t.orgs, org)
		} else {
			delete(t.waiting, org)
		}
		t.running[org]++
		return x, true
	}
	return x, false
}

func (t *turns) done(x Item) {
	if t.running[x.Org]--; t.running[x.Org] == 0 {
		delete(t.running, x.Org)
	}
}
