package queue

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"strings"
	"time"

	"github.com/nats-io/nats.go"

	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/proto/fault"
	"github.com/bullpen-run/bullpen/scheduler/store"
)

const (
	// storingShare is the part of the dispatcher's memory that submissions may take besides it until they are answered.
	storingShare = 4
	// submissionCost is what one is taken to need, in bytes, beside its bodyCopies bodies: as it came, as it is written, and on its way
	// into a NATS that runs in the same process.
	submissionCost = 8 << 10
	bodyCopies     = 3
)

// arrived takes in a submission. While too much is being stored the next are refused at once, so that none is kept: what disk and loop
// are behind with would otherwise pile up.
func (l *leading) arrived(ctx context.Context, m *nats.Msg) {
	size := int64(submissionCost + bodyCopies*len(m.Data))
	if most := l.Memory / storingShare; most > 0 && l.storing.Add(size) > most {
		l.storing.Add(-size)
		head := &nats.Msg{Subject: m.Subject, Reply: m.Reply, Header: m.Header, Sub: m.Sub}
		l.post(ctx, func() { l.turnAway(head) })
		return
	}
	l.post(ctx, func() {
		if !l.submit(ctx, m, func() { l.storing.Add(-size) }) {
			l.storing.Add(-size)
		}
	})
}

// turnAway refuses a submission that there is no room for now, unless it is one that comes again: an earlier copy may be stored by now. That
// is not answered here, so that whoever submits asks once more.
func (l *leading) turnAway(m *nats.Msg) {
	meta, err := readMeta(m.Header)
	if err != nil || !l.sure() || l.book.jobs[meta.TraceID] != nil {
		return
	}
	if _, ended := l.ended[meta.TraceID]; ended {
		return
	}
	l.reply(m, submitReply{Refusal: &proto.Refusal{Reason: proto.RefusedUnavailable, Detail: "too many jobs are being stored"}})
}

// submit admits a job and stores it beside the loop. A free slot is told of it meanwhile, so that its jail is made while the job is
// being stored; the program does not start before the job is. A submission that comes again, because its answer was lost, is
// answered again. A dispatcher that is not sure that it leads says nothing: another one may know of other jobs, and has the same
// submission.
//
// It reports whether the job is being stored; done is called when that has come to an end.
func (l *leading) submit(ctx context.Context, m *nats.Msg, done func()) bool {
	meta, err := readMeta(m.Header)
	if err != nil {
		l.Log.Error("a malformed submission was passed over", "error", err)
		return false
	}
	id := meta.TraceID
	if !l.sure() {
		return false
	}
	if _, ended := l.ended[id]; ended { // because it has run, or because whoever submitted it gave up: the record says it
		l.reply(m, submitReply{Unknown: "the execution has ended"})
		return false
	}
	if l.book.jobs[id] == nil {
		if refusal := l.book.admit(meta); refusal != nil {
			l.reply(m, submitReply{Refusal: refusal})
			return false
		}
		j := l.book.add(*meta)
		j.since, j.msg, j.body = time.Now(), m, store.BodyObject(m.Header)
	}
	// A copy, since the write adds its condition to the header.
	msg := &nats.Msg{Subject: store.JobSubject(meta), Header: maps.Clone(m.Header), Data: m.Data}
	go func() {
		bounded, cancel := context.WithTimeout(ctx, submitTimeout)
		defer cancel()
		seq, err := l.Store.WriteJob(bounded, msg)
		done()
		l.post(ctx, func() { l.wrote(m, id, seq, err) })
	}()
	return true
}

// wrote takes in how the writing of a submitted job ended, and answers.
func (l *leading) wrote(m *nats.Msg, id proto.TraceID, seq uint64, err error) {
	j := l.book.jobs[id]
	if err == nil && j != nil {
		l.stored(j, seq)
	}
	switch {
	case err == nil || j != nil && j.seq > 0: // by this write, or by one of the same job
		fault.Here(fault.AfterJobBeforeReply)
		l.reply(m, submitReply{})
		return
	case store.IsRejected(err):
		l.reply(m, submitReply{Refusal: unavailable(err)})
	default:
		l.reply(m, submitReply{Unknown: err.Error()})
	}
	if j == nil {
		return
	}
	// Should it have been stored all the same, the stream will tell.
	if j.state == assigned {
		l.tell(j.worker, assignment{Trace: id, Word: wordVoid}, nil)
	}
	l.book.remove(j)
}

// stored takes in where a job lies, and lets the worker begin that it was assigned to meanwhile.
func (l *leading) stored(j *job, seq uint64) {
	if j.seq == 0 && j.state == assigned {
		l.tell(j.worker, assignment{Trace: j.meta.TraceID, Word: wordStored}, nil)
	}
	j.seq, j.msg = seq, nil
}

// tell sends a worker an assignment or a word on one, with the job while that is not stored.
func (l *leading) tell(worker string, a assignment, job *nats.Msg) {
	body, err := json.Marshal(a)
	if err == nil {
		m := &nats.Msg{Subject: store.AssignSubject(worker), Header: nats.Header{headerAssignment: {string(body)}}}
		if job != nil {
			maps.Copy(m.Header, job.Header)
			m.Data = job.Data
		}
		err = l.Store.Conn.PublishMsg(m)
	}
	if err != nil {
		l.fail(fmt.Errorf("tell worker %s of %s: %w", worker, a.Trace, err))
	}
}

// readMeta reads the meta data of a job, which must make the subject of a job.
func readMeta(h nats.Header) (*proto.Meta, error) {
	meta, err := store.DecodeMeta(h)
	if err != nil {
		return nil, err
	}
	if _, err := proto.ParseTraceID(string(meta.TraceID)); err != nil {
		return nil, err
	}
	if strings.Count(store.JobSubject(meta), ".") != jobTokens-1 || meta.Concurrent < 1 {
		return nil, errors.New("its header is not that of a job")
	}
	return meta, nil
}

func unavailable(err error) *proto.Refusal {
	return &proto.Refusal{Reason: proto.RefusedUnavailable, Detail: fmt.Sprintf("the job could not be stored: %v", err)}
}
