package gateway

import (
	"crypto/hmac"
	"crypto/sha256"
	"encoding/base64"
	"fmt"
	"net/http"
	"net/netip"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/go-chi/chi/v5"

	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/proto/api"
)

const (
	// contentPath is the prefix of signed URLs.
	contentPath = "/v1/files/content/"
	// urlLife is the time in which a request with a signed URL must begin.
	urlLife = 15 * time.Minute
	// grantForm is the version of the signed text. It is signed too, so that texts of different
	// versions cannot be confused.
	grantForm = "bullpen-file-2"
)

// grant is what a signed URL allows: one method on one file. Its fields are readable to everyone
// who has the URL.
type grant struct {
	method    string // GET, which HEAD goes with, PUT, or methodParts
	key       string // the id of the API key that asked for it; a revoked key makes the grant invalid
	org       string
	source    proto.FileSource
	id        string // of the thread or the storage connection
	upload    string // the id of an upload in parts, otherwise empty; without line breaks
	path      string // relative to the home or the connection, cleaned
	size      int64  // of an upload, in bytes
	expiresAt time.Time
}

// token returns the signed form of g for a URL.
func (g *grant) token(secret [32]byte) string {
	text := strings.Join([]string{
		grantForm, g.method, g.key, g.org, string(g.source), g.id, strconv.FormatInt(g.size, 10), strconv.FormatInt(g.expiresAt.Unix(), 10), g.upload,
		g.path, // last, because it may have line breaks
	}, "\n")
	return signedText(secret, text)
}

// signedText returns text and its signature for a URL.
func signedText(secret [32]byte, text string) string {
	encode := base64.RawURLEncoding.EncodeToString
	return encode([]byte(text)) + "." + encode(signature(secret, text))
}

// verifyText returns the text in a result of signedText. ok is false for other tokens.
func verifyText(secret [32]byte, token string) (text string, ok bool) {
	body, sum, _ := strings.Cut(token, ".")
	decode := base64.RawURLEncoding.Strict().DecodeString
	raw, err := decode(body)
	if err != nil {
		return "", false
	}
	mac, err := decode(sum)
	return string(raw), err == nil && hmac.Equal(mac, signature(secret, string(raw)))
}

func signature(secret [32]byte, text string) []byte {
	mac := hmac.New(sha256.New, secret[:])
	_, _ = mac.Write([]byte(text)) // never an error
	return mac.Sum(nil)
}

var (
	errBadURL = api.Errorf(api.CodeForbidden, "this URL was not made by this server for this method; ask for one at /v1/files/upload_url or download_url")
	errOldURL = api.Errorf(api.CodeForbidden, "this URL has expired, or the API key that asked for it was revoked or lost its scope; ask for another at /v1/files/upload_url or download_url")
)

// parseGrant returns the grant of a token that is valid at a time. It returns errBadURL or
// errOldURL if the token is not.
func parseGrant(secret [32]byte, token string, now time.Time) (*grant, error) {
	text, ok := verifyText(secret, token)
	if !ok {
		return nil, errBadURL
	}
	const fields = 10
	parts := strings.SplitN(text, "\n", fields)
	if len(parts) != fields || parts[0] != grantForm {
		return nil, errBadURL
	}
	g := &grant{method: parts[1], key: parts[2], org: parts[3], source: proto.FileSource(parts[4]), id: parts[5], upload: parts[8], path: parts[9]}
	expires, err := strconv.ParseInt(parts[7], 10, 64)
	if err == nil {
		g.size, err = strconv.ParseInt(parts[6], 10, 64)
	}
	if err != nil {
		return nil, fmt.Errorf("parse a signed grant: %w", err)
	}
	if g.expiresAt = time.Unix(expires, 0); !now.Before(g.expiresAt) {
		return nil, errOldURL
	}
	return g, nil
}

// checkGrant returns the grant in a request's URL and the API key that asked for it. It returns
// errBadURL or errOldURL unless the grant is for the method and the key is valid.
func (s *Server) checkGrant(r *http.Request, method string) (*grant, *proto.Key, error) {
	g, err := parseGrant(*s.URLSecret, chi.URLParam(r, "token"), time.Now())
	if err != nil {
		return nil, nil, err
	}
	if g.method != method {
		return nil, nil, errBadURL
	}
	key, ok := s.principal(g.key)
	if !ok || !key.Valid(time.Now()) || !key.Has(proto.ScopeFiles) || key.Org != g.org {
		return nil, nil, errOldURL
	}
	if _, err := s.entitlementOf(r.Context(), key); err != nil {
		return nil, nil, err
	}
	s.checkAtEnd(r, key)
	return g, key, nil
}

// signedURL returns a URL for g that is valid from now on, and the headers to send with it.
func (s *Server) signedURL(r *http.Request, g *grant, headers ...api.Header) (*api.SignedURL, error) {
	at, err := s.signedPath(r, g, contentPath, urlLife)
	if err != nil {
		return nil, err
	}
	return &api.SignedURL{URL: at, Method: g.method, Headers: append([]api.Header{}, headers...), ExpiresAt: api.Time{Time: g.expiresAt}}, nil
}

// signedPath returns a URL for g below a path that is valid from now on for some time.
func (s *Server) signedPath(r *http.Request, g *grant, path string, life time.Duration) (string, error) {
	base, err := s.baseURL(r)
	if err != nil {
		return "", err
	}
	g.expiresAt = time.Now().Add(life).Truncate(time.Second)
	return base + path + g.token(*s.URLSecret), nil
}

// baseURL returns the address of this server as its clients know it. Of clients, no header but Host
// is trusted: a wrong Host misleads only the client that sent it.
func (s *Server) baseURL(r *http.Request) (string, error) {
	if s.PublicURL != "" {
		return s.PublicURL, nil
	}
	if r.Host == "" {
		return "", proto.FieldErrorf("Host", "must be sent, for the URL in the answer")
	}
	if r.TLS != nil || s.proxiedTLS(r) {
		return "https://" + r.Host, nil
	}
	return "http://" + r.Host, nil
}

// proxiedTLS reports whether the request came over TLS to a trusted proxy.
func (s *Server) proxiedTLS(r *http.Request) bool {
	from, err := netip.ParseAddrPort(r.RemoteAddr)
	schemes := listItems(r.Header.Values("X-Forwarded-Proto"))
	// The last one is from the nearest proxy.
	return err == nil && len(schemes) > 0 && strings.EqualFold(schemes[len(schemes)-1], "https") && s.trustedProxy(from.Addr())
}

func (s *Server) trustedProxy(addr netip.Addr) bool {
	return slices.ContainsFunc(s.TrustedProxies, func(p netip.Prefix) bool { return p.Contains(addr.Unmap()) })
}

// clientAddress returns the IP address that a request comes from, as far as trusted proxies report
// it. It is empty if the connection has none.
func (s *Server) clientAddress(r *http.Request) string {
	from, err := netip.ParseAddrPort(r.RemoteAddr)
	if err != nil {
		return ""
	}
	addr := from.Addr()
	hops := listItems(r.Header.Values("X-Forwarded-For"))
	for len(hops) > 0 && s.trustedProxy(addr) { // each proxy appends the address that it sees
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
