package batches_test

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/scheduler/batches"
	"github.com/bullpen-run/bullpen/scheduler/deliveries"
	"github.com/bullpen-run/bullpen/scheduler/storetest"
)

func TestBatchRunsToItsEnd(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.fails["a7"] = true
	p := w.process("p")
	b := w.create(p, "a", 700, func(b *proto.Batch) { b.MaxParallel, b.WebhookURL = 3, "https://example.com/" })
	s := w.untilStatus(p, b, proto.BatchCompleted)
	w.checkOnce(700)
	if want := (proto.BatchCounts{Total: 700, Succeeded: 699, Failed: 1}); s.Counts != want {
		t.Errorf("counts %+v, want %+v", s.Counts, want)
	}
	if w.most > 3 {
		t.Errorf("%d at a time", w.most)
	}
	d, err := (&deliveries.Store{Store: w.st}).Delivery(w.ctx, "acme", proto.BatchDeliveryTrace(b))
	if err != nil || !strings.Contains(string(d.Body), `"event":"batch.completed","batch_id":"`+b.ID+`"`) {
		t.Errorf("delivery %+v, %v", d, err)
	}

	// A retry runs the failed item again, and sends a webhook of its own.
	w.set(func() { clear(w.fails); w.order = nil })
	w.change(p, b, func(b *proto.Batch) { b.Retries++ })
	if s := w.untilStatus(p, b, proto.BatchCompleted); s.Counts.Succeeded != 700 || len(w.order) != 1 ||
		w.order[0] != "a7" {
		t.Errorf("counts %+v, ran %q", s.Counts, w.order)
	}
	items, err := p.Items(w.ctx, b.Org, b.ID)
	if err != nil || items.Round(7) != 1 || items.Round(8) != 0 {
		t.Errorf("rounds of items %v", err)
	}
	b.Retries = 1
	if _, err := (&deliveries.Store{Store: w.st}).Delivery(w.ctx, "acme", proto.BatchDeliveryTrace(b)); err != nil {
		t.Error(err)
	}

	if err := p.Remove(w.ctx, "other", b.ID); !errors.Is(err, proto.ErrNotFound) {
		t.Errorf("removed for another organisation: %v", err)
	}
	if err := p.Remove(w.ctx, b.Org, b.ID); err != nil || len(w.blobs.stored) != 0 {
		t.Errorf("%d blobs stay after the removal: %v", len(w.blobs.stored), err)
	}
}

// The clock of the gateway that accepted a batch may differ by days from the engine's, and may have
// been set since. The batch runs to its end, and is kept from then on.
func TestBatchOfAnotherClock(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.held["past0"] = true
	p := w.process("p")
	var made []*proto.Batch
	for name, ahead := range map[string]time.Duration{"past": -48 * time.Hour, "future": 48 * time.Hour} {
		b := w.create(p, name, 20, func(b *proto.Batch) { b.CreatedAt = b.CreatedAt.Add(ahead) })
		made = append(made, b)
		w.until(p, b, "its items have ended", func(_ *proto.Batch, s *proto.BatchState) bool {
			return s.Counts.Succeeded >= 19
		})
	}
	p.stop()
	p = w.process("next")
	for id := range w.submitted {
		if rec, _, err := w.st.Records.Get(w.ctx, "acme", id); err == nil && !rec.Status.Terminal() {
			w.release(id)
		}
	}
	for _, b := range made {
		s := w.untilStatus(p, b, proto.BatchCompleted)
		if s.Counts.Succeeded != 20 || s.Rate < 0 || time.Since(s.EndedAt) < 0 || time.Since(s.EndedAt) > time.Hour {
			t.Errorf("%+v", s)
		}
	}
	w.checkOnce(40)
}

// Engines end and begin while a batch runs, and submissions have every kind of answer. Each item
// runs once all the same.
func TestNoItemIsLostOrDoubled(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	random := rand.New(rand.NewPCG(1, 2))
	lost := errors.New("no answer")
	w.answer = func(string) (string, bool, error) {
		w.mu.Lock()
		n := random.IntN(12)
		w.mu.Unlock()
		switch n {
		case 0:
			return "", false, &proto.Rejection{Reason: proto.RejectedQueueFull}
		case 1:
			return "", true, lost // accepted, and the answer is lost
		case 2:
			return "", false, lost
		case 3:
			return "", false, &proto.BusyError{}
		default:
			return "", true, nil
		}
	}
	keep := w.process("keep") // so that the batch can be read
	b := w.create(keep, "a", 300, nil)
	keep.stop()
	for i := 0; ; i++ {
		first, second := w.process(fmt.Sprint("first", i)), w.process(fmt.Sprint("second", i))
		least := min(300, (i+1)*40)
		w.until(second, b, "it goes on", func(_ *proto.Batch, s *proto.BatchState) bool { return s.Counts.Ended() >= least })
		first.stop()
		if least == 300 {
			w.untilStatus(second, b, proto.BatchCompleted)
			second.stop()
			break
		}
		second.stop()
	}
	w.checkOnce(300)
}

func TestPauseAndCancel(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	for i := range 3 {
		w.held[fmt.Sprint("a", i)] = true
	}
	p := w.process("p")
	b := w.create(p, "a", 50, func(b *proto.Batch) { b.MaxParallel = 3 })
	running := func(n int) func(*proto.Batch, *proto.BatchState) bool {
		return func(_ *proto.Batch, s *proto.BatchState) bool { return s.Counts.Running == n }
	}
	w.until(p, b, "three run", running(3))
	w.change(p, b, func(b *proto.Batch) { b.Paused = true })
	other := w.create(p, "b", 5, nil) // ends after the engine has seen the pause
	w.untilStatus(p, other, proto.BatchCompleted)
	w.release(b.ItemTrace(0, 0))
	w.until(p, b, "two run", running(2))
	if got := w.untilStatus(p, b, proto.BatchPaused).Counts; got.Waiting != 47 {
		t.Errorf("paused with %+v", got)
	}
	w.change(p, b, func(b *proto.Batch) { b.Paused = false })
	w.until(p, b, "it goes on", func(_ *proto.Batch, s *proto.BatchState) bool { return s.Counts.Succeeded >= 2 })
	w.change(p, b, func(b *proto.Batch) { b.Cancelled = true })
	s := w.untilStatus(p, b, proto.BatchCancelled)
	if s.Counts.Cancelled < 2 || s.Counts.Ended() != 50 {
		t.Errorf("cancelled with %+v", s.Counts)
	}
	w.set(func() { clear(w.held) })
	w.change(p, b, func(b *proto.Batch) { b.Cancelled, b.RetryCancelled, b.Retries = false, true, 1 })
	if s := w.untilStatus(p, b, proto.BatchCompleted); s.Counts.Succeeded != 50 {
		t.Errorf("after the retry: %+v", s.Counts)
	}
}

func TestStoppedBatches(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	p := w.process("p")
	w.fails["a3"] = true
	b := w.create(p, "a", 50, func(b *proto.Batch) { b.MaxParallel, b.StopOnFailure = 1, true })
	if s := w.untilStatus(p, b, proto.BatchFailed); s.Counts != (proto.BatchCounts{
		Total: 50, Succeeded: 3, Failed: 1, Cancelled: 46,
	}) ||
		s.Reason != "Item 3 failed." {
		t.Errorf("after a failure: %+v", s)
	}
	w.set(func() {
		w.answer = func(string) (string, bool, error) { return "the key is revoked", false, nil }
	})
	b = w.create(p, "r", 5, nil)
	if s := w.untilStatus(p, b, proto.BatchFailed); s.Counts.Cancelled != 5 ||
		!strings.HasSuffix(s.Reason, "cannot be submitted: the key is revoked") {
		t.Errorf("after a refusal: %+v", s)
	}
	w.set(func() { w.answer = nil; w.blobs.stored = map[string][]byte{} })
	w.change(p, b, func(b *proto.Batch) { b.RetryCancelled, b.Retries = true, 1 })
	w.until(p, b, "nothing can be read", func(b *proto.Batch, s *proto.BatchState) bool {
		return b.Finished(s) && s.Retries == 1 && s.Counts.Cancelled == 5
	})
}

// A batch that expires ends with what has ended by then. Processes that die in the middle change
// nothing about that, and neither does the other batches for which it may be waiting.
func TestExpiredBatches(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	expire := func(b *proto.Batch) { b.ExpiresAt = time.Now() }
	later := func(b *proto.Batch) { b.ExpiresAt = time.Now().Add(time.Hour) }
	done := func(n int) func(*proto.Batch, *proto.BatchState) bool {
		return func(_ *proto.Batch, s *proto.BatchState) bool {
			return s.Counts.Succeeded == n && s.Counts.Running == 1
		}
	}
	stopped := func(why proto.BatchStop) func(*proto.Batch, *proto.BatchState) bool {
		return func(_ *proto.Batch, s *proto.BatchState) bool {
			return s.Stopped == why && s.Counts.Waiting == 0 && s.EndedAt.IsZero()
		}
	}
	held := func(name string, n int) func(*proto.Batch) {
		w.set(func() { w.held[fmt.Sprint(name, n)] = true })
		return func(b *proto.Batch) { later(b); b.MaxParallel = 1 }
	}
	ended := func(p *process, b *proto.Batch, why proto.BatchStop, want proto.BatchCounts) {
		t.Helper()
		if s := w.untilStatus(p, b, proto.BatchCancelled); s.Stopped != why || s.Counts != want {
			t.Errorf("%s: %+v, want %+v", why, s, want)
		}
	}

	// The process that knows of the expiry dies before it has ended the item that runs.
	p := w.process("first")
	early := w.create(p, "early", 2, later)
	w.untilStatus(p, early, proto.BatchCompleted)
	killed := w.create(p, "a", 50, held("a", 3))
	w.until(p, killed, "one runs", done(3))
	w.set(func() { w.stuck = true })
	w.change(p, killed, expire)
	w.until(p, killed, "it is stopped", stopped(proto.StopExpired))
	user := w.create(p, "b", 50, held("b", 2)) // cancelled by its user before
	w.until(p, user, "one runs", done(2))
	w.change(p, user, func(b *proto.Batch) { b.Cancelled = true })
	w.until(p, user, "it is stopped", stopped(proto.StopCancelled))
	w.change(p, user, expire)
	w.change(p, killed, func(b *proto.Batch) { b.Cancelled = true }) // too late
	down := w.create(p, "c", 50, held("c", 4))                       // expires while no process runs
	w.until(p, down, "one runs", done(4))
	p.stop()
	w.set(func() { w.stuck = false })
	w.change(p, down, expire)
	w.change(p, early, expire)
	p = w.process("second")
	ended(p, killed, proto.StopExpired, proto.BatchCounts{Total: 50, Succeeded: 3, Cancelled: 47})
	ended(p, user, proto.StopCancelled, proto.BatchCounts{Total: 50, Succeeded: 2, Cancelled: 48})
	ended(p, down, proto.StopExpired, proto.BatchCounts{Total: 50, Succeeded: 4, Cancelled: 46})

	// A failure stays the reason. The item that has started goes on until the expiry.
	w.set(func() { w.fails["f1"] = true })
	failed := w.create(p, "f", 5, func(b *proto.Batch) { held("f", 0)(b); b.StopOnFailure, b.MaxParallel = true, 2 })
	w.until(p, failed, "it is stopped", stopped(proto.StopFailed))
	w.change(p, failed, expire)
	if s := w.untilStatus(p, failed, proto.BatchFailed); s.Reason != "Item 1 failed." ||
		s.Counts != (proto.BatchCounts{Total: 5, Failed: 1, Cancelled: 4}) {
		t.Errorf("%+v", s)
	}

	// Others run, and one is paused.
	for i := range 16 {
		b := w.create(p, fmt.Sprint("front", i, "-"), 1, held(fmt.Sprint("front", i, "-"), 0))
		w.until(p, b, "it runs", done(0))
	}
	behind := w.create(p, "behind", 5, later)
	w.change(p, behind, expire)
	ended(p, behind, proto.StopExpired, proto.BatchCounts{Total: 5, Cancelled: 5})
	paused := w.create(p, "paused", 5, func(b *proto.Batch) { later(b); b.Paused = true })
	w.change(p, paused, expire)
	ended(p, paused, proto.StopExpired, proto.BatchCounts{Total: 5, Cancelled: 5})
	if found, err := p.Get(w.ctx, "acme", early.ID); err != nil ||
		found.Batch.Status(&found.State) != proto.BatchCompleted {
		t.Errorf("one that had ended before: %+v, %v", found, err)
	}
}

// A batch of requests to an API is gone for its clients once they remove it. The runs of its items are
// removed after that, also if the process dies in the middle.
func TestRemovedBatchRemovesItsRuns(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	p := w.process("first")
	b := w.create(p, "a", 40, func(b *proto.Batch) { b.API = "anthropic" })
	w.untilStatus(p, b, proto.BatchCompleted)
	w.set(func() { w.keeps = true })
	if err := p.Remove(w.ctx, "acme", b.ID); err != nil {
		t.Fatal(err)
	}
	_, errGet := p.Get(w.ctx, "acme", b.ID)
	_, errChange := p.Change(w.ctx, "acme", b.ID, func(*proto.Batch, *proto.BatchState) error { return nil })
	_, errItems := p.Items(w.ctx, "acme", b.ID)
	for _, err := range []error{errGet, errChange, errItems, p.Remove(w.ctx, "acme", b.ID)} {
		if !errors.Is(err, proto.ErrNotFound) {
			t.Errorf("after the removal: %v", err)
		}
	}
	w.eventually("a run is removed", func() bool { return len(w.removed) > 0 })
	p.stop()
	w.set(func() { w.keeps = false })
	if len(w.removed) == 40 || len(w.blobs.stored) == 0 {
		t.Errorf("%d runs are removed, %d blobs are there", len(w.removed), len(w.blobs.stored))
	}
	p = w.process("second")
	if list, _ := p.Page("acme", "", -1, nil); len(list) != 0 {
		t.Errorf("listed: %+v", list)
	}
	w.eventually("all runs are removed", func() bool { return len(w.removed) == 40 })
	w.eventually("the batch is removed", func() bool {
		w.blobs.mu.Lock()
		defer w.blobs.mu.Unlock()
		_, err := w.st.Batches.Get(w.ctx, "def.acme."+b.ID)
		return errors.Is(err, jetstream.ErrKeyNotFound) && len(w.blobs.stored) == 0
	})
}

// A batch that was removed is created again under its id. What a process that died during the
// removal left of it means nothing.
func TestRemovedBatchIsCreatedAgain(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	p := w.process("p")
	id := func(b *proto.Batch) { b.ID = proto.NewBatchID("acme", "key_1", "idempotency key") }
	b := w.create(p, "a", 10, id)
	w.untilStatus(p, b, proto.BatchCompleted)
	if err := w.st.Batches.Purge(w.ctx, "def.acme."+b.ID); err != nil {
		t.Fatal(err)
	}
	again := w.create(p, "b", 10, id)
	if again.ID != b.ID {
		t.Fatal("the ids differ")
	}
	w.untilStatus(p, again, proto.BatchCompleted)
	w.checkOnce(20)
}

// Batches of a higher priority go first. The others take turns.
func TestPriority(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.concurrent = 2 // one item of a batch at a time
	for i := range 3 {
		w.held[fmt.Sprint("hold", i)] = true
	}
	p := w.process("p")
	hold := w.create(p, "hold", 1, func(b *proto.Batch) { b.Priority = 9 })
	w.until(p, hold, "it runs", func(_ *proto.Batch, s *proto.BatchState) bool { return s.Counts.Running == 1 })
	low := w.create(p, "low", 20, nil)
	high := w.create(p, "high", 20, func(b *proto.Batch) { b.Priority = 5 })
	w.release(hold.ItemTrace(0, 0))
	w.untilStatus(p, high, proto.BatchCompleted)
	w.untilStatus(p, low, proto.BatchCompleted)
	lastHigh := slices.Index(w.order, "high19")
	before := 0
	for _, name := range w.order[:lastHigh] {
		if strings.HasPrefix(name, "low") {
			before++
		}
	}
	if before > 3 { // that the engine had admitted before it knew of the other batch
		t.Errorf("%d items of the low priority ran before the last of the high one: %q", before, w.order)
	}
}

// An organisation with more batches than may run, whose submissions are not answered, does not keep the batch
// of another one waiting.
func TestBatchesLeaveRoom(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	submitted, answered := make(chan struct{}, 100), make(chan struct{})
	answer := sync.OnceFunc(func() { close(answered) })
	w.answer = func(item string) (string, bool, error) {
		if strings.HasPrefix(item, "slow") {
			submitted <- struct{}{}
			<-answered
		}
		return "", true, nil
	}
	p := w.process("p")
	t.Cleanup(answer)
	var slow []*proto.Batch
	for i := range 20 {
		slow = append(slow, w.create(p, fmt.Sprint("slow", i, "-"), 5, func(b *proto.Batch) { b.Priority = 9 }))
	}
	for range 16 { // as many as are submitted at the same time for one organisation
		select {
		case <-submitted:
		case <-w.ctx.Done():
			t.Fatal("the items of the first batches are not submitted")
		}
	}
	w.untilStatus(p, w.create(p, "other", 100, func(b *proto.Batch) { b.Org = "other" }), proto.BatchCompleted)
	answer()
	for _, b := range slow {
		w.untilStatus(p, b, proto.BatchCompleted)
	}
	w.checkOnce(200)
}

// Two gateways that store batches at the same time do not exceed the limits of an organisation together: of
// their number, and of what they store.
func TestLimitsOfTwoGateways(t *testing.T) {
	for name, c := range map[string]struct {
		batches int
		stored  int64
	}{"number": {proto.MaxBatches - 3, 1}, "size": {1, proto.MaxBatchStored - 3500}} {
		t.Run(name, func(t *testing.T) {
			w, server := newWorld(t), storetest.Server(t)
			w.st = storetest.Open(t, server)
			batch := func(id string, stored int64) *proto.Batch {
				b := &proto.Batch{ID: id, Org: "acme", Key: "key_1", Total: 1, CreatedAt: time.Now().UTC()}
				b.Content.Index, b.Content.Stored = proto.Blob{Key: "batches/acme/" + id + "/1"}, stored
				return b
			}
			storetest.Fill(t, w.st, w.st.Batches, c.batches, func(i int) (string, any) {
				b := batch(fmt.Sprint("old_", i), c.stored)
				return "def.acme." + b.ID, b
			})
			create := func() func(int) error {
				p, err := batches.Open(w.ctx, storetest.Open(t, server), w.blobs, storetest.Log(t))
				if err != nil {
					t.Fatal(err)
				}
				ctx, cancel := context.WithCancel(w.ctx)
				var work sync.WaitGroup
				work.Go(func() { _ = p.Run(ctx) })
				t.Cleanup(func() { cancel(); work.Wait() })
				return func(i int) error {
					_, _, err := p.Create(w.ctx, batch(fmt.Sprint("new_", i), 1000))
					return err
				}
			}
			refused := func(err error) bool { _, ok := errors.AsType[*proto.QuotaError](err); return ok }
			if n := storetest.Race(t, 10, refused, create(), create()); n != 3 {
				t.Errorf("%d batches were stored, 3 were left", n)
			}
		})
	}
}
