package gateway

import (
	"net/http"
	"net/netip"
	"net/url"
	"slices"
	"strings"

	"github.com/bullpen-run/bullpen/proto/api"
)

// checkOrigin refuses a request of a web page that is not of this server. A page whose host name
// was made to resolve to this server has the host of the request as its origin, so that the host
// alone proves nothing: the origin must be the server's public URL, be on this machine, or be one
// of CORSOrigins. Requests of other programs have no origin.
func (s *Server) checkOrigin(r *http.Request) error {
	origin := r.Header.Get("Origin")
	if origin == "" || s.ownOrigin(r, origin) || s.allowedOrigin(origin) {
		return nil
	}
	return api.Errorf(api.CodeForbidden, "requests of web pages of this origin are not accepted")
}

// allowedOrigin reports whether an origin is one of CORSOrigins.
func (s *Server) allowedOrigin(origin string) bool {
	return slices.ContainsFunc(s.CORSOrigins, func(allowed string) bool { return strings.EqualFold(allowed, origin) })
}

// ownOrigin reports whether an origin is this server's.
func (s *Server) ownOrigin(r *http.Request, origin string) bool {
	if s.PublicURL != "" && strings.EqualFold(origin, originOf(s.PublicURL)) {
		return true
	}
	u, err := url.Parse(origin)
	return err == nil && strings.EqualFold(u.Host, r.Host) && loopback(u.Hostname())
}

// originOf returns the origin of a URL.
func originOf(address string) string {
	u, err := url.Parse(address)
	if err != nil {
		return ""
	}
	return u.Scheme + "://" + u.Host
}

// loopback reports whether a host is this machine by its name, which no resolver can change.
func loopback(host string) bool {
	if addr, err := netip.ParseAddr(host); err == nil {
		return addr.IsLoopback()
	}
	return strings.EqualFold(host, "localhost")
}

// What web pages of CORSOrigins may send and read. An API key is sent in a header, never by the
// browser on its own, so that credentials are not allowed.
const (
	corsMethods = "GET, HEAD, POST, PUT, PATCH, DELETE"
	corsHeaders = "Accept, Authorization, Content-Encoding, Content-Type, Idempotency-Key, If-Match, If-Range, Last-Event-ID, Mcp-Method, Mcp-Name, Mcp-Protocol-Version, Mcp-Session-Id, " +
		"Prefer, Range, X-Client-Id, X-Request-Id"
	corsExposed = "Content-Range, ETag, Location, Mcp-Session-Id, Preference-Applied, RateLimit, RateLimit-Policy, Retry-After, X-Quota-Warning, X-Request-Id, X-Should-Retry, X-Trace-Id"
	corsMaxAge  = "600" // seconds for which a browser keeps the answer to a preflight
)

// cors lets web pages of CORSOrigins use the server. It answers their preflight requests.
func (s *Server) cors(next http.Handler) http.Handler {
	if len(s.CORSOrigins) == 0 {
		return next
	}
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		h := w.Header()
		h.Add("Vary", "Origin")
		origin := r.Header.Get("Origin")
		if origin == "" || !s.allowedOrigin(origin) {
			next.ServeHTTP(w, r)
			return
		}
		h.Set("Access-Control-Allow-Origin", origin)
		if r.Method != http.MethodOptions || r.Header.Get("Access-Control-Request-Method") == "" {
			h.Set("Access-Control-Expose-Headers", corsExposed)
			next.ServeHTTP(w, r)
			return
		}
		h.Add("Vary", "Access-Control-Request-Method, Access-Control-Request-Headers")
		h.Set("Access-Control-Allow-Methods", corsMethods)
		h.Set("Access-Control-Allow-Headers", corsHeaders)
		h.Set("Access-Control-Max-Age", corsMaxAge)
		w.WriteHeader(http.StatusNoContent)
	})
}
