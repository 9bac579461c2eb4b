package queue_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/nats-io/nats.go"

	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/scheduler/queue"
	"github.com/bullpen-run/bullpen/scheduler/store"
	"github.com/bullpen-run/bullpen/scheduler/storetest"
)

// sandboxWorker starts a worker with slots for live sandboxes and memory for them, in GiB.
func (w *world) sandboxWorker(name string, slots int, memory int64) *host {
	w.t.Helper()
	s := w.newSlots(w.server, name, slots, queue.CapabilitySandboxes)
	s.Live, s.Memory = true, memory<<30
	return w.run(s)
}

// sandboxJob returns the job of a live sandbox with a memory limit in GiB.
func sandboxJob(memory int64) *proto.Job {
	job := storetest.Job("acme", "k", proto.ModeSandbox)
	job.SandboxID, job.SandboxMemory, job.Concurrent = proto.NewSandboxID(), memory<<30, 1
	return job
}

// takes calls Take for all slots of a worker until the test ends.
func (w *world) takes(h *host) <-chan *queue.Lease {
	leases := make(chan *queue.Lease)
	for range h.Total {
		w.background(func(ctx context.Context) error {
			l, err := h.Take(ctx)
			if errors.Is(err, context.Canceled) {
				err = nil
			}
			select {
			case leases <- l:
			case <-ctx.Done():
			}
			return err
		})
	}
	return leases
}

// receive receives from a channel.
func receive[T any](w *world, from <-chan T, what string) (v T) {
	w.t.Helper()
	select {
	case v = <-from:
	case <-w.ctx.Done():
		w.t.Fatalf("never: %s", what)
	}
	return v
}

// A worker takes live sandboxes as long as their memory limits fit. One that does not fit waits, and
// smaller ones do not wait behind it.
func TestSandboxesGoWhereTheirMemoryFits(t *testing.T) {
	w := newWorld(t)
	small, large := w.sandboxWorker("small", 4, 2), w.sandboxWorker("large", 4, 6)
	onSmall, onLarge := w.takes(small), w.takes(large)
	take := func(on <-chan *queue.Lease, memory int64) *queue.Lease {
		t.Helper()
		id := w.submit(sandboxJob(memory))
		l := receive(w, on, "a sandbox is assigned")
		if l.Job().TraceID != id {
			t.Fatalf("%s was assigned, want %s", l.Job().TraceID, id)
		}
		w.claim(l)
		return l
	}
	first := take(onLarge, 5)
	take(onSmall, 2) // the other worker has room for 1 GiB
	waiting := w.submit(sandboxJob(2))
	take(onLarge, 1)
	w.eventually("only one waits", func() bool {
		st, err := w.queue.Stats(w.ctx)
		return err == nil && st.Queued == 1 && st.Running == 3
	})
	w.finish(first)
	if l := receive(w, onLarge, "the one that waits is assigned"); l.Job().TraceID != waiting {
		t.Errorf("%s was assigned, want the one that waited", l.Job().TraceID)
	} else {
		w.claim(l)
	}
}

// What no worker is large enough for is refused at once. What fits into one that is full, or expected
// back, waits.
func TestSandboxesThatNoWorkerHasMemoryFor(t *testing.T) {
	o, _ := newOffering(t, true, time.Minute)
	small, large := o.sandboxWorker("small", 1, 2), o.sandboxWorker("large", 2, 6)
	refused := func(memory int64) *proto.Missing {
		t.Helper()
		job := sandboxJob(memory)
		err := o.queue.Submit(o.ctx, job)
		if rejection, ok := errors.AsType[*proto.Rejection](err); ok && rejection.Reason == proto.RejectedNoWorker {
			return rejection.Missing
		}
		if err != nil {
			t.Fatal(err)
		}
		if _, err := o.queue.Cancel(o.ctx, job.Org, job.TraceID); err != nil {
			t.Fatal(err)
		}
		return nil
	}
	o.eventually("both workers are known", func() bool { return refused(6) == nil && refused(7) != nil })
	for _, n := range []int64{2, 5} {
		o.submit(sandboxJob(n))
	}
	o.claim(o.take(small))
	o.claim(o.take(large))
	if got := refused(6); got != nil {
		t.Errorf("6 GiB fit when others have ended: %+v", got)
	}
	got := refused(7)
	want := "no worker offers live sandboxes with 7GiB of memory; the operator of this server can add one that does " +
		"(bullpen doctor on its machine says what is missing there), or bind the API key to another sandbox"
	if got == nil || got.Expected || got.Message != want || fmt.Sprint(got.Capabilities) != "[sandbox-memory:7GiB]" {
		t.Errorf("7 GiB fit nowhere: %+v", got)
	}
	large.stop()
	if got := refused(6); got != nil {
		t.Errorf("the large worker is expected back: %+v", got)
	}
	if got := refused(7); got == nil {
		t.Error("7 GiB are not refused")
	}
}

// The next leader gives a worker no more than what fits, beside what it runs and what was assigned to it
// and is not claimed.
func TestSandboxMemoryAfterAChangeOfLeaders(t *testing.T) {
	w := newLeaderlessWorld(t)
	die := w.killableDispatcher("first")
	h := w.sandboxWorker("w", 8, 5)
	jobs := w.takes(h)
	w.submit(sandboxJob(2))
	w.submit(sandboxJob(2))
	running := receive(w, jobs, "the first is assigned")
	w.claim(running)
	receive(w, jobs, "the second is assigned") // and not claimed
	die()
	w.dispatcher("second")
	w.submit(sandboxJob(2)) // waits
	one := w.submit(sandboxJob(1))
	if l := receive(w, jobs, "a small one is assigned"); l.Job().TraceID != one {
		t.Fatal("more was assigned than fits")
	}
	w.finish(running)
	w.claim(receive(w, jobs, "the one that waits is assigned"))
}

// A worker returns what it has no memory for: a leader that was replaced may have assigned another one.
// Neither slot is lost.
func TestWorkerReturnsSandboxesThatDoNotFit(t *testing.T) {
	w := newLeaderlessWorld(t)
	type announcement struct {
		Free       []uint64
		FreeMemory int64 `json:"free_memory"`
		Dropped    []proto.TraceID
	}
	announced := make(chan announcement, 100)
	sub, err := w.store.Conn.Subscribe(store.SlotsSubject, func(m *nats.Msg) {
		var a announcement
		if err := json.Unmarshal(m.Data, &a); err != nil {
			t.Error(err)
		}
		announced <- a
	})
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = sub.Unsubscribe() }()
	jobs := []*proto.Job{sandboxJob(2), sandboxJob(2)}
	for _, job := range jobs {
		if err := storetest.PutJob(w.ctx, w.store, job); err != nil {
			t.Fatal(err)
		}
	}
	h := w.sandboxWorker("w", 2, 3)
	taken := w.takes(h)
	var a announcement
	for len(a.Free) < 2 {
		a = receive(w, announced, "both slots are free")
	}
	for i, job := range jobs {
		body, err := json.Marshal(map[string]any{
			"ticket": a.Free[i], "org": job.Org, "trace": job.TraceID, "job": i + 1, "attempt": 1, "memory": job.SandboxMemory,
		})
		if err != nil {
			t.Fatal(err)
		}
		m := nats.NewMsg(store.AssignSubject("w"))
		m.Header.Set("Bullpen-Assignment", string(body))
		if err := w.store.Conn.PublishMsg(m); err != nil {
			t.Fatal(err)
		}
	}
	if l := receive(w, taken, "the first is held"); l.Job().TraceID != jobs[0].TraceID {
		t.Errorf("%s is held", l.Job().TraceID)
	}
	for len(a.Dropped) == 0 {
		a = receive(w, announced, "the second is returned")
	}
	if a.Dropped[0] != jobs[1].TraceID || a.FreeMemory != 1<<30 || len(a.Free) != 1 {
		t.Errorf("announced %+v", a)
	}
}
