package main

import (
	"net/http"
	"net/http/httptest"
	"testing"
)

// serve sends a request through the front, and returns the answer and what has reached the server.
func serve(t *testing.T, c *serverCommand, token, method, url string, header map[string]string) (
	resp *http.Response, reached *http.Request,
) {
	t.Helper()
	f := newFront(c, token, "sk-key", http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) { reached = r }))
	r := httptest.NewRequest(method, url, http.NoBody)
	for name, value := range header {
		r.Header.Set(name, value)
	}
	w := httptest.NewRecorder()
	f.ServeHTTP(w, r)
	return w.Result(), reached
}

// TestFrontPaths checks that the server gets the paths of the API, below its prefix, and the API key instead of the
// token.
func TestFrontPaths(t *testing.T) {
	for path, want := range map[string]string{
		"/":                           "/sandbox-agent/",
		"/v1/sessions/a%2Fb/events":   "/sandbox-agent/v1/sessions/a%2Fb/events",
		"/v1/fs/file?path=x":          "/sandbox-agent/v1/fs/file?path=x",
		"/sandbox-agent/../v1/agents": "/sandbox-agent/sandbox-agent/../v1/agents",
	} {
		for given, key := range map[string]string{"Bearer token": "Bearer sk-key", "Bearer sk-key": "", "": ""} {
			_, r := serve(t, &serverCommand{Host: "127.0.0.1"}, "token", http.MethodGet, "http://127.0.0.1:2468"+path,
				map[string]string{"Authorization": given})
			if r == nil || r.URL.RequestURI() != want || r.Header.Get("Authorization") != key {
				t.Errorf("%s with %q reaches the server as %v", path, given, r)
			}
		}
	}
}

// TestNoToken checks that web pages of other sites cannot use a server that needs no token.
func TestNoToken(t *testing.T) {
	for _, test := range []struct {
		host, url, origin string
		allowed           bool
	}{
		{"127.0.0.1", "http://127.0.0.1:2468/", "", true},
		{"127.0.0.1", "http://localhost:2468/", "", true},
		{"127.0.0.1", "http://localhost:2468/", "http://localhost:2468", true},
		{"127.0.0.1", "http://localhost/", "https://app.example.com", true},
		{"127.0.0.1", "http://localhost:2468/", "http://localhost:3000", false},
		{"127.0.0.1", "http://127.0.0.1:2468/", "https://example.com", false},
		{"127.0.0.1", "http://127.0.0.1:2468/", "null", false},
		{"127.0.0.1", "http://rebound.example.com:2468/", "", false},
		{"127.0.0.1", "http://rebound.example.com:2468/", "http://rebound.example.com:2468", false},
		{"::1", "http://[::1]:2468/", "", true},
		{"::1", "http://[::1]/", "", true},
		{"0.0.0.0", "http://2468-sandbox.example.com/", "", true},
		{"0.0.0.0", "http://2468-sandbox.example.com/", "http://2468-sandbox.example.com", true},
		{"0.0.0.0", "http://2468-sandbox.example.com/", "https://example.com", false},
	} {
		c := &serverCommand{Host: test.host, CORSAllowOrigin: []string{"https://app.example.com"}}
		header := map[string]string{}
		if test.origin != "" {
			header["Origin"] = test.origin
		}
		resp, r := serve(t, c, "", http.MethodPost, test.url, header)
		if (r != nil) != test.allowed || (resp.StatusCode != http.StatusForbidden) != test.allowed {
			t.Errorf("%s on %s from %q: %s", test.url, test.host, test.origin, resp.Status)
		}
		if r != nil && r.Header.Get("Authorization") != "Bearer sk-key" {
			t.Errorf("%s on %s: the server has no key", test.url, test.host)
		}
	}
}

// TestCORS checks what web pages are told, with and without lists of methods and headers.
func TestCORS(t *testing.T) {
	const page, method, headers = "https://app.example.com", "PUT", "authorization,x-other"
	some := &serverCommand{
		CORSAllowOrigin: []string{page}, CORSAllowMethod: []string{"GET", "POST"}, CORSAllowHeader: []string{"Authorization"},
		CORSAllowCredentials: true,
	}
	all := &serverCommand{CORSAllowOrigin: []string{page}}
	for _, test := range []struct {
		c                                     *serverCommand
		method, origin                        string
		allowed, methods, headers, credential string
		reached                               bool
	}{
		{some, "OPTIONS", page, page, "GET,POST", "Authorization", "true", false},
		{all, "OPTIONS", page, page, method, headers, "", false},
		{some, "OPTIONS", "https://example.com", "", "", "", "", false},
		{some, "GET", page, page, "", "", "true", true},
		{some, "GET", "https://example.com", "", "", "", "", true},
		{some, "GET", "", "", "", "", "", true},
		{&serverCommand{}, "OPTIONS", page, "", "", "", "", true},
	} {
		header := map[string]string{"Authorization": "Bearer token"}
		if test.origin != "" {
			header["Origin"] = test.origin
		}
		if test.method == http.MethodOptions {
			header["Access-Control-Request-Method"], header["Access-Control-Request-Headers"] = method, headers
		}
		resp, r := serve(t, test.c, "token", test.method, "http://127.0.0.1:2468/v1/agents", header)
		for name, want := range map[string]string{
			"Origin": test.allowed, "Methods": test.methods, "Headers": test.headers, "Credentials": test.credential,
		} {
			if got := resp.Header.Get("Access-Control-Allow-" + name); got != want {
				t.Errorf("%s from %q: %s %q, want %q", test.method, test.origin, name, got, want)
			}
		}
		if resp.StatusCode != http.StatusOK || (r != nil) != test.reached {
			t.Errorf("%s from %q: %s, reaches the server: %t", test.method, test.origin, resp.Status, r != nil)
		}
	}
}
