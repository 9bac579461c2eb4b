package batches

import (
	"context"
	"errors"
	"log/slog"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/scheduler/engine"
	"github.com/bullpen-run/bullpen/scheduler/store"
)

const (
	scanEvery = 200 * time.Millisecond
	// submitters limits the concurrent submissions of items, submittersOfOrg those of one
	// organisation.
	submitters      = 32
	submittersOfOrg = 16
	// maxRunning limits an organisation's batches that run at the same time, and those ending or
	// being removed. Others wait. maxHandled limits the total.
	maxRunning   = 16
	maxHandled   = 4096
	statsEvery   = time.Second
	orphansEvery = time.Hour
	restartPause = time.Second
)

// Executions submits, reads and ends executions.
type Executions interface {
	// ItemsOf returns what carries out the items of a batch.
	ItemsOf(b *proto.Batch) ItemExecutions
	// BatchLimits returns the limits of an API key and its plans: how many executions may run at a
	// time, and how many may be queued.
	BatchLimits(ctx context.Context, key string) (concurrent, queued int)
	// RemoveRun removes the run of an item of a batch of agent requests. A missing run is no error.
	RemoveRun(ctx context.Context, b *proto.Batch, id proto.TraceID) error
	// Slots returns the number of slots of all workers.
	Slots(ctx context.Context) (int, error)
}

// ItemExecutions are the executions, or agent runs, of one batch's items.
type ItemExecutions interface {
	// OpenBatch returns a function that submits the batch's items. shared is the JSON of their
	// common fields, nil for none.
	OpenBatch(b *proto.Batch, shared []byte) (SubmitItem, error)
	// Lookup returns the record of an execution, or [proto.ErrNotFound].
	Lookup(ctx context.Context, id proto.TraceID) (*proto.Record, error)
	// Cancel stores a request to end an execution.
	Cancel(ctx context.Context, id proto.TraceID) (*proto.Record, error)
	// Withdraw ends an execution that has not started with result r.
	Withdraw(ctx context.Context, id proto.TraceID, r proto.Result) (*proto.Record, error)
}

// SubmitItem submits an item as execution id. refused is the reason if it can never be submitted,
// otherwise empty. Errors include [*proto.Rejection] and [*proto.BusyError], after which nothing of
// it remains. After any other error it may have been submitted.
type SubmitItem func(ctx context.Context, item []byte, number int, id proto.TraceID) (refused string, err error)

// Deliveries stores webhooks.
type Deliveries interface {
	// Create stores a delivery, unless one with its trace id exists.
	Create(ctx context.Context, d *proto.Delivery) error
}

// Runner submits the items of all batches while it leads, and removes expired batches.
type Runner struct {
	Batches    *Batches
	Executions Executions
	Deliveries Deliveries
	Store      *store.Store
	Retention  time.Duration // of batches that have ended
	Instance   string        // unique to this process
	Log        *slog.Logger

	stillLeader func() bool
	submitting  engine.Slots[string] // by organisation
	joined      chan struct{}        // has a value when a batch has begun to run
	asked       time.Time            // when slots was
	refs        sync.Map             // what is submitted: itemRef by [proto.TraceID]

	mu    sync.Mutex
	runs  map[*run]bool
	slots int                // of all workers
	stop  context.CancelFunc // ends the following of records; nil if they were not followed
}

// Run campaigns and submits items until ctx is done. It always returns nil.
func (r *Runner) Run(ctx context.Context) error {
	e := engine.Engine[entry]{
		Queue: &r.Batches.queue, Store: r.Store, Name: "batches", Instance: r.Instance, Log: r.Log,
		Due: r.due, Handle: r.handle, Urgent: (*entry).urgent,
		Order: func(a, b *entry) int { return byPriority(a.batch, b.batch) },
		Beside: []func(context.Context){
			r.follow, engine.Every(scanEvery, r.share), engine.Every(orphansEvery, r.removeOrphans),
			func(ctx context.Context) { store.CollectMarkers(ctx, r.Store, r.Store.Batches, r.Log) },
		},
		Pause: scanEvery, RetryAfter: restartPause, Handlers: maxHandled, HandlersOfOrg: maxRunning,
	}
	r.stillLeader, r.submitting.Total, r.submitting.Each = e.StillLeader, submitters, submittersOfOrg
	r.joined, r.runs = make(chan struct{}, 1), map[*run]bool{}
	return e.Run(ctx)
}

// handle carries out a batch, or removes it.
func (r *Runner) handle(ctx context.Context, _ engine.Item, known entry) (err error) {
	switch b := known.batch; {
	case b.Removed:
		if err = r.removeRuns(ctx, b); err == nil {
			err = r.Batches.removeMarked(ctx, b)
		}
	case b.Finished(stateOf(b, known.state)): // its runs are past the retention of the log stream
		err = r.Batches.remove(ctx, b.Org, b.ID)
	default:
		err = r.carryOut(ctx, b)
	}
	if errors.Is(err, proto.ErrNotFound) { // removed by another process
		return nil
	}
	return err
}

// removeRuns removes the runs of a batch, whose items have one round.
func (r *Runner) removeRuns(ctx context.Context, b *proto.Batch) error {
	group, removing := errgroup.WithContext(ctx)
	group.SetLimit(lookups)
	for index := range b.Total {
		group.Go(func() error {
			if err := removing.Err(); err != nil {
				return err
			}
			return r.Executions.RemoveRun(removing, b, b.ItemTrace(index, 0))
		})
	}
	return group.Wait()
}

// removeOrphans removes blobs without a batch.
func (r *Runner) removeOrphans(ctx context.Context) {
	removed, err := r.Batches.content.removeOrphans(ctx, r.Batches.definitions.All(), time.Now())
	if err != nil && ctx.Err() == nil {
		r.Log.Warn("remove items without a batch failed, will retry", "error", err)
	}
	if removed > 0 {
		r.Log.Info("removed items without a batch", "blobs", removed)
	}
}
