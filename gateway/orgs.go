package gateway

import (
	"errors"
	"fmt"
	"net/http"
	"time"

	"github.com/go-chi/chi/v5"

	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/proto/api"
)

func orgError(name string, err error) error {
	if errors.Is(err, proto.ErrNotFound) {
		return errNoOrg
	}
	return fmt.Errorf("organisation %s: %w", name, err)
}

// readOrg decodes an organisation from the body of a request. If the path has a name, the body may
// omit it.
func (s *Server) readOrg(w http.ResponseWriter, r *http.Request, name string) (proto.Org, error) {
	body, err := s.readBody(w, r)
	if err != nil {
		return proto.Org{}, err
	}
	org, err := api.DecodeOrg(name, body)
	if err != nil {
		return org, err
	}
	return org, s.checkPlanExists(r.Context(), "plan", org.Plan)
}

func (s *Server) createOrg(w http.ResponseWriter, r *http.Request) error {
	org, err := s.readOrg(w, r, "")
	if err != nil {
		return err
	}
	org.CreatedAt = time.Now().UTC()
	ctx, cancel := detached(r.Context())
	defer cancel()
	if err := s.Orgs.Create(ctx, org); err != nil {
		return orgError(org.Name, err)
	}
	auditAfter(r, org.Name, org.Name, api.NewOrg(&org))
	w.Header().Set("Location", "/v1/admin/orgs/"+org.Name)
	return writeTagged(w, http.StatusCreated, api.NewOrg(&org))
}

func (s *Server) listOrgs(w http.ResponseWriter, r *http.Request) error {
	key := &infoOf(r.Context()).key
	answer := api.Orgs{Orgs: []api.Org{}}
	for _, org := range s.Orgs.List() {
		if key.Global || org.Name == key.Org {
			answer.Orgs = append(answer.Orgs, api.NewOrg(&org))
		}
	}
	return writeValue(w, http.StatusOK, answer)
}

func (s *Server) getOrg(w http.ResponseWriter, r *http.Request) error {
	name, err := adminOrg(r, chi.URLParam(r, "name"))
	if err != nil {
		return err
	}
	org, err := s.Orgs.Org(r.Context(), name)
	if err != nil {
		return orgError(name, err)
	}
	return writeTagged(w, http.StatusOK, api.NewOrg(&org))
}

func (s *Server) replaceOrg(w http.ResponseWriter, r *http.Request) error {
	name := chi.URLParam(r, "name")
	wanted, err := s.readOrg(w, r, name)
	if err != nil {
		return err
	}
	if wanted.Suspended && name == infoOf(r.Context()).key.Org {
		return api.Errorf(api.CodeConflict, "the organisation of the API key in use cannot be suspended; use a key of another one")
	}
	ctx, cancel := detached(r.Context())
	defer cancel()
	org, err := s.Orgs.Change(ctx, name, func(org *proto.Org) error {
		auditBefore(r, name, name, api.NewOrg(org))
		if err := checkMatch(r, api.NewOrg(org)); err != nil {
			return err
		}
		wanted.CreatedAt = org.CreatedAt
		*org = wanted
		return nil
	})
	if err != nil {
		return orgError(name, err)
	}
	auditAfter(r, name, name, api.NewOrg(&org))
	return writeTagged(w, http.StatusOK, api.NewOrg(&org))
}
