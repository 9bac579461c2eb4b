package activity_test

import (
	"context"
	"sync"
	"testing"

	"go.uber.org/goleak"

	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/scheduler/activity"
	"github.com/bullpen-run/bullpen/scheduler/store"
	"github.com/bullpen-run/bullpen/scheduler/storetest"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// follow runs a follower and returns the changes that it reports. It returns once the follower is
// current.
func follow(t *testing.T, st *store.Store) <-chan proto.Change {
	t.Helper()
	changes := make(chan proto.Change, 1000)
	f := &activity.Follower{
		Store: st, OnChange: func(c proto.Change) { changes <- c }, OnQueued: func(*proto.Meta) {},
		OnEnded: func(*proto.Record) {}, Log: storetest.Log(t),
	}
	ctx, cancel := context.WithCancel(context.Background())
	var work sync.WaitGroup
	work.Go(func() { _ = f.Run(ctx) })
	t.Cleanup(func() { cancel(); work.Wait() })
	for range 2 { // one for each stream
		expect(t, changes, proto.Change{Kind: proto.ChangedExecutions})
	}
	return changes
}

func expect(t *testing.T, changes <-chan proto.Change, want proto.Change) {
	t.Helper()
	select {
	case got := <-changes:
		if got != want {
			t.Fatalf("got %+v, want %+v", got, want)
		}
	case <-storetest.Context(t).Done():
		t.Fatalf("no change %+v", want)
	}
}

func change(job *proto.Job) proto.Change {
	return proto.Change{Kind: proto.ChangedExecutions, Org: job.Org, ID: string(job.TraceID)}
}

func put(t *testing.T, st *store.Store) *proto.Job {
	t.Helper()
	job := storetest.Job("acme", "k", proto.ModeAsync)
	if err := storetest.PutJob(storetest.Context(t), st, job); err != nil {
		t.Fatal(err)
	}
	return job
}

func write(t *testing.T, st *store.Store, job *proto.Job, status proto.Status, revision uint64) uint64 {
	t.Helper()
	rec := &proto.Record{Meta: job.Meta, Status: status, Attempt: 1, Worker: "w"}
	if status.Terminal() {
		rec.Result = new(proto.Exited(0))
	}
	seq, err := st.Records.Put(storetest.Context(t), rec, revision)
	if err != nil {
		t.Fatal(err)
	}
	return seq
}

// Every process sees the changes of executions, those of earlier times excepted.
func TestEveryProcessFollowsExecutions(t *testing.T) {
	server := storetest.Server(t)
	one, two := storetest.Open(t, server), storetest.Open(t, server)
	put(t, one)
	processes := []<-chan proto.Change{follow(t, one), follow(t, two)}
	job := put(t, one)
	for _, p := range processes {
		expect(t, p, change(job))
	}
	revision := write(t, one, job, proto.StatusRunning, 0)
	for _, p := range processes {
		expect(t, p, change(job))
	}
	write(t, two, job, proto.StatusSuccess, revision)
	for _, p := range processes {
		expect(t, p, change(job))
	}
}

// A follower that has lost the server goes on where it was.
func TestFollowerGoesOnAfterARestart(t *testing.T) {
	server := storetest.NewRestartable(t)
	st := storetest.Open(t, server)
	changes := follow(t, st)
	job := put(t, st)
	expect(t, changes, change(job))
	server.Restart()
	other := storetest.Open(t, server)
	later := put(t, other)
	for {
		select {
		case got := <-changes:
			if got == change(later) {
				return
			}
		case <-storetest.Context(t).Done():
			t.Fatal("the change is missing")
		}
	}
}

// Each execution is counted once when it is accepted and once when it has ended.
func TestFollowerCountsExecutions(t *testing.T) {
	st := storetest.Open(t, storetest.Server(t))
	queued, ended, current := make(chan *proto.Meta, 10), make(chan *proto.Record, 10), make(chan bool, 100)
	f := &activity.Follower{
		Store: st, OnChange: func(proto.Change) { current <- true }, OnQueued: func(m *proto.Meta) { queued <- m },
		OnEnded: func(r *proto.Record) { ended <- r }, Log: storetest.Log(t),
	}
	ctx, cancel := context.WithCancel(context.Background())
	var work sync.WaitGroup
	work.Go(func() { _ = f.Run(ctx) })
	t.Cleanup(func() { cancel(); work.Wait() })
	<-current
	<-current
	job := put(t, st)
	write(t, st, job, proto.StatusSuccess, write(t, st, job, proto.StatusRunning, 0))
	if m := <-queued; m.TraceID != job.TraceID || m.Org != "acme" {
		t.Errorf("queued %+v", m)
	}
	if r := <-ended; r.TraceID != job.TraceID || r.Status != proto.StatusSuccess || r.Result == nil {
		t.Errorf("ended %+v", r)
	}
	if len(queued)+len(ended) != 0 {
		t.Error("counted more than once")
	}
}
