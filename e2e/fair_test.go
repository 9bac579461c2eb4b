package e2e

import (
	"fmt"
	"math"
	"net/http"
	"path/filepath"
	"slices"
	"sync"
	"syscall"
	"testing"
	"time"
)

// limitedKey creates a key with its own concurrency limit.
func (a *api) limitedKey(org, plan string, concurrent int) *api {
	a.t.Helper()
	r := a.do(http.MethodPost, "/v1/admin/keys",
		request{"name": "limited", "org": org, "plan": plan, "concurrent": concurrent})
	var key struct {
		Key        string
		Concurrent int
	}
	if r.into(a.t, &key); r.status != http.StatusCreated || key.Concurrent != concurrent {
		a.t.Fatalf("make a key: %s", r)
	}
	return a.with(key.Key)
}

// checkConcurrency fails the test if more than limit programs hold at once.
func (h hold) checkConcurrency(t *testing.T, limit int) {
	t.Helper()
	over := make(chan struct{})
	var watch sync.WaitGroup
	watch.Go(func() {
		tick := time.NewTicker(100 * time.Millisecond) // a surplus program would hold like the others
		defer tick.Stop()
		for {
			select {
			case <-over:
				return
			case <-tick.C:
			}
			if pids := h.pids(t); len(pids) > limit {
				t.Errorf("%d programs run at once, and the limit is %d", len(pids), limit)
				return
			}
		}
	})
	t.Cleanup(func() { close(over); watch.Wait() })
}

// testLimitsKilled fills the concurrency limits of a key and an organisation and kills one process
// after another. After each kill, exactly as many executions can run again, and never more.
func testLimitsKilled(t *testing.T, p *programs, in topology) {
	const ofKey, ofFree, slots = 2, 5, 8
	sys := newSystem(t, p, in, slots, "--queue-wait", "1m", "--interactive-slots", "0")
	few := sys.limitedKey("few", "pro", ofKey)
	secret, _ := sys.newKey("small", "free")
	small := sys.with(secret)
	byKey, byOrg := newHold(), newHold()
	byKey.checkConcurrency(t, ofKey)
	byOrg.checkConcurrency(t, ofFree)
	for range 8 * ofKey {
		few.submit(bash(byKey.code()))
	}
	// full runs as many executions as the organisation may.
	full := func() {
		few.base, small.base = sys.base, sys.base
		eventually(t, "as many run as may", func() (bool, any) {
			if len(byOrg.pids(t)) < ofFree {
				small.start(bash(byOrg.code()).and("timeout", 60))
			}
			r := small.execute(bash("true"))
			return r.status == http.StatusTooManyRequests && len(byOrg.pids(t)) == ofFree, r
		})
		r := small.execute(bash("true"))
		if got := r.rejection(t, http.StatusTooManyRequests, "rate_limited"); got != "concurrent execution limit "+
			"reached (5/5)." {
			t.Errorf("refused with %q", got)
		}
		byKey.reached(t, ofKey)
		r = few.execute(bash("true"))
		if got := r.rejection(t, http.StatusTooManyRequests, "rate_limited"); got != "concurrent execution limit of this "+
			"API key reached (2/2)." {
			t.Errorf("refused with %q", got)
		}
		r.retryAfter(t)
	}
	full()
	kills := []func(){func() { sys.front.kill(); sys.startFront(t); sys.ready(t) }}
	if in.separate {
		kills = append(kills, func() { sys.worker.kill(); sys.startWorker(t); sys.ready(t) })
	}
	for _, kill := range kills {
		kill()
		full()
		// The survivors end and free their slots.
		byOrg.release(t)
		byKey.release(t)
		full()
	}
	sys.worker.kill() // a clean stop would wait for the held programs
	sys.front.kill()
}

// testSleepers has one organisation make more sleeping calls than there are slots, first inline,
// then async. Every call of another organisation, which has made one before, must be answered, also
// after a change of dispatchers. So must an inline call of the key with the async ones.
func testSleepers(t *testing.T, p *programs, in topology) {
	const slots, reserved, interactive, sleepers = 8, 1, 2, 30
	sys, h := newSystem(t, p, in, slots, "--queue-wait", "3s"), newHold()
	h.checkConcurrency(t, slots-reserved)
	loud, _ := sys.newKey("loud", "pro")
	key, _ := sys.newKey("quiet", "pro")
	quiet := sys.with(key)
	call := func() {
		t.Helper()
		if r := quiet.inline(bash("echo answered"), "Prefer", "wait=60"); r.Stdout != "answered\n" {
			t.Fatalf("got %+v", r)
		}
	}
	call()
	var calls []*pending
	for range sleepers {
		calls = append(calls, sys.with(loud).start(bash(h.code()).and("timeout", 3600)))
	}
	h.reached(t, slots-reserved)
	for range 10 {
		call()
	}
	answered := func(status int) (n int) {
		for _, p := range calls {
			select {
			case <-p.done:
				r := p.answer(t)
				if r.status == status {
					n++
				}
				if r.status == http.StatusServiceUnavailable && r.header.Get("Retry-After") != "30" {
					t.Errorf("Retry-After is %q on %s", r.header.Get("Retry-After"), r)
				}
			default:
			}
		}
		return n
	}
	eventually(t, "the calls that got no slot are rejected", func() (bool, any) {
		n := answered(http.StatusServiceUnavailable)
		return n == sleepers-slots+reserved, n
	})
	// The metrics tell the waits of those, and of the ones that run.
	const wait = `bullpen_queue_wait_seconds_count{class="interactive",started="%t"}`
	if n := sys.metric(sys.base, fmt.Sprintf(wait, false))(); n != sleepers-slots+reserved {
		t.Errorf("%g waits without a start are counted", n)
	}
	if n := sys.metric(sys.health, fmt.Sprintf(wait, true))(); n < slots-reserved {
		t.Errorf("%g waits with a start are counted", n)
	}
	call()
	h.reached(t, slots-reserved)
	h.release(t)
	eventually(t, "the others are answered", func() (bool, any) {
		n := answered(http.StatusOK)
		return n == slots-reserved, n
	})

	for range sleepers {
		sys.with(loud).submit(bash(h.code()).and("timeout", 3600))
	}
	h.reached(t, slots-interactive)
	if r := sys.with(loud).inline(bash("echo answered")); r.Stdout != "answered\n" {
		t.Errorf("an inline call of the key with the async ones got %+v", r)
	}
	eventually(t, "the metrics tell that the others wait", func() (bool, any) {
		n, oldest := sys.metric(sys.base, "bullpen_queue_depth")(), sys.metric(sys.base, "bullpen_queue_oldest_age_seconds")()
		return n == sleepers-slots+interactive && oldest > 0, fmt.Sprint(n, " ", oldest)
	})
	sys.front.kill()
	sys.startFront(t)
	sys.ready(t)
	quiet.base = sys.base
	for range 3 {
		call()
	}
	sys.worker.kill() // a clean stop would wait for the held programs
	sys.front.kill()
}

// testDispatcherKilled kills the leading dispatcher while jobs of two organisations are queued.
// Another one must take over, and no job may be lost, run twice or be served out of order.
func testDispatcherKilled(t *testing.T, p *programs, in topology) {
	testTakeover(t, p, in, syscall.SIGKILL)
}

// testDispatcherFrozen suspends the leading dispatcher instead and resumes it later.
func testDispatcherFrozen(t *testing.T, p *programs) {
	testTakeover(t, p, topology{separate: true}, syscall.SIGSTOP)
}

func testTakeover(t *testing.T, p *programs, in topology, by syscall.Signal) {
	sys, h := newSystem(t, p, in, 1), newHold()
	args := append([]string{"--data", filepath.Join(t.TempDir(), "second"), "--roles", frontRole}, sys.args...)
	_, base := p.startServe(t, "second front", sys.env, args...)
	second := &api{t, base, sys.key, sys.http}
	first := second.submit(bash(h.code()))
	h.reached(t, 1)
	weights := map[string]int{"pro": 4, "enterprise": 16}
	const rounds = 2
	queued, tenants := map[string][]string{}, map[string]*api{}
	for plan, weight := range weights {
		secret, _ := sys.newKey(plan, plan)
		tenants[plan] = second.with(secret)
		eventually(t, "the second gateway knows the key", func() (bool, any) {
			r := tenants[plan].get(execution("trc_x"))
			return r.status == http.StatusNotFound, r
		})
		for i := range (rounds + 1) * weight {
			queued[plan] = append(queued[plan], tenants[plan].submit(bash(fmt.Sprint("echo ", i))))
		}
	}
	sys.front.signal(by)
	if by == syscall.SIGKILL {
		<-sys.front.exited
	}
	gone := time.Now()
	h.release(t) // the slot is free, but no dispatcher can assign it
	eventually(t, "the next job is handed out", func() (bool, any) {
		for plan, ids := range queued {
			if rec := tenants[plan].record(ids[0]); rec.Status != "queued" {
				return true, rec
			}
		}
		return false, "all are queued"
	})
	t.Logf("after %s of its dispatcher, the next job was handed out within %s", by,
		time.Since(gone).Round(10*time.Millisecond))
	second.ended(first).succeeded(t, "held\nwoken\n")
	if by == syscall.SIGSTOP {
		sys.front.signal(syscall.SIGCONT)
	}
	type run struct {
		plan string
		n    int
		at   time.Time
	}
	var runs []run
	for plan, ids := range queued {
		for i, id := range ids {
			rec := tenants[plan].ended(id)
			rec.succeeded(t, fmt.Sprintln(i))
			if rec.Attempt != 1 {
				t.Errorf("%s was run %d times", id, rec.Attempt)
			}
			runs = append(runs, run{plan, i, *rec.CompletedAt})
		}
	}
	slices.SortFunc(runs, func(a, b run) int { return a.at.Compare(b.at) })
	served := map[string]int{}
	for i, r := range runs {
		if r.n != served[r.plan] {
			t.Errorf("job %d of %s ended before its job %d", r.n, r.plan, served[r.plan])
		}
		served[r.plan]++
		if n := i + 1; n <= rounds*20 { // both organisations have jobs queued until then
			if share := float64(n*weights[r.plan]) / 20; math.Abs(float64(served[r.plan])-share) > float64(weights[r.plan]+1) {
				t.Errorf("of the first %d, %d were of %s", n, served[r.plan], r.plan)
			}
		}
	}
	if by == syscall.SIGSTOP { // once resumed, it must work like any other gateway
		eventually(t, "the one that hung is back", func() (bool, any) {
			r, err := sys.try(t.Context(), http.MethodPost, executePath, bash("echo back"))
			return err == nil && r.status == http.StatusOK, fmt.Sprint(r, err)
		})
	}
}
