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
	// storingShare divides the dispatcher's memory: the quotient is the limit of unanswered
	// submissions.
	storingShare = 4
	// submissionCost is the estimated memory of a submission in bytes, without its body. bodyCopies
	// is the number of copies of the body: as received, as written, and inside an embedded NATS.
	submissionCost = 8 << 10
	bodyCopies     = 3
)

// onSubmission handles a submission in the loop. While too much is being stored, it refuses
// submissions immediately and keeps none: otherwise the backlog of the disk or the loop would grow
// here.
func (t *term) onSubmission(ctx context.Context, m *nats.Msg) {
	size := int64(submissionCost + bodyCopies*len(m.Data))
	if limit := t.Memory / storingShare; limit > 0 && t.storing.Add(size) > limit {
		t.storing.Add(-size)
		head := &nats.Msg{Subject: m.Subject, Reply: m.Reply, Header: m.Header, Sub: m.Sub}
		t.post(ctx, func() { t.refuseForMemory(head) })
		return
	}
	t.post(ctx, func() {
		if !t.submit(ctx, m, func() { t.storing.Add(-size) }) {
			t.storing.Add(-size)
		}
	})
}

// refuseForMemory refuses a submission unless its job is known. If an earlier copy may be stored by
// now, it does not answer, and the gateway asks again.
func (t *term) refuseForMemory(m *nats.Msg) {
	meta, err := readMeta(m.Header)
	if err != nil || !t.stillLeader() || t.queue.jobs[meta.TraceID] != nil {
		return
	}
	if _, ended := t.outcomes[meta.TraceID]; ended {
		return
	}
	t.reply(m, submitReply{Rejection: &proto.Rejection{
		Reason: proto.RejectedUnavailable, Detail: "too many jobs are being stored",
	}})
}

// submit admits a job and stores it outside the loop. Meanwhile the job can be assigned to a slot,
// see the package comment. A repeated submission, whose answer was lost, is answered again. A
// leader in doubt does not answer: another leader may know of more jobs, and receives the same
// submission.
//
// It reports whether the job is being stored, and calls done after that.
func (t *term) submit(ctx context.Context, m *nats.Msg, done func()) bool {
	meta, err := readMeta(m.Header)
	if err != nil {
		t.Log.Error("malformed submission ignored", "error", err)
		return false
	}
	id := meta.TraceID
	if !t.stillLeader() {
		return false
	}
	if _, ended := t.outcomes[id]; ended { // it has run, or its submitter has undone it: the record says which
		t.reply(m, submitReply{Unknown: "the execution has ended"})
		return false
	}
	if t.queue.jobs[id] == nil {
		if meta.RunAt.IsZero() {
			t.observe(meta, time.Now())
		}
		if rejection := t.admit(meta); rejection != nil {
			t.reply(m, submitReply{Rejection: rejection})
			return false
		}
		j := t.queue.add(*meta)
		j.since, j.msg, j.body = time.Now(), m, store.BodyName(m.Header)
	}
	// The header is cloned because the write adds its condition to it.
	msg := &nats.Msg{Subject: store.JobSubject(meta), Header: maps.Clone(m.Header), Data: m.Data}
	go func() {
		bounded, cancel := context.WithTimeout(ctx, submitTimeout)
		defer cancel()
		seq, err := t.Store.Jobs.Put(bounded, msg)
		done()
		t.post(ctx, func() { t.onStored(m, id, seq, err) })
	}()
	return true
}

// admit returns a rejection if no worker can run an interactive job, or if the queue does not admit
// it. Other jobs wait for a worker that can.
func (t *term) admit(m *proto.Meta) *proto.Rejection {
	if m.Class() == proto.ClassInteractive {
		if lacking := t.offers.missing(needsOf(m), m.SandboxMemory, time.Now()); lacking != nil && !lacking.Expected {
			return &proto.Rejection{Reason: proto.RejectedNoWorker, Missing: lacking}
		}
	}
	return t.queue.admit(m)
}

// onStored handles the result of storing a submitted job, and answers.
func (t *term) onStored(m *nats.Msg, id proto.TraceID, seq uint64, err error) {
	j := t.queue.jobs[id]
	if err == nil && j != nil {
		t.setStored(j, seq)
	}
	switch {
	case err == nil || j != nil && j.seq > 0: // by this write, or by an earlier one of the same job
		fault.Here(fault.AfterJobBeforeReply)
		t.reply(m, submitReply{})
		return
	case store.IsRejected(err):
		t.reply(m, submitReply{Rejection: unavailable(err)})
	default:
		t.reply(m, submitReply{Unknown: err.Error()})
	}
	if j == nil {
		return
	}
	// If the job is stored after all, onJob adds it again.
	if j.state == assigned {
		t.send(j.worker, assignment{Trace: id, Ack: ackFailed}, nil)
	}
	t.queue.remove(j)
}

// setStored sets the job's sequence number, and acknowledges an early assignment.
func (t *term) setStored(j *job, seq uint64) {
	if j.seq == 0 && j.state == assigned {
		t.send(j.worker, assignment{Trace: j.meta.TraceID, Ack: ackStored}, nil)
	}
	j.seq, j.msg = seq, nil
}

// send sends an assignment to a worker, with the job if it is not stored yet.
func (t *term) send(worker string, a assignment, job *nats.Msg) {
	body, err := json.Marshal(a)
	if err == nil {
		m := &nats.Msg{Subject: store.AssignSubject(worker), Header: nats.Header{headerAssignment: {string(body)}}}
		if job != nil {
			maps.Copy(m.Header, job.Header)
			m.Data = job.Data
		}
		err = t.Store.Conn.PublishMsg(m)
	}
	if err != nil {
		t.fail(fmt.Errorf("send assignment of %s to worker %s: %w", a.Trace, worker, err))
	}
}

// readMeta returns the metadata in a job's headers. It checks that they make the subject of a job.
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

func unavailable(err error) *proto.Rejection {
	return &proto.Rejection{Reason: proto.RejectedUnavailable, Detail: fmt.Sprintf("the job could not be stored: %v", err)}
}
