package schedules_test

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/scheduler/schedules"
	"github.com/bullpen-run/bullpen/scheduler/store"
	"github.com/bullpen-run/bullpen/scheduler/storetest"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// executions starts executions in memory.
type executions struct {
	mu       sync.Mutex
	ids      map[string]proto.TraceID // by schedule and tick
	ended    map[proto.TraceID]bool
	refuse   string
	reported []proto.ScheduleRun
	failing  bool // StartScheduled starts executions and then returns an error
}

func newExecutions() *executions {
	return &executions{ids: map[string]proto.TraceID{}, ended: map[proto.TraceID]bool{}}
}

func (e *executions) StartScheduled(
	_ context.Context, s *proto.Schedule, tick time.Time,
) (proto.TraceID, string, error) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.refuse != "" {
		return "", e.refuse, nil
	}
	key := fmt.Sprint(s.ID, " ", tick.Unix())
	if e.ids[key] == "" {
		e.ids[key] = proto.NewTraceID()
		e.ended[e.ids[key]] = false
	}
	if e.failing {
		return "", "", errors.New("no answer")
	}
	return e.ids[key], "", nil
}

func (e *executions) StartedTick(_ context.Context, s *proto.Schedule, tick time.Time) (proto.TraceID, error) {
	e.mu.Lock()
	defer e.mu.Unlock()
	id := e.ids[fmt.Sprint(s.ID, " ", tick.Unix())]
	if id == "" {
		return "", proto.ErrNotFound
	}
	return id, nil
}

func (e *executions) ReportFailed(_ context.Context, _ *proto.Schedule, run proto.ScheduleRun) error {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.reported = append(e.reported, run)
	return nil
}

func (e *executions) Lookup(_ context.Context, _ string, id proto.TraceID) (*proto.Record, error) {
	e.mu.Lock()
	defer e.mu.Unlock()
	ended, ok := e.ended[id]
	switch {
	case !ok:
		return nil, proto.ErrNotFound
	case ended:
		return &proto.Record{Status: proto.StatusSuccess}, nil
	default:
		return &proto.Record{Status: proto.StatusRunning}, nil
	}
}

func (e *executions) Cancel(ctx context.Context, org string, id proto.TraceID) (*proto.Record, error) {
	e.end(id)
	return e.Lookup(ctx, org, id)
}

func (e *executions) end(id proto.TraceID) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.ended[id] = true
}

func (e *executions) set(change func(*executions)) {
	e.mu.Lock()
	defer e.mu.Unlock()
	change(e)
}

// process is a process that may lead.
type process struct {
	*schedules.Schedules
	stop func()
}

// world is a server with processes that start executions.
type world struct {
	t   *testing.T
	ctx context.Context
	st  *store.Store
	*executions
}

func newWorld(t *testing.T) *world {
	server := storetest.Server(t)
	ctx := storetest.Context(t)
	st, err := store.Connect(ctx, store.Access{InProcess: server, Name: "test"}, store.Config{Retention: time.Hour},
		storetest.Log(t))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(st.Close)
	return &world{t, ctx, st, newExecutions()}
}

func (w *world) process(name string) *process {
	w.t.Helper()
	s, err := schedules.Open(w.ctx, w.st, storetest.Log(w.t))
	if err != nil {
		w.t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(w.ctx)
	var parts sync.WaitGroup
	r := &schedules.Runner{Schedules: s, Executions: w.executions, Store: w.st, Instance: name, Log: storetest.Log(w.t)}
	parts.Go(func() { _ = s.Run(ctx) })
	parts.Go(func() { _ = r.Run(ctx) })
	p := &process{s, sync.OnceFunc(func() { cancel(); parts.Wait() })}
	w.t.Cleanup(p.stop)
	return p
}

// eachSecond creates a schedule with a tick each second.
func (w *world) eachSecond(p *process, change func(*proto.Schedule)) proto.Schedule {
	w.t.Helper()
	now := time.Now().UTC()
	s := proto.Schedule{
		ID: proto.NewScheduleID(), Org: "acme", Key: "key_1", Name: "test", Cron: "* * * * * *", TimeZone: "UTC",
		Overlap: proto.OverlapSkip,
		Missed:  proto.MissedAll, Request: []byte(`{}`), CreatedAt: now, UpdatedAt: now,
	}
	if change != nil {
		change(&s)
	}
	if err := p.Create(w.ctx, s); err != nil {
		w.t.Fatal(err)
	}
	return s
}

// state waits until the state of a schedule is as ok says.
func (w *world) state(
	p *process, s proto.Schedule, what string, ok func(proto.ScheduleState) bool,
) proto.ScheduleState {
	w.t.Helper()
	for {
		_, state, err := p.Get(w.ctx, s.Org, s.ID)
		if err == nil && ok(state) {
			return state
		}
		select {
		case <-w.ctx.Done():
			w.t.Fatalf("not so: %s: %+v, %v", what, state, err)
		case <-time.After(20 * time.Millisecond):
		}
	}
}

func started(n int) func(proto.ScheduleState) bool {
	return func(s proto.ScheduleState) bool { return count(s, proto.RunStarted) >= n }
}

func count(s proto.ScheduleState, outcome proto.RunOutcome) (n int) {
	for _, r := range s.Runs {
		if r.Outcome == outcome {
			n++
		}
	}
	return n
}

// Each tick starts once, whichever process leads, and none is left out when a leader goes.
func TestEachTickStartsOnce(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	first, second := w.process("first"), w.process("second")
	s := w.eachSecond(second, func(s *proto.Schedule) { s.Overlap = proto.OverlapReplace })
	w.state(first, s, "two ticks have started", started(2))
	first.stop()
	state := w.state(second, s, "the second process leads", started(4))
	for i, r := range state.Runs {
		if i > 0 && state.Runs[i-1].Tick.Sub(r.Tick) != time.Second || r.Outcome != proto.RunStarted {
			t.Errorf("run %d: %+v", i, state.Runs)
		}
	}
}

// A process that dies between the start of an execution and the storing of the state leaves a tick
// that its successor finds.
func TestUnstoredTickIsFound(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.failing = true
	p := w.process("p")
	s := w.eachSecond(p, nil)
	id := w.first()
	w.set(func(e *executions) { e.failing = false })
	state := w.state(p, s, "the tick has started", started(1))
	if first := state.Runs[len(state.Runs)-1]; first.TraceID != id {
		t.Errorf("got %+v, want the execution %s", first, id)
	}
}

// first waits for an execution.
func (w *world) first() (id proto.TraceID) {
	for id == "" {
		w.set(func(e *executions) {
			for _, id = range e.ids {
			}
		})
	}
	return id
}

// A tick that was started but not stored stays in the history of a schedule that is paused before
// the next leader looks at it.
func TestUnstoredTickOfAPausedScheduleIsKept(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.failing = true
	p := w.process("p")
	s := w.eachSecond(p, nil)
	id := w.first()
	p.stop()
	w.set(func(e *executions) { e.failing = false })
	between, err := schedules.Open(w.ctx, w.st, storetest.Log(t))
	if err != nil {
		t.Fatal(err)
	}
	if _, err := between.Change(w.ctx, s.Org, s.ID, func(s *proto.Schedule) error {
		s.Paused, s.UpdatedAt = true, time.Now().UTC()
		return nil
	}); err != nil {
		t.Fatal(err)
	}
	state := w.state(w.process("q"), s, "the tick is in the history", started(1))
	if state.Last != id {
		t.Errorf("got %+v, want the execution %s", state, id)
	}
}

func TestPreviousExecutionRuns(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	p := w.process("p")
	skip := w.eachSecond(p, nil)
	queue := w.eachSecond(p, func(s *proto.Schedule) { s.Overlap = proto.OverlapQueue })
	state := w.state(p, skip, "ticks are skipped", func(s proto.ScheduleState) bool {
		return count(s, proto.RunSkipped) >= 2
	})
	if count(state, proto.RunStarted) != 1 {
		t.Errorf("got %+v", state.Runs)
	}
	w.end(state.Last)
	w.state(p, skip, "ticks start again", started(2))
	state = w.state(p, queue, "ticks wait", func(s proto.ScheduleState) bool { return len(s.Waiting) >= 2 })
	waiting := state.Waiting[0]
	w.end(state.Last)
	state = w.state(p, queue, "the first of them has started", started(2))
	if got := state.Runs[0].Tick; !got.Equal(waiting) {
		t.Errorf("%s has started, want %s", got, waiting)
	}
}

func TestTicksFromATime(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	p := w.process("p")
	at := time.Date(2028, 2, 29, 12, 0, 0, 0, time.UTC)
	for _, c := range []struct {
		schedule proto.Schedule
		want     string
	}{
		{
			proto.Schedule{Cron: "0 12 29 2 *", TimeZone: "UTC"},
			"2028-02-29T12:00:00Z 2032-02-29T12:00:00Z 2036-02-29T12:00:00Z",
		},
		{
			proto.Schedule{Every: proto.Seconds(time.Hour), TimeZone: "UTC", CreatedAt: at},
			"2028-02-29T13:00:00Z 2028-02-29T14:00:00Z 2028-02-29T15:00:00Z",
		},
	} {
		ticks, err := p.Ticks(&c.schedule, at, 3)
		var got []string
		for _, tick := range ticks {
			got = append(got, tick.Format(time.RFC3339))
		}
		if err != nil || strings.Join(got, " ") != c.want {
			t.Errorf("got %v, want %s: %v", got, c.want, err)
		}
	}
	if _, err := p.Ticks(&proto.Schedule{Cron: "0 0 30 2 *", TimeZone: "UTC"}, at, 3); err == nil {
		t.Error("a schedule without ticks has ticks")
	}
}

// An edit that leaves the timing leaves the ticks that wait, and the next one. Another timing drops
// those that wait, and the history tells of it.
func TestEditsThatLeaveTheTiming(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	p := w.process("p")
	s := w.eachSecond(p, func(s *proto.Schedule) { s.Overlap = proto.OverlapQueue })
	before := w.state(p, s, "ticks wait", func(s proto.ScheduleState) bool { return len(s.Waiting) >= 2 })
	edit := func(change func(*proto.Schedule)) proto.Schedule {
		t.Helper()
		edited, err := p.Change(w.ctx, s.Org, s.ID, func(s *proto.Schedule) error {
			s.UpdatedAt = time.Now().UTC()
			change(s)
			return nil
		})
		if err != nil {
			t.Fatal(err)
		}
		return edited
	}
	for _, change := range []func(*proto.Schedule){
		func(*proto.Schedule) {},
		func(s *proto.Schedule) { s.Name = "another name" },
		func(s *proto.Schedule) { s.Request = []byte(`{"code":"2"}`) },
		func(s *proto.Schedule) { s.Missed = proto.MissedNone },
		func(s *proto.Schedule) { s.Jitter = proto.Seconds(time.Millisecond) },
		func(s *proto.Schedule) { s.Cron, s.Paused = "* * * * * *", false },
	} {
		if edited := edit(change); !edited.TimedAt.Equal(s.CreatedAt) {
			t.Errorf("%+v has the timing of %s", edited, edited.TimedAt)
		}
		after := w.state(p, s, "another tick waits", func(s proto.ScheduleState) bool {
			return len(s.Waiting) > len(before.Waiting)
		})
		if !after.Waiting[0].Equal(before.Waiting[0]) || count(after, proto.RunSkipped) > 0 {
			t.Errorf("waiting before the edit: %v, after it: %v", before.Waiting, after.Waiting)
		}
		before = after
	}
	edit(func(s *proto.Schedule) { s.Cron = "0 0 29 2 *" })
	after := w.state(p, s, "the ticks are dropped", func(s proto.ScheduleState) bool { return len(s.Waiting) == 0 })
	if r := after.Runs[0]; r.Outcome != proto.RunSkipped ||
		!strings.Contains(r.Reason, "the timing of the schedule was changed") || after.Next.Day() != 29 {
		t.Errorf("after another timing: %+v", after)
	}
}

func TestPausedAndRemovedSchedules(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	p := w.process("p")
	s := w.eachSecond(p, func(s *proto.Schedule) { s.Overlap = proto.OverlapReplace })
	w.state(p, s, "it ticks", started(1))
	pause := func(paused bool) {
		t.Helper()
		if _, err := p.Change(w.ctx, s.Org, s.ID, func(s *proto.Schedule) error {
			s.Paused, s.UpdatedAt = paused, time.Now().UTC()
			return nil
		}); err != nil {
			t.Fatal(err)
		}
	}
	pause(true)
	paused := w.state(p, s, "the pause is known", func(state proto.ScheduleState) bool {
		now, _, err := p.Get(w.ctx, s.Org, s.ID)
		return err == nil && state.TimedAt.Equal(now.TimedAt)
	})
	other := w.eachSecond(p, nil)
	w.state(p, other, "another one ticks meanwhile", func(s proto.ScheduleState) bool { return len(s.Runs) >= 2 })
	pause(false)
	state := w.state(p, s, "it ticks again", started(count(paused, proto.RunStarted)+1))
	if count(state, proto.RunMissed) != 0 {
		t.Errorf("ticks during the pause are missed: %+v", state.Runs)
	}
	if err := p.Remove(w.ctx, s.Org, s.ID); err != nil {
		t.Fatal(err)
	}
	if _, _, err := p.Get(w.ctx, s.Org, s.ID); !errors.Is(err, proto.ErrNotFound) {
		t.Errorf("the removed schedule: %v", err)
	}
	if err := p.Remove(w.ctx, "other", other.ID); !errors.Is(err, proto.ErrNotFound) {
		t.Errorf("the schedule of another organisation: %v", err)
	}
	if list, _ := p.Page("acme", "", -1, nil); len(list) != 1 || list[0].ID != other.ID {
		t.Errorf("got %+v", list)
	}
}

func TestRefusedExecution(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.refuse = "its sandbox is gone"
	p := w.process("p")
	s := w.eachSecond(p, nil)
	state := w.state(p, s, "the refusals are recorded", func(s proto.ScheduleState) bool {
		return count(s, proto.RunFailed) >= 2
	})
	if r := state.Runs[0]; r.Reason != w.refuse || r.TraceID != "" {
		t.Errorf("got %+v", r)
	}
	w.set(func(e *executions) {
		e.refuse = ""
		if r := e.reported[0]; !r.Tick.Equal(state.Runs[len(state.Runs)-1].Tick) || r.Reason != state.Runs[0].Reason {
			t.Errorf("reported %+v", e.reported)
		}
	})
	w.state(p, s, "it goes on", started(1))
}

// Two gateways that create schedules at the same time do not exceed the limit of an organisation together.
func TestLimitOfTwoGateways(t *testing.T) {
	ctx, server := storetest.Context(t), storetest.Server(t)
	const left = 5
	st := storetest.Open(t, server)
	schedule := func(id string) proto.Schedule {
		return proto.Schedule{ID: id, Org: "acme", Every: proto.Seconds(time.Hour), TimeZone: "UTC", CreatedAt: time.Now()}
	}
	storetest.Fill(t, st, st.Schedules, proto.MaxSchedules-left, func(i int) (string, any) {
		id := fmt.Sprint("sch_", i)
		return "def.acme." + id, schedule(id)
	})
	create := func() func(int) error {
		s, err := schedules.Open(ctx, storetest.Open(t, server), storetest.Log(t))
		if err != nil {
			t.Fatal(err)
		}
		running, cancel := context.WithCancel(ctx)
		var work sync.WaitGroup
		work.Go(func() { _ = s.Run(running) })
		t.Cleanup(func() { cancel(); work.Wait() })
		return func(i int) error { return s.Create(ctx, schedule(fmt.Sprint("sch_new", i))) }
	}
	refused := func(err error) bool { _, ok := errors.AsType[*proto.FieldError](err); return ok }
	if n := storetest.Race(t, 5, refused, create(), create()); n != left {
		t.Errorf("%d schedules were stored, %d were left", n, left)
	}
}
