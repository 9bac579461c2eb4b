package queue_test

import (
	"context"
	"fmt"
	"sync"
	"testing"

	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/scheduler/queue"
	"github.com/bullpen-run/bullpen/scheduler/storetest"
)

// leaderless is a world without a dispatcher.
func leaderless(t *testing.T) *world {
	t.Parallel()
	s := storetest.Server(t)
	st := storetest.Open(t, s)
	return &world{t: t, ctx: storetest.Context(t), server: s, store: st, queue: &queue.Queue{Store: st}}
}

// stored stores n jobs of a key, as a dispatcher that led before did.
func (w *world) stored(n int, org, key string, change ...func(*proto.Job)) {
	w.t.Helper()
	var writers sync.WaitGroup
	const side = 8
	for i := range side {
		writers.Go(func() {
			for range (n + i) / side {
				job := storetest.Job(org, key, proto.ModeAsync)
				job.Concurrent = n
				for _, c := range change {
					c(job)
				}
				if err := storetest.PutJob(w.ctx, w.store, job); err != nil {
					w.t.Error(err)
				}
			}
		})
	}
	writers.Wait()
}

// slot takes jobs for one slot, and tells of each when it has it. It runs the next when the last is finished.
type slot struct {
	lease *queue.Lease
	host  *host
}

// busy gives slots of workers, each with a job.
func (w *world) busy(workers, slots int) []*slot {
	w.t.Helper()
	var all []*slot
	for i := range workers {
		h := w.worker(fmt.Sprintf("w%d", i), slots)
		for range slots {
			s := &slot{host: h}
			s.lease = w.take(h)
			w.claim(s.lease)
			all = append(all, s)
		}
	}
	return all
}

// after ends the slot's job and gives the one that it gets then.
func (w *world) after(s *slot) *proto.Job {
	w.t.Helper()
	w.finish(s.lease)
	s.lease = w.take(s.host)
	w.claim(s.lease)
	return s.lease.Job()
}

func (w *world) finish(l *queue.Lease) {
	w.t.Helper()
	if _, err := l.Finish(w.ctx, outcome("")); err != nil {
		w.t.Fatal(err)
	}
}

// A key has 10,000 jobs queued. Whoever asks for less than its share gets the next slot that comes free, whichever that is.
func TestNextSlotIsThatOfWhoeverAsksForLittle(t *testing.T) {
	w := leaderless(t)
	w.stored(10000, "loud", "k")
	w.dispatcher("d")
	slots := w.busy(3, 2)
	for _, quiet := range []struct{ org, key string }{{"quiet", "k"}, {"loud", "quiet"}} {
		for i := range 60 {
			s := slots[i%len(slots)]
			if i%3 != 0 {
				if job := w.after(s); job.Org != "loud" || job.Key != "k" {
					t.Fatalf("%d: a job of %s %s was handed out", i, job.Org, job.Key)
				}
				continue
			}
			id := w.submit(storetest.Job(quiet.org, quiet.key, proto.ModeInline))
			if job := w.after(s); job.TraceID != id {
				t.Fatalf("%d: the next slot was given to a job of %s %s", i, job.Org, job.Key)
			}
		}
	}
}

// Organisations of different weights have jobs queued. After a change of dispatchers they share slots as before, and nothing is handed out twice.
func TestSharesOutliveTheirDispatcher(t *testing.T) {
	w := leaderless(t)
	weights := map[string]int{"free": 1, "pro": 4, "enterprise": 16}
	for org, weight := range weights {
		w.stored(200, org, "k", func(j *proto.Job) { j.Weight = weight })
	}
	die := w.mortal("first")
	slots := w.busy(2, 2)
	seen := map[proto.TraceID]bool{}
	for _, s := range slots {
		seen[s.lease.Job().TraceID] = true
	}
	const rounds = 3
	for _, leader := range []string{"first", "second"} {
		served := map[string]int{}
		for i := range rounds * (1 + 4 + 16) {
			job := w.after(slots[i%len(slots)])
			if seen[job.TraceID] {
				t.Fatalf("%s was handed out twice", job.TraceID)
			}
			seen[job.TraceID] = true
			served[job.Org]++
		}
		for org, weight := range weights {
			if n := served[org]; n < (rounds-1)*weight || n > (rounds+1)*weight {
				t.Errorf("%s: %s was served %d times in %d rounds", leader, org, n, rounds)
			}
		}
		if leader == "first" {
			w.dispatcher("second")
			die()
		}
	}
}

// mortal is a dispatcher that can be made to die without a word.
func (w *world) mortal(name string) (die func()) {
	st := storetest.Open(w.t, w.server)
	d := &queue.Dispatcher{Store: st, Instance: name, Log: storetest.Log(w.t)}
	stop := w.background(d.Run)
	return func() {
		st.Conn.Close()
		stop()
	}
}

// What a dispatcher finds when it takes over is in the order in which it was accepted. An attempt that was lost is older than what has not run.
func TestOrderOutlivesItsDispatcher(t *testing.T) {
	w := leaderless(t)
	var jobs []*proto.Job
	for range 6 {
		job := storetest.Job("acme", "k", proto.ModeAsync)
		job.MaxAttempts = 2
		if err := storetest.PutJob(w.ctx, w.store, job); err != nil {
			t.Fatal(err)
		}
		jobs = append(jobs, job)
	}
	for _, lost := range []int{1, 0} {
		rec := &proto.Record{Meta: jobs[lost].Meta, Status: proto.StatusRunning, Attempt: 1, Worker: "lost"}
		claimed, err := w.store.WriteRecord(w.ctx, rec, 0)
		if err != nil {
			t.Fatal(err)
		}
		rec.Status, rec.Worker = proto.StatusQueued, ""
		if _, err := w.store.WriteRecord(w.ctx, rec, claimed); err != nil {
			t.Fatal(err)
		}
	}
	w.dispatcher("d")
	h := w.worker("w", 1)
	for i, want := range jobs {
		l := w.take(h)
		if l.Job().TraceID != want.TraceID || l.Attempt() != 1+max(0, min(1, 2-i)) {
			t.Fatalf("job %d: attempt %d of %s was handed out", i, l.Attempt(), l.Job().TraceID)
		}
		w.claim(l)
		w.finish(l)
	}
}

// Limits hold over a change of dispatchers, also for what had been handed out and was not claimed yet.
func TestLimitsOutliveTheirDispatcher(t *testing.T) {
	for name, limit := range map[string]func(*proto.Job){
		"organisation": func(j *proto.Job) { j.Concurrent = 3 }, "key": func(j *proto.Job) { j.KeyConcurrent = 3 },
	} {
		t.Run(name, func(t *testing.T) {
			w := leaderless(t)
			w.stored(20, "acme", "k", limit)
			die := w.mortal("first")
			first, second := w.worker("w1", 3), w.worker("w2", 5)
			taken := make(chan *queue.Lease, 8)
			ctx, cancel := context.WithCancel(w.ctx)
			var slots sync.WaitGroup
			t.Cleanup(func() { cancel(); slots.Wait() })
			take := func(h *host) {
				slots.Go(func() {
					if l, err := h.Take(ctx); err == nil {
						taken <- l
					}
				})
			}
			var held []*queue.Lease
			for range 3 {
				take(first)
				held = append(held, <-taken)
			}
			for range 5 {
				take(second)
			}
			w.claim(held[0]) // and the others are not, yet
			w.dispatcher("second")
			die()
			for i := range 6 {
				w.eventually("the second dispatcher leads and knows what runs", func() bool {
					st, err := w.queue.Stats(w.ctx)
					return err == nil && st.Running == 3 && st.FreeSlots >= 5
				})
				// Another organisation's job is handed out, and so would one too many have been.
				other := w.submit(storetest.Job("other", "k", proto.ModeInline))
				l := <-taken
				if l.Job().TraceID != other {
					t.Fatalf("a job of %s was handed out beyond its limit", l.Job().Org)
				}
				w.claim(l)
				w.finish(l)
				take(second)
				w.finish(held[0])
				if held = held[1:]; i < 2 {
					w.claim(held[0])
				}
				take(second)
				l = <-taken
				w.claim(l)
				held = append(held, l)
			}
		})
	}
}
