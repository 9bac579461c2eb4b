package admin

import (
	"context"
	"errors"
	"fmt"
	"net/http"

	"github.com/go-chi/chi/v5"

	"github.com/bullpen-run/bullpen/gateway/web"
	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/proto/api"
)

// Members stores the people who may sign in.
type Members interface {
	// Get returns a member, or [proto.ErrNotFound].
	Get(ctx context.Context, id string) (proto.Member, error)
	web.Pages[proto.Member]
	// Create stores a new member with the organisation, the address or subject, and the role of m,
	// and returns it. It returns [proto.ErrExists] if the organisation has that person, and a
	// [*proto.QuotaError] if it has too many.
	Create(ctx context.Context, m proto.Member) (proto.Member, error)
	// Change stores the result of change for a member, and returns it. change may be called again.
	// Its error is returned unchanged. Change returns [proto.ErrNotFound] if there is no such
	// member.
	Change(ctx context.Context, id string, change func(*proto.Member) error) (proto.Member, error)
	// Remove removes a member for which check returns nil, and returns it. It returns
	// [proto.ErrNotFound] if there is none.
	Remove(ctx context.Context, id string, check func(proto.Member) error) (proto.Member, error)
}

// hookRemover removes the webhook settings of API keys.
type hookRemover interface {
	// Remove removes the settings of a key. It returns [proto.ErrNotFound] if there are none.
	Remove(ctx context.Context, org, key string) error
}

// MemberRoutes are the routes of members.
type MemberRoutes struct {
	*web.Core
	Members  Members
	Orgs     orgFinder
	Keys     keyList
	Webhooks hookRemover
}

// Handlers returns the handlers of the routes.
func (s *MemberRoutes) Handlers() []web.Handler {
	x := &web.Resource[proto.Member, api.Member]{
		Core: s.Core, Kind: "member", Path: "/v1/admin/members", Param: "id", Form: api.NewMember,
		Name:   func(m *proto.Member) (org, id string) { return m.Org, m.ID },
		Answer: func(list []api.Member, next *string) any { return api.Members{Members: list, NextCursor: next} },
		NotFound: func(string) error {
			return api.Errorf(api.CodeNotFound, "there is no member of that id; see /v1/admin/members")
		},
	}
	return []web.Handler{
		{ID: "createMember", Handle: x.Create(s.read, s.create)},
		{ID: "listMembers", Handle: x.List(web.ListedOrg, s.Members)},
		{ID: "getMember", Handle: x.Get(func(ctx context.Context, r *web.Request) (proto.Member, error) {
			return s.inPath(ctx, r, false)
		})},
		{ID: "replaceMember", Handle: x.Put(s.readSettings,
			func(ctx context.Context, r *web.Request, id string, wanted proto.Member) (proto.Member, error) {
				return s.Members.Change(ctx, id, func(m *proto.Member) error {
					key := m.Key() // perhaps a global administrator's by now
					if err := web.Administer(r, &key, true); err != nil {
						return err
					}
					if err := x.Before(r, m); err != nil {
						return err
					}
					m.Role, m.Global = wanted.Role, wanted.Global
					return nil
				})
			})},
		{ID: "removeMember", Handle: x.Remove(func(ctx context.Context, r *web.Request, id string) (*proto.Member, error) {
			m, err := s.Members.Remove(ctx, id, func(m proto.Member) error {
				key := m.Key()
				if err := web.Administer(r, &key, true); err != nil {
					return err
				}
				return x.Before(r, &m)
			})
			if err != nil {
				return nil, err
			}
			if err := s.Webhooks.Remove(ctx, m.Org, m.ID); err != nil && !errors.Is(err, proto.ErrNotFound) {
				return nil, fmt.Errorf("remove the webhook settings: %w", err)
			}
			return &m, nil
		})},
	}
}

// checkRole returns an error unless the API key of a request may grant a member its role. A
// member's programs use the default sandbox profile, which the organisation must already have.
func (s *MemberRoutes) checkRole(r *web.Request, m *proto.Member) error {
	key := m.Key()
	if !key.Has(proto.ScopeExecute) {
		return nil
	}
	return checkGrantable(r, s.Keys, &key)
}

// read decodes a new member from the body of a request.
func (s *MemberRoutes) read(w http.ResponseWriter, r *web.Request) (m proto.Member, err error) {
	req, err := web.DecodeBody[api.MemberRequest](s.Core, w, r)
	if err != nil {
		return m, err
	}
	if _, err := web.AdminOrg(r, req.Org); err != nil {
		return m, err
	}
	m = req.Member()
	if err := s.checkRole(r, &m); err != nil {
		return m, err
	}
	return m, CheckMayGetObjects(r.Context(), s.Orgs, req.Org)
}

func (s *MemberRoutes) create(ctx context.Context, wanted proto.Member) (proto.Member, error) {
	m, err := s.Members.Create(ctx, wanted)
	if errors.Is(err, proto.ErrExists) {
		err = api.Errorf(api.CodeConflict, "%s is a member of %s already; change the role of that one",
			proto.Shorten(wanted.Name()), wanted.Org)
	}
	return m, err
}

// readSettings returns the member in the path with the role in the body of a request.
func (s *MemberRoutes) readSettings(w http.ResponseWriter, r *web.Request) (m proto.Member, err error) {
	settings, err := web.DecodeBody[api.MemberSettings](s.Core, w, r)
	if err != nil {
		return m, err
	}
	if m, err = s.inPath(r.Context(), r, true); err != nil {
		return m, err
	}
	m.Role, m.Global = settings.Role, settings.Global
	return m, s.checkRole(r, &m)
}

// inPath returns the member that a request names. change reports that the request changes it.
func (s *MemberRoutes) inPath(ctx context.Context, r *web.Request, change bool) (proto.Member, error) {
	m, err := s.Members.Get(ctx, chi.URLParam(r.Request, "id"))
	if err == nil {
		key := m.Key()
		err = web.Administer(r, &key, change)
	}
	return m, err
}
