package app

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"sync"
	"sync/atomic"
	"time"

	"go.opentelemetry.io/otel"

	"github.com/bullpen-run/bullpen/console"
	"github.com/bullpen-run/bullpen/gateway"
	"github.com/bullpen-run/bullpen/gateway/admin"
	"github.com/bullpen-run/bullpen/gateway/changes"
	"github.com/bullpen-run/bullpen/gateway/executions"
	"github.com/bullpen-run/bullpen/gateway/interpreters"
	"github.com/bullpen-run/bullpen/gateway/overview"
	gatewaysandboxes "github.com/bullpen-run/bullpen/gateway/sandboxes"
	"github.com/bullpen-run/bullpen/gateway/web"
	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/scheduler/activity"
	"github.com/bullpen-run/bullpen/scheduler/admission"
	"github.com/bullpen-run/bullpen/scheduler/audit"
	"github.com/bullpen-run/bullpen/scheduler/backup"
	"github.com/bullpen-run/bullpen/scheduler/batches"
	"github.com/bullpen-run/bullpen/scheduler/deadletters"
	"github.com/bullpen-run/bullpen/scheduler/events"
	"github.com/bullpen-run/bullpen/scheduler/orgdata"
	"github.com/bullpen-run/bullpen/scheduler/pipelines"
	"github.com/bullpen-run/bullpen/scheduler/queue"
	"github.com/bullpen-run/bullpen/scheduler/registry"
	"github.com/bullpen-run/bullpen/scheduler/sandboxes"
	"github.com/bullpen-run/bullpen/scheduler/schedules"
	"github.com/bullpen-run/bullpen/scheduler/submit"
	"github.com/bullpen-run/bullpen/scheduler/usage"
	"github.com/bullpen-run/bullpen/storage/thread"
)

const (
	headerTimeout  = 10 * time.Second
	idleTimeout    = 2 * time.Minute
	maxHeaderBytes = 64 << 10
	closeTimeout   = 5 * time.Second
)

// gateway returns the server of the gateway role, and the parts it needs.
func (s *system) gateway(ctx context.Context) (*gateway.Server, []part, error) {
	feed := new(changes.Feed)
	s.store.OnChange = feed.Changed
	keys, err := registry.OpenKeys(ctx, s.store, s.keyring, s.cfg.Region, s.log)
	if err != nil {
		return nil, nil, err
	}
	if err := s.bootstrap(ctx, keys); err != nil {
		return nil, nil, err
	}
	uses, err := registry.OpenKeyUses(ctx, s.store, s.log)
	if err != nil {
		return nil, nil, err
	}
	plans, err := registry.OpenPlans(ctx, s.store, s.log)
	if err != nil {
		return nil, nil, err
	}
	orgs, err := registry.OpenOrgs(ctx, s.store, s.log)
	if err != nil {
		return nil, nil, err
	}
	if err := adoptOrgs(ctx, orgs, keys); err != nil {
		return nil, nil, err
	}
	members, err := registry.OpenMembers(ctx, s.store, s.log)
	if err != nil {
		return nil, nil, err
	}
	sessions, err := registry.OpenSessions(ctx, s.store, keys.Derived("tokens of sessions"), s.log)
	if err != nil {
		return nil, nil, err
	}
	provider, err := s.cfg.login()
	if err != nil {
		return nil, nil, err
	}
	secrets, err := registry.OpenSecrets(ctx, s.store, s.keyring, s.log)
	if err != nil {
		return nil, nil, err
	}
	connections, err := registry.OpenConnections(ctx, s.store, s.log)
	if err != nil {
		return nil, nil, err
	}
	storage, err := openBuckets(s.cfg)
	if err != nil {
		return nil, nil, err
	}
	for _, warning := range storage.guard.Warnings() {
		s.log.Warn(warning)
	}
	profiles, err := registry.OpenProfiles(ctx, s.store, s.log)
	if err != nil {
		return nil, nil, err
	}
	images, err := s.images(ctx)
	if err != nil {
		return nil, nil, err
	}
	if s.offers, err = queue.OpenOffers(ctx, s.store, s.log); err != nil {
		return nil, nil, err
	}
	if s.schedules, err = schedules.Open(ctx, s.store, s.log); err != nil {
		return nil, nil, err
	}
	if err := s.openHistory(); err != nil {
		return nil, nil, err
	}
	if s.pipelines, err = pipelines.Open(ctx, s.store, s.log); err != nil {
		return nil, nil, err
	}
	if s.sandboxes, err = sandboxes.Open(ctx, s.store, s.log); err != nil {
		return nil, nil, err
	}
	if s.batches, err = batches.Open(ctx, s.store, s.blobs, s.log); err != nil {
		return nil, nil, err
	}
	if s.usage, err = usage.Open(ctx, s.store, s.log); err != nil {
		return nil, nil, err
	}
	s.orgs, s.orgData = orgs, orgdata.New(s.store, orgdata.Sources{
		Executions: s.queue, Blobs: s.blobs, Threads: thread.Prefixes, Batches: s.batches.Prefixes, Index: s.history,
	})
	s.logDefaultImage(ctx, images)
	agentFiles, err := registry.OpenAgentFiles(ctx, s.store, s.log)
	if err != nil {
		return nil, nil, err
	}
	versions := s.versions()
	letters := &deadletters.Store{Store: s.store}
	submitter := &submit.Submitter{
		Jobs: s.queue, Bindings: &registry.Bindings{Store: s.store}, Threads: s.threads, DeadLetters: letters, Log: s.log,
	}
	transfers := new(web.Transfers)
	s.admission = &admission.Admission{
		Submitter: submitter, Keys: keys, Members: members, Orgs: orgs, Plans: plans, Usage: s.usage, Profiles: profiles,
		Images:  images,
		Secrets: secrets, Connections: connections, Buckets: storage, Threads: s.threads, Files: versions,
		Transfers: transfers,
		Webhooks:  s.webhooks.settings, URLs: s.webhooks.guard, Default: s.defaultProfile(), QueueExpiry: s.cfg.QueueExpiry,
		Retention: s.cfg.Retention, UpgradeURL: s.cfg.UpgradeURL, QuotaReached: s.metrics.QuotaReached,
		Log: s.log, Tracer: otel.Tracer("bullpen/scheduler/admission"),
	}
	server := &gateway.Server{
		Console: console.Files(),
		Core: web.Core{
			Callers: keys, KeyUses: uses, Entitlements: s.admission, Auditor: &audit.Log{Store: s.store}, Transfers: transfers,
			Log: s.log, Tracer: otel.Tracer("bullpen/gateway"), TrustTraceparent: s.cfg.TrustTraceparent,
			Done:    s.metrics.HTTPDone,
			MaxBody: web.DefaultMaxBody, Memory: s.cfg.requestMemory(), PublicURL: s.cfg.PublicURL,
			TrustedProxies: s.cfg.TrustedProxies, CORSOrigins: s.cfg.CORSOrigins, CursorSecret: keys.Derived("cursors of lists"),
			DiskFull: s.disk.full,
		},
		Admission: s.admission, Submissions: submitter,
		Jobs: queued{s.queue}, History: s.history, Workers: s.queue, Processes: s, Queue: s.queue, Capabilities: s.offers,
		Usage: s.usage, Schedules: s.schedules, Pipelines: s.pipelines, Batches: batchStore{s.batches, ""},
		Events: eventLog{s.events}, Keys: keys, KeyAdmin: keys, Orgs: orgs, OrgData: s.orgData, Plans: plans,
		Members: members, Sessions: sessions, Login: provider, Connections: connections, Storage: storage,
		Profiles: profiles, Preload: &registry.PreloadFailures{Store: s.store}, ImageAdmin: images,
		Webhooks: s.webhooks.settings, URLs: s.webhooks.guard, Deliveries: s.webhooks.deliveries,
		WebhookBody: s.cfg.webhookBody,
		Threads:     threadList{s.threads, s.queue}, Versions: versions, ThreadAdmin: versions, Files: versions,
		Parts:   versions,
		Backups: &backup.Maker{Store: s.store, Version: Version()}, Changes: feed,
		Home: s.cfg.Home, URLSecret: keys.Derived("URLs of files"),
		Metrics:   s.sharedMetrics(),
		QueueWait: s.cfg.QueueWait,
		MaxVolume: s.cfg.MaxVolumeSize, Version: Version(), Unfit: s.health.reason, StoreReady: s.monitor.storeReady.Load,
		Problems: s.problems,
		FromZero: s.cfg.Autoscale != AutoscaleNone, AgentFiles: agentFiles, Spool: s.newSpool,
	}
	s.live = &gatewaysandboxes.Service{
		Core: &server.Core, Store: s.sandboxes, Admission: s.admission, Jobs: s.queue, Submissions: submitter,
		Events:    eventLog{s.events},
		Tunnels:   &gatewaysandboxes.Tunnels{Endpoints: &sandboxes.Endpoints{Store: s.store}},
		TicketKey: keys.Derived("tickets of sandboxes"),
	}
	server.Interpreters = &interpreters.Service{Live: s.live}
	s.serveE2B(server, s.live, keys)
	counters := overview.NewCounters()
	follower := &activity.Follower{
		Store: s.store, OnChange: feed.Changed, OnQueued: counters.Queued, OnEnded: counters.Ended, Log: s.log,
	}
	server.Groups = []web.Group{
		&gatewaysandboxes.Routes{Service: s.live},
		&overview.Routes{
			Core: &server.Core, Counters: counters, Queue: s.queue, Stats: s.queue, Sandboxes: s.sandboxes, Problems: s.problems,
		},
		&admin.DeadLetterRoutes{Core: &server.Core, DeadLetters: letters, Requeuer: s.admission},
		&admin.SecretRoutes{Core: &server.Core, Secrets: secrets, Orgs: orgs, Key: s.keyring},
		&admin.AuditRoutes{Core: &server.Core, Audit: &audit.Log{Store: s.store}},
	}
	return server, []part{
		{"files of agents", agentFiles.Run},
		{"API keys", keys.Run},
		{"capabilities of workers", s.offers.Run},
		{"last uses of API keys", uses.Run},
		{"organisations", orgs.Run},
		{"plans", plans.Run},
		{"members", members.Run},
		{"sessions", sessions.Run},
		{"secrets", secrets.Run},
		{"storage connections", connections.Run},
		{"sandbox profiles", profiles.Run},
		{"images", images.Run},
		{"schedules", s.schedules.Run},
		{"pipelines", s.pipelines.Run},
		{"sandboxes", s.sandboxes.Run},
		{"batches", s.batches.Run},
		{"index of executions", s.history.Run},
		{"usage", s.usage.Run},
		{"activity", follower.Run},
	}, nil
}

// sharedMetrics returns what serves the metrics at the address of the API, or nil if they have one
// of their own.
func (s *system) sharedMetrics() http.Handler {
	if s.cfg.MetricsListen != "" {
		return nil
	}
	return s.metrics.Handler()
}

// healthHandler serves health and metrics in a process without the gateway role.
func (s *system) healthHandler() http.Handler {
	mux := http.NewServeMux()
	mux.HandleFunc("GET /healthz", func(w http.ResponseWriter, _ *http.Request) { _, _ = io.WriteString(w, "ok\n") })
	mux.HandleFunc("GET /readyz", func(w http.ResponseWriter, _ *http.Request) {
		if why := s.health.reason(); why != "" {
			http.Error(w, "the worker here accepts no jobs: "+why, http.StatusServiceUnavailable)
			return
		}
		if why := s.disk.full(); why != "" {
			http.Error(w, why, http.StatusServiceUnavailable)
			return
		}
		if s.blobs != nil && !s.monitor.storeReady.Load() {
			http.Error(w, "the blob store has not answered yet; see the log", http.StatusServiceUnavailable)
			return
		}
		_, _ = io.WriteString(w, "ready\n")
	})
	if metrics := s.sharedMetrics(); metrics != nil {
		mux.Handle("GET /metrics", metrics)
	}
	return mux
}

// starting serves requests until the roles have started.
func starting() http.Handler {
	mux := http.NewServeMux()
	mux.HandleFunc("GET /healthz", func(w http.ResponseWriter, _ *http.Request) { _, _ = io.WriteString(w, "ok\n") })
	mux.HandleFunc("/", func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", "application/json")
		w.Header().Set("Retry-After", "1")
		w.WriteHeader(http.StatusServiceUnavailable)
		_, _ = io.WriteString(w, `{"error":"service_unavailable","message":"this server is starting","missing":"server"}`+
			"\n")
	})
	return mux
}

// httpServer serves HTTP. Its listener stays open while work drains, so that new requests get 503
// rather than a refused connection.
type httpServer struct {
	server      *http.Server
	listener    net.Listener
	certificate *certificate // nil without TLS
	requests    *requests
	leave       func() // answers clients that wait; nil before open
	drain       time.Duration
	log         *slog.Logger
}

// listen opens the address of the HTTP server. It returns nil if there is none. Until open is
// called, the server serves only its health.
func listen(cfg *Config, log *slog.Logger) (*httpServer, error) {
	if cfg.Address() == "" {
		return nil, nil
	}
	listener, err := net.Listen("tcp", cfg.Address())
	if err != nil {
		return nil, fmt.Errorf("listen: %w: choose another --listen", err)
	}
	limited := &limitedListener{Listener: listener, limit: cfg.maxConnections()}
	h := &httpServer{listener: limited, requests: newRequests(starting()), drain: cfg.Drain + closeTimeout, log: log}
	h.server = &http.Server{
		Handler: h.requests, ReadHeaderTimeout: headerTimeout, IdleTimeout: idleTimeout, MaxHeaderBytes: maxHeaderBytes,
		Protocols: protocols(), ConnState: limited.count, ConnContext: web.ConnContext,
		ErrorLog: slog.NewLogLogger(log.Handler(), slog.LevelDebug),
	}
	if cfg.TLSCert != "" {
		if h.certificate, err = loadCertificate(cfg.TLSCert, cfg.TLSKey, log); err != nil {
			return nil, errors.Join(err, listener.Close())
		}
		h.server.TLSConfig = &tls.Config{GetCertificate: h.certificate.get, MinVersion: tls.VersionTLS12}
		countHTTP2(h.server.TLSConfig)
	}
	return h, nil
}

// serve serves connections until the server is shut down.
func (h *httpServer) serve() error {
	if h.certificate != nil {
		return h.server.ServeTLS(h.listener, "", "")
	}
	return h.server.Serve(h.listener)
}

// open serves api from now on. run calls leave when requests have had the time to finish.
func (h *httpServer) open(api http.Handler, leave func()) {
	h.leave = leave
	h.requests.setHandler(api)
	scheme := "http://"
	if h.certificate != nil {
		scheme = "https://"
	}
	h.log.Info("listening", "url", scheme+h.listener.Addr().String())
}

// run serves until ctx is done and all requests open at that time have finished. Requests that
// arrive meanwhile are served, too.
func (h *httpServer) run(ctx context.Context) error {
	served := make(chan error, 1)
	go func() { served <- h.serve() }()
	select {
	case err := <-served:
		return err
	case <-ctx.Done():
	}
	background := context.WithoutCancel(ctx)
	idle, stop := context.WithTimeout(background, h.drain)
	defer stop()
	select {
	case <-h.requests.done():
	case <-idle.Done():
	}
	if h.leave != nil {
		h.leave()
	}
	closing, cancel := context.WithTimeout(background, closeTimeout)
	defer cancel()
	if err := h.server.Shutdown(closing); err != nil {
		_ = h.server.Close()
	}
	if err := <-served; !errors.Is(err, http.ErrServerClosed) {
		return err
	}
	return nil
}

// protocols includes HTTP/2, also without TLS, for proxies in front of the gateway.
func protocols() *http.Protocols {
	p := new(http.Protocols)
	p.SetHTTP1(true)
	p.SetHTTP2(true)
	p.SetUnencryptedHTTP2(true)
	return p
}

// defaultProfile returns the sandbox profile of keys that name none.
func (s *system) defaultProfile() proto.Profile {
	p := proto.DefaultProfile()
	p.Output, p.Image = s.cfg.OutputLimit, s.cfg.DefaultImage
	return p
}

// afterDrain calls f when d has passed since ctx was done, unless stop is called first.
func afterDrain(ctx context.Context, d time.Duration, f func()) (stop func()) {
	var mu sync.Mutex
	var timer *time.Timer
	unhook := context.AfterFunc(ctx, func() {
		mu.Lock()
		defer mu.Unlock()
		timer = time.AfterFunc(d, f)
	})
	return func() {
		unhook()
		mu.Lock()
		defer mu.Unlock()
		if timer != nil {
			timer.Stop()
		}
	}
}

// requests counts the open requests of a handler.
type requests struct {
	handler atomic.Pointer[http.Handler]
	mu      sync.Mutex
	open    *sync.WaitGroup // requests since the start, or since done was called
}

func newRequests(h http.Handler) *requests {
	f := &requests{open: new(sync.WaitGroup)}
	f.setHandler(h)
	return f
}

// ServeHTTP calls the handler.
func (f *requests) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	f.mu.Lock()
	open := f.open
	open.Add(1)
	f.mu.Unlock()
	defer open.Done()
	(*f.handler.Load()).ServeHTTP(w, r)
}

// setHandler replaces the handler.
func (f *requests) setHandler(h http.Handler) { f.handler.Store(&h) }

// done returns a channel that is closed when the requests open now have ended. Later ones do not
// count, since polling clients would delay it forever.
func (f *requests) done() <-chan struct{} {
	f.mu.Lock()
	defer f.mu.Unlock()
	open, done := f.open, make(chan struct{})
	f.open = new(sync.WaitGroup)
	go func() {
		open.Wait()
		close(done)
	}()
	return done
}

// queued adapts the queue to the interface of the gateway.
type queued struct{ *queue.Queue }

func (q queued) Watch(org string, id proto.TraceID) (executions.Watch, error) {
	return q.Queue.Watch(org, id)
}

// eventLog adapts the event log to the interface of the gateway.
type eventLog struct{ log *events.Log }

func (l eventLog) Follow(ctx context.Context, org string, id proto.TraceID, after int64) (web.Tail, error) {
	return l.log.Follow(ctx, org, id, after)
}

func (l eventLog) Last(ctx context.Context, org string, id proto.TraceID, attempt int) (int64, error) {
	return l.log.Store.Output.LastEvent(ctx, org, id, attempt)
}
