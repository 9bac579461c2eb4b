package proto

// Missing is what an execution needs and no live worker offers. The execution waits for a worker
// that does.
type Missing struct {
	_ struct{} `doc:"What the execution waits for because no live worker offers it. An extension of the public contract."`

	Capabilities []string `json:"missing" doc:"What no worker offers, as GET /v1/admin/workers names it: language:NAME, images, architecture:NAME, network, disk, threads, secrets, injections, mounts, volumes, agent:NAME, agent:NAME@VERSION. If each need is offered by some worker but no worker offers all, the list has all needs."`
	Message      string   `json:"message" doc:"What is missing, and who can provide it."`
	Expected     bool     `json:"expected" doc:"Such a worker was live in the last minute, or the autoscaler may start one. Otherwise inline and streaming executions are refused."`
}
