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

// Metrics are the Prometheus metrics of this process. Its methods may be called concurrently.
type Metrics struct {
	registry      *prometheus.Registry
	executions    *prometheus.CounterVec
	start         *prometheus.HistogramVec
	duration      *prometheus.HistogramVec
	outputBytes   prometheus.Counter
	requests      *prometheus.CounterVec
	requestTime   *prometheus.HistogramVec
	cgroupVersion prometheus.Gauge
	healthy       prometheus.Gauge
	jails         *prometheus.CounterVec
	attempts      *prometheus.CounterVec
	deliveries    *prometheus.CounterVec
	attemptTime   prometheus.Histogram
	deliveryDelay prometheus.Histogram
}

// NewMetrics registers the metrics. Each scrape calls stats for those of the queue. stats may be
// nil in a process without the queue.
func NewMetrics(stats func(context.Context) (proto.QueueStats, error)) *Metrics {
	m := &Metrics{
		registry: prometheus.NewRegistry(),
		executions: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "bullpen_executions_total", Help: "Finished executions by language and status.",
		}, []string{"language", "status"}),
		start: prometheus.NewHistogramVec(prometheus.HistogramOpts{
			Name: "bullpen_start_seconds", Help: "Time from the acceptance of an execution to the start of its program, by class.",
			Buckets: []float64{.001, .002, .005, .01, .02, .05, .1, .25, .5, 1, 3, 10, 60, 600, 3600},
		}, []string{"class"}),
		duration: prometheus.NewHistogramVec(prometheus.HistogramOpts{
			Name: "bullpen_execution_seconds", Help: "Time from the start of a program to its end, by language.",
			Buckets: []float64{.001, .002, .005, .01, .02, .05, .1, .25, .5, 1, 3, 10, 60, 600, 3600},
		}, []string{"language"}),
		outputBytes: prometheus.NewCounter(prometheus.CounterOpts{
			Name: "bullpen_output_bytes_total", Help: "Bytes of output kept in the results of executions.",
		}),
		requests: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "bullpen_http_requests_total", Help: "HTTP requests by route, method and status code.",
		}, []string{"route", "method", "code"}),
		requestTime: prometheus.NewHistogramVec(prometheus.HistogramOpts{
			Name: "bullpen_http_request_seconds", Help: "Time from the arrival of a request to the end of its response, by route and method.",
			Buckets: []float64{.001, .0025, .005, .01, .025, .05, .1, .25, .5, 1, 3, 10, 60, 600},
		}, []string{"route", "method"}),
		cgroupVersion: prometheus.NewGauge(prometheus.GaugeOpts{
			Name: "bullpen_cgroup_version", Help: "Version of cgroups in use, 1 or 2; 0 in a process that runs no programs.",
		}),
		healthy: prometheus.NewGauge(prometheus.GaugeOpts{
			Name: "bullpen_worker_fit", Help: "1 while the worker of this process can create sandboxes and accepts jobs; otherwise 0.",
		}),
	}
	m.jails = prometheus.NewCounterVec(prometheus.CounterOpts{
		Name: "bullpen_worker_jails_total", Help: "Sandboxes of executions by language and start: prewarmed (warm), forked from a zygote of the API key (forked), or created on demand (cold).",
	}, []string{"language", "start"})
	m.attempts = prometheus.NewCounterVec(prometheus.CounterOpts{
		Name: "bullpen_webhook_attempts_total", Help: "Webhook attempts by error; none if delivered.",
	}, []string{"error"})
	m.deliveries = prometheus.NewCounterVec(prometheus.CounterOpts{
		Name: "bullpen_webhook_deliveries_total", Help: "Finished webhook deliveries by status.",
	}, []string{"status"})
	m.attemptTime = prometheus.NewHistogram(prometheus.HistogramOpts{
		Name: "bullpen_webhook_attempt_seconds", Help: "Duration of webhook attempts.",
		Buckets: []float64{.001, .0025, .005, .01, .025, .05, .1, .25, .5, 1, 3, 10, 30},
	})
	m.deliveryDelay = prometheus.NewHistogram(prometheus.HistogramOpts{
		Name: "bullpen_webhook_delay_seconds", Help: "Time from a result to the start of its first webhook attempt.",
		Buckets: []float64{.001, .0025, .005, .01, .025, .05, .1, .25, .5, 1, 3, 10, 60, 600},
	})
	m.registry.MustRegister(m.attempts, m.deliveries, m.attemptTime, m.deliveryDelay)
	m.registry.MustRegister(m.executions, m.start, m.duration, m.outputBytes, m.requests, m.requestTime, m.cgroupVersion, m.healthy, m.jails,
		collectors.NewGoCollector(), collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}))
	if stats != nil {
		m.registry.MustRegister(newQueueCollector(stats))
	}
	return m
}

// Handler serves the metrics.
func (m *Metrics) Handler() http.Handler {
	return promhttp.HandlerFor(m.registry, promhttp.HandlerOpts{Registry: m.registry})
}

// ExecutionDone counts a finished execution.
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

// HTTPDone counts a request. The route is the pattern that matched, because ids in a path would
// each create a time series.
func (m *Metrics) HTTPDone(route, method string, code int, d time.Duration) {
	switch method {
	case http.MethodGet, http.MethodHead, http.MethodPost, http.MethodPut, http.MethodPatch, http.MethodDelete, http.MethodOptions:
	default:
		method = "other" // clients can send any method
	}
	m.requests.WithLabelValues(route, method, strconv.Itoa(code)).Inc()
	m.requestTime.WithLabelValues(route, method).Observe(d.Seconds())
}

// WebhookAttempted counts a webhook attempt.
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

// PendingWebhooks registers the number of pending deliveries. Each scrape calls pending.
func (m *Metrics) PendingWebhooks(pending func() int) {
	m.registry.MustRegister(prometheus.NewGaugeFunc(prometheus.GaugeOpts{
		Name: "bullpen_webhook_pending", Help: "Webhook deliveries that wait for an attempt, reported by the leader; 0 in other processes.",
	}, func() float64 { return float64(pending()) }))
}

// WorkerHealthy sets whether the worker accepts jobs.
func (m *Metrics) WorkerHealthy(healthy bool) {
	if healthy {
		m.healthy.Set(1)
	} else {
		m.healthy.Set(0)
	}
}

// JailAcquired counts a jail that an execution got.
func (m *Metrics) JailAcquired(language proto.Language, start worker.Start) {
	m.jails.WithLabelValues(string(language), string(start)).Inc()
}

// CgroupVersion sets the version of cgroups in use.
func (m *Metrics) CgroupVersion(version int) { m.cgroupVersion.Set(float64(version)) }

// statsTimeout bounds the time for which a scrape waits for the queue.
const statsTimeout = time.Second

// queueCollector collects the metrics of the queue at each scrape. If the queue does not answer, it
// reports only bullpen_queue_up.
type queueCollector struct {
	stats                                                 func(context.Context) (proto.QueueStats, error)
	up, depth, oldest, workers, slots, freeSlots, running *prometheus.Desc
}

func newQueueCollector(stats func(context.Context) (proto.QueueStats, error)) *queueCollector {
	desc := func(name, help string) *prometheus.Desc { return prometheus.NewDesc(name, help, nil, nil) }
	return &queueCollector{
		stats:     stats,
		up:        desc("bullpen_queue_up", "1 if the queue answered the scrape; otherwise the metrics of the queue are missing."),
		depth:     desc("bullpen_queue_depth", "Queued executions."),
		oldest:    desc("bullpen_queue_oldest_seconds", "Age of the oldest queued execution; 0 if there is none."),
		workers:   desc("bullpen_workers", "Live workers."),
		slots:     desc("bullpen_slots", "Slots of all live workers."),
		freeSlots: desc("bullpen_slots_free", "Free slots of all live workers."),
		running:   desc("bullpen_running", "Running executions."),
	}
}

// Describe sends the descriptions of the metrics.
func (c *queueCollector) Describe(ch chan<- *prometheus.Desc) {
	for _, d := range []*prometheus.Desc{c.up, c.depth, c.oldest, c.workers, c.slots, c.freeSlots, c.running} {
		ch <- d
	}
}

// Collect sends the metrics.
func (c *queueCollector) Collect(ch chan<- prometheus.Metric) {
	ctx, cancel := context.WithTimeout(context.Background(), statsTimeout) // Collect gets no context
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
