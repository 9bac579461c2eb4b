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

// world is a store of heads on a server of its own.
type world struct {
	*threads.Threads
	t   *testing.T
	ctx context.Context
}

func newWorld(t *testing.T) *world {
	t.Parallel()
	return &world{
		Threads: &threads.Threads{Store: storetest.Open(t, storetest.Server(t))}, t: t,
		ctx: storetest.Context(t),
	}
}

// record writes the record of an execution.
func (w *world) record(id proto.TraceID, status proto.Status, worker string) {
	w.t.Helper()
	rec := &proto.Record{Meta: proto.Meta{TraceID: id, Org: "acme"}, Status: status, Attempt: 1, Worker: worker}
	if status.Terminal() {
		rec.Result = new(proto.Exited(0))
	}
	_, seq, err := w.Store.Records.Get(w.ctx, "acme", id)
	if err != nil && !errors.Is(err, proto.ErrNotFound) {
		w.t.Fatal(err)
	}
	if _, err := w.Store.Records.Put(w.ctx, rec, seq); err != nil {
		w.t.Fatal(err)
	}
}

// lock locks thread t of acme for a new execution.
func (w *world) lock() (proto.TraceID, *proto.Thread) {
	w.t.Helper()
	id := proto.NewTraceID()
	head, _, err := w.Lock(w.ctx, "acme", "t", id)
	if err != nil {
		w.t.Fatal(err)
	}
	return id, head
}

// whileLocked calls f with the thread locked for a new execution, which ends after that.
func (w *world) whileLocked(f func(id proto.TraceID, head *proto.Thread)) {
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

// wantError checks that err is want.
func (w *world) wantError(what string, err, want error) {
	w.t.Helper()
	if !errors.Is(err, want) {
		w.t.Errorf("%s: %v, want %v", what, err, want)
	}
}

// wantBusy checks that err is a BusyError with holder.
func (w *world) wantBusy(what string, err error, holder proto.TraceID) {
	w.t.Helper()
	var busy *proto.BusyError
	if !errors.As(err, &busy) || busy.Thread != "t" || busy.Holder != holder {
		w.t.Errorf("%s: %v, want a BusyError with holder %s", what, err, holder)
	}
}

func (w *world) wantRemoving(what string, err error) {
	w.t.Helper()
	var removing *proto.RemovingError
	if !errors.As(err, &removing) || removing.Thread != "t" {
		w.t.Errorf("%s: %v, want a RemovingError", what, err)
	}
}

// remove removes the head of a thread.
func (w *world) remove(id string) error {
	removal, err := w.Tombstone(w.ctx, "acme", id, func(head *proto.Thread) error {
		if head == nil {
			return proto.ErrNotFound
		}
		return nil
	})
	if err != nil {
		return err
	}
	return w.Purge(w.ctx, "acme", id, removal)
}

// commit returns a commit of the next version with one layer.
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

func TestConcurrentLocks(t *testing.T) {
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
				w.wantError("the holder", err, nil)
			} else {
				w.wantBusy("another", err, head.Holder)
			}
		}
		if head.Fence != int64(round+1) {
			t.Errorf("round %d: fence %d", round, head.Fence)
		}
		w.record(head.Holder, proto.StatusFailed, "w")
	}
}

func TestLockIsHeldUntilTheExecutionEnds(t *testing.T) {
	w := newWorld(t)
	first, head := w.lock()
	if head.Org != "acme" || head.ID != "t" || head.Holder != first || head.Fence != 1 || head.CreatedAt.IsZero() ||
		head.HeldAt.IsZero() || head.UsedAt.IsZero() {
		t.Errorf("created: %+v", head)
	}
	again, worker, err := w.Lock(w.ctx, "acme", "t", first)
	if d := cmp.Diff(head, again); d != "" || worker != "" || err != nil {
		t.Errorf("locked again: %s %q %v", d, worker, err)
	}
	next := proto.NewTraceID()
	wantHeld := func(what string) {
		t.Helper()
		_, _, err := w.Lock(w.ctx, "acme", "t", next)
		w.wantBusy(what, err, first)
	}
	wantHeld("neither job nor record yet")
	job := storetest.Job("acme", "k", proto.ModeAsync)
	job.TraceID = first
	if err := storetest.PutJob(w.ctx, w.Store, job); err != nil {
		t.Fatal(err)
	}
	wantHeld("in the queue")
	w.record(first, proto.StatusRunning, "w1")
	wantHeld("running")
	w.record(first, proto.StatusQueued, "")
	wantHeld("waiting for another attempt")
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

func TestUnknownHolderHoldsForSubmitGrace(t *testing.T) {
	w := newWorld(t)
	for id, tt := range map[string]struct {
		since time.Duration
		job   bool
		free  bool
	}{
		"fresh": {10 * time.Second, false, false}, "old": {31 * time.Second, false, true},
		"queued": {time.Hour, true, false},
	} {
		job := storetest.Job("acme", "k", proto.ModeAsync)
		if tt.job {
			if err := storetest.PutJob(w.ctx, w.Store, job); err != nil {
				t.Fatal(err)
			}
		}
		head := &proto.Thread{Org: "acme", ID: id, Holder: job.TraceID, HeldAt: time.Now().Add(-tt.since), Fence: 7}
		w.wantError("create", w.Create(w.ctx, head), nil)
		_, worker, err := w.Lock(w.ctx, "acme", id, proto.NewTraceID())
		var busy *proto.BusyError
		if tt.free != (err == nil) || !tt.free && !errors.As(err, &busy) || worker != "" {
			t.Errorf("%s: %q, %v", id, worker, err)
		}
	}
}

// serveStale answers all direct reads of records with the given messages, like a follower that lags
// behind. Other messages are not found.
func (w *world) serveStale(stale map[string]nats.Header) {
	w.t.Helper()
	for _, st := range []jetstream.Stream{w.Store.Records, w.Store.Jobs} {
		cfg := st.CachedInfo().Config
		prefix := "$JS.API.DIRECT.GET." + cfg.Name + "."
		cfg.AllowDirect = false // so that no server answers
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

// A stale read must neither keep a free thread locked nor make a locked one free.
func TestStaleReadsDoNotDecideWhoHoldsAThread(t *testing.T) {
	w := newWorld(t)
	const old = time.Hour
	ended, running, queued := proto.NewTraceID(), proto.NewTraceID(), storetest.Job("acme", "k", proto.ModeAsync)
	w.record(ended, proto.StatusSuccess, "w1")
	w.record(running, proto.StatusRunning, "w1")
	if err := storetest.PutJob(w.ctx, w.Store, queued); err != nil {
		t.Fatal(err)
	}
	w.serveStale(map[string]nats.Header{
		store.ExecSubject("acme", ended): {store.HeaderStatus: {string(proto.StatusRunning)}, store.HeaderWorker: {"w1"}},
	})
	if m, err := w.Store.Records.GetLastMsgForSubject(w.ctx, store.ExecSubject("acme", ended)); err != nil ||
		m.Header.Get(store.HeaderStatus) != "running" {
		t.Fatalf("the read is not stale: %+v, %v", m, err)
	}
	for id, tt := range map[string]struct {
		holder proto.TraceID
		free   bool
	}{"ended": {ended, true}, "running": {running, false}, "queued": {queued.TraceID, false}} {
		w.wantError("create", w.Create(
			w.ctx, &proto.Thread{Org: "acme", ID: id, Holder: tt.holder, HeldAt: time.Now().Add(-old)}), nil)
		_, worker, err := w.Lock(w.ctx, "acme", id, proto.NewTraceID())
		if tt.free && (err != nil || worker != "w1") || !tt.free && err == nil {
			t.Errorf("%s: %q, %v", id, worker, err)
		}
	}
}

func TestUnlock(t *testing.T) {
	w := newWorld(t)
	w.wantError("of no thread", w.Unlock(w.ctx, "acme", "t", proto.NewTraceID()), nil)
	refused, _ := w.lock()
	w.wantError("by another", w.Unlock(w.ctx, "acme", "t", proto.NewTraceID()), nil)
	if head := w.get(); head.Holder != refused || head.Fence != 1 {
		t.Errorf("unlocked by another: %+v", head)
	}
	// A thread that the lock created is removed.
	w.wantError("by the holder", w.Unlock(w.ctx, "acme", "t", refused), nil)
	_, err := w.Get(w.ctx, "acme", "t")
	w.wantError("then", err, proto.ErrNotFound)

	w.wantError("stage", w.Stage(w.ctx, "acme", "t", staged("a", "1"), acceptAny), nil)
	refused, _ = w.lock()
	w.wantError("by the holder", w.Unlock(w.ctx, "acme", "t", refused), nil)
	if head := w.get(); head.Holder != "" || !head.HeldAt.IsZero() || head.Fence != 2 || len(head.Staged) != 1 {
		t.Errorf("unlocked: %+v", head)
	}
	if _, head := w.lock(); head.Fence != 3 {
		t.Errorf("locked again: %+v", head)
	}
}

func TestFence(t *testing.T) {
	w := newWorld(t)
	w.wantError("of no thread", w.Fence(w.ctx, "acme", "t", proto.NewTraceID()), nil)
	id, head := w.lock()
	w.wantError("of another", w.Fence(w.ctx, "acme", "t", proto.NewTraceID()), nil)
	if d := cmp.Diff(head, w.get()); d != "" {
		t.Errorf("fenced by another: %s", d)
	}
	w.wantError("of the holder", w.Fence(w.ctx, "acme", "t", id), nil)
	if fenced := w.get(); fenced.Fence != head.Fence+1 || fenced.Holder != id {
		t.Errorf("fenced: %+v", fenced)
	}
	w.wantError("commit with the old fence", w.Commit(w.ctx, "acme", "t", id, commit(head)), proto.ErrFenced)
	if w.get().Version != nil {
		t.Error("it was committed")
	}
	w.wantError("commit of the next attempt", w.Commit(w.ctx, "acme", "t", id, commit(w.get())), nil)
}

func TestCommit(t *testing.T) {
	w := newWorld(t)
	w.wantError("of no thread", w.Commit(w.ctx, "acme", "t", proto.NewTraceID(), commit(&proto.Thread{})), proto.ErrFenced)
	w.wantError("refused", w.Stage(w.ctx, "acme", "t", staged("a", "1"),
		func(_ []proto.StagedFile, next *proto.Thread) error {
			if len(next.Staged) != 1 || next.Staged[0].Key != "1" || next.ID != "t" {
				t.Errorf("check was called with %+v", next)
			}
			return proto.ErrExists
		}), proto.ErrExists)
	_, err := w.Get(w.ctx, "acme", "t")
	w.wantError("then", err, proto.ErrNotFound)
	w.wantError("stage", w.Stage(w.ctx, "acme", "t", staged("a", "1"), acceptAny), nil)
	var first *proto.Commit
	w.whileLocked(func(id proto.TraceID, head *proto.Thread) {
		first = commit(head, "1")
		// is not part of the commit
		w.wantError("stage meanwhile", w.Stage(w.ctx, "acme", "t", staged("a", "2"), acceptAny), nil)
		w.wantError("by another", w.Commit(w.ctx, "acme", "t", proto.NewTraceID(), first), proto.ErrFenced)
		w.wantError("commit", w.Commit(w.ctx, "acme", "t", id, first), nil)
		after := w.get()
		if after.Number() != 1 || !slices.Equal(after.Staged, []proto.StagedFile{staged("a", "2")}) || after.Holder != id {
			t.Errorf("%+v", after)
		}
		w.wantError("again", w.Commit(w.ctx, "acme", "t", id, first), nil)
		w.wantError("by a dispatcher", w.Commit(w.ctx, "acme", "t", id, first), nil)
		other := commit(head)
		w.wantError("another version of that number", w.Commit(w.ctx, "acme", "t", id, other), proto.ErrFenced)
		if d := cmp.Diff(after, w.get()); d != "" {
			t.Errorf("changed again: %s", d)
		}
	})
	w.whileLocked(func(id proto.TraceID, head *proto.Thread) {
		w.wantError("commit", w.Commit(w.ctx, "acme", "t", id, commit(head)), nil)
		w.wantError("the one before again", w.Commit(w.ctx, "acme", "t", id, first), nil)
		after := w.get()
		if after.Number() != 2 || !slices.Equal(after.Version.Layers, []proto.Layer{layer(1), layer(2)}) ||
			len(after.History) != 1 || after.History[0].Number != 1 || after.History[0].Layers != nil {
			t.Errorf("%+v", after)
		}
	})
}

// A body that is stored apart would expire.
func TestTooLargeHeadIsRejected(t *testing.T) {
	w := newWorld(t)
	id, head := w.lock()
	c := commit(head)
	for n := range int64(5000) {
		c.Version.Layers = append(c.Version.Layers, layer(n))
	}
	w.wantError("commit", w.Commit(w.ctx, "acme", "t", id, c), threads.ErrTooLarge)
	if d := cmp.Diff(head, w.get()); d != "" {
		t.Errorf("changed: %s", d)
	}
}

func TestEdit(t *testing.T) {
	w := newWorld(t)
	version := func(head *proto.Thread) *proto.Commit {
		key := fmt.Sprint("manifest ", head.Number()+1, " ", head.Fence)
		return &proto.Commit{Fence: head.Fence, Version: proto.Version{
			Number: head.Number() + 1, Manifest: proto.Blob{Key: key},
			Layers: []proto.Layer{{Blob: proto.Blob{Key: key + " layer"}}},
		}}
	}
	none := &proto.Thread{Org: "acme", ID: "t"}
	created := version(none)
	for range 2 { // the second time, the answer of the first was lost
		w.wantError("of a new thread", w.Edit(w.ctx, none, created, nil), nil)
	}
	one := w.get()
	if one.Number() != 1 || one.CreatedAt.IsZero() || one.UsedAt.IsZero() {
		t.Errorf("created %+v", one)
	}
	w.wantError("of a thread created meanwhile", w.Edit(w.ctx, none, version(none), []proto.StagedFile{staged("x", "0")}),
		proto.ErrConflict)
	files := []proto.StagedFile{staged("a", "1"), staged("b", "2")}
	for range 2 {
		w.wantError("of staged files", w.Edit(w.ctx, one, nil, files), nil)
	}
	two := w.get()
	w.wantError("from an old head", w.Edit(w.ctx, one, version(one), nil), proto.ErrConflict)
	if two.Number() != 1 || len(two.Staged) != 2 || two.Fence != one.Fence+1 {
		t.Errorf("staged %+v", two)
	}
	w.wantError("with a version", w.Edit(w.ctx, two, version(two), files[:1]), nil)
	three := w.get()
	if three.Number() != 2 || len(three.Version.Layers) != 2 || len(three.History) != 1 || len(three.Staged) != 1 {
		t.Errorf("changed %+v", three)
	}
	w.wantError("stage", w.Stage(w.ctx, "acme", "t", staged("c", "3"), acceptAny), nil)
	w.wantError("from before an upload", w.Edit(w.ctx, three, version(three), three.Staged), proto.ErrConflict)

	id, held := w.lock()
	w.wantBusy("while an execution is queued", w.Edit(w.ctx, held, version(held), nil), id)
	w.record(id, proto.StatusRunning, "w")
	w.wantBusy("while it runs", w.Edit(w.ctx, held, version(held), nil), id)
	w.record(id, proto.StatusSuccess, "w")
	w.wantError("after its end", w.Edit(w.ctx, held, version(held), held.Staged), nil)
	w.wantError("a late commit", w.Commit(w.ctx, "acme", "t", id, commit(held)), proto.ErrFenced)

	last := w.get()
	var many []proto.StagedFile
	for i := range proto.MaxStaged + 1 {
		many = append(many, staged(fmt.Sprint(i), fmt.Sprint(i)))
	}
	if _, full := errors.AsType[*proto.StagedError](w.Edit(w.ctx, last, nil, many)); !full {
		t.Error("too many staged files were accepted")
	}
	w.wantError("remove", w.remove("t"), nil)
	w.wantError("of a removed thread", w.Edit(w.ctx, last, version(last), nil), proto.ErrNotFound)
}

func TestCompact(t *testing.T) {
	w := newWorld(t)
	w.wantError("of no thread", w.Compact(w.ctx, "acme", "t", []proto.Layer{layer(1)}, layer(9)), proto.ErrNotFound)
	next := func() {
		w.whileLocked(func(id proto.TraceID, head *proto.Thread) {
			w.wantError("commit", w.Commit(w.ctx, "acme", "t", id, commit(head)), nil)
		})
	}
	w.whileLocked(func(proto.TraceID, *proto.Thread) {})
	w.wantError("of an empty home", w.Compact(w.ctx, "acme", "t", []proto.Layer{layer(1)}, layer(9)), proto.ErrConflict)
	for range 3 {
		next()
	}
	old := w.get()
	for name, layers := range map[string][]proto.Layer{
		"none": nil, "others": {layer(2)}, "the middle": {layer(2), layer(3)},
		"more": {layer(1), layer(2), layer(3), layer(4)},
	} {
		w.wantError(name, w.Compact(w.ctx, "acme", "t", layers, layer(9)), proto.ErrConflict)
	}
	if d := cmp.Diff(old, w.get()); d != "" {
		t.Errorf("the head was changed: %s", d)
	}
	// Compact while an execution runs that began with the old layers.
	w.whileLocked(func(id proto.TraceID, head *proto.Thread) {
		w.wantError("compact", w.Compact(w.ctx, "acme", "t", []proto.Layer{layer(1), layer(2)}, layer(12)), nil)
		w.wantError("again", w.Compact(w.ctx, "acme", "t", []proto.Layer{layer(1), layer(2)}, layer(12)), proto.ErrConflict)
		w.wantError("commit", w.Commit(w.ctx, "acme", "t", id, commit(head)), nil)
	})
	if now := w.get(); now.Number() != 4 ||
		!slices.Equal(now.Version.Layers, []proto.Layer{layer(12), layer(3), layer(4)}) {
		t.Errorf("%+v", now.Version)
	}
	w.wantError("all", w.Compact(w.ctx, "acme", "t", []proto.Layer{layer(12), layer(3), layer(4)}, layer(124)), nil)
	if now := w.get(); !slices.Equal(now.Version.Layers, []proto.Layer{layer(124)}) {
		t.Errorf("%+v", now.Version)
	}
}

func acceptAny([]proto.StagedFile, *proto.Thread) error { return nil }

func staged(path, key string) proto.StagedFile {
	return proto.StagedFile{
		Path: path, At: time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC),
		Blob: proto.Blob{Key: key, Size: 1},
	}
}

func TestStage(t *testing.T) {
	w := newWorld(t)
	for _, f := range []proto.StagedFile{staged("a", "1"), staged("b", "2"), staged("a", "3")} {
		w.wantError("stage", w.Stage(w.ctx, "acme", "t", f, acceptAny), nil)
	}
	head := w.get()
	if d := cmp.Diff([]proto.StagedFile{staged("b", "2"), staged("a", "3")}, head.Staged); d != "" || head.Fence != 0 ||
		head.Holder != "" || head.UsedAt.IsZero() {
		t.Errorf("%+v %s", head, d)
	}
	var all sync.WaitGroup
	for i := range 20 {
		all.Go(func() {
			w.wantError("stage", w.Stage(w.ctx, "acme", "t", staged(fmt.Sprint("many", i), "k"), acceptAny), nil)
		})
	}
	all.Wait()
	if n := len(w.get().Staged); n != 22 {
		t.Errorf("%d staged files", n)
	}
}

func TestStageLimits(t *testing.T) {
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
		w.wantError("create", w.Create(w.ctx, head), nil)
		var full *proto.StagedError
		for i := most; full == nil; i++ {
			if err := w.Stage(w.ctx, "acme", id, staged(name(i), "k"), acceptAny); err != nil && !errors.As(err, &full) {
				t.Fatal(err)
			}
		}
		now, err := w.Get(w.ctx, "acme", id)
		if err != nil || full.Thread != id || full.Files != len(now.Staged) ||
			(long == 1) != (full.Files == proto.MaxStaged) {
			t.Errorf("%s: %v with %d files, %v", id, full, len(now.Staged), err)
		}
		w.wantError("replace a file", w.Stage(w.ctx, "acme", id, staged(name(0), "k2"), acceptAny), nil)
	}
}

func TestTombstone(t *testing.T) {
	w := newWorld(t)
	absent := func(head *proto.Thread) error {
		if head == nil {
			return proto.ErrNotFound
		}
		return nil
	}
	_, err := w.Tombstone(w.ctx, "acme", "t", absent)
	w.wantError("none", err, proto.ErrNotFound)
	id, _ := w.lock()
	_, err = w.Tombstone(w.ctx, "acme", "t", absent)
	w.wantBusy("held", err, id)
	w.record(id, proto.StatusSuccess, "w")
	removal, err := w.Tombstone(w.ctx, "acme", "t", absent)
	w.wantError("free", err, nil)
	_, err = w.Get(w.ctx, "acme", "t")
	w.wantError("then", err, proto.ErrNotFound)
	if list, err := w.List(w.ctx, "acme", "", "", 9); len(list) > 0 || err != nil {
		t.Errorf("listed: %+v, %v", list, err)
	}
	if again, err := w.Tombstone(w.ctx, "acme", "t", absent); again != removal || err != nil {
		t.Errorf("again: %q, %v, want %q", again, err, removal)
	}
	if now, err := w.Removal(w.ctx, "acme", "t"); now != removal || err != nil {
		t.Errorf("the tombstone is %q, %v, want %q", now, err, removal)
	}
	_, _, err = w.Lock(w.ctx, "acme", "t", proto.NewTraceID())
	w.wantRemoving("lock", err)
	w.wantRemoving("create", w.Create(w.ctx, &proto.Thread{Org: "acme", ID: "t"}))
	w.wantRemoving("stage", w.Stage(w.ctx, "acme", "t", staged("a", "1"), acceptAny))
	w.wantError("the holder's commit", w.Commit(w.ctx, "acme", "t", id, commit(&proto.Thread{Fence: 1})), proto.ErrFenced)
	w.wantError("unlock", w.Unlock(w.ctx, "acme", "t", id), nil)
	w.wantError("purge of another", w.Purge(w.ctx, "acme", "t", "another"), nil)
	if now, err := w.Removal(w.ctx, "acme", "t"); now != removal || err != nil {
		t.Errorf("the tombstone is %q, %v, want %q", now, err, removal)
	}
	w.wantError("purge", w.Purge(w.ctx, "acme", "t", removal), nil)
	w.wantError("purge again", w.Purge(w.ctx, "acme", "t", removal), nil)
	info, err := w.Store.Threads.Info(w.ctx)
	if err != nil || info.State.Msgs != 0 {
		t.Errorf("%+v, %v", info.State, err)
	}
	w.wantError("the holder's commit", w.Commit(w.ctx, "acme", "t", id, commit(&proto.Thread{Fence: 1})), proto.ErrFenced)
	if _, head := w.lock(); head.Fence != 1 {
		t.Errorf("%+v", head)
	}
	w.wantError("purge of a thread", w.Purge(w.ctx, "acme", "t", removal), nil)
	w.wantError("its commit to the next of that name", w.Commit(w.ctx, "acme", "t", id, commit(&proto.Thread{Fence: 1})),
		proto.ErrFenced)
}

// A head that changes after its check is checked again.
func TestTombstoneAfterChange(t *testing.T) {
	w := newWorld(t)
	w.whileLocked(func(proto.TraceID, *proto.Thread) {})
	used := errors.New("it was used")
	_, err := w.Tombstone(w.ctx, "acme", "t", func(head *proto.Thread) error {
		if len(head.Staged) > 0 {
			return used
		}
		return w.Stage(w.ctx, "acme", "t", staged("a", "1"), acceptAny)
	})
	w.wantError("tombstone", err, used)
	if head := w.get(); len(head.Staged) != 1 {
		t.Errorf("%+v", head)
	}
}

// A process may die between the deletion marker and the purge.
func TestDeletionMarkerIsNoThread(t *testing.T) {
	for name, remove := range map[string]func(w *world) error{
		"lock":   func(w *world) error { _, _, err := w.Lock(w.ctx, "acme", "t", proto.NewTraceID()); return err },
		"create": func(w *world) error { return w.Create(w.ctx, &proto.Thread{Org: "acme", ID: "t"}) },
		"stage":  func(w *world) error { return w.Stage(w.ctx, "acme", "t", staged("a", "1"), acceptAny) },
	} {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t)
			w.whileLocked(func(proto.TraceID, *proto.Thread) {})
			cfg := w.Store.Threads.CachedInfo().Config
			cfg.DenyPurge = true
			if _, err := w.Store.JS.UpdateStream(w.ctx, cfg); err != nil {
				t.Fatal(err)
			}
			w.wantError("remove", w.remove("t"), nil)
			info, err := w.Store.Threads.Info(w.ctx)
			if err != nil || info.State.Msgs != 1 {
				t.Fatalf("no marker was written: %+v, %v", info.State, err)
			}
			_, err = w.Get(w.ctx, "acme", "t")
			w.wantError("get", err, proto.ErrNotFound)
			w.wantError("remove again", w.remove("t"), proto.ErrNotFound)
			if list, err := w.List(w.ctx, "acme", "", "", 9); len(list) > 0 || err != nil {
				t.Errorf("listed: %+v, %v", list, err)
			}
			for head, err := range w.All(w.ctx) {
				t.Errorf("of all: %+v, %v", head, err)
			}
			w.wantError(name, remove(w), nil)
			if head := w.get(); head.Version != nil {
				t.Errorf("%+v", head)
			}
		})
	}
}

func TestConcurrentRemoveAndLock(t *testing.T) {
	w := newWorld(t)
	for range 50 {
		w.whileLocked(func(id proto.TraceID, head *proto.Thread) {
			w.wantError("commit", w.Commit(w.ctx, "acme", "t", id, commit(head)), nil)
		})
		var all sync.WaitGroup
		var removed error
		all.Go(func() { removed = w.remove("t") })
		id := proto.NewTraceID()
		var removing *proto.RemovingError
		head, _, err := w.Lock(w.ctx, "acme", "t", id)
		for ; errors.As(err, &removing); head, _, err = w.Lock(w.ctx, "acme", "t", id) {
		}
		w.wantError("lock", err, nil)
		all.Wait()
		if now := w.get(); now.Holder != id || (head.Version == nil) != (now.Version == nil) {
			t.Fatalf("locked %+v, is %+v", head, now)
		}
		if removed == nil && head.Version != nil {
			t.Fatal("removed while locked")
		}
		if removed != nil {
			w.wantBusy("remove", removed, id)
		}
		w.record(id, proto.StatusSuccess, "w")
	}
}

func TestCreate(t *testing.T) {
	w := newWorld(t)
	made := &proto.Thread{
		Org: "acme", ID: "t", Fence: 3,
		Version: &proto.Version{Number: 5, Layers: []proto.Layer{layer(5)}},
	}
	w.wantError("create", w.Create(w.ctx, made), nil)
	w.wantError("again", w.Create(w.ctx, &proto.Thread{Org: "acme", ID: "t"}), proto.ErrExists)
	if d := cmp.Diff(made, w.get()); d != "" {
		t.Error(d)
	}
}

func TestListAndAll(t *testing.T) {
	w := newWorld(t)
	if list, err := w.List(w.ctx, "acme", "", "", 10); len(list) > 0 || err != nil {
		t.Fatalf("of none: %+v, %v", list, err)
	}
	const all = 300
	for i := range all {
		head := &proto.Thread{Org: "acme", ID: fmt.Sprintf("t%03d", (i*7)%all), UsedAt: time.Now().UTC()}
		if i == 0 {
			head.Version, head.Staged = &proto.Version{Number: 4, Bytes: 5, Files: 6}, []proto.StagedFile{staged("a", "1")}
		}
		w.wantError("create", w.Create(w.ctx, head), nil)
	}
	w.wantError("create", w.Create(w.ctx, &proto.Thread{Org: "other", ID: "t0005"}), nil)
	for _, owner := range proto.ThreadOwners() { // not in the list of users' threads
		for _, name := range []string{"v", "w", "x"} {
			w.wantError("create", w.Create(w.ctx, &proto.Thread{Org: "acme", ID: owner.Thread(name)}), nil)
		}
		list, err := w.List(w.ctx, "acme", owner, "v", 1)
		if err != nil || len(list) != 1 || list[0].ID != "w" {
			t.Errorf("threads of %s after v: %+v, %v", owner, list, err)
		}
	}
	w.wantError("remove", w.remove("t100"), nil)
	var ids []string
	for after := ""; ; after = ids[len(ids)-1] {
		page, err := w.List(w.ctx, "acme", "", after, 70)
		if err != nil {
			t.Fatal(err)
		}
		for _, s := range page {
			ids = append(ids, s.ID)
			if s.ID == "t000" {
				head, err := w.Get(w.ctx, "acme", s.ID)
				if d := cmp.Diff(head.Summary(), s); d != "" || err != nil || s.Version != 4 || s.Bytes != 5 || s.Files != 6 ||
					s.Staged != 1 {
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
	used := time.Now().UTC().Add(time.Hour)
	w.wantError("create", w.Create(w.ctx, &proto.Thread{Org: "acme", ID: "t2", UsedAt: used}), nil)
	w.wantError("create", w.Create(w.ctx, &proto.Thread{Org: "acme", ID: "u1", UsedAt: used}), nil)
	for prefix, want := range map[string]string{"t": "t2", "u": "u1", "z": "", "": "t2 u1"} {
		list, err := w.ListUsed(w.ctx, "acme", prefix, used, 10)
		var ids []string
		for _, s := range list {
			ids = append(ids, s.ID)
		}
		if strings.Join(ids, " ") != want || err != nil {
			t.Errorf("used threads with the prefix %q: %v, %v", prefix, ids, err)
		}
	}
	seen := map[string]int{}
	for head, err := range w.All(w.ctx) {
		if err != nil {
			t.Fatal(err)
		}
		seen[head.Org+"/"+head.ID]++
		if len(seen) == 1 { // a head that changes meanwhile is returned too
			w.wantError("stage", w.Stage(w.ctx, "acme", "t299", staged("a", "1"), acceptAny), nil)
		}
	}
	if len(seen) != all+2+3*len(proto.ThreadOwners()) || seen["acme/"+proto.VolumeThread("v")] != 1 ||
		seen["other/t0005"] != 1 || seen["acme/t299"] != 1 {
		t.Errorf("%d threads of all", len(seen))
	}
	for head, err := range w.All(w.ctx) { // the loop may end early
		if head == nil || err != nil {
			t.Errorf("%+v, %v", head, err)
		}
		break
	}
}

func TestMalformedHead(t *testing.T) {
	w := newWorld(t)
	w.wantError("create", w.Create(w.ctx, &proto.Thread{Org: "acme", ID: "a"}), nil)
	another, err := json.Marshal(&proto.Thread{Org: "other", ID: "t"})
	if err != nil {
		t.Fatal(err)
	}
	for name, body := range map[string]string{"no JSON": "{", "of another": string(another)} {
		m := &nats.Msg{
			Subject: store.ThreadSubject("acme", "t"), Data: []byte(body),
			Header: nats.Header{store.HeaderThread: {"{"}},
		}
		if _, err := w.Store.JS.PublishMsg(w.ctx, m); err != nil {
			t.Fatal(err)
		}
		_, err := w.Get(w.ctx, "acme", "t")
		w.wantError(name, err, store.ErrMalformed)
		_, _, err = w.Lock(w.ctx, "acme", "t", proto.NewTraceID())
		w.wantError(name, err, store.ErrMalformed)
		_, err = w.List(w.ctx, "acme", "", "", 9)
		if err == nil || !strings.Contains(err.Error(), "head of thread t") {
			t.Errorf("%s: listed with %v", name, err)
		}
		var good, bad int
		for _, err := range w.All(w.ctx) {
			if err != nil {
				w.wantError(name, err, store.ErrMalformed)
				bad++
			} else {
				good++
			}
		}
		if good != 1 || bad != 1 {
			t.Errorf("%s: %d good, %d bad", name, good, bad)
		}
		w.wantError(name, w.remove("t"), nil)
		_, err = w.Get(w.ctx, "acme", "t")
		w.wantError("then", err, proto.ErrNotFound)
	}
}

func TestInvalidNamesAreNotFound(t *testing.T) {
	w := newWorld(t)
	w.lock()
	for _, id := range []string{"", "*", ">", "t.x", "a b", "t\r\nx"} {
		_, err := w.Get(w.ctx, "acme", id)
		w.wantError("get", err, proto.ErrNotFound)
		_, err = w.Get(w.ctx, id, "t")
		w.wantError("get", err, proto.ErrNotFound)
		_, _, err = w.Lock(w.ctx, "acme", id, proto.NewTraceID())
		w.wantError("lock", err, proto.ErrNotFound)
		w.wantError("stage", w.Stage(w.ctx, "acme", id, staged("a", "1"), acceptAny), proto.ErrNotFound)
		w.wantError("remove", w.remove(id), proto.ErrNotFound)
		if list, err := w.List(w.ctx, id, "", "", 9); len(list) > 0 || err != nil {
			t.Errorf("list of %q: %+v, %v", id, list, err)
		}
	}
}

// A follower may not have the last write.
func TestHeadsAreReadFromTheLeader(t *testing.T) {
	w := newWorld(t)
	info, err := w.Store.Threads.Info(w.ctx)
	if err != nil || info.Config.AllowDirect || info.Config.MaxMsgsPerSubject != 1 || info.Config.MaxAge != 0 {
		t.Errorf("%+v, %v", info.Config, err)
	}
}

// Workers have no permission to create streams.
func TestAttachOnlyConnection(t *testing.T) {
	t.Parallel()
	s := storetest.Server(t)
	ctx := storetest.Context(t)
	storetest.Open(t, s)
	st, err := store.Connect(ctx, store.Access{InProcess: s, Name: t.Name()}, store.Config{AttachOnly: true},
		storetest.Log(t))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(st.Close)
	heads := &threads.Threads{Store: st}
	if _, _, err := heads.Lock(ctx, "acme", "t", proto.NewTraceID()); err != nil {
		t.Error(err)
	}
}

// delayed connects to the server, and delays the answer to the first write of a head until the
// second.
type delayed struct {
	nats.InProcessConnProvider
	mu     sync.Mutex
	writes int
	again  chan struct{} // closed by the second write
}

func (d *delayed) InProcessConn() (net.Conn, error) {
	c, err := d.InProcessConnProvider.InProcessConn()
	return &delayedConn{c, d}, err
}

type delayedConn struct {
	net.Conn
	server *delayed
}

func (c *delayedConn) Write(p []byte) (int, error) {
	c.server.mu.Lock()
	if bytes.Contains(p, []byte("PUB bullpen.thread.")) {
		if c.server.writes++; c.server.writes == 2 {
			close(c.server.again)
		}
	}
	c.server.mu.Unlock()
	return c.Conn.Write(p)
}

func (c *delayedConn) Read(p []byte) (int, error) {
	n, err := c.Conn.Read(p)
	c.server.mu.Lock()
	wait := c.server.writes == 1
	c.server.mu.Unlock()
	if wait {
		<-c.server.again
	}
	return n, err
}

func TestRepeatedWriteIsRecognised(t *testing.T) {
	t.Parallel()
	server := &delayed{InProcessConnProvider: storetest.Server(t), again: make(chan struct{})}
	heads := &threads.Threads{Store: storetest.Open(t, server)}
	if err := heads.Create(storetest.Context(t), &proto.Thread{Org: "acme", ID: "t"}); err != nil {
		t.Error(err)
	}
	if server.writes < 2 {
		t.Errorf("written %d times", server.writes)
	}
}
