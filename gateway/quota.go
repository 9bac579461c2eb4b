package gateway

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/proto/api"
)

// headerQuota is on answers to organisations above a soft limit of their month.
const headerQuota = "X-Quota-Warning"

// crossings are the limits reached in this month that this process knows to be reported.
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

// quotaUses returns what an organisation has used of the monthly quotas of its plan, and reports
// the limits that it has reached. It reads no usage if the plan has no quotas.
func (s *Server) quotaUses(ctx context.Context, org string, quotas proto.Quotas) []proto.QuotaUse {
	if quotas == (proto.Quotas{}) {
		return nil
	}
	month := s.Usage.Month(org)
	uses := quotas.Uses(&month)
	for i := range uses {
		for _, c := range uses[i].Crossings(org) {
			s.reportCrossing(ctx, c, uses[i].Used)
		}
	}
	return uses
}

// reportCrossing logs and counts a limit that is reached, once in all processes.
func (s *Server) reportCrossing(ctx context.Context, c proto.Crossing, used float64) {
	if !s.crossings.add(c) {
		return
	}
	first, err := s.Usage.Cross(ctx, c)
	if err != nil {
		s.crossings.remove(c)
		s.Log.WarnContext(ctx, "report of a reached quota failed, will retry", "org", c.Org, "quota", c.Name, "error", err)
		return
	}
	if !first {
		return
	}
	s.Log.WarnContext(ctx, "monthly quota reached", "org", c.Org, "quota", c.Name, "level", c.Level, "limit", c.Limit, "used", used, "month_ends", c.Month)
	if s.QuotaReached != nil {
		s.QuotaReached(c)
	}
}

// checkQuota refuses what would use more if the organisation has reached a hard limit of its month:
// of the quotas named, or of all if none are.
func (s *Server) checkQuota(ctx context.Context, name string, quotas ...proto.QuotaName) error {
	plan, err := s.orgPlan(ctx, name)
	if err != nil {
		return err
	}
	for _, use := range s.quotaUses(ctx, name, plan.Monthly) {
		if use.Reached(use.Hard) && (len(quotas) == 0 || slices.Contains(quotas, use.Name)) {
			return s.quotaError(ctx, &plan, &use)
		}
	}
	return nil
}

// orgPlan returns the plan of an organisation.
func (s *Server) orgPlan(ctx context.Context, name string) (proto.Plan, error) {
	org, err := s.Orgs.Org(ctx, name)
	if err != nil {
		return proto.Plan{}, fmt.Errorf("look up organisation %s: %w", name, err)
	}
	return s.planNamed(ctx, org.Plan)
}

// orgQuotas returns what an organisation has used of the monthly quotas of its plan. It returns
// none for an unknown organisation, and for all of them, whose name is empty.
func (s *Server) orgQuotas(ctx context.Context, name string) ([]proto.QuotaUse, error) {
	if name == "" {
		return nil, nil
	}
	plan, err := s.orgPlan(ctx, name)
	if errors.Is(err, proto.ErrNotFound) {
		return nil, nil
	}
	return s.quotaUses(ctx, name, plan.Monthly), err
}

// quotaError returns the error for a client whose organisation has reached a hard limit.
func (s *Server) quotaError(ctx context.Context, plan *proto.Plan, use *proto.QuotaUse) error {
	message := fmt.Sprintf("the %s plan includes %d %s in a month, and the organisation has used %s; the month ends at %s",
		plan.Title, use.Hard, use.Name, quantity(use.Used), use.Ends.Format(time.RFC3339))
	if use.Name == proto.QuotaStored {
		message += "; or remove threads, which counts within an hour"
	}
	if s.UpgradeURL != "" && plan.Next != "" {
		if next, err := s.Plans.Plan(ctx, plan.Next); err == nil { // else the message suggests none
			message += ". Upgrade to " + next.Title + " at " + s.UpgradeURL
		}
	}
	return api.NotInPlan("%s", message)
}

// quantity formats an amount of a quota.
func quantity(n float64) string { return strconv.FormatFloat(n, 'f', -1, 64) }

// submitNew submits a job unless the month's quotas of its organisation are used up. An execution
// that was accepted before is found nevertheless.
func (s *Server) submitNew(ctx context.Context, sub *proto.Submission) (proto.TraceID, error) {
	sub.Admit = func() error { return s.checkQuota(ctx, sub.Job.Org) }
	return s.Submissions.Submit(ctx, sub)
}

// warnQuota adds a header to answers while the organisation of the API key is above a soft limit of
// its month.
func (s *Server) warnQuota(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		i := infoOf(r.Context())
		var warnings []string
		for _, use := range s.quotaUses(r.Context(), i.key.Org, i.plan.Monthly) {
			if !use.Reached(use.Soft) {
				continue
			}
			text := fmt.Sprintf("%s;used=%s;soft=%d", use.Name, quantity(use.Used), use.Soft)
			if use.Hard > 0 {
				text += fmt.Sprintf(";hard=%d", use.Hard)
			}
			warnings = append(warnings, fmt.Sprintf("%s;ends=@%d", text, use.Ends.Unix()))
		}
		if len(warnings) > 0 {
			w.Header().Set(headerQuota, strings.Join(warnings, ", "))
		}
		next.ServeHTTP(w, r)
	})
}
