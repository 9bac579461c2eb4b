package queue

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/nats-io/nats.go"

	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/proto/fault"
	"github.com/bullpen-run/bullpen/scheduler/store"
)

// finishPause is the time between two attempts to write a result.
const finishPause = 250 * time.Millisecond

// Lease is the right to run one attempt of one job. [Slots.Take] returns it, Claim records it
// before the program starts, and Finish or Release ends it.
type Lease struct {
	slots   *Slots
	id      proto.TraceID
	seq     uint64      // of the job in its stream; 0 while it is being stored
	msg     *nats.Msg   // the job, if it came with the assignment
	ack     chan string // of a job that is being stored; nil otherwise
	started *time.Time  // nil before the claim
	attempt int
	job     *proto.Job

	// The entry in the journal. Guarded by slots.mu.
	journaled bool
	entry     int

	// The record and its revision are owned by renewLoop while that runs, and by the caller
	// otherwise.
	rec      *proto.Record
	revision uint64

	mu       sync.Mutex
	renewing bool // renewLoop runs
	reads    chan struct{}
	cancel   context.CancelCauseFunc // of the program's context
	quit     context.CancelFunc      // ends renewLoop
	stopped  chan struct{}           // closed when renewLoop has returned
}

// Job returns the job to run.
func (l *Lease) Job() *proto.Job { return l.job }

// Attempt returns the number of the attempt, starting at 1.
func (l *Lease) Attempt() int { return l.attempt }

// load reads the job. It returns [proto.ErrNotFound] if the job was removed.
func (l *Lease) load(ctx context.Context) error {
	st := l.slots.Store
	var m *store.Message
	var err error
	if l.msg != nil {
		m, err = st.ReadBody(ctx, l.msg)
	} else {
		m, err = st.At(ctx, st.Jobs, l.seq)
	}
	if store.IsNotFound(err) {
		return fmt.Errorf("job %s: %w", l.id, proto.ErrNotFound)
	}
	if err != nil {
		return err
	}
	job, err := store.DecodeJob(m, l.id)
	if err != nil {
		return l.reject(ctx, m, err)
	}
	l.job, l.msg = job, nil
	return nil
}

// reject ends an execution whose job is malformed, as far as its header can be read. It returns
// cause.
func (l *Lease) reject(ctx context.Context, m *store.Message, cause error) error {
	meta, err := store.DecodeMeta(m.Header)
	if err != nil {
		return errors.Join(cause, err)
	}
	rec := terminal(&proto.Record{Meta: *meta, Attempt: l.attempt - 1}, proto.Failure(proto.CodeSandboxStart,
		"The stored job could not be read, so its program was not started."), time.Now())
	q := &Queue{Store: l.slots.Store, Ended: l.slots.Ended}
	if _, err := q.writeRecord(ctx, rec, l.revision); err != nil && !store.IsConflict(err) {
		return errors.Join(cause, err)
	}
	return cause
}

// awaitStored waits until the job is stored. It returns [proto.ErrNotFound] if the job must not
// start.
func (l *Lease) awaitStored(ctx context.Context) error {
	if l.ack == nil {
		return nil
	}
	timeout := time.NewTimer(l.slots.timing.ackWait)
	defer timeout.Stop()
	select {
	case ack := <-l.ack:
		if ack != ackStored {
			return fmt.Errorf("job %s was not stored: %w", l.id, proto.ErrNotFound)
		}
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	case <-timeout.C: // lost with a dispatcher or a connection
		_, err := l.slots.Store.JobMeta(ctx, l.id)
		return err
	}
}

// Claim records that this worker starts the program. After a nil error nobody else starts it; after
// any other error it must not be started. The returned context is cancelled, with cause
// [proto.ErrCancelled] or [proto.ErrLost], when the program must be stopped. baseSeq is the
// sequence number of the last event of earlier attempts.
func (l *Lease) Claim(ctx context.Context) (claimed context.Context, baseSeq int64, err error) {
	if err := l.awaitStored(ctx); err != nil {
		return nil, 0, fmt.Errorf("claim %s: %w", l.id, err)
	}
	if l.attempt > 1 {
		if baseSeq, err = l.slots.Store.LastEvent(ctx, l.id, l.attempt-1); err != nil {
			return nil, 0, err
		}
	}
	now := time.Now().UTC()
	l.started = &now
	l.rec = &proto.Record{
		Meta: l.job.Meta, Status: proto.StatusRunning, Attempt: l.attempt, Worker: l.slots.Worker, StartedAt: &now,
		ResultSeq: baseSeq,
	}
	sent := time.Now()
	l.revision, err = l.slots.Store.WriteRecord(ctx, l.rec, l.revision)
	if err != nil {
		return nil, 0, fmt.Errorf("claim %s: %w", l.id, err)
	}
	l.slots.onClaimed(l)
	if l.slots.Started != nil {
		l.slots.Started(l.rec)
	}
	// If the acknowledgement was late, the lease would run out before its first renewal.
	if time.Since(sent) > l.slots.timing.renewEvery {
		sent = time.Now()
		if err := l.renew(ctx); err != nil {
			return nil, 0, fmt.Errorf("renew %s after a late claim: %w", l.id, err)
		}
	}
	claimed, l.cancel = context.WithCancelCause(ctx)
	// The lease is renewed until the result is written, also while the program is being stopped.
	renewing, quit := context.WithCancel(context.WithoutCancel(ctx))
	l.reads, l.stopped, l.quit = make(chan struct{}, 1), make(chan struct{}), quit
	l.mu.Lock()
	l.renewing = true
	l.mu.Unlock()
	go l.renewLoop(renewing, sent)
	return claimed, baseSeq, nil
}

// requestRead makes renewLoop read the record before the next renewal.
func (l *Lease) requestRead() {
	l.mu.Lock()
	defer l.mu.Unlock()
	if !l.renewing {
		return
	}
	select {
	case l.reads <- struct{}{}:
	default:
	}
}

// renewLoop renews the lease until ctx is done. It cancels the program's context if the record says
// so, or if no renewal sent in the last holderTimeout was confirmed. A timer decides that, since a
// renewal may get no answer at all.
func (l *Lease) renewLoop(ctx context.Context, sent time.Time) {
	defer close(l.stopped)
	holderTimeout := l.slots.timing.holderTimeout
	expiry := time.AfterFunc(holderTimeout-time.Since(sent), func() {
		l.cancel(fmt.Errorf("%w: no renewal for %s", proto.ErrLost, holderTimeout))
		l.quit()
	})
	defer expiry.Stop()
	tick := time.NewTicker(l.slots.timing.renewEvery)
	defer tick.Stop()
	for {
		var err error
		select {
		case <-ctx.Done():
			return
		case <-l.reads:
			err = l.read(ctx)
		case <-tick.C:
			sent = time.Now()
			// A store that rejects this write does not accept anybody else's claim either.
			if err = l.renew(ctx); (err == nil || store.IsRejected(err)) && !expiry.Reset(holderTimeout-time.Since(sent)) {
				return // too late
			}
		}
		switch {
		case errors.Is(err, proto.ErrLost):
			l.cancel(err)
			return
		case l.rec.Cancelling:
			l.cancel(proto.ErrCancelled)
		}
	}
}

// errUnreadable hides why a changed record could not be read: a rejected read is no rejected write.
var errUnreadable = errors.New("the record was changed and could not be read")

// renew writes the record again, with the changes of others in it.
func (l *Lease) renew(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, l.slots.timing.renewTimeout)
	defer cancel()
	for {
		revision, err := l.slots.Store.WriteRecord(ctx, l.rec, l.revision)
		switch {
		case err == nil:
			l.revision = revision
			return nil
		case !store.IsConflict(err):
			return err
		}
		if err := l.adopt(ctx); errors.Is(err, proto.ErrLost) {
			return err
		} else if err != nil {
			return fmt.Errorf("%w: %v", errUnreadable, err) //nolint:errorlint // see errUnreadable
		}
	}
}

func (l *Lease) read(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, l.slots.timing.renewTimeout)
	defer cancel()
	return l.adopt(ctx)
}

// adopt reads the record, which may have been marked as cancelled. It returns [proto.ErrLost] if
// the lease is not ours any more.
func (l *Lease) adopt(ctx context.Context) error {
	rec, revision, err := l.slots.Store.Record(ctx, l.id)
	if errors.Is(err, proto.ErrNotFound) {
		return fmt.Errorf("%w: its record is gone", proto.ErrLost)
	}
	if errors.Is(err, store.ErrMalformed) {
		l.revision = revision // not written by a lease holder, so it is overwritten
		return nil
	}
	if err != nil {
		return err
	}
	if rec.Status != proto.StatusRunning || rec.Worker != l.slots.Worker || rec.Attempt != l.attempt {
		return fmt.Errorf("%w: the record is %s, attempt %d, by %q", proto.ErrLost, rec.Status, rec.Attempt, rec.Worker)
	}
	l.rec, l.revision = rec, revision
	return nil
}

// Outcome is the outcome of an attempt.
type Outcome struct {
	Result          proto.Result
	LastSeq         int64 // of the last event published
	OutputTruncated bool
	Usage           *proto.Usage
	Steps           *proto.Steps  // nil if they are not known
	Commit          *proto.Commit // of the thread's home; nil if there is nothing to commit
	Volumes         []proto.VolumeCommit
}

// Finish writes the terminal record and returns it. If another process wrote one first, Finish
// returns that and [proto.ErrLost]. It retries until ctx is done, and renews the lease while a
// large result is being stored. It also works without a claim.
//
// Commits take these writes: the record with the pending result, one for each commit, the terminal
// record. After the first one the outcome is decided: if the lease ends, the dispatcher makes the
// others.
func (l *Lease) Finish(ctx context.Context, o Outcome) (*proto.Record, error) {
	defer l.slots.forget(l.id)
	defer l.stop()
	done := &proto.Record{Meta: l.job.Meta, Attempt: l.attempt, Worker: l.slots.Worker, StartedAt: l.started}
	done.ResultSeq, done.OutputTruncated, done.Usage, done.Steps = o.LastSeq, o.OutputTruncated, o.Usage, o.Steps
	rec, err := l.finish(ctx, done, o)
	if errors.Is(err, proto.ErrLost) {
		rec, _, err := l.slots.Store.Record(ctx, l.id)
		if err != nil {
			return nil, fmt.Errorf("finish %s: %w", l.id, err)
		}
		return rec, proto.ErrLost
	}
	if err != nil {
		return nil, fmt.Errorf("finish %s: %w", l.id, err)
	}
	return rec, nil
}

func (l *Lease) finish(ctx context.Context, done *proto.Record, o Outcome) (*proto.Record, error) {
	result := o.Result
	var pending *store.StagedRecord
	if o.Commit != nil || len(o.Volumes) > 0 {
		done.Status, done.Pending, done.Commit, done.VolumeCommits = proto.StatusRunning, &o.Result, o.Commit, o.Volumes
		var err error
		began := time.Now()
		if pending, err = l.write(ctx, done); err != nil {
			return nil, err
		}
		fault.Here(fault.AfterPendingBeforeCommit)
		if result, err = l.commit(ctx, done); err != nil {
			return nil, err
		}
		if done.Steps != nil {
			done.Steps.Commit = done.Steps.Interval(began, time.Now())
		}
		fault.Here(fault.AfterCommitBeforeResult)
	}
	rec := terminal(done, result, time.Now())
	if _, err := l.write(ctx, rec); err != nil {
		return nil, err
	}
	fault.Here(fault.AfterResultBeforeAck)
	if pending != nil {
		pending.Discard(ctx)
	}
	return rec, nil
}

// write replaces the record, also if others have changed it while the lease is ours. It stops
// renewLoop before that, and retries until ctx is done. It returns [proto.ErrLost] if the lease is
// not ours any more.
func (l *Lease) write(ctx context.Context, rec *proto.Record) (*store.StagedRecord, error) {
	var staged *store.StagedRecord
	for {
		var err error
		if staged == nil {
			staged, err = l.slots.Store.StageRecord(ctx, rec)
		}
		if staged != nil {
			l.stop()
			var revision uint64
			if revision, err = staged.Write(ctx, l.revision); err == nil {
				l.revision = revision
				return staged, nil
			}
		}
		if store.IsConflict(err) {
			err = l.adopt(ctx)
			if errors.Is(err, proto.ErrLost) {
				staged.Discard(ctx)
				return nil, err
			}
			if err == nil {
				continue
			}
		}
		if err := pause(ctx, err); err != nil {
			return nil, err
		}
	}
}

// commit makes the commits of a stored record and returns the result. It retries until ctx is done.
func (l *Lease) commit(ctx context.Context, rec *proto.Record) (proto.Result, error) {
	for {
		result, err := commit(ctx, l.slots.Store, rec)
		if err == nil {
			return result, nil
		}
		if err := pause(ctx, err); err != nil {
			return result, err
		}
	}
}

// pause waits before a retry. If ctx is done, it returns cause with the cause of ctx.
func pause(ctx context.Context, cause error) error {
	select {
	case <-ctx.Done():
		return errors.Join(cause, context.Cause(ctx))
	case <-time.After(finishPause):
		return nil
	}
}

// Release ends a lease without a result: the job was not claimed, or the lease was lost.
func (l *Lease) Release() {
	l.stop()
	l.slots.forget(l.id)
}

// stop stops renewLoop and waits for it, so that the revision does not change any more.
func (l *Lease) stop() {
	l.mu.Lock()
	renewing := l.renewing
	l.renewing = false
	l.mu.Unlock()
	if renewing {
		l.quit()
		<-l.stopped
		l.cancel(context.Canceled)
	}
}
