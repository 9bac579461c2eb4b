package gateway

import (
	"encoding/json"
	"io"
	"net/http"
	"strconv"
	"strings"
	"testing"

	"github.com/getkin/kin-openapi/openapi3"

	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/proto/api"
)

// A field that is dropped silently may be a restriction that was spelled wrong. Only the request to
// run a program ignores unknown fields, as the public contract does.
func TestUnknownFieldsAreRefused(t *testing.T) {
	h := newHarness(t)
	h.stub.finishAtOnce(proto.Exited(0))
	for _, route := range api.Routes() {
		if route.Request == nil || route.ID == "mcp" { // a message of JSON-RPC may have others
			continue
		}
		t.Run(route.ID, func(t *testing.T) {
			body, err := json.Marshal(route.Request)
			if err != nil {
				t.Fatal(err)
			}
			path := strings.NewReplacer("{id}", "t", "{name}", "web", "{slug}", "data").Replace(route.Path)
			text := strings.Replace(`{"env_vars_":{},`+strings.TrimPrefix(string(body), "{"), ",}", "}", 1)
			if route.ID == "execute" {
				h.in(t).do(route.Method, path, text).want(http.StatusOK, "")
				return
			}
			h.in(t).do(route.Method, path, text).want(http.StatusBadRequest, "validation_error", "env_vars_")
		})
	}
}

func TestQueriesAreStrict(t *testing.T) {
	h := newHarness(t)
	id := string(h.run())
	for query, word := range map[string]string{
		"/v1/threads?limit=1&limit=2":              "limit must be given only once",
		"/v1/executions/" + id + "?wait=0&wait=1":  "wait must be given only once",
		"/v1/threads?limit=1;cursor=a":             "query",
		"/v1/threads?cursor=%zz":                   "query",
		"/v1/admin/dead-letters?cursor=a&cursor=b": "cursor must be given only once",
	} {
		h.do("GET", query, "").want(http.StatusBadRequest, "validation_error", word)
	}
	h.do("GET", "/v1/threads?limit=1&unknown=1", "").want(http.StatusOK, "")
}

// The limits in the OpenAPI document are the limits of the server.
func TestDocumentedLimits(t *testing.T) {
	h := newHarness(t)
	h.server.ImageAdmin = &imageStub{registry: h.registry}
	h.remount()
	id := string(h.run())
	doc, err := contract()
	if err != nil {
		t.Fatal(err)
	}
	for path, item := range doc.Paths.Map() {
		if item.Get == nil {
			continue
		}
		for _, p := range item.Get.Parameters {
			schema := p.Value.Schema.Value
			if p.Value.In != "query" || !schema.Type.Is("integer") {
				continue
			}
			if schema.Max == nil {
				t.Errorf("%s: %s has no maximum", path, p.Value.Name)
				continue
			}
			above := strings.Replace(path, "{id}", id, 1) + "?" + p.Value.Name + "=" +
				strconv.FormatInt(int64(*schema.Max)+1, 10)
			h.do("GET", above, "").want(http.StatusBadRequest, "validation_error", p.Value.Name)
		}
	}
	name := strings.Repeat("n", 255)
	for path, valid := range map[string]bool{
		"": true, "a//./b/": true, "/home/baponi/" + name + "/" + name: true, name + "n": false, "a/" + name + "n/b": false,
		"a\x00": false, "a/../b": false, "..": false, "a..b/..c/...": true,
	} {
		text, err := json.Marshal(map[string]any{"source": "thread", "id": "t", "path": path})
		if err != nil {
			t.Fatal(err)
		}
		got := documented(t, "FileListRequest", string(text))
		if a := h.do("POST", "/v1/files/list", string(text)); (a.status == http.StatusOK) != valid || got != valid {
			t.Errorf("path %.20q: answered %d, documented as %v", path, a.status, got)
		}
	}
}

// documented reports whether a body is valid for the document.
func documented(t *testing.T, schema, body string) bool {
	t.Helper()
	doc, err := contract()
	if err != nil {
		t.Fatal(err)
	}
	var value any
	if err := json.Unmarshal([]byte(body), &value); err != nil {
		t.Fatal(err)
	}
	return doc.Components.Schemas[schema].Value.VisitJSON(value, openapi3.EnableJSONSchema2020()) == nil
}

func TestDocumentedLimitsOfWebhooks(t *testing.T) {
	h := newHarness(t)
	for body, valid := range map[string]bool{
		`"url":"https://example.com"`: true, `"url":"https://example.com:8443/a@b?c=d#e"`: true,
		`"url":"https://[2001:db8::1]/"`: true,
		`"url":"ftp://example.com"`:      false, `"url":"https://"`: false, `"url":"https://:443/"`: false,
		`"url":"example.com"`:               false,
		`"url":"https://user@example.com/"`: false, `"url":"https://example.com/a b"`: false,
		`"url":"https://example.com/\u0085"`: false,
		`"secret":"0123456789abcdef"`:        true, `"secret":"0123456789abcde"`: false,
		`"secret":"whsec_` + strings.Repeat("A", 32) + `"`: true, `"secret":"whsec_` + strings.Repeat("A", 28) + `"`: false,
		`"secret":"whsec_` + strings.Repeat("A", 86) + `=="`: true, `"secret":"whsec_` + strings.Repeat("A", 92) + `"`: false,
		`"secret":"whsec_` + strings.Repeat("_", 32) + `"`: false,
		`"signature_headers":["X-A","Sig-Signature"]`:      true, `"signature_headers":["Content-Type"]`: false,
		`"signature_headers":["X-"]`: false,
		`"max_attempts":21`:          false, `"timeout":31`: false,
	} {
		whole := "{" + body + "}"
		if !strings.HasPrefix(body, `"url"`) {
			whole = `{"url":"https://example.com",` + body + "}"
		}
		a := h.do("PUT", webhookPath, whole)
		if got := documented(t, "WebhookRequest", whole); got != valid || (a.status == http.StatusOK) != valid {
			t.Errorf("%s: documented as %v, answered %d %s", body, got, a.status, a.body)
		}
	}
}

func TestHead(t *testing.T) {
	h := newHarness(t)
	ended := string(h.run())
	h.stub.onSubmit = nil
	running := h.execute(hello, "Prefer", "respond-async").trace()
	h.stub.start(running)
	h.addThread("acme", "t")
	for path, status := range map[string]int{
		"/v1/executions/" + ended: 200, "/v1/executions/x": 404, "/v1/executions/" + string(running) + "/output": 200,
		"/v1/threads":   200,
		"/v1/threads/t": 200, "/v1/threads/t/archive": 200, "/v1/threads/u/archive": 404, "/v1/admin/keys": 200,
		"/openapi.json": 200, "/docs": 200,
		"/metrics": 200, "/readyz": 200,
	} {
		resp, err := h.client.Do(h.request(http.MethodHead, path, ""))
		if err != nil {
			t.Fatal(err)
		}
		body, err := io.ReadAll(resp.Body)
		_ = resp.Body.Close()
		if resp.StatusCode != status || len(body) > 0 || err != nil || resp.Header.Get("Content-Type") == "" &&
			path != "/metrics" {
			t.Errorf("%s: %s with %d bytes, %v, %v", path, resp.Status, len(body), resp.Header, err)
		}
	}
}
