package gateway

import (
	"github.com/bullpen-run/bullpen/gateway/agents"
	"github.com/bullpen-run/bullpen/gateway/executions"
	"github.com/bullpen-run/bullpen/gateway/tools"
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
