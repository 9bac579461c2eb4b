package proto

// DefaultPool is the pool of workers that name none.
const DefaultPool = "default"

// Pool is a group of workers that can run the same executions, with the demand for them. It exists
// from its first worker on, also while it has none.
type Pool struct {
	Name string `json:"name"`
	// of the worker that joined last; empty in a pool that never had a worker
	Capabilities []string `json:"capabilities"`
	Architecture string   `json:"architecture,omitempty"` // of the worker that joined last, as in [Worker]
	// of the worker that joined last; 0 in a pool that never had a worker
	WorkerSlots int `json:"worker_slots"`
	Workers     int `json:"workers"` // live ones that do not drain
	Slots       int `json:"slots"`   // of those
	// Queued are the executions that the pool is to run and that could run at once if there were
	// slots: the limits of their organisations and keys allow it.
	Queued  int `json:"queued"`
	Running int `json:"running"` // executions in the slots of workers that do not drain
	// MeanSeconds is how long executions have held a slot lately, 0 if none has ended.
	MeanSeconds float64 `json:"mean_seconds"`
	OldestWait  float64 `json:"oldest_wait_seconds"` // of those queued; 0 if there are none
	// Desired is the recommendation of the autoscaler, nil if the dispatcher has none.
	Desired *DesiredWorkers `json:"desired,omitempty"`
}

// DesiredWorkers is how many workers a pool should have.
type DesiredWorkers struct {
	Workers int    `json:"workers"`
	Slots   int    `json:"slots"` // of so many workers
	Reason  string `json:"reason"`
}
