package gateway

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"runtime"
	"strings"
	"testing"
	"time"

	"github.com/bullpen-run/bullpen/gateway/web"
	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/proto/api"
)

// run executes a program that prints two lines and ends, and returns its id.
func (h *harness) run() proto.TraceID {
	h.t.Helper()
	h.stub.finishAtOnce(proto.Exited(0), "a\n", "b\n")
	return h.execute(hello).want(200, "").trace()
}

func TestExecutionJSON(t *testing.T) {
	at := func(ms int64) *time.Time {
		u := time.UnixMilli(1795000000000 + ms).In(time.FixedZone("x", 3600))
		return &u
	}
	meta := proto.Meta{
		TraceID: "trc_AbCdEfGhIjKlMnOpQrSt", Mode: proto.ModeAsync, Language: proto.Bash, Timeout: 60, CreatedAt: *at(0),
		Org: "acme", Key: "key_1",
	}
	ended := proto.Signaled(9)
	ended.Stdout, ended.Stderr, ended.DurationMS, ended.StdoutTruncated = "a\u0085\x00", "é", 21, true
	full := meta
	full.Mode, full.ThreadID, full.WebhookURL, full.Metadata = proto.ModeInline, "t", "https://example.com/",
		map[string]string{"k": "v"}
	full.Profile = "web"
	const null = `"webhook_url":null,"webhook_delivery_status":null,"error_code":null,"error_message":null,` +
		`"language":"bash","timeout":60,"thread_id":null,"metadata":{},`
	for name, tt := range map[string]struct {
		record   proto.Record
		delivery proto.DeliveryStatus
		want     string
	}{
		"queued": {
			proto.Record{Meta: meta, Status: proto.StatusQueued},
			"",
			`"status":"queued","exit_code":null,"stdout":null,"stderr":null,"error":null,"duration_ms":0,` +
				`"delivery_mode":"webhook","created_at":"2026-11-18T11:06:40.000Z","completed_at":null,` +
				null + `"attempt":0,"queued_ms":9000,"stdout_truncated":false,"stderr_truncated":false,"output_truncated":false,` +
				`"profile":null}`,
		},
		"running": {
			proto.Record{Meta: meta, Status: proto.StatusRunning, Attempt: 1, StartedAt: at(4000)},
			"",
			`"status":"running","exit_code":null,"stdout":null,"stderr":null,"error":null,"duration_ms":5000,` +
				`"delivery_mode":"webhook","created_at":"2026-11-18T11:06:40.000Z","completed_at":null,` +
				null + `"attempt":1,"queued_ms":4000,"stdout_truncated":false,"stderr_truncated":false,"output_truncated":false,` +
				`"profile":null}`,
		},
		"ended": {
			proto.Record{
				Meta: full, Status: proto.StatusFailed, Attempt: 2, StartedAt: at(4), CompletedAt: at(30),
				Result: &ended, OutputTruncated: true,
			},
			proto.DeliveryDelivered,
			`"status":"failed","exit_code":137,"stdout":"a\u0085\u0000","stderr":"é","error":null,"duration_ms":21,` +
				`"delivery_mode":"inline","created_at":"2026-11-18T11:06:40.000Z",` +
				`"completed_at":"2026-11-18T11:06:40.030Z","webhook_url":"https://example.com/",` +
				`"webhook_delivery_status":"delivered","error_code":null,"error_message":null,` +
				`"language":"bash","timeout":60,"thread_id":"t","metadata":{"k":"v"},"attempt":2,"queued_ms":4,` +
				`"stdout_truncated":true,"stderr_truncated":false,"output_truncated":true,"profile":"web"}`,
		},
		"withdrawn, on a clock that is behind": {
			proto.Record{
				Meta: meta, Status: proto.StatusFailed, CompletedAt: at(-5),
				Result: new(proto.Failure(proto.CodeExpiredInQueue, "m")),
			},
			"",
			`"status":"failed","exit_code":-1,"stdout":"","stderr":"","error":"expired_in_queue","duration_ms":0,` +
				`"delivery_mode":"webhook","created_at":"2026-11-18T11:06:40.000Z",` +
				`"completed_at":"2026-11-18T11:06:39.995Z","webhook_url":null,"webhook_delivery_status":null,` +
				`"error_code":"expired_in_queue","error_message":"m",` +
				`"language":"bash","timeout":60,"thread_id":null,"metadata":{},"attempt":0,"queued_ms":0,` +
				`"stdout_truncated":false,"stderr_truncated":false,"output_truncated":false,"profile":null}`,
		},
	} {
		t.Run(name, func(t *testing.T) {
			var body strings.Builder
			err := api.NewExecution(&tt.record, tt.delivery, nil, *at(9000)).Write(&body)
			if got, want := body.String(), `{"trace_id":"trc_AbCdEfGhIjKlMnOpQrSt",`+tt.want; err != nil || got != want {
				t.Errorf("%v\n%s, want\n%s", err, got, want)
			}
		})
	}
}

func TestGetRequest(t *testing.T) {
	h := newHarness(t)
	h.stub.finishAtOnce(proto.Exited(0))
	request := func(id proto.TraceID) *reply { return h.do("GET", "/v1/executions/"+string(id)+"/request", "") }
	ran := func(body string, change ...func(*proto.Job)) *reply {
		t.Helper()
		h.stub.onSubmit = func(job *proto.Job) {
			for _, f := range change {
				f(job)
				h.stub.update(job.TraceID, func(x *run) { x.record.Meta = job.Meta })
			}
			h.stub.finish(job.TraceID, proto.Exited(0))
		}
		return request(h.execute(body).want(200, "").trace())
	}
	a := ran(`{"code":"echo \u0000<\u2028","language":"bash","args":["a",""],"stdin":"\u0000","env_vars":{"B":"secret",`+
		`"A":"secret"},"timeout":7,"kill_grace":1.5,"thread_id":"t","metadata":{"k":"v"},"max_attempts":2}`).want(200, "")
	want := `{"trace_id":"` + string(a.trace()) + `","delivery_mode":"inline","code":"echo \u0000\u003c\u2028",` +
		`"language":"bash","args":["a",""],"stdin":"\u0000","env_names":["A","B"],"profile":"default","timeout":7,` +
		`"kill_grace":1.5,"thread_id":"t","sub_paths":[],"metadata":{"k":"v"},"max_attempts":2,"webhook_url":null}` + "\n"
	if string(a.body) != want {
		t.Errorf("%s, want\n%s", a.body, want)
	}
	// The answer can be sent as it is.
	again := ran(string(a.body)).want(200, "")
	want = strings.NewReplacer(string(a.trace()), string(again.trace()), `["A","B"]`, `[]`).Replace(want)
	if string(again.body) != want {
		t.Errorf("again: %s, want\n%s", again.body, want)
	}

	sized := func(n int) string {
		return fmt.Sprintf(`{"code":%q,"args":["arg"],"stdin":"in"}`, strings.Repeat("x", n-len("arg")-len("in")))
	}
	ran(sized(proto.MaxKeptRequest)).want(200, "")
	for name, c := range map[string]struct {
		answer *reply
		words  string
	}{
		"too large": {ran(sized(proto.MaxKeptRequest + 1)), "more than 65536 bytes"},
		"older":     {ran(hello, func(j *proto.Job) { j.Requested = nil }), "is not kept"},
		"item": {
			ran(hello, func(j *proto.Job) { j.Batch, j.BatchIndex = "bat_abcdefghijklmnopqrstuvwxyz", 7 }),
			"item 7 of the batch bat_abcdefghijklmnopqrstuvwxyz",
		},
		"sandbox": {ran(hello, func(j *proto.Job) { j.SandboxID = "sbx_1" }), "/v1/sandboxes/sbx_1"},
		"unknown": {request(proto.NewTraceID()), ""},
		"no id":   {request("x"), ""},
		"another's": {
			h.do("GET", "/v1/executions/"+string(a.trace())+"/request", "",
				"Authorization", "Bearer "+h.stub.addKey("other", "", asUser)), "",
		},
	} {
		t.Run(name, func(*testing.T) { c.answer.want(404, "not_found", c.words) })
	}
}

func TestGetExecution(t *testing.T) {
	h := newHarness(t)
	id := h.run()
	a := h.do("GET", "/v1/executions/"+string(id), "").want(200, "")
	if got := a.json(); got["trace_id"] != string(id) || got["stdout"] != "a\nb\n" || got["status"] != "success" ||
		a.trace() != id {
		t.Errorf("execution %v", got)
	}
	for wait, status := range map[string]int{
		"0": 200, "60": 200, "": 200, "61": 400, "-1": 400, "1.5": 400, "x": 400,
		"99999999999999999999": 400,
	} {
		if a := h.do("GET", "/v1/executions/"+string(id)+"?wait="+wait, ""); a.status != status {
			t.Errorf("wait=%s: status %d, want %d", wait, a.status, status)
		}
	}
}

// An execution of another organisation must look exactly like one that does not exist.
func TestOtherOrganisationsSeeNothing(t *testing.T) {
	h := newHarness(t)
	id := h.run()
	h.key = h.stub.addKey("other", "enterprise", asAdmin)
	for _, route := range []string{
		"GET %s", "GET %s?wait=1", "GET %s/output", "POST %s/cancel", "GET %s/webhook",
		"POST %s/webhook/replay",
	} {
		method, path, _ := strings.Cut(route, " ")
		foreign := h.do(method, fmt.Sprintf(path, "/v1/executions/"+string(id)), "", "X-Request-Id", "r").want(
			404, "not_found")
		for _, unknown := range []string{
			string(proto.NewTraceID()), "x", "trc_", "trc_AbCdEfGhIjKlMnOpQrS%2e",
			"trc_AbCdEfGhIj%0AKlMnOpQrS",
		} {
			a := h.do(method, fmt.Sprintf(path, "/v1/executions/"+unknown), "", "X-Request-Id", "r").want(404, "not_found")
			a.header.Del("Date")
			foreign.header.Del("Date")
			if string(a.body) != string(foreign.body) || fmt.Sprint(a.header) != fmt.Sprint(foreign.header) {
				t.Errorf("%s of %s: %v %s, but %v %s", route, unknown, a.header, a.body, foreign.header, foreign.body)
			}
		}
	}
	if h.stub.record(id).Cancelling {
		t.Error("it was cancelled")
	}
}

func TestOutput(t *testing.T) {
	h := newHarness(t)
	id := h.run()
	status := `{"type":"status","trace_id":"` + string(id) + `","status":"running","seq":1}`
	a, b := `{"type":"output","stream":"stdout","data":"a\n","seq":2}`,
		`{"type":"output","stream":"stdout","data":"b\n","seq":3}`
	result := `{"type":"result","trace_id":"` + string(id) +
		`","status":"success","result":{"success":true,"stdout":"a\nb\n","stderr":"","exit_code":0,` +
		`"error":null,"error_code":null,"error_message":null,"duration_ms":0,"stdout_truncated":false,` +
		`"stderr_truncated":false},"output_truncated":false,"seq":4}`
	lines := func(l ...string) string { return strings.Join(l, "\n") + "\n" }
	for _, tt := range []struct{ query, accept, last, want string }{
		{"", "", "", lines(status, a, b, result)},
		{"?after_seq=0", "*/*", "", lines(status, a, b, result)},
		{"?after_seq=2", web.TypeNDJSON, "", lines(b, result)},
		{"?after_seq=4", web.TypeJSON, "", lines(result)},
		{"?after_seq=9007199254740991", web.TypeNDJSON, "1", lines(result)},
		{"?after_seq=2", web.TypeSSE, "", "id: 3\ndata: " + b + "\n\nid: 4\ndata: " + result + "\n\n"},
		{"?after_seq=1", web.TypeSSE, "2", "id: 3\ndata: " + b + "\n\nid: 4\ndata: " + result + "\n\n"},
		{"", web.TypeNDJSON + ";q=0.1, " + web.TypeSSE, "3", "id: 4\ndata: " + result + "\n\n"},
	} {
		got := h.do("GET", "/v1/executions/"+string(id)+"/output"+tt.query, "", "Accept", tt.accept, "Last-Event-ID",
			tt.last).want(200, "")
		if string(got.body) != tt.want || got.trace() != id {
			t.Errorf("%+v: events\n%s", tt, got.body)
		}
		if strings.HasPrefix(tt.want, "id:") != (got.header.Get("Content-Type") == web.TypeSSE) ||
			got.header.Get("X-Accel-Buffering") != "no" {
			t.Errorf("%+v: headers %v", tt, got.header)
		}
	}
	for _, after := range []string{"-1", "x", "1.0", "9007199254740992"} {
		h.do("GET", "/v1/executions/"+string(id)+"/output?after_seq="+after, "").want(400, "validation_error", "after_seq")
	}
	h.do("GET", "/v1/executions/"+string(id)+"/output", "", "Accept", web.TypeSSE, "Last-Event-ID", "x").want(
		400, "validation_error", "Last-Event-ID")
}

// Without follow, the output of a running execution ends with the last event at the time of the
// request, however many events follow.
func TestOutputWithoutFollowing(t *testing.T) {
	h := newHarness(t)
	id := h.execute(hello, "Prefer", "respond-async").want(202, "").trace()
	output := func(query string) string {
		t.Helper()
		return string(h.do("GET", "/v1/executions/"+string(id)+"/output?follow=false"+query, "").want(200, "").body)
	}
	if got := output(""); got != "" {
		t.Errorf("queued: %s", got)
	}
	h.stub.start(id)
	h.stub.output(id, proto.Stdout, "a")
	h.server.Events = prolific{h.stub}
	h.remount()
	status := `{"type":"status","trace_id":"` + string(id) + `","status":"running","seq":1}` + "\n"
	if got := output(""); got != status+`{"type":"output","stream":"stdout","data":"a","seq":2}`+"\n" {
		t.Errorf("running: %s", got)
	}
	if got := output("&after_seq=9"); got != "" {
		t.Errorf("running, from after its end: %s", got)
	}
	h.server.Events = h.stub
	h.remount()
	h.stub.finish(id, proto.Exited(0))
	if got := output("&after_seq=9"); !strings.HasPrefix(got, `{"type":"result"`) {
		t.Errorf("ended: %s", got)
	}
	h.do("GET", "/v1/executions/"+string(id)+"/output?follow=no", "").want(400, "validation_error", "follow")
}

// prolific is a stub whose program prints again each time its events are read.
type prolific struct{ *stub }

func (q prolific) Follow(ctx context.Context, org string, id proto.TraceID, after int64) (web.Tail, error) {
	tail, err := q.stub.Follow(ctx, org, id, after)
	return prolificTail{tail, q.stub, id}, err
}

type prolificTail struct {
	web.Tail
	stub *stub
	id   proto.TraceID
}

func (t prolificTail) Next(ctx context.Context) (proto.Events, error) {
	defer t.stub.output(t.id, proto.Stdout, "more")
	return t.Tail.Next(ctx)
}

// A broken stream must not look like a complete one.
func TestBrokenStreamIsCutOff(t *testing.T) {
	h := newHarness(t)
	id := h.run()
	h.server.Events = brokenEvents{}
	h.remount()
	resp, err := h.client.Do(h.request("GET", "/v1/executions/"+string(id)+"/output", ""))
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = resp.Body.Close() }()
	var sink strings.Builder
	if err := resp.Write(&sink); err == nil {
		t.Errorf("whole answer %s", sink.String())
	}
	h.http.Close()
	if !strings.Contains(h.log.String(), "disk on fire") {
		t.Error("the failure is not logged")
	}
}

type brokenEvents struct{}

func (brokenEvents) Follow(context.Context, string, proto.TraceID, int64) (web.Tail, error) {
	return brokenEvents{}, nil
}

func (brokenEvents) Next(context.Context) (proto.Events, error) {
	return proto.Events{}, errors.New("disk on fire")
}
func (brokenEvents) Close() {}

func (brokenEvents) Last(context.Context, string, proto.TraceID, int) (int64, error) {
	return 0, errors.New("disk on fire")
}

func TestCancel(t *testing.T) {
	h := newHarness(t)
	cancel := func(id proto.TraceID) *reply {
		return h.do("POST", "/v1/executions/"+string(id)+"/cancel", "", "Content-Type", web.TypeJSON)
	}
	queued := h.execute(hello, "Prefer", "respond-async").trace()
	if a := cancel(queued).want(202, ""); a.json()["status"] != "cancelling" {
		t.Errorf("queued: %s", a.body)
	}
	if a := cancel(queued).want(200, ""); a.json()["status"] != "cancelled" {
		t.Errorf("again: %s", a.body)
	}
	if a := h.do("GET", "/v1/executions/"+string(queued)+"/output", ""); strings.Count(string(a.body), "\n") != 1 {
		t.Errorf("output of what was cancelled in the queue: %s", a.body)
	}
	running := h.execute(hello, "Prefer", "respond-async").trace()
	h.stub.start(running)
	if a := cancel(running).want(202, ""); string(a.body) != `{"trace_id":"`+string(running)+
		`","status":"cancelling"}`+"\n" {
		t.Errorf("running: %s", a.body)
	}
	if !h.stub.record(running).Cancelling {
		t.Error("it is not being cancelled")
	}
	if a := cancel(h.run()).want(200, ""); a.json()["status"] != "success" {
		t.Errorf("ended: %s", a.body)
	}
	h.server.Jobs = lateJobs{h.stub}
	h.remount()
	h.stub.onSubmit = nil
	if a := cancel(h.execute(hello, "Prefer", "respond-async").trace()).want(200, ""); a.json()["status"] != "success" {
		t.Errorf("ended in between: %s", a.body)
	}
}

func TestKeysExpire(t *testing.T) {
	bubble(t, func(t *testing.T, h *harness) {
		h.stub.finishAtOnce(proto.Exited(0))
		at := time.Now().Add(time.Hour).UTC()
		made := h.do("POST", "/v1/admin/keys", `{"name":"ci","org":"beta","plan":"pro","expires_at":"`+
			at.Format(time.RFC3339)+`"}`).want(201, "").json()
		if made["expires_at"] != at.Format(proto.TimeLayout) {
			t.Errorf("key %v", made)
		}
		authorization := "Bearer " + made["key"].(string)
		h.execute(hello, "Authorization", authorization).want(200, "")
		time.Sleep(time.Hour)
		h.execute(hello, "Authorization", authorization).want(401, "unauthorized", "expired at "+at.Format(time.RFC3339))
		h.do("POST", "/v1/admin/keys", `{"name":"ci","org":"beta","plan":"pro","expires_at":"`+at.Format(time.RFC3339)+`"}`).
			want(400, "validation_error", "expires_at", "future")
	})
}

// lateJobs is a stub whose executions end just before they are cancelled.
type lateJobs struct{ *stub }

func (q lateJobs) Cancel(ctx context.Context, org string, id proto.TraceID) (*proto.Record, error) {
	q.finish(id, proto.Exited(0))
	return q.stub.Cancel(ctx, org, id)
}

func TestKeys(t *testing.T) {
	h := newHarness(t)
	made := h.do("POST", "/v1/admin/keys", `{"name":"ci","org":"beta","plan":"pro"}`).want(201, "").json()
	if fmt.Sprint(made["scopes"]) != "[execute read files]" || made["global"] != false || made["org"] != "beta" ||
		made["plan"] != nil || made["name"] != "ci" || made["revoked_at"] != nil {
		t.Errorf("key %v", made)
	}
	secret, id := made["key"].(string), made["id"].(string)
	list := h.do("GET", "/v1/admin/keys", "").want(200, "")
	if strings.Contains(string(list.body), secret) || len(list.json()["keys"].([]any)) != 2 {
		t.Errorf("keys %s", list.body)
	}
	h.stub.finishAtOnce(proto.Exited(0))
	h.execute(hello, "Authorization", "Bearer "+secret).want(200, "")
	for _, route := range []string{"POST /v1/admin/keys", "GET /v1/admin/keys", "DELETE /v1/admin/keys/" + id} {
		method, path, _ := strings.Cut(route, " ")
		h.do(method, path, `{}`, "Authorization", "Bearer "+secret).want(403, "forbidden")
	}
	if a := h.do("DELETE", "/v1/admin/keys/"+id, "").want(200, ""); a.json()["revoked_at"] == nil {
		t.Errorf("revoked key %s", a.body)
	}
	h.execute(hello, "Authorization", "Bearer "+secret).want(401, "unauthorized")
	h.do("DELETE", "/v1/admin/keys/nothing", "").want(404, "not_found")
	if strings.Contains(h.log.String(), secret) {
		t.Error("a key is in the log")
	}
}

func TestKeyLimits(t *testing.T) {
	h := newHarness(t)
	h.do("POST", "/v1/admin/orgs", `{"name":"o"}`).want(201, "")
	with := func(field, value string) string {
		m := map[string]string{"name": `"n"`, "org": `"o"`, "plan": `"free"`, "scopes": `["admin"]`}
		m[field] = value
		return fmt.Sprintf(`{"name":%s,"org":%s,"plan":%s,"scopes":%s}`, m["name"], m["org"], m["plan"], m["scopes"])
	}
	for _, tt := range []struct {
		field, value string
		status       int
	}{
		{"name", `"` + strings.Repeat("é", 128) + `"`, 201},
		{"name", `"` + strings.Repeat("é", 129) + `"`, 400},
		{"name", `""`, 400},
		{"name", `null`, 400},
		{"name", `"a\u0000"`, 400},
		{"name", `1`, 400},
		{"org", `"` + strings.Repeat("a", 63) + `"`, 201},
		{"org", `"` + strings.Repeat("a", 64) + `"`, 400},
		{"org", `"A"`, 400},
		{"org", `"a.b"`, 400},
		{"org", `"a\n"`, 400},
		{"plan", `"enterprise"`, 201},
		{"plan", `"gold"`, 400},
		{"plan", `null`, 201},
		{"scopes", `null`, 201},
		{"scopes", `["none"]`, 400},
		{"scopes", `["read","read"]`, 400},
		{"scopes", `[]`, 400},
		{"scopes", `true`, 400},
	} {
		code := "validation_error"
		if tt.status == 201 {
			code = ""
		}
		h.do(http.MethodPost, "/v1/admin/keys", with(tt.field, tt.value)).want(tt.status, code, tt.field)
	}
}

// An answer that is six times as long as the output must not be assembled in memory.
func TestLargeAnswersTakeLittleMemory(t *testing.T) {
	const size = 8 << 20
	h := newHarness(t)
	r := proto.Exited(0)
	r.Stdout = strings.Repeat("\x00", size)
	h.stub.finishAtOnce(r)
	id := h.execute(hello, "Prefer", "respond-async").want(202, "").trace()
	for name, request := range map[string]*http.Request{
		"inline":         h.request("POST", "/v1/sandbox/execute", hello),
		"streaming":      h.request("POST", "/v1/sandbox/execute", hello, "Accept", web.TypeNDJSON),
		"execution":      h.request("GET", "/v1/executions/"+string(id), ""),
		"output":         h.request("GET", "/v1/executions/"+string(id)+"/output", ""),
		"output, as SSE": h.request("GET", "/v1/executions/"+string(id)+"/output", "", "Accept", web.TypeSSE),
	} {
		t.Run(name, func(t *testing.T) {
			var before, after runtime.MemStats
			runtime.ReadMemStats(&before)
			answer, err := h.client.Do(request)
			if err != nil {
				t.Fatal(err)
			}
			defer func() { _ = answer.Body.Close() }()
			n, err := io.Copy(io.Discard, answer.Body)
			if err != nil || answer.StatusCode != http.StatusOK || n < 6*size {
				t.Fatalf("status %d, %d bytes, %v", answer.StatusCode, n, err)
			}
			runtime.ReadMemStats(&after)
			if took := after.TotalAlloc - before.TotalAlloc; took > size/4 {
				t.Errorf("an answer of %d bytes took %d bytes of memory", n, took)
			}
		})
	}
}
