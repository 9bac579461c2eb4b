package api

import "github.com/bullpen-run/bullpen/proto"

// Pool is a pool of workers.
type Pool struct {
	_ struct{} `doc:"A group of workers that can run the same executions, with the demand for them."`

	Name         string          `json:"name"`
	Capabilities []string        `json:"capabilities" doc:"Of the worker that joined last. Empty in a pool that never had a worker."`
	Architecture *string         `json:"architecture" enum:"amd64,arm64" doc:"Those of the worker that joined last; null if the pool never had a worker, or if that worker has an older version."`
	WorkerSlots  int             `json:"worker_slots" minimum:"0" doc:"Slots of the worker that joined last. 0 in a pool that never had a worker."`
	Workers      int             `json:"workers" minimum:"0" doc:"Live workers that do not drain."`
	Slots        int             `json:"slots" minimum:"0" doc:"Of those."`
	Queued       int             `json:"queued" minimum:"0" doc:"Executions that would start now if slots were free. Those held back by a limit of their organisation or key do not count."`
	Running      int             `json:"running" minimum:"0" doc:"Executions in the slots of workers that do not drain."`
	MeanSeconds  float64         `json:"mean_seconds" minimum:"0" doc:"How long executions have held a slot in the last minutes. 0 if none has ended."`
	OldestWait   float64         `json:"oldest_wait_seconds" minimum:"0" doc:"How long the oldest of those queued has waited."`
	Desired      *DesiredWorkers `json:"desired" doc:"What the autoscaler recommends; null in the first seconds of a new dispatcher."`
}

// DesiredWorkers is how many workers a pool should have.
type DesiredWorkers struct {
	_ struct{} `doc:"How many workers a pool should have."`

	Workers int    `json:"workers" minimum:"0"`
	Slots   int    `json:"slots" minimum:"0" doc:"Slots of so many workers."`
	Reason  string `json:"reason" doc:"Why, see the autoscaling policy."`
}

// Autoscale is the demand for workers and what the autoscaler recommends.
type Autoscale struct {
	Pools []Pool `json:"pools"`
}

// NewAutoscale returns the form of the pools.
func NewAutoscale(pools []proto.Pool) Autoscale {
	list := make([]Pool, len(pools))
	for i, p := range pools {
		list[i] = Pool{
			Name: p.Name, Capabilities: p.Capabilities, Architecture: optional(p.Architecture), WorkerSlots: p.WorkerSlots,
			Workers: p.Workers, Slots: p.Slots,
			Queued: p.Queued, Running: p.Running, MeanSeconds: p.MeanSeconds, OldestWait: p.OldestWait,
		}
		if p.Capabilities == nil {
			list[i].Capabilities = []string{}
		}
		if p.Desired != nil {
			list[i].Desired = &DesiredWorkers{Workers: p.Desired.Workers, Slots: p.Desired.Slots, Reason: p.Desired.Reason}
		}
	}
	return Autoscale{list}
}
