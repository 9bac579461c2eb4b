package main

import (
	"testing"
	"time"
)

func testCluster(t *testing.T, p *programs) {
	began := time.Now()
	w := newWorld(t, p, onCluster(), manySlots)
	t.Logf("up after %s", time.Since(began))
	l := startLoad(t, w)
	t.Logf("first %s", l.since(t, time.Now(), 50))
	w.cluster.whole(t)
	t.Logf("whole after %s", time.Since(began))
	for _, f := range []struct {
		name string
		f    func(n *natsNode)
		undo func(n *natsNode)
	}{
		{"kill", func(n *natsNode) { n.kill() }, func(n *natsNode) { n.start(t) }},
		{"freeze", func(n *natsNode) { n.freeze() }, func(n *natsNode) { n.thaw() }},
		{"cut", func(n *natsNode) { n.cut(t) }, func(n *natsNode) { n.heal(t) }},
		{"mute", func(n *natsNode) { n.mute(t) }, func(n *natsNode) { n.heal(t) }},
		{"deafen", func(n *natsNode) { n.deafen(t) }, func(n *natsNode) { n.heal(t) }},
	} {
		n := w.cluster.leader(t, "BULLPEN_EXECS")
		at := time.Now()
		f.f(n)
		gap := l.since(t, at, 100)
		t.Logf("%s %s %s: silence %s, 100 ends after %s; %s", at.Format(time.TimeOnly), f.name, n.name, gap, time.Since(at), l.tail())
		at = time.Now()
		f.undo(n)
		w.cluster.whole(t)
		t.Logf("whole after %s", time.Since(at))
		t.Logf("%s undone, silence %s, %s", f.name, l.since(t, at, 50), l.tail())
	}
	l.check(t)
}
