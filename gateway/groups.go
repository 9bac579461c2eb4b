package gateway

import (
	"context"
	"slices"

	"github.com/bullpen-run/bullpen/gateway/admin"
	"github.com/bullpen-run/bullpen/gateway/agents"
	"github.com/bullpen-run/bullpen/gateway/executions"
	"github.com/bullpen-run/bullpen/gateway/files"
	"github.com/bullpen-run/bullpen/gateway/tools"
	"github.com/bullpen-run/bullpen/gateway/web"
	"github.com/bullpen-run/bullpen/gateway/webhooks"
	"github.com/bullpen-run/bullpen/gateway/work"
)

// runner returns what runs programs for requests that wait for their end.
func (s *Server) runner() *executions.Runner {
	return &executions.Runner{
		Core: &s.Core, Admission: s.Admission, Submissions: s.Submissions, Jobs: s.Jobs, Events: s.Events,
		Capabilities: s.Capabilities, QueueWait: s.QueueWait,
	}
}

// executions returns the routes of executions.
func (s *Server) executions() *executions.Routes {
	return &executions.Routes{
		Runner: s.runner(), History: s.History, Queue: s.Queue, Principals: s.Admission,
		DeliveryStatus: s.webhooks().DeliveryStatus, URLSecret: s.URLSecret,
	}
}

// tools returns the route of the Model Context Protocol.
func (s *Server) tools() *tools.Routes {
	return &tools.Routes{Runner: s.runner(), Files: s.files, Version: s.Version, URLSecret: s.URLSecret}
}

// Agents returns what makes the agents of surfaces. It is called after Handler.
func (s *Server) Agents() *agents.Maker {
	return &agents.Maker{
		Runner: s.runner(), Opener: s.opener, Keys: s.Admission, Threads: s.Threads, Versions: s.Versions, Homes: s.Files,
		Files: s.AgentFiles, Batches: s.AgentBatches, Uploads: s.batches(), Spool: s.Spool,
	}
}

// filesRoutes returns the routes of files and threads.
func (s *Server) filesRoutes() []web.Handler {
	threads := &files.ThreadRoutes{
		Opener: s.opener, Threads: s.Threads, Versions: s.Versions, Admin: s.ThreadAdmin, Quotas: s.Admission,
	}
	return slices.Concat(s.files.Handlers(), threads.Handlers())
}

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

// workRoutes returns the routes of batches, schedules and pipelines.
func (s *Server) workRoutes() []web.Handler {
	schedules := &work.ScheduleRoutes{
		Core: &s.Core, Schedules: s.Schedules, Checker: s.Admission, Waiting: s.executions().WaitingOf,
	}
	pipelines := &work.PipelineRoutes{
		Core: &s.Core, Pipelines: s.Pipelines, Checker: s.Admission, Caches: s.Threads, Versions: s.Versions,
		Waiting: s.executions().WaitingOf,
	}
	return slices.Concat(s.batches().Handlers(), schedules.Handlers(), pipelines.Handlers())
}

// batches returns the routes of batches.
func (s *Server) batches() *work.BatchRoutes {
	return &work.BatchRoutes{
		Core: &s.Core, Batches: s.Batches, Checker: s.Admission, URLs: s.URLs, Deliveries: s.Deliveries, Results: s.Jobs,
		Waiting: s.executions().WaitingOf,
	}
}

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
