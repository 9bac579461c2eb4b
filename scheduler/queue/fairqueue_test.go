package queue

import (
	"fmt"
	"testing"
	"time"

	"github.com/bullpen-run/bullpen/proto"
)

var noon = time.Date(2026, 1, 1, 12, 0, 0, 0, time.UTC)

func meta(org, key string, mode proto.Mode) proto.Meta {
	return proto.Meta{TraceID: proto.NewTraceID(), Org: org, Key: key, Mode: mode, Concurrent: 5, MaxQueued: 3}
}

// slotsFor are free slots that every organisation may take. It reports whether they meet the needs.
type slotsFor func(*needSet) bool

func (s slotsFor) canRun(n *needSet) bool                     { return s(n) }
func (s slotsFor) canRunFor(_ contender, n *needSet) bool     { return s(n) }
func (s slotsFor) backgroundLimit(_, _ string, limit int) int { return limit }

func serve(q *fairQueue) *job {
	j := q.next(slotsFor(func(*needSet) bool { return true }))
	if j != nil {
		q.charge(j)
		q.activate(j, assigned, "w", noon)
	}
	return j
}

func TestKeysOfOneOrganisationAreServedEvenly(t *testing.T) {
	q := newFairQueue()
	for i := range 9 {
		m := meta("org", fmt.Sprintf("k%d", i/3), proto.ModeAsync)
		m.Concurrent = 100
		q.add(m)
	}
	for round := range 3 {
		seen := map[string]bool{}
		for range 3 {
			seen[serve(q).meta.Key] = true
		}
		if len(seen) != 3 {
			t.Fatalf("round %d served only %v", round, seen)
		}
	}
}

func TestOrganisationAtItsLimitIsSkipped(t *testing.T) {
	q := newFairQueue()
	var first []*job
	for range 7 {
		q.add(meta("full", "k", proto.ModeAsync))
	}
	for range 5 {
		first = append(first, serve(q))
	}
	if j := serve(q); j != nil {
		t.Fatalf("job %s was served beyond the limit", j.meta.TraceID)
	}
	other := q.add(meta("other", "k", proto.ModeAsync))
	if j := serve(q); j != other {
		t.Fatalf("served %v, want the other organisation's job", j)
	}
	q.remove(first[0])
	if j := serve(q); j == nil || j.meta.Org != "full" {
		t.Fatalf("served %v after a slot was freed", j)
	}
}

func TestInteractiveJobsAreServedFourToOne(t *testing.T) {
	q := newFairQueue()
	for range 20 {
		for _, mode := range []proto.Mode{proto.ModeAsync, proto.ModeInline} {
			m := meta("org", "k", mode)
			m.Concurrent = 100
			q.add(m)
		}
	}
	background := 0
	for range 10 {
		if serve(q).meta.Class() == proto.ClassBackground {
			background++
		}
	}
	if background != 2 {
		t.Fatalf("%d of the first 10 jobs were background, want 2", background)
	}
}

func TestJobsThatNoSlotCanRunDelayNoOthers(t *testing.T) {
	q := newFairQueue()
	add := func(org, key string, l proto.Language) *job {
		m := meta(org, key, proto.ModeInline)
		m.Concurrent, m.Language = 1000, l
		return q.add(m)
	}
	for range 100 {
		add("a", "k", proto.Node)
	}
	add("a", "k", proto.Python)
	add("b", "k", proto.Python)
	add("b", "k2", proto.Node)
	able := func(names ...string) slotsFor {
		return func(n *needSet) bool { return newCapabilities(names).meet(n.needs) }
	}
	for range 2 {
		j := q.next(able("language:python", "image:x"))
		if j == nil || j.meta.Language != proto.Python {
			t.Fatalf("next is %+v", j)
		}
		q.charge(j)
		q.activate(j, running, "w", noon)
	}
	if j := q.next(able("language:python")); j != nil {
		t.Fatalf("next is %s", j.meta.Language)
	}
	orgs := ""
	for range 4 {
		j := q.next(able("language:node"))
		q.charge(j)
		q.activate(j, running, "w", noon)
		orgs += j.meta.Org
	}
	if orgs != "abaa" {
		t.Fatalf("served %s", orgs)
	}
}

// If every slot can run every job, the needs of jobs do not change the order of organisations.
func TestOrganisationsAreServedEvenlyOverAllNeeds(t *testing.T) {
	q := newFairQueue()
	languages := proto.Languages()
	for i := range 30 {
		for o, org := range []string{"a", "b", "c"} {
			m := meta(org, "k", proto.ModeInline)
			m.Concurrent, m.Language = 1000, languages[(o+i/10)%3]
			q.add(m)
		}
	}
	for round := range 30 {
		seen := map[string]bool{}
		for range 3 {
			seen[serve(q).meta.Org] = true
		}
		if len(seen) != 3 {
			t.Fatalf("round %d served only %v", round, seen)
		}
	}
}

func TestJobsOfOneKeyAreServedInOrderOverAllNeeds(t *testing.T) {
	q := newFairQueue()
	var jobs []*job
	for i := range 9 {
		m := meta("org", "k", proto.ModeAsync)
		m.Concurrent, m.Language = 1000, proto.Languages()[i%3]
		jobs = append(jobs, q.add(m))
	}
	first := serve(q)
	q.requeue(first)
	for i, want := range jobs {
		if j := serve(q); j != want {
			t.Fatalf("job %d is not the next in order", i)
		}
	}
}

func TestCancelledJobIsNotCharged(t *testing.T) {
	q := newFairQueue()
	var a []*job
	for range 3 {
		a = append(a, q.add(meta("a", "k", proto.ModeAsync)))
	}
	other := q.add(meta("b", "k", proto.ModeAsync))
	q.remove(a[0])
	if j := serve(q); j != a[1] {
		t.Fatalf("organisation %s was served out of order", j.meta.Org)
	}
	if j := serve(q); j != other {
		t.Fatalf("organisation %s was served out of order", j.meta.Org)
	}
	for _, mode := range []proto.Mode{
		proto.ModeAsync, proto.ModeAsync, proto.ModeAsync, proto.ModeAsync,
		proto.ModeInline,
	} {
		a = append(a, q.add(meta("c", "k", mode)))
	}
	for _, j := range a[3:7] {
		q.remove(j)
	}
	if l := q.org("c").keys["k"]; l.served != 0 {
		t.Fatalf("%d jobs were counted as served", l.served)
	}
}

func TestAdmitCountsAdmittedJobs(t *testing.T) {
	q := newFairQueue()
	ask := func(mode proto.Mode) *proto.Rejection {
		m := meta("o", "k", mode)
		m.Concurrent, m.MaxQueued = 5, 3
		r := q.admit(&m)
		if r == nil {
			q.add(m)
		}
		return r
	}
	for i := range 5 {
		if r := ask(proto.ModeInline); r != nil {
			t.Fatalf("job %d refused: %v", i, r)
		}
	}
	if r := ask(proto.ModeInline); r == nil || r.Reason != proto.RejectedConcurrency || r.Used != 5 || r.Limit != 5 {
		t.Fatalf("sixth job: %v", r)
	}
	for i := range 3 {
		if r := ask(proto.ModeAsync); r != nil {
			t.Fatalf("queue job %d refused: %v", i, r)
		}
	}
	if r := ask(proto.ModeAsync); r == nil || r.Reason != proto.RejectedQueueFull {
		t.Fatalf("fourth background job: %v", r)
	}
}

func TestKeyLimit(t *testing.T) {
	q := newFairQueue()
	limited := func(mode proto.Mode) proto.Meta {
		m := meta("org", "limited", mode)
		m.KeyConcurrent = 2
		return m
	}
	q.add(limited(proto.ModeAsync))
	first := serve(q)
	inline := limited(proto.ModeInline)
	if r := q.admit(&inline); r != nil {
		t.Fatalf("the second: %v", r)
	}
	q.add(inline)
	third := limited(proto.ModeInline)
	if r := q.admit(&third); r == nil || r.Reason != proto.RejectedKeyConcurrency || r.Limit != 2 || r.Used != 2 {
		t.Fatalf("the third: %v", r)
	}
	serve(q)
	waits := q.add(limited(proto.ModeAsync))
	if j := serve(q); j != nil {
		t.Fatalf("job %s was served beyond the limit", j.meta.TraceID)
	}
	other := meta("org", "other", proto.ModeInline)
	if r := q.admit(&other); r != nil {
		t.Fatalf("another key: %v", r)
	}
	if want := q.add(other); serve(q) != want {
		t.Fatal("a key at its limit delays another")
	}
	q.requeue(first)
	for _, want := range []*job{first, nil} {
		if j := serve(q); j != want {
			t.Fatalf("served %v", j)
		}
	}
	q.remove(first)
	if j := serve(q); j != waits {
		t.Fatalf("served %v after a slot was freed", j)
	}
}

func TestFairQueueKeepsNothingOfRemovedJobs(t *testing.T) {
	q := newFairQueue()
	var jobs []*job
	for i := range 100 {
		m := meta(fmt.Sprintf("o%d", i%7), fmt.Sprintf("k%d", i%3), proto.ModeAsync)
		m.Concurrent, m.Language = 100, proto.Languages()[i%3]
		jobs = append(jobs, q.add(m))
	}
	for range 30 {
		serve(q)
	}
	for i, j := range jobs {
		switch i % 4 {
		case 1:
			q.activate(j, running, "w", noon)
		case 2:
			q.activate(j, assigned, "w", noon)
			q.requeue(j)
		case 3:
			q.requeue(j)
			q.expire(j)
			if i%3 == 0 { // another dispatcher assigned it
				q.activate(j, running, "w", noon)
			}
		}
		q.remove(j)
	}
	if len(q.jobs)+len(q.current)+len(q.orgs)+len(q.needSets)+q.queued+q.interactive+q.active != 0 || q.size != 0 {
		t.Fatalf("left over: %d jobs, %d organisations, %d sets of needs", len(q.jobs), len(q.orgs), len(q.needSets))
	}
}

// Delayed jobs are not among those that are reviewed several times a second.
func TestDelayedJobsAreNotCurrent(t *testing.T) {
	q := newFairQueue()
	var delayed []*job
	for range 3 {
		m := meta("o", "k", proto.ModeAsync)
		m.RunAt = noon.Add(7 * 24 * time.Hour)
		delayed = append(delayed, q.add(m))
	}
	prompt := q.add(meta("o", "k", proto.ModeAsync))
	check := func(what string, want ...*job) {
		t.Helper()
		if len(q.current) != len(want) {
			t.Errorf("%s: %d jobs, want %d", what, len(q.current), len(want))
		}
		for _, j := range want {
			if _, ok := q.current[j]; !ok {
				t.Errorf("%s: a job is missing", what)
			}
		}
	}
	check("before they are due", prompt)
	q.undelay(delayed[0])
	q.enqueue(delayed[0])
	q.activate(delayed[1], running, "w", noon) // by another dispatcher
	check("one is due, one runs", prompt, delayed[0], delayed[1])
	for _, j := range []*job{prompt, delayed[0], delayed[1], delayed[2]} {
		q.remove(j)
	}
	check("removed")
}
