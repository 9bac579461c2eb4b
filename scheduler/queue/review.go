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
		if now.Sub(w.seen) > workerTimeout {
			delete(t.workers, name)
			t.Log.Warn("worker lost", "worker", name)
		}
	}
	maps.DeleteFunc(t.outcomes, func(_ proto.TraceID, o outcome) bool { return now.Sub(o.at) > outcomesKept })
	for _, j := range t.queue.jobs {
		if !j.writePending {
			t.reviewJob(ctx, j, now)
		}
	}
	t.collectGarbage(ctx, now)
}

func (t *term) reviewJob(ctx context.Context, j *job, now time.Time) {
	switch j.state {
	case queued:
		if t.overdue(j, now) {
			t.expire(ctx, j)
		}
	case assigned:
		w := t.workers[j.worker]
		switch {
		case w != nil && (w.held[j.meta.TraceID] || w.seen.Sub(j.since) < claimGrace):
		case w == nil && now.Sub(j.since) < claimGrace:
		case w == nil:
			t.writeLoss(ctx, j)
		default: // the assignment was lost on the way
			t.Log.Warn("assignment lost", "trace_id", j.meta.TraceID, "worker", j.worker)
			delete(w.used, j.ticket)
			t.queue.requeue(j)
		}
	case running:
		if now.Sub(j.since) > leaseTimeout {
			known := &proto.Record{Meta: j.meta, Status: proto.StatusRunning, Attempt: j.attempt, Worker: j.worker}
			revision := j.revision
			t.write(ctx, j, func(ctx context.Context, q *Queue) (*proto.Record, uint64, error) {
				return q.endLease(ctx, known, revision)
			})
		}
	}
}

// overdue reports whether a queued job is past its deadline. Each further attempt may wait as long
// as the first.
func (t *term) overdue(j *job, now time.Time) bool {
	deadline := j.meta.QueueDeadline.Add(expiryGrace)
	if j.attempt > 0 {
		deadline = j.since.Add(j.meta.QueueDeadline.Sub(j.meta.CreatedAt))
	}
	return now.After(deadline)
}

// expire ends an overdue job. It returns false if too many writes are pending.
func (t *term) expire(ctx context.Context, j *job) bool {
	if t.writes >= maxExpiring {
		return false
	}
	t.withdraw(ctx, j, expired(&j.meta, t.anyWorkerMeets(j.needs)))
	return true
}

// expired returns the result of an overdue job. able says that a live worker meets its needs.
func expired(m *proto.Meta, able bool) proto.Result {
	waited := m.QueueDeadline.Sub(m.CreatedAt).Round(time.Millisecond)
	if !able {
		return proto.Failure(proto.CodeExpiredInQueue, fmt.Sprintf("No worker that offers %s was there to start the program within %s.",
			strings.Join(needsOf(m), " and "), waited))
	}
	return proto.Failure(proto.CodeExpiredInQueue, fmt.Sprintf("No worker was free to start the program within %s.", waited))
}

// writeLoss counts a worker that was lost with an assigned job. The job is requeued when the count
// is stored, since the next worker and this dispatcher may be lost together.
func (t *term) writeLoss(ctx context.Context, j *job) {
	t.Log.Warn("worker lost with an assigned job", "trace_id", j.meta.TraceID, "worker", j.worker, "losses", j.losses+1)
	id, worker, revision := j.meta.TraceID, j.worker, j.revision
	t.write(ctx, j, func(ctx context.Context, q *Queue) (*proto.Record, uint64, error) {
		return q.countLoss(ctx, id, worker, func(_ *proto.Record, at uint64) bool { return at == revision })
	})
}

// withdraw ends a job that has not started.
func (t *term) withdraw(ctx context.Context, j *job, r proto.Result) {
	id := j.meta.TraceID
	t.write(ctx, j, func(ctx context.Context, q *Queue) (*proto.Record, uint64, error) { return q.withdraw(ctx, id, r) })
}

// write changes the record of a job outside the loop and applies the result. change returns the
// record as it is then and its revision, or nil if a concurrent change makes that unknown. The
// record is applied in every case, since the dispatcher may have missed a change. If the write
// fails, the next review repeats it.
func (t *term) write(ctx context.Context, j *job, change func(context.Context, *Queue) (*proto.Record, uint64, error)) {
	j.writePending = true
	t.writes++
	id := j.meta.TraceID
	go func() {
		bounded, cancel := context.WithTimeout(ctx, submitTimeout)
		defer cancel()
		rec, revision, err := change(bounded, &Queue{Store: t.Store})
		if err != nil && ctx.Err() == nil {
			t.Log.Warn("write of a terminal record or loss failed, will retry", "trace_id", id, "error", err)
		}
		t.post(ctx, func() {
			t.writes--
			j := t.queue.jobs[id]
			if j == nil {
				return
			}
			j.writePending = false
			switch {
			case store.IsRejected(err) && j.state == running:
				j.since = time.Now() // the holder could not renew its lease either
			case err == nil && rec != nil:
				t.apply(ctx, j, recordState{rec.Status, rec.Attempt, rec.Worker, len(rec.Lost), revision})
			}
		})
	}()
}
