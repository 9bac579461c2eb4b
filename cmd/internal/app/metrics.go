package app

import (
	"cmp"
	"context"
	"net/http"
	"strconv"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
	"github.com/prometheus/client_golang/prometheus/promhttp"

	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/worker"
)

// Metrics are the figures of this process, in Prometheus' form. Its methods may be called from many goroutines.
type Metrics struct {
	registry      *prometheus.Registry
	executions    *prometheus.CounterVec
	start         *prometheus.HistogramVec
	duration      *prometheus.HistogramVec
	outputBytes   prometheus.Counter
	requests      *prometheus.CounterVec
	requestTime   *prometheus.HistogramVec
	cgroupVersion prometheus.Gauge
	fit           prometheus.Gauge
	jails         *prometheus.CounterVec
	attempts      *prometheus.CounterVec
	deliveries    *prometheus.CounterVec
	attemptTime   prometheus.Histogram
	deliveryDelay prometheus.Histogram
}

// NewMetrics makes the figures. Those of the queue are asked of stats when somebody looks; stats may be nil in a process that
// does not know the queue.
func NewMetrics(stats func(context.Context) (proto.QueueStats, error)) *Metrics {
	m := &Metrics{
		registry: prometheus.NewRegistry(),
		executions: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "bullpen_executions_total", Help: "Executions that have ended, by language and status.",
		}, []string{"language", "status"}),
		start: prometheus.NewHistogramVec(prometheus.HistogramOpts{
			Name: "bullpen_start_seconds", Help: "Time from accepting an execution to its program's start, by class.",
			Buckets: []float64{.001, .002, .005, .01, .02, .05, .1, .25, .5, 1, 3, 10, 60, 600, 3600},
		}, []string{"class"}),
		duration: prometheus.NewHistogramVec(prometheus.HistogramOpts{
			Name: "bullpen_execution_seconds", Help: "Time from a program's start to its end, by language.",
			Buckets: []float64{.001, .002, .005, .01, .02, .05, .1, .25, .5, 1, 3, 10, 60, 600, 3600},
		}, []string{"language"}),
		outputBytes: prometheus.NewCounter(prometheus.CounterOpts{
			Name: "bullpen_output_bytes_total", Help: "Bytes of output kept in the results of executions.",
		}),
		requests: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "bullpen_http_requests_total", Help: "HTTP requests answered, by route, method and status code.",
		}, []string{"route", "method", "code"}),
		requestTime: prometheus.NewHistogramVec(prometheus.HistogramOpts{
			Name: "bullpen_http_request_seconds", Help: "Time from a request's arrival to the end of its answer, by route and method.",
			Buckets: []float64{.001, .0025, .005, .01, .025, .05, .1, .25, .5, 1, 3, 10, 60, 600},
		}, []string{"route", "method"}),
		cgroupVersion: prometheus.NewGauge(prometheus.GaugeOpts{
			Name: "bullpen_cgroup_version", Help: "Version of the cgroups that hold programs to their limits: 1 or 2; 0 where this process runs none.",
		}),
		fit: prometheus.NewGauge(prometheus.GaugeOpts{
			Name: "bullpen_worker_fit", Help: "1 while the worker of this process can make sandboxes and takes jobs; 0 while it does not, or there is none.",
		}),
	}
	m.jails = prometheus.NewCounterVec(prometheus.CounterOpts{
		Name: "bullpen_worker_jails_total", Help: "Sandboxes that executions asked for, by language and how it started: one was ready (warm), was forked from one of the API key's (forked), or had to be made (cold).",
	}, []string{"language", "start"})
	m.attempts = prometheus.NewCounterVec(prometheus.CounterOpts{
		Name: "bullpen_webhook_attempts_total", Help: "Attempts to deliver a webhook, by what went wrong; none where it was delivered.",
	}, []string{"error"})
	m.deliveries = prometheus.NewCounterVec(prometheus.CounterOpts{
		Name: "bullpen_webhook_deliveries_total", Help: "Deliveries that have ended with an attempt, by status.",
	}, []string{"status"})
	m.attemptTime = prometheus.NewHistogram(prometheus.HistogramOpts{
		Name: "bullpen_webhook_attempt_seconds", Help: "Time that an attempt to deliver a webhook took.",
		Buckets: []float64{.001, .0025, .005, .01, .025, .05, .1, .25, .5, 1, 3, 10, 30},
	})
	m.deliveryDelay = prometheus.NewHistogram(prometheus.HistogramOpts{
		Name: "bullpen_webhook_delay_seconds", Help: "Time from a result to the beginning of the first attempt to deliver it.",
		Buckets: []float64{.001, .0025, .005, .01, .025, .05, .1, .25, .5, 1, 3, 10, 60, 600},
	})
	m.registry.MustRegister(m.attempts, m.deliveries, m.attemptTime, m.deliveryDelay)
	m.registry.MustRegister(m.executions, m.start, m.duration, m.outputBytes, m.requests, m.requestTime, m.cgroupVersion, m.fit, m.jails,
		collectors.NewGoCollector(), collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}))
	if stats != nil {
		m.registry.MustRegister(newQueueCollector(stats))
	}
	return m
}

// Handler answers with all figures.
func (m *Metrics) Handler() http.Handler {
	return promhttp.HandlerFor(m.registry, promhttp.HandlerOpts{Registry: m.registry})
}

// ExecutionDone counts an execution that has ended.
func (m *Metrics) ExecutionDone(rec *proto.Record) {
	m.executions.WithLabelValues(string(rec.Language), string(rec.Status)).Inc()
	if rec.StartedAt != nil {
		m.start.WithLabelValues(string(rec.Class())).Observe(rec.StartedAt.Sub(rec.CreatedAt).Seconds())
	}
	if rec.Result == nil {
		return
	}
	if rec.StartedAt != nil {
		m.duration.WithLabelValues(string(rec.Language)).Observe(float64(rec.Result.DurationMS) / 1000)
	}
	m.outputBytes.Add(float64(len(rec.Result.Stdout) + len(rec.Result.Stderr)))
}

// HTTPDone counts a request that was answered with code after d. The route is the pattern that matched, never the path: ids
// in it would make a figure each.
func (m *Metrics) HTTPDone(route, method string, code int, d time.Duration) {
	switch method {
	case http.MethodGet, http.MethodHead, http.MethodPost, http.MethodPut, http.MethodPatch, http.MethodDelete, http.MethodOptions:
	default:
		method = "other" // the client makes them up
	}
	m.requests.WithLabelValues(route, method, strconv.Itoa(code)).Inc()
	m.requestTime.WithLabelValues(route, method).Observe(d.Seconds())
}

// WebhookAttempted counts an attempt to deliver a webhook.
func (m *Metrics) WebhookAttempted(d *proto.Delivery, a *proto.DeliveryAttempt) {
	m.attempts.WithLabelValues(string(cmp.Or(a.Error, "none"))).Inc()
	m.attemptTime.Observe(a.Timings.Total / 1000)
	if d.Made == 1 {
		m.deliveryDelay.Observe(a.At.Sub(d.CreatedAt).Seconds())
	}
	if d.Status != proto.DeliveryPending {
		m.deliveries.WithLabelValues(string(d.Status)).Inc()
	}
}

// PendingWebhooks has the number of pending deliveries asked for when somebody looks.
func (m *Metrics) PendingWebhooks(pending func() int) {
	m.registry.MustRegister(prometheus.NewGaugeFunc(prometheus.GaugeOpts{
		Name: "bullpen_webhook_pending", Help: "Deliveries that wait for an attempt, told by the process that leads; 0 in others.",
	}, func() float64 { return float64(pending()) }))
}

// WorkerFit says whether the worker takes jobs.
func (m *Metrics) WorkerFit(fit bool) {
	if fit {
		m.fit.Set(1)
	} else {
		m.fit.Set(0)
	}
}

// JailTaken counts an execution that asked for a jail.
func (m *Metrics) JailTaken(language proto.Language, start worker.Start) {
	m.jails.WithLabelValues(string(language), string(start)).Inc()
}

// CgroupVersion says which version of cgroups holds programs to their limits.
func (m *Metrics) CgroupVersion(version int) { m.cgroupVersion.Set(float64(version)) }

// statsTimeout is how long a scrape waits for the queue.
const statsTimeout = time.Second

// queueCollector asks for the queue's figures at each scrape, so that they are never old. Where the queue does not answer it
// tells only that.
type queueCollector struct {
	stats                                                 func(context.Context) (proto.QueueStats, error)
	up, depth, oldest, workers, slots, freeSlots, running *prometheus.Desc
}

func newQueueCollector(stats func(context.Context) (proto.QueueStats, error)) *queueCollector {
	desc := func(name, help string) *prometheus.Desc { return prometheus.NewDesc(name, help, nil, nil) }
	return &queueCollector{
		stats:     stats,
		up:        desc("bullpen_queue_up", "Whether the queue answered when it was asked for the figures below."),
		depth:     desc("bullpen_queue_depth", "Executions that wait for a slot."),
		oldest:    desc("bullpen_queue_oldest_seconds", "Age of the oldest execution that waits for a slot; 0 when none does."),
		workers:   desc("bullpen_workers", "Live workers."),
		slots:     desc("bullpen_slots", "Slots of all live workers."),
		freeSlots: desc("bullpen_slots_free", "Slots that run nothing."),
		running:   desc("bullpen_running", "Executions that run."),
	}
}

// Describe tells which figures there are.
func (c *queueCollector) Describe(ch chan<- *prometheus.Desc) {
	for _, d := range []*prometheus.Desc{c.up, c.depth, c.oldest, c.workers, c.slots, c.freeSlots, c.running} {
		ch <- d
	}
}

// Collect tells the figures.
func (c *queueCollector) Collect(ch chan<- prometheus.Metric) {
	ctx, cancel := context.WithTimeout(context.Background(), statsTimeout) // a scrape hands us no context
	defer cancel()
	gauge := func(d *prometheus.Desc, v float64) { ch <- prometheus.MustNewConstMetric(d, prometheus.GaugeValue, v) }
	s, err := c.stats(ctx)
	if err != nil {
		gauge(c.up, 0)
		return
	}
	gauge(c.up, 1)
	gauge(c.depth, float64(s.Queued))
	gauge(c.oldest, s.OldestQueue)
	gauge(c.workers, float64(s.Workers))
	gauge(c.slots, float64(s.Slots))
	gauge(c.freeSlots, float64(s.FreeSlots))
	gauge(c.running, float64(s.Running))
}
