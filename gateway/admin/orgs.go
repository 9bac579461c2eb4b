package admin

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"slices"
	"time"

	"github.com/go-chi/chi/v5"

	"github.com/bullpen-run/bullpen/gateway/web"
	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/proto/api"
)

// Orgs stores organisations.
type Orgs interface {
	orgFinder
	web.Pages[proto.Org] // by name
	// Create stores a new organisation. It returns [proto.ErrExists] if there is one of that name.
	Create(ctx context.Context, org proto.Org) error
	// Change stores the result of change for an organisation, and returns it. change may be called
	// again. Its error is returned unchanged. Change returns [proto.ErrNotFound] if there is no
	// such organisation.
	Change(ctx context.Context, name string, change func(*proto.Org) error) (proto.Org, error)
}

// orgFinder finds organisations.
type orgFinder interface {
	// Org returns an organisation, or [proto.ErrNotFound].
	Org(ctx context.Context, name string) (proto.Org, error)
}

// OrgData shows what is stored of organisations.
type OrgData interface {
	// List returns the stored data of an organisation, which need not exist.
	List(ctx context.Context, org string) (*proto.OrgData, error)
}

// keyList lists API keys.
type keyList interface {
	// List returns the keys of an organisation, or all if org is empty, including revoked ones.
	List(org string) []proto.Key
}

// OrgRoutes are the routes of organisations.
type OrgRoutes struct {
	*web.Core
	Orgs  Orgs
	Plans planFinder
	Keys  keyList
	Data  OrgData
}

// Handlers returns the handlers of the routes.
func (s *OrgRoutes) Handlers() []web.Handler {
	x := &web.Resource[proto.Org, api.Org]{
		Core: s.Core, Kind: "organisation", Path: "/v1/admin/orgs", Param: "name", Form: api.NewOrg,
		Name:     func(o *proto.Org) (org, id string) { return o.Name, o.Name },
		Answer:   func(list []api.Org, next *string) any { return api.Orgs{Orgs: list, NextCursor: next} },
		NotFound: func(string) error { return web.ErrNoOrg },
	}
	return []web.Handler{
		{ID: "createOrg", Handle: x.Create(s.read, func(ctx context.Context, org proto.Org) (proto.Org, error) {
			org.CreatedAt = time.Now().UTC()
			return org, s.Orgs.Create(ctx, org)
		})},
		{ID: "listOrgs", Handle: func(w http.ResponseWriter, r *web.Request) error {
			return x.WritePage(w, r, s.Orgs, "", func(org *proto.Org) bool { return r.Key.Global || org.Name == r.Key.Org })
		}},
		{ID: "getOrg", Handle: x.Get(func(ctx context.Context, r *web.Request) (org proto.Org, err error) {
			name, err := web.AdminOrg(r, chi.URLParam(r.Request, "name"))
			if err != nil {
				return org, err
			}
			return s.Orgs.Org(ctx, name)
		})},
		{ID: "replaceOrg", Handle: x.Put(s.readReplacement,
			func(ctx context.Context, r *web.Request, name string, wanted proto.Org) (proto.Org, error) {
				return s.Orgs.Change(ctx, name, func(org *proto.Org) error {
					if err := x.Before(r, org); err != nil {
						return err
					}
					if err := checkNotDeleting(org); err != nil {
						return err
					}
					wanted.CreatedAt = org.CreatedAt
					*org = wanted
					return nil
				})
			})},
		{ID: "deleteOrg", Handle: func(w http.ResponseWriter, r *web.Request) error { return s.delete(x, w, r) }},
		{ID: "getOrgData", Handle: s.getData},
	}
}

// read decodes an organisation from the body of a request. If the path has a name, the body may
// omit it.
func (s *OrgRoutes) read(w http.ResponseWriter, r *web.Request) (org proto.Org, err error) {
	err = s.WithBody(w, r, func(body []byte) (err error) {
		org, err = api.DecodeOrg(chi.URLParam(r.Request, "name"), body)
		return err
	})
	if err != nil {
		return org, err
	}
	return org, checkPlanExists(r.Context(), s.Plans, "plan", org.Plan)
}

func (s *OrgRoutes) readReplacement(w http.ResponseWriter, r *web.Request) (proto.Org, error) {
	org, err := s.read(w, r)
	if err == nil && org.Suspended && chi.URLParam(r.Request, "name") == r.Key.Org {
		err = api.Errorf(api.CodeConflict,
			"the organisation of the API key in use cannot be suspended; use a key of another one")
	}
	return org, err
}

// CheckMayGetObjects returns an error if an organisation does not exist or is being deleted: a new
// object could outlive it and go to its successor with the same name.
func CheckMayGetObjects(ctx context.Context, orgs orgFinder, name string) error {
	org, err := orgs.Org(ctx, name)
	if errors.Is(err, proto.ErrNotFound) {
		return web.ErrNoOrg
	}
	if err != nil {
		return fmt.Errorf("organisation %s: %w", name, err)
	}
	return checkNotDeleting(&org)
}

func checkNotDeleting(org *proto.Org) error {
	if org.DeletingAt != nil {
		return api.Errorf(api.CodeConflict,
			"the organisation %s is being deleted, which cannot be undone; wait until it is gone to create another of its name",
			org.Name)
	}
	return nil
}

// delete marks an organisation as one that is being deleted. A process that leads removes its data
// and then the organisation.
func (s *OrgRoutes) delete(x *web.Resource[proto.Org, api.Org], w http.ResponseWriter, r *web.Request) error {
	name := chi.URLParam(r.Request, "name")
	if err := s.checkDeletable(r, name); err != nil {
		return err
	}
	ctx, cancel := web.Detached(r.Context())
	defer cancel()
	org, err := s.Orgs.Change(ctx, name, func(org *proto.Org) error {
		if err := x.Before(r, org); err != nil {
			return err
		}
		if org.DeletingAt == nil {
			org.DeletingAt = new(time.Now().UTC())
		}
		return nil
	})
	if err != nil {
		return x.Error(name, err)
	}
	x.After(r, &org)
	return x.Write(w, http.StatusAccepted, &org)
}

// checkDeletable returns an error if deleting an organisation would leave no administrator for the
// server, or keep the caller from following the deletion.
func (s *OrgRoutes) checkDeletable(r *web.Request, name string) error {
	switch {
	case !proto.ValidOrg(name):
		return proto.FieldErrorf("name", "must be the name of an organisation")
	case name == r.Key.Org:
		return api.Errorf(api.CodeConflict,
			"the organisation of the API key in use cannot be deleted; use a key of another one")
	case name == proto.DefaultOrg:
		return api.Errorf(api.CodeConflict,
			"the organisation %s, to which the first API key belongs, cannot be deleted; revoke its keys and remove what it has",
			name)
	}
	if !slices.ContainsFunc(s.Keys.List(""), func(k proto.Key) bool {
		return k.Org != name && k.RevokedAt == nil && k.ExpiresAt == nil && k.GlobalAdmin()
	}) {
		return api.Errorf(api.CodeConflict,
			"the only API keys of global administrators that never expire belong to the organisation %s; create another "+
				"one first", name)
	}
	return nil
}

func (s *OrgRoutes) getData(w http.ResponseWriter, r *web.Request) error {
	name, err := web.AdminOrg(r, chi.URLParam(r.Request, "name"))
	if err != nil {
		return err
	}
	data, err := s.Data.List(r.Context(), name)
	if err != nil {
		return err
	}
	return web.WriteValue(w, http.StatusOK, api.NewOrgData(data))
}
