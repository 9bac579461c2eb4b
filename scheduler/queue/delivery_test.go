package queue_test

import (
	"context"
	"testing"
	"time"

	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/scheduler/deliveries"
	"github.com/bullpen-run/bullpen/scheduler/storetest"
)

const hook = "https://hooks.example.com/a"

// followDeliveries returns a channel with the stored deliveries.
func (w *world) followDeliveries() <-chan proto.DeliveryChange {
	changes := make(chan proto.DeliveryChange, 16)
	store := &deliveries.Store{Store: storetest.Open(w.t, w.server)}
	w.background(func(ctx context.Context) error {
		_ = store.Follow(ctx, func(c proto.DeliveryChange) { changes <- c }, func() {}, func(err error) { w.t.Error(err) })
		return nil
	})
	return changes
}

func (w *world) nextDelivery(changes <-chan proto.DeliveryChange) proto.DeliveryChange {
	w.t.Helper()
	select {
	case c := <-changes:
		return c
	case <-w.ctx.Done():
		w.t.Fatal("no delivery")
		return proto.DeliveryChange{}
	}
}

func TestExecutionWithWebhookIsDelivered(t *testing.T) {
	w := newWorld(t)
	h := w.worker("w1", 4)
	changes := w.followDeliveries()
	for _, mode := range []proto.Mode{proto.ModeInline, proto.ModeStreaming, proto.ModeAsync} {
		for _, url := range []string{"", hook} {
			job := storetest.Job("acme", "k", mode)
			job.WebhookURL = url
			id := w.submit(job)
			l := w.take(h)
			w.claim(l)
			if _, err := l.Finish(w.ctx, outcome("hello")); err != nil {
				t.Fatal(err)
			}
			if mode != proto.ModeAsync || url == "" {
				continue
			}
			if c := w.nextDelivery(changes); c.TraceID != id || c.Org != "acme" || c.Due.IsZero() ||
				c.Origin != "https://hooks.example.com:443" {
				t.Errorf("%+v", c)
			}
		}
	}
	job := storetest.Job("acme", "k", proto.ModeAsync)
	job.WebhookURL, job.Language = hook, proto.Node
	id := w.submit(job)
	if _, err := w.queue.Cancel(w.ctx, "acme", id); err != nil {
		t.Fatal(err)
	}
	if c := w.nextDelivery(changes); c.TraceID != id {
		t.Errorf("cancelled in the queue: %+v", c)
	}
}

// The job stays until its delivery is stored, so that the next leader can store the delivery.
func TestMissingDeliveryIsStoredByTheNextLeader(t *testing.T) {
	w := newLeaderlessWorld(t)
	st := w.store
	job := storetest.Job("acme", "k", proto.ModeAsync)
	job.WebhookURL = hook
	if err := storetest.PutJob(w.ctx, st, job); err != nil {
		t.Fatal(err)
	}
	result, now := proto.Exited(0), time.Now()
	rec := &proto.Record{Meta: job.Meta, Status: proto.StatusSuccess, Attempt: 1, Result: &result, CompletedAt: &now}
	if _, err := st.Records.Put(w.ctx, rec, 0); err != nil {
		t.Fatal(err)
	}
	changes := w.followDeliveries()
	w.dispatcher("next")
	if c := w.nextDelivery(changes); c.TraceID != job.TraceID {
		t.Fatalf("%+v", c)
	}
	store := &deliveries.Store{Store: st}
	if d, err := store.Delivery(w.ctx, "acme", job.TraceID); err != nil || d.URL != hook || d.Key != "k" {
		t.Fatalf("%+v, %v", d, err)
	}
	for { // until the job is removed
		info, err := st.Jobs.Info(w.ctx)
		if err != nil {
			t.Fatal(err)
		}
		if info.State.Msgs == 0 {
			break
		}
	}
}
