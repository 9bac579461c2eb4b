package queue

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/proto/fault"
	"github.com/bullpen-run/bullpen/scheduler/store"
	"github.com/bullpen-run/bullpen/scheduler/threads"
)

// review looks for what has not happened in time: workers that fell silent, assignments that were not taken up, leases that were
// not renewed, jobs that waited too long.
func (l *leading) review(ctx context.Context, now time.Time) {
	for name, w := range l.workers {
		if now.Sub(w.heard) > workerDead {
			delete(l.workers, name)
			l.Log.Warn("worker fell silent", "worker", name)
		}
	}
	maps.DeleteFunc(l.ended, func(_ proto.TraceID, e end) bool { return now.Sub(e.at) > endedKept })
	for _, j := range l.book.jobs {
		if !j.ending {
			l.reviewJob(ctx, j, now)
		}
	}
	l.tidy(ctx, now)
}

func (l *leading) reviewJob(ctx context.Context, j *job, now time.Time) {
	switch j.state {
	case queued:
		if l.late(j, now) {
			l.expire(ctx, j)
		}
	case assigned:
		w := l.workers[j.worker]
		switch {
		case w != nil && (w.held[j.meta.TraceID] || w.heard.Sub(j.since) < claimGrace):
		case w == nil && now.Sub(j.since) < claimGrace:
		default:
			l.comeBack(ctx, j, w)
		}
	case running:
		if now.Sub(j.since) > leaseOver {
			seen := &proto.Record{Meta: j.meta, Status: proto.StatusRunning, Attempt: j.attempt, Worker: j.worker}
			revision := j.revision
			l.end(ctx, j, func(ctx context.Context, q *Queue) (*proto.Record, uint64, error) { return q.lose(ctx, seen, revision) })
		}
	}
}

// late reports whether a queued job has waited too long.
func (l *leading) late(j *job, now time.Time) bool {
	late := j.meta.QueueDeadline.Add(expiryGrace)
	if j.attempt > 0 { // waiting for another attempt, for as long again
		late = j.since.Add(j.meta.QueueDeadline.Sub(j.meta.CreatedAt))
	}
	return now.After(late)
}

// expire ends a job that is late, and reports whether it does: not while too many are being ended.
func (l *leading) expire(ctx context.Context, j *job) bool {
	if l.endings >= maxExpiring {
		return false
	}
	l.withdraw(ctx, j, expired(&j.meta, !l.offered(j.kind)))
	return true
}

// comeBack returns a job that its worker did not take up to the line. Where the worker w is gone that is a loss, which is written down first:
// the count must outlive this dispatcher, which may run beside the next worker that the job takes with it.
func (l *leading) comeBack(ctx context.Context, j *job, w *member) {
	if w != nil {
		l.Log.Warn("an assigned job comes back", "trace_id", j.meta.TraceID, "worker", j.worker)
		delete(w.used, j.ticket) // if the worker still says that it is free, the assignment was lost on the way
		l.book.requeue(j)
		return
	}
	l.Log.Warn("a worker was lost with an assigned job", "trace_id", j.meta.TraceID, "worker", j.worker, "losses", j.losses+1)
	id, worker, revision := j.meta.TraceID, j.worker, j.revision
	l.end(ctx, j, func(ctx context.Context, q *Queue) (*proto.Record, uint64, error) {
		return q.countLoss(ctx, id, worker, func(_ *proto.Record, at uint64) bool { return at == revision })
	})
}

// countLoss writes into the record of an execution that a worker was lost before it started the program, if the execution is queued and counts
// says of its record that this is not told there. With the last of startsAllowed the execution ends. It returns the record that stands, with
// its sequence number; nil where that is not known because somebody changed it meanwhile.
func (q *Queue) countLoss(ctx context.Context, id proto.TraceID, worker string, counts func(rec *proto.Record, at uint64) bool) (*proto.Record, uint64, error) {
	rec, seq, err := q.lookup(ctx, id)
	if err != nil || rec.Status != proto.StatusQueued || !counts(rec, seq) {
		return rec, seq, err
	}
	next := *rec
	next.Lost = append(slices.Clone(rec.Lost), worker)
	if len(next.Lost) >= startsAllowed {
		next = *terminal(&next, proto.Failure(proto.CodeWorkerLost, fmt.Sprintf("%d workers were lost with this job, each before it started "+
			"the program. The job is not tried again; it is kept among the dead letters, for whoever administers this server.", len(next.Lost))), time.Now())
	}
	revision, err := q.Store.WriteRecord(ctx, &next, seq)
	if store.IsConflict(err) {
		return nil, 0, nil // it was claimed, cancelled or counted
	}
	if err != nil {
		return nil, 0, fmt.Errorf("count the loss of %s: %w", id, err)
	}
	return &next, revision, nil
}

// withdraw ends a job that has not started.
func (l *leading) withdraw(ctx context.Context, j *job, r proto.Result) {
	id := j.meta.TraceID
	l.end(ctx, j, func(ctx context.Context, q *Queue) (*proto.Record, uint64, error) { return q.withdraw(ctx, id, r) })
}

// end writes a record that ends a job, or counts a loss of it, beside the loop, and takes in the record that stands then: write returns it with
// its sequence number, nil where it is not known. The book may have been wrong about the job, and the stream does not tell twice. When the
// write fails, review tries again.
func (l *leading) end(ctx context.Context, j *job, write func(context.Context, *Queue) (*proto.Record, uint64, error)) {
	j.ending = true
	l.endings++
	id := j.meta.TraceID
	go func() {
		bounded, cancel := context.WithTimeout(ctx, submitTimeout)
		defer cancel()
		rec, revision, err := write(bounded, &Queue{Store: l.Store})
		if err != nil && ctx.Err() == nil {
			l.Log.Warn("the end or the loss of a job could not be written, will retry", "trace_id", id, "error", err)
		}
		l.post(ctx, func() {
			l.endings--
			j := l.book.jobs[id]
			if j == nil {
				return
			}
			j.ending = false
			switch {
			case store.IsRejected(err) && j.state == running:
				j.since = time.Now() // its holder could not renew either
			case err == nil && rec != nil:
				l.changed(ctx, j, standing{rec.Status, rec.Attempt, rec.Worker, len(rec.Lost), revision})
			}
		})
	}()
}

// expired is the result of a job that has waited too long. unable says that no live worker offers what it needs.
func expired(m *proto.Meta, unable bool) proto.Result {
	waited := m.QueueDeadline.Sub(m.CreatedAt).Round(time.Millisecond)
	if unable {
		return proto.Failure(proto.CodeExpiredInQueue, fmt.Sprintf("No worker that offers %s was there to start the program within %s.",
			strings.Join(needsOf(m), " and "), waited))
	}
	return proto.Failure(proto.CodeExpiredInQueue, fmt.Sprintf("No worker was free to start the program within %s.", waited))
}

// lose ends an execution whose holder did not renew its lease: as lost, or in line for its next attempt; or, if its program had ended and
// only the commit of its home was missing, as that program did. seen is what the dispatcher knows of it, which stands in for a record that
// cannot be read. It returns the record that stands, with its sequence number; nil where that is not known because somebody changed it
// meanwhile.
func (q *Queue) lose(ctx context.Context, seen *proto.Record, at uint64) (*proto.Record, uint64, error) {
	id := seen.TraceID
	m, err := q.Store.LastFromLeader(ctx, q.Store.Executions, store.ExecSubject(id))
	if err != nil {
		return nil, 0, fmt.Errorf("lose %s: %w", id, err)
	}
	rec, err := proto.DecodeRecord(id, m.Data)
	if err != nil {
		rec = seen
	} else if m.Seq != at {
		return rec, m.Seq, nil // it has moved on, or was renewed
	}
	pending := rec.Pending != nil
	if pending {
		rec, err = q.complete(ctx, rec)
	} else {
		rec, err = q.giveUp(ctx, rec, m.Time)
	}
	if err != nil {
		return nil, 0, fmt.Errorf("lose %s: %w", id, err)
	}
	revision, err := q.Store.WriteRecord(ctx, rec, m.Seq)
	if store.IsConflict(err) {
		return nil, 0, nil // the holder was not lost, or somebody else saw it first
	}
	if err == nil && pending {
		q.Store.DiscardBody(ctx, m)
	}
	return rec, revision, err
}

// complete makes the commit that rec tells of, and the record that follows.
func (q *Queue) complete(ctx context.Context, rec *proto.Record) (*proto.Record, error) {
	result, err := commit(ctx, q.Store, rec)
	if err != nil {
		return nil, err
	}
	return terminal(rec, result, time.Now()), nil
}

// giveUp makes the record that follows rec, whose holder renewed it at a time for the last time. The holder may live and not know of it
// yet: it can commit nothing any more.
func (q *Queue) giveUp(ctx context.Context, rec *proto.Record, renewed time.Time) (*proto.Record, error) {
	if rec.ThreadID != "" {
		if err := (&threads.Threads{Store: q.Store}).Fence(ctx, rec.Org, rec.ThreadID, rec.TraceID); err != nil {
			return nil, err
		}
		fault.Here(fault.AfterFenceBeforeLost)
	}
	last, err := q.Store.LastEvent(ctx, rec.TraceID, rec.Attempt)
	if err != nil {
		return nil, err
	}
	rec.ResultSeq = last
	var known time.Duration // that it ran for: until the lease was last renewed
	if rec.StartedAt != nil {
		known = max(0, renewed.Sub(*rec.StartedAt))
	}
	switch {
	case rec.Cancelling:
		rec = terminal(rec, proto.Cancelled(), time.Now())
	case rec.Attempt < rec.MaxAttempts:
		rec.Status, rec.Worker, rec.StartedAt = proto.StatusQueued, "", nil
	default:
		rec = terminal(rec, proto.Failure(proto.CodeWorkerLost, fmt.Sprintf(
			"The worker that ran attempt %d of %d was lost, and the program with it. It is known to have run for %s.",
			rec.Attempt, rec.MaxAttempts, known.Round(time.Millisecond))), time.Now())
	}
	if rec.Result != nil {
		rec.Result.DurationMS = known.Milliseconds()
	}
	return rec, nil
}
