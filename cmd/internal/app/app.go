// Package app has the settings of bullpen and wires its packages together. No other package imports
// more than one component, or knows whether this process runs all roles or some.
package app

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"os"
	"strings"
	"sync"
	"time"

	gatewaysandboxes "github.com/bullpen-run/bullpen/gateway/sandboxes"
	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/scheduler/admission"
	"github.com/bullpen-run/bullpen/scheduler/agentruns"
	"github.com/bullpen-run/bullpen/scheduler/batches"
	"github.com/bullpen-run/bullpen/scheduler/deliveries"
	"github.com/bullpen-run/bullpen/scheduler/events"
	schedulerhistory "github.com/bullpen-run/bullpen/scheduler/history"
	"github.com/bullpen-run/bullpen/scheduler/keyring"
	"github.com/bullpen-run/bullpen/scheduler/natsembed"
	"github.com/bullpen-run/bullpen/scheduler/orgdata"
	"github.com/bullpen-run/bullpen/scheduler/pipelines"
	"github.com/bullpen-run/bullpen/scheduler/queue"
	"github.com/bullpen-run/bullpen/scheduler/registry"
	"github.com/bullpen-run/bullpen/scheduler/sandboxes"
	"github.com/bullpen-run/bullpen/scheduler/schedules"
	"github.com/bullpen-run/bullpen/scheduler/store"
	"github.com/bullpen-run/bullpen/scheduler/threads"
	"github.com/bullpen-run/bullpen/scheduler/usage"
	"github.com/bullpen-run/bullpen/storage/blob"
	"github.com/bullpen-run/bullpen/storage/history"
)

const (
	flushTime = 5 * time.Second
)

// Run runs the roles of cfg until ctx is done, and then drains: it rejects new work and lets
// running work finish for cfg.Drain. Longer executions are recorded as lost. Run returns nil after
// an orderly stop.
func Run(ctx context.Context, cfg *Config) error { return run(ctx, cfg, nil) }

// RunBehind is Run for a program that puts a handler of its own in front of the server. front is
// called with the server's handler and returns the handler of all requests. If the machine cannot
// run a worker, RunBehind runs without one.
func RunBehind(ctx context.Context, cfg *Config, front func(server http.Handler) http.Handler) error {
	return run(ctx, cfg, front)
}

// run runs a server. If front is not nil, it runs as [RunBehind] describes.
func run(ctx context.Context, cfg *Config, front func(http.Handler) http.Handler) error {
	log := NewLogger(os.Stderr, cfg.LogLevel, cfg.LogFormat)
	log.Info("starting", "version", Version(), "roles", roleNames(cfg.Roles))
	log.Debug("settings", "config", cfg)
	cfg.limitMemory()
	telemetry, err := StartTelemetry(ctx, Version(), log, cfg.LogLevel)
	if err != nil {
		return err
	}
	local := log
	log = telemetry.Log
	defer func() {
		flush, cancel := context.WithTimeout(context.WithoutCancel(ctx), flushTime)
		defer cancel()
		if err := telemetry.Shutdown(flush); err != nil {
			local.Warn("telemetry lost at shutdown", "error", err)
		}
	}()
	switch err := cfg.checkMachine(); {
	case errors.Is(err, errNeedsRoot) && front == nil:
		return fmt.Errorf("%w: run it as root, or omit the role with --roles and --nats", err)
	case err != nil && front == nil:
		return err
	case err != nil:
		log.Warn("no worker on this machine, so no programs run in sandboxes", "reason", err)
		cfg = cfg.withoutWorker()
	}
	if cfg.Autoscale == AutoscaleProcess {
		cfg = cfg.withoutWorker()
	}
	return serve(ctx, cfg, front, log)
}

// system has the resources that the roles of a process share.
type system struct {
	cfg          *Config
	log          *slog.Logger
	instance     string    // unique to this process
	lock         *os.File  // of the data directory; nil with an embedded NATS, which locks it
	disk         *dataDisk // nil if this process stores nothing on it that grows
	embedded     *natsembed.Server
	store        *store.Store
	keyring      *keyring.Keyring // nil in a process with the worker role alone
	blobs        *blob.Store      // nil without the gateway and worker roles
	monitor      *monitor
	queue        *queue.Queue
	offers       *queue.OfferCache // nil without the gateway role
	threads      *threads.Threads
	events       *events.Log
	admission    *admission.Admission      // nil without the gateway role
	schedules    *schedules.Schedules      // nil without the gateway role
	batches      *batches.Batches          // nil without the gateway role
	agentRuns    *agentruns.Runs           // nil without the gateway role
	pipelines    *pipelines.Pipelines      // nil without the gateway role
	sandboxes    *sandboxes.Sandboxes      // nil without the gateway role
	live         *gatewaysandboxes.Service // of sandboxes; nil without the gateway role
	history      *schedulerhistory.History // nil without the gateway role
	usage        *usage.Usage              // nil without the gateway role
	orgs         *registry.Orgs            // nil without the gateway role
	orgData      *orgdata.Data             // nil without the gateway role
	historyIndex *history.DB               // where history is stored
	metrics      *Metrics
	health       *health   // nil without the worker role
	webhooks     *webhooks // nil without the gateway and webhook roles
}

// open opens the shared resources. It blocks until NATS is reachable.
func open(ctx context.Context, cfg *Config, log *slog.Logger) (_ *system, err error) {
	s := &system{cfg: cfg, log: log, instance: cmp.Or(cfg.Instance, instanceName()), disk: cfg.dataDisk()}
	defer func() {
		if err != nil {
			s.close()
		}
	}()
	if err := cfg.checkSecrets(); err != nil {
		return nil, err
	}
	access := cfg.access("bullpen " + s.instance)
	if cfg.Embedded() {
		if s.embedded, err = natsembed.Open(cfg.Data, minDiskReserve, log); err != nil {
			return nil, err
		}
		s.embedded.MaxSubjects = cfg.maxSubjects()
		access.InProcess = s.embedded
	} else if s.lock, err = natsembed.LockDir(cfg.Data); err != nil {
		return nil, err
	}
	if cfg.needsStore() {
		if s.blobs, err = openStore(ctx, cfg); err != nil {
			return nil, err
		}
	}
	s.store, err = store.Connect(ctx, access, store.Config{
		Replicas: cfg.Replicas, Retention: cfg.Retention, AuditRetention: cfg.AuditRetention, AttachOnly: cfg.onlyWorks(),
	}, log)
	if err != nil {
		return nil, err
	}
	if !cfg.onlyWorks() {
		if err := s.openKeyring(ctx); err != nil {
			return nil, err
		}
	}
	s.queue = &queue.Queue{Store: s.store, Rejects: s.rejects}
	s.threads = &threads.Threads{Store: s.store}
	s.events = &events.Log{Store: s.store, Records: s.queue}
	s.metrics = NewMetrics(cfg.MetricsOrg)
	s.metrics.DiskReserve(s.disk)
	s.metrics.Disks(cfg.directories())
	if s.blobs != nil {
		s.blobs.Retry.OnError = s.metrics.StoreFailed
	}
	s.queue.Ended = s.executionEnded
	return s, nil
}

// executionEnded logs and counts an execution whose terminal record was not written by a worker
// that ran it.
func (s *system) executionEnded(rec *proto.Record) {
	s.metrics.ExecutionDone(rec)
	line := []any{
		"trace_id", rec.TraceID, "attempt", rec.Attempt, "org", rec.Org, "key", rec.Key, "language", rec.Language,
		"mode", rec.Mode,
		"status", rec.Status, "request_id", rec.RequestID,
	}
	if rec.Attempt == 0 {
		line = append(line, "queued_ms", max(0, rec.CompletedAt.Sub(rec.QueuedAt()).Milliseconds()))
	}
	if rec.Result.ErrorCode != nil {
		line = append(line, "error_code", *rec.Result.ErrorCode, "detail", *rec.Result.ErrorMessage)
	}
	s.log.Info("execution ended", line...)
}

// access returns the parameters of connections to the external NATS. NATS lists a connection by its
// name.
func (c *Config) access(name string) store.Access {
	n := &c.NATS
	a := store.Access{
		URL: n.URL, Creds: n.Creds, User: n.User, Password: n.Password, CA: n.CA, Cert: n.Cert, Key: n.Key, Name: name,
	}
	if path, ok := strings.CutPrefix(n.URL, unixScheme); ok {
		a.URL, a.InProcess = "", natsembed.Socket(path)
	}
	// The role with the most permissions names the inbox.
	for _, role := range []Role{RoleGateway, RoleScheduler, RoleWebhook, RoleWorker} {
		if c.Has(role) {
			a.Role = string(role)
			break
		}
	}
	return a
}

func (s *system) close() {
	if s.historyIndex != nil {
		if err := s.historyIndex.Close(); err != nil {
			s.log.Warn("index of executions not closed", "error", err)
		}
	}
	if s.blobs != nil {
		if err := s.blobs.Close(); err != nil {
			s.log.Warn("blob store not closed", "error", err)
		}
	}
	if s.store != nil {
		s.store.Close()
	}
	if s.embedded != nil {
		s.embedded.Close()
	}
	if s.lock != nil {
		_ = s.lock.Close() // only locked
	}
}

// instanceName returns a readable name that is unique to this process.
func instanceName() string {
	host, err := os.Hostname()
	if err != nil {
		host = "host"
	}
	name := make([]byte, 0, len(host))
	for _, c := range []byte(host) { // only characters that subjects allow
		if c == '-' || c >= '0' && c <= '9' || c >= 'a' && c <= 'z' || c >= 'A' && c <= 'Z' {
			name = append(name, c)
		}
	}
	return string(name) + "-" + string(proto.NewTraceID()[4:12])
}

// part is a long-running part of a role. run returns when ctx is done, or with an error.
type part struct {
	name string
	run  func(ctx context.Context) error
}

// roles are the parts of a process, in the order in which they stop.
type roles struct {
	work  []part       // processes jobs and drains: stops first
	api   http.Handler // serves HTTP until the work is drained
	base  []part       // serves the other parts: stops last
	drain func()       // makes api reject new work
	leave func()       // makes api answer clients that wait for queued work
}

// group runs parts.
type group struct {
	mu   sync.Mutex
	errs []error // of failed parts
	fail context.CancelCauseFunc
}

// start runs p until ctx is done. If p fails, the process stops.
func (g *group) start(ctx context.Context, wait *sync.WaitGroup, p part) {
	wait.Go(func() {
		if err := p.run(ctx); err != nil {
			err = fmt.Errorf("%s: %w", p.name, err)
			g.mu.Lock()
			g.errs = append(g.errs, err)
			g.mu.Unlock()
			g.fail(err)
		}
	})
}

// serve runs the roles until ctx is done or a part fails, and then stops them in order. It returns
// the errors of all parts.
func serve(ctx context.Context, cfg *Config, front func(http.Handler) http.Handler, log *slog.Logger) error {
	failed, fail := context.WithCancelCause(ctx)
	defer fail(nil)
	parts := &group{fail: fail}
	stay, leave := context.WithCancel(context.WithoutCancel(ctx)) // outlives ctx until the work is drained
	defer leave()
	webCtx, closeWeb := context.WithCancel(stay)
	defer closeWeb()
	server, err := listen(cfg, log)
	if err != nil {
		return err
	}
	if server != nil && front != nil {
		server.server.Handler = front(server.requests)
	}
	var work, web, base sync.WaitGroup
	if cfg.ProfileListen != "" {
		parts.start(webCtx, &web,
			part{"profiles", func(ctx context.Context) error { return cfg.serveProfiles(ctx, log) }})
	}
	if server != nil { // serves /healthz while the others wait for NATS
		parts.start(webCtx, &web, part{"HTTP server", server.run})
	}
	err = func() error {
		s, err := open(failed, cfg, log)
		if err != nil {
			return err
		}
		defer s.close()
		r, err := s.roles(failed)
		if err != nil {
			return err
		}
		for _, p := range r.base {
			parts.start(stay, &base, p)
		}
		for _, p := range r.work {
			parts.start(failed, &work, p)
		}
		if server != nil {
			server.open(r.api, r.leave)
		}
		if cfg.MetricsListen != "" {
			parts.start(webCtx, &web, part{"metrics", s.serveMetrics})
		}
		<-failed.Done()
		log.Info("draining", "timeout", cfg.Drain)
		r.drain()
		work.Wait()
		if cfg.Embedded() {
			r.leave() // queued jobs do not run before the next start
		}
		closeWeb()
		web.Wait()
		leave()
		base.Wait()
		return nil
	}()
	closeWeb()
	web.Wait()
	if failed.Err() != nil && errors.Is(err, context.Canceled) {
		err = nil // stopped during the start
	}
	if err = errors.Join(append(parts.errs, err)...); err == nil {
		log.Info("stopped")
	}
	return err
}

// roles returns the parts of this process.
func (s *system) roles(ctx context.Context) (r roles, err error) {
	if s.embedded != nil {
		r.base = append(r.base, part{"embedded NATS", s.embedded.Run})
		if s.cfg.Autoscale == AutoscaleProcess {
			socket, err := s.serveWorkers()
			if err != nil {
				return roles{}, err
			}
			r.base = append(r.base, socket)
		}
	}
	s.monitor = s.newMonitor()
	r.base = append(r.base, part{"monitor", s.monitor.run}, part{"description of this process", s.describe})
	var leads func() bool
	if s.cfg.dispatches() {
		scale, scalers, err := s.autoscaler()
		if err != nil {
			return roles{}, err
		}
		r.work = append(r.work, scalers...)
		d := &queue.Dispatcher{
			Store: s.store, Instance: s.instance, Memory: s.cfg.jobMemory(), Reserved: s.cfg.ReservedSlots.Of,
			Interactive:  s.cfg.InteractiveSlots.Of,
			OutputBudget: int64(s.cfg.OutputBudget), DiskFull: s.storeDiskFull, Secrets: s.keyring, Ended: s.executionEnded,
			DeadLettered: s.metrics.DeadLettered,
			Autoscaler:   scale, SoleWorker: s.cfg.Embedded() && s.cfg.Has(RoleWorker), Log: s.log,
		}
		leads = d.Leads
		s.metrics.Pools(s.queue.Pools, leads)
		r.base = append(r.base, part{"dispatcher", d.Run})
	}
	s.metrics.Queue(s.queue.Stats, leads)
	if s.cfg.Has(RoleWorker) {
		s.metrics.Worker()
		s.health = newHealth(s.metrics, s.log)
	}
	if s.cfg.Has(RoleWebhook) || s.cfg.Has(RoleGateway) {
		if s.webhooks, err = s.openWebhooks(ctx); err != nil {
			return roles{}, err
		}
		r.base = append(r.base, part{"webhook settings", s.webhooks.settings.Run})
		r.work = append(r.work, part{"webhook dispatcher", s.webhooks.run})
	}
	r.api, r.drain, r.leave = s.healthHandler(), func() {}, func() {}
	if s.cfg.Has(RoleGateway) {
		g, base, err := s.gateway(ctx)
		if err != nil {
			return roles{}, err
		}
		if err := s.serveAgentSessions(ctx, g, &r); err != nil {
			return roles{}, err
		}
		if err := s.serveAgents(ctx, g, &r); err != nil {
			return roles{}, err
		}
		r.api, r.drain, r.leave = g.Handler(), g.Drain, g.Leave
		runner := &schedules.Runner{
			Schedules: s.schedules, Executions: scheduled{s.admission, s.queue, &deliveries.Store{Store: s.store}},
			Store: s.store, Instance: s.instance, Log: s.log,
		}
		batchRunner := &batches.Runner{
			Batches: s.batches, Executions: batchExecutions{s.admission, s.queue, s.agentRuns}, Deliveries: &deliveries.Store{
				Store: s.store,
			}, Store: s.store,
			Retention: s.cfg.Retention, Instance: s.instance, Log: s.log,
		}
		stepRunner := &pipelines.Runner{
			Pipelines: s.pipelines, Executions: steps{s.admission, s.queue}, Threads: stepThreads{s.versions(), s.threads},
			Store: s.store, Retention: s.cfg.Retention,
			Instance: s.instance, Log: s.log,
		}
		sandboxRunner := &sandboxes.Runner{
			Sandboxes: s.sandboxes, Executions: s.queue, Keys: s.admission, Homes: s.versions(), Store: s.store,
			Instance: s.instance, Log: s.log,
		}
		deletions := &orgdata.Runner{
			Store: s.store, Data: s.orgData, Orgs: s.orgs, Settle: orgdata.DefaultSettle, Instance: s.instance, Log: s.log,
		}
		r.work = append(r.work, part{"runner of schedules", runner.Run}, part{"runner of batches", batchRunner.Run},
			part{"runner of pipelines", stepRunner.Run}, part{"runner of sandboxes", sandboxRunner.Run},
			part{"deletion of organisations", deletions.Run})
		counter := &usage.Counter{Store: s.store, Retention: s.cfg.Retention, Instance: s.instance, Log: s.log}
		r.base = append(append(r.base, base...), part{"threads", s.runThreadGC}, part{"counting of usage", counter.Run})
		sinks, err := s.auditSinks()
		if err != nil {
			return roles{}, err
		}
		r.base = append(r.base, sinks...)
	}
	if s.cfg.Has(RoleWorker) {
		w := &workerRole{system: s, ready: make(chan struct{}), logged: map[string]string{}}
		r.work, r.base = append(r.work, part{"worker", w.work}), append(r.base, part{"jails", w.hold})
	}
	if !s.cfg.Has(RoleGateway) && !s.cfg.Has(RoleScheduler) {
		r.base = append(r.base, part{"dispatcher watch", s.watchDispatcher})
	}
	return r, nil
}
