package batches

import (
	"context"
	"errors"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/scheduler/store"
)

// itemRef names an item whose changes are reported to its run.
type itemRef struct {
	run   *run
	index int
}

// carryOut carries out a batch until it has ended or is paused.
func (r *Runner) carryOut(ctx context.Context, b *proto.Batch) error {
	x := newRun(r, b)
	r.mu.Lock()
	r.runs[x] = true
	r.mu.Unlock()
	notify(r.joined)
	r.setWindows(ctx, b.Org)
	defer func() {
		r.mu.Lock()
		defer r.mu.Unlock()
		delete(r.runs, x)
		r.refs.Range(func(id, ref any) bool {
			if ref.(itemRef).run == x {
				r.refs.Delete(id)
			}
			return true
		})
		r.stopIdle()
	}()
	return x.run(ctx)
}

// stopIdle ends the following of records if no batch runs.
func (r *Runner) stopIdle() {
	if len(r.runs) == 0 && r.stop != nil {
		r.stop()
	}
}

// follow passes the changes of all records to the runs of their batches while any batch runs, until
// ctx is done.
func (r *Runner) follow(ctx context.Context) {
	for {
		select {
		case <-ctx.Done():
			return
		case <-r.joined:
		}
		following, stop := context.WithCancel(ctx)
		r.mu.Lock()
		r.stop = stop
		r.stopIdle()
		r.mu.Unlock()
		err := r.Store.Records.Follow(following, store.Range{New: true}, r.onRecord, r.readRecords)
		if following.Err() == nil {
			r.Log.Warn("records of items not followed, will retry", "error", err)
			time.AfterFunc(restartPause, func() { notify(r.joined) })
		}
		stop()
	}
}

// readRecords makes all runs read the records of their items, in case they missed an end.
func (r *Runner) readRecords() {
	r.mu.Lock()
	defer r.mu.Unlock()
	for x := range r.runs {
		x.post(event{missed: true})
	}
}

// onRecord reports a change of a record to the run of its batch.
func (r *Runner) onRecord(m *store.Message) {
	id := proto.TraceID(m.Subject[strings.LastIndexByte(m.Subject, '.')+1:])
	found, ok := r.refs.Load(id)
	if !ok {
		return
	}
	ref, h := found.(itemRef), m.Header
	attempt, _ := strconv.Atoi(h.Get(store.HeaderAttempt)) // 0 makes the run read the record
	ref.run.post(event{index: ref.index, id: id, status: proto.Status(h.Get(store.HeaderStatus)), attempt: attempt})
}

// share periodically reads the number of slots and redivides the organisations' windows.
func (r *Runner) share(ctx context.Context) {
	r.mu.Lock()
	idle := len(r.runs) == 0
	r.mu.Unlock()
	if idle {
		return
	}
	if now := time.Now(); now.Sub(r.asked) > statsEvery {
		r.asked = now
		asking, cancel := context.WithTimeout(ctx, statsEvery)
		defer cancel()
		if slots, err := r.Executions.Slots(asking); err == nil { // else the last number holds
			r.mu.Lock()
			r.slots = slots
			r.mu.Unlock()
		}
	}
	r.setWindows(ctx, "")
}

// setWindows divides the window of an organisation, or of each if of is empty, among its batches.
func (r *Runner) setWindows(ctx context.Context, of string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	byOrg := map[string][]*run{}
	for x := range r.runs {
		if org := x.batch.Org; of == "" || of == org {
			byOrg[org] = append(byOrg[org], x)
		}
	}
	for _, runs := range byOrg {
		slices.SortFunc(runs, func(x, y *run) int { return byPriority(x.batch, y.batch) })
		left := 0
		wants := make([]demand, len(runs))
		for i, x := range runs {
			concurrent, queued := r.Executions.BatchLimits(ctx, x.batch.Key)
			left = max(left, window(concurrent, queued, r.slots))
			wants[i] = demand{x.batch.Priority, int(x.wanted.Load())}
		}
		for i, n := range divide(left, wants) {
			runs[i].setWindow(n)
		}
	}
}

var errNotLeader = errors.New("the leadership is in doubt")
