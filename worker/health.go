package worker

import (
	"context"
	"sync"
	"time"

	"github.com/bullpen-run/bullpen/proto"
)

// retestInterval is the pause between two tests of an unhealthy worker.
const retestInterval = 5 * time.Second

// health keeps a worker that cannot create sandboxes from accepting jobs, which would all fail.
type health struct {
	test   func(ctx context.Context) error // creates a sandbox
	notify func(err error)                 // is called with the result of each test

	testing       sync.Mutex
	mu            sync.Mutex
	healthy       context.Context // is done when the worker is marked unhealthy
	cancelHealthy context.CancelFunc
}

// markHealthy lets the worker accept jobs. It returns a context that is done when the worker is
// marked unhealthy or ctx is done.
func (h *health) markHealthy(ctx context.Context) context.Context {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.healthy, h.cancelHealthy = context.WithCancel(ctx)
	return h.healthy
}

// markUnhealthy stops the worker from accepting jobs until a test succeeds.
func (h *health) markUnhealthy() {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.cancelHealthy()
}

// awaitHealthy blocks until the worker is healthy. It returns the context to accept a job under,
// which is done when ctx is done or the worker is marked unhealthy.
func (h *health) awaitHealthy(ctx context.Context) context.Context {
	h.testing.Lock()
	defer h.testing.Unlock()
	for {
		h.mu.Lock()
		healthy := h.healthy
		h.mu.Unlock()
		if healthy.Err() == nil || ctx.Err() != nil {
			return healthy
		}
		err := h.test(ctx)
		if ctx.Err() != nil {
			return healthy
		}
		h.notify(err)
		if err == nil {
			return h.markHealthy(ctx)
		}
		select {
		case <-ctx.Done():
		case <-time.After(retestInterval):
		}
	}
}

// selfTest creates a default sandbox.
func (w *Worker) selfTest(ctx context.Context) error {
	j, err := w.Jails.Prepare(ctx, Spec(proto.DefaultSandbox(), ""))
	if err != nil {
		return err
	}
	return j.Close()
}
