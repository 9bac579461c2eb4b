package backup

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"strconv"
	"strings"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/scheduler/deliveries"
	"github.com/bullpen-run/bullpen/scheduler/store"
)

// endLook is how often a record is read that is about to end.
const endLook = 100 * time.Millisecond

// Maker makes backups.
type Maker struct {
	Store   *store.Store
	Version string // of this program
}

// Backup writes all that is in JetStream to w, while everything runs.
//
// The streams are read one after the other, so what is told of an execution is of several moments. The order is such that it fits together:
// whatever was accepted before the backup began is in it, as it was at one moment while it was made.
//
//   - Jobs come before dead letters and deliveries, and these before records: a job that is gone already is a dead letter, or has a record
//     which has ended, and its delivery. A delivery that is told of belongs to a record that has ended.
//   - A record that has not ended and has no job was accepted since. It is left out: nobody would end it.
//   - A record that has ended, and neither has a job nor its delivery, was accepted since, too. The delivery is made for it.
//   - Heads come after records. The executions that made the versions which came meanwhile are waited for, and told of again.
//   - Output comes last, without that of attempts which began after their record was read.
//   - Idempotency keys come at the very end. One without an execution counts for nothing after some seconds.
func (m *Maker) Backup(ctx context.Context, w io.Writer) error {
	f, err := create(w, m.Version, time.Now())
	if err != nil {
		return err
	}
	b := &run{
		store: m.Store, file: f, jobs: map[proto.TraceID]bool{}, deliveries: map[proto.TraceID]bool{}, attempts: map[proto.TraceID]int{},
	}
	if err := b.run(ctx); err != nil {
		return err
	}
	return f.end()
}

// run is the making of one backup.
type run struct {
	store *store.Store
	file  *file
	// The last messages of streams when the backup began: what comes after them came while it was made.
	execsMark, hooksMark, headsMark, outsMark uint64

	jobs       map[proto.TraceID]bool
	deliveries map[proto.TraceID]bool // that changed since
	attempts   map[proto.TraceID]int  // of records that have not ended or changed since
	execsLast  uint64                 // the last record that was read
}

func (b *run) run(ctx context.Context) error {
	for _, mark := range []struct {
		st *jetstream.Stream
		to *uint64
	}{{&b.store.Executions, &b.execsMark}, {&b.store.Deliveries, &b.hooksMark}, {&b.store.Threads, &b.headsMark}, {&b.store.Output, &b.outsMark}} {
		info, err := (*mark.st).Info(ctx)
		if err != nil {
			return fmt.Errorf("ask for the state of a stream: %w", err)
		}
		*mark.to = info.State.LastSeq
	}
	b.execsLast = b.execsMark
	for _, s := range []struct {
		st   jetstream.Stream
		take func(context.Context, *message) error
	}{
		{b.store.Jobs, b.job}, {b.store.DeadLetters, b.letter}, {b.store.Deliveries, b.delivery}, {b.store.Executions, b.record}, {b.store.Threads, b.head}, {b.store.Output, b.output},
	} {
		if err := b.each(ctx, s.st, s.take); err != nil {
			return err
		}
	}
	for _, bucket := range []jetstream.KeyValue{b.store.Keys, b.store.Profiles, b.store.Webhooks, b.store.Images} {
		if err := b.bucket(ctx, bucket); err != nil {
			return err
		}
	}
	return b.bucket(ctx, b.store.Bindings)
}

// message is one that was read.
type message struct {
	subject string
	seq     uint64
	at      time.Time
	header  nats.Header
	body    []byte
}

// id gives the execution that the message is about: the last word of its subject.
func (m *message) id() proto.TraceID {
	return proto.TraceID(m.subject[strings.LastIndexByte(m.subject, '.')+1:])
}

// each hands all messages of a stream to take.
func (b *run) each(ctx context.Context, st jetstream.Stream, take func(context.Context, *message) error) error {
	ctx, fail := context.WithCancelCause(ctx)
	defer fail(nil)
	err := b.store.ReadMessages(ctx, st, func(m jetstream.Msg, at *jetstream.MsgMetadata) {
		if ctx.Err() != nil {
			return
		}
		if err := take(ctx, &message{subject: m.Subject(), seq: at.Sequence.Stream, at: at.Timestamp, header: m.Headers(), body: m.Data()}); err != nil {
			fail(err)
		}
	})
	if cause := context.Cause(ctx); cause != nil {
		return cause
	}
	return err
}

func (b *run) bucket(ctx context.Context, kv jetstream.KeyValue) error {
	st, err := b.store.BucketStream(ctx, kv)
	if err != nil {
		return err
	}
	return b.each(ctx, st, b.any)
}

// any writes a message, unless it says that there is nothing.
func (b *run) any(_ context.Context, m *message) error {
	if store.IsDeleteMarker(m.header) || !store.InBackup(m.subject) {
		return nil
	}
	return b.file.add(m.subject, store.BackupHeader(m.header), m.at, m.body)
}

// whole reads the newest message on a subject with a body that is stored apart, which may be gone with an older one. there is false where
// nothing is there any more.
func (b *run) whole(ctx context.Context, st jetstream.Stream, m *message) (there bool, err error) {
	if store.BodyObject(m.header) == "" {
		return true, nil
	}
	newest, err := b.store.LastFromLeader(ctx, st, m.subject)
	if store.IsNotFound(err) {
		return false, nil
	}
	if err != nil {
		return false, err
	}
	m.seq, m.at, m.header, m.body = newest.Seq, newest.Time, newest.Header, newest.Data
	return true, nil
}

func (b *run) job(ctx context.Context, m *message) error {
	there, err := b.whole(ctx, b.store.Jobs, m)
	if err != nil || !there { // it has ended, and its delivery is stored
		return err
	}
	b.jobs[m.id()] = true
	return b.any(ctx, m)
}

func (b *run) letter(ctx context.Context, m *message) error {
	there, err := b.whole(ctx, b.store.DeadLetters, m)
	if err != nil || !there { // it was requeued or removed
		return err
	}
	return b.any(ctx, m)
}

func (b *run) delivery(ctx context.Context, m *message) error {
	there, err := b.whole(ctx, b.store.Deliveries, m)
	if err != nil || !there {
		return err
	}
	if m.seq > b.hooksMark {
		b.deliveries[m.id()] = true
	}
	return b.any(ctx, m)
}

func (b *run) record(ctx context.Context, m *message) error {
	b.execsLast = max(b.execsLast, m.seq)
	there, err := b.whole(ctx, b.store.Executions, m)
	if err != nil || !there {
		return err
	}
	b.execsLast = max(b.execsLast, m.seq)
	ended := proto.Status(m.header.Get(store.HeaderStatus)).Terminal()
	if m.seq > b.execsMark && !ended && !b.jobs[m.id()] {
		return nil
	}
	if ended && m.seq <= b.execsMark {
		delete(b.attempts, m.id())
		return b.any(ctx, m)
	}
	return b.changed(ctx, m, ended)
}

// changed writes a record that has not ended, or that changed since the backup began.
func (b *run) changed(ctx context.Context, m *message, ended bool) error {
	attempt, err := strconv.Atoi(m.header.Get(store.HeaderAttempt))
	if err != nil {
		return b.any(ctx, m) // malformed, and passed over by all
	}
	b.attempts[m.id()] = attempt
	if err := b.any(ctx, m); err != nil || !ended || b.jobs[m.id()] || b.deliveries[m.id()] {
		return err
	}
	var d *proto.Delivery
	if rec, err := proto.DecodeRecord(m.id(), m.body); err == nil { // else as above
		d = proto.NewDelivery(&rec.Meta, m.at)
	}
	if d == nil {
		return nil
	}
	h, body, err := deliveries.Encode(d)
	if err != nil {
		return err
	}
	b.deliveries[m.id()] = true
	return b.file.add(store.DeliverySubject(d.Org, d.TraceID), h, m.at, body)
}

func (b *run) head(ctx context.Context, m *message) error {
	if err := b.any(ctx, m); err != nil || m.seq <= b.headsMark {
		return err
	}
	var t proto.Thread
	var versions []proto.Version
	if err := json.Unmarshal(m.body, &t); err == nil && t.Version != nil { // else it is malformed, or has no version
		versions = append(t.History, *t.Version)
	}
	for _, v := range versions {
		if err := b.made(ctx, v.Trace); err != nil {
			return err
		}
	}
	return nil
}

// made writes the record of an execution that made a version, if it was not told of as it has ended. It ends soon: its commit comes after
// its result was written as pending, and whoever comes goes on from there.
func (b *run) made(ctx context.Context, id proto.TraceID) error {
	if id == "" {
		return nil
	}
	look := time.NewTicker(endLook)
	defer look.Stop()
	for {
		rec, err := b.store.LastFromLeader(ctx, b.store.Executions, store.ExecSubject(id))
		if store.IsNotFound(err) {
			return nil // its retention is over
		}
		if err != nil {
			return err
		}
		if proto.Status(rec.Header.Get(store.HeaderStatus)).Terminal() {
			if rec.Seq <= b.execsLast {
				return nil
			}
			return b.changed(ctx, &message{store.ExecSubject(id), rec.Seq, rec.Time, rec.Header, rec.Data}, true)
		}
		select {
		case <-ctx.Done():
			return context.Cause(ctx)
		case <-look.C:
		}
	}
}

func (b *run) output(ctx context.Context, m *message) error {
	words := strings.Split(m.subject, ".") // bullpen.out.<trace>.<attempt>
	attempt, err := strconv.Atoi(words[len(words)-1])
	if told := err == nil && attempt <= b.attempts[proto.TraceID(words[len(words)-2])]; !told && m.seq > b.outsMark {
		return nil
	}
	return b.any(ctx, m)
}
