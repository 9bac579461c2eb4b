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
	left      context.Context // of all waits for executions: it ends with Leave
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
	s.left, s.leave = context.WithCancel(context.Background())
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
	root.Group(s.routeV1)
	root.Group(s.routeContent)
	return root
}

// routeV1 is the execute API: everything that belongs to this surface and not to the whole server hangs here. It is not
// mounted as a router of its own because the paths of a mounted one cannot be told from those that do not exist.
func (s *Server) routeV1(r chi.Router) {
	const prefix = "/v1"
	r.Use(s.refuseWhenDraining, s.authenticate, s.occupy)
	r.Post(prefix+"/sandbox/execute", s.handle(s.execute))
	r.Get(prefix+"/executions/{id}", s.handle(s.getExecution))
	r.Get(prefix+"/executions/{id}/output", s.handle(s.getOutput))
	r.Post(prefix+"/executions/{id}/cancel", s.handle(s.cancelExecution))
	r.Get(prefix+"/executions/{id}/webhook", s.handle(s.getDelivery))
	r.Post(prefix+"/executions/{id}/webhook/replay", s.handle(s.replayDelivery))
	r.Get(prefix+"/webhook", s.handle(s.getWebhook))
	r.Put(prefix+"/webhook", s.handle(s.putWebhook))
	r.Patch(prefix+"/webhook", s.handle(s.patchWebhook))
	r.Delete(prefix+"/webhook", s.handle(s.deleteWebhook))
	r.Post(prefix+"/webhook/rotate", s.handle(s.rotateWebhook))
	r.Post(prefix+"/webhook/test", s.handle(s.testWebhook))
	r.Post(prefix+"/webhook/replay-failed", s.handle(s.replayFailed))
	r.Get(prefix+"/webhook/endpoints", s.handle(s.listEndpoints))
	r.Post(prefix+"/webhook/endpoints/enable", s.handle(s.enableEndpoint))
	r.Get(prefix+"/executions", s.handle(notYet("the list of executions is", "ask for each by its trace id")))
	r.Get(prefix+"/threads", s.handle(s.listThreads))
	r.Get(prefix+"/threads/{id}", s.handle(s.getThread))
	r.Delete(prefix+"/threads/{id}", s.handle(s.deleteThread))
	r.Post(prefix+"/threads/{id}/fork", s.handle(s.forkThread))
	r.Get(prefix+"/threads/{id}/archive", s.handle(s.archiveThread))
	r.Post(prefix+"/files/list", s.handle(s.listFiles))
	r.Post(prefix+"/files/upload_url", s.handle(s.uploadURL))
	r.Post(prefix+"/files/download_url", s.handle(s.downloadURL))
	r.Group(func(r chi.Router) {
		r.Use(s.requireAllRights)
		r.Post(prefix+"/admin/keys", s.handle(s.createKey))
		r.Get(prefix+"/admin/keys", s.handle(s.listKeys))
		r.Delete(prefix+"/admin/keys/{id}", s.handle(s.revokeKey))
		r.Post(prefix+"/admin/sandboxes", s.handle(s.createSandbox))
		r.Get(prefix+"/admin/sandboxes", s.handle(s.listSandboxes))
		r.Get(prefix+"/admin/sandboxes/{name}", s.handle(s.getSandbox))
		r.Put(prefix+"/admin/sandboxes/{name}", s.handle(s.replaceSandbox))
		r.Delete(prefix+"/admin/sandboxes/{name}", s.handle(s.deleteSandbox))
		r.Put(prefix+"/admin/images/{name}", s.handle(s.putImage))
		r.Get(prefix+"/admin/images", s.handle(s.listImages))
		r.Delete(prefix+"/admin/images/{name}", s.handle(s.removeImage))
		r.Get(deadLettersPath, s.handle(s.listDeadLetters))
		r.Get(deadLettersPath+"/{id}", s.handle(s.getDeadLetter))
		r.Delete(deadLettersPath+"/{id}", s.handle(s.deleteDeadLetter))
		r.Post(deadLettersPath+"/{id}/requeue", s.handle(s.requeueDeadLetter))
		r.Get(prefix+"/admin/backup", s.handle(s.backup))
		r.Post(prefix+"/admin/threads/gc", s.handle(s.collectThreads))
		r.Post(prefix+"/admin/threads/rebuild", s.handle(s.rebuildThreads))
	})
}

// routeContent is what signed URLs lead to: they say themselves what they allow, and to whom.
func (s *Server) routeContent(r chi.Router) {
	r.Use(s.refuseWhenDraining)
	r.Get(contentPath+"{token}", s.handle(s.getContent))
	r.Head(contentPath+"{token}", s.handle(s.getContent))
	r.Put(contentPath+"{token}", s.handle(s.putContent))
}

// notYet answers a route of the contract that this version does not have.
func notYet(what, instead string) func(http.ResponseWriter, *http.Request) error {
	return func(http.ResponseWriter, *http.Request) error { return &unimplementedError{what, instead} }
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
			s.writeError(w, r, errUnauthorized)
			return
		}
		key, ok := s.Keys.Authenticate(secret)
		if !ok || key.RevokedAt != nil {
			s.writeError(w, r, errUnauthorized)
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
			s.writeError(w, r, errForbidden)
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
		return errMethod
	}
}

// until gives a context that ends at the deadline, or when this server leaves.
func (s *Server) until(ctx context.Context, deadline time.Time) (context.Context, context.CancelFunc) {
	ctx, cancel := context.WithDeadline(ctx, deadline)
	stop := context.AfterFunc(s.left, cancel)
	return ctx, func() {
		stop()
		cancel()
	}
}

// detached gives a context for what must be finished although the client may be gone.
func detached(ctx context.Context) (context.Context, context.CancelFunc) {
	return context.WithTimeout(context.WithoutCancel(ctx), storeTimeout)
}
