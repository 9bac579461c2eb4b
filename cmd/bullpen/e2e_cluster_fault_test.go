package main

import (
	"flag"
	"math/rand/v2"
	"net/http"
	"slices"
	"testing"
	"time"
)

var clusterCycles = flag.Int("cluster-cycles", 5, "how often a server of a cluster of NATS servers is harmed while it leads")

// nodeFault is what is done to a server, and how that is undone.
type nodeFault struct {
	name     string
	do, undo func(t *testing.T, n *natsNode)
}

func nodeFaults() []nodeFault {
	heal := func(t *testing.T, n *natsNode) { n.heal(t) }
	return []nodeFault{
		{"killed", func(_ *testing.T, n *natsNode) { n.kill() }, func(t *testing.T, n *natsNode) { n.start(t) }},
		{"frozen", func(_ *testing.T, n *natsNode) { n.freeze() }, func(_ *testing.T, n *natsNode) { n.thaw() }},
		{"cut off", func(t *testing.T, n *natsNode) { n.cut(t) }, heal},
		{"not heard", func(t *testing.T, n *natsNode) { n.mute(t) }, heal},
		{"deaf", func(t *testing.T, n *natsNode) { n.deafen(t) }, heal},
	}
}

// flowing is how many executions that end show that all is well: every client has one in flight when a fault comes, which may end yet.
const flowing = 40

// testClusterLeaders harms the server that leads the stream of records or that of jobs, again and again, while executions are run.
func testClusterLeaders(t *testing.T, p *programs) {
	w := newWorld(t, p, onCluster(), manySlots)
	l := startLoad(t, w)
	l.since(t, time.Now(), flowing)
	w.cluster.whole(t)
	recovered := map[string][]time.Duration{}
	faults := nodeFaults()
	for i := range *clusterCycles {
		fault := faults[i%len(faults)]
		stream := []string{"BULLPEN_EXECS", "BULLPEN_JOBS"}[rand.IntN(2)]
		n := w.cluster.leader(t, stream)
		at := time.Now()
		fault.do(t, n)
		gap := l.since(t, at, flowing)
		l.outage(at, gap)
		for _, kind := range []string{fault.name, "all"} {
			recovered[kind] = append(recovered[kind], gap)
		}
		t.Logf("%s: %s, which led %s, was %s: %s without an execution that ended; %s", at.Format(time.TimeOnly), n.name, stream, fault.name,
			gap.Round(time.Millisecond), l)
		fault.undo(t, n)
		w.cluster.whole(t)
	}
	l.check(t)
	for kind, gaps := range recovered {
		slices.Sort(gaps)
		t.Logf("figure: recovery after a leader was lost (%s, %d times): p50 %s, max %s", kind, len(gaps),
			gaps[len(gaps)/2].Round(time.Millisecond), gaps[len(gaps)-1].Round(time.Millisecond))
	}
}

// testClusterNodes does what operators do, and what happens to them, while executions are run: all servers are restarted one by one, one loses
// its disk and is replaced, two are lost for a while, the disk of one is full, then those of all.
func testClusterNodes(t *testing.T, p *programs) {
	w := newWorld(t, p, onCluster(), manySlots)
	l := startLoad(t, w)
	l.since(t, time.Now(), flowing)
	c := w.cluster
	c.whole(t)
	step := func(name string, do func()) {
		t.Helper()
		at := time.Now()
		do()
		c.whole(t)
		l.since(t, time.Now(), flowing)
		l.mu.Lock()
		first, _ := slices.BinarySearchFunc(l.finished, at, time.Time.Compare)
		gap := longest(at, l.finished[first:])
		l.mu.Unlock()
		l.outage(at, gap)
		t.Logf("%s, in %s: %s at most without an execution that ended; %s", name, time.Since(at).Round(time.Millisecond), gap.Round(time.Millisecond), l)
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
		l.isRefused(t)
		c.nodes[0].start(t)
		c.nodes[1].start(t)
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
		l.isRefused(t)
		for _, n := range c.nodes { // one that has turned JetStream off may not end in order
			n.free(t)
			n.kill()
			n.start(t)
		}
	})
	l.check(t)
}

// isRefused waits until a submission is refused for the time being, as every one has to be that cannot be stored.
func (l *load) isRefused(t *testing.T) {
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
	if r := l.w.get("/readyz"); r.status != http.StatusServiceUnavailable {
		t.Errorf("ready: %s", r)
	}
}
