package gateway

import (
	"context"
	"errors"
	"io"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/bullpen-run/bullpen/gateway/web"
	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/proto/api"
)

// claimGrace equals the constant in package submit.
const claimGrace = 10 * time.Second

func TestIdempotencyKeyForm(t *testing.T) {
	h := newHarness(t)
	h.stub.finishAtOnce(proto.Exited(0))
	for key, status := range map[string]int{
		"k": 200, strings.Repeat("k", 255): 200, strings.Repeat("k", 256): 400,
		"é": 400, "a b~": 200,
	} {
		if a := h.execute(hello, "Idempotency-Key", key); a.status != status {
			t.Errorf("key %.20q: status %d, want %d", key, a.status, status)
		}
	}
	for _, values := range [][]string{{""}, {"a", "b"}} {
		r := h.executeRequest(hello)
		r.Header["Idempotency-Key"] = values
		h.send(r).want(400, "validation_error", "Idempotency-Key")
	}
}

func TestSameKeySameBody(t *testing.T) {
	h := newHarness(t)
	h.stub.finishAtOnce(proto.Exited(0), "once\n")
	first := h.execute(hello, "Idempotency-Key", "k").want(200, "")
	again := h.execute(` { "timeout":60,"code":"print('hello')","max_attempts":null } `, "Idempotency-Key",
		"k").want(200, "")
	if string(again.body) != string(first.body) || again.trace() != first.trace() {
		t.Errorf("second answer %s of %s", again.body, again.trace())
	}
	stream := h.execute(hello, "Idempotency-Key", "k", "Accept", web.TypeNDJSON).want(200, "")
	if stream.trace() != first.trace() || strings.Count(string(stream.body), "\n") != 3 {
		t.Errorf("stream\n%s", stream.body)
	}
	if async := h.execute(hello, "Idempotency-Key", "k", "Prefer", "respond-async").want(
		202, ""); async.trace() != first.trace() {
		t.Errorf("async %s", async.body)
	}
	h.execute(`{"code":"other"}`, "Idempotency-Key", "k").want(422, "idempotency_mismatch")
	h.execute(`{"code":"print('hello')","timeout":59}`, "Idempotency-Key", "k").want(422, "idempotency_mismatch")
	if other := h.execute(hello, "Idempotency-Key", "k2").want(200, ""); other.trace() == first.trace() {
		t.Error("another key returns the same execution")
	}
	h.key = h.stub.addKey("acme", "pro", asUser)
	if other := h.execute(hello, "Idempotency-Key", "k").want(200, ""); other.trace() == first.trace() {
		t.Error("another API key returns the same execution")
	}
	if len(h.stub.submitted) != 3 {
		t.Errorf("%d executions, want 3", len(h.stub.submitted))
	}
}

// A retry during the first request gets the same answer, even if that takes longer than the wait
// for a worker.
func TestRetryDuringTheRun(t *testing.T) {
	for name, headers := range waitingModes {
		t.Run(name, func(t *testing.T) {
			bubble(t, func(t *testing.T, h *harness) {
				headers := append(headers, "Idempotency-Key", "k")
				first := h.begin(h.executeRequest(hello, headers...))
				id := <-h.stub.submitted
				h.stub.start(id)
				second := h.begin(h.executeRequest(hello, headers...))
				time.Sleep(10 * time.Second)
				h.stub.finish(id, proto.Exited(0))
				one, two := (<-first).want(200, ""), (<-second).want(200, "")
				if one.trace() != two.trace() || string(one.body) != string(two.body) {
					t.Errorf("%s and %s", one.body, two.body)
				}
			})
		})
	}
}

// A request that did not submit an execution must not withdraw it.
func TestRetryDoesNotWithdraw(t *testing.T) {
	for name, headers := range waitingModes {
		t.Run(name, func(t *testing.T) {
			bubble(t, func(t *testing.T, h *harness) {
				id := h.execute(`{"code":"1","timeout":2}`, "Prefer", "respond-async", "Idempotency-Key", "k").want(202, "").trace()
				start := time.Now()
				h.execute(`{"code":"1","timeout":2}`, append(headers, "Idempotency-Key", "k")...).want(504, "gateway_timeout")
				if took := time.Since(start); took != 10*time.Second {
					t.Errorf("took %s", took)
				}
				ctx, cancel := context.WithCancel(t.Context())
				go func() {
					resp, err := h.client.Do(
						h.executeRequest(`{"code":"1","timeout":2}`, append(headers, "Idempotency-Key", "k")...).WithContext(ctx))
					if err == nil {
						_ = resp.Body.Close()
					}
				}()
				synctest.Wait()
				cancel()
				synctest.Wait()
				if r := h.stub.record(id); r.Status != proto.StatusQueued {
					t.Errorf("record %+v", r)
				}
			})
		})
	}
}

func TestWithdrawnExecutionFreesItsKey(t *testing.T) {
	bubble(t, func(t *testing.T, h *harness) {
		id := h.execute(hello, "Prefer", "respond-async", "Idempotency-Key", "k").want(202, "").trace()
		// as the queue does, with no open request that could free the key
		h.stub.finish(id, proto.Failure(proto.CodeExpiredInQueue, "m"))
		h.stub.finishAtOnce(proto.Exited(0))
		if a := h.execute(hello, "Idempotency-Key", "k").want(200, ""); a.trace() == id {
			t.Error("the answer is for an execution that never ran")
		}
	})
}

// A server that dies between binding and submitting leaves a binding without an execution.
func TestBindingOfADeadServer(t *testing.T) {
	hash := func(t *testing.T) string {
		r, err := api.Decode[api.ExecuteRequest]([]byte(hello))
		if err != nil {
			t.Fatal(err)
		}
		sum, err := r.Hash()
		if err != nil {
			t.Fatal(err)
		}
		return sum
	}
	bubble(t, func(t *testing.T, h *harness) {
		h.stub.finishAtOnce(proto.Exited(0))
		old := proto.Binding{Trace: proto.NewTraceID(), BodyHash: hash(t), BoundAt: time.Now()}
		if _, bound, err := h.stub.Bind(t.Context(), "acme", "key_1", "k", old); !bound || err != nil {
			t.Fatal(bound, err)
		}
		start := time.Now()
		a := h.execute(hello, "Idempotency-Key", "k").want(200, "")
		if took := time.Since(start); took < claimGrace || took > claimGrace+time.Second || a.trace() == old.Trace {
			t.Errorf("taken over after %s", took)
		}
	})
	// The server of a young binding may only be slow. The execution is then found as soon as it
	// exists.
	bubble(t, func(t *testing.T, h *harness) {
		job := &proto.Job{Meta: proto.Meta{TraceID: proto.NewTraceID(), Org: "acme"}}
		young := proto.Binding{Trace: job.TraceID, BodyHash: hash(t), BoundAt: time.Now()}
		if _, _, err := h.stub.Bind(t.Context(), "acme", "key_1", "k", young); err != nil {
			t.Fatal(err)
		}
		h.stub.finishAtOnce(proto.Exited(0))
		answers := h.begin(h.executeRequest(hello, "Idempotency-Key", "k"))
		time.Sleep(time.Second)
		if err := h.stub.Submit(t.Context(), job); err != nil {
			t.Fatal(err)
		}
		if a := (<-answers).want(200, ""); a.trace() != job.TraceID {
			t.Errorf("answer of %s", a.trace())
		}
	})
	// A short timeout may leave no time for this wait.
	bubble(t, func(t *testing.T, h *harness) {
		h.submitter.Jobs = &forgetful{h.stub}
		h.stub.finishAtOnce(proto.Exited(0))
		young := proto.Binding{Trace: proto.NewTraceID(), BodyHash: "x", BoundAt: time.Now().Add(time.Hour)}
		r, _ := api.Decode[api.ExecuteRequest]([]byte(`{"code":"1","timeout":1}`))
		young.BodyHash, _ = r.Hash()
		if _, _, err := h.stub.Bind(t.Context(), "acme", "key_1", "k", young); err != nil {
			t.Fatal(err)
		}
		h.execute(`{"code":"1","timeout":1}`, "Idempotency-Key", "k").want(504, "gateway_timeout")
	})
}

// forgetful knows no execution.
type forgetful struct{ *stub }

func (*forgetful) Lookup(context.Context, string, proto.TraceID) (*proto.Record, error) {
	return nil, proto.ErrNotFound
}

// Of concurrent requests with the same key, only one submits.
func TestRace(t *testing.T) {
	h := newHarness(t)
	h.stub.finishAtOnce(proto.Exited(0))
	const n = 20
	var answers [n]<-chan *reply
	for i := range answers {
		answers[i] = h.begin(h.executeRequest(hello, "Idempotency-Key", "k"))
	}
	traces := map[proto.TraceID]bool{}
	for _, a := range answers {
		traces[(<-a).want(200, "").trace()] = true
	}
	if len(traces) != 1 || len(h.stub.submitted) != 1 {
		t.Errorf("%d executions for %d submissions", len(traces), len(h.stub.submitted))
	}
}

func TestBindingsFail(t *testing.T) {
	h := newHarness(t)
	h.submitter.Bindings = brokenBindings{h.stub}
	h.execute(hello, "Idempotency-Key", "k").want(500, "internal")
	if len(h.stub.submitted) != 0 {
		t.Error("it was submitted")
	}
}

type brokenBindings struct{ *stub }

func (brokenBindings) Bind(
	context.Context, string, string, string, proto.Binding,
) (b proto.Binding, bound bool, err error) {
	return b, false, errors.New("no disk")
}

// A slow body does not make its binding look abandoned.
func TestSlowBodyUnderOneKeyRunsOnce(t *testing.T) {
	bubble(t, func(t *testing.T, h *harness) {
		h.stub.finishAtOnce(proto.Exited(0))
		h.stub.refuse = func(*proto.Job) error { time.Sleep(2 * time.Second); return nil } // a change of leader
		body, end := io.Pipe()
		r := h.executeRequest("", "Idempotency-Key", "k")
		r.Body, r.ContentLength = body, -1
		one := h.begin(r)
		go func() {
			time.Sleep(claimGrace + time.Second)
			_, _ = io.WriteString(end, hello)
			_ = end.Close()
		}()
		time.Sleep(claimGrace + 1500*time.Millisecond)
		two := h.begin(h.executeRequest(hello, "Idempotency-Key", "k"))
		a, b := <-one, <-two
		if len(h.stub.submitted) != 1 || a.trace() != b.trace() {
			t.Errorf("%d executions, %s and %s", len(h.stub.submitted), a.trace(), b.trace())
		}
	})
}
