package batches

import (
	"context"
	"errors"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/scheduler/store"
)

// session is a time in which batches run, and the records of all executions are followed.
type session struct {
	*Runner
	following chan struct{}   // closed once no end of an execution is missed any more
	followed  context.Context // done when one may have been missed, or no batch runs
	end       context.CancelCauseFunc
	changed   chan struct{} // has a value when the runs have changed
	parts     sync.WaitGroup

	// under the mutex of the runner
	runs  map[*run]bool
	items map[proto.TraceID]itemRef
	slots int
}

// itemRef names an item that is submitted.
type itemRef struct {
	run   *run
	index int
}

// carryOut carries out a batch until it has ended or is paused. It returns an error if it may have missed
// the end of an execution.
func (r *Runner) carryOut(ctx context.Context, b *proto.Batch) error {
	x := newRun(r, b)
	s := r.join(ctx, x)
	defer s.leave(x)
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	defer context.AfterFunc(s.followed, func() { cancel(context.Cause(s.followed)) })()
	select {
	case <-ctx.Done():
		return context.Cause(ctx)
	case <-s.following:
		return x.run(ctx)
	}
}

// join adds a run to the session, and begins one if there is none.
func (r *Runner) join(ctx context.Context, x *run) *session {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.session == nil {
		s := &session{
			Runner: r, following: make(chan struct{}), changed: make(chan struct{}, 1), runs: map[*run]bool{},
			items: map[proto.TraceID]itemRef{},
		}
		s.followed, s.end = context.WithCancelCause(context.WithoutCancel(ctx))
		s.parts.Go(s.follow)
		s.parts.Go(s.share)
		r.session = s
	}
	x.session = r.session
	x.session.runs[x] = true
	notify(x.session.changed)
	return x.session
}

// leave takes a run out of the session, which ends with the last one.
func (s *session) leave(x *run) {
	s.mu.Lock()
	delete(s.runs, x)
	for id, ref := range s.items {
		if ref.run == x {
			delete(s.items, id)
		}
	}
	last := len(s.runs) == 0
	if last && s.Runner.session == s {
		s.Runner.session = nil
	}
	s.mu.Unlock()
	notify(s.changed)
	if last {
		s.end(nil)
		s.parts.Wait()
	}
}

// follow reports the changes of records to the runs of their batches.
func (s *session) follow() {
	err := s.Store.Follow(s.followed, s.Store.Executions,
		jetstream.ConsumerConfig{DeliverPolicy: jetstream.DeliverNewPolicy}, s.onRecord, func() { close(s.following) })
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.Runner.session == s {
		s.Runner.session = nil
	}
	s.end(err)
}

// share divides what each organisation may have in the queue among its batches.
func (s *session) share() {
	tick := time.NewTicker(scanEvery)
	defer tick.Stop()
	var asked time.Time
	for {
		if now := time.Now(); now.Sub(asked) > statsEvery {
			s.readSlots()
			asked = now
		}
		s.setWindows()
		select {
		case <-s.followed.Done():
			return
		case <-tick.C:
		case <-s.changed:
		}
	}
}

func (s *session) readSlots() {
	ctx, cancel := context.WithTimeout(s.followed, statsEvery)
	defer cancel()
	slots, err := s.Executions.Slots(ctx)
	if err != nil {
		return // the last number holds
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.slots = slots
}

func (s *session) setWindows() {
	s.mu.Lock()
	defer s.mu.Unlock()
	byOrg := map[string][]*run{}
	for r := range s.runs {
		byOrg[r.batch.Org] = append(byOrg[r.batch.Org], r)
	}
	for _, runs := range byOrg {
		slices.SortFunc(runs, func(x, y *run) int { return byPriority(x.batch, y.batch) })
		left := 0
		wants := make([]demand, len(runs))
		for i, r := range runs {
			concurrent, queued := s.Executions.BatchLimits(s.followed, r.batch.Key)
			left = max(left, window(concurrent, queued, s.slots))
			wants[i] = demand{r.batch.Priority, r.demand()}
		}
		for i, n := range divide(left, wants) {
			runs[i].setWindow(n)
		}
	}
}

// add makes the session report the changes of an item's record to its run.
func (s *session) add(id proto.TraceID, ref itemRef) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.items[id] = ref
}

func (s *session) forget(id proto.TraceID) {
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.items, id)
}

// onRecord reports a change of a record to the run of its batch.
func (s *session) onRecord(m jetstream.Msg, _ *jetstream.MsgMetadata) {
	subject := m.Subject()
	id := proto.TraceID(subject[strings.LastIndexByte(subject, '.')+1:])
	s.mu.Lock()
	ref, ok := s.items[id]
	s.mu.Unlock()
	if !ok {
		return
	}
	h := m.Headers()
	attempt, _ := strconv.Atoi(h.Get(store.HeaderAttempt)) // 0 makes the run read the record
	ref.run.post(event{index: ref.index, id: id, status: proto.Status(h.Get(store.HeaderStatus)), attempt: attempt})
}

var errNotLeader = errors.New("the leadership is in doubt")
