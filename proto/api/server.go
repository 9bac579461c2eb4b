package api

// Health answers GET /healthz.
type Health struct {
	Status string `json:"status" enum:"ok"`
}

// Ready answers GET /readyz if executions would run.
type Ready struct {
	Status  string `json:"status" enum:"ready"`
	Workers int    `json:"workers" minimum:"1"`
}

// NotReady answers GET /readyz if executions would not run.
type NotReady struct {
	Code    Code   `json:"error" enum:"service_unavailable"`
	Message string `json:"message"`
	Missing string `json:"missing" enum:"server,queue,store,disk,worker"`
}
