package e2e

import (
	"encoding/json"
	"fmt"
	"net/http"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/bullpen-run/bullpen/proto"
)

// schedule is a schedule as the API returns it.
type schedule struct {
	ID   string
	Runs []scheduleRun
}

type scheduleRun struct {
	Tick    time.Time
	Outcome proto.RunOutcome
	TraceID string `json:"trace_id"`
}

// testSchedules kills the gateway that starts the executions of a schedule with a tick each second.
// The other gateway must go on: each tick runs once, and none is left out.
func testSchedules(t *testing.T, p *programs) {
	hooks := startReceiver(t)
	sys := newSystem(t, p, topology{separate: true}, 2, hooks.flags...)
	var s schedule
	program := bash("echo run >> runs").of("runs")
	sys.do(http.MethodPost, "/v1/schedules", request{"name": "each second", "cron": "* * * * * *", "overlap": "queue", "request": program}).into(t, &s)
	path := "/v1/schedules/" + s.ID
	runs := func(a *api, least int) {
		t.Helper()
		eventually(t, fmt.Sprintf("%d ticks have run", least), func() (bool, any) {
			r := a.get(path)
			r.into(t, &s)
			return len(s.Runs) >= least, r
		})
	}
	runs(sys.api, 2)
	failing := sys.failingSchedule(hooks.url + "/200")
	const delay = 4 * time.Second
	began := time.Now()
	delayed := sys.submit(bash("echo late").and("delay", delay.Seconds()))
	cancelled := sys.submit(bash("echo never").and("delay", 3600))

	// It leads: the other gateway starts now.
	args := append([]string{"--data", filepath.Join(t.TempDir(), "second"), "--roles", "gateway"}, sys.args...)
	_, base := p.startServe(t, "second front", sys.env, args...)
	second := &api{t, base, sys.key, sys.http}
	sys.front.kill()
	runs(second, len(s.Runs)+3)
	var late struct {
		Status      string
		Stdout      string
		RunAt       time.Time `json:"run_at"`
		CompletedAt time.Time `json:"completed_at"`
	}
	second.get("/v1/executions/"+cancelled).into(t, &late)
	if late.Status != "queued" || late.RunAt.Before(began) {
		t.Errorf("the delayed execution: %+v", late)
	}
	second.do(http.MethodPost, "/v1/executions/"+cancelled+"/cancel", nil)
	if second.get("/v1/executions/"+cancelled).into(t, &late); late.Status != "cancelled" {
		t.Errorf("the cancelled execution: %+v", late)
	}
	second.get("/v1/executions/"+delayed+"?wait=30").into(t, &late)
	if late.Status != "success" || late.Stdout != "late\n" || late.CompletedAt.Before(began.Add(delay)) {
		t.Errorf("the delayed execution, from %s: %+v", began, late)
	}
	sys.checkFailedTicks(second, failing, hooks)
	second.do(http.MethodPatch, path, request{"paused": true}).into(t, &s)
	eventually(t, "each tick has run once", func() (bool, any) { // one may have been started meanwhile
		r := second.execute(bash("cat runs").of("runs"))
		if r.status != http.StatusOK {
			return false, r
		}
		second.get(path).into(t, &s)
		n := strings.Count(r.result(t).Stdout, "run\n")
		return n == len(s.Runs), fmt.Sprintf("%d executions for %d ticks", n, len(s.Runs))
	})
	for i, r := range s.Runs {
		if r.Outcome != proto.RunStarted || i > 0 && s.Runs[i-1].Tick.Sub(r.Tick) != time.Second {
			t.Errorf("run %d: %+v", i, s.Runs)
		}
	}
}

// failingSchedule creates a schedule with a tick each second, and revokes its key.
func (sys *system) failingSchedule(webhook string) (id string) {
	sys.t.Helper()
	secret, key := sys.newKey("default", "enterprise")
	owner := &api{sys.t, sys.base, secret, sys.http}
	program := bash("echo never").and("webhook_url", webhook)
	var s schedule
	owner.do(http.MethodPost, "/v1/schedules", request{"name": "fails", "every": 1, "request": program}).into(sys.t, &s)
	if r := sys.do(http.MethodDelete, "/v1/admin/keys/"+key, nil); r.status >= http.StatusMultipleChoices {
		sys.t.Fatalf("revoke a key: %s", r)
	}
	return s.ID
}

// checkFailedTicks checks that each failed tick of a schedule has one webhook with an id of its
// own.
func (sys *system) checkFailedTicks(a *api, id string, hooks *receiver) {
	sys.t.Helper()
	ids := map[string]time.Time{}
	for len(ids) < 3 {
		p := hooks.next(sys.t)
		var body struct {
			Event, Reason string
			ScheduleID    string `json:"schedule_id"`
			Tick          time.Time
		}
		if err := json.Unmarshal(p.body, &body); err != nil {
			sys.t.Fatal(err)
		}
		if body.Event == proto.EventCompleted { // accepted before its key was revoked
			continue
		}
		if tick, again := ids[p.id]; again && !tick.Equal(body.Tick) || body.Event != "schedule.failed" || body.ScheduleID != id || !strings.Contains(body.Reason, "revoked") {
			sys.t.Errorf("webhook %s: %s", p.id, p.body)
		}
		ids[p.id] = body.Tick
	}
	var s schedule
	a.get("/v1/schedules/"+id).into(sys.t, &s)
	for hook, tick := range ids {
		if !slices.ContainsFunc(s.Runs, func(r scheduleRun) bool { return r.Tick.Equal(tick) && r.Outcome == proto.RunFailed }) {
			sys.t.Errorf("webhook %s is about %s; the history is %+v", hook, tick, s.Runs)
		}
	}
}
