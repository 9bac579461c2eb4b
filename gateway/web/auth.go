package web

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/netip"
	"slices"
	"strings"
	"time"

	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/proto/api"
)

// authenticate finds the API key of the request, or the session of its browser.
func (c *Core) authenticate(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		info := infoOf(r.Context())
		var key *proto.Key
		var err error
		switch find := sandboxKey(r.Context()); {
		case find != nil:
			key, err = find()
			info.ModelsOnly = true
		case r.Header.Get("Authorization") == "":
			key, info.Session, err = c.Cookies.KeyOfCookie(r)
		default:
			key, err = c.keyOfHeader(r)
		}
		if err == nil {
			info.Key = *key
			err = c.CheckAddress(r, key)
		}
		if err != nil {
			c.writeError(w, r, err)
			return
		}
		if info.Session == nil {
			c.KeyUses.Used(key.Org, key.ID, time.Now())
		}
		if info.Plan, err = c.Entitlements.Entitlement(r.Context(), key); err != nil {
			c.writeError(w, r, err)
			return
		}
		c.CheckAtEnd(r, key)
		next.ServeHTTP(w, r)
	})
}

type sandboxKeyName struct{}

// FromSandbox returns the context of requests that a program in a sandbox sends with the rights of an API key,
// which find returns as it is now. They may only use the model APIs: nothing that the organisation has stored.
func FromSandbox(ctx context.Context, find func() (*proto.Key, error)) context.Context {
	return context.WithValue(ctx, sandboxKeyName{}, find)
}

// sandboxKey returns the find of [FromSandbox], nil for all other requests.
func sandboxKey(ctx context.Context) func() (*proto.Key, error) {
	find, _ := ctx.Value(sandboxKeyName{}).(func() (*proto.Key, error))
	return find
}

// SecretOf returns the API key of a request, or "".
func SecretOf(r *http.Request) string { return Bearer(r.Header.Get("Authorization")) }

// Bearer returns the secret in a value of the header Authorization, or "".
func Bearer(authorization string) string {
	scheme, secret, _ := strings.Cut(authorization, " ")
	if !strings.EqualFold(scheme, "Bearer") {
		return ""
	}
	return strings.TrimSpace(secret)
}

func (c *Core) keyOfHeader(r *http.Request) (*proto.Key, error) {
	key, ok := c.Callers.Authenticate(SecretOf(r))
	now := time.Now()
	switch {
	case !ok:
		return nil, Unauthorized()
	case key.Expired(now):
		return nil, api.Errorf(api.CodeUnauthorized, "the API key expired at %s; use another",
			key.ExpiresAt.Format(time.RFC3339))
	case !key.Valid(now):
		return nil, Unauthorized()
	default:
		return key, nil
	}
}

// CheckCaller returns an error if the API key or the session of a request has become invalid since
// the request began, or has lost rights. It is for endless responses.
func (c *Core) CheckCaller(r *Request) error {
	var key *proto.Key
	var err error
	if r.Session == nil {
		key, err = c.keyOfHeader(r.Request)
	} else {
		key, err = c.Cookies.CheckCookie(r.Request)
	}
	if err == nil {
		err = c.CheckAddress(r.Request, key)
	}
	if err == nil && lostRights(&r.Key, key) {
		err = Unauthorized()
	}
	if err == nil {
		_, err = c.Entitlements.Entitlement(r.Context(), key)
	}
	return err
}

// lostRights reports whether a key lacks rights that it had before.
func lostRights(before, now *proto.Key) bool {
	return before.Org != now.Org || before.Global && !now.Global ||
		slices.ContainsFunc(before.Scopes, func(s proto.Scope) bool { return !now.Has(s) })
}

// CheckAddress refuses a request from an address outside the key's allowed networks. The message
// contains the address, which reveals an untrusted proxy, but not the networks.
func (c *Core) CheckAddress(r *http.Request, key *proto.Key) error {
	if len(key.AllowedNetworks) == 0 || sandboxKey(r.Context()) != nil {
		return nil
	}
	from := c.ClientAddress(r)
	if addr, err := netip.ParseAddr(from); err == nil && key.AllowedFrom(addr) {
		return nil
	}
	return &api.Error{
		Code: api.CodeForbidden, Reason: api.ReasonAddress,
		Message: fmt.Sprintf("this API key may not be used from the address %q, which this request came from", from),
	}
}

// authorized returns the middleware that refuses keys without access to a route.
func (c *Core) authorized(route *api.Route) func(http.Handler) http.Handler {
	return func(next http.Handler) http.Handler {
		return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			if err := authorize(&infoOf(r.Context()).Key, route); err != nil {
				c.writeError(w, r, err)
				return
			}
			next.ServeHTTP(w, r)
		})
	}
}

// authorize returns an error unless a key may use a route. It is the only such check. Which objects
// the key sees there depends on their organisation. A route without a scope is refused, so that
// none is open by mistake.
func authorize(key *proto.Key, route *api.Route) error {
	switch {
	case route.Public || route.ScopeByTool || route.AnyScope:
		return nil
	case !key.Has(route.Scope) && (!route.OrAdmin || !key.Has(proto.ScopeAdmin)):
		return api.MissingScope(route.Scope)
	case route.Global && !key.Global:
		return api.NotGlobal("this needs the API key of a global administrator")
	default:
		return nil
	}
}

// maxClientText limits texts in which clients describe themselves, in bytes.
const maxClientText = 256

// CallerOf describes the client of a request.
func CallerOf(r *Request) proto.Caller {
	i := r.Info
	return proto.Caller{
		Key: &i.Key, Entitlement: i.Plan, RequestID: i.RequestID,
		ClientID: ClientText(r.Header, "X-Client-Id"), UserAgent: ClientText(r.Header, "User-Agent"),
	}
}

// ClientText returns a header that describes the client, truncated and in valid UTF-8.
func ClientText(h http.Header, name string) string {
	text := h.Get(name)
	return strings.ToValidUTF8(text[:min(len(text), maxClientText)], "")
}

// ErrNoOrg is returned for an organisation that does not exist or is hidden from the caller.
var ErrNoOrg = api.Errorf(api.CodeNotFound, "there is no organisation of that name")

// AdminOrg returns the organisation of an administrator's request: org, or the API key's if org is
// empty. For an organisation's administrator no other one exists.
func AdminOrg(r *Request, org string) (string, error) {
	key := &r.Key
	switch {
	case org == "":
		return key.Org, nil
	case !proto.ValidOrg(org):
		return "", proto.FieldErrorf("org", "must be the name of an organisation")
	case org != key.Org && !key.Global:
		return "", ErrNoOrg
	default:
		return org, nil
	}
}

// ListedOrg returns the organisation whose objects an administrator's request lists. It is empty
// for all organisations, the default of a global administrator.
func ListedOrg(r *Request) (string, error) {
	org := r.URL.Query().Get("org")
	if org == "" && r.Key.Global {
		return "", nil
	}
	return AdminOrg(r, org)
}

// Administer returns an error unless the API key of a request may see another key, or change it.
// Otherwise a caller could become a global administrator by changing such an administrator's key.
func Administer(r *Request, key *proto.Key, change bool) error {
	own := &r.Key
	switch {
	case own.Global:
		return nil
	case key.Org != own.Org:
		return fmt.Errorf("key of another organisation: %w", proto.ErrNotFound)
	case change && key.Global:
		return api.NotGlobal("only a global administrator changes the key of one")
	default:
		return nil
	}
}

// entitledBody is a body whose end is an error if the request's key has lost all rights. A body may
// take long, and its result must not be stored for an organisation deleted meanwhile.
type entitledBody struct {
	io.ReadCloser
	entitled func() error
	left     int64 // bytes that are expected; negative if unknown
	refusal  error // of the end
	checked  bool
}

// CheckAtEnd makes a request's body end with an error if key has lost all rights by then.
func (c *Core) CheckAtEnd(r *http.Request, key *proto.Key) {
	if r.ContentLength == 0 {
		return
	}
	r.Body = &entitledBody{ReadCloser: r.Body, left: r.ContentLength, entitled: func() error {
		_, err := c.Entitlements.Entitlement(r.Context(), key)
		if err != nil {
			err = fmt.Errorf("%w: %w", api.NewError(err), err)
		}
		return err
	}}
}

func (b *entitledBody) Read(p []byte) (int, error) {
	n, err := b.ReadCloser.Read(p)
	if b.left >= 0 {
		b.left -= int64(n)
	}
	if !b.checked && (errors.Is(err, io.EOF) || b.left == 0) { // who knows the size may not read on
		b.checked, b.refusal = true, b.entitled()
	}
	if b.refusal != nil {
		return 0, b.refusal
	}
	return n, err
}
