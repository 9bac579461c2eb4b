package queue_test

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/nats-io/nats.go"
	"go.uber.org/goleak"

	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/scheduler/queue"
	"github.com/bullpen-run/bullpen/scheduler/store"
	"github.com/bullpen-run/bullpen/scheduler/storetest"
)

func TestMain(m *testing.M) {
	// Most tests wait for timeouts rather than for a processor.
	if err := flag.Set("test.parallel", "8"); err != nil {
		panic(err)
	}
	goleak.VerifyTestMain(m)
}

// world is a queue with a leading dispatcher.
type world struct {
	t                     *testing.T
	ctx                   context.Context
	server                nats.InProcessConnProvider
	store                 *store.Store
	queue                 *queue.Queue
	ended                 func(*proto.Record) // of dispatchers and workers started from now on
	reserved, interactive func(slots int) int // of dispatchers started from now on
	// dispatchers and workers started from now on notice losses in a third of the time
	short bool
}

func newWorld(t *testing.T) *world {
	w := newLeaderlessWorld(t)
	w.dispatcher("first")
	return w
}

// newShortWorld returns a world in which losses are noticed in a third of the time.
func newShortWorld(t *testing.T) *world {
	w := newLeaderlessWorld(t)
	w.short = true
	w.dispatcher("first")
	return w
}

// background runs f until stop is called or the test ends.
func (w *world) background(f func(context.Context) error) (stop func()) {
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan struct{})
	go func() {
		defer close(done)
		if err := f(ctx); err != nil {
			w.t.Error(err)
		}
	}()
	stop = func() { cancel(); <-done }
	w.t.Cleanup(stop)
	return stop
}

func (w *world) dispatcher(name string) (stop func()) {
	return w.background(w.newDispatcher(name).Run)
}

func (w *world) newDispatcher(name string) *queue.Dispatcher {
	d := &queue.Dispatcher{
		Store: storetest.Open(w.t, w.server), Instance: name, Reserved: w.reserved,
		Interactive: w.interactive, Ended: w.ended, Log: storetest.Log(w.t),
	}
	if w.short {
		d.ShortenTimeouts()
	}
	return d
}

// host is a worker on a connection of its own.
type host struct {
	*queue.Slots
	stop func() // announces that the worker is gone
}

// worker starts a worker that runs Python.
func (w *world) worker(name string, slots int) *host {
	return w.run(w.newSlots(w.server, name, slots, queue.CapabilityLanguage(proto.Python)))
}

func (w *world) run(s *queue.Slots) *host { return &host{Slots: s, stop: w.background(s.Run)} }

func (w *world) newSlots(
	server nats.InProcessConnProvider, name string, total int, capabilities ...string,
) *queue.Slots {
	st, err := store.Connect(w.ctx, store.Access{InProcess: server, Name: name}, store.Config{AttachOnly: true},
		storetest.Log(w.t))
	if err != nil {
		w.t.Fatal(err)
	}
	w.t.Cleanup(st.Close)
	s := &queue.Slots{
		Store: st, Worker: name, Total: total, Capabilities: capabilities, Ended: w.ended,
		Log: storetest.Log(w.t),
	}
	if w.short {
		s.ShortenTimeouts()
	}
	return s
}

// die closes the connection of the worker, like SIGKILL.
func (h *host) die() { h.Store.Conn.Close() }

func (w *world) submit(job *proto.Job) proto.TraceID {
	w.t.Helper()
	if err := w.queue.Submit(w.ctx, job); err != nil {
		w.t.Fatal(err)
	}
	return job.TraceID
}

func (w *world) take(h *host) *queue.Lease {
	w.t.Helper()
	l, err := h.Take(w.ctx)
	if err != nil {
		w.t.Fatal(err)
	}
	return l
}

func (w *world) claim(l *queue.Lease) context.Context {
	w.t.Helper()
	ctx, _, err := l.Claim(w.ctx)
	if err != nil {
		w.t.Fatal(err)
	}
	w.t.Cleanup(l.Release)
	return ctx
}

func (w *world) wait(id proto.TraceID) *proto.Record {
	w.t.Helper()
	rec, err := w.queue.Wait(w.ctx, "acme", id)
	if err != nil {
		w.t.Fatal(err)
	}
	return rec
}

func outcome(stdout string) queue.Outcome {
	r := proto.Exited(0)
	r.Stdout = stdout
	return queue.Outcome{Result: r, LastSeq: 3}
}

func TestJobRuns(t *testing.T) {
	w := newWorld(t)
	h := w.worker("w1", 1)
	id := w.submit(storetest.Job("acme", "k", proto.ModeInline))
	if rec, err := w.queue.Lookup(w.ctx, "acme", id); err != nil || rec.Status.Terminal() {
		t.Fatalf("after submission: %+v, %v", rec, err)
	}
	l := w.take(h)
	w.claim(l)
	rec, err := w.queue.Lookup(w.ctx, "acme", id)
	if err != nil || rec.Status != proto.StatusRunning || rec.Attempt != 1 || rec.Worker != "w1" || rec.StartedAt == nil {
		t.Fatalf("after the claim: %+v, %v", rec, err)
	}
	if _, err := l.Finish(w.ctx, outcome("hello")); err != nil {
		t.Fatal(err)
	}
	rec = w.wait(id)
	if rec.Status != proto.StatusSuccess || rec.Result.Stdout != "hello" || rec.ResultSeq != 4 || rec.CompletedAt == nil ||
		rec.Org != "acme" {
		t.Fatalf("at the end: %+v", rec)
	}
	if _, err := w.queue.Lookup(w.ctx, "acme", proto.NewTraceID()); !errors.Is(err, proto.ErrNotFound) {
		t.Fatalf("an unknown id: %v", err)
	}
}

func TestWatchBeforeSubmit(t *testing.T) {
	w := newWorld(t)
	h := w.worker("w", 1)
	for _, out := range []string{"small", strings.Repeat("large", 1<<20)} {
		job := storetest.Job("acme", "k", proto.ModeInline)
		watch, err := w.queue.Watch(job.Org, job.TraceID)
		if err != nil {
			t.Fatal(err)
		}
		defer watch.Close()
		w.submit(job)
		l := w.take(h)
		w.claim(l)
		gone, cancel := context.WithCancel(w.ctx)
		cancel()
		if rec, err := watch.Wait(gone); !errors.Is(err, context.Canceled) {
			t.Fatalf("while it runs: %+v, %v", rec, err)
		}
		if _, err := l.Finish(w.ctx, outcome(out)); err != nil {
			t.Fatal(err)
		}
		rec, err := watch.Wait(w.ctx)
		if err != nil || rec.TraceID != job.TraceID || rec.Status != proto.StatusSuccess || rec.Result.Stdout != out {
			t.Fatalf("at the end: %v, %v", rec, err)
		}
	}
}

func TestLargeBodiesAreStoredAndDeleted(t *testing.T) {
	w := newWorld(t)
	h := w.worker("w", 1)
	job := storetest.Job("acme", "k", proto.ModeInline)
	job.Code = strings.Repeat("x", 1<<20)
	id := w.submit(job)
	l := w.take(h)
	if l.Job().Code != job.Code {
		t.Fatal("the code was altered")
	}
	w.claim(l)
	out := strings.Repeat("é", 4<<20)
	if _, err := l.Finish(w.ctx, outcome(out)); err != nil {
		t.Fatal(err)
	}
	if rec := w.wait(id); rec.Result.Stdout != out {
		t.Fatalf("%d bytes of output came back, want %d", len(rec.Result.Stdout), len(out))
	}
	w.eventually("the job is removed", func() bool {
		_, err := w.store.Jobs.Meta(w.ctx, "acme", id)
		return errors.Is(err, proto.ErrNotFound)
	})
}

// eventually polls until ok returns true.
func (w *world) eventually(what string, ok func() bool) {
	w.t.Helper()
	tick := time.NewTicker(10 * time.Millisecond)
	defer tick.Stop()
	for !ok() {
		select {
		case <-w.ctx.Done():
			w.t.Fatalf("never: %s", what)
		case <-tick.C:
		}
	}
}

// The request can be read as long as the execution, whoever ends it, and whether or not it has
// started.
func TestRequestIsKept(t *testing.T) {
	w := newShortWorld(t)
	newJob := func() *proto.Job {
		job := storetest.Job("acme", "k", proto.ModeAsync)
		job.Code, job.Args, job.Stdin = "\x00\u2028<", []string{"", "\u00e9"}, "\n\x00\n"
		job.Requested = &proto.Requested{EnvNames: []string{"A"}, SubPaths: []string{"/data/s/a"}}
		job.Env = map[string]string{"A": "secret", "OF_THE_PROFILE": "secret"}
		return job
	}
	check := func(what string, job *proto.Job, status proto.Status) {
		t.Helper()
		rec, err := w.queue.Submitted(w.ctx, "acme", job.TraceID)
		if err != nil || rec.Status != status {
			t.Fatalf("%s: %+v, %v", what, rec, err)
		}
		if d := cmp.Diff(&proto.Request{
			Code: job.Code, Args: job.Args, Stdin: job.Stdin, Requested: *job.Requested,
		}, rec.Request); d != "" {
			t.Errorf("%s: %s", what, d)
		}
		if rec, err := w.queue.Summary(w.ctx, "acme", job.TraceID); err != nil || rec.Request != nil {
			t.Errorf("%s: the summary has %+v, %v", what, rec.Request, err)
		}
	}
	cancelled, expired := newJob(), newJob()
	w.submit(cancelled)
	check("queued", cancelled, proto.StatusQueued)
	if _, err := w.queue.Cancel(w.ctx, "acme", cancelled.TraceID); err != nil {
		t.Fatal(err)
	}
	check("cancelled in the queue", cancelled, proto.StatusCancelled)
	expired.QueueDeadline = expired.CreatedAt.Add(10 * time.Millisecond)
	w.wait(w.submit(expired))
	check("expired", expired, proto.StatusFailed)

	h := w.worker("dies", 2)
	done, lost := newJob(), newJob()
	w.submit(done)
	l := w.take(h)
	w.claim(l)
	check("running", done, proto.StatusRunning)
	if _, err := l.Finish(w.ctx, outcome("out")); err != nil {
		t.Fatal(err)
	}
	check("ended", done, proto.StatusSuccess)
	w.submit(lost)
	w.claim(w.take(h))
	h.die()
	w.wait(lost.TraceID)
	check("lost", lost, proto.StatusFailed)

	large, old := newJob(), newJob()
	large.Code = strings.Repeat("x", proto.MaxKeptRequest)
	old.Requested = nil
	for what, job := range map[string]*proto.Job{"large": large, "of an older version": old} {
		w.submit(job)
		for _, f := range []func() error{
			func() error { return nil },
			func() error { _, err := w.queue.Cancel(w.ctx, "acme", job.TraceID); return err },
		} {
			if err := f(); err != nil {
				t.Fatal(err)
			}
			if rec, err := w.queue.Submitted(w.ctx, "acme", job.TraceID); err != nil || rec.Request != nil {
				t.Errorf("%s: %+v, %v", what, rec, err)
			}
		}
	}
	if _, err := w.queue.Submitted(w.ctx, "other", done.TraceID); !errors.Is(err, proto.ErrNotFound) {
		t.Errorf("another organisation's: %v", err)
	}
}

func TestCancelQueuedJob(t *testing.T) {
	w := newWorld(t)
	id := w.submit(storetest.Job("acme", "k", proto.ModeAsync))
	if rec, err := w.queue.Cancel(w.ctx, "acme", id); err != nil || rec.Status != proto.StatusCancelled ||
		rec.ResultSeq != 1 {
		t.Fatalf("%+v, %v", rec, err)
	}
	h := w.worker("w", 1)
	other := w.submit(storetest.Job("acme", "k", proto.ModeAsync))
	if l := w.take(h); l.Job().TraceID != other {
		t.Fatal("the cancelled job was assigned")
	}
}

func TestCancelRunningJob(t *testing.T) {
	w := newWorld(t)
	h := w.worker("w", 1)
	id := w.submit(storetest.Job("acme", "k", proto.ModeAsync))
	l := w.take(h)
	running := w.claim(l)
	for range 2 { // the second one changes nothing
		rec, err := w.queue.Cancel(w.ctx, "acme", id)
		if err != nil || rec.Status != proto.StatusRunning || !rec.Cancelling {
			t.Fatalf("%+v, %v", rec, err)
		}
	}
	<-l.Cancelled()
	if running.Err() != nil { // the program has its grace
		t.Fatalf("the context was cancelled with cause %v", context.Cause(running))
	}
	if _, err := l.Finish(w.ctx, queue.Outcome{Result: proto.Cancelled(), LastSeq: 1}); err != nil {
		t.Fatal(err)
	}
	if rec := w.wait(id); rec.Status != proto.StatusCancelled {
		t.Fatalf("%+v", rec)
	}
	if rec, err := w.queue.Cancel(w.ctx, "acme", id); err != nil || rec.Status != proto.StatusCancelled {
		t.Fatalf("cancelled again: %+v, %v", rec, err)
	}
}

func TestWithdraw(t *testing.T) {
	w := newWorld(t)
	id := w.submit(storetest.Job("acme", "k", proto.ModeInline))
	rec, err := w.queue.Withdraw(w.ctx, "acme", id, proto.Failure(proto.CodeExpiredInQueue, "no worker was free"))
	if err != nil || rec.Status != proto.StatusFailed || *rec.Result.ErrorCode != "expired_in_queue" {
		t.Fatalf("%+v, %v", rec, err)
	}
	h := w.worker("w", 1)
	next := w.submit(storetest.Job("acme", "k", proto.ModeInline))
	l := w.take(h)
	if l.Job().TraceID != next {
		t.Fatal("the withdrawn job was assigned")
	}
	w.claim(l)
	if rec, err := w.queue.Withdraw(w.ctx, "acme", next, proto.Cancelled()); err != nil ||
		rec.Status != proto.StatusRunning {
		t.Fatalf("a running job was withdrawn: %+v, %v", rec, err)
	}
	l.Release()
}

func TestQueueDeadline(t *testing.T) {
	w := newWorld(t)
	job := storetest.Job("acme", "k", proto.ModeAsync)
	job.QueueDeadline = job.CreatedAt.Add(10 * time.Millisecond)
	rec := w.wait(w.submit(job))
	if rec.Status != proto.StatusFailed || *rec.Result.ErrorCode != string(proto.CodeExpiredInQueue) {
		t.Fatalf("%+v", rec)
	}
}

func TestJobWaitsForCapabilitiesOfItsSandbox(t *testing.T) {
	w := newWorld(t)
	plain := w.worker("plain", 8)
	language := queue.CapabilityLanguage(proto.Python)
	for name, tt := range map[string]struct {
		need         func(job *proto.Job)
		capabilities []string
	}{
		// without the language
		"image": {func(j *proto.Job) { j.Image, j.Sandbox.Image = "py", "py" }, []string{queue.CapabilityImages}},
		"architecture": {
			func(j *proto.Job) { j.Image, j.Architecture = "py", "amd64" },
			[]string{queue.CapabilityImages, queue.CapabilityArchitecture("amd64")},
		},
		"network": {func(j *proto.Job) { j.Network = proto.NetworkAllowlist }, []string{language, queue.CapabilityNetwork}},
		"private": {
			func(j *proto.Job) { j.Network, j.NetworkExtended = proto.NetworkAllowlist, true },
			[]string{language, queue.CapabilityNetwork, queue.CapabilityNetworkExtended},
		},
		"secrets": {
			func(j *proto.Job) { j.HasSecrets, j.HasInjections = true, true },
			[]string{language, queue.CapabilitySecrets, queue.CapabilityInjections},
		},
		"disk":   {func(j *proto.Job) { j.Disk = true }, []string{queue.CapabilityDisk, language}},
		"thread": {func(j *proto.Job) { j.ThreadID = "t" }, []string{queue.CapabilityThreads, language}},
		"all": {
			func(j *proto.Job) { j.Image, j.Network, j.Disk = "py", proto.NetworkUnrestricted, true },
			[]string{queue.CapabilityDisk, queue.CapabilityImages, queue.CapabilityNetwork},
		},
	} {
		job := storetest.Job("acme", "k", proto.ModeAsync)
		tt.need(job)
		demanding := w.submit(job)
		if id := w.submit(storetest.Job("acme", "k", proto.ModeAsync)); w.take(plain).Job().TraceID != id {
			t.Fatalf("%s: a job was assigned to a worker without a capability", name)
		}
		capable := w.run(w.newSlots(w.server, name, 1, tt.capabilities...))
		l := w.take(capable)
		if l.Job().TraceID != demanding {
			t.Fatalf("%s: got %s", name, l.Job().TraceID)
		}
		w.claim(l)
		w.finish(l)
		capable.stop()
	}
}

func TestJobWaitsForItsLanguage(t *testing.T) {
	w := newWorld(t)
	python := w.worker("python", 4)
	job := storetest.Job("acme", "k", proto.ModeAsync)
	job.Language = proto.Node
	node := w.submit(job)
	for range 3 { // other jobs get the slots of a worker that cannot run it
		id := w.submit(storetest.Job("acme", "k", proto.ModeAsync))
		l := w.take(python)
		if l.Job().TraceID != id {
			t.Fatalf("a worker without node got a job in %s", l.Job().Language)
		}
		w.claim(l)
	}
	if rec, err := w.queue.Lookup(w.ctx, "acme", node); err != nil || rec.Status != proto.StatusQueued {
		t.Fatalf("%+v, %v", rec, err)
	}
	all := w.run(w.newSlots(w.server, "all", 1, "image:x", queue.CapabilityLanguage(proto.Node),
		queue.CapabilityLanguage(proto.Bash)))
	if l := w.take(all); l.Job().TraceID != node {
		t.Fatalf("got %s", l.Job().TraceID)
	}
}

func TestJobThatNoWorkerCanRunExpires(t *testing.T) {
	w := newWorld(t)
	h := w.worker("python", 1)
	w.submit(storetest.Job("acme", "k", proto.ModeAsync))
	w.claim(w.take(h)) // the dispatcher knows the worker
	job := storetest.Job("acme", "k", proto.ModeAsync)
	job.Language, job.QueueDeadline = proto.Bash, job.CreatedAt.Add(10*time.Millisecond)
	rec := w.wait(w.submit(job))
	if *rec.Result.ErrorCode != string(proto.CodeExpiredInQueue) ||
		!strings.Contains(*rec.Result.ErrorMessage, "with language:bash") {
		t.Fatalf("%s: %s", *rec.Result.ErrorCode, *rec.Result.ErrorMessage)
	}
}

func TestWorkerDiesBeforeTheClaim(t *testing.T) {
	w := newShortWorld(t)
	first := w.worker("dies", 1)
	id := w.submit(storetest.Job("acme", "k", proto.ModeAsync))
	w.take(first)
	first.die()
	l := w.take(w.worker("lives", 1))
	if l.Job().TraceID != id || l.Attempt() != 1 {
		t.Fatalf("got %s, attempt %d", l.Job().TraceID, l.Attempt())
	}
	w.claim(l)
	if _, err := l.Finish(w.ctx, outcome("")); err != nil {
		t.Fatal(err)
	}
}

func TestWorkerDiesAfterTheClaim(t *testing.T) {
	w := newShortWorld(t)
	h := w.worker("dies", 2)
	once := w.submit(storetest.Job("acme", "k", proto.ModeAsync))
	job := storetest.Job("acme", "k", proto.ModeAsync)
	job.MaxAttempts = 2
	twice := w.submit(job)
	leases := map[proto.TraceID]*queue.Lease{}
	lost := map[proto.TraceID]context.Context{}
	for range 2 {
		l := w.take(h)
		leases[l.Job().TraceID], lost[l.Job().TraceID] = l, w.claim(l)
	}
	h.die()

	rec := w.wait(once)
	if rec.Status != proto.StatusFailed || *rec.Result.ErrorCode != string(proto.CodeWorkerLost) || rec.Attempt != 1 {
		t.Fatalf("%+v", rec)
	}
	again := w.take(w.worker("lives", 1))
	if again.Job().TraceID != twice || again.Attempt() != 2 {
		t.Fatalf("got %s, attempt %d", again.Job().TraceID, again.Attempt())
	}
	w.claim(again)
	for id, ctx := range lost {
		<-ctx.Done()
		if cause := context.Cause(ctx); !errors.Is(cause, proto.ErrLost) {
			t.Errorf("the context of %s was cancelled with cause %v", id, cause)
		}
	}
	rec, err := again.Finish(w.ctx, outcome("second"))
	if err != nil || rec.Attempt != 2 || rec.Result.Stdout != "second" {
		t.Fatalf("%+v, %v", rec, err)
	}
}

// A frozen worker wakes after its execution was ended.
func TestStaleHolderCannotWrite(t *testing.T) {
	w := newWorld(t)
	h := w.worker("frozen", 1)
	id := w.submit(storetest.Job("acme", "k", proto.ModeAsync))
	l := w.take(h)
	w.claim(l)
	rec, seq, err := w.store.Records.Get(w.ctx, "acme", id)
	if err != nil {
		t.Fatal(err)
	}
	done := *rec
	r := proto.Failure(proto.CodeWorkerLost, "lost")
	done.Status, done.Result = r.Status(), &r
	if _, err := w.store.Records.Put(w.ctx, &done, seq); err != nil {
		t.Fatal(err)
	}
	existing, err := l.Finish(w.ctx, outcome("too late"))
	if !errors.Is(err, proto.ErrLost) || existing.Status != proto.StatusFailed {
		t.Fatalf("%+v, %v", existing, err)
	}
	if rec := w.wait(id); *rec.Result.ErrorCode != string(proto.CodeWorkerLost) {
		t.Fatalf("%+v", rec)
	}
}

func TestConcurrencyLimit(t *testing.T) {
	w := newWorld(t)
	h := w.worker("w", 4)
	job := func() *proto.Job {
		j := storetest.Job("acme", "k", proto.ModeInline)
		j.Concurrent = 2
		return j
	}
	ids := []proto.TraceID{w.submit(job()), w.submit(job())}
	var rejection *proto.Rejection
	if err := w.queue.Submit(w.ctx, job()); !errors.As(err, &rejection) || rejection.Reason != proto.RejectedConcurrency ||
		rejection.Used != 2 {
		t.Fatalf("the third: %v", err)
	}
	w.submit(storetest.Job("other", "k", proto.ModeInline)) // another organisation
	for range 3 {
		l := w.take(h)
		w.claim(l)
		if _, err := l.Finish(w.ctx, outcome("")); err != nil {
			t.Fatal(err)
		}
	}
	for _, id := range ids {
		w.wait(id)
	}
	w.eventually("a job is accepted again", func() bool { return w.queue.Submit(w.ctx, job()) == nil })
}

func TestChangeOfLeaders(t *testing.T) {
	w := newWorld(t)
	stop := w.dispatcher("second") // one of the two leads
	w.dispatcher("third")
	var ids []proto.TraceID
	for range 50 {
		ids = append(ids, w.submit(storetest.Job("acme", "k", proto.ModeAsync)))
	}
	stop()
	h := w.worker("w", 8)
	var workers sync.WaitGroup
	running, cancel := context.WithCancel(w.ctx)
	for range 8 {
		workers.Go(func() {
			for {
				l, err := h.Take(running)
				if err != nil {
					return
				}
				if _, _, err := l.Claim(w.ctx); err != nil {
					t.Errorf("claimed twice: %v", err)
					return
				}
				if _, err := l.Finish(w.ctx, outcome(string(l.Job().TraceID))); err != nil {
					t.Error(err)
				}
			}
		})
	}
	for _, id := range ids {
		if rec := w.wait(id); rec.Result.Stdout != string(id) || rec.Attempt != 1 {
			t.Errorf("%+v", rec)
		}
	}
	cancel()
	workers.Wait()
}

func TestMalformedMessages(t *testing.T) {
	w := newWorld(t)
	h := w.worker("w", 1)
	id := string(proto.NewTraceID())
	for _, subject := range []string{
		"job.interactive.acme.k." + id, "job.x", "job.batch.a.b.c.d.e", "exec." + id, "exec.x.y",
		"out." + id + ".1", "out.x",
		"done." + id,
		"ctl.admit", "ctl.slots", "ctl.stats", "ctl.rollcall", "worker.w.assign", "worker.w.cancel",
	} {
		for _, body := range []string{
			"", "{", `{"trace":1}`, `{"worker":"a.*.>"}`, `{"ticket":1,"trace":"` + id + `","attempt":1}`, "\xff\x00",
		} {
			if err := w.store.Conn.Publish("bullpen."+subject, []byte(body)); err != nil {
				t.Fatal(err)
			}
		}
	}
	for i := range 5 {
		job := w.submit(storetest.Job("acme", fmt.Sprintf("k%d", i), proto.ModeInline))
		l := w.take(h)
		w.claim(l)
		if _, err := l.Finish(w.ctx, outcome("")); err != nil {
			t.Fatal(err)
		}
		w.wait(job)
	}
	w.eventually("the malformed jobs are dead-lettered", func() bool {
		info, err := w.store.Jobs.Info(w.ctx)
		dead, errDead := w.store.DeadLetters.Info(w.ctx)
		return err == nil && errDead == nil && info.State.Msgs == 0 && dead.State.Msgs >= 3
	})
}

func TestStats(t *testing.T) {
	w := newWorld(t)
	w.submit(storetest.Job("acme", "k", proto.ModeAsync))
	w.eventually("the queued job is counted", func() bool {
		st, err := w.queue.Stats(w.ctx)
		return err == nil && st.Queued == 1 && st.Workers == 0 && st.OldestQueue > 0
	})
	h := w.worker("w", 3)
	w.claim(w.take(h))
	w.eventually("the running job is counted", func() bool {
		st, err := w.queue.Stats(w.ctx)
		return err == nil && st.Queued == 0 && st.Running == 1 && st.Workers == 1 && st.Slots == 3
	})
}

// A new leader does not assign an overdue job: its record may be past the retention.
func TestNewLeaderExpiresOldJobs(t *testing.T) {
	w := newLeaderlessWorld(t)
	st := w.store
	old := storetest.Job("acme", "k", proto.ModeAsync)
	old.CreatedAt = old.CreatedAt.Add(-time.Hour)
	old.QueueDeadline = old.CreatedAt.Add(time.Minute)
	next := storetest.Job("acme", "k", proto.ModeAsync)
	for _, job := range []*proto.Job{old, next} {
		if err := storetest.PutJob(w.ctx, st, job); err != nil {
			t.Fatal(err)
		}
	}
	h := w.worker("w", 1)
	w.dispatcher("d")
	if l := w.take(h); l.Job().TraceID != next.TraceID {
		t.Fatal("the old job was assigned")
	}
	if rec := w.wait(old.TraceID); *rec.Result.ErrorCode != string(proto.CodeExpiredInQueue) {
		t.Fatalf("%+v", rec)
	}
}

// The previous leader may still remove jobs while the next one reads them.
func TestRebuildWhileJobsAreRemoved(t *testing.T) {
	w := newLeaderlessWorld(t)
	st := w.store
	const jobs, rounds = 600, 3
	var writers sync.WaitGroup
	for range 8 {
		writers.Go(func() {
			for range jobs / 8 {
				if err := storetest.PutJob(w.ctx, st, storetest.Job("acme", "k", proto.ModeAsync)); err != nil {
					t.Error(err)
				}
			}
		})
	}
	writers.Wait()
	for round := range rounds {
		stop := w.dispatcher(fmt.Sprintf("d%d", round))
		if err := st.Jobs.Remove(w.ctx, store.RemovedJobs{Below: uint64((round + 1) * jobs / rounds)}); err != nil {
			t.Fatal(err)
		}
		w.eventually("the dispatcher leads", func() bool {
			_, err := w.queue.Stats(w.ctx)
			return err == nil
		})
		stop()
	}
}

func TestServerRestart(t *testing.T) {
	t.Parallel()
	s := storetest.NewRestartable(t)
	st := storetest.Open(t, s)
	w := &world{t: t, ctx: storetest.Context(t), server: s, store: st, queue: &queue.Queue{Store: st}}
	w.dispatcher("d")
	h := w.worker("w", 1)
	before := w.submit(storetest.Job("acme", "k", proto.ModeAsync))
	s.Restart()
	after := storetest.Job("acme", "k", proto.ModeAsync)
	w.eventually("a new job is accepted", func() bool { return w.queue.Submit(w.ctx, after) == nil })
	for _, id := range []proto.TraceID{before, after.TraceID} {
		l := w.take(h)
		w.claim(l)
		if _, err := l.Finish(w.ctx, outcome("")); err != nil || l.Job().TraceID != id {
			t.Fatalf("ran %s, %v", l.Job().TraceID, err)
		}
	}
}

// The preferred worker may have the home in its cache. The job does not wait for it.
func TestPreferredWorkerGetsTheJobIfFree(t *testing.T) {
	w := newWorld(t)
	python, threads := queue.CapabilityLanguage(proto.Python), queue.CapabilityThreads
	taken := map[string]<-chan *queue.Lease{}
	for name, tt := range map[string]struct {
		slots        int
		capabilities []string
	}{"has": {1, []string{python, threads}}, "large": {4, []string{threads, python}}, "unable": {5, []string{python}}} {
		h := w.run(w.newSlots(w.server, name, tt.slots, tt.capabilities...))
		leases := make(chan *queue.Lease, tt.slots)
		for range tt.slots {
			go func() {
				if l, err := h.Take(w.ctx); err == nil {
					leases <- l
				}
			}()
		}
		taken[name] = leases
	}
	w.eventually("all slots are free", func() bool {
		st, err := w.queue.Stats(w.ctx)
		return err == nil && st.FreeSlots == 10
	})
	for i, tt := range []struct{ prefer, to string }{
		{"has", "has"}, {"has", "large"}, {"unable", "large"}, {"gone", "large"}, {"", "large"},
	} {
		job := storetest.Job("acme", "k", proto.ModeInline)
		job.ThreadID, job.Prefer = "t", tt.prefer
		id := w.submit(job)
		select {
		case l := <-taken[tt.to]:
			if l.Job().TraceID != id {
				t.Fatalf("%d: %s was assigned", i, l.Job().TraceID)
			}
		case <-w.ctx.Done():
			t.Fatalf("%d: %s does not get the job", i, tt.to)
		}
	}
}
