package store

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/cenkalti/backoff/v4"
	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
)

// Header names of what is stored. The dispatcher reads headers only.
const (
	HeaderMeta   = "Bullpen-Meta"   // JSON of [proto.Meta] on a job
	HeaderStatus = "Bullpen-Status" // of an execution's record
	// JSON of a record without outputs, see [proto.SummarizeRecord]; none if it would be too long
	HeaderSummary = "Bullpen-Summary"
	HeaderWorker  = "Bullpen-Worker"  // who runs the execution, or holds the lease
	HeaderEpoch   = "Bullpen-Epoch"   // of the worker's lease under which the execution runs; none without one
	HeaderRenewed = "Bullpen-Renewed" // on a lease that has ended: when it was renewed last, RFC 3339 with nanoseconds
	HeaderCancel  = "Bullpen-Cancel"  // set if a client has cancelled the running execution
	HeaderAttempt = "Bullpen-Attempt" // the claimed attempt
	HeaderLosses  = "Bullpen-Losses"  // number of workers that died before they started the program; none for 0
	HeaderFirst   = "Bullpen-First"   // number of the first event in an output message
	HeaderLast    = "Bullpen-Last"    // number of the last event
	HeaderPacked  = "Bullpen-Packed"  // set if the events of an output message are compressed with S2
	HeaderOrigin  = "Bullpen-Origin"  // scheme, host and port of a delivery's URL
	// when a delivery's next attempt is due, RFC 3339 with nanoseconds; none if the delivery has ended
	HeaderDue  = "Bullpen-Due"
	HeaderUsed = "Bullpen-Used" // JSON of [proto.DeliveryUsage] on a delivery that has ended
	// JSON of [proto.ThreadSummary] on a head; none on a tombstone and if the thread was removed
	HeaderThread = "Bullpen-Thread"
	HeaderDead   = "Bullpen-Dead"   // JSON of [proto.DeadLetter] on a dead letter
	HeaderTurn   = "Bullpen-Turn"   // the API key of a session whose turn ended with this message of its log
	headerBody   = "Bullpen-Body"   // a [bodyRef] to the body, if it is stored apart
	headerWrite  = "Bullpen-Write"  // unique to a write, to recognise it after a lost answer
	headerPlace  = "Bullpen-Place"  // a [Place] that a message restored from a backup had before; once for each backup
	headerStored = "Bullpen-Stored" // when a message restored from a backup was first stored, RFC 3339 with nanoseconds
)

const publishTimeout = time.Second

// Message is one message of a stream.
type Message struct {
	Subject string
	Header  nats.Header
	Data    []byte
	Seq     uint64
	Time    time.Time // when it was stored
}

// FirstStored returns when the message was first stored, which is before Time if a backup was
// restored since.
func (m *Message) FirstStored() time.Time {
	if at, err := time.Parse(time.RFC3339Nano, m.Header.Get(headerStored)); err == nil {
		return at
	}
	return m.Time
}

// ErrMalformed means that a stored message is not what its subject stands for.
var ErrMalformed = errors.New("malformed record")

// Write stores a message if the last one on its subject has sequence number expect (0: none yet),
// and returns the new sequence number. It repeats the write until ctx is done, and recognises its
// own write after a lost answer. A body that is too large for the message is stored apart first.
// Callers distinguish the errors that [IsConflict] and [IsRejected] match.
func (st Stream) Write(ctx context.Context, subject string, h nats.Header, body []byte, expect uint64) (uint64, error) {
	m, err := st.store.Bodies.stage(ctx, subject, h, body, st.store.MaxInline)
	if err != nil {
		return 0, err
	}
	seq, err := st.write(ctx, m, expect, false)
	// An unanswered write may still be carried out, and needs its body.
	if IsConflict(err) || IsRejected(err) {
		st.store.Bodies.Discard(ctx, m.Header)
	}
	return seq, err
}

// write stores msg. maybeStored is set if an earlier write of msg may have been carried out.
func (st Stream) write(ctx context.Context, msg *nats.Msg, expect uint64, maybeStored bool) (seq uint64, err error) {
	policy := st.store.Leaders.Retry(st.Name(), publishTimeout)
	policy.Transient = AnyError
	err = policy.Do(ctx, func(ctx context.Context) error {
		ack, err := st.store.JS.PublishMsg(ctx, msg, jetstream.WithExpectLastSequencePerSubject(expect))
		switch {
		case err == nil:
			seq = ack.Sequence
			return nil
		case isUndecided(err):
			return err
		case IsConflict(err) || IsRejected(err):
			if !maybeStored {
				return backoff.Permanent(err)
			}
			seq, err = st.findWrite(ctx, msg, err)
			return err
		default:
			maybeStored = maybeStored || !errors.Is(err, jetstream.ErrNoStreamResponse)
			return err
		}
	})
	if err != nil {
		return 0, fmt.Errorf("write %s: %w", msg.Subject, markUnanswered(err))
	}
	return seq, nil
}

// findWrite looks for msg after the server has rejected it: an earlier write may have been carried
// out, and its answer lost.
func (st Stream) findWrite(ctx context.Context, msg *nats.Msg, rejection error) (uint64, error) {
	m, err := st.fetch(ctx, query{Last: msg.Subject}, false)
	switch {
	case err == nil && m.Header.Get(headerWrite) == msg.Header.Get(headerWrite):
		return m.Seq, nil
	case err == nil || IsNotFound(err):
		return 0, backoff.Permanent(rejection)
	default:
		return 0, err
	}
}
