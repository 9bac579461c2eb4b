package egress

import (
	"context"
	"sync/atomic"
	"time"

	"golang.org/x/time/rate"

	"github.com/bullpen-run/bullpen/proto"
)

const (
	minBurst   = 64 << 10 // bytes, at least one datagram
	burstShare = 20       // part of a second's bytes that a burst may have, so that timers are precise enough
	// maxOpenWait is how long a connection beyond the rate may wait. Programs rarely give up before.
	maxOpenWait = 10 * time.Second
)

// meter counts and limits the bytes of a link in one direction.
type meter struct {
	limit *rate.Limiter
	bytes atomic.Int64
}

// newBandwidth returns a limit of bytes per second; 0 is none.
func newBandwidth(perSecond proto.Bytes) *rate.Limiter {
	if perSecond == 0 {
		return rate.NewLimiter(rate.Inf, 0)
	}
	return rate.NewLimiter(rate.Limit(perSecond), int(max(minBurst, perSecond/burstShare)))
}

// newOpenRate returns a limit of connections per second; 0 is none.
func newOpenRate(perSecond int) *rate.Limiter {
	if perSecond == 0 {
		return rate.NewLimiter(rate.Inf, 0)
	}
	return rate.NewLimiter(rate.Limit(perSecond), perSecond)
}

// reserve returns how long the sender of n bytes must wait. n must be at most minBurst.
func (m *meter) reserve(n int) time.Duration { return m.limit.ReserveN(time.Now(), n).Delay() }

// await waits until n bytes may be sent, or returns ctx's error. n must be at most minBurst.
func (m *meter) await(ctx context.Context, n int) error { return sleep(ctx, m.reserve(n)) }

// reserveOpen returns how long a new connection must wait. It returns false if that is too long.
func (l *Link) reserveOpen() (wait time.Duration, ok bool) {
	r := l.opens.Reserve()
	if wait = r.Delay(); wait > maxOpenWait {
		r.Cancel()
		return 0, false
	}
	return wait, true
}

// sleep waits, or returns ctx's error if it is done first.
func sleep(ctx context.Context, d time.Duration) error {
	if d <= 0 {
		return nil
	}
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}
