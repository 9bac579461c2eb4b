package gateway

import (
	"context"
	"errors"
	"fmt"
	"net/http"

	"github.com/go-chi/chi/v5"

	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/proto/api"
)

// checkRole returns an error unless the API key of a request may give a member its role. What a
// member runs has the default sandbox profile, which the organisation must have already.
func (s *Server) checkRole(r *http.Request, m *proto.Member) error {
	key := m.Key()
	if !key.Has(proto.ScopeExecute) {
		return nil
	}
	return s.checkGrantable(r, &key)
}

func memberError(err error) error {
	if errors.Is(err, proto.ErrNotFound) {
		return api.Errorf(api.CodeNotFound, "there is no member of that id; see /v1/admin/members")
	}
	return fmt.Errorf("member: %w", err)
}

func (s *Server) createMember(w http.ResponseWriter, r *http.Request) error {
	req, err := decodeBody[api.MemberRequest](s, w, r)
	if err != nil {
		return err
	}
	if _, err := adminOrg(r, req.Org); err != nil {
		return err
	}
	wanted := req.Member()
	if err := s.checkRole(r, &wanted); err != nil {
		return err
	}
	if err := s.checkMayGetObjects(r.Context(), req.Org); err != nil {
		return err
	}
	ctx, cancel := detached(r.Context())
	defer cancel()
	m, err := s.Members.Create(ctx, wanted)
	if errors.Is(err, proto.ErrExists) {
		return api.Errorf(api.CodeConflict, "%s is a member of %s already; change the role of that one", proto.Shorten(wanted.Name()), wanted.Org)
	}
	if err != nil {
		return fmt.Errorf("create member: %w", err)
	}
	auditAfter(r, m.Org, m.ID, api.NewMember(&m))
	w.Header().Set("Location", "/v1/admin/members/"+m.ID)
	return writeTagged(w, http.StatusCreated, api.NewMember(&m))
}

func (s *Server) listMembers(w http.ResponseWriter, r *http.Request) error {
	org, err := listedOrg(r)
	if err != nil {
		return err
	}
	answer := api.Members{Members: []api.Member{}}
	for _, m := range s.Members.List() {
		if org == "" || m.Org == org {
			answer.Members = append(answer.Members, api.NewMember(&m))
		}
	}
	return writeValue(w, http.StatusOK, answer)
}

// memberInPath returns the member that a request names. change reports that the request changes it.
func (s *Server) memberInPath(ctx context.Context, r *http.Request, change bool) (proto.Member, error) {
	m, err := s.Members.Get(ctx, chi.URLParam(r, "id"))
	if err == nil {
		key := m.Key()
		err = administer(r, &key, change)
	}
	if err != nil {
		return m, memberError(err)
	}
	return m, nil
}

func (s *Server) getMember(w http.ResponseWriter, r *http.Request) error {
	m, err := s.memberInPath(r.Context(), r, false)
	if err != nil {
		return err
	}
	return writeTagged(w, http.StatusOK, api.NewMember(&m))
}

func (s *Server) replaceMember(w http.ResponseWriter, r *http.Request) error {
	settings, err := decodeBody[api.MemberSettings](s, w, r)
	if err != nil {
		return err
	}
	ctx, cancel := detached(r.Context())
	defer cancel()
	wanted, err := s.memberInPath(ctx, r, true)
	if err != nil {
		return err
	}
	wanted.Role, wanted.Global = settings.Role, settings.Global
	if err := s.checkRole(r, &wanted); err != nil {
		return err
	}
	m, err := s.Members.Change(ctx, wanted.ID, func(m *proto.Member) error {
		key := m.Key() // perhaps a global administrator's by now
		if err := administer(r, &key, true); err != nil {
			return err
		}
		auditBefore(r, m.Org, m.ID, api.NewMember(m))
		if err := checkMatch(r, api.NewMember(m)); err != nil {
			return err
		}
		m.Role, m.Global = wanted.Role, wanted.Global
		return nil
	})
	if err != nil {
		return memberError(err)
	}
	auditAfter(r, m.Org, m.ID, api.NewMember(&m))
	return writeTagged(w, http.StatusOK, api.NewMember(&m))
}

func (s *Server) deleteMember(w http.ResponseWriter, r *http.Request) error {
	ctx, cancel := detached(r.Context())
	defer cancel()
	m, err := s.Members.Remove(ctx, chi.URLParam(r, "id"), func(m proto.Member) error {
		key := m.Key()
		if err := administer(r, &key, true); err != nil {
			return err
		}
		auditBefore(r, m.Org, m.ID, api.NewMember(&m))
		return checkMatch(r, api.NewMember(&m))
	})
	if err != nil {
		return memberError(err)
	}
	if err := s.Webhooks.Remove(ctx, m.ID); err != nil && !errors.Is(err, proto.ErrNotFound) {
		return fmt.Errorf("remove the webhook settings of a member: %w", err)
	}
	return writeValue(w, http.StatusOK, api.NewMember(&m))
}
