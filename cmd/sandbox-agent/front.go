package main

import (
	"crypto/sha256"
	"crypto/subtle"
	"net"
	"net/http"
	"net/netip"
	"net/url"
	"slices"
	"strings"

	"github.com/bullpen-run/bullpen/agent/sessions/rest"
)

// front forwards requests to the routes of the Sandbox Agent API of the embedded server. It hides
// the server's other routes, and replaces a client's token with the server's API key.
type front struct {
	*serverCommand
	token  string // empty if requests need no token
	key    string // of the embedded server
	local  bool   // whether the server listens on a loopback address
	server http.Handler
}

func newFront(c *serverCommand, token, key string, server http.Handler) *front {
	return &front{c, token, key, loopback(c.Host), server}
}

// ServeHTTP implements [http.Handler].
func (f *front) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	if f.answerCORS(w, r) {
		return
	}
	if f.token == "" && !f.trusts(r) {
		http.Error(w, "This server needs no token, so it accepts no requests of other sites' web pages. Start it with "+
			"--cors-allow-origin for one.", http.StatusForbidden)
		return
	}
	allowed := f.token == "" || equal(rest.Token(r), f.token)
	r = r.Clone(r.Context())
	r.Header.Del("Authorization") // without it, the server responds with 401, except to public routes
	if allowed {
		r.Header.Set("Authorization", "Bearer "+f.key)
	}
	r.Header.Del("Origin") // already checked
	if r.URL.RawPath != "" {
		r.URL.RawPath = rest.Prefix + r.URL.RawPath
	}
	r.URL.Path = rest.Prefix + r.URL.Path
	f.server.ServeHTTP(w, r)
}

// equal compares tokens in constant time.
func equal(a, b string) bool {
	x, y := sha256.Sum256([]byte(a)), sha256.Sum256([]byte(b))
	return subtle.ConstantTimeCompare(x[:], y[:]) == 1
}

// trusts reports whether a request without a token comes from a program, or from a web page that
// may call this server. Otherwise, any page that a user of this machine visits could use the
// server. Against DNS rebinding, a server on a loopback address requires a loopback host name.
func (f *front) trusts(r *http.Request) bool {
	if host, _, err := net.SplitHostPort(r.Host); f.local && !loopback(r.Host) && (err != nil || !loopback(host)) {
		return false
	}
	origin := r.Header.Get("Origin")
	if origin == "" || slices.Contains(f.CORSAllowOrigin, origin) {
		return true
	}
	u, err := url.Parse(origin)
	return err == nil && strings.EqualFold(u.Host, r.Host)
}

// loopback reports whether a host is a loopback address or localhost, without asking a resolver.
func loopback(host string) bool {
	addr, err := netip.ParseAddr(strings.Trim(host, "[]"))
	return err == nil && addr.IsLoopback() || strings.EqualFold(host, "localhost")
}

// answerCORS sets the CORS headers. It reports whether the request was a preflight, which it
// answers.
func (f *front) answerCORS(w http.ResponseWriter, r *http.Request) bool {
	origin, h := r.Header.Get("Origin"), w.Header()
	if len(f.CORSAllowOrigin) == 0 || origin == "" {
		return false
	}
	h.Add("Vary", "origin, access-control-request-method, access-control-request-headers")
	allowed := slices.Contains(f.CORSAllowOrigin, origin)
	if allowed {
		h.Set("Access-Control-Allow-Origin", origin)
		if f.CORSAllowCredentials {
			h.Set("Access-Control-Allow-Credentials", "true")
		}
	}
	method := r.Header.Get("Access-Control-Request-Method")
	if r.Method != http.MethodOptions || method == "" {
		return false
	}
	if allowed {
		setList(h, "Access-Control-Allow-Methods", f.CORSAllowMethod, method)
		setList(h, "Access-Control-Allow-Headers", f.CORSAllowHeader, r.Header.Get("Access-Control-Request-Headers"))
	}
	w.WriteHeader(http.StatusOK)
	return true
}

// setList sets a header to a list, or to requested if the list is empty.
func setList(h http.Header, name string, list []string, requested string) {
	if len(list) > 0 {
		requested = strings.Join(list, ",")
	}
	if requested != "" {
		h.Set(name, requested)
	}
}
