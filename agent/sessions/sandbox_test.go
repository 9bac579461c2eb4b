package sessions_test

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/bullpen-run/bullpen/agent/sessions"
	"github.com/bullpen-run/bullpen/agent/sessions/sessionstest"
	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/scheduler/storetest"
)

// boxes are sandboxes without anything in them.
type boxes struct {
	opened, closed chan *box
	full           bool // opening takes until its context is done
}

type box struct {
	sessions.Sandbox
	of      *boxes
	changes []sessions.FileChange
	failure error
	lost    string
}

func (b *boxes) Open(ctx context.Context, _ *proto.AgentSession) (sessions.Sandbox, error) {
	x := &box{of: b}
	b.opened <- x
	if b.full {
		<-ctx.Done()
		b.closed <- x
		return nil, ctx.Err()
	}
	return x, nil
}

func (x *box) Save(context.Context) ([]sessions.FileChange, bool, error) {
	return x.changes, false, x.failure
}

func (x *box) Lost(context.Context) string { return x.lost }

func (x *box) Close() { x.of.closed <- x }

// boxed returns a world whose agent, a puppet, needs a sandbox.
func boxed(t *testing.T, keepAlive time.Duration) (*sessionstest.World, *puppet, *boxes) {
	t.Helper()
	p, b := newPuppet(), &boxes{opened: make(chan *box, 10), closed: make(chan *box, 10)}
	p.info.Sandboxed = true
	w := sessionstest.New(t, storetest.Open(t, storetest.Server(t)), p)
	w.Sandboxes, w.KeepAlive = b, keepAlive
	return w, p, b
}

// receive receives what must come within a minute.
func receive[T any](t *testing.T, what string, from <-chan T) (x T) {
	t.Helper()
	select {
	case x = <-from:
	case <-time.After(time.Minute):
		t.Fatalf("nothing came: %s", what)
	}
	return x
}

// A conversation and its sandbox serve several turns, until nobody has used them for a while.
func TestSandboxServesTurns(t *testing.T) {
	w, p, b := boxed(t, 300*time.Millisecond)
	w.Lead()
	w.MustCreate("s", "puppet")
	send(w, "s", "one", "two")
	h := receive(t, "a conversation", p.starts)
	for range 2 {
		receive(t, "a message", h.sent)
		h.report(t, ends())
	}
	w.Until("s", 0, nth(2, sessions.TurnEnded))
	if x := receive(t, "the end of the sandbox", b.closed); x != h.Sandbox {
		t.Error("another sandbox was closed")
	}
	send(w, "s", "three")
	next := receive(t, "another conversation", p.starts)
	next.report(t, ends())
	if next.Sandbox == h.Sandbox || len(b.opened) != 2 {
		t.Errorf("%d sandboxes", len(b.opened))
	}
}

// The files are saved before a turn ends, and what has changed is one of its items.
func TestChangedFiles(t *testing.T) {
	w, p, b := boxed(t, time.Hour)
	w.Lead()
	w.MustCreate("s", "puppet")
	send(w, "s", "go")
	x, h := receive(t, "a sandbox", b.opened), receive(t, "a conversation", p.starts)
	x.changes = []sessions.FileChange{{Path: "/home/user/a", Action: "write", Diff: "+a"}, {Path: "/b", Action: "patch"}}
	h.report(t, completed("a", sessions.Text("done")), ends())
	events := w.Until("s", 0, sessionstest.Is(sessions.TurnEnded))
	item := sessionstest.Data[sessions.ItemData](t, &events[len(events)-2]).Item
	if c := item.Content; len(c) != 2 || c[0].Path != "/home/user/a" || *c[0].Diff != "+a" || c[1].Diff != nil {
		t.Errorf("%+v", item)
	}

	send(w, "s", "again")
	x.changes, x.failure = nil, errors.New("no space")
	h.report(t, ends())
	events = w.Until("s", events[len(events)-1].Sequence, sessionstest.Is(sessions.TurnEnded))
	if e := &events[len(events)-2]; line(e) != "error: files_not_saved" {
		t.Error(line(e))
	}
}

// A sandbox that ends by itself ends the turn, and not the session.
func TestLostSandbox(t *testing.T) {
	w, p, b := boxed(t, time.Hour)
	w.Lead()
	w.MustCreate("s", "puppet")
	exited := sessions.Native{Type: sessions.SessionEnded, Data: sessions.Ended{Reason: sessions.EndError}}
	for _, running := range []bool{true, false} {
		send(w, "s", "go")
		x, h := receive(t, "a sandbox", b.opened), receive(t, "a conversation", p.starts)
		receive(t, "a message", h.sent)
		x.lost = "its worker died"
		if !running {
			h.report(t, ends())
		}
		h.report(t, exited)
		if receive(t, "the end of the sandbox", b.closed) != x {
			t.Error("another sandbox was closed")
		}
	}
	events := w.Until("s", 0, nth(2, sessions.TurnEnded))
	var got []string
	for i := range events {
		if k := events[i].Type; k == sessions.ErrorEvent || k == sessions.SessionEnded {
			got = append(got, line(&events[i]))
		}
	}
	if len(got) != 1 || got[0] != "error: sandbox_lost" {
		t.Error(got)
	}
}

// Users can end a turn that waits for its sandbox.
func TestWaitingForSandbox(t *testing.T) {
	w, _, b := boxed(t, time.Hour)
	b.full = true
	w.Lead()
	w.MustCreate("s", "puppet")
	send(w, "s", "one", "two")
	receive(t, "a sandbox", b.opened)
	if err := w.Interrupt(t.Context(), org, "s"); err != nil {
		t.Fatal(err)
	}
	receive(t, "the sandbox of the second turn", b.opened)
	if err := w.Terminate(t.Context(), org, "s"); err != nil {
		t.Fatal(err)
	}
	events := w.Until("s", 0, sessionstest.Is(sessions.SessionEnded))
	turns := 0
	for i := range events {
		if events[i].Type == sessions.TurnEnded {
			turns++
		}
	}
	if turns == 0 {
		t.Error(lines(events))
	}
	for range 2 {
		receive(t, "the end of the wait", b.closed)
	}
}
