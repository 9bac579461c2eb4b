package e2e

import (
	"bytes"
	"fmt"
	"io"
	"maps"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"

	"github.com/bullpen-run/bullpen/proto/fault"

	schema "github.com/bullpen-run/bullpen/proto/api"
)

// testAudit carries out acts of every kind at two gateways, and looks for them in the audit log, in
// an export and at an HTTP sink. It alters an export, and kills a gateway in the middle of an act.
func testAudit(t *testing.T, p *programs) {
	const canary = "canary-of-the-audit-log"
	sink := startAuditSink(t)
	sys := newSystem(t, p.faulty(t), topology{separate: true}, 1, "--audit-http", sink.url)
	_, base := sys.programs.startServe(t, "second front", sys.env,
		append([]string{"--data", filepath.Join(t.TempDir(), "second"), "--roles", "gateway"}, sys.args...)...)
	second := &api{t, base, sys.key, sys.http}

	var made struct{ ID string }
	sys.do(http.MethodPost, "/v1/admin/keys",
		request{"name": "victim", "org": "acme", "plan": "pro", "env": request{"A": canary}}).into(t, &made)
	workers := sys.workers(t)
	hook := "/v1/webhook?key=" + made.ID
	for i, act := range []struct {
		method, path string
		body         any
		status       int
	}{
		{http.MethodPut, hook, request{"url": "https://example.com/" + canary, "secret": canary}, 200},
		{http.MethodPatch, hook, request{"max_attempts": 2}, 200},
		{http.MethodPost, strings.Replace(hook, "?", "/rotate?", 1), nil, 200},
		{http.MethodPost, strings.Replace(hook, "?", "/test?", 1), nil, 200},
		{http.MethodDelete, hook, nil, 204},
		{http.MethodPut, "/v1/admin/keys/" + made.ID, request{"name": "renamed", "env": request{"A": canary}}, 200},
		{http.MethodPost, "/v1/admin/keys/" + made.ID + "/rotate", nil, 200},
		{http.MethodDelete, "/v1/admin/keys/" + made.ID, nil, 200},
		{http.MethodPost, "/v1/admin/orgs", request{"name": "audited"}, 201},
		{http.MethodPut, "/v1/admin/orgs/audited", request{"plan": "pro"}, 200},
		{http.MethodPost, "/v1/admin/members", request{"org": "audited", "email": "a@example.com", "role": "viewer"}, 201},
		{http.MethodPut, "/v1/admin/members/mem_0", request{"role": "viewer"}, 404},
		{http.MethodDelete, "/v1/admin/members/mem_0", nil, 404},
		{http.MethodDelete, "/v1/admin/sessions/ses_0", nil, 404},
		{http.MethodDelete, "/v1/admin/orgs/audited", nil, 202},
		{http.MethodPost, "/v1/admin/plans", request{"name": "audited"}, 201},
		{http.MethodPut, "/v1/admin/plans/audited", request{"concurrent": 5}, 200},
		{http.MethodDelete, "/v1/admin/plans/audited", nil, 200},
		{http.MethodPut, "/v1/admin/secrets/TOKEN?org=acme", request{"value": canary}, 200},
		{
			http.MethodPost, "/v1/admin/connections",
			request{"org": "acme", "slug": "audited", "kind": "directory", "directory": "/srv/data"},
			201,
		},
		{http.MethodPost, "/v1/admin/connections/audited/test?org=acme", nil, 409},
		{
			http.MethodPut, "/v1/admin/connections/audited?org=acme",
			request{"kind": "directory", "directory": "/srv/data", "read_only": true},
			200,
		},
		{http.MethodDelete, "/v1/admin/connections/audited?org=acme", nil, 200},
		{
			http.MethodPost, "/v1/admin/connections",
			request{"org": "acme", "slug": "audited-volume", "kind": "volume", "bytes": "1MiB"},
			201,
		},
		{http.MethodPost, "/v1/admin/connections/audited-volume/fork?org=acme", request{"slug": "audited-fork"}, 201},
		{http.MethodDelete, "/v1/admin/secrets/TOKEN?org=acme", nil, 204},
		{http.MethodPost, "/v1/admin/secrets/rotate-key", nil, 200},
		{http.MethodPost, "/v1/admin/profiles", request{"name": "web", "env": request{"A": canary}}, 201},
		{http.MethodPost, "/v1/admin/profiles", request{"name": "web"}, 409},
		{http.MethodPut, "/v1/admin/profiles/web", request{"cpu": 0.5}, 200},
		{http.MethodDelete, "/v1/admin/profiles/web", nil, 200},
		{http.MethodPut, "/v1/admin/images/none?digest=sha256:" + strings.Repeat("0", 64), []byte(canary), 400},
		{http.MethodDelete, "/v1/admin/images/none", nil, 404},
		{http.MethodPost, "/v1/admin/workers/" + workers[0] + "/drain", nil, 200},
		{http.MethodPost, "/v1/admin/workers/" + workers[0] + "/undrain", nil, 200},
		{http.MethodDelete, "/v1/admin/dead-letters/dead_1", nil, 404},
		{http.MethodPost, "/v1/admin/dead-letters/dead_1/requeue", nil, 404},
		{http.MethodDelete, "/v1/admin/caches/none?org=acme", nil, 404},
		{http.MethodPost, "/v1/admin/threads/gc", nil, 200},
		{http.MethodPost, "/v1/admin/threads/rebuild", nil, 200},
		{http.MethodGet, "/v1/admin/backup", nil, 200},
	} {
		a := []*api{sys.api, second}[i%2]
		if r := a.do(act.method, act.path, act.body); r.status != act.status {
			t.Errorf("%s %s: %s", act.method, act.path, r)
		}
	}
	// A user's key is refused, and its attempt recorded.
	user, _ := sys.newKey("acme", "pro")
	if r := sys.with(user).do(http.MethodPost, "/v1/admin/keys",
		request{"name": "mine", "org": "acme", "plan": "pro"}); r.status != http.StatusForbidden {
		t.Errorf("a user creates a key: %s", r)
	}
	var group sync.WaitGroup
	for i := range 8 {
		group.Go(func() {
			for n := range 10 {
				a := []*api{sys.api, second}[i%2]
				if r := a.do(http.MethodPut, fmt.Sprintf("/v1/admin/secrets/S%d_%d?org=acme", i, n),
					request{"value": canary}); r.status != http.StatusOK {
					t.Errorf("store a secret: %s", r)
				}
			}
		})
	}
	group.Wait()
	sys.checkAuditLog(t, canary)
	sys.checkTampering(t)
	sys.killDuringAct(t, second)
	sink.check(t, second)
}

// auditCommand runs bullpen audit with arguments.
func (a *api) auditCommand(t *testing.T, p *programs, args ...string) (code int, output string) {
	t.Helper()
	return p.run(t, []string{"BULLPEN_URL=" + a.base, "BULLPEN_API_KEY=" + a.key}, append([]string{"audit"}, args...)...)
}

// auditLog returns the lines of the audit log, whose chain must be unbroken.
func (a *api) auditLog(t *testing.T) (lines []string, records []*schema.AuditRecord) {
	t.Helper()
	var c schema.AuditChain
	for line := range bytes.Lines(a.get("/v1/admin/audit?all=true", accept, ndjson).body) {
		r, err := c.Add(line)
		if err != nil {
			t.Fatal(err)
		}
		lines, records = append(lines, strings.TrimSpace(string(line))), append(records, r)
	}
	return lines, records
}

// checkAuditLog checks that there is an outcome for each action that a route has, and no secret.
func (sys *system) checkAuditLog(t *testing.T, canary string) {
	t.Helper()
	lines, records := sys.auditLog(t)
	if strings.Contains(strings.Join(lines, ""), canary) {
		t.Error("a secret is in the audit log")
	}
	missing, puts, refused := map[string]bool{}, 0, 0
	for _, route := range schema.Routes() {
		if route.Audit != "" {
			missing[route.Audit] = true
		}
	}
	for _, r := range records {
		if r.Stage != schema.AuditOutcome {
			continue
		}
		delete(missing, r.Action)
		if r.SourceIP != "127.0.0.1" || r.Actor.ID == "" || r.RequestID == "" {
			t.Errorf("record %d: %+v", r.Sequence, r)
		}
		switch {
		case r.Action == "secret.put" && *r.Status == http.StatusOK:
			puts++
		case *r.Status == http.StatusForbidden:
			refused++
		}
	}
	if len(missing) > 0 || puts != 81 || refused != 1 {
		t.Errorf("no records of %v; %d secrets were stored, %d attempts refused", slices.Sorted(maps.Keys(missing)),
			puts, refused)
	}
	if code, output := sys.auditCommand(t, sys.programs, "verify"); code != 0 ||
		!strings.Contains(output, fmt.Sprintf("sequence  1 to %d\n", len(lines))) || strings.Contains(output, "unfinished") {
		t.Errorf("verify: %d\n%s", code, output)
	}
}

// checkTampering alters an export, and has it verified.
func (sys *system) checkTampering(t *testing.T) {
	t.Helper()
	file := filepath.Join(t.TempDir(), "audit.jsonl")
	if code, output := sys.auditCommand(t, sys.programs, "export", "-o", file); code != 0 {
		t.Fatalf("export: %d\n%s", code, output)
	}
	if code, output := sys.auditCommand(t, sys.programs, "verify", file); code != 0 {
		t.Errorf("verify an export: %d\n%s", code, output)
	}
	content, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	lines := bytes.SplitAfter(content, []byte("\n"))
	lines[6] = bytes.Replace(lines[6], []byte("127.0.0.1"), []byte("127.0.0.2"), 1)
	if err := os.WriteFile(file, bytes.Join(lines, nil), 0o600); err != nil {
		t.Fatal(err)
	}
	if code, output := sys.auditCommand(t, sys.programs, "verify", file); code != 1 ||
		!strings.Contains(output, "record 7 was altered") {
		t.Errorf("verify an altered export: %d\n%s", code, output)
	}
}

// killDuringAct kills the first gateway when it has made a change and not recorded the outcome. The
// act can be seen at the second one.
func (sys *system) killDuringAct(t *testing.T, second *api) {
	t.Helper()
	sys.front.kill()
	clean := sys.env
	sys.env = append(slices.Clone(clean), "BULLPEN_CRASH_AT="+string(fault.AfterChangeBeforeOutcome))
	sys.startFront(t)
	sys.env = clean
	if r, err := sys.try(t.Context(), http.MethodPut, "/v1/admin/secrets/HIDDEN?org=acme",
		request{"value": "a-hidden-value"}); err == nil {
		t.Errorf("the gateway answers %s", r)
	}
	sys.front.exitCode(t)
	if status, ok := sys.front.cmd.ProcessState.Sys().(syscall.WaitStatus); !ok || status.Signal() != syscall.SIGKILL {
		t.Fatalf("the gateway ended with %s:\n%s", sys.front.cmd.ProcessState, sys.front.tail())
	}
	if r := second.get("/v1/admin/secrets/HIDDEN?org=acme"); r.status != http.StatusOK {
		t.Errorf("the change was not made: %s", r)
	}
	_, records := second.auditLog(t)
	last := records[len(records)-1]
	if last.Stage != schema.AuditIntent || last.Action != "secret.put" || last.Object.Name != "HIDDEN" {
		t.Errorf("the last record is %+v", last)
	}
	if code, output := second.auditCommand(t, sys.programs, "verify"); code != 0 ||
		!strings.Contains(output, fmt.Sprintf("unfinished  %d\n", last.Sequence)) {
		t.Errorf("verify: %d\n%s", code, output)
	}
	if code, output := second.auditCommand(t, sys.programs, "list"); code != 0 || !strings.Contains(output, "unknown") {
		t.Errorf("list: %d\n%s", code, output)
	}
}

// auditSink is an HTTP endpoint that collects records.
type auditSink struct {
	url   string
	mu    sync.Mutex
	lines []string
}

func startAuditSink(t *testing.T) *auditSink {
	sink := &auditSink{}
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		body, err := io.ReadAll(r.Body)
		if err != nil {
			return // its sender was killed
		}
		sink.mu.Lock()
		defer sink.mu.Unlock()
		for line := range strings.Lines(string(body)) {
			sink.lines = append(sink.lines, strings.TrimSpace(line))
		}
		w.WriteHeader(http.StatusNoContent)
	}))
	t.Cleanup(server.Close)
	sink.url = server.URL
	return sink
}

// check waits until the sink has every record, each at least once and in order.
func (s *auditSink) check(t *testing.T, a *api) {
	t.Helper()
	want, _ := a.auditLog(t)
	eventually(t, "all records are at the sink", func() (bool, any) {
		s.mu.Lock()
		defer s.mu.Unlock()
		next := 0
		for _, line := range s.lines {
			if next < len(want) && line == want[next] {
				next++
			}
		}
		return next == len(want), fmt.Sprintf("%d of %d records", next, len(want))
	})
}
