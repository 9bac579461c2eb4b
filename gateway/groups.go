package gateway

import "github.com/bullpen-run/bullpen/gateway/executions"

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
