package events_test

import (
	"context"
	"encoding/base64"
	"errors"
	"io"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/scheduler/events"
	"github.com/bullpen-run/bullpen/scheduler/queue"
	"github.com/bullpen-run/bullpen/scheduler/store"
	"github.com/bullpen-run/bullpen/scheduler/storetest"
)

// startDispatcher starts a dispatcher with an output budget.
func startDispatcher(t *testing.T, st *store.Store, budget int64) {
	t.Helper()
	ctx, cancel := context.WithCancel(storetest.Context(t))
	done := make(chan error)
	d := &queue.Dispatcher{Store: st, Instance: "d", OutputBudget: budget, Log: storetest.Log(t)}
	go func() { done <- d.Run(ctx) }()
	t.Cleanup(func() {
		cancel()
		if err := <-done; err != nil {
			t.Error(err)
		}
	})
}

// printed is an attempt that has ended.
type printed struct {
	id         proto.TraceID
	kept       map[proto.Stream]int // bytes in the result
	truncated  bool
	overBudget bool
}

// print runs an attempt that prints lines of 16 KiB that can hardly be compressed, n bytes to each
// stream.
func (e *execution) print(b events.Budget, org string, n int, streams ...proto.Stream) printed {
	e.t.Helper()
	p := printed{id: proto.NewTraceID(), kept: map[proto.Stream]int{}}
	w := events.NewWriter(e.ctx, e.store, org, p.id, 1, 0, limit)
	w.Budget = b
	random, noise := rand.NewChaCha8([32]byte{}), make([]byte, 12<<10)
	for written := 0; written < n; written += 16 << 10 {
		_, _ = random.Read(noise)
		line := []byte(base64.StdEncoding.EncodeToString(noise))
		line[len(line)-1] = '\n'
		for _, s := range streams {
			out := w.Stream(s)
			p.kept[s] += out.Keep(len(line))
			_, _ = out.Write(line)
		}
	}
	_, p.truncated = w.Close()
	p.overBudget = w.OverBudget()
	return p
}

// stored returns the bytes in the stream of output.
func (e *execution) stored() int {
	e.t.Helper()
	info, err := e.store.Output.Info(e.ctx)
	if err != nil {
		e.t.Fatal(err)
	}
	return int(info.State.Bytes)
}

func TestOutputBudget(t *testing.T) {
	e := start(t)
	startDispatcher(t, e.store, 8<<20)
	q := &queue.Queue{Store: e.store}
	if p := e.print(q, "acme", 1<<20, proto.Stdout); p.kept[proto.Stdout] != 1<<20 || p.overBudget || p.truncated {
		t.Errorf("within the budget: %+v", p)
	}
	before := e.stored()
	// The budget has about 6 MiB left, and the result and the events hold what is kept.
	if p := e.print(q, "acme", 8<<20, proto.Stdout); p.kept[proto.Stdout] < 2<<20 || p.kept[proto.Stdout] > 4<<20 ||
		!p.overBudget || !p.truncated {
		t.Errorf("across the end of the budget: %+v", p)
	}
	const least = 64 << 10
	if err := q.SettleOutput("acme", 8<<20); err != nil { // the evicted events were given back
		t.Fatal(err)
	}
	for range 3 {
		p := e.print(q, "acme", 8<<20, proto.Stdout, proto.Stderr)
		if p.kept[proto.Stdout] != least || p.kept[proto.Stderr] != least || !p.overBudget || !p.truncated {
			t.Errorf("beyond the budget: %+v", p)
		}
	}
	for e.stored() > before+4*2*least { // all but the last events are evicted
		if time.Sleep(time.Millisecond); e.ctx.Err() != nil {
			t.Fatalf("%d bytes are stored, %d before", e.stored(), before)
		}
	}
	if p := e.print(q, "acme", least, proto.Stdout, proto.Stderr); p.kept[proto.Stdout] != least || p.overBudget ||
		p.truncated {
		t.Errorf("little output beyond the budget: %+v", p)
	}
	if p := e.print(q, "other", 1<<20, proto.Stdout, proto.Stderr); p.kept[proto.Stderr] != 1<<20 || p.overBudget ||
		p.truncated {
		t.Errorf("another organisation: %+v", p)
	}
}

// A reservation is larger than what is needed at that moment. The rest is given back.
func TestUnusedBudgetIsGivenBack(t *testing.T) {
	e := start(t)
	startDispatcher(t, e.store, 2<<20)
	q := &queue.Queue{Store: e.store}
	for i := range 10 { // each reserves 128 KiB beyond the 64 KiB, and stores 160 KiB in all
		if p := e.print(q, "acme", 80<<10, proto.Stdout); p.kept[proto.Stdout] != 80<<10 || p.overBudget {
			t.Fatalf("%d: %+v", i, p)
		}
	}
	var over int
	for range 10 {
		if p := e.print(q, "acme", 80<<10, proto.Stdout); p.overBudget {
			over++
		}
	}
	if over < 5 { // also what was not reserved counts
		t.Errorf("%d of 10 were shortened", over)
	}
}

// unreachable is a budget whose dispatcher does not answer.
type unreachable struct{ asked *int }

func (u unreachable) ReserveOutput(context.Context, string, int64, int64) (int64, error) {
	*u.asked++
	return 0, errors.New("no dispatcher leads")
}

func (unreachable) SettleOutput(string, int64) error { return io.ErrClosedPipe }

func TestOutputIsKeptWithoutADispatcher(t *testing.T) {
	e := start(t)
	asked := 0
	if p := e.print(unreachable{&asked}, "acme", 2<<20, proto.Stdout); p.kept[proto.Stdout] != 2<<20 || p.overBudget ||
		p.truncated || asked != 1 {
		t.Errorf("asked %d times: %+v", asked, p)
	}
}
