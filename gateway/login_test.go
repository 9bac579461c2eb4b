package gateway

import (
	"encoding/json"
	"net/http"
	"net/url"
	"strings"
	"testing"

	"github.com/bullpen-run/bullpen/gateway/login"
	"github.com/bullpen-run/bullpen/gateway/login/logintest"
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
			Issuer: p.URL, ClientID: logintest.ClientID, Secret: func() (string, error) { return logintest.Secret, nil }, Redirect: publicURL + "/login/callback",
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
		r.AddCookie(&http.Cookie{Name: name, Value: value}) //nolint:gosec // of a request
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
	callback, ok := strings.CutPrefix(resp.Header.Get("Location"), publicURL)
	if resp.StatusCode != 302 || !ok {
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
	done := b.signIn("/login?return=" + url.QueryEscape("/console?page=2#top")).want(302, "")
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
	if who["key_id"] != id || who["org"] != "acme" || who["name"] != "ann@example.com" || who["session"].(map[string]any)["org"] != "acme" {
		t.Errorf("signed in as %v", who)
	}
}
