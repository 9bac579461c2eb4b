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
	headerTimeout  = 10 * time.Second // a client that sends its headers slower is cut off
	idleTimeout    = 2 * time.Minute
	maxHeaderBytes = 64 << 10
	closeTimeout   = 5 * time.Second
)

// gateway puts the gateway role together; the parts are what it stands on.
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
		UpgradeURL: s.cfg.UpgradeURL, Version: Version(), Unfit: s.fitness.whyNot,
	}, []part{{"API keys", keys.Run}, {"sandbox profiles", profiles.Run}, {"images", images.Run}}, nil
}

// health is what a process without the gateway role answers.
func (s *system) health() http.Handler {
	mux := http.NewServeMux()
	mux.HandleFunc("GET /healthz", func(w http.ResponseWriter, _ *http.Request) { _, _ = io.WriteString(w, "ok\n") })
	mux.HandleFunc("GET /readyz", func(w http.ResponseWriter, _ *http.Request) {
		if why := s.fitness.whyNot(); why != "" {
			http.Error(w, "the worker here takes no jobs: "+why, http.StatusServiceUnavailable)
			return
		}
		_, _ = io.WriteString(w, "ready\n")
	})
	mux.Handle("GET /metrics", s.metrics.Handler())
	return mux
}

// starting is what a process answers before its roles are put together.
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

// httpServer answers HTTP. While work drains its listener stays open, so that new requests are told to come again rather than
// refused a connection.
type httpServer struct {
	server   *http.Server
	listener net.Listener
	busy     *inFlight
	leave    func() // answers those who wait; nil before open
	patience time.Duration
	log      *slog.Logger
}

// listen takes the address that is served on; it is nil where there is none. Until open is called all but its health is refused.
func listen(cfg *Config, log *slog.Logger) (*httpServer, error) {
	if cfg.Address() == "" {
		return nil, nil
	}
	listener, err := net.Listen("tcp", cfg.Address())
	if err != nil {
		return nil, fmt.Errorf("listen: %w: choose another --listen", err)
	}
	limited := &limitedListener{Listener: listener, most: cfg.maxConnections()}
	h := &httpServer{listener: limited, busy: &inFlight{}, patience: cfg.Drain + closeTimeout, log: log}
	h.busy.become(starting())
	h.server = &http.Server{
		Handler: h.busy, ReadHeaderTimeout: headerTimeout, IdleTimeout: idleTimeout, MaxHeaderBytes: maxHeaderBytes,
		Protocols: protocols(), ConnState: limited.count,
	}
	return h, nil
}

// open answers with api from now on. leave is called when those who wait for their answers have waited long enough.
func (h *httpServer) open(api http.Handler, leave func()) {
	h.leave = leave
	h.busy.become(api)
	h.log.Info("listening", "url", "http://"+h.listener.Addr().String())
}

// run serves until ctx ends and what is being answered has been.
func (h *httpServer) run(ctx context.Context) error {
	served := make(chan error, 1)
	go func() { served <- h.server.Serve(h.listener) }()
	select {
	case err := <-served:
		return err
	case <-ctx.Done():
	}
	rest := context.WithoutCancel(ctx)
	idle, stop := context.WithTimeout(rest, h.patience)
	defer stop()
	h.busy.wait(idle)
	if h.leave != nil {
		h.leave()
	}
	closing, cancel := context.WithTimeout(rest, closeTimeout)
	defer cancel()
	if err := h.server.Shutdown(closing); err != nil {
		_ = h.server.Close()
	}
	if err := <-served; !errors.Is(err, http.ErrServerClosed) {
		return err
	}
	return nil
}

// protocols lets clients speak HTTP/2 without TLS, which proxies in front of the gateway do.
func protocols() *http.Protocols {
	p := new(http.Protocols)
	p.SetHTTP1(true)
	p.SetUnencryptedHTTP2(true)
	return p
}

// defaultProfile is the sandbox of keys that are bound to none.
func (s *system) defaultProfile() proto.Profile {
	p := proto.DefaultProfile()
	p.Output = s.cfg.OutputLimit
	return p
}

// afterDrain calls f when d has passed since ctx ended, unless stop is called first.
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

// inFlight counts the requests that are being answered.
type inFlight struct {
	next atomic.Pointer[http.Handler]
	mu   sync.Mutex
	n    int
	zero chan struct{} // closed when n falls to 0; nil when nobody waits
}

func (f *inFlight) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	f.add(1)
	defer f.add(-1)
	(*f.next.Load()).ServeHTTP(w, r)
}

// become sets what answers from now on.
func (f *inFlight) become(h http.Handler) { f.next.Store(&h) }

func (f *inFlight) add(n int) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.n += n
	if f.n == 0 && f.zero != nil {
		close(f.zero)
		f.zero = nil
	}
}

// wait returns when no request is being answered, or ctx ends.
func (f *inFlight) wait(ctx context.Context) {
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

// queued gives the gateway the queue under its own interface.
type queued struct{ *queue.Queue }

func (q queued) Watch(id proto.TraceID) (gateway.Watch, error) { return q.Queue.Watch(id) }

// eventLog gives the gateway the event log under its own interface.
type eventLog struct{ log *events.Log }

func (l eventLog) Follow(ctx context.Context, id proto.TraceID, after int64) (gateway.Tail, error) {
	return l.log.Follow(ctx, id, after)
}

func (l eventLog) Last(ctx context.Context, id proto.TraceID, attempt int) (int64, error) {
	return l.log.Store.LastEvent(ctx, id, attempt)
}
