package engine_test

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"go.uber.org/goleak"

	"github.com/bullpen-run/bullpen/scheduler/engine"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// thing is what a queue knows of an item in these tests.
type thing struct {
	at      time.Time // when it is due; zero for never
	rank    int
	urgent  bool
	ended   error // why a call for it must end
	handled int   // by this leader
}

func (x *thing) due() (time.Time, bool) { return x.at, !x.at.IsZero() }

// world has an engine whose handlers return when the test lets them.
type world struct {
	t      *testing.T
	engine engine.Engine[thing]
	mu     sync.Mutex
	calls  []*heldCall // that have not returned
	begun  []string    // ids of all calls
}

// heldCall is a call that has not returned.
type heldCall struct {
	engine.Item
	answer chan error
	cause  error // of the end of its context
}

// test runs a test in time of its own.
func test(t *testing.T, f func(w *world)) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		w := &world{t: t}
		w.engine = engine.Engine[thing]{
			Queue: new(engine.Queue[thing]), Log: slog.New(slog.DiscardHandler), Name: "things",
			Due: (*thing).due, Forget: func(x *thing) { x.handled = 0 },
			Interrupt: func(x *thing) error { return x.ended },
			Handle: func(ctx context.Context, x engine.Item, _ thing) (err error) {
				c := &heldCall{Item: x, answer: make(chan error)}
				w.mu.Lock()
				w.calls, w.begun = append(w.calls, c), append(w.begun, x.ID)
				w.mu.Unlock()
				select {
				case err = <-c.answer:
				case <-ctx.Done():
					err = context.Cause(ctx)
				}
				w.mu.Lock()
				c.cause = context.Cause(ctx)
				w.calls = slices.DeleteFunc(w.calls, func(other *heldCall) bool { return other == c })
				w.mu.Unlock()
				w.engine.Queue.Change(x, func(x *thing) bool { x.handled++; return !x.at.IsZero() })
				return err
			},
			Pause: time.Second, Handlers: 100, HandlersOfOrg: 100,
		}
		f(w)
	})
}

// lead handles items until stop is called.
func (w *world) lead() (stop func()) {
	ctx, cancel := context.WithCancel(w.t.Context())
	ended := make(chan struct{})
	go func() { defer close(ended); w.engine.Lead(ctx) }()
	synctest.Wait()
	return func() { cancel(); <-ended }
}

// set makes an item due after a time, and changes it.
func (w *world) set(org, id string, after time.Duration, change ...func(*thing)) engine.Item {
	x := engine.Item{Org: org, ID: id}
	w.engine.Queue.Change(x, func(known *thing) bool {
		known.at = time.Now().Add(after)
		for _, f := range change {
			f(known)
		}
		return true
	})
	return x
}

// after lets time pass.
func (w *world) after(d time.Duration) {
	time.Sleep(d)
	synctest.Wait()
}

// call returns the call for an item.
func (w *world) call(id string) *heldCall {
	w.t.Helper()
	w.mu.Lock()
	defer w.mu.Unlock()
	at := slices.IndexFunc(w.calls, func(c *heldCall) bool { return c.ID == id })
	if at < 0 {
		w.t.Fatalf("%s is not being handled", id)
	}
	return w.calls[at]
}

// end makes the call for an item return.
func (w *world) end(id string, err error) {
	w.t.Helper()
	w.call(id).answer <- err
	synctest.Wait()
}

// want compares the items that are being handled.
func (w *world) want(what, want string) {
	w.t.Helper()
	synctest.Wait()
	w.mu.Lock()
	defer w.mu.Unlock()
	ids := make([]string, len(w.calls))
	for i, c := range w.calls {
		ids[i] = c.ID
	}
	slices.Sort(ids)
	if got := strings.Join(ids, " "); got != want {
		w.t.Errorf("%s: %q, want %q", what, got, want)
	}
}

func TestItemsAreHandledWhenDue(t *testing.T) {
	test(t, func(w *world) {
		w.set("acme", "a", 3*time.Second)
		stop := w.lead()
		b := w.set("acme", "b", time.Second)
		w.set("other", "c", 2*time.Second)
		w.want("before the first is due", "")
		w.set("acme", "now", 0)
		w.want("due by a change", "now")
		w.end("now", nil)
		w.engine.Queue.Change(engine.Item{Org: "acme", ID: "now"}, func(*thing) bool { return false })
		w.after(1100 * time.Millisecond)
		w.want("the first", "b")
		w.after(time.Second)
		w.want("in their order", "b c")
		w.set("acme", "b", time.Minute)
		w.want("changed while it is handled", "b c")
		w.end("b", nil)
		w.end("c", errors.New("it is due as before"))
		w.want("not before a pause", "")
		w.after(1100 * time.Millisecond)
		w.want("again", "a c")
		if known := w.engine.Queue.Get(b); known.handled != 1 {
			t.Errorf("known of b: %+v", known)
		}
		stop()
		if known := w.engine.Queue.Get(b); known.handled != 0 {
			t.Errorf("after the end: %+v", known)
		}
		w.after(time.Hour)
		w.want("nobody leads", "")
		defer w.lead()()
		w.want("another leader", "a b c")
		w.engine.Queue.Change(b, func(*thing) bool { return false })
		w.engine.Queue.Change(engine.Item{Org: "acme", ID: "a"}, func(x *thing) bool { x.at = time.Time{}; return true })
		for _, id := range []string{"a", "b", "c"} {
			w.end(id, nil)
		}
		w.after(time.Minute)
		w.want("removed, and nothing to do", "c")
	})
}

// An error delays the next call, and a change makes it due.
func TestRetries(t *testing.T) {
	test(t, func(w *world) {
		w.engine.RetryAfter = time.Minute
		defer w.lead()()
		w.set("acme", "a", 0)
		w.want("at first", "a")
		w.end("a", errors.New("it cannot"))
		w.after(59 * time.Second)
		w.want("after an error", "")
		w.after(2 * time.Second)
		w.want("a minute later", "a")
		w.end("a", errors.New("it cannot"))
		w.set("acme", "a", 0)
		w.want("changed", "a")
	})
}

// An item that is removed and made again has no second call beside the first.
func TestItemMadeAgainWhileItIsHandled(t *testing.T) {
	test(t, func(w *world) {
		defer w.lead()()
		x := w.set("acme", "a", 0)
		w.want("at first", "a")
		w.engine.Queue.Change(x, func(*thing) bool { return false })
		w.set("acme", "a", 0, func(x *thing) {
			if x.handled != 0 {
				t.Error("something is known of the removed one")
			}
		})
		w.want("made again", "a")
		w.end("a", nil)
		w.after(2 * time.Second)
		w.want("after the call", "a")
	})
}

func TestOrganisationsTakeTurns(t *testing.T) {
	test(t, func(w *world) {
		w.engine.HandlersOfOrg, w.engine.Handlers, w.engine.Pause = 2, 10, time.Hour
		for i := range 5 {
			w.set("large", fmt.Sprint("large", i), time.Duration(i))
		}
		for i := range 2 {
			w.set("small", fmt.Sprint("small", i), time.Second)
		}
		time.Sleep(time.Minute)
		defer w.lead()()
		w.want("at first", "large0 large1 small0 small1")
		w.end("large0", nil)
		w.want("after one of them", "large1 large2 small0 small1")
		w.end("large1", nil)
		w.end("large2", nil)
		w.want("at last", "large3 large4 small0 small1")
	})
}

// However many calls last, and of however many organisations, others begin.
func TestLongCallsLeaveRoom(t *testing.T) {
	test(t, func(w *world) {
		w.engine.HandlersOfOrg, w.engine.Handlers = 64, 256
		for i := range 800 {
			w.set(fmt.Sprint("hostile", i%8), fmt.Sprint(i), 0)
		}
		defer w.lead()()
		w.set("acme", "one", 0)
		synctest.Wait()
		w.mu.Lock()
		defer w.mu.Unlock()
		if w.begun[len(w.begun)-1] != "one" || len(w.calls) > 240 {
			t.Errorf("%d calls, the last for %s", len(w.calls), w.begun[len(w.begun)-1])
		}
	})
}

// Due items of an organisation go in their order. Urgent ones need not wait for the others.
func TestOrderAndUrgency(t *testing.T) {
	test(t, func(w *world) {
		w.engine.HandlersOfOrg = 1
		w.engine.Order = func(a, b *thing) int { return a.rank - b.rank }
		w.engine.Urgent = func(x *thing) bool { return x.urgent }
		rank := func(n int) func(*thing) { return func(x *thing) { x.rank = n } }
		defer w.lead()()
		w.set("acme", "a", 0)
		w.want("at first", "a")
		w.set("acme", "third", 0, rank(3))
		w.set("acme", "first", 0, rank(1))
		w.set("acme", "second", 0, rank(2))
		w.set("acme", "never", 0, rank(0))
		w.set("acme", "never", 1000*time.Hour)
		w.end("a", nil)
		w.want("by rank", "first")
		w.set("acme", "third", 0, func(x *thing) { x.urgent = true })
		w.want("beside it", "first third")
		w.set("acme", "late", 0, func(x *thing) { x.urgent = true })
		w.want("one after another", "first third")
		w.end("third", nil)
		w.want("in its place", "first late")
		w.end("first", nil)
		w.want("after the first", "late second")
	})
}

func TestInterruptedCalls(t *testing.T) {
	test(t, func(w *world) {
		over := errors.New("it is over")
		ended := func(x *thing) { x.ended = over }
		defer w.lead()()
		w.set("acme", "a", 0)
		w.set("acme", "b", 0, ended)
		w.want("at first", "a b")
		a := w.call("a")
		w.set("acme", "a", time.Hour, ended)
		w.set("acme", "b", 0, ended)
		w.want("one began after its reason", "b")
		if !errors.Is(a.cause, over) {
			t.Errorf("the cause is %v", a.cause)
		}
	})
}

// A change costs nothing that grows with the number of items.
func BenchmarkChange(b *testing.B) {
	for _, n := range []int{100, 100_000} {
		b.Run(fmt.Sprint(n, " items"), func(b *testing.B) {
			q := new(engine.Queue[thing])
			e := engine.Engine[thing]{
				Queue: q, Due: (*thing).due, Handlers: 1, HandlersOfOrg: 1,
				Handle: func(context.Context, engine.Item, thing) error { return nil },
			}
			ctx, cancel := context.WithCancel(b.Context())
			ended := make(chan struct{})
			go func() { defer close(ended); e.Lead(ctx) }()
			defer func() { cancel(); <-ended }()
			later := func(at time.Time) func(*thing) bool { return func(x *thing) bool { x.at = at; return true } }
			for i := range n {
				q.Change(engine.Item{Org: fmt.Sprint("org", i%10), ID: fmt.Sprint(i)}, later(time.Now().Add(time.Hour)))
			}
			for b.Loop() {
				q.Change(engine.Item{Org: "org", ID: "one"}, later(time.Now()))
				q.Change(engine.Item{Org: "org", ID: "one"}, later(time.Time{}))
			}
		})
	}
}
