package admin

import (
	"context"
	"errors"
	"net/http"

	"github.com/go-chi/chi/v5"

	"github.com/bullpen-run/bullpen/gateway/web"
	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/proto/api"
)

// Plans stores plans.
type Plans interface {
	planFinder
	// List returns all plans.
	List() []proto.Plan
	// Create stores a new plan. It returns [proto.ErrExists] if there is one of that name.
	Create(ctx context.Context, plan proto.Plan) error
	// Replace replaces the plan with the same name if check returns nil for the stored one. check
	// may be called again. Its error is returned unchanged. Replace returns [proto.ErrNotFound] if
	// there is no such plan.
	Replace(ctx context.Context, plan proto.Plan, check func(old proto.Plan) error) error
	// Remove removes a stored plan for which check returns nil, and returns it. It returns
	// [proto.ErrNotFound] if there is none, and a [*proto.PlanInUseError] if it is in use.
	Remove(ctx context.Context, name string, check func(old proto.Plan) error) (proto.Plan, error)
}

// planFinder finds plans.
type planFinder interface {
	// Plan returns a built-in or a stored plan, or [proto.ErrNotFound].
	Plan(ctx context.Context, name string) (proto.Plan, error)
}

// PlanRoutes are the routes of plans.
type PlanRoutes struct {
	*web.Core
	Plans Plans
}

// Handlers returns the handlers of the routes.
func (s *PlanRoutes) Handlers() []web.Handler {
	x := &web.Resource[proto.Plan, proto.Plan]{
		Core: s.Core, Kind: "plan", Path: "/v1/admin/plans", Param: "name", Form: web.Same[proto.Plan],
		Name:   func(p *proto.Plan) (org, id string) { return "", p.Name },
		Answer: func(list []proto.Plan, next *string) any { return api.Plans{Plans: list, NextCursor: next} },
		NotFound: func(name string) error {
			return api.Errorf(api.CodeNotFound, "there is no stored plan %s; see /v1/admin/plans", proto.Shorten(name))
		},
	}
	return []web.Handler{
		{ID: "createPlan", Handle: x.Create(s.read, func(ctx context.Context, p proto.Plan) (proto.Plan, error) {
			return p, s.Plans.Create(ctx, p)
		})},
		{ID: "listPlans", Handle: func(w http.ResponseWriter, r *web.Request) error {
			all, presets := s.Plans.List(), len(proto.PresetPlans())
			list := web.NamedAfter(all[:presets], all[presets:], func(p *proto.Plan) string { return p.Name })
			return x.WritePage(w, r, list, "", nil)
		}},
		{ID: "getPlan", Handle: x.Get(func(ctx context.Context, r *web.Request) (p proto.Plan, err error) {
			name := chi.URLParam(r.Request, "name")
			if err := proto.CheckPlanName("name", name); err != nil {
				return p, err
			}
			return s.Plans.Plan(ctx, name)
		})},
		{ID: "replacePlan", Handle: x.Put(s.read,
			func(ctx context.Context, r *web.Request, _ string, wanted proto.Plan) (proto.Plan, error) {
				return wanted, s.Plans.Replace(ctx, wanted, func(old proto.Plan) error { return x.Before(r, &old) })
			})},
		{ID: "removePlan", Handle: x.Remove(func(ctx context.Context, r *web.Request, name string) (*proto.Plan, error) {
			if err := proto.CheckPlanName("name", name); err != nil {
				return nil, err
			}
			p, err := s.Plans.Remove(ctx, name, func(old proto.Plan) error { return x.Before(r, &old) })
			return &p, err
		})},
	}
}

// read decodes a plan from the body of a request. If the path has a name, the body may omit it.
func (s *PlanRoutes) read(w http.ResponseWriter, r *web.Request) (p proto.Plan, err error) {
	err = s.WithBody(w, r, func(body []byte) (err error) {
		p, err = api.DecodePlan(chi.URLParam(r.Request, "name"), body)
		return err
	})
	if err != nil || p.Next == "" {
		return p, err
	}
	return p, checkPlanExists(r.Context(), s.Plans, "next", p.Next)
}

// checkPlanExists returns an error about a field unless it names a plan.
func checkPlanExists(ctx context.Context, plans planFinder, field, name string) error {
	_, err := plans.Plan(ctx, name)
	if errors.Is(err, proto.ErrNotFound) {
		return proto.FieldErrorf(field, "%q does not exist; see /v1/admin/plans", proto.Shorten(name))
	}
	return err
}
