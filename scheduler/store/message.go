package store

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"strconv"
	"time"

	"github.com/cenkalti/backoff/v4"
	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
	"github.com/nats-io/nuid"

	"github.com/bullpen-run/bullpen/proto"
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
	headerBody   = "Bullpen-Body"   // a [bodyRef] to the body, if it is stored apart
	headerWrite  = "Bullpen-Write"  // unique to a write, to recognise it after a lost answer
	headerPlace  = "Bullpen-Place"  // a [Place] that a message restored from a backup had before; once for each backup
	headerStored = "Bullpen-Stored" // when a message restored from a backup was first stored, RFC 3339 with nanoseconds
)

const (
	publishTimeout = time.Second
	maxSummary     = 32 << 10 // bytes; JetStream accepts headers of 64 KiB
	summaryRoom    = 12 << 10 // bytes of a summary for which maxRecord leaves room
)

// Message is one message of a stream with its body.
type Message struct {
	Subject string
	Header  nats.Header
	Data    []byte
	Seq     uint64
	Time    time.Time // when it was first stored, also if a backup was restored since
}

// Write stores a message if the last one on its subject has sequence number expect (0: none yet),
// and returns the new sequence number. It repeats the write until ctx is done, and recognises its
// own write after a lost answer. A body that is too large for the message is stored apart first.
// Callers distinguish the errors that [IsConflict] and [IsRejected] match.
func (s *Store) Write(ctx context.Context, subject string, h nats.Header, body []byte, expect uint64) (uint64, error) {
	m, err := s.stage(ctx, subject, h, body, s.maxInline)
	if err != nil {
		return 0, err
	}
	seq, err := s.write(ctx, m, expect, false)
	// An unanswered write may still be carried out, and needs its body.
	if IsConflict(err) || IsRejected(err) {
		s.discard(ctx, m)
	}
	return seq, err
}

// stage prepares a message for writing. It stores a body of more than limit bytes apart.
func (s *Store) stage(ctx context.Context, subject string, h nats.Header, body []byte, limit int) (*nats.Msg, error) {
	h.Set(headerWrite, nuid.Next())
	if len(body) > limit {
		r, err := s.putBody(ctx, subject, body)
		if err != nil {
			return nil, err
		}
		h.Set(headerBody, r.String())
		body = nil
	}
	return &nats.Msg{Subject: subject, Header: h, Data: body}, nil
}

// discard removes the body of a message that will not be written.
func (s *Store) discard(ctx context.Context, m *nats.Msg) {
	s.DiscardBody(ctx, &Message{Header: m.Header})
}

// write stores msg. maybeStored is set if an earlier write of msg may have been carried out.
func (s *Store) write(ctx context.Context, msg *nats.Msg, expect uint64, maybeStored bool) (seq uint64, err error) {
	st := s.streamOf(msg.Subject)
	policy := s.RetryLeader(nameOf(st), publishTimeout)
	policy.Transient = AnyError
	err = policy.Do(ctx, func(ctx context.Context) error {
		ack, err := s.JS.PublishMsg(ctx, msg, jetstream.WithExpectLastSequencePerSubject(expect))
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
			seq, err = s.findWrite(ctx, st, msg, err)
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

// streamOf returns the stream that messages on a subject are written to.
func (s *Store) streamOf(subject string) jetstream.Stream { return *rowOf(subject).stream(s) }

// findWrite looks for msg in st after the server has rejected it: an earlier write may have been
// carried out, and its answer lost.
func (s *Store) findWrite(ctx context.Context, st jetstream.Stream, msg *nats.Msg, rejection error) (uint64, error) {
	m, err := s.readLast(ctx, st, msg.Subject)
	switch {
	case err == nil && m.Header.Get(headerWrite) == msg.Header.Get(headerWrite):
		return m.Sequence, nil
	case err == nil || IsNotFound(err):
		return 0, backoff.Permanent(rejection)
	default:
		return 0, err
	}
}

// Last reads the last message on a subject of st. [IsNotFound] matches its error if there is none.
func (s *Store) Last(ctx context.Context, st jetstream.Stream, subject string) (*Message, error) {
	m, err := s.readMessage(ctx, func() (*jetstream.RawStreamMsg, error) { return s.readLast(ctx, st, subject) })
	if err != nil {
		return nil, fmt.Errorf("read %s: %w", subject, err)
	}
	return m, nil
}

// LastFromLeader reads the last message on a subject from the leader of st, which never returns an
// outdated one. It asks until ctx is done.
func (s *Store) LastFromLeader(ctx context.Context, st jetstream.Stream, subject string) (*Message, error) {
	m, err := s.readMessage(ctx, func() (*jetstream.RawStreamMsg, error) { return s.lastFromLeader(ctx, st, subject) })
	if err != nil {
		return nil, fmt.Errorf("read %s: %w", subject, err)
	}
	return m, nil
}

// At reads the message of st with sequence number seq. [IsNotFound] matches its error if there is
// none.
func (s *Store) At(ctx context.Context, st jetstream.Stream, seq uint64) (*Message, error) {
	m, err := s.readMessage(ctx, func() (*jetstream.RawStreamMsg, error) { return s.readAt(ctx, st, seq) })
	if err != nil {
		return nil, fmt.Errorf("read message %d: %w", seq, err)
	}
	return m, nil
}

// NextMessage reads the first message of st on a subject whose sequence number is at least from.
// [IsNotFound] matches its error if there is none.
func (s *Store) NextMessage(ctx context.Context, st jetstream.Stream, from uint64, subject string) (*Message, error) {
	found := false
	m, err := s.readMessage(ctx, func() (*jetstream.RawStreamMsg, error) {
		raw, err := s.Next(ctx, st, from, subject)
		found = err == nil
		return raw, err
	})
	if found && IsNotFound(err) {
		return nil, fmt.Errorf("read %s: %w: its body is gone: %s", subject,
			ErrMalformed, err) //nolint:errorlint // the message itself was found
	}
	if err != nil {
		return nil, fmt.Errorf("read %s: %w", subject, err)
	}
	return m, nil
}

// readMessage reads a message and its body. If the body is gone, because the message is just being
// replaced, or does not arrive within some time, both are read again, with more time for the body.
func (s *Store) readMessage(ctx context.Context, read func() (*jetstream.RawStreamMsg, error)) (*Message, error) {
	end, err := proto.BeginRead(ctx)
	if err != nil {
		return nil, err
	}
	defer end()
	missing := uint64(0) // the message whose body was not found
	for timeout := bodyTimeout; ; timeout *= 2 {
		m, err := read()
		if err != nil {
			return nil, err
		}
		out := &Message{Subject: m.Subject, Header: m.Header, Data: m.Data, Seq: m.Sequence, Time: m.Time}
		if at, err := time.Parse(time.RFC3339Nano, m.Header.Get(headerStored)); err == nil {
			out.Time = at
		}
		if err := proto.ReserveRead(ctx, len(m.Data)); err != nil {
			return nil, err
		}
		err = s.loadBody(ctx, out, timeout)
		if err == nil {
			return out, nil
		}
		if IsNotFound(err) && out.Seq != missing {
			missing = out.Seq
			continue
		}
		incomplete := errors.Is(err, errIncompleteBody)
		if ctx.Err() != nil || !incomplete && !errors.Is(err, context.DeadlineExceeded) && !errors.Is(err, nats.ErrTimeout) {
			return nil, err
		}
		if incomplete {
			select {
			case <-ctx.Done():
				return nil, err
			case <-time.After(retryMaxPause):
			}
		}
	}
}

// RemovedJobs are jobs to remove. Each sequence number is one above the last job to remove, 0 for
// none.
type RemovedJobs struct {
	Below        uint64 // of all jobs
	PromptBelow  uint64 // of those without a RunAt
	DelayedBelow uint64 // of those with one
	Single       []uint64
	Bodies       []string // names of their bodies
}

// RemoveJobs removes jobs. A job that is gone already is no error. One failure does not stop the
// rest.
func (s *Store) RemoveJobs(ctx context.Context, r RemovedJobs) error {
	var failed []error
	purge := func(below uint64, subject string) {
		if below == 0 {
			return
		}
		// Without a subject, the server drops the beginning of the stream, which is much cheaper.
		opts := []jetstream.StreamPurgeOpt{jetstream.WithPurgeSequence(below)}
		if subject != "" {
			opts = append(opts, jetstream.WithPurgeSubject(subject))
		}
		if err := s.Jobs.Purge(ctx, opts...); err != nil {
			failed = append(failed, fmt.Errorf("remove jobs %s below %d: %w", subject, below, err))
		}
	}
	purge(r.Below, "")
	for _, class := range []proto.Class{proto.ClassInteractive, proto.ClassBackground} {
		purge(r.PromptBelow, jobPrefix(string(class))+">")
	}
	purge(r.DelayedBelow, jobPrefix(delayedJobs)+">")
	for _, seq := range r.Single {
		if err := s.unlessGone(ctx, s.Jobs, seq, s.Jobs.DeleteMsg(ctx, seq)); err != nil {
			failed = append(failed, fmt.Errorf("remove job %d: %w", seq, err))
		}
	}
	for _, name := range r.Bodies {
		if err := s.removeBody(ctx, name); err != nil {
			failed = append(failed, err)
		}
	}
	return errors.Join(failed...)
}

// JobMeta returns the metadata in the header of a job, without reading its body. It returns
// [proto.ErrNotFound] if there is no such job.
func (s *Store) JobMeta(ctx context.Context, org string, id proto.TraceID) (*proto.Meta, error) {
	m, err := s.readLast(ctx, s.Jobs, JobPattern(org, id))
	if IsNotFound(err) {
		return nil, fmt.Errorf("job %s: %w", id, proto.ErrNotFound)
	}
	if err != nil {
		return nil, fmt.Errorf("read job %s: %w", id, err)
	}
	meta, err := DecodeMeta(m.Header)
	if err == nil && (meta.TraceID != id || meta.Org != org) {
		err = fmt.Errorf("decode job %s of %s: its id is %q, of %q", id, org, meta.TraceID, meta.Org)
	}
	return meta, err
}

// DecodeJob decodes the job of an execution of an organisation.
func DecodeJob(m *Message, org string, id proto.TraceID) (*proto.Job, error) {
	var job proto.Job
	if err := json.Unmarshal(m.Data, &job); err != nil {
		return nil, fmt.Errorf("decode job %s: %w", id, err)
	}
	if job.TraceID != id || job.Org != org {
		return nil, fmt.Errorf("decode job %s of %s: its id is %q, of %q", id, org, job.TraceID, job.Org)
	}
	return &job, nil
}

// DecodeMeta decodes the metadata in the header of a job.
func DecodeMeta(h nats.Header) (*proto.Meta, error) {
	var meta proto.Meta
	if err := json.Unmarshal([]byte(h.Get(HeaderMeta)), &meta); err != nil {
		return nil, fmt.Errorf("decode the header of a job: %w", err)
	}
	return &meta, nil
}

// ErrMalformed means that a stored message is not what its subject stands for.
var ErrMalformed = errors.New("malformed record")

// Record reads the record of an execution, and the sequence number to change it by. It returns
// [proto.ErrNotFound] if there is none, and [ErrMalformed] with the sequence number if the message
// is not a record.
func (s *Store) Record(ctx context.Context, org string, id proto.TraceID) (*proto.Record, uint64, error) {
	m, err := s.Last(ctx, s.Executions, ExecSubject(org, id))
	if IsNotFound(err) {
		return nil, 0, fmt.Errorf("record of %s: %w", id, proto.ErrNotFound)
	}
	if err != nil {
		return nil, 0, err
	}
	rec, err := decodeRecord(org, id, m.Data)
	return rec, m.Seq, err
}

// RecordSummary is [Store.Record] without outputs. It reads no body that is stored apart.
func (s *Store) RecordSummary(ctx context.Context, org string, id proto.TraceID) (*proto.Record, uint64, error) {
	m, err := s.lastWithoutBody(ctx, s.Executions, ExecSubject(org, id))
	if IsNotFound(err) {
		return nil, 0, fmt.Errorf("record of %s: %w", id, proto.ErrNotFound)
	}
	if err != nil {
		return nil, 0, fmt.Errorf("read the record of %s: %w", id, err)
	}
	rec, err := s.Summary(ctx, org, id, m.Sequence, m.Header)
	return rec, m.Sequence, err
}

// Summary returns the record of an execution without outputs, from the header of its message m. If
// the header has none, as that of an older version, it reads the whole record.
func (s *Store) Summary(
	ctx context.Context, org string, id proto.TraceID, seq uint64, h nats.Header,
) (*proto.Record, error) {
	if text := h.Get(HeaderSummary); text != "" {
		rec, err := proto.DecodeSummary(id, []byte(text))
		if err == nil && rec.Org != org {
			err = fmt.Errorf("%w: the summary of %s of %s is of %q", ErrMalformed, id, org, rec.Org)
		}
		return rec, err
	}
	m, err := s.At(ctx, s.Executions, seq)
	if err != nil {
		return nil, err
	}
	rec, err := decodeRecord(org, id, m.Data)
	if err != nil {
		return nil, err
	}
	return rec.Public(), nil
}

// decodeRecord decodes the record of an execution of an organisation.
func decodeRecord(org string, id proto.TraceID, body []byte) (*proto.Record, error) {
	rec, err := proto.DecodeRecord(id, body)
	switch {
	case err != nil:
		return nil, fmt.Errorf("%w: %w", ErrMalformed, err)
	case rec.Org != org:
		return nil, fmt.Errorf("%w: the record of %s of %s is of %q", ErrMalformed, id, org, rec.Org)
	default:
		return rec, nil
	}
}

// WriteRecord stores rec if the record has sequence number expect, and returns the new one. Once a
// terminal record is durable, the server notifies those who wait for it. Errors are those of
// [Store.Write].
func (s *Store) WriteRecord(ctx context.Context, rec *proto.Record, expect uint64) (uint64, error) {
	staged, err := s.StageRecord(ctx, rec)
	if err != nil {
		return 0, err
	}
	seq, err := staged.Write(ctx, expect)
	if IsConflict(err) || IsRejected(err) {
		staged.Discard(ctx)
	}
	return seq, err
}

// StagedRecord is a record that can be written any number of times. A large body is stored already.
type StagedRecord struct {
	store *Store
	msg   *nats.Msg
	// maybeStored is set if an earlier Write may have been carried out.
	maybeStored bool
}

// StageRecord prepares rec for writing.
func (s *Store) StageRecord(ctx context.Context, rec *proto.Record) (*StagedRecord, error) {
	body, err := proto.EncodeRecord(rec)
	if err != nil {
		return nil, err
	}
	h := nats.Header{}
	h.Set(HeaderStatus, string(rec.Status))
	h.Set(HeaderWorker, rec.Worker)
	h.Set(HeaderAttempt, strconv.Itoa(rec.Attempt))
	if rec.Epoch != "" {
		h.Set(HeaderEpoch, rec.Epoch)
	}
	if rec.Cancelling {
		h.Set(HeaderCancel, "true")
	}
	if len(rec.Lost) > 0 {
		h.Set(HeaderLosses, strconv.Itoa(len(rec.Lost)))
	}
	summary, err := proto.SummarizeRecord(rec)
	if err != nil {
		return nil, err
	}
	limit := s.maxRecord
	if len(summary) <= maxSummary {
		h.Set(HeaderSummary, string(summary))
		limit -= max(0, len(summary)-summaryRoom)
	}
	m, err := s.stage(ctx, ExecSubject(rec.Org, rec.TraceID), h, body, limit)
	if err != nil {
		return nil, err
	}
	return &StagedRecord{store: s, msg: m}, nil
}

// Write is [Store.WriteRecord] of the staged record. It keeps a stored body when it fails.
func (r *StagedRecord) Write(ctx context.Context, expect uint64) (uint64, error) {
	seq, err := r.store.write(ctx, r.msg, expect, r.maybeStored)
	if err != nil {
		r.maybeStored = r.maybeStored || isUndecided(err) || !IsConflict(err) && !IsRejected(err)
		return 0, err
	}
	return seq, nil
}

// Discard removes the body of a record that will not be written.
func (r *StagedRecord) Discard(ctx context.Context) { r.store.discard(ctx, r.msg) }

// StageJob prepares the message that [Store.WriteJob] stores.
func (s *Store) StageJob(ctx context.Context, job *proto.Job, h nats.Header) (*nats.Msg, error) {
	body, err := json.Marshal(job)
	if err != nil {
		return nil, fmt.Errorf("encode job %s: %w", job.TraceID, err)
	}
	meta, err := json.Marshal(&job.Meta)
	if err != nil {
		return nil, fmt.Errorf("encode job %s: %w", job.TraceID, err)
	}
	h.Set(HeaderMeta, string(meta))
	return s.stage(ctx, JobSubject(&job.Meta), h, body, s.maxInline)
}

// WriteJob stores a staged job that is not stored yet, and returns its sequence number. Storing the
// same message again is no error.
func (s *Store) WriteJob(ctx context.Context, m *nats.Msg) (uint64, error) {
	return s.write(ctx, m, 0, true)
}

// DiscardJob removes the body of a staged job that will not be written.
func (s *Store) DiscardJob(ctx context.Context, m *nats.Msg) { s.discard(ctx, m) }

// ReadBody returns a message that was not read from its stream, with its body.
func (s *Store) ReadBody(ctx context.Context, m *nats.Msg) (*Message, error) {
	out := &Message{Subject: m.Subject, Header: m.Header, Data: m.Data}
	if err := s.loadBody(ctx, out, bodyTimeout); err != nil {
		return nil, err
	}
	return out, nil
}

// MaxInline is the size in bytes up to which a body is stored in the message, except for records.
func (s *Store) MaxInline() int { return s.maxInline }
