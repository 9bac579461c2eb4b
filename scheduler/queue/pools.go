package queue

import (
	"cmp"
	"context"
	"maps"
	"math"
	"slices"
	"strings"
	"time"

	"github.com/nats-io/nats.go"

	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/scheduler/autoscale"
	"github.com/bullpen-run/bullpen/scheduler/store"
)

const (
	// maxPools bounds the pools that the dispatcher knows. Workers of further pools count as workers
	// of [proto.DefaultPool].
	maxPools = 32
	// maxPoolName bounds the length of a pool's name.
	maxPoolName = 63
	// poolKept is how long a pool is known after its last worker.
	poolKept = 30 * 24 * time.Hour
	poolsKey = "dispatcher.pools"
)

// pool is a group of workers that can run the same jobs. It may have no workers.
type pool struct {
	Name         string          `json:"name"`
	Capabilities []string        `json:"capabilities"` // of the worker that joined last
	WorkerSlots  int             `json:"worker_slots"` // of that worker
	Seen         time.Time       `json:"seen"`         // when a worker last announced itself
	Duration     autoscale.Mean  `json:"duration"`     // for which jobs hold a slot
	State        autoscale.State `json:"state"`        // of the last evaluation
}

// meets reports whether the pool's workers can run jobs with the needs. A pool that never had a
// worker may.
func (p *pool) meets(needs []string) bool {
	return len(p.Capabilities) == 0 || newCapabilities(p.Capabilities).meet(needs)
}

// pools are the known pools.
type pools struct {
	byName map[string]*pool
	next   handover
}

func newPools() pools {
	byName := map[string]*pool{}
	return pools{byName, handover{
		key: poolsKey, what: "the pools of workers", value: func() any { return slices.Collect(maps.Values(byName)) },
	}}
}

// loadPools reads what the last leader knew.
func (t *term) loadPools(ctx context.Context) {
	var saved []pool
	t.pools.next.load(ctx, t, &saved)
	for i := range saved {
		if ValidPool(saved[i].Name) && len(t.pools.byName) < maxPools {
			t.pools.byName[saved[i].Name] = &saved[i]
		}
	}
}

// forget deletes pools that had no worker for long.
func (p *pools) forget(now time.Time) {
	maps.DeleteFunc(p.byName, func(_ string, p *pool) bool {
		return p.Name != proto.DefaultPool && now.Sub(p.Seen) > poolKept
	})
}

// ValidPool reports whether a pool may have the name.
func ValidPool(name string) bool {
	return name != "" && len(name) <= maxPoolName && !strings.ContainsFunc(name, func(c rune) bool {
		return c != '-' && c != '_' && (c < '0' || c > '9') && (c < 'a' || c > 'z') && (c < 'A' || c > 'Z')
	})
}

// of returns the pool with a name, or the default pool if there are too many.
func (p *pools) of(name string) *pool {
	if !ValidPool(name) || p.byName[name] == nil && len(p.byName) >= maxPools {
		name = proto.DefaultPool
	}
	one := p.byName[name]
	if one == nil {
		one = &pool{Name: name}
		p.byName[name] = one
	}
	return one
}

// join notes a worker's announcement in its pool.
func (t *term) join(w *workerState, a *announcement) {
	p := t.pools.of(cmp.Or(a.Pool, proto.DefaultPool))
	if p.WorkerSlots != a.Slots || !slices.Equal(p.Capabilities, a.Capabilities) {
		p.WorkerSlots, p.Capabilities, t.pools.next.changed = a.Slots, slices.Clone(a.Capabilities), true
	}
	p.Seen, w.pool, w.load.pool = w.seen, p.Name, p.Name
}

// measure adds the time a job held its slot to the mean of its pool.
func (t *term) measure(j *job, now time.Time) {
	if j.started.IsZero() || j.meta.SandboxID != "" {
		return
	}
	p := t.pools.of(cmp.Or(t.queue.load(j.worker).pool, proto.DefaultPool))
	p.Duration.Add(now, now.Sub(j.started).Seconds())
	t.pools.next.changed = true
}

// poolFor returns the pool for jobs with the needs: the suitable one whose workers offer least, so
// that the others stay free for more demanding jobs. The fallback is a pool that never had a
// worker, or nil.
func (t *term) poolFor(needs []string) *pool {
	var best *pool
	for _, p := range t.pools.byName {
		if p.meets(needs) && (best == nil || p.compare(best) < 0) {
			best = p
		}
	}
	return best
}

// compare orders pools by how much their workers offer. Pools that never had a worker come last.
func (p *pool) compare(q *pool) int {
	rank := func(p *pool) int {
		if len(p.Capabilities) == 0 {
			return math.MaxInt
		}
		return len(p.Capabilities)
	}
	return cmp.Or(cmp.Compare(rank(p), rank(q)), cmp.Compare(p.Name, q.Name))
}

// demand returns the pools and the demand for their workers, by name.
func (t *term) demand(now time.Time) []proto.Pool {
	t.pools.of(proto.DefaultPool) // it exists before the first worker
	found := make(map[string]*proto.Pool, len(t.pools.byName))
	for name, p := range t.pools.byName {
		found[name] = &proto.Pool{
			Name: name, Capabilities: p.Capabilities, Architecture: architectureOf(p.Capabilities), WorkerSlots: p.WorkerSlots,
			MeanSeconds: p.Duration.Value(),
		}
	}
	for _, w := range t.workers {
		if p := found[w.pool]; p != nil && !w.info.Draining {
			p.Workers, p.Slots = p.Workers+1, p.Slots+w.slots
		}
	}
	for name, l := range t.queue.loads {
		if w := t.workers[name]; w != nil && w.info.Draining {
			continue // its programs need no other slot
		}
		if p := found[cmp.Or(l.pool, proto.DefaultPool)]; p != nil {
			p.Running += l.jobs.all
		}
	}
	for n, w := range t.queue.startable(&round{term: t, since: now.Add(-submittedWithin)}) {
		p := t.poolFor(n.needs)
		if p == nil {
			continue // its jobs expire with a message about the missing capabilities
		}
		f := found[p.Name]
		f.Queued += w.jobs
		f.OldestWait = max(f.OldestWait, now.Sub(w.oldest).Seconds())
	}
	list := make([]proto.Pool, 0, len(found))
	for _, name := range slices.Sorted(maps.Keys(found)) {
		list = append(list, *found[name])
	}
	return list
}

// waiting are queued jobs.
type waiting struct {
	jobs   int
	oldest time.Time // when the oldest one was queued
}

// startable counts the queued jobs that limits allow to run now, by their needs. More slots than
// that would stay idle.
func (q *fairQueue) startable(free capacity) map[*needSet]waiting {
	sets := make([]*needSet, 0, len(q.needSets))
	for _, key := range slices.Sorted(maps.Keys(q.needSets)) {
		sets = append(sets, q.needSets[key])
	}
	found := map[*needSet]waiting{}
	for _, o := range q.orgs {
		org := o.active
		for _, f := range o.sfq.flows {
			k := f.party
			key := k.active
			for _, class := range []proto.Class{proto.ClassInteractive, proto.ClassBackground} {
				for _, n := range sets {
					jobs := k.jobs[class][n]
					if jobs == nil {
						continue
					}
					first := jobs.Front().Value.(*job)
					able := min(jobs.Len(), roomFor(&first.meta, org, key, free))
					if able <= 0 {
						continue
					}
					org.add(&first.meta, able)
					key.add(&first.meta, able)
					w := found[n]
					w.jobs += able
					if since := first.queuedAt(); w.oldest.IsZero() || since.Before(w.oldest) {
						w.oldest = since
					}
					found[n] = w
				}
			}
		}
	}
	return found
}

// roomFor returns how many more jobs like m the limits of its organisation and key allow, see
// [orgQueue.hasRoom].
func roomFor(m *proto.Meta, org, key tally, free capacity) int {
	room := m.Concurrent - org.all
	if m.KeyConcurrent > 0 {
		room = min(room, m.KeyConcurrent-key.all)
	}
	if m.Class() != proto.ClassBackground {
		return room
	}
	room = min(room, free.backgroundLimit(m.Org, "", m.Concurrent)-org.background)
	if m.KeyConcurrent > 0 {
		room = min(room, free.backgroundLimit(m.Org, m.Key, m.KeyConcurrent)-key.background)
	}
	return room
}

// queuedAt returns when a queued job was queued for its next attempt.
func (j *job) queuedAt() time.Time {
	if j.attempt > 0 {
		return j.since
	}
	if j.meta.RunAt.After(j.meta.CreatedAt) {
		return j.meta.RunAt
	}
	return j.meta.CreatedAt
}

// currentPools returns the pools with the demand at the last review, or at the first call after it
// if the review did not need them. The list is immutable. It is cached because every caller may
// request it and [term.demand] walks the whole queue.
func (t *term) currentPools(now time.Time) []proto.Pool {
	if t.views.pools == nil {
		t.views.pools = t.demand(now)
		for i := range t.views.pools {
			t.setDesired(&t.views.pools[i])
		}
	}
	return t.views.pools
}

// Pools returns all pools of workers by name, with the demand for them since the dispatcher's last
// review.
func (q *Queue) Pools(ctx context.Context) ([]proto.Pool, error) {
	ctx, cancel := context.WithTimeout(ctx, statsTimeout)
	defer cancel()
	var list []proto.Pool
	err := q.request(ctx, &nats.Msg{Subject: store.PoolsSubject}, &list)
	return list, err
}
