package queue_test

import (
	"bytes"
	"context"
	"errors"
	"io"
	"net"
	"strings"
	"sync"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/nats-io/nats.go"

	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/scheduler/queue"
	"github.com/bullpen-run/bullpen/scheduler/store"
	"github.com/bullpen-run/bullpen/scheduler/storetest"
	"github.com/bullpen-run/bullpen/scheduler/threads"
)

// wire connects a process to the server, and stops at a certain message, as if the process was
// killed or frozen there.
type wire struct {
	nats.InProcessConnProvider
	mu      sync.Mutex
	subject string        // of the counted messages
	skip    int           // messages that pass
	frozen  chan struct{} // blocks until closed; nil to break the connection
	reached chan struct{} // closed when the wire stops
	broken  bool
}

// stopAt stops the wire at the nth message to a subject, for ever or until thaw is called.
func (w *wire) stopAt(subject string, n int, freeze bool) (reached <-chan struct{}, thaw func()) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.subject, w.skip, w.reached, w.frozen = subject, n-1, make(chan struct{}), nil
	if freeze {
		w.frozen = make(chan struct{})
	}
	frozen := w.frozen
	return w.reached, sync.OnceFunc(func() { close(frozen) })
}

func (w *wire) InProcessConn() (net.Conn, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.broken {
		return nil, io.ErrClosedPipe
	}
	c, err := w.InProcessConnProvider.InProcessConn()
	return &wireConn{c, w}, err
}

type wireConn struct {
	net.Conn
	wire *wire
}

func (s *wireConn) Write(p []byte) (int, error) {
	w := s.wire
	w.mu.Lock()
	var wait chan struct{}
	if w.subject != "" {
		n := bytes.Count(p, []byte("PUB "+w.subject+" "))
		if n > w.skip {
			w.subject, w.broken, wait = "", w.frozen == nil, w.frozen
			close(w.reached)
		}
		w.skip -= n
	}
	broken := w.broken
	w.mu.Unlock()
	switch {
	case broken:
		_ = s.Close()
		return 0, io.ErrClosedPipe
	case wait != nil:
		<-wait
	}
	return s.Conn.Write(p)
}

// threaded is a claimed execution of a thread, on a worker behind a wire.
type threaded struct {
	*world
	*threads.Threads
	job    *proto.Job
	wire   *wire
	lease  *queue.Lease
	before *proto.Thread // the head before the execution
}

// runThread claims a job of a new thread on a new worker.
func (w *world) runThread(thread string, attempts int) *threaded {
	w.t.Helper()
	x := &threaded{world: w, Threads: &threads.Threads{Store: w.store}, wire: &wire{InProcessConnProvider: w.server}}
	x.job = storetest.Job("acme", "k", proto.ModeAsync)
	x.job.ThreadID, x.job.MaxAttempts, x.job.Prefer = thread, attempts, thread
	if _, _, err := x.Lock(w.ctx, "acme", thread, x.job.TraceID); err != nil {
		w.t.Fatal(err)
	}
	x.lease = x.take(x.threadWorker(thread, x.wire))
	w.claim(x.lease)
	x.before = x.head()
	return x
}

// threadWorker starts a worker with one slot that can run threads.
func (x *threaded) threadWorker(name string, server nats.InProcessConnProvider) *host {
	x.t.Helper()
	return x.run(x.newSlots(server, name, 1, queue.CapabilityLanguage(proto.Python), queue.CapabilityThreads))
}

func (x *threaded) take(h *host) *queue.Lease {
	x.t.Helper()
	taken := x.takeAll(h, 1)
	x.submit(x.job)
	return <-taken
}

func (x *threaded) head() *proto.Thread {
	x.t.Helper()
	head, err := x.Get(x.ctx, "acme", x.job.ThreadID)
	if err != nil {
		x.t.Fatal(err)
	}
	return head
}

func (x *threaded) outcome() queue.Outcome {
	e := outcome("saved " + x.job.ThreadID)
	e.Commit = &proto.Commit{Fence: x.before.Fence, Version: proto.Version{
		Number: x.before.Number() + 1, Manifest: proto.Blob{Key: "threads/acme/" + x.job.ThreadID},
		Layers: []proto.Layer{{Blob: proto.Blob{Key: "layers/acme/1"}}},
	}}
	return e
}

// wantNew checks that the execution has ended with outcome e and the new home.
func (x *threaded) wantNew(e queue.Outcome) {
	x.t.Helper()
	rec := x.wait(x.job.TraceID)
	if d := cmp.Diff(&e.Result, rec.Result); d != "" || rec.ResultSeq != e.LastSeq+1 || rec.Pending != nil ||
		rec.Commit != nil || rec.Attempt != 1 {
		x.t.Errorf("%s ended as %+v: %s", x.job.ThreadID, rec, d)
	}
	want, err := x.before.Commit(e.Commit)
	if err != nil {
		x.t.Fatal(err)
	}
	if d := cmp.Diff(want, x.head()); d != "" {
		x.t.Errorf("%s is not the new version: %s", x.job.ThreadID, d)
	}
}

// wantOld checks that the execution has ended with code and the old home.
func (x *threaded) wantOld(code proto.ErrorCode) *proto.Record {
	x.t.Helper()
	rec := x.wait(x.job.TraceID)
	if rec.Result.ErrorCode == nil || *rec.Result.ErrorCode != string(code) || rec.Pending != nil || rec.Commit != nil {
		x.t.Errorf("%s ended as %+v", x.job.ThreadID, rec)
	}
	want := *x.before
	want.Fence++
	if d := cmp.Diff(&want, x.head()); d != "" {
		x.t.Errorf("%s is not the old version: %s", x.job.ThreadID, d)
	}
	return rec
}

// wantFree checks that another execution can lock the thread.
func (x *threaded) wantFree(worker string) {
	x.t.Helper()
	if _, had, err := x.Lock(x.ctx, "acme", x.job.ThreadID, proto.NewTraceID()); err != nil || had != worker {
		x.t.Errorf("%s is not free, of %q: %v", x.job.ThreadID, had, err)
	}
}

func TestHomeIsCommittedBeforeTheResult(t *testing.T) {
	w := newWorld(t)
	x := w.runThread("t", 1)
	e := x.outcome()
	e.Usage = &proto.Usage{CPUMS: 5}
	rec, err := x.lease.Finish(w.ctx, e)
	if err != nil {
		t.Fatal(err)
	}
	x.wantNew(e)
	if d := cmp.Diff(rec, w.wait(x.job.TraceID)); d != "" || rec.Usage.CPUMS != 5 {
		t.Error(d)
	}
	x.wantFree("t")

	// Without a commit, the head does not change.
	same := w.runThread("same", 1)
	if _, err := same.lease.Finish(w.ctx, outcome("")); err != nil {
		t.Fatal(err)
	}
	if d := cmp.Diff(same.before, same.head()); d != "" {
		t.Error(d)
	}
	same.wantFree("same")
}

// A large output is stored once for the pending and once for the terminal record. The first is
// deleted.
func TestLargePendingResultIsDeleted(t *testing.T) {
	w := newWorld(t)
	x := w.runThread("t", 1)
	e := x.outcome()
	e.Result.Stdout = strings.Repeat("é", 1<<20)
	if _, err := x.lease.Finish(w.ctx, e); err != nil {
		t.Fatal(err)
	}
	x.wantNew(e)
	bodies, err := w.store.Bodies.Subjects(w.ctx, store.BodyPatternOf(x.job.Org))
	if err != nil || len(bodies) != 1 {
		t.Errorf("the stored bodies are %v, %v", bodies, err)
	}
}

// A worker dies, or is frozen for too long, at each step of a commit. The thread has the old or the
// new version, and the execution ends accordingly. A frozen worker that wakes changes neither.
func TestWorkerThatStopsDuringACommit(t *testing.T) {
	w := newShortWorld(t)
	type stopped struct {
		*threaded
		saved bool   // the pending result was recorded
		wake  func() // nil for a dead worker
		over  chan error
	}
	var all []*stopped
	for _, step := range []string{"pending", "head", "result"} {
		for _, how := range []string{"dead", "frozen"} {
			x := &stopped{threaded: w.runThread(step+"-"+how, 1), saved: step != "pending", over: make(chan error, 1)}
			all = append(all, x)
			reached, wake := x.stopAt(step, how == "frozen")
			finish, cancel := context.WithCancel(w.ctx)
			t.Cleanup(cancel)
			go func() {
				_, err := x.lease.Finish(finish, x.outcome())
				x.over <- err
			}()
			<-reached
			if how == "frozen" {
				x.wake = wake
				t.Cleanup(wake)
			} else {
				cancel()
				if err := <-x.over; !errors.Is(err, context.Canceled) {
					t.Errorf("%s: the dead worker finished: %v", x.job.ThreadID, err)
				}
			}
			if x.saved {
				x.wantPrivate()
			}
		}
	}
	for _, x := range all {
		check := func() { x.wantNew(x.outcome()) }
		if !x.saved {
			check = func() { x.wantOld(proto.CodeWorkerLost) }
		}
		check()
		if x.wake != nil {
			x.wake()
			if err := <-x.over; !errors.Is(err, proto.ErrLost) {
				t.Errorf("%s: Finish returned %v", x.job.ThreadID, err)
			}
			check()
		}
		x.wantFree(x.job.ThreadID)
		// A commit that was not recorded in time is rejected.
		err := x.Commit(w.ctx, "acme", x.job.ThreadID, x.job.TraceID, x.outcome().Commit)
		if !x.saved && !errors.Is(err, proto.ErrFenced) || x.saved && err != nil {
			t.Errorf("%s: commit: %v", x.job.ThreadID, err)
		}
	}
}

// stopAt stops the worker before one of the writes of Finish: "pending", "head" or "result".
func (x *threaded) stopAt(step string, freeze bool) (reached <-chan struct{}, thaw func()) {
	switch step {
	case "head":
		return x.wire.stopAt(store.ThreadSubject("acme", x.job.ThreadID), 1, freeze)
	case "result":
		return x.wire.stopAt(store.ExecSubject(x.job.Org, x.job.TraceID), 2, freeze)
	default:
		return x.wire.stopAt(store.ExecSubject(x.job.Org, x.job.TraceID), 1, freeze)
	}
}

// wantPrivate checks that a pending result is not visible to clients.
func (x *threaded) wantPrivate() {
	x.t.Helper()
	stored, seq, err := x.store.Records.Get(x.ctx, x.job.Org, x.job.TraceID)
	if err != nil || stored.Pending == nil || stored.Commit == nil || stored.Status != proto.StatusRunning {
		x.t.Fatalf("stored: %+v, %v", stored, err)
	}
	for what, ask := range map[string]func() (*proto.Record, error){
		"lookup": func() (*proto.Record, error) { return x.queue.Lookup(x.ctx, x.job.Org, x.job.TraceID) },
		"cancel": func() (*proto.Record, error) { return x.queue.Cancel(x.ctx, x.job.Org, x.job.TraceID) },
		"withdraw": func() (*proto.Record, error) {
			return x.queue.Withdraw(x.ctx, x.job.Org, x.job.TraceID, proto.Cancelled())
		},
	} {
		rec, err := ask()
		if err != nil || rec.Status != proto.StatusRunning || rec.Pending != nil || rec.Commit != nil || rec.Result != nil ||
			rec.Usage != nil {
			x.t.Errorf("%s: %+v, %v", what, rec, err)
		}
	}
	if _, now, err := x.store.Records.Get(x.ctx, x.job.Org, x.job.TraceID); err != nil || now != seq {
		x.t.Errorf("the record was changed: %v", err)
	}
}

// The thread is fenced after the worker has recorded the pending result.
func TestOutputIsKeptIfTheThreadIsFenced(t *testing.T) {
	w := newWorld(t)
	x := w.runThread("t", 1)
	reached, thaw := x.stopAt("head", true)
	finished := make(chan *proto.Record, 1)
	go func() {
		rec, err := x.lease.Finish(w.ctx, x.outcome())
		if err != nil {
			t.Error(err)
		}
		finished <- rec
	}()
	<-reached
	if err := x.Fence(w.ctx, "acme", "t", x.job.TraceID); err != nil {
		t.Fatal(err)
	}
	thaw()
	rec := <-finished
	if r := x.wantOld(proto.CodeThreadSave).Result; r.Stdout != "saved t" || r.ProgramExitCode == nil ||
		*r.ProgramExitCode != 0 {
		t.Errorf("%+v", r)
	}
	if d := cmp.Diff(rec, w.wait(x.job.TraceID)); d != "" {
		t.Error(d)
	}
}

// A cancellation while the pending result is being recorded has no effect.
func TestCancelledTooLate(t *testing.T) {
	w := newWorld(t)
	x := w.runThread("t", 1)
	reached, thaw := x.stopAt("pending", true)
	e, finished := x.outcome(), make(chan error, 1)
	go func() {
		_, err := x.lease.Finish(w.ctx, e)
		finished <- err
	}()
	<-reached
	if rec, err := w.queue.Cancel(w.ctx, x.job.Org, x.job.TraceID); err != nil || !rec.Cancelling {
		t.Fatalf("%+v, %v", rec, err)
	}
	thaw()
	if err := <-finished; err != nil {
		t.Fatal(err)
	}
	x.wantNew(e)
}

// The next attempt finds the old home, and only it can commit.
func TestPreviousAttemptIsFenced(t *testing.T) {
	w := newShortWorld(t)
	x := w.runThread("t", 2)
	first := x.outcome()
	reached, thaw := x.stopAt("pending", true)
	t.Cleanup(thaw)
	woke := make(chan error, 1)
	go func() {
		_, err := x.lease.Finish(w.ctx, first)
		woke <- err
	}()
	<-reached
	next := x.threadWorker("next", w.server)
	l, err := next.Take(w.ctx)
	if err != nil || l.Attempt() != 2 || l.Job().TraceID != x.job.TraceID {
		t.Fatalf("%+v, %v", l, err)
	}
	w.claim(l)
	old := *x.before
	x.before = x.head()
	old.Fence++
	if d := cmp.Diff(&old, x.before); d != "" {
		t.Errorf("the head of the next attempt: %s", d)
	}
	thaw()
	if err := <-woke; !errors.Is(err, proto.ErrLost) && !errors.Is(err, context.Canceled) {
		t.Errorf("the first attempt ended with %v", err)
	}
	if err := x.Commit(w.ctx, "acme", "t", x.job.TraceID, first.Commit); !errors.Is(err, proto.ErrFenced) {
		t.Errorf("its commit: %v", err)
	}
	e := x.outcome()
	if _, err := l.Finish(w.ctx, e); err != nil {
		t.Fatal(err)
	}
	if x.head().Number() != 1 || x.head().Fence != old.Fence {
		t.Errorf("%+v", x.head())
	}
}

// runWithVolume claims a job of a new thread that can also change a volume.
func (w *world) runWithVolume(name string, attempts int) *threaded {
	w.t.Helper()
	x := &threaded{world: w, Threads: &threads.Threads{Store: w.store}, wire: &wire{InProcessConnProvider: w.server}}
	x.job = storetest.Job("acme", "k", proto.ModeAsync)
	x.job.ThreadID, x.job.MaxAttempts, x.job.Prefer = name, attempts, name
	x.job.SetMounts([]proto.Mount{
		{Slug: name, Kind: proto.MountVolume, Bytes: 1 << 20},
		{Slug: "read", Kind: proto.MountVolume, Bytes: 1 << 20, ReadOnly: true},
	})
	for _, id := range x.job.Threads() {
		if _, _, err := x.Lock(w.ctx, "acme", id, x.job.TraceID); err != nil {
			w.t.Fatal(err)
		}
	}
	x.lease = x.take(x.volumeWorker(name, x.wire))
	w.claim(x.lease)
	x.before = x.head()
	return x
}

func (x *threaded) volumeWorker(name string, server nats.InProcessConnProvider) *host {
	x.t.Helper()
	return x.run(x.newSlots(server, name, 1, queue.CapabilityLanguage(proto.Python), queue.CapabilityThreads,
		queue.CapabilityMounts, queue.CapabilityVolumes))
}

// volume returns the head of the execution's volume.
func (x *threaded) volume() *proto.Thread {
	x.t.Helper()
	head, err := x.Get(x.ctx, "acme", proto.VolumeThread(x.job.Volumes[0]))
	if err != nil {
		x.t.Fatal(err)
	}
	return head
}

func (x *threaded) volumeOutcome() queue.Outcome {
	x.t.Helper()
	e, volume := x.outcome(), x.volume()
	e.Volumes = []proto.VolumeCommit{
		{Volume: x.job.Volumes[0], Commit: proto.Commit{Fence: volume.Fence, Version: proto.Version{
			Number: volume.Number() + 1, Manifest: proto.Blob{Key: "threads/acme/" + volume.ID},
			Layers: []proto.Layer{{Blob: proto.Blob{Key: "layers/acme/2"}}},
		}}},
	}
	return e
}

// A worker dies before each commit. The dispatcher makes those that are missing.
func TestWorkerThatStopsBetweenTwoCommits(t *testing.T) {
	w := newShortWorld(t)
	var all []*threaded
	for _, step := range []string{"pending", "volume", "head", "result"} {
		x := w.runWithVolume(step, 1)
		all = append(all, x)
		reached, _ := x.stopAt(step, false)
		if step == "volume" {
			reached, _ = x.wire.stopAt(store.ThreadSubject("acme", x.volume().ID), 1, false)
		}
		finish, cancel := context.WithCancel(w.ctx)
		over := make(chan error, 1)
		go func() {
			_, err := x.lease.Finish(finish, x.volumeOutcome())
			over <- err
		}()
		<-reached
		cancel()
		if err := <-over; !errors.Is(err, context.Canceled) {
			t.Errorf("%s: the dead worker finished: %v", step, err)
		}
	}
	for _, x := range all {
		want := int64(1)
		if x.job.ThreadID == "pending" {
			want = 0
			x.wantOld(proto.CodeWorkerLost)
		} else {
			x.wantNew(x.outcome())
		}
		if head := x.volume(); head.Number() != want || want == 0 && head.Fence != 2 {
			t.Errorf("%s: the volume is %+v", x.job.ThreadID, head)
		}
	}
}

// The volume is fenced after the worker has recorded the pending result.
func TestFencedVolumeIsNotSaved(t *testing.T) {
	w := newWorld(t)
	x := w.runWithVolume("t", 1)
	e := x.volumeOutcome()
	if err := x.Fence(w.ctx, "acme", x.volume().ID, x.job.TraceID); err != nil {
		t.Fatal(err)
	}
	rec, err := x.lease.Finish(w.ctx, e)
	if err != nil {
		t.Fatal(err)
	}
	r := rec.Result
	if r.ErrorCode == nil || *r.ErrorCode != string(proto.CodeStorageWrite) || *r.ProgramExitCode != 0 ||
		r.Stdout != "saved t" ||
		!strings.Contains(*r.ErrorMessage, "volume t was not saved") || rec.VolumeCommits != nil {
		t.Errorf("%+v", rec)
	}
	if x.head().Number() != 1 || x.volume().Number() != 0 {
		t.Errorf("home %+v, volume %+v", x.head(), x.volume())
	}
}

// The next attempt of a lost one finds the old volume, and only it can commit.
func TestPreviousAttemptIsFencedFromTheVolume(t *testing.T) {
	w := newShortWorld(t)
	x := w.runWithVolume("t", 2)
	first := x.volumeOutcome()
	reached, thaw := x.stopAt("pending", true)
	t.Cleanup(thaw)
	woke := make(chan error, 1)
	go func() {
		_, err := x.lease.Finish(w.ctx, first)
		woke <- err
	}()
	<-reached
	l, err := x.volumeWorker("next", w.server).Take(w.ctx)
	if err != nil || l.Attempt() != 2 {
		t.Fatalf("%+v, %v", l, err)
	}
	w.claim(l)
	thaw()
	if err := <-woke; !errors.Is(err, proto.ErrLost) && !errors.Is(err, context.Canceled) {
		t.Errorf("the first attempt ended with %v", err)
	}
	if err := x.Commit(w.ctx, "acme", x.volume().ID, x.job.TraceID, &first.Volumes[0].Commit); !errors.Is(
		err, proto.ErrFenced) {
		t.Errorf("its commit: %v", err)
	}
	x.before = x.head()
	if _, err := l.Finish(w.ctx, x.volumeOutcome()); err != nil {
		t.Fatal(err)
	}
	if x.volume().Number() != 1 || x.head().Number() != 1 {
		t.Errorf("home %+v, volume %+v", x.head(), x.volume())
	}
}
