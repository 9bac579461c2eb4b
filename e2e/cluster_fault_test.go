package e2e

import (
	"fmt"
	"maps"
	"math/rand/v2"
	"net/http"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"
)

var clusterCycles = repeatsFlag("cluster-cycles", 5, 5,
	"how often a server of a cluster of NATS servers is harmed while it leads")

// nodeFault is a fault of one server and how to undo it.
type nodeFault struct {
	name           string
	inject, repair func(t *testing.T, n *natsNode)
}

func nodeFaults() []nodeFault {
	heal := func(t *testing.T, n *natsNode) { n.heal(t) }
	return []nodeFault{
		{"killed", func(_ *testing.T, n *natsNode) { n.kill() }, func(t *testing.T, n *natsNode) { n.start(t) }},
		{"frozen", func(_ *testing.T, n *natsNode) { n.freeze() }, func(_ *testing.T, n *natsNode) { n.thaw() }},
		{"cut off", func(t *testing.T, n *natsNode) { n.cut(t) }, heal},
		{"outgoing packets dropped", func(t *testing.T, n *natsNode) { n.dropOutgoing(t) }, heal},
		{"deaf", func(t *testing.T, n *natsNode) { n.dropIncoming(t) }, heal},
	}
}

// flowing is the number of finished executions that prove recovery. When a fault occurs, every
// client has one execution in flight, which may still end.
const flowing = 40

// testClusterLeaders repeatedly disrupts the leader of the records stream or of the jobs stream
// while executions run.
func testClusterLeaders(t *testing.T, p *programs) {
	sys := newSystem(t, p, onCluster(), manySlots)
	l := startLoad(t, sys)
	l.since(t, time.Now(), flowing)
	sys.cluster.whole(t)
	recovered := recoveries{}
	faults := nodeFaults()
	for i := range clusterCycles.n() {
		fault := faults[i%len(faults)]
		stream := []string{"BULLPEN_EXECS", "BULLPEN_JOBS"}[rand.IntN(2)]
		n := sys.cluster.leader(t, stream)
		at := time.Now()
		fault.inject(t, n)
		l.outage(at, longest(at, l.since(t, at, flowing)))
		outage := span{at, l.renewed(t, at)}
		r := recoveryOf(outage, sys.cluster.elections(t, outage), sys.front.hasLogWithin(t, "dispatcher leads", outage))
		recovered.add(fault.name, r)
		t.Logf("%s: %s, which led %s, was %s: %s; %s", at.Format(time.TimeOnly), n.name, stream, fault.name, r, l)
		fault.repair(t, n)
		sys.cluster.whole(t)
		// Executions may end again before the stream of leases has a leader.
		if elected, ok := sys.cluster.elections(t, span{at, time.Now()})[leasesGroup]; ok {
			l.outage(at, elected.Sub(at))
		}
	}
	l.check(t)
	recovered.log(t)
}

// recovery is the time from a fault until the end of the first execution submitted after it. It has
// two parts, split when the last Raft group that executions need had elected a leader.
type recovery struct {
	whole, election, ours time.Duration
	chosen                string // groups that elected a leader in that time, and when
}

// neededGroups are the Raft groups whose leaders a submission and an execution need.
var neededGroups = []string{"BULLPEN_JOBS", "BULLPEN_EXECS", "BULLPEN_OUT", "KV_bullpen_control"}

// leasesGroup is the Raft group that workers renew their leases in.
const leasesGroup = "BULLPEN_LEASES"

// recoveryOf splits a recovery into its steps. A dispatcher that rereads the streams needs
// consumers, which the meta group creates.
func recoveryOf(outage span, elections map[string]time.Time, anew bool) recovery {
	r := recovery{whole: outage.to.Sub(outage.from)}
	needed := neededGroups
	if anew {
		needed = append(slices.Clone(needed), metaGroup, leasesGroup)
	}
	var chosen []string
	for _, group := range slices.SortedFunc(maps.Keys(elections), func(a, b string) int {
		return elections[a].Compare(elections[b])
	}) {
		after := elections[group].Sub(outage.from)
		chosen = append(chosen, fmt.Sprintf("%s %s", group, after.Round(time.Millisecond)))
		if slices.Contains(needed, group) {
			r.election = after
		}
	}
	r.ours, r.chosen = r.whole-r.election, strings.Join(chosen, ", ")
	return r
}

func (r recovery) String() string {
	return fmt.Sprintf("the first execution submitted since ended after %s, %s after the last election (%s)",
		r.whole.Round(time.Millisecond),
		r.ours.Round(time.Millisecond), r.chosen)
}

// recoveries maps each fault's name to its recoveries.
type recoveries map[string][]recovery

func (all recoveries) add(fault string, r recovery) {
	all[fault] = append(all[fault], r)
	all["all"] = append(all["all"], r)
}

func (all recoveries) log(t *testing.T) {
	t.Helper()
	for _, fault := range slices.Sorted(maps.Keys(all)) {
		figure := func(part func(recovery) time.Duration) string {
			var of []time.Duration
			for _, r := range all[fault] {
				of = append(of, part(r))
			}
			slices.Sort(of)
			return fmt.Sprintf("p50 %s, max %s", of[len(of)/2].Round(time.Millisecond), of[len(of)-1].Round(time.Millisecond))
		}
		t.Logf("figure: recovery after a leader was lost (%s, %d times): %s; of that elections %s; the rest %s", fault,
			len(all[fault]),
			figure(func(r recovery) time.Duration { return r.whole }),
			figure(func(r recovery) time.Duration { return r.election }),
			figure(func(r recovery) time.Duration { return r.ours }))
	}
}

// testClusterNodes performs operations and injects failures while executions run. All servers
// restart one by one, one server loses its disk and is replaced, and two fail for a while. Then one
// disk fills up, and after that all disks.
func testClusterNodes(t *testing.T, p *programs) {
	sys := newSystem(t, p, onCluster(), manySlots)
	l := startLoad(t, sys)
	l.since(t, time.Now(), flowing)
	c := sys.cluster
	c.whole(t)
	step := func(name string, do func()) {
		t.Helper()
		at := time.Now()
		do()
		c.whole(t)
		l.since(t, time.Now(), flowing)
		l.mu.Lock()
		first, _ := slices.BinarySearchFunc(l.finished, at, span.endsAt)
		gap := longest(at, l.finished[first:])
		l.mu.Unlock()
		l.outage(at, gap)
		t.Logf("%s, in %s: %s at most without an execution that ended; %s", name, time.Since(at).Round(time.Millisecond),
			gap.Round(time.Millisecond), l)
	}
	step("all restarted", func() {
		for _, n := range c.nodes {
			n.stop(t)
			n.start(t)
			c.whole(t)
		}
	})
	step("one replaced", func() { c.leader(t, "BULLPEN_EXECS").replace(t) })
	step("two lost", func() {
		c.nodes[0].kill()
		c.nodes[1].kill()
		l.checkRejects(t)
		c.nodes[0].start(t)
		c.nodes[1].start(t)
		// Until then, the third server may be the only one with the latest messages, so it must
		// keep its disk.
		c.whole(t)
	})
	step("one full", func() {
		n := c.leader(t, "BULLPEN_EXECS")
		n.fill(t)
		l.since(t, time.Now(), flowing)
		n.free(t)
		n.kill()
		n.start(t)
	})
	step("all full", func() {
		for _, n := range c.nodes {
			n.fill(t)
		}
		l.checkRejects(t)
		for _, n := range c.nodes { // a server that has disabled JetStream may not exit cleanly
			n.free(t)
			n.kill()
			n.start(t)
		}
	})
	l.check(t)
}

// checkRejects waits until a submission is rejected with Retry-After, as every one must be that
// cannot be stored.
func (l *load) checkRejects(t *testing.T) {
	t.Helper()
	eventually(t, "new work is refused", func() (bool, any) {
		l.mu.Lock()
		before := l.refused
		l.mu.Unlock()
		_, err := l.submit(t.Context(), "one more", program("one more"), "Prefer", "respond-async")
		if err != nil {
			t.Fatal(err)
		}
		l.mu.Lock()
		defer l.mu.Unlock()
		return l.refused > before, "it is not"
	})
	if r := l.sys.get("/readyz"); r.status != http.StatusServiceUnavailable {
		t.Errorf("ready: %s", r)
	}
}

// testFreshCluster starts all processes at the same time as the NATS servers they use, which store
// nothing yet and have no leader. No process may exit.
func testFreshCluster(t *testing.T, p *programs) {
	d := newDeployment(t, p, onCluster())
	d.cluster = d.programs.startCluster(t)
	for _, n := range d.cluster.nodes {
		n.kill()
		n.wipe(t)
	}
	d.addSeparate(d.cluster.env(), func(m *member) { m.args = append(m.args, d.cluster.flags()...) })
	d.cluster.launch(t)
	var all sync.WaitGroup
	for _, m := range d.members {
		all.Go(func() { m.start(d) })
	}
	all.Wait()
	d.ready()
	for _, m := range d.gateways(rand.New(rand.NewPCG(0, 0))) {
		a := d.clientOf(m)
		if rec := a.ended(a.submit(bash("echo fresh"))); rec.Stdout == nil || *rec.Stdout != "fresh\n" {
			t.Errorf("%s: %+v", m.name, rec)
		}
	}
}
