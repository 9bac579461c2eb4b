package pipelines_test

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"path"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/scheduler/pipelines"
	"github.com/bullpen-run/bullpen/scheduler/store"
	"github.com/bullpen-run/bullpen/scheduler/storetest"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// executions starts executions in memory. They end at once.
type executions struct {
	mu      sync.Mutex
	started map[string]proto.TraceID // by step and cell
	order   []string
	records map[proto.TraceID]*proto.Record
	result  func(step string) proto.Status
	answer  func(n int) error // of the n-th start, after it
	starts  int
	refused string          // why no cell starts
	blocks  map[string]bool // steps that do not start before their context is done
	blocked map[string]int  // how many wait, by organisation
	files   *threads
}

func (e *executions) StartStep(
	ctx context.Context, p *proto.Pipeline, step, cell int, thread string,
) (proto.TraceID, string, error) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.blocks[p.Steps[step].Name] {
		e.blocked[p.Org]++
		e.mu.Unlock()
		<-ctx.Done()
		e.mu.Lock()
		return "", "", ctx.Err()
	}
	key := fmt.Sprint(p.Steps[step].Name, cell)
	if e.started[key] == "" {
		id := proto.NewTraceID()
		e.started[key], e.order = id, append(e.order, key)
		now := time.Now()
		status := e.result(p.Steps[step].Name)
		r := &proto.Record{Status: status}
		if status.Terminal() {
			result := proto.Exited(0)
			if status != proto.StatusSuccess {
				result = proto.Exited(1)
			}
			r.StartedAt, r.CompletedAt, r.Result = &now, &now, &result
		}
		e.records[id] = r
		e.files.put(thread, "out/"+key)
		e.files.hold(thread, id)
	}
	e.starts++
	if err := e.answer(e.starts); err != nil {
		return "", "", err
	}
	return e.started[key], "", nil
}

func (e *executions) StepSpace(_ context.Context, _ *proto.Pipeline, step, _ int) (proto.Space, string, error) {
	e.mu.Lock()
	defer e.mu.Unlock()
	return proto.Space{Bytes: 1 << 20, Files: 100}, e.refused, nil
}

func (e *executions) Lookup(_ context.Context, _ string, id proto.TraceID) (*proto.Record, error) {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.records[id], nil
}

func (e *executions) Cancel(_ context.Context, _ string, id proto.TraceID) (*proto.Record, error) {
	e.mu.Lock()
	defer e.mu.Unlock()
	result := proto.Cancelled()
	e.records[id] = &proto.Record{Status: proto.StatusCancelled, Result: &result}
	return e.records[id], nil
}

// threads are threads in memory: the content of their files by thread and path.
type threads struct {
	mu      sync.Mutex
	files   map[string]map[string]string
	holders map[string]proto.TraceID
	copies  []string         // the threads that files were copied to
	fails   map[string]error // of copies to a thread, empty for all
	keep    string           // a thread that cannot be removed
}

func (s *threads) Get(_ context.Context, _, thread string) (*proto.Thread, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.files[thread] == nil {
		return nil, proto.ErrNotFound
	}
	return &proto.Thread{ID: thread, Holder: s.holders[thread]}, nil
}

// put puts a file with the content x into a thread.
func (s *threads) put(thread, path string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.files[thread] == nil {
		s.files[thread] = map[string]string{}
	}
	s.files[thread][path] = "x"
}

// hold makes an execution the last holder of a thread.
func (s *threads) hold(thread string, id proto.TraceID) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.holders[thread] = id
}

func (s *threads) Copy(_ context.Context, _, thread string, c *proto.TreeCopy) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if c.New && s.files[thread] != nil {
		return proto.ErrExists
	}
	if err := cmp.Or(s.fails[thread], s.fails[""]); err != nil {
		return err
	}
	for _, part := range c.Parts {
		for name, text := range s.files[part.Thread] {
			below, selected := proto.NewPathMatcher(part.Paths), false
			for dir := range strings.SplitSeq(name, "/") {
				if below, selected = below.Enter(dir); selected {
					break
				}
			}
			if !selected {
				continue
			}
			if s.files[thread] == nil {
				s.files[thread] = map[string]string{}
			}
			s.files[thread][path.Join(part.Dir, name)] = text
		}
	}
	s.copies = append(s.copies, thread)
	return nil
}

func (s *threads) Fork(_ context.Context, _, from string, _ int64, to string) (*proto.Thread, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	switch {
	case s.files[from] == nil:
		return nil, proto.ErrNotFound
	case s.files[to] != nil:
		return nil, proto.ErrExists
	}
	s.files[to] = maps.Clone(s.files[from])
	return new(proto.Thread), nil
}

func (s *threads) Remove(_ context.Context, _, thread string) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if thread == s.keep {
		return errors.New("the store of threads does not answer")
	}
	delete(s.files, thread)
	return nil
}

func (s *threads) has(thread, path string) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	_, ok := s.files[thread][path]
	return ok
}

// world is a server with processes that run pipelines.
type world struct {
	t   *testing.T
	ctx context.Context
	st  *store.Store
	*executions
	files     *threads
	retention time.Duration
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
	files := &threads{
		files: map[string]map[string]string{}, holders: map[string]proto.TraceID{},
		fails: map[string]error{},
	}
	e := &executions{
		started: map[string]proto.TraceID{}, records: map[proto.TraceID]*proto.Record{}, files: files,
		blocked: map[string]int{}, result: func(string) proto.Status { return proto.StatusSuccess }, answer: func(int) error {
			return nil
		},
	}
	return &world{t, ctx, st, e, files, time.Hour}
}

// process starts a process that may lead, and returns how to stop it.
func (w *world) process(name string) (*pipelines.Pipelines, func()) {
	w.t.Helper()
	p, err := pipelines.Open(w.ctx, w.st, storetest.Log(w.t))
	if err != nil {
		w.t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(w.ctx)
	var parts sync.WaitGroup
	r := &pipelines.Runner{
		Pipelines: p, Executions: w.executions, Threads: w.files, Store: w.st, Retention: w.retention, Instance: name,
		Log: storetest.Log(w.t),
	}
	parts.Go(func() { _ = p.Run(ctx) })
	parts.Go(func() { _ = r.Run(ctx) })
	stop := sync.OnceFunc(func() { cancel(); parts.Wait() })
	w.t.Cleanup(stop)
	return p, stop
}

func (w *world) start(p *pipelines.Pipelines, file string) *proto.Pipeline {
	w.t.Helper()
	return w.startFor(p, "acme", file)
}

func (w *world) startFor(p *pipelines.Pipelines, org, file string) *proto.Pipeline {
	w.t.Helper()
	run, err := p.Parse(file)
	if err == nil {
		run.ID, run.Org, run.CreatedAt = proto.NewPipelineID(), org, time.Now().UTC()
		_, err = p.Create(w.ctx, run, nothing)
	}
	if err != nil {
		w.t.Fatal(err)
	}
	return run
}

// await waits until the state of a run is as ok says.
func (w *world) await(
	p *pipelines.Pipelines, run *proto.Pipeline, what string, ok func(*proto.PipelineState) bool,
) *proto.PipelineState {
	w.t.Helper()
	for {
		s, err := p.Get(w.ctx, run.Org, run.ID)
		if err == nil && ok(s) {
			return s
		}
		select {
		case <-w.ctx.Done():
			w.t.Fatalf("%s: %+v, %v", what, s, err)
		case <-time.After(10 * time.Millisecond):
		}
	}
}

func ended(s *proto.PipelineState) bool { return s.Status != proto.PipelineRunning }

var depsCache = proto.OwnerCache.Thread("deps")

const diamond = `
steps:
  - {name: build, run: x, cache: {key: deps, paths: [out]}}
  - {name: test, run: x, matrix: {k: [1, 2]}, artifacts: {result: [out/test*]}}
  - {name: report, run: x, when: always, artifacts: {all: [out]}}
`

func TestRun(t *testing.T) {
	w := newWorld(t)
	p, _ := w.process("one")
	w.result = func(step string) proto.Status {
		if step == "test" {
			return proto.StatusFailed
		}
		return proto.StatusSuccess
	}
	run := w.start(p, diamond)
	s := w.await(p, run, "the run ends", ended)
	if s.Status != proto.PipelineFailed || s.Cells[0].Status != proto.StepSuccess ||
		s.Cells[1].Status != proto.StepFailed || *s.Cells[1].ExitCode != 1 ||
		s.Cells[3].Status != proto.StepSuccess {
		t.Errorf("%+v", s)
	}
	for _, path := range []string{
		"out/build0", "artifacts/test/k=1/out/test0", "artifacts/test/k=2/out/test1",
		"out/report0",
	} {
		if !w.files.has(s.Cells[3].Thread, path) {
			t.Errorf("the artifacts of the report have no %s: %v", path, w.files.files)
		}
	}
	if !w.files.has(depsCache, "out/build0") || w.files.has(s.Cells[1].Thread, "out/test1") {
		t.Errorf("%v", w.files.files)
	}
	next := w.start(p, "steps: [{name: other, run: x, cache: {key: deps, paths: [out]}}]")
	w.await(p, next, "the run with the cache ends", ended)
	if !w.files.has(proto.RunThread(next.ID), "out/build0") {
		t.Errorf("the cache is not there: %v", w.files.files)
	}
	if list := p.List("acme"); len(list) != 2 || list[0].ID != next.ID || len(p.List("other")) != 0 {
		t.Errorf("%+v", list)
	}
}

// Each process dies after it has started an execution, and before it stores the id.
func TestNoStepTwice(t *testing.T) {
	w := newWorld(t)
	died := make(chan struct{}, 3)
	w.answer = func(n int) error {
		if n <= 3 {
			died <- struct{}{}
			return errors.New("the process has died")
		}
		return nil
	}
	p, stop := w.process("process-0")
	run := w.start(p, diamond)
	for i := range 3 {
		<-died
		stop()
		p, stop = w.process(fmt.Sprint("process-", i+1))
	}
	s := w.await(p, run, "the run ends", ended)
	if s.Status != proto.PipelineSuccess || len(w.order) != 4 || w.starts < 5 {
		t.Errorf("%s, started %v with %d calls", s.Status, w.order, w.starts)
	}
	for i, key := range []string{"build0", "test0", "test1", "report0"} {
		if s.Cells[i].TraceID != w.started[key] {
			t.Errorf("cell %d has execution %s, %s was started", i, s.Cells[i].TraceID, w.started[key])
		}
	}
}

// runner returns a runner that is not elected.
func (w *world) runner() *pipelines.Runner {
	w.t.Helper()
	p, err := pipelines.Open(w.ctx, w.st, storetest.Log(w.t))
	if err != nil {
		w.t.Fatal(err)
	}
	r := &pipelines.Runner{
		Pipelines: p, Executions: w.executions, Threads: w.files, Store: w.st, Retention: w.retention,
		Log: storetest.Log(w.t),
	}
	r.Init()
	return r
}

// Two processes handle a run at the same time, as after a leader that hung. Each step runs once, and
// the state names its execution.
func TestTwoRunnersAtOnce(t *testing.T) {
	const file = `
steps:
  - {name: build, run: x, cache: {key: deps, paths: [out]}, artifacts: {all: [out]}}
  - {name: test, run: x, matrix: {k: [1, 2, 3, 4, 5, 6]}, artifacts: {result: [out/test*]}}
  - {name: lint, run: x, workspace: own}
  - {name: report, run: x, needs: [test, lint], artifacts: {all: [out]}}
`
	for round := range 5 {
		w := newWorld(t)
		ran := w.result
		w.result = func(step string) proto.Status {
			if step == "lint" && round%2 == 1 {
				return proto.StatusFailed
			}
			return ran(step)
		}
		one, two := w.runner(), w.runner()
		run := w.start(one.Pipelines, file)
		var both sync.WaitGroup
		for _, r := range []*pipelines.Runner{one, two} {
			both.Go(func() {
				for {
					s, err := r.Pipelines.Get(w.ctx, run.Org, run.ID)
					if err == nil && ended(s) {
						return
					}
					if err == nil {
						err = r.Handle(w.ctx, s)
					}
					if err != nil {
						t.Error(err)
						return
					}
				}
			})
		}
		both.Wait()
		s, err := one.Pipelines.Get(w.ctx, run.Org, run.ID)
		if err != nil {
			t.Fatal(err)
		}
		want := map[bool]proto.PipelineStatus{false: proto.PipelineSuccess, true: proto.PipelineFailed}[round%2 == 1]
		if s.Status != want {
			t.Errorf("%+v", s)
		}
		seen := map[proto.TraceID]bool{}
		for i, c := range s.Cells {
			if skipped := c.Status == proto.StepSkipped; skipped != (c.TraceID == "") || c.TraceID != "" && seen[c.TraceID] {
				t.Errorf("cell %d: %+v", i, c)
			}
			seen[c.TraceID] = true
		}
		for key, id := range w.started {
			if !seen[id] {
				t.Errorf("%s was started as %s, which no cell names", key, id)
			}
		}
		if !w.files.has(depsCache, "out/build0") || !w.files.has(proto.CellThread(run.ID, 0), "out/build0") {
			t.Errorf("%v", w.files.files)
		}
	}
}

// The clock of the gateway that created a run may differ from the leader's, and may be set while the
// run goes on.
func TestClockOfARun(t *testing.T) {
	w := newWorld(t)
	w.result = func(string) proto.Status { return proto.StatusRunning }
	r := w.runner()
	run := w.start(r.Pipelines, "timeout: 60\nsteps: [{name: a, run: x}]")
	s, err := r.Pipelines.Get(w.ctx, run.Org, run.ID)
	if err == nil {
		err = r.Handle(w.ctx, s)
	}
	if err != nil {
		t.Fatal(err)
	}
	deadline := r.Deadline(run.Org, run.ID)
	if left := time.Until(deadline); left <= 0 || left > time.Minute || !strings.Contains(deadline.String(), " m=") {
		t.Errorf("the deadline %s is in %s, or has no monotonic clock", deadline, left)
	}
}

// A run whose definition is gone ends, and says why.
func TestLostDefinition(t *testing.T) {
	w := newWorld(t)
	w.result = func(string) proto.Status { return proto.StatusRunning }
	p, stop := w.process("one")
	run := w.start(p, diamond)
	w.await(p, run, "a step runs", func(s *proto.PipelineState) bool { return s.Cells[0].TraceID != "" })
	stop()
	if err := w.st.Pipelines.Delete(w.ctx, "def.acme."+run.ID); err != nil {
		t.Fatal(err)
	}
	p, _ = w.process("two")
	s := w.await(p, run, "the run ends", ended)
	if s.Status != proto.PipelineFailed || !strings.Contains(s.Reason, "definition of the run is gone") ||
		s.Cells[0].Status != proto.StepCancelled ||
		w.records[s.Cells[0].TraceID].Status != proto.StatusCancelled {
		t.Errorf("%+v", s)
	}
}

func TestCancelAndRemove(t *testing.T) {
	w := newWorld(t)
	w.retention = -time.Second
	w.result = func(string) proto.Status { return proto.StatusRunning }
	p, stop := w.process("one")
	run := w.start(p, diamond)
	w.await(p, run, "a step runs", func(s *proto.PipelineState) bool { return s.Cells[0].TraceID != "" })
	if _, err := p.Cancel(w.ctx, run.Org, run.ID); err != nil {
		t.Fatal(err)
	}
	s := w.await(p, run, "the run ends", ended)
	if s.Status != proto.PipelineCancelled || s.Cells[0].Status != proto.StepCancelled ||
		s.Cells[3].Status != proto.StepCancelled {
		t.Errorf("%+v", s)
	}
	if _, err := p.Cancel(w.ctx, "other", run.ID); !errors.Is(err, proto.ErrNotFound) {
		t.Errorf("another organisation: %v", err)
	}
	stop()
	p, _ = w.process("two") // sweeps at its start
	for {
		_, err := p.Get(w.ctx, run.Org, run.ID)
		_, errDefinition := p.Definition(w.ctx, run.Org, run.ID)
		if errors.Is(err, proto.ErrNotFound) && errors.Is(errDefinition, proto.ErrNotFound) {
			break
		}
		select {
		case <-w.ctx.Done():
			t.Fatal(err, errDefinition)
		case <-time.After(10 * time.Millisecond):
		}
	}
	if w.files.has(proto.RunThread(run.ID), "out/build0") {
		t.Error("the workspace stays")
	}
}

// A key that is revoked while a run goes on ends the run, and does not keep it waiting.
func TestRefusedSpace(t *testing.T) {
	w := newWorld(t)
	w.refused = "the key is revoked"
	p, _ := w.process("one")
	run := w.start(p, "steps: [{name: a, run: x}]")
	if s := w.await(p, run, "the run ends", ended); s.Status != proto.PipelineFailed || s.Cells[0].Reason != w.refused {
		t.Errorf("%+v", s)
	}
}

func nothing(context.Context) error { return nil }

// Two gateways that are not notified of each other's runs enforce the limit together.
func TestLimits(t *testing.T) {
	w := newWorld(t)
	w.result = func(string) proto.Status { return proto.StatusRunning }
	one, _ := w.process("one")
	two, err := pipelines.Open(w.ctx, w.st, storetest.Log(t)) // applies no changes
	if err != nil {
		t.Fatal(err)
	}
	parsed, err := one.Parse("steps: [{name: a, run: x}]")
	if err != nil {
		t.Fatal(err)
	}
	create := func(p *pipelines.Pipelines, org string, prepare func(context.Context) error) (*proto.Pipeline, error) {
		run := *parsed
		run.ID, run.Org, run.CreatedAt = proto.NewPipelineID(), org, time.Now().UTC()
		_, err := p.Create(w.ctx, &run, prepare)
		return &run, err
	}
	runs := make(chan *proto.Pipeline, 2*proto.MaxActivePipelines)
	var creations sync.WaitGroup
	for i := range 2 * proto.MaxActivePipelines {
		creations.Go(func() {
			run, err := create([]*pipelines.Pipelines{one, two}[i%2], "acme", nothing)
			rejection, ok := errors.AsType[*proto.Rejection](err)
			switch {
			case err == nil:
				runs <- run
			case !ok || rejection.Reason != proto.RejectedPipelines || rejection.Limit != proto.MaxActivePipelines:
				t.Error(err)
			}
		})
	}
	creations.Wait()
	if len(runs) != proto.MaxActivePipelines {
		t.Errorf("%d runs were accepted", len(runs))
	}
	if _, err := create(two, "other", nothing); err != nil {
		t.Error(err)
	}
	ends := <-runs
	w.put(proto.PipelineState{ID: ends.ID, Status: proto.PipelineSuccess, CreatedAt: time.Now(), EndedAt: time.Now()})
	failed := errors.New("no such thread")
	if run, err := create(two, "acme", func(context.Context) error { return failed }); !errors.Is(err, failed) {
		t.Error(err)
	} else if _, err := two.Definition(w.ctx, "acme", run.ID); !errors.Is(err, proto.ErrNotFound) {
		t.Error(err)
	}
	if _, err := create(two, "acme", nothing); err != nil { // in the place of both
		t.Error(err)
	}
	if _, err := create(one, "acme", nothing); err == nil {
		t.Error("one run too many")
	}
	parsed.Secrets = map[string]string{"A": strings.Repeat("x", 1<<20)}
	if _, err := create(one, "other", nothing); err == nil || !strings.Contains(err.Error(), "file makes a run") {
		t.Error(err)
	}
}

// The oldest runs of an organisation are removed soon after the limit is reached.
func TestMostRunsKept(t *testing.T) {
	w := newWorld(t)
	p, _ := w.process("one")
	first := w.start(p, "steps: [{name: a, run: x}]")
	w.await(p, first, "the first run ends", ended)
	for range proto.MaxPipelines {
		w.put(proto.PipelineState{
			ID: proto.NewPipelineID(), Status: proto.PipelineSuccess, CreatedAt: time.Now(),
			EndedAt: time.Now(),
		})
	}
	w.eventually("the first run is removed, and only that", func() bool {
		_, err := p.Get(w.ctx, first.Org, first.ID)
		return errors.Is(err, proto.ErrNotFound) && len(p.List("acme")) == proto.MaxPipelines
	})
}

// put stores the state of a run.
func (w *world) put(s proto.PipelineState) {
	w.t.Helper()
	s.Org = "acme"
	body, err := json.Marshal(s)
	if err == nil {
		_, err = w.st.Pipelines.Put(w.ctx, "run.acme."+s.ID, body)
	}
	if err != nil {
		w.t.Fatal(err)
	}
}

func (w *world) eventually(what string, ok func() bool) {
	w.t.Helper()
	for !ok() {
		select {
		case <-w.ctx.Done():
			w.t.Fatal(what)
		case <-time.After(10 * time.Millisecond):
		}
	}
}

func TestSecretsAreForgotten(t *testing.T) {
	w := newWorld(t)
	p, _ := w.process("one")
	run, err := p.Parse("steps: [{name: a, run: x, secrets: [TOKEN]}]")
	if err != nil {
		t.Fatal(err)
	}
	run.ID, run.Org, run.CreatedAt, run.Secrets = proto.NewPipelineID(), "acme", time.Now().UTC(),
		map[string]string{"TOKEN": "s3cret"}
	if _, err := p.Create(w.ctx, run, nothing); err != nil {
		t.Fatal(err)
	}
	w.await(p, run, "the run ends, without secrets", func(s *proto.PipelineState) bool {
		return ended(s) && !s.HasSecrets
	})
	stored, err := p.Definition(w.ctx, run.Org, run.ID)
	if err != nil || stored.Secrets != nil || len(stored.Steps) != 1 || stored.Steps[0].Secrets[0] != "TOKEN" {
		t.Errorf("%+v, %v", stored, err)
	}
}

// A process that died while it created a run has left its state, its definition and a copy of the files. One
// whose files cannot be removed does not keep others from being removed. Clients see none of them.
func TestRemainsOfDeadProcesses(t *testing.T) {
	w := newWorld(t)
	p, stop := w.process("one")
	stop()
	stuck, old, young := proto.NewPipelineID(), proto.NewPipelineID(), proto.NewPipelineID()
	for id, age := range map[string]time.Duration{stuck: 2 * time.Hour, old: time.Hour, young: 0} {
		created := time.Now().Add(-age)
		body, err := json.Marshal(proto.Pipeline{ID: id, Org: "acme", CreatedAt: created})
		if err == nil {
			_, err = w.st.Pipelines.Put(w.ctx, "def.acme."+id, body)
		}
		if err != nil {
			t.Fatal(err)
		}
		w.put(proto.PipelineState{ID: id, CreatedAt: created, Status: proto.PipelineRunning, Creating: true})
		w.files.put(proto.RunThread(id), "a")
	}
	w.files.keep = proto.RunThread(stuck)
	p, _ = w.process("two")
	w.eventually("the definition is removed", func() bool {
		_, err := p.Definition(w.ctx, "acme", old)
		return errors.Is(err, proto.ErrNotFound)
	})
	if _, err := p.Definition(w.ctx, "acme", young); err != nil || w.files.has(proto.RunThread(old), "a") ||
		!w.files.has(proto.RunThread(young), "a") {
		t.Errorf("%v, %v", err, w.files.files)
	}
	for _, id := range []string{stuck, young} {
		_, err := p.Get(w.ctx, "acme", id)
		_, errCancel := p.Cancel(w.ctx, "acme", id)
		if !errors.Is(err, proto.ErrNotFound) || !errors.Is(errCancel, proto.ErrNotFound) || len(p.List("acme")) != 0 {
			t.Errorf("a run that is being created: %v, %v, %v", err, errCancel, p.List("acme"))
		}
	}
}

// A process that leads no more forgets the definitions of runs, which have secrets.
func TestSecretsOfALeaderThatStopped(t *testing.T) {
	w := newWorld(t)
	w.result = func(string) proto.Status { return proto.StatusRunning }
	p, stop := w.process("one")
	run := w.start(p, "steps: [{name: a, run: x}]")
	w.await(p, run, "a step runs", func(s *proto.PipelineState) bool { return s.Cells[0].TraceID != "" })
	if n := p.Known(); n != 1 {
		t.Errorf("the leader knows %d definitions", n)
	}
	stop()
	if n := p.Known(); n != 0 {
		t.Errorf("a process that leads no more knows %d definitions", n)
	}
}

// A cache never changes. One that cannot be saved or used is a warning.
func TestCache(t *testing.T) {
	w := newWorld(t)
	p, _ := w.process("one")
	const file = "steps: [{name: build, run: x, cache: {key: deps, paths: [out]}}, {name: next, run: x}]"
	tooLarge := &proto.CopyError{Size: proto.Space{Files: 2}, Most: proto.Space{Files: 1}}
	w.files.fails[depsCache] = tooLarge
	s := w.await(p, w.start(p, file), "the run ends", ended)
	if warnings := s.Cells[0].Warnings; s.Status != proto.PipelineSuccess || len(warnings) != 1 ||
		!strings.Contains(warnings[0], "the cache deps is not saved: 2 files") {
		t.Errorf("%+v", s)
	}
	w.files.fails = map[string]error{}
	w.files.put(depsCache, "out/old")
	run := w.start(p, file)
	if s := w.await(p, run, "the run ends", ended); s.Status != proto.PipelineSuccess || s.Cells[0].Warnings != nil {
		t.Errorf("%+v", s)
	}
	if !w.files.has(proto.RunThread(run.ID), "out/old") || w.files.has(depsCache, "out/build0") {
		t.Errorf("%v", w.files.files)
	}
	w.files.fails[""] = tooLarge
	s = w.await(p, w.start(p, file), "the run ends", ended)
	if warnings := s.Cells[0].Warnings; s.Status != proto.PipelineSuccess || len(warnings) != 1 ||
		!strings.Contains(warnings[0], "the cache deps is not used: 2 files") {
		t.Errorf("%+v", s)
	}
}

// A process dies after it has started an execution. The next one does not copy a cache and artifacts
// again: the program may have changed them.
func TestPreparedOnce(t *testing.T) {
	w := newWorld(t)
	w.files.put(depsCache, "out/old")
	w.answer = func(n int) error {
		if n == 2 {
			return errors.New("the process has died")
		}
		return nil
	}
	p, _ := w.process("one")
	run := w.start(p, `
steps:
  - {name: make, run: x, workspace: own, artifacts: {all: [out]}}
  - {name: use, run: x, cache: {key: deps, paths: [out]}}
`)
	if s := w.await(p, run, "the run ends", ended); s.Status != proto.PipelineSuccess || w.starts != 3 {
		t.Errorf("%+v after %d starts", s, w.starts)
	}
	// the artifacts, and the cache
	if want := []string{proto.RunThread(run.ID), proto.RunThread(run.ID)}; !slices.Equal(w.files.copies, want) {
		t.Errorf("copies to %q, want %q", w.files.copies, want)
	}
}

// Runs of two organisations whose steps cannot start now do not keep those of a third one waiting.
func TestOrganisationsTakeTurns(t *testing.T) {
	w := newWorld(t)
	w.blocks = map[string]bool{"slow": true}
	p, _ := w.process("one")
	for _, org := range []string{"large", "larger"} {
		for range proto.MaxActivePipelines {
			w.startFor(p, org, "steps: [{name: slow, run: x}]")
		}
	}
	w.eventually("steps of both organisations wait", func() bool {
		w.mu.Lock()
		defer w.mu.Unlock()
		return w.blocked["large"] > 0 && w.blocked["larger"] > 0 &&
			w.blocked["large"]+w.blocked["larger"] >= proto.MaxActivePipelines
	})
	run := w.startFor(p, "third", "steps: [{name: quick, run: x}]")
	w.await(p, run, "the run of the third organisation ends", ended)
	w.mu.Lock()
	defer w.mu.Unlock()
	if n := len(w.started); n != 1 {
		t.Errorf("%d steps started", n)
	}
}
