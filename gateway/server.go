package gateway

import (
	"context"
	"log/slog"
	"net/http"
	"net/netip"
	"os"
	"strings"
	"sync/atomic"
	"time"

	"github.com/go-chi/chi/v5"
	"go.opentelemetry.io/otel/trace"

	"github.com/bullpen-run/bullpen/gateway/login"
	"github.com/bullpen-run/bullpen/gateway/mcp"
	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/proto/api"
)

// DefaultMaxBody is the documented cap on request bodies, in bytes.
const DefaultMaxBody = 8 << 20

const (
	bodyTimeout = 30 * time.Second // a body must have arrived by then
	// writeTimeout is how long a client may take to read writePiece bytes of an answer before the
	// connection is dropped: a client that stops reading must not keep an answer in memory.
	writeTimeout = 60 * time.Second
	writePiece   = 256 << 10
	keepalive    = 15 * time.Second
	// leaveGrace is how long a stream goes on without an event after Leave.
	leaveGrace = time.Second
	// answerGrace is the time for an inline answer beyond the execution's timeout. The SDK stops
	// waiting two seconds later and sends the request again.
	answerGrace = 8 * time.Second
	// startGrace is the part of that for all but the wait for a worker.
	startGrace = 5 * time.Second
	// minQueueWait is the default wait for a worker of an execution with a shorter timeout.
	minQueueWait = 5 * time.Second
	// storeTimeout bounds a change that is completed even if the client is gone.
	storeTimeout = 4 * time.Second
	// readyTimeout bounds the check behind /readyz.
	readyTimeout = time.Second
)

// Server answers HTTP requests. Its exported fields are set before Handler is called and not
// changed afterwards. All but Metrics, QuotaReached, Done, UpgradeURL, PublicURL, TrustedProxies,
// Login and Unfit are required. It is safe for concurrent use.
type Server struct {
	Submissions Submissions
	Jobs        Jobs
	History     History
	Workers     Workers
	Queue       Queue
	Usage       Usage
	Schedules   Schedules
	Batches     Batches
	Pipelines   Pipelines
	Events      Events
	Keys        Keys
	KeyAdmin    KeyAdmin
	KeyUses     KeyUses
	Orgs        Orgs
	OrgData     OrgData
	Plans       Plans
	Members     Members
	Sessions    Sessions
	SecretsKey  SecretsKey
	Secrets     Secrets
	Connections Connections
	Storage     Storage // of connections
	Profiles    Profiles
	Preload     PreloadFailures
	Images      Images // of profiles
	ImageAdmin  ImageAdmin
	Webhooks    Webhooks
	URLs        URLs // of webhooks
	Deliveries  Deliveries
	Threads     Threads
	Versions    Versions
	ThreadAdmin ThreadAdmin
	Files       Files
	Parts       Parts // of uploads
	DeadLetters DeadLetters
	Backups     Backups
	Audit       AuditLog
	AgentFiles  AgentFiles
	// AgentBatches are of requests to agents, and Batches of executions.
	AgentBatches AgentBatches
	// Spool returns an empty file, which is removed when it is closed. Surfaces need it.
	Spool func() (*os.File, error)
	// Surfaces are served besides this server's own API.
	Surfaces []Surface

	Log    *slog.Logger
	Tracer trace.Tracer
	// TrustTraceparent makes the trace of a request's Traceparent header the parent of the request's
	// spans. Otherwise it is linked.
	TrustTraceparent bool
	// Metrics, if not nil, answers GET /metrics.
	Metrics http.Handler
	// QuotaReached, if not nil, is called once for each limit that an organisation reaches in a
	// month, in one process.
	QuotaReached func(proto.Crossing)
	// Done, if not nil, is called after each request with the pattern of its route.
	Done func(route, method string, status int, took time.Duration)

	Default     proto.Profile // the sandbox of keys that are bound to no profile
	QueueWait   time.Duration // the longest wait of inline and streaming executions for a worker, without Prefer: wait
	QueueExpiry time.Duration // the same of async ones
	Retention   time.Duration // of records
	MaxBody     int64         // largest request body, in bytes
	Memory      int64         // limit of open requests and their bodies, in bytes
	MaxVolume   proto.Bytes   // largest quota of a new or changed volume
	UpgradeURL  string        // where users change their plan, for messages; empty for none
	Version     string        // of the program, for the OpenAPI document
	Home        string        // the home of programs, absolute and cleaned: paths of files may begin with it
	PublicURL   string        // the address for URLs of files, without a final slash; empty for the Host of the request
	// TrustedProxies are the addresses whose X-Forwarded-Proto is the scheme of URLs of files, and
	// whose X-Forwarded-For is where a request comes from, for the audit log and for the allowed
	// networks of API keys.
	TrustedProxies []netip.Prefix
	// CORSOrigins are the origins whose web pages may call this server, such as https://example.com.
	CORSOrigins []string
	// Login signs people in. Without it, nil, only API keys make sessions.
	Login *login.Provider
	// URLSecret signs the URLs of files and streams. All gateways have the same random secret.
	URLSecret *[32]byte
	// Unfit returns the reason why the worker in this process accepts no jobs, or "" if it accepts
	// them. Unfit is nil in a process without a worker.
	Unfit func() string
	// FromZero reports that workers are started when executions wait, so that none need be live.
	FromZero bool
	// DiskFull, if not nil, returns why nothing more should be stored on this server's disk, empty if
	// it should.
	DiskFull func() string
	// StoreReady reports whether the blob store has answered since the start.
	StoreReady func() bool
	// Problems returns what this process needs and does not have.
	Problems func() []proto.Problem

	draining  atomic.Bool
	budget    budget
	leaving   context.Context // of all waits for executions; cancelled by Leave
	leave     context.CancelFunc
	transfers transfers
	// beginning has one slot for each organisation: uploads in parts begin one after another, so that
	// those that begin at the same time are counted.
	beginning transfers
	rates     rateLimits
	crossings crossings
	tools     *mcp.Handler
	// acts and refusedActs bound what an organisation adds to the audit log.
	acts, refusedActs rateLimits
}

// Drain makes the server answer /readyz and requests that start executions with 503, and calls of
// the tool that does so with the same error. Other requests are answered, and their connections
// closed, so that clients find another server.
func (s *Server) Drain() { s.draining.Store(true) }

// Leave ends all waits for executions. Queued executions of waiting requests are withdrawn and
// answered with 503, running ones with the path to ask at. Streams are broken off between two
// events after a second without events: clients resume at another server. It is called after
// Handler.
func (s *Server) Leave() { s.leave() }

// Handler returns the handler of all routes. It is called once.
func (s *Server) Handler() http.Handler {
	s.leaving, s.leave = context.WithCancel(context.Background())
	root := chi.NewRouter()
	root.Use(s.observe, s.cors)
	root.NotFound(s.handle(func(http.ResponseWriter, *http.Request) error { return errNoRoute }))
	root.MethodNotAllowed(s.handle(methodNotAllowed(root)))

	get(root, "/healthz", http.HandlerFunc(s.healthz))
	get(root, "/readyz", http.HandlerFunc(s.readyz))
	if s.Metrics != nil {
		get(root, "/metrics", s.Metrics)
	}
	s.tools = mcp.NewHandler(s.Version, toolCalls{s})
	s.routeDocs(root)
	s.routeAPI(root)
	for i := range s.Surfaces {
		s.routeSurface(root, &s.Surfaces[i])
	}
	return root
}

// routeAPI registers the routes of the API. They are not mounted as a router of their own, because
// a mounted router cannot distinguish unknown paths from unknown methods.
func (s *Server) routeAPI(r chi.Router) {
	handlers := map[string]func(http.ResponseWriter, *http.Request) error{
		"execute": s.execute, "getExecution": s.getExecution, "getOutput": s.getOutput, "cancelExecution": s.cancelExecution,
		"streamURL": s.streamURL, "getStream": s.getStream,
		"listExecutions": s.listExecutions, "getUsage": s.getUsage, "getOrgUsage": s.getOrgUsage,
		"getDelivery": s.getDelivery, "replayDelivery": s.replayDelivery, "getWebhook": s.getWebhook, "putWebhook": s.putWebhook,
		"patchWebhook": s.patchWebhook, "deleteWebhook": s.deleteWebhook, "rotateWebhook": s.rotateWebhook, "testWebhook": s.testWebhook,
		"replayFailed": s.replayFailed, "listEndpoints": s.listEndpoints, "enableEndpoint": s.enableEndpoint,
		"listThreads": s.listThreads, "getThread": s.getThread, "deleteThread": s.deleteThread, "forkThread": s.forkThread,
		"archiveThread": s.archiveThread, "unpackThread": s.unpackThread, "listFiles": s.listFiles, "deleteFile": s.deleteFile, "renameFile": s.renameFile, "fileUploadURL": s.uploadURL, "fileDownloadURL": s.downloadURL,
		"createUpload": s.createUpload, "getUpload": s.getUpload, "putPart": s.putPart, "completeUpload": s.completeUpload, "abortUpload": s.abortUpload,
		"getContent": s.getContent, "putContent": s.putContent, "createKey": s.createKey, "listKeys": s.listKeys, "revokeKey": s.revokeKey,
		"getKey": s.getKey, "replaceKey": s.replaceKey, "rotateKey": s.rotateKey,
		"createOrg": s.createOrg, "listOrgs": s.listOrgs, "getOrg": s.getOrg, "replaceOrg": s.replaceOrg, "deleteOrg": s.deleteOrg, "getOrgData": s.getOrgData,
		"login": s.startLogin, "loginCallback": s.finishLogin, "createSession": s.createSession, "getSession": s.getSession, "deleteSession": s.deleteSession,
		"listSessions": s.listSessions, "endSession": s.endSession,
		"createMember": s.createMember, "listMembers": s.listMembers, "getMember": s.getMember, "replaceMember": s.replaceMember, "removeMember": s.deleteMember,
		"createPlan": s.createPlan, "listPlans": s.listPlans, "getPlan": s.getPlan, "replacePlan": s.replacePlan, "removePlan": s.deletePlan,
		"createSandbox": s.createSandbox, "listSandboxes": s.listSandboxes, "getSandbox": s.getSandbox, "getSandboxPreload": s.getSandboxPreload, "replaceSandbox": s.replaceSandbox,
		"removeSandbox": s.deleteSandbox, "putImage": s.putImage, "listImages": s.listImages, "removeImage": s.removeImage,
		"createSchedule": s.createSchedule, "listSchedules": s.listSchedules, "getSchedule": s.getSchedule, "patchSchedule": s.patchSchedule,
		"deleteSchedule": s.deleteSchedule, "runSchedule": s.runSchedule,
		"createPipeline": s.createPipeline, "listPipelines": s.listPipelines, "getPipelineSchema": s.getPipelineSchema,
		"getPipeline": s.getPipeline, "cancelPipeline": s.cancelPipeline,
		"createBatch": s.createBatch, "listBatches": s.listBatches, "getBatch": s.getBatch, "deleteBatch": s.deleteBatch,
		"pauseBatch": s.changeBatch(pauseBatch(true)), "resumeBatch": s.changeBatch(pauseBatch(false)), "cancelBatch": s.changeBatch(cancelBatch),
		"retryBatch": s.retryBatch, "getBatchResults": s.getBatchResults,
		"getQueue": s.getQueue, "getAutoscale": s.getAutoscale, "listWorkers": s.listWorkers, "drainWorker": s.drainWorker(true), "undrainWorker": s.drainWorker(false),
		"listDeadLetters": s.listDeadLetters, "getDeadLetter": s.getDeadLetter, "deleteDeadLetter": s.deleteDeadLetter,
		"createConnection": s.createConnection, "listConnections": s.listConnections, "getConnection": s.getConnection, "replaceConnection": s.replaceConnection,
		"removeConnection": s.deleteConnection, "testConnection": s.testConnection,
		"getVolume": s.getVolume, "forkVolume": s.forkVolume, "archiveVolume": s.archiveVolume,
		"rotateSecretsKey": s.rotateSecretsKey, "putSecret": s.putSecret, "getSecret": s.getSecret, "listSecrets": s.listSecrets, "deleteSecret": s.deleteSecret, "requeueDeadLetter": s.requeueDeadLetter, "backup": s.backup, "collectThreads": s.collectThreads, "rebuildThreads": s.rebuildThreads, "listAudit": s.listAudit,
		"mcp": s.serveMCP,
	}
	public := r.With(s.closeWhenDraining) // signed URLs
	user := public.With(s.authenticate, s.limitRate, s.warnQuota, s.limitMemory)
	for _, route := range api.Routes() {
		handler := handlers[route.ID]
		if handler == nil {
			continue // routes of the server itself
		}
		on := public
		if !route.Public {
			on = user.With(s.audited(&route), s.authorized(&route))
		}
		if route.ID == "execute" || route.ID == "requeueDeadLetter" || route.ID == "runSchedule" || route.ID == "createBatch" || route.ID == "createPipeline" {
			on = on.With(s.refuseWhenDraining)
		}
		if route.Method == http.MethodGet {
			get(on, route.Path, s.handle(handler))
		} else {
			on.Method(route.Method, route.Path, s.handle(handler))
		}
	}
}

// get registers a handler for GET and for HEAD.
func get(r chi.Router, path string, handler http.Handler) {
	r.Method(http.MethodGet, path, handler)
	r.Method(http.MethodHead, path, handler)
}

func (s *Server) closeWhenDraining(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if s.draining.Load() {
			w.Header().Set("Connection", "close")
		}
		next.ServeHTTP(w, r)
	})
}

func (s *Server) refuseWhenDraining(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if s.draining.Load() {
			s.writeError(w, r, errDraining)
			return
		}
		next.ServeHTTP(w, r)
	})
}

// methodNotAllowed lists the methods of a path. The router also calls it for unknown methods on any
// path, so a path without methods does not exist.
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

// until returns a context that ends at the deadline, or at Leave.
func (s *Server) until(ctx context.Context, deadline time.Time) (context.Context, context.CancelFunc) {
	ctx, cancel := context.WithDeadline(ctx, deadline)
	stop := context.AfterFunc(s.leaving, cancel)
	return ctx, func() {
		stop()
		cancel()
	}
}

// detached returns a context for changes that are completed even if the client is gone.
func detached(ctx context.Context) (context.Context, context.CancelFunc) {
	return context.WithTimeout(context.WithoutCancel(ctx), storeTimeout)
}
