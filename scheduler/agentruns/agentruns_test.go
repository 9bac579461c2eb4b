package agentruns_test

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/scheduler/agentruns"
	"github.com/bullpen-run/bullpen/scheduler/store"
	"github.com/bullpen-run/bullpen/scheduler/storetest"
)

// open returns the runs as one gateway has them.
func open(t *testing.T, st *store.Store) *agentruns.Runs {
	t.Helper()
	r, err := agentruns.Open(t.Context(), st, storetest.Log(t))
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	var work sync.WaitGroup
	work.Go(func() { _ = r.Run(ctx) })
	t.Cleanup(func() { cancel(); work.Wait() })
	return r
}

// eventually waits until ok returns true.
func eventually(t *testing.T, ok func() bool) {
	t.Helper()
	late := time.After(time.Minute)
	for !ok() {
		select {
		case <-time.After(10 * time.Millisecond):
		case <-late:
			t.Fatal("no change within a minute")
		}
	}
}

// Two gateways share runs: both see what is active, and only one can add to a log.
func TestRuns(t *testing.T) {
	ctx, st := t.Context(), storetest.Open(t, storetest.Server(t))
	one, two := open(t, st), open(t, st)
	request := append(append([]byte(`"`), bytes.Repeat([]byte("x"), 1<<20)...), '"') // too large for a message
	run := &proto.AgentRun{
		Org: "acme", ID: "resp_1", Key: "k", API: "openai", Request: request, Background: true,
		CreatedAt: time.Now(),
	}
	first, err := one.Create(ctx, run)
	if err != nil {
		t.Fatal(err)
	}
	if again, err := two.Create(ctx, run); err != nil || again != first {
		t.Errorf("the same run again: %d, %v", again, err)
	}
	eventually(t, func() bool { return two.IsActive("acme", "resp_1") })
	got, at, err := two.Get(ctx, "acme", "resp_1")
	if err != nil || at != first || !bytes.Equal(got.Request, request) || got.Key != "k" {
		t.Fatalf("%v, at %d", err, at)
	}
	added, stop, err := two.Watch("acme", "resp_1")
	if err != nil {
		t.Fatal(err)
	}
	defer stop()
	second, err := one.Append(ctx, "acme", "resp_1", first, []byte("second"))
	if err != nil {
		t.Fatal(err)
	}
	<-added
	if _, err := two.Append(ctx, "acme", "resp_1", first, []byte("other")); !errors.Is(err, proto.ErrConflict) {
		t.Errorf("after a message that is not the last: %v", err)
	}
	if m, at, err := two.Next(ctx, "acme", "resp_1", first); err != nil || string(m) != "second" || at != second {
		t.Errorf("%q at %d: %v", m, at, err)
	}
	if m, at, err := two.Next(ctx, "acme", "resp_1", second); err != nil || m != nil || at != second {
		t.Errorf("%q at %d: %v", m, at, err)
	}
	for _, org := range []string{"other", "acm"} {
		if _, _, err := two.Get(ctx, org, "resp_1"); !errors.Is(err, proto.ErrNotFound) {
			t.Errorf("of %s: %v", org, err)
		}
		if err := two.Cancel(ctx, org, "resp_1"); !errors.Is(err, proto.ErrNotFound) {
			t.Errorf("of %s: %v", org, err)
		}
	}
	if err := two.Cancel(ctx, "acme", "resp_1"); err != nil {
		t.Fatal(err)
	}
	eventually(t, func() bool { return one.IsCancelled("acme", "resp_1") })
	if err := errors.Join(one.Finish(ctx, "acme", "resp_1"), one.Finish(ctx, "acme", "resp_1")); err != nil {
		t.Fatal(err)
	}
	eventually(t, func() bool { return !two.IsActive("acme", "resp_1") })
	if err := two.Remove(ctx, "acme", "resp_1"); err != nil {
		t.Fatal(err)
	}
	if _, _, err := one.Get(ctx, "acme", "resp_1"); !errors.Is(err, proto.ErrNotFound) {
		t.Errorf("after its removal: %v", err)
	}
	if _, _, err := one.Next(ctx, "acme", "resp_1", second); !errors.Is(err, proto.ErrNotFound) {
		t.Errorf("who reads it on after its removal: %v", err)
	}
}

// A request takes no more room than its client has sent.
func TestRequestsAreStoredAsTheyAre(t *testing.T) {
	runs := open(t, storetest.Open(t, storetest.Server(t)))
	body := `"` + strings.Repeat("<&>", 1000) + `"`
	if _, err := runs.Create(
		t.Context(), &proto.AgentRun{Org: "acme", ID: "resp_1", Request: json.RawMessage(body)}); err != nil {
		t.Fatal(err)
	}
	if run, _, err := runs.Get(t.Context(), "acme", "resp_1"); err != nil || string(run.Request) != body {
		t.Errorf("%v: the request has %d bytes, want %d", err, len(run.Request), len(body))
	}
}

// An organisation cannot fill the memory of all gateways with runs.
func TestActiveRunsAreLimited(t *testing.T) {
	ctx, st := t.Context(), storetest.Open(t, storetest.Server(t))
	runs := open(t, st)
	create := func(org string, i int) error {
		_, err := runs.Create(ctx, &proto.AgentRun{
			Org: org, ID: "r" + string(rune('a'+i%26)) + string(rune('a'+i/26%26)) + string(rune('a'+i/676)), Background: true,
		})
		return err
	}
	for i := range proto.MaxAgentRuns {
		if err := create("acme", i); err != nil {
			t.Fatal(err)
		}
	}
	if _, quota := errors.AsType[*proto.QuotaError](create("acme", proto.MaxAgentRuns)); !quota {
		t.Error("one more was accepted")
	}
	if err := create("other", 0); err != nil {
		t.Error(err)
	}
}

// A removal ends when its caller does, also while the server does not answer.
func TestRemoveWithoutServer(t *testing.T) {
	server := storetest.Server(t)
	runs := open(t, storetest.Open(t, server))
	if _, err := runs.Create(t.Context(), &proto.AgentRun{Org: "acme", ID: "resp_1", Request: []byte("{}")}); err != nil {
		t.Fatal(err)
	}
	server.Close()
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if err := runs.Remove(ctx, "acme", "resp_1"); !errors.Is(err, context.Canceled) {
		t.Errorf("%v", err)
	}
}

// Two gateways that start runs at the same time do not exceed the limits of an organisation together: of
// their number, and of the size of their requests. A run that was refused leaves no log.
func TestLimitsOfTwoGateways(t *testing.T) {
	for name, c := range map[string]struct{ active, size int64 }{
		"number": {proto.MaxAgentRuns - 3, 1}, "size": {1, proto.MaxAgentRunBytes - 3*1000},
	} {
		t.Run(name, func(t *testing.T) {
			ctx, server := storetest.Context(t), storetest.Server(t)
			st := storetest.Open(t, server)
			storetest.Fill(t, st, st.AgentRuns, int(c.active), func(i int) (string, any) {
				id := fmt.Sprint("old_", i)
				return "acme." + id, proto.ActiveAgentRun{Org: "acme", ID: id, Bytes: c.size}
			})
			request := append(append([]byte(`"`), bytes.Repeat([]byte("x"), 998)...), '"')
			create := func() func(i int) error {
				r := open(t, storetest.Open(t, server))
				return func(i int) error {
					_, err := r.Create(ctx, &proto.AgentRun{
						Org: "acme", ID: fmt.Sprint("new_", i), Request: request, Background: true, CreatedAt: time.Now(),
					})
					return err
				}
			}
			refused := func(err error) bool { _, ok := errors.AsType[*proto.QuotaError](err); return ok }
			if n := storetest.Race(t, 10, refused, create(), create()); n != 3 {
				t.Errorf("%d runs were stored, 3 were left", n)
			}
			if logs, err := st.AgentLogs.Subjects(ctx, store.AgentLogSubject("acme", "*")); err != nil || len(logs) != 3 {
				t.Errorf("%d runs have a log, want 3: %v", len(logs), err)
			}
		})
	}
}
