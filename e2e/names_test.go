package e2e

import (
	"net/http"
	"net/url"
	"strings"
	"testing"

	schema "github.com/bullpen-run/bullpen/proto/api"
)

// testNames asks every route that names something, in its path or its query, for what cannot exist.
// Each answer is final: nobody waits for it, or is told to send it again.
func testNames(t *testing.T, p *programs) {
	sys := newSystem(t, p, topology{separate: true}, noSlots)
	eventually(t, "the gateway answers", func() (bool, any) {
		r, err := sys.try(t.Context(), http.MethodGet, "/v1/admin/keys", nil)
		return err == nil && r.status == http.StatusOK, err
	})
	names := []string{
		"nothing", "a b", "~", "*", ">", ".", "..", "a..b", ".a", "a.", "é", "\x00", "a\x00b", "key.*",
		"$KV", "%2A", strings.Repeat("a", 1000),
	}
	named := map[string]bool{
		"key": true, "org": true, "schedule": true, "batch": true, "pipeline": true,
		"thread_id": true, "trace_id": true, "cursor": true,
	}
	requests := 0
	ask := func(route *schema.Route, path string) {
		var body any
		if route.Request != nil {
			body = route.Request
		}
		// Only the head is read, since a stream of changes does not end.
		r, err := sys.open(t.Context(), route.Method, path, body)
		if err != nil {
			t.Fatalf("%s %q: %v", route.Method, path, err)
		}
		_ = r.Body.Close() // there may be more
		requests++
		if r.StatusCode >= 500 || strings.HasPrefix(path, "/v1/admin") && r.Header.Get("Retry-After") != "" {
			t.Errorf("%s %q: %s", route.Method, path, r.Status)
		}
	}
	for _, route := range schema.Routes() {
		begin, end := strings.IndexByte(route.Path, '{'), strings.IndexByte(route.Path, '}')
		for _, name := range names {
			if begin >= 0 {
				ask(&route, route.Path[:begin]+url.PathEscape(name)+route.Path[end+1:])
				for _, c := range "~*" { // escapes that are not necessary
					if strings.ContainsRune(name, c) {
						ask(&route, route.Path[:begin]+strings.ReplaceAll(url.PathEscape(name), string(c),
							map[rune]string{'~': "%7E", '*': "%2A"}[c])+route.Path[end+1:])
					}
				}
				continue
			}
			for _, param := range route.Params {
				if param.In == "query" && named[param.Name] && route.Request == nil {
					ask(&route, route.Path+"?"+param.Name+"="+url.QueryEscape(name))
				}
			}
		}
	}
	if requests < 1000 {
		t.Errorf("only %d requests", requests)
	}
}
