package app

import (
	"errors"
	"log/slog"
	"sync"
)

// health stores whether the worker of this process accepts jobs. It is safe for concurrent use.
type health struct {
	metrics *Metrics
	log     *slog.Logger

	mu      sync.Mutex
	err     error             // nil while the worker is healthy
	missing map[string]string // why the worker does not have a capability, by capability
}

func newHealth(metrics *Metrics, log *slog.Logger) *health {
	return &health{metrics: metrics, log: log, err: errors.New("it is starting")}
}

// set stores the reason why the worker accepts no jobs, or nil if it accepts jobs.
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

// setMissing stores why the worker does not have capabilities.
func (h *health) setMissing(missing map[string]string) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.missing = missing
}

// missingCapabilities returns what setMissing stored. It is nil if there is no worker.
func (h *health) missingCapabilities() map[string]string {
	if h == nil {
		return nil
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.missing // never changed
}

// reason returns why the worker accepts no jobs, or "" if it does or there is no worker.
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
