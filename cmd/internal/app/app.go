// Package app holds the settings of bullpen and puts its rooms together. It is the only place where they meet, and the only one that
// knows whether this process is the whole of bullpen or a part of it.
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
	// diskReserve is what must be free on the disk of the embedded store for new jobs to be accepted. The results of those that
	// were accepted have it for themselves.
	diskReserve = 64 << 20
)

// Run serves with the roles of cfg until ctx ends, and then drains: new work is refused, work that runs goes on for cfg.Drain, what
// runs longer is recorded as lost. A nil error means that all of that went well.
func Run(ctx context.Context, cfg *Config) error {
	log := NewLogger(os.Stderr, cfg.LogLevel, cfg.LogFormat)
	log.Info("bullpen starts", "version", Version(), "roles", roleNames(cfg.Roles))
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
			log.Warn("the last spans were not sent", "error", err)
		}
	}()
	if err := cfg.checkMachine(); err != nil {
		return err
	}
	return serve(ctx, cfg, log)
}

// system is what the roles of a process share.
type system struct {
	cfg      *Config
	log      *slog.Logger
	instance string // unique to this process
	embedded *natsembed.Server
	store    *store.Store
	blobs    *blob.Store // of the gateway and worker roles; nil without either
	queue    *queue.Queue
	threads  *threads.Threads
	events   *events.Log
	metrics  *Metrics
	fitness  *fitness  // of the worker role; nil without it
	webhooks *webhooks // of the gateway and webhook roles; nil without either
}

// open opens what the roles stand on, waiting for a NATS that is not there yet.
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

// access says how to reach the external NATS, under a name for the server's connection list.
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

// instanceName is unique to this process and readable in logs.
func instanceName() string {
	host, err := os.Hostname()
	if err != nil {
		host = "host"
	}
	name := make([]byte, 0, len(host))
	for _, c := range []byte(host) { // it becomes part of subjects
		if c == '-' || c >= '0' && c <= '9' || c >= 'a' && c <= 'z' || c >= 'A' && c <= 'Z' {
			name = append(name, c)
		}
	}
	return string(name) + "-" + string(proto.NewTraceID()[4:12])
}

// part is a long-lived piece of a role.
type part struct {
	name string
	run  func(ctx context.Context) error
}

// roles are the parts of a process by when they stop.
type roles struct {
	work  []part       // takes jobs: stops first, and drains
	base  []part       // what the others stand on: stops last
	api   http.Handler // what the process answers over HTTP, until the work and its answers are done
	drain func()       // makes api refuse new work
	leave func()       // makes api answer those who wait for work
}

// running are the parts that were started.
type running struct {
	mu   sync.Mutex
	errs []error // of those that failed, whenever that was
	fail context.CancelCauseFunc
}

// start runs p until ctx ends. If it fails, all stops.
func (r *running) start(ctx context.Context, group *sync.WaitGroup, p part) {
	group.Go(func() {
		if err := p.run(ctx); err != nil {
			err = fmt.Errorf("%s: %w", p.name, err)
			r.mu.Lock()
			r.errs = append(r.errs, err)
			r.mu.Unlock()
			r.fail(err)
		}
	})
}

// serve runs the roles until ctx ends or one of them fails, and stops them in their order. Its error is all that failed, before and
// while it stopped.
func serve(ctx context.Context, cfg *Config, log *slog.Logger) error {
	failed, fail := context.WithCancelCause(ctx)
	defer fail(nil)
	parts := &running{fail: fail}
	stay, leave := context.WithCancel(context.WithoutCancel(ctx)) // outlives ctx until all has drained
	defer leave()
	closing, closeWeb := context.WithCancel(stay)
	defer closeWeb()
	front, err := listen(cfg, log)
	if err != nil {
		return err
	}
	var work, web, base sync.WaitGroup
	if cfg.ProfileListen != "" {
		parts.start(closing, &web, part{"profiles", func(ctx context.Context) error { return tellProfiles(ctx, cfg.ProfileListen, log) }})
	}
	if front != nil { // it tells that the process lives while the others wait for NATS
		parts.start(closing, &web, part{"HTTP server", front.run})
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
		if front != nil {
			front.open(r.api, r.leave)
		}
		<-failed.Done()
		log.Info("draining", "at_most", cfg.Drain)
		r.drain()
		work.Wait()
		if cfg.Embedded() {
			r.leave() // what is queued now does not run before the next start
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
		err = nil // told to stop before it had begun
	}
	if err = errors.Join(append(parts.errs, err)...); err == nil {
		log.Info("bullpen has stopped")
	}
	return err
}

// roles puts the roles of this process together.
func (s *system) roles(ctx context.Context) (r roles, err error) {
	if s.embedded != nil {
		r.base = append(r.base, part{"embedded NATS", s.embedded.Run})
	}
	if s.cfg.Has(RoleScheduler) || s.cfg.Has(RoleGateway) {
		d := &queue.Dispatcher{Store: s.store, Instance: s.instance, Memory: s.cfg.jobMemory(), Log: s.log}
		r.base = append(r.base, part{"dispatcher", d.Run})
	}
	if s.cfg.Has(RoleWorker) {
		s.fitness = newFitness(s.metrics, s.log)
	}
	if s.cfg.Has(RoleWebhook) || s.cfg.Has(RoleGateway) {
		if s.webhooks, err = s.openWebhooks(ctx); err != nil {
			return roles{}, err
		}
		r.base = append(r.base, part{"webhook settings", s.webhooks.settings.Run})
		r.work = append(r.work, part{"webhook dispatcher", s.webhooks.run})
	}
	r.api, r.drain, r.leave = s.health(), func() {}, func() {}
	if s.cfg.Has(RoleGateway) {
		g, base, err := s.gateway(ctx)
		if err != nil {
			return roles{}, err
		}
		r.api, r.drain, r.leave = g.Handler(), g.Drain, g.Leave
		r.base = append(append(r.base, base...), part{"threads", s.keepHouse})
	}
	if s.cfg.Has(RoleWorker) {
		w := &workerRole{system: s, ready: make(chan struct{}), lacks: map[string]string{}}
		r.work, r.base = append(r.work, part{"worker", w.work}), append(r.base, part{"jails", w.hold})
	}
	if !s.cfg.Has(RoleGateway) && !s.cfg.Has(RoleScheduler) {
		r.base = append(r.base, part{"watch of the dispatcher", s.watchDispatcher})
	}
	return r, nil
}
