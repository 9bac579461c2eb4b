package app

import (
	"cmp"
	"context"
	"math"
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
	registry        *prometheus.Registry
	byOrg           bool // executions have the label org
	executions      *prometheus.CounterVec
	start           *prometheus.HistogramVec
	duration        *prometheus.HistogramVec
	outputBytes     prometheus.Counter
	requests        *prometheus.CounterVec
	requestTime     *prometheus.HistogramVec
	cgroupVersion   prometheus.Gauge
	healthy         prometheus.Gauge
	jails           *prometheus.CounterVec
	zygotes         *prometheus.CounterVec
	preloadFailures prometheus.Counter
	attempts        *prometheus.CounterVec
	deliveries      *prometheus.CounterVec
	attemptTime     prometheus.Histogram
	deliveryDelay   prometheus.Histogram
	scaling         *prometheus.CounterVec
	quotas          *prometheus.CounterVec
}

// NewMetrics registers the metrics. Each scrape calls stats for the metrics of the queue. stats may
// be nil in a process without the queue. byOrg adds the organisation to the count of executions.
func NewMetrics(stats func(context.Context) (proto.QueueStats, error), byOrg bool) *Metrics {
	labels := []string{"language", "status", "error_code"}
	if byOrg {
		labels = append(labels, "org")
	}
	m := &Metrics{
		byOrg:    byOrg,
		registry: prometheus.NewRegistry(),
		executions: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "bullpen_executions_total", Help: "Finished executions by language, status and error code; none without an error. With --metrics-org also by organisation.",
		}, labels),
		start: prometheus.NewHistogramVec(prometheus.HistogramOpts{
			Name: "bullpen_start_seconds", Help: "Time from the acceptance of an execution to the first start of its program, or to its end if it never started, by class and by whether it started.",
			Buckets: []float64{.001, .002, .005, .01, .02, .05, .1, .25, .5, 1, 3, 10, 60, 600, 3600},
		}, []string{"class", "started"}),
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
	m.zygotes = prometheus.NewCounterVec(prometheus.CounterOpts{
		Name: "bullpen_worker_zygotes_total", Help: "Zygotes, from which sandboxes are forked, by result: created, or failed, for example because a module of preload cannot be imported.",
	}, []string{"result"})
	m.preloadFailures = prometheus.NewCounter(prometheus.CounterOpts{
		Name: "bullpen_worker_preload_failures_total", Help: "Zygotes that were not created for a sandbox profile with modules in preload. bullpen sandbox show has the reason.",
	})
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
	m.scaling = prometheus.NewCounterVec(prometheus.CounterOpts{
		Name: "bullpen_autoscale_failures_total", Help: "Failed attempts to change the number of workers, by pool.",
	}, []string{"pool"})
	m.quotas = prometheus.NewCounterVec(prometheus.CounterOpts{
		Name: "bullpen_quota_reached_total", Help: "Limits of monthly quotas that organisations have reached, by quota and level (soft or hard). Of all gateways, one counts each.",
	}, []string{"quota", "level"})
	m.registry.MustRegister(m.quotas, m.scaling, m.attempts, m.deliveries, m.attemptTime, m.deliveryDelay)
	m.registry.MustRegister(m.executions, m.start, m.duration, m.outputBytes, m.requests, m.requestTime, m.cgroupVersion, m.healthy, m.jails, m.zygotes, m.preloadFailures,
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

// ExecutionStarted counts the start of an attempt. The first one ends the wait for a slot.
func (m *Metrics) ExecutionStarted(rec *proto.Record) {
	if rec.Attempt == 1 {
		m.start.WithLabelValues(string(rec.Class()), "true").Observe(rec.StartedAt.Sub(rec.QueuedAt()).Seconds())
	}
}

// ExecutionDone counts a finished execution.
func (m *Metrics) ExecutionDone(rec *proto.Record) {
	code := "none"
	if rec.Result != nil && rec.Result.ErrorCode != nil {
		code = *rec.Result.ErrorCode
	}
	values := []string{string(rec.Language), string(rec.Status), code}
	if m.byOrg {
		values = append(values, rec.Org)
	}
	m.executions.WithLabelValues(values...).Inc()
	if rec.Attempt == 0 && rec.CompletedAt != nil {
		m.start.WithLabelValues(string(rec.Class()), "false").Observe(max(0, rec.CompletedAt.Sub(rec.QueuedAt()).Seconds()))
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
		Name: "bullpen_webhook_pending", Help: "Webhook deliveries in memory that wait for an attempt, reported by the leader; 0 in other processes.",
	}, func() float64 { return float64(pending()) }))
}

// DataDisk registers the free space and the reserve of the disk of the data directory, if this
// process uses it.
func (m *Metrics) DataDisk(d *dataDisk) {
	if d == nil {
		return
	}
	gauge := func(name, help string, value func(free, reserve int64) int64) {
		m.registry.MustRegister(prometheus.NewGaugeFunc(prometheus.GaugeOpts{Name: name, Help: help}, func() float64 {
			free, reserve, err := d.space()
			if err != nil {
				return math.NaN()
			}
			return float64(value(free, reserve))
		}))
	}
	gauge("bullpen_data_free_bytes", "Free space of the disk of the data directory.", func(free, _ int64) int64 { return free })
	gauge("bullpen_data_reserve_bytes", "Free space of that disk below which nothing is accepted, see --disk-reserve.", func(_, reserve int64) int64 { return reserve })
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

// ZygoteCreated counts a zygote that was created, or was not because of err. preloads reports whether
// its sandbox has modules to preload.
func (m *Metrics) ZygoteCreated(preloads bool, err error) {
	if preloads && err != nil {
		m.preloadFailures.Inc()
	}
	result := "created"
	if err != nil {
		result = "failed"
	}
	m.zygotes.WithLabelValues(result).Inc()
}

// CgroupVersion sets the version of cgroups in use.
func (m *Metrics) CgroupVersion(version int) { m.cgroupVersion.Set(float64(version)) }

// statsTimeout bounds the time for which a scrape waits for the queue.
const statsTimeout = time.Second

// queueCollector collects the metrics of the queue at each scrape. If the queue does not answer, it
// reports only bullpen_queue_up.
type queueCollector struct {
	stats                                                          func(context.Context) (proto.QueueStats, error)
	up, depth, delayed, oldest, workers, slots, freeSlots, running *prometheus.Desc
}

func newQueueCollector(stats func(context.Context) (proto.QueueStats, error)) *queueCollector {
	desc := func(name, help string) *prometheus.Desc { return prometheus.NewDesc(name, help, nil, nil) }
	return &queueCollector{
		stats:     stats,
		up:        desc("bullpen_queue_up", "1 if the queue answered the scrape; otherwise the metrics of the queue are missing."),
		depth:     desc("bullpen_queue_depth", "Queued executions."),
		delayed:   desc("bullpen_queue_delayed", "Accepted executions that are queued at a later time."),
		oldest:    desc("bullpen_queue_oldest_seconds", "Age of the oldest queued execution; 0 if there is none."),
		workers:   desc("bullpen_workers", "Live workers."),
		slots:     desc("bullpen_slots", "Slots of all live workers."),
		freeSlots: desc("bullpen_slots_free", "Free slots of all live workers."),
		running:   desc("bullpen_running", "Running executions."),
	}
}

// Describe sends the descriptions of the metrics.
func (c *queueCollector) Describe(ch chan<- *prometheus.Desc) {
	for _, d := range []*prometheus.Desc{c.up, c.depth, c.delayed, c.oldest, c.workers, c.slots, c.freeSlots, c.running} {
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
	gauge(c.delayed, float64(s.Delayed))
	gauge(c.oldest, s.OldestQueue)
	gauge(c.workers, float64(s.Workers))
	gauge(c.slots, float64(s.Slots))
	gauge(c.freeSlots, float64(s.FreeSlots))
	gauge(c.running, float64(s.Running))
}

// QuotaReached counts a limit of a monthly quota that an organisation has reached.
func (m *Metrics) QuotaReached(c proto.Crossing) {
	m.quotas.WithLabelValues(string(c.Name), c.Level).Inc()
}

// ScalingFailed counts a failed attempt to change the number of workers of a pool.
func (m *Metrics) ScalingFailed(pool string) { m.scaling.WithLabelValues(pool).Inc() }

// Pools registers the demand for the workers of each pool, and how many are recommended. Each
// scrape calls pools.
func (m *Metrics) Pools(pools func(context.Context) ([]proto.Pool, error)) {
	m.registry.MustRegister(newPoolCollector(pools))
}

// poolCollector collects the metrics of pools at each scrape. There are none if the queue does not
// answer.
type poolCollector struct {
	pools   func(context.Context) ([]proto.Pool, error)
	figures []poolFigure
}

// poolFigure is one metric of a pool. It is not collected if ok is false.
type poolFigure struct {
	desc *prometheus.Desc
	of   func(p *proto.Pool) (value float64, ok bool)
}

func newPoolCollector(pools func(context.Context) ([]proto.Pool, error)) *poolCollector {
	figure := func(name, help string, of func(p *proto.Pool) float64) poolFigure {
		return poolFigure{prometheus.NewDesc(name, help, []string{"pool"}, nil), func(p *proto.Pool) (float64, bool) { return of(p), true }}
	}
	desired := func(name, help string, of func(d *proto.DesiredWorkers) int) poolFigure {
		return poolFigure{prometheus.NewDesc(name, help, []string{"pool"}, nil), func(p *proto.Pool) (float64, bool) {
			if p.Desired == nil {
				return 0, false
			}
			return float64(of(p.Desired)), true
		}}
	}
	return &poolCollector{pools, []poolFigure{
		desired("bullpen_autoscale_desired_slots", "Slots that the pool should have.", func(d *proto.DesiredWorkers) int { return d.Slots }),
		desired("bullpen_autoscale_desired_workers", "Workers that the pool should have.", func(d *proto.DesiredWorkers) int { return d.Workers }),
		figure("bullpen_autoscale_workers", "Live workers of the pool that do not drain.", func(p *proto.Pool) float64 { return float64(p.Workers) }),
		figure("bullpen_autoscale_slots", "Slots of those.", func(p *proto.Pool) float64 { return float64(p.Slots) }),
		figure("bullpen_autoscale_queued", "Executions for the pool that would run at once if there were slots.", func(p *proto.Pool) float64 { return float64(p.Queued) }),
		figure("bullpen_autoscale_running", "Executions in the slots of the pool.", func(p *proto.Pool) float64 { return float64(p.Running) }),
		figure("bullpen_autoscale_mean_seconds", "How long executions have held a slot of the pool lately.", func(p *proto.Pool) float64 { return p.MeanSeconds }),
		figure("bullpen_autoscale_oldest_wait_seconds", "How long the oldest of those queued has waited.", func(p *proto.Pool) float64 { return p.OldestWait }),
	}}
}

// Describe sends the descriptions of the metrics.
func (c *poolCollector) Describe(ch chan<- *prometheus.Desc) {
	for _, f := range c.figures {
		ch <- f.desc
	}
}

// Collect sends the metrics.
func (c *poolCollector) Collect(ch chan<- prometheus.Metric) {
	ctx, cancel := context.WithTimeout(context.Background(), statsTimeout) // Collect gets no context
	defer cancel()
	pools, err := c.pools(ctx)
	if err != nil {
		return
	}
	for i := range pools {
		for _, f := range c.figures {
			if value, ok := f.of(&pools[i]); ok {
				ch <- prometheus.MustNewConstMetric(f.desc, prometheus.GaugeValue, value, pools[i].Name)
			}
		}
	}
}
