package e2e

import (
	"encoding/json"
	"fmt"
	"net/http"
	"net/url"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/proto/fault"
)

// tickLedger has all ticks that the history of a schedule has shown.
type tickLedger struct {
	id       string
	every    time.Duration
	outcomes map[proto.RunOutcome]bool // that are allowed
	runs     map[time.Time]scheduleRun
	newest   time.Time
	paused   bool // ticks that waited then do not count
}

// read adds the ticks in the history of the schedule, and returns the number of all.
func (l *tickLedger) read(t *testing.T, a *api) int {
	t.Helper()
	var s schedule
	a.get("/v1/schedules/"+l.id).into(t, &s)
	l.add(t, &s)
	return len(l.runs)
}

// add adds the ticks in the history of s.
func (l *tickLedger) add(t *testing.T, s *schedule) {
	t.Helper()
	for _, r := range s.Runs {
		if l.paused && r.Outcome == proto.RunSkipped && strings.Contains(r.Reason, "the timing of the schedule was changed") {
			continue
		}
		if before, known := l.runs[r.Tick]; known && before.TraceID != r.TraceID {
			t.Errorf("tick %s started %q, then %q", r.Tick, before.TraceID, r.TraceID)
		}
		if !l.outcomes[r.Outcome] {
			t.Errorf("tick %s: %+v", r.Tick, r)
		}
		l.runs[r.Tick] = r
		if r.Tick.After(l.newest) {
			l.newest = r.Tick
		}
	}
}

// check checks that no tick is left out, and that the executions of the schedule are
// those of its ticks.
func (l *tickLedger) check(t *testing.T, a *api) {
	t.Helper()
	executions := map[string]bool{}
	started := 0
	for tick, r := range l.runs {
		if _, next := l.runs[tick.Add(l.every)]; !next && tick.Before(l.newest) {
			t.Errorf("no tick after %s", tick)
		}
		if r.Outcome == proto.RunStarted {
			started++
			executions[r.TraceID] = true
		}
	}
	if len(executions) != started {
		t.Errorf("%d executions of %d ticks", len(executions), started)
	}
	for id := range l.executions(t, a) {
		if !executions[id] {
			t.Errorf("execution %s belongs to no tick", id)
		}
		delete(executions, id)
	}
	if len(executions) > 0 {
		t.Errorf("not in the list of executions: %v", executions)
	}
}

// checkWebhooks checks that each failed tick has a webhook with an id of its own, and no other has
// one.
func (l *tickLedger) checkWebhooks(t *testing.T, hooks *receiver) {
	t.Helper()
	left := map[time.Time]bool{}
	for tick, r := range l.runs {
		if r.Outcome == proto.RunFailed {
			left[tick] = true
		}
	}
	ids, ticks := map[time.Time]string{}, map[string]time.Time{}
	for len(left) > 0 {
		p := hooks.next(t)
		var body struct {
			Event string
			Tick  time.Time
		}
		if err := json.Unmarshal(p.body, &body); err != nil {
			t.Fatal(err)
		}
		if body.Event != "schedule.failed" {
			continue
		}
		id, told := ids[body.Tick]
		if tick, used := ticks[p.id]; told && id != p.id || used && !tick.Equal(body.Tick) ||
			l.runs[body.Tick].Outcome != proto.RunFailed {
			t.Errorf("webhook %s is about tick %s, which had %q: %+v", p.id, body.Tick, id, l.runs[body.Tick])
		}
		ids[body.Tick], ticks[p.id] = p.id, body.Tick
		delete(left, body.Tick)
	}
}

// keptSchedule creates a schedule none of whose ticks may be lost.
func (sys *system) keptSchedule(t *testing.T, seconds int) *tickLedger {
	t.Helper()
	var s schedule
	sys.do(http.MethodPost, "/v1/schedules", request{
		"name": "kept", "cron": fmt.Sprintf("*/%d * * * * *", seconds), "overlap": "queue", "missed": "all",
		"request": bash("true"),
	}).into(t, &s)
	return &tickLedger{
		id: s.ID, every: time.Duration(seconds) * time.Second, outcomes: map[proto.RunOutcome]bool{proto.RunStarted: true},
		runs: map[time.Time]scheduleRun{},
	}
}

// finish pauses the schedule and checks it once all its executions have succeeded.
func (l *tickLedger) finish(t *testing.T, a *api) {
	t.Helper()
	a.do(http.MethodPatch, "/v1/schedules/"+l.id, request{"paused": true})
	l.paused = true
	eventually(t, "all executions of the schedule have succeeded", func() (bool, any) {
		list := l.executions(t, a)
		for id, status := range list {
			if status != "success" {
				return false, a.record(id)
			}
		}
		return l.read(t, a) == len(list), fmt.Sprintf("%d executions for %d ticks", len(list), len(l.runs))
	})
	l.check(t, a)
}

// executions returns the status of all executions of the schedule. It leaves out those that never
// were in the queue: when a backup or a crash comes between the claim of a tick and its job, the
// tick is executed under another id.
func (l *tickLedger) executions(t *testing.T, a *api) map[string]string {
	t.Helper()
	list := a.listed(t, url.Values{"schedule": {l.id}})
	for id, status := range list {
		if status != "failed" {
			continue
		}
		if code := a.record(id).ErrorCode; code != nil && *code == string(proto.CodeExpiredInQueue) {
			delete(list, id)
		}
	}
	return list
}

// listed returns the status of all executions in a list, once the index has them.
func (a *api) listed(t *testing.T, filters url.Values) map[string]string {
	t.Helper()
	found := map[string]string{}
	for filters.Set("limit", "100"); ; {
		var page struct {
			Executions []struct {
				Status  string
				TraceID string `json:"trace_id"`
			}
			NextCursor *string `json:"next_cursor"`
			Complete   bool
		}
		eventually(t, "a page of executions", func() (bool, any) {
			r, err := a.try(t.Context(), http.MethodGet, "/v1/executions?"+filters.Encode(), nil)
			if err != nil || r.status != http.StatusOK {
				return false, fmt.Sprint(r, err)
			}
			r.into(t, &page)
			return page.Complete, r
		})
		for _, e := range page.Executions {
			if found[e.TraceID] != "" {
				t.Errorf("execution %s is listed twice", e.TraceID)
			}
			found[e.TraceID] = e.Status
		}
		if page.NextCursor == nil {
			return found
		}
		filters.Set("cursor", *page.NextCursor)
	}
}

// testSchedulesKilled kills the process that starts the executions of schedules at points of a
// tick, while Redis is flushed, stopped and started empty. Each tick must have one execution or, if
// that is refused, one webhook. With -short there is one point, else all, with and without a second
// process.
func testSchedulesKilled(t *testing.T, p *programs) {
	hooks, timers := startReceiver(t), startRedis(t, nil)
	sys := &crashSystem{died: map[fault.Point]bool{}}
	sys.system = newSystem(t, p.faulty(t), topology{separate: true}, 2,
		append(hooks.flags, "--redis", "redis://"+timers.addr)...)
	kept := sys.keptSchedule(t, 1)
	failing := &tickLedger{
		id: sys.failingSchedule(hooks.url + "/200"), every: time.Second, runs: map[time.Time]scheduleRun{},
		outcomes: map[proto.RunOutcome]bool{proto.RunStarted: true, proto.RunFailed: true, proto.RunSkipped: true},
	}
	points := append(fault.SchedulePoints(), fault.AfterJobBeforeReply, fault.AfterAcceptBeforeAnswer)
	pairs := []bool{false, true}
	if testing.Short() {
		points, pairs = []fault.Point{fault.AfterTickBeforeState}, pairs[:1]
	}
	disruptions := []func(){
		func() { timers.server.FlushAll() },
		func() { timers.server.Close() },
		func() { timers.start(t) },
	}
	goesOn := func() {
		t.Helper()
		a, b := kept.read(t, sys.api), failing.read(t, sys.api)
		eventually(t, "ticks are handled", func() (bool, any) {
			return kept.read(t, sys.api) > a+1 && failing.read(t, sys.api) > b+1, sys.front.tail()
		})
	}
	var delayed []string
	round := 0
	for _, pair := range pairs {
		for _, at := range points {
			goesOn()
			delayed = append(delayed, sys.submit(bash("echo late").and("delay", 3)))
			sys.front.kill()
			point := at + ":2"
			if pair {
				point = at + ":6" // the second process may be there then
			}
			sys.startDying(t, point, sys.startFront)
			disruptions[round%len(disruptions)]()
			round++
			dying := sys.front
			if pair {
				eventually(t, "the dying process has handled a tick", func() (bool, any) {
					r, err := sys.try(t.Context(), http.MethodGet, "/v1/schedules/"+kept.id, nil)
					if err != nil || r.status != http.StatusOK {
						return dying.ended(), err
					}
					var s schedule
					r.into(t, &s)
					return s.Runs[0].Tick.After(kept.newest), r
				})
				args := append([]string{"--data", filepath.Join(t.TempDir(), "second"), "--roles", frontRole}, sys.args...)
				sys.front, sys.base = p.startServe(t, "second front", sys.env, args...)
			}
			sys.awaitCrash(t, point, dying)
			if !pair {
				sys.startFront(t)
			}
		}
	}
	goesOn() // a change of the schedule would drop what is due
	sys.do(http.MethodPatch, "/v1/schedules/"+failing.id, request{"paused": true})
	for _, id := range delayed {
		sys.ended(id).succeeded(t, "late\n")
	}
	kept.finish(t, sys.api)
	failing.read(t, sys.api)
	failing.check(t, sys.api)
	failing.checkWebhooks(t, hooks)
	t.Logf("%d and %d ticks", len(kept.runs), len(failing.runs))
}
