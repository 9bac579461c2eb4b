package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/bullpen-run/bullpen/proto"
)

// Parameters for measuring webhooks. The receivers are in this process, and a separate server runs
// a program for each webhook.
const (
	endpoints     = 100
	perEndpoint   = 5  // webhooks that the server sends to one endpoint concurrently
	webhookRate   = 20 // executions per second while latency is measured
	webhookTurns  = 4  // with all receivers alive, and with a dead one
	sentHooks     = 3000
	quickSent     = 700 // more than all endpoints hold at once
	pendingHooks  = 10_000
	quickPending  = 300
	writersAtOnce = 32
	resumeWithin  = time.Minute
	hooksWithin   = 5 * time.Minute // for all executions of one measurement
	webhookRetry  = "[3600]"        // seconds until a refused webhook is sent again
)

// webhooks holds the figures of webhook delivery. Latencies are from the end of the execution to
// the first byte at the receiver.
type webhooks struct {
	PerSecond    float64  `json:"per_second"`
	Sent         int      `json:"sent"` // at that rate
	Latency      *summary `json:"latency_ms"`
	DeadOnes     *summary `json:"latency_beside_a_dead_endpoint_ms"`
	Pending      int      `json:"pending"` // deliveries that wait for a retry
	PendingMB    float64  `json:"pending_mb"`
	ResumeMillis float64  `json:"resume_ms"` // from the start of a server until it has loaded all pending deliveries
}

// measureWebhooks measures deliveries. dir holds the data of the servers.
func measureWebhooks(ctx context.Context, program, dir string, quick bool, d time.Duration) (*webhooks, error) {
	w := &webhooks{Sent: sentHooks, Pending: pendingHooks}
	if quick {
		w.Sent, w.Pending = quickSent, quickPending
	}
	receivers, err := startReceivers(ctx)
	if err != nil {
		return nil, err
	}
	defer receivers.close()
	err = receivers.serve(ctx, program, filepath.Join(dir, "webhooks"), func(t *target) error {
		if w.PerSecond, err = receivers.rate(ctx, t, w.Sent); err != nil {
			return err
		}
		sides := map[bool][]float64{}
		for range webhookTurns { // alternating, because other load on the machine outweighs the effect of the dead endpoint
			for _, dead := range []bool{false, true} {
				receivers.all[0].dead.Store(dead)
				took, err := receivers.latency(ctx, t, d/webhookTurns)
				if err != nil {
					return err
				}
				sides[dead] = append(sides[dead], took...)
			}
		}
		receivers.all[0].dead.Store(false)
		w.Latency, w.DeadOnes = summarise(sides[false]), summarise(sides[true])
		return nil
	})
	if err != nil {
		return nil, fmt.Errorf("measure webhooks: %w", err)
	}
	if w.PendingMB, w.ResumeMillis,
		err = receivers.resume(ctx, program, filepath.Join(dir, "pending"), w.Pending); err != nil {
		return nil, fmt.Errorf("measure pending webhooks: %w", err)
	}
	return w, nil
}

// receivers are HTTP servers that receive webhooks.
type receivers struct {
	all     []*receiver
	refuse  atomic.Bool   // answer 503
	hold    chan struct{} // respond when it is closed
	arrived chan arrival
}

// arrival is a webhook that reached its receiver.
type arrival struct {
	trace string
	at    time.Time
}

type receiver struct {
	server *http.Server
	port   int
	dead   atomic.Bool // never responds
}

func (r *receiver) url() string { return "http://127.0.0.1:" + strconv.Itoa(r.port) + "/" }

func startReceivers(ctx context.Context) (*receivers, error) {
	rs := &receivers{hold: make(chan struct{}), arrived: make(chan arrival, pendingHooks)}
	close(rs.hold)
	for range endpoints {
		listener, err := new(net.ListenConfig).Listen(ctx, "tcp", "127.0.0.1:0")
		if err != nil {
			rs.close()
			return nil, fmt.Errorf("start a receiver of webhooks: %w", err)
		}
		r := &receiver{port: listener.Addr().(*net.TCPAddr).Port}
		r.server = &http.Server{ReadHeaderTimeout: time.Minute, Handler: rs.handler(r)}
		go func() { _ = r.server.Serve(listener) }()
		rs.all = append(rs.all, r)
	}
	return rs, nil
}

func (rs *receivers) handler(r *receiver) http.HandlerFunc {
	return func(w http.ResponseWriter, req *http.Request) {
		now := time.Now()
		var body struct {
			TraceID string `json:"trace_id"`
		}
		err := json.NewDecoder(req.Body).Decode(&body)
		_, _ = io.Copy(io.Discard, req.Body)
		switch {
		case err != nil:
			w.WriteHeader(http.StatusBadRequest)
			return
		case r.dead.Load():
			<-req.Context().Done()
			return
		case rs.refuse.Load():
			w.WriteHeader(http.StatusServiceUnavailable)
		default:
			select {
			case <-rs.hold:
			case <-req.Context().Done():
				return
			}
			w.WriteHeader(http.StatusNoContent)
		}
		select {
		case rs.arrived <- arrival{body.TraceID, now}:
		case <-req.Context().Done():
		}
	}
}

func (rs *receivers) close() {
	for _, r := range rs.all {
		_ = r.server.Close()
	}
}

// settings returns settings that let the server send webhooks to the receivers.
func (rs *receivers) settings() []string {
	ports := make([]string, len(rs.all))
	for i, r := range rs.all {
		ports[i] = strconv.Itoa(r.port)
	}
	return []string{
		"BULLPEN_WEBHOOK_ALLOW_HTTP=true", "BULLPEN_WEBHOOK_ALLOW_CIDRS=127.0.0.0/8",
		"BULLPEN_WEBHOOK_ALLOW_PORTS=" + strings.Join(ports, ","),
		"BULLPEN_WEBHOOK_CONCURRENCY=" + strconv.Itoa(perEndpoint),
	}
}

// serve calls f with a server whose data is in dir.
func (rs *receivers) serve(ctx context.Context, program, dir string, f func(*target) error) error {
	t, err := startServer(ctx, program, dir, rs.settings()...)
	if err != nil {
		return err
	}
	if err = t.ready(ctx); err == nil {
		err = f(t)
	}
	return errors.Join(err, t.close())
}

// submit submits a program whose result is sent to url. If url is empty, no webhook is sent.
func (rs *receivers) submit(ctx context.Context, t *target, url string) (id string, err error) {
	return t.submit(ctx, asked{Language: proto.Bash, Code: ":", Timeout: programTimeout, WebhookURL: url})
}

// next waits for the next webhook to arrive.
func (rs *receivers) next(ctx context.Context) (arrival, error) {
	select {
	case a := <-rs.arrived:
		return a, nil
	case <-ctx.Done():
		return arrival{}, fmt.Errorf("wait for a webhook: %w", context.Cause(ctx))
	}
}

// rate returns how many webhooks per second are delivered. Receivers hold the first ones until all
// programs have ended, so that programs do not slow down the rest.
func (rs *receivers) rate(ctx context.Context, t *target, n int) (float64, error) {
	ctx, cancel := context.WithTimeout(ctx, hooksWithin)
	defer cancel()
	rs.hold = make(chan struct{})
	ids := make([]string, n)
	err := each(n, func(i int) (err error) {
		ids[i], err = rs.submit(ctx, t, rs.all[i%endpoints].url())
		return err
	})
	for i := 0; i < n && err == nil; i++ {
		_, err = t.completed(ctx, ids[i])
	}
	began := time.Now()
	close(rs.hold)
	for i := 0; i < n && err == nil; i++ {
		_, err = rs.next(ctx)
	}
	return float64(n-endpoints*perEndpoint) / time.Since(began).Seconds(), err
}

// completed waits until an execution has ended and returns when it did.
func (a *api) completed(ctx context.Context, id string) (time.Time, error) {
	for {
		body, err := a.get(ctx, "/v1/executions/"+id+"?wait=20")
		if err != nil {
			return time.Time{}, err
		}
		var record struct {
			CompletedAt *time.Time `json:"completed_at"`
		}
		if err := json.Unmarshal(body, &record); err != nil {
			return time.Time{}, fmt.Errorf("execution %s: decode the record: %w", id, err)
		}
		if record.CompletedAt != nil {
			return *record.CompletedAt, nil
		}
	}
}

// latency submits programs at a fixed rate for d, alternating between receivers. It returns the
// latencies of webhooks to the receivers that respond, in milliseconds.
func (rs *receivers) latency(ctx context.Context, t *target, d time.Duration) ([]float64, error) {
	ctx, cancel := context.WithTimeout(ctx, hooksWithin)
	defer cancel()
	tick := time.NewTicker(time.Second / webhookRate)
	defer tick.Stop()
	waiting := map[string]bool{} // for receivers that respond
	for i := range int(d.Seconds() * webhookRate) {
		select {
		case <-tick.C:
		case <-ctx.Done():
			return nil, context.Cause(ctx)
		}
		r := rs.all[i%endpoints]
		id, err := rs.submit(ctx, t, r.url())
		if err != nil {
			return nil, err
		}
		if !r.dead.Load() {
			waiting[id] = true
		}
	}
	var took []float64
	for len(waiting) > 0 {
		a, err := rs.next(ctx)
		if err != nil {
			return nil, err
		}
		if !waiting[a.trace] { // sent again after the receiver was dead
			continue
		}
		delete(waiting, a.trace)
		ended, err := t.completed(ctx, a.trace)
		if err != nil {
			return nil, err
		}
		took = append(took, millis(a.at.Sub(ended)))
	}
	return took, nil
}

// resume restarts a server with the results of n executions, and another one that also has n
// pending webhooks. It returns the additional memory of the latter, in MB, and how long it takes to
// load the webhooks, in milliseconds.
func (rs *receivers) resume(ctx context.Context, program, dir string, n int) (mb, ms float64, err error) {
	rs.refuse.Store(true)
	defer rs.refuse.Store(false)
	var idle [2]float64
	for i, pending := range []int{0, n} {
		data := filepath.Join(dir, strconv.Itoa(pending))
		if err := rs.serve(ctx, program, data, func(t *target) error { return rs.fill(ctx, t, n, pending > 0) }); err != nil {
			return 0, 0, err
		}
		began := time.Now()
		t, err := startServer(ctx, program, data, rs.settings()...)
		if err != nil {
			return 0, 0, err
		}
		if ms, err = t.resumed(ctx, began, pending); err == nil {
			idle[i], err = idleMemory(ctx, t)
		}
		if err = errors.Join(err, t.close()); err != nil {
			return 0, 0, err
		}
	}
	return idle[1] - idle[0], ms, nil
}

// fill runs n programs. If hooks is set, it also waits until the first attempt of each webhook has
// failed.
func (rs *receivers) fill(ctx context.Context, t *target, n int, hooks bool) error {
	ctx, cancel := context.WithTimeout(ctx, hooksWithin)
	defer cancel()
	if hooks {
		settings := fmt.Sprintf(`{"url":%q,"waits":%s}`, rs.all[0].url(), webhookRetry)
		resp, err := t.do(ctx, http.MethodPut, "/v1/webhook", "application/json", []byte(settings))
		if err == nil {
			err = resp.Body.Close()
		}
		if err != nil {
			return err
		}
	}
	ids := make([]string, n)
	err := each(n, func(i int) (err error) {
		url := ""
		if hooks {
			url = rs.all[i%endpoints].url()
		}
		ids[i], err = rs.submit(ctx, t, url)
		return err
	})
	for i := 0; i < n && err == nil; i++ {
		_, err = t.completed(ctx, ids[i])
	}
	for i := 0; i < n && err == nil && hooks; i++ {
		_, err = rs.next(ctx)
	}
	return err
}

// each calls f for each number below n in writersAtOnce goroutines.
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

// resumed waits until the server has loaded all pending deliveries. It returns the milliseconds
// since the server was started.
func (t *target) resumed(ctx context.Context, began time.Time, pending int) (float64, error) {
	ctx, cancel := context.WithTimeout(ctx, resumeWithin)
	defer cancel()
	for {
		body, err := t.get(ctx, "/metrics")
		for line := range strings.Lines(string(body)) {
			text, ok := strings.CutPrefix(line, "bullpen_webhook_pending_deliveries ")
			if n, parse := strconv.ParseFloat(strings.TrimSpace(text), 64); ok && parse == nil && int(n) >= pending {
				return float64(time.Since(began).Microseconds()) / 1000, nil
			}
		}
		select {
		case <-ctx.Done():
			return 0, fmt.Errorf("the server did not have %d pending webhooks within %s: %w%s", pending, resumeWithin,
				err, t.tail())
		case <-time.After(readyPoll):
		}
	}
}
