// Package worker runs jobs in stages: take the job, claim it while a sandbox is prepared, run the
// program, collect its output and files, save its home, finish with a result. Package jail defines
// jails; interfaces connect the worker with queues, images and homes.
package worker

import (
	"context"
	"errors"
	"log/slog"
	"sync"
	"time"

	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/worker/inject"
	"github.com/bullpen-run/bullpen/worker/live"
	"github.com/bullpen-run/bullpen/worker/mount"
	"github.com/bullpen-run/bullpen/worker/pool"
)

// ErrShutdown is the cause with which the context of running programs is cancelled after the drain
// time.
var ErrShutdown = errors.New("the worker was shut down")

// Worker runs jobs in a number of slots.
type Worker struct {
	Jobs   Jobs
	Open   func(ctx context.Context, job *proto.Job, attempt int, baseSeq int64) Output
	Jails  Jails
	Images Images
	Homes  Homes
	Home   string // inside the jail
	Slots  int
	Warm   Warm
	// SaveTimeout limits how long saving a thread's home may take.
	SaveTimeout time.Duration
	Log         *slog.Logger
	Done        func(rec *proto.Record) // is called for every execution that ended here
	// OnHealth is called when the worker's ability to create sandboxes changes: with the cause when
	// it is lost, with nil when it is restored. The worker accepts no jobs in between.
	OnHealth func(err error)
	// Roots prove the names of the servers that get secrets.
	Roots inject.Roots
	// Mounts mounts storage connections; nil if this worker cannot.
	Mounts *mount.Opener
	// Agents has the programs of coding agents for live sandboxes.
	Agents Agents
	// Live are the live sandboxes, whose jobs LiveJobs assigns to LiveSlots slots; nil if this worker
	// runs none.
	Live      *live.Sandboxes
	LiveJobs  Jobs
	LiveSlots int

	health  health
	pool    *pool.Pool[*preparedJail]
	zygotes *zygotePool
	limiter *backgroundLimiter
}

// Run accepts jobs until ctx is done, and returns when all of them have ended. When cut is done, it
// kills the remaining programs and records them as lost to the shutdown.
func (w *Worker) Run(ctx, cut context.Context) error {
	var slots sync.WaitGroup
	w.health.test, w.health.notify = w.selfTest, w.OnHealth
	w.health.markHealthy(ctx)
	defer w.health.markUnhealthy()
	defer w.startPrewarming(ctx)()
	w.limiter = newBackgroundLimiter()
	work := func(jobs Jobs, n int) {
		for range n {
			slots.Go(func() { w.work(ctx, cut, jobs) })
		}
	}
	work(w.Jobs, w.Slots)
	if w.Live != nil {
		defer context.AfterFunc(ctx, w.Live.Drain)()
		work(w.LiveJobs, w.LiveSlots)
	}
	slots.Wait()
	return nil
}

// work carries out the jobs of one slot until ctx is done.
func (w *Worker) work(ctx, cut context.Context, jobs Jobs) {
	for {
		lease, err := jobs.Take(w.health.awaitHealthy(ctx))
		switch {
		case err == nil:
			w.attempt(cut, lease)
		case ctx.Err() != nil:
			return
		}
	}
}
