package queue

import (
	"fmt"
	"math"
	"testing"
	"time"

	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/scheduler/storetest"
)

// The estimated positions are those in which the queue serves the jobs, to within one service of
// each rival.
func TestPositionsAreThoseOfTheService(t *testing.T) {
	tm := newTestTerm(t, storetest.Open(t, storetest.Server(t)))
	tm.workers["w"] = &workerState{
		slots: 1, capabilities: newCapabilities([]string{CapabilityLanguage(proto.Python)}),
		load: tm.queue.load("w"),
	}
	add := func(n int, org, key string, mode proto.Mode, weight int) {
		for range n {
			m := meta(org, key, mode)
			m.Concurrent, m.Weight, m.Language = 1000, weight, proto.Python
			tm.queue.add(m)
		}
	}
	add(40, "a", "k1", proto.ModeAsync, 4)
	add(6, "a", "k1", proto.ModeInline, 4)
	add(10, "a", "k2", proto.ModeAsync, 4)
	add(100, "b", "k3", proto.ModeAsync, 1)
	add(30, "c", "k4", proto.ModeInline, 16)
	estimated := map[proto.TraceID]int{}
	for id, j := range tm.queue.jobs {
		estimated[id] = tm.place(tm.queue.orgs[j.meta.Org], j, noon).Position
	}
	const rivals = 16 + 1 + 1 + 4 // services of others that may come first or not
	for i := range len(tm.queue.jobs) {
		j := serve(tm.queue)
		if n := estimated[j.meta.TraceID]; n < i-rivals || n > i+rivals {
			t.Errorf("job %d of %s %s %s was estimated at %d", i, j.meta.Org, j.meta.Key, j.meta.Class(), n)
		}
	}
}

func TestEstimatedWait(t *testing.T) {
	const unknown = -1
	st := storetest.Open(t, storetest.Server(t))
	for name, tt := range map[string]struct {
		slots, free, limit, keyLimit, ahead, active int
		mean                                        time.Duration
		interactive                                 bool
		want                                        float64
	}{
		"no worker":                     {slots: 0, limit: 9, mean: time.Second, want: unknown},
		"a free slot":                   {slots: 4, free: 1, limit: 9, want: 0},
		"no mean":                       {slots: 4, limit: 9, want: unknown},
		"next":                          {slots: 4, limit: 9, mean: 8 * time.Second, want: 2},
		"behind others":                 {slots: 4, limit: 9, ahead: 7, mean: 8 * time.Second, want: 16},
		"the organisation at its limit": {slots: 4, free: 3, limit: 1, active: 1, mean: 8 * time.Second, want: 8},
		"the key at its limit": {
			slots: 4, free: 3, limit: 9, keyLimit: 1, active: 1, mean: 8 * time.Second, want: 8,
		},
		"slots that interactive jobs may have": {
			slots: 4, free: 1, limit: 9, interactive: true, mean: 6 * time.Second, want: 2,
		},
	} {
		t.Run(name, func(t *testing.T) {
			tm := newTestTerm(t, st)
			tm.Interactive = func(n int) int { return n / 4 }
			job := func() *job {
				m := meta("a", "k", proto.ModeAsync)
				m.Concurrent, m.KeyConcurrent, m.Language = tt.limit, tt.keyLimit, proto.Python
				return tm.queue.add(m)
			}
			if tt.slots > 0 {
				w := &workerState{
					slots: tt.slots, capabilities: newCapabilities([]string{CapabilityLanguage(proto.Python)}),
					load: tm.queue.load("w"), free: make([]uint64, tt.free),
				}
				w.load.jobs.all = tt.slots - tt.free // of others
				tm.workers["w"] = w
			}
			for range tt.active {
				tm.queue.activate(job(), running, "elsewhere", noon)
			}
			last := job()
			for range tt.ahead {
				last = job()
			}
			if tt.mean > 0 {
				tm.pools.of(proto.DefaultPool).Duration.Add(noon, tt.mean.Seconds())
			}
			if tt.interactive {
				tm.demands.of(last.needs.needs).Interactive = noon
			}
			place := tm.place(tm.queue.orgs["a"], last, noon)
			got := float64(unknown)
			if place.Wait != nil {
				got = *place.Wait
			}
			if math.Abs(got-tt.want) > 1e-9 || place.Position != tt.ahead {
				t.Errorf("position %d, wait %v, want %v", place.Position, got, tt.want)
			}
		})
	}
}

// An organisation sees its own executions only.
func TestQueueOfAKey(t *testing.T) {
	tm := newTestTerm(t, storetest.Open(t, storetest.Server(t)))
	ids := map[string]proto.TraceID{}
	for i, of := range []struct {
		org, key string
		mode     proto.Mode
	}{
		{"a", "k1", proto.ModeAsync},
		{"a", "k1", proto.ModeAsync},
		{"a", "k1", proto.ModeInline},
		{"a", "k2", proto.ModeAsync},
		{"b", "k3", proto.ModeAsync},
	} {
		ids[fmt.Sprint(i)] = tm.queue.add(meta(of.org, of.key, of.mode)).meta.TraceID
	}
	tm.queue.activate(tm.queue.jobs[ids["0"]], running, "w", noon)
	v := tm.view(&proto.QueueRequest{
		Org: "a", Key: "k1", Traces: []proto.TraceID{ids["0"], ids["3"], ids["4"], proto.NewTraceID()},
	}, noon)
	if v.Key != (proto.QueueCounts{
		Queued: proto.ClassCounts{Interactive: 1, Background: 1}, Running: proto.ClassCounts{Background: 1},
	}) ||
		v.Org != (proto.QueueCounts{
			Queued: proto.ClassCounts{Interactive: 1, Background: 2}, Running: proto.ClassCounts{Background: 1},
		}) {
		t.Errorf("got %+v", v)
	}
	if v.Oldest == nil || v.Oldest.TraceID != ids["1"] || len(v.Places) != 1 || v.Places[0].TraceID != ids["3"] {
		t.Errorf("got places %+v, oldest %+v", v.Places, v.Oldest)
	}
	if v := tm.view(&proto.QueueRequest{Org: "none", Key: "k"}, noon); v.Oldest != nil || v.Org != (proto.QueueCounts{}) {
		t.Errorf("an organisation without executions got %+v", v)
	}
}

// The queues of organisations are read in parts, those without executions excepted.
func TestQueueOfOrganisations(t *testing.T) {
	tm := newTestTerm(t, storetest.Open(t, storetest.Server(t)))
	for i := range proto.MaxQueueOrgs + 1 {
		tm.queue.add(meta(fmt.Sprintf("org%04d", i), "k", proto.ModeAsync))
	}
	first := tm.viewOrgs("")
	if len(first) != proto.MaxQueueOrgs || first[0].Org != "org0000" ||
		first[0].QueueCounts != (proto.QueueCounts{Queued: proto.ClassCounts{Background: 1}}) {
		t.Fatalf("got %d, the first %+v", len(first), first[0])
	}
	rest := tm.viewOrgs(first[len(first)-1].Org)
	if len(rest) != 1 || rest[0].Org != "org1000" {
		t.Errorf("then got %+v", rest)
	}
}
