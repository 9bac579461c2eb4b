package queue

import (
	"context"
	"fmt"
	"maps"
	"strings"
	"time"

	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/scheduler/store"
)

// review handles timeouts: of workers, assignments, leases and queued jobs.
func (t *term) review(ctx context.Context, now time.Time) {
	for name, w := range t.workers {
		if now.Sub(w.seen) > t.timing.workerTimeout {
			t.removeWorker(name)
			t.Log.Warn("worker lost", "worker", name)
		}
	}
	maps.DeleteFunc(t.queue.loads, func(name string, l *load) bool { return l.jobs.all == 0 && t.workers[name] == nil })
	maps.DeleteFunc(t.outcomes, func(_ proto.TraceID, o outcome) bool { return now.Sub(o.at) > outcomesKept })
	t.output.forget(now)
	t.startRate.update(now, t.queue.queued > 0)
	t.releaseDelayed(now)
	t.views = views{orders: map[string]classOrders{}}
	t.oldest = time.Time{}
	for j := range t.queue.current {
		if at := j.meta.QueuedAt(); !j.active() && (t.oldest.IsZero() || at.Before(t.oldest)) {
			t.oldest = at
		}
		if !j.writePending {
			t.reviewJob(ctx, j, now)
		}
	}
	t.forgetLeases(now)
	t.collectGarbage(ctx, now)
	t.reviewDemands(ctx, now)
	t.reviewPools(ctx, now)
	t.reviewOffers(now)
	t.offers.next.review(ctx, t, now)
}

func (t *term) reviewJob(ctx context.Context, j *job, now time.Time) {
	switch j.state {
	case queued:
		if t.isOverdue(j, now) {
			t.expire(ctx, j)
		}
	case assigned:
		w := t.workers[j.worker]
		switch {
		case w != nil && (w.held[j.meta.TraceID] || w.seen.Sub(j.since) < t.timing.claimGrace):
		case w == nil && now.Sub(j.since) < t.timing.claimGrace:
		case w == nil:
			t.writeLoss(ctx, j)
		default: // the assignment was lost on the way
			t.Log.Warn("assignment lost", "trace_id", j.meta.TraceID, "worker", j.worker)
			delete(w.used, j.ticket)
			t.queue.requeue(j)
		}
	case running:
		t.reviewRunning(ctx, j, now)
	}
}

// reviewRunning ends an attempt whose worker has lost its lease or given the attempt up. A claim
// may be newer than the loss: the worker then has the length of a lease to claim again under its
// next one.
func (t *term) reviewRunning(ctx context.Context, j *job, now time.Time) {
	if j.cancelling && now.Sub(j.notified) > t.timing.renewEvery {
		j.notified = now
		(&Queue{Store: t.Store}).notifyCancel(j.worker, j.meta.TraceID)
	}
	lease := t.reviewLease(ctx, j, now)
	if !lease.ended || now.Sub(j.since) <= t.timing.leaseTimeout {
		return
	}
	known := &proto.Record{Meta: j.meta, Status: proto.StatusRunning, Attempt: j.attempt, Worker: j.worker}
	revision, renewed := j.revision, lease.renewed
	t.write(ctx, j, func(ctx context.Context, q *Queue) (*proto.Record, uint64, error) {
		return q.endAttempt(ctx, known, revision, renewed)
	}, nil)
}

// isOverdue reports whether a queued job is past its deadline. Each further attempt may wait as
// long as the first.
func (t *term) isOverdue(j *job, now time.Time) bool {
	deadline := j.meta.QueueDeadline.Add(expiryGrace)
	if j.attempt > 0 {
		deadline = j.since.Add(j.meta.QueueDeadline.Sub(j.meta.QueuedAt()))
	}
	return now.After(deadline)
}

// expire ends an overdue job and removes it from the queue immediately.
func (t *term) expire(ctx context.Context, j *job) {
	t.queue.expire(j)
	t.overdue = append(t.overdue, j)
	t.writeExpired(ctx)
}

// writeExpired starts writes of overdue jobs up to the limit. A failed write is repeated after the
// others, and stays pending for a moment: the store may be rejecting all of them.
func (t *term) writeExpired(ctx context.Context) {
	for t.expiring < maxExpiring && len(t.overdue) > 0 {
		j := t.overdue[0]
		t.overdue = t.overdue[1:]
		if j.state != expired || j.writePending || t.queue.jobs[j.meta.TraceID] != j {
			continue // changed meanwhile
		}
		t.expiring++
		org, id, result := j.meta.Org, j.meta.TraceID, t.expiredResult(&j.meta)
		t.write(ctx, j, func(ctx context.Context, q *Queue) (*proto.Record, uint64, error) {
			rec, revision, err := q.withdraw(ctx, org, id, result)
			if err != nil || !rec.Status.Terminal() {
				_ = pause(ctx, err)
			}
			return rec, revision, err
		}, func() {
			t.expiring--
			t.overdue = append(t.overdue, j)
			t.writeExpired(ctx)
		})
	}
}

// expiredResult returns the result of an overdue job.
func (t *term) expiredResult(m *proto.Meta) proto.Result {
	waited := m.QueueDeadline.Sub(m.QueuedAt()).Round(time.Millisecond)
	if needs := needsOf(m); !t.anyWorkerMeets(needs, m.SandboxMemory) {
		return proto.Failure(proto.CodeExpiredInQueue, fmt.Sprintf("No worker with %s was available within %s.",
			strings.Join(needs, " and "), waited))
	}
	return proto.Failure(proto.CodeExpiredInQueue, fmt.Sprintf("No slot was free for it within %s.", waited))
}

// writeLoss counts a worker lost with an assigned job. The job is requeued only once the count is
// stored, since the next worker and this dispatcher may be lost together.
func (t *term) writeLoss(ctx context.Context, j *job) {
	t.Log.Warn("worker lost with an assigned job", "trace_id", j.meta.TraceID, "worker", j.worker, "losses", j.losses+1)
	org, id, worker, revision := j.meta.Org, j.meta.TraceID, j.worker, j.revision
	t.write(ctx, j, func(ctx context.Context, q *Queue) (*proto.Record, uint64, error) {
		return q.countLoss(ctx, org, id, worker, func(_ *proto.Record, at uint64) bool { return at == revision })
	}, nil)
}

// write changes the record of a job outside the loop and applies the result. change returns the new
// record and its revision, or nil if a concurrent change makes that unknown. The record is applied
// in every case, since the dispatcher may have missed a change. done, if not nil, is then called in
// the loop. The next review repeats a failed write of a loss.
func (t *term) write(
	ctx context.Context, j *job, change func(context.Context, *Queue) (*proto.Record, uint64, error), done func(),
) {
	j.writePending = true
	id := j.meta.TraceID
	go func() {
		bounded, cancel := context.WithTimeout(ctx, submitTimeout)
		defer cancel()
		rec, revision, err := change(bounded, &Queue{Store: t.Store, Ended: t.Ended})
		if err != nil && ctx.Err() == nil {
			t.Log.Warn("write of a terminal record or loss failed, will retry", "trace_id", id, "error", err)
		}
		t.post(ctx, func() {
			if done != nil {
				defer done()
			}
			j := t.queue.jobs[id]
			if j == nil {
				return
			}
			j.writePending = false
			switch {
			case store.IsRejected(err) && j.state == running:
				j.since = time.Now() // the holder could not renew its lease either
			case err == nil && rec != nil:
				t.apply(ctx, j, stateOf(rec, revision))
			}
		})
	}()
}
