package worker

import (
	"context"
	"sync"
	"time"
)

// retest is the pause between two tests of a worker that is not fit.
const retest = 5 * time.Second

// fitness keeps a worker that can make no sandboxes from taking jobs, which would all fail.
type fitness struct {
	test func(ctx context.Context) error // makes a sandbox
	tell func(err error)                 // hears of each test's end

	testing sync.Mutex
	mu      sync.Mutex
	trusted context.Context // ends in doubt
	doubted context.CancelFunc
}

// trust begins a time of taking jobs.
func (f *fitness) trust(ctx context.Context) context.Context {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.trusted, f.doubted = context.WithCancel(ctx)
	return f.trusted
}

// doubt ends it, until a test speaks for the worker.
func (f *fitness) doubt() {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.doubted()
}

// await waits until the worker is fit, and gives the context to take a job under: it ends with ctx, and in doubt.
func (f *fitness) await(ctx context.Context) context.Context {
	f.testing.Lock()
	defer f.testing.Unlock()
	for {
		f.mu.Lock()
		trusted := f.trusted
		f.mu.Unlock()
		if trusted.Err() == nil || ctx.Err() != nil {
			return trusted
		}
		err := f.test(ctx)
		if ctx.Err() != nil {
			return trusted
		}
		f.tell(err)
		if err == nil {
			return f.trust(ctx)
		}
		select {
		case <-ctx.Done():
		case <-time.After(retest):
		}
	}
}
