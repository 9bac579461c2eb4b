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
	"github.com/bullpen-run/bullpen/scheduler/threads"
)

const (
	// finishPause is the time between two attempts to write a result.
	finishPause = 250 * time.Millisecond
	// recordTimeout bounds one attempt to read or rewrite the record of a running execution.
	recordTimeout = 2 * time.Second
	// refreshesPerLife is how often a running execution's record is rewritten per retention period.
	refreshesPerLife = 3
)

// Lease is the right to run one attempt of one job. [Slots.Take] returns it, Claim records it
// before the program starts, and Finish or Release ends it. Once claimed, it is valid as long as
// the worker's lease.
type Lease struct {
	slots   *Slots
	org     string
	id      proto.TraceID
	seq     uint64      // of the job in its stream; 0 while it is being stored
	msg     *nats.Msg   // the job, if it came with the assignment
	ack     chan string // of a job that is being stored; nil otherwise
	started *time.Time  // nil before the claim
	attempt int
	memory  int64 // of a live sandbox
	job     *proto.Job

	// The entry in the journal. Guarded by slots.mu.
	journaled bool
	entry     int

	// watch owns the record and its revision while it runs, otherwise the caller does.
	rec      *proto.Record
	revision uint64
	epoch    *epoch // nil before the claim, and when the attempt has ended

	mu       sync.Mutex
	watching bool // watch runs
	reads    chan struct{}
	asked    chan struct{}           // closed by watch when a client has cancelled the execution
	cancel   context.CancelCauseFunc // of the program's context
	quit     context.CancelFunc      // ends watch
	detach   func() bool             // ends the wait for the loss of the lease
	stopped  chan struct{}           // closed when watch has returned
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
		m, err = st.Bodies.Load(ctx, l.msg)
	} else {
		m, err = st.Jobs.At(ctx, l.seq)
	}
	if store.IsNotFound(err) {
		return fmt.Errorf("job %s: %w", l.id, proto.ErrNotFound)
	}
	if err != nil {
		return err
	}
	job, err := store.DecodeJob(m, l.org, l.id)
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
	unreadable := proto.Failure(proto.CodeSandboxStart,
		"The stored job could not be read, so its program was not started.")
	rec := terminal(&proto.Record{Meta: *meta, Attempt: l.attempt - 1}, unreadable, time.Now())
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
		_, err := l.slots.Store.Jobs.Meta(ctx, l.org, l.id)
		return err
	}
}

// Claim records that this worker starts the program. After a nil error no other worker starts it;
// after any other error it must not be started. The returned context is cancelled, with cause
// [proto.ErrLost], when the program must be killed. baseSeq is the sequence number of the last
// event of earlier attempts.
func (l *Lease) Claim(ctx context.Context) (claimed context.Context, baseSeq int64, err error) {
	if err := l.awaitStored(ctx); err != nil {
		return nil, 0, fmt.Errorf("claim %s: %w", l.id, err)
	}
	if l.attempt > 1 {
		if baseSeq, err = l.slots.Store.Output.LastEvent(ctx, l.org, l.id, l.attempt-1); err != nil {
			return nil, 0, err
		}
	}
	if err := l.claim(ctx, baseSeq); err != nil {
		return nil, 0, fmt.Errorf("claim %s: %w", l.id, err)
	}
	l.slots.onClaimed(l)
	if l.slots.Started != nil {
		l.slots.Started(l.rec)
	}
	claimed, l.cancel = context.WithCancelCause(ctx)
	// The record is watched until the result is written, even while the program is being stopped.
	watching, quit := context.WithCancel(context.WithoutCancel(ctx))
	l.reads, l.asked, l.stopped, l.quit = make(chan struct{}, 1), make(chan struct{}), make(chan struct{}), quit
	l.mu.Lock()
	l.watching = true
	l.mu.Unlock()
	// This kills the program at once, whatever watch waits for.
	lost := l.epoch.ctx
	l.detach = context.AfterFunc(lost, func() {
		l.cancel(context.Cause(lost))
		quit()
	})
	go l.watch(watching)
	return claimed, baseSeq, nil
}

// claim writes the claim. If its acknowledgement arrives after the worker's lease has expired, it
// claims again under the next one, since the dispatcher may end every attempt that names the old
// one.
func (l *Lease) claim(ctx context.Context, baseSeq int64) error {
	for {
		e, err := l.slots.awaitEpoch(ctx)
		if err != nil {
			return err
		}
		now := time.Now().UTC()
		l.started = &now
		l.rec = &proto.Record{
			Meta: l.job.Meta, Status: proto.StatusRunning, Attempt: l.attempt, Worker: l.slots.Worker, Epoch: e.id,
			StartedAt: &now, ResultSeq: baseSeq,
		}
		if l.revision, err = l.slots.Store.Records.Put(ctx, l.rec, l.revision); err != nil {
			return err
		}
		if e.valid() {
			l.epoch = e
			return nil
		}
	}
}

// Cancelled returns a channel that is closed when a client cancels the execution. The lease stays
// valid.
func (l *Lease) Cancelled() <-chan struct{} { return l.asked }

// requestRead makes watch read the record.
func (l *Lease) requestRead() {
	l.mu.Lock()
	defer l.mu.Unlock()
	if !l.watching {
		return
	}
	select {
	case l.reads <- struct{}{}:
	default:
	}
}

// watch detects a cancel or the end of the attempt in the record, until ctx is done. It rewrites
// the record before its retention expires.
func (l *Lease) watch(ctx context.Context) {
	defer close(l.stopped)
	var refresh <-chan time.Time
	if age := l.slots.Store.Records.CachedInfo().Config.MaxAge; age > 0 {
		tick := time.NewTicker(age / refreshesPerLife)
		defer tick.Stop()
		refresh = tick.C
	}
	for asked := false; ; {
		var err error
		select {
		case <-ctx.Done():
			return
		case <-l.reads:
			err = l.read(ctx)
		case <-refresh:
			err = l.rewrite(ctx)
		}
		switch {
		case errors.Is(err, proto.ErrLost):
			l.cancel(err)
			return
		case l.rec.Cancelling && !asked:
			asked = true
			close(l.asked)
		}
	}
}

// rewrite writes the record again, including changes by others.
func (l *Lease) rewrite(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, recordTimeout)
	defer cancel()
	for {
		revision, err := l.slots.Store.Records.Put(ctx, l.rec, l.revision)
		switch {
		case err == nil:
			l.revision = revision
			return nil
		case !store.IsConflict(err):
			return err
		}
		if err := l.adopt(ctx); err != nil {
			return err
		}
	}
}

func (l *Lease) read(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, recordTimeout)
	defer cancel()
	return l.adopt(ctx)
}

// adopt reads the record, which may have been marked as cancelled. It returns [proto.ErrLost] if
// the attempt is no longer ours.
func (l *Lease) adopt(ctx context.Context) error {
	rec, revision, err := l.slots.Store.Records.Get(ctx, l.org, l.id)
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
	if l.rec == nil || rec.Status != proto.StatusRunning || rec.Epoch != l.rec.Epoch || rec.Attempt != l.attempt {
		return fmt.Errorf("%w: the record is %s, attempt %d, by %q", proto.ErrLost, rec.Status, rec.Attempt, rec.Worker)
	}
	l.rec, l.revision = rec, revision
	return nil
}

// Commit makes a commit of the thread's home while the program runs. It retries until ctx is done; the
// commit may have been made then. It returns [proto.ErrFenced] if the attempt no longer holds the thread,
// and [threads.ErrTooLarge].
func (l *Lease) Commit(ctx context.Context, c *proto.Commit) error {
	return (&threads.Threads{Store: l.slots.Store}).Commit(ctx, l.org, l.job.ThreadID, l.id, c)
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
// returns that and [proto.ErrLost]. It retries until ctx is done. It also works without a claim.
//
// With commits, it writes the record with the pending result, each commit, and the terminal record.
// The first write decides the outcome: if the lease then ends, the dispatcher makes the others.
func (l *Lease) Finish(ctx context.Context, o Outcome) (*proto.Record, error) {
	defer l.slots.forget(l.id)
	defer l.stop()
	done := &proto.Record{
		Meta: l.job.Meta, Attempt: l.attempt, Worker: l.slots.Worker, StartedAt: l.started, Request: l.job.Request(),
	}
	if l.rec != nil {
		done.Epoch = l.rec.Epoch
	}
	done.ResultSeq, done.OutputTruncated, done.Usage, done.Steps = o.LastSeq, o.OutputTruncated, o.Usage, o.Steps
	rec, err := l.finish(ctx, done, o)
	if err == nil || errors.Is(err, proto.ErrLost) {
		l.epoch = nil
	}
	if errors.Is(err, proto.ErrLost) {
		rec, _, err := l.slots.Store.Records.Get(ctx, l.org, l.id)
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

// write replaces the record, even if others have changed it, while the attempt is ours. It stops
// watch before that, and retries until ctx is done. It returns [proto.ErrLost] if the attempt is no
// longer ours.
func (l *Lease) write(ctx context.Context, rec *proto.Record) (*store.StagedRecord, error) {
	var staged *store.StagedRecord
	for {
		var err error
		if staged == nil {
			staged, err = l.slots.Store.Records.Stage(ctx, rec)
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

// Release ends a lease without a result: the job was not claimed, the lease was lost, or the
// attempt is given up. The record of an attempt given up then names no epoch, so that the
// dispatcher ends it although the worker is alive.
func (l *Lease) Release() {
	l.stop()
	l.slots.forget(l.id)
	if e := l.epoch; e != nil {
		l.epoch = nil
		l.slots.background.Go(func() { l.giveUp(e) })
	}
}

// giveUp takes the epoch out of the record. It retries until that is done or the epoch has ended.
func (l *Lease) giveUp(e *epoch) {
	for {
		rec := *l.rec
		rec.Epoch = ""
		_, err := l.slots.Store.Records.Put(e.ctx, &rec, l.revision)
		if store.IsConflict(err) {
			err = l.adopt(e.ctx)
			if err == nil {
				continue
			}
		}
		if err == nil || errors.Is(err, proto.ErrLost) || pause(e.ctx, err) != nil {
			return
		}
	}
}

// stop stops watch and waits for it, so that the revision no longer changes.
func (l *Lease) stop() {
	l.mu.Lock()
	watching := l.watching
	l.watching = false
	l.mu.Unlock()
	if watching {
		l.detach()
		l.quit()
		<-l.stopped
		l.cancel(context.Canceled)
	}
}
