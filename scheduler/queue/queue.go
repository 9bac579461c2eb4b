// Package queue gets durable jobs to workers, fairly and at most once per attempt, and their results back, first writer wins. It
// holds the promises of bullpen: what was accepted is durable, ends in exactly one terminal record, and is run by one holder of a
// lease at a time. It does not know what a program is or who asks: gateways submit through [Queue], one [Dispatcher] decides, and
// workers take through [Slots].
//
// An execution takes three durable writes: the job, the claim, the result. Claim, lease and result are one record on one
// subject, changed only by compare-and-set, so that whoever lost the lease can no longer write any of them.
package queue

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"time"

	"github.com/cenkalti/backoff/v4"
	"github.com/nats-io/nats.go"
	"go.opentelemetry.io/otel"
	"go.opentelemetry.io/otel/propagation"

	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/scheduler/store"
)

// Queue is the queue as those see it who submit jobs and ask after them.
type Queue struct {
	Store *store.Store
	// Full reports that the store has no room for new jobs; nil where that cannot be known beforehand.
	Full func() bool
}

const (
	askTimeout    = 3 * time.Second // covers a change of leader
	submitTimeout = 5 * time.Second // and the write
	undoTimeout   = time.Second
	controlRetry  = 50 * time.Millisecond
	waitLook      = time.Second // how often a waiter looks itself, in case a notice was lost
)

// Submit makes job durable. A nil error means that the job will end in exactly one terminal record; a [*proto.Refusal] that
// nothing of it runs; after any other error it is not known which. It takes until ctx ends and undoTimeout longer at most. ctx should
// not end with a caller that goes: half an answer helps nobody.
func (q *Queue) Submit(ctx context.Context, job *proto.Job) error {
	if q.Full != nil && q.Full() {
		return &proto.Refusal{Reason: proto.RefusedUnavailable, Detail: "the disk of the job store is full"}
	}
	h := nats.Header{}
	otel.GetTextMapPropagator().Inject(ctx, propagation.HeaderCarrier(h))
	bounded, cancel := context.WithTimeout(ctx, submitTimeout)
	defer cancel()
	m, err := q.Store.StageJob(bounded, job, h)
	if err != nil {
		return unavailable(err)
	}
	m.Subject = store.SubmitSubject
	var reply submitReply
	err = q.send(bounded, m, &reply)
	switch {
	case err == nil && reply.Refusal != nil:
		q.Store.DiscardJob(bounded, m)
		return reply.Refusal
	case err == nil && reply.Unknown == "":
		return nil
	case err == nil:
		err = errors.New(reply.Unknown)
	case errors.Is(err, errNobody):
		return unavailable(err)
	}
	undone := q.undo(ctx, job)
	switch {
	case undone == nil:
		return unavailable(err)
	case store.IsConflict(undone):
		return nil // it was stored after all, and has moved on
	default:
		return fmt.Errorf("submit %s: whether it was stored is not known: %w", job.TraceID, errors.Join(err, undone))
	}
}

// undo makes sure that a job whose write was not acknowledged, and may still arrive, does not run.
func (q *Queue) undo(ctx context.Context, job *proto.Job) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), undoTimeout)
	defer cancel()
	rec := terminal(&proto.Record{Meta: job.Meta}, proto.Failure(proto.CodeExpiredInQueue,
		"The job could not be stored and was not accepted."), time.Now())
	_, err := q.Store.WriteRecord(ctx, rec, 0)
	return err
}

// ask sends a request to the dispatcher that leads, waiting for one to appear.
func (q *Queue) ask(ctx context.Context, subject string, request, reply any) error {
	body, err := json.Marshal(request)
	if err != nil {
		return fmt.Errorf("encode %T: %w", request, err)
	}
	ctx, cancel := context.WithTimeout(ctx, askTimeout)
	defer cancel()
	return q.send(ctx, &nats.Msg{Subject: subject, Data: body}, reply)
}

var errNobody = errors.New("no dispatcher leads")

// send sends a request to the dispatcher that leads, again until there is an answer or ctx ends. Its error is errNobody when the
// request reached none.
func (q *Queue) send(ctx context.Context, m *nats.Msg, reply any) error {
	reached := false
	msg, err := backoff.RetryWithData(func() (*nats.Msg, error) {
		try, cancel := q.Store.AttemptContext(ctx, store.Dispatcher, answerTimeout)
		defer cancel()
		msg, err := q.Store.Conn.RequestMsgWithContext(try, m)
		if err != nil && !errors.Is(err, nats.ErrNoResponders) && !errors.Is(err, nats.ErrReconnectBufExceeded) {
			reached = true
		}
		return msg, err
	}, backoff.WithContext(backoff.NewConstantBackOff(controlRetry), ctx))
	switch {
	case err == nil:
		if err := json.Unmarshal(msg.Data, reply); err != nil {
			return fmt.Errorf("read the dispatcher's answer: %w", err)
		}
		return nil
	case !reached:
		return fmt.Errorf("%w: %w", errNobody, err)
	default:
		return fmt.Errorf("ask the dispatcher: %w", err)
	}
}

// Lookup reads what is known of an execution now. Its error is [proto.ErrNotFound] where that is nothing.
func (q *Queue) Lookup(ctx context.Context, id proto.TraceID) (*proto.Record, error) {
	rec, _, err := q.lookup(ctx, id)
	if err != nil {
		return nil, err
	}
	return rec.Told(), nil
}

// lookup also gives the sequence number to change the record by, 0 for a job that nobody has claimed.
func (q *Queue) lookup(ctx context.Context, id proto.TraceID) (*proto.Record, uint64, error) {
	rec, seq, err := q.Store.Record(ctx, id)
	if !errors.Is(err, proto.ErrNotFound) {
		return rec, seq, err
	}
	meta, err := q.Store.JobMeta(ctx, id)
	if errors.Is(err, proto.ErrNotFound) {
		// The record is written before the job goes: between the two reads it may have appeared.
		return q.Store.Record(ctx, id)
	}
	if err != nil {
		return nil, 0, err
	}
	return &proto.Record{Meta: *meta, Status: proto.StatusQueued}, 0, nil
}

// record reads the record of an execution that is known to have been accepted: it is queued while there is none.
func (q *Queue) record(ctx context.Context, id proto.TraceID) (*proto.Record, uint64, error) {
	rec, seq, err := q.Store.Record(ctx, id)
	if errors.Is(err, proto.ErrNotFound) {
		return &proto.Record{Status: proto.StatusQueued}, 0, nil
	}
	return rec, seq, err
}

// Wait returns the terminal record of an execution when there is one. When ctx ends first the error is ctx's.
func (q *Queue) Wait(ctx context.Context, id proto.TraceID) (*proto.Record, error) {
	w, err := q.Watch(id)
	if err != nil {
		return nil, err
	}
	defer w.Close()
	if rec, err := w.look(ctx); rec != nil || err != nil {
		return rec, err
	}
	return w.Wait(ctx)
}

// Watch listens for the end of one execution.
type Watch struct {
	queue   *Queue
	id      proto.TraceID
	notices chan *nats.Msg
	heard   *nats.Subscription
	read    func(context.Context, proto.TraceID) (*proto.Record, uint64, error)
}

// Watch begins to listen for the end of an execution. Who does so before submitting it hears of it, and need not look first.
func (q *Queue) Watch(id proto.TraceID) (*Watch, error) {
	w := &Watch{queue: q, id: id, notices: make(chan *nats.Msg, 4), read: q.lookup}
	var err error
	if w.heard, err = q.Store.Conn.ChanSubscribe(store.DoneSubject(id), w.notices); err != nil {
		return nil, fmt.Errorf("wait for %s: %w", id, err)
	}
	return w, nil
}

// Close ends the listening.
func (w *Watch) Close() { _ = w.heard.Unsubscribe() }

// Wait returns the terminal record when the execution has ended since the watch began. When ctx ends first the error is ctx's, and
// Wait may be called again.
func (w *Watch) Wait(ctx context.Context) (*proto.Record, error) {
	tick := time.NewTicker(waitLook)
	defer tick.Stop()
	for {
		if rec, err := notice(ctx, w.id, w.notices, tick.C); rec != nil || err != nil {
			return rec, err
		}
		if rec, err := w.look(ctx); rec != nil || err != nil {
			return rec, err
		}
	}
}

// look gives the record if it is terminal.
func (w *Watch) look(ctx context.Context) (*proto.Record, error) {
	rec, _, err := w.read(ctx, w.id)
	if err == nil && rec.Status == proto.StatusQueued {
		w.read = w.queue.record // a job that is known to be there is not read again and again: its end is in the record
	}
	switch {
	case errors.Is(err, proto.ErrNotFound) || ctx.Err() != nil:
		return nil, errors.Join(err, context.Cause(ctx))
	case err == nil && rec.Status.Terminal():
		return rec, nil
	default:
		return nil, nil // it has not ended, or cannot be asked just now
	}
}

// notice waits for the terminal record of id. It gives none when it is time to look for it.
func notice(ctx context.Context, id proto.TraceID, notices <-chan *nats.Msg, look <-chan time.Time) (*proto.Record, error) {
	for {
		select {
		case <-ctx.Done():
			return nil, context.Cause(ctx)
		case m := <-notices:
			if !proto.Status(m.Header.Get(store.HeaderStatus)).Terminal() {
				continue // a claim or a renewal
			}
			if rec, err := proto.DecodeRecord(id, m.Data); err == nil && rec.Status.Terminal() {
				return rec, nil
			}
			return nil, nil // what is large of it is stored apart
		case <-look:
			return nil, nil
		}
	}
}

// Withdraw ends an execution that has not started with result r. It returns the record as it is then: terminal by this call, or
// running or terminal by somebody else. One that waits for another attempt has started before: where r says that it expired in the queue,
// it ends as lost.
func (q *Queue) Withdraw(ctx context.Context, id proto.TraceID, r proto.Result) (*proto.Record, error) {
	rec, _, err := q.withdraw(ctx, id, r)
	if err != nil {
		return nil, err
	}
	return rec.Told(), nil
}

// withdraw also gives the record's sequence number.
func (q *Queue) withdraw(ctx context.Context, id proto.TraceID, r proto.Result) (*proto.Record, uint64, error) {
	for {
		rec, seq, err := q.lookup(ctx, id)
		if err != nil || rec.Status != proto.StatusQueued {
			return rec, seq, err
		}
		end := r
		if rec.Attempt > 0 && r.ErrorCode != nil && *r.ErrorCode == string(proto.CodeExpiredInQueue) {
			end = proto.Failure(proto.CodeWorkerLost, fmt.Sprintf(
				"The worker that ran attempt %d of %d was lost, and the program with it; there was no next one: %s",
				rec.Attempt, rec.MaxAttempts, *r.ErrorMessage))
		}
		done := terminal(rec, end, time.Now())
		seq, err = q.Store.WriteRecord(ctx, done, seq)
		if err == nil {
			return done, seq, nil
		}
		if !store.IsConflict(err) {
			return nil, 0, fmt.Errorf("withdraw %s: %w", id, err)
		}
	}
}

// Cancel ends an execution: one that has not started at once, one that runs by an intent in its record of which the worker is
// told. One whose program has ended is left to end. It returns the record as it is then.
func (q *Queue) Cancel(ctx context.Context, id proto.TraceID) (*proto.Record, error) {
	for {
		rec, seq, err := q.lookup(ctx, id)
		if err != nil || rec.Status.Terminal() {
			return rec, err
		}
		if rec.Pending != nil {
			return rec.Told(), nil
		}
		if rec.Status == proto.StatusRunning {
			if rec.Cancelling {
				_ = q.Store.Conn.Publish(store.CancelSubject(rec.Worker), []byte(id)) // again, in case the first was lost
				return rec, nil
			}
			rec.Cancelling = true
		} else {
			rec = terminal(rec, proto.Cancelled(), time.Now())
		}
		_, err = q.Store.WriteRecord(ctx, rec, seq)
		if err == nil {
			if rec.Status == proto.StatusRunning {
				// Lost words are made up for when the worker renews its lease and meets the changed record.
				_ = q.Store.Conn.Publish(store.CancelSubject(rec.Worker), []byte(id))
			}
			return rec, nil
		}
		if !store.IsConflict(err) {
			return nil, fmt.Errorf("cancel %s: %w", id, err)
		}
	}
}

// Stats asks the dispatcher for its view of the queue. An error means that jobs cannot be accepted now.
func (q *Queue) Stats(ctx context.Context) (proto.QueueStats, error) {
	var st proto.QueueStats
	err := q.ask(ctx, store.StatsSubject, struct{}{}, &st)
	return st, err
}

// terminal makes the terminal record that follows rec.
func terminal(rec *proto.Record, r proto.Result, now time.Time) *proto.Record {
	out := *rec
	done := now.UTC()
	out.Status, out.Result, out.CompletedAt, out.Cancelling = r.Status(), &r, &done, false
	out.Pending, out.Commit = nil, nil
	out.ResultSeq++ // the result follows the last event the record knows of
	return &out
}
