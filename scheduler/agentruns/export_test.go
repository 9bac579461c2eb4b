package agentruns

import "github.com/bullpen-run/bullpen/scheduler/engine"

// IsCancelled reports whether this process knows that the end of an active run was requested.
func (r *Runs) IsCancelled(org, id string) bool {
	return r.queue.Get(engine.Item{Org: org, ID: id}).Cancelled
}
