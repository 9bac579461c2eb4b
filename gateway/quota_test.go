package gateway

import (
	"fmt"
	"strings"
	"testing"
	"time"

	sdk "github.com/modelcontextprotocol/go-sdk/mcp"

	"github.com/bullpen-run/bullpen/gateway/web"
	"github.com/bullpen-run/bullpen/proto"
)

// newQuotaHarness returns a harness and a client of an organisation whose plan has quotas.
func newQuotaHarness(t *testing.T, quotas string) (h, user *harness, usage *usageStub) {
	t.Helper()
	usage = &usageStub{month: proto.UsageMonth{Ends: time.Date(2026, 12, 1, 0, 0, 0, 0, time.UTC)}}
	h = newHarness(t, func(s *Server) { s.Usage = usage })
	h.stub.finishAtOnce(proto.Exited(0))
	h.do("POST", "/v1/admin/plans", `{"name":"metered","title":"Metered","next":"pro","monthly":`+quotas+`}`).want(201, "")
	h.do("POST", "/v1/admin/orgs", `{"name":"beta","plan":"metered"}`).want(201, "")
	key := h.do("POST", "/v1/admin/keys", `{"name":"n","org":"beta"}`).want(201, "").json()["key"].(string)
	return h, h.as(key), usage
}

// use sets what every organisation has used in the month.
func (u *usageStub) use(cpuMS, memoryMS, stored int64) {
	u.mu.Lock()
	defer u.mu.Unlock()
	u.month.CPUMS, u.month.MemoryMS, u.month.StoredBytes = cpuMS, memoryMS, stored
}

// usedUp checks that an answer is the refusal of a plan without those words in its message.
func (a *reply) usedUp(words ...string) {
	a.t.Helper()
	a.want(429, "rate_limited", append(words, "2026-12-01T00:00:00Z")...)
	if got := a.json(); got["reason"] != "plan_limit" || got["permanent"] != true ||
		a.header.Get("X-Should-Retry") != "false" || a.header.Get("Retry-After") != "" {
		a.t.Errorf("%v %s", a.header, a.body)
	}
}

func TestQuotasOfAMonth(t *testing.T) {
	h, user, usage := newQuotaHarness(
		t, `{"cpu_seconds":{"soft":800,"hard":1000},"memory_mib_seconds":{"hard":50},"stored_bytes":{"soft":10}}`)
	usage.use(799_999, 49_999, 9)
	if a := user.execute(hello).want(200, ""); a.header.Get("X-Quota-Warning") != "" {
		t.Errorf("below all limits: %v", a.header)
	}
	accepted := user.execute(hello, "Idempotency-Key", "one").want(200, "").trace()

	usage.use(812_500, 49_999, 10)
	const warning = "cpu_seconds;used=812.5;soft=800;hard=1000;ends=@1796083200, " +
		"stored_bytes;used=10;soft=10;ends=@1796083200"
	for range 3 {
		if a := user.execute(hello).want(200, ""); a.header.Get("X-Quota-Warning") != warning {
			t.Errorf("%q", a.header.Get("X-Quota-Warning"))
		}
	}
	if a := h.execute(hello).want(200, ""); a.header.Get("X-Quota-Warning") != "" {
		t.Errorf("another organisation: %v", a.header)
	}

	usage.use(1_000_000, 49_999, 10)
	for mode, headers := range map[string][]string{
		"inline": nil, "async": {"Prefer", "respond-async"}, "streaming": {"Accept", web.TypeNDJSON},
		"a new idempotency key": {"Idempotency-Key", "two"},
	} {
		t.Run(mode, func(t *testing.T) {
			user.in(t).execute(hello, headers...).usedUp("Metered", "1000 cpu_seconds", "used 1000",
				"Upgrade to Pro at https://example.com/upgrade")
		})
	}
	if again := user.execute(hello, "Idempotency-Key", "one").want(200, "").trace(); again != accepted {
		t.Errorf("an execution that was accepted before is not found: %s, want %s", again, accepted)
	}
	user.do("POST", "/v1/batches", `{"items":[{"code":"1"}]}`).usedUp("cpu_seconds")
	_, result := callTool(t, h.modelClient(user.key, "", nil), "sandbox_execute", map[string]any{"code": "1"})
	if text := result.Content[0].(*sdk.TextContent).Text; !result.IsError ||
		result.Meta["bullpen.run/reason"] != "plan_limit" || !strings.Contains(text, "1000 cpu_seconds") {
		t.Errorf("tool: %v %s", result.Meta, text)
	}
	user.do("GET", "/v1/threads", "").want(200, "") // what uses nothing
	user.do("POST", "/v1/files/upload_url", `{"source":"thread","id":"t","path":"a","content_length":1}`).want(200, "")

	usage.use(0, 50_001, 10)
	user.execute(hello).usedUp("50 memory_mib_seconds", "used 50.001")
	usage.use(0, 0, 10)
	user.execute(hello).want(200, "")
	upload, _ := user.beginUpload(ofThread, "a", 1)
	h.do("PUT", "/v1/admin/plans/metered", `{"monthly":{"stored_bytes":{"hard":7}}}`).want(200, "")
	user.do("POST", "/v1/files/uploads", `{"source":"thread","id":"t","path":"a","content_length":1}`).usedUp(
		"stored_bytes")
	user.send(h.put(upload+"?part=1", "x")).usedUp("stored_bytes")
	user.execute(hello).usedUp("7 stored_bytes", "used 10", "remove threads")
	user.do("POST", "/v1/files/upload_url", `{"source":"thread","id":"t","path":"a","content_length":1}`).usedUp(
		"stored_bytes")

	for _, line := range []string{
		`"quota":"cpu_seconds","level":"soft","limit":800`, `"quota":"cpu_seconds","level":"hard","limit":1000`,
		`"quota":"memory_mib_seconds","level":"hard"`,
		`"quota":"stored_bytes","level":"soft","limit":10`, `"quota":"stored_bytes","level":"hard","limit":7`,
	} {
		if n := strings.Count(h.log.String(), line); n != 1 {
			t.Errorf("%s is logged %d times", line, n)
		}
	}
}

// Ticks, items and steps have no client to answer. They get the reason.
func TestQuotasOfWorkWithoutARequest(t *testing.T) {
	h, _, usage := newQuotaHarness(t, `{"cpu_seconds":{"hard":1}}`)
	id := h.stub.keys[len(h.stub.keys)-1].ID
	schedule := &proto.Schedule{ID: proto.NewScheduleID(), Org: "beta", Key: id, Request: []byte(hello)}
	tick := time.Now()
	started, refused, err := h.admission.StartScheduled(t.Context(), schedule, tick)
	if err != nil || refused != "" {
		t.Fatal(refused, err)
	}
	usage.use(1000, 0, 0)
	if again, refused, err := h.admission.StartScheduled(t.Context(), schedule, tick); again != started || err != nil {
		t.Errorf("a tick that was started: %s %s %v", again, refused, err)
	}
	_, refused, err = h.admission.StartScheduled(t.Context(), schedule, tick.Add(time.Hour))
	if err != nil || !strings.Contains(refused, "1 cpu_seconds") {
		t.Errorf("tick: %q %v", refused, err)
	}
	submit, err := h.admission.OpenBatch(&proto.Batch{ID: proto.NewBatchID("beta", id, ""), Org: "beta", Key: id}, nil)
	if err != nil {
		t.Fatal(err)
	}
	if refused, err := submit(t.Context(), []byte(hello), 0, proto.NewTraceID()); err != nil ||
		!strings.Contains(refused, "1 cpu_seconds") {
		t.Errorf("item: %q %v", refused, err)
	}
	p := &proto.Pipeline{
		ID: proto.NewPipelineID(), Org: "beta", Key: id,
		Steps: []proto.PipelineStep{{Name: "s", Code: "1", Language: proto.Bash, Timeout: 1, Cells: []proto.MatrixCell{{}}}},
	}
	if _, refused, err := h.admission.StartStep(t.Context(), p, 0, 0, p.ID); err != nil ||
		!strings.Contains(refused, "1 cpu_seconds") {
		t.Errorf("step: %q %v", refused, err)
	}
}

func TestPlanWithoutQuotasReadsNoUsage(t *testing.T) {
	usage := new(usageStub)
	h := newHarness(t, func(s *Server) { s.Usage = usage })
	h.stub.finishAtOnce(proto.Exited(0))
	for range 3 {
		h.execute(hello).want(200, "")
	}
	if usage.read != 0 {
		t.Errorf("usage was read %d times", usage.read)
	}
}

func TestQuotasInUsageAndPlans(t *testing.T) {
	h, user, usage := newQuotaHarness(t, `{"cpu_seconds":{"soft":800,"hard":1000},"stored_bytes":{"hard":10}}`)
	usage.use(1_500_250, 0, 3)
	const want = "[map[ends:2026-12-01T00:00:00.000Z hard:1000 name:cpu_seconds soft:800 used:1500.25] " +
		"map[ends:2026-12-01T00:00:00.000Z hard:10 name:stored_bytes soft:<nil> used:3]]"
	for _, a := range []*reply{user.do("GET", "/v1/usage", ""), h.do("GET", "/v1/admin/usage?org=beta", "")} {
		if got := fmt.Sprint(a.want(200, "").json()["quotas"]); got != want {
			t.Errorf("%s", got)
		}
	}
	for _, path := range []string{"/v1/usage", "/v1/admin/usage", "/v1/admin/usage?org=nobody"} {
		if got := fmt.Sprint(h.do("GET", path, "").want(200, "").json()["quotas"]); got != "[]" {
			t.Errorf("%s: %s", path, got)
		}
	}
	for quotas, field := range map[string]string{
		`{"cpu_seconds":{"soft":2,"hard":1}}`:        "monthly.cpu_seconds.soft",
		`{"memory_mib_seconds":{"hard":0}}`:          "monthly.memory_mib_seconds.hard",
		`{"stored_bytes":{"soft":-1}}`:               "monthly.stored_bytes.soft",
		`{"stored_bytes":{"hard":1000000000000001}}`: "monthly.stored_bytes.hard",
		`{"cpu":{"hard":1}}`:                         "monthly.cpu", `{"cpu_seconds":5}`: "monthly.cpu_seconds",
	} {
		h.do("POST", "/v1/admin/plans", `{"name":"bad","monthly":`+quotas+`}`).want(400, "validation_error", field)
	}
	// A key's own plan without quotas allows no more than the organisation's with some.
	h.do("POST", "/v1/admin/keys", `{"name":"n","org":"beta","plan":"free"}`).want(201, "")
}
