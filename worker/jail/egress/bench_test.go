package egress_test

import (
	"context"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/bullpen-run/bullpen/worker/jail/egress"
)

// cycle attaches and closes a link. It returns the duration of the former.
func cycle(b testing.TB, n *egress.Network, j *jail) time.Duration {
	start := time.Now()
	l, err := n.Attach(context.Background(), j.netns, unrestricted, 1)
	took := time.Since(start)
	if err != nil {
		b.Error(err)
		return 0
	}
	l.Close()
	until(b, "the interface to go", func() bool { return len(j.do(order{Do: "interfaces"}).Found) == 2 })
	return took
}

// BenchmarkAttach measures how long a jail waits for its network.
func BenchmarkAttach(b *testing.B) {
	n := open(b)
	j := newJail(b)
	var took []time.Duration
	for b.Loop() {
		took = append(took, cycle(b, n, j))
	}
	reportWaits(b, took)
}

// BenchmarkAttachAmongOthers attaches and closes seven other links meanwhile.
func BenchmarkAttachAmongOthers(b *testing.B) {
	n := open(b)
	ctx, cancel := context.WithCancel(b.Context())
	var others sync.WaitGroup
	for range 7 {
		other := newJail(b)
		others.Go(func() {
			for ctx.Err() == nil {
				cycle(b, n, other)
			}
		})
	}
	j := newJail(b)
	var took []time.Duration
	for b.Loop() {
		took = append(took, cycle(b, n, j))
	}
	cancel()
	others.Wait()
	reportWaits(b, took)
}

func reportWaits(b *testing.B, took []time.Duration) {
	slices.Sort(took)
	b.ReportMetric(0, "ns/op") // the duration of the whole cycle is not of interest
	b.ReportMetric(float64(took[len(took)/2].Microseconds())/1000, "p50-ms")
	b.ReportMetric(float64(took[len(took)*95/100].Microseconds())/1000, "p95-ms")
}
