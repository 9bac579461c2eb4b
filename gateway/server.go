package gateway

import (
	"context"
	"fmt"
	"log/slog"
	"net/http"
	"strings"
	"sync/atomic"
	"time"

	"github.com/go-chi/chi/v5"
	"go.opentelemetry.io/otel/trace"

	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/proto/api"
)

// DefaultMaxBody is the documented cap on request bodies, in bytes.
const DefaultMaxBody = 8 << 20

const (
	bodyTimeout = 30 * time.Second // a body must have arrived by then
	// writeTimeout is how long a client may take for one piece of an answer, of up to writePiece bytes, before the
	// connection is dropped: a client that stops reading must not hold an answer in memory.
	writeTimeout = 60 * time.Second
	writePiece   = 256 << 10
	keepalive    = 15 * time.Second
	// leaveGrace is how long a stream goes on without an event once this server leaves.
	leaveGrace = time.Second
	// answerGrace is what an inline answer may take beyond the execution's timeout. The SDK gives up two seconds later,
	// and sends the code again.
	answerGrace = 8 * time.Second
	// storeTimeout bounds a change that is completed even if the client is gone.
	storeTimeout = 4 * time.Second
	// readyTimeout bounds the check behind /readyz.
	readyTimeout = time.Second
)

// Server answers HTTP requests. Its exported fields are set before Handler is called and not changed afterwards; all but
// Metrics, Done, UpgradeURL and PublicURL are needed. It is safe for concurrent use and starts no goroutines of its own.
type Server struct {
	Submissions Submissions
	Jobs        Jobs
	Events      Events
	Keys        Keys
	KeyAdmin    KeyAdmin
	Profiles    Profiles
	Images      Images // those that profiles name
	// ImageAdmin answers for the images of sandboxes.
	ImageAdmin ImageAdmin
	Webhooks   Webhooks
	URLs       URLs // those that webhooks may go to
	Deliveries Deliveries
	Threads    Threads
	Versions   Versions
	// ThreadAdmin answers for the store of all threads.
	ThreadAdmin ThreadAdmin
	Files       Files
	DeadLetters DeadLetters
	Backups     Backups

	Log    *slog.Logger
	Tracer trace.Tracer
	// Metrics answers GET /metrics; nil for none.
	Metrics http.Handler
	// Done is told of every request that was answered: the pattern of its route, its method, the status and the time taken;
	// nil for nobody.
	Done func(route, method string, status int, took time.Duration)

	Default     proto.Profile // the sandbox of keys that are bound to none
	QueueWait   time.Duration // how long inline and streaming executions wait for a worker
	QueueExpiry time.Duration // how long asynchronous ones do
	MaxBody     int64         // cap on request bodies, in bytes
	Memory      int64         // what open requests and their bodies may take, in bytes; more than that is refused
	UpgradeURL  string        // where people change their plan, for messages; empty for nowhere
	Version     string        // of the program, for the documents
	Home        string        // where programs find their home, absolute and cleaned: paths of files may begin with it
	PublicURL   string        // where clients reach this server, for URLs of files, without a slash at its end; empty for the Host they name
	// URLSecret signs the URLs of files. It is random, and the same in all gateways.
	URLSecret *[32]byte
	// Unfit tells why the worker in this process takes no jobs; empty where it does. It is nil in a process without one.
	Unfit func() string

	draining  atomic.Bool
	budget    budget
	leaving   context.Context // of all waits for executions; cancelled by Leave
	leave     context.CancelFunc
	transfers transfers
}

// Drain makes new requests of the API be answered with 503 from now on, and /readyz too. Those that have begun go on to their end,
// for which the caller waits.
func (s *Server) Drain() { s.draining.Store(true) }

// Leave makes nobody wait any longer for an execution whose answer has not begun: what is queued for its caller is withdrawn and
// answered with 503, what runs with where to ask for it. Streams that have begun are broken off, between two events, when there is
// nothing to tell for a second: whoever reads them goes on elsewhere. It is called after Handler.
func (s *Server) Leave() { s.leave() }

// Handler gives the handler of all routes. It is called once.
func (s *Server) Handler() http.Handler {
	s.leaving, s.leave = context.WithCancel(context.Background())
	root := chi.NewRouter()
	root.Use(s.observe)
	root.NotFound(s.handle(func(http.ResponseWriter, *http.Request) error { return errNoRoute }))
	root.MethodNotAllowed(s.handle(methodNotAllowed(root)))

	for _, register := range []func(string, http.HandlerFunc){root.Get, root.Head} {
		register("/healthz", s.healthz)
		register("/readyz", s.readyz)
	}
	if s.Metrics != nil {
		root.Method(http.MethodGet, "/metrics", s.Metrics)
	}
	s.routeDocs(root)
	s.routeAPI(root)
	return root
}

// routeAPI registers the routes of the API. They are not mounted as a router of their own, because a mounted router cannot
// distinguish unknown paths from unknown methods.
func (s *Server) routeAPI(r chi.Router) {
	handlers := map[string]func(http.ResponseWriter, *http.Request) error{
		"execute": s.execute, "getExecution": s.getExecution, "getOutput": s.getOutput, "cancelExecution": s.cancelExecution,
		"listExecutions": func(http.ResponseWriter, *http.Request) error {
			return notImplemented("the list of executions is", "ask for each by its trace id")
		},
		"getDelivery": s.getDelivery, "replayDelivery": s.replayDelivery, "getWebhook": s.getWebhook, "putWebhook": s.putWebhook,
		"patchWebhook": s.patchWebhook, "deleteWebhook": s.deleteWebhook, "rotateWebhook": s.rotateWebhook, "testWebhook": s.testWebhook,
		"replayFailed": s.replayFailed, "listEndpoints": s.listEndpoints, "enableEndpoint": s.enableEndpoint,
		"listThreads": s.listThreads, "getThread": s.getThread, "deleteThread": s.deleteThread, "forkThread": s.forkThread,
		"archiveThread": s.archiveThread, "listFiles": s.listFiles, "fileUploadURL": s.uploadURL, "fileDownloadURL": s.downloadURL,
		"getContent": s.getContent, "putContent": s.putContent, "createKey": s.createKey, "listKeys": s.listKeys, "revokeKey": s.revokeKey,
		"createSandbox": s.createSandbox, "listSandboxes": s.listSandboxes, "getSandbox": s.getSandbox, "replaceSandbox": s.replaceSandbox,
		"removeSandbox": s.deleteSandbox, "putImage": s.putImage, "listImages": s.listImages, "removeImage": s.removeImage,
		"listDeadLetters": s.listDeadLetters, "getDeadLetter": s.getDeadLetter, "deleteDeadLetter": s.deleteDeadLetter,
		"requeueDeadLetter": s.requeueDeadLetter, "backup": s.backup, "collectThreads": s.collectThreads, "rebuildThreads": s.rebuildThreads,
	}
	public := r.With(s.refuseWhenDraining) // signed URLs
	user := public.With(s.authenticate, s.limitMemory)
	admin := user.With(s.requireAllRights)
	for _, route := range api.Routes() {
		handler := handlers[route.ID]
		if handler == nil {
			continue // routes of the server itself
		}
		on := user
		switch {
		case route.Public:
			on = public
		case route.Admin():
			on = admin
		}
		on.Method(route.Method, route.Path, s.handle(handler))
	}
	public.Head(contentPath+"{token}", s.handle(s.getContent))
}

func (s *Server) refuseWhenDraining(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if s.draining.Load() {
			w.Header().Set("Connection", "close")
			s.writeError(w, r, errDraining)
			return
		}
		next.ServeHTTP(w, r)
	})
}

// authenticate finds the key of the request. What is not of the form of a key is not looked up.
func (s *Server) authenticate(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		scheme, secret, _ := strings.Cut(r.Header.Get("Authorization"), " ")
		secret = strings.TrimSpace(secret)
		if !strings.EqualFold(scheme, "Bearer") || proto.CheckKeyForm(secret) != nil {
			s.writeError(w, r, unauthorized())
			return
		}
		key, ok := s.Keys.Authenticate(secret)
		if !ok || key.RevokedAt != nil {
			s.writeError(w, r, unauthorized())
			return
		}
		info := infoOf(r.Context())
		info.key = *key
		if info.plan, ok = proto.PlanByName(key.Plan); !ok {
			s.writeError(w, r, fmt.Errorf("key %s has the plan %q, which there is not", key.ID, key.Plan))
			return
		}
		next.ServeHTTP(w, r)
	})
}

func (s *Server) requireAllRights(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if infoOf(r.Context()).key.Rights != proto.RightsAll {
			s.writeError(w, r, api.Errorf(api.CodeForbidden, "this route needs an API key with all rights"))
			return
		}
		next.ServeHTTP(w, r)
	})
}

// methodNotAllowed says which methods the path takes. The router calls it for methods it has never heard of as well, on any
// path, so a path that takes none is one that does not exist.
func methodNotAllowed(root chi.Routes) func(http.ResponseWriter, *http.Request) error {
	methods := []string{http.MethodGet, http.MethodHead, http.MethodPost, http.MethodPut, http.MethodPatch, http.MethodDelete}
	return func(w http.ResponseWriter, r *http.Request) error {
		path := r.URL.RawPath
		if path == "" {
			path = r.URL.Path
		}
		var allowed []string
		for _, method := range methods {
			if root.Match(chi.NewRouteContext(), method, path) {
				allowed = append(allowed, method)
			}
		}
		if len(allowed) == 0 {
			return errNoRoute
		}
		w.Header().Set("Allow", strings.Join(allowed, ", "))
		return api.Errorf(api.CodeMethodNotAllowed, "this path does not take that method; see the Allow header")
	}
}

// until gives a context that ends at the deadline, or when this server leaves.
func (s *Server) until(ctx context.Context, deadline time.Time) (context.Context, context.CancelFunc) {
	ctx, cancel := context.WithDeadline(ctx, deadline)
	stop := context.AfterFunc(s.leaving, cancel)
	return ctx, func() {
		stop()
		cancel()
	}
}

// detached gives a context for what must be finished although the client may be gone.
func detached(ctx context.Context) (context.Context, context.CancelFunc) {
	return context.WithTimeout(context.WithoutCancel(ctx), storeTimeout)
}
