package e2e

import (
	"fmt"
	"net/http"
	"net/url"
	"strings"
	"testing"
	"time"

	"github.com/bullpen-run/bullpen/proto"
)

// usageRow is a row of a report of usage.
type usageRow struct {
	Key, Language string
	Executions    struct{ Total, Success, Failed, Timeout, OOM, Cancelled int }
	CPUSeconds    float64 `json:"cpu_seconds"`
	MemorySeconds float64 `json:"memory_mib_seconds"`
	// SandboxSeconds is how long live sandboxes ran.
	SandboxSeconds float64 `json:"sandbox_seconds"`
	OutputBytes    int     `json:"output_bytes"`
	StoredDays     int64   `json:"stored_byte_days"`
	Attempts       int     `json:"webhook_attempts"`
}

// usage returns the rows of a report that has everything.
func (a *api) usage(t *testing.T, path string, query url.Values) []usageRow {
	t.Helper()
	var report struct {
		Complete bool
		Rows     []usageRow
	}
	eventually(t, "everything is counted", func() (bool, any) {
		r, err := a.try(t.Context(), http.MethodGet, path+"?"+query.Encode(), nil)
		if err != nil || r.status != http.StatusOK {
			return false, fmt.Sprint(r, err)
		}
		r.into(t, &report)
		return report.Complete, r
	})
	return report.Rows
}

// testUsage kills the process that counts usage, dispatches and sends webhooks while executions run
// and end. Each must be counted once, with what its worker has measured.
func testUsage(t *testing.T, p *programs) {
	hooks := startReceiver(t)
	sys := newSystem(t, p, topology{separate: true}, 4, hooks.flags...)
	days := url.Values{
		"from": {time.Now().UTC().Format(proto.UsageDayLayout)},
		"to":   {time.Now().UTC().AddDate(0, 0, 1).Format(proto.UsageDayLayout)},
	}
	firstSecret, firstID := sys.newKey("tenant", "pro")
	secondSecret, secondID := sys.newKey("tenant", "pro")
	first, second := sys.with(firstSecret), sys.with(secondSecret)
	const rounds = 3
	for round := range rounds {
		held := newHold()
		ids := []string{
			first.submit(python("sum(range(3_000_000)); print('hello')")), first.submit(bash("exit 3")),
			first.submit(bash("echo hook").and("webhook_url", hooks.url+"/200")),
			second.submit(bash("head -c 5000 /dev/zero > file").of("home")),
		}
		cancelled := second.submit(bash(held.code()))
		held.reached(t, 1)
		second.do(http.MethodPost, execution(cancelled, "cancel"), nil)
		sys.front.kill()
		sys.startFront(t)
		sys.ready(t)
		first.base, second.base = sys.base, sys.base
		for i, id := range append(ids, cancelled) {
			if rec := first.ended(id); i != 1 && i < len(ids) && rec.Status != "success" {
				t.Errorf("round %d: %s", round, rec)
			}
		}
		eventually(t, "the webhook is delivered", func() (bool, any) {
			r := first.get(execution(ids[2], "webhook"))
			return strings.Contains(string(r.body), `"delivered"`), r
		})
	}

	days.Set("group_by", "key,language")
	rows := map[string]usageRow{}
	var cpu, memory float64
	for _, row := range first.usage(t, "/v1/usage", days) {
		rows[row.Key+" "+row.Language] = row
		cpu, memory = cpu+row.CPUSeconds, memory+row.MemorySeconds
	}
	for name, want := range map[string]func(r usageRow) bool{
		firstID + " python": func(r usageRow) bool {
			return r.Executions.Total == rounds && r.Executions.Success == rounds && r.OutputBytes == rounds*len("hello\n") &&
				r.CPUSeconds > 0 && r.MemorySeconds > 0
		},
		firstID + " bash": func(r usageRow) bool {
			return r.Executions.Total == 2*rounds && r.Executions.Success == rounds && r.Executions.Failed == rounds &&
				r.OutputBytes == rounds*len("hook\n")
		},
		firstID + " ": func(r usageRow) bool { return r.Attempts == rounds && r.Executions.Total == 0 },
		secondID + " bash": func(r usageRow) bool {
			return r.Executions.Total == 2*rounds && r.Executions.Success == rounds && r.Executions.Cancelled == rounds &&
				r.OutputBytes == rounds*len("held\n")
		},
		" ": func(r usageRow) bool { return r.StoredDays >= 5000 },
	} {
		if !want(rows[name]) {
			t.Errorf("%q: %+v", name, rows[name])
		}
		delete(rows, name)
	}
	if len(rows) > 0 {
		t.Errorf("also: %+v", rows)
	}
	var logged, measured int64
	for _, line := range sys.worker.logged(t, "execution ended") {
		if line.Org == "tenant" {
			logged += line.CPUMS
			measured += (line.MemoryPeak >> 10) * line.DurationMS >> 10
		}
	}
	if near := func(seconds float64, ms int64) bool { return int64(seconds*1000+0.5) == ms }; !near(cpu, logged) ||
		!near(memory, measured) {
		t.Errorf("%f CPU seconds and %f MiB seconds are counted, the worker has measured %d and %d ms", cpu, memory,
			logged, measured)
	}
	days.Del("group_by")
	if all := sys.usage(t, "/v1/admin/usage",
		url.Values{"from": days["from"], "to": days["to"], "org": {"tenant"}, "group_by": {""}}); len(all) != 1 ||
		all[0].Executions.Total != 5*rounds || all[0].Attempts != rounds {
		t.Errorf("%+v", all)
	}
}
