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

	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/scheduler/deliveries"
	"github.com/bullpen-run/bullpen/scheduler/store"
)

// terminalPoll is how often to read a record that is about to become terminal.
const terminalPoll = 100 * time.Millisecond

// Maker makes backups.
type Maker struct {
	Store   *store.Store
	Version string // of this program
}

// Backup writes all that is in JetStream to w, while everything runs.
//
// The streams are read one after the other, so that the messages about one execution are from
// several moments. The order makes them consistent. Whatever was accepted before the backup began
// is in it, in a state that it had while the backup was made.
//
//   - Usage comes before the records and deliveries that it counts. Each of these has its place in
//     its stream, so that what the backup counts already is not counted again after a restore.
//   - Schedules, batches and runs of pipelines come next, since their states name executions and
//     webhooks. What they started meanwhile, they start again after a restore under the same trace
//     id or idempotency key, so it is the same execution.
//   - Jobs come before dead letters and deliveries, and these before records. A job that is gone by
//     then is a dead letter, or has a terminal record and its delivery. A delivery in the backup
//     belongs to a terminal record.
//   - A record that is not terminal and has no job was accepted later. It is omitted: nobody would
//     finish the execution.
//   - A terminal record without job and delivery was accepted later, too. Its delivery is created.
//   - Heads of threads come after records. Executions that made a version meanwhile are waited for,
//     and their records are written again.
//   - Output comes after that, without attempts that began after their record was read.
//   - Idempotency keys come last. One without an execution is ignored after some seconds.
func (m *Maker) Backup(ctx context.Context, w io.Writer) error {
	f, err := create(w, m.Version, time.Now())
	if err != nil {
		return err
	}
	b := &run{
		store: m.Store, file: f, start: map[store.Stream]uint64{},
		ids: map[store.Stream]string{
			m.Store.Records.Stream: store.StreamID(m.Store.Records), m.Store.Deliveries: store.StreamID(m.Store.Deliveries),
		},
		jobs: map[proto.TraceID]bool{}, deliveries: map[proto.TraceID]bool{}, attempts: map[proto.TraceID]int{},
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
	ids   map[store.Stream]string // of the streams whose messages are restored with their places
	start map[store.Stream]uint64 // sequence number of a stream's last message when the backup began

	jobs       map[proto.TraceID]bool
	deliveries map[proto.TraceID]bool // that changed since the start
	attempts   map[proto.TraceID]int  // of records that are not terminal, or changed since the start
	lastRecord uint64                 // highest sequence number of the records read
}

func (b *run) run(ctx context.Context) error {
	st := b.store
	for _, s := range []store.Stream{st.Records.Stream, st.Deliveries, st.Threads, st.Output.Stream} {
		info, err := s.Info(ctx)
		if err != nil {
			return fmt.Errorf("read the state of a stream: %w", err)
		}
		b.start[s] = info.State.LastSeq
	}
	b.lastRecord = b.start[st.Records.Stream]
	handlers := map[store.Stream]func(context.Context, *message) error{
		st.Jobs.Stream: b.job, st.DeadLetters: b.deadLetter, st.Deliveries: b.delivery, st.Records.Stream: b.record,
		st.Threads: b.head, st.Output.Stream: b.output,
	}
	streams, err := store.BackupStreams(ctx, st)
	if err != nil {
		return err
	}
	for _, s := range streams {
		handle := handlers[s]
		if handle == nil {
			handle = b.add
		}
		if err := b.each(ctx, s, handle); err != nil {
			return err
		}
	}
	return nil
}

// message is a stored message.
type message struct {
	stream  string // its id, if the message is restored with its place
	subject string
	seq     uint64
	at      time.Time
	header  nats.Header
	body    []byte
}

// id returns the execution that the message is about: the last token of its subject.
func (m *message) id() proto.TraceID {
	return proto.TraceID(m.subject[strings.LastIndexByte(m.subject, '.')+1:])
}

// each calls handle with all messages of a stream.
func (b *run) each(ctx context.Context, st store.Stream, handle func(context.Context, *message) error) error {
	ctx, fail := context.WithCancelCause(ctx)
	defer fail(nil)
	err := st.ReadAll(ctx, func(m *store.Message) {
		if ctx.Err() != nil {
			return
		}
		if err := handle(ctx, &message{
			stream: b.ids[st], subject: m.Subject, seq: m.Seq, at: m.Time, header: m.Header, body: m.Data,
		}); err != nil {
			fail(err)
		}
	})
	if cause := context.Cause(ctx); cause != nil {
		return cause
	}
	return err
}

// add writes a message, unless it is a delete marker.
func (b *run) add(_ context.Context, m *message) error {
	if store.IsDeleteMarker(m.header) || !store.InBackup(m.subject) {
		return nil
	}
	h := store.BackupHeader(m.header)
	if m.stream != "" {
		store.AddPlace(h, store.Place{Stream: m.stream, Seq: m.seq})
	}
	return b.file.add(m.subject, h, m.at, m.body)
}

// load replaces a message whose body is stored separately by the newest one on its subject, since
// the body of a replaced message may be gone. It reports whether there still is a message.
func (b *run) load(ctx context.Context, st store.Stream, m *message) (bool, error) {
	if store.BodyName(m.header) == "" {
		return true, nil
	}
	newest, err := st.Last(ctx, m.subject, store.FromLeader)
	if store.IsNotFound(err) {
		return false, nil
	}
	if err != nil {
		return false, err
	}
	m.seq, m.at, m.header, m.body = newest.Seq, newest.FirstStored(), newest.Header, newest.Data
	return true, nil
}

func (b *run) job(ctx context.Context, m *message) error {
	exists, err := b.load(ctx, b.store.Jobs.Stream, m)
	if err != nil || !exists { // its execution has ended, and its delivery is stored
		return err
	}
	b.jobs[m.id()] = true
	return b.add(ctx, m)
}

func (b *run) deadLetter(ctx context.Context, m *message) error {
	exists, err := b.load(ctx, b.store.DeadLetters, m)
	if err != nil || !exists { // requeued or removed
		return err
	}
	return b.add(ctx, m)
}

func (b *run) delivery(ctx context.Context, m *message) error {
	exists, err := b.load(ctx, b.store.Deliveries, m)
	if err != nil || !exists {
		return err
	}
	if m.seq > b.start[b.store.Deliveries] {
		b.deliveries[m.id()] = true
	}
	return b.add(ctx, m)
}

func (b *run) record(ctx context.Context, m *message) error {
	b.lastRecord = max(b.lastRecord, m.seq)
	exists, err := b.load(ctx, b.store.Records.Stream, m)
	if err != nil || !exists {
		return err
	}
	b.lastRecord = max(b.lastRecord, m.seq)
	terminal := proto.Status(m.header.Get(store.HeaderStatus)).Terminal()
	old := m.seq <= b.start[b.store.Records.Stream]
	if !old && !terminal && !b.jobs[m.id()] {
		return nil
	}
	if old && terminal {
		delete(b.attempts, m.id())
		return b.add(ctx, m)
	}
	return b.changed(ctx, m, terminal)
}

// changed writes a record that is not terminal, or that changed since the backup began.
func (b *run) changed(ctx context.Context, m *message, terminal bool) error {
	attempt, err := strconv.Atoi(m.header.Get(store.HeaderAttempt))
	if err != nil {
		return b.add(ctx, m) // malformed, and ignored by all readers
	}
	b.attempts[m.id()] = attempt
	if err := b.add(ctx, m); err != nil || !terminal || b.jobs[m.id()] || b.deliveries[m.id()] {
		return err
	}
	var d *proto.Delivery
	if rec, err := proto.DecodeRecord(m.id(), m.body); err == nil { // else it is malformed
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
	if err := b.add(ctx, m); err != nil || m.seq <= b.start[b.store.Threads] {
		return err
	}
	var t proto.Thread
	var versions []proto.Version
	if err := json.Unmarshal(m.body, &t); err == nil && t.Version != nil { // else it is malformed, or has no version
		versions = append(t.History, *t.Version)
	}
	for _, v := range versions {
		if err := b.maker(ctx, t.Org, v.Trace); err != nil {
			return err
		}
	}
	return nil
}

// maker writes the record of the execution that made a version, unless its terminal record is
// already written. It waits for the execution to end, which is soon: the result is stored as
// pending before the version is committed, and any process can finish from there. A version that a
// live sandbox saved while it ran does not depend on its end.
func (b *run) maker(ctx context.Context, org string, id proto.TraceID) error {
	if id == "" {
		return nil
	}
	subject := store.ExecSubject(org, id)
	poll := time.NewTicker(terminalPoll)
	defer poll.Stop()
	for {
		rec, err := b.store.Records.Last(ctx, subject, store.FromLeader)
		if store.IsNotFound(err) {
			return nil // its retention is over
		}
		if err != nil {
			return err
		}
		if proto.Status(rec.Header.Get(store.HeaderStatus)).Terminal() {
			if rec.Seq <= b.lastRecord {
				return nil
			}
			return b.changed(ctx, &message{
				b.ids[b.store.Records.Stream], subject, rec.Seq, rec.FirstStored(), rec.Header, rec.Data,
			}, true)
		}
		if r, err := proto.DecodeRecord(id, rec.Data); err == nil && r.Pending == nil {
			return nil
		}
		select {
		case <-ctx.Done():
			return context.Cause(ctx)
		case <-poll.C:
		}
	}
}

func (b *run) output(ctx context.Context, m *message) error {
	attempt, err := store.OutputAttempt(m.subject)
	tokens := strings.Split(m.subject, ".") // bullpen.out.<org>.<trace>.<attempt>
	known := err == nil && attempt <= b.attempts[proto.TraceID(tokens[len(tokens)-2])]
	if !known && m.seq > b.start[b.store.Output.Stream] {
		return nil
	}
	return b.add(ctx, m)
}
