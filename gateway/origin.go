package gateway

import (
	"net/http"
	"net/netip"
	"net/url"
	"strings"

	"github.com/bullpen-run/bullpen/proto/api"
)

// checkOrigin refuses a request of a web page that is not of this server. A page whose host name was
// made to resolve to this server has the host of the request as its origin, so that the host alone
// proves nothing: the origin must be the server's public URL, or be on this machine. Requests of
// other programs have no origin.
func (s *Server) checkOrigin(r *http.Request) error {
	origin := r.Header.Get("Origin")
	if origin == "" || s.ownOrigin(r, origin) {
		return nil
	}
	return api.Errorf(api.CodeForbidden, "requests of web pages of this origin are not accepted")
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
