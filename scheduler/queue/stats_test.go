package queue

import (
	"encoding/json"
	"testing"
	"time"

	"github.com/nats-io/nats.go"

	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/scheduler/store"
	"github.com/bullpen-run/bullpen/scheduler/storetest"
)

// Anybody may request statistics. All requests that wait cost the loop one computation.
// Eight slots, each free again after four seconds, start two jobs per second.
func TestStartRateIsMeasuredWhileJobsWait(t *testing.T) {
	var r startRate
	now := noon
	pass := func(d time.Duration, perSecond int, waiting bool) {
		for range int(d / time.Second) {
			now = now.Add(time.Second)
			r.started += perSecond
			r.update(now, waiting)
		}
	}
	r.update(now, false)
	pass(time.Minute, 50, false) // nobody waits: more could start
	if r.perSecond() != 0 {
		t.Errorf("%v starts per second without a queue", r.perSecond())
	}
	pass(2*time.Second, 2, true)
	if got := r.perSecond(); got != 2 {
		t.Errorf("%v starts per second, want 2", got)
	}
	pass(time.Minute, 8, true)
	pass(time.Hour, 0, false)
	if got := r.perSecond(); got < 7.9 || got > 8 {
		t.Errorf("%v starts per second, want 8 again", got)
	}
}

func TestStatsRequestsAreAnsweredTogether(t *testing.T) {
	st := storetest.Open(t, storetest.Server(t))
	ctx := storetest.Context(t)
	tm := newTestTerm(t, st)
	for range 3 {
		m := storetest.Job("acme", "k", proto.ModeAsync).Meta
		m.CreatedAt = time.Now().Add(-time.Minute)
		tm.queue.add(m)
	}
	serve(tm.queue).since = time.Now()
	tm.queue.expire(serve(tm.queue)) // counts as queued until its record is written
	tm.review(ctx, time.Now())
	stop, err := tm.subscribe(ctx)
	if err != nil {
		t.Fatal(err)
	}
	defer stop()
	answers, err := st.Conn.SubscribeSync(nats.NewInbox())
	if err != nil {
		t.Fatal(err)
	}
	const requests = 100
	for range requests {
		if err := st.Conn.PublishRequest(store.StatsSubject, answers.Subject, nil); err != nil {
			t.Fatal(err)
		}
	}
	waiting := func() int {
		tm.statsRequests.mu.Lock()
		defer tm.statsRequests.mu.Unlock()
		return len(tm.statsRequests.waiting)
	}
	for waiting() < requests {
		if time.Sleep(time.Millisecond); ctx.Err() != nil {
			t.Fatalf("%d requests arrived", waiting())
		}
	}
	if n := len(tm.inbox); n != 1 {
		t.Fatalf("%d functions for the loop", n)
	}
	step(t, tm)
	for range requests {
		m, err := answers.NextMsgWithContext(ctx)
		if err != nil {
			t.Fatal(err)
		}
		var got proto.QueueStats
		if err := json.Unmarshal(m.Data, &got); err != nil || got.Queued != 2 || got.Running != 1 || got.OldestQueue < 60 {
			t.Fatalf("%s, %v", m.Data, err)
		}
	}
}
