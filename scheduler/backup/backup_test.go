package backup_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"go.uber.org/goleak"

	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/scheduler/backup"
	"github.com/bullpen-run/bullpen/scheduler/deliveries"
	"github.com/bullpen-run/bullpen/scheduler/events"
	"github.com/bullpen-run/bullpen/scheduler/natsembed"
	"github.com/bullpen-run/bullpen/scheduler/queue"
	"github.com/bullpen-run/bullpen/scheduler/store"
	"github.com/bullpen-run/bullpen/scheduler/storetest"
	"github.com/bullpen-run/bullpen/scheduler/threads"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// patience bounds how long a test waits for an event. It is not a performance goal.
const patience = 3 * time.Minute

const (
	slots   = 8
	burst   = 7  // jobs that a client submits before it waits for one
	between = 40 // jobs that are accepted between two backups
)

var config = store.Config{Replicas: 1, Retention: time.Hour}

// world is a queue with a dispatcher, and a worker that runs no programs but reports results.
type world struct {
	t     *testing.T
	ctx   context.Context
	store *store.Store
	queue *queue.Queue
	all   sync.WaitGroup
	stop  context.CancelFunc
}

// start runs what is queued at s until it is stopped.
func start(t *testing.T, s *natsembed.Server) *world {
	st := storetest.Open(t, s)
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	w := &world{t: t, ctx: ctx, store: st, queue: &queue.Queue{Store: st}}
	w.stop = func() { cancel(); w.all.Wait() }
	t.Cleanup(w.stop)
	d := &queue.Dispatcher{Store: st, Instance: "first", Log: storetest.Log(t)}
	taker := &queue.Slots{
		Store: storetest.Open(t, s), Worker: "worker", Total: slots,
		Capabilities: []string{queue.CapabilityLanguage(proto.Python), queue.CapabilityThreads}, Log: storetest.Log(t),
	}
	w.all.Go(func() { _ = d.Run(ctx) })
	w.all.Go(func() { _ = taker.Run(ctx) })
	for range slots {
		w.all.Go(func() {
			for ctx.Err() == nil {
				if l, err := taker.Take(ctx); err == nil {
					w.run(l)
				}
			}
		})
	}
	return w
}

// run handles a job like a worker: the output names the attempt, and a thread gets a version.
func (w *world) run(l *queue.Lease) {
	defer l.Release()
	_, base, err := l.Claim(w.ctx)
	if err != nil {
		return
	}
	job := l.Job()
	out := events.NewWriter(w.ctx, w.store, job.Org, job.TraceID, l.Attempt(), base, 16<<20)
	_, _ = fmt.Fprintf(out.Stream(proto.Stdout), "output of attempt %d\n", l.Attempt())
	last, _ := out.Close()
	r := proto.Exited(0)
	r.Stdout = job.Code
	e := queue.Outcome{Result: r, LastSeq: last}
	if job.ThreadID != "" {
		head, err := (&threads.Threads{Store: w.store}).Get(w.ctx, job.Org, job.ThreadID)
		if err != nil {
			return
		}
		e.Commit = &proto.Commit{
			Fence:   head.Fence,
			Version: proto.Version{Number: head.Number() + 1, Trace: job.TraceID, CreatedAt: time.Now().UTC()},
		}
	}
	_, _ = l.Finish(w.ctx, e)
}

// accepted records what a client knows of executions.
type accepted struct {
	mu  sync.Mutex
	ids []proto.TraceID
}

func (a *accepted) add(id proto.TraceID) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.ids = append(a.ids, id)
}

func (a *accepted) now() []proto.TraceID {
	a.mu.Lock()
	defer a.mu.Unlock()
	return slices.Clone(a.ids)
}

// submit submits a job per turn, of all kinds: with webhooks, in threads, large ones.
func (w *world) submit(n int, turns <-chan struct{}, to *accepted) {
	random := rand.New(rand.NewPCG(1, uint64(n)))
	heads := &threads.Threads{Store: w.store}
	for i := 0; ; i++ {
		select {
		case <-turns:
		case <-w.ctx.Done():
			return
		}
		job := storetest.Job("acme", "k", proto.ModeAsync)
		job.MaxAttempts = 1 + i%2
		if i%3 == 0 {
			job.WebhookURL = "https://example.com/"
		}
		if i%10 == 0 {
			job.Code = strings.Repeat("large ", 173_000+random.IntN(100)) // stored apart, like that of its result
		}
		if i%4 == 1 {
			job.ThreadID = fmt.Sprintf("thread-%d", n)
			if _, _, err := heads.Lock(w.ctx, job.Org, job.ThreadID, job.TraceID); err != nil {
				continue // the thread's last execution has not ended
			}
		}
		if err := w.queue.Submit(w.ctx, job); err != nil {
			if w.ctx.Err() == nil {
				w.t.Error(err)
			}
			return
		}
		to.add(job.TraceID)
		if i%burst == 0 {
			_, _ = w.queue.Wait(w.ctx, job.Org, job.TraceID) // the error means that the test is over
		}
	}
}

// state returns the record of an execution.
func state(ctx context.Context, st *store.Store, id proto.TraceID) (*proto.Record, error) {
	return (&queue.Queue{Store: st}).Lookup(ctx, "acme", id)
}

// TestBackupDuringExecutions makes backups while executions begin and end, and restores each.
// Executions accepted before are in it, terminal ones are unchanged, nothing is inconsistent, and a
// worker finishes the rest.
func TestBackupDuringExecutions(t *testing.T) {
	w := start(t, storetest.Server(t))
	turns := make(chan struct{})
	var known accepted
	for n := range 6 {
		w.all.Go(func() { w.submit(n, turns, &known) })
	}
	backups := 2
	if testing.Short() {
		backups = 1
	}
	for range backups {
		for range between {
			select {
			case turns <- struct{}{}:
			case <-w.ctx.Done():
				t.Fatal("nothing is accepted")
			}
		}
		before := map[proto.TraceID]*proto.Record{}
		for _, id := range known.now() {
			rec, err := state(w.ctx, w.store, id)
			if err != nil {
				t.Fatal(err)
			}
			before[id] = rec
		}
		var file bytes.Buffer
		made := make(chan struct{})
		w.all.Go(func() { // meanwhile the work continues
			for range 3 * between {
				select {
				case turns <- struct{}{}:
				case <-made:
					return
				case <-w.ctx.Done():
					return
				}
			}
		})
		if err := (&backup.Maker{Store: w.store, Version: "test"}).Backup(w.ctx, &file); err != nil {
			t.Fatal(err)
		}
		close(made)
		t.Logf("%d executions known, a backup of %d bytes", len(before), file.Len())
		restored(t, &file, before)
	}
}

// restored restores a backup and checks the result.
func restored(t *testing.T, file *bytes.Buffer, before map[proto.TraceID]*proto.Record) {
	t.Helper()
	server := storetest.Server(t)
	if _, err := backup.Restore(t.Context(), store.Access{InProcess: server}, config, file, storetest.Log(t)); err != nil {
		t.Fatal(err)
	}
	st := storetest.Open(t, server)
	all := map[proto.TraceID]proto.Status{}
	if err := st.Records.Read(t.Context(), store.Range{}, func(m *store.Message) {
		all[idOf(m)] = proto.Status(m.Header.Get(store.HeaderStatus))
	}); err != nil {
		t.Fatal(err)
	}
	jobs := map[proto.TraceID]bool{}
	if err := st.Jobs.Read(t.Context(), store.Range{}, func(m *store.Message) {
		id := idOf(m)
		jobs[id] = true
		if _, ok := all[id]; !ok {
			all[id] = proto.StatusQueued
		}
	}); err != nil {
		t.Fatal(err)
	}
	for id, was := range before {
		now, err := state(t.Context(), st, id)
		if err != nil {
			t.Errorf("%s, which was %s before the backup: %v", id, was.Status, err)
			continue
		}
		if was.Status.Terminal() {
			if diff := cmp.Diff(was, now); diff != "" {
				t.Errorf("%s has changed:\n%s", id, diff)
			}
		}
	}
	for id, status := range all {
		if !status.Terminal() && !jobs[id] {
			t.Errorf("%s is %s and has no job: it never ends", id, status)
		}
	}
	consistent(t, st, all, jobs)

	w := start(t, server)
	for id := range all {
		rec, err := w.queue.Wait(w.ctx, "acme", id)
		if err != nil {
			t.Fatal(err)
		}
		if rec.Status != proto.StatusSuccess &&
			(rec.Result.ErrorCode == nil || *rec.Result.ErrorCode != string(proto.CodeWorkerLost)) {
			t.Errorf("%s ends as %s %+v", id, rec.Status, rec.Result)
		}
		oneOutput(t, w, rec)
	}
	w.delivered(all)
	w.stop()
}

func idOf(m *store.Message) proto.TraceID {
	return proto.TraceID(m.Subject[strings.LastIndexByte(m.Subject, '.')+1:])
}

// consistent checks that deliveries and versions belong to terminal executions, and none is
// missing.
func consistent(t *testing.T, st *store.Store, all map[proto.TraceID]proto.Status, jobs map[proto.TraceID]bool) {
	t.Helper()
	stored := map[proto.TraceID]bool{}
	if err := st.Deliveries.Read(t.Context(), store.Range{}, func(m *store.Message) {
		id := idOf(m)
		stored[id] = true
		if !all[id].Terminal() {
			t.Errorf("there is a delivery of %s, which is %q", id, all[id])
		}
	}); err != nil {
		t.Fatal(err)
	}
	versions := map[proto.TraceID]bool{}
	for n := range 6 {
		head, err := (&threads.Threads{Store: st}).Get(t.Context(), "acme", fmt.Sprintf("thread-%d", n))
		if errors.Is(err, proto.ErrNotFound) {
			continue
		}
		if err != nil {
			t.Fatal(err)
		}
		if head.Version == nil {
			continue
		}
		for _, v := range append(head.History, *head.Version) {
			versions[v.Trace] = true
			if !all[v.Trace].Terminal() {
				t.Errorf("version %d of %s is by %s, which is %q", v.Number, head.ID, v.Trace, all[v.Trace])
			}
		}
		if len(head.History)+1 < proto.KeptVersions {
			for id, status := range all {
				rec, err := state(t.Context(), st, id)
				if err == nil && status == proto.StatusSuccess && rec.ThreadID == head.ID && !versions[id] {
					t.Errorf("%s has succeeded, and its version of %s is not there", id, head.ID)
				}
			}
		}
	}
	for id, status := range all {
		rec, err := state(t.Context(), st, id)
		if err == nil && status.Terminal() && rec.WebhookURL != "" && !stored[id] && !jobs[id] {
			t.Errorf("%s has ended and has no delivery", id)
		}
	}
}

// oneOutput checks that an execution's events are numbered without gaps, and that no attempt
// published an event twice.
func oneOutput(t *testing.T, w *world, rec *proto.Record) {
	t.Helper()
	tail, err := (&events.Log{Store: w.store, Records: w.queue}).Follow(w.ctx, rec.Org, rec.TraceID, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer tail.Close()
	var text strings.Builder
	for next := int64(1); ; {
		batch, err := tail.Next(w.ctx)
		if err != nil {
			t.Fatalf("the events of %s (%s): %v", rec.TraceID, rec.Status, err)
		}
		if batch.First != next {
			t.Errorf("the events of %s continue at %d after %d", rec.TraceID, batch.First, next-1)
		}
		next = batch.Last + 1
		text.Write(batch.Lines)
		if batch.Result != nil {
			break
		}
	}
	for attempt := 1; attempt <= 2; attempt++ {
		if n := strings.Count(text.String(), fmt.Sprintf("output of attempt %d", attempt)); n > 1 {
			t.Errorf("attempt %d of %s has %d copies of one event", attempt, rec.TraceID, n)
		}
	}
}

// delivered waits until each execution with a webhook has its delivery.
func (w *world) delivered(all map[proto.TraceID]proto.Status) {
	w.t.Helper()
	for id := range all {
		rec, err := state(w.ctx, w.store, id)
		if err != nil {
			w.t.Fatal(err)
		}
		for rec.WebhookURL != "" {
			_, err := (&deliveries.Store{Store: w.store}).Delivery(w.ctx, "acme", id)
			if err == nil {
				break
			}
			if !errors.Is(err, proto.ErrNotFound) || w.ctx.Err() != nil {
				w.t.Fatalf("the delivery of %s: %v", id, err)
			}
		}
	}
}
