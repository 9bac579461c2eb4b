package pipelines

import (
	"context"
	"time"

	"github.com/bullpen-run/bullpen/proto"
)

// Init prepares a runner that handles runs without being elected, as one does that does not know yet
// that another one leads.
func (r *Runner) Init() { r.handled, r.known = map[string]bool{}, map[string]knownRun{} }

// Handle takes a run as far as it gets now.
func (r *Runner) Handle(ctx context.Context, s *proto.PipelineState) error { return r.handle(ctx, s) }

// Deadline returns when the runner ends a run that it handles.
func (r *Runner) Deadline(id string) time.Time {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.known[id].deadline
}
