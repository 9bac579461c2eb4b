package gateway

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"encoding/base64"
	"encoding/json"
	"net/http"
	"net/url"
	"strings"
	"testing"
	"time"

	"github.com/coreos/go-oidc/v3/oidc"
	"github.com/coreos/go-oidc/v3/oidc/oidctest"

	"github.com/bullpen-run/bullpen/gateway/login"
	"github.com/bullpen-run/bullpen/gateway/login/logintest"
	"github.com/bullpen-run/bullpen/proto"
)

const publicURL = "https://bullpen.example.com"

// browser is a client with cookies and without an API key.
type browser struct {
	*harness
	cookies map[string]string
}

// newLogin starts a server with an identity provider.
func newLogin(t *testing.T, set ...func(*Server)) (*harness, *logintest.Provider) {
	p := logintest.New(t)
	h := newHarness(t, append([]func(*Server){func(s *Server) {
		s.PublicURL = publicURL
		s.Login = &login.Provider{
			Issuer: p.URL, ClientID: logintest.ClientID, Secret: func() (string, error) { return logintest.Secret, nil },
			Redirect: publicURL + "/login/callback",
		}
		s.History = &historyStub{}
	}}, set...)...)
	return h, p
}

func (h *harness) browser() *browser { return &browser{h, map[string]string{}} }

// do sends a request with the cookies, and stores those of the answer.
func (b *browser) do(method, path, body string, headers ...string) *reply {
	b.t.Helper()
	r := b.request(method, path, body, append([]string{"Authorization", ""}, headers...)...)
	for name, value := range b.cookies {
		r.AddCookie(&http.Cookie{Name: name, Value: value})
	}
	a := b.send(r)
	for _, c := range (&http.Response{Header: a.header}).Cookies() {
		if c.MaxAge < 0 {
			delete(b.cookies, c.Name)
			continue
		}
		b.cookies[c.Name] = c.Value
	}
	return a
}

// visit begins a login and returns the path of the callback to which the provider sends the browser.
func (b *browser) visit(path string) (callback string) {
	b.t.Helper()
	start := b.do("GET", path, "").want(302, "")
	r, err := http.NewRequestWithContext(b.t.Context(), http.MethodGet, start.header.Get("Location"), nil)
	if err != nil {
		b.t.Fatal(err)
	}
	client := &http.Client{CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse }}
	defer client.CloseIdleConnections()
	resp, err := client.Do(r)
	if err != nil {
		b.t.Fatal(err)
	}
	_ = resp.Body.Close()
	callback, ok := strings.CutPrefix(resp.Header.Get("Location"), b.server.PublicURL)
	if resp.StatusCode != http.StatusFound || !ok {
		b.t.Fatalf("the provider answers %d, Location %q", resp.StatusCode, resp.Header.Get("Location"))
	}
	return callback
}

// signIn signs in as the provider's present person.
func (b *browser) signIn(path string) *reply {
	b.t.Helper()
	return b.do("GET", b.visit(path), "")
}

func (h *harness) addMember(org, email, role string) string {
	h.t.Helper()
	body, err := json.Marshal(map[string]string{"org": org, "email": email, "role": role})
	if err != nil {
		h.t.Fatal(err)
	}
	return h.do("POST", "/v1/admin/members", string(body)).want(201, "").json()["id"].(string)
}

func TestPersonSignsIn(t *testing.T) {
	h, p := newLogin(t)
	id := h.addMember("acme", "Ann@Example.com", "viewer")
	p.SignIn(logintest.Person("1", "ann@example.com"))
	b := h.browser()
	b.do("GET", "/v1/executions", "").want(401, "unauthorized")
	done := b.signIn("/login?return="+url.QueryEscape("/console?page=2#top")).want(302, "")
	if to := done.header.Get("Location"); to != publicURL+"/console?page=2#top" {
		t.Errorf("sent to %q", to)
	}
	set := done.header.Values("Set-Cookie")
	for _, want := range []string{"__Host-bullpen_session=", "; Path=/", "; HttpOnly", "; Secure", "; SameSite=Lax"} {
		if last := set[len(set)-1]; !strings.Contains(last, want) {
			t.Errorf("cookie %q has no %q", last, want)
		}
	}
	b.do("GET", "/v1/executions", "").want(200, "")
	who := b.do("GET", "/v1/session", "").want(200, "").json()
	if who["key_id"] != id || who["org"] != "acme" || who["name"] != "ann@example.com" ||
		who["session"].(map[string]any)["org"] != "acme" {
		t.Errorf("signed in as %v", who)
	}
}

// Each row is a login that must not succeed. The answer of the server is an error, and no session
// starts.
func TestRefusedLogins(t *testing.T) {
	ann := logintest.Person("1", "ann@example.com")
	without := func(claim string) logintest.Claims {
		c := logintest.Person("1", "ann@example.com")
		delete(c, claim)
		return c
	}
	with := func(claim string, value any) logintest.Claims {
		c := logintest.Person("1", "ann@example.com")
		c[claim] = value
		return c
	}
	changed := func(claim string, value any) func(*logintest.Provider, *browser, *string) {
		return func(p *logintest.Provider, _ *browser, _ *string) {
			p.Change = func(c logintest.Claims) { c[claim] = value }
		}
	}
	parameter := func(name, value string) func(*logintest.Provider, *browser, *string) {
		return func(_ *logintest.Provider, _ *browser, callback *string) {
			path, query, _ := strings.Cut(*callback, "?")
			values, _ := url.ParseQuery(query)
			values.Set(name, value)
			*callback = path + "?" + values.Encode()
		}
	}
	encode := base64.RawURLEncoding.EncodeToString
	for name, c := range map[string]struct {
		person logintest.Claims
		// attack is called between the provider's redirect and the callback.
		attack func(p *logintest.Provider, b *browser, callback *string)
		status int
		words  string
	}{
		"no address":            {person: without("email"), status: 403, words: "not a member"},
		"not verified":          {person: without("email_verified"), status: 403, words: "has not verified"},
		"not verified, false":   {person: with("email_verified", false), status: 403, words: "has not verified"},
		"not verified, as text": {person: with("email_verified", "false"), status: 403, words: "has not verified"},
		"another address":       {person: with("email", "bob@example.com"), status: 403, words: "not a member"},
		"an address that folds": {person: with("email", "ann@example.\u212Aom"), status: 403, words: "not a member"},
		"an address with a suffix": {
			person: with("email", "ann@example.com\x00@evil.example"), status: 403,
			words: "not a member",
		},
		"a subject of another form": {person: with("sub", "1\n2"), status: 403, words: "ask the administrator"},
		"no subject":                {person: without("sub"), status: 403, words: "ask the administrator"},
		"another state":             {attack: parameter("state", "AAAA"), status: 403, words: "this browser has begun"},
		"no state":                  {attack: parameter("state", ""), status: 403, words: "this browser has begun"},
		"another code":              {attack: parameter("code", "AAAA"), status: 403, words: "begin again"},
		"refused by the provider":   {attack: parameter("error", "access_denied"), status: 403, words: "access_denied"},
		"of another provider": {
			attack: parameter("iss", "https://evil.example"), status: 403,
			words: "another identity provider",
		},
		"another issuer": {
			attack: changed("iss", "https://evil.example"), status: 403, words: "ask the administrator",
		},
		"another audience": {attack: changed("aud", "another"), status: 403, words: "ask the administrator"},
		"several audiences": {
			attack: changed("aud", []string{logintest.ClientID, "another"}), status: 403,
			words: "ask the administrator",
		},
		"another authorised party": {attack: changed("azp", "another"), status: 403, words: "ask the administrator"},
		"another nonce":            {attack: changed("nonce", "AAAA"), status: 403, words: "another login"},
		"no nonce":                 {attack: changed("nonce", ""), status: 403, words: "another login"},
		"an expired token": {
			attack: changed("exp", time.Now().Add(-time.Minute).Unix()), status: 403,
			words: "ask the administrator",
		},
		"a token without expiry": {attack: changed("exp", nil), status: 403, words: "ask the administrator"},
		"a token from the future": {
			attack: changed("nbf", time.Now().Add(time.Hour).Unix()), status: 403,
			words: "ask the administrator",
		},
		"a browser without a cookie": {
			attack: func(_ *logintest.Provider, b *browser, _ *string) { clear(b.cookies) },
			status: 403, words: "this browser has not begun",
		},
		"the cookie of another login": {attack: func(_ *logintest.Provider, b *browser, _ *string) {
			b.visit("/login")
		}, status: 403, words: "this browser has begun"},
		"a cookie that was changed": {attack: func(_ *logintest.Provider, b *browser, _ *string) {
			secret, _, _ := strings.Cut(b.cookies["__Host-bullpen_login"], ".")
			b.cookies["__Host-bullpen_login"] = secret + "." + encode([]byte("\n/evil"))
		}, status: 403, words: "this browser has begun"},
		"a cookie that returns elsewhere": {attack: func(_ *logintest.Provider, b *browser, _ *string) {
			secret, _, _ := strings.Cut(b.cookies["__Host-bullpen_login"], ".")
			b.cookies["__Host-bullpen_login"] = secret + "." + encode([]byte("\n@evil.example/"))
		}, status: 400, words: "return"},
		"an unsigned token": {attack: func(p *logintest.Provider, _ *browser, _ *string) {
			p.Sign = func(claims string) string {
				return encode([]byte(`{"alg":"none"}`)) + "." + encode([]byte(claims)) + "."
			}
		}, status: 403, words: "ask the administrator"},
		"a token with another key": {attack: func(p *logintest.Provider, _ *browser, _ *string) {
			key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
			if err != nil {
				t.Fatal(err)
			}
			p.Sign = func(claims string) string { return oidctest.SignIDToken(key, "key-1", oidc.ES256, claims) }
		}, status: 403, words: "ask the administrator"},
		"a token with a shared secret": {attack: func(p *logintest.Provider, _ *browser, _ *string) {
			p.Sign = func(claims string) string {
				return oidctest.SignIDToken([]byte(logintest.Secret+logintest.Secret), "key-1", "HS256", claims)
			}
		}, status: 403, words: "ask the administrator"},
		"no token": {attack: func(p *logintest.Provider, _ *browser, _ *string) {
			p.Sign = func(string) string { return "" }
		}, status: 403, words: "ask the administrator"},
		"keys that cannot be read": {attack: func(p *logintest.Provider, _ *browser, _ *string) {
			p.Sign = func(claims string) string {
				p.Down = true
				return encode([]byte(`{"alg":"ES256","kid":"key-1"}`)) + "." + encode([]byte(claims)) + "." +
					encode([]byte("signature"))
			}
		}, status: 503},
		"a provider down": {attack: func(p *logintest.Provider, _ *browser, _ *string) { p.Down = true }, status: 503},
		"a wrong password": {attack: func(_ *logintest.Provider, b *browser, _ *string) {
			b.server.Login.Secret = func() (string, error) { return "wrong", nil }
		}, status: 403, words: "ask the administrator"},
	} {
		t.Run(name, func(t *testing.T) {
			h, p := newLogin(t)
			h.addMember("acme", "ann@example.com", "viewer")
			if c.person == nil {
				c.person = ann
			}
			p.SignIn(c.person)
			b := h.browser()
			callback := b.visit("/login")
			if c.attack != nil {
				c.attack(p, b, &callback)
			}
			code := map[int]string{400: "validation_error", 403: "forbidden", 503: "service_unavailable"}[c.status]
			a := b.do("GET", callback, "").want(c.status, code, c.words)
			if sessions := h.server.Sessions.(sessionStore); len(sessions) != 0 || b.cookies["__Host-bullpen_session"] != "" {
				t.Errorf("a session started: %v %v", sessions, a.header)
			}
		})
	}
}

func TestCallbackIsAnsweredOnce(t *testing.T) {
	h, p := newLogin(t)
	h.addMember("acme", "ann@example.com", "viewer")
	p.SignIn(logintest.Person("1", "ann@example.com"))
	b := h.browser()
	callback := b.visit("/login")
	kept := b.cookies["__Host-bullpen_login"]
	b.do("GET", callback, "").want(302, "")
	if b.cookies["__Host-bullpen_login"] != "" {
		t.Error("the browser keeps the login")
	}
	thief := h.browser()
	thief.do("GET", callback, "").want(403, "forbidden")
	thief.cookies["__Host-bullpen_login"] = kept
	thief.do("GET", callback, "").want(403, "forbidden", "begin again")
}

// A provider may give an address to another person, who must not become the member.
func TestMemberIsThePersonWhoSignedInFirst(t *testing.T) {
	h, p := newLogin(t)
	id := h.addMember("acme", "ann@example.com", "viewer")
	p.SignIn(logintest.Person("1", "ann@example.com"))
	b := h.browser()
	b.signIn("/login").want(302, "")
	if got := h.do("GET", "/v1/admin/members/"+id, "").want(200, "").json(); got["subject"] != "1" ||
		got["issuer"] != p.URL {
		t.Errorf("bound to %v", got)
	}
	p.SignIn(logintest.Person("2", "ann@example.com"))
	other := h.browser()
	other.signIn("/login").want(403, "forbidden", "subject 2")
	p.SignIn(logintest.Person("1", "ann.smith@example.com")) // the person may get another address
	other.signIn("/login").want(302, "")
	// Who was removed does not come back with the address that another person has now.
	h.do("DELETE", "/v1/admin/members/"+id, "").want(200, "")
	b.do("GET", "/v1/executions", "").want(401, "unauthorized")
	h.addMember("acme", "ann@example.com", "viewer")
	p.SignIn(logintest.Person("2", "ann@example.com"))
	other.signIn("/login").want(302, "")
	b.do("GET", "/v1/executions", "").want(401, "unauthorized")
}

func TestMemberIsFoundBySubject(t *testing.T) {
	h, p := newLogin(t)
	h.do("POST", "/v1/admin/members", `{"org":"acme","subject":"7","role":"viewer"}`).want(201, "")
	p.SignIn(logintest.Claims{"sub": "7"})
	b := h.browser()
	b.signIn("/login").want(302, "")
	b.do("GET", "/v1/executions", "").want(200, "")
}

// The provider may say that an address is verified in a text.
func TestVerifiedAsText(t *testing.T) {
	h, p := newLogin(t)
	h.addMember("acme", "ann@example.com", "viewer")
	p.SignIn(logintest.Claims{"sub": "1", "email": "Ann@Example.com", "email_verified": "true"})
	h.browser().signIn("/login").want(302, "")
}

func TestLoginReturnsToThisServer(t *testing.T) {
	h, p := newLogin(t)
	h.addMember("acme", "ann@example.com", "viewer")
	p.SignIn(logintest.Person("1", "ann@example.com"))
	for _, path := range []string{
		"", "/", "//evil.example/", "/\\evil.example", "/%0d%0aSet-Cookie:%20a=b",
		"/.//evil.example", "/@evil.example",
	} {
		to := h.browser().signIn("/login?return="+url.QueryEscape(path)).want(302, "").header.Get("Location")
		if u, err := url.Parse(to); err != nil || u.Scheme+"://"+u.Host != publicURL ||
			!strings.HasPrefix(to, publicURL+"/") {
			t.Errorf("return to %q leads to %q", path, to)
		}
	}
	for _, path := range []string{
		"https://evil.example/", "evil.example", "@evil.example/", ".evil.example/",
		"\\\\evil.example", "/a\r\nSet-Cookie: a=b", "/a\tb", "javascript:alert(1)", "/" + strings.Repeat("a", 1024),
	} {
		h.browser().do("GET", "/login?return="+url.QueryEscape(path), "").want(400, "validation_error", "return")
	}
	if to := h.browser().signIn("/login").want(302, "").header.Get("Location"); to != publicURL+"/console/" {
		t.Errorf("return by default leads to %q", to)
	}
	h.browser().do("GET", "/login?org=A", "").want(400, "validation_error", "org")
	h.browser().do("GET", "/login?org=a&org=b", "").want(400, "validation_error", "org")
}

// Behind a proxy that removes a prefix of paths, browsers return below that prefix.
func TestLoginBelowPrefix(t *testing.T) {
	const prefixed = publicURL + "/pen"
	h, p := newLogin(t, func(s *Server) {
		s.PublicURL, s.Login.Redirect = prefixed, prefixed+"/login/callback"
	})
	h.addMember("acme", "ann@example.com", "viewer")
	p.SignIn(logintest.Person("1", "ann@example.com"))
	for path, want := range map[string]string{
		"": "/console/", url.QueryEscape("/console/#/executions?status=failed"): "/console/#/executions?status=failed",
	} {
		b := h.browser()
		to := b.signIn("/login?return="+path).want(302, "").header.Get("Location")
		if to != prefixed+want {
			t.Errorf("return to %q leads to %q", path, to)
		}
		b.do("GET", "/v1/session", "", "Origin", publicURL, "Sec-Fetch-Site", "same-origin").want(200, "")
	}
}

// Anybody can read whether there is an identity provider.
func TestWaysToSignIn(t *testing.T) {
	h, _ := newLogin(t, func(s *Server) { s.Version = "v1.2.3" })
	if got := strings.TrimSpace(string(h.browser().do("GET", "/v1/login", "").want(200, "").body)); got !=
		`{"oidc":true,"version":"v1.2.3"}` {
		t.Error(got)
	}
	if got := newHarness(t).browser().do("GET", "/v1/login", "").want(200, "").json(); got["oidc"] != false {
		t.Error(got)
	}
}

func TestLoginWithoutProvider(t *testing.T) {
	h := newHarness(t)
	h.browser().do("GET", "/login", "").want(404, "not_found", "--oidc-issuer")
	h.browser().do("GET", "/login/callback?state=a&code=b", "").want(404, "not_found", "--oidc-issuer")
	const accept = "text/html,application/xhtml+xml,*/*;q=0.8"
	to := h.browser().do("GET", "/login?return=/docs", "", "Accept", accept).want(302, "").header.Get("Location")
	if !strings.HasSuffix(to, "/console/") {
		t.Errorf("a browser is sent to %q and not to the console, which asks for an API key", to)
	}
	page := h.browser().do("GET", "/login/callback?state=a&code=b", "", "Accept", accept)
	if page.status != 404 || page.header.Get("Content-Type") != "text/html; charset=utf-8" ||
		!strings.Contains(string(page.body), "--oidc-issuer") {
		t.Errorf("a browser is shown %d %v: %s", page.status, page.header, page.body)
	}
}

func TestPersonOfSeveralOrganisations(t *testing.T) {
	h, p := newLogin(t)
	h.stub.addKey("beta", "pro", asUser)
	h.addMember("acme", "ann@example.com", "viewer")
	p.SignIn(logintest.Person("1", "ann@example.com"))
	b := h.browser()
	b.signIn("/login").want(302, "")
	h.addMember("beta", "ann@example.com", "administrator")
	page := h.browser().signIn("/login?return=/a%26b").want(200, "")
	for _, want := range []string{
		publicURL + "/login?org=acme&amp;return=%2Fa%26b", publicURL + "/login?org=beta&amp;return=",
	} {
		if !strings.Contains(string(page.body), want) {
			t.Errorf("the page has no %s: %s", want, page.body)
		}
	}
	if policy := page.header.Get("Content-Security-Policy"); !strings.Contains(policy, "default-src 'none'") ||
		page.header.Get("Set-Cookie") == "" {
		t.Errorf("headers %v", page.header)
	}
	h.browser().signIn("/login?org=gamma").want(403, "forbidden", "gamma")
	b.signIn("/login?org=beta").want(302, "")
	if who := b.do("GET", "/v1/session", "").want(200, "").json(); who["org"] != "beta" ||
		len(who["scopes"].([]any)) != 4 {
		t.Errorf("signed in as %v", who)
	}
	// A tab that was opened for acme does nothing in beta.
	b.do("POST", "/v1/sandbox/execute", hello, "X-Bullpen-Org", "acme", "Sec-Fetch-Site", "same-origin").want(
		403, "forbidden", "beta")
	b.do("GET", "/v1/executions", "", "X-Bullpen-Org", "acme").want(403, "forbidden", "beta")
}

func TestRoles(t *testing.T) {
	h, p := newLogin(t)
	h.stub.finishAtOnce(proto.Exited(0))
	id := h.addMember("acme", "ann@example.com", "viewer")
	p.SignIn(logintest.Person("1", "ann@example.com"))
	b := h.browser()
	b.signIn("/login").want(302, "")
	ask := func(method, path, body string) *reply { return b.do(method, path, body, "X-Bullpen-Org", "acme") }
	role := func(settings string) { h.do("PUT", "/v1/admin/members/"+id, settings).want(200, "") }
	ask("GET", "/v1/executions", "").want(200, "")
	ask("POST", "/v1/sandbox/execute", hello).want(403, "forbidden", "execute")
	ask("GET", "/v1/admin/keys", "").want(403, "forbidden", "admin")
	role(`{"role":"operator"}`) // at once, in the same session
	trace := ask("POST", "/v1/sandbox/execute", hello).want(200, "").trace()
	if m := h.stub.record(trace).Meta; m.Key != id || m.Org != "acme" {
		t.Errorf("executed as %+v", m)
	}
	ask("GET", "/v1/admin/keys", "").want(403, "forbidden", "admin")
	role(`{"role":"administrator"}`)
	ask("GET", "/v1/admin/keys", "").want(200, "")
	ask("GET", "/v1/admin/workers", "").want(403, "forbidden", "global")
	ask("PUT", "/v1/admin/members/"+id, `{"role":"administrator","global":true}`).want(403, "forbidden", "global")
	role(`{"role":"administrator","global":true}`)
	ask("POST", "/v1/admin/orgs", `{"name":"new"}`).want(201, "")
	role(`{"role":"viewer"}`)
	ask("POST", "/v1/admin/orgs", `{"name":"newer"}`).want(403, "forbidden", "admin")
	h.do("DELETE", "/v1/admin/members/"+id, "").want(200, "")
	ask("GET", "/v1/executions", "").want(401, "unauthorized", "sign in again")
}

// What a member has started stops with the member.
func TestWorkOfAMemberEndsWithTheMember(t *testing.T) {
	h, p := newLogin(t)
	schedules := new(scheduleStub)
	h.server.Schedules = schedules
	h.remount()
	h.stub.finishAtOnce(proto.Exited(0))
	h.server.PublicURL = "" // upload expects the harness's own
	h.upload("a", "x").want(200, "")
	h.server.PublicURL = publicURL
	id := h.addMember("acme", "ann@example.com", "operator")
	p.SignIn(logintest.Person("1", "ann@example.com"))
	b := h.browser()
	b.signIn("/login").want(302, "")
	signed := b.do("POST", "/v1/files/download_url", `{"source":"thread","id":"t","path":"a"}`, "X-Bullpen-Org",
		"acme").want(200, "").json()["url"].(string)
	content := strings.TrimPrefix(signed, publicURL)
	h.do("GET", content, "").want(200, "")
	schedule := b.do("POST", "/v1/schedules", accessTable()["createSchedule"].body, "X-Bullpen-Org", "acme").want(
		201, "").json()
	if schedule["key_id"] != id {
		t.Errorf("schedule of %v", schedule["key_id"])
	}
	run := "/v1/schedules/" + schedule["id"].(string) + "/run"
	h.do("POST", run, "").want(202, "")
	h.do("PUT", "/v1/admin/members/"+id, `{"role":"viewer"}`).want(200, "")
	h.do("POST", run, "").want(403, "forbidden", "lost the scope")
	h.do("DELETE", "/v1/admin/members/"+id, "").want(200, "")
	h.do("POST", run, "").want(403, "forbidden", id)
	h.do("GET", content, "").want(403, "forbidden")
}
