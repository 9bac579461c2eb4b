package queue

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/proto/fault"
	"github.com/bullpen-run/bullpen/scheduler/store"
	"github.com/bullpen-run/bullpen/scheduler/threads"
)

// lookup returns the record of an execution and its revision, which is 0 for a job without a
// record.
func (q *Queue) lookup(
	ctx context.Context, org string, id proto.TraceID, opts ...store.ReadOption,
) (*proto.Record, uint64, error) {
	rec, revision, err := q.Store.Records.Get(ctx, org, id, opts...)
	if !errors.Is(err, proto.ErrNotFound) {
		return rec, revision, err
	}
	meta, err := q.Store.Jobs.Meta(ctx, org, id)
	if errors.Is(err, proto.ErrNotFound) {
		// The record is written before the job is removed: it may have appeared between the two
		// reads.
		return q.Store.Records.Get(ctx, org, id, opts...)
	}
	if err != nil {
		return nil, 0, err
	}
	return &proto.Record{Meta: *meta, Status: proto.StatusQueued}, 0, nil
}

// terminal returns the terminal record that follows rec.
func terminal(rec *proto.Record, r proto.Result, now time.Time) *proto.Record {
	out := *rec
	done := now.UTC()
	out.Status, out.Result, out.CompletedAt, out.Cancelling = r.Status(), &r, &done, false
	out.Epoch, out.Pending, out.Commit, out.VolumeCommits = "", nil, nil, nil
	out.ResultSeq++ // the result follows the last event that the record knows
	return &out
}

// writeRecord stores rec if the record has the given revision, and returns the new one. A terminal
// record is stored with the request, which only the job has until then.
func (q *Queue) writeRecord(ctx context.Context, rec *proto.Record, revision uint64) (uint64, error) {
	if rec.Status.Terminal() && rec.Request == nil {
		kept := *rec
		// Best effort: the execution ends with or without it. The body of a job that is stored apart is
		// not read: its request is usually too large to be kept.
		kept.Request, _ = q.jobRequest(ctx, &rec.Meta, store.WithoutBody)
		rec = &kept
	}
	revision, err := q.Store.Records.Put(ctx, rec, revision)
	if err == nil && rec.Status.Terminal() && q.Ended != nil {
		q.Ended(rec)
	}
	return revision, err
}

// jobRequest returns the request of an execution's job, nil if there is none to keep.
func (q *Queue) jobRequest(ctx context.Context, of *proto.Meta, opts ...store.ReadOption) (*proto.Request, error) {
	if of.Batch != "" || of.SandboxID != "" {
		return nil, nil
	}
	m, err := q.Store.Jobs.Last(ctx, store.JobPattern(of.Org, of.TraceID), opts...)
	if store.IsNotFound(err) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	job, err := store.DecodeJob(m, of.Org, of.TraceID)
	if err != nil {
		return nil, err
	}
	return job.Request(), nil
}

// withdraw is [Queue.Withdraw], and also returns the revision of the record.
func (q *Queue) withdraw(
	ctx context.Context, org string, id proto.TraceID, r proto.Result,
) (rec *proto.Record, revision uint64, err error) {
	err = store.Update(ctx, func() (err error) {
		rec, revision, err = q.lookup(ctx, org, id)
		if err != nil || rec.Status != proto.StatusQueued {
			return err
		}
		result := r
		if rec.Attempt > 0 && r.ErrorCode != nil && *r.ErrorCode == string(proto.CodeExpiredInQueue) {
			result = proto.Failure(proto.CodeWorkerLost, fmt.Sprintf(
				"The worker that ran attempt %d of %d was lost, and the program with it. No further attempt started: %s",
				rec.Attempt, rec.MaxAttempts, *r.ErrorMessage))
		}
		rec = terminal(rec, result, time.Now())
		if revision, err = q.writeRecord(ctx, rec, revision); err != nil {
			return fmt.Errorf("withdraw %s: %w", id, err)
		}
		return nil
	})
	if err != nil {
		return nil, revision, err
	}
	return rec, revision, nil
}

// countLoss adds worker to the workers lost with a queued job, if isNew reports that the record
// does not include this loss. The maxLosses-th loss ends the execution. countLoss returns the
// record and its revision, or nil if a concurrent change makes that unknown.
func (q *Queue) countLoss(
	ctx context.Context, org string, id proto.TraceID, worker string,
	isNew func(rec *proto.Record, revision uint64) bool,
) (*proto.Record, uint64, error) {
	rec, revision, err := q.lookup(ctx, org, id)
	if err != nil || rec.Status != proto.StatusQueued || !isNew(rec, revision) {
		return rec, revision, err
	}
	next := *rec
	next.Lost = append(slices.Clone(rec.Lost), worker)
	if len(next.Lost) >= maxLosses {
		lost := fmt.Sprintf("%d workers were lost with this job, each before it started the program. "+
			"The job is not tried again; it is stored as a dead letter for the administrator of this server.", len(next.Lost))
		next = *terminal(&next, proto.Failure(proto.CodeWorkerLost, lost), time.Now())
	}
	revision, err = q.writeRecord(ctx, &next, revision)
	if store.IsConflict(err) {
		return nil, 0, nil // claimed, cancelled or counted concurrently
	}
	if err != nil {
		return nil, 0, fmt.Errorf("count the loss of %s: %w", id, err)
	}
	return &next, revision, nil
}

// endAttempt ends an attempt that has lost its lease. The execution is requeued for its next
// attempt or ends as lost. If its program had ended and only commits were missing, endAttempt
// completes them. known is the dispatcher's knowledge, in case the record is malformed. renewed is
// when the lease was last renewed, zero if unknown. endAttempt returns the record and its revision,
// or nil if a concurrent change makes that unknown.
func (q *Queue) endAttempt(
	ctx context.Context, known *proto.Record, revision uint64, renewed time.Time,
) (*proto.Record, uint64, error) {
	org, id := known.Org, known.TraceID
	m, err := q.Store.Records.Last(ctx, store.ExecSubject(org, id), store.FromLeader)
	if err != nil {
		return nil, 0, fmt.Errorf("end the attempt at %s: %w", id, err)
	}
	rec, err := proto.DecodeRecord(id, m.Data)
	if err != nil {
		rec = known
	} else if m.Seq != revision {
		return rec, m.Seq, nil // changed or ended
	}
	pending := rec.Pending != nil
	if pending {
		var result proto.Result
		result, err = commit(ctx, q.Store, rec)
		rec = terminal(rec, result, time.Now())
	} else {
		if stored := m.FirstStored(); stored.After(renewed) {
			renewed = stored
		}
		rec, err = q.loseAttempt(ctx, rec, renewed)
	}
	if err != nil {
		return nil, 0, fmt.Errorf("end the attempt at %s: %w", id, err)
	}
	revision, err = q.writeRecord(ctx, rec, m.Seq)
	if store.IsConflict(err) {
		return nil, 0, nil // changed or ended concurrently
	}
	if err == nil && pending {
		q.Store.Bodies.Discard(ctx, m.Header)
	}
	return rec, revision, err
}

// loseAttempt returns the successor of rec after its attempt was lost. The holder may still be
// alive, so its threads are fenced first: it can commit nothing after that.
func (q *Queue) loseAttempt(ctx context.Context, rec *proto.Record, renewed time.Time) (*proto.Record, error) {
	held := rec.Threads()
	for _, id := range held {
		if err := (&threads.Threads{Store: q.Store}).Fence(ctx, rec.Org, id, rec.TraceID); err != nil {
			return nil, err
		}
	}
	if len(held) > 0 {
		fault.Here(fault.AfterFenceBeforeLost)
	}
	last, err := q.Store.Output.LastEvent(ctx, rec.Org, rec.TraceID, rec.Attempt)
	if err != nil {
		return nil, err
	}
	rec.ResultSeq = last
	var ran time.Duration // known: until the last renewal
	if rec.StartedAt != nil {
		ran = max(0, renewed.Sub(*rec.StartedAt))
	}
	switch {
	case rec.Cancelling && rec.SandboxID == "": // the home of a sandbox that was being stopped is not saved
		rec = terminal(rec, proto.Cancelled(), time.Now())
	case rec.Attempt < rec.MaxAttempts:
		rec.Status, rec.Worker, rec.Epoch, rec.StartedAt = proto.StatusQueued, "", "", nil
	default:
		rec = terminal(rec, proto.Failure(proto.CodeWorkerLost, fmt.Sprintf(
			"The worker that ran attempt %d of %d was lost, and the program with it. It is known to have run for %s.",
			rec.Attempt, rec.MaxAttempts, ran.Round(time.Millisecond))), time.Now())
	}
	if rec.Result != nil {
		rec.Result.DurationMS = ran.Milliseconds()
	}
	return rec, nil
}

// commit makes the commits of rec, skipping those already made. It returns the result of the
// execution: the pending one, or an error because the home or a volume was not saved.
func commit(ctx context.Context, st *store.Store, rec *proto.Record) (proto.Result, error) {
	result := *rec.Pending
	for _, v := range rec.VolumeCommits {
		why, err := commitThread(ctx, st, rec, proto.VolumeThread(v.Volume), &v.Commit)
		if err != nil {
			return proto.Result{}, fmt.Errorf("commit volume %s of %s: %w", v.Volume, rec.TraceID, err)
		}
		if why != "" {
			result = result.Unwritten("The volume " + v.Volume + " was not saved: " + why)
		}
	}
	if rec.Commit == nil {
		return result, nil
	}
	why, err := commitThread(ctx, st, rec, rec.ThreadID, rec.Commit)
	if err != nil {
		return proto.Result{}, fmt.Errorf("commit the home of %s: %w", rec.TraceID, err)
	}
	if why != "" {
		result = result.Unsaved("The home was not saved: " + why)
	}
	return result, nil
}

// commitThread makes a commit of rec. refused is the reason why it cannot be made, a sentence for the
// tenant.
func commitThread(
	ctx context.Context, st *store.Store, rec *proto.Record, thread string, c *proto.Commit,
) (refused string, err error) {
	err = (&threads.Threads{Store: st}).Commit(ctx, rec.Org, thread, rec.TraceID, c)
	switch {
	case errors.Is(err, proto.ErrFenced):
		return "the worker lost its lease on the thread.", nil
	case errors.Is(err, threads.ErrTooLarge):
		return "the thread has too many layers that are not merged yet.", nil
	}
	return "", err
}
