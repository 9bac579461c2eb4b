package queue

import (
	"cmp"
	"context"
	"slices"
	"time"

	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/scheduler/autoscale"
)

// settleTime is how long a new leader waits for all workers' announcements before it recommends
// anything.
const settleTime = 2 * time.Second

// Autoscaler decides how many workers the pools should have.
type Autoscaler struct {
	// Policy returns the policy of a pool.
	Policy func(pool string) autoscale.Policy
	// Scale, if not nil, is called with each evaluation while this process leads. It must not block.
	Scale func([]proto.Pool)
	// Starts is whether workers are started as recommended, here or elsewhere.
	Starts bool
}

// reviewPools deletes pools without workers after some time, evaluates the others, and saves them.
func (t *term) reviewPools(ctx context.Context, now time.Time) {
	t.pools.forget(now)
	if t.Autoscaler != nil && now.Sub(t.began) >= settleTime && t.stillLeader() {
		list := t.demand(now)
		for i := range list {
			t.recommend(&list[i], now)
		}
		t.views.pools = list
		if t.Autoscaler.Scale != nil {
			t.Autoscaler.Scale(slices.Clone(list))
		}
	}
	t.pools.next.review(ctx, t, now)
}

// recommend evaluates the demand for a pool. The state is saved when the number of workers changes:
// the next leader may begin a delay anew.
func (t *term) recommend(p *proto.Pool, now time.Time) {
	policy := t.Autoscaler.Policy(p.Name)
	policy.SlotsPerWorker = cmp.Or(p.WorkerSlots, policy.SlotsPerWorker)
	state := &t.pools.byName[p.Name].State
	workers, next := policy.Recommend(autoscale.Demand{
		Pool: p.Name, Queued: p.Queued, Running: p.Running, MeanSeconds: p.MeanSeconds,
		OldestWait: time.Duration(p.OldestWait * float64(time.Second)), Slots: p.Slots,
	}, *state, now)
	if workers != state.Workers || state.At.IsZero() {
		t.pools.next.changed = true
		t.Log.Info("workers recommended", "pool", p.Name, "workers", workers, "before", state.Workers, "reason", next.Reason,
			"queued", p.Queued, "running", p.Running, "slots", p.Slots)
	}
	*state = next
	t.setDesired(p)
}

// setDesired sets what was recommended last.
func (t *term) setDesired(p *proto.Pool) {
	state := &t.pools.byName[p.Name].State
	if t.Autoscaler == nil || state.At.IsZero() {
		return
	}
	slots := cmp.Or(p.WorkerSlots, t.Autoscaler.Policy(p.Name).SlotsPerWorker)
	p.Desired = &proto.DesiredWorkers{Workers: state.Workers, Slots: state.Workers * slots, Reason: string(state.Reason)}
}
