package proto

import "fmt"

// Reason is why the queue does not accept a job. The gateway words it for clients.
type Reason string

// The reasons.
const (
	RefusedConcurrency    Reason = "concurrency"     // the organisation runs as many executions as its plan allows
	RefusedKeyConcurrency Reason = "key_concurrency" // the API key runs as many executions as its own limit allows
	RefusedQueueFull      Reason = "queue_full"      // the organisation has as many queued as its plan allows
	RefusedUnavailable    Reason = "unavailable"     // the queue cannot accept jobs now: no dispatcher, no disk, draining
)

// Refusal is the error of a job that was not accepted. Nothing of the job remains.
type Refusal struct {
	Reason Reason `json:"reason"`
	Limit  int    `json:"limit,omitempty"` // the limit that was reached
	Used   int    `json:"used,omitempty"`  // the number that reached it
	Detail string `json:"detail,omitempty"`
}

func (r *Refusal) Error() string {
	return fmt.Sprintf("job refused: %s (%d of %d) %s", r.Reason, r.Used, r.Limit, r.Detail)
}
