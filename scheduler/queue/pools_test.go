package queue_test

import (
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/scheduler/autoscale"
	"github.com/bullpen-run/bullpen/scheduler/queue"
	"github.com/bullpen-run/bullpen/scheduler/storetest"
)

// pools returns the pools by name.
func (w *world) pools() map[string]proto.Pool {
	w.t.Helper()
	list, err := w.queue.Pools(w.ctx)
	if err != nil {
		w.t.Fatal(err)
	}
	found := map[string]proto.Pool{}
	for _, p := range list {
		found[p.Name] = p
	}
	return found
}

// The demand of a pool is reported once it has had a worker, by every leader, and also while the
// pool has no workers.
func TestDemandOfPools(t *testing.T) {
	w := newLeaderlessWorld(t)
	stop := w.dispatcher("first")
	if got := fmt.Sprint(w.pools()); got != fmt.Sprint(map[string]proto.Pool{"default": {Name: "default"}}) {
		t.Errorf("got %s before the first worker", got)
	}
	python := queue.CapabilityLanguage(proto.Python)
	plain := w.run(w.newSlots(w.server, "p", 2, python))
	wide := w.newSlots(w.server, "n", 4, python, queue.CapabilityNetwork)
	wide.Pool = "net"
	net := w.run(wide)
	w.eventually("both have joined", func() bool {
		found := w.pools()
		return found["default"].Slots == 2 && found["net"].Slots == 4 && found["net"].Workers == 1
	})

	running := w.submit(storetest.Job("acme", "k", proto.ModeAsync))
	l := w.take(plain)
	w.claim(l)
	outside := storetest.Job("acme", "k", proto.ModeAsync)
	outside.Network = proto.NetworkUnrestricted
	w.submit(outside)
	w.submit(storetest.Job("acme", "k", proto.ModeAsync))
	w.eventually("each job counts for the pool with the fewest capabilities", func() bool {
		found := w.pools()
		return found["default"].Running == 1 && found["default"].Queued == 1 && found["net"].Running == 0 &&
			found["net"].Queued == 1
	})
	if _, err := l.Finish(w.ctx, outcome("")); err != nil {
		t.Fatal(err)
	}
	w.wait(running)
	w.drain("n", true)
	plain.stop()
	w.eventually("nothing runs and no slot is left", func() bool {
		found := w.pools()
		return found["default"].Running == 0 && found["default"].Slots == 0 && found["net"].Slots == 0
	})
	net.stop()
	stop()
	w.dispatcher("second")
	w.eventually("the new leader knows the pools", func() bool {
		list, err := w.queue.Pools(w.ctx)
		if err != nil || len(list) != 2 {
			return false
		}
		d, n := list[0], list[1]
		return d.WorkerSlots == 2 && d.Queued == 1 && d.MeanSeconds > 0 && d.OldestWait > 0 && n.WorkerSlots == 4 &&
			n.Queued == 1 && n.MeanSeconds == 0
	})
	if _, err := w.queue.Lookup(w.ctx, "acme", running); errors.Is(err, proto.ErrNotFound) {
		t.Error(err)
	}
}

// The leading dispatcher evaluates the demand, and a new leader goes on from its recommendation.
func TestAutoscaler(t *testing.T) {
	w := newLeaderlessWorld(t)
	evaluations := make(chan []proto.Pool, 1)
	lead := func(name string) (stop func()) {
		d := w.newDispatcher(name)
		d.Autoscaler = &queue.Autoscaler{
			Policy: func(pool string) autoscale.Policy {
				p := autoscale.DefaultPolicy()
				p.SlotsPerWorker = 2
				return p
			},
			Scale: func(pools []proto.Pool) {
				select {
				case evaluations <- pools:
				default:
				}
			},
		}
		return w.background(d.Run)
	}
	stop := lead("first")
	id := w.submit(storetest.Job("acme", "k", proto.ModeAsync))
	pools := <-evaluations
	if p := pools[0]; len(pools) != 1 || p.Name != proto.DefaultPool || p.Queued != 1 || p.Desired == nil ||
		p.Desired.Workers != 1 || p.Desired.Slots != 2 {
		t.Errorf("got %+v, %+v", p, p.Desired)
	}
	if _, err := w.queue.Cancel(w.ctx, "acme", id); err != nil {
		t.Fatal(err)
	}
	stop()
	lead("second")
	w.eventually("the new leader knows the recommendation", func() bool {
		p := w.pools()[proto.DefaultPool]
		return p.Desired != nil && p.Desired.Workers == 1 && p.Desired.Slots == 2
	})
}

// A job of an image waits for a worker of the image's architecture, and counts for a pool that had
// one.
func TestJobWaitsForItsArchitecture(t *testing.T) {
	w := newWorld(t)
	python := queue.CapabilityLanguage(proto.Python)
	start := func(name string, total int) *host {
		s := w.newSlots(w.server, name, total, python, queue.CapabilityImages, queue.CapabilityArchitecture(name))
		s.Pool = name
		return w.run(s)
	}
	arm := start("arm64", 1)
	inImage := func() *proto.Job {
		job := storetest.Job("acme", "k", proto.ModeAsync)
		job.Image, job.Architecture = "py", "amd64"
		return job
	}
	waiting := w.submit(inImage())
	other := w.submit(storetest.Job("acme", "k", proto.ModeAsync))
	l := w.take(arm) // the dispatcher knows the worker
	if l.Job().TraceID != other {
		t.Fatalf("a worker of arm64 got %+v", l.Job())
	}
	w.claim(l)
	if rec, err := w.queue.Lookup(w.ctx, "acme", waiting); err != nil || rec.Status != proto.StatusQueued {
		t.Errorf("%+v, %v", rec, err)
	}
	if p := w.pools()["arm64"]; p.Architecture != "arm64" || p.Queued != 0 || p.Running != 1 {
		t.Errorf("the only pool is of another architecture: %+v", p)
	}
	late := inImage()
	late.QueueDeadline = late.CreatedAt.Add(10 * time.Millisecond)
	if rec := w.wait(w.submit(late)); !strings.Contains(*rec.Result.ErrorMessage,
		"No worker with images and architecture:amd64 was available") {
		t.Errorf("expired with %q", *rec.Result.ErrorMessage)
	}

	full := start("amd64", 0)
	w.eventually("the job counts for the pool of its architecture", func() bool {
		p := w.pools()["amd64"]
		return p.Architecture == "amd64" && p.Queued == 1
	})
	full.stop()
	amd := start("amd64", 1)
	if l := w.take(amd); l.Job().TraceID != waiting {
		t.Errorf("got %s", l.Job().TraceID)
	}
	for _, listed := range w.workers() {
		if listed.Architecture != listed.Pool {
			t.Errorf("got %+v", listed)
		}
	}
}
