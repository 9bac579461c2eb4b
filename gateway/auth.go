package gateway

import (
	"context"
	"fmt"
	"net/http"
	"net/netip"
	"slices"
	"strings"
	"time"

	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/proto/api"
)

// authenticate finds the API key of the request, or the session of its browser.
func (s *Server) authenticate(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		info := infoOf(r.Context())
		var key *proto.Key
		var err error
		if r.Header.Get("Authorization") == "" {
			key, info.session, err = s.keyOfCookie(r)
		} else {
			key, err = s.keyOfHeader(r)
		}
		if err == nil {
			info.key = *key
			err = s.checkAddress(r, key)
		}
		if err != nil {
			s.writeError(w, r, err)
			return
		}
		if info.session == nil {
			s.KeyUses.Used(key.ID, time.Now())
		}
		if info.plan, err = s.entitlementOf(r.Context(), key); err != nil {
			s.writeError(w, r, err)
			return
		}
		s.checkAtEnd(r, key)
		next.ServeHTTP(w, r)
	})
}

// secretOf returns the API key of a request, empty if it has none.
func secretOf(r *http.Request) string {
	scheme, secret, _ := strings.Cut(r.Header.Get("Authorization"), " ")
	if !strings.EqualFold(scheme, "Bearer") {
		return ""
	}
	return strings.TrimSpace(secret)
}

func (s *Server) keyOfHeader(r *http.Request) (*proto.Key, error) {
	key, ok := s.Keys.Authenticate(secretOf(r))
	now := time.Now()
	switch {
	case !ok:
		return nil, unauthorized()
	case key.Expired(now):
		return nil, api.Errorf(api.CodeUnauthorized, "the API key expired at %s; use another", key.ExpiresAt.Format(time.RFC3339))
	case !key.Valid(now):
		return nil, unauthorized()
	default:
		return key, nil
	}
}

// principal returns the API key with an id, or the one as which the member with that id acts.
func (s *Server) principal(id string) (*proto.Key, bool) {
	if !strings.HasPrefix(id, proto.MemberPrefix) {
		return s.Keys.Key(id)
	}
	m, ok := s.Members.Member(id)
	if !ok {
		return nil, false
	}
	return new(m.Key()), true
}

// checkAddress refuses a request from an address that a key is not allowed to be used from. The
// message has the address, which explains a proxy that is not trusted, but not the allowed ones.
func (s *Server) checkAddress(r *http.Request, key *proto.Key) error {
	if len(key.AllowedNetworks) == 0 {
		return nil
	}
	from := s.clientAddress(r)
	if addr, err := netip.ParseAddr(from); err == nil && key.AllowedFrom(addr) {
		return nil
	}
	return &api.Error{
		Code: api.CodeForbidden, Reason: api.ReasonAddress,
		Message: fmt.Sprintf("this API key may not be used from the address %q, which this request came from", from),
	}
}

// storedPrincipal is like principal, but reads the store, where a key may be revoked.
func (s *Server) storedPrincipal(ctx context.Context, id string) (proto.Key, error) {
	if !strings.HasPrefix(id, proto.MemberPrefix) {
		return s.KeyAdmin.Get(ctx, id)
	}
	m, err := s.Members.Get(ctx, id)
	return m.Key(), err
}

// authorized returns the middleware that refuses keys which may not use a route.
func (s *Server) authorized(route *api.Route) func(http.Handler) http.Handler {
	return func(next http.Handler) http.Handler {
		return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			if err := authorize(&infoOf(r.Context()).key, route); err != nil {
				s.writeError(w, r, err)
				return
			}
			next.ServeHTTP(w, r)
		})
	}
}

// authorize returns an error unless a key may use a route. It alone decides that. Which objects the
// key sees there is decided by their organisation. A route without a scope is refused, so that none
// is open by mistake.
func authorize(key *proto.Key, route *api.Route) error {
	switch {
	case route.Public || route.ScopeByTool || route.AnyScope:
		return nil
	case !key.Has(route.Scope):
		return api.MissingScope(route.Scope)
	case route.Global && !key.Global:
		return api.NotGlobal("this needs the API key of a global administrator")
	default:
		return nil
	}
}

var errNoOrg = api.Errorf(api.CodeNotFound, "there is no organisation of that name")

// adminOrg returns the organisation that an administrator's request is about: org, or that of the
// API key if org is empty. For the administrator of an organisation there is no other one.
func adminOrg(r *http.Request, org string) (string, error) {
	key := &infoOf(r.Context()).key
	switch {
	case org == "":
		return key.Org, nil
	case !proto.ValidOrg(org):
		return "", proto.FieldErrorf("org", "must be the name of an organisation")
	case org != key.Org && !key.Global:
		return "", errNoOrg
	default:
		return org, nil
	}
}

// listedOrg returns the organisation whose objects an administrator's request lists. It is empty for
// all organisations, which a global administrator gets by default.
func listedOrg(r *http.Request) (string, error) {
	org := r.URL.Query().Get("org")
	if org == "" && infoOf(r.Context()).key.Global {
		return "", nil
	}
	return adminOrg(r, org)
}

// administer returns an error unless the API key of a request may see another key, or change it.
// A caller that changes the key of a global administrator could become one.
func administer(r *http.Request, key *proto.Key, change bool) error {
	own := &infoOf(r.Context()).key
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

// checkGrantable returns an error unless the API key of a request may give another one its
// privileges. The administrator of an organisation gives no more than the organisation has.
func (s *Server) checkGrantable(r *http.Request, wanted *proto.Key) error {
	own := &infoOf(r.Context()).key
	if own.Global {
		return nil
	}
	if wanted.Global {
		return api.NotGlobal("only a global administrator creates the key of another")
	}
	keys, err := s.KeyAdmin.List(r.Context())
	if err != nil {
		return fmt.Errorf("list keys: %w", err)
	}
	if !slices.ContainsFunc(keys, func(k proto.Key) bool { return k.Org == own.Org && k.Valid(time.Now()) && k.Sandbox == wanted.Sandbox }) {
		return api.NotGlobal("no API key of this organisation is bound to that sandbox profile; only a global administrator binds the first")
	}
	return nil
}
