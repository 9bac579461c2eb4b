package admin

import (
	"context"
	"errors"
	"fmt"
	"net/http"

	"github.com/bullpen-run/bullpen/gateway/web"
	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/proto/api"
)

// OrgQueues shows the queues of organisations.
type OrgQueues interface {
	// Orgs returns the queues of all organisations that have something queued or running, by name.
	Orgs(ctx context.Context) ([]proto.OrgQueue, error)
}

// OrgPlans finds the plans of organisations.
type OrgPlans interface {
	// OrgPlan returns the plan of an organisation. It returns [proto.ErrNotFound] for an unknown
	// organisation.
	OrgPlan(ctx context.Context, org string) (proto.Plan, error)
}

// QueueRoutes are the routes of the queues of organisations.
type QueueRoutes struct {
	*web.Core
	Queues OrgQueues
	Plans  OrgPlans
}

// Handlers returns the handlers of the routes.
func (s *QueueRoutes) Handlers() []web.Handler {
	return []web.Handler{{ID: "getOrgQueues", Handle: s.list}}
}

func (s *QueueRoutes) list(w http.ResponseWriter, r *web.Request) error {
	list, err := s.Queues.Orgs(r.Context())
	if err != nil {
		return fmt.Errorf("show the queues of organisations: %w", err)
	}
	answer := api.OrgQueues{Orgs: make([]api.OrgQueue, len(list))}
	for i := range list {
		plan, err := s.Plans.OrgPlan(r.Context(), list[i].Org)
		_, noPlan := errors.AsType[*proto.Rejection](err)
		if err != nil && !noPlan && !errors.Is(err, proto.ErrNotFound) {
			return err
		}
		answer.Orgs[i] = api.NewOrgQueue(&list[i], &plan)
	}
	return web.WriteValue(w, http.StatusOK, answer)
}
