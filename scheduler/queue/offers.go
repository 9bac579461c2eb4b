package queue

import (
	"context"
	"log/slog"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/scheduler/store"
)

const offersKey = "dispatcher.offers"

// missing returns the unmet needs of a job, given the capabilities of each worker, or nil if one of
// them can run it. If each need is met by some worker but no worker meets all, it returns all
// needs, and together is true.
func missing(needs []string, workers [][]string) (lacking []string, together bool) {
	if slices.ContainsFunc(workers, func(w []string) bool { return containsAll(w, needs) }) {
		return nil, false
	}
	for _, need := range needs {
		if !slices.ContainsFunc(workers, func(w []string) bool { return slices.Contains(w, need) }) {
			lacking = append(lacking, need)
		}
	}
	if lacking == nil {
		return needs, true
	}
	return lacking, false
}

func containsAll(list, names []string) bool {
	return !slices.ContainsFunc(names, func(name string) bool { return !slices.Contains(list, name) })
}

// Offers is the leading dispatcher's knowledge of the workers' capabilities. It is stored for
// gateways and for the next leader.
type Offers struct {
	Workers []*offer `json:"workers"`
	// Started are the capabilities of the workers that the autoscaler starts, for each pool. An
	// empty entry is a pool that never had a worker, whose capabilities are unknown.
	Started [][]string `json:"started,omitempty"`
	// Complete is when the dispatcher knows all workers. Before, others may yet connect.
	Complete time.Time `json:"complete"`
}

// offer is a set of capabilities of live or recent workers.
type offer struct {
	Capabilities []string `json:"capabilities"` // sorted
	// Memory is the largest sum of memory limits of live sandboxes, 0 for no limit.
	Memory int64 `json:"memory,omitempty"`
	Live   bool  `json:"live"` // a worker that has them takes jobs
	// Until is the time until which such a worker is expected back, if none is live.
	Until time.Time `json:"until,omitzero"`

	seen time.Time // when the last worker that has them took jobs
}

// missing returns the needs of a job that no live worker meets, or nil. memory is the memory limit
// of a live sandbox, otherwise 0.
func (o *Offers) missing(needs []string, memory int64, now time.Time) *proto.Missing {
	var live, large, expected [][]string
	for _, w := range o.Workers {
		fits := hasMemory(w.Memory, memory)
		switch {
		case w.Live && fits:
			large = append(large, w.Capabilities)
			fallthrough
		case w.Live:
			live = append(live, w.Capabilities)
		case fits && now.Before(w.Until):
			expected = append(expected, w.Capabilities)
		}
	}
	lacking, together := missing(needs, live)
	if lacking == nil {
		if tooSmall, _ := missing(needs, large); tooSmall == nil {
			return nil
		}
		lacking = []string{capabilitySandboxMemory(memory)}
	}
	started := slices.ContainsFunc(o.Started, func(pool []string) bool {
		return len(pool) == 0 || containsAll(pool, needs)
	})
	back, _ := missing(needs, expected)
	return &proto.Missing{
		Capabilities: lacking, Message: missingMessage(lacking, together, len(live) > 0, started),
		Expected: started || back == nil || now.Before(o.Complete),
	}
}

// hasMemory reports whether an otherwise empty worker has room for a live sandbox with a memory
// limit. available is 0 if there is no limit.
func hasMemory(available, limit int64) bool { return available == 0 || limit <= available }

// missingMessage names what is missing and who can provide it.
func missingMessage(lacking []string, together, live, started bool) string {
	names := make([]string, len(lacking))
	for i, capability := range lacking {
		names[i] = describe(capability)
	}
	what := "no worker offers " + strings.Join(names, " or ")
	switch {
	case !live && started:
		return "no worker is live; the autoscaler starts one"
	case !live:
		return "no worker is live; the operator of this server starts one"
	case together:
		what = "no worker offers all of this together: " + strings.Join(names, ", ")
	}
	if started {
		return what + "; the autoscaler starts one that does"
	}
	return what + "; the operator of this server can add one that does (bullpen doctor on its machine says what is " +
		"missing there), " +
		"or bind the API key to another sandbox"
}

// describe returns a capability in words.
func describe(capability string) string {
	kind, value, _ := strings.Cut(capability, ":")
	switch kind {
	case "language":
		return "the language " + value
	case "architecture":
		return "images for the architecture " + value
	case "sandbox-memory":
		return "live sandboxes with " + value + " of memory"
	case "agent":
		return "the agent " + strings.Replace(value, agentVersionSeparator, " ", 1)
	case CapabilitySandboxNode:
		return "Node.js for live sandboxes without an image"
	case CapabilityImages:
		return "sandbox images"
	case CapabilitySandboxes:
		return "live sandboxes"
	case CapabilitySandboxImages:
		return "live sandboxes with images"
	case CapabilityNetwork:
		return "network access"
	case CapabilityNetworkExtended:
		return "private destinations and limits of a network"
	case CapabilityDisk:
		return "a home or /tmp on disk"
	case CapabilityInjections:
		return "secrets that are added to requests"
	case CapabilityMounts:
		return "mounts of storage connections"
	case CapabilityRich:
		return "rich results"
	default: // threads, secrets, volumes
		return capability
	}
}

// offers is what the workers of a term offer.
type offers struct {
	Offers

	handedOver bool // the last leader knew workers
	next       handover
}

func newOffers() *offers {
	o := new(offers)
	o.next = handover{key: offersKey, what: "what the workers offer", value: func() any { return &o.Offers }}
	return o
}

// loadOffers reads what the last leader knew. Whatever it expected then is expected for as long
// again: a whole deployment may have been restarted.
func (t *term) loadOffers(ctx context.Context) {
	var saved Offers
	t.offers.next.load(ctx, t, &saved)
	now := time.Now()
	for _, w := range saved.Workers {
		if w != nil {
			w.Live, w.Until, t.offers.handedOver = false, now.Add(t.timing.offerKept), true
			t.offers.Workers = append(t.offers.Workers, w)
		}
	}
	t.offers.Complete, t.offers.next.changed = now.Add(t.timing.offerKept), true
	t.reviewOffers(now)
}

// reviewOffers updates the offers from the live workers.
func (t *term) reviewOffers(now time.Time) {
	o := t.offers
	live := map[string]*workerState{} // the most recently seen worker of each set of capabilities
	for _, w := range t.workers {
		if last := live[w.offer]; !w.info.Draining && (last == nil || last.seen.Before(w.seen)) {
			live[w.offer] = w
		}
	}
	if len(live) > 0 && now.Before(o.Complete) && (o.handedOver || t.SoleWorker) {
		o.Complete, o.next.changed = now, true
	}
	o.Workers = slices.DeleteFunc(o.Workers, func(w *offer) bool {
		key := memoryKey(w.Capabilities, w.Memory)
		if worker := live[key]; worker != nil {
			o.next.changed = o.next.changed || !w.Live
			w.Live, w.Until, w.seen = true, time.Time{}, worker.seen
			delete(live, key)
			return false
		}
		if w.Live {
			w.Live, w.Until, o.next.changed = false, w.seen.Add(t.timing.offerKept), true
		}
		gone := !now.Before(w.Until)
		o.next.changed = o.next.changed || gone
		return gone
	})
	for _, key := range slices.Sorted(maps.Keys(live)) {
		w := live[key]
		o.Workers = append(o.Workers, &offer{
			Capabilities: slices.Sorted(maps.Keys(w.capabilities)), Memory: w.memory, Live: true, seen: w.seen,
		})
		o.next.changed = true
	}
	if started := t.startedPools(); !slices.EqualFunc(started, o.Started, slices.Equal) {
		o.Started, o.next.changed = started, true
	}
}

// startedPools returns the capabilities of the pools that the autoscaler starts workers of.
func (t *term) startedPools() (list [][]string) {
	if t.Autoscaler == nil || !t.Autoscaler.Starts {
		return nil
	}
	t.pools.of(proto.DefaultPool) // it exists before the first worker
	for _, name := range slices.Sorted(maps.Keys(t.pools.byName)) {
		list = append(list, t.pools.byName[name].Capabilities)
	}
	return list
}

// OfferCache knows what workers can run. Run must be running.
type OfferCache struct{ cache *store.Collection[Offers] }

// OpenOffers reads what workers can run.
func OpenOffers(ctx context.Context, st *store.Store, log *slog.Logger) (*OfferCache, error) {
	cache, err := store.OpenCollection(ctx, store.CollectionConfig[Offers]{
		Store: st, Bucket: st.Control, Keys: offersKey, Name: "capabilities of workers", Decode: decodeOffers, Log: log,
	})
	if err != nil {
		return nil, err
	}
	return &OfferCache{cache}, nil
}

func decodeOffers(e jetstream.KeyValueEntry) (*Offers, error) {
	o, err := store.DecodeJSON[Offers](e)
	if err == nil {
		o.Workers = slices.DeleteFunc(o.Workers, func(w *offer) bool { return w == nil })
	}
	return o, err
}

// Run follows the changes until ctx is done. It always returns nil.
func (c *OfferCache) Run(ctx context.Context) error { return c.cache.Run(ctx) }

// Missing returns what live workers lack to run an execution, or nil. It reads memory only, and may
// be a few seconds old.
func (c *OfferCache) Missing(m *proto.Meta) *proto.Missing {
	o := c.cache.Get(offersKey)
	if o == nil {
		return nil
	}
	return o.missing(needsOf(m), m.SandboxMemory, time.Now())
}

// AgentVersions returns the versions of an agent's program that live sandboxes can have, the newest
// first. It reads memory only, and may be a few seconds old.
func (c *OfferCache) AgentVersions(agent string) (versions []string) {
	o := c.cache.Get(offersKey)
	if o == nil {
		return nil
	}
	now := time.Now()
	for _, w := range o.Workers {
		if slices.Contains(w.Capabilities, CapabilitySandboxes) && (w.Live || now.Before(w.Until)) {
			versions = append(versions, agentVersions(w.Capabilities, agent)...)
		}
	}
	slices.SortFunc(versions, func(a, b string) int { return proto.CompareAgentVersions(b, a) })
	return slices.Compact(versions)
}
