package queue_test

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/scheduler/deadletters"
	"github.com/bullpen-run/bullpen/scheduler/queue"
	"github.com/bullpen-run/bullpen/scheduler/store"
	"github.com/bullpen-run/bullpen/scheduler/storetest"
)

// deadLetters returns all dead letters.
func (w *world) deadLetters() []proto.DeadLetter {
	w.t.Helper()
	list, err := (&deadletters.Store{Store: w.store}).List(w.ctx, nil, 100, func(err error) { w.t.Error(err) })
	if err != nil {
		w.t.Fatal(err)
	}
	return list
}

// awaitLosses waits until the losses of an execution are recorded.
func (w *world) awaitLosses(id proto.TraceID, losses int) {
	w.t.Helper()
	w.eventually(fmt.Sprintf("%d losses are recorded", losses), func() bool {
		rec, _, err := w.store.Records.Get(w.ctx, "acme", id)
		return err == nil && len(rec.Lost) == losses
	})
}

// Losses count over changes of leaders. The dead letter contains the job, and the webhook is
// delivered.
func TestJobThatKillsItsWorkersIsDeadLettered(t *testing.T) {
	w := newLeaderlessWorld(t)
	w.short = true
	st := w.store
	changes := w.followDeliveries()
	job := storetest.Job("acme", "k", proto.ModeAsync)
	job.Code, job.WebhookURL = strings.Repeat("x", 1<<20), hook
	var behind proto.TraceID // another job of the same key
	for n := 1; n <= 3; n++ {
		stop := w.dispatcher(fmt.Sprintf("d%d", n))
		if n == 1 {
			w.submit(job)
			behind = w.submit(storetest.Job("acme", "k", proto.ModeAsync))
		}
		h := w.worker(fmt.Sprintf("w%d", n), 1)
		l := w.take(h)
		if l.Job().TraceID != job.TraceID || l.Attempt() != 1 {
			t.Fatalf("got %s, attempt %d", l.Job().TraceID, l.Attempt())
		}
		h.die()
		w.awaitLosses(job.TraceID, n)
		if rec, err := w.queue.Lookup(w.ctx, job.Org, job.TraceID); n < 3 &&
			(err != nil || rec.Status != proto.StatusQueued || rec.Attempt != 0) {
			t.Errorf("after %d losses: %+v, %v", n, rec, err)
		}
		if n < 3 {
			stop()
		}
	}
	rec := w.wait(job.TraceID)
	if rec.Status != proto.StatusFailed || *rec.Result.ErrorCode != string(proto.CodeWorkerLost) || rec.Attempt != 0 ||
		rec.ResultSeq != 1 ||
		!strings.Contains(*rec.Result.ErrorMessage, "3 workers were lost with this job") {
		t.Errorf("%+v", rec)
	}
	if c := w.nextDelivery(changes); c.TraceID != job.TraceID {
		t.Errorf("%+v", c)
	}
	w.eventually("the job is removed", func() bool {
		_, err := w.store.Jobs.Meta(w.ctx, job.Org, job.TraceID)
		return errors.Is(err, proto.ErrNotFound)
	})
	letters := w.deadLetters()
	if len(letters) != 1 || letters[0].ID != string(job.TraceID) || letters[0].Attempt != 1 ||
		!slices.Equal(letters[0].Workers, []string{"w1", "w2", "w3"}) {
		t.Fatalf("%+v", letters)
	}
	_, content, err := (&deadletters.Store{Store: st}).Get(w.ctx, letters[0].ID)
	if err != nil || content.Job.Code != job.Code {
		t.Errorf("its job is incomplete: %v", err)
	}
	if l := w.take(w.worker("lives", 1)); l.Job().TraceID != behind {
		t.Errorf("then got %s", l.Job().TraceID)
	}
}

// The job stays until its dead letter is stored, so that the next leader can store the dead letter.
func TestMissingDeadLetterIsStoredByTheNextLeader(t *testing.T) {
	w := newLeaderlessWorld(t)
	st := w.store
	var ids []string
	for _, lost := range [][]string{{"a", "b", "c"}, {"a", "b"}, nil} {
		job := storetest.Job("acme", "k", proto.ModeAsync)
		if err := storetest.PutJob(w.ctx, st, job); err != nil {
			t.Fatal(err)
		}
		result, now := proto.Failure(proto.CodeWorkerLost, "lost"), time.Now()
		rec := &proto.Record{Meta: job.Meta, Status: proto.StatusFailed, Result: &result, CompletedAt: &now, Lost: lost}
		if _, err := st.Records.Put(w.ctx, rec, 0); err != nil {
			t.Fatal(err)
		}
		ids = append(ids, string(job.TraceID))
	}
	for _, name := range []string{"first", "second"} { // the second finds nothing to do
		stop := w.dispatcher(name)
		w.eventually("no job is left", func() bool {
			info, err := st.Jobs.Info(w.ctx)
			return err == nil && info.State.Msgs == 0
		})
		if letters := w.deadLetters(); len(letters) != 1 || letters[0].ID != ids[0] {
			t.Errorf("%+v", letters)
		}
		stop()
	}
}

// A frozen worker whose job was reassigned does not start the program when it wakes.
func TestFrozenWorkerCannotClaim(t *testing.T) {
	w := newShortWorld(t)
	server := newFrozenServer(w)
	frozen := w.run(w.newSlots(server, "frozen", 1, queue.CapabilityLanguage(proto.Python)))
	id := w.submit(storetest.Job("acme", "k", proto.ModeAsync))
	stale := w.take(frozen)
	thaw := server.freeze()
	t.Cleanup(thaw)
	w.awaitLosses(id, 1)
	thaw()
	if _, _, err := stale.Claim(w.ctx); !store.IsConflict(err) {
		t.Fatalf("the claim: %v", err)
	}
	stale.Release()
	l := w.take(w.worker("lives", 1))
	w.claim(l)
	if rec, _, err := w.store.Records.Get(w.ctx, "acme", id); err != nil || rec.Worker != "lives" || len(rec.Lost) != 0 {
		t.Fatalf("the record after a claim: %+v, %v", rec, err)
	}
	if _, err := l.Finish(w.ctx, outcome("")); err != nil {
		t.Fatal(err)
	}
}

// If the dispatcher dies with the worker, as in one process, only the journal knows of the loss.
func TestLossIsRecoveredFromTheJournal(t *testing.T) {
	w := newLeaderlessWorld(t)
	w.short = true
	name := filepath.Join(t.TempDir(), "journal")
	if err := os.WriteFile(name, []byte(strings.Repeat("malformed\n", 100)), 0o600); err != nil {
		t.Fatal(err)
	}
	worker := func(n int) *host {
		journal, err := os.OpenFile(name, os.O_RDWR, 0)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = journal.Close() })
		s := w.newSlots(w.server, fmt.Sprintf("w%d", n), 4, queue.CapabilityLanguage(proto.Python))
		s.Journal = journal
		return w.run(s)
	}
	stop := w.dispatcher("d0")
	var claimed, poison proto.TraceID
	for n := range 3 {
		h := worker(n)
		if n == 0 {
			ended := w.submit(storetest.Job("acme", "k", proto.ModeAsync))
			claimed = w.submit(storetest.Job("acme", "k", proto.ModeAsync))
			for range 2 {
				l := w.take(h)
				w.claim(l)
				if l.Job().TraceID == ended {
					if _, err := l.Finish(w.ctx, outcome("")); err != nil {
						t.Fatal(err)
					}
				}
			}
			poison = w.submit(storetest.Job("acme", "k", proto.ModeAsync))
		}
		if l := w.take(h); l.Job().TraceID != poison {
			t.Fatalf("got %s", l.Job().TraceID)
		}
		stop()
		h.die()
		if rec, err := w.queue.Lookup(w.ctx, "acme", poison); err != nil || len(rec.Lost) != n {
			t.Fatalf("%+v, %v", rec, err)
		}
		stop = w.dispatcher(fmt.Sprintf("d%d", n+1))
	}
	worker(3)
	rec := w.wait(poison)
	if *rec.Result.ErrorCode != string(proto.CodeWorkerLost) || !slices.Equal(rec.Lost, []string{"w0", "w1", "w2"}) {
		t.Errorf("%+v", rec)
	}
	w.eventually("it is dead-lettered", func() bool { return len(w.deadLetters()) == 1 })
	if rec := w.wait(claimed); len(rec.Lost) != 0 || rec.Attempt != 1 { // its lease is over
		t.Errorf("a claimed job was counted as lost before the claim: %+v", rec)
	}
}

// A worker is lost while it ends what a client has cancelled. An execution has been cancelled then. The
// home of a live sandbox is not saved, and its owner must know.
func TestLostWhileBeingCancelled(t *testing.T) {
	w := newShortWorld(t)
	for _, sandbox := range []string{"", proto.NewSandboxID()} {
		slots := w.newSlots(w.server, "w"+sandbox, 1, queue.CapabilityLanguage(proto.Python), queue.CapabilitySandboxes)
		slots.Live = sandbox != ""
		h := w.run(slots)
		job := storetest.Job("acme", "k", proto.ModeAsync)
		want := proto.CodeCancelled
		if sandbox != "" {
			job.SandboxID, want = sandbox, proto.CodeWorkerLost
		}
		w.submit(job)
		w.claim(w.take(h))
		if rec, err := w.queue.Cancel(w.ctx, job.Org, job.TraceID); err != nil || !rec.Cancelling {
			t.Fatalf("%+v, %v", rec, err)
		}
		h.die()
		if rec := w.wait(job.TraceID); *rec.Result.ErrorCode != string(want) {
			t.Errorf("sandbox %q: %s, want %s", sandbox, *rec.Result.ErrorCode, want)
		}
	}
}
