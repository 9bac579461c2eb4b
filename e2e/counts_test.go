package e2e

import (
	"encoding/json"
	"fmt"
	"maps"
	"net/http"
	"strings"
	"testing"
)

// testCounts ends executions in every way: by their program, by a client in the queue and while
// they run, by their deadline in the queue, and with a worker that is killed. Each must have one
// log line of one process, and count once in one process, under its organisation.
func testCounts(t *testing.T, p *programs) {
	sys := newSystem(t, p, topology{separate: true}, 1, "--metrics-org", "--queue-expiry", "3s", "--retention", "1h")
	want := map[string]string{} // by trace id: the outcome, as labels
	label := func(language, status, code, org string) string {
		return fmt.Sprintf(`bullpen_executions_total{error_code=%q,language=%q,org=%q,status=%q}`, code, language,
			org, status)
	}
	secret, _ := sys.newKey("beta", "enterprise")
	const org = "default"
	first := sys.submit(bash("exit 3"))
	want[first] = label("bash", "failed", "none", org)
	other := sys.with(secret).submit(python("print(1)"))
	want[other] = label("python", "success", "none", "beta")
	sys.ended(first)
	sys.with(secret).ended(other)

	h := newHold()
	running := sys.submit(bash(h.code()))
	h.reached(t, 1)
	cancelled, expired := sys.submit(bash("true")), sys.submit(bash("true"))
	want[cancelled] = label("bash", "cancelled", "cancelled", org)
	want[expired] = label("bash", "failed", "expired_in_queue", org)
	sys.do(http.MethodPost, "/v1/executions/"+cancelled+"/cancel", nil)
	sys.ended(cancelled)
	sys.ended(expired)
	sys.do(http.MethodPost, "/v1/executions/"+running+"/cancel", nil)
	want[running] = label("bash", "cancelled", "cancelled", org)
	sys.ended(running)

	metrics := func(base string) map[string]int {
		counts := map[string]int{}
		for line := range strings.Lines(string((&api{t, base, "", sys.http}).get("/metrics").body)) {
			name, value, _ := strings.Cut(strings.TrimSpace(line), "} ")
			var n int
			if _, err := fmt.Sscan(value, &n); err == nil && strings.HasPrefix(name, "bullpen_executions_total{") {
				counts[name+"}"] += n
			}
		}
		return counts
	}
	lost := newHold()
	doomed := sys.submit(bash(lost.code()))
	lost.reached(t, 1)
	counts := metrics(sys.health) // the worker's die with it
	sys.worker.kill()
	want[doomed] = label("bash", "failed", "worker_lost", org)
	sys.ended(doomed)

	for name, n := range metrics(sys.base) {
		counts[name] += n
	}
	wanted := map[string]int{}
	for _, name := range want {
		wanted[name]++
	}
	if !maps.Equal(counts, wanted) {
		t.Errorf("counted %v, want %v", counts, wanted)
	}
	lines := map[string]int{}
	for line := range strings.Lines(sys.worker.text(t) + sys.front.text(t)) {
		var fields struct {
			Msg   string
			Trace string `json:"trace_id"`
		}
		if json.Unmarshal([]byte(line), &fields) == nil && fields.Msg == "execution ended" {
			lines[fields.Trace]++
		}
	}
	for id := range want {
		if lines[id] != 1 {
			t.Errorf("%s (%s) has %d log lines", id, want[id], lines[id])
		}
	}
}
