package login

import (
	"cmp"
	"context"
	"crypto/rand"
	"crypto/sha256"
	"crypto/subtle"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"strings"
	"sync"
	"time"

	"github.com/coreos/go-oidc/v3/oidc"
	"golang.org/x/oauth2"

	"github.com/bullpen-run/bullpen/proto"
)

const (
	requestTimeout = 10 * time.Second // for each request to the provider
	// retryAfter is the pause after a failed discovery of the provider, because anyone can trigger
	// one.
	retryAfter = 5 * time.Second
	// maxExchanges limits the concurrent exchanges of codes, for the same reason.
	maxExchanges = 16
)

// Provider is an OpenID Connect provider. Its exported fields are set before its first use. It is
// safe for concurrent use.
type Provider struct {
	Issuer   string // the URL of the provider, as in its id tokens
	ClientID string
	// Secret returns the client's secret, empty for a public client.
	Secret func() (string, error)
	// Redirect is the URL of the callback.
	Redirect string

	mu        sync.Mutex
	found     *oidc.Provider
	failure   error
	failedAt  time.Time
	exchanges chan struct{}
}

// RefusedError is returned if a login is not accepted. Its text is for the person.
type RefusedError struct{ Reason string }

func (e *RefusedError) Error() string { return e.Reason }

func refused(format string, args ...any) error { return &RefusedError{fmt.Sprintf(format, args...)} }

// AnswerError is returned if the provider's answer proves no identity: the id token is missing,
// expired, for another client, of another issuer or has a wrong signature. Retrying does not help:
// the settings of the provider or of this server are wrong.
type AnswerError struct{ Err error }

func (e *AnswerError) Error() string { return e.Err.Error() }

// Unwrap returns the cause.
func (e *AnswerError) Unwrap() error { return e.Err }

func badAnswer(format string, args ...any) error { return &AnswerError{fmt.Errorf(format, args...)} }

// ErrBusy is returned if too many logins are being checked.
var ErrBusy = errors.New("too many logins at once")

// Attempt is one login of a browser, which keeps Cookie until the callback. The provider only sees
// values derived from the cookie, which do not reveal it.
type Attempt struct {
	Org    string // the organisation that the person wants to sign in to; empty for the only one
	Return string // the path to go to after the login
	Cookie string
}

const attemptParts = 2

// NewAttempt returns a new attempt.
func NewAttempt(org, returnTo string) Attempt {
	var secret [32]byte
	_, _ = rand.Read(secret[:]) // crypto/rand.Read never returns an error since Go 1.24
	encode := base64.RawURLEncoding.EncodeToString
	return Attempt{org, returnTo, encode(secret[:]) + "." + encode([]byte(org+"\n"+returnTo))}
}

// ParseAttempt returns the attempt of a cookie. The browser may have changed all of it.
func ParseAttempt(cookie string) (Attempt, error) {
	_, rest, _ := strings.Cut(cookie, ".")
	text, err := base64.RawURLEncoding.Strict().DecodeString(rest)
	parts := strings.SplitN(string(text), "\n", attemptParts)
	if err != nil || len(parts) != attemptParts {
		return Attempt{}, refused("this browser has not begun this login, or did so more than %s ago; begin again at /login",
			AttemptLife)
	}
	return Attempt{parts[0], parts[1], cookie}, nil
}

// AttemptLife is how long a person may take to sign in at the provider.
const AttemptLife = 10 * time.Minute

// derive returns a value for one purpose.
func (a *Attempt) derive(purpose string) string {
	sum := sha256.Sum256([]byte(purpose + "\x00" + a.Cookie))
	return base64.RawURLEncoding.EncodeToString(sum[:])
}

// URL returns the provider's address to which the browser is redirected.
func (p *Provider) URL(ctx context.Context, a *Attempt) (string, error) {
	config, _, err := p.config(ctx)
	if err != nil {
		return "", err
	}
	return config.AuthCodeURL(a.derive("state"), oidc.Nonce(a.derive("nonce")),
		oauth2.S256ChallengeOption(a.derive("verifier"))), nil
}

// Callback is the provider's answer, sent through the browser.
type Callback struct{ State, Code, Error, Issuer string }

// Identify returns the person who has signed in. It returns a [*RefusedError] if the callback does
// not belong to the attempt or if the provider refused the login, an [*AnswerError], and [ErrBusy].
// Other errors mean that the provider is unavailable.
func (p *Provider) Identify(ctx context.Context, a *Attempt, c Callback) (proto.Identity, error) {
	if subtle.ConstantTimeCompare([]byte(c.State), []byte(a.derive("state"))) != 1 {
		return proto.Identity{}, refused(
			"this is not the answer to the login that this browser has begun; begin again at /login")
	}
	if c.Error != "" {
		return proto.Identity{}, refused("the identity provider refused the login: %s", proto.Shorten(c.Error))
	}
	if c.Issuer != "" && c.Issuer != p.Issuer { // RFC 9207
		return proto.Identity{}, refused("the answer is of another identity provider; begin again at /login")
	}
	done, err := p.begin()
	if err != nil {
		return proto.Identity{}, err
	}
	defer done()
	config, verifier, err := p.config(ctx)
	if err != nil {
		return proto.Identity{}, err
	}
	ctx, cancel := context.WithTimeout(withClient(ctx), requestTimeout)
	defer cancel()
	token, err := config.Exchange(ctx, c.Code, oauth2.VerifierOption(a.derive("verifier")))
	if answer, ok := errors.AsType[*oauth2.RetrieveError](err); ok && answer.ErrorCode == "invalid_grant" {
		return proto.Identity{}, refused("the identity provider does not know this login any more; begin again at /login")
	}
	if permanent(err) {
		return proto.Identity{}, badAnswer("exchange a code at %s: %w", p.Issuer, err)
	}
	if err != nil {
		return proto.Identity{}, fmt.Errorf("exchange a code at %s: %w", p.Issuer, err)
	}
	text, ok := token.Extra("id_token").(string)
	if !ok {
		return proto.Identity{}, badAnswer("exchange a code at %s: the answer has no id token", p.Issuer)
	}
	return p.identity(ctx, verifier, text, a.derive("nonce"))
}

// permanent reports whether the provider refused the client for good.
func permanent(err error) bool {
	answer, ok := errors.AsType[*oauth2.RetrieveError](err)
	if !ok {
		return false
	}
	code := answer.Response.StatusCode
	return code >= 400 && code < 500 && code != http.StatusRequestTimeout && code != http.StatusTooManyRequests
}

// identity verifies an id token.
func (p *Provider) identity(
	ctx context.Context, verifier *oidc.IDTokenVerifier, text, nonce string,
) (proto.Identity, error) {
	token, err := verifier.Verify(ctx, text)
	if err != nil && strings.Contains(err.Error(), "fetching keys") { // go-oidc has no type for it
		return proto.Identity{}, fmt.Errorf("verify an id token of %s: %w", p.Issuer, err)
	}
	if err != nil {
		return proto.Identity{}, badAnswer("verify an id token of %s: %w", p.Issuer, err)
	}
	var claims struct {
		Email    string   `json:"email"`
		Verified verified `json:"email_verified"`
		Party    string   `json:"azp"`
	}
	if err := token.Claims(&claims); err != nil {
		return proto.Identity{}, badAnswer("decode an id token of %s: %w", p.Issuer, err)
	}
	switch {
	case subtle.ConstantTimeCompare([]byte(token.Nonce), []byte(nonce)) != 1:
		return proto.Identity{}, refused("the identity provider's answer is to another login; begin again at /login")
	case len(token.Audience) != 1 && claims.Party != p.ClientID || claims.Party != "" && claims.Party != p.ClientID:
		return proto.Identity{}, badAnswer("verify an id token of %s: it is for the client %q", p.Issuer,
			cmp.Or(claims.Party, strings.Join(token.Audience, " ")))
	case proto.CheckSubject(token.Subject) != nil:
		return proto.Identity{}, badAnswer("verify an id token of %s: %w", p.Issuer, proto.CheckSubject(token.Subject))
	}
	id := proto.Identity{Issuer: p.Issuer, Subject: token.Subject}
	if claims.Verified {
		id.Email = proto.LowerEmail(claims.Email)
	}
	return id, nil
}

// verified is a claim that some providers send as a string.
type verified bool

// UnmarshalJSON decodes true and "true" as true.
func (v *verified) UnmarshalJSON(text []byte) error {
	*v = string(text) == `true` || string(text) == `"true"`
	return nil
}

var _ json.Unmarshaler = (*verified)(nil)

// begin returns ErrBusy if too many codes are being exchanged.
func (p *Provider) begin() (done func(), err error) {
	p.mu.Lock()
	if p.exchanges == nil {
		p.exchanges = make(chan struct{}, maxExchanges)
	}
	p.mu.Unlock()
	select {
	case p.exchanges <- struct{}{}:
		return func() { <-p.exchanges }, nil
	default:
		return nil, ErrBusy
	}
}

// config returns the provider's client, and the verifier of its id tokens.
func (p *Provider) config(ctx context.Context) (*oauth2.Config, *oidc.IDTokenVerifier, error) {
	found, err := p.discover(ctx)
	if err != nil {
		return nil, nil, err
	}
	secret, err := p.Secret()
	if err != nil {
		return nil, nil, fmt.Errorf("read the client's secret: %w", err)
	}
	return &oauth2.Config{
		ClientID: p.ClientID, ClientSecret: secret, Endpoint: found.Endpoint(), RedirectURL: p.Redirect,
		Scopes: []string{oidc.ScopeOpenID, "email"},
	}, found.Verifier(&oidc.Config{ClientID: p.ClientID}), nil
}

// discover reads the provider's configuration, once.
func (p *Provider) discover(ctx context.Context) (*oidc.Provider, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.found != nil {
		return p.found, nil
	}
	if time.Since(p.failedAt) < retryAfter {
		return nil, p.failure
	}
	// A client that leaves must not make the attempt of others fail.
	ctx, cancel := context.WithTimeout(withClient(context.WithoutCancel(ctx)), requestTimeout)
	defer cancel()
	found, err := oidc.NewProvider(ctx, p.Issuer)
	if err != nil {
		p.failure, p.failedAt = fmt.Errorf("discover the identity provider %s: %w", p.Issuer, err), time.Now()
		return nil, p.failure
	}
	p.found = found
	return found, nil
}

// client sends all requests to providers.
var client = &http.Client{Timeout: requestTimeout}

func withClient(ctx context.Context) context.Context {
	return context.WithValue(ctx, oauth2.HTTPClient, client)
}
