package queue_test

import (
	"testing"
	"time"

	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/scheduler/storetest"
)

// rejectRecords makes the stream of records reject writes, or accept them again.
func (w *world) rejectRecords(reject bool) {
	w.t.Helper()
	cfg := w.store.Records.CachedInfo().Config
	cfg.MaxMsgSize = -1
	if reject {
		cfg.MaxMsgSize = 1
	}
	if _, err := w.store.JS.UpdateStream(w.ctx, cfg); err != nil {
		w.t.Fatal(err)
	}
}

// The jobs of one organisation are overdue, and none of their terminal records can be written.
// Other jobs are still assigned.
func TestOverdueJobsDelayNoOthers(t *testing.T) {
	w := newLeaderlessWorld(t)
	w.storeJobs(600, "late", "k", func(j *proto.Job) {
		j.CreatedAt, j.QueueDeadline = j.CreatedAt.Add(-time.Hour), j.QueueDeadline.Add(-time.Hour)
	})
	d := w.newDispatcher("d") // resets the configuration of the streams
	w.rejectRecords(true)
	w.background(d.Run)
	h := w.worker("w", 2)
	for _, org := range []string{"other", "late"} {
		id := w.submit(storetest.Job(org, "k", proto.ModeAsync))
		if l := w.take(h); l.Job().TraceID != id {
			t.Fatalf("%s was assigned, want the job of %s", l.Job().TraceID, org)
		}
	}
	st, err := w.queue.Stats(w.ctx)
	if err != nil || st.Queued != 600 {
		t.Errorf("%+v, %v", st, err)
	}
	w.rejectRecords(false)
	w.eventually("all overdue jobs have expired", func() bool {
		st, err := w.queue.Stats(w.ctx)
		return err == nil && st.Queued == 0
	})
	info, err := w.store.Records.Info(w.ctx)
	if err != nil || info.State.Msgs < 600 {
		t.Errorf("%d records, %v", info.State.Msgs, err)
	}
}
