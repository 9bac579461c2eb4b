package proto

import "fmt"

// Reason is why the queue does not accept a job. The gateway words it for clients.
type Reason string

// The reasons.
const (
	RejectedConcurrency    Reason = "concurrency"     // the organisation runs as many executions as its plan allows
	RejectedKeyConcurrency Reason = "key_concurrency" // the API key runs as many executions as its own limit allows
	RejectedQueueFull      Reason = "queue_full"      // the organisation has as many queued as its plan allows
	RejectedPipelines      Reason = "pipelines"       // the organisation runs as many pipelines as it may
	RejectedUnavailable    Reason = "unavailable"     // the queue cannot accept jobs now: no dispatcher, no memory, draining
	RejectedDiskFull       Reason = "disk_full"       // the disk of the data directory is full up to its reserve
)

// Rejection is the error of a job that was not accepted. Nothing of the job remains.
type Rejection struct {
	Reason Reason `json:"reason"`
	Limit  int    `json:"limit,omitempty"` // the limit that was reached
	Used   int    `json:"used,omitempty"`  // the number that reached it
	Detail string `json:"detail,omitempty"`
}

func (r *Rejection) Error() string {
	return fmt.Sprintf("job refused: %s (%d of %d) %s", r.Reason, r.Used, r.Limit, r.Detail)
}
