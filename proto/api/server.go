package api

// Health answers GET /healthz.
type Health struct {
	Status string `json:"status" enum:"ok"`
}

// Ready answers GET /readyz if executions would run.
type Ready struct {
	Status  string `json:"status" enum:"ready"`
	Workers int    `json:"workers" minimum:"1"`
	// Problems do not keep executions without threads, images and webhooks from running. Anybody may
	// read them, so they have no addresses.
	Problems []string `json:"problems,omitempty" doc:"Currently unmet needs of this server, such as store or redis. Some executions may fail, or their webhooks may be late. See the log and bullpen doctor --cluster for the reason."`
}

// NotReady answers GET /readyz if executions would not run.
type NotReady struct {
	Code    Code   `json:"error" enum:"service_unavailable"`
	Message string `json:"message"`
	Missing string `json:"missing" enum:"server,queue,store,disk,worker"`
}
