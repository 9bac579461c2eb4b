package submit_test

import (
	"context"
	"sync"
	"testing"
	"time"

	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/scheduler/queue"
	"github.com/bullpen-run/bullpen/scheduler/registry"
	"github.com/bullpen-run/bullpen/scheduler/storetest"
	"github.com/bullpen-run/bullpen/scheduler/submit"
	"github.com/bullpen-run/bullpen/scheduler/threads"
)

// stalledJobs is a queue whose Submit waits until it is released.
type stalledJobs struct {
	*queue.Queue
	reached, released chan struct{}
}

func (s stalledJobs) Submit(ctx context.Context, job *proto.Job) error {
	close(s.reached)
	<-s.released
	return s.Queue.Submit(ctx, job)
}

// earlierBindings dates bindings as a machine whose clock is behind.
type earlierBindings struct{ *registry.Bindings }

func (b earlierBindings) Bind(
	ctx context.Context, org, scope, key string, n proto.Binding,
) (proto.Binding, bool, error) {
	n.BoundAt = n.BoundAt.Add(-time.Minute)
	return b.Bindings.Bind(ctx, org, scope, key, n)
}

// A request looks abandoned because the clock of its machine is behind. Another request with its
// idempotency key takes the key over, and one of the two executions runs.
func TestTakeoverDespiteClockSkew(t *testing.T) {
	server, ctx := storetest.Server(t), storetest.Context(t)
	st := storetest.Open(t, server)
	var background sync.WaitGroup
	running, stop := context.WithCancel(ctx)
	t.Cleanup(func() { stop(); background.Wait() })
	dispatcher := &queue.Dispatcher{Store: storetest.Open(t, server), Instance: "d", Log: storetest.Log(t)}
	slots := &queue.Slots{
		Store: storetest.Open(t, server), Worker: "w", Total: 2,
		Capabilities: []string{queue.CapabilityLanguage(proto.Python), queue.CapabilityThreads},
		Log:          storetest.Log(t),
	}
	background.Go(func() { _ = dispatcher.Run(running) })
	background.Go(func() { _ = slots.Run(running) })
	q, bindings := &queue.Queue{Store: st}, &registry.Bindings{Store: st}
	submission := func() *proto.Submission {
		job := storetest.Job("acme", "k", proto.ModeAsync)
		job.ThreadID = "t"
		return &proto.Submission{Job: job, IdempotencyKey: "i", BodyHash: "h", WaitUntil: time.Now().Add(time.Minute)}
	}
	submitter := &submit.Submitter{
		Jobs: q, Bindings: bindings, Threads: &threads.Threads{Store: st},
		Log: storetest.Log(t),
	}
	late := *submitter
	stalled := stalledJobs{q, make(chan struct{}), make(chan struct{})}
	late.Jobs, late.Bindings = stalled, earlierBindings{bindings}

	first, second := submission(), submission()
	accepted := make(chan error, 1)
	go func() {
		_, err := late.Submit(ctx, first)
		accepted <- err
	}()
	<-stalled.reached // the key is bound and the thread is locked
	id, err := submitter.Submit(ctx, second)
	if err != nil || id != second.Job.TraceID {
		t.Fatalf("the second request: %s, %v", id, err)
	}
	close(stalled.released)
	if err := <-accepted; err != nil {
		t.Logf("the first request: %v", err)
	}
	l, err := slots.Take(ctx)
	if err != nil || l.Job().TraceID != second.Job.TraceID {
		t.Fatalf("%v was assigned, %v", l.Job().TraceID, err)
	}
	l.Release()
	rec, err := q.Wait(ctx, first.Job.Org, first.Job.TraceID)
	if err != nil || !rec.ExpiredInQueue() {
		t.Errorf("the first execution: %+v, %v", rec, err)
	}
}
