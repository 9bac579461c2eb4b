package store

import (
	"context"
	"fmt"
	"slices"
	"strconv"

	"github.com/nats-io/nats.go"

	"github.com/bullpen-run/bullpen/proto"
)

const (
	maxSummary  = 32 << 10 // bytes; JetStream accepts headers of 64 KiB
	summaryRoom = 12 << 10 // bytes of a summary for which maxRecord leaves room
)

// Records is the stream of the records of executions: the claim of each, then its result.
type Records struct{ Stream }

// Get reads the record of an execution, and the sequence number to change it by. With [WithoutBody],
// the record has no outputs. Get returns [proto.ErrNotFound] if there is none, and [ErrMalformed] with
// the sequence number if the message is not a record.
func (r Records) Get(
	ctx context.Context, org string, id proto.TraceID, opts ...ReadOption,
) (rec *proto.Record, revision uint64, err error) {
	m, err := r.last(ctx, ExecSubject(org, id), opts)
	if IsNotFound(err) {
		return nil, 0, fmt.Errorf("record of %s: %w", id, proto.ErrNotFound)
	}
	if err != nil {
		return nil, 0, err
	}
	if slices.Contains(opts, WithoutBody) {
		rec, err = r.summary(ctx, org, id, m)
	} else {
		rec, err = decodeRecord(org, id, m.Data)
	}
	return rec, m.Seq, err
}

// last reads the last message on a subject. Most records are in the message itself, up to 1 MiB, so the read
// is limited like one with a body.
func (r Records) last(ctx context.Context, subject string, opts []ReadOption) (*Message, error) {
	if slices.Contains(opts, WithoutBody) {
		end, err := proto.BeginRead(ctx)
		if err != nil {
			return nil, err
		}
		defer end()
	}
	return r.Last(ctx, subject, opts...)
}

// Summary returns the record of an execution without outputs, from the header of its message m. If
// the header has none, because an older version wrote it, Summary reads the whole record.
func (r Records) Summary(ctx context.Context, m *Message) (*proto.Record, error) {
	org, id, err := ParseExecSubject(m.Subject)
	if err != nil {
		return nil, err
	}
	return r.summary(ctx, org, id, m)
}

func (r Records) summary(ctx context.Context, org string, id proto.TraceID, m *Message) (*proto.Record, error) {
	if text := m.Header.Get(HeaderSummary); text != "" {
		rec, err := proto.DecodeSummary(id, []byte(text))
		if err == nil && rec.Org != org {
			err = fmt.Errorf("%w: the summary of %s of %s is of %q", ErrMalformed, id, org, rec.Org)
		}
		return rec, err
	}
	m, err := r.At(ctx, m.Seq)
	if err != nil {
		return nil, err
	}
	rec, err := decodeRecord(org, id, m.Data)
	if err != nil {
		return nil, err
	}
	return rec.Public(), nil
}

// Status returns the status of an execution and the worker that had it last. The status is queued
// while only the job exists. Any server may report a terminal status, which is final; anything else
// is read from the leaders. Status returns [proto.ErrNotFound] if there is neither record nor job.
func (r Records) Status(
	ctx context.Context, org string, id proto.TraceID,
) (status proto.Status, worker string, err error) {
	subject := ExecSubject(org, id)
	parse := func(h nats.Header) (proto.Status, string) {
		return proto.Status(h.Get(HeaderStatus)), h.Get(HeaderWorker)
	}
	anyServer, cancel := context.WithTimeout(ctx, getTimeout)
	raw, err := r.GetLastMsgForSubject(anyServer, subject)
	cancel()
	if err == nil {
		if status, worker = parse(raw.Header); status.Terminal() {
			return status, worker, nil
		}
	}
	m, err := r.Last(ctx, subject, FromLeader, WithoutBody)
	if IsNotFound(err) {
		_, err = r.store.Jobs.Last(ctx, JobPattern(org, id), FromLeader, WithoutBody)
		if err == nil {
			return proto.StatusQueued, "", nil
		}
		if IsNotFound(err) { // the record is written before the job is removed: it may have appeared between the reads
			m, err = r.Last(ctx, subject, FromLeader, WithoutBody)
		}
	}
	switch {
	case IsNotFound(err):
		return "", "", fmt.Errorf("execution %s: %w", id, proto.ErrNotFound)
	case err != nil:
		return "", "", fmt.Errorf("read the status of execution %s: %w", id, err)
	}
	status, worker = parse(m.Header)
	return status, worker, nil
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

// Put stores rec if the record has sequence number expect, and returns the new one. Once a
// terminal record is durable, the server notifies those who wait for it. Errors are those of
// [Stream.Write].
func (r Records) Put(ctx context.Context, rec *proto.Record, expect uint64) (uint64, error) {
	staged, err := r.Stage(ctx, rec)
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
	records Records
	msg     *nats.Msg
	// maybeStored is set if an earlier Write may have been carried out.
	maybeStored bool
}

// Stage prepares rec for writing.
func (r Records) Stage(ctx context.Context, rec *proto.Record) (*StagedRecord, error) {
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
	limit := r.store.maxRecord
	if len(summary) <= maxSummary {
		h.Set(HeaderSummary, string(summary))
		limit -= max(0, len(summary)-summaryRoom)
	}
	m, err := r.store.Bodies.stage(ctx, ExecSubject(rec.Org, rec.TraceID), h, body, limit)
	if err != nil {
		return nil, err
	}
	return &StagedRecord{records: r, msg: m}, nil
}

// Write is [Records.Put] of the staged record. It keeps a stored body when it fails.
func (s *StagedRecord) Write(ctx context.Context, expect uint64) (uint64, error) {
	seq, err := s.records.write(ctx, s.msg, expect, s.maybeStored)
	if err != nil {
		s.maybeStored = s.maybeStored || isUndecided(err) || !IsConflict(err) && !IsRejected(err)
		return 0, err
	}
	return seq, nil
}

// Discard removes the body of a record that will not be written.
func (s *StagedRecord) Discard(ctx context.Context) {
	s.records.store.Bodies.Discard(ctx, s.msg.Header)
}
