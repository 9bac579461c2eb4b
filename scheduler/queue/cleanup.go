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
	// deleteAfter is how long a finished job stays behind an unfinished one before it is deleted
	// individually.
	deleteAfter = 10 * time.Second
)

// garbage tracks which jobs can be deleted from the stream. Jobs of terminal executions are
// harmless, since the record is read first. A delete is a synced write, so finished jobs are not
// deleted one by one: one purge removes all below the oldest unfinished job. Jobs with a RunAt and
// those of live sandboxes may stay for weeks, so each of these kinds has a floor of its own.
type garbage struct {
	lastSeq   uint64 // of the messages seen
	jobs      []pendingDelete
	bodies    []string
	excluded  map[uint64]bool // messages whose dead letter or delivery is being stored
	collected time.Time
	running   bool // a collection
}

type pendingDelete struct {
	seq  uint64
	kind jobKind
	at   time.Time
}

// jobKind groups jobs by how long they may stay.
type jobKind int

const (
	promptJob  jobKind = iota
	delayedJob         // it has a RunAt
	sandboxJob         // it runs the guest of a live sandbox
	jobKinds
)

func kindOf(m *proto.Meta) jobKind {
	switch {
	case m.SandboxID != "":
		return sandboxJob
	case !m.RunAt.IsZero():
		return delayedJob
	default:
		return promptJob
	}
}

func (g *garbage) observe(seq uint64) { g.lastSeq = max(g.lastSeq, seq) }

func (g *garbage) add(m *proto.Meta, seq uint64, body string) {
	g.jobs = append(g.jobs, pendingDelete{seq: seq, kind: kindOf(m), at: time.Now()})
	if body != "" {
		g.bodies = append(g.bodies, body)
	}
}

// exclude excludes a message from purges.
func (g *garbage) exclude(seq uint64) {
	if g.excluded == nil {
		g.excluded = map[uint64]bool{}
	}
	g.excluded[seq] = true
}

// removeJob removes the job of a terminal execution. The dead letter and the delivery are stored
// first: until then the job is the only trace of them.
func (t *term) removeJob(ctx context.Context, m *proto.Meta, seq uint64, body string, deadLettered bool) {
	delivery := proto.NewDelivery(m, time.Now())
	if delivery == nil && !deadLettered {
		t.garbage.add(m, seq, body)
		return
	}
	fault.Here(fault.AfterResultBeforeDelivery)
	t.garbage.exclude(seq)
	go func() {
		if deadLettered && t.retry(ctx, m.TraceID, "store dead letter", func() error {
			return t.storeDeadLetter(ctx, m, seq)
		}) != nil {
			return
		}
		if delivery != nil && t.retry(ctx, m.TraceID, "store delivery", func() error {
			return (&deliveries.Store{Store: t.Store}).Create(ctx, delivery)
		}) != nil {
			return
		}
		fault.Here(fault.AfterDeliveryBeforeJobRemoved)
		t.post(ctx, func() {
			delete(t.garbage.excluded, seq)
			t.garbage.add(m, seq, body)
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

func (t *term) storeDeadLetter(ctx context.Context, m *proto.Meta, seq uint64) error {
	rec, _, err := t.Store.Records.Get(ctx, m.Org, m.TraceID)
	if err != nil {
		return err
	}
	if err := (&deadletters.Store{Store: t.Store, Added: t.DeadLettered}).AddJob(ctx, rec, seq); err != nil {
		return err
	}
	t.Log.Error("job dead-lettered", "trace_id", m.TraceID, "org", rec.Org, "workers", rec.Lost)
	return nil
}

// moveMalformed moves a malformed message to the dead letters.
func (t *term) moveMalformed(ctx context.Context, seq uint64, cause error) {
	t.garbage.exclude(seq)
	go func() {
		if err := (&deadletters.Store{Store: t.Store, Added: t.DeadLettered}).MoveMessage(ctx, seq, cause); err != nil &&
			ctx.Err() == nil {
			t.Log.Error("store dead letter failed", "sequence", seq, "error", err)
			return // the next leader finds the message again
		}
		t.post(ctx, func() { delete(t.garbage.excluded, seq) })
	}()
}

// collectGarbage deletes garbage outside the loop.
func (t *term) collectGarbage(ctx context.Context, now time.Time) {
	g := &t.garbage
	if len(g.jobs) == 0 || g.running || now.Sub(g.collected) < collectEvery {
		return
	}
	floors := t.garbageFloors()
	all := slices.Min(floors[:])
	r := store.RemovedJobs{Bodies: g.bodies}
	below := [jobKinds]*uint64{&r.PromptBelow, &r.DelayedBelow, &r.SandboxesBelow}
	g.jobs = slices.DeleteFunc(g.jobs, func(d pendingDelete) bool {
		switch {
		case d.seq < all:
			r.Below = all
		case d.seq < floors[d.kind]:
			*below[d.kind] = floors[d.kind]
		case now.Sub(d.at) > deleteAfter:
			r.Single = append(r.Single, d.seq)
		default:
			return false
		}
		return true
	})
	g.bodies, g.collected, g.running = nil, now, true
	go func() {
		if err := t.Store.Jobs.Remove(ctx, r); err != nil && ctx.Err() == nil {
			t.Log.Warn("remove finished jobs failed, the next leader will", "error", err)
		}
		t.post(ctx, func() { g.running = false })
	}()
}

// garbageFloors returns the sequence numbers of the oldest jobs of each kind that must stay.
func (t *term) garbageFloors() (floors [jobKinds]uint64) {
	floor := t.garbage.lastSeq + 1
	for seq := range t.garbage.excluded {
		floor = min(floor, seq)
	}
	for kind := range floors {
		floors[kind] = floor
	}
	for _, j := range t.queue.jobs {
		if kind := kindOf(&j.meta); j.seq > 0 {
			floors[kind] = min(floors[kind], j.seq)
		}
	}
	return floors
}
