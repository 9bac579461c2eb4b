package worker

import (
	"context"
	"runtime"
	"sync"
	"time"
)

const (
	// interactiveWindow is how long after an interactive job batch jobs start in turn.
	interactiveWindow = 10 * time.Second
	// batchStartTime is how long a batch job keeps others from starting at most. Most of what a short
	// job costs is the creation of its jail and the interpreter's start, which lasts less.
	batchStartTime = 50 * time.Millisecond
)

// batchStarts limits how many batch jobs start at a time while the worker runs interactive jobs. The
// CPU weight of a jail does not do that: this process, the kernel and zygotes do much of the work
// for a short job, at the weight of interactive ones.
type batchStarts struct {
	turns chan struct{} // holds a value for each batch job that is starting

	mu          sync.Mutex
	interactive time.Time // of the last interactive job
}

func newBatchStarts() *batchStarts {
	return &batchStarts{turns: make(chan struct{}, max(1, runtime.GOMAXPROCS(0)/2))}
}

// onInteractive is called with each interactive job's start.
func (b *batchStarts) onInteractive() {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.interactive = time.Now()
}

// limited reports whether batch jobs start in turn.
func (b *batchStarts) limited() bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	return time.Since(b.interactive) < interactiveWindow
}

// await blocks until a batch job may start, or ctx is done. The caller calls done at the job's end.
func (b *batchStarts) await(ctx context.Context) (done func()) {
	if !b.limited() {
		return func() {}
	}
	select {
	case b.turns <- struct{}{}:
	case <-ctx.Done():
		return func() {}
	}
	end := sync.OnceFunc(func() { <-b.turns })
	timer := time.AfterFunc(batchStartTime, end)
	return func() {
		timer.Stop()
		end()
	}
}
