package app

import (
	"errors"
	"log/slog"
	"sync"
)

// health is whether the worker of this process accepts jobs. It may be used concurrently.
type health struct {
	metrics *Metrics
	log     *slog.Logger

	mu  sync.Mutex
	err error // nil while the worker is healthy
}

func newHealth(metrics *Metrics, log *slog.Logger) *health {
	return &health{metrics: metrics, log: log, err: errors.New("it is starting")}
}

// set stores why the worker accepts no jobs, or nil if it does.
func (h *health) set(err error) {
	h.mu.Lock()
	before := h.err
	h.err = err
	h.mu.Unlock()
	h.metrics.WorkerHealthy(err == nil)
	switch {
	case err != nil && (before == nil || err.Error() != before.Error()):
		h.log.Error("worker unhealthy", "error", err)
	case err == nil && before != nil:
		h.log.Info("worker healthy")
	}
}

// reason returns why the worker accepts no jobs. It is "" if the worker does, or if there is none.
func (h *health) reason() string {
	if h == nil {
		return ""
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.err == nil {
		return ""
	}
	return h.err.Error()
}
