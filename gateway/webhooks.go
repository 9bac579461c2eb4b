package gateway

import (
	"context"

	"github.com/bullpen-run/bullpen/gateway/admin"
	"github.com/bullpen-run/bullpen/gateway/webhooks"
)

// webhooks returns the routes of webhooks.
func (s *Server) webhooks() *webhooks.Routes {
	return &webhooks.Routes{
		Core: &s.Core, Webhooks: s.Webhooks, Deliveries: s.Deliveries, URLs: s.URLs, Executions: s.Jobs, Keys: s.KeyAdmin,
		Members: s.Members,
		MayGetObjects: func(ctx context.Context, org string) error {
			return admin.CheckMayGetObjects(ctx, s.Orgs, org)
		},
	}
}
