package gateway

import (
	"errors"
	"io"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/bullpen-run/bullpen/gateway/agents"
	"github.com/bullpen-run/bullpen/gateway/login/logintest"
	"github.com/bullpen-run/bullpen/proto"
)

const plainURL = "http://localhost:8080"

func withPlainURL(s *Server) { s.PublicURL = plainURL }

// signInWithKey starts a session with an API key.
func (b *browser) signInWithKey(key string) *reply {
	b.t.Helper()
	return b.do("POST", "/v1/session", "", "Authorization", "Bearer "+key)
}

func TestSessionOfAnAPIKey(t *testing.T) {
	h := newHarness(t, withPlainURL)
	h.server.History = &historyStub{}
	h.remount()
	b := h.browser()
	made := b.signInWithKey(h.key).want(201, "")
	if got := made.json(); got["key_id"] != "key_1" || got["global"] != true ||
		got["session"].(map[string]any)["name"] != "test" {
		t.Errorf("signed in as %v", got)
	}
	if set := made.header.Get("Set-Cookie"); !strings.HasPrefix(set, "bullpen_session=") ||
		!strings.Contains(set, "; HttpOnly") || strings.Contains(set, "Secure") {
		t.Errorf("over plain HTTP the cookie is %q", set)
	}
	b.do("GET", "/v1/executions", "").want(200, "")
	// the key is a global administrator's
	b.do("POST", "/v1/admin/orgs", `{"name":"new"}`, "X-Bullpen-Org", "acme").want(201, "")
	b.do("POST", "/v1/session", "", "X-Bullpen-Org", "acme").want(403, "forbidden", "API key")
	b.signInWithKey("sk-local-wrong-wrong-wrong-wrong").want(401, "unauthorized")
	token := b.cookies["bullpen_session"]
	b.do("DELETE", "/v1/session", "").want(403, "forbidden", "X-Bullpen-Org")
	b.do("DELETE", "/v1/session", "", "X-Bullpen-Org", "acme").want(204, "")
	if b.cookies["bullpen_session"] != "" {
		t.Error("the browser keeps the cookie")
	}
	b.cookies["bullpen_session"] = token
	b.do("GET", "/v1/executions", "").want(401, "unauthorized")
	if got := h.do("GET", "/v1/session", "").want(200, "").json(); got["session"] != nil || got["key_id"] != "key_1" {
		t.Errorf("a request with an API key is %v", got)
	}
	h.do("DELETE", "/v1/session", "").want(404, "not_found")
}

func TestAllowedNetworksHoldForSessionsOfAKey(t *testing.T) {
	h := newHarness(t, withPlainURL)
	created := h.do("POST", "/v1/admin/keys", `{"name":"n","org":"acme"}`).want(201, "").json()
	b := h.browser()
	b.signInWithKey(created["key"].(string)).want(201, "")
	b.do("GET", "/v1/session", "").want(200, "")
	h.do("PUT", "/v1/admin/keys/"+created["id"].(string), `{"name":"n","allowed_networks":["192.0.2.0/24"]}`).want(200, "")
	b.do("GET", "/v1/session", "").want(403, "forbidden", "may not be used from the address")
}

// A session ends with the API key that made it, and when its organisation is suspended.
func TestSessionEndsWithItsAPIKey(t *testing.T) {
	h := newHarness(t, withPlainURL)
	h.server.History = &historyStub{}
	h.remount()
	for name, end := range map[string]func(id string){
		"revoked":   func(id string) { h.do("DELETE", "/v1/admin/keys/"+id, "").want(200, "") },
		"expired":   func(id string) { h.stub.change(id, func(k *proto.Key) { k.ExpiresAt = new(time.Now()) }) },
		"replaced":  func(id string) { h.stub.forget(id) },
		"suspended": func(string) { h.do("PUT", "/v1/admin/orgs/suspended", `{"suspended":true}`).want(200, "") },
	} {
		t.Run(name, func(t *testing.T) {
			b := h.in(t).browser()
			h.stub.addKey(name, "pro", asUser)
			made := h.do("POST", "/v1/admin/keys", `{"name":"n","org":"`+name+`"}`).want(201, "").json()
			b.signInWithKey(made["key"].(string)).want(201, "")
			b.do("GET", "/v1/executions", "").want(200, "")
			end(made["id"].(string))
			if a := b.do("GET", "/v1/executions", ""); a.status != 401 && (name != "suspended" || a.status != 403) {
				t.Errorf("answered with %d %s", a.status, a.body)
			}
		})
	}
}

// A browser adds the cookie to requests of pages of other origins, too.
func TestRequestsOfOtherPagesAreRefused(t *testing.T) {
	h := newHarness(t, func(s *Server) { s.PublicURL, s.CORSOrigins = plainURL, []string{"https://app.example.com"} })
	h.server.History = &historyStub{}
	h.remount()
	h.stub.finishAtOnce(proto.Exited(0))
	b := h.browser()
	b.signInWithKey(h.key).want(201, "")
	own := []string{"Origin", plainURL, "X-Bullpen-Org", "acme"}
	for _, c := range []struct {
		name    string
		method  string
		headers []string
		status  int
	}{
		{"own page", "POST", append([]string{"Sec-Fetch-Site", "same-origin"}, own...), 200},
		{"own page without fetch metadata", "POST", own, 200},
		{"own page that reads", "GET", []string{"Sec-Fetch-Site", "same-origin"}, 200},
		{"address typed", "GET", []string{"Sec-Fetch-Site", "none"}, 200},
		{"no browser", "POST", []string{"X-Bullpen-Org", "acme"}, 200},
		{"link on another page", "GET", []string{"Sec-Fetch-Site", "cross-site"}, 403},
		{"image on another page", "GET", []string{"Sec-Fetch-Site", "same-site"}, 403},
		{"form", "POST", []string{
			"Origin", "https://evil.example", "Sec-Fetch-Site", "cross-site", "Content-Type",
			"text/plain",
		}, 403},
		{
			"form without fetch metadata", "POST",
			[]string{"Origin", "https://evil.example", "Content-Type", "text/plain"},
			403,
		},
		{"form of a sandboxed page", "POST", []string{"Origin", "null"}, 403},
		{
			"form of a page of the same site", "POST",
			[]string{"Origin", "http://localhost:9090", "Sec-Fetch-Site", "same-site"},
			403,
		},
		{"form with no origin", "POST", nil, 403},
		{
			"page of another origin that sets the header", "POST",
			[]string{"Origin", "https://evil.example", "X-Bullpen-Org", "acme"},
			403,
		},
		{
			"page that CORS allows", "POST",
			[]string{"Origin", "https://app.example.com", "Sec-Fetch-Site", "cross-site", "X-Bullpen-Org", "acme"},
			403,
		},
		{
			"page that CORS allows, without fetch metadata", "POST",
			[]string{"Origin", "https://app.example.com", "X-Bullpen-Org", "acme"},
			403,
		},
		{"page of another organisation", "POST", []string{"Origin", plainURL, "X-Bullpen-Org", "beta"}, 403},
		{"two organisations", "POST", []string{"Origin", plainURL, "X-Bullpen-Org", "acme, beta"}, 403},
	} {
		path, body := "/v1/sandbox/execute", hello
		if c.method == "GET" {
			path, body = "/v1/executions", ""
		}
		a := b.do(c.method, path, body, c.headers...)
		if a.status != c.status {
			t.Errorf("%s: %d %s", c.name, a.status, a.body)
		}
		if a.header.Get("Access-Control-Allow-Credentials") != "" {
			t.Errorf("%s: credentials are allowed", c.name)
		}
	}
	// An API key in a header comes from a program or page that has it.
	h.do("POST", "/v1/sandbox/execute", hello, "Origin", "https://app.example.com", "Sec-Fetch-Site",
		"cross-site").want(200, "")
	// A wrong API key is not made up for by the cookie.
	b.do("GET", "/v1/executions", "", "Authorization", "Bearer sk-local-wrong-wrong-wrong-wrong").want(401, "unauthorized")
	b.do("GET", "/v1/executions", "", "Authorization", "Basic YTpi").want(401, "unauthorized")
}

// An attacker who sets a cookie in a browser before the login does not know the session after it.
func TestSessionIsNewAfterLogin(t *testing.T) {
	h, p := newLogin(t)
	h.addMember("acme", "ann@example.com", "viewer")
	p.SignIn(logintest.Person("1", "ann@example.com"))
	attacker := h.browser()
	attacker.signInWithKey(h.key).want(201, "")
	planted := attacker.cookies["__Host-bullpen_session"]
	b := h.browser()
	b.cookies["__Host-bullpen_session"] = planted
	b.signIn("/login").want(302, "")
	if got := b.cookies["__Host-bullpen_session"]; got == planted || len(got) < 43 {
		t.Errorf("the session is %q", got)
	}
	attacker.do("GET", "/v1/session", "").want(401, "unauthorized")
	if who := b.do("GET", "/v1/session", "").want(200, "").json(); who["name"] != "ann@example.com" {
		t.Errorf("signed in as %v", who)
	}
}

// Over TLS only the cookie counts that no other host can have set.
func TestCookieOfAnotherHost(t *testing.T) {
	h, _ := newLogin(t)
	b := h.browser()
	b.signInWithKey(h.key).want(201, "")
	token := b.cookies["__Host-bullpen_session"]
	b.cookies = map[string]string{"bullpen_session": token}
	b.do("GET", "/v1/session", "").want(401, "unauthorized")
	h.server.PublicURL = plainURL
	r := h.request("GET", "/v1/session", "", "Authorization", "", "Cookie",
		"bullpen_session="+token+"; bullpen_session=other")
	h.send(r).want(401, "unauthorized")
	h.send(h.request("GET", "/v1/session", "", "Authorization", "", "Cookie", "bullpen_session="+token)).want(200, "")
}

func TestSessionExpires(t *testing.T) {
	h := newHarness(t, withPlainURL)
	stored := h.server.Sessions.(sessionStore)
	b := h.browser()
	at := func(created, used time.Duration) int {
		b.signInWithKey(h.key).want(201, "")
		id := proto.SessionID(b.cookies["bullpen_session"])
		s := stored[id]
		s.CreatedAt, s.UsedAt = time.Now().Add(-created), time.Now().Add(-used)
		stored[id] = s
		return b.do("GET", "/v1/session", "").status
	}
	const minute = time.Minute
	for _, c := range []struct {
		created, used time.Duration
		status        int
	}{
		{0, 0, 200},
		{proto.SessionIdle, proto.SessionIdle - minute, 200},
		{proto.SessionIdle, proto.SessionIdle, 401},
		{proto.SessionLife - minute, 0, 200},
		{proto.SessionLife, 0, 401},
	} {
		if got := at(c.created, c.used); got != c.status {
			t.Errorf("created %s ago and used %s ago: %d", c.created, c.used, got)
		}
	}
	at(proto.SessionIdle, proto.SessionIdle-minute) // that was a use
	if used := stored[proto.SessionID(b.cookies["bullpen_session"])].UsedAt; time.Since(used) > minute {
		t.Errorf("last used %s ago", time.Since(used))
	}
}

func TestAdministratorEndsSessions(t *testing.T) {
	h, p := newLogin(t)
	h.addMember("acme", "ann@example.com", "viewer")
	p.SignIn(logintest.Person("1", "ann@example.com"))
	b, root := h.browser(), h.browser()
	b.signIn("/login").want(302, "")
	root.signInWithKey(h.key).want(201, "")
	boss := h.as(h.stub.addKey("acme", "pro", proto.Key{Scopes: []proto.Scope{proto.ScopeAdmin}}))
	other := h.as(h.stub.addKey("beta", "pro", proto.Key{Scopes: []proto.Scope{proto.ScopeAdmin}}))
	ids := map[string]string{}
	for _, s := range boss.do("GET", "/v1/admin/sessions", "").want(200, "").json()["sessions"].([]any) {
		ids[s.(map[string]any)["name"].(string)] = s.(map[string]any)["id"].(string)
	}
	if len(ids) != 2 {
		t.Fatalf("sessions %v", ids)
	}
	if list := other.do("GET", "/v1/admin/sessions", "").want(200, "").json()["sessions"].([]any); len(list) != 0 {
		t.Errorf("another organisation sees %v", list)
	}
	other.do("GET", "/v1/admin/sessions?org=acme", "").want(404, "not_found")
	other.do("DELETE", "/v1/admin/sessions/"+ids["ann@example.com"], "").want(404, "not_found")
	boss.do("DELETE", "/v1/admin/sessions/"+ids["test"], "").want(403, "forbidden", "global")
	boss.do("DELETE", "/v1/admin/sessions/"+ids["ann@example.com"], "").want(204, "")
	boss.do("DELETE", "/v1/admin/sessions/"+ids["ann@example.com"], "").want(404, "not_found")
	b.do("GET", "/v1/session", "").want(401, "unauthorized", "sign in again")
	root.do("GET", "/v1/session", "").want(200, "")
	h.do("DELETE", "/v1/admin/sessions/"+ids["test"], "").want(204, "")
	root.do("GET", "/v1/session", "").want(401, "unauthorized")
}

func TestMembers(t *testing.T) {
	h := newHarness(t)
	made := h.do("POST", "/v1/admin/members", `{"org":"acme","email":"Ann@Example.com","role":"viewer"}`).want(201, "")
	got := made.json()
	path := "/v1/admin/members/" + got["id"].(string)
	if got["email"] != "ann@example.com" || got["subject"] != nil || got["role"] != "viewer" || got["global"] != false ||
		made.header.Get("Location") != path {
		t.Errorf("added %v, %v", got, made.header)
	}
	h.do("POST", "/v1/admin/members", `{"org":"acme","email":"ann@example.com","role":"viewer"}`).want(
		409, "conflict", "acme already")
	h.do("POST", "/v1/admin/members", `{"org":"nobody","email":"ann@example.com","role":"viewer"}`).want(
		404, "not_found", "organisation")
	for body, field := range map[string]string{
		`{"org":"acme","role":"viewer"}`: "email", `{"org":"acme","email":"a@b","subject":"1","role":"viewer"}`: "email",
		`{"org":"acme","email":"a","role":"viewer"}`: "email", `{"org":"acme","email":"\u212A@b","role":"viewer"}`: "email",
		`{"org":"acme","email":"a@b@c","role":"viewer"}`: "email",
		`{"org":"acme","subject":"a b","role":"viewer"}`: "subject", `{"org":"acme","email":"a@b"}`: "role",
		`{"org":"acme","email":"a@b","role":"owner"}`:                  "role",
		`{"org":"A","email":"a@b","role":"viewer"}`:                    "org",
		`{"org":"acme","email":"a@b","role":"operator","global":true}`: "global",
	} {
		h.do("POST", "/v1/admin/members", body).want(400, "validation_error", field)
	}
	tag := h.do("GET", path, "").want(200, "").header.Get("ETag")
	h.do("PUT", path, `{"role":"operator"}`, "If-Match", `"old"`).want(412, "precondition_failed")
	if got := h.do("PUT", path, `{"role":"operator"}`, "If-Match", tag).want(200, "").json(); got["role"] != "operator" {
		t.Errorf("changed to %v", got)
	}
	h.do("DELETE", path, "", "If-Match", tag).want(412, "precondition_failed")
	h.do("DELETE", path, "").want(200, "")
	h.do("GET", path, "").want(404, "not_found", "member")
}

// The administrator of an organisation gives nobody more than the organisation has.
// Nobody could see or remove webhook settings that outlive their member.
func TestWebhookSettingsEndWithTheirMember(t *testing.T) {
	h := newHarness(t)
	id := h.addMember("acme", "ann@example.com", "administrator")
	h.do("PUT", "/v1/webhook?key="+id, `{"url":"https://example.com/hook"}`).want(200, "")
	h.do("GET", "/v1/webhook?key="+id, "").want(200, "")
	h.do("DELETE", "/v1/admin/members/"+id, "").want(200, "")
	if _, err := h.server.Webhooks.Stored(t.Context(), "acme", id); !errors.Is(err, proto.ErrNotFound) {
		t.Errorf("of the settings remains: %v", err)
	}
	h.do("GET", "/v1/webhook?key="+id, "").want(404, "not_found", "no API key or member")
}

func TestAdministratorOfAnOrganisationAddsMembers(t *testing.T) {
	h := newHarness(t)
	h.do("POST", "/v1/admin/profiles", `{"name":"small"}`).want(201, "")
	h.do("POST", "/v1/admin/orgs", `{"name":"beta"}`).want(201, "")
	made := h.do("POST", "/v1/admin/keys", `{"name":"n","org":"beta","profile":"small","scopes":["admin"]}`).want(
		201, "").json()
	boss := h.as(made["key"].(string))
	add := func(rest string) *reply {
		return boss.do("POST", "/v1/admin/members", `{"email":"a@example.com",`+rest+`}`)
	}
	add(`"org":"acme","role":"viewer"`).want(404, "not_found")
	add(`"org":"beta","role":"operator"`).want(403, "forbidden", "profile") // it has no key with the default profile
	add(`"org":"beta","role":"administrator","global":true`).want(403, "forbidden", "global")
	path := "/v1/admin/members/" + add(`"org":"beta","role":"viewer"`).want(201, "").json()["id"].(string)
	boss.do("PUT", path, `{"role":"administrator"}`).want(403, "forbidden", "profile")
	h.stub.addKey("beta", "", asUser)
	boss.do("PUT", path, `{"role":"administrator"}`).want(200, "")
	boss.do("PUT", path, `{"role":"administrator","global":true}`).want(403, "forbidden", "global")
	h.do("PUT", path, `{"role":"administrator","global":true}`).want(200, "")
	boss.do("PUT", path, `{"role":"viewer"}`).want(403, "forbidden", "global")
	boss.do("DELETE", path, "").want(403, "forbidden", "global")
	acme := "/v1/admin/members/" + h.do("POST", "/v1/admin/members",
		`{"org":"acme","email":"a@example.com","role":"viewer"}`).want(201, "").json()["id"].(string)
	boss.do("GET", acme, "").want(404, "not_found")
	boss.do("PUT", acme, `{"role":"viewer"}`).want(404, "not_found")
	boss.do("DELETE", acme, "").want(404, "not_found")
	if list := boss.do("GET", "/v1/admin/members", "").want(200, "").json()["members"].([]any); len(list) != 1 {
		t.Errorf("an administrator of beta sees %v", list)
	}
	boss.do("GET", "/v1/admin/members?org=acme", "").want(404, "not_found")
}

// A surface that accepts sessions checks their requests as this server's own API does.
func TestSurfaceWithSessions(t *testing.T) {
	h := newHarness(t, withPlainURL, withSurface(func(a *agents.Agent, w http.ResponseWriter, _ *http.Request) error {
		org, _ := a.Caller()
		_, err := io.WriteString(w, org)
		return err
	}))
	for _, accepted := range []bool{false, true} {
		h.server.Surfaces[0].Cookies = accepted
		h.remount()
		b := h.browser()
		b.signInWithKey(h.key).want(201, "")
		for _, c := range []struct {
			method, path string
			headers      []string
			status       int
		}{
			{"GET", "/other/files", nil, 200},
			{"POST", "/other/run", []string{"X-Bullpen-Org", "acme"}, 200},
			{"POST", "/other/run", nil, 403},
			{"POST", "/other/run", []string{"X-Bullpen-Org", "beta"}, 403},
			{"GET", "/other/files", []string{"Sec-Fetch-Site", "cross-site"}, 403},
			{"POST", "/other/run", []string{"X-Bullpen-Org", "acme", "Authorization", "Basic YTpi"}, 401},
		} {
			a, want := b.do(c.method, c.path, "", c.headers...), c.status
			if !accepted {
				want = 401
			}
			if a.status != want || want == 200 && string(a.body) != "acme" {
				t.Errorf("cookies accepted: %t; %s %s %v: %d %s", accepted, c.method, c.path, c.headers, a.status, a.body)
			}
		}
	}
}
