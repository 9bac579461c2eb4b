package queue

import (
	"context"
	"slices"
	"time"

	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/proto/fault"
	"github.com/bullpen-run/bullpen/scheduler/deadletters"
	"github.com/bullpen-run/bullpen/scheduler/deliveries"
	"github.com/bullpen-run/bullpen/scheduler/store"
)

const (
	collectEvery = time.Second
	// deleteAfter is how long a finished job stays among unfinished ones until it is deleted
	// individually.
	deleteAfter = 10 * time.Second
)

// garbage is what can be deleted from the jobs stream. Jobs of terminal executions are harmless,
// since the record is read first. A delete is a synced write, so finished jobs are not deleted one
// by one: all jobs below the oldest unfinished one are purged at once.
type garbage struct {
	lastSeq   uint64 // of the messages seen
	jobs      []pendingDelete
	bodies    []string
	kept      map[uint64]bool // messages that a dead letter or delivery is being made of
	collected time.Time
	running   bool // a collection
}

type pendingDelete struct {
	seq uint64
	at  time.Time
}

func (g *garbage) saw(seq uint64) { g.lastSeq = max(g.lastSeq, seq) }

func (g *garbage) add(seq uint64, body string) {
	g.jobs = append(g.jobs, pendingDelete{seq: seq, at: time.Now()})
	if body != "" {
		g.bodies = append(g.bodies, body)
	}
}

// keep excludes a message from purges.
func (g *garbage) keep(seq uint64) {
	if g.kept == nil {
		g.kept = map[uint64]bool{}
	}
	g.kept[seq] = true
}

// removeJob removes the job of a terminal execution. The dead letter and the delivery are stored
// first: until then the job is the only trace of them.
func (t *term) removeJob(ctx context.Context, m *proto.Meta, seq uint64, body string, deadLettered bool) {
	delivery := proto.NewDelivery(m, time.Now())
	if delivery == nil && !deadLettered {
		t.garbage.add(seq, body)
		return
	}
	fault.Here(fault.AfterResultBeforeDelivery)
	t.garbage.keep(seq)
	go func() {
		if deadLettered && t.retry(ctx, m.TraceID, "store dead letter", func() error { return t.storeDeadLetter(ctx, m.TraceID, seq) }) != nil {
			return
		}
		if delivery != nil && t.retry(ctx, m.TraceID, "store delivery", func() error { return (&deliveries.Store{Store: t.Store}).Create(ctx, delivery) }) != nil {
			return
		}
		fault.Here(fault.AfterDeliveryBeforeJobRemoved)
		t.post(ctx, func() {
			delete(t.garbage.kept, seq)
			t.garbage.add(seq, body)
		})
	}()
}

// retry calls f until it succeeds or ctx is done. The next leader finds the job again.
func (t *term) retry(ctx context.Context, id proto.TraceID, what string, f func() error) error {
	policy := store.Retry{Pause: collectEvery, Transient: store.AnyError, OnRetry: func(err error, _ time.Duration) {
		t.Log.Error(what+" failed, will retry", "trace_id", id, "error", err)
	}}
	return policy.Do(ctx, func(context.Context) error { return f() })
}

func (t *term) storeDeadLetter(ctx context.Context, id proto.TraceID, seq uint64) error {
	rec, _, err := t.Store.Record(ctx, id)
	if err != nil {
		return err
	}
	if err := (&deadletters.Store{Store: t.Store}).AddJob(ctx, rec, seq); err != nil {
		return err
	}
	t.Log.Error("job dead-lettered", "trace_id", id, "org", rec.Org, "workers", rec.Lost)
	return nil
}

// moveMalformed moves a malformed message to the dead letters.
func (t *term) moveMalformed(ctx context.Context, seq uint64, cause error) {
	t.garbage.keep(seq)
	go func() {
		if err := (&deadletters.Store{Store: t.Store}).MoveMessage(ctx, seq, cause); err != nil && ctx.Err() == nil {
			t.Log.Error("store dead letter failed", "sequence", seq, "error", err)
			return // the next leader finds the message again
		}
		t.post(ctx, func() { delete(t.garbage.kept, seq) })
	}()
}

// collectGarbage deletes garbage outside the loop.
func (t *term) collectGarbage(ctx context.Context, now time.Time) {
	g := &t.garbage
	if len(g.jobs) == 0 || g.running || now.Sub(g.collected) < collectEvery {
		return
	}
	floor := g.lastSeq + 1
	for _, j := range t.queue.jobs {
		if j.seq > 0 {
			floor = min(floor, j.seq)
		}
	}
	for seq := range g.kept {
		floor = min(floor, seq)
	}
	var single []uint64
	purge := false
	g.jobs = slices.DeleteFunc(g.jobs, func(d pendingDelete) bool {
		if d.seq < floor {
			purge = true
			return true
		}
		if now.Sub(d.at) > deleteAfter {
			single = append(single, d.seq)
			return true
		}
		return false
	})
	bodies := g.bodies
	g.bodies, g.collected, g.running = nil, now, true
	go func() {
		if !purge {
			floor = 0
		}
		if err := t.Store.RemoveJobs(ctx, floor, single, bodies); err != nil && ctx.Err() == nil {
			t.Log.Warn("remove finished jobs failed, the next leader will", "error", err)
		}
		t.post(ctx, func() { g.running = false })
	}()
}
