package proto

// Missing is what an execution needs and no live worker offers. The execution waits for a worker
// that does.
type Missing struct {
	_ struct{} `doc:"What the execution waits for: no worker that is live offers what it needs. An extension of the public contract."`

	Capabilities []string `json:"missing" doc:"What no worker offers, as GET /v1/admin/workers names it: language:NAME, images, architecture:NAME, network, disk, threads, secrets, injections, mounts, volumes. If workers offer each of them but no worker all, all of them."`
	Message      string   `json:"message" doc:"What is missing, and who can change that."`
	Expected     bool     `json:"expected" doc:"Such a worker was live in the last minute, or the autoscaler may start one. If not, inline and streaming executions are refused."`
}
