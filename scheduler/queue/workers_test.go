package queue_test

import (
	"context"
	"errors"
	"fmt"
	"testing"

	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/scheduler/queue"
	"github.com/bullpen-run/bullpen/scheduler/storetest"
)

// workers returns the live workers.
func (w *world) workers() []proto.Worker {
	w.t.Helper()
	list, err := w.queue.Workers(w.ctx)
	if err != nil {
		w.t.Fatal(err)
	}
	return list
}

// drain makes a worker drain, or take jobs again.
func (w *world) drain(name string, drain bool) {
	w.t.Helper()
	got, err := w.queue.Drain(w.ctx, name, drain)
	if err != nil || got.Draining != drain {
		w.t.Fatalf("got %+v, %v", got, err)
	}
}

func TestWorkersAreListed(t *testing.T) {
	w := newWorld(t)
	if list := w.workers(); len(list) != 0 {
		t.Errorf("no worker runs: %+v", list)
	}
	const more = 250 // than fit into one answer
	st := w.newSlots(w.server, "w", 2).Store
	for i := range more {
		w.run(&queue.Slots{
			Store: st, Worker: fmt.Sprintf("w-%03d", i), Total: 2, Capabilities: []string{queue.CapabilityDisk},
			Log:  storetest.Log(t),
			Info: func() proto.Worker { return proto.Worker{Version: "v1", Threads: i} },
		})
	}
	var list []proto.Worker
	w.eventually("all workers are live", func() bool {
		list = w.workers()
		return len(list) == more
	})
	for i, got := range list {
		if got.Name != fmt.Sprintf("w-%03d", i) || got.Version != "v1" || got.Threads != i || got.Slots != 2 ||
			got.Running != 0 || got.Draining ||
			fmt.Sprint(got.Capabilities) != "[disk]" {
			t.Fatalf("worker %d: %+v", i, got)
		}
	}
}

// A draining worker finishes its jobs and gets no others, under any leader, until draining is
// cancelled.
func TestDrainingWorkerGetsNoJobs(t *testing.T) {
	w := newLeaderlessWorld(t)
	stop := w.dispatcher("first")
	h := w.worker("w", 2)
	before := w.submit(storetest.Job("acme", "k", proto.ModeAsync))
	running := w.take(h)
	w.claim(running)
	taken := make(chan *queue.Lease, 1)
	w.background(func(ctx context.Context) error {
		l, err := h.Take(ctx)
		if err == nil {
			taken <- l
		}
		return nil
	})
	w.eventually("both slots are announced", func() bool {
		st, err := w.queue.Stats(w.ctx)
		return err == nil && st.FreeSlots == 1 && st.Running == 1
	})
	w.drain("w", true)
	waiting := w.submit(storetest.Job("acme", "k", proto.ModeAsync))
	stop()
	w.dispatcher("second")
	w.eventually("the new leader knows that the worker drains", func() bool {
		list, err := w.queue.Workers(w.ctx)
		return err == nil && len(list) == 1 && list[0].Draining && list[0].Running == 1
	})
	if _, err := running.Finish(w.ctx, outcome("done")); err != nil {
		t.Fatal(err)
	}
	if rec := w.wait(before); rec.Status != proto.StatusSuccess {
		t.Errorf("the running job ended as %s", rec.Status)
	}
	if st, err := w.queue.Stats(w.ctx); err != nil || st.FreeSlots != 0 || st.Queued != 1 {
		t.Errorf("got %+v, %v, want one queued job and no free slot", st, err)
	}
	w.drain("w", false)
	if l := <-taken; l.Job().TraceID != waiting {
		t.Errorf("got %s, want %s", l.Job().TraceID, waiting)
	}
	if _, err := w.queue.Drain(w.ctx, "other", true); !errors.Is(err, proto.ErrNotFound) {
		t.Errorf("got %v for an unknown worker", err)
	}
}
