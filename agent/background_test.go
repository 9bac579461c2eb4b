package agent_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/bullpen-run/bullpen/agent"
	"github.com/bullpen-run/bullpen/agent/agenttest"
	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/proto/api"
	"github.com/bullpen-run/bullpen/scheduler/agentruns"
	"github.com/bullpen-run/bullpen/scheduler/engine"
)

// background has runs of the test's own API. Its calls are counted by their ids.
type background struct {
	store *agenttest.Store
	up    agent.Upstream
	mu    sync.Mutex
	calls map[string]int
	ended []string
	hosts chan *agenttest.Host // of the next runs; others get new ones
	api   agent.API            // nil for the world itself
	read  agent.Active         // nil for the store
	// forbidden, if not nil, ends all runs with an error when it is closed.
	forbidden chan struct{}
	// block, if not nil, is called in a call.
	block func(ctx context.Context) error
}

func (b *background) Prepare(
	ctx context.Context, _ agent.Host, record *proto.AgentRun, started *agent.Start,
) (*agent.Run, *agent.Start, error) {
	var text string
	if err := json.Unmarshal(record.Request, &text); err != nil || text == "refused" {
		return nil, nil, proto.FieldErrorf("text", "is refused")
	}
	if started == nil {
		if ctx.Err() != nil { // the container cannot be made
			return nil, nil, api.Errorf(api.CodeInternal, "as a host says")
		}
		started = &agent.Start{Container: "c"}
	}
	r := run(say(text))
	n := 0
	r.NewCallID = func(*agent.Tool) string { n++; return fmt.Sprintf("new%d", n) }
	execute := r.Tools[0].Execute
	r.Tools[0].Execute = func(ctx context.Context, call *agent.Call) (*agent.Outcome, error) {
		b.mu.Lock()
		b.calls[call.ID+string(call.Arguments)]++
		b.mu.Unlock()
		if b.block != nil {
			if err := b.block(ctx); err != nil {
				return nil, err
			}
		}
		return execute(ctx, call)
	}
	return r, started, nil
}

func (b *background) Ended(_ context.Context, record *proto.AgentRun, last *agent.Entry) error {
	b.mu.Lock()
	defer b.mu.Unlock()
	switch {
	case last.Cancelled:
		b.ended = append(b.ended, record.ID+" cancelled")
	case last.Failed != nil:
		b.ended = append(b.ended, record.ID+" failed "+string(last.Failed.Code))
	default:
		b.ended = append(b.ended, record.ID+" "+string(last.Event.End.Reason))
	}
	return nil
}

func newBackground(w *world) *background {
	return &background{store: agenttest.NewStore(), up: w.up, calls: map[string]int{}}
}

// start carries out runs until stop is called, as one process does.
func (b *background) start(t *testing.T) (stop func()) {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	served := b.api
	if served == nil {
		served = b
	}
	read := b.read
	if read == nil {
		read = b.store
	}
	log := slog.New(slog.DiscardHandler)
	runs := &agent.Background{
		Store: read, Upstream: b.up, APIs: map[string]agent.API{"test": served}, Log: log,
		Host: func(string, string) agent.BackgroundHost {
			select {
			case host := <-b.hosts:
				return host
			default:
				return &forbiddenHost{Host: agenttest.NewHost(), forbidden: b.forbidden, end: func(error) {}}
			}
		},
	}
	queue := new(engine.Queue[proto.ActiveAgentRun])
	b.store.Follow(func(run proto.ActiveAgentRun, active bool) {
		queue.Change(engine.Item{Org: run.Org, ID: run.ID}, func(known *proto.ActiveAgentRun) bool {
			*known = run
			return active
		})
	})
	done := make(chan struct{})
	go func() { defer close(done); agentruns.NewEngine(queue, runs.CarryOut, log).Lead(ctx) }()
	return func() { cancel(); <-done }
}

// forbiddenHost is a host that ends its run when forbidden, which may be nil, is closed.
type forbiddenHost struct {
	*agenttest.Host
	forbidden chan struct{}
	end       context.CancelCauseFunc
}

// Begin implements [agent.BackgroundHost].
func (h *forbiddenHost) Begin(ctx context.Context, _ *proto.AgentRun, _ bool) (context.Context, error) {
	ctx, h.end = context.WithCancelCause(ctx)
	go func() {
		select {
		case <-ctx.Done():
		case <-h.forbidden:
			h.end(api.Errorf(api.CodeForbidden, "the key was revoked"))
		}
	}()
	return ctx, nil
}

// Release implements [agent.BackgroundHost].
func (h *forbiddenHost) Release() { h.end(nil) }

func (b *background) create(t *testing.T, id, text string) {
	t.Helper()
	request, err := json.Marshal(text)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := b.store.Create(t.Context(), &proto.AgentRun{
		Org: "acme", ID: id, API: "test", Request: request,
		Background: true, Stream: true, CreatedAt: time.Now(),
	}); err != nil {
		t.Fatal(err)
	}
}

// follow returns the entries of a run to its end, in short form.
func (b *background) follow(t *testing.T, id string) string {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	w := &world{t: t}
	var end string
	r := agent.Reader{Store: b.store, Org: "acme", ID: id, At: 1}
	err := r.Follow(ctx, func(e *agent.Entry) error {
		switch {
		case e.Event != nil:
			w.events = append(w.events, *e.Event)
		case e.Failed != nil:
			end = " failed: " + e.Failed.Message
		case e.Cancelled:
			end = " cancelled"
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	return w.trace() + end
}

const twoCalls = `rules: [{role: user, text: "so ", calls: [{name: double, arguments: {n: 1}}, {name: double, ` +
	`arguments: {n: 2}}]}, {text: ok}]`

// A run that is interrupted after any of its entries goes on in another process: what was carried out
// is not carried out again, and nothing is missing.
func TestBackgroundRunsSurviveEveryInterruption(t *testing.T) {
	eachProtocol(t, twoCalls, func(w *world) {
		plain := newBackground(w)
		plain.create(t, "r", "x")
		stop := plain.start(t)
		want := plain.follow(t, "r")
		stop()
		if want != `0:"so " 1:server new1=double({"n":1}) 2:server new2=double({"n":2}) 3:new1->doubled 2 4:new2->doubled `+
			`4 5:"ok" done` {
			t.Fatal(want)
		}
		for after := range 10 {
			b := newBackground(w)
			b.create(t, "r", "x")
			appended, interrupted, resumed := 0, make(chan struct{}), atomic.Bool{}
			b.store.FailAppend = func([]byte) error {
				if appended++; resumed.Load() || appended <= after {
					return nil
				}
				if appended == after+1 {
					close(interrupted)
				}
				return errors.New("this process is gone")
			}
			stop := b.start(t)
			ended := make(chan string)
			go func() { ended <- b.follow(t, "r") }()
			select {
			case <-interrupted:
				stop()
				resumed.Store(true)
				stop = b.start(t)
			case got := <-ended: // it has fewer entries
				stop()
				if got != want {
					t.Errorf("not interrupted: %s", got)
				}
				continue
			}
			got := <-ended
			stop()
			for call, n := range b.calls {
				// A call whose result was not stored is looked up by its execution.
				if n > 2 || n == 2 && after < 4 {
					t.Errorf("after %d entries: call %s was carried out %d times", after, call, n)
				}
			}
			if !strings.Contains(got, `->doubled 2`) || strings.Count(got, "->doubled") != 2 ||
				!strings.HasSuffix(got, `"ok" done`) {
				t.Errorf("after %d entries:\n got %s\nwant %s", after, got, want)
			}
		}
	})
}

// A run that is cancelled while no process carries it out ends the call that was carried out.
func TestCancelledBetweenProcesses(t *testing.T) {
	eachProtocol(t, twoCalls, func(w *world) {
		b := newBackground(w)
		entered := make(chan struct{}, 1)
		causes := make(chan error, 2)
		b.block = func(ctx context.Context) error {
			entered <- struct{}{}
			<-ctx.Done()
			causes <- context.Cause(ctx)
			return api.Errorf(api.CodeInternal, "as a host says")
		}
		b.create(t, "r", "x")
		stop := b.start(t)
		<-entered
		stop()
		if err := <-causes; errors.Is(err, proto.ErrRunCancelled) {
			t.Error("stopped as if it was cancelled")
		}
		if err := b.store.Cancel(t.Context(), "acme", "r"); err != nil {
			t.Fatal(err)
		}
		defer b.start(t)()
		if got := b.follow(t, "r"); !strings.HasSuffix(got, " cancelled") {
			t.Error(got)
		}
		if err := <-causes; !errors.Is(err, proto.ErrRunCancelled) || b.calls[`new1{"n":1}`] != 2 {
			t.Errorf("%v, after the calls %v", err, b.calls)
		}
	})
}

// A run that is cancelled before it has begun does not need what it would begin with.
func TestCancelledBeforeItBegan(t *testing.T) {
	eachProtocol(t, twoCalls, func(w *world) {
		b := newBackground(w)
		b.create(t, "r", "x")
		if err := b.store.Cancel(t.Context(), "acme", "r"); err != nil {
			t.Fatal(err)
		}
		defer b.start(t)()
		if got := b.follow(t, "r"); got != " cancelled" {
			t.Errorf("%q", got)
		}
	})
}

// A host that may not go on ends a run, with its reason.
func TestHostEndsRun(t *testing.T) {
	eachProtocol(t, `rules: [{fault: hang}]`, func(w *world) {
		b := newBackground(w)
		b.forbidden = make(chan struct{})
		b.create(t, "r", "x")
		defer b.start(t)()
		close(b.forbidden)
		if got := b.follow(t, "r"); !strings.HasSuffix(got, "failed: the key was revoked") {
			t.Error(got)
		}
	})
}

// Organisations whose models do not answer leave room for others.
func TestBackgroundRunsLeaveRoom(t *testing.T) {
	eachProtocol(t, `rules: [{match: hang, fault: hang}, {text: ok}]`, func(w *world) {
		b := newBackground(w)
		request := json.RawMessage(`"hang"`)
		for i := range 800 {
			run := &proto.AgentRun{
				Org: fmt.Sprint("hostile", i%8), ID: fmt.Sprint("r", i), API: "test", Request: request,
				Background: true,
			}
			if _, err := b.store.Create(t.Context(), run); err != nil {
				t.Fatal(err)
			}
		}
		defer b.start(t)()
		b.create(t, "one", "x")
		if got := b.follow(t, "one"); !strings.HasSuffix(got, `"ok" done`) {
			t.Error(got)
		}
	})
}

// A run for which there is no memory is carried out later.
func TestBackgroundRunsWaitForMemory(t *testing.T) {
	eachProtocol(t, twoCalls, func(w *world) {
		b := newBackground(w)
		b.hosts = make(chan *agenttest.Host, 1)
		full := agenttest.NewHost()
		full.SetMemory(1)
		b.hosts <- full
		b.create(t, "r", "x")
		defer b.start(t)()
		if got := b.follow(t, "r"); !strings.HasSuffix(got, `"ok" done`) || full.Reserved() == 0 {
			t.Error(got)
		}
	})
}

// countedReads counts the reads of logs.
type countedReads struct {
	*agenttest.Store
	reads atomic.Int64
}

func (c *countedReads) Get(ctx context.Context, org, id string) (*proto.AgentRun, uint64, error) {
	c.reads.Add(1)
	return c.Store.Get(ctx, org, id)
}

func (c *countedReads) Next(ctx context.Context, org, id string, after uint64) ([]byte, uint64, error) {
	c.reads.Add(1)
	return c.Store.Next(ctx, org, id, after)
}

// Memory is reserved before a request is read, and before more than one entry of a log is.
func TestMemoryIsReservedBeforeLogsAreRead(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newSilent()
		store := &countedReads{Store: b.store}
		b.read, b.hosts = store, make(chan *agenttest.Host, 3)
		b.create(t, "r", "x")
		for i := range 100 {
			entry := fmt.Appendf(nil, `{"event":{"kind":"text","text":"%d"}}`, i)
			if _, err := b.store.Append(t.Context(), "acme", "r", uint64(i)+1, entry); err != nil {
				t.Fatal(err)
			}
		}
		var full []*agenttest.Host
		for _, memory := range []int64{1, 10, 50} { // too little for the request, an entry, two entries
			host := agenttest.NewHost()
			host.SetMemory(memory)
			full = append(full, host)
			b.hosts <- host
		}
		defer b.start(t)()
		for i, want := range []int64{0, 2, 3} {
			synctest.Wait()
			if reads := store.reads.Swap(0); full[i].Reserved() == 0 || reads != want {
				t.Errorf("host %d: %d reads, want %d; %d bytes reserved", i, reads, want, full[i].Reserved())
			}
			time.Sleep(5100 * time.Millisecond)
		}
	})
}

// slowEnds is an API that is told of the ends of runs, and does not return.
type slowEnds struct {
	*background
	ending map[string]int // by organisation
	goOn   chan struct{}
}

func (s *slowEnds) Ended(ctx context.Context, record *proto.AgentRun, last *agent.Entry) error {
	s.mu.Lock()
	s.ending[record.Org]++
	s.mu.Unlock()
	<-s.goOn
	return s.background.Ended(ctx, record, last)
}

// Runs whose end was requested count as others do, and leave room for other organisations.
func TestCancelledRunsAreBounded(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newSilent()
		slow := &slowEnds{background: b, ending: map[string]int{}, goOn: make(chan struct{})}
		b.api = slow
		for i := range 300 {
			b.create(t, fmt.Sprint("r", i), "x")
			if err := b.store.Cancel(t.Context(), "acme", fmt.Sprint("r", i)); err != nil {
				t.Fatal(err)
			}
		}
		other := &proto.AgentRun{
			Org: "other", ID: "one", API: "test", Request: json.RawMessage(`"x"`), Background: true,
		}
		if _, err := b.store.Create(t.Context(), other); err != nil {
			t.Fatal(err)
		}
		defer b.start(t)()
		synctest.Wait()
		b.mu.Lock()
		if slow.ending["acme"] != 64 || slow.ending["other"] != 1 {
			t.Errorf("at a time: %v", slow.ending)
		}
		b.mu.Unlock()
		close(slow.goOn)
		time.Sleep(time.Minute)
		if left := len(b.store.Active()); left != 0 {
			t.Errorf("%d runs have not ended", left)
		}
	})
}

func TestBackgroundRunsEnd(t *testing.T) {
	eachProtocol(t, `rules: [{match: broken, text: half, fault: drop}, {match: slow, role: user, calls: [{name: double,`+
		` arguments: {n: 1}}]}, {text: ok}]`, func(w *world) {
		b := newBackground(w)
		entered := make(chan struct{}, 1)
		b.block = func(ctx context.Context) error {
			entered <- struct{}{}
			<-ctx.Done()
			return ctx.Err()
		}
		defer b.start(t)()
		b.create(t, "plain", "x")
		b.create(t, "bad", "refused")
		b.create(t, "dropped", "broken")
		b.create(t, "long", "slow")
		if got := b.follow(t, "plain"); got != `0:"ok" done` {
			t.Error(got)
		}
		if got := b.follow(t, "bad"); !strings.Contains(got, "failed: ") {
			t.Error(got)
		}
		if got := b.follow(t, "dropped"); !strings.Contains(got, "failed: ") {
			t.Error(got)
		}
		<-entered
		if err := b.store.Cancel(t.Context(), "acme", "long"); err != nil {
			t.Fatal(err)
		}
		if got := b.follow(t, "long"); !strings.HasSuffix(got, " cancelled") {
			t.Error(got)
		}
		for len(b.store.Active()) > 0 {
			<-time.After(10 * time.Millisecond)
		}
		b.mu.Lock()
		defer b.mu.Unlock()
		if len(b.ended) != 4 {
			t.Errorf("%q", b.ended)
		}
	})
}
