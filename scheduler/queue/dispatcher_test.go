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

// newLeaderlessWorld returns a world without a dispatcher.
func newLeaderlessWorld(t *testing.T) *world {
	t.Parallel()
	s := storetest.Server(t)
	st := storetest.Open(t, s)
	return &world{t: t, ctx: storetest.Context(t), server: s, store: st, queue: &queue.Queue{Store: st}}
}

// storeJobs stores n jobs of a key without a dispatcher.
func (w *world) storeJobs(n int, org, key string, change ...func(*proto.Job)) {
	w.t.Helper()
	var writers sync.WaitGroup
	const writerCount = 8
	for i := range writerCount {
		writers.Go(func() {
			for range (n + i) / writerCount {
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

// slot is a slot with a claimed job.
type slot struct {
	lease *queue.Lease
	host  *host
}

// claimAll returns the slots of new workers, each with a claimed job.
func (w *world) claimAll(workers, slots int) []*slot {
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

// finishAndTake finishes the job of a slot, and returns the next one.
func (w *world) finishAndTake(s *slot) *proto.Job {
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

// Another key has many queued jobs. A flow that uses less than its share gets the next free slot.
func TestQuietKeyGetsTheNextSlot(t *testing.T) {
	w := newLeaderlessWorld(t)
	backlog := 10000
	if testing.Short() {
		backlog = 1000
	}
	w.storeJobs(backlog, "loud", "k")
	w.dispatcher("d")
	slots := w.claimAll(3, 2)
	for _, quiet := range []struct{ org, key string }{{"quiet", "k"}, {"loud", "quiet"}} {
		for i := range 60 {
			s := slots[i%len(slots)]
			if i%3 != 0 {
				if job := w.finishAndTake(s); job.Org != "loud" || job.Key != "k" {
					t.Fatalf("%d: a job of %s %s was assigned", i, job.Org, job.Key)
				}
				continue
			}
			id := w.submit(storetest.Job(quiet.org, quiet.key, proto.ModeInline))
			if job := w.finishAndTake(s); job.TraceID != id {
				t.Fatalf("%d: the next slot got a job of %s %s", i, job.Org, job.Key)
			}
		}
	}
}

// After a change of leaders, organisations share slots by weight as before, and no job is assigned
// twice.
func TestSharesAfterAChangeOfLeaders(t *testing.T) {
	w := newLeaderlessWorld(t)
	weights := map[string]int{"free": 1, "pro": 4, "enterprise": 16}
	for org, weight := range weights {
		w.storeJobs(200, org, "k", func(j *proto.Job) { j.Weight = weight })
	}
	die := w.killableDispatcher("first")
	slots := w.claimAll(2, 2)
	seen := map[proto.TraceID]bool{}
	for _, s := range slots {
		seen[s.lease.Job().TraceID] = true
	}
	const rounds = 3
	for _, leader := range []string{"first", "second"} {
		served := map[string]int{}
		for i := range rounds * (1 + 4 + 16) {
			job := w.finishAndTake(slots[i%len(slots)])
			if seen[job.TraceID] {
				t.Fatalf("%s was assigned twice", job.TraceID)
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

// killableDispatcher starts a dispatcher that die stops without a resignation.
func (w *world) killableDispatcher(name string) (die func()) {
	d := w.newDispatcher(name)
	stop := w.background(d.Run)
	return func() {
		d.Store.Conn.Close()
		stop()
	}
}

// A new leader assigns jobs in the order in which they were accepted, requeued attempts included.
func TestOrderAfterAChangeOfLeaders(t *testing.T) {
	w := newLeaderlessWorld(t)
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
		claimed, err := w.store.Records.Put(w.ctx, rec, 0)
		if err != nil {
			t.Fatal(err)
		}
		rec.Status, rec.Worker = proto.StatusQueued, ""
		if _, err := w.store.Records.Put(w.ctx, rec, claimed); err != nil {
			t.Fatal(err)
		}
	}
	w.dispatcher("d")
	h := w.worker("w", 1)
	for i, want := range jobs {
		l := w.take(h)
		if l.Job().TraceID != want.TraceID || l.Attempt() != 1+max(0, min(1, 2-i)) {
			t.Fatalf("job %d: attempt %d of %s was assigned", i, l.Attempt(), l.Job().TraceID)
		}
		w.claim(l)
		w.finish(l)
	}
}

// Limits hold over a change of leaders, also for assigned jobs that are not claimed.
func TestLimitsAfterAChangeOfLeaders(t *testing.T) {
	for name, limit := range map[string]func(*proto.Job){
		"organisation": func(j *proto.Job) { j.Concurrent = 3 }, "key": func(j *proto.Job) { j.KeyConcurrent = 3 },
	} {
		if testing.Short() && name == "key" {
			continue
		}
		t.Run(name, func(t *testing.T) {
			w := newLeaderlessWorld(t)
			w.storeJobs(20, "acme", "k", limit)
			die := w.killableDispatcher("first")
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
			w.claim(held[0]) // the others are not claimed yet
			w.dispatcher("second")
			die()
			for i := range 6 {
				w.eventually("the second dispatcher leads and knows all active jobs", func() bool {
					st, err := w.queue.Stats(w.ctx)
					return err == nil && st.Running == 3 && st.FreeSlots >= 5
				})
				// A job of another organisation is assigned, as would be one beyond the limit.
				other := w.submit(storetest.Job("other", "k", proto.ModeInline))
				l := <-taken
				if l.Job().TraceID != other {
					t.Fatalf("a job of %s was assigned beyond its limit", l.Job().Org)
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
