package queue_test

import (
	"maps"
	"sync"
	"testing"
	"time"

	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/scheduler/storetest"
)

// Every execution that no worker finishes is reported once, with its error code.
func TestEndedReportsExecutionsThatNoWorkerFinished(t *testing.T) {
	w := newLeaderlessWorld(t)
	w.short = true
	var mu sync.Mutex
	codes := map[proto.TraceID]string{}
	w.ended = func(rec *proto.Record) {
		mu.Lock()
		defer mu.Unlock()
		codes[rec.TraceID] += *rec.Result.ErrorCode
	}
	w.queue.Ended = w.ended
	w.dispatcher("d")
	h := w.worker("w", 2)
	want := map[proto.TraceID]string{}
	w.submit(storetest.Job("acme", "k", proto.ModeAsync)) // finished by the worker
	finished := w.take(h)
	w.claim(finished)
	w.finish(finished)
	want[w.submit(storetest.Job("acme", "k", proto.ModeAsync))] = "worker_lost"
	w.claim(w.take(h))
	h.die()
	cancelled, withdrawn, overdue := unrunnable(), unrunnable(), unrunnable()
	overdue.QueueDeadline = overdue.CreatedAt.Add(10 * time.Millisecond)
	want[w.submit(overdue)] = "expired_in_queue"
	want[w.submit(cancelled)] = "cancelled"
	want[w.submit(withdrawn)] = "expired_in_queue"
	if _, err := w.queue.Cancel(w.ctx, cancelled.Org, cancelled.TraceID); err != nil {
		t.Fatal(err)
	}
	if _, err := w.queue.Withdraw(w.ctx, withdrawn.Org, withdrawn.TraceID,
		proto.Failure(proto.CodeExpiredInQueue, "no worker was free")); err != nil {
		t.Fatal(err)
	}
	for id := range want {
		w.wait(id)
	}
	w.eventually("each is reported once", func() bool {
		mu.Lock()
		defer mu.Unlock()
		return maps.Equal(codes, want)
	})
}
