package queue

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/nats-io/nats.go"
	"go.opentelemetry.io/otel"
	"go.opentelemetry.io/otel/propagation"

	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/proto/fault"
	"github.com/bullpen-run/bullpen/scheduler/store"
	"github.com/bullpen-run/bullpen/scheduler/threads"
)

const (
	renewEvery   = 3 * time.Second
	leaseLost    = 10 * time.Second // without a confirmed renewal the holder stops; the dispatcher waits for leaseOver
	finishPause  = 250 * time.Millisecond
	renewTimeout = 2 * time.Second
	wordPatience = 2 * time.Second // with the word that a job is stored
)

// Lease is the right to run one attempt of one job. It is taken by [Slots.Take], made known by Claim before the program starts, and
// ends with Finish or Release.
type Lease struct {
	slots   *Slots
	id      proto.TraceID
	at      uint64      // where the job lies in its stream, 0 while it is being stored
	sent    *nats.Msg   // the job, when it came with its assignment
	word    chan string // of a job that is being stored; else nil
	started *time.Time  // of the claimed attempt; nil before
	attempt int
	job     *proto.Job
	header  nats.Header

	// Whether and where it is noted that the job was taken; they belong to slots.
	noted bool
	place int

	// The record and its revision belong to renew from Claim until it has stopped, and to the caller before and after.
	rec      *proto.Record
	revision uint64

	mu      sync.Mutex
	claimed bool // renew runs
	looks   chan struct{}
	cancel  context.CancelCauseFunc // ends the program's context
	quit    context.CancelFunc      // ends renew
	stopped chan struct{}           // closed when renew has ended
}

// Job is what to run.
func (l *Lease) Job() *proto.Job { return l.job }

// Attempt counts from 1.
func (l *Lease) Attempt() int { return l.attempt }

// Context carries the submission's trace context from the message into ctx.
func (l *Lease) Context(ctx context.Context) context.Context {
	return otel.GetTextMapPropagator().Extract(ctx, propagation.HeaderCarrier(l.header))
}

func (l *Lease) load(ctx context.Context) error {
	st := l.slots.Store
	var m *store.Message
	var err error
	if l.sent != nil {
		m, err = st.ReadBody(ctx, l.sent)
	} else {
		m, err = st.At(ctx, st.Jobs, l.at)
	}
	if store.IsNotFound(err) {
		return fmt.Errorf("job %s: %w", l.id, proto.ErrNotFound)
	}
	if err != nil {
		return err
	}
	job, err := store.DecodeJob(m, l.id)
	if err != nil {
		return l.refuse(ctx, m, err)
	}
	l.job, l.header, l.sent = job, m.Header, nil
	return nil
}

// awaitStored waits until the job is stored. The word that it is may be lost with a dispatcher or a connection, so in the end the
// stream is asked. Its error is [proto.ErrNotFound] for a job that is not to be run.
func (l *Lease) awaitStored(ctx context.Context) error {
	if l.word == nil {
		return nil
	}
	patience := time.NewTimer(wordPatience)
	defer patience.Stop()
	select {
	case word := <-l.word:
		if word != wordStored {
			return fmt.Errorf("job %s was not stored: %w", l.id, proto.ErrNotFound)
		}
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	case <-patience.C:
		_, err := l.slots.Store.JobMeta(ctx, l.id)
		return err
	}
}

// refuse ends a job that cannot be read with what its header says of it.
func (l *Lease) refuse(ctx context.Context, m *store.Message, cause error) error {
	meta, err := store.DecodeMeta(m.Header)
	if err != nil {
		return errors.Join(cause, err)
	}
	rec := terminal(&proto.Record{Meta: *meta, Attempt: l.attempt - 1}, proto.Failure(proto.CodeSandboxStart,
		"The stored job could not be read, so its program was not started."), time.Now())
	if _, err := l.slots.Store.WriteRecord(ctx, rec, l.revision); err != nil && !store.IsConflict(err) {
		return errors.Join(cause, err)
	}
	return cause
}

// Claim records that this worker starts the program now. When it returns nil nobody else starts it; the context it returns ends,
// with [proto.ErrCancelled] or [proto.ErrLost] as its cause, when the program must be stopped. baseSeq is the sequence number of the last event
// of earlier attempts. An error means that the program must not be started.
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
	if fault.Planted(fault.ClaimAfterStart) {
		return ctx, baseSeq, nil // Finish serves an attempt that was never claimed
	}
	sent := time.Now()
	l.revision, err = l.slots.Store.WriteRecord(ctx, l.rec, l.revision)
	if err != nil {
		return nil, 0, fmt.Errorf("claim %s: %w", l.id, err)
	}
	l.slots.claimed(l)
	claimed, l.cancel = context.WithCancelCause(ctx)
	// The lease is kept until the result is written, also while a program that was told to stop is being stopped.
	keep, quit := context.WithCancel(context.WithoutCancel(ctx))
	l.looks, l.stopped, l.quit = make(chan struct{}, 1), make(chan struct{}), quit
	l.mu.Lock()
	l.claimed = true
	l.mu.Unlock()
	go l.renew(keep, sent)
	return claimed, baseSeq, nil
}

// look has the record read now rather than at the next renewal.
func (l *Lease) look() {
	l.mu.Lock()
	defer l.mu.Unlock()
	if !l.claimed {
		return
	}
	select {
	case l.looks <- struct{}{}:
	default:
	}
}

// renew keeps the lease until the execution is over, and ends its context when the record says so or was not renewed for leaseLost
// since sent. That is a matter of a timer and not of a renewal's answer, which may not come.
func (l *Lease) renew(ctx context.Context, sent time.Time) {
	defer close(l.stopped)
	doubt := time.AfterFunc(leaseLost-time.Since(sent), func() {
		if fault.Planted(fault.LeaseWithoutFencing) {
			return
		}
		l.cancel(fmt.Errorf("%w: no renewal for %s", proto.ErrLost, leaseLost))
		l.quit()
	})
	defer doubt.Stop()
	tick := time.NewTicker(renewEvery)
	defer tick.Stop()
	for {
		var err error
		select {
		case <-ctx.Done():
			return
		case <-l.looks:
			err = l.reread(ctx)
		case <-tick.C:
			sent = time.Now()
			// Only a write keeps others off. A store that takes none takes nobody else's claim either.
			if err = l.rewrite(ctx); (err == nil || store.IsRejected(err)) && !doubt.Reset(leaseLost-time.Since(sent)) {
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

// errUnread is that of a renewal that met another record and could not read it. It hides the server's refusal, which is none of a write.
var errUnread = errors.New("the record has changed and could not be read")

// rewrite renews the lease: it writes the record as it is, with what others wrote into it.
func (l *Lease) rewrite(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, renewTimeout)
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
			return fmt.Errorf("%w: %v", errUnread, err) //nolint:errorlint // see errUnread
		}
	}
}

func (l *Lease) reread(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, renewTimeout)
	defer cancel()
	return l.adopt(ctx)
}

// adopt takes the record as it now is: still ours, perhaps with an intent to cancel, or not ours any more.
func (l *Lease) adopt(ctx context.Context) error {
	rec, revision, err := l.slots.Store.Record(ctx, l.id)
	if errors.Is(err, proto.ErrNotFound) {
		return fmt.Errorf("%w: its record is gone", proto.ErrLost)
	}
	if errors.Is(err, store.ErrMalformed) {
		l.revision = revision // not the word of anybody who holds the lease: ours is written over it
		return nil
	}
	if err != nil {
		return err
	}
	if rec.Status != proto.StatusRunning || rec.Worker != l.slots.Worker || rec.Attempt != l.attempt {
		if fault.Planted(fault.LeaseWithoutFencing) {
			l.revision = revision
			return nil
		}
		return fmt.Errorf("%w: the record is %s, attempt %d, by %q", proto.ErrLost, rec.Status, rec.Attempt, rec.Worker)
	}
	l.rec, l.revision = rec, revision
	return nil
}

// Ending is how an attempt ended.
type Ending struct {
	Result          proto.Result
	LastSeq         int64 // of the last event published
	OutputTruncated bool
	Usage           *proto.Usage
	Commit          *proto.Commit // what it made of its thread; nil where nothing changed, or there is none
}

// Finish writes the terminal record, unless somebody wrote one first, and returns the one that stands. It keeps trying while the
// store takes no writes, until ctx ends. It also serves an attempt that was never claimed. The lease is kept while a large result is
// on its way.
//
// Where there is something to commit, the result is first recorded as pending, then the commit is made, then the result stands. From the
// first of these writes on the execution ends in this way whoever lives: a dispatcher takes the other two if the lease is over.
func (l *Lease) Finish(ctx context.Context, e Ending) (*proto.Record, error) {
	defer l.slots.forget(l.id)
	defer l.stop()
	done := &proto.Record{Meta: l.job.Meta, Attempt: l.attempt, Worker: l.slots.Worker, StartedAt: l.started}
	done.ResultSeq, done.OutputTruncated, done.Usage = e.LastSeq, e.OutputTruncated, e.Usage
	result := e.Result
	var pending *store.StagedRecord
	if e.Commit != nil {
		done.Status, done.Pending, done.Commit = proto.StatusRunning, &e.Result, e.Commit
		var err error
		if pending, err = l.put(ctx, done); err == nil {
			fault.Here(fault.AfterPendingBeforeCommit)
			result, err = l.commit(ctx, done)
			fault.Here(fault.AfterCommitBeforeResult)
		}
		if err != nil {
			return l.ended(ctx, err)
		}
	}
	rec := terminal(done, result, time.Now())
	if _, err := l.put(ctx, rec); err != nil {
		return l.ended(ctx, err)
	}
	fault.Here(fault.AfterResultBeforeAck)
	if pending != nil {
		pending.Discard(ctx)
	}
	return rec, nil
}

// put writes rec in place of the record, also where others changed that but left it ours. It stops the renewals before, and keeps trying
// until ctx ends. Its error is [proto.ErrLost] where the record is not ours any more.
func (l *Lease) put(ctx context.Context, rec *proto.Record) (*store.StagedRecord, error) {
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

// commit makes the commit of a record that is stored. It keeps trying until ctx ends, and gives the result that is to stand.
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

// commit makes the commit of rec, and gives the result that is to stand then: the pending one, or that of a home which was not saved.
func commit(ctx context.Context, st *store.Store, rec *proto.Record) (proto.Result, error) {
	err := (&threads.Threads{Store: st}).Commit(ctx, rec.Org, rec.ThreadID, rec.TraceID, rec.Commit)
	switch {
	case err == nil:
		return *rec.Pending, nil
	case errors.Is(err, proto.ErrFenced):
		return rec.Pending.Unsaved("The home was not saved: the worker lost touch for so long that the thread was taken from it."), nil
	case errors.Is(err, threads.ErrLarge):
		return rec.Pending.Unsaved("The home was not saved: the thread has more changes that were not yet put together than can be kept."), nil
	default:
		return proto.Result{}, fmt.Errorf("commit the home of %s: %w", rec.TraceID, err)
	}
}

// pause waits before another try. Its error is that ctx has ended, with why the last try failed.
func pause(ctx context.Context, failed error) error {
	select {
	case <-ctx.Done():
		return errors.Join(failed, context.Cause(ctx))
	case <-time.After(finishPause):
		return nil
	}
}

// ended gives what Finish returns after an error.
func (l *Lease) ended(ctx context.Context, err error) (*proto.Record, error) {
	if errors.Is(err, proto.ErrLost) {
		return l.standing(ctx)
	}
	return nil, fmt.Errorf("finish %s: %w", l.id, err)
}

// standing reads the record that somebody else wrote first.
func (l *Lease) standing(ctx context.Context) (*proto.Record, error) {
	rec, _, err := l.slots.Store.Record(ctx, l.id)
	if err != nil {
		return nil, fmt.Errorf("finish %s: %w", l.id, err)
	}
	return rec, proto.ErrLost
}

// Release gives up a lease without a result: the job was never claimed, or it is somebody else's now.
func (l *Lease) Release() {
	l.stop()
	l.slots.forget(l.id)
}

// stop ends the renewals and waits for the last one, so that the revision stands still.
func (l *Lease) stop() {
	l.mu.Lock()
	running := l.claimed
	l.claimed = false
	l.mu.Unlock()
	if running {
		l.quit()
		<-l.stopped
		l.cancel(context.Canceled)
	}
}
