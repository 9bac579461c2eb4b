package gateway

import (
	"io/fs"
	"net/http"
	"os"
	"time"

	"github.com/go-chi/chi/v5"

	"github.com/bullpen-run/bullpen/gateway/admin"
	"github.com/bullpen-run/bullpen/gateway/agents"
	"github.com/bullpen-run/bullpen/gateway/changes"
	"github.com/bullpen-run/bullpen/gateway/executions"
	"github.com/bullpen-run/bullpen/gateway/files"
	"github.com/bullpen-run/bullpen/gateway/filestore"
	"github.com/bullpen-run/bullpen/gateway/interpreters"
	"github.com/bullpen-run/bullpen/gateway/login"
	"github.com/bullpen-run/bullpen/gateway/web"
	"github.com/bullpen-run/bullpen/gateway/webhooks"
	"github.com/bullpen-run/bullpen/gateway/work"
	"github.com/bullpen-run/bullpen/proto"
)

// Server answers HTTP requests. Its exported fields are set before Handler is called and not
// changed afterwards. All but Metrics, Done, PublicURL, TrustedProxies,
// Login and Unfit are required. It is safe for concurrent use.
type Server struct {
	web.Core

	Admission   Admission
	Submissions executions.Submissions
	Jobs        executions.Jobs
	History     executions.History
	Workers     admin.Workers
	Processes   admin.Processes
	Queue       Queue
	// Capabilities of the workers.
	Capabilities executions.Capabilities
	Usage        admin.Usage
	Schedules    work.Schedules
	Batches      work.Batches
	Pipelines    work.Pipelines
	Events       executions.Events
	Keys         login.Keys
	KeyAdmin     admin.Keys
	Orgs         admin.Orgs
	OrgData      admin.OrgData
	Plans        admin.Plans
	Members      Members
	Sessions     login.Sessions
	Connections  admin.Connections
	Storage      Storage // of connections
	Profiles     admin.Profiles
	Preload      admin.PreloadFailures
	ImageAdmin   admin.Images
	Webhooks     webhooks.Webhooks
	URLs         work.URLs // of webhooks
	Deliveries   webhooks.Deliveries
	WebhookBody  func(r *proto.Record) ([]byte, error) // of an execution that has ended
	Threads      Threads
	Versions     Versions
	ThreadAdmin  files.ThreadAdmin
	Files        Files
	Parts        filestore.Parts // of uploads
	Backups      admin.Backups
	AgentFiles   agents.Files
	// Changes are those of the objects of all organisations.
	Changes *changes.Feed
	Groups  []web.Group // of routes whose objects no other group needs
	// Interpreters keep their state between calls of tools.
	Interpreters *interpreters.Service
	// AgentBatches are of requests to agents, and Batches of executions.
	AgentBatches agents.Batches
	// Around, if not nil, returns a handler that answers what is for no route, and calls that of the routes
	// for everything else.
	Around func(routes http.Handler) http.Handler
	// Console has the files of the console, index.html among them.
	Console fs.FS
	// Spool returns an empty file that is removed when closed. Surfaces need it.
	Spool func() (*os.File, error)

	// Metrics, if not nil, answers GET /metrics.
	Metrics   http.Handler
	QueueWait time.Duration // the longest wait of inline and streaming executions for a worker, without Prefer: wait
	MaxVolume proto.Bytes   // largest quota of a new or changed volume
	Version   string        // of the program, for the OpenAPI document
	Home      string        // the home of programs, absolute and cleaned: paths of files may begin with it
	// Login signs people in. Without it, nil, only API keys make sessions.
	Login *login.Provider
	// URLSecret signs the URLs of files and streams. All gateways have the same random secret.
	URLSecret *[32]byte
	// Unfit returns why the worker in this process accepts no jobs, or "". It is nil in a process
	// without a worker.
	Unfit func() string
	// FromZero reports that waiting executions start workers, so that none need be live.
	FromZero bool
	// StoreReady reports whether the blob store has answered since the start.
	StoreReady func() bool
	// Problems returns the unmet needs of this process.
	Problems func() []proto.Problem

	opener *filestore.Opener
	logins *login.Routes
}

// Handler returns the handler of all routes. It is called once.
func (s *Server) Handler() http.Handler {
	s.Init()
	s.logins = &login.Routes{
		Core: &s.Core, Provider: s.Login, Sessions: s.Sessions, Members: s.Members, Keys: s.Keys,
		Version: s.Version,
	}
	s.Cookies = s.logins
	s.opener = &filestore.Opener{
		Core: &s.Core, Homes: s.Files, Connections: s.Connections, Mounts: s.Storage, Parts: s.Parts, Keys: s.Admission,
		Home: s.Home,
	}
	root := chi.NewRouter()
	root.Use(s.Observe, s.CORS)
	root.NotFound(s.Unknown(s.Handle(func(http.ResponseWriter, *web.Request) error { return web.ErrNoRoute })))
	root.MethodNotAllowed(s.Unknown(s.Handle(web.MethodNotAllowed(root))))

	web.Get(root, "/healthz", http.HandlerFunc(s.healthz))
	web.Get(root, "/readyz", http.HandlerFunc(s.readyz))
	if s.Metrics != nil {
		web.Get(root, "/metrics", s.Metrics)
	}
	s.routeDocs(root)
	s.routeConsole(root)
	s.route(root)
	if s.Around != nil {
		return s.Around(root)
	}
	return root
}
