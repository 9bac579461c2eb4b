package api

import "github.com/bullpen-run/bullpen/proto"

// Health answers GET /healthz.
type Health struct {
	Status string `json:"status" enum:"ok"`
}

// Ready answers GET /readyz if executions would run.
type Ready struct {
	Status  string `json:"status" enum:"ready"`
	Workers int    `json:"workers" minimum:"1"`
	// Problems do not keep executions without threads, images and webhooks from running.
	Problems []proto.Problem `json:"problems,omitempty" doc:"What this server needs and does not have at present. Some executions may fail, or their webhooks come late."`
}

// NotReady answers GET /readyz if executions would not run.
type NotReady struct {
	Code    Code   `json:"error" enum:"service_unavailable"`
	Message string `json:"message"`
	Missing string `json:"missing" enum:"server,queue,store,disk,worker"`
}
