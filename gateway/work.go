package gateway

import (
	"slices"

	"github.com/bullpen-run/bullpen/gateway/web"
	"github.com/bullpen-run/bullpen/gateway/work"
)

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
