package gateway

import (
	"context"

	"github.com/bullpen-run/bullpen/gateway/admin"
	"github.com/bullpen-run/bullpen/gateway/agents"
	"github.com/bullpen-run/bullpen/gateway/changes"
	"github.com/bullpen-run/bullpen/gateway/executions"
	"github.com/bullpen-run/bullpen/gateway/files"
	"github.com/bullpen-run/bullpen/gateway/tools"
	"github.com/bullpen-run/bullpen/gateway/web"
	"github.com/bullpen-run/bullpen/gateway/webhooks"
	"github.com/bullpen-run/bullpen/gateway/work"
)

// handlers returns the handlers of the routes of the API. Each group has what it needs of the server.
func (s *Server) handlers() []web.Handler {
	core, runs := &s.Core, s.executions()
	stored := &files.FileRoutes{
		Opener: s.opener, Quotas: s.Admission, Principals: s.Admission, URLSecret: s.URLSecret,
	}
	volumes := &admin.VolumeRoutes{
		Core: core, Connections: s.Connections, Orgs: s.Orgs, Volumes: s.Threads, Versions: s.Versions,
		Quotas: s.Admission, MaxVolume: s.MaxVolume,
	}
	var all []web.Handler
	for _, group := range append([]web.Group{
		runs,
		s.batches(),
		&work.ScheduleRoutes{Core: core, Schedules: s.Schedules, Checker: s.Admission, Waiting: runs.WaitingOf},
		&work.PipelineRoutes{
			Core: core, Pipelines: s.Pipelines, Checker: s.Admission, Caches: s.Threads, Versions: s.Versions,
			Waiting: runs.WaitingOf,
		},
		stored,
		&files.ThreadRoutes{
			Opener: s.opener, Threads: s.Threads, Versions: s.Versions, Admin: s.ThreadAdmin, Quotas: s.Admission,
		},
		&tools.Routes{
			Runner: runs.Runner, Files: stored, Version: s.Version, URLSecret: s.URLSecret,
			Interpreters: s.Interpreters,
		},
		s.webhooks(),
		s.logins,
		&admin.KeyRoutes{
			Core: core, Keys: s.KeyAdmin, Orgs: s.Orgs, Plans: s.Plans, Profiles: s.Admission, Connections: s.Connections,
		},
		&admin.OrgRoutes{Core: core, Orgs: s.Orgs, Plans: s.Plans, Keys: s.KeyAdmin, Data: s.OrgData},
		&admin.MemberRoutes{Core: core, Members: s.Members, Orgs: s.Orgs, Keys: s.KeyAdmin, Webhooks: s.Webhooks},
		&admin.PlanRoutes{Core: core, Plans: s.Plans},
		&admin.ProfileRoutes{
			Core: core, Profiles: s.Profiles, Resolver: s.Admission, Images: s.ImageAdmin, Keys: s.KeyAdmin,
			Preload: s.Preload,
		},
		&admin.ImageRoutes{Core: core, Images: s.ImageAdmin, Profiles: s.Profiles, Resolver: s.Admission},
		&admin.WorkerRoutes{Core: core, Workers: s.Workers, Processes: s.Processes},
		&admin.QueueRoutes{Core: core, Queues: s.Queue, Plans: s.Admission},
		&admin.ConnectionRoutes{
			Core: core, Connections: s.Connections, Orgs: s.Orgs, Buckets: s.Storage, Credentials: s.Admission,
			Volumes: volumes, MaxVolume: s.MaxVolume,
		},
		volumes,
		&admin.UsageRoutes{Core: core, Usage: s.Usage, Quotas: s.Admission},
		&changes.Routes{Core: core, Feed: s.Changes},
		&admin.BackupRoutes{Core: core, Backups: s.Backups},
	}, s.Groups...) {
		all = append(all, group.Handlers()...)
	}
	return all
}

// runner runs programs for requests that wait for the result.
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

// batches returns the routes of batches.
func (s *Server) batches() *work.BatchRoutes {
	return &work.BatchRoutes{
		Core: &s.Core, Batches: s.Batches, Checker: s.Admission, URLs: s.URLs, Deliveries: s.Deliveries, Results: s.Jobs,
		Waiting: s.runner().WaitingOf,
	}
}

// webhooks returns the routes of webhooks.
func (s *Server) webhooks() *webhooks.Routes {
	return &webhooks.Routes{
		Core: &s.Core, Webhooks: s.Webhooks, Deliveries: s.Deliveries, URLs: s.URLs, Executions: s.Jobs, Keys: s.KeyAdmin,
		Members: s.Members, Body: s.WebhookBody,
		MayGetObjects: func(ctx context.Context, org string) error {
			return admin.CheckMayGetObjects(ctx, s.Orgs, org)
		},
	}
}

// Agents returns the factory of the surfaces' agents. It is called after Handler.
func (s *Server) Agents() *agents.Maker {
	return &agents.Maker{
		Runner: s.runner(), Opener: s.opener, Keys: s.Admission, Threads: s.Threads, Versions: s.Versions, Homes: s.Files,
		Files: s.AgentFiles, Batches: s.AgentBatches, Uploads: s.batches(), Spool: s.Spool,
		Interpreters: s.Interpreters,
	}
}
