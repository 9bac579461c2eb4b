package sandboxes_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
	"go.uber.org/goleak"

	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/scheduler/sandboxes"
	"github.com/bullpen-run/bullpen/scheduler/store"
	"github.com/bullpen-run/bullpen/scheduler/storetest"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// open returns the sandboxes as one process has them.
func open(t *testing.T, st *store.Store) *sandboxes.Sandboxes {
	t.Helper()
	s, err := sandboxes.Open(t.Context(), st, storetest.Log(t))
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	var running sync.WaitGroup
	running.Go(func() { _ = s.Run(ctx) })
	t.Cleanup(func() { cancel(); running.Wait() })
	return s
}

// eventually waits until ok returns true.
func eventually(t *testing.T, what string, ok func() bool) {
	t.Helper()
	late := time.After(10 * time.Second) // less than an unnoticed end takes
	for !ok() {
		select {
		case <-time.After(5 * time.Millisecond):
		case <-late:
			t.Fatalf("within 10 seconds, it is not so that %s", what)
		}
	}
}

// starting returns a sandbox of an organisation that has just been started.
func starting(org string) *proto.LiveSandbox {
	now, id := time.Now().UTC(), proto.NewSandboxID()
	return &proto.LiveSandbox{
		ID: id, Org: org, Key: "key_1", ThreadID: proto.OwnerSandbox.Thread(id), OwnHome: true, OnTimeout: proto.SandboxKill,
		CreatedAt: now, State: proto.SandboxStarting, Starts: 1, Execution: proto.NewTraceID(), StartedAt: now,
		ExpiresAt: now.Add(time.Hour),
	}
}

// completedAt is when the executions of records ended. It is recent: sandboxes that ended long ago are removed.
var completedAt = time.Now().UTC().Truncate(time.Second)

func record(x *proto.LiveSandbox, r *proto.Result) *proto.Record {
	rec := &proto.Record{
		Meta: proto.Meta{TraceID: x.Execution, Org: x.Org}, Attempt: 1, Worker: "w", Status: proto.StatusRunning,
	}
	if r != nil {
		rec.Status, rec.Result, rec.CompletedAt = r.Status(), r, new(completedAt)
	}
	return rec
}

// Two gateways share sandboxes: both see them, the newest first, and only one can resume one.
func TestSandboxes(t *testing.T) {
	t.Parallel()
	ctx, st := t.Context(), storetest.Open(t, storetest.Server(t))
	one, two := open(t, st), open(t, st)
	old, young := starting("acme"), starting("acme")
	old.CreatedAt = old.CreatedAt.Add(-time.Hour)
	old.State, old.Env = proto.SandboxPaused, map[string]string{"A": "1"}
	for _, x := range []*proto.LiveSandbox{young, old, starting("other")} {
		if err := one.Create(ctx, x, proto.NoLimit); err != nil {
			t.Fatal(err)
		}
	}
	eventually(t, "the other gateway has both", func() bool {
		page, _ := two.Page("acme", "", 10, func(*proto.LiveSandbox) bool { return true })
		return len(page) == 2 && page[0].ID == young.ID && page[1].ID == old.ID
	})
	page, next := two.Page("acme", "", 1, func(x *proto.LiveSandbox) bool { return true })
	if len(page) != 1 || next == "" {
		t.Fatalf("%d of 1, next %q", len(page), next)
	}
	if page, next = two.Page("acme", next, 1, func(*proto.LiveSandbox) bool { return true }); len(page) != 1 ||
		page[0].ID != old.ID || next != "" {
		t.Errorf("%v, next %q", page, next)
	}
	if x, err := two.Get(ctx, "acme", old.ID); err != nil || x.Env["A"] != "1" {
		t.Errorf("%+v, %v", x, err)
	}
	for _, org := range []string{"other", "acm"} {
		_, errGet := two.Get(ctx, org, old.ID)
		_, errFind := two.Find(ctx, org, old.ID)
		_, errChange := two.Change(ctx, org, old.ID, func(*proto.LiveSandbox) error { return nil })
		for _, err := range []error{errGet, errFind, errChange} {
			if !errors.Is(err, proto.ErrNotFound) {
				t.Errorf("of %s: %v", org, err)
			}
		}
	}
	errConflict := errors.New("not paused")
	won := storetest.Race(t, 2, func(err error) bool { return errors.Is(err, errConflict) }, func(i int) error {
		_, err := []*sandboxes.Sandboxes{one, two}[i].Change(ctx, "acme", old.ID, func(x *proto.LiveSandbox) error {
			if x.State != proto.SandboxPaused {
				return errConflict
			}
			x.State, x.Execution = proto.SandboxStarting, proto.NewTraceID()
			return nil
		})
		return err
	})
	if won != 1 {
		t.Errorf("%d gateways have resumed it", won)
	}
}

// An organisation may have so many sandboxes; those that have ended do not count.
func TestLimit(t *testing.T) {
	t.Parallel()
	ctx, st := t.Context(), storetest.Open(t, storetest.Server(t))
	var last *proto.LiveSandbox
	storetest.Fill(t, st, st.Sandboxes, proto.MaxLiveSandboxes+10, func(i int) (string, any) {
		x := starting("acme")
		if i < 10 {
			x.State = proto.SandboxEnded
		}
		last = x
		return x.Org + "." + x.ID, x
	})
	s := open(t, st)
	err := s.Create(ctx, starting("acme"), proto.NoLimit)
	rejection, ok := errors.AsType[*proto.Rejection](err)
	if !ok || rejection.Reason != proto.RejectedSandboxes || rejection.Used != proto.MaxLiveSandboxes {
		t.Errorf("one too many: %v", err)
	}
	if err := s.Create(ctx, starting("other"), proto.NoLimit); err != nil {
		t.Error(err)
	}
	if _, err := s.Settle(ctx, last.ID, record(last, new(proto.Exited(0)))); err != nil {
		t.Fatal(err)
	}
	eventually(t, "there is room for another one", func() bool {
		return s.Create(ctx, starting("acme"), proto.NoLimit) == nil
	})
}

// The record of an execution says what becomes of its sandbox, once.
func TestSettle(t *testing.T) {
	t.Parallel()
	ctx, st := t.Context(), storetest.Open(t, storetest.Server(t))
	s := open(t, st)
	for _, c := range []struct {
		result   proto.Result
		stopping *proto.SandboxStopped
		state    proto.SandboxState
		reason   proto.SandboxReason
		message  string
		of       bool // interpreters
	}{
		{
			result: proto.Failure(proto.CodeSandboxDrained, "Shut down."), state: proto.SandboxEnded,
			reason: proto.SandboxWorkerDrained, message: "Shut down.", of: true,
		},
		{
			result: proto.Failure(proto.CodeSandboxExpired, "Late."), state: proto.SandboxEnded,
			reason: proto.SandboxExpired, message: "Late.",
		},
		{
			result: proto.Failure(proto.CodeSandboxDrained, "Shut down."), state: proto.SandboxPaused,
			reason: proto.SandboxWorkerDrained, message: "Shut down.",
		},
		{
			result:   proto.Cancelled(),
			stopping: &proto.SandboxStopped{Stop: proto.SandboxPause, Reason: proto.SandboxPausedByUser},
			state:    proto.SandboxPaused, reason: proto.SandboxPausedByUser,
		},
		{result: proto.Exited(0), state: proto.SandboxEnded, reason: proto.SandboxGuestEnded},
	} {
		x := starting("acme")
		x.State, x.Stopping, x.Interpreters = proto.SandboxRunning, c.stopping, c.of
		if err := s.Create(ctx, x, proto.NoLimit); err != nil {
			t.Fatal(err)
		}
		earlier := record(x, &c.result)
		earlier.TraceID = proto.NewTraceID()
		if got, err := s.Settle(ctx, x.ID, earlier); err != nil || got.State != proto.SandboxRunning {
			t.Errorf("after the end of another execution: %+v, %v", got, err)
		}
		rec := record(x, &c.result)
		got, err := s.Settle(ctx, x.ID, rec)
		if err != nil || got.State != c.state || got.Reason != c.reason || got.Message != c.message ||
			!got.StoppedAt.Equal(*rec.CompletedAt) || got.Stopping != nil {
			t.Errorf("%s: %+v, %v", c.reason, got, err)
		}
		other := record(x, new(proto.Failure(proto.CodeWorkerLost, "Lost.")))
		if got, err := s.Settle(ctx, x.ID, other); err != nil || got.Reason != c.reason {
			t.Errorf("%s: a second record: %+v, %v", c.reason, got, err)
		}
	}
	if _, err := s.Settle(ctx, proto.NewSandboxID(), record(starting("acme"), new(proto.Exited(0)))); !errors.Is(
		err, proto.ErrNotFound) {
		t.Errorf("of no sandbox: %v", err)
	}
}

// A sandbox whose execution was not accepted is as before: absent, or paused.
func TestAbandon(t *testing.T) {
	t.Parallel()
	ctx, st := t.Context(), storetest.Open(t, storetest.Server(t))
	s := open(t, st)
	for starts := 1; starts <= 2; starts++ {
		x := starting("acme")
		x.Starts = starts
		if err := s.Create(ctx, x, proto.NoLimit); err != nil {
			t.Fatal(err)
		}
		for range 2 {
			if err := s.Abandon(ctx, x, "No room."); err != nil {
				t.Fatal(err)
			}
		}
		got, err := s.Get(ctx, "acme", x.ID)
		switch {
		case starts == 1 && !errors.Is(err, proto.ErrNotFound):
			t.Errorf("a new one: %+v, %v", got, err)
		case starts == 2 && (err != nil || got.State != proto.SandboxPaused || got.Reason != proto.SandboxNotStarted ||
			got.Message != "No room."):
			t.Errorf("a resumed one: %+v, %v", got, err)
		}
	}
}

// world is what a runner knows of besides sandboxes.
type world struct {
	mu        sync.Mutex
	records   map[proto.TraceID]*proto.Record
	cancelled []proto.TraceID
	revoked   map[string]error // by key
	removed   []string         // threads
	fails     bool             // the next removal of a thread
}

func (w *world) Summary(_ context.Context, _ string, id proto.TraceID) (*proto.Record, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if rec := w.records[id]; rec != nil {
		return rec, nil
	}
	return nil, proto.ErrNotFound
}

func (w *world) Cancel(ctx context.Context, org string, id proto.TraceID) (*proto.Record, error) {
	w.mu.Lock()
	w.cancelled = append(w.cancelled, id)
	w.mu.Unlock()
	return w.Summary(ctx, org, id)
}

func (w *world) CheckKey(_ context.Context, id string) error {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.revoked[id]
}

func (w *world) Remove(_ context.Context, org, thread string) error {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.fails {
		w.fails = false
		return errors.New("the store does not answer")
	}
	w.removed = append(w.removed, org+"/"+thread)
	return proto.ErrNotFound // as after an earlier attempt
}

func (w *world) set(change func(*world)) {
	w.mu.Lock()
	defer w.mu.Unlock()
	change(w)
}

func (w *world) isCancelled(id proto.TraceID) bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	return slices.Contains(w.cancelled, id)
}

// lead starts a process that leads.
func (w *world) lead(t *testing.T, st *store.Store) *sandboxes.Sandboxes {
	t.Helper()
	s := open(t, st)
	r := &sandboxes.Runner{
		Sandboxes: s, Executions: w, Keys: w, Homes: w, Store: st, Instance: "one", Log: storetest.Log(t),
	}
	ctx, cancel := context.WithCancel(t.Context())
	var running sync.WaitGroup
	running.Go(func() { _ = r.Run(ctx) })
	t.Cleanup(func() { cancel(); running.Wait() })
	return s
}

func newWorld() *world {
	return &world{records: map[proto.TraceID]*proto.Record{}, revoked: map[string]error{}}
}

// stateOf returns the state and the reason of a sandbox.
func stateOf(t *testing.T, s *sandboxes.Sandboxes, x *proto.LiveSandbox) string {
	t.Helper()
	got, err := s.Get(t.Context(), x.Org, x.ID)
	if errors.Is(err, proto.ErrNotFound) {
		return "absent"
	}
	if err != nil {
		t.Fatal(err)
	}
	return strings.TrimSpace(fmt.Sprint(got.State, " ", got.Reason))
}

// A leader finds what has ended without it, and hears of what ends while it leads.
func TestRunnerSettles(t *testing.T) {
	t.Parallel()
	ctx, st, w := t.Context(), storetest.Open(t, storetest.Server(t)), newWorld()
	before := open(t, st)
	ended, lives, lost := starting("acme"), starting("acme"), starting("acme")
	lost.StartedAt = lost.StartedAt.Add(-time.Hour) // and its execution is unknown
	lost.Starts = 2
	for _, x := range []*proto.LiveSandbox{ended, lives, lost} {
		if err := before.Create(ctx, x, proto.NoLimit); err != nil {
			t.Fatal(err)
		}
	}
	w.records[ended.Execution] = record(ended, new(proto.Failure(proto.CodeWorkerLost, "Lost.")))
	w.records[lives.Execution] = record(lives, nil)
	s := w.lead(t, st)
	eventually(t, "the ended one has ended", func() bool { return stateOf(t, s, ended) == "ended worker_lost" })
	eventually(t, "the unknown one is paused", func() bool { return stateOf(t, s, lost) == "paused not_started" })
	// The gateway that started it may have died before it stored that.
	eventually(t, "the one that runs is running", func() bool { return stateOf(t, s, lives) == "running" })
	w.set(func(w *world) {
		w.records[lives.Execution] = record(lives, new(proto.Failure(proto.CodeSandboxIdle, "Idle.")))
	})
	eventually(t, "the notice of its end is heard", func() bool {
		m := nats.NewMsg(store.DoneSubject(lives.Org, lives.Execution))
		m.Header.Set(store.HeaderStatus, string(proto.StatusFailed))
		if err := st.Conn.PublishMsg(m); err != nil {
			t.Fatal(err)
		}
		return stateOf(t, s, lives) == "ended idle"
	})
}

// A leader repeats a stop whose gateway died after it had stored it.
func TestRunnerRepeatsStops(t *testing.T) {
	t.Parallel()
	ctx, st, w := t.Context(), storetest.Open(t, storetest.Server(t)), newWorld()
	s := w.lead(t, st)
	x := starting("acme")
	x.State = proto.SandboxStopping
	x.Stopping = &proto.SandboxStopped{Stop: proto.SandboxPause, Reason: proto.SandboxPausedByUser}
	w.set(func(w *world) { w.records[x.Execution] = record(x, nil) })
	if err := s.Create(ctx, x, proto.NoLimit); err != nil {
		t.Fatal(err)
	}
	eventually(t, "the execution is cancelled", func() bool { return w.isCancelled(x.Execution) })
}

// Sandboxes of a key that is no longer valid end. An error that may pass ends none.
func TestRunnerEndsSandboxesOfRevokedKeys(t *testing.T) {
	t.Parallel()
	ctx, st, w := t.Context(), storetest.Open(t, storetest.Server(t)), newWorld()
	w.revoked["key_2"] = errors.New("the store does not answer")
	s := w.lead(t, st)
	revoked, unsure := starting("acme"), starting("acme")
	unsure.Key = "key_2"
	for _, x := range []*proto.LiveSandbox{revoked, unsure} {
		w.set(func(w *world) { w.records[x.Execution] = record(x, nil) })
		if err := s.Create(ctx, x, proto.NoLimit); err != nil {
			t.Fatal(err)
		}
	}
	w.set(func(w *world) { w.revoked["key_1"] = &proto.Rejection{Reason: proto.RejectedKey} })
	eventually(t, "the execution is cancelled", func() bool { return w.isCancelled(revoked.Execution) })
	if got := stateOf(t, s, revoked); got != "stopping" {
		t.Errorf("it is %s", got)
	}
	if _, err := s.Settle(ctx, revoked.ID, record(revoked, new(proto.Cancelled()))); err != nil {
		t.Fatal(err)
	}
	if got := stateOf(t, s, revoked); got != "ended key_revoked" {
		t.Errorf("it is %s", got)
	}
	if got := stateOf(t, s, unsure); got != "running" {
		t.Errorf("that of the other key is %s", got)
	}
}

// What sandboxes leave is removed: their own homes at once, they themselves after a day.
func TestRunnerRemoves(t *testing.T) {
	t.Parallel()
	ctx, st, w := t.Context(), storetest.Open(t, storetest.Server(t)), newWorld()
	s := w.lead(t, st)
	end := func(ago time.Duration, change func(*proto.LiveSandbox)) *proto.LiveSandbox {
		x := starting("acme")
		x.State, x.Reason, x.StoppedAt = proto.SandboxEnded, proto.SandboxKilled, time.Now().Add(-ago)
		change(x)
		if err := s.Create(ctx, x, proto.NoLimit); err != nil {
			t.Fatal(err)
		}
		return x
	}
	own := end(0, func(*proto.LiveSandbox) {})
	paused := end(48*time.Hour, func(x *proto.LiveSandbox) { x.State = proto.SandboxPaused })
	lent := end(0, func(x *proto.LiveSandbox) { x.OwnHome, x.ThreadID = false, "notebook" })
	old := end(25*time.Hour, func(*proto.LiveSandbox) {})
	eventually(t, "the old one is gone", func() bool { return stateOf(t, s, old) == "absent" })
	eventually(t, "the home of the new one is gone", func() bool {
		x, err := s.Get(ctx, "acme", own.ID)
		return err == nil && !x.OwnHome
	})
	for _, x := range []*proto.LiveSandbox{lent, own, paused} {
		if got := stateOf(t, s, x); got == "absent" {
			t.Error("a sandbox was removed too early")
		}
	}
	w.set(func(w *world) {
		slices.Sort(w.removed)
		want := []string{"acme/" + own.ThreadID, "acme/" + old.ThreadID}
		if slices.Sort(want); !slices.Equal(w.removed, want) {
			t.Errorf("removed are %v, want %v", w.removed, want)
		}
		w.fails = true
	})
	failing := end(0, func(*proto.LiveSandbox) {})
	eventually(t, "a failed removal is repeated", func() bool {
		x, err := s.Get(ctx, "acme", failing.ID)
		return err == nil && !x.OwnHome
	})
}

// The limit of a plan counts active sandboxes alone, of one organisation, and a resume too.
func TestLimitOfPlans(t *testing.T) {
	ctx, st := t.Context(), storetest.Open(t, storetest.Server(t))
	s := open(t, st)
	first := starting("acme")
	if err := s.Create(ctx, first, 1); err != nil {
		t.Fatal(err)
	}
	full := func(err error) bool {
		rejection, ok := errors.AsType[*proto.Rejection](err)
		return ok && rejection.Reason == proto.RejectedSandboxes && rejection.Limit == 1 && rejection.Used == 1
	}
	if err := s.Create(ctx, starting("acme"), 1); !full(err) {
		t.Errorf("a second active sandbox: %v", err)
	}
	if err := s.Create(ctx, starting("other"), 1); err != nil {
		t.Errorf("of another organisation: %v", err)
	}
	paused := func(x *proto.LiveSandbox) error { x.State = proto.SandboxPaused; return nil }
	if _, err := s.Change(ctx, "acme", first.ID, paused); err != nil {
		t.Fatal(err)
	}
	if err := s.Create(ctx, starting("acme"), 1); err != nil {
		t.Errorf("beside a paused one: %v", err)
	}
	resume := func(x *proto.LiveSandbox) error { x.State = proto.SandboxStarting; return nil }
	if _, err := s.Resume(ctx, "acme", first.ID, 1, resume); !full(err) {
		t.Errorf("a resume beside an active one: %v", err)
	}
	if x, err := s.Get(ctx, "acme", first.ID); err != nil || x.State != proto.SandboxPaused {
		t.Errorf("after the refused resume it is %v, %v", x, err)
	}
}
