package gateway

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"reflect"
	"strings"
	"testing"
	"time"

	"github.com/bullpen-run/bullpen/gateway/executions"
	"github.com/bullpen-run/bullpen/gateway/web"
	"github.com/bullpen-run/bullpen/proto"
)

const hello = `{"code":"print('hello')"}`

func TestInline(t *testing.T) {
	h := newHarness(t)
	h.stub.finishAtOnce(proto.Exited(3), "hello\u0085\u2028\u2029\x00\n")
	a := h.execute(`{"code":"é\n","language":"node","timeout":7,"env_vars":{"A":"1"},"metadata":{"k":"v"},`+
		`"max_attempts":2,"thread_id":null}`,
		"User-Agent", "tester", "X-Client-Id", "c1", "X-Request-Id", "r-1", "Content-Type", "text/plain").want(200, "")
	const body = `{"success":false,"stdout":"hello\u0085\u2028\u2029\u0000\n","stderr":"","exit_code":3,"error":null,` +
		`"error_code":null,` +
		`"error_message":null,"duration_ms":0,"stdout_truncated":false,"stderr_truncated":false}` + "\n"
	if string(a.body) != body {
		t.Errorf("body\n%s, want\n%s", a.body, body)
	}
	job := h.stub.runs[a.trace()].job
	if job.Code != "é\n" || job.Language != proto.Node || job.Timeout != 7 || job.Env["A"] != "1" ||
		job.Metadata["k"] != "v" ||
		job.MaxAttempts != 2 || job.Org != "acme" || job.Key != "key_1" || job.Mode != proto.ModeInline ||
		job.RequestID != "r-1" ||
		job.ClientID != "c1" || job.UserAgent != "tester" || job.Concurrent != 1000 || job.Weight != 16 ||
		job.KeyConcurrent != 0 ||
		job.Profile != "default" || !reflect.DeepEqual(job.Sandbox, proto.DefaultSandbox()) {
		t.Errorf("job %+v", job)
	}
	if got := job.QueueDeadline.Sub(job.CreatedAt); got != h.server.QueueWait {
		t.Errorf("waits %s for a worker", got)
	}
	if got := a.header.Get("X-Request-Id"); got != "r-1" {
		t.Errorf("X-Request-Id %q", got)
	}
}

func TestAnswersEndWithALineBreak(t *testing.T) {
	for _, size := range []int{web.SmallOutput, web.SmallOutput + 1} {
		h := newHarness(t)
		h.stub.finishAtOnce(proto.Exited(0), strings.Repeat("x", size))
		a := h.execute(hello).want(200, "")
		for _, body := range [][]byte{a.body, h.do("GET", "/v1/executions/"+string(a.trace()), "").want(200, "").body} {
			if !strings.HasSuffix(string(body), "}\n") {
				t.Errorf("%d bytes of output: the answer ends with %q", size, body[len(body)-10:])
			}
		}
	}
}

func TestPlatformOutcomesAreResults(t *testing.T) {
	for _, r := range []proto.Result{
		proto.TimedOut(30), proto.Cancelled(), proto.Failure(proto.CodeMemory, "m"),
		proto.Failure(proto.CodeWorkerLost, "m"),
	} {
		h := newHarness(t)
		h.stub.finishAtOnce(r)
		if got := h.execute(hello).want(200, "").json()["error"]; got != *r.Error {
			t.Errorf("error %v, want %v", got, *r.Error)
		}
	}
}

func TestStream(t *testing.T) {
	h := newHarness(t)
	h.stub.finishAtOnce(proto.Exited(0), "a\n", "b\n")
	a := h.execute(hello, "Accept", web.TypeNDJSON).want(200, "")
	lines := strings.SplitAfter(string(a.body), "\n")
	if len(lines) != 5 || !strings.HasPrefix(lines[0], `{"type":"status"`) ||
		!strings.HasPrefix(lines[3], `{"type":"result"`) {
		t.Errorf("events\n%s", a.body)
	}
	for name, want := range map[string]string{
		"Content-Type": web.TypeNDJSON, "Cache-Control": "no-store", "X-Accel-Buffering": "no", "Content-Length": "",
	} {
		if got := a.header.Get(name); got != want {
			t.Errorf("%s is %q, want %q", name, got, want)
		}
	}
	if job := h.stub.runs[a.trace()].job; job.Mode != proto.ModeStreaming {
		t.Errorf("mode %q", job.Mode)
	}
}

func TestStreamOfAnExecutionCancelledInTheQueue(t *testing.T) {
	h := newHarness(t)
	h.stub.onSubmit = func(job *proto.Job) { h.stub.finish(job.TraceID, proto.Cancelled()) }
	a := h.execute(hello, "Accept", web.TypeNDJSON).want(200, "")
	if lines := strings.Count(string(a.body), "\n"); lines != 1 || a.json()["status"] != "cancelled" {
		t.Errorf("events %s", a.body)
	}
}

// The store may elect a new leader at that moment. The execution was accepted, and the answer must
// report where to ask for it.
func TestStreamOfALostExecution(t *testing.T) {
	h := newHarness(t)
	h.server.Events = silentEvents{h.stub}
	h.remount()
	a := h.execute(hello, "Accept", web.TypeNDJSON).want(504, "gateway_timeout", "ask for it at /v1/executions/")
	if h.stub.runs[a.trace()] == nil {
		t.Errorf("%s is not an execution that was accepted", a.trace())
	}
}

type silentEvents struct{ *stub }

func (silentEvents) Follow(context.Context, string, proto.TraceID, int64) (web.Tail, error) {
	return nil, fmt.Errorf("look it up: %w", context.DeadlineExceeded)
}

func TestAsync(t *testing.T) {
	h := newHarness(t)
	a := h.execute(hello, "Prefer", "wait=5, Respond-Async", "Accept", web.TypeNDJSON).want(202, "")
	id := a.trace()
	if want := `{"trace_id":"` + string(id) + `","status":"running"}` + "\n"; string(a.body) != want {
		t.Errorf("body %s, want %s", a.body, want)
	}
	if a.header.Get("Location") != "/v1/executions/"+string(id) || a.header.Get("Preference-Applied") != "respond-async" {
		t.Errorf("headers %v", a.header)
	}
	job := h.stub.runs[id].job
	if got := job.QueueDeadline.Sub(job.CreatedAt); got != h.admission.QueueExpiry || job.Mode != proto.ModeAsync {
		t.Errorf("mode %s, waits %s", job.Mode, got)
	}
	if got := h.do("GET", "/v1/executions/"+string(id), "").want(200, "").json(); got["status"] != "queued" ||
		got["duration_ms"] != 0.0 {
		t.Errorf("execution %v", got)
	}
}

func TestDelayed(t *testing.T) {
	h := newHarness(t)
	async := []string{"Prefer", "respond-async"}
	at := time.Now().Add(time.Hour).UTC().Truncate(time.Millisecond)
	for body, want := range map[string]time.Time{
		`"run_at":"` + at.In(time.FixedZone("", 3600)).Format(time.RFC3339Nano) + `"`: at,
		`"delay":3600`: at,
	} {
		a := h.execute(`{"code":"1",`+body+`}`, async...).want(202, "")
		job := h.stub.runs[a.trace()].job
		if got := job.RunAt.Sub(want); got < 0 || got > time.Minute ||
			job.QueueDeadline.Sub(job.RunAt) != h.admission.QueueExpiry || a.json()["status"] != "queued" {
			t.Errorf("%s: run at %s until %s: %s", body, job.RunAt, job.QueueDeadline, a.body)
		}
		got := h.do("GET", "/v1/executions/"+string(a.trace()), "").want(200, "").json()
		if got["status"] != "queued" || got["run_at"] != job.RunAt.Format(proto.TimeLayout) || got["queued_ms"] != 0.0 {
			t.Errorf("%s: execution %v", body, got)
		}
	}
	a := h.execute(`{"code":"1","run_at":"2020-01-01T00:00:00Z"}`, async...).want(202, "")
	if job := h.stub.runs[a.trace()].job; !job.RunAt.IsZero() || a.json()["status"] != "running" {
		t.Errorf("a time that is past: run at %s: %s", job.RunAt, a.body)
	}
	for _, tt := range []struct {
		body, message string
		headers       []string
	}{
		{`"delay":5`, "delay must be used with an async execution: send the header Prefer: respond-async", nil},
		{
			`"delay":5`, "delay must be used with an async execution: send the header Prefer: respond-async",
			[]string{"Accept", web.TypeNDJSON},
		},
		{`"delay":604801`, "delay must be at most 168h0m0s ahead", async},
		{`"run_at":"2999-01-01T00:00:00Z"`, "run_at must be at most 168h0m0s ahead", async},
	} {
		if got := h.execute(`{"code":"1",`+tt.body+`}`, tt.headers...).want(
			400, "validation_error").json()["message"]; got != tt.message {
			t.Errorf("%s: %q", tt.body, got)
		}
	}
}

func TestRejections(t *testing.T) {
	modes := map[string][]string{
		"inline": nil, "streaming": {"Accept", web.TypeNDJSON}, "async": {"Prefer", "respond-async"},
	}
	for name, headers := range modes {
		for _, tt := range []struct {
			plan      string
			rejection proto.Rejection
			status    int
			code      string
			retry     string
			message   string
		}{
			{
				"pro",
				proto.Rejection{Reason: proto.RejectedConcurrency, Limit: 100, Used: 100},
				429, "rate_limited", "1",
				"concurrent execution limit reached (100/100). Upgrade to Enterprise for 1000 concurrent executions.",
			},
			{
				"enterprise",
				proto.Rejection{Reason: proto.RejectedConcurrency, Limit: 1000, Used: 1000},
				429, "rate_limited", "1",
				"concurrent execution limit reached (1000/1000).",
			},
			{
				"pro",
				proto.Rejection{Reason: proto.RejectedQueueFull, Limit: 1000, Used: 1000},
				429, "rate_limited", "5",
				"queued execution limit reached (1000/1000)",
			},
			{"pro", proto.Rejection{Reason: proto.RejectedUnavailable}, 503, "service_unavailable", "2", "queue"},
		} {
			t.Run(name+" "+string(tt.rejection.Reason)+" "+tt.plan, func(t *testing.T) {
				h := newHarness(t)
				h.key = h.stub.addKey("of-"+tt.plan, tt.plan, asUser)
				h.stub.refuse = func(*proto.Job) error { return &tt.rejection }
				a := h.execute(hello, append(headers, "Idempotency-Key", "k")...).want(tt.status, tt.code, tt.message)
				if got := a.header.Get("Retry-After"); got != tt.retry {
					t.Errorf("Retry-After %q, want %q", got, tt.retry)
				}
				if a.header.Get("X-Trace-Id") != "" {
					t.Error("X-Trace-Id of an execution that never was")
				}
				if h.stub.bound() != 0 {
					t.Error("the idempotency key stays bound")
				}
			})
		}
	}
}

// A submission that fails with an unknown outcome must not leave a job behind that runs for no
// client.
func TestSubmitWithUnknownOutcome(t *testing.T) {
	t.Run("nothing was taken", func(t *testing.T) {
		h := newHarness(t)
		h.stub.refuse = func(*proto.Job) error { return errors.New("disk on fire") }
		h.execute(hello, "Idempotency-Key", "k").want(503, "service_unavailable")
		if h.stub.bound() != 0 {
			t.Error("the idempotency key stays bound")
		}
	})
	t.Run("it was taken and waits", func(t *testing.T) {
		h := newHarness(t)
		h.submitter.Jobs = &unsure{h.stub}
		h.execute(hello).want(503, "service_unavailable")
		if r := h.stub.record(<-h.stub.submitted); !r.ExpiredInQueue() {
			t.Errorf("record %+v", r)
		}
	})
	t.Run("it was taken and runs", func(t *testing.T) {
		h := newHarness(t)
		h.submitter.Jobs = &unsure{h.stub}
		h.stub.finishAtOnce(proto.Exited(0))
		h.execute(hello).want(200, "")
	})
	t.Run("it was taken and nothing is known of it", func(t *testing.T) {
		h := newHarness(t)
		h.submitter.Jobs = &lost{unsure{h.stub}}
		a := h.execute(hello, "Idempotency-Key", "k").want(500, "internal", "/v1/executions/trc_")
		if a.trace() != <-h.stub.submitted {
			t.Errorf("X-Trace-Id %s", a.trace())
		}
		if h.stub.bound() != 1 {
			t.Error("the idempotency key is free, and would run it twice")
		}
	})
}

// lost stops answering after it has accepted a job.
type lost struct{ unsure }

func (lost) Withdraw(context.Context, string, proto.TraceID, proto.Result) (*proto.Record, error) {
	return nil, context.DeadlineExceeded
}

// unsure accepts jobs and returns an error.
type unsure struct{ *stub }

func (q *unsure) Submit(ctx context.Context, job *proto.Job) error {
	return errors.Join(errors.New("no answer"), q.stub.Submit(ctx, job))
}

// An accepted job may run. A later failure must not invite the client to send the request again.
func TestFailureAfterAcceptance(t *testing.T) {
	for name, headers := range waitingModes {
		t.Run(name, func(t *testing.T) {
			h := newHarness(t)
			h.server.Jobs, h.server.Events = waitTimesOut{h.stub}, brokenEvents{}
			h.remount()
			a := h.execute(hello, headers...).want(500, "internal", "/v1/executions/trc_")
			if a.trace() != <-h.stub.submitted {
				t.Errorf("X-Trace-Id %s", a.trace())
			}
		})
	}
}

// waitTimesOut is a stub whose Wait fails with a timeout at once.
type waitTimesOut struct{ *stub }

func (waitTimesOut) Wait(context.Context, string, proto.TraceID) (*proto.Record, error) {
	return nil, context.DeadlineExceeded
}

func (q waitTimesOut) Watch(org string, id proto.TraceID) (executions.Watch, error) {
	return q.watch(q.Wait, org, id), nil
}

func TestPlans(t *testing.T) {
	h := newHarness(t)
	h.key = h.stub.addKey("small", "free", asUser)
	h.stub.finishAtOnce(proto.Exited(0))
	for _, tt := range []struct {
		body, name, value, message string
	}{
		{
			hello, "Accept", web.TypeNDJSON,
			"Streaming execution requires a Pro or Enterprise plan. Upgrade at https://example.com/upgrade",
		},
		{
			hello, "Prefer", "respond-async",
			"Async execution requires a Pro or Enterprise plan. Upgrade at https://example.com/upgrade",
		},
		{
			`{"code":"1","timeout":61}`, "Accept", "*/*",
			"timeout is above the maximum of 60 seconds of the Free plan; upgrade to Pro for up to 3600 seconds",
		},
		{`{"code":"1","timeout":99999999999999999999999999}`, "Accept", "*/*", "timeout"},
		{`{"code":"1","timeout":99999999999999999999999999,"kill_grace":3}`, "Accept", "*/*", "timeout"},
		{
			`{"code":"1","timeout":60,"kill_grace":0.001}`, "Accept", "*/*",
			"timeout and kill_grace together are above the maximum of 60 seconds of the Free plan; upgrade",
		},
	} {
		a := h.execute(tt.body, tt.name, tt.value).want(429, "rate_limited", tt.message)
		if a.header.Get("Retry-After") != "" || a.header.Get("X-Should-Retry") != "false" ||
			!strings.Contains(string(a.body), `"permanent":true,"reason":"plan_limit"`) {
			t.Errorf("the rejection by plan looks temporary: %v %s", a.header, a.body)
		}
	}
	h.execute(`{"code":"1","timeout":60}`).want(200, "")
	h.execute(`{"code":"1","timeout":57,"kill_grace":3}`).want(200, "")
	h.admission.UpgradeURL = "" // no message asks to upgrade
	for _, tt := range []struct{ body, name, value string }{
		{hello, "Prefer", "respond-async"}, {`{"code":"1","timeout":61}`, "Accept", "*/*"},
	} {
		if a := h.execute(tt.body, tt.name, tt.value).want(429, "rate_limited"); strings.Contains(
			strings.ToLower(string(a.body)), "upgrade") {
			t.Errorf("got %s", a.body)
		}
	}
	for plan, most := range map[string]string{"pro": "3600", "enterprise": "86400"} {
		h.key = h.stub.addKey("of-"+plan, plan, asUser)
		h.execute(`{"code":"1","timeout":`+most+`}`).want(200, "")
		h.execute(`{"code":"1","timeout":`+most+`1}`).want(429, "rate_limited", "timeout", most)
	}
}

// kill_grace has another limit where a client waits for the answer, and 0 is not the same as nothing.
func TestKillGrace(t *testing.T) {
	h := newHarness(t)
	h.stub.finishAtOnce(proto.Exited(0))
	const waiting, always = "kill_grace must be 0 to 3 seconds in inline and streaming executions; with the header " +
		"Prefer: respond-async, it may be up to 30",
		"kill_grace must be 0 to 30 seconds"
	async := []string{"Prefer", "respond-async"}
	for _, tt := range []struct {
		grace   string
		header  []string
		want    any
		message string
	}{
		{"null", nil, (*proto.Seconds)(nil), ""},
		{"0", nil, new(proto.Seconds(0)), ""},
		{"3", nil, new(proto.Seconds(3 * time.Second)), ""},
		{"3.001", nil, nil, waiting},
		{"3.001", []string{"Accept", web.TypeNDJSON}, nil, waiting},
		{"3.001", async, new(proto.Seconds(3001 * time.Millisecond)), ""},
		{"30", async, new(proto.Seconds(30 * time.Second)), ""},
		{"30.001", async, nil, always},
		{"-1", async, nil, always},
		{"1e99", async, nil, always},
		{`"2"`, async, nil, "kill_grace must be a number of seconds"},
	} {
		a := h.execute(`{"code":"1","kill_grace":`+tt.grace+`}`, tt.header...)
		if tt.message != "" {
			a.want(400, "validation_error", tt.message)
			continue
		}
		if got := h.stub.runs[a.trace()].job.KillGrace; !reflect.DeepEqual(got, tt.want) {
			t.Errorf("%s %v: got %v", tt.grace, tt.header, got)
		}
	}
}

func TestAuthentication(t *testing.T) {
	h := newHarness(t)
	for name, header := range map[string]string{
		"missing": "", "wrong": "Bearer " + proto.NewKeySecret("local"), "truncated": "Bearer " + h.key[:len(h.key)-1],
		"longer": "Bearer " + h.key + "x", "no scheme": h.key, "other scheme": "Basic " + h.key, "form": "Bearer x",
		"huge": "Bearer sk-local-" + strings.Repeat("a", 1000),
	} {
		t.Run(name, func(t *testing.T) {
			h := h.in(t)
			for _, path := range []string{
				"POST /v1/sandbox/execute", "GET /v1/executions/trc_AbCdEfGhIjKlMnOpQrSt",
				"GET /v1/admin/keys",
			} {
				method, path, _ := strings.Cut(path, " ")
				a := h.do(method, path, hello, "Authorization", header).want(401, "unauthorized")
				if a.header.Get("WWW-Authenticate") != "Bearer" {
					t.Error("no WWW-Authenticate")
				}
			}
		})
	}
	if strings.Contains(h.log.String(), h.key[10:]) {
		t.Error("a key is in the log")
	}
	h.stub.finishAtOnce(proto.Exited(0))
	h.execute(hello, "Authorization", "bearer  "+h.key).want(200, "")
}

func TestLogLine(t *testing.T) {
	h := newHarness(t)
	h.stub.finishAtOnce(proto.Exited(0))
	a := h.execute(hello, "X-Request-Id", "r-1")
	h.http.Close() // returns after its handlers
	var line map[string]any
	if err := json.Unmarshal([]byte(h.log.String()), &line); err != nil {
		t.Fatalf("one line: %v in %s", err, h.log)
	}
	for name, want := range map[string]any{
		"method": "POST", "route": "/v1/sandbox/execute", "status": 200.0, "org": "acme", "key": "key_1", "request_id": "r-1",
		"trace_id": string(a.trace()), "bytes": float64(len(a.body)), "level": "INFO",
	} {
		if line[name] != want {
			t.Errorf("%s is %v, want %v", name, line[name], want)
		}
	}
}

func TestRequestID(t *testing.T) {
	h := newHarness(t)
	for id, kept := range map[string]bool{
		"a b~": true, strings.Repeat("x", 128): true, strings.Repeat("x", 129): false,
		"é": false,
	} {
		if got := h.do("GET", "/healthz", "", "X-Request-Id", id).header.Get("X-Request-Id"); (got == id) != kept {
			t.Errorf("X-Request-Id %q for %q", got, id)
		}
	}
}

func TestPanicIsAnInternalError(t *testing.T) {
	h := newHarness(t)
	h.stub.onSubmit = func(*proto.Job) { panic("boom") }
	h.execute(hello).want(500, "internal", "X-Request-Id")
	h.http.Close()
	if !strings.Contains(h.log.String(), "boom") {
		t.Error("the panic is not logged")
	}
}

// An event stream has the same events as the lines of JSON, and can be resumed with their ids.
func TestExecuteAsEventStream(t *testing.T) {
	h := newHarness(t)
	h.stub.finishAtOnce(proto.Exited(0), "a\n")
	a := h.execute(hello, "Accept", "text/event-stream").want(200, "")
	if a.header.Get("Content-Type") != web.TypeSSE {
		t.Errorf("Content-Type %q", a.header.Get("Content-Type"))
	}
	again := h.do("GET", "/v1/executions/"+string(a.trace())+"/output", "", "Accept", "text/event-stream").want(200, "")
	if string(a.body) != string(again.body) || !strings.HasPrefix(string(a.body), "id: 1\ndata: {\"type\":\"status\"") {
		t.Errorf("got\n%s\nwant\n%s", a.body, again.body)
	}
}

func TestDrain(t *testing.T) {
	h := newHarness(t)
	answers := make(chan *reply)
	r := h.request(http.MethodPost, "/v1/sandbox/execute", hello)
	go func() { answers <- h.send(r) }()
	id := <-h.stub.submitted
	h.server.Drain()
	a := h.execute(hello).want(503, "service_unavailable", "shutting down")
	if a.header.Get("Retry-After") == "" || !a.closed {
		t.Errorf("headers %v", a.header)
	}
	h.do("POST", "/v1/admin/dead-letters/x/requeue", "").want(503, "service_unavailable", "shutting down")
	h.do("GET", "/readyz", "").want(503, "service_unavailable", "shutting down")
	h.do("GET", "/healthz", "").want(200, "")
	// Only new work is refused: clients still ask for what runs here.
	at := "/v1/executions/" + string(id)
	for _, a := range []*reply{
		h.do("GET", at, "").want(200, ""), h.do("POST", at+"/cancel", "").want(202, ""),
		h.do("GET", "/v1/threads", "").want(200, ""),
		h.do("GET", "/v1/admin/keys", "").want(200, ""),
	} {
		if !a.closed {
			t.Error("the connection stays open, so that the client does not find another server")
		}
	}
	h.stub.finish(id, proto.Exited(0))
	(<-answers).want(200, "")
}
