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

// Anybody may request statistics. All requests that wait cost the loop one computation.
func TestStatsRequestsAreAnsweredTogether(t *testing.T) {
	st := storetest.Open(t, storetest.Server(t))
	ctx := storetest.Context(t)
	tm := newTestTerm(t, st)
	for range 3 {
		tm.queue.add(waitingSince(time.Now().Add(-time.Minute)))
	}
	serve(tm.queue).since = time.Now()
	tm.queue.expire(serve(tm.queue)) // counts as queued until its record is written
	tm.review(ctx, time.Now())
	stop, err := tm.subscribe(ctx)
	if err != nil {
		t.Fatal(err)
	}
	defer stop()
	for _, answer := range requestTogether(t, tm, store.StatsSubject, &tm.statsRequests, 100) {
		var got proto.QueueStats
		if err := json.Unmarshal(answer, &got); err != nil || got.Queued != 2 || got.Running != 1 || got.OldestQueue < 60 {
			t.Fatalf("%s, %v", answer, err)
		}
	}
}

// Anybody may request the pools, through /metrics. All requests between two reviews cost the loop
// one computation.
func TestPoolsRequestsAreAnsweredTogether(t *testing.T) {
	st := storetest.Open(t, storetest.Server(t))
	ctx := storetest.Context(t)
	tm := newTestTerm(t, st)
	stop, err := tm.subscribe(ctx)
	if err != nil {
		t.Fatal(err)
	}
	defer stop()
	request := func(requests, queued int) {
		t.Helper()
		for _, answer := range requestTogether(t, tm, store.PoolsSubject, &tm.poolsRequests, requests) {
			var got []proto.Pool
			if err := json.Unmarshal(answer, &got); err != nil || len(got) != 1 || got[0].Queued != queued ||
				got[0].OldestWait < 60 {
				t.Fatalf("%s, %v, want %d queued", answer, err, queued)
			}
		}
	}
	tm.queue.add(waitingSince(time.Now().Add(-time.Minute)))
	tm.review(ctx, time.Now())
	request(100, 1)
	tm.queue.add(waitingSince(time.Now().Add(-time.Minute)))
	request(1, 1) // the queue is not walked again before the next review
	tm.review(ctx, time.Now())
	request(100, 2)
}

// waitingSince returns a job that was submitted at a time.
func waitingSince(at time.Time) proto.Meta {
	m := storetest.Job("acme", "k", proto.ModeAsync).Meta
	m.CreatedAt = at
	return m
}

// requestTogether sends requests, checks that they are joined while the loop is busy, and returns
// the answers.
func requestTogether(t *testing.T, tm *term, subject string, joined *joinedRequests, requests int) (answers [][]byte) {
	t.Helper()
	ctx, conn := storetest.Context(t), tm.Store.Conn
	inbox, err := conn.SubscribeSync(nats.NewInbox())
	if err != nil {
		t.Fatal(err)
	}
	for range requests {
		if err := conn.PublishRequest(subject, inbox.Subject, nil); err != nil {
			t.Fatal(err)
		}
	}
	waiting := func() int {
		joined.mu.Lock()
		defer joined.mu.Unlock()
		return len(joined.waiting)
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
		m, err := inbox.NextMsgWithContext(ctx)
		if err != nil {
			t.Fatal(err)
		}
		answers = append(answers, m.Data)
	}
	return answers
}
