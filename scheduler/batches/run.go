package batches

import (
	"context"
	"errors"
	"fmt"
	"math"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/proto/fault"
	"github.com/bullpen-run/bullpen/scheduler/store"
)

const (
	storeEvery    = time.Second // of a state that only counts
	minAhead      = 32          // items that a state allows to be submitted ahead
	lookups       = 16          // concurrent, also removals of runs
	submitTimeout = 20 * time.Second
	endTimeout    = 10 * time.Second // of a request to end an execution
	minPause      = 100 * time.Millisecond
	maxPause      = 2 * time.Second
	busyPause     = time.Second // before resubmitting an item whose thread is busy
	maxBusy       = 64          // items whose thread is busy
	rateSeconds   = 15          // over which the rate is averaged
)

// event is something that happened to an item.
type event struct {
	index int
	id    proto.TraceID
	// The record has this status and attempt, if status is not empty.
	status  proto.Status
	attempt int
	record  *proto.Record // the whole record, if it was read
	// Otherwise, the item was submitted, or a request to end it was made.
	submitted, asked bool
	missed           bool // or the ends of items may have been missed
	refused          string
	lost             bool // the item cannot be read
	err              error
}

// flight is an item that is submitted and has not ended.
type flight struct {
	id       proto.TraceID
	accepted bool // else it is being submitted
	missed   bool // its end may have been missed; the record tells
	running  bool
	asking   bool      // a request to end it is being made
	asked    time.Time // when one was made last
	check    time.Time // when to read the record: the submission had no answer, or see nextCheck; zero for never
}

// run carries out one batch. Its fields belong to one goroutine, except for those under mu.
type run struct {
	*Runner
	batch *proto.Batch // what never changes of it
	// executions are those of the items.
	executions ItemExecutions
	current    *proto.Batch
	state      proto.BatchState
	revision   uint64
	items      *Items
	reader     *reader
	submit     SubmitItem
	next       int               // no item below it waits
	ready      []int             // items that the stored state allows to be submitted, in order
	busy       map[int]time.Time // items whose thread is busy: when to submit them again
	flights    map[int]*flight
	running    int
	pause      time.Duration // after a rejection
	paused     time.Time     // until when
	dirty      bool
	stored     time.Time
	began      time.Time
	done       int // items that had run at the last store
	// unreadable is set if the items cannot be read.
	unreadable bool
	work       sync.WaitGroup

	window atomic.Int64 // how many items may be in the queue
	wanted atomic.Int64 // how many could be
	wake   chan struct{}

	mu    sync.Mutex
	inbox []event
}

func newRun(r *Runner, b *proto.Batch) *run {
	x := &run{
		Runner: r, batch: b, executions: r.Executions.ItemsOf(b), current: b, busy: map[int]time.Time{},
		flights: map[int]*flight{}, wake: make(chan struct{}, 1),
	}
	x.wanted.Store(int64(b.Total))
	return x
}

// post hands an event to the run.
func (r *run) post(e event) {
	r.mu.Lock()
	r.inbox = append(r.inbox, e)
	r.mu.Unlock()
	notify(r.wake)
}

func (r *run) drainInbox() []event {
	r.mu.Lock()
	defer r.mu.Unlock()
	list := r.inbox
	r.inbox = nil
	return list
}

// setWindow sets how many items the run may have in the queue.
func (r *run) setWindow(n int) {
	if r.window.Swap(int64(n)) != int64(n) {
		notify(r.wake)
	}
}

// run carries out the batch until it has ended or is paused, or ctx is done.
func (r *run) run(ctx context.Context) error {
	ctx, cancel := context.WithCancel(ctx)
	defer r.work.Wait()
	defer cancel()
	if err := r.load(ctx); err != nil {
		return fmt.Errorf("load: %w", err)
	}
	tick := time.NewTicker(scanEvery)
	defer tick.Stop()
	for {
		done, err := r.step(ctx)
		if done || err != nil {
			return err
		}
		select {
		case <-ctx.Done():
			return context.Cause(ctx)
		case <-tick.C:
		case <-r.wake:
		}
	}
}

// load reads the batch.
func (r *run) load(ctx context.Context) error {
	var err error
	if r.current, _, err = r.Batches.definitions.Read(ctx, definitionKey(r.batch.Org, r.batch.ID)); err != nil {
		return err
	}
	state, revision, err := r.Batches.state(ctx, r.current)
	if err != nil {
		return err
	}
	r.state, r.revision = *state, revision
	if r.items, err = unpack(state, r.batch.Total); err != nil {
		return err
	}
	if r.reader, err = r.Batches.content.open(ctx, &r.batch.Content); err == nil {
		r.submit, err = r.executions.OpenBatch(r.batch, r.reader.shared)
	}
	if r.unreadable = lost(err); err != nil && !r.unreadable {
		return err
	}
	r.done, r.stored, r.began = r.executed(), time.Now(), time.Now()
	for index := range r.items.Len() { // find out what happened to possibly submitted items
		if r.items.Status(index) == proto.ItemSubmitted {
			r.flights[index] = &flight{id: r.id(index), check: r.began}
			r.refs.Store(r.id(index), itemRef{r, index})
		}
	}
	return nil
}

// lost reports whether the items of a batch are gone from the blob store, or damaged.
func lost(err error) bool {
	return errors.Is(err, proto.ErrNotFound) || errors.Is(err, proto.ErrCorrupt)
}

// nextCheck returns when to read the record of an unfinished item: never for an execution, whose
// changes are followed.
func (r *run) nextCheck(now time.Time) time.Time {
	if r.batch.API == "" {
		return time.Time{}
	}
	return now.Add(busyPause)
}

func (r *run) id(index int) proto.TraceID {
	return r.batch.ItemTrace(index, r.items.Round(index))
}

// step does the pending work. It reports whether nothing is left.
func (r *run) step(ctx context.Context) (done bool, err error) {
	current := r.Batches.definitions.Get(definitionKey(r.batch.Org, r.batch.ID))
	if current == nil || current.Content.Index != r.batch.Content.Index {
		return true, nil // removed, and perhaps created again
	}
	r.current = current
	for _, e := range r.drainInbox() {
		if err := r.handle(ctx, e); err != nil {
			return false, err
		}
	}
	now := time.Now()
	r.checkUnanswered(ctx, now)
	r.retry()
	if r.unreadable {
		r.stop(proto.StopFailed, "Its programs cannot be read from the store of this server any more.")
	}
	if r.current.Cancelled {
		r.stop(proto.StopCancelled, "A client cancelled it.")
	}
	if r.current.Expired(now) && r.items.counts.Ended() < r.items.Len() && r.stop(proto.StopExpired, "It expired.") {
		// The reason is stored before an item is cancelled: the clock of a later leader may be behind.
		if err := r.store(ctx, now); err != nil {
			return false, err
		}
	}
	if r.state.Stopped != "" {
		r.dropWaiting()
		r.endSubmitted(ctx, now)
	}
	if !r.stillLeader() {
		return false, errNotLeader
	}
	reserved := 0
	if r.state.Stopped == "" && !r.current.Paused {
		reserved = r.reserve()
	} else {
		r.release()
	}
	if r.items.counts.Ended() == r.items.Len() {
		return true, r.finish(ctx)
	}
	if reserved > 0 || r.dirty && now.Sub(r.stored) >= storeEvery {
		if err := r.store(ctx, now); err != nil {
			return false, err
		}
		fault.Here(fault.AfterReserveBeforeItem)
	}
	if r.state.Stopped == "" && !r.current.Paused && now.After(r.paused) {
		r.submitReady(ctx, now)
	}
	if r.current.Paused || r.state.Stopped != "" {
		r.wanted.Store(int64(len(r.flights)))
	} else {
		r.wanted.Store(int64(min(r.items.Len()-r.items.counts.Ended(), r.maxParallel())))
	}
	idle := r.current.Paused && len(r.flights) == 0 && r.state.Stopped == ""
	if idle && r.dirty {
		return true, r.store(ctx, now)
	}
	return idle, nil
}

func (r *run) maxParallel() int {
	if r.batch.MaxParallel > 0 {
		return r.batch.MaxParallel
	}
	return r.batch.Total
}

// retry makes failed items wait again, if a client requested that since the batch ended.
func (r *run) retry() {
	if r.state.EndedAt.IsZero() || r.state.Retries >= r.current.Retries {
		return
	}
	r.items.retry(r.current.RetryCancelled)
	r.next, r.dirty = 0, true
	r.state.Retries, r.state.EndedAt, r.state.Stopped, r.state.Reason, r.state.Notified = r.current.Retries, time.Time{},
		"", "", false
	r.state.Rate, r.began, r.done = 0, time.Now(), r.executed()
}

// stop keeps waiting items from starting. It reports whether it has changed the reason: a client's
// replaces a failure.
func (r *run) stop(why proto.BatchStop, reason string) bool {
	if r.state.Stopped != "" && (r.state.Stopped != proto.StopFailed || why != proto.StopCancelled) {
		return false
	}
	r.state.Stopped, r.state.Reason, r.dirty = why, reason, true
	r.Log.Info("batch stopped", "batch", r.batch.ID, "org", r.batch.Org, "reason", reason)
	return true
}

// dropWaiting cancels the items that were not submitted.
func (r *run) dropWaiting() {
	r.release()
	if r.items.counts.Waiting == 0 {
		return
	}
	for index := range r.items.Len() {
		if r.items.Status(index) == proto.ItemWaiting {
			r.items.set(index, proto.ItemCancelled)
		}
	}
	r.dirty = true
}

// release makes items wait again that the state marks as submitted but that were not.
func (r *run) release() {
	for _, index := range r.ready {
		r.makeWait(index)
	}
	for index := range r.busy {
		r.makeWait(index)
	}
	r.ready = nil
	clear(r.busy)
}

func (r *run) makeWait(index int) {
	r.refs.Delete(r.id(index))
	r.items.set(index, proto.ItemWaiting)
	r.next, r.dirty = min(r.next, index), true
}

// endSubmitted ends the submitted items: after a failure, those that have not started; after
// expiry, all.
func (r *run) endSubmitted(ctx context.Context, now time.Time) {
	cancel := r.state.Stopped != proto.StopFailed || r.current.Expired(now)
	for index, f := range r.flights {
		if !f.accepted || f.asking || now.Sub(f.asked) < endTimeout || !cancel && f.running {
			continue
		}
		if !r.submitting.Acquire(r.batch.Org) {
			return // others are being asked for
		}
		f.asking, f.asked = true, now
		r.work.Go(func() {
			defer r.submitting.Release(r.batch.Org)
			ctx, stop := context.WithTimeout(ctx, endTimeout)
			defer stop()
			e := event{index: index, id: f.id, asked: true}
			if cancel {
				_, e.err = r.executions.Cancel(ctx, f.id)
			} else {
				_, e.err = r.executions.Withdraw(ctx, f.id, proto.Cancelled())
			}
			r.post(e)
		})
	}
}

// reserve allows more items to be submitted, once the state is stored. It returns their number.
func (r *run) reserve() (n int) {
	window := r.limit()
	if window == 0 || len(r.ready) > window/2 || len(r.busy) >= maxBusy {
		return 0
	}
	for ; r.next < r.items.Len() && len(r.ready) < max(window, minAhead); r.next++ {
		if r.items.Status(r.next) == proto.ItemWaiting {
			r.items.set(r.next, proto.ItemSubmitted)
			r.ready = append(r.ready, r.next)
			n++
		}
	}
	if n > 0 {
		r.dirty = true
	}
	return n
}

// limit returns how many items the run may have in the queue.
func (r *run) limit() int {
	return min(int(r.window.Load()), r.maxParallel())
}

// submitReady submits items that the stored state allows to be submitted.
func (r *run) submitReady(ctx context.Context, now time.Time) {
	for index, at := range r.busy {
		if now.After(at) {
			delete(r.busy, index)
			r.ready = append([]int{index}, r.ready...)
		}
	}
	window := r.limit()
	for len(r.ready) > 0 && len(r.flights) < window {
		if !r.submitting.Acquire(r.batch.Org) {
			return // a submission of another batch ends soon
		}
		index := r.ready[0]
		r.ready = r.ready[1:]
		id := r.id(index)
		r.refs.Store(id, itemRef{r, index})
		r.flights[index] = &flight{id: id}
		if r.state.StartedAt.IsZero() {
			r.state.StartedAt, r.dirty = now.UTC(), true
		}
		r.work.Go(func() {
			defer func() { r.submitting.Release(r.batch.Org); notify(r.wake) }()
			ctx, cancel := context.WithTimeout(ctx, submitTimeout)
			defer cancel()
			e := event{index: index, id: id, submitted: true}
			item, err := r.reader.item(ctx, index)
			if e.lost = lost(err); err == nil {
				e.refused, err = r.submit(ctx, item, index, id)
			}
			e.err = err
			fault.Here(fault.AfterItemBeforeState)
			r.post(e)
		})
	}
}

// handle handles what happened to an item.
func (r *run) handle(ctx context.Context, e event) error {
	if e.missed {
		for _, f := range r.flights {
			if f.missed = true; f.accepted {
				f.check = time.Now()
			}
		}
		return nil
	}
	f := r.flights[e.index]
	if f == nil && e.status != "" && r.items.Status(e.index) == proto.ItemSubmitted && r.id(e.index) == e.id {
		// Another process, which does not know yet that it lost the lead, has submitted it.
		f = &flight{id: e.id}
		r.flights[e.index] = f
		r.ready = slices.DeleteFunc(r.ready, func(index int) bool { return index == e.index })
		delete(r.busy, e.index)
	}
	if f == nil || f.id != e.id {
		return nil // it has ended
	}
	switch {
	case e.asked:
		f.asking = false
		if e.err != nil && ctx.Err() == nil {
			r.Log.Warn("end item of a stopped batch failed, will retry", "batch", r.batch.ID, "trace_id", e.id, "error", e.err)
		}
	case e.submitted:
		return r.onSubmitted(ctx, f, e)
	case e.status == proto.StatusFailed && e.attempt == 0 && e.record == nil:
		// It never ran. Only the record says why.
		f.accepted, f.check = true, time.Now()
	case e.status != "":
		f.accepted = true
		r.onStatus(e)
	}
	return nil
}

// onSubmitted handles the answer to a submission.
func (r *run) onSubmitted(ctx context.Context, f *flight, e event) error {
	_, rejected := errors.AsType[*proto.Rejection](e.err)
	_, busy := errors.AsType[*proto.BusyError](e.err)
	switch {
	case e.err == nil && e.refused == "":
		if f.accepted, f.check, r.pause = true, r.nextCheck(time.Now()), 0; f.missed {
			f.check = time.Now()
		}
	case ctx.Err() != nil:
		return context.Cause(ctx)
	case e.err == nil: // refused
		r.drop(e.index)
		r.items.set(e.index, proto.ItemWaiting)
		r.stop(proto.StopFailed, fmt.Sprintf("Item %d cannot be submitted: %s", e.index, e.refused))
	case rejected:
		r.drop(e.index)
		r.ready = append([]int{e.index}, r.ready...)
		r.pause = min(max(2*r.pause, minPause), maxPause)
		r.paused = time.Now().Add(r.pause)
	case busy:
		r.drop(e.index)
		r.busy[e.index] = time.Now().Add(busyPause)
	case e.lost:
		r.drop(e.index)
		r.items.set(e.index, proto.ItemWaiting)
		r.unreadable = true
	default:
		r.Log.Warn("submission of an item not confirmed, will ask", "batch", r.batch.ID, "trace_id", e.id, "error", e.err)
		f.check = time.Now().Add(busyPause)
	}
	return nil
}

// drop removes an item from the submitted ones. Changes of its record are still reported, since
// another process may submit it.
func (r *run) drop(index int) {
	f := r.flights[index]
	if f.running {
		r.running--
	}
	delete(r.flights, index)
}

// checkUnanswered reads the records of items with an unknown outcome.
func (r *run) checkUnanswered(ctx context.Context, now time.Time) {
	var due []int
	for index, f := range r.flights {
		if !f.check.IsZero() && !now.Before(f.check) {
			due = append(due, index)
		}
	}
	slices.SortFunc(due, func(x, y int) int { return y - x }) // those not submitted become ready in order
	records, errs := make([]*proto.Record, len(due)), make([]error, len(due))
	var group errgroup.Group
	group.SetLimit(lookups)
	for i, index := range due {
		group.Go(func() error {
			records[i], errs[i] = r.executions.Lookup(ctx, r.flights[index].id)
			return nil
		})
	}
	_ = group.Wait()
	for i, index := range due {
		f, rec := r.flights[index], records[i]
		switch {
		case errors.Is(errs[i], proto.ErrNotFound):
			r.drop(index)
			r.ready = append([]int{index}, r.ready...)
		case errs[i] != nil:
			f.check = now.Add(busyPause)
		default:
			f.accepted, f.check = true, r.nextCheck(now)
			r.onStatus(event{index: index, id: f.id, status: rec.Status, attempt: rec.Attempt, record: rec})
		}
	}
}

// onStatus applies the status of an item's record.
func (r *run) onStatus(e event) {
	f := r.flights[e.index]
	if !e.status.Terminal() {
		running := e.status == proto.StatusRunning
		if running != f.running {
			f.running, r.dirty = running, true
			if running {
				r.running++
			} else {
				r.running--
			}
		}
		return
	}
	r.drop(e.index)
	r.refs.Delete(e.id)
	r.dirty = true
	switch {
	case e.status == proto.StatusSuccess:
		r.items.set(e.index, proto.ItemSucceeded)
	case e.status == proto.StatusCancelled:
		r.items.set(e.index, proto.ItemCancelled)
	case e.record != nil && e.record.NotConfirmed() && r.items.again(e.index):
		r.next = min(r.next, e.index)
	default:
		r.items.set(e.index, proto.ItemFailed)
		if r.batch.StopOnFailure {
			r.stop(proto.StopFailed, fmt.Sprintf("Item %d failed.", e.index))
		}
	}
}

// finish stores the end of the batch, and its webhook.
func (r *run) finish(ctx context.Context) error {
	now := time.Now()
	if r.state.EndedAt.IsZero() {
		r.state.EndedAt, r.state.Notified = now.UTC(), r.batch.WebhookURL == ""
		if err := r.store(ctx, now); err != nil {
			return err
		}
		fault.Here(fault.AfterBatchBeforeDelivery)
		r.Log.Info("batch ended", "batch", r.batch.ID, "org", r.batch.Org, "status", r.current.Status(&r.state), "succeeded",
			r.state.Counts.Succeeded,
			"failed", r.state.Counts.Failed, "cancelled", r.state.Counts.Cancelled, "took_ms",
			r.state.EndedAt.Sub(r.batch.CreatedAt).Milliseconds())
	}
	if r.state.Notified {
		return nil
	}
	delivery, err := proto.NewBatchDelivery(r.current, &r.state)
	if err != nil {
		return err
	}
	if delivery != nil {
		if err := r.Deliveries.Create(ctx, delivery); err != nil {
			return err
		}
	}
	r.state.Notified = true
	return r.store(ctx, now)
}

// executed returns the number of items that have ended and were not cancelled.
func (r *run) executed() int { return r.items.counts.Succeeded + r.items.counts.Failed }

// store stores the state. Its error matches [store.IsConflict] if another process has changed the
// state.
func (r *run) store(ctx context.Context, now time.Time) error {
	if err := r.items.pack(&r.state); err != nil {
		return err
	}
	done := r.executed()
	if past := now.Sub(r.stored).Seconds(); past > 0 {
		rate := float64(max(0, done-r.done)) / past
		r.state.Rate += (rate - r.state.Rate) * max(1-math.Exp(-past/rateSeconds), min(1, past/now.Sub(r.began).Seconds()))
	}
	r.state.Counts = r.items.counts
	// To readers, items marked as submitted that were not are still waiting.
	unsent := len(r.ready) + len(r.busy)
	r.state.Counts.Waiting += unsent
	r.state.Counts.Running = r.running
	r.state.Counts.Queued -= unsent + r.running
	r.state.UpdatedAt = now.UTC()
	ctx, cancel := context.WithTimeout(ctx, submitTimeout)
	defer cancel()
	r.state.Content = r.batch.Content.Index.Key
	state := r.state // the cache keeps it
	revision, err := r.Batches.states.Replace(ctx, stateKey(r.batch.Org, r.batch.ID), &state, r.revision)
	if store.IsConflict(err) {
		return fmt.Errorf("another process carries on with it: %w", err)
	}
	if err != nil {
		return err
	}
	r.revision, r.dirty, r.stored, r.done = revision, false, now, done
	return nil
}
