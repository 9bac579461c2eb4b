package leader_test

import (
	"context"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/bullpen-run/bullpen/scheduler/leader"
	"github.com/bullpen-run/bullpen/scheduler/store"
	"github.com/bullpen-run/bullpen/scheduler/storetest"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

const name, instance = "dispatcher", "first"

// leadership is a term of the elector under test.
type leadership struct {
	ctx   context.Context // of the test
	store *store.Store
	lead  context.Context // of the term
	term  *leader.Term
}

// elect runs an elector until the test ends, and returns its first term.
func elect(t *testing.T, leadInDoubt bool) *leadership {
	t.Helper()
	st := storetest.Open(t, storetest.Server(t))
	e := &leader.Elector{Store: st, Name: name, Instance: instance, LeadInDoubt: leadInDoubt, Log: storetest.Log(t)}
	ctx, cancel := context.WithCancel(storetest.Context(t))
	terms, done := make(chan *leadership, 16), make(chan struct{})
	go func() {
		defer close(done)
		e.Run(ctx, func(lead context.Context, term *leader.Term) error {
			terms <- &leadership{ctx: ctx, store: st, lead: lead, term: term}
			<-lead.Done()
			return context.Cause(lead)
		})
	}()
	t.Cleanup(func() { cancel(); <-done })
	return <-terms
}

// awaitRenewal waits for the next renewal after a revision.
func (l *leadership) awaitRenewal(t *testing.T, after uint64) {
	t.Helper()
	watch, err := l.store.Control.Watch(l.ctx, name)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = watch.Stop() }()
	for {
		select {
		case e := <-watch.Updates():
			if e != nil && string(e.Value()) == instance && e.Revision() > after {
				return
			}
		case <-l.lead.Done():
			t.Fatalf("the term ended: %v", context.Cause(l.lead))
		case <-l.ctx.Done():
			t.Fatal("no renewal")
		}
	}
}

// awaitStillLeader waits until StillLeader returns want.
func (l *leadership) awaitStillLeader(t *testing.T, want bool) {
	t.Helper()
	tick := time.NewTicker(10 * time.Millisecond)
	defer tick.Stop()
	for l.term.StillLeader() != want {
		select {
		case <-tick.C:
		case <-l.ctx.Done():
			t.Fatalf("StillLeader never returned %v", want)
		}
	}
}

// setWritable makes the stream of the leader's key accept or reject writes.
func (l *leadership) setWritable(t *testing.T, writable bool) {
	t.Helper()
	st, err := l.store.JS.Stream(l.ctx, store.ControlLeader)
	if err != nil {
		t.Fatal(err)
	}
	cfg := st.CachedInfo().Config
	cfg.MaxMsgSize = 1
	if writable {
		cfg.MaxMsgSize = -1
	}
	if _, err := l.store.JS.UpdateStream(l.ctx, cfg); err != nil {
		t.Fatal(err)
	}
}

// overwrite stores an instance as the leader and returns the revision.
func (l *leadership) overwrite(t *testing.T, instance string) uint64 {
	t.Helper()
	for {
		var revision uint64
		e, err := l.store.Control.Get(l.ctx, name)
		if err == nil {
			revision, err = l.store.Control.Update(l.ctx, name, []byte(instance), e.Revision())
		}
		switch {
		case err == nil:
			return revision
		case !store.IsConflict(err): // with a renewal
			t.Fatal(err)
		}
	}
}

// A stream leader that dies may have stored a renewal without answering it.
func TestRenewalWithLostAnswerKeepsTheTerm(t *testing.T) {
	t.Parallel()
	l := elect(t, false)
	revision := l.overwrite(t, instance)
	l.awaitRenewal(t, revision)
}

func TestLeadInDoubtContinuesTheTermWhenRenewalsWorkAgain(t *testing.T) {
	t.Parallel()
	l := elect(t, true)
	l.setWritable(t, false)
	l.awaitStillLeader(t, false)
	l.setWritable(t, true)
	l.awaitStillLeader(t, true)
	if err := context.Cause(l.lead); err != nil {
		t.Errorf("the term ended: %v", err)
	}
}

func TestLeadInDoubtStepsDownWhenAnotherIsElected(t *testing.T) {
	t.Parallel()
	l := elect(t, true)
	l.overwrite(t, "second")
	select {
	case <-l.lead.Done():
	case <-l.ctx.Done():
		t.Error("the term continues although another instance was elected")
	}
}

func TestElectorStepsDownWhenItCannotRenew(t *testing.T) {
	t.Parallel()
	l := elect(t, false)
	l.setWritable(t, false)
	select {
	case <-l.lead.Done():
	case <-l.ctx.Done():
		t.Error("the term continues although it is not renewed")
	}
}

// TestIntervalCountsAcrossTerms runs terms that are shorter than the interval.
func TestIntervalCountsAcrossTerms(t *testing.T) {
	st := storetest.Open(t, storetest.Server(t))
	ctx := storetest.Context(t)
	last := func() time.Time {
		entry, err := st.Control.Get(ctx, "gc.last")
		if store.IsNotFound(err) {
			return time.Time{}
		}
		var at time.Time
		if err == nil {
			err = at.UnmarshalText(entry.Value())
		}
		if err != nil {
			t.Fatal(err)
		}
		return at
	}
	// runUntil runs a new process until done or its first call.
	runUntil := func(done func() bool) (called bool) {
		t.Helper()
		e := &leader.Elector{Store: st, Name: "gc", Instance: "any", Log: storetest.Log(t)}
		ctx, cancel := context.WithCancel(ctx)
		calls, ended := make(chan struct{}, 1), make(chan struct{})
		go func() {
			defer close(ended)
			e.RunEvery(ctx, time.Hour, func(context.Context) { calls <- struct{}{} })
		}()
		defer func() { cancel(); <-ended }()
		tick := time.NewTicker(10 * time.Millisecond)
		defer tick.Stop()
		for {
			select {
			case <-calls:
				called = true
			case <-tick.C:
			}
			if done() {
				return called
			}
		}
	}
	if runUntil(func() bool { return !last().IsZero() }) {
		t.Error("the first term did not wait for the interval")
	}
	hourAgo := time.Now().Add(-time.Hour).UTC().Format(time.RFC3339)
	if _, err := st.Control.Put(ctx, "gc.last", []byte(hourAgo)); err != nil {
		t.Fatal(err)
	}
	if !runUntil(func() bool { return time.Since(last()) < time.Minute }) {
		t.Error("the second term did not continue the interval")
	}
}
