package batches

import (
	"cmp"
	"context"
	"errors"
	"log/slog"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/nats-io/nats.go/jetstream"
	"golang.org/x/sync/errgroup"

	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/scheduler/leader"
	"github.com/bullpen-run/bullpen/scheduler/store"
)

const (
	scanEvery = 200 * time.Millisecond
	// submitters is the number of items that are submitted at the same time.
	submitters = 32
	// maxRunning bounds the batches of an organisation that run at the same time, and those that have
	// expired and end at the same time. Others wait.
	maxRunning = 16
	// baseWindow and two items for each slot are in the queue at most, so that a batch of a higher
	// priority need not wait for long.
	baseWindow   = 64
	statsEvery   = time.Second
	collectEvery = time.Minute
	removeEvery  = time.Second
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
	// RemoveRun removes the run that is an item of a batch of requests to an API. It is no error if there
	// is none.
	RemoveRun(ctx context.Context, b *proto.Batch, id proto.TraceID) error
	// Slots returns the number of slots of all workers.
	Slots(ctx context.Context) (int, error)
}

// ItemExecutions are the executions that are the items of one batch, or the runs of agents.
type ItemExecutions interface {
	// OpenBatch returns what submits the items of the batch. shared is the JSON of the fields that they
	// share, nil for none.
	OpenBatch(b *proto.Batch, shared []byte) (SubmitItem, error)
	// Lookup returns the record of an execution, or [proto.ErrNotFound].
	Lookup(ctx context.Context, id proto.TraceID) (*proto.Record, error)
	// Cancel stores a request to end an execution.
	Cancel(ctx context.Context, id proto.TraceID) (*proto.Record, error)
	// Withdraw ends an execution that has not started with result r.
	Withdraw(ctx context.Context, id proto.TraceID, r proto.Result) (*proto.Record, error)
}

// SubmitItem submits an item as execution id. refused is the reason why it can never be submitted,
// empty if it was. Errors include [*proto.Rejection] and [*proto.BusyError], after which nothing of
// it remains. After any other error it may have been submitted.
type SubmitItem func(ctx context.Context, item []byte, number int, id proto.TraceID) (refused string, err error)

// Deliveries stores webhooks.
type Deliveries interface {
	// Create stores a delivery, unless there is one of its trace id.
	Create(ctx context.Context, d *proto.Delivery) error
}

// Engine submits the items of all batches while it leads.
type Engine struct {
	Batches    *Batches
	Executions Executions
	Deliveries Deliveries
	Store      *store.Store
	Retention  time.Duration // of batches that have ended
	Instance   string        // unique to this process
	Log        *slog.Logger
}

// Run campaigns and submits items until ctx is done. It always returns nil.
func (e *Engine) Run(ctx context.Context) error {
	elector := leader.Elector{Store: e.Store, Name: "batches", Instance: e.Instance, Log: e.Log}
	elector.Run(ctx, func(ctx context.Context, lead *leader.Term) error {
		ctx, cancel := context.WithCancel(ctx)
		var collecting sync.WaitGroup
		defer collecting.Wait()
		defer cancel()
		collecting.Go(func() { e.collect(ctx) }) // the blob store may take its time
		collecting.Go(func() { e.removeRemoved(ctx) })
		collecting.Go(func() { e.Store.CollectMarkers(ctx, e.Store.Batches, e.Log) })
		tick := time.NewTicker(scanEvery)
		defer tick.Stop()
		for {
			if len(e.unfinished()) > 0 {
				if err := e.session(ctx, lead); err != nil {
					return err
				}
			}
			select {
			case <-ctx.Done():
				return nil
			case <-tick.C:
			case <-e.Batches.changed:
			}
		}
	})
	return nil
}

// unfinished returns the batches with something to do.
func (e *Engine) unfinished() []*proto.Batch {
	var list []*proto.Batch
	for _, b := range e.Batches.definitions.All() {
		if s := e.Batches.cachedState(b); !b.Removed && !b.Finished(s) && !idle(b, s) {
			list = append(list, b)
		}
	}
	return list
}

// idle reports whether nothing is to be done for a batch because it is paused.
func idle(b *proto.Batch, s *proto.BatchState) bool {
	return b.Paused && !b.Cancelled && !b.Expired(time.Now()) && s.Stopped == "" && s.EndedAt.IsZero() &&
		s.Counts.Queued+s.Counts.Running == 0
}

// collect removes batches that are past their retention, and blobs without a batch, until ctx is
// done.
func (e *Engine) collect(ctx context.Context) {
	tick := time.NewTicker(collectEvery)
	defer tick.Stop()
	swept := time.Now()
	for {
		select {
		case <-ctx.Done():
			return
		case now := <-tick.C:
			e.removeOld(ctx, now)
			if now.Sub(swept) > orphansEvery {
				e.removeOrphans(ctx, now)
				swept = now
			}
		}
	}
}

func (e *Engine) removeOld(ctx context.Context, now time.Time) {
	for _, b := range e.Batches.definitions.All() {
		if !pastRetention(b, e.Batches.cachedState(b), e.Retention, now) {
			continue
		}
		// Its runs are past the retention of the log stream.
		if err := e.Batches.remove(ctx, b.Org, b.ID); err != nil && !errors.Is(err, proto.ErrNotFound) && ctx.Err() == nil {
			e.Log.Warn("remove batch past its retention failed", "batch", b.ID, "org", b.Org, "error", err)
		}
	}
}

// removeRemoved removes the batches that clients have removed, with the runs of their items, until ctx
// is done.
func (e *Engine) removeRemoved(ctx context.Context) {
	tick := time.NewTicker(removeEvery)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
		for _, b := range e.Batches.definitions.All() {
			if !b.Removed {
				continue
			}
			err := e.removeRuns(ctx, b)
			if err == nil {
				err = e.Batches.removeMarked(ctx, b)
			}
			if err != nil && !errors.Is(err, proto.ErrNotFound) && ctx.Err() == nil {
				e.Log.Warn("remove batch with its runs failed, will retry", "batch", b.ID, "org", b.Org, "error", err)
			}
		}
	}
}

// removeRuns removes the runs of a batch, whose items have one round.
func (e *Engine) removeRuns(ctx context.Context, b *proto.Batch) error {
	group, removing := errgroup.WithContext(ctx)
	group.SetLimit(lookups)
	for index := range b.Total {
		group.Go(func() error {
			if err := removing.Err(); err != nil {
				return err
			}
			return e.Executions.RemoveRun(removing, b, b.ItemTrace(index, 0))
		})
	}
	return group.Wait()
}

func (e *Engine) removeOrphans(ctx context.Context, now time.Time) {
	removed, err := e.Batches.content.removeOrphans(ctx, e.Batches.definitions.All(), now)
	if err != nil && ctx.Err() == nil {
		e.Log.Warn("remove items without a batch failed, will retry", "error", err)
	}
	if removed > 0 {
		e.Log.Info("removed items without a batch", "blobs", removed)
	}
}

// session is a time in which batches run and the records of all executions are followed.
type session struct {
	*Engine
	stillLeader func() bool
	free        chan struct{} // semaphore of submitters

	mu    sync.Mutex
	runs  map[string]*run // by batch
	items map[proto.TraceID]itemRef
	slots int
}

// itemRef names an item that is submitted.
type itemRef struct {
	run   *run
	index int
}

// session runs batches until all have ended. It returns an error if it may have missed the end of
// an execution.
func (e *Engine) session(ctx context.Context, lead *leader.Term) error {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	s := &session{
		Engine: e, stillLeader: lead.StillLeader, free: make(chan struct{}, submitters), runs: map[string]*run{},
		items: map[proto.TraceID]itemRef{},
	}
	var parts sync.WaitGroup
	defer parts.Wait()
	following := make(chan struct{})
	parts.Go(func() {
		cancel(e.Store.Follow(ctx, e.Store.Executions, jetstream.ConsumerConfig{DeliverPolicy: jetstream.DeliverNewPolicy},
			s.onRecord, func() { close(following) }))
	})
	select {
	case <-ctx.Done():
		return context.Cause(ctx)
	case <-following: // from now on, no end is missed
	}
	tick := time.NewTicker(scanEvery)
	defer tick.Stop()
	var asked time.Time
	for {
		if now := time.Now(); now.Sub(asked) > statsEvery {
			s.readSlots(ctx)
			asked = now
		}
		s.start(ctx, &parts)
		s.share(ctx)
		select {
		case <-ctx.Done():
			return context.Cause(ctx)
		case <-tick.C:
		case <-e.Batches.changed:
		}
		if len(e.unfinished()) == 0 && s.idle() {
			cancel(nil)
			return nil
		}
	}
}

func (s *session) readSlots(ctx context.Context) {
	ctx, cancel := context.WithTimeout(ctx, statsEvery)
	defer cancel()
	slots, err := s.Executions.Slots(ctx)
	if err != nil {
		return // the last number holds
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.slots = slots
}

func (s *session) idle() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return len(s.runs) == 0
}

// byPriority orders batches: the highest priority first, then the oldest.
func byPriority(x, y *proto.Batch) int {
	return cmp.Or(cmp.Compare(y.Priority, x.Priority), x.CreatedAt.Compare(y.CreatedAt), cmp.Compare(x.ID, y.ID))
}

// start starts the batches with something to do.
func (s *session) start(ctx context.Context, parts *sync.WaitGroup) {
	list := s.unfinished()
	slices.SortFunc(list, byPriority)
	s.mu.Lock()
	defer s.mu.Unlock()
	type group struct {
		org     string
		expired bool
	}
	now, running := time.Now(), map[group]int{}
	for _, r := range s.runs {
		running[group{r.batch.Org, r.batch.Expired(now)}]++
	}
	for _, b := range list {
		of := group{b.Org, b.Expired(now)}
		if s.runs[b.ID] != nil || running[of] >= maxRunning {
			continue
		}
		running[of]++
		r := newRun(s, b)
		s.runs[b.ID] = r
		parts.Go(func() {
			err := r.run(ctx)
			if err != nil && ctx.Err() == nil && !errors.Is(err, proto.ErrNotFound) {
				s.Log.Warn("batch not carried on, will retry", "batch", r.batch.ID, "org", r.batch.Org, "error", err)
				select {
				case <-ctx.Done():
				case <-time.After(restartPause):
				}
			}
			s.mu.Lock()
			defer s.mu.Unlock()
			delete(s.runs, r.batch.ID)
			for id, ref := range s.items {
				if ref.run == r {
					delete(s.items, id)
				}
			}
		})
	}
}

// share divides what an organisation may have in the queue among its batches: all that those of the
// highest priority want, evenly, then those of the next.
func (s *session) share(ctx context.Context) {
	s.mu.Lock()
	defer s.mu.Unlock()
	byOrg := map[string][]*run{}
	for _, r := range s.runs {
		byOrg[r.batch.Org] = append(byOrg[r.batch.Org], r)
	}
	for _, runs := range byOrg {
		slices.SortFunc(runs, func(x, y *run) int { return byPriority(x.batch, y.batch) })
		left := 0
		wants := make([]demand, len(runs))
		for i, r := range runs {
			left = max(left, s.window(ctx, r.batch.Key))
			wants[i] = demand{r.batch.Priority, r.demand()}
		}
		for i, n := range divide(left, wants) {
			runs[i].setWindow(n)
		}
	}
}

// window returns how many items of batches an organisation may have in the queue or running: part
// of what its plan allows, so that other executions are not refused, and no more than keep the
// slots busy.
func (s *session) window(ctx context.Context, key string) int {
	concurrent, queued := s.Executions.BatchLimits(ctx, key)
	return max(1, min(concurrent-max(1, concurrent/4), queued/2, baseWindow+2*s.slots))
}

// demand is how many items a batch could have in the queue.
type demand struct{ priority, want int }

// divide divides a number among demands, which are ordered by priority.
func divide(left int, demands []demand) []int {
	shares := make([]int, len(demands))
	for begin := 0; begin < len(demands); {
		end := begin
		for end < len(demands) && demands[end].priority == demands[begin].priority {
			end++
		}
		// The smallest demands first: what they do not need is for the others.
		order := make([]int, 0, end-begin)
		for i := begin; i < end; i++ {
			order = append(order, i)
		}
		slices.SortStableFunc(order, func(x, y int) int { return cmp.Compare(demands[x].want, demands[y].want) })
		for n, i := range order {
			others := len(order) - n
			shares[i] = min(demands[i].want, (left+others-1)/others)
			left -= shares[i]
		}
		begin = end
	}
	return shares
}

// add makes the session report the changes of an item's record to its run.
func (s *session) add(id proto.TraceID, ref itemRef) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.items[id] = ref
}

func (s *session) forget(id proto.TraceID) {
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.items, id)
}

// onRecord reports a change of a record to the run of its batch.
func (s *session) onRecord(m jetstream.Msg, _ *jetstream.MsgMetadata) {
	subject := m.Subject()
	id := proto.TraceID(subject[strings.LastIndexByte(subject, '.')+1:])
	s.mu.Lock()
	ref, ok := s.items[id]
	s.mu.Unlock()
	if !ok {
		return
	}
	h := m.Headers()
	attempt, _ := strconv.Atoi(h.Get(store.HeaderAttempt)) // 0 makes the run read the record
	ref.run.post(event{index: ref.index, id: id, status: proto.Status(h.Get(store.HeaderStatus)), attempt: attempt})
}

var errNotLeader = errors.New("the leadership is in doubt")
