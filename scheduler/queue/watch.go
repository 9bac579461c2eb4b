package queue

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/nats-io/nats.go"

	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/scheduler/store"
)

// pollEvery is how often a waiter reads the record, in case the notification was lost.
const pollEvery = time.Second

// Wait blocks until an execution has ended and returns its record. It returns the error of ctx if
// ctx is done first.
func (q *Queue) Wait(ctx context.Context, org string, id proto.TraceID) (*proto.Record, error) {
	w, err := q.Watch(org, id)
	if err != nil {
		return nil, err
	}
	defer w.Close()
	if rec, err := w.poll(ctx); rec != nil || err != nil {
		return rec, err
	}
	return w.Wait(ctx)
}

// WaitStarted is Wait for the start of an execution's program, or the end of the execution.
func (q *Queue) WaitStarted(ctx context.Context, org string, id proto.TraceID) (*proto.Record, error) {
	w, err := q.Watch(org, id)
	if err != nil {
		return nil, err
	}
	defer w.Close()
	w.reached = func(s proto.Status) bool { return s == proto.StatusRunning || s.Terminal() }
	if rec, err := w.poll(ctx); rec != nil || err != nil {
		return rec, err
	}
	return w.Wait(ctx)
}

// Watch waits for the end of one execution.
type Watch struct {
	queue    *Queue
	org      string
	id       proto.TraceID
	messages chan *nats.Msg
	sub      *nats.Subscription
	accepted bool                    // the job was found
	reached  func(proto.Status) bool // reports whether a status is waited for
}

// Watch subscribes to the end of an execution. If called before the submission, the caller need not
// read the record first.
func (q *Queue) Watch(org string, id proto.TraceID) (*Watch, error) {
	w := &Watch{queue: q, org: org, id: id, messages: make(chan *nats.Msg, 4), reached: proto.Status.Terminal}
	var err error
	if w.sub, err = q.Store.Conn.ChanSubscribe(store.DoneSubject(org, id), w.messages); err != nil {
		return nil, fmt.Errorf("wait for %s: %w", id, err)
	}
	return w, nil
}

// Close ends the subscription.
func (w *Watch) Close() { _ = w.sub.Unsubscribe() }

// Wait blocks until the execution ends after the call of Watch, and returns its record. It returns
// the error of ctx if ctx is done first, and may be called again then.
func (w *Watch) Wait(ctx context.Context) (*proto.Record, error) {
	tick := time.NewTicker(pollEvery)
	defer tick.Stop()
	for {
		rec, err := w.receive(ctx, tick.C)
		if rec == nil && err == nil {
			rec, err = w.poll(ctx)
		}
		if rec != nil || err != nil {
			return rec, err
		}
	}
}

// receive waits for the message with the terminal record. It returns nil if the caller must read
// the record instead.
func (w *Watch) receive(ctx context.Context, tick <-chan time.Time) (*proto.Record, error) {
	for {
		select {
		case <-ctx.Done():
			return nil, context.Cause(ctx)
		case m := <-w.messages:
			if !w.reached(proto.Status(m.Header.Get(store.HeaderStatus))) {
				continue // a claim, or a change of it
			}
			if rec, err := proto.DecodeRecord(w.id, m.Data); err == nil && w.reached(rec.Status) {
				return rec, nil
			}
			return nil, nil // its body is stored apart
		case <-tick:
			return nil, nil
		}
	}
}

// poll returns the record if it is terminal. It returns nil if it is not, or cannot be read now.
func (w *Watch) poll(ctx context.Context) (*proto.Record, error) {
	rec, err := w.record(ctx)
	w.accepted = w.accepted || err == nil && rec.Status == proto.StatusQueued
	switch {
	case errors.Is(err, proto.ErrNotFound) || ctx.Err() != nil:
		return nil, errors.Join(err, context.Cause(ctx))
	case err == nil && w.reached(rec.Status):
		return rec, nil
	default:
		return nil, nil
	}
}

// record returns the record. It reads only that once the execution is known to be accepted.
func (w *Watch) record(ctx context.Context) (*proto.Record, error) {
	if !w.accepted {
		rec, _, err := w.queue.lookup(ctx, w.org, w.id)
		return rec, err
	}
	rec, _, err := w.queue.Store.Records.Get(ctx, w.org, w.id)
	if errors.Is(err, proto.ErrNotFound) {
		return &proto.Record{Status: proto.StatusQueued}, nil
	}
	return rec, err
}
