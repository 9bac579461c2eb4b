package queue

import (
	"context"
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/nats-io/nats.go"

	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/scheduler/store"
	"github.com/bullpen-run/bullpen/scheduler/storetest"
	"github.com/bullpen-run/bullpen/scheduler/threads"
)

// A dispatcher that was paused may miss renewals. It ends a lease only at the revision that it knows, and no renewal
// follows that.
func TestLeaseIsEndedUnlessItWasRenewed(t *testing.T) {
	st := storetest.Open(t, storetest.Server(t))
	ctx := storetest.Context(t)
	q, slots := &Queue{Store: st}, &Slots{Store: st, Worker: "w", Log: storetest.Log(t)}
	slots.init()
	e, err := slots.beginEpoch(ctx)
	if err != nil {
		t.Fatal(err)
	}
	defer e.close()
	missed := &workerLease{revision: e.revision}
	if err := slots.renew(ctx, e); err != nil {
		t.Fatal(err)
	}
	stored, err := st.Leases.Last(ctx, store.LeaseSubject(e.id))
	if err != nil {
		t.Fatal(err)
	}
	end := func() {
		t.Helper()
		s, err := q.endLease(ctx, e.id, "w", missed.revision)
		if err != nil {
			t.Fatal(err)
		}
		missed.observe(s)
	}
	if end(); missed.ended || missed.revision != e.revision || missed.seen.IsZero() {
		t.Fatalf("a renewed lease: %+v", missed)
	}
	if err := slots.renew(ctx, e); err != nil {
		t.Fatalf("it was ended: %v", err)
	}
	missed.revision = e.revision
	for range 2 { // another leader finds that it has ended
		missed.ended = false
		if end(); !missed.ended || missed.renewed.Before(stored.Time) {
			t.Fatalf("a lease that was not renewed: %+v", missed)
		}
	}
	if err := slots.renew(ctx, e); !errors.Is(err, proto.ErrLost) {
		t.Fatalf("a renewal after the end: %v", err)
	}
	gone := &workerLease{}
	if s, err := q.endLease(ctx, "unknown", "w", 0); err != nil {
		t.Fatal(err)
	} else if gone.observe(s); !gone.ended {
		t.Error("a lease that is not stored counts")
	}
}

// The program is known to have run until the last renewal of the lease, or the last change of its record.
func TestLostProgramIsKnownToHaveRun(t *testing.T) {
	st := storetest.Open(t, storetest.Server(t))
	ctx := storetest.Context(t)
	started := time.Now().Add(-time.Hour)
	for _, renewed := range []time.Time{{}, started, time.Now().Add(time.Minute)} {
		rec := &proto.Record{
			Meta: storetest.Job("acme", "k", proto.ModeAsync).Meta, Status: proto.StatusRunning, Attempt: 1, Worker: "w",
			Epoch: "e", StartedAt: &started,
		}
		at, err := st.Records.Put(ctx, rec, 0)
		if err != nil {
			t.Fatal(err)
		}
		stored, err := st.Records.Last(ctx, store.ExecSubject(rec.Org, rec.TraceID))
		if err != nil {
			t.Fatal(err)
		}
		q := &Queue{Store: st}
		if _, _, err := q.endAttempt(ctx, rec, at-1, renewed); err != nil { // the record has changed
			t.Fatal(err)
		}
		if now, _, err := st.Records.Get(ctx, rec.Org, rec.TraceID); err != nil || now.Status != proto.StatusRunning {
			t.Fatalf("%+v, %v", now, err)
		}
		if _, _, err := q.endAttempt(ctx, rec, at, renewed); err != nil {
			t.Fatal(err)
		}
		now, _, err := st.Records.Get(ctx, rec.Org, rec.TraceID)
		if err != nil || *now.Result.ErrorCode != string(proto.CodeWorkerLost) || now.Epoch != "" {
			t.Fatalf("%+v, %v", now, err)
		}
		last := stored.Time
		if renewed.After(last) {
			last = renewed
		}
		if known := last.Sub(started); now.Result.DurationMS != known.Milliseconds() ||
			!strings.Contains(*now.Result.ErrorMessage, "known to have run for "+known.Round(time.Millisecond).String()) {
			t.Errorf("%d ms, %s", now.Result.DurationMS, *now.Result.ErrorMessage)
		}
	}
}

// newTestTerm returns the term of a dispatcher whose loop does not run.
func newTestTerm(t *testing.T, st *store.Store) *term {
	return (&Dispatcher{Store: st, Instance: "d", Log: storetest.Log(t)}).newTerm(func() bool { return true }, nil)
}

// A change that the dispatcher missed is applied when it tries to write the record.
func TestMissedChangeIsAppliedByAWrite(t *testing.T) {
	st := storetest.Open(t, storetest.Server(t))
	ctx := storetest.Context(t)
	tm := newTestTerm(t, st)
	j := tm.queue.add(storetest.Job("acme", "k", proto.ModeAsync).Meta)
	j.seq = 1
	rec := &proto.Record{Meta: j.meta, Status: proto.StatusRunning, Attempt: 2, Worker: "w"}
	claimed, err := st.Records.Put(ctx, rec, 0)
	if err != nil {
		t.Fatal(err)
	}
	tm.expire(ctx, j)
	(<-tm.inbox)()
	if j.state != running || j.worker != "w" || j.attempt != 2 || j.revision != claimed || j.writePending {
		t.Fatalf("%+v", j)
	}
	if _, err := st.Records.Put(ctx, terminal(rec, proto.Exited(0), time.Now()), claimed); err != nil {
		t.Fatal(err)
	}
	tm.write(ctx, j, func(ctx context.Context, q *Queue) (*proto.Record, uint64, error) {
		return q.endAttempt(ctx, rec, claimed, time.Time{})
	}, nil)
	(<-tm.inbox)()
	if len(tm.queue.jobs) != 0 {
		t.Fatalf("%+v", j)
	}
}

// The server that dates jobs may have a clock that is behind.
func TestStreamTimeDoesNotExpireALease(t *testing.T) {
	st := storetest.Open(t, storetest.Server(t))
	ctx := storetest.Context(t)
	job := storetest.Job("acme", "k", proto.ModeAsync)
	if err := storetest.PutJob(ctx, st, job); err != nil {
		t.Fatal(err)
	}
	m, err := st.Jobs.Next(ctx, 1, store.AllJobs)
	if err != nil {
		t.Fatal(err)
	}
	m.Time = m.Time.Add(-clockSkew)
	tm := newTestTerm(t, st)
	j := tm.queue.add(job.Meta) // as it is when it was submitted here
	tm.queue.activate(j, running, "w", time.Now())
	tm.onJob(ctx, m)
	if tm.reviewJob(ctx, j, time.Now()); j.seq != m.Seq || j.writePending {
		t.Fatalf("the lease was ended: %+v", j)
	}
}

// Another dispatcher may lead, and know of other jobs that count against the limits.
func TestLeaderInDoubtAcceptsNoSubmission(t *testing.T) {
	st := storetest.Open(t, storetest.Server(t))
	ctx := storetest.Context(t)
	job := storetest.Job("acme", "k", proto.ModeAsync)
	m, err := st.Jobs.Stage(ctx, job, nats.Header{})
	if err != nil {
		t.Fatal(err)
	}
	tm := newTestTerm(t, st)
	for _, sure := range []bool{true, false} {
		tm.stillLeader = func() bool { return sure }
		tm.submit(ctx, m, func() {})
		if accepted := tm.queue.jobs[job.TraceID] != nil; accepted != sure {
			t.Errorf("still leader %v: accepted %v", sure, accepted)
		}
		if sure {
			(<-tm.inbox)()
			tm.queue.remove(tm.queue.jobs[job.TraceID])
		}
	}
}

// An execution that waits for another attempt has run already. If it were reported as expired in
// the queue, the client would send it again.
func TestRequeuedExecutionIsLostRatherThanExpired(t *testing.T) {
	st := storetest.Open(t, storetest.Server(t))
	ctx := storetest.Context(t)
	q := &Queue{Store: st}
	job := storetest.Job("acme", "k", proto.ModeAsync)
	job.MaxAttempts = 3
	running := &proto.Record{Meta: job.Meta, Status: proto.StatusRunning, Attempt: 1, Worker: "w"}
	at, err := st.Records.Put(ctx, running, 0)
	if err == nil {
		_, _, err = q.endAttempt(ctx, running, at, time.Time{})
	}
	if err != nil {
		t.Fatal(err)
	}
	rec, err := q.Withdraw(ctx, job.Org, job.TraceID, proto.Failure(proto.CodeExpiredInQueue, "No worker was free."))
	if err != nil || rec.Status != proto.StatusFailed || rec.Attempt != 1 ||
		*rec.Result.ErrorCode != string(proto.CodeWorkerLost) ||
		*rec.Result.ErrorMessage != "The worker that ran attempt 1 of 3 was lost, and the program with it. No further "+
			"attempt started: No worker was free." {
		t.Errorf("%+v with %+v, %v", rec, rec.Result, err)
	}
}

// endAttempt either completes a pending commit or fences the thread.
func TestEndAttemptWithAThread(t *testing.T) {
	st := storetest.Open(t, storetest.Server(t))
	ctx := storetest.Context(t)
	heads, q := &threads.Threads{Store: st}, &Queue{Store: st}
	pending := proto.Exited(3)
	pending.Stdout, pending.DurationMS = "out", 12
	for name, tt := range map[string]struct {
		change func(rec *proto.Record)
		fenced bool // before
		code   proto.ErrorCode
		status proto.Status
		number int64
		fence  int64
	}{
		"lost":      {func(*proto.Record) {}, false, proto.CodeWorkerLost, proto.StatusFailed, 0, 2},
		"cancelled": {func(r *proto.Record) { r.Cancelling = true }, false, proto.CodeCancelled, proto.StatusCancelled, 0, 2},
		"again":     {func(r *proto.Record) { r.MaxAttempts = 2 }, false, "", proto.StatusQueued, 0, 2},
		"malformed": {
			func(r *proto.Record) { r.Commit = &proto.Commit{} }, false, proto.CodeWorkerLost,
			proto.StatusFailed, 0, 2,
		},
		"pending": {func(r *proto.Record) {
			r.Pending, r.Commit, r.MaxAttempts, r.Cancelling = &pending,
				&proto.Commit{Fence: 1, Version: proto.Version{Number: 1}}, 2, true
		}, false, "", proto.StatusFailed, 1, 1},
		"fenced": {func(r *proto.Record) {
			r.Pending, r.Commit = &pending, &proto.Commit{Fence: 1, Version: proto.Version{Number: 1}}
		}, true, proto.CodeThreadSave, proto.StatusFailed, 0, 2},
	} {
		job := storetest.Job("acme", "k", proto.ModeAsync)
		job.ThreadID = name
		if _, _, err := heads.Lock(ctx, "acme", name, job.TraceID); err != nil {
			t.Fatal(err)
		}
		if tt.fenced {
			if err := heads.Fence(ctx, "acme", job.ThreadID, job.TraceID); err != nil {
				t.Fatal(err)
			}
		}
		rec := &proto.Record{Meta: job.Meta, Status: proto.StatusRunning, Attempt: 1, Worker: "w"}
		seen := *rec
		tt.change(rec)
		at, err := st.Records.Put(ctx, rec, 0)
		if err != nil {
			t.Fatal(err)
		}
		for range 2 { // the second call has no effect
			if _, _, err := q.endAttempt(ctx, &seen, at, time.Time{}); err != nil {
				t.Fatal(err)
			}
		}
		now, _, err := st.Records.Get(ctx, job.Org, job.TraceID)
		if err != nil || now.Status != tt.status || now.Pending != nil || now.Commit != nil {
			t.Errorf("%s: %+v, %v", name, now, err)
			continue
		}
		if r := now.Result; tt.code != "" && *r.ErrorCode != string(tt.code) || rec.Pending != nil &&
			(r.Stdout != "out" || r.DurationMS != 12) {
			t.Errorf("%s: %+v", name, r)
		}
		head, err := heads.Get(ctx, "acme", job.ThreadID)
		if err != nil || head.Number() != tt.number || head.Fence != tt.fence {
			t.Errorf("%s: %+v, %v", name, head, err)
		}
	}
}

// A jump of the time of day expires queued jobs, or delays that. Leases use the monotonic clock.
func TestClockJumps(t *testing.T) {
	for name, c := range map[string]struct {
		jump    time.Duration
		expires bool
	}{"forwards": {time.Hour, true}, "backwards": {-time.Hour, false}} {
		t.Run(name, func(t *testing.T) {
			st := storetest.Open(t, storetest.Server(t))
			ctx := storetest.Context(t)
			tm := newTestTerm(t, st)
			// A job that was dated before the clock jumped.
			waiting := storetest.Job("acme", "k", proto.ModeAsync)
			waiting.CreatedAt, waiting.QueueDeadline = waiting.CreatedAt.Add(-c.jump), waiting.QueueDeadline.Add(-c.jump)
			if err := storetest.PutJob(ctx, st, waiting); err != nil {
				t.Fatal(err)
			}
			queued := tm.queue.add(waiting.Meta)
			holder := tm.queue.add(storetest.Job("acme", "k", proto.ModeAsync).Meta)
			tm.apply(ctx, holder, recordState{status: proto.StatusRunning, attempt: 1, worker: "w", epoch: "e", revision: 1})
			tm.lease("e").observe(leaseState{revision: 1, header: nats.Header{}})
			awaiting := tm.queue.add(storetest.Job("acme", "k", proto.ModeAsync).Meta)
			tm.queue.activate(awaiting, assigned, "w", time.Now())
			tm.workers["w"] = &workerState{
				slots: 3, seen: time.Now(), used: map[uint64]int64{}, held: map[proto.TraceID]bool{awaiting.meta.TraceID: true},
			}
			for range 2 { // the second review meets a pending write
				tm.review(ctx, time.Now())
			}
			if queued.writePending != c.expires || holder.writePending || awaiting.state != assigned || tm.workers["w"] == nil {
				t.Fatalf("queued %+v, running %+v, assigned %+v", queued, holder, awaiting)
			}
			if !c.expires {
				return
			}
			handled := 0
			for ; tm.queue.jobs[waiting.TraceID] != nil; handled++ {
				(<-tm.inbox)()
			}
			rec, _, err := st.Records.Get(ctx, waiting.Org, waiting.TraceID)
			// The result is stored once. The capabilities of the worker are stored, too.
			if err != nil || *rec.Result.ErrorCode != string(proto.CodeExpiredInQueue) || handled+len(tm.inbox) > 2 {
				t.Fatalf("%+v, %v", rec, err)
			}
			for what, at := range map[string]time.Time{
				"claim": holder.since, "lease": tm.lease("e").seen, "assignment": awaiting.since, "worker": tm.workers["w"].seen,
			} {
				if !strings.Contains(at.String(), "m=") {
					t.Errorf("the time of the %s, %s, has no monotonic clock", what, at)
				}
			}
		})
	}
}
