package webhook

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"go.uber.org/goleak"

	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/webhook/send"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// store implements the dependencies of a dispatcher in memory, so that tests can use synctest.
type store struct {
	mu        sync.Mutex
	stored    map[proto.TraceID]proto.Delivery
	revisions map[proto.TraceID]uint64
	last      uint64
	followers []chan proto.DeliveryChange
	settings  map[string]proto.Webhook
	endpoints map[string]proto.Endpoint
	records   map[proto.TraceID]*proto.Record
	wake      func(string)
	noTimers  bool          // timers are lost
	offset    time.Duration // of the time of day
	notFound  int           // reads of deliveries that do not exist
	before    func(d *proto.Delivery)
}

func newStore() *store {
	return &store{
		stored: map[proto.TraceID]proto.Delivery{}, revisions: map[proto.TraceID]uint64{},
		settings:  map[string]proto.Webhook{},
		endpoints: map[string]proto.Endpoint{}, records: map[proto.TraceID]*proto.Record{},
	}
}

func change(d *proto.Delivery, revision uint64) proto.DeliveryChange {
	return proto.DeliveryChange{
		Org: d.Org, TraceID: d.TraceID, Revision: revision, Origin: proto.Origin(d.URL),
		Due: d.NextAt,
	}
}

func (s *store) Follow(
	ctx context.Context, onChange func(proto.DeliveryChange), onCurrent func(), _ func(error),
) error {
	changes := make(chan proto.DeliveryChange, 1<<16)
	s.mu.Lock()
	for id, d := range s.stored {
		changes <- change(&d, s.revisions[id])
	}
	existing := len(changes)
	s.followers = append(s.followers, changes)
	s.mu.Unlock()
	for {
		if existing == 0 {
			onCurrent()
		}
		existing--
		select {
		case c := <-changes:
			onChange(c)
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

func (s *store) Scan(_ context.Context, org string, onChange func(proto.DeliveryChange)) error {
	s.mu.Lock()
	var changes []proto.DeliveryChange
	for id, d := range s.stored {
		if d.Org == org {
			changes = append(changes, change(&d, s.revisions[id]))
		}
	}
	s.mu.Unlock()
	for _, c := range changes {
		onChange(c)
	}
	return nil
}

func (s *store) put(d *proto.Delivery) uint64 {
	s.last++
	s.stored[d.TraceID], s.revisions[d.TraceID] = *d, s.last
	for _, f := range s.followers {
		f <- change(d, s.last)
	}
	return s.last
}

func (s *store) Get(_ context.Context, _ string, id proto.TraceID) (*proto.Delivery, uint64, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	d, ok := s.stored[id]
	if !ok {
		if s.notFound++; s.notFound > 100 {
			panic("too many reads of a delivery that does not exist")
		}
		return nil, 0, proto.ErrNotFound
	}
	d.Attempts = slices.Clone(d.Attempts)
	return &d, s.revisions[id], nil
}

func (s *store) Update(_ context.Context, d *proto.Delivery, revision uint64) (uint64, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if before := s.before; before != nil {
		s.before = nil
		other := s.stored[d.TraceID]
		before(&other)
		s.put(&other)
	}
	if s.revisions[d.TraceID] != revision {
		return 0, proto.ErrConflict
	}
	return s.put(d), nil
}

func (s *store) Lookup(_ context.Context, _ string, id proto.TraceID) (*proto.Record, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if rec := s.records[id]; rec != nil {
		return rec, nil
	}
	return nil, proto.ErrNotFound
}

func (s *store) Webhook(_, key string) proto.Webhook {
	s.mu.Lock()
	defer s.mu.Unlock()
	if w, ok := s.settings[key]; ok {
		return w
	}
	return proto.DefaultWebhook()
}

func (s *store) Endpoint(org, url string) (proto.Endpoint, bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	e, ok := s.endpoints[org+url]
	return e, ok
}

func (s *store) Failing(_ context.Context, org, url string, at time.Time) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if _, ok := s.endpoints[org+url]; !ok {
		s.endpoints[org+url] = proto.Endpoint{URL: url, FailingSince: at}
	}
	return nil
}

func (s *store) Disable(_ context.Context, org, url, reason string, at time.Time) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	e := s.endpoints[org+url]
	e.URL, e.DisabledAt, e.Reason = url, at, reason
	s.endpoints[org+url] = e
	return nil
}

func (s *store) Enable(_ context.Context, org, url string) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.endpoints, org+url)
	return nil
}

func (s *store) Set(_ context.Context, key string, at time.Time) error {
	if s.noTimers {
		return errors.New("timers lost")
	}
	time.AfterFunc(at.Sub(s.now()), func() { s.wake(key) })
	return nil
}

// now returns the time of day, which jump changes.
func (s *store) now() time.Time {
	s.mu.Lock()
	defer s.mu.Unlock()
	return time.Now().Add(s.offset)
}

func (s *store) jump(by time.Duration) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.offset += by
}

// senderFunc is a [Sender].
type senderFunc func(ctx context.Context, p send.Post) send.Outcome

func (f senderFunc) Send(ctx context.Context, p send.Post) send.Outcome { return f(ctx, p) }

func answered(status int) send.Outcome {
	o := send.Outcome{DeliveryAttempt: proto.DeliveryAttempt{At: time.Now(), Status: status}}
	if status >= 300 {
		o.Error = proto.DeliveryRejected
	}
	return o
}

// world is a leading dispatcher and its dependencies.
type world struct {
	*store
	t    *testing.T
	d    *Dispatcher
	stop func() error
}

func newWorld(t *testing.T, r senderFunc) *world {
	t.Helper()
	s := newStore()
	w := &world{store: s, t: t, d: &Dispatcher{
		Deliveries: s, Records: s, Settings: s, Endpoints: s, Timers: s, Sender: r, MaxPerOrigin: 5, MaxPending: 1 << 20,
		Body: func(r *proto.Record) ([]byte, error) {
			return proto.WebhookBody(r, "/v1/executions/"+string(r.TraceID), 1<<20)
		},
		Log: slog.New(slog.NewTextHandler(t.Output(), nil)), Now: s.now,
		OnAttempt: func(*proto.Delivery, *proto.DeliveryAttempt) {},
	}}
	s.wake = w.d.Wake
	ctx, cancel := context.WithCancel(t.Context())
	abort, abortAttempts := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- w.d.Lead(ctx, abort) }()
	w.stop = sync.OnceValue(func() error { cancel(); abortAttempts(); return <-done })
	t.Cleanup(func() {
		if err := w.stop(); err != nil {
			t.Error(err)
		}
	})
	return w
}

// deliver creates a delivery.
func (w *world) deliver(org, url string) proto.TraceID {
	w.t.Helper()
	m := proto.Meta{TraceID: proto.NewTraceID(), Org: org, Key: "k", Mode: proto.ModeAsync, WebhookURL: url}
	result, now := proto.Exited(0), time.Now()
	w.mu.Lock()
	defer w.mu.Unlock()
	w.records[m.TraceID] = &proto.Record{Meta: m, Status: proto.StatusSuccess, Result: &result, CompletedAt: &now}
	w.put(proto.NewDelivery(&m, now))
	return m.TraceID
}

// wantDelivery checks the state of a delivery and returns it. made is -1 for any number of
// attempts.
func (w *world) wantDelivery(id proto.TraceID, status proto.DeliveryStatus, made int, reason string) *proto.Delivery {
	w.t.Helper()
	d, _, err := w.Get(w.t.Context(), "", id)
	if err != nil {
		w.t.Fatal(err)
	}
	if d.Status != status || made >= 0 && d.Made != made || !strings.Contains(d.Reason, reason) ||
		reason == "" && d.Reason != "" {
		w.t.Errorf("%s after %d attempts, %q; want %s after %d, %q", d.Status, d.Made, d.Reason, status, made, reason)
	}
	return d
}

// An event that is not about an execution is posted as it is stored.
func TestEventWithABodyOfItsOwn(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var posted []send.Post
		w := newWorld(t, func(_ context.Context, p send.Post) send.Outcome {
			posted = append(posted, p)
			return answered([]int{500, 200}[len(posted)-1])
		})
		d, err := proto.NewEventDelivery("a tick", "acme", "k", url,
			map[string]string{"event": "schedule.failed"}, time.Now())
		if err != nil {
			t.Fatal(err)
		}
		w.mu.Lock()
		w.put(d)
		w.mu.Unlock()
		time.Sleep(time.Minute)
		synctest.Wait()
		w.wantDelivery(d.TraceID, proto.DeliveryDelivered, 2, "")
		for _, p := range posted {
			if string(p.Body) != `{"event":"schedule.failed"}` || p.ID != d.ID {
				t.Errorf("%s: %s", p.ID, p.Body)
			}
		}
	})
}

const url = "https://hooks.example.com/a"

// isAbout reports whether a is b, within the jitter.
func isAbout(a, b time.Duration) bool {
	return a >= b-b/5 && a <= b+b/5
}

func TestRetries(t *testing.T) {
	for name, tt := range map[string]struct {
		answers []int
		at      []time.Duration // after the attempt before
		status  proto.DeliveryStatus
		reason  string
	}{
		"at once": {[]int{204}, []time.Duration{0}, proto.DeliveryDelivered, ""},
		"second":  {[]int{500, 200}, []time.Duration{0, time.Second}, proto.DeliveryDelivered, ""},
		"third":   {[]int{404, 302, 200}, []time.Duration{0, time.Second, 10 * time.Second}, proto.DeliveryDelivered, ""},
		"never": {
			[]int{500, 400, 301},
			[]time.Duration{0, time.Second, 10 * time.Second},
			proto.DeliveryFailed,
			"no success in 3 attempts",
		},
		"gone":     {[]int{500, 410}, []time.Duration{0, time.Second}, proto.DeliveryFailed, "410"},
		"no reply": {[]int{0, 0, 200}, []time.Duration{0, time.Second, 10 * time.Second}, proto.DeliveryDelivered, ""},
	} {
		for _, noTimers := range []bool{false, true} {
			t.Run(fmt.Sprintf("%s timers lost %v", name, noTimers), func(t *testing.T) {
				synctest.Test(t, func(t *testing.T) {
					var at []time.Time
					w := newWorld(t, func(_ context.Context, p send.Post) send.Outcome {
						o := answered(tt.answers[len(at)])
						if o.Status == 0 {
							o.Error = proto.DeliveryTimeout
						}
						at = append(at, time.Now())
						return o
					})
					w.noTimers = noTimers
					began := time.Now()
					id := w.deliver("acme", url)
					time.Sleep(2 * time.Minute)
					synctest.Wait()
					d := w.wantDelivery(id, tt.status, len(tt.answers), tt.reason)
					last := began
					for i, want := range tt.at {
						got := at[i].Sub(last)
						last = at[i]
						if !isAbout(got, want) && (!noTimers || got > want+reconcileEvery+time.Second) {
							t.Errorf("attempt %d came after %s, want %s", i+1, got, want)
						}
						if d.Attempts[i].Number != i+1 || d.Attempts[i].Status != tt.answers[i] {
							t.Errorf("attempt %d: %+v", i+1, d.Attempts[i])
						}
					}
				})
			})
		}
	}
}

// The time of day jumps while deliveries wait for their second attempts. Each is made once, within
// the limits, and none later than the jump.
func TestClockJumps(t *testing.T) {
	const many, jump = 50, time.Hour
	for name, jumps := range map[string][]time.Duration{
		"forwards": {jump}, "backwards": {-jump}, "forwards and back": {jump, -jump}, "backwards and on again": {-jump, jump},
	} {
		for _, noTimers := range []bool{false, true} {
			t.Run(fmt.Sprintf("%s timers lost %v", name, noTimers), func(t *testing.T) {
				synctest.Test(t, func(t *testing.T) {
					var mu sync.Mutex
					attempts, inFlight := map[string][]time.Time{}, 0
					w := newWorld(t, func(_ context.Context, p send.Post) send.Outcome {
						mu.Lock()
						inFlight++
						if inFlight > 5 {
							t.Errorf("%d at once", inFlight)
						}
						first := len(attempts[p.ID]) == 0
						attempts[p.ID] = append(attempts[p.ID], time.Now())
						mu.Unlock()
						time.Sleep(time.Millisecond)
						mu.Lock()
						inFlight--
						mu.Unlock()
						if first {
							return answered(500)
						}
						return answered(200)
					})
					w.noTimers = noTimers
					settings := proto.DefaultWebhook()
					settings.Waits = []proto.Seconds{proto.Seconds(30 * time.Second)}
					w.settings["k"] = settings
					began := time.Now()
					var ids []proto.TraceID
					for range many {
						ids = append(ids, w.deliver("acme", url))
					}
					for _, by := range jumps {
						time.Sleep(2 * time.Second)
						synctest.Wait()
						w.jump(by)
					}
					time.Sleep(2 * jump)
					synctest.Wait()
					for _, id := range ids {
						w.wantDelivery(id, proto.DeliveryDelivered, 2, "")
						at := attempts[proto.DeliveryID(id)]
						if late := at[1].Sub(began); late > jump+2*time.Minute || jumps[len(jumps)-1] > 0 && late > 2*time.Minute {
							t.Errorf("the second attempt came after %s", late)
						}
					}
				})
			})
		}
	}
}

func TestGoneDisablesOneURL(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var gone atomic.Int64
		gone.Store(http.StatusGone)
		w := newWorld(t, func(_ context.Context, p send.Post) send.Outcome {
			if p.URL == url {
				return answered(int(gone.Load()))
			}
			return answered(200)
		})
		first := w.deliver("acme", url)
		synctest.Wait()
		w.wantDelivery(first, proto.DeliveryFailed, 1, "410")
		second, neighbour, other := w.deliver("acme", url), w.deliver("acme", url+"b"), w.deliver("other", url+"b")
		synctest.Wait()
		w.wantDelivery(second, proto.DeliveryFailed, 0, "disabled")
		w.wantDelivery(neighbour, proto.DeliveryDelivered, 1, "")
		w.wantDelivery(other, proto.DeliveryDelivered, 1, "")
		if err := w.Enable(t.Context(), "acme", url); err != nil {
			t.Fatal(err)
		}
		gone.Store(200)
		w.mu.Lock()
		d := w.stored[second]
		d.Replay(time.Now())
		w.put(&d)
		w.mu.Unlock()
		synctest.Wait()
		w.wantDelivery(second, proto.DeliveryDelivered, 1, "")
	})
}

func TestURLThatFailsForDaysIsDisabled(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var status atomic.Int64
		status.Store(500)
		w := newWorld(t, func(context.Context, send.Post) send.Outcome { return answered(int(status.Load())) })
		w.settings["k"] = proto.Webhook{MaxAttempts: 20, Waits: []proto.Seconds{proto.Seconds(8 * time.Hour)}}
		id := w.deliver("acme", url)
		time.Sleep(30 * time.Hour)
		status.Store(200)
		time.Sleep(10 * time.Hour)
		synctest.Wait()
		w.wantDelivery(id, proto.DeliveryDelivered, -1, "")
		if e, failing := w.Endpoint("acme", url); failing {
			t.Fatalf("after a success: %+v", e)
		}
		status.Store(500)
		id = w.deliver("acme", url)
		time.Sleep(7 * 24 * time.Hour)
		synctest.Wait()
		w.wantDelivery(id, proto.DeliveryFailed, -1, "disabled: it has failed since")
	})
}

func TestRetryAfter(t *testing.T) {
	for asked, want := range map[time.Duration]time.Duration{
		0: time.Second, 30 * time.Second: 30 * time.Second, 90 * time.Minute: 90 * time.Minute,
		1000 * time.Hour: maxRetryAfter,
	} {
		t.Run(asked.String(), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				var mu sync.Mutex
				var at []time.Time
				w := newWorld(t, func(context.Context, send.Post) send.Outcome {
					mu.Lock()
					defer mu.Unlock()
					at = append(at, time.Now())
					if len(at) > 1 {
						return answered(200)
					}
					o := answered(http.StatusTooManyRequests)
					o.RetryAfter = asked
					return o
				})
				id := w.deliver("acme", url)
				synctest.Wait()
				other := w.deliver("acme", url+"/other") // the same server
				time.Sleep(25 * time.Hour)
				synctest.Wait()
				w.wantDelivery(id, proto.DeliveryDelivered, 2, "")
				w.wantDelivery(other, proto.DeliveryDelivered, 1, "")
				if first := at[1].Sub(at[0]); asked > 0 && (first < want || first > want+reconcileEvery) {
					t.Errorf("the next attempt came after %s, want %s", first, want)
				}
			})
		})
	}
}

// hang blocks until the attempt times out.
func hang(ctx context.Context) send.Outcome {
	select {
	case <-time.After(15 * time.Second):
	case <-ctx.Done():
	}
	return send.Outcome{DeliveryAttempt: proto.DeliveryAttempt{Error: proto.DeliveryTimeout}}
}

func TestReceiverThatHangsBlocksItsOwnQueueOnly(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var mu sync.Mutex
		waiting, most := 0, 0
		w := newWorld(t, func(ctx context.Context, p send.Post) send.Outcome {
			if !strings.Contains(p.URL, "dead") {
				return answered(200)
			}
			mu.Lock()
			waiting++
			most = max(most, waiting)
			mu.Unlock()
			o := hang(ctx)
			mu.Lock()
			waiting--
			mu.Unlock()
			return o
		})
		w.settings["k"] = proto.Webhook{MaxAttempts: 2, Waits: []proto.Seconds{proto.Seconds(time.Second)}}
		var dead []proto.TraceID
		for range 40 {
			dead = append(dead, w.deliver("acme", "https://dead.example.com/"))
		}
		began := time.Now()
		for i := range 99 {
			id := w.deliver("acme", fmt.Sprintf("https://h%d.example.com/", i))
			synctest.Wait()
			w.wantDelivery(id, proto.DeliveryDelivered, 1, "")
		}
		if time.Since(began) != 0 {
			t.Errorf("the others took %s", time.Since(began))
		}
		mu.Lock()
		if most != 5 {
			t.Errorf("%d attempts at once, want 5", most)
		}
		mu.Unlock()
		time.Sleep(10 * time.Minute)
		mu.Lock()
		if waiting > 1 {
			t.Errorf("%d attempts at once with an open breaker, want one", waiting)
		}
		mu.Unlock()
		time.Sleep(5 * time.Hour) // no delivery is dropped
		synctest.Wait()
		for _, id := range dead {
			w.wantDelivery(id, proto.DeliveryFailed, 2, "no success in 2 attempts")
		}
	})
}

func TestOrganisationWithManyDeadReceiversBlocksItsOwnShare(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var mu sync.Mutex
		waiting := 0
		w := newWorld(t, func(ctx context.Context, p send.Post) send.Outcome {
			if !strings.Contains(p.URL, "dead") {
				return answered(200)
			}
			mu.Lock()
			waiting++
			mu.Unlock()
			return hang(ctx)
		})
		for i := range maxInFlightPerOrg {
			w.deliver("hostile", fmt.Sprintf("https://dead%d.example.com/", i))
			w.deliver("hostile", fmt.Sprintf("https://dead%d.example.com/", i))
		}
		synctest.Wait()
		if waiting != maxInFlightPerOrg {
			t.Errorf("%d attempts at once, want %d", waiting, maxInFlightPerOrg)
		}
		id := w.deliver("acme", url)
		synctest.Wait()
		w.wantDelivery(id, proto.DeliveryDelivered, 1, "")
	})
}

func TestAttemptIsRecordedAfterAConcurrentChange(t *testing.T) {
	for name, tt := range map[string]struct {
		other  proto.DeliveryStatus
		answer int
		status proto.DeliveryStatus
	}{
		"delivered here":  {proto.DeliveryPending, 200, proto.DeliveryDelivered},
		"delivered there": {proto.DeliveryDelivered, 500, proto.DeliveryDelivered},
		"failed there":    {proto.DeliveryFailed, 200, proto.DeliveryDelivered},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				w := newWorld(t, func(context.Context, send.Post) send.Outcome { return answered(tt.answer) })
				w.mu.Lock()
				w.before = func(d *proto.Delivery) {
					d.Record(proto.DeliveryAttempt{Status: 599})
					if d.Status = tt.other; d.Status != proto.DeliveryPending {
						d.NextAt = time.Time{}
					}
				}
				w.mu.Unlock()
				id := w.deliver("acme", url)
				synctest.Wait()
				if d := w.wantDelivery(id, tt.status, 2, ""); d.Attempts[0].Status != 599 || d.Attempts[1].Status != tt.answer ||
					d.Attempts[1].Number != 2 {
					t.Errorf("%+v", d.Attempts)
				}
			})
		})
	}
}

func TestDeliveryWithoutResultFails(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, func(context.Context, send.Post) send.Outcome { return answered(200) })
		w.mu.Lock()
		m := proto.Meta{TraceID: proto.NewTraceID(), Org: "acme", Mode: proto.ModeAsync, WebhookURL: url}
		w.put(proto.NewDelivery(&m, time.Now()))
		w.mu.Unlock()
		synctest.Wait()
		w.wantDelivery(m.TraceID, proto.DeliveryFailed, 0, "not kept any more")
	})
}

// A delivery past its retention is read once more, and dropped.
func TestDeliveryThatNoLongerExistsIsDropped(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, func(context.Context, send.Post) send.Outcome { return answered(500) })
		id := w.deliver("acme", url)
		synctest.Wait()
		w.mu.Lock()
		delete(w.stored, id)
		w.notFound = 0
		w.mu.Unlock()
		time.Sleep(time.Minute)
		synctest.Wait()
		if n := w.d.Pending(); n != 0 || w.notFound != 1 {
			t.Errorf("%d pending, %d reads", n, w.notFound)
		}
	})
}

// Lead waits for the attempts in flight, and begins no more.
func TestLeadWaitsForAttemptsInFlight(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, func(context.Context, send.Post) send.Outcome {
			time.Sleep(time.Second)
			return answered(200)
		})
		var ids []proto.TraceID
		for range 7 {
			ids = append(ids, w.deliver("acme", url))
		}
		synctest.Wait()
		if err := w.stop(); err != nil {
			t.Fatal(err)
		}
		counts := map[proto.DeliveryStatus]int{}
		for _, id := range ids {
			counts[w.stored[id].Status]++
		}
		if counts[proto.DeliveryDelivered] != 5 || counts[proto.DeliveryPending] != 2 {
			t.Errorf("%v", counts)
		}
	})
}

// The deliveries of one organisation that do not fit in memory wait in the store. They neither get
// lost nor keep out others.
func TestPendingDeliveriesAreBounded(t *testing.T) {
	for name, answer := range map[string]int{"slow": http.StatusOK, "failing": http.StatusInternalServerError} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				const most, many = 8 * orgShare, 100
				var sent atomic.Int32
				w := newWorld(t, func(_ context.Context, p send.Post) send.Outcome {
					time.Sleep(time.Second)
					if p.URL == url && sent.Add(1) <= many {
						return answered(answer)
					}
					return answered(http.StatusOK)
				})
				w.d.MaxPending = most
				retryLater := proto.DefaultWebhook()
				retryLater.Waits = []proto.Seconds{proto.Seconds(time.Hour)}
				w.mu.Lock()
				w.settings["k"] = retryLater
				w.mu.Unlock()
				var ids []proto.TraceID
				for range many {
					ids = append(ids, w.deliver("acme", url))
					if n := w.d.Pending(); n > most/orgShare {
						t.Fatalf("%d deliveries of one organisation are in memory", n)
					}
				}
				other := w.deliver("other", url+"/other")
				time.Sleep(2 * time.Second)
				w.wantDelivery(other, proto.DeliveryDelivered, 1, "")
				time.Sleep(6 * time.Hour)
				synctest.Wait()
				for _, id := range ids {
					w.wantDelivery(id, proto.DeliveryDelivered, -1, "")
				}
				if n := w.d.Pending(); n != 0 {
					t.Errorf("%d deliveries are left", n)
				}
			})
		})
	}
}
