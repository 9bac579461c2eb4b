package gateway

import (
	"context"
	"reflect"
	"testing"
	"time"

	"github.com/bullpen-run/bullpen/proto"
)

func TestOverview(t *testing.T) {
	bubble(t, func(t *testing.T, h *harness) {
		user := h.as(h.stub.addKey("team", "pro", asUser))
		began := time.Now()
		time.Sleep(90 * time.Second) // the clock of the test jumps
		now := time.Now()
		started, result := now.Add(-2*time.Second), proto.Exited(0)
		result.DurationMS = 1500
		for _, org := range []string{"team", "acme"} {
			m := proto.Meta{Org: org, CreatedAt: started.Add(-100 * time.Millisecond)}
			h.counters.Queued(&m)
			h.counters.Ended(&proto.Record{
				Meta: m, Status: proto.StatusSuccess, StartedAt: &started, CompletedAt: &now, Result: &result,
			})
		}
		h.sandboxes.byID["sbx"] = proto.LiveSandbox{ID: "sbx", Org: "team", State: proto.SandboxRunning}
		counts := proto.QueueCounts{Queued: proto.ClassCounts{Background: 40}, Running: proto.ClassCounts{Interactive: 1}}
		h.queue.view = proto.QueueView{Org: counts}
		h.queue.orgs = []proto.OrgQueue{{Org: "team", QueueCounts: counts}, {Org: "acme", QueueCounts: counts}}
		h.stub.stats = func(context.Context) (proto.QueueStats, error) {
			return proto.QueueStats{Workers: 2, Slots: 16, FreeSlots: 14}, nil
		}
		class := func(interactive, background float64) map[string]any {
			return map[string]any{"interactive": interactive, "background": background}
		}

		got := user.do("GET", "/v1/overview", "").want(200, "").json()
		minutes := got["minutes"].([]any)
		last := minutes[len(minutes)-1].(map[string]any)
		if len(minutes) != 60 || last["at"] != now.UTC().Truncate(time.Minute).Format(proto.TimeLayout) ||
			got["from"] != began.UTC().Truncate(time.Minute).Add(time.Minute).Format(proto.TimeLayout) {
			t.Errorf("%d minutes, the last one at %v, complete since %v", len(minutes), last["at"], got["from"])
		}
		total := got["total"].(map[string]any)
		delete(last, "at")
		if !reflect.DeepEqual(last, total) || total["arrivals"] != 1.0 ||
			!reflect.DeepEqual(total["ends"], map[string]any{"success": 1.0}) {
			t.Errorf("total %v, last minute %v", total, last)
		}
		for name, want := range map[string]float64{"wait": 100, "duration": 1500} {
			q := total[name].(map[string]any)
			if p50 := q["p50_ms"].(float64); p50 < 0.95*want || p50 > 1.05*want || q["p99_ms"] != p50 {
				t.Errorf("%s is %v", name, q)
			}
		}
		first := minutes[0].(map[string]any)
		if !reflect.DeepEqual(first["wait"], map[string]any{"p50_ms": nil, "p99_ms": nil}) {
			t.Errorf("the first minute is %v", first)
		}
		if got["org"] != "team" || got["server"] != nil ||
			!reflect.DeepEqual(got["queue"], map[string]any{"queued": class(0, 40), "running": class(1, 0)}) ||
			!reflect.DeepEqual(got["sandboxes"], map[string]any{"running": 1.0}) || h.queue.last.Org != "team" {
			t.Errorf("now %v", got)
		}

		all := h.do("GET", "/v1/overview", "").want(200, "").json()
		server := map[string]any{
			"workers": map[string]any{"count": 2.0, "slots": 16.0, "free_slots": 14.0}, "problems": []any{},
		}
		if all["org"] != nil || all["total"].(map[string]any)["arrivals"] != 2.0 ||
			!reflect.DeepEqual(all["server"], server) ||
			!reflect.DeepEqual(all["queue"], map[string]any{"queued": class(0, 80), "running": class(2, 0)}) {
			t.Errorf("all organisations: %v", all)
		}
		if one := h.do("GET", "/v1/overview?org=acme", "").want(200, "").json(); one["org"] != "acme" ||
			one["total"].(map[string]any)["arrivals"] != 1.0 || len(one["sandboxes"].(map[string]any)) != 0 {
			t.Errorf("another organisation: %v", one)
		}
		user.do("GET", "/v1/overview?org=acme", "").want(404, "not_found")

		// Without a dispatcher, the rest is still there.
		h.stub.stats = func(context.Context) (proto.QueueStats, error) {
			return proto.QueueStats{}, context.DeadlineExceeded
		}
		if got := h.do("GET", "/v1/overview", "").want(200, "").json(); got["queue"] != nil ||
			got["server"].(map[string]any)["workers"] != nil {
			t.Errorf("without a dispatcher: %v", got)
		}
	})
}
