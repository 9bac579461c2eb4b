package queue

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"time"

	"github.com/nats-io/nats.go"

	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/scheduler/store"
)

// Queue submits, reads and cancels executions.
type Queue struct {
	Store *store.Store
	// Rejects, if not nil, returns why no new jobs are accepted, or nil.
	Rejects func() *proto.Rejection
	// Ended, if not nil, is called with every terminal record that this process writes for an
	// execution that it did not run: cancelled or expired in the queue, or lost with its worker. It
	// may be called concurrently.
	Ended func(*proto.Record)
}

const (
	statsTimeout  = 3 * time.Second // covers an election
	submitTimeout = 5 * time.Second // covers an election and the write
	undoTimeout   = time.Second
	requestPause  = 50 * time.Millisecond
)

// Submit makes job durable. After a nil error the job ends with exactly one terminal record. After
// a [*proto.Rejection] nothing of it remains. After any other error either may be the case. Submit
// returns at most undoTimeout after ctx is done. Cancel ctx only for a timeout, not when a client
// leaves. It sets the Traceparent of the job.
func (q *Queue) Submit(ctx context.Context, job *proto.Job) error {
	if q.Rejects != nil {
		if rejection := q.Rejects(); rejection != nil {
			return rejection
		}
	}
	ctx, span := startSubmit(ctx, job)
	err := q.submit(ctx, job)
	endSubmit(span, err)
	return err
}

func (q *Queue) submit(ctx context.Context, job *proto.Job) error {
	bounded, cancel := context.WithTimeout(ctx, submitTimeout)
	defer cancel()
	m, err := q.Store.Jobs.Stage(bounded, job, nats.Header{})
	if err != nil {
		return unavailable(err)
	}
	m.Subject = store.SubmitSubject
	var reply submitReply
	err = q.request(bounded, m, &reply)
	switch {
	case err == nil && reply.Rejection != nil:
		q.Store.Bodies.Discard(bounded, m.Header)
		return reply.Rejection
	case err == nil && reply.Unknown == "":
		return nil
	case err == nil:
		err = errors.New(reply.Unknown)
	case errors.Is(err, errNoDispatcher):
		return unavailable(err)
	}
	undo, stop := context.WithTimeout(context.WithoutCancel(ctx), undoTimeout)
	defer stop()
	errAbandon := q.Abandon(undo, &job.Meta, "The job could not be stored and was not accepted.")
	switch {
	case errAbandon == nil:
		return unavailable(err)
	case errors.Is(errAbandon, proto.ErrConflict):
		return nil // stored, and claimed or ended
	default:
		return fmt.Errorf("submit %s: unknown whether it was stored: %w", job.TraceID, errors.Join(err, errAbandon))
	}
}

// Abandon stores that the execution described by m has expired, so that it never starts, even if
// its job is stored later. It returns [proto.ErrConflict] if the execution has a record.
func (q *Queue) Abandon(ctx context.Context, m *proto.Meta, reason string) error {
	rec := terminal(&proto.Record{Meta: *m}, proto.Failure(proto.CodeExpiredInQueue, reason), time.Now())
	_, err := q.writeRecord(ctx, rec, 0)
	if store.IsConflict(err) {
		return fmt.Errorf("abandon %s: %w", m.TraceID, proto.ErrConflict)
	}
	return err
}

var errNoDispatcher = errors.New("no dispatcher leads")

// request sends a request to the leading dispatcher, and repeats it until it is answered or ctx is
// done. It returns errNoDispatcher if no dispatcher can have received the request.
func (q *Queue) request(ctx context.Context, m *nats.Msg, reply any) error {
	received := false
	var msg *nats.Msg
	policy := q.Store.Leaders.Retry(store.Dispatcher, requestTimeout)
	policy.Pause = requestPause
	err := policy.Do(ctx, func(ctx context.Context) (err error) {
		msg, err = q.Store.Conn.RequestMsgWithContext(ctx, m)
		if err != nil && !errors.Is(err, nats.ErrNoResponders) && !errors.Is(err, nats.ErrReconnectBufExceeded) {
			received = true
		}
		return err
	})
	switch {
	case err == nil:
		if err := json.Unmarshal(msg.Data, reply); err != nil {
			return fmt.Errorf("decode the dispatcher's reply: %w", err)
		}
		return nil
	case !received:
		return fmt.Errorf("%w: %w", errNoDispatcher, err)
	default:
		return fmt.Errorf("request to the dispatcher: %w", err)
	}
}

// Stats returns the state of the queue. An error means that jobs cannot be accepted now.
func (q *Queue) Stats(ctx context.Context) (proto.QueueStats, error) {
	ctx, cancel := context.WithTimeout(ctx, statsTimeout)
	defer cancel()
	var st proto.QueueStats
	err := q.request(ctx, &nats.Msg{Subject: store.StatsSubject}, &st)
	return st, err
}

// Lookup returns the record of an execution, or [proto.ErrNotFound].
func (q *Queue) Lookup(ctx context.Context, org string, id proto.TraceID) (*proto.Record, error) {
	return public(q.lookup(ctx, org, id))
}

// Summary is Lookup without the outputs of the result.
func (q *Queue) Summary(ctx context.Context, org string, id proto.TraceID) (*proto.Record, error) {
	return public(q.lookup(ctx, org, id, store.WithoutBody))
}

// Submitted is Lookup with the request, if the execution keeps it. Until an execution has ended,
// only its job has the request.
func (q *Queue) Submitted(ctx context.Context, org string, id proto.TraceID) (*proto.Record, error) {
	rec, err := q.Lookup(ctx, org, id)
	if err != nil || rec.Request != nil || rec.Status.Terminal() {
		return rec, err
	}
	request, err := q.jobRequest(ctx, &rec.Meta)
	if err != nil {
		return nil, fmt.Errorf("read the request of %s: %w", id, err)
	}
	if request == nil { // the execution may have ended since, and its job been removed
		return q.Lookup(ctx, org, id)
	}
	submitted := *rec
	submitted.Request = request
	return &submitted, nil
}

// Withdraw ends an execution that has not started with result r. It returns the record: ended by
// this call, or already running or terminal. If r reports expiry in the queue, but an earlier
// attempt was lost, the execution ends as lost.
func (q *Queue) Withdraw(
	ctx context.Context, org string, id proto.TraceID, r proto.Result,
) (*proto.Record, error) {
	return public(q.withdraw(ctx, org, id, r))
}

func public(rec *proto.Record, _ uint64, err error) (*proto.Record, error) {
	if err != nil {
		return nil, err
	}
	return rec.Public(), nil
}

// Cancel cancels an execution and returns its record. A queued execution ends at once. A running
// one is marked, and its worker is notified; the worker ends it. If its program has already ended,
// Cancel changes nothing.
func (q *Queue) Cancel(ctx context.Context, org string, id proto.TraceID) (rec *proto.Record, err error) {
	err = store.Update(ctx, func() error {
		var revision uint64
		if rec, revision, err = q.lookup(ctx, org, id); err != nil || rec.Status.Terminal() {
			return err
		}
		switch {
		case rec.Pending != nil:
			rec = rec.Public()
			return nil
		case rec.Cancelling:
			q.notifyCancel(rec.Worker, id) // the first notification may have been lost
			return nil
		case rec.Status == proto.StatusRunning:
			rec.Cancelling = true
		default:
			rec = terminal(rec, proto.Cancelled(), time.Now())
		}
		if _, err := q.writeRecord(ctx, rec, revision); err != nil {
			return fmt.Errorf("cancel %s: %w", id, err)
		}
		if rec.Cancelling {
			q.notifyCancel(rec.Worker, id)
		}
		return nil
	})
	if err != nil {
		return nil, err
	}
	return rec, nil
}

// notifyCancel makes the worker read the record. The message may be lost, so the dispatcher repeats
// it until the execution has ended.
func (q *Queue) notifyCancel(worker string, id proto.TraceID) {
	_ = q.Store.Conn.Publish(store.CancelSubject(worker), []byte(id))
}
