package gateway

import (
	"bytes"
	"compress/gzip"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"os"
	"regexp"
	"strings"
	"testing"

	"github.com/getkin/kin-openapi/openapi3"
	"github.com/go-chi/chi/v5"

	"github.com/bullpen-run/bullpen/gateway/web"
	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/proto/doctest"
)

func TestDocumentIsValidAndWhole(t *testing.T) {
	h := newHarness(t)
	doc, err := openapi3.NewLoader().LoadFromData(h.do("GET", "/openapi.json", "").want(200, "").body)
	if err != nil {
		t.Fatal(err)
	}
	if err := doc.Validate(t.Context(), openapi3.EnableExamplesValidation()); err != nil {
		t.Error(err)
	}
	if !strings.HasPrefix(doc.OpenAPI, "3.1.") || doc.Info.Version != "1.2.3" {
		t.Errorf("OpenAPI %s of version %s", doc.OpenAPI, doc.Info.Version)
	}
	routes := map[string]bool{}
	err = chi.Walk(h.http.Config.Handler.(chi.Routes),
		func(method, route string, _ http.Handler, _ ...func(http.Handler) http.Handler) error {
			isFile := strings.HasPrefix(route, "/docs/") || strings.HasPrefix(route, "/console/")
			if method != "HEAD" && route != "/" && !isFile {
				routes[method+" "+route] = true
			}
			return nil
		})
	if err != nil {
		t.Fatal(err)
	}
	for path, item := range doc.Paths.Map() {
		for method, operation := range item.Operations() {
			if !routes[method+" "+path] {
				t.Errorf("%s %s is documented and does not exist", method, path)
			}
			if operation.RequestBody != nil && operation.Responses.Status(http.StatusUnsupportedMediaType) == nil {
				t.Errorf("%s %s has a body, and it is not documented that a compressed one is refused", method, path)
			}
			delete(routes, method+" "+path)
		}
	}
	for route := range routes {
		t.Errorf("%s is not documented", route)
	}
}

// TestTypesOfClientsAreCurrent compares the hash of the OpenAPI document with the one in the files of the Python and
// TypeScript clients that are generated from it. With -update it writes the document, for make sdk-types.
func TestTypesOfClientsAreCurrent(t *testing.T) {
	document := newHarness(t).do("GET", "/openapi.json", "").want(200, "").body
	if *doctest.Update {
		if err := os.MkdirAll("../bin", 0o750); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile("../bin/openapi.json", document, 0o600); err != nil {
			t.Fatal(err)
		}
		return
	}
	header := fmt.Sprintf("openapi: sha256:%x\n", sha256.Sum256(document))
	for _, file := range []string{
		"../sdk/python/src/bullpen/types.py", "../sdk/python/src/bullpen/params.py", "../sdk/typescript/src/schema.ts",
	} {
		content, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		if !strings.Contains(string(content), header) {
			t.Errorf("%s is not current: run `make sdk-types`", file)
		}
	}
}

// The document is compressed for clients that take it so, and only for these.
func TestDocumentIsCompressed(t *testing.T) {
	h := newHarness(t)
	plain := h.do("GET", "/openapi.json", "", "Accept-Encoding", "identity").want(200, "")
	for accept, want := range map[string]string{
		"gzip": "gzip", "br, GZIP;q=0.5": "gzip", "gzip;q=0": "", "br": "",
		"identity": "",
	} {
		resp, err := h.client.Do(h.request("GET", "/openapi.json", "", "Accept-Encoding", accept))
		if err != nil {
			t.Fatal(err)
		}
		sent, err := io.ReadAll(resp.Body)
		if err := errors.Join(err, resp.Body.Close()); err != nil {
			t.Fatal(err)
		}
		if got := resp.Header.Get("Content-Encoding"); got != want || resp.Header.Get("Vary") != "Accept-Encoding" {
			t.Errorf("%q is answered with %q", accept, got)
		}
		body := sent
		if want != "" {
			r, err := gzip.NewReader(bytes.NewReader(body))
			if err != nil {
				t.Fatal(err)
			}
			if body, err = io.ReadAll(r); err != nil {
				t.Fatal(err)
			}
			if 5*len(sent) > len(body) {
				t.Errorf("%d bytes became %d", len(body), len(sent))
			}
		}
		if !bytes.Equal(body, plain.body) {
			t.Errorf("%q: another document", accept)
		}
	}
	if to := h.do("GET", "/", ""); to.status != 302 || to.header.Get("Location") != "console/" {
		t.Errorf("/ leads to %d %q", to.status, to.header.Get("Location"))
	}
}

// The page must work without a network, and under the policy that it is served with it.
func TestDocsPage(t *testing.T) {
	h := newHarness(t)
	page := h.do("GET", "/docs", "").want(200, "")
	policy := page.header.Get("Content-Security-Policy")
	if !strings.Contains(policy, "script-src 'self';") || strings.Contains(string(page.body), "<script>") ||
		strings.Contains(string(page.body), "//") {
		t.Errorf("policy %q for\n%s", policy, page.body)
	}
	links := regexp.MustCompile(`(?:src|href)="([^"]+)"`).FindAllSubmatch(page.body, -1)
	if len(links) != 4 {
		t.Errorf("%d links", len(links))
	}
	for _, link := range links {
		for _, encoding := range []string{"identity", "gzip"} {
			if a := h.do("GET", "/"+string(link[1]), "", "Accept-Encoding", encoding).want(200, ""); len(a.body) == 0 {
				t.Errorf("%s is empty", link[1])
			}
		}
	}
	if got := h.do("GET", "/docs/", "").header.Get("Location"); got != "../docs" {
		t.Errorf("/docs/ leads to %q", got)
	}
}

func TestHealth(t *testing.T) {
	h := newHarness(t)
	h.do("GET", "/healthz", "", "Authorization", "").want(200, "")
	h.do("HEAD", "/healthz", "", "Authorization", "").want(200, "")
	h.do("GET", "/readyz", "", "Authorization", "").want(200, "")
	h.server.Problems = func() []proto.Problem {
		return []proto.Problem{{Need: "redis", Message: "dial tcp 10.0.0.5:6379"}}
	}
	if a := h.do("GET", "/readyz", "", "Authorization", "").want(200, ""); !strings.Contains(
		string(a.body), `"problems":["redis"]`) || strings.Contains(string(a.body), "10.0.0.5") {
		t.Errorf("anybody may read %s", string(a.body))
	}
	h.do("GET", "/metrics", "", "Authorization", "").want(200, "")
	for missing, answer := range map[string]func(context.Context) (proto.QueueStats, error){
		"worker": func(context.Context) (proto.QueueStats, error) { return proto.QueueStats{}, nil },
		"queue":  func(context.Context) (proto.QueueStats, error) { return proto.QueueStats{Workers: 1}, errors.New("no") },
	} {
		h.stub.stats = answer
		a := h.do("GET", "/readyz", "").want(503, "service_unavailable")
		if a.json()["missing"] != missing || a.header.Get("Retry-After") == "" {
			t.Errorf("%s missing: %s", missing, a.body)
		}
	}
	// The reason why a worker accepts no jobs may contain text of another program.
	h.stub.stats = func(context.Context) (proto.QueueStats, error) { return proto.QueueStats{Workers: 1}, nil }
	why := "nsjail: \x1b[31mno\a\v\U000e0001"
	h.server.Unfit = func() string { return why }
	a := h.do("GET", "/readyz", "").want(503, "service_unavailable")
	if a.json()["missing"] != "worker" || a.json()["message"] != "the worker here accepts no jobs: "+why {
		t.Errorf("unfit: %s", a.body)
	}
	why = ""
	h.do("GET", "/readyz", "").want(200, "")
	h.server.Drain()
	if a := h.do("GET", "/readyz", "").want(503, "service_unavailable"); a.json()["missing"] != "server" {
		t.Errorf("draining: %s", a.body)
	}
}

func TestSecurityHeaders(t *testing.T) {
	h := newHarness(t)
	h.server.TrustedProxies = []netip.Prefix{netip.MustParsePrefix("127.0.0.0/8")}
	for path, policy := range map[string]string{
		"/healthz": web.ContentPolicy, "/metrics": web.ContentPolicy,
		"/v1/executions/x": web.ContentPolicy, "/none": web.ContentPolicy, "/docs": docsPolicy, "/console/": consolePolicy,
	} {
		header := h.do("GET", path, "").header
		if header.Get("X-Content-Type-Options") != "nosniff" || header.Get("Referrer-Policy") != "no-referrer" ||
			header.Get("Content-Security-Policy") != policy {
			t.Errorf("%s: %v", path, header)
		}
		if header.Get("Strict-Transport-Security") != "" {
			t.Errorf("%s: strict transport without TLS", path)
		}
	}
	r := h.request("GET", "/healthz", "", "X-Forwarded-Proto", "https")
	r.RemoteAddr = "127.0.0.1:1"
	w := httptest.NewRecorder()
	h.http.Config.Handler.ServeHTTP(w, r)
	if w.Header().Get("Strict-Transport-Security") == "" {
		t.Error("no strict transport over a proxy's TLS")
	}
}
