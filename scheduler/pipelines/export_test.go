package pipelines

import (
	"context"
	"time"

	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/scheduler/engine"
)

// Init prepares a runner that handles runs without being elected, as one does that does not know yet
// that another one leads.
func (r *Runner) Init() { r.init() }

// Handle takes a run as far as it gets now.
func (r *Runner) Handle(ctx context.Context, s *proto.PipelineState) error { return r.handle(ctx, s) }

// Deadline returns when the runner ends a run that it handles.
func (r *Runner) Deadline(org, id string) time.Time {
	return r.Pipelines.queue.Get(engine.Item{Org: org, ID: id}).known.deadline
}

// Known returns the number of runs whose definitions a process has in memory.
func (p *Pipelines) Known() (n int) {
	for _, s := range p.states.All() {
		if p.queue.Get(engine.Item{Org: s.Org, ID: s.ID}).known != nil {
			n++
		}
	}
	return n
}
