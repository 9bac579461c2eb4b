package seat_test

import (
	"context"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/bullpen-run/bullpen/scheduler/seat"
	"github.com/bullpen-run/bullpen/scheduler/stream"
	"github.com/bullpen-run/bullpen/scheduler/streamtest"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

const name, holder = "dispatcher", "first"

// held is a seat that is held.
type held struct {
	ctx  context.Context // of the test
	set  *stream.Set
	lead context.Context // of the term
	term *seat.Term
}

// hold has a seat taken, and left when the test is over.
func hold(t *testing.T, stays bool) *held {
	t.Helper()
	set := streamtest.Set(t, streamtest.Server(t))
	s := &seat.Seat{Set: set, Name: name, Instance: holder, Stays: stays, Log: streamtest.Log(t)}
	ctx, cancel := context.WithCancel(streamtest.Context(t))
	terms, over := make(chan *held, 16), make(chan struct{})
	go func() {
		defer close(over)
		s.Run(ctx, func(lead context.Context, term *seat.Term) error {
			terms <- &held{ctx: ctx, set: set, lead: lead, term: term}
			<-lead.Done()
			return context.Cause(lead)
		})
	}()
	t.Cleanup(func() { cancel(); <-over })
	return <-terms
}

// renewed waits for the next renewal after a revision.
func (h *held) renewed(t *testing.T, after uint64) {
	t.Helper()
	watch, err := h.set.Control.Watch(h.ctx, name)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = watch.Stop() }()
	for {
		select {
		case e := <-watch.Updates():
			if e != nil && string(e.Value()) == holder && e.Revision() > after {
				return
			}
		case <-h.lead.Done():
			t.Fatalf("the seat was left: %v", context.Cause(h.lead))
		case <-h.ctx.Done():
			t.Fatal("the seat is not renewed")
		}
	}
}

// untilSure waits until the holder is sure of its seat, or is not.
func (h *held) untilSure(t *testing.T, sure bool) {
	t.Helper()
	look := time.NewTicker(10 * time.Millisecond)
	defer look.Stop()
	for h.term.Sure() != sure {
		select {
		case <-look.C:
		case <-h.ctx.Done():
			t.Fatalf("never: sure %v", sure)
		}
	}
}

// writable has the seat's stream take writes or refuse all.
func (h *held) writable(t *testing.T, yes bool) {
	t.Helper()
	st, err := h.set.JS.Stream(h.ctx, stream.OfControl)
	if err != nil {
		t.Fatal(err)
	}
	cfg := st.CachedInfo().Config
	cfg.MaxMsgSize = 1
	if yes {
		cfg.MaxMsgSize = -1
	}
	if _, err := h.set.JS.UpdateStream(h.ctx, cfg); err != nil {
		t.Fatal(err)
	}
}

// overwrite writes into the seat who holds it, and gives its revision.
func (h *held) overwrite(t *testing.T, instance string) uint64 {
	t.Helper()
	for {
		var revision uint64
		e, err := h.set.Control.Get(h.ctx, name)
		if err == nil {
			revision, err = h.set.Control.Update(h.ctx, name, []byte(instance), e.Revision())
		}
		switch {
		case err == nil:
			return revision
		case !stream.Conflict(err): // with a renewal
			t.Fatal(err)
		}
	}
}

// A leader that dies may have stored a renewal without having answered.
func TestHolderWhoseRenewalWasNotAnsweredKeepsTheSeat(t *testing.T) {
	t.Parallel()
	h := hold(t, false)
	revision := h.overwrite(t, holder)
	h.renewed(t, revision)
}

func TestHolderThatStaysLeadsOnWhenItCanRenewTheSeatAgain(t *testing.T) {
	t.Parallel()
	h := hold(t, true)
	h.writable(t, false)
	h.untilSure(t, false)
	h.writable(t, true)
	h.untilSure(t, true)
	if err := context.Cause(h.lead); err != nil {
		t.Errorf("it has left the seat: %v", err)
	}
}

func TestHolderThatStaysLeavesTheSeatToAnother(t *testing.T) {
	t.Parallel()
	h := hold(t, true)
	h.overwrite(t, "second")
	select {
	case <-h.lead.Done():
	case <-h.ctx.Done():
		t.Error("it holds the seat of another")
	}
}

func TestHolderThatDoesNotStayLeavesTheSeatItCannotRenew(t *testing.T) {
	t.Parallel()
	h := hold(t, false)
	h.writable(t, false)
	select {
	case <-h.lead.Done():
	case <-h.ctx.Done():
		t.Error("it holds on to its seat")
	}
}
