package proto

// DefaultPool is the pool of workers that name none.
const DefaultPool = "default"

// Pool is a group of workers that can run the same executions, with the demand for them. It exists
// from its first worker on, even after all have left.
type Pool struct {
	Name string `json:"name"`
	// of the worker that joined last; empty in a pool that never had a worker
	Capabilities []string `json:"capabilities"`
	Architecture string   `json:"architecture,omitempty"` // of the worker that joined last, as in [Worker]
	// of the worker that joined last; 0 in a pool that never had a worker
	WorkerSlots int `json:"worker_slots"`
	Workers     int `json:"workers"` // live ones that do not drain
	Slots       int `json:"slots"`   // of those
	// Queued counts the pool's executions that would start if slots were free. Executions held back
	// by the limits of their organisations or keys are not counted.
	Queued  int `json:"queued"`
	Running int `json:"running"` // executions in the slots of workers that do not drain
	// MeanSeconds is how long recent executions held a slot, 0 if none has ended.
	MeanSeconds float64 `json:"mean_seconds"`
	OldestWait  float64 `json:"oldest_wait_seconds"` // of those queued; 0 if there are none
	// Desired is the autoscaler's recommendation, nil if the dispatcher has none.
	Desired *DesiredWorkers `json:"desired,omitempty"`
}

// DesiredWorkers is how many workers a pool should have.
type DesiredWorkers struct {
	Workers int    `json:"workers"`
	Slots   int    `json:"slots"` // of so many workers
	Reason  string `json:"reason"`
}
