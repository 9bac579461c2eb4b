package e2e

import (
	"bytes"
	"encoding/json"
	"fmt"
	"net/http"
	"path/filepath"
	"strings"
	"testing"
)

// quotaUse returns what the organisation of an API key has used of its quota of CPU time.
func (a *api) quotaUse(t *testing.T) float64 {
	t.Helper()
	var report struct{ Quotas []struct{ Used float64 } }
	a.get("/v1/usage").into(t, &report)
	if len(report.Quotas) != 1 {
		t.Fatalf("%+v", report)
	}
	return report.Quotas[0].Used
}

// testQuotas uses up a monthly quota at two gateways. What was accepted before goes on, and counts.
func testQuotas(t *testing.T, p *programs) {
	sys := newSystem(t, p, topology{separate: true}, 4)
	args := append([]string{"--data", filepath.Join(t.TempDir(), "second"), "--roles", "gateway"}, sys.args...)
	process, base := p.startServe(t, "second front", sys.env, args...)
	if r := sys.do(http.MethodPost, "/v1/admin/plans",
		request{
			"name":    "metered",
			"monthly": request{"cpu_seconds": request{"soft": 1, "hard": 3}},
		}); r.status != http.StatusCreated {
		t.Fatal(r)
	}
	secret, _ := sys.newKey("metered", "metered")
	gateways := []*api{sys.with(secret), {t, base, secret, sys.http}}
	burn := func(seconds int) request {
		return python(fmt.Sprintf("import os\nwhile sum(os.times()[:2]) < %d: pass", seconds))
	}
	for _, a := range gateways {
		eventually(t, "the key is known", func() (bool, any) {
			r := a.get("/v1/threads")
			return r.status == http.StatusOK, r
		})
	}

	held := newHold()
	running := gateways[0].submit(bash(held.code() + "i=0; while ((i < 300000)); do ((i += 1)); done"))
	held.reached(t, 1)
	gateways[1].inline(burn(2))
	for _, a := range gateways {
		eventually(t, "answers warn", func() (bool, any) {
			r := a.get("/v1/threads")
			return strings.HasPrefix(r.header.Get("X-Quota-Warning"), "cpu_seconds;used="), r
		})
		if r := a.execute(bash("exit")); r.status != http.StatusOK {
			t.Errorf("above the soft limit: %s", r)
		}
	}
	gateways[0].inline(burn(2))
	for _, a := range gateways {
		eventually(t, "executions are refused", func() (bool, any) {
			r := a.execute(bash("exit"))
			return r.status == http.StatusTooManyRequests, r
		})
		r := a.execute(bash("exit"), "Prefer", "respond-async")
		if r.status != http.StatusTooManyRequests || !bytes.Contains(r.body, []byte(`"reason":"plan_limit"`)) ||
			r.header.Get("X-Should-Retry") != "false" || r.header.Get("Retry-After") != "" {
			t.Errorf("above the hard limit: %s", r)
		}
	}

	before := gateways[0].quotaUse(t)
	held.release(t)
	if rec := gateways[1].ended(running); rec.Status != "success" {
		t.Errorf("what ran when the limit was reached: %s", rec)
	}
	eventually(t, "the limit is overshot by what ran", func() (bool, any) {
		used := gateways[1].quotaUse(t)
		return used > before && used > 3, fmt.Sprint(before, used)
	})
	logged := map[string]int{}
	for _, log := range []string{sys.front.text(t), process.text(t)} {
		for line := range strings.Lines(log) {
			var l struct{ Msg, Org, Quota, Level string }
			if json.Unmarshal([]byte(line), &l) == nil && l.Msg == "monthly quota reached" {
				logged[l.Org+" "+l.Quota+" "+l.Level]++
			}
		}
	}
	if got := fmt.Sprint(logged); got != "map[metered cpu_seconds hard:1 metered cpu_seconds soft:1]" {
		t.Errorf("logged by both: %s", got)
	}

	if r := sys.do(http.MethodPut, "/v1/admin/plans/metered",
		request{"monthly": request{"cpu_seconds": request{"hard": 1000}}}); r.status != http.StatusOK {
		t.Fatal(r)
	}
	for _, a := range gateways {
		eventually(t, "executions are accepted under a larger quota", func() (bool, any) {
			r := a.execute(bash("exit"))
			return r.status == http.StatusOK, r
		})
	}
}
