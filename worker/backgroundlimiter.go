package worker

import (
	"context"
	"runtime"
	"sync"
	"time"
)

const (
	// interactiveWindow is how long after the start of an interactive job background jobs are limited.
	interactiveWindow = 10 * time.Second
	// backgroundStartTime is how long a background job counts as starting. A short job has ended by then, jail
	// and interpreter included. A longer one does not keep others waiting.
	backgroundStartTime = 50 * time.Millisecond
)

// backgroundLimiter limits how many background jobs start at a time while the worker runs interactive jobs.
// The CPU weight of their jails is not enough: most of a short job's work is done by this process,
// zygotes and the kernel, at the weight of interactive jobs.
type backgroundLimiter struct {
	starting chan struct{} // holds a value for each background job that is starting

	mu          sync.Mutex
	interactive time.Time // when the last interactive job started
}

func newBackgroundLimiter() *backgroundLimiter {
	return &backgroundLimiter{starting: make(chan struct{}, max(1, runtime.GOMAXPROCS(0)/2))}
}

// onInteractive records that an interactive job starts.
func (b *backgroundLimiter) onInteractive() {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.interactive = time.Now()
}

// limited reports whether an interactive job has started within interactiveWindow.
func (b *backgroundLimiter) limited() bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	return time.Since(b.interactive) < interactiveWindow
}

// acquire blocks until a background job may start, or ctx is done. The caller calls release when the job
// has ended.
func (b *backgroundLimiter) acquire(ctx context.Context) (release func()) {
	if !b.limited() {
		return func() {}
	}
	select {
	case b.starting <- struct{}{}:
	case <-ctx.Done():
		return func() {}
	}
	once := sync.OnceFunc(func() { <-b.starting })
	timer := time.AfterFunc(backgroundStartTime, once)
	return func() {
		timer.Stop()
		once()
	}
}
