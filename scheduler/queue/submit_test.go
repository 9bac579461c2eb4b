package queue_test

import (
	"encoding/json"
	"errors"
	"fmt"
	"strings"
	"testing"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/scheduler/queue"
	"github.com/bullpen-run/bullpen/scheduler/store"
	"github.com/bullpen-run/bullpen/scheduler/storetest"
)

func TestJobThatCannotBeStoredDoesNotStart(t *testing.T) {
	w := newWorld(t)
	h := w.worker("w1", 1)
	leases := w.takeAll(h, 1)
	limit := func(messages int64) {
		cfg := w.store.Jobs.CachedInfo().Config
		cfg.MaxMsgs, cfg.Discard = messages, jetstream.DiscardNew
		if _, err := w.store.JS.UpdateStream(w.ctx, cfg); err != nil {
			t.Fatal(err)
		}
	}
	limit(1)
	if err := storetest.PutJob(w.ctx, w.store, unrunnable()); err != nil {
		t.Fatal(err)
	}
	// The job is assigned early, unless the store rejects it before that.
	var l *queue.Lease
	w.eventually("a job that is being stored is assigned", func() bool {
		refused := storetest.Job("acme", "k", proto.ModeInline)
		var rejection *proto.Rejection
		if err := w.queue.Submit(w.ctx, refused); !errors.As(err, &rejection) ||
			rejection.Reason != proto.RejectedUnavailable {
			t.Fatalf("submitted to a full store: %v", err)
		}
		select {
		case l = <-leases:
			return true
		default:
			return false
		}
	})
	if _, _, err := l.Claim(w.ctx); !errors.Is(err, proto.ErrNotFound) {
		t.Fatalf("claim of %s: %v", l.Job().TraceID, err)
	}
	l.Release()
	if rec, err := w.queue.Lookup(w.ctx, "acme", l.Job().TraceID); !errors.Is(err, proto.ErrNotFound) {
		t.Fatalf("the record is %+v, %v", rec, err)
	}
	limit(-1)
	id := w.submit(storetest.Job("acme", "k", proto.ModeInline))
	l = w.take(h)
	w.claim(l)
	if l.Job().TraceID != id {
		t.Fatalf("%s was assigned, want %s", l.Job().TraceID, id)
	}
}

// takeAll calls Take for n slots, and returns when the dispatcher knows that they are free.
func (w *world) takeAll(h *host, n int) <-chan *queue.Lease {
	leases := make(chan *queue.Lease, n)
	for range n {
		go func() {
			l, err := h.Take(w.ctx)
			if err != nil {
				w.t.Error(err)
			}
			leases <- l
		}()
	}
	w.eventually("the slots are free", func() bool {
		st, err := w.queue.Stats(w.ctx)
		return err == nil && st.FreeSlots == n
	})
	return leases
}

// unrunnable returns a job that no worker of these tests can run.
func unrunnable() *proto.Job {
	job := storetest.Job("acme", "k", proto.ModeAsync)
	job.Language = proto.Node
	return job
}

// The acknowledgement may be lost with the dispatcher.
func TestWorkerWithoutAckReadsTheJob(t *testing.T) {
	w := newShortWorld(t)
	h := w.worker("w1", 2)
	stored, never := storetest.Job("acme", "k", proto.ModeInline), storetest.Job("acme", "k", proto.ModeInline)
	stored.Language, never.Language = proto.Node, proto.Node // so that the dispatcher does not assign them
	if err := storetest.PutJob(w.ctx, w.store, stored); err != nil {
		t.Fatal(err)
	}
	leases := w.takeAll(h, 2)
	for ticket, job := range map[uint64]*proto.Job{1: stored, 2: never} {
		m, err := w.store.Jobs.Stage(w.ctx, job, nats.Header{})
		if err != nil {
			t.Fatal(err)
		}
		a, err := json.Marshal(map[string]any{"ticket": ticket, "org": job.Org, "trace": job.TraceID, "attempt": 1})
		if err != nil {
			t.Fatal(err)
		}
		m.Subject = store.AssignSubject("w1")
		m.Header.Set("Bullpen-Assignment", string(a))
		if err := w.store.Conn.PublishMsg(m); err != nil {
			t.Fatal(err)
		}
	}
	for range 2 {
		l := <-leases
		_, _, err := l.Claim(w.ctx)
		if l.Job().TraceID == stored.TraceID && err != nil || l.Job().TraceID == never.TraceID &&
			!errors.Is(err, proto.ErrNotFound) {
			t.Errorf("claim: %v", err)
		}
		l.Release()
	}
}

// A repeated submission may arrive after the execution has ended.
func TestSubmissionOfAnEndedExecutionIsNeitherRefusedNorQueued(t *testing.T) {
	w := newLeaderlessWorld(t)
	stop := w.dispatcher("first")
	h := w.worker("w1", 1)
	job := storetest.Job("acme", "k", proto.ModeInline)
	job.Concurrent = 1
	m, err := w.store.Jobs.Stage(w.ctx, job, nats.Header{})
	if err != nil {
		t.Fatal(err)
	}
	m.Subject = store.SubmitSubject
	submit := func() string {
		w.idle()
		answer, err := w.store.Conn.RequestMsgWithContext(w.ctx, m)
		if err != nil {
			t.Fatal(err)
		}
		return string(answer.Data)
	}
	if answer := submit(); answer != "{}" {
		t.Fatalf("submitted: %s", answer)
	}
	l := w.take(h)
	w.claim(l)
	if _, err := l.Finish(w.ctx, outcome("")); err != nil {
		t.Fatal(err)
	}
	if answer := submit(); !strings.Contains(answer, `"unknown"`) {
		t.Errorf("submitted again: %s", answer)
	}
	w.idle()
	stop()
	w.dispatcher("second")
	if answer := submit(); !strings.Contains(answer, `"unknown"`) {
		t.Errorf("submitted again, to another dispatcher: %s", answer)
	}
	w.idle()
}

// idle waits until a dispatcher leads and has no jobs.
func (w *world) idle() {
	w.t.Helper()
	w.eventually("no jobs", func() bool {
		st, err := w.queue.Stats(w.ctx)
		return err == nil && st.Queued+st.Running == 0
	})
}

// A new leader may assign a job that the worker already holds.
func TestDuplicateAssignmentKeepsTheSlotFree(t *testing.T) {
	w := newShortWorld(t)
	h := w.worker("w1", 2)
	leases := w.takeAll(h, 2)
	job := storetest.Job("acme", "k", proto.ModeInline)
	m, err := w.store.Jobs.Stage(w.ctx, job, nats.Header{})
	if err != nil {
		t.Fatal(err)
	}
	m.Subject = store.AssignSubject("w1")
	m.Header.Set("Bullpen-Assignment", fmt.Sprintf(`{"ticket":1,"org":%q,"trace":%q,"attempt":1}`, job.Org, job.TraceID))
	if err := w.store.Conn.PublishMsg(m); err != nil {
		t.Fatal(err)
	}
	held := <-leases
	w.eventually("one slot is free", func() bool {
		st, err := w.queue.Stats(w.ctx)
		return err == nil && st.FreeSlots == 1
	})
	w.submit(job) // assigned to the other slot
	w.claim(held)
	next := w.submit(storetest.Job("acme", "k", proto.ModeInline))
	select {
	case l := <-leases:
		if w.claim(l); l.Job().TraceID != next {
			t.Fatalf("%s was assigned, want %s", l.Job().TraceID, next)
		}
	case <-w.ctx.Done():
		t.Fatal("the other slot gets no job")
	}
}
