package store

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"strconv"
	"strings"
	"time"

	"github.com/cenkalti/backoff/v4"
	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
	"github.com/nats-io/nuid"

	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/proto/fault"
)

// Header names of what is stored. The dispatcher reads headers only.
const (
	HeaderMeta    = "Bullpen-Meta"    // JSON of [proto.Meta] on a job
	HeaderStatus  = "Bullpen-Status"  // of an execution's record
	HeaderWorker  = "Bullpen-Worker"  // who holds the lease
	HeaderAttempt = "Bullpen-Attempt" // the claimed attempt
	HeaderLosses  = "Bullpen-Losses"  // how many workers died with an execution before they started its program; none for 0
	HeaderFirst   = "Bullpen-First"   // sequence number of the first event in an output message
	HeaderLast    = "Bullpen-Last"    // and of the last
	HeaderOrigin  = "Bullpen-Origin"  // scheme, host and port of a delivery's URL
	HeaderDue     = "Bullpen-Due"     // when a delivery's next attempt is due, RFC 3339 with nanoseconds; none where it has ended
	HeaderThread  = "Bullpen-Thread"  // JSON of [proto.ThreadSummary] on a head; none where the thread was removed
	HeaderDead    = "Bullpen-Dead"    // JSON of [proto.DeadLetter] on a dead letter
	headerBody    = "Bullpen-Body"    // name of the object that holds the body
	headerWrite   = "Bullpen-Write"   // names one write, to recognise it after an answer was lost
	headerStored  = "Bullpen-Stored"  // when a message was stored that was restored from a backup later, RFC 3339 with nanoseconds
)

const (
	publishTimeout = time.Second
	retryFirst     = 20 * time.Millisecond
	retryMost      = 500 * time.Millisecond
	bodyTimeout    = 2 * time.Second // of the first try to read a body; each further one has twice as long
)

// Stored is one message of a stream with its body, which may have been claim-checked.
type Message struct {
	Header nats.Header
	Data   []byte
	Seq    uint64
	Time   time.Time // when it was first stored, also where a backup was restored since
}

// Write stores a message if the last one on its subject has sequence number expect (0: none yet), and returns the new sequence
// number. It is safe against lost answers: it tries again until ctx ends, and recognises its own write. A body over the inline
// limit goes to the object store first. The errors to tell apart are those of [IsConflict] and [IsRejected].
func (s *Store) Write(ctx context.Context, subject string, h nats.Header, body []byte, expect uint64) (uint64, error) {
	m, err := s.stage(ctx, subject, h, body, s.inline)
	if err != nil {
		return 0, err
	}
	seq, err := s.write(ctx, m, h.Get(headerWrite), expect, false)
	// Left alone unless the server said no: an unanswered write may still be carried out, and needs its body.
	if IsConflict(err) || IsRejected(err) {
		s.discard(ctx, m)
	}
	return seq, err
}

// stage makes a message ready to be written; a body of more than most bytes is stored.
func (s *Store) stage(ctx context.Context, subject string, h nats.Header, body []byte, most int) (*nats.Msg, error) {
	id := nuid.Next()
	h.Set(headerWrite, id)
	if len(body) > most {
		name := strings.TrimPrefix(subject, root) + "." + id
		// In the largest pieces: each is a durable write, and somebody waits for all of them.
		object := jetstream.ObjectMeta{Name: name, Opts: &jetstream.ObjectMetaOptions{ChunkSize: uint32(s.MaxInline())}}
		if _, err := s.bodies.Put(ctx, object, bytes.NewReader(body)); err != nil {
			return nil, fmt.Errorf("store the body of %s: %w", subject, err)
		}
		h.Set(headerBody, name)
		body = nil
	}
	return &nats.Msg{Subject: subject, Header: h, Data: body}, nil
}

// discard removes the stored body of a message that will not be written. One that stays goes at the end of its retention.
func (s *Store) discard(ctx context.Context, m *nats.Msg) {
	s.DiscardBody(ctx, &Message{Header: m.Header})
}

// write stores msg; unsure says that it may have been stored before.
func (s *Store) write(ctx context.Context, msg *nats.Msg, id string, expect uint64, unsure bool) (uint64, error) {
	st := s.streamOf(msg.Subject)
	seq, err := insist(ctx, s.news, nameOf(st), publishTimeout, func(try context.Context) (uint64, error) {
		ack, err := s.JS.PublishMsg(try, msg, jetstream.WithExpectLastSequencePerSubject(expect))
		switch {
		case err == nil:
			return ack.Sequence, nil
		case undecided(err):
			return 0, err
		case IsConflict(err) || IsRejected(err):
			if !unsure {
				return 0, backoff.Permanent(err)
			}
			return s.wrote(try, st, msg.Subject, id, err)
		default:
			unsure = unsure || !errors.Is(err, jetstream.ErrNoStreamResponse)
			return 0, err
		}
	})
	if err != nil {
		return 0, fmt.Errorf("write %s: %w", msg.Subject, unanswered(err))
	}
	return seq, nil
}

// streamOf gives the stream that messages on a subject are written to.
func (s *Store) streamOf(subject string) jetstream.Stream {
	switch {
	case strings.HasPrefix(subject, root+"job."):
		return s.Jobs
	case strings.HasPrefix(subject, root+"delivery."):
		return s.Deliveries
	case strings.HasPrefix(subject, root+"thread."):
		return s.Threads
	case strings.HasPrefix(subject, dead):
		return s.DeadLetters
	default:
		return s.Executions
	}
}

// wrote finds out whether this very write was carried out before the server's no to it: the answer may have been lost.
func (s *Store) wrote(ctx context.Context, st jetstream.Stream, subject, id string, no error) (uint64, error) {
	m, err := s.readLast(ctx, st, subject)
	switch {
	case err == nil && m.Header.Get(headerWrite) == id:
		return m.Sequence, nil
	case err == nil || IsNotFound(err):
		return 0, backoff.Permanent(no)
	default:
		return 0, err
	}
}

// DiscardBody removes the stored body of a message that was replaced.
func (s *Store) DiscardBody(ctx context.Context, m *Message) {
	if name := BodyObject(m.Header); name != "" {
		_ = s.bodies.Delete(ctx, name)
	}
}

// Last reads the last message on a subject of st. Its error may be one that [IsNotFound] knows.
func (s *Store) Last(ctx context.Context, st jetstream.Stream, subject string) (*Message, error) {
	m, err := s.readMessage(ctx, func() (*jetstream.RawStreamMsg, error) { return s.readLast(ctx, st, subject) })
	if err != nil {
		return nil, fmt.Errorf("read %s: %w", subject, err)
	}
	return m, nil
}

// Newest is [Store.Last] as the leader of the stream has it, which no answer is older than. It asks again until ctx ends.
func (s *Store) LastFromLeader(ctx context.Context, st jetstream.Stream, subject string) (*Message, error) {
	m, err := s.readMessage(ctx, func() (*jetstream.RawStreamMsg, error) { return s.lastFromLeader(ctx, st, subject) })
	if err != nil {
		return nil, fmt.Errorf("read %s: %w", subject, err)
	}
	return m, nil
}

// At reads the message of st with sequence number seq. Its error may be one that [IsNotFound] knows.
func (s *Store) At(ctx context.Context, st jetstream.Stream, seq uint64) (*Message, error) {
	m, err := s.readMessage(ctx, func() (*jetstream.RawStreamMsg, error) { return s.readAt(ctx, st, seq) })
	if err != nil {
		return nil, fmt.Errorf("read message %d: %w", seq, err)
	}
	return m, nil
}

// whole reads a message and its body. A body that is deleted meanwhile may be waited for in vain, so after some time both are looked
// for again: they are gone then, or it was slow and gets longer.
func (s *Store) readMessage(ctx context.Context, read func() (*jetstream.RawStreamMsg, error)) (*Message, error) {
	for patience := bodyTimeout; ; patience *= 2 {
		m, err := read()
		if err != nil {
			return nil, err
		}
		out := &Message{Header: m.Header, Data: m.Data, Seq: m.Sequence, Time: m.Time}
		if at, err := time.Parse(time.RFC3339Nano, m.Header.Get(headerStored)); err == nil {
			out.Time = at
		}
		err = s.loadBody(ctx, out, patience)
		if err == nil {
			return out, nil
		}
		if ctx.Err() != nil || !errors.Is(err, context.DeadlineExceeded) && !errors.Is(err, nats.ErrTimeout) && !errors.Is(err, os.ErrDeadlineExceeded) {
			return nil, err
		}
	}
}

// fill reads the body of a message that was claim-checked, within patience.
func (s *Store) loadBody(ctx context.Context, m *Message, patience time.Duration) error {
	name := m.Header.Get(headerBody)
	if name == "" {
		return nil
	}
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	object, err := s.bodies.Get(ctx, name) // it checks the digest
	if err != nil {
		return fmt.Errorf("body %s: %w", name, err)
	}
	defer func() { _ = object.Close() }()
	info, err := object.Info()
	if err != nil {
		return fmt.Errorf("body %s: %w", name, err)
	}
	var body bytes.Buffer
	body.Grow(int(info.Size) + bytes.MinRead)
	if _, err := body.ReadFrom(object); err != nil {
		return fmt.Errorf("body %s: %w", name, err)
	}
	m.Data = body.Bytes()
	return nil
}

// BodyOf names the object that holds a message's body; empty where the message holds it itself.
func BodyObject(h nats.Header) string { return h.Get(headerBody) }

// RemoveJobs removes every job below floor (0 for none), the jobs alone, and the objects that held their bodies. Removing what is gone
// is no error. What cannot be removed does not keep it from the rest.
func (s *Store) RemoveJobs(ctx context.Context, floor uint64, alone []uint64, bodies []string) error {
	var failed []error
	if floor > 0 {
		if err := s.Jobs.Purge(ctx, jetstream.WithPurgeSequence(floor)); err != nil {
			failed = append(failed, fmt.Errorf("remove jobs below %d: %w", floor, err))
		}
	}
	for _, seq := range alone {
		if err := s.Jobs.DeleteMsg(ctx, seq); err != nil && !IsNotFound(err) {
			failed = append(failed, fmt.Errorf("remove job %d: %w", seq, err))
		}
	}
	for _, name := range bodies {
		if err := s.bodies.Delete(ctx, name); err != nil && !IsNotFound(err) {
			failed = append(failed, fmt.Errorf("delete body %q: %w", name, err))
		}
	}
	return errors.Join(failed...)
}

// JobMeta reads what the header of a job that is not terminal says of it, without a body that is stored apart. Its error is
// [proto.ErrNotFound] where there is no such job.
func (s *Store) JobMeta(ctx context.Context, id proto.TraceID) (*proto.Meta, error) {
	m, err := s.readLast(ctx, s.Jobs, JobPattern(id))
	if IsNotFound(err) {
		return nil, fmt.Errorf("job %s: %w", id, proto.ErrNotFound)
	}
	if err != nil {
		return nil, fmt.Errorf("read job %s: %w", id, err)
	}
	meta, err := DecodeMeta(m.Header)
	if err == nil && meta.TraceID != id {
		err = fmt.Errorf("decode job %s: it says it is %q", id, meta.TraceID)
	}
	return meta, err
}

// DecodeJob decodes the job of id.
func DecodeJob(m *Message, id proto.TraceID) (*proto.Job, error) {
	var job proto.Job
	if err := json.Unmarshal(m.Data, &job); err != nil {
		return nil, fmt.Errorf("decode job %s: %w", id, err)
	}
	if job.TraceID != id {
		return nil, fmt.Errorf("decode job %s: it says it is %q", id, job.TraceID)
	}
	return &job, nil
}

// DecodeMeta decodes what a job's header says of it.
func DecodeMeta(h nats.Header) (*proto.Meta, error) {
	var meta proto.Meta
	if err := json.Unmarshal([]byte(h.Get(HeaderMeta)), &meta); err != nil {
		return nil, fmt.Errorf("decode the header of a job: %w", err)
	}
	return &meta, nil
}

// ErrMalformed says that something else lies where a record should.
var ErrMalformed = errors.New("malformed record")

// Record reads the record of an execution that was claimed or has ended, with the sequence number to change it by. Its error is
// [proto.ErrNotFound] where there is none, and [ErrMalformed], with the sequence number, where there is something else.
func (s *Store) Record(ctx context.Context, id proto.TraceID) (*proto.Record, uint64, error) {
	m, err := s.Last(ctx, s.Executions, ExecSubject(id))
	if IsNotFound(err) {
		return nil, 0, fmt.Errorf("record of %s: %w", id, proto.ErrNotFound)
	}
	if err != nil {
		return nil, 0, err
	}
	rec, err := proto.DecodeRecord(id, m.Data)
	if err != nil {
		return nil, m.Seq, fmt.Errorf("%w: %w", ErrMalformed, err)
	}
	return rec, m.Seq, nil
}

// WriteRecord stores rec if the record has sequence number expect, and returns the new one. When rec is terminal, those who wait
// for it are told once it is durable. Its errors are those of [Store.Write].
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

// StagedRecord is a record that is ready to be written, any number of times: what is large of it is stored already.
type StagedRecord struct {
	store *Store
	msg   *nats.Msg
}

// StageRecord makes rec ready to be written.
func (s *Store) StageRecord(ctx context.Context, rec *proto.Record) (*StagedRecord, error) {
	body, err := proto.EncodeRecord(rec)
	if err != nil {
		return nil, err
	}
	h := nats.Header{}
	h.Set(HeaderStatus, string(rec.Status))
	h.Set(HeaderWorker, rec.Worker)
	h.Set(HeaderAttempt, strconv.Itoa(rec.Attempt))
	if len(rec.Lost) > 0 {
		h.Set(HeaderLosses, strconv.Itoa(len(rec.Lost)))
	}
	m, err := s.stage(ctx, ExecSubject(rec.TraceID), h, body, s.record)
	if err != nil {
		return nil, err
	}
	return &StagedRecord{store: s, msg: m}, nil
}

// Write is [Store.WriteRecord] of what was staged; it keeps what is stored of it when it fails.
func (r *StagedRecord) Write(ctx context.Context, expect uint64) (uint64, error) {
	if fault.Planted(fault.ResultWithoutCAS) && proto.Status(r.msg.Header.Get(HeaderStatus)).Terminal() {
		if m, err := r.store.Executions.GetLastMsgForSubject(ctx, r.msg.Subject); err == nil {
			expect = m.Sequence
		}
	}
	seq, err := r.store.write(ctx, r.msg, r.msg.Header.Get(headerWrite), expect, false)
	if err != nil {
		return 0, err
	}
	return seq, nil
}

// Discard gives up a record that will not be written.
func (r *StagedRecord) Discard(ctx context.Context) { r.store.discard(ctx, r.msg) }

// StageJob makes the message that [Store.WriteJob] stores: a body that is too large for it is stored already.
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
	return s.stage(ctx, JobSubject(&job.Meta), h, body, s.inline)
}

// WriteJob stores a staged job that is not there yet, and returns its sequence number. Storing the same message again is no error.
func (s *Store) WriteJob(ctx context.Context, m *nats.Msg) (uint64, error) {
	return s.write(ctx, m, m.Header.Get(headerWrite), 0, true)
}

// DiscardJob gives up a staged job that will not be written.
func (s *Store) DiscardJob(ctx context.Context, m *nats.Msg) { s.discard(ctx, m) }

// Received gives a message that came by another way than its stream, with its body.
func (s *Store) ReadBody(ctx context.Context, m *nats.Msg) (*Message, error) {
	out := &Message{Header: m.Header, Data: m.Data}
	if err := s.loadBody(ctx, out, bodyTimeout); err != nil {
		return nil, err
	}
	return out, nil
}

// Piece is the largest body that a message takes unless it is a record's, in bytes.
func (s *Store) MaxInline() int { return s.inline }
