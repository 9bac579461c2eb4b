package webhook

import (
	"container/list"
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"sync"
	"time"

	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/proto/fault"
	"github.com/bullpen-run/bullpen/webhook/send"
)

const (
	reconcileEvery = 20 * time.Second // finds due deliveries whose timer was lost
	timerHorizon   = 2 * time.Minute  // timers are set for deliveries that are due within it
	timerSetters   = 4
	timerQueueSize = 4096
	maxBodies      = 8           // that are built concurrently
	retryPause     = time.Second // after an internal failure
	disableAfter   = 5 * 24 * time.Hour
	// orgShare divides MaxPending: the deliveries of one organisation cannot keep out all others.
	orgShare = 8
	// scanShare divides the time between scans: scans take at most this part of one processor.
	scanShare = 20
)

// pendingDelivery is a delivery that waits for an attempt.
type pendingDelivery struct {
	id       proto.TraceID
	revision uint64
	due      time.Time
	queue    *originQueue
	elem     *list.Element // in queue.due; nil while not due or in flight
	inFlight bool
	timerSet bool // for due
}

type timerRequest struct {
	id proto.TraceID
	at time.Time
}

// term is the state of one period of leadership.
type term struct {
	*Dispatcher
	abort     context.Context // ends the attempts in flight
	timers    chan timerRequest
	bodySlots chan struct{} // semaphore, see maxBodies
	attempts  sync.WaitGroup

	mu      sync.Mutex
	pending map[proto.TraceID]*pendingDelivery
	spilled map[string]bool // organisations with pending deliveries that are in the store only
	queues  *queues
	started bool // all deliveries that existed at the start are known
	stopped bool // no more attempts are begun
	// resuming are the timers of paused queues that wait.
	resuming map[*time.Timer]struct{}
}

func newTerm(abort context.Context, d *Dispatcher) *term {
	return &term{
		Dispatcher: d, abort: abort, pending: map[proto.TraceID]*pendingDelivery{}, spilled: map[string]bool{},
		queues:   newQueues(d.MaxPerOrigin),
		resuming: map[*time.Timer]struct{}{},
		timers:   make(chan timerRequest, timerQueueSize), bodySlots: make(chan struct{}, maxBodies),
	}
}

// start begins the attempts and returns the number of pending deliveries.
func (t *term) start() int {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.started = true
	n := len(t.pending)
	t.dispatch()
	return n
}

func (t *term) stop() {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.stopped = true
	for timer := range t.resuming { // a pause may last a day, and its timer keeps the term in memory
		timer.Stop()
	}
	clear(t.resuming)
}

// onChange applies a change of a stored delivery.
func (t *term) onChange(c proto.DeliveryChange) {
	t.mu.Lock()
	defer t.mu.Unlock()
	p := t.pending[c.TraceID]
	switch {
	case p == nil && c.Due.IsZero():
		return
	case p == nil && !t.fits(c.Org, c.Due, 1):
		t.spill(c.Org)
		return
	case p == nil:
		p = &pendingDelivery{id: c.TraceID, queue: t.queues.acquire(queueKey{c.Org, c.Origin})}
		t.pending[c.TraceID] = p
	case c.Revision <= p.revision:
		return // written by this process
	}
	t.update(p, c.Revision, c.Due)
}

// update sets the revision and due time of a delivery; due is zero if no attempt follows. t.mu is
// held.
func (t *term) update(p *pendingDelivery, revision uint64, due time.Time) {
	now := time.Now()
	p.revision, p.due, p.timerSet = revision, due, false
	if p.elem != nil {
		t.queues.dequeue(p, now)
	}
	switch {
	case p.inFlight: // updated again when the attempt ends
	case due.IsZero():
		t.forget(p)
	case !t.fits(p.queue.key.org, due, 0):
		t.spill(p.queue.key.org)
		t.forget(p)
	default:
		t.schedule(p, now)
	}
}

// forget removes a delivery from memory. t.mu is held.
func (t *term) forget(p *pendingDelivery) {
	delete(t.pending, p.id)
	t.queues.release(p.queue)
}

// fits reports whether an organisation may have n more deliveries with that due time in memory.
// Deliveries with a long wait get half of its share, so that they do not crowd out those that are
// due. t.mu is held.
func (t *term) fits(org string, due time.Time, n int) bool {
	share := t.MaxPending / orgShare
	if due.Sub(t.Now()) > timerHorizon {
		share /= 2
	}
	return t.queues.pending(org)+n <= share && len(t.pending)+n <= t.MaxPending
}

// spill notes that an organisation has deliveries in the store only. t.mu is held.
func (t *term) spill(org string) {
	if !t.spilled[org] {
		t.spilled[org] = true
		t.Log.Debug("webhook deliveries wait in the store", "org", org)
	}
}

// schedule enqueues a delivery that is due, and sets a timer for one that is due soon. t.mu is
// held.
func (t *term) schedule(p *pendingDelivery, now time.Time) {
	wait := p.due.Sub(t.Now())
	switch {
	case wait <= 0:
		t.queues.enqueue(p, now)
		t.dispatch()
	case wait < timerHorizon && !p.timerSet:
		select {
		case t.timers <- timerRequest{p.id, p.due}:
			p.timerSet = true
		default: // reconcileLoop finds it
		}
	}
}

func (t *term) setTimers(ctx context.Context) {
	for {
		select {
		case <-ctx.Done():
			return
		case r := <-t.timers:
			if err := t.Timers.Set(ctx, string(r.id), r.at); err != nil && ctx.Err() == nil {
				t.Log.Warn("set timer failed, delivery will be late", "trace_id", r.id, "error", err)
			}
		}
	}
}

func (t *term) wake(id proto.TraceID) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if p := t.pending[id]; p != nil {
		t.scheduleIdle(p, time.Now())
	}
}

// scheduleIdle schedules p unless it is enqueued or in flight. t.mu is held.
func (t *term) scheduleIdle(p *pendingDelivery, now time.Time) {
	if !p.inFlight && p.elem == nil {
		t.schedule(p, now)
	}
}

// reconcileLoop finds due deliveries whose timer was lost or that did not fit in memory.
func (t *term) reconcileLoop(ctx context.Context) {
	tick := time.NewTicker(reconcileEvery)
	defer tick.Stop()
	var nextScan time.Time
	for {
		select {
		case <-ctx.Done():
			return
		case now := <-tick.C:
			t.mu.Lock()
			for _, p := range t.pending {
				t.scheduleIdle(p, now)
			}
			t.mu.Unlock()
			if !now.Before(nextScan) {
				t.scanSpilled(ctx)
				nextScan = now.Add(time.Since(now) * scanShare)
			}
		}
	}
}

// scanSpilled reads the deliveries of organisations that have some in the store only.
func (t *term) scanSpilled(ctx context.Context) {
	t.mu.Lock()
	orgs := slices.Sorted(maps.Keys(t.spilled))
	clear(t.spilled)
	t.mu.Unlock()
	for _, org := range orgs {
		if err := t.Deliveries.Scan(ctx, org, t.onChange); err != nil {
			if ctx.Err() == nil {
				t.Log.Warn("scan of webhook deliveries failed, will retry", "org", org, "error", err)
			}
			t.mu.Lock()
			t.spill(org)
			t.mu.Unlock()
		}
	}
}

// dispatch starts every attempt that the limits allow. t.mu is held.
func (t *term) dispatch() {
	for t.started && !t.stopped {
		p := t.queues.next(time.Now())
		if p == nil {
			return
		}
		p.inFlight = true
		t.attempts.Go(func() { t.attempt(p) })
	}
}

// attemptResult is the state of a delivery after an attempt.
type attemptResult struct {
	revision uint64    // 0 if the delivery is not stored any more
	due      time.Time // of the next attempt; zero for none
	verdict  *verdict  // nil if nothing was sent
}

// attempt makes one attempt and updates the queues with its result.
func (t *term) attempt(p *pendingDelivery) {
	r, err := t.deliver(t.abort, p.queue.key.org, p.id)
	if err != nil && t.abort.Err() == nil {
		t.Log.Warn("delivery attempt failed internally, will retry", "trace_id", p.id, "error", err)
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	now := time.Now()
	if r.verdict != nil {
		t.queues.recordVerdict(p.queue, *r.verdict, now)
		if pause := p.queue.pausedTo.Sub(now); pause > 0 {
			t.resumeAfter(p.queue, pause)
		}
	}
	t.queues.finish(p.queue, now)
	p.inFlight = false
	switch {
	case err == nil && (r.revision == 0 || r.revision >= p.revision):
		t.update(p, r.revision, r.due)
	case err != nil && !p.due.IsZero() && p.due.Before(t.Now().Add(retryPause)):
		t.update(p, p.revision, t.Now().Add(retryPause))
	default: // onChange was called with a newer revision
		t.update(p, p.revision, p.due)
	}
	t.dispatch()
}

// resumeAfter resumes q when a pause is over, unless the term ends first. t.mu is held.
func (t *term) resumeAfter(q *originQueue, pause time.Duration) {
	if t.stopped {
		return
	}
	var timer *time.Timer
	timer = time.AfterFunc(pause, func() {
		t.mu.Lock()
		defer t.mu.Unlock()
		delete(t.resuming, timer)
		t.queues.update(q, time.Now())
		t.dispatch()
	})
	t.resuming[timer] = struct{}{}
}

// deliver sends a delivery once if it is still due, and stores the attempt.
func (t *term) deliver(ctx context.Context, org string, id proto.TraceID) (attemptResult, error) {
	d, revision, err := t.Deliveries.Get(ctx, org, id)
	switch {
	case errors.Is(err, proto.ErrNotFound): // past its retention
		return attemptResult{}, nil
	case err != nil:
		return attemptResult{}, err
	case d.Status != proto.DeliveryPending:
		return attemptResult{revision: revision}, nil
	case t.Now().Before(d.NextAt):
		return attemptResult{revision: revision, due: d.NextAt}, nil
	}
	if e, ok := t.Endpoints.Endpoint(d.Org, d.URL); ok && e.Disabled() {
		return t.fail(ctx, d, revision, "the endpoint is disabled: "+e.Reason)
	}
	body := []byte(d.Body)
	if body == nil {
		body, err = t.body(ctx, org, id)
	}
	if errors.Is(err, proto.ErrNotFound) {
		return t.fail(ctx, d, revision, "the result is not kept any more")
	}
	if err != nil {
		return attemptResult{}, err
	}
	settings := t.Settings.Webhook(d.Org, d.Key)
	o := t.Sender.Send(ctx, send.Post{URL: d.URL, ID: d.ID, Body: body, Settings: settings})
	if ctx.Err() != nil && o.Status == 0 {
		return attemptResult{}, ctx.Err() // aborted by this process: not the receiver's failure
	}
	fault.Here(fault.AfterPostBeforeRecord)
	v := decide(&o, &settings, d.Made-d.Before+1)
	t.updateEndpoint(ctx, d, v)
	return t.record(ctx, d, revision, &o, v)
}

// body builds the body of a delivery. Results may be large, so few are read concurrently.
func (t *term) body(ctx context.Context, org string, id proto.TraceID) ([]byte, error) {
	select {
	case t.bodySlots <- struct{}{}:
		defer func() { <-t.bodySlots }()
	case <-ctx.Done():
		return nil, context.Cause(ctx)
	}
	rec, err := t.Records.Lookup(ctx, org, id)
	if err != nil {
		return nil, err
	}
	return t.Body(rec)
}

// fail ends a delivery without an attempt.
func (t *term) fail(ctx context.Context, d *proto.Delivery, revision uint64, reason string) (attemptResult, error) {
	d.Status, d.Reason, d.NextAt = proto.DeliveryFailed, reason, time.Time{}
	revision, err := t.Deliveries.Update(ctx, d, revision)
	if err != nil {
		return attemptResult{}, err
	}
	t.Log.Warn("delivery failed", "trace_id", d.TraceID, "org", d.Org, "reason", reason)
	return attemptResult{revision: revision}, nil
}

// updateEndpoint stores what the verdict on an attempt means for the URL. The next attempt repeats
// a failed update.
func (t *term) updateEndpoint(ctx context.Context, d *proto.Delivery, v verdict) {
	now := t.Now()
	e, failing := t.Endpoints.Endpoint(d.Org, d.URL)
	if v.disable == "" && failing && now.Sub(e.FailingSince) >= disableAfter {
		v.disable = fmt.Sprintf("it has failed since %s", e.FailingSince.UTC().Format(proto.TimeLayout))
	}
	var err error
	switch {
	case v.status == proto.DeliveryDelivered && failing:
		if err = t.Endpoints.Enable(ctx, d.Org, d.URL); errors.Is(err, proto.ErrNotFound) {
			err = nil // enabled concurrently
		}
	case v.status == proto.DeliveryDelivered:
	case v.disable != "":
		err = t.Endpoints.Disable(ctx, d.Org, d.URL, v.disable, now)
	case !failing:
		err = t.Endpoints.Failing(ctx, d.Org, d.URL, now)
	}
	if err != nil && ctx.Err() == nil {
		t.Log.Warn("store endpoint state failed", "org", d.Org, "error", err)
	}
}

// record stores an attempt and its verdict, even if another dispatcher changed the delivery
// meanwhile.
func (t *term) record(
	ctx context.Context, d *proto.Delivery, revision uint64, o *send.Outcome, v verdict,
) (attemptResult, error) {
	for {
		if d.Status == proto.DeliveryPending || v.status == proto.DeliveryDelivered {
			d.Status, d.Reason, d.NextAt = v.status, v.reason, time.Time{}
			if v.status == proto.DeliveryPending {
				d.NextAt = t.Now().Add(v.wait).UTC()
			}
		}
		d.Record(o.DeliveryAttempt)
		updated, err := t.Deliveries.Update(ctx, d, revision)
		if err == nil {
			t.logAttempt(ctx, d)
			return attemptResult{revision: updated, due: d.NextAt, verdict: &v}, nil
		}
		if !errors.Is(err, proto.ErrConflict) {
			return attemptResult{verdict: &v}, err
		}
		if d, revision, err = t.Deliveries.Get(ctx, d.Org, d.TraceID); err != nil {
			return attemptResult{verdict: &v}, err
		}
	}
}

// logAttempt logs the attempt that was recorded last.
func (t *term) logAttempt(ctx context.Context, d *proto.Delivery) {
	a := &d.Attempts[len(d.Attempts)-1]
	t.OnAttempt(d, a)
	traceAttempt(ctx, d, a)
	fields := []any{
		"trace_id", d.TraceID, "org", d.Org, "key", d.Key, "webhook_id", d.ID, "origin", proto.Origin(d.URL),
		"attempt", a.Number,
		"status", a.Status, "took_ms", a.Timings.Total, "delivery", d.Status,
	}
	if a.Error != "" {
		fields = append(fields, "error", a.Error, "detail", a.Detail)
	}
	if !d.NextAt.IsZero() {
		fields = append(fields, "next_at", d.NextAt.Format(proto.TimeLayout))
	}
	t.Log.InfoContext(ctx, "webhook attempt", fields...)
}
