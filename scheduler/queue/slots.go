package queue

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"sync"
	"time"

	"github.com/nats-io/nats.go"

	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/scheduler/store"
)

// announceEvery is how often a worker shows that it lives; changes are announced at once.
const announceEvery = 2 * time.Second

// Slots is a worker's end of the queue: it tells the dispatcher which slots are free and takes the jobs assigned to them. Run must
// be running while Take is used.
type Slots struct {
	Store  *store.Store
	Worker string   // unique to this process
	Total  int      // slots
	Offers []string // what the jobs taken here may need, such as OfferLanguage of a language
	Log    *slog.Logger
	Notes  Notes // its own until Run returns; nil for none

	mu      sync.Mutex
	open    bool // assignments reach us: before that nothing is announced
	ticket  uint64
	waiting map[uint64]chan *Lease // free slots by ticket
	held    map[proto.TraceID]*Lease
	places  map[int]bool // of Notes that are used
}

// Run counts what the last worker was lost with, announces this one until ctx ends, and then says goodbye.
func (s *Slots) Run(ctx context.Context) error {
	s.recall(ctx)
	var subs []*nats.Subscription
	defer func() {
		for _, sub := range subs {
			_ = sub.Unsubscribe()
		}
	}()
	for subject, handle := range map[string]func(*nats.Msg){
		store.AssignSubject(s.Worker): s.assigned, store.CancelSubject(s.Worker): s.cancelled,
		store.AnnounceSubject: func(*nats.Msg) { s.announce(false) },
	} {
		sub, err := s.Store.Conn.Subscribe(subject, handle)
		if err != nil {
			return fmt.Errorf("listen on %s: %w", subject, err)
		}
		subs = append(subs, sub)
	}
	s.mu.Lock()
	s.open = true
	s.mu.Unlock()
	tick := time.NewTicker(announceEvery)
	defer tick.Stop()
	for {
		s.announce(false)
		select {
		case <-ctx.Done():
			s.announce(true)
			_ = s.Store.Conn.FlushTimeout(time.Second)
			return nil
		case <-tick.C:
		}
	}
}

func (s *Slots) announce(gone bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if !s.open {
		return
	}
	s.publish(announcement{Gone: gone})
}

// publish completes an announcement and sends it. s.mu is held, so that an older word does not overtake a newer one.
func (s *Slots) publish(a announcement) {
	a.Worker, a.Slots, a.Offers = s.Worker, s.Total, s.Offers
	for ticket := range s.waiting {
		a.Free = append(a.Free, ticket)
	}
	for id := range s.held {
		a.Held = append(a.Held, id)
	}
	body, err := json.Marshal(a)
	if err == nil {
		err = s.Store.Conn.Publish(store.SlotsSubject, body)
	}
	if err != nil && !errors.Is(err, nats.ErrReconnectBufExceeded) {
		s.Log.Warn("the worker could not announce itself, will retry", "error", err)
	}
}

// Take waits for a job for one free slot. The error is ctx's when that ends first; a lease that arrives at that very moment is
// returned all the same, so that none is lost.
func (s *Slots) Take(ctx context.Context) (*Lease, error) {
	for {
		l, err := s.wait(ctx)
		if err != nil {
			return nil, err
		}
		switch err := l.load(context.WithoutCancel(ctx)); { // it is ours now, also while we stop
		case err == nil:
			return l, nil
		case errors.Is(err, proto.ErrNotFound): // it ended meanwhile
		default:
			s.Log.Error("an assigned job could not be read", "trace_id", l.id, "error", err)
		}
		s.forget(l.id)
	}
}

func (s *Slots) wait(ctx context.Context) (*Lease, error) {
	arrived := make(chan *Lease, 1)
	s.mu.Lock()
	if s.waiting == nil {
		s.waiting, s.held, s.places = map[uint64]chan *Lease{}, map[proto.TraceID]*Lease{}, map[int]bool{}
	}
	s.free(arrived)
	s.mu.Unlock()
	s.announce(false)
	select {
	case l := <-arrived:
		return l, nil
	case <-ctx.Done():
	}
	s.mu.Lock()
	maps.DeleteFunc(s.waiting, func(_ uint64, c chan *Lease) bool { return c == arrived })
	s.mu.Unlock()
	select {
	case l := <-arrived:
		return l, nil
	default:
		return nil, context.Cause(ctx)
	}
}

// free gives a free slot a ticket of its own. s.mu is held.
func (s *Slots) free(slot chan *Lease) {
	s.ticket++
	s.waiting[s.ticket] = slot
}

// assigned takes in an assignment. One for a slot that is not free any more is given back at once.
func (s *Slots) assigned(m *nats.Msg) {
	var a assignment
	if err := json.Unmarshal([]byte(m.Header.Get(headerAssignment)), &a); err != nil {
		s.Log.Error("a malformed assignment was passed over", "error", err)
		return
	}
	if a.Word != "" {
		s.heard(a)
		return
	}
	if _, err := proto.ParseTraceID(string(a.Trace)); err != nil || a.Attempt < 1 {
		s.Log.Error("a malformed assignment was passed over", "trace_id", a.Trace, "attempt", a.Attempt)
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	arrived, free := s.waiting[a.Ticket]
	delete(s.waiting, a.Ticket)
	if s.held[a.Trace] != nil { // a dispatcher that has just begun to lead may not know
		if free {
			s.free(arrived) // the ticket is used
			s.publish(announcement{})
		}
		return
	}
	if !free {
		s.publish(announcement{Dropped: []proto.TraceID{a.Trace}})
		return
	}
	l := &Lease{slots: s, id: a.Trace, at: a.Job, attempt: a.Attempt, revision: a.Revision}
	if a.Job == 0 {
		l.sent, l.word = m, make(chan string, 1)
	}
	s.held[a.Trace] = l
	s.note(l)
	arrived <- l
}

// heard passes on the word on an assignment.
func (s *Slots) heard(a assignment) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if l := s.held[a.Trace]; l != nil && l.word != nil {
		select {
		case l.word <- a.Word:
		default: // it has one
		}
	}
}

func (s *Slots) cancelled(m *nats.Msg) {
	s.mu.Lock()
	l := s.held[proto.TraceID(m.Data)]
	s.mu.Unlock()
	if l != nil {
		l.look()
	}
}

func (s *Slots) forget(id proto.TraceID) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.strike(s.held[id])
	delete(s.held, id)
}
