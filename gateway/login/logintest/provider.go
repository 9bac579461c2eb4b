// Package logintest has an OpenID Connect provider for tests.
package logintest

import (
	"crypto"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/sha256"
	"encoding/base64"
	"encoding/json"
	"maps"
	"net/http"
	"net/http/httptest"
	"net/url"
	"sync"
	"testing"
	"time"

	"github.com/coreos/go-oidc/v3/oidc"
	"github.com/coreos/go-oidc/v3/oidc/oidctest"
)

// What a client of the provider has.
const (
	ClientID = "bullpen"
	Secret   = "the secret of the client"
)

// Claims are the claims of an id token, or of the person who signs in.
type Claims map[string]any

// Person returns the claims of a person with a verified address.
func Person(subject, email string) Claims {
	return Claims{"sub": subject, "email": email, "email_verified": true}
}

// Provider signs in the current person without a prompt. Its fields must not change during a login.
type Provider struct {
	URL string
	// Change, if not nil, changes the claims of an id token before it is signed.
	Change func(Claims)
	// Sign, if not nil, signs an id token.
	Sign func(claims string) string
	// Down makes every request fail.
	Down bool

	key crypto.Signer

	mu     sync.Mutex
	person Claims
	codes  map[string]url.Values // of the requests that got them
}

const (
	keyID     = "key-1"
	codeBytes = 16
	tokenLife = time.Hour
)

// New starts a provider, which ends with the test.
func New(t testing.TB) *Provider {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	p := &Provider{key: key, codes: map[string]url.Values{}}
	documents := &oidctest.Server{
		PublicKeys: []oidctest.PublicKey{{PublicKey: key.Public(), KeyID: keyID, Algorithm: oidc.ES256}},
		Algorithms: []string{oidc.ES256},
	}
	mux := http.NewServeMux()
	mux.Handle("/", documents)
	mux.HandleFunc("/auth", p.authorize)
	mux.HandleFunc("/token", p.token)
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if p.Down {
			http.Error(w, "down", http.StatusInternalServerError)
			return
		}
		mux.ServeHTTP(w, r)
	}))
	t.Cleanup(server.Close)
	p.URL = server.URL
	documents.SetIssuer(server.URL)
	return p
}

// SignIn makes the person with these claims sign in from now on.
func (p *Provider) SignIn(person Claims) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.person = person
}

// authorize sends the browser back with a code.
func (p *Provider) authorize(w http.ResponseWriter, r *http.Request) {
	query := r.URL.Query()
	if query.Get("client_id") != ClientID || query.Get("response_type") != "code" ||
		query.Get("code_challenge_method") != "S256" || query.Get("nonce") == "" {
		http.Error(w, "not a request that is expected: "+r.URL.RawQuery, http.StatusBadRequest)
		return
	}
	code := rand.Text()[:codeBytes]
	p.mu.Lock()
	p.codes[code] = query
	p.mu.Unlock()
	answer := url.Values{"code": {code}, "state": {query.Get("state")}}
	//nolint:gosec // the client of a test names where
	http.Redirect(w, r, query.Get("redirect_uri")+"?"+answer.Encode(), http.StatusFound)
}

// token answers with an id token for a code, once.
func (p *Provider) token(w http.ResponseWriter, r *http.Request) {
	p.mu.Lock()
	request, known := p.codes[r.FormValue("code")]
	delete(p.codes, r.FormValue("code"))
	claims := Claims{
		"iss": p.URL, "aud": ClientID, "nonce": request.Get("nonce"), "iat": time.Now().Unix(),
		"exp": time.Now().Add(tokenLife).Unix(),
	}
	maps.Copy(claims, p.person)
	p.mu.Unlock()
	id, secret, basic := r.BasicAuth()
	if !basic {
		id, secret = r.FormValue("client_id"), r.FormValue("client_secret")
	}
	challenge := sha256.Sum256([]byte(r.FormValue("code_verifier")))
	w.Header().Set("Content-Type", "application/json")
	switch unescaped, err := url.QueryUnescape(secret); {
	case id != ClientID || secret != Secret && (err != nil || unescaped != Secret):
		w.WriteHeader(http.StatusUnauthorized)
		_, _ = w.Write([]byte(`{"error":"invalid_client"}`)) // the client may be gone
		return
	case !known || request.Get("code_challenge") != base64.RawURLEncoding.EncodeToString(challenge[:]) ||
		r.FormValue("redirect_uri") != request.Get("redirect_uri"):
		w.WriteHeader(http.StatusBadRequest)
		_, _ = w.Write([]byte(`{"error":"invalid_grant"}`)) // the client may be gone
		return
	}
	if p.Change != nil {
		p.Change(claims)
	}
	text, err := json.Marshal(claims)
	if err != nil {
		http.Error(w, err.Error(), http.StatusInternalServerError)
		return
	}
	sign := p.Sign
	if sign == nil {
		sign = func(claims string) string { return oidctest.SignIDToken(p.key, keyID, oidc.ES256, claims) }
	}
	answer := map[string]any{"access_token": "unused", "token_type": "Bearer", "id_token": sign(string(text))}
	_ = json.NewEncoder(w).Encode(answer) // the client may be gone
}
