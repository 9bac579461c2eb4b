package gateway

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"strings"

	"github.com/go-chi/chi/v5"

	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/proto/api"
)

// entitlement is what an API key may do: the plan of its organisation, narrowed by the key.
type entitlement struct {
	proto.Plan

	keyConcurrent int         // executions of the key that may run at once; 0 for no limit
	keyTimeout    int         // seconds that an execution of the key may ask for; 0 for no limit
	next          *proto.Plan // the plan that messages suggest; nil for none
}

// entitlementOf returns what a key may do. It returns an error for the client if the key's
// organisation is suspended or being deleted.
func (s *Server) entitlementOf(ctx context.Context, key *proto.Key) (e entitlement, err error) {
	org, err := s.Orgs.Org(ctx, key.Org)
	if errors.Is(err, proto.ErrNotFound) {
		return e, api.Errorf(api.CodeInternal, "the organisation %q does not exist, so nothing is done under its API keys; ask the administrator of this server to create it", key.Org)
	}
	if err != nil {
		return e, fmt.Errorf("look up organisation %s: %w", key.Org, err)
	}
	if org.DeletingAt != nil {
		return e, &api.Error{Code: api.CodeForbidden, Reason: api.ReasonDeleted, Message: "the organisation " + org.Name + " is being deleted; use an API key of another one"}
	}
	if org.Suspended {
		return e, &api.Error{Code: api.CodeForbidden, Reason: api.ReasonSuspended, Message: "the organisation " + org.Name + " is suspended; ask its administrator"}
	}
	if e.Plan, err = s.planNamed(ctx, org.Plan); err != nil {
		return e, err
	}
	e.keyConcurrent, e.keyTimeout = key.Concurrent, key.MaxTimeout
	if key.Plan != "" {
		own, err := s.planNamed(ctx, key.Plan)
		if err != nil {
			return e, err
		}
		if limit := min(proto.LimitOf(own.Concurrent), proto.LimitOf(key.Concurrent)); limit != proto.NoLimit {
			e.keyConcurrent = limit
		}
		own.Concurrent = 0 // the plan of a key limits that key alone
		narrowed := e.Narrow(own)
		if !e.Within(narrowed) {
			narrowed.Title, narrowed.Next = own.Title, "" // another plan of the organisation would not help
		}
		e.Plan = narrowed
	}
	e.Plan = e.Narrow(proto.Plan{RequestRate: key.RequestRate, Streaming: true, Async: true})
	if s.UpgradeURL != "" && e.Next != "" {
		if next, err := s.Plans.Plan(ctx, e.Next); err == nil { // else messages suggest none
			e.next = &next
		}
	}
	return e, nil
}

// planNamed returns the plan of an organisation or of a key.
func (s *Server) planNamed(ctx context.Context, name string) (proto.Plan, error) {
	p, err := s.Plans.Plan(ctx, name)
	if errors.Is(err, proto.ErrNotFound) {
		return p, api.Errorf(api.CodeInternal, "the plan %q does not exist, so nothing is done under the API keys that have it; ask the administrator of this server to create it", name)
	}
	if err != nil {
		return p, fmt.Errorf("look up plan %s: %w", name, err)
	}
	return p, nil
}

// checkPlan refuses a mode or timeout that the plan does not include. Nothing is reduced silently.
func (s *Server) checkPlan(ctx context.Context, e *entitlement, mode proto.Mode, timeout int) error {
	upgrade := ""
	if s.UpgradeURL != "" {
		upgrade = ". Upgrade at " + s.UpgradeURL
	}
	if !e.Allows(mode) {
		kind := "Async"
		if mode == proto.ModeStreaming {
			kind = "Streaming"
		}
		larger := s.largerPlansWith(ctx, &e.Plan, mode)
		if larger == "" {
			return api.NotInPlan("%s execution is not part of the %s plan", kind, e.Title)
		}
		return api.NotInPlan("%s execution requires a %s plan%s", kind, larger, upgrade)
	}
	if e.keyTimeout > 0 && timeout > e.keyTimeout {
		return api.NotInPlan("timeout is above the maximum of %d seconds of this API key; ask for less", e.keyTimeout)
	}
	most := min(proto.LimitOf(e.MaxTimeout), proto.MaxTimeout)
	if timeout <= most {
		return nil
	}
	message := fmt.Sprintf("timeout is above the maximum of %d seconds of the %s plan", most, e.Title)
	if e.next == nil {
		return api.NotInPlan("%s; ask for less", message)
	}
	return api.NotInPlan("%s; upgrade to %s for up to %d seconds, or ask for less%s", message, e.next.Title, min(proto.LimitOf(e.next.MaxTimeout), proto.MaxTimeout), upgrade)
}

// largerPlansWith lists the plans after p that include a mode, such as "Pro or Enterprise".
func (s *Server) largerPlansWith(ctx context.Context, p *proto.Plan, mode proto.Mode) string {
	var titles []string
	seen := map[string]bool{p.Name: true}
	for next := p.Next; next != "" && !seen[next]; {
		plan, err := s.Plans.Plan(ctx, next)
		if err != nil {
			break // an administrator named a plan that does not exist
		}
		if plan.Allows(mode) {
			titles = append(titles, plan.Title)
		}
		seen[next] = true
		next = plan.Next
	}
	return strings.Join(titles, " or ")
}

// planError says which plan an error is about.
func planError(name string, err error) error {
	if errors.Is(err, proto.ErrNotFound) {
		return api.Errorf(api.CodeNotFound, "there is no stored plan %s; see /v1/admin/plans", proto.Shorten(name))
	}
	return fmt.Errorf("plan %s: %w", name, err)
}

// readPlan decodes a plan from the body of a request. If the path has a name, the body may omit it.
func (s *Server) readPlan(w http.ResponseWriter, r *http.Request, name string) (proto.Plan, error) {
	body, err := s.readBody(w, r)
	if err != nil {
		return proto.Plan{}, err
	}
	p, err := api.DecodePlan(name, body)
	if err != nil || p.Next == "" {
		return p, err
	}
	return p, s.checkPlanExists(r.Context(), "next", p.Next)
}

// checkPlanExists returns an error about a field unless it names a plan.
func (s *Server) checkPlanExists(ctx context.Context, field, name string) error {
	_, err := s.Plans.Plan(ctx, name)
	if errors.Is(err, proto.ErrNotFound) {
		return proto.FieldErrorf(field, "%q does not exist; see /v1/admin/plans", proto.Shorten(name))
	}
	return err
}

func (s *Server) createPlan(w http.ResponseWriter, r *http.Request) error {
	p, err := s.readPlan(w, r, "")
	if err != nil {
		return err
	}
	ctx, cancel := detached(r.Context())
	defer cancel()
	if err := s.Plans.Create(ctx, p); err != nil {
		return planError(p.Name, err)
	}
	auditAfter(r, "", p.Name, p)
	w.Header().Set("Location", "/v1/admin/plans/"+p.Name)
	return writeTagged(w, http.StatusCreated, p)
}

func (s *Server) listPlans(w http.ResponseWriter, _ *http.Request) error {
	return writeValue(w, http.StatusOK, api.Plans{Plans: s.Plans.List()})
}

func (s *Server) getPlan(w http.ResponseWriter, r *http.Request) error {
	name := chi.URLParam(r, "name")
	if err := proto.CheckPlanName("name", name); err != nil {
		return err
	}
	p, err := s.Plans.Plan(r.Context(), name)
	if err != nil {
		return planError(name, err)
	}
	return writeTagged(w, http.StatusOK, p)
}

func (s *Server) replacePlan(w http.ResponseWriter, r *http.Request) error {
	p, err := s.readPlan(w, r, chi.URLParam(r, "name"))
	if err != nil {
		return err
	}
	ctx, cancel := detached(r.Context())
	defer cancel()
	err = s.Plans.Replace(ctx, p, func(old proto.Plan) error {
		auditBefore(r, "", p.Name, old)
		return checkMatch(r, old)
	})
	if err != nil {
		return planError(p.Name, err)
	}
	auditAfter(r, "", p.Name, p)
	return writeTagged(w, http.StatusOK, p)
}

func (s *Server) deletePlan(w http.ResponseWriter, r *http.Request) error {
	name := chi.URLParam(r, "name")
	if err := proto.CheckPlanName("name", name); err != nil {
		return err
	}
	ctx, cancel := detached(r.Context())
	defer cancel()
	p, err := s.Plans.Remove(ctx, name, func(old proto.Plan) error {
		auditBefore(r, "", name, old)
		return checkMatch(r, old)
	})
	if err != nil {
		return planError(name, err)
	}
	return writeValue(w, http.StatusOK, p)
}
