package app

import (
	"errors"
	"log/slog"
	"sync"
)

// fitness is whether the worker of this process takes jobs, for all who ask.
type fitness struct {
	metrics *Metrics
	log     *slog.Logger

	mu  sync.Mutex
	err error
}

func newFitness(metrics *Metrics, log *slog.Logger) *fitness {
	return &fitness{metrics: metrics, log: log, err: errors.New("it is starting")}
}

// set says why the worker takes no jobs, or with nil that it does.
func (f *fitness) set(err error) {
	f.mu.Lock()
	before := f.err
	f.err = err
	f.mu.Unlock()
	f.metrics.WorkerFit(err == nil)
	switch {
	case err != nil && (before == nil || err.Error() != before.Error()):
		f.log.Error("the worker takes no jobs", "error", err)
	case err == nil && before != nil:
		f.log.Info("the worker takes jobs")
	}
}

// whyNot tells why the worker takes no jobs; empty where it does, or there is none.
func (f *fitness) whyNot() string {
	if f == nil {
		return ""
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.err == nil {
		return ""
	}
	return f.err.Error()
}
