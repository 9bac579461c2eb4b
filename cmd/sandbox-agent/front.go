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

// front passes requests for the Sandbox Agent API on to the server behind it, whose other routes it hides. It replaces
// the token of clients by the API key of the server.
type front struct {
	*serverCommand
	token  string // empty if none is needed
	key    string
	local  bool // only this machine reaches the server
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
	r.Header.Del("Authorization") // the server answers a request without
	if allowed {
		r.Header.Set("Authorization", "Bearer "+f.key)
	}
	r.Header.Del("Origin") // checked here
	if r.URL.RawPath != "" {
		r.URL.RawPath = rest.Prefix + r.URL.RawPath
	}
	r.URL.Path = rest.Prefix + r.URL.Path
	f.server.ServeHTTP(w, r)
}

// equal compares tokens in a time that does not depend on what they have in common.
func equal(a, b string) bool {
	x, y := sha256.Sum256([]byte(a)), sha256.Sum256([]byte(b))
	return subtle.ConstantTimeCompare(x[:], y[:]) == 1
}

// trusts reports whether a request without a token is one of a program, or of a web page that may call this server.
// Otherwise every page that a user of this machine visits could use the server. A page whose host name was made to
// resolve to this machine has that name as the request's host.
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

// loopback reports whether a host is this machine by its name, which no resolver can change.
func loopback(host string) bool {
	addr, err := netip.ParseAddr(strings.Trim(host, "[]"))
	return err == nil && addr.IsLoopback() || strings.EqualFold(host, "localhost")
}

// answerCORS sets the headers for web pages of other origins. It reports whether it has answered the request, one that
// asks for what such a page may do.
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

// setList sets a header to a list, or to what the client asks for if the list is empty.
func setList(h http.Header, name string, list []string, asked string) {
	if len(list) > 0 {
		asked = strings.Join(list, ",")
	}
	if asked != "" {
		h.Set(name, asked)
	}
}
