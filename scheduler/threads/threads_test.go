package threads_test

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
	"go.uber.org/goleak"

	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/scheduler/store"
	"github.com/bullpen-run/bullpen/scheduler/storetest"
	"github.com/bullpen-run/bullpen/scheduler/threads"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// world is the heads on a server of their own.
type world struct {
	*threads.Threads
	t   *testing.T
	ctx context.Context
}

func newWorld(t *testing.T) *world {
	t.Parallel()
	return &world{Threads: &threads.Threads{Store: storetest.Open(t, storetest.Server(t))}, t: t, ctx: storetest.Context(t)}
}

// record writes the record of an execution that a worker has, or had.
func (w *world) record(id proto.TraceID, status proto.Status, worker string) {
	w.t.Helper()
	rec := &proto.Record{Meta: proto.Meta{TraceID: id, Org: "acme"}, Status: status, Attempt: 1, Worker: worker}
	if status.Terminal() {
		rec.Result = new(proto.Exited(0))
	}
	_, seq, err := w.Store.Record(w.ctx, id)
	if err != nil && !errors.Is(err, proto.ErrNotFound) {
		w.t.Fatal(err)
	}
	if _, err := w.Store.WriteRecord(w.ctx, rec, seq); err != nil {
		w.t.Fatal(err)
	}
}

// lock takes thread t of acme with a new execution.
func (w *world) lock() (proto.TraceID, *proto.Thread) {
	w.t.Helper()
	id := proto.NewTraceID()
	head, _, err := w.Lock(w.ctx, "acme", "t", id)
	if err != nil {
		w.t.Fatal(err)
	}
	return id, head
}

// held takes the thread with an execution that ends after f, which gets it with the head as it is then.
func (w *world) held(f func(id proto.TraceID, head *proto.Thread)) {
	w.t.Helper()
	id, head := w.lock()
	f(id, head)
	w.record(id, proto.StatusSuccess, "w")
}

func (w *world) get() *proto.Thread {
	w.t.Helper()
	head, err := w.Get(w.ctx, "acme", "t")
	if err != nil {
		w.t.Fatal(err)
	}
	return head
}

// is fails the test where err is not the one that is wanted; nil where none is.
func (w *world) is(what string, err, want error) {
	w.t.Helper()
	if !errors.Is(err, want) {
		w.t.Errorf("%s: %v, want %v", what, err, want)
	}
}

// busy fails the test where err does not say that holder has the thread.
func (w *world) busy(what string, err error, holder proto.TraceID) {
	w.t.Helper()
	var busy *proto.BusyError
	if !errors.As(err, &busy) || busy.Thread != "t" || busy.Holder != holder {
		w.t.Errorf("%s: %v, want that %s is busy", what, err, holder)
	}
}

// commit makes the commit of the next version, with one layer and whatever else is to be in it.
func commit(head *proto.Thread, staged ...string) *proto.Commit {
	n := head.Number() + 1
	key := fmt.Sprintf("threads/acme/t/%010d-%s", n, proto.NewTraceID())
	return &proto.Commit{
		Fence: head.Fence, Staged: staged,
		Version: proto.Version{
			Number: n, Bytes: 10 * n, Files: n, Manifest: proto.Blob{Key: key, Size: 1},
			Layers: []proto.Layer{layer(n)},
		},
	}
}

func layer(n int64) proto.Layer {
	return proto.Layer{Blob: proto.Blob{Key: fmt.Sprint("layers/acme/", n), Size: n}, Version: n}
}

func TestOfManyWhoLockAtOnceOneWins(t *testing.T) {
	w := newWorld(t)
	for round := range 5 {
		ids := make([]proto.TraceID, 20)
		errs := make([]error, len(ids))
		var all sync.WaitGroup
		for i := range ids {
			ids[i] = proto.NewTraceID()
			all.Go(func() { _, _, errs[i] = w.Lock(w.ctx, "acme", "t", ids[i]) })
		}
		all.Wait()
		head := w.get()
		for i, err := range errs {
			if ids[i] == head.Holder {
				w.is("the holder", err, nil)
			} else {
				w.busy("another", err, head.Holder)
			}
		}
		if head.Fence != int64(round+1) {
			t.Errorf("round %d: fence %d", round, head.Fence)
		}
		w.record(head.Holder, proto.StatusFailed, "w")
	}
}

func TestThreadIsFreeOnceItsHolderHasEnded(t *testing.T) {
	w := newWorld(t)
	first, head := w.lock()
	if head.Org != "acme" || head.ID != "t" || head.Holder != first || head.Fence != 1 || head.CreatedAt.IsZero() ||
		head.HeldAt.IsZero() || head.UsedAt.IsZero() {
		t.Errorf("made: %+v", head)
	}
	again, worker, err := w.Lock(w.ctx, "acme", "t", first)
	if d := cmp.Diff(head, again); d != "" || worker != "" || err != nil {
		t.Errorf("locked again: %s %q %v", d, worker, err)
	}
	next := proto.NewTraceID()
	try := func(what string) {
		t.Helper()
		_, _, err := w.Lock(w.ctx, "acme", "t", next)
		w.busy(what, err, first)
	}
	try("neither job nor record yet")
	job := storetest.Job("acme", "k", proto.ModeAsync)
	job.TraceID = first
	if err := storetest.PutJob(w.ctx, w.Store, job); err != nil {
		t.Fatal(err)
	}
	try("in the queue")
	w.record(first, proto.StatusRunning, "w1")
	try("running")
	w.record(first, proto.StatusQueued, "")
	try("waiting for another attempt")
	w.record(first, proto.StatusRunning, "w2")
	w.record(first, proto.StatusOOM, "w2")
	head, worker, err = w.Lock(w.ctx, "acme", "t", next)
	if err != nil || worker != "w2" || head.Holder != next || head.Fence != 2 {
		t.Errorf("then: %+v, of %q, %v", head, worker, err)
	}
	if d := cmp.Diff(head, w.get()); d != "" {
		t.Errorf("stored: %s", d)
	}
	if _, _, err := w.Lock(w.ctx, "other", "t", first); err != nil {
		t.Errorf("a thread of that name of another organisation: %v", err)
	}
}

func TestHolderOfWhomNothingIsKnownHoldsForAWhile(t *testing.T) {
	w := newWorld(t)
	for id, tt := range map[string]struct {
		since time.Duration
		job   bool
		free  bool
	}{"fresh": {10 * time.Second, false, false}, "old": {31 * time.Second, false, true}, "queued": {time.Hour, true, false}} {
		job := storetest.Job("acme", "k", proto.ModeAsync)
		if tt.job {
			if err := storetest.PutJob(w.ctx, w.Store, job); err != nil {
				t.Fatal(err)
			}
		}
		head := &proto.Thread{Org: "acme", ID: id, Holder: job.TraceID, HeldAt: time.Now().Add(-tt.since), Fence: 7}
		w.is("create", w.Create(w.ctx, head), nil)
		_, worker, err := w.Lock(w.ctx, "acme", id, proto.NewTraceID())
		var busy *proto.BusyError
		if tt.free != (err == nil) || !tt.free && !errors.As(err, &busy) || worker != "" {
			t.Errorf("%s: %q, %v", id, worker, err)
		}
	}
}

// answers makes all direct questions for records be answered with these messages, by subject, as by a server that lags behind; others are
// not found.
func (w *world) answers(stale map[string]nats.Header) {
	w.t.Helper()
	for _, st := range []jetstream.Stream{w.Store.Executions, w.Store.Jobs} {
		cfg := st.CachedInfo().Config
		prefix := "$JS.API.DIRECT.GET." + cfg.Name + "."
		cfg.AllowDirect = false // from now on nobody else answers
		if _, err := w.Store.JS.UpdateStream(w.ctx, cfg); err != nil {
			w.t.Fatal(err)
		}
		sub, err := w.Store.Conn.Subscribe(prefix+">", func(m *nats.Msg) {
			subject := strings.TrimPrefix(m.Subject, prefix)
			h := nats.Header{"Status": {"404"}, "Description": {"Message Not Found"}}
			if found := stale[subject]; found != nil {
				h = found
				h.Set("Nats-Stream", cfg.Name)
				h.Set("Nats-Subject", subject)
				h.Set("Nats-Sequence", "1")
				h.Set("Nats-Time-Stamp", time.Now().Format(time.RFC3339Nano))
			}
			if err := m.RespondMsg(&nats.Msg{Header: h}); err != nil {
				w.t.Error(err)
			}
		})
		if err != nil {
			w.t.Fatal(err)
		}
		w.t.Cleanup(func() { _ = sub.Unsubscribe() })
	}
}

// A caller that has its answer must find the thread free, and one that is held must not seem free, whoever is asked.
func TestServerThatLagsBehindDecidesNothing(t *testing.T) {
	w := newWorld(t)
	const old = time.Hour
	ended, running, queued := proto.NewTraceID(), proto.NewTraceID(), storetest.Job("acme", "k", proto.ModeAsync)
	w.record(ended, proto.StatusSuccess, "w1")
	w.record(running, proto.StatusRunning, "w1")
	if err := storetest.PutJob(w.ctx, w.Store, queued); err != nil {
		t.Fatal(err)
	}
	w.answers(map[string]nats.Header{
		store.ExecSubject(ended): {store.HeaderStatus: {string(proto.StatusRunning)}, store.HeaderWorker: {"w1"}},
	})
	if m, err := w.Store.Executions.GetLastMsgForSubject(w.ctx, store.ExecSubject(ended)); err != nil || m.Header.Get(store.HeaderStatus) != "running" {
		t.Fatalf("no server lags behind: %+v, %v", m, err)
	}
	for id, tt := range map[string]struct {
		holder proto.TraceID
		free   bool
	}{"ended": {ended, true}, "running": {running, false}, "queued": {queued.TraceID, false}} {
		w.is("create", w.Create(w.ctx, &proto.Thread{Org: "acme", ID: id, Holder: tt.holder, HeldAt: time.Now().Add(-old)}), nil)
		_, worker, err := w.Lock(w.ctx, "acme", id, proto.NewTraceID())
		if tt.free && (err != nil || worker != "w1") || !tt.free && err == nil {
			t.Errorf("%s: %q, %v", id, worker, err)
		}
	}
}

func TestUnlockTakesOnlyWhatIsHeld(t *testing.T) {
	w := newWorld(t)
	w.is("of no thread", w.Unlock(w.ctx, "acme", "t", proto.NewTraceID()), nil)
	refused, _ := w.lock()
	w.is("by another", w.Unlock(w.ctx, "acme", "t", proto.NewTraceID()), nil)
	if head := w.get(); head.Holder != refused || head.Fence != 1 {
		t.Errorf("unlocked by another: %+v", head)
	}
	// What the refused submission made goes with it.
	w.is("by the holder", w.Unlock(w.ctx, "acme", "t", refused), nil)
	_, err := w.Get(w.ctx, "acme", "t")
	w.is("then", err, proto.ErrNotFound)

	w.is("stage", w.Stage(w.ctx, "acme", "t", staged("a", "1"), anything), nil)
	refused, _ = w.lock()
	w.is("by the holder", w.Unlock(w.ctx, "acme", "t", refused), nil)
	if head := w.get(); head.Holder != "" || !head.HeldAt.IsZero() || head.Fence != 2 || len(head.Staged) != 1 {
		t.Errorf("unlocked: %+v", head)
	}
	if _, head := w.lock(); head.Fence != 3 {
		t.Errorf("locked again: %+v", head)
	}
}

func TestFenceStopsACommit(t *testing.T) {
	w := newWorld(t)
	w.is("of no thread", w.Fence(w.ctx, "acme", "t", proto.NewTraceID()), nil)
	id, head := w.lock()
	w.is("of another", w.Fence(w.ctx, "acme", "t", proto.NewTraceID()), nil)
	if d := cmp.Diff(head, w.get()); d != "" {
		t.Errorf("fenced by another: %s", d)
	}
	w.is("of the holder", w.Fence(w.ctx, "acme", "t", id), nil)
	if fenced := w.get(); fenced.Fence != head.Fence+1 || fenced.Holder != id {
		t.Errorf("fenced: %+v", fenced)
	}
	w.is("commit from before", w.Commit(w.ctx, "acme", "t", id, commit(head)), proto.ErrFenced)
	if w.get().Version != nil {
		t.Error("it was made")
	}
	w.is("commit of the next attempt", w.Commit(w.ctx, "acme", "t", id, commit(w.get())), nil)
}

func TestCommitIsMadeOnceByWhoeverHolds(t *testing.T) {
	w := newWorld(t)
	w.is("of no thread", w.Commit(w.ctx, "acme", "t", proto.NewTraceID(), commit(&proto.Thread{})), proto.ErrFenced)
	w.is("refused", w.Stage(w.ctx, "acme", "t", staged("a", "1"), func(_ []proto.StagedFile, next *proto.Thread) error {
		if len(next.Staged) != 1 || next.Staged[0].Key != "1" || next.ID != "t" {
			t.Errorf("asked about %+v", next)
		}
		return proto.ErrExists
	}), proto.ErrExists)
	_, err := w.Get(w.ctx, "acme", "t")
	w.is("then", err, proto.ErrNotFound)
	w.is("stage", w.Stage(w.ctx, "acme", "t", staged("a", "1"), anything), nil)
	var first *proto.Commit
	w.held(func(id proto.TraceID, head *proto.Thread) {
		first = commit(head, "1")
		w.is("stage meanwhile", w.Stage(w.ctx, "acme", "t", staged("a", "2"), anything), nil) // is not in what was saved
		w.is("by another", w.Commit(w.ctx, "acme", "t", proto.NewTraceID(), first), proto.ErrFenced)
		w.is("commit", w.Commit(w.ctx, "acme", "t", id, first), nil)
		after := w.get()
		if after.Number() != 1 || !slices.Equal(after.Staged, []proto.StagedFile{staged("a", "2")}) || after.Holder != id {
			t.Errorf("%+v", after)
		}
		w.is("again", w.Commit(w.ctx, "acme", "t", id, first), nil)
		w.is("by a dispatcher", w.Commit(w.ctx, "acme", "t", id, first), nil)
		other := commit(head)
		w.is("another of the same number", w.Commit(w.ctx, "acme", "t", id, other), proto.ErrFenced)
		if d := cmp.Diff(after, w.get()); d != "" {
			t.Errorf("changed again: %s", d)
		}
	})
	w.held(func(id proto.TraceID, head *proto.Thread) {
		w.is("commit", w.Commit(w.ctx, "acme", "t", id, commit(head)), nil)
		w.is("the one before again", w.Commit(w.ctx, "acme", "t", id, first), nil)
		after := w.get()
		if after.Number() != 2 || !slices.Equal(after.Version.Layers, []proto.Layer{layer(1), layer(2)}) ||
			len(after.History) != 1 || after.History[0].Number != 1 || after.History[0].Layers != nil {
			t.Errorf("%+v", after)
		}
	})
}

// A head that was stored apart would go with what is stored apart.
func TestHeadThatFitsInNoMessageIsNotStored(t *testing.T) {
	w := newWorld(t)
	id, head := w.lock()
	c := commit(head)
	for n := range int64(5000) {
		c.Version.Layers = append(c.Version.Layers, layer(n))
	}
	w.is("commit", w.Commit(w.ctx, "acme", "t", id, c), threads.ErrTooLarge)
	if d := cmp.Diff(head, w.get()); d != "" {
		t.Errorf("changed: %s", d)
	}
}

func TestCompactedLayersAreThoseOfTheNewestVersion(t *testing.T) {
	w := newWorld(t)
	w.is("of no thread", w.Compact(w.ctx, "acme", "t", []proto.Layer{layer(1)}, layer(9)), proto.ErrNotFound)
	next := func() {
		w.held(func(id proto.TraceID, head *proto.Thread) {
			w.is("commit", w.Commit(w.ctx, "acme", "t", id, commit(head)), nil)
		})
	}
	w.held(func(proto.TraceID, *proto.Thread) {})
	w.is("of an empty home", w.Compact(w.ctx, "acme", "t", []proto.Layer{layer(1)}, layer(9)), proto.ErrConflict)
	for range 3 {
		next()
	}
	old := w.get()
	for name, layers := range map[string][]proto.Layer{
		"none": nil, "others": {layer(2)}, "a part from the middle": {layer(2), layer(3)}, "more": {layer(1), layer(2), layer(3), layer(4)},
	} {
		w.is(name, w.Compact(w.ctx, "acme", "t", layers, layer(9)), proto.ErrConflict)
	}
	if d := cmp.Diff(old, w.get()); d != "" {
		t.Errorf("refused, and changed: %s", d)
	}
	// Made of what was there before the last execution, and while the next one runs.
	w.held(func(id proto.TraceID, head *proto.Thread) {
		w.is("compact", w.Compact(w.ctx, "acme", "t", []proto.Layer{layer(1), layer(2)}, layer(12)), nil)
		w.is("again", w.Compact(w.ctx, "acme", "t", []proto.Layer{layer(1), layer(2)}, layer(12)), proto.ErrConflict)
		w.is("commit", w.Commit(w.ctx, "acme", "t", id, commit(head)), nil)
	})
	if now := w.get(); now.Number() != 4 || !slices.Equal(now.Version.Layers, []proto.Layer{layer(12), layer(3), layer(4)}) {
		t.Errorf("%+v", now.Version)
	}
	w.is("all", w.Compact(w.ctx, "acme", "t", []proto.Layer{layer(12), layer(3), layer(4)}, layer(124)), nil)
	if now := w.get(); !slices.Equal(now.Version.Layers, []proto.Layer{layer(124)}) {
		t.Errorf("%+v", now.Version)
	}
}

func anything([]proto.StagedFile, *proto.Thread) error { return nil }

func staged(path, key string) proto.StagedFile {
	return proto.StagedFile{Path: path, At: time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC), Blob: proto.Blob{Key: key, Size: 1}}
}

func TestStagedFilesWaitInOrder(t *testing.T) {
	w := newWorld(t)
	for _, f := range []proto.StagedFile{staged("a", "1"), staged("b", "2"), staged("a", "3")} {
		w.is("stage", w.Stage(w.ctx, "acme", "t", f, anything), nil)
	}
	head := w.get()
	if d := cmp.Diff([]proto.StagedFile{staged("b", "2"), staged("a", "3")}, head.Staged); d != "" || head.Fence != 0 || head.Holder != "" || head.UsedAt.IsZero() {
		t.Errorf("%+v %s", head, d)
	}
	var all sync.WaitGroup
	for i := range 20 {
		all.Go(func() { w.is("stage", w.Stage(w.ctx, "acme", "t", staged(fmt.Sprint("many", i), "k"), anything), nil) })
	}
	all.Wait()
	if n := len(w.get().Staged); n != 22 {
		t.Errorf("%d files wait", n)
	}
}

func TestThreadHasRoomForSoManyStagedFiles(t *testing.T) {
	w := newWorld(t)
	for id, long := range map[string]int{"many": 1, "long": 4000} {
		head := &proto.Thread{Org: "acme", ID: id}
		most := proto.MaxStaged
		if long > 1 {
			most = 60
		}
		name := func(i int) string { return fmt.Sprintf("%0*d", long, i) }
		for i := range most {
			head.Staged = append(head.Staged, staged(name(i), "k"))
		}
		w.is("create", w.Create(w.ctx, head), nil)
		var full *proto.StagedError
		for i := most; full == nil; i++ {
			if err := w.Stage(w.ctx, "acme", id, staged(name(i), "k"), anything); err != nil && !errors.As(err, &full) {
				t.Fatal(err)
			}
		}
		now, err := w.Get(w.ctx, "acme", id)
		if err != nil || full.Thread != id || full.Files != len(now.Staged) || (long == 1) != (full.Files == proto.MaxStaged) {
			t.Errorf("%s: %v with %d files, %v", id, full, len(now.Staged), err)
		}
		w.is("in place of another", w.Stage(w.ctx, "acme", id, staged(name(0), "k2"), anything), nil)
	}
}

func TestRemovedThreadIsNoMore(t *testing.T) {
	w := newWorld(t)
	w.is("none", w.Remove(w.ctx, "acme", "t"), proto.ErrNotFound)
	id, _ := w.lock()
	w.busy("held", w.Remove(w.ctx, "acme", "t"), id)
	w.record(id, proto.StatusSuccess, "w")
	w.is("free", w.Remove(w.ctx, "acme", "t"), nil)
	_, err := w.Get(w.ctx, "acme", "t")
	w.is("then", err, proto.ErrNotFound)
	w.is("again", w.Remove(w.ctx, "acme", "t"), proto.ErrNotFound)
	info, err := w.Store.Threads.Info(w.ctx)
	if err != nil || info.State.Msgs != 0 {
		t.Errorf("%+v, %v", info.State, err)
	}
	w.is("the holder's commit", w.Commit(w.ctx, "acme", "t", id, commit(&proto.Thread{Fence: 1})), proto.ErrFenced)
	if _, head := w.lock(); head.Fence != 1 {
		t.Errorf("%+v", head)
	}
	w.is("its commit to the next of that name", w.Commit(w.ctx, "acme", "t", id, commit(&proto.Thread{Fence: 1})), proto.ErrFenced)
}

func TestThreadThatIsUsedDoesNotExpire(t *testing.T) {
	w := newWorld(t)
	w.held(func(proto.TraceID, *proto.Thread) {})
	used := w.get().UsedAt
	w.is("used later", w.Expire(w.ctx, "acme", "t", used), proto.ErrConflict)
	id, _ := w.lock()
	w.busy("held", w.Expire(w.ctx, "acme", "t", used.Add(time.Hour)), id)
	w.record(id, proto.StatusSuccess, "w")
	w.is("idle", w.Expire(w.ctx, "acme", "t", used.Add(time.Hour)), nil)
	w.is("gone", w.Expire(w.ctx, "acme", "t", used.Add(time.Hour)), proto.ErrNotFound)
}

// What is left when a process dies between the mark and the purge.
func TestMarkOfARemovedThreadIsNoThread(t *testing.T) {
	for name, take := range map[string]func(w *world) error{
		"lock":   func(w *world) error { _, _, err := w.Lock(w.ctx, "acme", "t", proto.NewTraceID()); return err },
		"create": func(w *world) error { return w.Create(w.ctx, &proto.Thread{Org: "acme", ID: "t"}) },
		"stage":  func(w *world) error { return w.Stage(w.ctx, "acme", "t", staged("a", "1"), anything) },
	} {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t)
			w.held(func(proto.TraceID, *proto.Thread) {})
			cfg := w.Store.Threads.CachedInfo().Config
			cfg.DenyPurge = true
			if _, err := w.Store.JS.UpdateStream(w.ctx, cfg); err != nil {
				t.Fatal(err)
			}
			w.is("remove", w.Remove(w.ctx, "acme", "t"), nil)
			info, err := w.Store.Threads.Info(w.ctx)
			if err != nil || info.State.Msgs != 1 {
				t.Fatalf("no mark lies there: %+v, %v", info.State, err)
			}
			_, err = w.Get(w.ctx, "acme", "t")
			w.is("get", err, proto.ErrNotFound)
			w.is("remove again", w.Remove(w.ctx, "acme", "t"), proto.ErrNotFound)
			if list, err := w.List(w.ctx, "acme", "", 9); len(list) > 0 || err != nil {
				t.Errorf("listed: %+v, %v", list, err)
			}
			for head, err := range w.All(w.ctx) {
				t.Errorf("of all: %+v, %v", head, err)
			}
			w.is(name, take(w), nil)
			if head := w.get(); head.Version != nil {
				t.Errorf("%+v", head)
			}
		})
	}
}

// A thread is taken at the moment in which it is removed: both may not come true.
func TestThreadIsRemovedOrTaken(t *testing.T) {
	w := newWorld(t)
	for range 50 {
		w.held(func(id proto.TraceID, head *proto.Thread) {
			w.is("commit", w.Commit(w.ctx, "acme", "t", id, commit(head)), nil)
		})
		var all sync.WaitGroup
		var removed error
		all.Go(func() { removed = w.Remove(w.ctx, "acme", "t") })
		id, head := w.lock()
		all.Wait()
		if now := w.get(); now.Holder != id || (head.Version == nil) != (now.Version == nil) {
			t.Fatalf("locked %+v, is %+v", head, now)
		}
		if removed == nil && head.Version != nil {
			t.Fatal("removed under its holder")
		}
		if removed != nil {
			w.busy("remove", removed, id)
		}
		w.record(id, proto.StatusSuccess, "w")
	}
}

func TestCreateNeedsAFreeName(t *testing.T) {
	w := newWorld(t)
	made := &proto.Thread{Org: "acme", ID: "t", Fence: 3, Version: &proto.Version{Number: 5, Layers: []proto.Layer{layer(5)}}}
	w.is("create", w.Create(w.ctx, made), nil)
	w.is("again", w.Create(w.ctx, &proto.Thread{Org: "acme", ID: "t"}), proto.ErrExists)
	if d := cmp.Diff(made, w.get()); d != "" {
		t.Error(d)
	}
}

func TestThreadsAreListedInPages(t *testing.T) {
	w := newWorld(t)
	if list, err := w.List(w.ctx, "acme", "", 10); len(list) > 0 || err != nil {
		t.Fatalf("of none: %+v, %v", list, err)
	}
	const all = 300
	for i := range all {
		head := &proto.Thread{Org: "acme", ID: fmt.Sprintf("t%03d", (i*7)%all), UsedAt: time.Now().UTC()}
		if i == 0 {
			head.Version, head.Staged = &proto.Version{Number: 4, Bytes: 5, Files: 6}, []proto.StagedFile{staged("a", "1")}
		}
		w.is("create", w.Create(w.ctx, head), nil)
	}
	w.is("create", w.Create(w.ctx, &proto.Thread{Org: "other", ID: "t0005"}), nil)
	w.is("remove", w.Remove(w.ctx, "acme", "t100"), nil)
	var ids []string
	for after := ""; ; after = ids[len(ids)-1] {
		page, err := w.List(w.ctx, "acme", after, 70)
		if err != nil {
			t.Fatal(err)
		}
		for _, s := range page {
			ids = append(ids, s.ID)
			if s.ID == "t000" {
				head, err := w.Get(w.ctx, "acme", s.ID)
				if d := cmp.Diff(head.Summary(), s); d != "" || err != nil || s.Version != 4 || s.Bytes != 5 || s.Files != 6 || s.Staged != 1 {
					t.Errorf("%s, %v", d, err)
				}
			}
		}
		if len(page) < 70 {
			break
		}
	}
	if len(ids) != all-1 || !slices.IsSorted(ids) || slices.Contains(ids, "t100") {
		t.Errorf("%d threads: %v", len(ids), ids)
	}
	seen := map[string]int{}
	for head, err := range w.All(w.ctx) {
		if err != nil {
			t.Fatal(err)
		}
		seen[head.Org+"/"+head.ID]++
		if len(seen) == 1 { // one that changes meanwhile comes, too
			w.is("stage", w.Stage(w.ctx, "acme", "t299", staged("a", "1"), anything), nil)
		}
	}
	if len(seen) != all || seen["other/t0005"] != 1 || seen["acme/t299"] != 1 {
		t.Errorf("%d threads of all", len(seen))
	}
	for head, err := range w.All(w.ctx) { // who has seen enough may go
		if head == nil || err != nil {
			t.Errorf("%+v, %v", head, err)
		}
		break
	}
}

func TestHeadThatCannotBeReadIsToldAndCanBeRemoved(t *testing.T) {
	w := newWorld(t)
	w.is("create", w.Create(w.ctx, &proto.Thread{Org: "acme", ID: "a"}), nil)
	another, err := json.Marshal(&proto.Thread{Org: "other", ID: "t"})
	if err != nil {
		t.Fatal(err)
	}
	for name, body := range map[string]string{"no JSON": "{", "of another": string(another)} {
		m := &nats.Msg{Subject: store.ThreadSubject("acme", "t"), Data: []byte(body), Header: nats.Header{store.HeaderThread: {"{"}}}
		if _, err := w.Store.JS.PublishMsg(w.ctx, m); err != nil {
			t.Fatal(err)
		}
		_, err := w.Get(w.ctx, "acme", "t")
		w.is(name, err, store.ErrMalformed)
		_, _, err = w.Lock(w.ctx, "acme", "t", proto.NewTraceID())
		w.is(name, err, store.ErrMalformed)
		_, err = w.List(w.ctx, "acme", "", 9)
		if err == nil || !strings.Contains(err.Error(), "head of thread t") {
			t.Errorf("%s: listed with %v", name, err)
		}
		var good, bad int
		for _, err := range w.All(w.ctx) {
			if err != nil {
				w.is(name, err, store.ErrMalformed)
				bad++
			} else {
				good++
			}
		}
		if good != 1 || bad != 1 {
			t.Errorf("%s: %d good, %d bad", name, good, bad)
		}
		w.is(name, w.Remove(w.ctx, "acme", "t"), nil)
		_, err = w.Get(w.ctx, "acme", "t")
		w.is("then", err, proto.ErrNotFound)
	}
}

// What would be a pattern, or another subject, names no thread.
func TestNamesThatAreNoneAreNotFound(t *testing.T) {
	w := newWorld(t)
	w.lock()
	for _, id := range []string{"", "*", ">", "t.x", "a b", "t\r\nx"} {
		_, err := w.Get(w.ctx, "acme", id)
		w.is("get", err, proto.ErrNotFound)
		_, err = w.Get(w.ctx, id, "t")
		w.is("get", err, proto.ErrNotFound)
		_, _, err = w.Lock(w.ctx, "acme", id, proto.NewTraceID())
		w.is("lock", err, proto.ErrNotFound)
		w.is("stage", w.Stage(w.ctx, "acme", id, staged("a", "1"), anything), proto.ErrNotFound)
		w.is("remove", w.Remove(w.ctx, "acme", id), proto.ErrNotFound)
		if list, err := w.List(w.ctx, id, "", 9); len(list) > 0 || err != nil {
			t.Errorf("list of %q: %+v, %v", id, list, err)
		}
	}
}

// A read that goes to any server of a cluster could miss what was just written.
func TestHeadsAreReadFromTheLeaderAlone(t *testing.T) {
	w := newWorld(t)
	info, err := w.Store.Threads.Info(w.ctx)
	if err != nil || info.Config.AllowDirect || info.Config.MaxMsgsPerSubject != 1 || info.Config.MaxAge != 0 {
		t.Errorf("%+v, %v", info.Config, err)
	}
}

// A worker gets by without the right to make streams.
func TestGuestHasHeads(t *testing.T) {
	t.Parallel()
	s := storetest.Server(t)
	ctx := storetest.Context(t)
	storetest.Open(t, s)
	st, err := store.Connect(ctx, store.Access{InProcess: s, Name: t.Name()}, store.Config{AttachOnly: true}, storetest.Log(t))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(st.Close)
	heads := &threads.Threads{Store: st}
	if _, _, err := heads.Lock(ctx, "acme", "t", proto.NewTraceID()); err != nil {
		t.Error(err)
	}
}

// unheard is a way to the server on which the answer to the first write of a head does not come before that is made again.
type unheard struct {
	nats.InProcessConnProvider
	mu     sync.Mutex
	writes int
	again  chan struct{} // closed by the second write
}

func (u *unheard) InProcessConn() (net.Conn, error) {
	c, err := u.InProcessConnProvider.InProcessConn()
	return &unheardConn{c, u}, err
}

type unheardConn struct {
	net.Conn
	way *unheard
}

func (c *unheardConn) Write(p []byte) (int, error) {
	c.way.mu.Lock()
	if bytes.Contains(p, []byte("PUB bullpen.thread.")) {
		if c.way.writes++; c.way.writes == 2 {
			close(c.way.again)
		}
	}
	c.way.mu.Unlock()
	return c.Conn.Write(p)
}

func (c *unheardConn) Read(p []byte) (int, error) {
	n, err := c.Conn.Read(p)
	c.way.mu.Lock()
	wait := c.way.writes == 1
	c.way.mu.Unlock()
	if wait {
		<-c.way.again
	}
	return n, err
}

// A write whose answer is lost is made again, and meets itself.
func TestWriteWhoseAnswerWasLostIsRecognised(t *testing.T) {
	t.Parallel()
	way := &unheard{InProcessConnProvider: storetest.Server(t), again: make(chan struct{})}
	heads := &threads.Threads{Store: storetest.Open(t, way)}
	if err := heads.Create(storetest.Context(t), &proto.Thread{Org: "acme", ID: "t"}); err != nil {
		t.Error(err)
	}
	if way.writes < 2 {
		t.Errorf("written %d times", way.writes)
	}
}
