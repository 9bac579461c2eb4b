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
	"github.com/bullpen-run/bullpen/scheduler/stream"
)

// submit admits a job and stores it beside the loop. A free slot is told of it meanwhile, so that its jail is made while the job is
// being stored; the program does not start before the job is. A submission that comes again, because its answer was lost, is
// answered again. A dispatcher that is not sure that it leads says nothing: another one may know of other jobs, and has the same
// submission.
func (l *leading) submit(ctx context.Context, m *nats.Msg) {
	meta, err := readMeta(m.Header)
	if err != nil {
		l.Log.Error("a malformed submission was passed over", "error", err)
		return
	}
	id := meta.TraceID
	if !l.sure() {
		return
	}
	if _, ended := l.ended[id]; ended { // because it has run, or because whoever submitted it gave up: the record says it
		l.reply(m, submitReply{Unknown: "the execution has ended"})
		return
	}
	if l.book.jobs[id] == nil {
		if refusal := l.book.admit(meta); refusal != nil {
			l.reply(m, submitReply{Refusal: refusal})
			return
		}
		j := l.book.add(*meta)
		j.since, j.msg, j.body = time.Now(), m, stream.BodyOf(m.Header)
	}
	// A copy, since the write adds its condition to the header.
	msg := &nats.Msg{Subject: stream.JobSubject(meta), Header: maps.Clone(m.Header), Data: m.Data}
	go func() {
		bounded, cancel := context.WithTimeout(ctx, submitTimeout)
		defer cancel()
		seq, err := l.Set.WriteJob(bounded, msg)
		l.post(ctx, func() { l.wrote(m, id, seq, err) })
	}()
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
	case stream.Refused(err):
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
		m := &nats.Msg{Subject: stream.Assign(worker), Header: nats.Header{headerAssignment: {string(body)}}}
		if job != nil {
			maps.Copy(m.Header, job.Header)
			m.Data = job.Data
		}
		err = l.Set.Conn.PublishMsg(m)
	}
	if err != nil {
		l.fail(fmt.Errorf("tell worker %s of %s: %w", worker, a.Trace, err))
	}
}

// readMeta reads the meta data of a job, which must make the subject of a job.
func readMeta(h nats.Header) (*proto.Meta, error) {
	meta, err := stream.DecodeMeta(h)
	if err != nil {
		return nil, err
	}
	if _, err := proto.ParseTraceID(string(meta.TraceID)); err != nil {
		return nil, err
	}
	if strings.Count(stream.JobSubject(meta), ".") != jobTokens-1 || meta.Concurrent < 1 {
		return nil, errors.New("its header is not that of a job")
	}
	return meta, nil
}

func unavailable(err error) *proto.Refusal {
	return &proto.Refusal{Reason: proto.RefusedUnavailable, Detail: fmt.Sprintf("the job could not be stored: %v", err)}
}
