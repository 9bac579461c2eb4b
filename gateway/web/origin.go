package web

import (
	"net/http"
	"net/netip"
	"net/url"
	"slices"
	"strings"

	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/proto/api"
)

// CheckOrigin refuses requests of other sites' web pages. The host alone proves nothing: a page
// whose host name was made to resolve to this server has the request's host as its origin. So the
// origin must be the server's public URL, be on this machine, or be one of CORSOrigins. Requests of
// other programs have no origin.
func (c *Core) CheckOrigin(r *Request) error {
	origin := r.Header.Get("Origin")
	if origin == "" || c.OwnOrigin(r.Request, origin) || c.allowedOrigin(origin) {
		return nil
	}
	return api.Errorf(api.CodeForbidden, "requests of web pages of this origin are not accepted")
}

// allowedOrigin reports whether an origin is one of CORSOrigins.
func (c *Core) allowedOrigin(origin string) bool {
	return slices.ContainsFunc(c.CORSOrigins, func(allowed string) bool { return strings.EqualFold(allowed, origin) })
}

// OwnOrigin reports whether an origin is this server's.
func (c *Core) OwnOrigin(r *http.Request, origin string) bool {
	if c.PublicURL != "" && strings.EqualFold(origin, originOf(c.PublicURL)) {
		return true
	}
	u, err := url.Parse(origin)
	return err == nil && strings.EqualFold(u.Host, r.Host) && Loopback(u.Hostname())
}

// originOf returns the origin of a URL.
func originOf(address string) string {
	u, err := url.Parse(address)
	if err != nil {
		return ""
	}
	return u.Scheme + "://" + u.Host
}

// Loopback reports whether a host is this machine by its name, which no resolver can change.
func Loopback(host string) bool {
	if addr, err := netip.ParseAddr(host); err == nil {
		return addr.IsLoopback()
	}
	return strings.EqualFold(host, "localhost")
}

// What web pages of CORSOrigins may send and read. Credentials are not allowed: an API key is sent
// in a header, never by the browser on its own.
const (
	corsMethods = "GET, HEAD, POST, PUT, PATCH, DELETE"
	corsHeaders = "Accept, Authorization, Content-Encoding, Content-Type, Idempotency-Key, If-Match, If-Range, " +
		"Last-Event-ID, Mcp-Method, Mcp-Name, Mcp-Protocol-Version, Mcp-Session-Id, " +
		"Prefer, Range, X-Client-Id, X-Request-Id"
	corsExposed = "Content-Range, ETag, Location, Mcp-Session-Id, Preference-Applied, RateLimit, RateLimit-Policy, " +
		"Retry-After, X-Output-Truncated, X-Quota-Warning, X-Request-Id, X-Should-Retry, X-Trace-Id"
	corsMaxAge = "600" // seconds for which a browser keeps the answer to a preflight
)

// CORS lets web pages of CORSOrigins use the server. It answers their preflight requests.
func (c *Core) CORS(next http.Handler) http.Handler {
	if len(c.CORSOrigins) == 0 {
		return next
	}
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		h := w.Header()
		h.Add("Vary", "Origin")
		origin := r.Header.Get("Origin")
		if origin == "" || !c.allowedOrigin(origin) {
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
		// Clients of other APIs have headers of their own.
		h.Set("Access-Control-Allow-Headers", strings.Join(append([]string{corsHeaders},
			r.Header.Values("Access-Control-Request-Headers")...), ", "))
		h.Set("Access-Control-Max-Age", corsMaxAge)
		w.WriteHeader(http.StatusNoContent)
	})
}

// BaseURL returns the address of this server as its clients know it. Of clients, no header but Host
// is trusted: a wrong Host misleads only the client that sent it.
func (c *Core) BaseURL(r *http.Request) (string, error) {
	if c.PublicURL != "" {
		return c.PublicURL, nil
	}
	if r.Host == "" {
		return "", proto.FieldErrorf("Host", "must be sent, for the URL in the answer")
	}
	if r.TLS != nil || c.proxiedTLS(r) {
		return "https://" + r.Host, nil
	}
	return "http://" + r.Host, nil
}

// proxiedTLS reports whether the request came over TLS to a trusted proxy.
func (c *Core) proxiedTLS(r *http.Request) bool {
	from, err := netip.ParseAddrPort(r.RemoteAddr)
	schemes := ListItems(r.Header.Values("X-Forwarded-Proto"))
	// The last one is from the nearest proxy.
	return err == nil && len(schemes) > 0 && strings.EqualFold(schemes[len(schemes)-1], "https") &&
		c.trustedProxy(from.Addr())
}

func (c *Core) trustedProxy(addr netip.Addr) bool {
	return slices.ContainsFunc(c.TrustedProxies, func(p netip.Prefix) bool { return p.Contains(addr.Unmap()) })
}

// ClientAddress returns the source IP address of a request, as far as trusted proxies report it. It
// may be empty.
func (c *Core) ClientAddress(r *http.Request) string {
	from, err := netip.ParseAddrPort(r.RemoteAddr)
	if err != nil {
		return ""
	}
	addr := from.Addr()
	hops := ListItems(r.Header.Values("X-Forwarded-For"))
	for len(hops) > 0 && c.trustedProxy(addr) { // each proxy appends the address that it sees
		last := hops[len(hops)-1]
		before, err := netip.ParseAddr(last)
		if withPort, errPort := netip.ParseAddrPort(last); errPort == nil {
			before, err = withPort.Addr(), nil
		}
		if err != nil {
			break
		}
		addr, hops = before, hops[:len(hops)-1]
	}
	return addr.Unmap().WithZone("").String()
}
