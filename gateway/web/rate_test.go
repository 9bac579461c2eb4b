package web

import (
	"testing"
	"time"
)

// The buckets of idle names are forgotten.
func TestIdleBucketsAreForgotten(t *testing.T) {
	var l rateLimits
	now := time.Now()
	l.take("idle", 1, 2, now)
	l.take("busy", 1, 2, now)
	later := now.Add(2 * sweepEvery)
	if left, wait := l.take("busy", 1, 2, later); left != 1 || wait != 0 || len(l.buckets) != 1 {
		t.Errorf("%d left, wait %s, %d buckets", left, wait, len(l.buckets))
	}
}
