package main

import (
	"cmp"
	"context"
	"fmt"
	"io"
	"sync"
	"sync/atomic"
	"time"

	"github.com/bullpen-run/bullpen/proto"
)

const (
	burstCalls  = 50 // fewer than idleConnections
	bursts      = 20
	quickBursts = 3
)

// measureBursts sends bursts of python calls, each to an idle server with a full pool of jails. It
// returns when the last response of each burst arrived.
func measureBursts(ctx context.Context, t *target, times int, progress io.Writer) (*summary, error) {
	host, err := ownPIDSpace()
	if err != nil {
		return nil, err
	}
	var nonce atomic.Int64
	nonce.Store(firstNonce())
	_, _ = fmt.Fprintf(progress, "%d bursts of %d …\n", times, burstCalls)
	k := printing(proto.Python)
	var s series
	for range times {
		if err := t.quiet(ctx); err != nil {
			return nil, err
		}
		s.once(ctx, func(ctx context.Context) (sample, error) {
			errs := make([]error, burstCalls)
			began := time.Now()
			var all sync.WaitGroup
			for i := range errs {
				all.Go(func() { _, errs[i] = k.inJail(ctx, t.api, nonce.Add(1), host) })
			}
			all.Wait()
			return sample{took: time.Since(began)}, cmp.Or(errs...)
		})
	}
	return s.summary(), nil
}

// burstTargets returns the target figures. s is nil if they were not measured.
func burstTargets(s *summary) []figure {
	name := fmt.Sprintf("burst of %d python calls on an idle server, last answer, ", burstCalls)
	median, worst := atMost(name+"median", targetBurstMS, "ms"), atMost(name+"worst", targetBurstMS, "ms")
	switch {
	case s == nil:
		const why = "needs a server that is started here"
		return []figure{median.unknown(why), worst.unknown(why)}
	case s.Runs == 0:
		return []figure{median.none(s), worst.none(s)}
	}
	note := withErrors(fmt.Sprintf("%d bursts", s.Runs), s)
	return []figure{
		median.is(s.P50, s.P50 <= targetBurstMS && s.Errors == 0, note),
		worst.is(s.Max, s.Max <= targetBurstMS && s.Errors == 0, note),
	}
}
