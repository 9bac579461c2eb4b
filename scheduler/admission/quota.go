package admission

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"github.com/bullpen-run/bullpen/proto"
)

// Usage reports what organisations used.
type Usage interface {
	// Month returns an organisation's usage in the current month, as of a few seconds ago. It reads
	// memory only. Its maps must not be modified.
	Month(org string) proto.UsageMonth
	// Cross reports whether this is the first call, in any process, for a limit that an
	// organisation has reached.
	Cross(ctx context.Context, c proto.Crossing) (first bool, err error)
}

// crossings are the limits reached this month that this process knows to be reported.
type crossings struct {
	mu    sync.Mutex
	month time.Time
	known map[proto.Crossing]bool
}

// add reports whether c is a new crossing.
func (k *crossings) add(c proto.Crossing) bool {
	k.mu.Lock()
	defer k.mu.Unlock()
	if !k.month.Equal(c.Month) {
		k.month, k.known = c.Month, map[proto.Crossing]bool{}
	}
	if k.known[c] {
		return false
	}
	k.known[c] = true
	return true
}

func (k *crossings) remove(c proto.Crossing) {
	k.mu.Lock()
	defer k.mu.Unlock()
	delete(k.known, c)
}

// QuotaUses returns how much of its plan's monthly quotas an organisation has used, and reports the
// limits that it has reached. It reads no usage if the plan has no quotas.
func (a *Admission) QuotaUses(ctx context.Context, org string, quotas proto.Quotas) []proto.QuotaUse {
	if quotas == (proto.Quotas{}) {
		return nil
	}
	month := a.Usage.Month(org)
	uses := quotas.Uses(&month)
	for i := range uses {
		for _, c := range uses[i].Crossings(org) {
			a.reportCrossing(ctx, c, uses[i].Used)
		}
	}
	return uses
}

// reportCrossing logs and counts a limit that is reached, once in all processes.
func (a *Admission) reportCrossing(ctx context.Context, c proto.Crossing, used float64) {
	if !a.crossings.add(c) {
		return
	}
	first, err := a.Usage.Cross(ctx, c)
	if err != nil {
		a.crossings.remove(c)
		a.Log.WarnContext(ctx, "report of a reached quota failed, will retry", "org", c.Org, "quota", c.Name, "error", err)
		return
	}
	if !first {
		return
	}
	a.Log.WarnContext(ctx, "monthly quota reached",
		"org", c.Org, "quota", c.Name, "level", c.Level, "limit", c.Limit, "used", used, "month_ends", c.Month)
	if a.QuotaReached != nil {
		a.QuotaReached(c)
	}
}

// CheckQuota rejects a use if the organisation has reached a hard limit this month: of the named
// quotas, or of those of all executions if none are named.
func (a *Admission) CheckQuota(ctx context.Context, org string, quotas ...proto.QuotaName) error {
	plan, err := a.OrgPlan(ctx, org)
	if err != nil {
		return err
	}
	if len(quotas) == 0 {
		quotas = []proto.QuotaName{proto.QuotaCPU, proto.QuotaMemory, proto.QuotaStored}
	}
	for _, use := range a.QuotaUses(ctx, org, plan.Monthly) {
		if use.Reached(use.Hard) && slices.Contains(quotas, use.Name) {
			return &proto.Rejection{Reason: proto.RejectedQuota, Plan: &proto.PlanLimit{
				Title: plan.Title, Quota: &use, Next: a.nextPlan(ctx, &plan), UpgradeURL: a.UpgradeURL,
			}}
		}
	}
	return nil
}

// OrgPlan returns the plan of an organisation. It returns [proto.ErrNotFound] for an unknown
// organisation.
func (a *Admission) OrgPlan(ctx context.Context, name string) (proto.Plan, error) {
	org, err := a.Orgs.Org(ctx, name)
	if err != nil {
		return proto.Plan{}, fmt.Errorf("look up organisation %s: %w", name, err)
	}
	return a.planNamed(ctx, org.Plan)
}

// OrgQuotas returns how much of its plan's monthly quotas an organisation has used. It returns none
// for an unknown organisation, or if name is empty, which means all organisations.
func (a *Admission) OrgQuotas(ctx context.Context, name string) ([]proto.QuotaUse, error) {
	if name == "" {
		return nil, nil
	}
	plan, err := a.OrgPlan(ctx, name)
	if errors.Is(err, proto.ErrNotFound) {
		return nil, nil
	}
	return a.QuotaUses(ctx, name, plan.Monthly), err
}
