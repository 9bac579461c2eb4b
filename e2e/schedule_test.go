package e2e

import (
	"crypto/rand"
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
	Reason  string
}

// testSchedules kills the gateway that starts the executions of a schedule with a tick each second.
// The other gateway must go on: each tick runs once, and none is left out.
func testSchedules(t *testing.T, p *programs) {
	hooks := startReceiver(t)
	sys := newSystem(t, p, topology{separate: true}, 2, hooks.flags...)
	var s schedule
	program := bash("echo run >> runs").of("runs")
	sys.do(http.MethodPost, "/v1/schedules",
		request{"name": "each second", "cron": "* * * * * *", "overlap": "queue", "request": program}).into(t, &s)
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
	sys.checkFailedTicks(second, failing, "revoked", hooks)
	second.do(http.MethodPatch, path, request{"paused": true}).into(t, &s)
	// One tick may still start. So this does not execute anything in the thread, which would make it fail. A tick that
	// waited for the end of the one before is skipped.
	eventually(t, "each tick has run once", func() (bool, any) {
		files := second.files("runs", "", false)
		second.get(path).into(t, &s)
		if s.Runs[0].Outcome == proto.RunSkipped {
			s.Runs = s.Runs[1:]
		}
		want := fmt.Sprint("runs ", len("run\n")*len(s.Runs))
		return slices.Contains(files, want), fmt.Sprintf("%q, want %q", files, want)
	})
	for i, r := range s.Runs {
		if r.Outcome != proto.RunStarted || i > 0 && s.Runs[i-1].Tick.Sub(r.Tick) != time.Second {
			t.Errorf("run %d: %+v", i, s.Runs)
		}
	}
}

// testScheduleWithoutSandbox loses the sandbox profile of a schedule's key, which the API refuses to
// remove. Ticks fail visibly until there is a profile again, and then start executions.
func testScheduleWithoutSandbox(t *testing.T, p *programs) {
	hooks := startReceiver(t)
	sys := newSystem(t, p, topology{separate: true}, 1, hooks.flags...)
	owner := sys.sandboxed("nightly", request{})
	var s schedule
	program := bash("true").and("webhook_url", hooks.url+"/200")
	owner.do(http.MethodPost, "/v1/schedules",
		request{"name": "nightly", "every": 1, "overlap": "queue", "request": program}).into(t, &s)
	await := func(what string, outcome proto.RunOutcome) scheduleRun {
		eventually(t, what, func() (bool, any) {
			r := owner.get("/v1/schedules/" + s.ID)
			s.Runs = nil // null would leave what an earlier answer had
			r.into(t, &s)
			return len(s.Runs) > 0 && s.Runs[0].Outcome == outcome, r
		})
		return s.Runs[0]
	}
	await("a tick started an execution", proto.RunStarted)
	sys.do(http.MethodDelete, profilesPath+"/nightly", nil).rejection(t, http.StatusConflict, "conflict")
	profiles, err := sys.connectStore(t).JS.KeyValue(t.Context(), "bullpen_profiles")
	if err == nil {
		err = profiles.Delete(t.Context(), "nightly")
	}
	if err != nil {
		t.Fatal(err)
	}
	if run := await("a tick failed", proto.RunFailed); run.TraceID != "" ||
		!strings.Contains(run.Reason, `the profile "nightly" does not exist`) {
		t.Errorf("got %+v", run)
	}
	sys.checkFailedTicks(owner, s.ID, `the profile "nightly" does not exist`, hooks)
	sys.newProfile("nightly", request{})
	run := await("a tick started an execution again", proto.RunStarted)
	owner.ended(run.TraceID).succeeded(t, "")
	for i, r := range s.Runs {
		if i > 0 && s.Runs[i-1].Tick.Sub(r.Tick) != time.Second {
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

// checkFailedTicks checks that each failed tick of a schedule has one webhook with the reason, and
// with an id of its own.
func (sys *system) checkFailedTicks(a *api, id, reason string, hooks *receiver) {
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
		if body.Event == proto.EventCompleted { // accepted before its ticks failed
			continue
		}
		if tick, again := ids[p.id]; again && !tick.Equal(body.Tick) || body.Event != "schedule.failed" ||
			body.ScheduleID != id || !strings.Contains(body.Reason, reason) {
			sys.t.Errorf("webhook %s: %s", p.id, p.body)
		}
		ids[p.id] = body.Tick
	}
	for hook, tick := range ids {
		eventually(sys.t, "the history has the tick of webhook "+hook, func() (bool, any) { // which is sent first
			var s schedule
			a.get("/v1/schedules/"+id).into(sys.t, &s)
			return slices.ContainsFunc(s.Runs, func(r scheduleRun) bool {
				return r.Tick.Equal(tick) && r.Outcome == proto.RunFailed
			}), fmt.Sprintf("%s is not in %+v", tick, s.Runs)
		})
	}
}

// testDelayed lists an execution before it starts, and cancels it then.
func testDelayed(t *testing.T, a *api) {
	name := "delayed-" + rand.Text()
	at := time.Now().Add(time.Hour).UTC().Truncate(time.Millisecond)
	program := bash("echo never").and("run_at", at.Format(time.RFC3339Nano), "metadata", request{"test": name})
	id := a.submit(program)
	list := func(status string) []string {
		var page struct {
			Executions []struct {
				TraceID   string    `json:"trace_id"`
				Status    string    `json:"status"`
				RunAt     time.Time `json:"run_at"`
				QueuedMS  int64     `json:"queued_ms"`
				Completed *string   `json:"completed_at"`
			}
			Complete bool
		}
		query := "/v1/executions?metadata.test=" + name + "&status=" + status
		eventually(t, "the index has read the execution", func() (bool, any) {
			r := a.get(query)
			r.into(t, &page)
			return page.Complete, r
		})
		ids := []string{}
		for _, e := range page.Executions {
			if !e.RunAt.Equal(at) || e.QueuedMS != 0 || (e.Completed == nil) != (status == "queued") {
				t.Errorf("listed %+v", e)
			}
			ids = append(ids, e.TraceID)
		}
		return ids
	}
	if got := list("queued"); !slices.Equal(got, []string{id}) || len(list("running")) > 0 {
		t.Errorf("listed %v", got)
	}
	if r := a.do(http.MethodPost, execution(id, "cancel"), nil); r.status != http.StatusAccepted {
		t.Errorf("cancel: %s", r)
	}
	a.ended(id).failed(t, "cancelled", "cancelled", "")
	if got := list("cancelled"); !slices.Equal(got, []string{id}) || len(list("queued")) > 0 {
		t.Errorf("after the cancellation %v are listed", got)
	}
}
