package batches_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"iter"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/scheduler/batches"
	"github.com/bullpen-run/bullpen/scheduler/deliveries"
	"github.com/bullpen-run/bullpen/scheduler/store"
	"github.com/bullpen-run/bullpen/scheduler/storetest"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// blobs stores objects in memory.
type blobs struct {
	mu     sync.Mutex
	stored map[string][]byte
}

func (b *blobs) Put(_ context.Context, blob proto.Blob, content io.ReaderAt) error {
	body, err := io.ReadAll(io.NewSectionReader(content, 0, blob.Size))
	b.mu.Lock()
	defer b.mu.Unlock()
	b.stored[blob.Key] = body
	return err
}

func (b *blobs) Get(_ context.Context, blob proto.Blob) (io.ReadCloser, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	body, ok := b.stored[blob.Key]
	if !ok {
		return nil, proto.ErrNotFound
	}
	return io.NopCloser(bytes.NewReader(body)), nil
}

func (b *blobs) Delete(_ context.Context, key string) error {
	b.mu.Lock()
	defer b.mu.Unlock()
	delete(b.stored, key)
	return nil
}

func (b *blobs) List(context.Context, string) iter.Seq2[proto.BlobEntry, error] {
	return func(func(proto.BlobEntry, error) bool) {}
}

// world has a JetStream, and executions whose records are in it.
type world struct {
	t     *testing.T
	ctx   context.Context
	st    *store.Store
	blobs *blobs

	mu        sync.Mutex
	submitted map[proto.TraceID]int // accepted submissions
	order     []string              // items in the order of their first submission
	active    int
	most      int
	held      map[string]bool // items that do not end
	fails     map[string]bool // items that fail
	stuck     bool            // requests to end an item fail
	keeps     bool            // runs are not removed, except those of the first items
	removed   map[proto.TraceID]bool
	// answer, if not nil, answers a submission in place of accepting it. If accept is true, the
	// submission is accepted all the same.
	answer     func(item string) (refused string, accept bool, err error)
	concurrent int
}

func newWorld(t *testing.T) *world {
	t.Helper()
	w := &world{
		t: t, ctx: storetest.Context(t), st: storetest.Open(t, storetest.Server(t)),
		blobs:     &blobs{stored: map[string][]byte{}},
		submitted: map[proto.TraceID]int{}, held: map[string]bool{}, fails: map[string]bool{},
		removed: map[proto.TraceID]bool{}, concurrent: 100,
	}
	return w
}

func (w *world) set(f func()) {
	w.mu.Lock()
	defer w.mu.Unlock()
	f()
}

func (w *world) ItemsOf(*proto.Batch) batches.ItemExecutions { return w }

func (w *world) OpenBatch(b *proto.Batch, shared []byte) (batches.SubmitItem, error) {
	return func(ctx context.Context, item []byte, number int, id proto.TraceID) (string, error) {
		name := strings.Trim(string(item), `"`)
		if shared != nil {
			name = strings.Trim(string(shared), `"`) + name
		}
		w.mu.Lock()
		answer := w.answer
		w.mu.Unlock()
		var refused string
		var err error
		if answer != nil {
			var accept bool
			if refused, accept, err = answer(name); !accept {
				return refused, err
			}
		}
		m := proto.Meta{
			TraceID: id, Org: b.Org, Key: b.Key, Mode: proto.ModeAsync, MaxAttempts: 1, Batch: b.ID,
			BatchIndex: number, CreatedAt: time.Now(), QueueDeadline: time.Now().Add(time.Hour),
		}
		w.accept(ctx, &m, name)
		return "", err
	}, nil
}

// accept stores the record of a running execution, and ends it unless it is held.
func (w *world) accept(ctx context.Context, m *proto.Meta, name string) {
	w.mu.Lock()
	w.submitted[m.TraceID]++
	first, held, fails := w.submitted[m.TraceID] == 1, w.held[name], w.fails[name]
	if first {
		w.order = append(w.order, name)
		w.active++
		w.most = max(w.most, w.active)
	}
	w.mu.Unlock()
	if !first {
		return
	}
	ctx = context.WithoutCancel(ctx)
	now := time.Now()
	rec := &proto.Record{Meta: *m, Status: proto.StatusRunning, Attempt: 1, Worker: "w", StartedAt: &now}
	seq, err := w.st.Records.Put(ctx, rec, 0)
	if err != nil {
		w.t.Error(err)
		return
	}
	if !held {
		w.end(ctx, rec, seq, proto.Exited(map[bool]int{true: 1}[fails]))
	}
}

func (w *world) end(ctx context.Context, rec *proto.Record, seq uint64, result proto.Result) {
	now := time.Now()
	done := *rec
	done.Status, done.Result, done.CompletedAt = result.Status(), &result, &now
	w.set(func() { w.active-- })
	if _, err := w.st.Records.Put(ctx, &done, seq); err != nil && !store.IsConflict(err) {
		w.t.Error(err)
	}
}

// release ends a held item.
func (w *world) release(id proto.TraceID) {
	w.t.Helper()
	rec, seq, err := w.st.Records.Get(w.ctx, "acme", id)
	if err != nil {
		w.t.Fatal(err)
	}
	w.end(w.ctx, rec, seq, proto.Exited(0))
}

func (w *world) RemoveRun(ctx context.Context, _ *proto.Batch, id proto.TraceID) error {
	rec, _, err := w.st.Records.Get(ctx, "acme", id)
	if err != nil {
		return err
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.keeps && rec.BatchIndex >= 3 { // there is no answer
		w.mu.Unlock()
		<-ctx.Done()
		w.mu.Lock()
		return ctx.Err()
	}
	w.removed[id] = true
	return nil
}

func (w *world) BatchLimits(context.Context, string) (concurrent, queued int) {
	return w.concurrent, 1000
}

func (w *world) Slots(context.Context) (int, error) { return 4, nil }

func (w *world) Lookup(ctx context.Context, id proto.TraceID) (*proto.Record, error) {
	rec, _, err := w.st.Records.Get(ctx, "acme", id)
	return rec, err
}

func (w *world) Cancel(ctx context.Context, id proto.TraceID) (*proto.Record, error) {
	var stuck bool
	if w.set(func() { stuck = w.stuck }); stuck {
		return nil, errors.New("no answer")
	}
	rec, seq, err := w.st.Records.Get(ctx, "acme", id)
	if err == nil && !rec.Status.Terminal() {
		w.end(ctx, rec, seq, proto.Cancelled())
	}
	return rec, err
}

func (w *world) Withdraw(ctx context.Context, id proto.TraceID, _ proto.Result) (*proto.Record, error) {
	return w.Lookup(ctx, id) // all are running
}

// process is a process with an engine.
type process struct {
	*batches.Batches
	stop func()
}

func (w *world) process(name string) *process {
	w.t.Helper()
	b, err := batches.Open(w.ctx, w.st, w.blobs, storetest.Log(w.t))
	if err != nil {
		w.t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(w.ctx)
	e := &batches.Runner{
		Batches: b, Executions: w, Deliveries: &deliveries.Store{Store: w.st}, Store: w.st, Retention: time.Hour,
		Instance: name, Log: storetest.Log(w.t),
	}
	var parts sync.WaitGroup
	parts.Go(func() { _ = b.Run(ctx) })
	parts.Go(func() { _ = e.Run(ctx) })
	p := &process{b, sync.OnceFunc(func() { cancel(); parts.Wait() })}
	w.t.Cleanup(p.stop)
	return p
}

// create creates a batch of items called name0, name1 and so on.
func (w *world) create(p *process, name string, n int, change func(*proto.Batch)) *proto.Batch {
	w.t.Helper()
	b := &proto.Batch{ID: proto.NewBatchID("acme", "key_1", ""), Org: "acme", Key: "key_1", CreatedAt: time.Now().UTC()}
	if change != nil {
		change(b)
	}
	u, err := p.Upload(b.Org)
	for i := range n {
		err = errors.Join(err, u.Add(w.ctx, fmt.Appendf(nil, `"%s%d"`, name, i)))
	}
	var errFinish error
	b.Content, b.Total, errFinish = u.Finish(w.ctx)
	if err := errors.Join(err, errFinish); err != nil {
		w.t.Fatal(err)
	}
	if _, created, err := p.Create(w.ctx, b); err != nil || !created {
		w.t.Fatal(created, err)
	}
	return b
}

// eventually waits until ok returns true, which is called with the lock.
func (w *world) eventually(what string, ok func() bool) {
	w.t.Helper()
	for done := false; !done; {
		w.set(func() { done = ok() })
		select {
		case <-w.ctx.Done():
			w.t.Fatal("not so: " + what)
		case <-time.After(10 * time.Millisecond):
		}
	}
}

// until waits until a batch is as ok says.
func (w *world) until(
	p *process, b *proto.Batch, what string, ok func(*proto.Batch, *proto.BatchState) bool,
) *proto.BatchState {
	w.t.Helper()
	for {
		found, err := p.Get(w.ctx, b.Org, b.ID)
		if err == nil && ok(&found.Batch, &found.State) {
			return &found.State
		}
		select {
		case <-w.ctx.Done():
			w.t.Fatalf("not so: %s: %s, %+v, %v", what, found.Batch.Status(&found.State), found.State, err)
		case <-time.After(10 * time.Millisecond):
		}
	}
}

func (w *world) untilStatus(p *process, b *proto.Batch, want proto.BatchStatus) *proto.BatchState {
	w.t.Helper()
	return w.until(p, b, string(want), func(b *proto.Batch, s *proto.BatchState) bool {
		return b.Status(s) == want && (s.EndedAt.IsZero() || s.Notified)
	})
}

func (w *world) change(p *process, b *proto.Batch, change func(*proto.Batch)) {
	w.t.Helper()
	_, err := p.Change(w.ctx, b.Org, b.ID, func(b *proto.Batch, _ *proto.BatchState) error {
		change(b)
		return nil
	})
	if err != nil {
		w.t.Fatal(err)
	}
}

// checkOnce checks that each submitted item ran once.
func (w *world) checkOnce(want int) {
	w.t.Helper()
	w.set(func() {
		names := slices.Clone(w.order)
		slices.Sort(names)
		if len(w.order) != want || len(slices.Compact(names)) != want {
			w.t.Errorf("%d executions of %d items, want one of each of %d", len(w.order), len(slices.Compact(names)), want)
		}
	})
}
