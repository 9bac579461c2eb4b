package queue_test

import (
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/nats-io/nats.go"

	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/scheduler/queue"
	"github.com/bullpen-run/bullpen/scheduler/storetest"
)

// putRecord stores the record of an execution that runs, or has ended with a result.
func (w *world) putRecord(m proto.Meta, r *proto.Result) {
	w.t.Helper()
	now := time.Now().UTC()
	rec := &proto.Record{Meta: m, Status: proto.StatusRunning, Attempt: 1, Worker: "w", StartedAt: &now}
	if r != nil {
		rec.Status, rec.Result, rec.CompletedAt = r.Status(), r, &now
	}
	if _, err := w.store.Records.Put(w.ctx, rec, 0); err != nil {
		w.t.Fatal(err)
	}
}

// A new leader knows the live sandboxes, and reads nothing of what has ended since they started.
func TestLeaderReadsNothingBetweenSandboxes(t *testing.T) {
	for _, ended := range []int{0, 500} {
		t.Run(fmt.Sprint(ended, " ended"), func(t *testing.T) {
			w := newLeaderlessWorld(t)
			const sandboxes = 20
			var stopped *proto.Job
			for i := range sandboxes {
				job := sandboxJob(1)
				if err := storetest.PutJob(w.ctx, w.store, job); err != nil {
					t.Fatal(err)
				}
				if i > 0 {
					w.putRecord(job.Meta, nil)
					continue
				}
				stopped = job // while no dispatcher led
				w.putRecord(job.Meta, new(proto.Exited(0)))
			}
			for range ended {
				w.putRecord(storetest.Job("acme", "k", proto.ModeAsync).Meta, new(proto.Exited(0)))
			}
			d := w.newDispatcher("d")
			d.TrustClocks()
			before := d.Store.Conn.Stats().InMsgs
			w.background(d.Run)
			w.eventually("it leads", d.Leads)
			if read := d.Store.Conn.Stats().InMsgs - before; read > 10*sandboxes {
				t.Errorf("it received %d messages", read)
			}
			w.eventually("it knows those that run", func() bool {
				st, err := w.queue.Stats(w.ctx)
				return err == nil && st.Running == sandboxes-1 && st.Queued == 0
			})
			w.eventually("the job of the one that has stopped is removed", func() bool {
				_, err := w.store.Jobs.Meta(w.ctx, "acme", stopped.TraceID)
				return errors.Is(err, proto.ErrNotFound)
			})
		})
	}
}

// A new leader ends the attempt of a live sandbox whose worker was lost with the leader.
func TestNewLeaderEndsLostSandboxes(t *testing.T) {
	w := newLeaderlessWorld(t)
	w.short = true
	die := w.killableDispatcher("first")
	slots := w.newSlots(w.server, "w", 1, queue.CapabilitySandboxes)
	slots.Live = true
	h := w.run(slots)
	id := w.submit(sandboxJob(1))
	w.claim(w.take(h))
	h.die()
	die()
	d := w.newDispatcher("second")
	d.TrustClocks()
	w.background(d.Run)
	if rec := w.wait(id); *rec.Result.ErrorCode != string(proto.CodeWorkerLost) {
		t.Errorf("%+v", rec)
	}
}

// The job of a live sandbox stays in the stream while that runs. The jobs behind it are removed together
// meanwhile: each single removal would be a synced write.
func TestSandboxKeepsNoFinishedJobs(t *testing.T) {
	w := newWorld(t)
	single := make(chan *nats.Msg, 100)
	sub, err := w.store.Conn.ChanSubscribe("$JS.API.STREAM.MSG.DELETE.>", single)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = sub.Unsubscribe() }()
	h := w.sandboxWorker("w", 1, 1)
	w.submit(sandboxJob(1))
	w.claim(w.take(h))
	for range 5 {
		w.submit(delayedJob("acme", time.Hour))
		if _, err := w.queue.Cancel(w.ctx, "acme", w.submit(storetest.Job("acme", "k", proto.ModeAsync))); err != nil {
			t.Fatal(err)
		}
	}
	w.eventually("the cancelled jobs are removed", func() bool {
		info, err := w.store.Jobs.Info(w.ctx)
		return err == nil && info.State.Msgs == 6
	})
	if len(single) > 0 {
		t.Errorf("%d were removed one by one", len(single))
	}
}
