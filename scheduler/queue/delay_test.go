package queue_test

import (
	"errors"
	"testing"
	"time"

	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/scheduler/storetest"
)

// delayedJob returns a job that is queued after some time.
func delayedJob(org string, by time.Duration) *proto.Job {
	job := storetest.Job(org, "k", proto.ModeAsync)
	job.RunAt = time.Now().Add(by).UTC()
	job.QueueDeadline = job.RunAt.Add(time.Minute)
	return job
}

func TestDelayedJobStartsWhenItIsDue(t *testing.T) {
	w := newWorld(t)
	h := w.worker("w", 3)
	later, sooner := delayedJob("acme", 4*time.Second), delayedJob("acme", 3*time.Second)
	w.submit(later)
	w.submit(sooner)
	st, err := w.queue.Stats(w.ctx)
	if err != nil || st.Delayed != 2 || st.Queued != 0 || st.OldestQueue != 0 {
		t.Errorf("%+v, %v", st, err)
	}
	now := storetest.Job("acme", "k", proto.ModeAsync)
	w.submit(now)
	for _, job := range []*proto.Job{now, sooner, later} {
		l := w.take(h)
		if l.Job().TraceID != job.TraceID {
			t.Fatalf("the job for %s was assigned, want that for %s", l.Job().RunAt, job.RunAt)
		}
		w.claim(l)
		rec, err := w.queue.Lookup(w.ctx, job.Org, job.TraceID)
		if err != nil || rec.StartedAt.Before(job.RunAt) {
			t.Errorf("it started at %s, want %s: %v", rec.StartedAt, job.RunAt, err)
		}
	}
}

func TestDelayedJobCountsAndIsCancelled(t *testing.T) {
	w := newWorld(t)
	job := delayedJob("acme", time.Hour)
	w.submit(job)
	if rec, err := w.queue.Lookup(w.ctx, job.Org, job.TraceID); err != nil || rec.Status != proto.StatusQueued ||
		!rec.RunAt.Equal(job.RunAt) {
		t.Errorf("%+v, %v", rec, err)
	}
	other := storetest.Job("acme", "k", proto.ModeAsync)
	other.MaxQueued = 1
	full := new(proto.Rejection)
	if err := w.queue.Submit(w.ctx, other); !errors.As(err, &full) || full.Reason != proto.RejectedQueueFull {
		t.Errorf("above the limit: %v", err)
	}
	if rec, err := w.queue.Cancel(w.ctx, job.Org, job.TraceID); err != nil || rec.Status != proto.StatusCancelled ||
		rec.StartedAt != nil {
		t.Fatalf("%+v, %v", rec, err)
	}
	w.eventually("it counts no more", func() bool { return w.queue.Submit(w.ctx, other) == nil })
}

// A new leader finds delayed jobs: one that is due later, one that became due and one that was
// cancelled while there was no leader. A job with a RunAt that runs is not started again.
func TestDelayedJobsOutliveTheLeader(t *testing.T) {
	w := newLeaderlessWorld(t)
	stop := w.dispatcher("first")
	h := w.worker("w", 5)
	runs := delayedJob("acme", 0)
	w.submit(runs)
	w.claim(w.take(h))
	later, due, cancelled := delayedJob("acme", time.Hour), delayedJob("acme", time.Second),
		delayedJob("acme", time.Second)
	for _, job := range []*proto.Job{later, due, cancelled} {
		w.submit(job)
	}
	stop()
	if _, err := w.queue.Cancel(w.ctx, cancelled.Org, cancelled.TraceID); err != nil {
		t.Fatal(err)
	}
	time.Sleep(time.Until(due.RunAt))
	w.dispatcher("second")
	if l := w.take(h); l.Job().TraceID != due.TraceID {
		t.Fatalf("%+v was assigned", l.Job().Meta)
	}
	w.eventually("the cancelled job is removed", func() bool {
		_, err := w.store.Jobs.Meta(w.ctx, cancelled.Org, cancelled.TraceID)
		return errors.Is(err, proto.ErrNotFound)
	})
	if st, err := w.queue.Stats(w.ctx); err != nil || st.Delayed != 1 || st.Queued != 0 || st.Running != 2 {
		t.Errorf("%+v, %v", st, err)
	}
}

// A delayed job stays in the stream for long. The jobs behind it are removed meanwhile.
func TestDelayedJobKeepsNoFinishedJobs(t *testing.T) {
	w := newWorld(t)
	w.submit(delayedJob("acme", time.Hour))
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
}
