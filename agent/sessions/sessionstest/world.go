// Package sessionstest runs agent sessions on a real store, for tests.
package sessionstest

import (
	"context"
	"errors"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/bullpen-run/bullpen/agent/sessions"
	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/scheduler/agentlogs"
	"github.com/bullpen-run/bullpen/scheduler/agentsessions"
	"github.com/bullpen-run/bullpen/scheduler/store"
	"github.com/bullpen-run/bullpen/scheduler/storetest"
)

// Org is the organisation of sessions in tests.
const Org = "acme"

// World is a gateway that serves agent sessions, and can lead them.
type World struct {
	*sessions.Service
	T      *testing.T
	Stored *agentsessions.Sessions
	// Sandboxes are where agents run, and KeepAlive how long they are kept after a turn. They must be set before
	// Lead is called, if an agent needs them.
	Sandboxes sessions.Sandboxes
	KeepAlive time.Duration
	// KeyRevoked makes the API key of all sessions invalid.
	KeyRevoked atomic.Bool
	mu         sync.Mutex
	notices    []sessions.Notice
}

// logs adapts logs to the interface of package sessions.
type logs struct{ *agentlogs.Logs }

func (l logs) Follow(org, id string) (sessions.Follower, error) { return l.Logs.Follow(org, id) }

// New returns a gateway with agents on a store. It drives no sessions until Lead is called.
func New(t *testing.T, st *store.Store, agents ...sessions.Agent) *World {
	t.Helper()
	stored, err := agentsessions.Open(t.Context(), st, storetest.Log(t))
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	var work sync.WaitGroup
	work.Go(func() { _ = stored.Run(ctx) })
	t.Cleanup(func() { cancel(); work.Wait() })
	return &World{
		T: t, Stored: stored, Service: &sessions.Service{Records: stored, Logs: logs{&stored.Logs}, Agents: agents},
	}
}

// Lead drives sessions until stop is called or the test ends.
func (w *World) Lead() (stop func()) {
	runner := &sessions.Runner{
		Logs: w.Logs, Records: w.Stored, Agent: w.Agent, Sandboxes: w.Sandboxes, KeepAlive: w.KeepAlive,
		Log: storetest.Log(w.T),
		CheckKey: func(context.Context, string) error {
			if w.KeyRevoked.Load() {
				return &proto.Rejection{Reason: proto.RejectedKey}
			}
			return nil
		},
		Notify: func(_ context.Context, _ *proto.AgentSession, n sessions.Notice) error {
			w.mu.Lock()
			defer w.mu.Unlock()
			w.notices = append(w.notices, n)
			return nil
		},
	}
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan struct{})
	engine := w.Stored.Engine(runner.CarryOut, 24*time.Hour, "test", storetest.Log(w.T))
	go func() { defer close(done); engine.Lead(ctx) }()
	stop = sync.OnceFunc(func() { cancel(); <-done })
	w.T.Cleanup(stop)
	return stop
}

// Notices returns the events whose webhooks were created.
func (w *World) Notices() []sessions.Notice {
	w.mu.Lock()
	defer w.mu.Unlock()
	return append([]sessions.Notice(nil), w.notices...)
}

// MustCreate creates a session of an agent.
func (w *World) MustCreate(id, agent string, change ...func(*proto.AgentSession)) {
	w.T.Helper()
	x := &proto.AgentSession{Org: Org, Key: "key", ID: id, Agent: agent}
	for _, f := range change {
		f(x)
	}
	if err := w.Create(w.T.Context(), x); err != nil {
		w.T.Fatal(err)
	}
}

// MustSend sends a message.
func (w *World) MustSend(id, text string) *sessions.Sent {
	w.T.Helper()
	sent, err := w.Send(w.T.Context(), Org, id, sessions.Message{Text: text}, "")
	if err != nil {
		w.T.Fatal(err)
	}
	return sent
}

// Until returns the events of a session after an offset, up to the first for which last returns
// true.
func (w *World) Until(id string, offset int64, last func(*sessions.Event) bool) (events []sessions.Event) {
	w.T.Helper()
	ctx, cancel := context.WithTimeout(w.T.Context(), time.Minute)
	defer cancel()
	r, err := w.Read(ctx, Org, id, offset)
	if err != nil {
		w.T.Fatal(err)
	}
	defer r.Close()
	for {
		e, err := r.Next(ctx, true)
		if errors.Is(err, context.DeadlineExceeded) {
			w.T.Fatalf("session %s: no such event within a minute; it has %s", id, Types(events))
		}
		if err != nil {
			w.T.Fatal(err)
		}
		for i := range e.Events {
			if events = append(events, e.Events[i]); last(&e.Events[i]) {
				return events
			}
		}
	}
}

// Is returns a function that reports whether an event has a type.
func Is(kind sessions.EventType) func(*sessions.Event) bool {
	return func(e *sessions.Event) bool { return e.Type == kind }
}

// Data returns the data of an event.
func Data[T any](t *testing.T, e *sessions.Event) T {
	t.Helper()
	d, err := sessions.DataOf[T](e)
	if err != nil {
		t.Fatal(err)
	}
	return d
}

// Types returns the types of events.
func Types(events []sessions.Event) (text string) {
	for _, e := range events {
		text += string(e.Type) + " "
	}
	return text
}
