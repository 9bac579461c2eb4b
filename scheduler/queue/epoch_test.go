package queue_test

import (
	"context"
	"errors"
	"sync"
	"testing"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/scheduler/queue"
	"github.com/bullpen-run/bullpen/scheduler/store"
	"github.com/bullpen-run/bullpen/scheduler/storetest"
)

// frozenServer connects to the server. Nothing gets through in either direction while it is frozen, as for a worker
// that is suspended or cut off.
type frozenServer struct {
	*hangingServer
	deaf *deafServer
}

func newFrozenServer(w *world) *frozenServer {
	deaf := &deafServer{InProcessConnProvider: w.server}
	return &frozenServer{&hangingServer{InProcessConnProvider: deaf}, deaf}
}

func (f *frozenServer) freeze() (thaw func()) {
	f.mu.Lock()
	f.deaf.mu.Lock()
	return sync.OnceFunc(func() { f.deaf.mu.Unlock(); f.mu.Unlock() })
}

// renewals waits until the leases of workers were written n more times.
func (w *world) renewals(n uint64) {
	w.t.Helper()
	last := func() uint64 {
		st, err := w.store.Leases.State(w.ctx)
		if err != nil {
			w.t.Fatal(err)
		}
		return st.Last
	}
	from := last()
	w.eventually("leases are renewed", func() bool { return last() >= from+n })
}

// record returns the stored record of an execution and its revision.
func (w *world) record(id proto.TraceID) (*proto.Record, uint64) {
	w.t.Helper()
	rec, revision, err := w.store.Records.Get(w.ctx, "acme", id)
	if err != nil {
		w.t.Fatal(err)
	}
	return rec, revision
}

// twice submits a job with two attempts.
func (w *world) twice() proto.TraceID {
	job := storetest.Job("acme", "k", proto.ModeAsync)
	job.MaxAttempts = 2
	return w.submit(job)
}

// wantLost checks that the program of a context was killed because its lease was lost.
func (w *world) wantLost(running context.Context) {
	w.t.Helper()
	if cause := context.Cause(running); !errors.Is(cause, proto.ErrLost) {
		w.t.Errorf("the context was cancelled with cause %v", cause)
	}
}

// All programs of a worker are under one lease. Their records are not written while they run.
func TestOneLeaseForAllProgramsOfAWorker(t *testing.T) {
	w := newShortWorld(t)
	h := w.worker("w", 4)
	revisions, epoch := map[proto.TraceID]uint64{}, ""
	var leases []*queue.Lease
	for range 4 {
		id := w.submit(storetest.Job("acme", "k", proto.ModeAsync))
		l := w.take(h)
		running := w.claim(l)
		leases = append(leases, l)
		t.Cleanup(func() {
			if running.Err() == nil {
				t.Errorf("%s still runs", id)
			}
		})
		rec, revision := w.record(id)
		if rec.Epoch == "" || epoch != "" && rec.Epoch != epoch {
			t.Fatalf("epoch %q, and %q", rec.Epoch, epoch)
		}
		revisions[id], epoch = revision, rec.Epoch
	}
	w.renewals(6) // longer than the dispatcher waits for one
	for id, before := range revisions {
		if rec, revision := w.record(id); revision != before || rec.Status != proto.StatusRunning {
			t.Errorf("the record was written: %+v", rec)
		}
	}
	for _, l := range leases {
		w.finish(l)
	}
	for id := range revisions {
		if rec := w.wait(id); rec.Status != proto.StatusSuccess || rec.Epoch != "" {
			t.Errorf("%+v", rec)
		}
	}
}

// A worker is suspended or cut off for so long that its lease ends. When the next attempt starts, its program is dead.
// When it is back, it can write nothing to what it had, and takes jobs in another epoch.
func TestWorkerThatIsAwayForTooLong(t *testing.T) {
	w := newShortWorld(t)
	server := newFrozenServer(w)
	h := w.run(w.newSlots(server, "away", 1, queue.CapabilityLanguage(proto.Python)))
	id := w.twice()
	old := w.take(h)
	first := w.claim(old)
	before, _ := w.record(id)
	thaw := server.freeze()
	t.Cleanup(thaw)
	other := w.worker("other", 1)
	l := w.take(other)
	if first.Err() == nil {
		t.Error("the next attempt was assigned while the program ran")
	}
	w.wantLost(first)
	second := w.claim(l)
	thaw()
	if rec, err := old.Finish(w.ctx, outcome("old")); !errors.Is(err, proto.ErrLost) || rec != nil && rec.Attempt != 2 {
		t.Errorf("the first attempt ended as %+v, %v", rec, err)
	}
	next := w.submit(storetest.Job("acme", "k", proto.ModeAsync))
	again := w.take(h)
	w.claim(again)
	if rec, _ := w.record(next); rec.Worker != "away" || rec.Epoch == "" || rec.Epoch == before.Epoch {
		t.Errorf("the epoch was %q, and the record is %+v", before.Epoch, rec)
	}
	w.renewals(4)
	if second.Err() != nil {
		t.Errorf("the second attempt was killed: %v", context.Cause(second))
	}
	w.finish(again)
	w.finish(l)
	if rec := w.wait(id); rec.Attempt != 2 || rec.Status != proto.StatusSuccess {
		t.Errorf("%+v", rec)
	}
}

// A worker is away for less time than its lease lasts. Nothing happens.
func TestWorkerThatIsAwayForAMoment(t *testing.T) {
	w := newShortWorld(t)
	server := newFrozenServer(w)
	h := w.run(w.newSlots(server, "away", 1, queue.CapabilityLanguage(proto.Python)))
	id := w.twice()
	l := w.take(h)
	running := w.claim(l)
	w.renewals(1)
	thaw := server.freeze()
	time.AfterFunc(h.HolderTimeout()/3, thaw)
	w.renewals(5)
	if running.Err() != nil {
		t.Fatalf("the program was killed: %v", context.Cause(running))
	}
	w.finish(l)
	if rec := w.wait(id); rec.Attempt != 1 || rec.Status != proto.StatusSuccess {
		t.Errorf("%+v", rec)
	}
}

// Renewals are stored, but the worker does not learn of that. It kills the program in time, and the dispatcher ends the
// lease when the renewals end.
func TestRenewalsWithoutAnswer(t *testing.T) {
	w := newShortWorld(t)
	server := &deafServer{InProcessConnProvider: w.server}
	h := w.run(w.newSlots(server, "deaf", 1, queue.CapabilityLanguage(proto.Python)))
	id := w.twice()
	first := w.claim(w.take(h))
	server.mu.Lock()
	unlock := sync.OnceFunc(server.mu.Unlock)
	t.Cleanup(unlock)
	l := w.take(w.worker("other", 1))
	if first.Err() == nil {
		t.Error("the next attempt was assigned while the program ran")
	}
	w.wantLost(first)
	w.claim(l)
	unlock()
	w.finish(l)
	if rec := w.wait(id); rec.Attempt != 2 || rec.Status != proto.StatusSuccess {
		t.Errorf("%+v", rec)
	}
}

// A worker is restarted under its name while the earlier process is suspended. What that process ran is not taken for
// that of the new one: it has another epoch.
func TestWorkerThatIsRestartedUnderItsName(t *testing.T) {
	w := newShortWorld(t)
	server := newFrozenServer(w)
	h := w.run(w.newSlots(server, "w", 1, queue.CapabilityLanguage(proto.Python)))
	id := w.twice()
	old := w.take(h)
	first := w.claim(old)
	before, _ := w.record(id)
	thaw := server.freeze()
	t.Cleanup(thaw)
	restarted := w.worker("w", 2)
	next := w.submit(storetest.Job("acme", "k", proto.ModeAsync))
	running := w.claim(w.take(restarted))
	if rec, _ := w.record(next); rec.Worker != "w" || rec.Epoch == before.Epoch {
		t.Errorf("epoch %q before, and %+v", before.Epoch, rec)
	}
	l := w.take(restarted)
	if l.Job().TraceID != id || l.Attempt() != 2 || first.Err() == nil {
		t.Errorf("attempt %d of %s, and the first one: %v", l.Attempt(), l.Job().TraceID, first.Err())
	}
	w.claim(l)
	thaw()
	if _, err := old.Finish(w.ctx, outcome("old")); !errors.Is(err, proto.ErrLost) {
		t.Errorf("the first attempt ended with %v", err)
	}
	w.finish(l)
	if rec := w.wait(id); rec.Attempt != 2 {
		t.Errorf("%+v", rec)
	}
	if running.Err() != nil {
		t.Errorf("the new process lost its program: %v", context.Cause(running))
	}
}

// A worker that is cut off reads a record, which takes longer than its lease lasts. The program is killed in time.
func TestProgramIsKilledWhileItsRecordIsRead(t *testing.T) {
	w := newShortWorld(t)
	server := &hangingServer{InProcessConnProvider: w.server}
	h := w.run(w.newSlots(server, "w", 1, queue.CapabilityLanguage(proto.Python)))
	id := w.twice()
	running := w.claim(w.take(h))
	w.renewals(1)
	server.mu.Lock()
	t.Cleanup(server.mu.Unlock)
	if _, err := w.queue.Cancel(w.ctx, "acme", id); err != nil { // the message is repeated, and the worker reads each time
		t.Fatal(err)
	}
	if rec := w.wait(id); rec.Status != proto.StatusCancelled {
		t.Errorf("%+v", rec)
	}
	if running.Err() == nil {
		t.Error("the execution ended while its program ran")
	}
}

// No dispatcher leads for longer than a lease lasts. The next one ends the lease of the worker that died meanwhile, and
// not that of the one that lives.
func TestLeasesOverAChangeOfLeaders(t *testing.T) {
	w := newLeaderlessWorld(t)
	w.short = true
	stop := w.dispatcher("first")
	live, dead := w.worker("live", 1), w.worker("dead", 1)
	w.twice()
	w.twice()
	kept, lost := w.take(live), w.take(dead)
	running, ended := w.claim(kept), w.claim(lost)
	stop()
	dead.die()
	w.renewals(6) // of the live one
	w.dispatcher("second")
	again := w.take(w.worker("other", 1))
	if again.Job().TraceID != lost.Job().TraceID || again.Attempt() != 2 || ended.Err() == nil {
		t.Errorf("attempt %d of %s, and the first one: %v", again.Attempt(), again.Job().TraceID, ended.Err())
	}
	w.claim(again)
	w.finish(again)
	if running.Err() != nil {
		t.Errorf("the live worker lost its program: %v", context.Cause(running))
	}
	w.finish(kept)
	for _, id := range []proto.TraceID{kept.Job().TraceID, lost.Job().TraceID} {
		w.wait(id)
	}
}

// The leader dies after it has ended a lease, and before it has ended what was under it.
func TestNextLeaderEndsWhatWasUnderAnEndedLease(t *testing.T) {
	w := newLeaderlessWorld(t)
	w.short = true
	stop := w.dispatcher("first")
	h := w.worker("w", 1)
	id := w.submit(storetest.Job("acme", "k", proto.ModeAsync))
	running := w.claim(w.take(h))
	stop()
	rec, _ := w.record(id)
	w.eventually("the lease is ended", func() bool {
		m, err := w.store.Leases.Last(w.ctx, store.LeaseSubject(rec.Epoch))
		if err == nil {
			m.Header.Set(store.HeaderRenewed, m.Time.UTC().Format(time.RFC3339Nano))
			_, err = w.store.Leases.Write(w.ctx, store.LeaseSubject(rec.Epoch), m.Header, nil, m.Seq)
		}
		return err == nil
	})
	<-running.Done() // the worker learns of it with the next renewal
	w.wantLost(running)
	if rec, _ := w.record(id); rec.Status != proto.StatusRunning {
		t.Fatalf("%+v", rec)
	}
	w.dispatcher("second")
	if rec := w.wait(id); *rec.Result.ErrorCode != string(proto.CodeWorkerLost) {
		t.Errorf("%+v", rec)
	}
	next := w.submit(storetest.Job("acme", "k", proto.ModeAsync))
	l := w.take(h)
	w.claim(l)
	w.finish(l)
	w.wait(next)
}

// The acknowledgement of a claim arrives after the dispatcher has ended the lease. Either the worker claims again under
// its next lease before the dispatcher ends the attempt, or its claim fails: the program runs at most once at a time.
func TestClaimThatIsAcknowledgedAfterTheLease(t *testing.T) {
	w := newShortWorld(t)
	server := &deafServer{InProcessConnProvider: w.server}
	h := w.run(w.newSlots(server, "deaf", 1, queue.CapabilityLanguage(proto.Python)))
	id := w.twice()
	l := w.take(h)
	server.mu.Lock()
	unlock := sync.OnceFunc(server.mu.Unlock)
	t.Cleanup(unlock)
	claimed := make(chan error, 1)
	go func() {
		_, _, err := l.Claim(w.ctx)
		claimed <- err
	}()
	w.eventually("the claim is stored", func() bool {
		rec, err := w.queue.Lookup(w.ctx, "acme", id)
		return err == nil && rec.Status == proto.StatusRunning
	})
	first, _ := w.record(id)
	w.eventually("the lease has ended", func() bool {
		m, err := w.store.Leases.Last(w.ctx, store.LeaseSubject(first.Epoch))
		return err == nil && m.Header.Get(store.HeaderRenewed) != ""
	})
	unlock()
	if err := <-claimed; err != nil { // the dispatcher was first
		l.Release()
		if again := w.take(h); again.Attempt() != 2 {
			t.Errorf("attempt %d", again.Attempt())
		}
		return
	}
	w.t.Cleanup(l.Release)
	if rec, _ := w.record(id); rec.Attempt != 1 || rec.Epoch == "" || rec.Epoch == first.Epoch {
		t.Errorf("claimed: %+v", rec)
	}
	w.finish(l)
	if rec := w.wait(id); rec.Attempt != 1 || rec.Status != proto.StatusSuccess {
		t.Errorf("%+v", rec)
	}
}

// A worker that lives can give an attempt up. The next one starts after the time of a lease, and other programs of the
// worker are not affected.
func TestAttemptThatIsGivenUp(t *testing.T) {
	w := newShortWorld(t)
	h := w.worker("w", 2)
	w.twice()
	id := w.twice()
	first, second := w.take(h), w.take(h)
	running := map[proto.TraceID]context.Context{
		first.Job().TraceID: w.claim(first), second.Job().TraceID: w.claim(second),
	}
	released := time.Now()
	if given := map[proto.TraceID]*queue.Lease{
		first.Job().TraceID: first, second.Job().TraceID: second,
	}[id]; given != nil {
		given.Release()
	}
	again := w.take(h)
	if again.Job().TraceID != id || again.Attempt() != 2 {
		t.Fatalf("attempt %d of %s", again.Attempt(), again.Job().TraceID)
	}
	if after := time.Since(released); after < h.HolderTimeout() {
		t.Errorf("the next attempt was assigned after %s", after)
	}
	w.claim(again)
	w.finish(again)
	w.wait(id)
	for other, ctx := range running {
		if other != id && ctx.Err() != nil {
			t.Errorf("another program was killed: %v", context.Cause(ctx))
		}
	}
}

// The message about a cancel is lost. The dispatcher sends it again.
func TestWorkerLearnsOfACancelWithoutTheMessage(t *testing.T) {
	w := newShortWorld(t)
	id := w.submit(storetest.Job("acme", "k", proto.ModeAsync))
	l := w.take(w.worker("w", 1))
	running := w.claim(l)
	rec, revision := w.record(id)
	rec.Cancelling = true
	if _, err := w.store.Records.Put(w.ctx, rec, revision); err != nil {
		t.Fatal(err)
	}
	select {
	case <-l.Cancelled():
	case <-running.Done():
		t.Fatalf("the program was killed: %v", context.Cause(running))
	}
	if _, err := l.Finish(w.ctx, queue.Outcome{Result: proto.Cancelled()}); err != nil {
		t.Fatal(err)
	}
	if rec := w.wait(id); rec.Status != proto.StatusCancelled {
		t.Errorf("%+v", rec)
	}
}

// A program may run longer than records are kept.
func TestRecordOfALongProgramIsKept(t *testing.T) {
	w := newWorld(t)
	cfg := w.store.Records.CachedInfo().Config
	cfg.MaxAge, cfg.Duplicates = 2*time.Second, time.Second
	if _, err := w.store.JS.UpdateStream(w.ctx, cfg); err != nil {
		t.Fatal(err)
	}
	id := w.submit(storetest.Job("acme", "k", proto.ModeAsync))
	l := w.take(w.worker("w", 1))
	running := w.claim(l)
	_, claimed := w.record(id)
	first, err := w.store.Records.GetMsg(w.ctx, claimed)
	if err != nil {
		t.Fatal(err)
	}
	w.eventually("the record is older than its retention", func() bool {
		m, err := w.store.Records.GetLastMsgForSubject(w.ctx, store.ExecSubject("acme", id))
		if errors.Is(err, jetstream.ErrMsgNotFound) {
			t.Fatal("the record is gone")
		}
		return err == nil && m.Time.Sub(first.Time) > cfg.MaxAge
	})
	if running.Err() != nil {
		t.Fatalf("the program was killed: %v", context.Cause(running))
	}
	w.finish(l)
	if rec, _ := w.record(id); rec.Status != proto.StatusSuccess {
		t.Errorf("%+v", rec)
	}
}
