package queue

import (
	"context"
	"encoding/json"
	"fmt"
	"log/slog"
	"testing"
	"time"

	"github.com/nats-io/nats.go"

	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/scheduler/storetest"
)

// BenchmarkAssign measures the dispatcher's work for one execution, without writes: a new job, the
// end of another one, the announcement of the slot that it frees, and the assignment. Jobs of ten
// organisations wait, and all other slots are busy.
func BenchmarkAssign(b *testing.B) {
	for _, workers := range []int{1, 10, 100} {
		b.Run(fmt.Sprint(workers, " workers"), func(b *testing.B) {
			const slots, orgs = 8, 10
			d := &Dispatcher{Store: storetest.Open(b, storetest.Server(b)), Instance: "d", Log: slog.New(slog.DiscardHandler)}
			tm := d.newTerm(func() bool { return true }, nil)
			tm.announced = true
			tm.Reserved = func(slots int) int { return slots / 8 }
			ctx, now := context.Background(), time.Now()
			submitted := 0
			var queued [orgs][]*job // in the order in which they are served
			submit := func() {
				org := submitted % orgs
				m := meta(fmt.Sprint("o", org), "k", proto.ModeAsync)
				m.Language, m.Concurrent, m.QueueDeadline = proto.Languages()[org%2], 1<<20, now.Add(time.Hour)
				tm.observe(&m, now)
				queued[org] = append(queued[org], tm.queue.add(m))
				submitted++
			}
			tickets := uint64(0)
			free := func(worker string, n int) {
				a := announcement{Worker: worker, Slots: slots}
				for range n {
					tickets++
					a.Free = append(a.Free, tickets)
				}
				announce(b, tm, a)
			}
			var running []*job
			assign := func() {
				tm.assign(ctx, now)
				for org := range queued {
					for len(queued[org]) > 0 && queued[org][0].active() {
						running, queued[org] = append(running, queued[org][0]), queued[org][1:]
					}
				}
			}
			for range workers*slots + 1000 {
				submit()
			}
			for i := range workers {
				free(fmt.Sprint("w", i), slots)
			}
			assign()
			for b.Loop() {
				if len(running) != workers*slots {
					b.Fatalf("%d jobs run", len(running))
				}
				submit()
				ended := running[0]
				running = running[1:]
				worker := ended.worker
				tm.queue.remove(ended)
				free(worker, 1)
				assign()
			}
		})
	}
}

// A submission reserves slots for submittedWithin, whatever the order in which the dispatcher
// observes submissions.
func TestReservationEnds(t *testing.T) {
	tm := newTestTerm(t, storetest.Open(t, storetest.Server(t)))
	tm.Reserved = func(slots int) int { return slots / 2 }
	tm.announced = true
	now := time.Now()
	submit := func(org string, at time.Time) {
		m := meta(org, "k", proto.ModeAsync)
		m.Language = proto.Python
		tm.observe(&m, at)
		if org == "loud" {
			m.QueueDeadline = now.Add(time.Hour)
			tm.queue.add(m)
		}
	}
	submit("loud", now)
	submit("loud", now)
	for _, ago := range []time.Duration{4 * time.Minute, time.Minute, 3 * time.Minute, 2 * time.Minute} {
		submit("quiet", now.Add(-ago))
	}
	submit("loud", now.Add(-time.Hour))
	announce(t, tm, announcement{Worker: "w", Slots: 2, Free: []uint64{1, 2}})
	for _, step := range []struct {
		after time.Duration
		run   int
	}{{0, 1}, {submittedWithin - time.Minute - 1, 1}, {submittedWithin - time.Minute, 2}} {
		tm.assign(t.Context(), now.Add(step.after))
		if tm.queue.active != step.run {
			t.Fatalf("after %s, %d jobs run, want %d", step.after, tm.queue.active, step.run)
		}
	}
}

// announce handles an announcement of a worker that runs every language.
func announce(t testing.TB, tm *term, a announcement) {
	t.Helper()
	for _, l := range proto.Languages() {
		a.Capabilities = append(a.Capabilities, CapabilityLanguage(l))
	}
	data, err := json.Marshal(a)
	if err != nil {
		t.Fatal(err)
	}
	tm.onAnnouncement(&nats.Msg{Data: data})
}
