package queue

import (
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/nats-io/nats.go"

	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/scheduler/storetest"
)

func TestAdmitRespectsMaxSize(t *testing.T) {
	q := newFairQueue()
	const each = 4
	q.maxSize = orgShare * each * (jobCost + 100)
	waiting := func(org string) proto.Meta {
		m := meta(org, "k", proto.ModeAsync)
		m.MaxQueued, m.Metadata = 1000, map[string]string{"text": strings.Repeat("x", 96)}
		return m
	}
	var jobs []*job
	var refused *proto.Rejection
	for range 2 * each {
		for _, org := range []string{"a", "b", "c"} {
			m := waiting(org)
			if rejection := q.admit(&m); rejection != nil {
				refused = rejection
			} else {
				jobs = append(jobs, q.add(m))
			}
		}
	}
	if len(jobs) != orgShare*each || refused == nil || refused.Reason != proto.RejectedUnavailable {
		t.Fatalf("%d jobs were admitted; rejection: %v", len(jobs), refused)
	}
	serve(q) // running jobs count too
	for _, j := range jobs {
		q.remove(j)
	}
	if q.size != 0 || len(q.orgs) != 0 {
		t.Fatalf("an empty queue has %d bytes, %d organisations", q.size, len(q.orgs))
	}
	// One organisation gets its share.
	n := 0
	for m := waiting("a"); q.admit(&m) == nil; m = waiting("a") {
		q.add(m)
		n++
	}
	if n != each {
		t.Fatalf("one organisation has %d jobs, want %d", n, each)
	}
}

// step runs the next function in the inbox.
func step(t *testing.T, tm *term) {
	t.Helper()
	select {
	case f := <-tm.inbox:
		f()
	case <-storetest.Context(t).Done():
		t.Fatal("the inbox stays empty")
	}
}

func TestSubmissionsAreRefusedWhileTooManyAreStored(t *testing.T) {
	server := storetest.Server(t)
	st := storetest.Open(t, server)
	ctx := storetest.Context(t)
	tm := newTestTerm(t, st)
	job := func() *proto.Job {
		j := storetest.Job("acme", "k", proto.ModeAsync)
		j.Code = strings.Repeat("#", 100<<10)
		return j
	}
	first, second := job(), job()
	tm.Memory = storingShare * (submissionCost + bodyCopies*(110<<10)) // one of them
	stop, err := tm.subscribe(ctx)
	if err != nil {
		t.Fatal(err)
	}
	defer stop()
	submit := func(j *proto.Job) <-chan error {
		answer := make(chan error, 1)
		q := &Queue{Store: storetest.Open(t, server)}
		go func() { answer <- q.Submit(ctx, j) }()
		return answer
	}
	stored := submit(first)
	arrival := <-tm.inbox
	refused := submit(second)
	refuse := <-tm.inbox
	arrival()
	refuse()
	var rejection *proto.Rejection
	if err := <-refused; !errors.As(err, &rejection) || rejection.Reason != proto.RejectedUnavailable {
		t.Fatalf("the second: %v", err)
	}
	if tm.queue.jobs[second.TraceID] != nil {
		t.Error("a refused job is queued")
	}
	step(t, tm)
	if err := <-stored; err != nil {
		t.Fatalf("the first: %v", err)
	}
	stored = submit(second)
	step(t, tm)
	step(t, tm)
	if err := <-stored; err != nil {
		t.Fatalf("the second, later: %v", err)
	}
	if n := tm.storing.Load(); n != 0 {
		t.Errorf("%d bytes are counted as being stored", n)
	}
}

// A submission is repeated when its answer is late. It must not be refused if the job may be
// stored.
func TestKnownSubmissionIsNotRefusedForMemory(t *testing.T) {
	st := storetest.Open(t, storetest.Server(t))
	ctx := storetest.Context(t)
	tm := newTestTerm(t, st)
	answers, err := st.Conn.SubscribeSync(nats.NewInbox())
	if err != nil {
		t.Fatal(err)
	}
	again := func(j *proto.Job) {
		m, err := st.Jobs.Stage(ctx, j, nats.Header{})
		if err != nil {
			t.Fatal(err)
		}
		m.Reply, m.Sub = answers.Subject, answers
		tm.refuseForMemory(m)
	}
	queued, ended, unknown := storetest.Job("acme", "k", proto.ModeAsync), storetest.Job("acme", "k", proto.ModeAsync),
		storetest.Job("acme", "k", proto.ModeAsync)
	tm.queue.add(queued.Meta)
	tm.outcomes[ended.TraceID] = outcome{at: noon}
	again(queued)
	again(ended)
	tm.stillLeader = func() bool { return false }
	again(unknown)
	if err := st.Conn.Flush(); err != nil {
		t.Fatal(err)
	}
	if n, _, err := answers.Pending(); n != 0 || err != nil {
		t.Errorf("%d were answered, %v", n, err)
	}
	tm.stillLeader = func() bool { return true }
	again(unknown)
	if m, err := answers.NextMsgWithContext(ctx); err != nil ||
		!strings.Contains(string(m.Data), string(proto.RejectedUnavailable)) {
		t.Errorf("an unknown one: %v", err)
	}
}

// A long queue may expire in one moment.
func TestConcurrentExpiryIsBounded(t *testing.T) {
	st := storetest.Open(t, storetest.Server(t))
	ctx := storetest.Context(t)
	tm := newTestTerm(t, st)
	const jobs = maxExpiring + 100
	for range jobs {
		job := storetest.Job("acme", "k", proto.ModeAsync)
		job.CreatedAt, job.QueueDeadline = noon, noon
		if err := storetest.PutJob(ctx, st, job); err != nil {
			t.Fatal(err)
		}
		tm.queue.add(job.Meta)
	}
	tm.review(ctx, noon.Add(time.Hour))
	tm.assign(ctx, noon.Add(time.Hour))
	if tm.expiring != maxExpiring {
		t.Errorf("%d writes at once, want %d", tm.expiring, maxExpiring)
	}
	for len(tm.queue.jobs) > 0 {
		step(t, tm)
	}
	if tm.expiring != 0 || len(tm.outcomes) != jobs {
		t.Errorf("%d writes pending, %d outcomes", tm.expiring, len(tm.outcomes))
	}
}
