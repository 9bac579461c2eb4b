package queue

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"sync"
	"time"

	"github.com/nats-io/nats.go"

	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/scheduler/store"
)

// Slots takes jobs for the slots of one worker. Run must be running while Take is used.
type Slots struct {
	Store        *store.Store
	Worker       string // unique to this process
	Pool         string // a name that [ValidPool] accepts, or empty for [proto.DefaultPool]
	Total        int    // slots
	Live         bool   // the slots are for live sandboxes, see [LiveWorker]
	Memory       int64  // maximum sum of the memory limits of live sandboxes, in bytes; 0 for no limit
	Capabilities []string
	Ended        func(*proto.Record) // called as Queue.Ended is
	Started      func(*proto.Record) // if not nil, is called with the record of each claim, concurrently
	Log          *slog.Logger
	Full         func() bool // reports whether this worker's disk is too full for more jobs; may be nil
	Journal      JournalFile // used by this worker alone until Run returns; nil for none
	// Info, if not nil, describes the worker to administrators. The fields that Slots knows need not
	// be set.
	Info func() proto.Worker

	timing       timing
	background   sync.WaitGroup // attempts that are being given up
	mu           sync.Mutex
	epoch        *epoch        // in which the worker holds its lease; nil if it has none
	epochChanged chan struct{} // closed when epoch changes
	stopped      bool          // Run has returned: there are no further epochs
	ready        bool          // subscribed to assignments; nothing is announced before
	draining     bool
	ticket       uint64
	waiting      map[uint64]chan *Lease // free slots by ticket
	held         map[proto.TraceID]*Lease
	journal      journal
}

// init sets up the maps. s.mu is held.
func (s *Slots) init() {
	if s.waiting == nil {
		s.waiting, s.held, s.epochChanged = map[uint64]chan *Lease{}, map[proto.TraceID]*Lease{}, make(chan struct{})
		s.timing = s.timing.defaults()
		if s.Live {
			s.timing = s.timing.forLive()
		}
		s.journal = journal{file: s.Journal, used: map[int]bool{}}
	}
}

// Run recovers the previous worker's journal, holds this worker's lease, and announces it until ctx
// is done. Programs still running then are lost.
func (s *Slots) Run(ctx context.Context) error {
	s.mu.Lock()
	s.init()
	s.mu.Unlock()
	s.recoverJournal(ctx)
	var subs []*nats.Subscription
	defer func() {
		for _, sub := range subs {
			_ = sub.Unsubscribe()
		}
	}()
	for subject, handle := range map[string]func(*nats.Msg){
		store.AssignSubject(s.Worker): s.onAssignment, store.CancelSubject(s.Worker): s.onCancel,
		store.AnnounceSubject: func(*nats.Msg) { s.announceAll() }, store.DrainSubject(s.Worker): s.onDrain,
	} {
		sub, err := s.Store.Conn.Subscribe(subject, handle)
		if err != nil {
			return fmt.Errorf("listen on %s: %w", subject, err)
		}
		subs = append(subs, sub)
	}
	s.mu.Lock()
	s.ready = true
	s.mu.Unlock()
	stopHolding := s.startHolding(ctx)
	tick := time.NewTicker(s.timing.announceEvery)
	defer tick.Stop()
	for {
		s.announceAll()
		select {
		case <-ctx.Done():
			stopHolding()
			s.announce(announcement{Gone: true})
			_ = s.Store.Conn.FlushTimeout(time.Second)
			return nil
		case <-tick.C:
		}
	}
}

// startHolding holds the lease until stop is called.
func (s *Slots) startHolding(ctx context.Context) (stop func()) {
	ctx, cancel := context.WithCancel(ctx)
	var holding sync.WaitGroup
	holding.Go(func() { s.holdLease(ctx) })
	return func() {
		cancel()
		holding.Wait()
		s.mu.Lock()
		s.stopped = true
		close(s.epochChanged)
		s.epochChanged = make(chan struct{})
		s.mu.Unlock()
		s.background.Wait()
	}
}

func (s *Slots) announce(a announcement) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.ready {
		s.publish(a)
	}
}

// announceAll also announces what changes seldom.
func (s *Slots) announceAll() {
	var a announcement
	if s.Info != nil {
		info := s.Info()
		a.Info = &info
	}
	s.announce(a)
}

// publish completes and sends an announcement. s.mu is held, so that announcements keep their
// order.
func (s *Slots) publish(a announcement) {
	a.Worker, a.Pool, a.Slots, a.Capabilities, a.Draining = s.Worker, s.Pool, s.Total, s.Capabilities, s.draining
	a.Live, a.Memory, a.FreeMemory = s.Live, s.Memory, s.freeMemory()
	if s.epoch != nil && !s.draining && (s.Full == nil || !s.Full()) {
		a.Free = slices.AppendSeq(a.Free, maps.Keys(s.waiting))
	}
	for id := range s.held {
		a.Held = append(a.Held, id)
	}
	body, err := json.Marshal(a)
	if err == nil {
		err = s.Store.Conn.Publish(store.SlotsSubject, body)
	}
	if err != nil && !errors.Is(err, nats.ErrReconnectBufExceeded) {
		s.Log.Warn("announce failed, will retry", "error", err)
	}
}

// Take blocks until a job is assigned to this slot. It returns the cause of ctx if ctx is done
// first. A lease that arrives at the same moment is returned nevertheless.
func (s *Slots) Take(ctx context.Context) (*Lease, error) {
	for {
		l, err := s.await(ctx)
		if err != nil {
			return nil, err
		}
		switch err := l.load(context.WithoutCancel(ctx)); { // the job is ours now, even if ctx is done
		case err == nil:
			return l, nil
		case errors.Is(err, proto.ErrNotFound): // ended in between
		default:
			s.Log.Error("read assigned job failed", "trace_id", l.id, "error", err)
		}
		s.forget(l.id)
	}
}

// await announces a free slot and waits for an assignment.
func (s *Slots) await(ctx context.Context) (*Lease, error) {
	slot := make(chan *Lease, 1)
	s.mu.Lock()
	s.init()
	s.issueTicket(slot)
	s.mu.Unlock()
	s.announce(announcement{})
	select {
	case l := <-slot:
		return l, nil
	case <-ctx.Done():
	}
	s.mu.Lock()
	maps.DeleteFunc(s.waiting, func(_ uint64, c chan *Lease) bool { return c == slot })
	s.mu.Unlock()
	select {
	case l := <-slot:
		return l, nil
	default:
		return nil, context.Cause(ctx)
	}
}

// issueTicket assigns a new ticket to a free slot. s.mu is held.
func (s *Slots) issueTicket(slot chan *Lease) {
	s.ticket++
	s.waiting[s.ticket] = slot
}

// onAssignment passes a lease to the slot of the ticket. If the ticket is no longer valid, or the job
// needs more memory than is free, it returns the assignment immediately.
func (s *Slots) onAssignment(m *nats.Msg) {
	var a assignment
	if err := json.Unmarshal([]byte(m.Header.Get(headerAssignment)), &a); err != nil {
		s.Log.Error("malformed assignment ignored", "error", err)
		return
	}
	if a.Ack != "" {
		s.onAck(a)
		return
	}
	if _, err := proto.ParseTraceID(string(a.Trace)); err != nil || a.Attempt < 1 || !proto.ValidOrg(a.Org) {
		s.Log.Error("malformed assignment ignored", "org", a.Org, "trace_id", a.Trace, "attempt", a.Attempt)
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	slot, free := s.waiting[a.Ticket]
	delete(s.waiting, a.Ticket)
	if s.held[a.Trace] != nil { // a new leader may not know that
		if free {
			s.issueTicket(slot)
			s.publish(announcement{})
		}
		return
	}
	fits := s.Memory == 0 || a.Memory <= s.freeMemory() // an earlier leader may have assigned another one
	if free && !fits {
		s.issueTicket(slot)
	}
	if !free || !fits {
		s.publish(announcement{Dropped: []proto.TraceID{a.Trace}})
		return
	}
	l := &Lease{
		slots: s, org: a.Org, id: a.Trace, seq: a.Job, attempt: a.Attempt, revision: a.Revision, memory: a.Memory,
	}
	if a.Job == 0 {
		l.msg, l.ack = m, make(chan string, 1)
	}
	s.held[a.Trace] = l
	s.journalAssigned(l)
	slot <- l
}

// freeMemory returns what the live sandboxes that this worker holds leave of its memory. s.mu is held.
func (s *Slots) freeMemory() int64 {
	free := s.Memory
	for _, l := range s.held {
		free -= l.memory
	}
	return free
}

// onAck passes an acknowledgement to its lease.
func (s *Slots) onAck(a assignment) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if l := s.held[a.Trace]; l != nil && l.ack != nil {
		select {
		case l.ack <- a.Ack:
		default: // a duplicate
		}
	}
}

// onDrain stops or resumes the announcement of free slots. Jobs that were assigned before run.
func (s *Slots) onDrain(m *nats.Msg) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.draining = string(m.Data) == drainOn
	s.publish(announcement{})
}

func (s *Slots) onCancel(m *nats.Msg) {
	s.mu.Lock()
	l := s.held[proto.TraceID(m.Data)]
	s.mu.Unlock()
	if l != nil {
		l.requestRead()
	}
}

// onClaimed removes the journal entry of l, since the record names the worker now.
func (s *Slots) onClaimed(l *Lease) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.journalDone(l)
}

// Used returns the number of slots that have a job.
func (s *Slots) Used() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return len(s.held)
}

func (s *Slots) forget(id proto.TraceID) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.journalDone(s.held[id])
	delete(s.held, id)
}
