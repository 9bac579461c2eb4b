package engine

import (
	"container/heap"
	"context"
	"slices"
	"strings"
	"sync"
	"time"
)

// Item names what an engine handles.
type Item struct{ Org, ID string }

// Queue knows all items and, while an [Engine] leads, when each is due. It is safe for concurrent use.
type Queue[T any] struct {
	mu      sync.Mutex
	entries map[Item]*entry[T]
	engine  *Engine[T] // nil while none leads
	heap    dueHeap[T]
	woken   chan struct{} // has a value when an item can be handled
	// Organisations with due items take turns.
	waiting map[string][]*entry[T]
	orgs    []string // of waiting, in the order of their turns
	slots   *Slots[lane]
}

// entry is an item in the queue.
type entry[T any] struct {
	Item
	value     T
	keep      bool      // otherwise it is forgotten once it is no longer handled
	at        time.Time // when it is due
	waits     bool      // for its turn
	handled   bool
	interrupt context.CancelCauseFunc // of its call; nil for none
	position  int                     // in the heap, or notInHeap
}

// lane limits the calls of an organisation.
type lane struct {
	org    string
	urgent bool
}

// call is a call of [Engine.Handle].
type call[T any] struct {
	ctx    context.Context
	cancel context.CancelCauseFunc
	entry  *entry[T]
	known  T
	lane   lane
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

// Watch returns the function that a collection calls when a value has changed. Its keys are prefix,
// an organisation, a dot and an id. set stores the value, nil if it was removed, in q's knowledge
// of the item, see [Queue.Change].
func Watch[T, V any](
	q *Queue[T], prefix string, set func(known *T, current *V) (keep bool),
) func(key string, old, current *V) {
	return func(key string, _, current *V) {
		org, id, _ := strings.Cut(strings.TrimPrefix(key, prefix), ".")
		q.Change(Item{org, id}, func(known *T) bool { return set(known, current) })
	}
}

// Change changes the queue's knowledge of an item, initially zero. The item is forgotten if change
// returns false.
func (q *Queue[T]) Change(x Item, change func(*T) (keep bool)) {
	q.mu.Lock()
	defer q.mu.Unlock()
	e := q.entries[x]
	if e == nil {
		e = &entry[T]{Item: x, position: notInHeap}
		if q.entries == nil {
			q.entries = map[Item]*entry[T]{}
		}
		q.entries[x] = e
	}
	if e.keep = change(&e.value); !e.keep {
		e.value = *new(T)
	}
	if e.interrupt != nil {
		if cause := q.engine.Interrupt(&e.value); cause != nil {
			e.interrupt(cause)
		}
	}
	if e.waits {
		if at, ok := q.due(e); ok && !at.After(time.Now()) {
			q.wake() // it may be urgent now
			return
		}
		q.stopWaiting(e)
	}
	q.place(e, time.Time{})
}

// Get returns what the queue knows of an item.
func (q *Queue[T]) Get(x Item) (value T) {
	q.mu.Lock()
	defer q.mu.Unlock()
	if e := q.entries[x]; e != nil {
		value = e.value
	}
	return value
}

func (q *Queue[T]) due(e *entry[T]) (at time.Time, ok bool) {
	if !e.keep || q.engine == nil {
		return at, false
	}
	return q.engine.Due(&e.value)
}

// place inserts an item that is neither waiting nor being handled into the heap, if it is due at
// all. It is not due before notBefore.
func (q *Queue[T]) place(e *entry[T], notBefore time.Time) {
	if e.handled {
		return
	}
	at, ok := q.due(e)
	if e.at = at; at.Before(notBefore) {
		e.at = notBefore
	}
	switch in := e.position != notInHeap; {
	case in && !ok:
		heap.Remove(&q.heap, e.position)
	case in:
		heap.Fix(&q.heap, e.position)
	case ok:
		heap.Push(&q.heap, e)
	}
	if ok && !e.at.After(time.Now()) {
		q.wake()
	}
	if !e.keep {
		delete(q.entries, e.Item)
	}
}

func (q *Queue[T]) wake() {
	select {
	case q.woken <- struct{}{}:
	default:
	}
}

// begin makes items due for a leader. The channel has a value when an item can be handled.
func (q *Queue[T]) begin(engine *Engine[T]) (woken <-chan struct{}) {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.engine, q.woken = engine, make(chan struct{}, 1)
	q.waiting, q.slots = map[string][]*entry[T]{}, &Slots[lane]{Total: engine.Handlers, Each: engine.HandlersOfOrg}
	for _, e := range q.entries {
		q.place(e, time.Time{})
	}
	return q.woken
}

// end is called when the leader has stopped and no item is being handled.
func (q *Queue[T]) end() {
	q.mu.Lock()
	defer q.mu.Unlock()
	for _, e := range q.entries {
		e.waits, e.position = false, notInHeap
		if q.engine.Forget != nil {
			q.engine.Forget(&e.value)
		}
	}
	q.engine, q.heap, q.waiting, q.orgs = nil, nil, nil, nil
}

// next begins a call for the item to handle next. It returns nil if no item can be handled now.
func (q *Queue[T]) next(ctx context.Context) *call[T] {
	q.mu.Lock()
	defer q.mu.Unlock()
	for now := time.Now(); len(q.heap) > 0 && !q.heap[0].at.After(now); {
		e := heap.Pop(&q.heap).(*entry[T])
		e.waits = true
		if len(q.waiting[e.Org]) == 0 {
			q.orgs = append(q.orgs, e.Org)
		}
		q.waiting[e.Org] = append(q.waiting[e.Org], e)
	}
	for i, org := range q.orgs {
		if e, in := q.acquire(org); e != nil {
			q.orgs = append(slices.Delete(q.orgs, i, i+1), org)
			q.stopWaiting(e)
			return q.start(ctx, e, in)
		}
	}
	return nil
}

// acquire returns the organisation's next waiting item, for which it takes a slot, or nil if all
// have to wait.
func (q *Queue[T]) acquire(org string) (*entry[T], lane) {
	if q.engine.Order != nil {
		slices.SortStableFunc(q.waiting[org], func(a, b *entry[T]) int { return q.engine.Order(&a.value, &b.value) })
	}
	for _, e := range q.waiting[org] {
		in := lane{org, q.engine.Urgent != nil && q.engine.Urgent(&e.value)}
		if q.slots.Acquire(in) {
			return e, in
		}
	}
	return nil, lane{}
}

// stopWaiting removes an item from the waiting ones.
func (q *Queue[T]) stopWaiting(e *entry[T]) {
	e.waits = false
	others := slices.DeleteFunc(q.waiting[e.Org], func(other *entry[T]) bool { return other == e })
	if q.waiting[e.Org] = others; len(others) == 0 {
		delete(q.waiting, e.Org)
		q.orgs = slices.DeleteFunc(q.orgs, func(org string) bool { return org == e.Org })
	}
}

// start begins a call for an item, which has a slot.
func (q *Queue[T]) start(ctx context.Context, e *entry[T], in lane) *call[T] {
	e.handled = true
	c := &call[T]{entry: e, known: e.value, lane: in}
	c.ctx, c.cancel = context.WithCancelCause(ctx)
	if q.engine.Interrupt != nil && q.engine.Interrupt(&e.value) == nil {
		e.interrupt = c.cancel
	}
	return c
}

// done ends a call. Its item is not due before notBefore, unless it changes.
func (q *Queue[T]) done(c *call[T], notBefore time.Time) {
	q.mu.Lock()
	defer q.mu.Unlock()
	c.cancel(nil)
	c.entry.handled, c.entry.interrupt = false, nil
	q.slots.Release(c.lane)
	q.place(c.entry, notBefore)
	q.wake()
}
