package gateway

import (
	"bufio"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/bullpen-run/bullpen/gateway/web"
	"github.com/bullpen-run/bullpen/proto"
)

// body returns an execute request with one more field.
func body(field string, value any) string {
	m := map[string]any{"code": "1", field: value}
	text, err := json.Marshal(m)
	if err != nil {
		panic(err)
	}
	return string(text)
}

func numbered(n int, key, value string) map[string]string {
	m := map[string]string{}
	for i := range n {
		m[fmt.Sprintf(key, i)] = value
	}
	return m
}

func paths(n int) []string {
	var list []string
	for i := range n {
		list = append(list, fmt.Sprintf("/data/s%d/p", i))
	}
	return list
}

// TestLimits sends values at every limit of the contract and just beyond it.
func TestLimits(t *testing.T) {
	const slow = 1 << 20
	long := strings.Repeat
	type request struct {
		name, body string
		status     int
	}
	tests := map[string][]request{
		"code": {
			{"1 byte", `{"code":"1"}`, 200},
			{"1 MB", body("code", long("é", slow/2)), 200},
			{"1 MB + 1", body("code", long("é", slow/2)+"1"), 400},
			{"empty", `{"code":""}`, 400},
			{"missing", `{}`, 400},
			{"twice", `{"code":"1","\u0063ode":"1"}`, 400},
			{"null", `{"code":null}`, 400},
			{"number", `{"code":1}`, 400},
			{"array", `{"code":["1"]}`, 400},
			{"lone high surrogate", `{"code":"\ud800"}`, 400},
			{"lone low surrogate", `{"code":"\udc00x"}`, 400},
			{"high and no low surrogate", `{"code":"\ud800\u0041"}`, 400},
			{"surrogate pair", `{"code":"\ud83d\ude00"}`, 200},
			{"escaped backslash before u", `{"code":"\\ud800"}`, 200},
			{"not UTF-8", "{\"code\":\"\xff\"}", 400},
			{"NUL", `{"code":"\u0000"}`, 200},
		},
		"language": {
			{"python", body("language", "python"), 200},
			{"node", body("language", "node"), 200},
			{"bash", body("language", "bash"), 200},
			{"null", body("language", nil), 200},
			{"unknown", body("language", "perl"), 400},
			{"case", body("language", "Python"), 400},
			{"empty", body("language", ""), 400},
			{"number", body("language", 3), 400},
		},
		"timeout": {
			{"1", body("timeout", 1), 200},
			{"null", body("timeout", nil), 200},
			{"0", body("timeout", 0), 400},
			{"-0", `{"code":"1","timeout":-0}`, 400},
			{"negative", body("timeout", -1), 400},
			{"very negative", `{"code":"1","timeout":-99999999999999999999}`, 400},
			{"fraction", body("timeout", 1.5), 400},
			{"whole fraction", `{"code":"1","timeout":1.0}`, 200},
			{"exponent", `{"code":"1","timeout":1e1}`, 200},
			{"negative exponent", `{"code":"1","timeout":1e-1}`, 400},
			{"string", body("timeout", "60"), 400},
			{"true", body("timeout", true), 400},
		},
		"max_attempts": {
			{"1", body("max_attempts", 1), 200},
			{"10", body("max_attempts", 10), 200},
			{"null", body("max_attempts", nil), 200},
			{"0", body("max_attempts", 0), 400},
			{"11", body("max_attempts", 11), 400},
			{"huge", `{"code":"1","max_attempts":1e400}`, 400},
			{"string", body("max_attempts", "1"), 400},
		},
		"metadata": {
			{"10 keys", body("metadata", numbered(10, "k%d", "v")), 200},
			{"11 keys", body("metadata", numbered(11, "k%d", "v")), 400},
			{"key of 40", body("metadata", map[string]string{long("k", 40): "v"}), 200},
			{"key of 41", body("metadata", map[string]string{long("k", 41): "v"}), 400},
			{"empty key", body("metadata", map[string]string{"": "v"}), 400},
			{"key characters", body("metadata", map[string]string{"0a_.-Z": "v"}), 200},
			{"key starts with a dot", body("metadata", map[string]string{".a": "v"}), 400},
			{"key with a new line", body("metadata", map[string]string{"a\n": "v"}), 400},
			{"value of 256", body("metadata", map[string]string{"k": long("é", 256)}), 200},
			{"value of 257", body("metadata", map[string]string{"k": long("é", 257)}), 400},
			{"empty value", body("metadata", map[string]string{"k": ""}), 200},
			{"value is a number", `{"code":"1","metadata":{"k":1}}`, 400},
			{"value is null", `{"code":"1","metadata":{"k":null}}`, 400},
			{"array", body("metadata", []string{}), 400},
			{"null", body("metadata", nil), 200},
		},
		"env_vars": {
			{"50", body("env_vars", numbered(50, "K%d", "v")), 200},
			{"51", body("env_vars", numbered(51, "K%d", "v")), 400},
			{"name of 128", body("env_vars", map[string]string{long("K", 128): "v"}), 200},
			{"name of 129", body("env_vars", map[string]string{long("K", 129): "v"}), 400},
			{"lower case", body("env_vars", map[string]string{"k": "v"}), 400},
			{"digit first", body("env_vars", map[string]string{"1K": "v"}), 400},
			{"empty name", body("env_vars", map[string]string{"": "v"}), 400},
			{"value of 4096", body("env_vars", map[string]string{"K": long("é", 4096)}), 200},
			{"value of 4097", body("env_vars", map[string]string{"K": long("é", 4097)}), 400},
			{"tab, newline, return", body("env_vars", map[string]string{"K": "\t\n\r"}), 200},
			{"NUL", body("env_vars", map[string]string{"K": "\x00"}), 400},
			{"escape", body("env_vars", map[string]string{"K": "\x1b"}), 400},
			{"delete", body("env_vars", map[string]string{"K": "\x7f"}), 400},
			{"C1", body("env_vars", map[string]string{"K": "\u0085"}), 400},
			{"65536 bytes", body("env_vars", numbered(16, "K%03d", long("v", 4092))), 200},
			{"65537 bytes", body("env_vars", map[string]string{
				"A": long("é", 4096), "B": long("é", 4096), "C": long("é", 4096), "D": long("é", 4096),
				"E": long("é", 4096), "F": long("é", 4096), "G": long("é", 4096), "H": long("é", 4092) + "v",
			}), 400},
			{"reserved", body("env_vars", map[string]string{"PATH": "/"}), 400},
			{"reserved prefix", body("env_vars", map[string]string{"LD_PRELOAD": "x"}), 400},
			{"underscore", body("env_vars", map[string]string{"_X": "x"}), 400},
			{"PYTHONPATHS is not reserved", body("env_vars", map[string]string{"PYTHONPATHS": "x"}), 200},
			{"TZ is not reserved", body("env_vars", map[string]string{"TZ": "UTC"}), 200},
			{"value is a number", `{"code":"1","env_vars":{"K":1}}`, 400},
			{"string", body("env_vars", "A=1"), 400},
			{"null", body("env_vars", nil), 200},
		},
		"thread_id": {
			{"128", body("thread_id", long("t", 128)), 200},
			{"129", body("thread_id", long("t", 129)), 400},
			{"empty", body("thread_id", ""), 400},
			{"dash first", body("thread_id", "-a"), 400},
			{"new line last", body("thread_id", "a\n"), 400},
			{"number", body("thread_id", 1), 400},
			{"null", body("thread_id", nil), 200},
		},
		"webhook_url": {
			{"2048", body("webhook_url", "https://example.com/"+long("a", 2048-20)), 200},
			{"2049", body("webhook_url", "https://example.com/"+long("a", 2049-20)), 400},
			{"http", body("webhook_url", "http://example.com/"), 400},
			{"user", body("webhook_url", "https://u:p@example.com/"), 400},
			{"no host", body("webhook_url", "https:///x"), 400},
			{"port only", body("webhook_url", "https://:443/x"), 400},
			{"relative", body("webhook_url", "/x"), 400},
			{"empty", body("webhook_url", ""), 400},
			{"control", body("webhook_url", "https://example.com/\r\nX: 1"), 400},
			{"space", body("webhook_url", "https://example.com/ x"), 400},
			{"number", body("webhook_url", 1), 400},
			{"null", body("webhook_url", nil), 200},
		},
		"sub_paths": {
			{"10", body("sub_paths", paths(10)), 403}, // valid, and of no connection of the key
			{"11", body("sub_paths", paths(11)), 400},
			{"none", body("sub_paths", []string{}), 200},
			{"512", body("sub_paths", []string{"/data/s/" + long("é/", 252)}), 403},
			{"513", body("sub_paths", []string{"/data/s/" + long("é/", 252) + "é"}), 400},
			{"component of 255", body("sub_paths", []string{"/data/s/" + long("a", 255)}), 403},
			{"component of 256", body("sub_paths", []string{"/data/s/" + long("a", 256)}), 400},
			{"slash at the end", body("sub_paths", []string{"/data/s/a/"}), 403},
			{"empty component", body("sub_paths", []string{"/data/s/a//b"}), 400},
			{"two slashes at the end", body("sub_paths", []string{"/data/s/a//"}), 400},
			{"dot", body("sub_paths", []string{"/data/s/a/./b"}), 400},
			{"slug twice", body("sub_paths", []string{"/data/s/a", "/data/s/b"}), 400},
			{"no path", body("sub_paths", []string{"/data/s"}), 400},
			{"empty path", body("sub_paths", []string{"/data/s/"}), 400},
			{"elsewhere", body("sub_paths", []string{"/etc/s/p"}), 400},
			{"dots", body("sub_paths", []string{"/data/s/../p"}), 400},
			{"escaped dot", body("sub_paths", []string{"/data/s/%2E%2e/p"}), 400},
			{"escaped slash", body("sub_paths", []string{"/data/s/a%2Fp"}), 400},
			{"escaped backslash", body("sub_paths", []string{"/data/s/%5cp"}), 400},
			{"escaped NUL", body("sub_paths", []string{"/data/s/%00"}), 400},
			{"escaped percent", body("sub_paths", []string{"/data/s/%252e"}), 400},
			{"overlong", body("sub_paths", []string{"/data/s/%C0%ae"}), 400},
			{"overlong c1", body("sub_paths", []string{"/data/s/%c1"}), 400},
			{"NUL", body("sub_paths", []string{"/data/s/\x00"}), 400},
			{"backslash", body("sub_paths", []string{`/data/s/\p`}), 400},
			{"numbers", `{"code":"1","sub_paths":[1]}`, 400},
			{"string", body("sub_paths", "/data/s/p"), 400},
			{"null", body("sub_paths", nil), 200},
		},
		"body": {
			{"empty", ``, 400},
			{"white space", " \n", 400},
			{"not JSON", `code=1`, 400},
			{"second value", `{"code":"1"} {}`, 400},
			{"white space after it", `{"code":"1"}` + "\n ", 200},
			{"array", `[{"code":"1"}]`, 400},
			{"string", `"code"`, 400},
			{"null", `null`, 400},
			{"cut off", `{"code":"1`, 400},
			{"name is not UTF-8", "{\"code\":\"1\",\"\xff\":1}", 400},
			{"very deep", `{"code":"1","x":` + long(`[`, 1<<20) + long(`]`, 1<<20) + `}`, 400},
			{"deep", `{"code":"1","x":` + long(`[`, 9000) + long(`]`, 9000) + `}`, 200},
			{"unknown fields", `{"code":"1","Code":2,"x":{"a":[1,"}"],"b":"\""}}`, 200},
			{"unknown field twice", `{"code":"1","x":1,"x":2}`, 200},
		},
		"x": {{"unknown field not UTF-8", "{\"code\":\"1\",\"x\":\"\xff\"}", 400}},
	}
	h := newHarness(t)
	h.stub.finishAtOnce(proto.Exited(0))
	codes := map[int]string{200: "", 400: "validation_error", 403: "forbidden"}
	for field, requests := range tests {
		for _, r := range requests {
			t.Run(field+"/"+r.name, func(t *testing.T) {
				h.in(t).execute(r.body).want(r.status, codes[r.status], field)
			})
		}
	}
}

func TestCodeIsPassedUnchanged(t *testing.T) {
	h := newHarness(t)
	h.stub.finishAtOnce(proto.Exited(0))
	code := "\ufeff\x00\r\n\t\"\\\u2028😀\x7f</script>"
	a := h.execute(body("code", code)).want(200, "")
	if got := h.stub.runs[a.trace()].job.Code; got != code {
		t.Errorf("code %q, want %q", got, code)
	}
}

func TestReservedNamesAreNotListed(t *testing.T) {
	h := newHarness(t)
	a := h.execute(body("env_vars", map[string]string{"HOME": "/"})).want(400, "validation_error", "env_vars", "reserved")
	if strings.Contains(string(a.body), "PATH") {
		t.Errorf("message %s", a.body)
	}
}

func TestBodyCap(t *testing.T) {
	h := newHarness(t)
	h.stub.finishAtOnce(proto.Exited(0))
	pad := func(n int) string { return hello + strings.Repeat(" ", n-len(hello)) }
	h.execute(pad(web.DefaultMaxBody)).want(200, "")
	h.execute(pad(web.DefaultMaxBody+1)).want(413, "payload_too_large", "body")

	t.Run("chunked", func(t *testing.T) {
		h := h.in(t)
		for size, status := range map[int]int{web.DefaultMaxBody: 200, web.DefaultMaxBody + 1: 413} {
			r := h.request(http.MethodPost, "/v1/sandbox/execute", pad(size))
			r.ContentLength = -1
			if a := h.send(r); a.status != status {
				t.Errorf("%d bytes: status %d, want %d", size, a.status, status)
			}
		}
	})
	t.Run("100 MB", func(t *testing.T) {
		h := h.in(t)
		for _, length := range []int64{100 << 20, -1} {
			r := h.request(http.MethodPost, "/v1/sandbox/execute", "")
			r.Body, r.ContentLength = io.NopCloser(io.LimitReader(spaces{}, 100<<20)), length
			if a := h.send(r).want(413, "payload_too_large", "body"); !a.closed {
				t.Error("the connection stays open for the rest")
			}
		}
	})
	t.Run("shorter than its Content-Length", func(t *testing.T) {
		if resp := h.in(t).raw("Content-Length: 99999999999\r\n\r\n{"); resp.StatusCode != http.StatusRequestEntityTooLarge ||
			!resp.Close {
			t.Errorf("%v", resp)
		}
	})
	t.Run("admin", func(t *testing.T) {
		h := h.in(t)
		h.do(http.MethodPost, "/v1/admin/keys", pad(web.DefaultMaxBody+1)).want(413, "payload_too_large", "body")
	})
}

func TestBodyThatEndsEarly(t *testing.T) {
	h := newHarness(t)
	conn, err := h.dial()
	if err != nil {
		t.Fatal(err)
	}
	h.write(conn, "Content-Length: 100\r\n\r\n"+hello)
	_ = conn.Close()
	h.http.Close() // returns after its handlers
	if len(h.stub.submitted) != 0 {
		t.Error("half a request was submitted")
	}
}

// A compressed program must not run as if it were uncompressed.
func TestContentEncoding(t *testing.T) {
	h := newHarness(t)
	h.stub.finishAtOnce(proto.Exited(0))
	for _, coding := range []string{"gzip", "Identity, gzip", "br", "x"} {
		for _, path := range []string{"/v1/sandbox/execute", "/v1/admin/keys", "/v1/admin/profiles"} {
			a := h.do(http.MethodPost, path, hello, "Content-Encoding", coding).want(415, "unsupported_media_type",
				"Content-Encoding")
			if a.header.Get("Accept-Encoding") != "identity" || !a.closed {
				t.Errorf("%s: headers %v", coding, a.header)
			}
		}
	}
	h.execute(hello, "Content-Encoding", "IDENTITY").want(200, "")
}

// If two readers could disagree about the end of a request, nothing else is read from its
// connection.
func TestAmbiguousEndClosesTheConnection(t *testing.T) {
	const chunked = "Transfer-Encoding: chunked\r\n"
	body := fmt.Sprintf("%x\r\n%s\r\n0\r\n\r\n", len(hello), hello)
	smuggled := "GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n"
	for name, tt := range map[string]struct {
		rest   string
		status int
	}{
		"both lengths, the second true": {chunked + fmt.Sprintf("Content-Length: %d\r\n\r\n", len(body)) + body, 200},
		"both lengths, chunked true":    {"Content-Length: 4\r\n" + chunked + "\r\n" + body, 200},
		"two lengths":                   {"Content-Length: 4\r\nContent-Length: 5\r\n\r\n" + body, 400},
		"an unknown coding":             {"Transfer-Encoding: x, chunked\r\n\r\n" + body, 501},
		"two codings":                   {chunked + chunked + "\r\n" + body, 501},
	} {
		t.Run(name, func(t *testing.T) {
			h := newHarness(t)
			h.stub.finishAtOnce(proto.Exited(0))
			conn, err := h.dial()
			if err != nil {
				t.Fatal(err)
			}
			defer func() { _ = conn.Close() }()
			// if the connection stays open, nothing more arrives
			if err := conn.SetDeadline(time.Now().Add(30 * time.Second)); err != nil {
				t.Fatal(err)
			}
			go h.writeAll(conn, tt.rest+smuggled)
			answers := bufio.NewReader(conn)
			resp, err := http.ReadResponse(answers, nil)
			if err != nil {
				t.Fatal(err)
			}
			if _, err := io.Copy(io.Discard, resp.Body); err != nil {
				t.Fatal(err)
			}
			if resp.StatusCode != tt.status || !resp.Close {
				t.Errorf("answer %v", resp)
			}
			if more, err := io.ReadAll(answers); len(more) > 0 {
				t.Errorf("%s, %v after the answer", more, err)
			}
		})
	}
}

type spaces struct{}

func (spaces) Read(p []byte) (int, error) {
	for i := range p {
		p[i] = ' '
	}
	return len(p), nil
}

func TestUnknownPathsAndMethods(t *testing.T) {
	h := newHarness(t)
	for _, path := range []string{
		"/v1", "/v1/", "/v1/nothing", "/v2/sandbox/execute", "/v1/sandbox/execute/",
		"/v1/executions/", "/docs/nothing", "/v1/executions/trc_AbCdEfGhIjKlMnOpQrSt/x",
	} {
		for _, method := range []string{"GET", "POST", "BREW"} {
			h.do(method, path, "").want(404, "not_found")
		}
	}
	for path, allow := range map[string]string{
		"/v1/sandbox/execute": "POST", "/v1/executions/trc_AbCdEfGhIjKlMnOpQrSt": "GET, HEAD",
		"/v1/executions/x/output": "GET, HEAD",
		"/v1/executions/x/cancel": "POST", "/v1/admin/keys": "GET, HEAD, POST", "/v1/admin/keys/x/rotate": "POST",
		"/v1/admin/profiles": "GET, HEAD, POST", "/healthz": "GET, HEAD",
		"/": "GET, HEAD", "/openapi.json": "GET, HEAD", "/docs": "GET, HEAD", "/console/": "GET, HEAD",
		"/metrics": "GET, HEAD", "/v1/admin/images": "GET, HEAD", "/v1/executions/x/webhook": "GET, HEAD",
		"/v1/executions/x/webhook/replay": "POST", "/v1/webhook/rotate": "POST",
		"/v1/webhook/test": "POST", "/v1/webhook/replay-failed": "POST", "/v1/webhook/endpoints": "GET, HEAD",
		"/v1/webhook/endpoints/enable": "POST",
		"/v1/threads":                  "GET, HEAD", "/v1/threads/x/fork": "POST", "/v1/admin/threads/gc": "POST",
		"/v1/files/list":   "POST",
		"/v1/files/delete": "POST", "/v1/files/rename": "POST",
	} {
		for _, method := range []string{"PUT", "PATCH", "OPTIONS", "BREW"} {
			if got := h.do(method, path, "").want(405, "method_not_allowed").header.Get("Allow"); got != allow {
				t.Errorf("%s %s: Allow %q, want %q", method, path, got, allow)
			}
		}
	}
	for path, allow := range map[string]string{
		"/v1/schedules/preview": "GET, HEAD", "/v1/schedules/x": "GET, HEAD, PATCH, DELETE",
		"/v1/pipelines/schema":         "GET, HEAD",
		"/v1/admin/secrets/rotate-key": "POST", "/v1/admin/secrets/x": "GET, HEAD, PUT, DELETE",
	} {
		if got := h.do("OPTIONS", path, "").want(405, "method_not_allowed").header.Get("Allow"); got != allow {
			t.Errorf("%s: Allow %q, want %q", path, got, allow)
		}
	}
	h.do("PUT", "/v1/admin/secrets/rotate-key", `{"value":"value"}`).want(400, "validation_error", "rotate-key")
}
