// Package webhook sends the results of executions to their receivers: signed, retried, one lane for each receiver, every attempt
// recorded. Truth is the record of each delivery, changed by compare-and-set; what is held in memory here can be rebuilt from those
// at any time, and timers only wake. It does not know where records, settings and timers are kept.
package webhook

import (
	"container/list"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"time"

	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/proto/fault"
	"github.com/bullpen-run/bullpen/webhook/send"
)

const (
	reconcile     = 20 * time.Second // how often it is looked for deliveries that are due and were not woken
	horizon       = 2 * time.Minute  // timers are set for what is due within
	armers        = 4                // that set timers at once
	armerQueue    = 4096
	readers       = 8           // of results at once
	retryPause    = time.Second // after a failure of our own
	disabledAfter = 5 * 24 * time.Hour
)

// Deliveries keeps the deliveries.
type Deliveries interface {
	// Follow gives every delivery as it is and then whenever it changes, and calls current once when take has had all that there
	// were. It returns when ctx ends, or with an error when changes may have been missed.
	Follow(ctx context.Context, take func(proto.DeliveryChange), current func(), wrong func(error)) error
	// Get gives a delivery and the revision to change it by. Its error is [proto.ErrNotFound] where there is none.
	Get(ctx context.Context, org string, id proto.TraceID) (*proto.Delivery, uint64, error)
	// Update stores d in place of the delivery as it was at a revision, trying until ctx ends. Its error is [proto.ErrConflict] where
	// somebody else changed it.
	Update(ctx context.Context, d *proto.Delivery, revision uint64) (uint64, error)
}

// Records gives executions.
type Records interface {
	// Lookup gives the record of an execution. Its error is [proto.ErrNotFound] where there is none, or none any more.
	Lookup(ctx context.Context, id proto.TraceID) (*proto.Record, error)
}

// Settings gives what was set for API keys.
type Settings interface {
	// Webhook gives the settings of a key; the default where nothing was set.
	Webhook(key string) proto.Webhook
}

// Endpoints remembers which URLs of an organisation fail.
type Endpoints interface {
	// Endpoint gives a URL that fails, or is disabled; ok is false for any other.
	Endpoint(org, url string) (e proto.Endpoint, ok bool)
	// Failing records that it fails since a time, unless that is recorded already.
	Failing(ctx context.Context, org, url string, at time.Time) error
	// Disable records that nothing is to be sent there any more, and logs it.
	Disable(ctx context.Context, org, url, reason string, at time.Time) error
	// Enable forgets all that. Its error is [proto.ErrNotFound] where there was nothing.
	Enable(ctx context.Context, org, url string) error
}

// Timers wake.
type Timers interface {
	// Set has wake called with key soon after that time; or twice, or never where what it is kept in was lost. A time that was set for
	// the key before may wake as well.
	Set(ctx context.Context, key string, at time.Time) error
}

// Sender makes one attempt.
type Sender interface {
	Send(ctx context.Context, p send.Post) send.Outcome
}

// Dispatcher sends deliveries. Its fields are set before it runs, and not changed afterwards. Any number of processes may have one;
// one leads at a time.
type Dispatcher struct {
	Deliveries Deliveries
	Records    Records
	Settings   Settings
	Endpoints  Endpoints
	Timers     Timers
	Sender     Sender
	// Lane is how many attempts of an organisation may be on their way to one server at once.
	Lane int
	// MaxBody is the largest body sent, in bytes; outputs are cut to it.
	MaxBody int
	// ResultURL tells where the whole result of an execution is.
	ResultURL func(id proto.TraceID) string
	Log       *slog.Logger
	// Now tells the time of day, which may jump. Deliveries are due by it; all else is measured.
	Now func() time.Time
	// Attempted is told of every attempt that was recorded, and what became of its delivery.
	Attempted func(d *proto.Delivery, a *proto.DeliveryAttempt)

	mu   sync.Mutex
	term *term // nil while another leads
}

// Pending tells how many deliveries wait for an attempt, while this dispatcher leads.
func (d *Dispatcher) Pending() int {
	t := d.leading()
	if t == nil {
		return 0
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	return len(t.book)
}

// Wake is told by the timers that a delivery is due.
func (d *Dispatcher) Wake(key string) {
	if t := d.leading(); t != nil {
		t.wake(proto.TraceID(key))
	}
}

func (d *Dispatcher) leading() *term {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.term
}

// Lead sends what is due until ctx ends or it has lost touch with what is stored, which is its error. Then it lets the attempts end
// that are on their way, until cut ends.
func (d *Dispatcher) Lead(ctx, cut context.Context) error {
	t := &term{
		Dispatcher: d, cut: cut, book: map[proto.TraceID]*entry{}, lanes: newLanes(d.Lane), arm: make(chan alarm, armerQueue),
		reading: make(chan struct{}, readers),
	}
	ctx, stop := context.WithCancel(ctx)
	var helpers sync.WaitGroup
	for range armers {
		helpers.Go(func() { t.arms(ctx) })
	}
	d.mu.Lock()
	d.term = t
	d.mu.Unlock()
	began := time.Now()
	err := d.Deliveries.Follow(ctx, t.take, func() {
		helpers.Go(func() { t.watch(ctx) })
		t.mu.Lock()
		defer t.mu.Unlock()
		t.current = true
		d.Log.Info("webhook dispatcher leads", "pending", len(t.book), "rebuilt_ms", time.Since(began).Milliseconds())
		t.pump()
	}, func(err error) { d.Log.Error("a malformed delivery was passed over", "error", err) })
	stop()
	t.mu.Lock()
	t.over = true
	t.mu.Unlock()
	d.mu.Lock()
	d.term = nil
	d.mu.Unlock()
	helpers.Wait()
	t.flights.Wait()
	if errors.Is(err, context.Canceled) {
		return nil
	}
	return err
}

// Test sends a test to the endpoint of a key at once, and tells what came of it. Its error is [proto.ErrNotFound] where the key has
// none.
func (d *Dispatcher) Test(ctx context.Context, key string) (*proto.DeliveryAttempt, error) {
	settings := d.Settings.Webhook(key)
	if settings.URL == "" {
		return nil, fmt.Errorf("webhook URL of the key: %w", proto.ErrNotFound)
	}
	now := time.Now().UTC()
	body, err := json.Marshal(struct {
		Event     string `json:"event"`
		Timestamp string `json:"timestamp"`
	}{proto.EventTest, now.Format(proto.TimeLayout)})
	if err != nil {
		return nil, err
	}
	o := d.Sender.Send(ctx, send.Post{URL: settings.URL, ID: proto.DeliveryID(proto.NewTraceID()), Body: body, Settings: settings})
	o.Number = 1
	return &o.DeliveryAttempt, nil
}

// entry is a pending delivery.
type entry struct {
	id       proto.TraceID
	revision uint64
	due      time.Time
	lane     *lane
	place    *list.Element // in its lane's line, while its time has come
	flying   bool
	armed    bool // a timer was set for due
}

// alarm is a timer to be set.
type alarm struct {
	id proto.TraceID
	at time.Time
}

// term is one time of leading.
type term struct {
	*Dispatcher
	cut     context.Context
	arm     chan alarm
	reading chan struct{} // holds one for each result that is being read
	flights sync.WaitGroup

	mu      sync.Mutex
	book    map[proto.TraceID]*entry
	lanes   *lanes
	current bool // all that lay in the stream were taken in
	over    bool // nothing more is begun
}

// take takes in a delivery as it is now.
func (t *term) take(c proto.DeliveryChange) {
	t.mu.Lock()
	defer t.mu.Unlock()
	e := t.book[c.TraceID]
	switch {
	case e == nil && c.Due.IsZero():
		return
	case e == nil && !t.current && fault.Planted(fault.RetryInMemory):
		return
	case e == nil:
		e = &entry{id: c.TraceID, lane: t.lanes.enter(laneKey{c.Org, c.Origin})}
		t.book[c.TraceID] = e
	case c.Revision <= e.revision:
		return // our own
	}
	t.place(e, c.Revision, c.Due)
}

// place puts an entry where it belongs; due is zero where nothing more is tried.
func (t *term) place(e *entry, revision uint64, due time.Time) {
	now := time.Now()
	e.revision, e.due, e.armed = revision, due, false
	if e.place != nil {
		t.lanes.drop(e.lane, e, now)
	}
	switch {
	case e.flying: // it is placed when it lands
	case due.IsZero():
		delete(t.book, e.id)
		t.lanes.leave(e.lane)
	default:
		t.schedule(e, now)
	}
}

// schedule has an entry sent when its time comes.
func (t *term) schedule(e *entry, now time.Time) {
	wait := e.due.Sub(t.Now())
	switch {
	case wait <= 0:
		t.lanes.add(e.lane, e, now)
		t.pump()
	case wait < horizon && !e.armed:
		select {
		case t.arm <- alarm{e.id, e.due}:
			e.armed = true
		default: // the next look finds it
		}
	}
}

// arms sets timers.
func (t *term) arms(ctx context.Context) {
	for {
		select {
		case <-ctx.Done():
			return
		case a := <-t.arm:
			if err := t.Timers.Set(ctx, string(a.id), a.at); err != nil && ctx.Err() == nil {
				t.Log.Warn("a timer could not be set, the delivery is found when it is overdue", "trace_id", a.id, "error", err)
			}
		}
	}
}

// wake looks at a delivery that a timer says is due.
func (t *term) wake(id proto.TraceID) {
	t.mu.Lock()
	defer t.mu.Unlock()
	e := t.book[id]
	if e == nil || e.flying || e.place != nil {
		return
	}
	t.schedule(e, time.Now())
}

// watch looks for what timers have missed.
func (t *term) watch(ctx context.Context) {
	tick := time.NewTicker(reconcile)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case now := <-tick.C:
			t.mu.Lock()
			for _, e := range t.book {
				if !e.flying && e.place == nil {
					t.schedule(e, now)
				}
			}
			t.mu.Unlock()
		}
	}
}

// resume lets a lane send again whose pause is over.
func (t *term) resume(n *lane) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.lanes.settle(n, time.Now())
	t.pump()
}

// pump begins the attempts that can be made.
func (t *term) pump() {
	for t.current && !t.over {
		e := t.lanes.next(time.Now())
		if e == nil {
			return
		}
		e.flying = true
		t.flights.Go(func() { t.fly(e) })
	}
}

// landing is how a flight ended.
type landing struct {
	revision uint64    // of the delivery; 0 where it is not stored any more
	due      time.Time // of the next attempt; zero for none
	verdict  *verdict  // nil where no attempt was made
}

// fly makes one attempt of an entry.
func (t *term) fly(e *entry) {
	l, err := t.attempt(t.cut, e.lane.key.org, e.id)
	if err != nil && t.cut.Err() == nil {
		t.Log.Warn("a delivery could not be tried, will be again", "trace_id", e.id, "error", err)
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	now := time.Now()
	if l.verdict != nil {
		t.lanes.judge(e.lane, *l.verdict, now)
		if pause := e.lane.until.Sub(now); pause > 0 {
			time.AfterFunc(pause, func() { t.resume(e.lane) })
		}
	}
	t.lanes.landed(e.lane, now)
	e.flying = false
	switch {
	case err == nil && (l.revision == 0 || l.revision >= e.revision):
		t.place(e, l.revision, l.due)
	case err != nil && !e.due.IsZero() && e.due.Before(t.Now().Add(retryPause)):
		t.place(e, e.revision, t.Now().Add(retryPause))
	default: // take has what it is now
		t.place(e, e.revision, e.due)
	}
	t.pump()
}

// attempt sends a delivery once, unless there is a reason not to, and records what came of it.
func (t *term) attempt(ctx context.Context, org string, id proto.TraceID) (landing, error) {
	d, revision, err := t.Deliveries.Get(ctx, org, id)
	switch {
	case errors.Is(err, proto.ErrNotFound): // its retention is over
		return landing{}, nil
	case err != nil:
		return landing{}, err
	case d.Status != proto.DeliveryPending:
		return landing{revision: revision}, nil
	case t.Now().Before(d.NextAt):
		return landing{revision: revision, due: d.NextAt}, nil
	}
	if e, ok := t.Endpoints.Endpoint(d.Org, d.URL); ok && e.Disabled() {
		return t.giveUp(ctx, d, revision, "the endpoint is disabled: "+e.Reason)
	}
	body, err := t.body(ctx, id)
	if errors.Is(err, proto.ErrNotFound) {
		return t.giveUp(ctx, d, revision, "the result is not kept any more")
	}
	if err != nil {
		return landing{}, err
	}
	settings := t.Settings.Webhook(d.Key)
	o := t.Sender.Send(ctx, send.Post{URL: d.URL, ID: d.ID, Body: body, Settings: settings})
	if ctx.Err() != nil && o.Status == 0 {
		return landing{}, ctx.Err() // cut off by us: it says nothing of the receiver
	}
	fault.Here(fault.AfterPostBeforeRecord)
	v := decide(&o, &settings, d.Made-d.Before+1)
	t.remember(ctx, d, v)
	return t.record(ctx, d, revision, &o, v)
}

// body makes what is sent. Results may be large, so few are read at once.
func (t *term) body(ctx context.Context, id proto.TraceID) ([]byte, error) {
	select {
	case t.reading <- struct{}{}:
		defer func() { <-t.reading }()
	case <-ctx.Done():
		return nil, context.Cause(ctx)
	}
	rec, err := t.Records.Lookup(ctx, id)
	if err != nil {
		return nil, err
	}
	return proto.WebhookBody(rec, t.ResultURL(id), t.MaxBody)
}

// giveUp ends a delivery without an attempt.
func (t *term) giveUp(ctx context.Context, d *proto.Delivery, revision uint64, reason string) (landing, error) {
	d.Status, d.Reason, d.NextAt = proto.DeliveryFailed, reason, time.Time{}
	revision, err := t.Deliveries.Update(ctx, d, revision)
	if err != nil {
		return landing{}, err
	}
	t.Log.Warn("a delivery was given up", "trace_id", d.TraceID, "org", d.Org, "reason", reason)
	return landing{revision: revision}, nil
}

// remember takes in what an attempt said of the URL.
func (t *term) remember(ctx context.Context, d *proto.Delivery, v verdict) {
	now := t.Now()
	e, failing := t.Endpoints.Endpoint(d.Org, d.URL)
	var err error
	switch {
	case v.status == proto.DeliveryDelivered && failing:
		if err = t.Endpoints.Enable(ctx, d.Org, d.URL); errors.Is(err, proto.ErrNotFound) {
			err = nil // somebody else was first
		}
	case v.status == proto.DeliveryDelivered:
	case v.disable == "" && failing && now.Sub(e.FailingSince) >= disabledAfter:
		v.disable = fmt.Sprintf("it has failed since %s", e.FailingSince.UTC().Format(proto.TimeLayout))
		fallthrough
	case v.disable != "":
		err = t.Endpoints.Disable(ctx, d.Org, d.URL, v.disable, now)
	case !failing:
		err = t.Endpoints.Failing(ctx, d.Org, d.URL, now)
	}
	if err != nil && ctx.Err() == nil { // the next attempt says so again
		t.Log.Warn("what is known of an endpoint could not be stored", "org", d.Org, "error", err)
	}
}

// record stores an attempt and what follows from it. One that another dispatcher has come before is recorded too.
func (t *term) record(ctx context.Context, d *proto.Delivery, revision uint64, o *send.Outcome, v verdict) (landing, error) {
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
			return landing{revision: updated, due: d.NextAt, verdict: &v}, nil
		}
		if !errors.Is(err, proto.ErrConflict) {
			return landing{verdict: &v}, err
		}
		if d, revision, err = t.Deliveries.Get(ctx, d.Org, d.TraceID); err != nil {
			return landing{verdict: &v}, err
		}
	}
}

// logAttempt leaves one wide line for the attempt that was recorded last.
func (t *term) logAttempt(ctx context.Context, d *proto.Delivery) {
	a := &d.Attempts[len(d.Attempts)-1]
	t.Attempted(d, a)
	line := []any{
		"trace_id", d.TraceID, "org", d.Org, "key", d.Key, "webhook_id", d.ID, "origin", proto.Origin(d.URL), "attempt", a.Number,
		"status", a.Status, "took_ms", a.Timings.Total, "delivery", d.Status,
	}
	if a.Error != "" {
		line = append(line, "error", a.Error, "detail", a.Detail)
	}
	if !d.NextAt.IsZero() {
		line = append(line, "next_at", d.NextAt.Format(proto.TimeLayout))
	}
	t.Log.InfoContext(ctx, "webhook attempt", line...)
}
