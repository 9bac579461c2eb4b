package queue

import (
	"context"
	"fmt"
	"maps"
	"time"

	"github.com/nats-io/nats.go"

	"github.com/bullpen-run/bullpen/scheduler/store"
)

// leaseKept is how long the dispatcher remembers a lease that is neither renewed nor used by a
// running job.
const leaseKept = time.Minute

// workerLease is the dispatcher's knowledge of a worker's lease in one epoch.
type workerLease struct {
	revision uint64
	seen     time.Time // when the dispatcher learnt of the revision
	used     time.Time // when a running job was last found to name the epoch
	ended    bool      // it can never be renewed again
	renewed  time.Time // once it has ended: when it was last renewed, by the server's clock; zero if unknown
	ending   bool      // a write that ends it is in progress
}

// onLease handles a change of a lease.
func (t *term) onLease(_ context.Context, m *store.Message) {
	l := t.lease(store.ParseLeaseSubject(m.Subject))
	l.observe(leaseState{revision: m.Seq, header: m.Header})
}

// lease returns the lease of an epoch.
func (t *term) lease(epoch string) *workerLease {
	l := t.leases[epoch]
	if l == nil {
		l = &workerLease{}
		t.leases[epoch] = l
	}
	return l
}

// leaseState is a stored lease. The header is nil if there is none.
type leaseState struct {
	revision uint64
	header   nats.Header
}

// observe updates l from the stored state. A missing lease has ended, since a renewal names the
// revision that it replaces.
func (l *workerLease) observe(s leaseState) {
	text := s.header.Get(store.HeaderRenewed)
	switch {
	case l.ended:
	case s.header == nil:
		l.ended = true
	case text != "":
		l.ended = true
		if at, err := time.Parse(time.RFC3339Nano, text); err == nil {
			l.renewed = at
		}
	case s.revision > l.revision:
		l.revision, l.seen = s.revision, time.Now()
	}
}

// reviewLease returns the lease of a running job. It starts to end a lease that is overdue for
// renewal.
func (t *term) reviewLease(ctx context.Context, j *job, now time.Time) *workerLease {
	if j.epoch == "" { // its worker has given it up
		return &workerLease{ended: true}
	}
	l, timeout := t.lease(j.epoch), t.timing.leaseTimeout
	if j.meta.SandboxID != "" {
		timeout = t.timing.forLive().leaseTimeout
	}
	l.used = now
	if !l.ended && !l.ending && now.Sub(l.seen) > timeout {
		t.endLease(ctx, j.epoch, j.worker, l)
	}
	return l
}

// endLease ends a lease outside the loop, unless it was renewed after the revision known to the
// dispatcher. The write replaces that revision: no renewal can follow it, and by then the worker
// has killed its programs.
func (t *term) endLease(ctx context.Context, epoch, worker string, l *workerLease) {
	l.ending = true
	known := l.revision
	go func() {
		bounded, cancel := context.WithTimeout(ctx, submitTimeout)
		defer cancel()
		s, err := (&Queue{Store: t.Store}).endLease(bounded, epoch, worker, known)
		if err != nil && ctx.Err() == nil {
			t.Log.Warn("end of a worker's lease failed, will retry", "worker", worker, "error", err)
		}
		t.post(ctx, func() {
			l.ending = false
			switch {
			case store.IsRejected(err):
				l.seen = time.Now() // the worker could not renew it either
			case err == nil:
				l.observe(s)
			}
		})
	}()
}

// endLease ends a worker's lease if its revision is known, and returns the stored state.
func (q *Queue) endLease(ctx context.Context, epoch, worker string, known uint64) (leaseState, error) {
	m, err := q.Store.Leases.Last(ctx, store.LeaseSubject(epoch), store.FromLeader)
	switch {
	case store.IsNotFound(err):
		return leaseState{}, nil
	case err != nil:
		return leaseState{}, fmt.Errorf("end the lease of worker %s: %w", worker, err)
	case m.Seq != known || m.Header.Get(store.HeaderRenewed) != "":
		return leaseState{m.Seq, m.Header}, nil
	}
	h := nats.Header{store.HeaderWorker: {worker}, store.HeaderRenewed: {m.Time.UTC().Format(time.RFC3339Nano)}}
	_, err = q.Store.Leases.Write(ctx, store.LeaseSubject(epoch), h, nil, known)
	switch {
	case store.IsConflict(err): // renewed or ended concurrently
		return leaseState{known, m.Header}, nil
	case err != nil:
		return leaseState{}, fmt.Errorf("end the lease of worker %s: %w", worker, err)
	default:
		return leaseState{known, h}, nil
	}
}

// forgetLeases removes leases that are neither renewed nor used by a running job.
func (t *term) forgetLeases(now time.Time) {
	maps.DeleteFunc(t.leases, func(_ string, l *workerLease) bool {
		return now.Sub(l.seen) > leaseKept && now.Sub(l.used) > leaseKept
	})
}
