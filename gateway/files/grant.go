package files

import (
	"fmt"
	"strconv"
	"strings"
	"time"

	"github.com/go-chi/chi/v5"

	"github.com/bullpen-run/bullpen/gateway/web"
	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/proto/api"
)

const (
	// contentPath is the prefix of signed URLs.
	contentPath = "/v1/files/content/"
	// grantForm is the version of the signed text. It is signed too, so that texts of different
	// versions cannot be confused.
	grantForm = "bullpen-file-2"
	// viewForm is the form of grants of a version or of inline content, which has two more fields. A
	// server that does not know it rejects them instead of sending other content.
	viewForm   = "bullpen-file-3"
	formFields = 10 // of grantForm
)

// grant is the content of a signed URL: it allows one method on one file. Anyone who has the URL
// can read it.
type grant struct {
	method    string // GET, which includes HEAD, PUT, or methodParts
	key       string // the id of the API key that requested it; revoking the key invalidates the grant
	org       string
	source    proto.FileSource
	id        string // of the thread or the storage connection
	upload    string // the id of an upload in parts, otherwise empty; without line breaks
	path      string // relative to the home or the connection, cleaned
	size      int64  // of an upload, in bytes
	expiresAt time.Time
	version   int64 // to download; 0 for the newest
	inline    bool  // the content may be shown
}

// token returns the signed form of g for a URL.
func (g *grant) token(secret [32]byte) string {
	fields := []string{
		grantForm, g.method, g.key, g.org, string(g.source), g.id, strconv.FormatInt(g.size, 10),
		strconv.FormatInt(g.expiresAt.Unix(), 10), g.upload,
	}
	if g.version > 0 || g.inline {
		fields[0] = viewForm
		fields = append(fields, strconv.FormatInt(g.version, 10), strconv.FormatBool(g.inline))
	}
	fields = append(fields, g.path) // last, because it may have line breaks
	return web.SignedText(secret, strings.Join(fields, "\n"))
}

var (
	errBadURL = api.Errorf(api.CodeForbidden,
		"this URL was not made by this server for this method; ask for one at /v1/files/upload_url or download_url")
	errOldURL = api.Errorf(api.CodeForbidden,
		"this URL has expired, or the API key that asked for it was revoked or lost its scope; ask for another at "+
			"/v1/files/upload_url or download_url")
)

// parseGrant returns the grant of a token that is valid at a time. It returns errBadURL or
// errOldURL if the token is not.
func parseGrant(secret [32]byte, token string, now time.Time) (*grant, error) {
	text, ok := web.VerifyText(secret, token)
	if !ok {
		return nil, errBadURL
	}
	fields := formFields
	form, _, _ := strings.Cut(text, "\n")
	if form == viewForm {
		fields += 2
	}
	parts := strings.SplitN(text, "\n", fields)
	if len(parts) != fields || form != grantForm && form != viewForm {
		return nil, errBadURL
	}
	g := &grant{
		method: parts[1], key: parts[2], org: parts[3], source: proto.FileSource(parts[4]), id: parts[5],
		upload: parts[8], path: parts[fields-1],
	}
	expires, err := strconv.ParseInt(parts[7], 10, 64)
	if err == nil {
		g.size, err = strconv.ParseInt(parts[6], 10, 64)
	}
	if err == nil && form == viewForm {
		g.version, err = strconv.ParseInt(parts[9], 10, 64)
		g.inline = parts[10] == strconv.FormatBool(true)
	}
	if err != nil {
		return nil, fmt.Errorf("parse a signed grant: %w", err)
	}
	if g.expiresAt = time.Unix(expires, 0); !now.Before(g.expiresAt) {
		return nil, errOldURL
	}
	return g, nil
}

// checkGrant returns the grant in a request's URL and the API key that requested it. It returns
// errBadURL or errOldURL unless the grant is for the method and the key is valid.
func (s *FileRoutes) checkGrant(r *web.Request, method string) (*grant, *proto.Key, error) {
	g, err := parseGrant(*s.URLSecret, chi.URLParam(r.Request, "token"), time.Now())
	if err != nil {
		return nil, nil, err
	}
	if g.method != method {
		return nil, nil, errBadURL
	}
	key, ok := s.Principals.Principal(g.key)
	if !ok || !key.Valid(time.Now()) || !key.Has(proto.ScopeFiles) || key.Org != g.org {
		return nil, nil, errOldURL
	}
	if _, err := s.Entitlements.Entitlement(r.Context(), key); err != nil {
		return nil, nil, err
	}
	s.CheckAtEnd(r.Request, key)
	return g, key, nil
}

// signedURL returns a URL for g, valid from now on, and the headers to send with it.
func (s *FileRoutes) signedURL(r *web.Request, g *grant, headers ...api.Header) (*api.SignedURL, error) {
	at, err := s.signedPath(r, g, contentPath, web.URLLife)
	if err != nil {
		return nil, err
	}
	return &api.SignedURL{
		URL: at, Method: g.method, Headers: append([]api.Header{}, headers...),
		ExpiresAt: api.Time{Time: g.expiresAt},
	}, nil
}

// signedPath returns a URL for g below a path, valid for some time from now on.
func (s *FileRoutes) signedPath(r *web.Request, g *grant, path string, life time.Duration) (string, error) {
	base, err := s.BaseURL(r.Request)
	if err != nil {
		return "", err
	}
	g.expiresAt = time.Now().Add(life).Truncate(time.Second)
	return base + path + g.token(*s.URLSecret), nil
}
