package submit_test

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/nats-io/nats.go"

	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/scheduler/queue"
	"github.com/bullpen-run/bullpen/scheduler/registry"
	"github.com/bullpen-run/bullpen/scheduler/store"
	"github.com/bullpen-run/bullpen/scheduler/storetest"
	"github.com/bullpen-run/bullpen/scheduler/submit"
)

// keptBindings is the store of a process that dies, or loses its connection, before it releases a key.
type keptBindings struct{ *registry.Bindings }

func (keptBindings) Release(context.Context, string, string, string, proto.Binding) error {
	return errors.New("the store does not answer")
}

// An execution that the queue did not confirm was not accepted, although its idempotency key is still
// bound to it and it has a record. The leader of schedules would lose its tick otherwise. An execution
// that waited until its deadline was accepted.
func TestUnconfirmedExecutionIsNotAccepted(t *testing.T) {
	st, ctx := storetest.Open(t, storetest.Server(t)), storetest.Context(t)
	sub, err := st.Conn.Subscribe(store.SubmitSubject, func(*nats.Msg) {}) // a dispatcher that does not answer
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = sub.Unsubscribe() }()
	q := &queue.Queue{Store: st}
	s := &submit.Submitter{Jobs: q, Bindings: keptBindings{&registry.Bindings{Store: st}}, Log: storetest.Log(t)}
	job := storetest.Job("acme", "k", proto.ModeAsync)
	if _, err := s.Submit(ctx, &proto.Submission{
		Job: job, IdempotencyKey: "unconfirmed", BodyHash: "h", WaitUntil: time.Now().Add(time.Minute),
	}); err == nil {
		t.Fatal("it was accepted")
	}
	if rec, err := q.Lookup(ctx, job.Org, job.TraceID); err != nil || !rec.NotConfirmed() {
		t.Fatalf("%+v, %v", rec, err)
	}
	if id, err := s.Accepted(ctx, "acme", "k", "unconfirmed"); !errors.Is(err, proto.ErrNotFound) {
		t.Errorf("%s counts as accepted, %v", id, err)
	}

	late := storetest.Job("acme", "k", proto.ModeAsync)
	late.QueueDeadline = time.Now().Add(-time.Second)
	if _, _, err := s.Bindings.Bind(ctx, "acme", "k", "late", proto.Binding{
		Trace: late.TraceID, BodyHash: "h", BoundAt: time.Now(),
	}); err != nil {
		t.Fatal(err)
	}
	if err := q.Abandon(ctx, &late.Meta, "No slot was free for it."); err != nil {
		t.Fatal(err)
	}
	if id, err := s.Accepted(ctx, "acme", "k", "late"); err != nil || id != late.TraceID {
		t.Errorf("the one that waited: %s, %v", id, err)
	}
}
