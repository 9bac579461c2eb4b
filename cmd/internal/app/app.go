// Package app has the settings of bullpen and wires its packages together. No other package imports
// more than one component, or knows whether this process runs all roles or some.
package app

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"os"
	"sync"
	"time"

	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/scheduler/events"
	"github.com/bullpen-run/bullpen/scheduler/natsembed"
	"github.com/bullpen-run/bullpen/scheduler/queue"
	"github.com/bullpen-run/bullpen/scheduler/store"
	"github.com/bullpen-run/bullpen/scheduler/threads"
	"github.com/bullpen-run/bullpen/storage/blob"
)

const (
	flushTime = 5 * time.Second
	// diskReserve is the free disk space in bytes below which the embedded NATS accepts no new
	// jobs. It is reserved for the results of accepted ones.
	diskReserve = 64 << 20
)

// Run runs the roles of cfg until ctx is done, and then drains: it rejects new work and lets
// running work finish for cfg.Drain. Longer executions are recorded as lost. Run returns nil after
// an orderly stop.
func Run(ctx context.Context, cfg *Config) error {
	log := NewLogger(os.Stderr, cfg.LogLevel, cfg.LogFormat)
	log.Info("starting", "version", Version(), "roles", roleNames(cfg.Roles))
	log.Debug("settings", "config", cfg)
	cfg.limitMemory()
	telemetry, err := StartTelemetry(ctx, Version(), log)
	if err != nil {
		return err
	}
	defer func() {
		flush, cancel := context.WithTimeout(context.WithoutCancel(ctx), flushTime)
		defer cancel()
		if err := telemetry.Shutdown(flush); err != nil {
			log.Warn("spans lost at shutdown", "error", err)
		}
	}()
	if err := cfg.checkMachine(); err != nil {
		return err
	}
	return serve(ctx, cfg, log)
}

// system has the resources that the roles of a process share.
type system struct {
	cfg      *Config
	log      *slog.Logger
	instance string // unique to this process
	embedded *natsembed.Server
	store    *store.Store
	blobs    *blob.Store // nil without the gateway and worker roles
	queue    *queue.Queue
	threads  *threads.Threads
	events   *events.Log
	metrics  *Metrics
	health   *health   // nil without the worker role
	webhooks *webhooks // nil without the gateway and webhook roles
}

// open opens the shared resources. It blocks until NATS is reachable.
func open(ctx context.Context, cfg *Config, log *slog.Logger) (_ *system, err error) {
	s := &system{cfg: cfg, log: log, instance: instanceName()}
	defer func() {
		if err != nil {
			s.close()
		}
	}()
	access := cfg.access("bullpen " + s.instance)
	var full func() bool
	if cfg.Embedded() {
		if s.embedded, err = natsembed.Open(cfg.Data, diskReserve, log); err != nil {
			return nil, err
		}
		access.InProcess, full = s.embedded, s.embedded.Full
	}
	if cfg.needsStore() {
		if s.blobs, err = openStore(ctx, cfg); err != nil {
			return nil, err
		}
	}
	s.store, err = store.Connect(ctx, access, store.Config{
		Replicas: cfg.Replicas, Retention: cfg.Retention, AttachOnly: len(cfg.Roles) == 1 && cfg.Has(RoleWorker),
	}, log)
	if err != nil {
		return nil, err
	}
	s.queue = &queue.Queue{Store: s.store, Full: full}
	s.threads = &threads.Threads{Store: s.store}
	s.events = &events.Log{Store: s.store, Records: s.queue}
	s.metrics = NewMetrics(s.queue.Stats)
	return s, nil
}

// access returns the parameters of connections to the external NATS. NATS lists a connection by its
// name.
func (n *NATS) access(name string) store.Access {
	return store.Access{
		URL: n.URL, Creds: n.Creds, User: n.User, Password: n.Password, CA: n.CA, Cert: n.Cert, Key: n.Key, Name: name,
	}
}

func (s *system) close() {
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
func serve(ctx context.Context, cfg *Config, log *slog.Logger) error {
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
	var work, web, base sync.WaitGroup
	if cfg.ProfileListen != "" {
		parts.start(webCtx, &web, part{"profiles", func(ctx context.Context) error { return serveProfiles(ctx, cfg.ProfileListen, log) }})
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
	}
	if s.cfg.Has(RoleScheduler) || s.cfg.Has(RoleGateway) {
		d := &queue.Dispatcher{Store: s.store, Instance: s.instance, Memory: s.cfg.jobMemory(), Log: s.log}
		r.base = append(r.base, part{"dispatcher", d.Run})
	}
	if s.cfg.Has(RoleWorker) {
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
		r.api, r.drain, r.leave = g.Handler(), g.Drain, g.Leave
		r.base = append(append(r.base, base...), part{"threads", s.runThreadGC})
	}
	if s.cfg.Has(RoleWorker) {
		w := &workerRole{system: s, ready: make(chan struct{}), lacks: map[string]string{}}
		r.work, r.base = append(r.work, part{"worker", w.work}), append(r.base, part{"jails", w.hold})
	}
	if !s.cfg.Has(RoleGateway) && !s.cfg.Has(RoleScheduler) {
		r.base = append(r.base, part{"dispatcher watch", s.watchDispatcher})
	}
	return r, nil
}
