package gateway

import (
	"slices"

	"github.com/bullpen-run/bullpen/gateway/admin"
	"github.com/bullpen-run/bullpen/gateway/web"
)

// adminRoutes returns the routes of the administration.
func (s *Server) adminRoutes() []web.Handler {
	core := &s.Core
	volumes := &admin.VolumeRoutes{
		Core: core, Connections: s.Connections, Orgs: s.Orgs, Volumes: s.Threads, Versions: s.Versions,
		Quotas: s.Admission, MaxVolume: s.MaxVolume,
	}
	var all []web.Handler
	for _, group := range []interface{ Handlers() []web.Handler }{
		&admin.KeyRoutes{
			Core: core, Keys: s.KeyAdmin, Orgs: s.Orgs, Plans: s.Plans, Profiles: s.Admission, Connections: s.Connections,
		},
		&admin.OrgRoutes{Core: core, Orgs: s.Orgs, Plans: s.Plans, Keys: s.KeyAdmin, Data: s.OrgData},
		&admin.MemberRoutes{Core: core, Members: s.Members, Orgs: s.Orgs, Keys: s.KeyAdmin, Webhooks: s.Webhooks},
		&admin.PlanRoutes{Core: core, Plans: s.Plans},
		&admin.ProfileRoutes{
			Core: core, Profiles: s.Profiles, Sandboxes: s.Admission, Images: s.ImageAdmin, Keys: s.KeyAdmin,
			Preload: s.Preload,
		},
		&admin.ImageRoutes{Core: core, Images: s.ImageAdmin, Profiles: s.Profiles, Sandboxes: s.Admission},
		&admin.WorkerRoutes{Core: core, Workers: s.Workers, Processes: s.Processes},
		&admin.DeadLetterRoutes{Core: core, DeadLetters: s.DeadLetters, Requeuer: s.Admission},
		&admin.ConnectionRoutes{
			Core: core, Connections: s.Connections, Orgs: s.Orgs, Buckets: s.Storage, Credentials: s.Admission,
			Volumes: volumes, MaxVolume: s.MaxVolume,
		},
		volumes,
		&admin.SecretRoutes{Core: core, Secrets: s.Secrets, Orgs: s.Orgs, Key: s.SecretsKey},
		&admin.UsageRoutes{Core: core, Usage: s.Usage, Quotas: s.Admission},
		&admin.BackupRoutes{Core: core, Backups: s.Backups},
		&admin.AuditRoutes{Core: core, Audit: s.Audit},
	} {
		all = slices.Concat(all, group.Handlers())
	}
	return all
}
