package queue

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nuid"

	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/scheduler/store"
)

// epoch is a period in which a worker holds its lease without interruption. The records of the
// attempts claimed in it name the epoch. The lease is a message: the worker replaces it by
// compare-and-set to renew it, the dispatcher to end it. An ended epoch never comes back: the
// worker begins another one.
type epoch struct {
	id            string
	holderTimeout time.Duration
	revision      uint64 // of the lease; used by the goroutine that renews it

	// ctx is cancelled with [proto.ErrLost] when the lease is lost: programs must be killed then.
	ctx  context.Context
	lose context.CancelCauseFunc

	mu        sync.Mutex
	expiry    *time.Timer
	confirmed time.Time // when the last confirmed renewal was sent
}

// confirm extends the lease after a renewal sent at the given time. A timer ends the lease, since a
// renewal may never be answered.
func (e *epoch) confirm(sent time.Time) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.confirmed = sent
	left := e.holderTimeout - time.Since(sent)
	if e.expiry != nil {
		e.expiry.Reset(left)
		return
	}
	e.expiry = time.AfterFunc(left, func() { e.lose(fmt.Errorf("%w: no renewal for %s", proto.ErrLost, e.holderTimeout)) })
}

// valid reports whether the worker holds the lease now. The timer alone is not enough: a process
// that was paused may get here before its timers fire.
func (e *epoch) valid() bool {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.ctx.Err() == nil && time.Since(e.confirmed) < e.holderTimeout
}

// close ends an epoch that is no longer renewed.
func (e *epoch) close() {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.expiry.Stop()
	e.lose(fmt.Errorf("%w: the worker stops", proto.ErrLost))
}

// holdLease holds the lease of the worker until ctx is done. After the loss of one epoch it begins another.
func (s *Slots) holdLease(ctx context.Context) {
	for ctx.Err() == nil {
		e, err := s.beginEpoch(ctx)
		if err != nil {
			if pause(ctx, err) == nil {
				s.Log.Warn("worker has no lease, will retry", "error", err)
			}
			continue
		}
		s.setEpoch(e)
		s.renewUntilLost(ctx, e)
		e.close()
		s.setEpoch(nil)
		if ctx.Err() == nil {
			s.Log.Warn("worker lost its lease", "error", context.Cause(e.ctx))
		}
	}
}

// beginEpoch acquires a new lease. A lease stored without an answer is never used.
func (s *Slots) beginEpoch(ctx context.Context) (*epoch, error) {
	e := &epoch{id: nuid.Next(), holderTimeout: s.timing.holderTimeout}
	bounded, cancel := context.WithTimeout(ctx, s.timing.renewTimeout)
	defer cancel()
	sent := time.Now()
	var err error
	if e.revision, err = s.writeLease(bounded, e); err != nil {
		return nil, fmt.Errorf("acquire the lease of worker %s: %w", s.Worker, err)
	}
	e.ctx, e.lose = context.WithCancelCause(context.WithoutCancel(ctx))
	e.confirm(sent)
	return e, nil
}

func (s *Slots) writeLease(ctx context.Context, e *epoch) (revision uint64, err error) {
	h := nats.Header{store.HeaderWorker: {s.Worker}}
	return s.Store.Leases.Write(ctx, store.LeaseSubject(e.id), h, nil, e.revision)
}

// renewUntilLost renews the lease of e until it is lost or ctx is done.
func (s *Slots) renewUntilLost(ctx context.Context, e *epoch) {
	tick := time.NewTicker(s.timing.renewEvery)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-e.ctx.Done():
			return
		case <-tick.C:
		}
		sent := time.Now()
		err := s.renew(ctx, e)
		switch {
		case errors.Is(err, proto.ErrLost):
			e.lose(err)
			return
		// A store that rejects this write also rejects a dispatcher's attempt to end the lease.
		case err == nil || store.IsRejected(err):
			e.confirm(sent)
		}
	}
}

// errUnreadable hides why a changed lease could not be read: a rejected read is no rejected write.
var errUnreadable = errors.New("the lease was changed and could not be read")

// renew replaces the lease. It returns [proto.ErrLost] if the lease has ended.
func (s *Slots) renew(ctx context.Context, e *epoch) error {
	ctx, cancel := context.WithTimeout(ctx, s.timing.renewTimeout)
	defer cancel()
	for {
		revision, err := s.writeLease(ctx, e)
		switch {
		case err == nil:
			e.revision = revision
			return nil
		case !store.IsConflict(err):
			return err
		}
		m, err := s.Store.Leases.Last(ctx, store.LeaseSubject(e.id), store.FromLeader)
		switch {
		case store.IsNotFound(err):
			return fmt.Errorf("%w: it is gone", proto.ErrLost)
		case err != nil:
			return fmt.Errorf("%w: %v", errUnreadable, err) //nolint:errorlint // see errUnreadable
		case m.Header.Get(store.HeaderRenewed) != "":
			return fmt.Errorf("%w: the dispatcher has ended it", proto.ErrLost)
		}
		e.revision = m.Seq // an earlier renewal without an answer
	}
}

// setEpoch sets the epoch under which jobs are claimed. Without one (nil), no free slots are
// announced.
func (s *Slots) setEpoch(e *epoch) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.epoch = e
	close(s.epochChanged)
	s.epochChanged = make(chan struct{})
	if s.ready {
		s.publish(announcement{})
	}
}

// errStopped means that the worker has ended and holds no lease.
var errStopped = errors.New("the worker has stopped")

// awaitEpoch returns the epoch that the worker is in. It blocks while there is none.
func (s *Slots) awaitEpoch(ctx context.Context) (*epoch, error) {
	for {
		s.mu.Lock()
		e, changed, stopped := s.epoch, s.epochChanged, s.stopped
		s.mu.Unlock()
		if e != nil && e.valid() {
			return e, nil
		}
		if stopped {
			return nil, errStopped
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return nil, context.Cause(ctx)
		}
	}
}
