package gateway

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"slices"
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
		if err := checkNotDeleting(org); err != nil {
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

// checkMayGetObjects returns an error if an organisation does not exist or is being deleted: what it
// would get now could stay for the next one of its name.
func (s *Server) checkMayGetObjects(ctx context.Context, name string) error {
	org, err := s.Orgs.Org(ctx, name)
	if err != nil {
		return orgError(name, err)
	}
	return checkNotDeleting(&org)
}

func checkNotDeleting(org *proto.Org) error {
	if org.DeletingAt != nil {
		return api.Errorf(api.CodeConflict, "the organisation %s is being deleted, which cannot be undone; wait until it is gone to create another of its name", org.Name)
	}
	return nil
}

// deleteOrg marks an organisation as one that is being deleted. A process that leads removes its
// data and then the organisation.
func (s *Server) deleteOrg(w http.ResponseWriter, r *http.Request) error {
	name := chi.URLParam(r, "name")
	if err := s.checkDeletable(r, name); err != nil {
		return err
	}
	ctx, cancel := detached(r.Context())
	defer cancel()
	org, err := s.Orgs.Change(ctx, name, func(org *proto.Org) error {
		auditBefore(r, name, name, api.NewOrg(org))
		if err := checkMatch(r, api.NewOrg(org)); err != nil {
			return err
		}
		if org.DeletingAt == nil {
			org.DeletingAt = new(time.Now().UTC())
		}
		return nil
	})
	if err != nil {
		return orgError(name, err)
	}
	auditAfter(r, name, name, api.NewOrg(&org))
	return writeTagged(w, http.StatusAccepted, api.NewOrg(&org))
}

// checkDeletable returns an error if nobody could administer the server, or the caller could not
// follow the deletion, without an organisation.
func (s *Server) checkDeletable(r *http.Request, name string) error {
	switch {
	case !proto.ValidOrg(name):
		return proto.FieldErrorf("name", "must be the name of an organisation")
	case name == infoOf(r.Context()).key.Org:
		return api.Errorf(api.CodeConflict, "the organisation of the API key in use cannot be deleted; use a key of another one")
	case name == proto.DefaultOrg:
		return api.Errorf(api.CodeConflict, "the organisation %s, to which the first API key belongs, cannot be deleted; revoke its keys and remove what it has", name)
	}
	keys, err := s.KeyAdmin.List(r.Context())
	if err != nil {
		return fmt.Errorf("list keys: %w", err)
	}
	if !slices.ContainsFunc(keys, func(k proto.Key) bool {
		return k.Org != name && k.RevokedAt == nil && k.ExpiresAt == nil && k.GlobalAdmin()
	}) {
		return api.Errorf(api.CodeConflict, "the only API keys of global administrators that never expire belong to the organisation %s; create another one first", name)
	}
	return nil
}

func (s *Server) getOrgData(w http.ResponseWriter, r *http.Request) error {
	name, err := adminOrg(r, chi.URLParam(r, "name"))
	if err != nil {
		return err
	}
	data, err := s.OrgData.List(r.Context(), name)
	if err != nil {
		return err
	}
	return writeValue(w, http.StatusOK, api.NewOrgData(data))
}

// entitledBody is a body whose end is an error if the key of the request may do nothing any more.
// A body may take long, and what it leads to must not be stored for an organisation that was
// deleted meanwhile.
type entitledBody struct {
	io.ReadCloser
	entitled func() error
	left     int64 // bytes that are expected; negative if unknown
	refusal  error // of the end
	checked  bool
}

// checkAtEnd makes the end of a request's body an error if key may do nothing any more.
func (s *Server) checkAtEnd(r *http.Request, key *proto.Key) {
	if r.ContentLength == 0 {
		return
	}
	r.Body = &entitledBody{ReadCloser: r.Body, left: r.ContentLength, entitled: func() error {
		_, err := s.entitlementOf(r.Context(), key)
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
