package app

import (
	"context"
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

	"github.com/bullpen-run/bullpen/gateway"
	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/scheduler/backup"
	"github.com/bullpen-run/bullpen/scheduler/deadletters"
	"github.com/bullpen-run/bullpen/scheduler/events"
	"github.com/bullpen-run/bullpen/scheduler/queue"
	"github.com/bullpen-run/bullpen/scheduler/registry"
	"github.com/bullpen-run/bullpen/scheduler/submit"
)

const (
	headerTimeout  = 10 * time.Second
	idleTimeout    = 2 * time.Minute
	maxHeaderBytes = 64 << 10
	closeTimeout   = 5 * time.Second
)

// gateway returns the server of the gateway role, and the parts that it needs.
func (s *system) gateway(ctx context.Context) (*gateway.Server, []part, error) {
	keys, err := registry.OpenKeys(ctx, s.store, s.cfg.Region, s.log)
	if err != nil {
		return nil, nil, err
	}
	if err := s.bootstrap(ctx, keys); err != nil {
		return nil, nil, err
	}
	profiles, err := registry.OpenProfiles(ctx, s.store, s.log)
	if err != nil {
		return nil, nil, err
	}
	images, err := s.images(ctx)
	if err != nil {
		return nil, nil, err
	}
	versions := s.versions()
	letters := &deadletters.Store{Store: s.store}
	return &gateway.Server{
		Submissions: &submit.Submitter{
			Jobs: s.queue, Bindings: &registry.Bindings{Store: s.store}, Threads: s.threads, DeadLetters: letters, Log: s.log,
		},
		Jobs: queued{s.queue}, Events: eventLog{s.events}, Keys: keys, KeyAdmin: keys,
		Profiles: profiles, Images: images, ImageAdmin: images, Default: s.defaultProfile(),
		Webhooks: s.webhooks.settings, URLs: s.webhooks.guard, Deliveries: s.webhooks.deliveries,
		Threads: threadList{s.threads, s.queue}, Versions: versions, ThreadAdmin: versions, Files: versions,
		DeadLetters: letters, Backups: &backup.Maker{Store: s.store, Version: Version()},
		Home: s.cfg.Home, PublicURL: s.cfg.PublicURL, URLSecret: keys.Derived("URLs of files"),
		Log: s.log, Tracer: otel.Tracer("bullpen/gateway"), Metrics: s.metrics.Handler(), Done: s.metrics.HTTPDone,
		QueueWait: s.cfg.QueueWait, QueueExpiry: s.cfg.QueueExpiry, MaxBody: gateway.DefaultMaxBody, Memory: s.cfg.requestMemory(),
		UpgradeURL: s.cfg.UpgradeURL, Version: Version(), Unfit: s.health.reason,
	}, []part{{"API keys", keys.Run}, {"sandbox profiles", profiles.Run}, {"images", images.Run}}, nil
}

// healthHandler serves health and metrics in a process without the gateway role.
func (s *system) healthHandler() http.Handler {
	mux := http.NewServeMux()
	mux.HandleFunc("GET /healthz", func(w http.ResponseWriter, _ *http.Request) { _, _ = io.WriteString(w, "ok\n") })
	mux.HandleFunc("GET /readyz", func(w http.ResponseWriter, _ *http.Request) {
		if why := s.health.reason(); why != "" {
			http.Error(w, "the worker here takes no jobs: "+why, http.StatusServiceUnavailable)
			return
		}
		_, _ = io.WriteString(w, "ready\n")
	})
	mux.Handle("GET /metrics", s.metrics.Handler())
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
		_, _ = io.WriteString(w, `{"error":"service_unavailable","message":"this server is starting","missing":"server"}`+"\n")
	})
	return mux
}

// httpServer serves HTTP. Its listener stays open while work drains, so that new requests get 503
// rather than a refused connection.
type httpServer struct {
	server   *http.Server
	listener net.Listener
	requests *requests
	leave    func() // answers clients that wait; nil before open
	drain    time.Duration
	log      *slog.Logger
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
	h := &httpServer{listener: limited, requests: &requests{}, drain: cfg.Drain + closeTimeout, log: log}
	h.requests.setHandler(starting())
	h.server = &http.Server{
		Handler: h.requests, ReadHeaderTimeout: headerTimeout, IdleTimeout: idleTimeout, MaxHeaderBytes: maxHeaderBytes,
		Protocols: protocols(), ConnState: limited.count,
	}
	return h, nil
}

// open serves api from now on. run calls leave when requests have had the time to finish.
func (h *httpServer) open(api http.Handler, leave func()) {
	h.leave = leave
	h.requests.setHandler(api)
	h.log.Info("listening", "url", "http://"+h.listener.Addr().String())
}

// run serves until ctx is done and the open requests have finished.
func (h *httpServer) run(ctx context.Context) error {
	served := make(chan error, 1)
	go func() { served <- h.server.Serve(h.listener) }()
	select {
	case err := <-served:
		return err
	case <-ctx.Done():
	}
	background := context.WithoutCancel(ctx)
	idle, stop := context.WithTimeout(background, h.drain)
	defer stop()
	h.requests.wait(idle)
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

// protocols includes HTTP/2 without TLS, for proxies in front of the gateway.
func protocols() *http.Protocols {
	p := new(http.Protocols)
	p.SetHTTP1(true)
	p.SetUnencryptedHTTP2(true)
	return p
}

// defaultProfile returns the sandbox profile of keys that name none.
func (s *system) defaultProfile() proto.Profile {
	p := proto.DefaultProfile()
	p.Output = s.cfg.OutputLimit
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
	n       int
	zero    chan struct{} // closed when n falls to 0; nil unless wait was called
}

// ServeHTTP calls the handler.
func (f *requests) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	f.add(1)
	defer f.add(-1)
	(*f.handler.Load()).ServeHTTP(w, r)
}

// setHandler replaces the handler.
func (f *requests) setHandler(h http.Handler) { f.handler.Store(&h) }

func (f *requests) add(n int) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.n += n
	if f.n == 0 && f.zero != nil {
		close(f.zero)
		f.zero = nil
	}
}

// wait blocks until no request is open, or ctx is done.
func (f *requests) wait(ctx context.Context) {
	f.mu.Lock()
	if f.n == 0 {
		f.mu.Unlock()
		return
	}
	if f.zero == nil {
		f.zero = make(chan struct{})
	}
	zero := f.zero
	f.mu.Unlock()
	select {
	case <-zero:
	case <-ctx.Done():
	}
}

// queued adapts the queue to the interface of the gateway.
type queued struct{ *queue.Queue }

func (q queued) Watch(id proto.TraceID) (gateway.Watch, error) { return q.Queue.Watch(id) }

// eventLog adapts the event log to the interface of the gateway.
type eventLog struct{ log *events.Log }

func (l eventLog) Follow(ctx context.Context, id proto.TraceID, after int64) (gateway.Tail, error) {
	return l.log.Follow(ctx, id, after)
}

func (l eventLog) Last(ctx context.Context, id proto.TraceID, attempt int) (int64, error) {
	return l.log.Store.LastEvent(ctx, id, attempt)
}
