package queue

import (
	"testing"
	"time"

	"github.com/bullpen-run/bullpen/proto"
)

// Jobs that a limit keeps from running are no demand, however long they wait.
func TestStartableJobs(t *testing.T) {
	q := newFairQueue()
	add := func(org, key string, n, limit, keyLimit int, age time.Duration) {
		for range n {
			m := meta(org, key, proto.ModeAsync)
			m.Concurrent, m.KeyConcurrent, m.CreatedAt = limit, keyLimit, noon.Add(-age)
			q.add(m)
		}
	}
	check := func(jobs int, age time.Duration) {
		t.Helper()
		total := waiting{oldest: noon}
		for _, w := range q.startable(slotsFor(nil)) {
			if total.jobs += w.jobs; w.oldest.Before(total.oldest) {
				total.oldest = w.oldest
			}
		}
		if total.jobs != jobs || noon.Sub(total.oldest) != age {
			t.Errorf("got %d jobs, the oldest of %s; want %d and %s", total.jobs, noon.Sub(total.oldest), jobs, age)
		}
	}
	check(0, 0)
	add("one", "k", 10, 1, 0, time.Hour)
	check(1, time.Hour)
	serve(q)
	check(0, 0)
	add("two", "limited", 10, 5, 2, time.Minute)
	check(2, time.Minute)
	add("two", "free", 10, 5, 0, time.Second)
	check(5, time.Minute)
	add("three", "k", 3, 5, 0, 2*time.Minute)
	check(8, 2*time.Minute)
}

func TestValidPool(t *testing.T) {
	for name, want := range map[string]bool{
		"default": true, "gpu_2-Arm": true, "": false, "a b": false, "ü": false, "a.b": false,
		string(make([]byte, 64)): false,
	} {
		if got := ValidPool(name); got != want {
			t.Errorf("%q: %v", name, got)
		}
	}
}
