package gateway

import (
	"context"
	"errors"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/bullpen-run/bullpen/proto"
)

// scheduleStub keeps schedules in memory. They tick each hour.
type scheduleStub struct {
	mu     sync.Mutex
	stored []proto.Schedule
	runs   []proto.ScheduleRun
}

func (s *scheduleStub) Create(_ context.Context, schedule proto.Schedule) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if schedule.Cron == "never" {
		return proto.FieldErrorf("cron", "must match a day that exists")
	}
	s.stored = append(s.stored, schedule)
	slices.SortFunc(s.stored, func(a, b proto.Schedule) int { return strings.Compare(a.ID, b.ID) })
	return nil
}

func (s *scheduleStub) Page(org, after string, limit int, keep func(*proto.Schedule) bool) ([]proto.Schedule, string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	id := func(x *proto.Schedule) string { return x.ID }
	return pageOf(slices.Values(s.stored), func(x *proto.Schedule) string { return x.Org }, id, org, after, limit, keep)
}

func (s *scheduleStub) Get(_ context.Context, org, id string) (proto.Schedule, proto.ScheduleState, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	i := s.index(org, id)
	if i < 0 {
		return proto.Schedule{}, proto.ScheduleState{}, proto.ErrNotFound
	}
	return s.stored[i], proto.ScheduleState{Runs: s.runs}, nil
}

func (s *scheduleStub) index(org, id string) int {
	return slices.IndexFunc(s.stored, func(x proto.Schedule) bool { return x.Org == org && x.ID == id })
}

func (s *scheduleStub) Ticks(schedule *proto.Schedule, from time.Time, n int) ([]time.Time, error) {
	if schedule.Cron == "never" || schedule.TimeZone == "gone" {
		return nil, proto.FieldErrorf("cron", "must match a day that exists")
	}
	list := make([]time.Time, n)
	for i := range list {
		list[i] = from.Add(time.Duration(i+1) * time.Hour)
	}
	return list, nil
}

func (s *scheduleStub) Change(
	_ context.Context, org, id string, change func(*proto.Schedule) error,
) (proto.Schedule, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	i := s.index(org, id)
	if i < 0 {
		return proto.Schedule{}, proto.ErrNotFound
	}
	changed := s.stored[i]
	if err := change(&changed); err != nil {
		return proto.Schedule{}, err
	}
	s.stored[i] = changed
	return changed, nil
}

func (s *scheduleStub) Remove(_ context.Context, org, id string) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	i := s.index(org, id)
	if i < 0 {
		return proto.ErrNotFound
	}
	s.stored = slices.Delete(s.stored, i, i+1)
	return nil
}

func (s *scheduleStub) Record(_ context.Context, _, _ string, run proto.ScheduleRun) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.runs = append(s.runs, run)
	return nil
}

func newScheduleHarness(t *testing.T) (*harness, *scheduleStub) {
	h, stub := newHarness(t), new(scheduleStub)
	h.server.Schedules = stub
	h.remount()
	return h, stub
}

func TestSchedules(t *testing.T) {
	h, _ := newScheduleHarness(t)
	made := h.do("POST", "/v1/schedules",
		`{"name":"report","cron":"30 2 * * *","time_zone":"Europe/Berlin","jitter":1.5,"request":{"language":"bash",`+
			`"code":"echo hi"}}`)
	s := made.want(201, "").json()
	path := "/v1/schedules/" + s["id"].(string)
	if made.header.Get("Location") != path || s["overlap"] != "skip" || s["missed"] != "last" || s["jitter"] != 1.5 ||
		s["every"] != nil || s["key_id"] != "key_1" ||
		s["request"].(map[string]any)["timeout"] != 60.0 || len(s["next"].([]any)) != 5 || s["error"] != nil {
		t.Errorf("created %v", s)
	}
	if list := h.do("GET", "/v1/schedules", "").want(200, "").json(); len(list["schedules"].([]any)) != 1 ||
		list["next_cursor"] != nil {
		t.Errorf("listed %v", list)
	}
	s = h.do("PATCH", path, `{"every":3600,"paused":true}`).want(200, "").json()
	if s["cron"] != nil || s["every"] != 3600.0 || s["name"] != "report" || s["paused"] != true ||
		len(s["next"].([]any)) != 0 {
		t.Errorf("changed to %v", s)
	}
	started := h.do("POST", path+"/run", "").want(202, "")
	id := started.json()["trace_id"].(string)
	if started.header.Get("X-Trace-Id") != id || started.header.Get("Location") != "/v1/executions/"+id {
		t.Errorf("headers %v", started.header)
	}
	job := h.stub.runs[proto.TraceID(id)].job
	if job.Mode != proto.ModeAsync || job.Code != "echo hi" || job.Key != "key_1" || job.Timeout != 60 {
		t.Errorf("job %+v", job)
	}
	if s := h.do("GET", path, "").want(200, "").json(); s["runs"].([]any)[0].(map[string]any)["trace_id"] != id {
		t.Errorf("after the run: %v", s)
	}
	other := h.in(t)
	other.key = h.stub.addKey("other", "pro", asAdmin)
	for _, route := range []string{"GET ", "PATCH ", "DELETE ", "POST /run"} {
		method, suffix, _ := strings.Cut(route, " ")
		other.do(method, path+suffix, "{}").want(404, "not_found")
		h.do(method, "/v1/schedules/sch_no"+suffix, "{}").want(404, "not_found")
	}
	h.do("DELETE", path, "").want(204, "")
	h.do("GET", path, "").want(404, "not_found")
}

// A schedule whose ticks cannot be computed stays in the list, and says why.
func TestScheduleWithoutTicks(t *testing.T) {
	h, stub := newScheduleHarness(t)
	s := h.do("POST", "/v1/schedules", `{"name":"a","cron":"@daily","request":{"code":"1"}}`).want(201, "").json()
	stub.stored[0].TimeZone = "gone"
	for _, path := range []string{"/v1/schedules/" + s["id"].(string), "/v1/schedules"} {
		answer := h.do("GET", path, "").want(200, "").json()
		if list, ok := answer["schedules"].([]any); ok {
			answer = list[0].(map[string]any)
		}
		if answer["error"] != "cron must match a day that exists" || len(answer["next"].([]any)) != 0 {
			t.Errorf("%s: %v", path, answer)
		}
	}
}

func TestPreviewOfASchedule(t *testing.T) {
	h, stub := newScheduleHarness(t)
	p := h.do("GET", "/v1/schedules/preview?cron=@daily&time_zone=Europe/Berlin&from=2027-03-27T01:00:00%2B01:00&count=2",
		"").want(200, "").json()
	if want := map[string]any{
		"ticks": []any{"2027-03-27T01:00:00.000Z", "2027-03-27T02:00:00.000Z"},
	}; !cmp.Equal(p, want) {
		t.Errorf("got %v", p)
	}
	if p := h.do("GET", "/v1/schedules/preview?every=60", "").want(200, "").json(); len(p["ticks"].([]any)) != 5 {
		t.Errorf("got %v", p)
	}
	for query, want := range map[string]string{
		"":                                   "cron or every must be given",
		"cron=@daily&every=60":               "every must not be given together with cron",
		"cron=":                              "cron must not be empty",
		"cron=never":                         "cron must match a day that exists",
		"every=0.5":                          "every must be 1 to 31536000",
		"every=5m":                           "every must be a number of seconds",
		"every=":                             "every must be a number of seconds",
		"every=60&time_zone=":                "time_zone must not be empty",
		"cron=@daily&timezone=UTC":           "timezone is no parameter of this route",
		"cron=@daily&cron=@weekly":           "cron must be given only once",
		"cron=@daily&from=tomorrow":          "from must be a time as in RFC 3339",
		"every=60&from=3000-01-01T00:00Z":    "from must be a time as in RFC 3339",
		"every=60&from=3000-01-01T00:00:00Z": "from must be from 1970 to 2999",
		"every=60&from=1969-12-31T23:59:59Z": "from must be from 1970 to 2999",
		"every=60&count=0":                   "count must be a whole number from 1 to 100",
		"every=60&count=101":                 "count must be a whole number from 1 to 100",
	} {
		r := h.do("GET", "/v1/schedules/preview?"+query, "").want(400, "validation_error")
		if message := r.json()["message"].(string); !strings.HasPrefix(message, want) {
			t.Errorf("%s: %s", query, message)
		}
	}
	if len(stub.stored) > 0 {
		t.Errorf("a preview created %+v", stub.stored)
	}
}

func TestSchedulePages(t *testing.T) {
	h, _ := newScheduleHarness(t)
	for range 5 {
		h.do("POST", "/v1/schedules", `{"name":"a","every":60,"request":{"code":"1"}}`).want(201, "")
	}
	seen, cursor := map[string]bool{}, ""
	for range 3 {
		page := h.do("GET", "/v1/schedules?limit=2"+cursor, "").want(200, "").json()
		for _, s := range page["schedules"].([]any) {
			seen[s.(map[string]any)["id"].(string)] = true
		}
		if next, ok := page["next_cursor"].(string); ok {
			cursor = "&cursor=" + next
		}
	}
	if len(seen) != 5 {
		t.Errorf("%d schedules on three pages", len(seen))
	}
	h.do("GET", "/v1/schedules?cursor=x", "").want(400, "validation_error")
}

func TestInvalidSchedules(t *testing.T) {
	h, _ := newScheduleHarness(t)
	request := `"request":{"code":"1"}`
	for body, want := range map[string]string{
		`{` + request + `,"every":60}`:                "name must be given",
		`{"name":"","every":60,` + request + `}`:      "name must be 1 to 128",
		`{"name":"a",` + request + `}`:                "cron or every must be given",
		`{"name":"a","cron":"",` + request + `}`:      "cron must not be empty",
		`{"name":"a","cron":"never",` + request + `}`: "cron must match",
		`{"name":"a","cron":"* * * * *","every":60,` + request +
			`}`: "every must not be given together with cron",
		`{"name":"a","every":0.5,` + request + `}`:                          "every must be 1 to 31536000",
		`{"name":"a","every":60}`:                                           "request must be given",
		`{"name":"a","every":60,"request":{"code":""}}`:                     "request.code must be",
		`{"name":"a","every":60,"request":{"code":"1","language":"cobol"}}`: "request.language must be",
		`{"name":"a","every":60,"request":{"code":"1","tiemout":1}}`:        "request.tiemout is not known here",
		`{"name":"a","every":60,"overlap":"wait",` + request +
			`}`: "overlap must be one of skip, queue, replace",
		`{"name":"a","every":60,"overlap":1,` + request + `}`:   "overlap must be a string",
		`{"name":7,"every":60,` + request + `}`:                 "name must be a string",
		`{"name":"a","cron":60,` + request + `}`:                "cron must be a string",
		`{"name":"a","every":"60",` + request + `}`:             "every must be",
		`{"name":"a","every":0,` + request + `}`:                "every must be 1 to 31536000",
		`{"name":"a","every":-60,` + request + `}`:              "every must be 1 to 31536000",
		`{"name":"a","every":31536001,` + request + `}`:         "every must be 1 to 31536000",
		`{"name":"a","every":60,"interval":60,` + request + `}`: "interval is not known here",
		`{"name":"a","every":60,"jitter":-1,` + request + `}`:   "jitter must be 0 to 3600",
		`{"name":"a","every":60,"jitter":3601,` + request + `}`: "jitter must be 0 to 3600",
		`{"name":"a","every":60,"jitter":"90",` + request +
			`}`: "jitter must be a number of seconds",
		`{"name":"a","every":60,"jitter":true,` + request +
			`}`: "jitter must be a number of seconds",
		`{"name":"a","every":60,"missed":"never",` + request +
			`}`: "missed must be one of none, last, all",
		`{"name":"a","every":60,"missed":false,` + request + `}`:  "missed must be a string",
		`{"name":"a","every":60,"paused":"true",` + request + `}`: "paused must be true or false",
		`{"name":"a","every":60,"paused":1,` + request + `}`:      "paused must be true or false",
		`{"name":"a","every":60,"time_zone":"",` + request + `}`:  "time_zone must not be empty",
		`{"name":"a","every":60,"time_zone":1,` + request + `}`:   "time_zone must be a string",
		`{"name":"a","every":60,"request":[]}`:                    "request must be an object",
		`{"name":"a","every":60,"request":{"code":"1","delay":5}}`: "request must have neither " +
			"run_at nor delay",
		`{"name":"a","every":60,"request":{"code":"` + strings.Repeat("x", 256<<10) +
			`"}}`: "request must be at most 262144 bytes",
	} {
		r := h.do("POST", "/v1/schedules", body).want(400, "validation_error")
		if message := r.json()["message"].(string); !strings.HasPrefix(message, want) {
			t.Errorf("%.80s: %s", body, message)
		}
	}
	// A change is checked in the same way, and one that is refused changes nothing.
	made := h.do("POST", "/v1/schedules", `{"name":"a","every":60,`+request+`}`).want(201, "").json()
	path := "/v1/schedules/" + made["id"].(string)
	for body, want := range map[string]string{
		`{"jitter":3601}`:                                         "jitter must be 0 to 3600",
		`{"missed":"never","paused":true}`:                        "missed must be one of",
		`{"paused":"no"}`:                                         "paused must be true or false",
		`{"cron":""}`:                                             "cron must not be empty",
		`{"cron":"* * * * *","every":60}`:                         "every must not be given together with cron",
		`{"name":"","paused":true}`:                               "name must be 1 to 128",
		`{"request":{"language":"python"}}`:                       "request.code must be",
		`{"request":{"code":"1","run_at":""}}`:                    "request.run_at must be",
		`{"paused":true,"request":{"code":"1","timeout":100000}}`: "timeout is above the maximum",
	} {
		r := h.do("PATCH", path, body)
		if message := r.json()["message"].(string); r.status != 400 && r.status != 429 || !strings.HasPrefix(message, want) {
			t.Errorf("%s: %d %s", body, r.status, message)
		}
	}
	after := h.do("GET", path, "").want(200, "").json()
	delete(after, "next")
	delete(made, "next")
	if !cmp.Equal(after, made) {
		t.Errorf("refused changes made %s", cmp.Diff(made, after))
	}
	free := h.in(t)
	free.key = h.stub.addKey("small", "free", asUser)
	free.do("POST", "/v1/schedules", `{"name":"a","every":60,`+request+`}`).want(429, "rate_limited")
}

// A change of what a schedule executes counts from the next tick on, under the key that created the
// schedule.
func TestScheduleGetsAnotherRequest(t *testing.T) {
	h, stub := newScheduleHarness(t)
	made := h.do("POST", "/v1/schedules",
		`{"name":"a","cron":"0 3 * * *","jitter":5,"request":{"language":"bash","code":"echo old","timeout":20,`+
			`"env_vars":{"A":"1"}}}`).want(201, "").json()
	path := "/v1/schedules/" + made["id"].(string)
	other := h.in(t)
	other.key = h.stub.addKey("acme", "pro", asUser)
	changed := other.do("PATCH", path, `{"request":{"language":"python","code":"print(2)"}}`).want(200, "").json()
	if r := changed["request"].(map[string]any); r["code"] != "print(2)" || r["language"] != "python" ||
		r["timeout"] != 60.0 || r["env_vars"] != nil && len(r["env_vars"].(map[string]any)) > 0 {
		t.Errorf("the request is %v", r)
	}
	if changed["name"] != "a" || changed["cron"] != "0 3 * * *" || changed["jitter"] != 5.0 ||
		changed["key_id"] != made["key_id"] || changed["created_at"] != made["created_at"] {
		t.Errorf("changed to %v", changed)
	}
	id, refused, err := h.admission.StartScheduled(t.Context(), &stub.stored[0], time.Unix(1e9, 0))
	if err != nil || refused != "" {
		t.Fatal(refused, err)
	}
	now := proto.TraceID(other.do("POST", path+"/run", "").want(202, "").json()["trace_id"].(string))
	for _, id := range []proto.TraceID{id, now} {
		if job := h.stub.runs[id].job; job.Code != "print(2)" || job.Language != proto.Python || job.Key != made["key_id"] ||
			job.Timeout != 60 || len(job.Env) != 0 {
			t.Errorf("job %+v", job)
		}
	}
}

// A tick that cannot start an execution any more has a reason. One that may is tried again.
func TestScheduledExecutions(t *testing.T) {
	h, _ := newScheduleHarness(t)
	ctx, tick := t.Context(), time.Unix(1e9, 0)
	key := h.stub.keys[0].ID
	s := &proto.Schedule{
		ID: proto.NewScheduleID(), Org: "acme", Key: key,
		Request: []byte(`{"code":"1","language":"python","timeout":60,"max_attempts":1}`),
	}
	first, refused, err := h.admission.StartScheduled(ctx, s, tick)
	again, _, errAgain := h.admission.StartScheduled(ctx, s, tick)
	if err != nil || refused != "" || errAgain != nil || first == "" || again != first {
		t.Errorf("started %s and %s: %q, %v, %v", first, again, refused, err, errAgain)
	}
	if next, _, err := h.admission.StartScheduled(ctx, s, tick.Add(time.Second)); err != nil || next == first {
		t.Errorf("the next tick: %s, %v", next, err)
	}
	h.stub.refuse = func(*proto.Job) error { return &proto.Rejection{Reason: proto.RejectedUnavailable} }
	if _, refused, err := h.admission.StartScheduled(ctx, s, tick.Add(time.Minute)); err == nil || refused != "" {
		t.Errorf("without a queue: %q, %v", refused, err)
	}
	h.stub.refuse = func(*proto.Job) error { return &proto.Rejection{Reason: proto.RejectedQueueFull, Used: 1, Limit: 1} }
	if _, refused, err := h.admission.StartScheduled(ctx, s, tick.Add(time.Minute)); err != nil ||
		!strings.Contains(refused, "queued execution limit") {
		t.Errorf("a full queue: %q, %v", refused, err)
	}
	h.stub.keys[0].Profile = "gone"
	if _, refused, err := h.admission.StartScheduled(ctx, s, tick.Add(time.Hour)); err != nil ||
		!strings.Contains(refused, `the profile "gone" does not exist`) {
		t.Errorf("without its sandbox: %q, %v", refused, err)
	}
	if _, err := h.stub.Revoke(ctx, key); err != nil && !errors.Is(err, proto.ErrNotFound) {
		t.Fatal(err)
	}
	if _, refused, err := h.admission.StartScheduled(ctx, s, tick.Add(time.Hour)); err != nil ||
		!strings.Contains(refused, "is revoked") {
		t.Errorf("with a revoked key: %q, %v", refused, err)
	}
}
