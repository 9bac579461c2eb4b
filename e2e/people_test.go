package e2e

import (
	"bytes"
	"encoding/json"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/bullpen-run/bullpen/gateway/login/logintest"
)

// publicURL is the address under which a proxy would offer all gateways.
const publicURL = "http://localhost:8080"

// visitor is a browser with cookies, at a gateway.
type visitor struct {
	*api
	cookies map[string]*http.Cookie
}

// at returns the same browser at another gateway.
func (v *visitor) at(a *api) *visitor { return &visitor{a, v.cookies} }

// ask sends a request, follows no redirect, and keeps the cookies of the answer.
func (v *visitor) ask(t *testing.T, method, url string, body request) *http.Response {
	t.Helper()
	text, err := json.Marshal(body)
	if err != nil {
		t.Fatal(err)
	}
	r, err := http.NewRequestWithContext(t.Context(), method, url, bytes.NewReader(text))
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range v.cookies {
		r.AddCookie(c)
	}
	r.Header.Set("X-Bullpen-Org", "acme")
	client := *v.http
	client.CheckRedirect = func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse }
	resp, err := client.Do(r)
	if err != nil {
		t.Fatal(err)
	}
	_ = resp.Body.Close()
	for _, c := range resp.Cookies() {
		v.cookies[c.Name] = c
		if c.MaxAge < 0 {
			delete(v.cookies, c.Name)
		}
	}
	return resp
}

// status returns the status of a request to the gateway.
func (v *visitor) status(t *testing.T, method, path string) int {
	t.Helper()
	return v.ask(t, method, v.base+path, nil).StatusCode
}

// testPeople signs in at one gateway and goes on at another one.
func testPeople(t *testing.T, p *programs) {
	provider := logintest.New(t)
	secret := filepath.Join(t.TempDir(), "secret")
	if err := os.WriteFile(secret, []byte(logintest.Secret+"\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	settings := []string{
		"--public-url", publicURL, "--oidc-issuer", provider.URL, "--oidc-client-id", logintest.ClientID,
		"--oidc-secret-file", secret,
	}
	sys := newSystem(t, p, topology{separate: true}, 2, settings...)
	args := append([]string{"--data", filepath.Join(t.TempDir(), "second"), "--roles", "gateway"}, sys.args...)
	_, base := p.startServe(t, "second front", sys.env, args...)
	first, second := sys.api, &api{t, base, sys.key, sys.http}

	if r := first.do(http.MethodPost, "/v1/admin/orgs", request{"name": "acme"}); r.status != http.StatusCreated {
		t.Fatal(r)
	}
	env := []string{"BULLPEN_URL=" + first.base, "BULLPEN_API_KEY=" + first.key}
	if exit, output := p.run(t, env, "member", "add", "--org", "acme", "--email", "ann@example.com", "--role",
		"operator"); exit != 0 {
		t.Fatal(output)
	}
	provider.SignIn(logintest.Person("1", "ann@example.com"))
	here := &visitor{first, map[string]*http.Cookie{}}
	there := here.at(second)
	if got := here.status(t, http.MethodGet, "/v1/executions"); got != http.StatusUnauthorized {
		t.Fatalf("without a session: %d", got)
	}
	var toProvider, callback *http.Response
	eventually(t, "the member is known to the second gateway", func() (bool, any) {
		toProvider = here.ask(t, http.MethodGet, here.base+"/login?return=/docs", nil)
		toCallback := here.ask(t, http.MethodGet, toProvider.Header.Get("Location"), nil)
		path, ok := strings.CutPrefix(toCallback.Header.Get("Location"), publicURL)
		if !ok {
			return false, toCallback.Header
		}
		callback = there.ask(t, http.MethodGet, there.base+path, nil) // the other gateway answers
		return callback.StatusCode == http.StatusFound, callback.Status
	})
	if to := callback.Header.Get("Location"); to != publicURL+"/docs" {
		t.Errorf("sent to %q", to)
	}
	// Both gateways know the session from the first request on.
	for _, v := range []*visitor{here, there} {
		if got := v.status(t, http.MethodGet, "/v1/session"); got != http.StatusOK {
			t.Errorf("with the session at %s: %d", v.base, got)
		}
	}
	resp := there.ask(t, http.MethodPost, there.base+executePath, bash("echo hello"))
	if resp.StatusCode != http.StatusOK {
		t.Errorf("execute: %s", resp.Status)
	}
	id := resp.Header.Get("X-Trace-Id")
	if got := here.status(t, http.MethodGet, execution(id)); got != http.StatusOK {
		t.Errorf("the execution at the first gateway: %d", got)
	}
	if got := here.status(t, http.MethodGet, "/v1/executions"); got != http.StatusOK {
		t.Errorf("list: %d", got)
	}
	if got := here.status(t, http.MethodGet, "/v1/admin/keys"); got != http.StatusForbidden {
		t.Errorf("an operator lists keys: %d", got)
	}

	var list struct{ Sessions []struct{ ID, Name string } }
	first.get("/v1/admin/sessions?org=acme").into(t, &list)
	if len(list.Sessions) != 1 || list.Sessions[0].Name != "ann@example.com" {
		t.Fatalf("sessions %+v", list)
	}
	if exit, output := p.run(t, env, "session", "end", list.Sessions[0].ID); exit != 0 {
		t.Fatal(output)
	}
	if got := here.status(t, http.MethodGet, "/v1/session"); got != http.StatusUnauthorized {
		t.Errorf("after the end: %d", got)
	}
	eventually(t, "the session has ended at the second gateway", func() (bool, any) {
		got := there.status(t, http.MethodGet, "/v1/session")
		return got == http.StatusUnauthorized, got
	})
}
