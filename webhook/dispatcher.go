// Package webhook delivers the results of executions to their receivers: signed, retried, with one
// queue for each organisation and origin, and every attempt recorded.
//
// The record of each delivery, changed by compare-and-set, is authoritative. The state in memory
// can be rebuilt from the records at any time, and timers only wake the dispatcher. Storage of
// records, settings and timers is left to the interfaces below.
package webhook

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"time"

	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/webhook/send"
)

// Deliveries stores the deliveries.
type Deliveries interface {
	// Follow calls onChange with every existing delivery and then with every change. It calls
	// onCurrent once, after the last delivery that existed at the start. It returns when ctx is
	// done, or with an error if it may have missed changes.
	Follow(ctx context.Context, onChange func(proto.DeliveryChange), onCurrent func(), onMalformed func(error)) error
	// Scan calls onChange with every delivery of an organisation.
	Scan(ctx context.Context, org string, onChange func(proto.DeliveryChange)) error
	// Get returns a delivery and its revision, or [proto.ErrNotFound].
	Get(ctx context.Context, org string, id proto.TraceID) (*proto.Delivery, uint64, error)
	// Update replaces the delivery at the given revision and returns the new revision. It retries
	// until ctx is done. It returns [proto.ErrConflict] if the revision is not the newest.
	Update(ctx context.Context, d *proto.Delivery, revision uint64) (uint64, error)
}

// Records reads executions.
type Records interface {
	// Lookup returns the record of an execution, or [proto.ErrNotFound].
	Lookup(ctx context.Context, org string, id proto.TraceID) (*proto.Record, error)
}

// Settings reads the webhook settings of API keys.
type Settings interface {
	// Webhook returns the settings of a key of an organisation, or the defaults.
	Webhook(org, key string) proto.Webhook
}

// Endpoints stores which URLs of an organisation fail.
type Endpoints interface {
	// Endpoint returns a URL that fails or is disabled; ok is false for any other.
	Endpoint(org, url string) (e proto.Endpoint, ok bool)
	// Failing records since when a URL has failed, unless that is recorded already.
	Failing(ctx context.Context, org, url string, at time.Time) error
	// Disable records and logs that a URL is disabled.
	Disable(ctx context.Context, org, url, reason string, at time.Time) error
	// Enable removes the record of a URL. It returns [proto.ErrNotFound] if there is none.
	Enable(ctx context.Context, org, url string) error
}

// Timers call [Dispatcher.Wake].
type Timers interface {
	// Set schedules a wake-up for key. The wake-up may be repeated or lost, and it does not cancel
	// an earlier one.
	Set(ctx context.Context, key string, at time.Time) error
}

// Sender makes one attempt.
type Sender interface {
	Send(ctx context.Context, p send.Post) send.Outcome
}

// Dispatcher sends deliveries. Any number of processes may have one; one of them leads at a time.
// The fields are set before Lead and not changed afterwards.
type Dispatcher struct {
	Deliveries Deliveries
	Records    Records
	Settings   Settings
	Endpoints  Endpoints
	Timers     Timers
	Sender     Sender
	// MaxPerOrigin is the number of concurrent attempts of an organisation to one origin.
	MaxPerOrigin int
	// MaxPending is the number of pending deliveries that are held in memory. The others wait in the
	// store. One organisation gets a part of it, see orgShare.
	MaxPending int
	// Body returns the body of the webhook of an execution that has ended.
	Body func(r *proto.Record) ([]byte, error)
	Log  *slog.Logger
	// Now returns the wall-clock time, which may jump. It decides when deliveries are due.
	// Everything else uses the monotonic clock.
	Now func() time.Time
	// OnAttempt is called with every recorded attempt and its delivery.
	OnAttempt func(d *proto.Delivery, a *proto.DeliveryAttempt)

	mu   sync.Mutex
	term *term // nil while another process leads
}

// Pending returns the number of pending deliveries in memory, or 0 while another process leads.
func (d *Dispatcher) Pending() int {
	t := d.current()
	if t == nil {
		return 0
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	return len(t.pending)
}

// Wake makes the dispatcher check whether the delivery of an execution is due.
func (d *Dispatcher) Wake(traceID string) {
	if t := d.current(); t != nil {
		t.wake(proto.TraceID(traceID))
	}
}

func (d *Dispatcher) current() *term {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.term
}

func (d *Dispatcher) setCurrent(t *term) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.term = t
}

// Lead sends due deliveries until ctx is done or changes may have been missed. It then waits for
// the attempts in flight, which are aborted when abort is done.
func (d *Dispatcher) Lead(ctx, abort context.Context) error {
	t := newTerm(abort, d)
	ctx, stop := context.WithCancel(ctx)
	var helpers sync.WaitGroup
	for range timerSetters {
		helpers.Go(func() { t.setTimers(ctx) })
	}
	d.setCurrent(t)
	began := time.Now()
	err := d.Deliveries.Follow(ctx, t.onChange, func() {
		helpers.Go(func() { t.reconcileLoop(ctx) })
		n := t.start()
		d.Log.Info("webhook dispatcher leads", "pending", n, "rebuilt_ms", time.Since(began).Milliseconds())
	}, func(err error) { d.Log.Error("malformed delivery ignored", "error", err) })
	stop()
	t.stop()
	d.setCurrent(nil)
	helpers.Wait()
	t.attempts.Wait()
	if errors.Is(err, context.Canceled) {
		return nil
	}
	return err
}

// Test sends a test event to the URL of a key of an organisation and returns the attempt. It returns
// [proto.ErrNotFound] if the key has no URL.
func (d *Dispatcher) Test(ctx context.Context, org, key string) (*proto.DeliveryAttempt, error) {
	settings := d.Settings.Webhook(org, key)
	if settings.URL == "" {
		return nil, fmt.Errorf("webhook URL of the key: %w", proto.ErrNotFound)
	}
	body, err := json.Marshal(struct {
		Event     string `json:"event"`
		Timestamp string `json:"timestamp"`
	}{proto.EventTest, time.Now().UTC().Format(proto.TimeLayout)})
	if err != nil {
		return nil, err
	}
	o := d.Sender.Send(ctx, send.Post{
		URL: settings.URL, ID: proto.DeliveryID(proto.NewTraceID()), Body: body,
		Settings: settings,
	})
	o.Number = 1
	return &o.DeliveryAttempt, nil
}
