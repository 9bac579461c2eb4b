package gateway

import (
	"bytes"
	"context"
	"encoding/base64"
	"encoding/json"
	"errors"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/bullpen-run/bullpen/gateway/web"
	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/proto/api"
)

// auditStub is an audit log in memory.
type auditStub struct {
	mu      sync.Mutex
	records []api.AuditRecord
	lines   [][]byte
	fail    func(r *api.AuditRecord) error
}

func (l *auditStub) Append(_ context.Context, r api.AuditRecord) (api.AuditRecord, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.fail != nil {
		if err := l.fail(&r); err != nil {
			return r, err
		}
	}
	var previous *api.AuditRecord
	if n := len(l.records); n > 0 {
		previous = &l.records[n-1]
	}
	line, err := r.Seal(previous)
	if err != nil {
		return r, err
	}
	l.records, l.lines = append(l.records, r), append(l.lines, line)
	return r, nil
}

func (l *auditStub) List(
	_ context.Context, f *api.AuditFilter, before int64, limit int,
) (page []api.AuditRecord, next int64, err error) {
	for _, r := range slices.Backward(l.all()) {
		if before != 0 && r.Sequence >= before || !f.Matches(&r) {
			continue
		}
		if len(page) == limit {
			return page, page[limit-1].Sequence, nil
		}
		page = append(page, r)
	}
	return page, 0, nil
}

func (l *auditStub) Export(_ context.Context, after int64, each func(*api.AuditRecord, []byte) error) error {
	for i, r := range l.all() {
		if r.Sequence <= after {
			continue
		}
		if err := each(&r, l.lines[i]); err != nil {
			return err
		}
	}
	return nil
}

func (l *auditStub) all() []api.AuditRecord {
	l.mu.Lock()
	defer l.mu.Unlock()
	return slices.Clone(l.records)
}

// outcome returns the last record, which must be the outcome of an action.
func (h *harness) outcome(action string) api.AuditRecord {
	h.t.Helper()
	all := h.audit.all()
	if len(all) == 0 || all[len(all)-1].Stage != api.AuditOutcome || all[len(all)-1].Action != action {
		h.t.Fatalf("the last record is not an outcome of %s: %+v", action, all)
	}
	return all[len(all)-1]
}

func TestActsAreRecorded(t *testing.T) {
	h := newHarness(t)
	created := h.do("POST", "/v1/admin/keys", `{"name":"ci","org":"other","plan":"pro","env":{"A":"value"}}`, "User-Agent",
		"agent/1", "X-Request-Id", "req-7").want(201, "").json()
	id := created["id"].(string)
	all := h.audit.all()
	if len(all) != 4 || all[0].Stage != api.AuditIntent || all[0].Status != nil || all[0].Action != "key.create" {
		t.Fatalf("the records are %+v", all)
	}
	if intent, org := all[1], all[2]; intent.Action != "org.create" || intent.Stage != api.AuditIntent ||
		intent.Object.Name != "other" || *intent.Object.Org != "other" ||
		org.Action != "org.create" || *org.Intent != intent.Sequence || *org.Status != 201 || *org.Object.Org != "other" ||
		org.RequestID != "req-7" || org.Actor.ID != "key_1" ||
		!strings.Contains(string(org.After), `"name":"other","title":"","plan":"pro"`) {
		t.Errorf("the organisation of the key: %+v, %+v", intent, org)
	}
	r := h.outcome("key.create")
	if *r.Intent != 1 || *r.Status != 201 || r.Error != nil ||
		r.Actor != (api.AuditActor{Type: "key", ID: "key_1", Name: "test", Org: "acme"}) ||
		r.Object.Kind != "key" || r.Object.Name != id || *r.Object.Org != "other" || r.UserAgent != "agent/1" ||
		r.RequestID != "req-7" || r.Before != nil {
		t.Errorf("%+v", r)
	}
	if after := string(r.After); !strings.Contains(after, `"env":{"A":"[redacted]"}`) ||
		!strings.Contains(after, `"name":"ci"`) {
		t.Errorf("after is %s", after)
	}

	h.do("DELETE", "/v1/admin/keys/"+id, "").want(200, "")
	r = h.outcome("key.revoke")
	if !strings.Contains(string(r.Before), `"revoked_at":null`) || strings.Contains(string(r.After), `"revoked_at":null`) {
		t.Errorf("before %s, after %s", r.Before, r.After)
	}
	if all := h.audit.all(); all[4].Object.Name != id { // of the intent, from the path
		t.Errorf("the intent is %+v", all[2])
	}

	h.do("PUT", webhookPath, `{"url":"https://hooks.example.com/T00/path-token?q=1"}`).want(200, "")
	h.do("PATCH", webhookPath, `{"max_attempts":7}`).want(200, "")
	r = h.outcome("webhook.patch")
	if !strings.Contains(string(r.Before), `"max_attempts":3`) || !strings.Contains(string(r.After), `"max_attempts":7`) ||
		r.Object.Name != "key_1" ||
		!strings.Contains(string(r.After), `"https://hooks.example.com/[redacted]"`) {
		t.Errorf("before %s, after %s", r.Before, r.After)
	}

	h.do("POST", "/v1/admin/profiles", `{"name":"web","cpu":2}`).want(201, "")
	h.do("PUT", "/v1/admin/profiles/web", `{"cpu":0.5}`).want(200, "")
	r = h.outcome("profile.replace")
	if !strings.Contains(string(r.Before), `"cpu":2`) || !strings.Contains(string(r.After), `"cpu":0.5`) ||
		r.Object.Org != nil {
		t.Errorf("%+v", r)
	}
	h.do("PUT", "/v1/admin/secrets/S", `{"value":"abcdef"}`).want(200, "")
	h.do("DELETE", "/v1/admin/secrets/S", "").want(204, "")
	if r = h.outcome("secret.delete"); r.Before == nil || r.After != nil || *r.Status != 204 || r.Object.Name != "S" {
		t.Errorf("%+v", r)
	}
	h.verifyAudit()
}

// verifyAudit checks the chain in an export.
func (h *harness) verifyAudit() (c api.AuditChain) {
	h.t.Helper()
	a := h.do("GET", "/v1/admin/audit?all=true", "", "Accept", web.TypeNDJSON).want(200, "")
	for line := range bytes.Lines(a.body) {
		if _, err := c.Add(line); err != nil {
			h.t.Fatal(err)
		}
	}
	return c
}

func TestRefusedAttemptsAreRecorded(t *testing.T) {
	h := newHarness(t)
	user := h.as(h.stub.addKey("acme", "pro", asUser))
	user.do("POST", "/v1/admin/keys", `{"name":"n","org":"acme","plan":"pro"}`).want(403, "forbidden")
	r := h.outcome("key.create")
	if len(h.audit.all()) != 1 || r.Intent != nil || *r.Status != 403 || *r.Error != api.CodeForbidden ||
		r.Actor.Org != "acme" {
		t.Errorf("%+v", r)
	}
	boss := h.as(h.stub.addKey("acme", "pro", proto.Key{Scopes: []proto.Scope{proto.ScopeAdmin}}))
	boss.do("POST", "/v1/admin/threads/gc", "").want(403, "forbidden")
	if r = h.outcome("thread_store.collect"); *r.Status != 403 {
		t.Errorf("%+v", r)
	}
	victim := h.do("POST", "/v1/admin/keys", `{"name":"victim","org":"other","plan":"pro"}`).want(
		201, "").json()["id"].(string)
	boss.do("DELETE", "/v1/admin/keys/"+victim, "").want(404, "not_found")
	if r = h.outcome("key.revoke"); *r.Status != 404 || r.Before != nil || r.Object.Org != nil || r.Object.Name != victim {
		t.Errorf("%+v", r) // nothing of the other organisation
	}
	h.do("POST", "/v1/admin/profiles", `{"name":"web"}`).want(201, "")
	h.do("POST", "/v1/admin/profiles", `{"name":"web"}`).want(409, "conflict")
	if r = h.outcome("profile.create"); *r.Status != 409 || *r.Error != api.CodeConflict || r.After != nil {
		t.Errorf("%+v", r)
	}
	h.do("POST", "/v1/admin/keys", `{`).want(400, "validation_error")
	if r = h.outcome("key.create"); *r.Status != 400 {
		t.Errorf("%+v", r)
	}
	before := len(h.audit.all())
	h.do("POST", "/v1/admin/keys", `{}`, "Authorization", "Bearer sk-local-nobody-knows-this-key").want(
		401, "unauthorized")
	h.do("GET", "/v1/admin/keys", "").want(200, "")
	if n := len(h.audit.all()); n != before {
		t.Errorf("%d records of requests that are not acts", n-before)
	}
}

// Markers in the place of every secret that a request can have are nowhere in the log.
func TestNoSecretIsRecorded(t *testing.T) {
	h, ids := newAccessHarness(t)
	const marker = "Mark3rMark3rMark3rMark3rMark3r"
	var keys []string
	for _, request := range []struct{ method, path, body string }{
		{"POST", "/v1/admin/keys", `{"name":"n","org":"acme","plan":"pro","env":{"A":"` + marker + `"}}`},
		{"POST", "/v1/admin/keys", `{"name":"` + marker + strings.Repeat("x", 200) + `","org":"acme","plan":"pro"}`},
		{"PUT", "/v1/admin/secrets/S", `{"value":"` + marker + `"}`},
		{"PUT", "/v1/admin/secrets/S", `{"value":"` + marker + `2"}`},
		{"PUT", "/v1/admin/secrets/S", `{"value":"` + marker + `","x":"` + marker + `"}`},
		{"DELETE", "/v1/admin/secrets/S", ""},
		{"POST", "/v1/admin/profiles", `{"name":"web","env":{"A":"` + marker + `"}}`},
		{"PUT", "/v1/admin/profiles/web", `{"env":{"A":"` + marker + `","B":"` + marker + `"}}`},
		{"DELETE", "/v1/admin/profiles/web", ""},
		{"PUT", "/v1/webhook?key={key}", `{"url":"https://user:` + marker + `@example.com/"}`},
		{"PUT", "/v1/webhook?key={key}", `{"url":"https://example.com/` + marker + `?t=` + marker + `#` + marker +
			`","secret":"` + marker + `"}`},
		{"PATCH", "/v1/webhook?key={key}", `{"secret":"` + marker + `again"}`},
		{"POST", "/v1/webhook/rotate?key={key}", `{"secret":"` + marker + `more"}`},
		{"POST", "/v1/webhook/rotate?key={key}", ``},
		{"POST", "/v1/webhook/test?key={key}", ""},
		{"DELETE", "/v1/webhook?key={key}", ""},
		{"PUT", "/v1/admin/images/i" + digestQuery, marker},
		{"DELETE", "/v1/admin/images/i", ""},
		{"POST", "/v1/admin/secrets/rotate-key", ""},
		{"POST", "/v1/admin/threads/gc", `{"safe_age":"` + marker + `"}`},
	} {
		a := h.do(request.method, ids.Replace(request.path), request.body)
		var shown struct{ Key, Secret string }
		if json.Unmarshal(a.body, &shown) == nil {
			keys = append(keys, shown.Key, shown.Secret)
		}
	}
	log := string(bytes.Join(h.audit.lines, nil))
	if len(h.audit.lines) < 40 {
		t.Errorf("only %d records: %s", len(h.audit.lines), log)
	}
	if at := strings.Index(log, marker); at >= 0 {
		t.Errorf("a secret is in the log: …%s", log[max(0, at-200):at+50])
	}
	secrets := 0
	for _, secret := range append(keys, h.key) {
		if secret == "" {
			continue
		}
		secrets++
		if strings.Contains(log, secret) {
			t.Errorf("%s is in the log", secret)
		}
	}
	if secrets < 3 {
		t.Errorf("only %d secrets were shown to the client", secrets)
	}
}

// Nothing happens without an intent, and nothing is said to have happened without an outcome.
func TestAuditLogThatCannotBeWritten(t *testing.T) {
	h := newHarness(t)
	down := errors.New("NATS is gone")
	h.audit.fail = func(*api.AuditRecord) error { return down }
	a := h.do("POST", "/v1/admin/profiles", `{"name":"web"}`).want(503, "service_unavailable", "audit log")
	if a.header.Get("Retry-After") == "" {
		t.Error("the answer has no Retry-After")
	}
	h.do("GET", "/v1/admin/profiles/web", "").want(404, "not_found")
	user := h.as(h.stub.addKey("acme", "pro", asUser))
	user.do("POST", "/v1/admin/profiles", `{"name":"web"}`).want(500, "internal", "audit log")

	h.audit.fail = func(r *api.AuditRecord) error {
		if r.Stage == api.AuditOutcome {
			return down
		}
		return nil
	}
	a = h.do("POST", "/v1/admin/profiles", `{"name":"web"}`).want(500, "internal", "may have been carried out")
	if a.header.Get("Location") != "" {
		t.Errorf("the error has the headers of the answer: %v", a.header)
	}
	h.do("GET", "/v1/admin/profiles/web", "").want(200, "")
	h.audit.fail = nil
	if c := h.verifyAudit(); !slices.Equal(c.Unfinished(), []int64{1}) {
		t.Errorf("the acts without an outcome are %v", c.Unfinished())
	}
}

// A handler that panics has an outcome, too.
func TestActsWithoutAnAnswerAreRecorded(t *testing.T) {
	h := newHarness(t, func(s *Server) { s.ThreadAdmin = nil }) // any use of it panics
	h.do("POST", "/v1/admin/threads/gc", "").want(500, "internal")
	if r := h.outcome("thread_store.collect"); *r.Status != 500 || *r.Error != api.CodeInternal {
		t.Errorf("%+v", r)
	}
}

func TestAuditList(t *testing.T) {
	h := newHarness(t)
	boss := h.as(h.stub.addKey("acme", "pro", proto.Key{Scopes: []proto.Scope{proto.ScopeAdmin}}))
	other := h.as(h.stub.addKey("other", "pro", proto.Key{Scopes: []proto.Scope{proto.ScopeAdmin}}))
	global := h.as(h.stub.addKey("operators", "pro", asAdmin))
	boss.do("PUT", "/v1/admin/secrets/A", `{"value":"value"}`, "User-Agent", "of-acme").want(200, "")
	other.do("PUT", "/v1/admin/secrets/B", `{"value":"value"}`, "User-Agent", "of-other").want(200, "")
	global.do("PUT", "/v1/admin/secrets/C?org=acme", `{"value":"value"}`, "User-Agent", "of-operators").want(200, "")
	global.do("POST", "/v1/admin/profiles", `{"name":"web"}`).want(201, "")

	list := func(h *harness, query string) (names, agents string) {
		t.Helper()
		for cursor := ""; ; {
			var page api.AuditRecords
			if err := json.Unmarshal(h.do("GET", "/v1/admin/audit?limit=1"+query+cursor, "").want(200, "").body,
				&page); err != nil {
				t.Fatal(err)
			}
			for _, r := range page.Records {
				if r.Stage == api.AuditOutcome {
					names, agents = names+r.Object.Name+" ", agents+r.UserAgent+" "
				}
			}
			if page.NextCursor == nil {
				return names, agents
			}
			cursor = "&cursor=" + *page.NextCursor
		}
	}
	if names, _ := list(global, ""); names != "web C B A " {
		t.Errorf("all: %s", names)
	}
	if names, agents := list(boss, ""); names != "C A " || agents != " of-acme " {
		t.Errorf("those of acme: %s by %s", names, agents)
	}
	if names, _ := list(other, ""); names != "B " {
		t.Errorf("those of other: %s", names)
	}
	if names, _ := list(global, "&org=operators&action=secret.put"); names != "C " {
		t.Errorf("with filters: %s", names)
	}
	if names, _ := list(global, "&actor=key_1"); names != "" {
		t.Errorf("of an idle key: %s", names)
	}
	if names, _ := list(global, "&created_before=2020-01-01T00:00:00Z"); names != "" {
		t.Errorf("of an earlier time: %s", names)
	}
	// A cursor says nothing about the acts of others, and is good for its own list only.
	page := func(h *harness) string {
		return h.do("GET", "/v1/admin/audit?limit=1", "").want(200, "").json()["next_cursor"].(string)
	}
	first, second := page(boss), page(boss)
	raw, err := base64.RawURLEncoding.DecodeString(first)
	if first == second || err != nil || bytes.Contains(raw, []byte{0, 0, 0, 0, 6}) {
		t.Errorf("cursors are %s and %s", first, second)
	}
	boss.do("GET", "/v1/admin/audit?limit=2&cursor="+first, "").want(200, "")
	for _, cursor := range []string{"5", page(other), page(global), "A" + first, first[:len(first)-2]} {
		boss.do("GET", "/v1/admin/audit?cursor="+cursor, "").want(400, "validation_error", "next_cursor")
	}
	boss.do("GET", "/v1/admin/audit?action=secret.put&cursor="+first, "").want(400, "validation_error", "next_cursor")
	for query, word := range map[string]string{
		"actr=x": "actr", "cursor=x": "cursor", "cursor=5": "cursor",
		"created_after=x": "created_after", "all=true&org=acme": "all", "org=%20": "org",
	} {
		global.do("GET", "/v1/admin/audit?"+query, "").want(400, "validation_error", word)
	}
	boss.do("GET", "/v1/admin/audit?org=other", "").want(404, "not_found")
	boss.do("GET", "/v1/admin/audit?all=true", "", "Accept", web.TypeNDJSON).want(403, "forbidden", "global")

	lines := func(h *harness, query string) []string {
		a := h.do("GET", "/v1/admin/audit?"+query, "", "Accept", web.TypeNDJSON).want(200, "")
		if got := a.header.Get("Content-Type"); got != web.TypeNDJSON {
			t.Errorf("the type is %q", got)
		}
		return slices.Collect(strings.Lines(string(a.body)))
	}
	if got := lines(boss, ""); len(got) != 3 || !strings.Contains(got[2], `"user_agent":""`) {
		t.Errorf("the export of acme is %q", got)
	}
	if got := lines(global, "after=6"); len(got) != 2 || !strings.Contains(got[0], `"sequence":7`) {
		t.Errorf("the export after 6 is %q", got)
	}
	if got := lines(global, "after=100"); len(got) != 0 {
		t.Errorf("the export after the end is %q", got)
	}
}

// The log is kept for ever, so no tenant fills it.
func TestTenantsCannotFloodTheAuditLog(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := newHarness(t)
		user := h.as(h.stub.addKey("acme", "pro", asUser))
		for range web.AuditRefusedBurst {
			user.do("DELETE", "/v1/admin/keys/x", "").want(403, "forbidden")
		}
		if a := user.do("DELETE", "/v1/admin/keys/x", "").want(429, "rate_limited"); a.header.Get("Retry-After") != "10" {
			t.Errorf("Retry-After is %q", a.header.Get("Retry-After"))
		}
		boss := h.as(h.stub.addKey("acme", "pro", proto.Key{Scopes: []proto.Scope{proto.ScopeAdmin}}))
		for range web.AuditBurst { // which its users cannot keep out
			boss.do("DELETE", "/v1/admin/keys/x", "").want(404, "not_found")
		}
		boss.do("DELETE", "/v1/admin/keys/x", "").want(429, "rate_limited")
		h.as(h.stub.addKey("other", "pro", asUser)).do("DELETE", "/v1/admin/keys/x", "").want(403, "forbidden")
		for range web.AuditBurst + 1 {
			h.do("DELETE", "/v1/admin/keys/x", "").want(404, "not_found")
		}
		if n := len(h.audit.all()); n != web.AuditRefusedBurst+2*web.AuditBurst+1+2*(web.AuditBurst+1) {
			t.Errorf("the log has %d records", n)
		}
		time.Sleep(10 * time.Second)
		user.do("DELETE", "/v1/admin/keys/x", "").want(403, "forbidden")
		boss.do("DELETE", "/v1/admin/keys/x", "").want(404, "not_found")
	})
}

func TestClientAddress(t *testing.T) {
	s := &web.Core{TrustedProxies: []netip.Prefix{netip.MustParsePrefix("10.0.0.0/8"), netip.MustParsePrefix("fd00::/8")}}
	for _, tt := range []struct {
		remote, want string
		forwarded    []string
	}{
		{"203.0.113.7:1", "203.0.113.7", nil},
		{"203.0.113.7:1", "203.0.113.7", []string{"198.51.100.1"}}, // not a proxy: anybody can send the header
		{"10.0.0.1:1", "198.51.100.1", []string{"198.51.100.1"}},
		{"10.0.0.1:1", "198.51.100.1", []string{"1.2.3.4, 198.51.100.1", "10.0.0.2"}},
		{"[::ffff:10.0.0.1]:1", "2001:db8::1", []string{"[2001:db8::1]:4711"}},
		{"[fd00::1]:1", "198.51.100.1", []string{"198.51.100.1:80"}},
		{"10.0.0.1:1", "10.0.0.1", []string{"unknown"}},
		{"10.0.0.1:1", "10.0.0.1", nil},
		{"pipe", "", []string{"1.2.3.4"}},
	} {
		r := httptest.NewRequest(http.MethodGet, "/", http.NoBody)
		r.RemoteAddr, r.Header["X-Forwarded-For"] = tt.remote, tt.forwarded
		if got := s.ClientAddress(r); got != tt.want {
			t.Errorf("%s with %q is %q, not %q", tt.remote, tt.forwarded, got, tt.want)
		}
	}
}

// The organisation of a new key is not created unless that can be recorded, and its record does not
// depend on what becomes of the key.
func TestOrganisationOfAKeyIsRecorded(t *testing.T) {
	h := newHarness(t)
	const body = `{"name":"n","org":"beta","plan":"pro"}`
	h.audit.fail = func(r *api.AuditRecord) error {
		if r.Action == "org.create" {
			return errors.New("down")
		}
		return nil
	}
	h.do("POST", "/v1/admin/keys", body).want(503, "service_unavailable", "nothing was changed")
	h.do("GET", "/v1/admin/orgs/beta", "").want(404, "not_found")
	if r := h.outcome("key.create"); *r.Status != 503 {
		t.Errorf("%+v", r)
	}

	h.audit.fail = func(r *api.AuditRecord) error {
		if r.Action == "org.create" && r.Stage == api.AuditOutcome {
			return errors.New("down")
		}
		return nil
	}
	h.do("POST", "/v1/admin/keys", body).want(500, "internal", "may have been carried out")
	h.do("GET", "/v1/admin/orgs/beta", "").want(200, "")

	h.audit.fail = nil
	h.do("POST", "/v1/admin/keys", `{"name":"n","org":"gamma","plan":"free","concurrent":6}`).want(400, "validation_error",
		"concurrent")
	if r := h.outcome("key.create"); *r.Status != 400 {
		t.Errorf("%+v", r)
	}
	all := h.audit.all()
	if r := all[len(all)-2]; r.Action != "org.create" || *r.Status != 201 || r.Object.Name != "gamma" {
		t.Errorf("%+v", r)
	}
	h.do("POST", "/v1/admin/keys", `{"name":"n","org":"gamma"}`).want(201, "")
	if all := h.audit.all(); all[len(all)-2].Action != "key.create" {
		t.Errorf("of an organisation that exists: %+v", all[len(all)-2])
	}
	h.verifyAudit()
}
