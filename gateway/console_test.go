package gateway

import (
	"strings"
	"testing"
	"testing/fstest"
)

func TestConsole(t *testing.T) {
	h := newHarness(t)
	for path, location := range map[string]string{"/": "console/", "/console": "console/"} {
		if a := h.do("GET", path, "", "Authorization", ""); a.status != 302 || a.header.Get("Location") != location {
			t.Errorf("%s: %d %q", path, a.status, a.header.Get("Location"))
		}
	}
	for path, cache := range map[string]string{"/console/": "no-cache", "/console/main-1.js": hashedFor} {
		a := h.do("GET", path, "", "Authorization", "").want(200, "")
		if a.header.Get("Cache-Control") != cache || a.header.Get("Content-Security-Policy") != consolePolicy {
			t.Errorf("%s: %v", path, a.header)
		}
	}
	script := h.do("GET", "/console/main-1.js", "")
	if got := script.header.Get("Content-Type"); !strings.HasPrefix(got, "text/javascript") {
		t.Errorf("script: %s", got)
	}
	h.do("GET", "/console/README", "").want(404, "not_found")
}

func TestWithoutConsole(t *testing.T) {
	h := newHarness(t, func(s *Server) { s.Console = fstest.MapFS{"README": {}} })
	if a := h.do("GET", "/console/", "").want(404, "not_found"); !strings.Contains(string(a.body), "make") {
		t.Errorf("%s", a.body)
	}
}
