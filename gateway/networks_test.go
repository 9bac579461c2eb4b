package gateway

import (
	"encoding/json"
	"fmt"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"strings"
	"testing"
)

// from sends a request from an address, by way of proxies if forwarded is not empty.
func (h *harness) from(address, forwarded, key, method, path, body string) *reply {
	h.t.Helper()
	r := httptest.NewRequest(method, "http://x"+path, strings.NewReader(body))
	r.RemoteAddr = address
	r.Header.Set("Authorization", "Bearer "+key)
	r.Header.Set("Accept", "application/json, text/event-stream")
	if forwarded != "" {
		r.Header.Set("X-Forwarded-For", forwarded)
	}
	w := httptest.NewRecorder()
	h.http.Config.Handler.ServeHTTP(w, r)
	return &reply{t: h.t, status: w.Code, header: w.Header(), body: w.Body.Bytes()}
}

func TestAllowedNetworksOfAKey(t *testing.T) {
	h := newHarness(t, func(s *Server) { s.TrustedProxies = []netip.Prefix{netip.MustParsePrefix("10.0.0.0/8")} })
	create := `{"name":"n","org":"acme","scopes":["execute","read","files"],"allowed_networks":["192.0.2.0/24",` +
		`"198.51.100.7","2001:db8::/32","::ffff:203.0.113.9"]}`
	created := h.do("POST", "/v1/admin/keys", create).want(201, "").json()
	id, secret := created["id"].(string), created["key"].(string)
	if got := fmt.Sprint(created["allowed_networks"]); got != "[192.0.2.0/24 198.51.100.7/32 2001:db8::/32 "+
		"203.0.113.9/32]" {
		t.Errorf("stored as %s", got)
	}
	for _, c := range []struct {
		remote, forwarded, seen string // seen is empty for an address that is allowed
	}{
		{"192.0.2.200:1", "", ""},
		{"[::ffff:192.0.2.1]:1", "", ""},
		{"[2001:db8:5::1]:1", "", ""},
		{"198.51.100.7:1", "", ""},
		{"203.0.113.9:1", "", ""},
		{"10.1.1.1:1", "192.0.2.1", ""},
		{"10.1.1.1:1", "[2001:db8::1]:4711", ""},
		{"192.0.3.1:1", "", "192.0.3.1"},
		{"198.51.100.8:1", "", "198.51.100.8"},
		{"[::ffff:192.0.3.1]:1", "", "192.0.3.1"},
		{"[2001:db9::1]:1", "", "2001:db9::1"},
		{"192.0.3.1:1", "192.0.2.1", "192.0.3.1"}, // anybody can send the header
		{"10.1.1.1:1", "", "10.1.1.1"},
		{"10.1.1.1:1", "192.0.2.1, 192.0.3.1", "192.0.3.1"},
		{"pipe", "", `""`},
	} {
		used, _ := h.server.KeyUses.LastUsed("acme", id)
		a := h.from(c.remote, c.forwarded, secret, "GET", "/v1/threads", "")
		if c.seen == "" {
			if a.status != 200 {
				t.Errorf("%+v: %s", c, a.body)
			}
			continue
		}
		a.want(403, "forbidden", c.seen)
		if a.json()["reason"] != "address_not_allowed" || strings.Contains(string(a.body), "198.51.100.7") {
			t.Errorf("%s", a.body)
		}
		if now, _ := h.server.KeyUses.LastUsed("acme", id); !now.Equal(used) {
			t.Errorf("%+v counts as a use", c)
		}
	}
	for route, body := range map[string]string{
		"POST /v1/sandbox/execute": hello, "POST /mcp": `{"jsonrpc":"2.0","id":1,"method":"tools/list"}`,
		"POST /v1/files/list": `{"source":"thread","id":"t"}`,
		"GET /v1/executions/00000000000000000000000000000000/output": "", "POST /v1/batches": `{"items":[]}`,
		"GET /v1/usage": "",
	} {
		method, path, _ := strings.Cut(route, " ")
		h.from("192.0.3.1:1", "", secret, method, path, body).want(403, "forbidden", "192.0.3.1")
	}
	if len(h.stub.submitted) != 0 {
		t.Error("a refused request was executed")
	}

	// The secret changes, and the networks stay.
	rotated := h.do("POST", "/v1/admin/keys/"+id+"/rotate", "{}").want(200, "").json()["key"].(string)
	h.from("192.0.3.1:1", "", rotated, "GET", "/v1/threads", "").want(403, "forbidden")
	h.from("192.0.2.1:1", "", rotated, "GET", "/v1/threads", "").want(200, "")
	h.do("PUT", "/v1/admin/keys/"+id, `{"name":"n"}`).want(200, "")
	h.from("192.0.3.1:1", "", rotated, "GET", "/v1/threads", "").want(200, "")
}

func TestAllowedNetworksAreChecked(t *testing.T) {
	h := newHarness(t)
	many := make([]string, 33)
	for i := range many {
		many[i] = fmt.Sprintf("192.0.2.%d", i)
	}
	list := func(networks ...string) string {
		text, _ := json.Marshal(networks)
		return `{"name":"n","org":"acme","allowed_networks":` + string(text) + `}`
	}
	for body, words := range map[string][]string{
		list("192.0.2.0/24", "192.0.2.1/24"): {"allowed_networks[1]", "192.0.2.0/24"},
		list("2001:db8::1/32"):               {"allowed_networks[0]", "2001:db8::/32"},
		list("example.com"):                  {"allowed_networks[0]"},
		list("fe80::1%eth0"):                 {"allowed_networks[0]"},
		list("192.0.2.0/33"):                 {"allowed_networks[0]"},
		list(""):                             {"allowed_networks[0]"},
		list(many...):                        {"allowed_networks", "at most 32"},
		`{"name":"n","org":"acme","allowed_networks":[7]}`:        {"allowed_networks[0]"},
		`{"name":"n","org":"acme","allowed_networks":"10.0.0.1"}`: {"allowed_networks"},
	} {
		h.do("POST", "/v1/admin/keys", body).want(400, "validation_error", words...)
	}
	h.do("POST", "/v1/admin/keys", list(many[:32]...)).want(201, "")
	h.do("POST", "/v1/admin/keys", list("0.0.0.0/0", "::/0")).want(201, "")
	if got := h.do("POST", "/v1/admin/keys", list()).want(201, "").json()["allowed_networks"]; got != nil {
		t.Errorf("an empty list is %v", got)
	}

	// Nobody locks out the key in use.
	admin := `{"name":"n","scopes":["execute","read","files","admin"],"global":true,"allowed_networks":["192.0.2.0/24"]}`
	h.from("192.0.3.1:1", "", h.key, http.MethodPut, "/v1/admin/keys/key_1", admin).want(400, "validation_error",
		"allowed_networks", "192.0.3.1")
	h.from("192.0.2.1:1", "", h.key, http.MethodPut, "/v1/admin/keys/key_1", admin).want(200, "")
}
