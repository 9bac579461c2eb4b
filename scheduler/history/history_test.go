package history_test

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/scheduler/history"
	"github.com/bullpen-run/bullpen/scheduler/store"
	"github.com/bullpen-run/bullpen/scheduler/storetest"
	database "github.com/bullpen-run/bullpen/storage/history"
)

func TestMain(m *testing.M) {
	goleak.VerifyTestMain(m, goleak.IgnoreAnyFunction("database/sql.(*DB).connectionOpener"))
}

// run keeps an index in a file up to date until the returned function is called.
func run(t *testing.T, h *history.History, file string) (stop func()) {
	t.Helper()
	index, err := database.Open(file, storetest.Log(t))
	if err != nil {
		t.Fatal(err)
	}
	h.Index, h.Instance, h.Log = index, "test", storetest.Log(t)
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan struct{})
	go func() { defer close(done); _ = h.Run(ctx) }()
	stopped := false
	stop = func() {
		if !stopped {
			stopped = true
			cancel()
			<-done
			if err := index.Close(); err != nil {
				t.Error(err)
			}
		}
	}
	t.Cleanup(stop)
	return stop
}

// list returns the executions of an organisation with their statuses, once the index has them all.
func list(t *testing.T, h *history.History, org string) map[proto.TraceID]proto.Status {
	t.Helper()
	for deadline := time.Now().Add(30 * time.Second); ; {
		page, err := h.List(storetest.Context(t), &proto.HistoryFilter{Org: org, Limit: 100})
		if err == nil && page.Complete {
			got := map[proto.TraceID]proto.Status{}
			for _, r := range page.Records {
				got[r.TraceID] = r.Status
			}
			return got
		}
		if time.Now().After(deadline) {
			t.Fatalf("%+v, %v", page, err)
		}
		time.Sleep(10 * time.Millisecond)
	}
}

func write(t *testing.T, st *store.Store, job *proto.Job, status proto.Status, expect uint64) uint64 {
	t.Helper()
	rec := &proto.Record{Meta: job.Meta, Status: status, Attempt: 1, Worker: "w"}
	if status.Terminal() {
		result := proto.Exited(0)
		result.Stdout = "output"
		rec.Result = &result
	}
	seq, err := st.Records.Put(storetest.Context(t), rec, expect)
	if err != nil {
		t.Fatal(err)
	}
	return seq
}

func put(t *testing.T, st *store.Store) *proto.Job {
	t.Helper()
	job := storetest.Job("acme", "k", proto.ModeAsync)
	if err := storetest.PutJob(storetest.Context(t), st, job); err != nil {
		t.Fatal(err)
	}
	return job
}

// A list after each write shows it. The index goes on where it was, and is built again when it is
// removed while it runs or between two runs.
func TestIndexFollowsTheStreams(t *testing.T) {
	st, file := storetest.Open(t, storetest.Server(t)), filepath.Join(t.TempDir(), "index.db")
	h := &history.History{Store: st}
	want := map[proto.TraceID]proto.Status{}
	check := func(when string) {
		t.Helper()
		got := list(t, h, "acme")
		if len(got) != len(want) {
			t.Errorf("%s: %v, want %v", when, got, want)
		}
		for id, status := range want {
			if got[id] != status {
				t.Errorf("%s: %s is %q, want %q", when, id, got[id], status)
			}
		}
	}
	step := func(when string) {
		t.Helper()
		job := put(t, st)
		want[job.TraceID] = proto.StatusQueued
		check(when + ", queued")
		seq := write(t, st, job, proto.StatusRunning, 0)
		want[job.TraceID] = proto.StatusRunning
		check(when + ", running")
		write(t, st, job, proto.StatusSuccess, seq)
		m, err := st.Jobs.Last(storetest.Context(t), store.JobPattern(job.Org, job.TraceID))
		if err != nil {
			t.Fatal(err)
		}
		if err := st.Jobs.Remove(storetest.Context(t), store.RemovedJobs{Single: []uint64{m.Seq}}); err != nil {
			t.Fatal(err)
		}
		want[job.TraceID] = proto.StatusSuccess
		check(when + ", ended")
	}
	ran := put(t, st) // before the index exists
	want[ran.TraceID] = proto.StatusQueued
	stop := run(t, h, file)
	step("a new index")
	if err := os.Remove(file); err != nil {
		t.Fatal(err)
	}
	step("removed while it runs")
	stop()
	write(t, st, ran, proto.StatusFailed, 0)
	want[ran.TraceID] = proto.StatusFailed
	h = &history.History{Store: st}
	stop = run(t, h, file)
	check("opened again")
	stop()
	if err := errors.Join(os.Remove(file),
		os.WriteFile(file, []byte(strings.Repeat("no index ", 1000)), 0o600)); err != nil {
		t.Fatal(err)
	}
	h = &history.History{Store: st}
	stop = run(t, h, file)
	step("corrupt between two runs")
	stop()
	// Another server, whose streams are new.
	h, want = &history.History{Store: storetest.Open(t, storetest.Server(t))}, map[proto.TraceID]proto.Status{}
	stop = run(t, h, file)
	defer stop()
	check("other streams")
}

// While its disk is full, lists fail with the reason, and nothing else waits. Afterwards the index
// catches up.
func TestDiskFull(t *testing.T) {
	st := storetest.Open(t, storetest.Server(t))
	var full atomic.Bool
	h := &history.History{Store: st, DiskFull: func() string {
		if full.Load() {
			return "no room"
		}
		return ""
	}}
	run(t, h, filepath.Join(t.TempDir(), "index.db"))
	first := put(t, st)
	list(t, h, "acme")
	full.Store(true)
	second := put(t, st)
	for deadline := time.Now().Add(30 * time.Second); ; {
		_, err := h.List(storetest.Context(t), &proto.HistoryFilter{Org: "acme", Limit: 1})
		if broken := new(proto.HistoryError); errors.As(err, &broken) && strings.Contains(broken.Reason, "disk is full") {
			break
		}
		if time.Now().After(deadline) {
			t.Fatal(err)
		}
	}
	full.Store(false)
	for deadline := time.Now().Add(30 * time.Second); ; {
		if _, err := h.List(storetest.Context(t), &proto.HistoryFilter{Org: "acme", Limit: 1}); err == nil {
			break
		} else if time.Now().After(deadline) {
			t.Fatal(err)
		}
		time.Sleep(10 * time.Millisecond)
	}
	if got := list(t, h, "acme"); len(got) != 2 || got[first.TraceID] != proto.StatusQueued ||
		got[second.TraceID] != proto.StatusQueued {
		t.Errorf("%v", got)
	}
}

// Without NATS a list has what the index has, and says that it may not be all.
func TestWithoutNATS(t *testing.T) {
	server := storetest.Server(t)
	st := storetest.Open(t, server)
	h := &history.History{Store: st}
	run(t, h, filepath.Join(t.TempDir(), "index.db"))
	put(t, st)
	list(t, h, "acme")
	server.Close()
	page, err := h.List(storetest.Context(t), &proto.HistoryFilter{Org: "acme", Limit: 10})
	if err != nil || len(page.Records) != 1 || page.Complete {
		t.Errorf("%+v, %v", page, err)
	}
}

// Of two processes with the same index one writes it. The other one reads it, and goes on writing
// when the first has stopped.
func TestTwoProcessesShareAnIndex(t *testing.T) {
	server := storetest.Server(t)
	st, file := storetest.Open(t, server), filepath.Join(t.TempDir(), "index.db")
	one, two := &history.History{Store: st, Shared: true}, &history.History{Store: storetest.Open(t, server), Shared: true}
	stop := run(t, one, file)
	put(t, st)
	list(t, one, "acme")
	run(t, two, file)
	put(t, st)
	if got := list(t, two, "acme"); len(got) != 2 {
		t.Errorf("%v", got)
	}
	stop()
	put(t, st)
	if got := list(t, two, "acme"); len(got) != 3 {
		t.Errorf("after a change of the writer: %v", got)
	}
}

// The index of a process that did not run when an organisation was removed drops it later.
func TestAnotherIndexDropsARemovedOrganisation(t *testing.T) {
	st, file := storetest.Open(t, storetest.Server(t)), filepath.Join(t.TempDir(), "index.db")
	stopped, running := &history.History{Store: st, Retention: time.Hour},
		&history.History{Store: st, Retention: time.Hour}
	stop := run(t, stopped, file)
	write(t, st, storetest.Job("beta", "k", proto.ModeAsync), proto.StatusSuccess, 0) // older, so that nothing expires
	job := put(t, st)
	write(t, st, job, proto.StatusSuccess, 0)
	if got := list(t, stopped, "acme"); len(got) != 1 {
		t.Fatal(got)
	}
	stop()
	run(t, running, filepath.Join(t.TempDir(), "index.db"))
	list(t, running, "acme")
	if err := st.Records.EraseSubject(storetest.Context(t), store.RecordPatternOf("acme")); err != nil {
		t.Fatal(err)
	}
	if err := st.Jobs.PurgeSubject(storetest.Context(t), store.AllJobs); err != nil {
		t.Fatal(err)
	}
	if err := running.RemoveOrg(storetest.Context(t), "acme"); err != nil {
		t.Fatal(err)
	}
	if got := list(t, running, "acme"); len(got) != 0 {
		t.Errorf("its own index has %v", got)
	}
	again := &history.History{Store: st, Retention: time.Hour}
	run(t, again, file)
	for deadline := time.Now().Add(time.Minute); len(list(t, again, "acme")) > 0; {
		if time.Now().After(deadline) {
			t.Fatal("the other index has it still")
		}
		time.Sleep(100 * time.Millisecond)
	}
}
