package admission

import (
	"context"
	"errors"
	"fmt"
	"math"
	"time"

	"github.com/bullpen-run/bullpen/proto"
)

// Orgs finds organisations.
type Orgs interface {
	// Org returns an organisation, or [proto.ErrNotFound].
	Org(ctx context.Context, name string) (proto.Org, error)
}

// Plans finds plans.
type Plans interface {
	// Plan returns a built-in or a stored plan, or [proto.ErrNotFound].
	Plan(ctx context.Context, name string) (proto.Plan, error)
}

// Entitlement returns what a key may do. It returns a [*proto.Rejection] if the key's organisation is
// suspended or being deleted.
func (a *Admission) Entitlement(ctx context.Context, key *proto.Key) (e proto.Entitlement, err error) {
	org, err := a.Orgs.Org(ctx, key.Org)
	if errors.Is(err, proto.ErrNotFound) {
		return e, &proto.Rejection{Reason: proto.RejectedNoOrg, Name: key.Org}
	}
	if err != nil {
		return e, fmt.Errorf("look up organisation %s: %w", key.Org, err)
	}
	if org.DeletingAt != nil {
		return e, &proto.Rejection{Reason: proto.RejectedDeleted, Name: org.Name}
	}
	if org.Suspended {
		return e, &proto.Rejection{Reason: proto.RejectedSuspended, Name: org.Name}
	}
	if e.Plan, err = a.planNamed(ctx, org.Plan); err != nil {
		return e, err
	}
	e.KeyConcurrent, e.KeyTimeout = key.Concurrent, key.MaxTimeout
	if key.Plan != "" {
		own, err := a.planNamed(ctx, key.Plan)
		if err != nil {
			return e, err
		}
		if limit := min(proto.LimitOf(own.Concurrent), proto.LimitOf(key.Concurrent)); limit != proto.NoLimit {
			e.KeyConcurrent = limit
		}
		own.Concurrent = 0 // the plan of a key limits that key alone
		narrowed := e.Narrow(own)
		if !e.Within(narrowed) {
			narrowed.Title, narrowed.Next = own.Title, "" // another plan of the organisation would not help
		}
		e.Plan = narrowed
	}
	e.Plan = e.Narrow(proto.Plan{RequestRate: key.RequestRate, Streaming: true, Async: true})
	e.Upgrade = a.nextPlan(ctx, &e.Plan)
	return e, nil
}

// nextPlan returns the plan to suggest after p in messages, nil for none.
func (a *Admission) nextPlan(ctx context.Context, p *proto.Plan) *proto.Plan {
	if a.UpgradeURL == "" || p.Next == "" {
		return nil
	}
	next, err := a.Plans.Plan(ctx, p.Next)
	if err != nil { // messages suggest none
		return nil
	}
	return &next
}

// planNamed returns the plan of an organisation or of a key.
func (a *Admission) planNamed(ctx context.Context, name string) (proto.Plan, error) {
	p, err := a.Plans.Plan(ctx, name)
	if errors.Is(err, proto.ErrNotFound) {
		return p, &proto.Rejection{Reason: proto.RejectedNoPlan, Name: name}
	}
	if err != nil {
		return p, fmt.Errorf("look up plan %s: %w", name, err)
	}
	return p, nil
}

// planLimit describes the plan of an entitlement in a rejection.
func (a *Admission) planLimit(e *proto.Entitlement) *proto.PlanLimit {
	return &proto.PlanLimit{Title: e.Title, Next: e.Upgrade, UpgradeURL: a.UpgradeURL}
}

// suggest adds the plan to suggest to a rejection by the queue of a key's job.
func (a *Admission) suggest(ctx context.Context, err error, key string) error {
	rejection, ok := errors.AsType[*proto.Rejection](err)
	if !ok || rejection.Reason != proto.RejectedConcurrency && rejection.Reason != proto.RejectedQueueFull {
		return err
	}
	principal, ok := a.Principal(key)
	if !ok {
		return err
	}
	e, errPlan := a.Entitlement(ctx, principal)
	if errPlan != nil { // the message suggests none
		return err
	}
	suggested := *rejection
	suggested.Plan = a.planLimit(&e)
	return &suggested
}

// CheckMode rejects a mode that the plan does not include.
func (a *Admission) CheckMode(ctx context.Context, e *proto.Entitlement, mode proto.Mode) error {
	if e.Allows(mode) {
		return nil
	}
	limit := a.planLimit(e)
	limit.Mode, limit.Larger = mode, a.largerPlansWith(ctx, &e.Plan, mode)
	return &proto.Rejection{Reason: proto.RejectedMode, Plan: limit}
}

// checkPlan rejects a mode or timeout that the plan does not include. Nothing is reduced silently.
func (a *Admission) checkPlan(
	ctx context.Context, e *proto.Entitlement, mode proto.Mode, timeout int, grace *proto.Seconds,
) error {
	if err := a.CheckMode(ctx, e, mode); err != nil {
		return err
	}
	extra := 0
	if grace != nil { // the program may run as long
		extra = int(math.Ceil(time.Duration(*grace).Seconds()))
	}
	limit := a.planLimit(e)
	limit.KillGrace = extra > 0
	if e.KeyTimeout > 0 && timeout > e.KeyTimeout-extra {
		return &proto.Rejection{Reason: proto.RejectedKeyTimeout, Limit: e.KeyTimeout, Plan: limit}
	}
	if most := e.LongestTimeout(); timeout > most-extra {
		return &proto.Rejection{Reason: proto.RejectedTimeout, Limit: most, Plan: limit}
	}
	return nil
}

// largerPlansWith returns the titles of the plans after p that include a mode.
func (a *Admission) largerPlansWith(ctx context.Context, p *proto.Plan, mode proto.Mode) (titles []string) {
	seen := map[string]bool{p.Name: true}
	for next := p.Next; next != "" && !seen[next]; {
		plan, err := a.Plans.Plan(ctx, next)
		if err != nil {
			break // an administrator named a plan that does not exist
		}
		if plan.Allows(mode) {
			titles = append(titles, plan.Title)
		}
		seen[next] = true
		next = plan.Next
	}
	return titles
}
