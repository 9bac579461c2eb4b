package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/netip"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/scheduler/deliveries"
	"github.com/bullpen-run/bullpen/scheduler/natsembed"
	"github.com/bullpen-run/bullpen/scheduler/queue"
	"github.com/bullpen-run/bullpen/scheduler/registry"
	"github.com/bullpen-run/bullpen/scheduler/store"
	"github.com/bullpen-run/bullpen/scheduler/timer"
	"github.com/bullpen-run/bullpen/webhook"
	"github.com/bullpen-run/bullpen/webhook/guard"
	"github.com/bullpen-run/bullpen/webhook/send"
)

// How webhooks are measured: receivers in this process, and a dispatcher on a store of its own, as the server puts them together.
// Executions would be far too slow to keep them busy, so results are written as the queue writes them.
const (
	endpoints     = 100
	webhookRate   = 200 // deliveries a second while latency is measured
	webhookTurns  = 4   // with all receivers alive, and with a dead one
	webhookOrg    = "bench"
	pendingHooks  = 100_000
	storeReserve  = 64 << 20
	writersAtOnce = 32
	testRetention = time.Hour
	resumeWithin  = time.Minute
	pendingFor    = 5 * time.Minute       // until the first of the pending ones is due
	pendingGap    = 10 * time.Millisecond // and each next one
)

// webhooks is what was measured of them. Latencies are from the result to the receiver's first byte.
type webhooks struct {
	PerSecond    float64  `json:"per_second"`
	Sent         int      `json:"sent"` // at that rate
	Latency      *summary `json:"latency_ms"`
	DeadOnes     *summary `json:"latency_beside_a_dead_endpoint_ms"`
	Pending      int      `json:"pending"` // deliveries that wait for a retry
	PendingMB    float64  `json:"pending_mb"`
	ResumeMillis float64  `json:"resume_ms"` // from the start of a server with those to when it has them all
}

// measureWebhooks measures deliveries; dir is for their store.
func measureWebhooks(ctx context.Context, program, dir string, quick bool, d time.Duration) (*webhooks, error) {
	w := &webhooks{Sent: 10_000, Pending: pendingHooks}
	if quick {
		w.Sent, w.Pending = 1000, pendingHooks/10
	}
	h, err := openHooks(ctx, filepath.Join(dir, "webhooks"))
	if err != nil {
		return nil, err
	}
	err = func() error {
		if w.PerSecond, err = h.rate(ctx, w.Sent); err != nil {
			return err
		}
		// In turn, since what else the machine does weighs more than the dead one.
		sides := map[bool][]float64{}
		for range webhookTurns {
			for _, dead := range []bool{false, true} {
				h.receivers[0].dead.Store(dead)
				took, err := h.latency(ctx, d/webhookTurns)
				if err != nil {
					return err
				}
				sides[dead] = append(sides[dead], took...)
			}
		}
		w.Latency, w.DeadOnes = summarise(sides[false]), summarise(sides[true])
		return nil
	}()
	if err = errors.Join(err, h.close()); err != nil {
		return nil, fmt.Errorf("measure webhooks: %w", err)
	}
	w.PendingMB, w.ResumeMillis, err = resume(ctx, program, filepath.Join(dir, "pending"), w.Pending)
	if err != nil {
		return nil, fmt.Errorf("measure pending webhooks: %w", err)
	}
	return w, nil
}

// hooks is a dispatcher that leads, and its receivers.
type hooks struct {
	*stored
	receivers []*receiver
	first     sync.Map // id of a delivery -> chan time.Time: when its first byte came
	stop      context.CancelFunc
	led       chan error
	timers    *timer.Timers
}

// stored is a store of results and deliveries.
type stored struct {
	server     *natsembed.Server
	store      *store.Store
	deliveries *deliveries.Store
}

func openStored(ctx context.Context, dir string) (*stored, error) {
	quiet := slog.New(slog.DiscardHandler)
	server, err := natsembed.Open(dir, storeReserve, quiet)
	if err != nil {
		return nil, err
	}
	st, err := store.Connect(ctx, store.Access{InProcess: server, Name: "bench"}, store.Config{Replicas: 1, Retention: testRetention}, quiet)
	if err != nil {
		server.Close()
		return nil, err
	}
	return &stored{server: server, store: st, deliveries: &deliveries.Store{Store: st}}, nil
}

func (s *stored) close() {
	s.store.Close()
	s.server.Close()
}

// each calls f for each number below n, several at once.
func each(n int, f func(i int) error) error {
	next := make(chan int)
	errs := make(chan error, writersAtOnce)
	var all sync.WaitGroup
	for range writersAtOnce {
		all.Go(func() {
			for i := range next {
				if err := f(i); err != nil {
					errs <- err
					return
				}
			}
		})
	}
	var err error
	for i := 0; i < n && err == nil; i++ {
		select {
		case next <- i:
		case err = <-errs:
		}
	}
	close(next)
	all.Wait()
	if err == nil && len(errs) > 0 {
		err = <-errs
	}
	return err
}

func openHooks(ctx context.Context, dir string) (h *hooks, err error) {
	h = &hooks{led: make(chan error, 1), stop: func() {}}
	if h.stored, err = openStored(ctx, dir); err != nil {
		return nil, err
	}
	quiet := slog.New(slog.DiscardHandler)
	settings, err := registry.OpenWebhooks(ctx, h.store, quiet)
	if err != nil {
		return nil, errors.Join(err, h.close())
	}
	for range endpoints {
		r, err := h.listen(ctx)
		if err != nil {
			return nil, errors.Join(err, h.close())
		}
		h.receivers = append(h.receivers, r)
	}
	urls, err := guard.New(guard.Config{AllowCIDRs: []netip.Prefix{netip.MustParsePrefix("127.0.0.0/8")}, AllowHTTP: true, AllowPorts: h.ports()})
	if err != nil {
		return nil, errors.Join(err, h.close())
	}
	if h.timers, err = timer.Open(ctx, timer.Config{Log: quiet}); err != nil {
		return nil, errors.Join(err, h.close())
	}
	d := &webhook.Dispatcher{
		Deliveries: h.deliveries, Records: &queue.Queue{Store: h.store}, Settings: settings, Endpoints: settings, Timers: h.timers,
		Sender: &send.Sender{Guard: urls, UserAgent: "bullpen/bench"}, MaxPerOrigin: 5, MaxBody: 1 << 20, Log: quiet,
		ResultURL: func(id proto.TraceID) string { return "/v1/executions/" + string(id) },
		OnAttempt: func(*proto.Delivery, *proto.DeliveryAttempt) {},
		Now:       time.Now,
	}
	run, stop := context.WithCancel(context.WithoutCancel(ctx))
	h.stop = stop
	go func() {
		woken := make(chan error, 1)
		go func() { woken <- h.timers.Run(run, d.Wake) }()
		h.led <- errors.Join(d.Lead(run, run), <-woken)
	}()
	return h, nil
}

func (h *hooks) close() error {
	h.stop()
	var err error
	if h.timers != nil {
		err = <-h.led
		h.timers.Close()
	}
	for _, r := range h.receivers {
		_ = r.server.Close()
	}
	h.stored.close()
	return err
}

func (h *hooks) ports() (ports []int) {
	for _, r := range h.receivers {
		ports = append(ports, r.port)
	}
	return ports
}

// receiver takes webhooks in.
type receiver struct {
	server *http.Server
	port   int
	dead   atomic.Bool // it answers nothing
}

func (r *receiver) url() string { return "http://127.0.0.1:" + strconv.Itoa(r.port) + "/" }

// listen starts a receiver.
func (h *hooks) listen(ctx context.Context) (*receiver, error) {
	listener, err := new(net.ListenConfig).Listen(ctx, "tcp", "127.0.0.1:0")
	if err != nil {
		return nil, fmt.Errorf("start a receiver: %w", err)
	}
	r := &receiver{port: listener.Addr().(*net.TCPAddr).Port}
	r.server = &http.Server{ReadHeaderTimeout: time.Minute, Handler: http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
		now := time.Now()
		_, _ = io.Copy(io.Discard, req.Body)
		if r.dead.Load() {
			<-req.Context().Done()
			return
		}
		if arrived, ok := h.first.LoadAndDelete(req.Header.Get("webhook-id")); ok {
			arrived.(chan time.Time) <- now
		}
		w.WriteHeader(http.StatusNoContent)
	})}
	go func() { _ = r.server.Serve(listener) }()
	return r, nil
}

// end writes the result of an execution, and makes its delivery to a URL, as the queue does; one that has failed once waits until next. The delivery is not stored yet.
func (s *stored) end(ctx context.Context, url string, next time.Time) (*proto.Delivery, error) {
	now := time.Now()
	result := proto.Exited(0)
	result.Stdout = "1\n"
	m := proto.Meta{TraceID: proto.NewTraceID(), Org: webhookOrg, Key: webhookOrg, Mode: proto.ModeAsync, WebhookURL: url, CreatedAt: now}
	rec := &proto.Record{Meta: m, Status: proto.StatusSuccess, Attempt: 1, CompletedAt: &now, Result: &result}
	if _, err := s.store.WriteRecord(ctx, rec, 0); err != nil {
		return nil, err
	}
	d := proto.NewDelivery(&m, now)
	if !next.IsZero() {
		d.Record(proto.DeliveryAttempt{At: now, Status: http.StatusServiceUnavailable, Error: proto.DeliveryRejected})
		d.NextAt = next
	}
	return d, nil
}

// rate gives how many deliveries a second n of them take from when all results are there.
func (h *hooks) rate(ctx context.Context, n int) (float64, error) {
	all := make([]*proto.Delivery, n)
	if err := each(n, func(i int) (err error) {
		all[i], err = h.end(ctx, h.receivers[i%endpoints].url(), time.Time{})
		return err
	}); err != nil {
		return 0, err
	}
	arrived := make(chan time.Time, n)
	for _, d := range all {
		h.first.Store(d.ID, arrived)
	}
	began := time.Now()
	if err := each(n, func(i int) error { return h.deliveries.Create(ctx, all[i]) }); err != nil {
		return 0, err
	}
	for range n {
		select {
		case <-arrived:
		case <-ctx.Done():
			return 0, context.Cause(ctx)
		}
	}
	return float64(n) / time.Since(began).Seconds(), nil
}

// latency has results come at a rate for some time, to all receivers in turn, and gives how long they take to get to those that answer.
func (h *hooks) latency(ctx context.Context, d time.Duration) (took []float64, failed error) {
	tick := time.NewTicker(time.Second / webhookRate)
	defer tick.Stop()
	n := int(d.Seconds() * webhookRate)
	var mu sync.Mutex
	var all sync.WaitGroup
	for i := range n {
		select {
		case <-tick.C:
		case <-ctx.Done():
			return nil, context.Cause(ctx)
		}
		r := h.receivers[i%endpoints]
		all.Go(func() {
			began := time.Now()
			delivery, err := h.end(ctx, r.url(), time.Time{})
			arrived := make(chan time.Time, 1)
			if err == nil {
				if !r.dead.Load() {
					h.first.Store(delivery.ID, arrived)
				}
				err = h.deliveries.Create(ctx, delivery)
			}
			if err == nil && r.dead.Load() {
				return
			}
			var at time.Time
			if err == nil {
				select {
				case at = <-arrived:
				case <-ctx.Done():
					err = context.Cause(ctx)
				}
			}
			mu.Lock()
			defer mu.Unlock()
			if failed = errors.Join(failed, err); err == nil {
				took = append(took, float64(at.Sub(began).Microseconds())/1000)
			}
		})
	}
	all.Wait()
	return took, failed
}

// resume starts the server with the results of n executions, and again with deliveries of them that wait for a retry. It gives how much
// more memory it takes with those, and how long until it has them all.
func resume(ctx context.Context, program, dir string, n int) (mb, ms float64, err error) {
	var bare float64
	for _, pending := range []int{0, n} {
		here := filepath.Join(dir, strconv.Itoa(pending))
		s, err := openStored(ctx, filepath.Join(here, "data"))
		if err != nil {
			return 0, 0, err
		}
		err = each(n, func(i int) error {
			d, err := s.end(ctx, fmt.Sprintf("https://h%d.example.com/", i%1000), time.Now().Add(pendingFor+time.Duration(i)*pendingGap))
			if err != nil || pending == 0 {
				return err
			}
			return s.deliveries.Create(ctx, d)
		})
		s.close()
		if err != nil {
			return 0, 0, err
		}
		began := time.Now()
		t, err := startServer(ctx, program, here)
		if err != nil {
			return 0, 0, err
		}
		if ms, err = t.resumed(ctx, began, pending); err == nil {
			mb, err = idleMemory(ctx, t)
		}
		if err = errors.Join(err, t.close()); err != nil {
			return 0, 0, err
		}
		if pending == 0 {
			bare = mb
		}
	}
	return mb - bare, ms, nil
}

// resumed waits until the server says that it has all pending deliveries, and gives the milliseconds since it was started.
func (t *target) resumed(ctx context.Context, began time.Time, pending int) (float64, error) {
	ctx, cancel := context.WithTimeout(ctx, resumeWithin)
	defer cancel()
	for {
		body, err := t.get(ctx, "/metrics")
		for line := range strings.Lines(string(body)) {
			text, ok := strings.CutPrefix(line, "bullpen_webhook_pending ")
			if n, parse := strconv.ParseFloat(strings.TrimSpace(text), 64); ok && parse == nil && int(n) >= pending {
				return float64(time.Since(began).Microseconds()) / 1000, nil
			}
		}
		select {
		case <-ctx.Done():
			return 0, fmt.Errorf("the server did not have %d pending webhooks within %s: %w%s", pending, resumeWithin, err, t.tail())
		case <-time.After(readyPoll):
		}
	}
}
