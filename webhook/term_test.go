package webhook

import (
	"context"
	"runtime"
	"testing"
	"time"
	"weak"
)

// The pause of an endpoint may last for a day. It does not keep a term in memory that has ended.
func TestEndedTermIsNotKept(t *testing.T) {
	newPaused := func(stop bool) weak.Pointer[term] {
		tm := newTerm(context.Background(), &Dispatcher{MaxPerOrigin: 1})
		tm.mu.Lock()
		tm.resumeAfter(tm.queues.acquire(queueKey{"acme", "https://example.com"}), 24*time.Hour)
		tm.mu.Unlock()
		if stop {
			tm.stop()
		}
		return weak.Make(tm)
	}
	going, ended := newPaused(false), newPaused(true)
	// The runtime forgets a stopped timer when it handles others.
	for deadline := time.Now().Add(time.Minute); ended.Value() != nil && time.Now().Before(deadline); runtime.GC() {
		<-time.After(time.Millisecond)
	}
	if going.Value() == nil || ended.Value() != nil {
		t.Fatalf("in memory: the term that goes on %t, the one that has ended %t", going.Value() != nil, ended.Value() != nil)
	}
	going.Value().stop()
}
