package gateway

import (
	"crypto/hmac"
	"crypto/sha256"
	"encoding/base64"
	"fmt"
	"net/http"
	"strconv"
	"strings"
	"time"

	"github.com/bullpen-run/bullpen/proto"
)

const (
	// contentPath is where files are sent to and got from by signed URLs.
	contentPath = "/v1/files/content/"
	// urlLife is how long a signed URL can be used to begin a request.
	urlLife = 15 * time.Minute
	// grantForm is the version of what is signed. It is signed too, so that a grant of one form is never taken for one of another.
	grantForm = "bullpen-file-1"
)

// grant is what a signed URL allows: one method on one file. What it says can be read by whoever has the URL.
type grant struct {
	method    string // GET, which HEAD goes with, or PUT
	key       string // the id of the API key that it was given to, without which it allows nothing
	org       string
	thread    string
	path      string // relative to the home, cleaned
	size      int64  // of an upload: the bytes it must have
	expiresAt time.Time
}

// token gives the signed form of g for a URL.
func (g *grant) token(secret [32]byte) string {
	text := strings.Join([]string{
		grantForm, g.method, g.key, g.org, g.thread, strconv.FormatInt(g.size, 10), strconv.FormatInt(g.expiresAt.Unix(), 10),
		g.path, // last, because it may have line breaks
	}, "\n")
	encode := base64.RawURLEncoding.EncodeToString
	return encode([]byte(text)) + "." + encode(signature(secret, text))
}

func signature(secret [32]byte, text string) []byte {
	mac := hmac.New(sha256.New, secret[:])
	_, _ = mac.Write([]byte(text)) // never an error
	return mac.Sum(nil)
}

// parseGrant gives what a token allows at a time. Its error is errBadURL or errOldURL.
func parseGrant(secret [32]byte, token string, now time.Time) (*grant, error) {
	body, sum, _ := strings.Cut(token, ".")
	decode := base64.RawURLEncoding.Strict().DecodeString
	text, err := decode(body)
	if err != nil {
		return nil, errBadURL
	}
	mac, err := decode(sum)
	if err != nil || !hmac.Equal(mac, signature(secret, string(text))) {
		return nil, errBadURL
	}
	const fields = 8
	parts := strings.SplitN(string(text), "\n", fields)
	if len(parts) != fields || parts[0] != grantForm {
		return nil, errBadURL
	}
	g := &grant{method: parts[1], key: parts[2], org: parts[3], thread: parts[4], path: parts[7]}
	expires, err := strconv.ParseInt(parts[6], 10, 64)
	if err == nil {
		g.size, err = strconv.ParseInt(parts[5], 10, 64)
	}
	if err != nil {
		return nil, fmt.Errorf("read a grant that was signed here: %w", err)
	}
	if g.expiresAt = time.Unix(expires, 0); !now.Before(g.expiresAt) {
		return nil, errOldURL
	}
	return g, nil
}

// allowed gives what the URL of a request allows, if that is its method and the API key that asked for it may still do so.
func (s *Server) allowed(r *http.Request, token string) (*grant, *proto.Key, error) {
	g, err := parseGrant(*s.URLSecret, token, time.Now())
	if err != nil {
		return nil, nil, err
	}
	if method := r.Method; method != g.method && (method != http.MethodHead || g.method != http.MethodGet) {
		return nil, nil, errBadURL
	}
	key, ok := s.Keys.Key(g.key)
	if !ok || key.RevokedAt != nil || key.Org != g.org {
		return nil, nil, errOldURL
	}
	return g, key, nil
}

// signedView is the JSON form of a signed URL.
type signedView struct {
	URL       string       `json:"url"`
	Method    string       `json:"method"`
	Headers   []headerView `json:"headers"`
	ExpiresAt string       `json:"expires_at"`
}

type headerView struct {
	Name  string `json:"name"`
	Value string `json:"value"`
}

// answerSigned answers with a URL for what g allows, from now on.
func (s *Server) answerSigned(w http.ResponseWriter, r *http.Request, g *grant) error {
	base, err := s.baseURL(r)
	if err != nil {
		return err
	}
	g.expiresAt = time.Now().Add(urlLife).Truncate(time.Second)
	v := signedView{
		URL: base + contentPath + g.token(*s.URLSecret), Method: g.method, Headers: []headerView{},
		ExpiresAt: g.expiresAt.UTC().Format(timeLayout),
	}
	if g.method == http.MethodPut {
		// For clients that would otherwise send a stream without its length.
		v.Headers = append(v.Headers, headerView{"Content-Length", strconv.FormatInt(g.size, 10)})
	}
	return writeValue(w, http.StatusOK, v)
}

// baseURL gives the address of this server as its clients know it. What a header says that any client can send is not believed, but for
// Host, which leads only that client itself elsewhere.
func (s *Server) baseURL(r *http.Request) (string, error) {
	if s.PublicURL != "" {
		return s.PublicURL, nil
	}
	if r.Host == "" {
		return "", &proto.FieldError{Field: "Host", Message: "Host must be sent, for the URL in the answer"}
	}
	if r.TLS != nil {
		return "https://" + r.Host, nil
	}
	return "http://" + r.Host, nil
}
