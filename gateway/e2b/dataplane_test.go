package e2b

import (
	"bufio"
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/url"
	"strings"
	"testing"

	"github.com/bullpen-run/bullpen/gateway/sandboxes"
	"github.com/bullpen-run/bullpen/proto"
)

const (
	toID    = proto.HeaderSandboxID
	toPort  = proto.HeaderSandboxPort
	daemon  = "49983"
	domain  = "sbx.example.org:8443"
	gone    = `{"sandboxId":"%s","message":"The sandbox was not found","code":502}` + "\n"
	reached = http.StatusOK
)

func withDomain(s *Server) { s.Domain = domain }

func TestDataPlaneAccess(t *testing.T) {
	h := newHarness(t, withDomain)
	h.add(sandboxID, nil)
	pausedID, publicID := "i"+strings.Repeat("p", 26), "i"+strings.Repeat("q", 26)
	foreignID := "i" + strings.Repeat("r", 26)
	h.add(pausedID, func(x *proto.LiveSandbox) { x.State = proto.SandboxPaused })
	h.add(publicID, func(x *proto.LiveSandbox) { x.PublicPorts = true })
	h.add(foreignID, func(x *proto.LiveSandbox) { x.Org = "other" })
	tokens := testTokens()
	access, traffic := tokens.Access(sandboxID), tokens.Traffic(sandboxID)
	signed := "/files?path=/a&signature=" + url.QueryEscape(sign("/a:read::"+access))
	for _, c := range []struct {
		name, method, path string
		headers            []string
		status             int
	}{
		{"daemon", "POST", "/process.Process/List", []string{toID, sandboxID, toPort, daemon, headerAccess, access}, reached},
		{"no token", "POST", "/process.Process/List", []string{toID, sandboxID, toPort, daemon}, 401},
		{
			"API key instead of the token", "POST", "/process.Process/List",
			[]string{toID, sandboxID, toPort, daemon, KeyHeader, apiKey, "Authorization", "Bearer " + apiKey},
			401,
		},
		{"traffic token", "POST", "/x", []string{toID, sandboxID, toPort, daemon, headerTraffic, traffic}, 401},
		{
			"token of another sandbox", "POST", "/x",
			[]string{toID, sandboxID, toPort, daemon, headerAccess, tokens.Access(otherID)},
			401,
		},
		{"two tokens", "POST", "/x", []string{toID, sandboxID, toPort, daemon, headerAccess, access, headerAccess, "x"}, 401},
		{"health", "GET", "/health", []string{toID, sandboxID, toPort, daemon}, reached},
		{"POST to health", "POST", "/health", []string{toID, sandboxID, toPort, daemon}, 401},
		{"health of a paused one", "GET", "/health", []string{toID, pausedID, toPort, daemon}, 502},
		{"health of an unknown one", "GET", "/health", []string{toID, otherID, toPort, daemon}, 502},
		{"another organisation's is found by its id", "GET", "/health", []string{toID, foreignID, toPort, daemon}, reached},
		{"signed", "GET", signed, []string{toID, sandboxID, toPort, daemon}, reached},
		{"signed for reading", "POST", signed, []string{toID, sandboxID, toPort, daemon}, 401},
		{"signed, of another sandbox", "GET", signed, []string{toID, publicID, toPort, daemon}, 401},
		{"signed, by host", "GET", signed, []string{"Host", daemon + "-" + sandboxID + ".sbx.example.org:8443"}, reached},
		{
			"expired", "GET", "/files?path=/a&signature_expiration=1&signature=" +
				url.QueryEscape(sign("/a:read::"+access+":1")), []string{toID, sandboxID, toPort, daemon}, 401,
		},
		{"port", "GET", "/", []string{toID, sandboxID, toPort, "3000"}, 403},
		{"traffic token", "GET", "/", []string{toID, sandboxID, toPort, "3000", headerTraffic, traffic}, reached},
		{"port with the access token", "GET", "/", []string{toID, sandboxID, toPort, "49999", headerAccess, access}, reached},
		{"health of a port", "GET", "/health", []string{toID, sandboxID, toPort, "49999"}, 403},
		{"public port", "GET", "/", []string{toID, publicID, toPort, "3000"}, reached},
		{"public port by host", "GET", "/", []string{"Host", "3000-" + publicID + ".SBX.example.org."}, reached},
		{"daemon of a sandbox with public ports", "GET", "/files?path=/a", []string{toID, publicID, toPort, daemon}, 401},
		{
			"unknown with a token", "GET", "/",
			[]string{toID, otherID, toPort, "80", headerAccess, tokens.Access(otherID)},
			502,
		},
		{"control path", "POST", "/init", []string{toID, sandboxID, toPort, daemon, headerAccess, access}, 404},
		{
			"control path, encoded", "POST", "/x/..%2F%69nit/",
			[]string{toID, sandboxID, toPort, daemon, headerAccess, access},
			404,
		},
		{"control path of a port", "POST", "/init", []string{toID, sandboxID, toPort, "80", headerAccess, access}, reached},
		{"no id", "GET", "/health", []string{toPort, daemon}, 400},
		{"no port", "GET", "/health", []string{toID, sandboxID}, 400},
		{"empty port", "GET", "/health", []string{toID, sandboxID, toPort, ""}, 400},
		{"two ids", "GET", "/health", []string{toID, sandboxID, toID, sandboxID, toPort, daemon}, 400},
		{"two ports", "GET", "/health", []string{toID, sandboxID, toPort, daemon, toPort, "1"}, 400},
		{"port 0", "GET", "/health", []string{toID, sandboxID, toPort, "0"}, 400},
		{"port 65536", "GET", "/health", []string{toID, sandboxID, toPort, "65536"}, 400},
		{"signed port", "GET", "/health", []string{toID, sandboxID, toPort, "+49983"}, 400},
		{"padded port", "GET", "/health", []string{toID, sandboxID, toPort, "049983"}, 400},
		{"list of ports", "GET", "/health", []string{toID, sandboxID, toPort, "49983, 1"}, 400},
		{"malformed id", "GET", "/health", []string{toID, "../" + sandboxID, toPort, daemon}, 502},
		{"upper case", "GET", "/health", []string{toID, strings.ToUpper(sandboxID), toPort, daemon}, 502},
		{"host and headers disagree", "GET", "/health", []string{
			toID, sandboxID, toPort, daemon, "Host", daemon + "-" + publicID + ".sbx.example.org",
		}, 400},
		{"host and headers agree", "GET", "/health", []string{
			toID, sandboxID, toPort, daemon, "Host", daemon + "-" + sandboxID + ".sbx.example.org",
		}, reached},
		{"host with a malformed id", "GET", "/health", []string{"Host", daemon + "-x.y.sbx.example.org"}, 502},
		{"native route", "GET", "/v1/sandboxes/" + sandboxID + "/guest/health", []string{toID, sandboxID, toPort, "80"}, 403},
		{"native route, one header", "GET", "/v1/x", []string{toPort, "80", "Authorization", "Bearer " + apiKey}, 400},
	} {
		h.served = nil
		a := h.do(c.method, c.path, "", c.headers...)
		if a.status != c.status || (len(h.served) == 1) != (c.status == reached) || a.body == native {
			t.Errorf("%s: %d %s", c.name, a.status, a.body)
		}
		if c.status >= 400 {
			fields := a.json(t)
			if fields["code"] != float64(c.status) || a.header.Get("Content-Type") != "application/json" {
				t.Errorf("%s: %s", c.name, a.body)
			}
		}
	}
	if a := h.do("GET", "/health", "", toID, pausedID, toPort, daemon); a.body != fmt.Sprintf(gone, pausedID) {
		t.Errorf("%s", a.body)
	}
	a := h.do("GET", "/files?path=/a&signature_expiration=1&signature="+url.QueryEscape(sign("/a:read::"+access+":1")), "",
		toID, sandboxID, toPort, daemon)
	if a.body != `{"code":401,"message":"signature is already expired"}`+"\n" {
		t.Errorf("%s", a.body)
	}
}

// What a server in a sandbox answers is no fault of this one.
func TestFailuresOfSandboxesAreNotLoggedAsErrors(t *testing.T) {
	h := newHarness(t, withDomain)
	var logged bytes.Buffer
	h.server.Core.Log = slog.New(slog.NewTextHandler(&logged, nil))
	h.add(sandboxID, nil)
	h.guest = http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		w.WriteHeader(http.StatusInternalServerError)
	})
	a := h.do(http.MethodGet, "/", "", toID, sandboxID, toPort, "3000", headerAccess, testTokens().Access(sandboxID))
	h.http.Close() // the request is logged
	if text := logged.String(); a.status != http.StatusInternalServerError || !strings.Contains(text, "level=INFO") ||
		strings.Contains(text, "level=ERROR") {
		t.Errorf("%d, logged %s", a.status, text)
	}
}

func TestOtherHostsReachTheRoutes(t *testing.T) {
	h := newHarness(t, withDomain)
	for _, host := range []string{
		"api.sbx.example.org", "sbx.example.org", "3000-" + sandboxID + ".example.org", "x-" + sandboxID + ".sbx.example.org",
		"3000.sbx.example.org", "-" + sandboxID + ".sbx.example.org",
	} {
		if a := h.do("GET", "/v1/x", "", "Host", host); a.body != native {
			t.Errorf("%s: %d %s", host, a.status, a.body)
		}
	}
	none := newHarness(t)
	if a := none.do("GET", "/v1/x", "", "Host", "3000-"+sandboxID+"."); a.body != native {
		t.Errorf("without a domain: %d %s", a.status, a.body)
	}
}

func TestWhatSandboxesAreSent(t *testing.T) {
	h := newHarness(t)
	h.add(sandboxID, nil)
	access := testTokens().Access(sandboxID)
	for _, c := range []struct {
		port, authorization, want string
		target                    sandboxes.Target
	}{
		{daemon, "Basic dXNlcjpwYXNzd29yZA==", "Basic dXNlcjo=", sandboxes.Target{}},
		{daemon, "Bearer " + apiKey, "", sandboxes.Target{}},
		{daemon, "Bearer theirs", "", sandboxes.Target{}},
		{"80", "Bearer theirs", "Bearer theirs", sandboxes.Target{Port: 80}},
		{"80", "bearer  " + apiKey, "", sandboxes.Target{Port: 80}},
	} {
		h.served = nil
		a := h.do("GET", "/a%2Fb/c", "", toID, sandboxID, toPort, c.port, headerAccess, access, "Authorization",
			c.authorization, "Connection", "E2b-Sandbox-Port", "Upgrade", "h2c")
		got := http.Header{}
		if err := json.Unmarshal([]byte(a.body), &got); err != nil {
			t.Fatalf("%d %s", a.status, a.body)
		}
		want := c.target
		want.Org, want.ID, want.Path, want.RawPath = "acme", sandboxID, "/a/b/c", "/a%2Fb/c"
		if got.Get("Authorization") != c.want || len(h.served) != 1 || h.served[0] != want {
			t.Errorf("%s %s: %v, %+v", c.port, c.authorization, got, h.served)
		}
		if (got.Get("Upgrade") == "") != (c.port == daemon) {
			t.Errorf("port %s: upgrade %q", c.port, got.Get("Upgrade"))
		}
		if policy := a.header.Get("Content-Security-Policy"); (policy == "") != (c.port != daemon) {
			t.Errorf("port %s: policy %q", c.port, policy)
		}
	}
}

func TestOpenRequestsAreLimited(t *testing.T) {
	h := newHarness(t)
	h.add(sandboxID, nil)
	started, end := make(chan struct{}), make(chan struct{})
	h.guest = http.HandlerFunc(func(http.ResponseWriter, *http.Request) {
		started <- struct{}{}
		<-end
	})
	ended := make(chan struct{})
	for range maxOpen {
		go func() {
			h.do("GET", "/health", "", toID, sandboxID, toPort, daemon)
			ended <- struct{}{}
		}()
		<-started
	}
	a := h.do("GET", "/health", "", toID, sandboxID, toPort, daemon)
	if a.status != http.StatusTooManyRequests || a.json(t)["code"] != 429.0 {
		t.Errorf("%d %s", a.status, a.body)
	}
	close(end)
	for range maxOpen {
		<-ended
	}
	h.guest = http.NotFoundHandler()
	if a := h.do("GET", "/health", "", toID, sandboxID, toPort, daemon); a.status != http.StatusNotFound {
		t.Errorf("%d %s", a.status, a.body)
	}
}

// Pages of any origin may use the guest with its token, and servers in sandboxes decide for themselves.
func TestPagesUseTheGuest(t *testing.T) {
	h := newHarness(t, withDomain)
	h.add(sandboxID, func(x *proto.LiveSandbox) { x.PublicPorts = true })
	host := daemon + "-" + sandboxID + "." + domain
	page := []string{"Host", host, "Origin", "https://page.example"}
	preflight := h.do("OPTIONS", "/process.Process/Start", "", append(page,
		"Access-Control-Request-Method", "POST",
		"Access-Control-Request-Headers", "x-access-token,connect-protocol-version")...)
	if got := preflight.header; preflight.status != http.StatusNoContent ||
		got.Get("Access-Control-Allow-Origin") != "*" ||
		!strings.Contains(got.Get("Access-Control-Allow-Headers"), "x-access-token") {
		t.Errorf("preflight: %d %v", preflight.status, got)
	}
	answer := h.do("POST", "/process.Process/List", "", append(page, headerAccess, testTokens().Access(sandboxID))...)
	if got := answer.header; answer.status != reached || got.Get("Access-Control-Allow-Origin") != "*" ||
		got.Get("Access-Control-Allow-Credentials") != "" {
		t.Errorf("answer: %d %v", answer.status, got)
	}
	port := h.do("GET", "/", "", "Host", "3000-"+sandboxID+"."+domain, "Origin", "https://page.example")
	if got := port.header.Get("Access-Control-Allow-Origin"); port.status != reached || got != "" {
		t.Errorf("a port: %d %q", port.status, got)
	}
}

// A client that is malformed on purpose.
func TestMalformedTargets(t *testing.T) {
	h := newHarness(t)
	h.add(sandboxID, nil)
	for _, line := range []string{"CONNECT x:1", "GET http://other/health"} {
		conn, err := net.Dial("tcp", h.http.Listener.Addr().String())
		if err != nil {
			t.Fatal(err)
		}
		_, _ = fmt.Fprintf(conn, "%s HTTP/1.1\r\nHost: x\r\nConnection: close\r\n%s: %s\r\n%s: %s\r\n\r\n", line, toID,
			sandboxID, toPort, daemon)
		resp, err := http.ReadResponse(bufio.NewReader(conn), nil)
		if err != nil {
			t.Fatal(err)
		}
		body, _ := io.ReadAll(resp.Body)
		want := http.StatusBadRequest
		if strings.HasPrefix(line, "GET") {
			want = http.StatusOK
		}
		if resp.StatusCode != want {
			t.Errorf("%s: %d %s", line, resp.StatusCode, body)
		}
		_ = conn.Close()
	}
}
