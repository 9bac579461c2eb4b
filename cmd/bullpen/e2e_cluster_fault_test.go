package main

import (
	"testing"
	"time"
)

// testCluster runs executions on three NATS servers.
func testCluster(t *testing.T, p *programs) {
	w := newWorld(t, p, onCluster(), manySlots)
	l := startLoad(t, w)
	l.since(t, time.Now(), 50)
	w.cluster.whole(t)
	l.check(t)
}
