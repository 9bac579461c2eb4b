package app

import (
	"cmp"
	"context"
	"errors"
	"io/fs"
	"math"
	"net/http"
	"runtime"
	"strconv"
	"syscall"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
	"github.com/prometheus/client_golang/prometheus/promhttp"

	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/storage/image"
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
	attempts        *prometheus.CounterVec
	deliveries      *prometheus.CounterVec
	attemptTime     prometheus.Histogram
	deliveryDelay   prometheus.Histogram
	scaling         *prometheus.CounterVec
	quotas          *prometheus.CounterVec
	steps           *prometheus.HistogramVec
	threadSaves     *prometheus.CounterVec
	storeErrors     *prometheus.CounterVec
	deadLetters     *prometheus.CounterVec
	preloadFailures prometheus.Counter
}

// durationBuckets are the buckets of all durations in seconds: from a warm sandbox's to the longest
// programs' of most plans.
func durationBuckets() []float64 {
	return []float64{.005, .01, .025, .05, .1, .25, .5, 1, 2.5, 5, 10, 30, 60, 300, 900, 3600}
}

// NewMetrics registers the metrics that every process has. byOrg adds the organisation to the count
// of executions.
func NewMetrics(byOrg bool) *Metrics {
	labels := []string{"language", "status", "error_code"}
	if byOrg {
		labels = append(labels, "org")
	}
	m := &Metrics{
		byOrg:    byOrg,
		registry: prometheus.NewRegistry(),
		executions: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "bullpen_executions_total",
			Help: "Finished executions by language, status and error code; none without an error. With --metrics-org also by " +
				"organisation.",
		}, labels),
		start: prometheus.NewHistogramVec(prometheus.HistogramOpts{
			Name: "bullpen_queue_wait_seconds",
			Help: "Time from the acceptance of an execution to the first start of its program, or to its end if it never " +
				"started, by class and by whether it started.",
			Buckets: durationBuckets(),
		}, []string{"class", "started"}),
		duration: prometheus.NewHistogramVec(prometheus.HistogramOpts{
			Name: "bullpen_execution_duration_seconds", Help: "Time from the start of a program to its end, by language.",
			Buckets: durationBuckets(),
		}, []string{"language"}),
		outputBytes: prometheus.NewCounter(prometheus.CounterOpts{
			Name: "bullpen_output_bytes_total", Help: "Bytes of output kept in the results of executions.",
		}),
		requests: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "bullpen_http_requests_total", Help: "HTTP requests by route, method and status code.",
		}, []string{"route", "method", "code"}),
		requestTime: prometheus.NewHistogramVec(prometheus.HistogramOpts{
			Name:    "bullpen_http_request_duration_seconds",
			Help:    "Time from the arrival of a request to the end of its response, by route and method.",
			Buckets: durationBuckets(),
		}, []string{"route", "method"}),
		cgroupVersion: prometheus.NewGauge(prometheus.GaugeOpts{
			Name: "bullpen_cgroup_version", Help: "Version of cgroups that the worker of this process uses, 1 or 2.",
		}),
		healthy: prometheus.NewGauge(prometheus.GaugeOpts{
			Name: "bullpen_worker_healthy",
			Help: "1 while the worker of this process can create sandboxes and accepts jobs; otherwise 0.",
		}),
	}
	m.jails = prometheus.NewCounterVec(prometheus.CounterOpts{
		Name: "bullpen_worker_jails_total",
		Help: "Sandboxes of executions by language and start: prewarmed (warm), forked from a zygote of the API key " +
			"(forked), or created on demand (cold).",
	}, []string{"language", "start"})
	m.zygotes = prometheus.NewCounterVec(prometheus.CounterOpts{
		Name: "bullpen_worker_zygotes_total",
		Help: "Zygotes, from which sandboxes are forked, by result: created, or failed, for example because a module of " +
			"preload cannot be imported.",
	}, []string{"result"})
	m.preloadFailures = prometheus.NewCounter(prometheus.CounterOpts{
		Name: "bullpen_worker_preload_failures_total",
		Help: "Zygotes that were not created for a sandbox profile with modules in preload. bullpen profile show has " +
			"the reason.",
	})
	m.attempts = prometheus.NewCounterVec(prometheus.CounterOpts{
		Name: "bullpen_webhook_attempts_total", Help: "Webhook attempts by error; none if delivered.",
	}, []string{"error"})
	m.deliveries = prometheus.NewCounterVec(prometheus.CounterOpts{
		Name: "bullpen_webhook_deliveries_total", Help: "Finished webhook deliveries by status.",
	}, []string{"status"})
	m.attemptTime = prometheus.NewHistogram(prometheus.HistogramOpts{
		Name: "bullpen_webhook_attempt_duration_seconds", Help: "Duration of webhook attempts.",
		Buckets: durationBuckets(),
	})
	m.deliveryDelay = prometheus.NewHistogram(prometheus.HistogramOpts{
		Name: "bullpen_webhook_delay_seconds", Help: "Time from a result to the start of its first webhook attempt.",
		Buckets: durationBuckets(),
	})
	m.scaling = prometheus.NewCounterVec(prometheus.CounterOpts{
		Name: "bullpen_autoscale_failures_total", Help: "Failed attempts to change the number of workers, by pool.",
	}, []string{"pool"})
	m.quotas = prometheus.NewCounterVec(prometheus.CounterOpts{
		Name: "bullpen_quotas_reached_total",
		Help: "Monthly quotas that organisations have reached, by quota and level (soft or hard). Only one gateway " +
			"counts each.",
	}, []string{"quota", "level"})
	m.steps = prometheus.NewHistogramVec(prometheus.HistogramOpts{
		Name: "bullpen_worker_step_duration_seconds",
		Help: "Time that executions spent in the steps around their program: jail and, within it, home; mounts, " +
			"save, commit.",
		Buckets: durationBuckets(),
	}, []string{"step"})
	m.threadSaves = prometheus.NewCounterVec(prometheus.CounterOpts{
		Name: "bullpen_thread_saves_total", Help: "Homes of threads after executions, by result: saved, unchanged or failed.",
	}, []string{"result"})
	m.storeErrors = prometheus.NewCounterVec(prometheus.CounterOpts{
		Name: "bullpen_store_errors_total",
		Help: "Failed requests to the blob store, by operation. Most are retried.",
	}, []string{"operation"})
	m.deadLetters = prometheus.NewCounterVec(prometheus.CounterOpts{
		Name: "bullpen_dead_letters_total", Help: "Dead letters stored by this process, by reason.",
	}, []string{"reason"})
	m.registry.MustRegister(m.quotas, m.scaling, m.attempts, m.deliveries, m.attemptTime, m.deliveryDelay)
	m.registry.MustRegister(m.executions, m.start, m.duration, m.outputBytes, m.requests, m.requestTime, m.jails,
		m.zygotes, m.preloadFailures,
		collectors.NewGoCollector(), collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}))
	// A counter that appears with its first event has not increased for Prometheus.
	for _, result := range []string{"saved", "unchanged", "failed"} {
		m.threadSaves.WithLabelValues(result)
	}
	for _, operation := range []string{"put", "get", "stat", "delete", "list"} {
		m.storeErrors.WithLabelValues(operation)
	}
	for _, reason := range []proto.DeadReason{proto.DeadWorkersLost, proto.DeadMalformed} {
		m.deadLetters.WithLabelValues(string(reason))
	}
	m.registry.MustRegister(m.steps, m.threadSaves, m.storeErrors, m.deadLetters,
		prometheus.NewGaugeFunc(prometheus.GaugeOpts{
			Name: "bullpen_build_info", Help: "1, with the version of bullpen and of Go as labels.",
			ConstLabels: prometheus.Labels{"version": Version(), "goversion": runtime.Version()},
		}, func() float64 { return 1 }))
	return m
}

// Queue registers the metrics of the queue. Each scrape calls stats. leads reports whether this
// process assigns jobs: only then does it report process-independent values, so that sums over
// processes are correct. leads may be nil for never.
func (m *Metrics) Queue(stats func(context.Context) (proto.QueueStats, error), leads func() bool) {
	m.registry.MustRegister(newQueueCollector(stats, leads))
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
	if rec.Steps != nil {
		m.worked(rec)
	}
	m.outputBytes.Add(float64(rec.Result.OutputBytes()))
}

// HTTPDone counts a request. The route is the pattern that matched, because ids in a path would
// each create a time series.
func (m *Metrics) HTTPDone(route, method string, code int, d time.Duration) {
	switch method {
	case http.MethodGet, http.MethodHead, http.MethodPost, http.MethodPut, http.MethodPatch, http.MethodDelete,
		http.MethodOptions:
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
		Name: "bullpen_webhook_pending_deliveries",
		Help: "Webhook deliveries in memory that wait for an attempt, reported by the leader; 0 in other processes.",
	}, func() float64 { return float64(pending()) }))
}

// Disks registers the free space of the disks of directories, each with the name of its setting. It
// is read at each scrape. Missing directories are skipped.
func (m *Metrics) Disks(directories map[string]string) {
	m.registry.MustRegister(&diskCollector{
		directories,
		prometheus.NewDesc("bullpen_disk_free_bytes",
			"Free space of the disk of a directory of this process, by the setting that names the directory.",
			[]string{"directory"}, nil),
		prometheus.NewDesc("bullpen_disk_size_bytes",
			"Size of the disk of a directory of this process, by the setting that names the directory.",
			[]string{"directory"}, nil),
	})
}

// DiskReserve registers the reserve of the disk of the data directory, if this process uses it.
func (m *Metrics) DiskReserve(d *dataDisk) {
	if d == nil {
		return
	}
	m.registry.MustRegister(prometheus.NewGaugeFunc(prometheus.GaugeOpts{
		Name: "bullpen_disk_reserve_bytes",
		Help: "Free space of the disk of the data directory below which nothing is accepted, see --disk-reserve.",
	}, func() float64 {
		_, reserve, err := d.space()
		if err != nil {
			return math.NaN()
		}
		return float64(reserve)
	}))
}

// diskCollector collects the free space of disks.
type diskCollector struct {
	directories map[string]string // paths by name
	free, size  *prometheus.Desc
}

// Describe sends the descriptions of the metrics.
func (c *diskCollector) Describe(ch chan<- *prometheus.Desc) {
	ch <- c.free
	ch <- c.size
}

// Collect sends the metrics.
func (c *diskCollector) Collect(ch chan<- prometheus.Metric) {
	for name, path := range c.directories {
		var st syscall.Statfs_t
		free, size := math.NaN(), math.NaN()
		switch err := syscall.Statfs(path, &st); {
		case errors.Is(err, fs.ErrNotExist):
			continue
		case err == nil:
			free, size = float64(st.Bavail)*float64(st.Bsize), float64(st.Blocks)*float64(st.Bsize)
		}
		ch <- prometheus.MustNewConstMetric(c.free, prometheus.GaugeValue, free, name)
		ch <- prometheus.MustNewConstMetric(c.size, prometheus.GaugeValue, size, name)
	}
}

// Slots registers the slots of the worker of this process. Each scrape calls used.
func (m *Metrics) Slots(total int, used func() int) {
	m.registry.MustRegister(
		prometheus.NewGaugeFunc(prometheus.GaugeOpts{
			Name: "bullpen_worker_slots", Help: "Slots of the worker of this process.",
		}, func() float64 { return float64(total) }),
		prometheus.NewGaugeFunc(prometheus.GaugeOpts{
			Name: "bullpen_worker_slots_used", Help: "Slots of the worker of this process with an execution.",
		}, func() float64 { return float64(used()) }))
}

// ImageCache registers the cache of images of the worker of this process. Each scrape calls stats.
func (m *Metrics) ImageCache(stats func() image.CacheStats) {
	m.registry.MustRegister(
		prometheus.NewGaugeFunc(prometheus.GaugeOpts{
			Name: "bullpen_image_cache_bytes", Help: "Disk space of the images that the worker of this process has unpacked.",
		}, func() float64 { return float64(stats().Bytes) }),
		prometheus.NewCounterFunc(prometheus.CounterOpts{
			Name: "bullpen_image_cache_hits_total",
			Help: "Uses of an image that the worker of this process had unpacked or was unpacking.",
		}, func() float64 { return float64(stats().Hits) }),
		prometheus.NewCounterFunc(prometheus.CounterOpts{
			Name: "bullpen_image_cache_misses_total", Help: "Uses of an image for which it was fetched and unpacked.",
		}, func() float64 { return float64(stats().Misses) }))
}

// StoreFailed counts a request to the blob store that failed or returned wrong content.
func (m *Metrics) StoreFailed(operation string) { m.storeErrors.WithLabelValues(operation).Inc() }

// DeadLettered counts a dead letter that was stored.
func (m *Metrics) DeadLettered(reason proto.DeadReason) {
	m.deadLetters.WithLabelValues(string(reason)).Inc()
}

// Worker registers the metrics that only a process with a worker has.
func (m *Metrics) Worker() { m.registry.MustRegister(m.cgroupVersion, m.healthy) }

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

// worked counts the steps of an execution on its worker, and the saving of its thread.
func (m *Metrics) worked(rec *proto.Record) {
	for _, step := range rec.Timeline() {
		switch step.Name {
		case proto.StepDelay, proto.StepQueue, proto.StepProgram: // have metrics of their own
		default:
			m.steps.WithLabelValues(string(step.Name)).Observe(step.Took.Seconds())
		}
	}
	if rec.Steps.Save == (proto.Interval{}) {
		return
	}
	switch code := rec.Result.ErrorCode; {
	case code != nil && *code == string(proto.CodeThreadSave):
		m.threadSaves.WithLabelValues("failed").Inc()
	case rec.Steps.Commit == (proto.Interval{}):
		m.threadSaves.WithLabelValues("unchanged").Inc()
	default:
		m.threadSaves.WithLabelValues("saved").Inc()
	}
}

// CgroupVersion sets the version of cgroups in use.
func (m *Metrics) CgroupVersion(version int) { m.cgroupVersion.Set(float64(version)) }

// statsTimeout limits how long a scrape waits for the queue.
const statsTimeout = time.Second

// queueCollector collects the metrics of the queue at each scrape. If the queue does not answer, or
// another process assigns jobs, it reports only bullpen_queue_up.
type queueCollector struct {
	leads                                                          func() bool
	stats                                                          func(context.Context) (proto.QueueStats, error)
	up, depth, delayed, oldest, workers, slots, freeSlots, running *prometheus.Desc
}

func newQueueCollector(stats func(context.Context) (proto.QueueStats, error), leads func() bool) *queueCollector {
	desc := func(name, help string) *prometheus.Desc { return prometheus.NewDesc(name, help, nil, nil) }
	return &queueCollector{
		leads: leads,
		stats: stats,
		up: desc("bullpen_queue_up",
			"1 if the queue answered the scrape; otherwise 0. Only the leading dispatcher has the other metrics of "+
				"the queue."),
		depth:     desc("bullpen_queue_depth", "Queued executions."),
		delayed:   desc("bullpen_queue_delayed", "Accepted executions with a later start time."),
		oldest:    desc("bullpen_queue_oldest_age_seconds", "Age of the oldest queued execution; 0 if there is none."),
		workers:   desc("bullpen_workers", "Live workers."),
		slots:     desc("bullpen_slots", "Slots of all live workers."),
		freeSlots: desc("bullpen_slots_free", "Free slots of all live workers."),
		running:   desc("bullpen_executions_running", "Running executions."),
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
	if c.leads == nil || !c.leads() {
		return
	}
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

// Pools registers the demand and the recommended number of workers of each pool. Each scrape calls
// pools. leads is as for [Metrics.Queue].
func (m *Metrics) Pools(pools func(context.Context) ([]proto.Pool, error), leads func() bool) {
	m.registry.MustRegister(newPoolCollector(pools, leads))
}

// poolCollector collects the metrics of pools at each scrape. There are none if the queue does not
// answer, or another process assigns jobs.
type poolCollector struct {
	leads   func() bool
	pools   func(context.Context) ([]proto.Pool, error)
	figures []poolFigure
}

// poolFigure is one metric of a pool. It is not collected if ok is false.
type poolFigure struct {
	desc *prometheus.Desc
	of   func(p *proto.Pool) (value float64, ok bool)
}

func newPoolCollector(pools func(context.Context) ([]proto.Pool, error), leads func() bool) *poolCollector {
	figure := func(name, help string, of func(p *proto.Pool) float64) poolFigure {
		return poolFigure{prometheus.NewDesc(name, help, []string{"pool"}, nil), func(p *proto.Pool) (float64, bool) {
			return of(p), true
		}}
	}
	desired := func(name, help string, of func(d *proto.DesiredWorkers) int) poolFigure {
		return poolFigure{prometheus.NewDesc(name, help, []string{"pool"}, nil), func(p *proto.Pool) (float64, bool) {
			if p.Desired == nil {
				return 0, false
			}
			return float64(of(p.Desired)), true
		}}
	}
	return &poolCollector{leads, pools, []poolFigure{
		desired("bullpen_autoscale_desired_slots", "Slots that the pool should have.", func(d *proto.DesiredWorkers) int {
			return d.Slots
		}),
		desired("bullpen_autoscale_desired_workers", "Workers that the pool should have.", func(d *proto.DesiredWorkers) int {
			return d.Workers
		}),
		figure("bullpen_autoscale_workers", "Live workers of the pool, except draining ones.", func(p *proto.Pool) float64 {
			return float64(p.Workers)
		}),
		figure("bullpen_autoscale_slots", "Slots of the live workers of the pool, except draining ones.",
			func(p *proto.Pool) float64 { return float64(p.Slots) }),
		figure("bullpen_autoscale_queued", "Executions that wait only for a slot of the pool.",
			func(p *proto.Pool) float64 { return float64(p.Queued) }),
		figure("bullpen_autoscale_running", "Executions in the slots of the pool.", func(p *proto.Pool) float64 {
			return float64(p.Running)
		}),
		figure("bullpen_autoscale_mean_execution_seconds", "Recent mean time that executions held a slot of the pool.",
			func(p *proto.Pool) float64 { return p.MeanSeconds }),
		figure("bullpen_autoscale_oldest_wait_seconds",
			"Wait of the oldest execution queued for the pool.", func(p *proto.Pool) float64 {
				return p.OldestWait
			}),
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
	if !c.leads() {
		return
	}
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
