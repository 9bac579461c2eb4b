package gateway

// runner returns what runs programs for requests that wait for their end.
func (s *Server) runner() *Runner {
	return &Runner{
		Core: &s.Core, Admission: s.Admission, Submissions: s.Submissions, Jobs: s.Jobs, Events: s.Events,
		Capabilities: s.Capabilities, QueueWait: s.QueueWait,
	}
}

// executions returns the routes of executions.
func (s *Server) executions() *executionRoutes {
	return &executionRoutes{
		Runner: s.runner(), History: s.History, Queue: s.Queue, Principals: s.Admission,
		DeliveryStatus: s.webhooks().DeliveryStatus, URLSecret: s.URLSecret,
	}
}
