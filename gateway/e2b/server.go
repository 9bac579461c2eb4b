package e2b

import (
	"context"
	"errors"
	"net/http"
	"strconv"
	"strings"

	"github.com/go-chi/chi/v5"

	"github.com/bullpen-run/bullpen/gateway/sandboxes"
	"github.com/bullpen-run/bullpen/gateway/web"
	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/proto/api"
)

// KeyHeader is the header with the API key.
const KeyHeader = "X-API-Key"

const (
	// clientID is a part of E2B's ids that its clients no longer use.
	clientID = "bullpen"
	// guestVersion is the version of E2B's daemon whose features clients use. From 0.6.2 on they store
	// metadata of files in extended attributes user.*, which homes have and keep. On a worker without
	// disks for homes that needs Linux 6.6.
	guestVersion = "0.6.4"
)

// Profiles finds the sandbox profiles of API keys.
type Profiles interface {
	// ProfileFor returns the profile that a request with a key chooses by name, the key's own if that is
	// empty. It returns a [*proto.Rejection] if the key does not allow it, or it does not exist.
	ProfileFor(ctx context.Context, key *proto.Key, name string) (proto.Profile, error)
}

// Sandboxes creates and stops sandboxes, see [sandboxes.Service].
type Sandboxes interface {
	Create(ctx context.Context, i *web.Info, x *proto.LiveSandbox, c proto.Caller) error
	Resume(ctx context.Context, i *web.Info, id string, timeout int, c proto.Caller) (*proto.LiveSandbox, error)
	Stop(ctx context.Context, id string, stop proto.SandboxStop, c proto.Caller) (*proto.LiveSandbox, error)
	Extend(ctx context.Context, id string, timeout *int, c proto.Caller) (*proto.LiveSandbox, error)
	Logs(ctx context.Context, x *proto.LiveSandbox) (*api.SandboxLogs, error)
}

// Guests reaches the guests of sandboxes, see [sandboxes.Service].
type Guests interface {
	Serve(w http.ResponseWriter, r *http.Request, to sandboxes.Target, unreachable func(error))
	Ping(ctx context.Context, org, id string) error
}

// Store reads sandboxes.
type Store interface {
	// Get returns a sandbox, or [proto.ErrNotFound].
	Get(ctx context.Context, org, id string) (*proto.LiveSandbox, error)
	web.Pages[proto.LiveSandbox]
}

// Server has the routes. It is safe for concurrent use.
type Server struct {
	Core      *web.Core
	Sandboxes Sandboxes
	Guests    Guests
	Store     Store
	Profiles  Profiles
	Tokens    Tokens
	// Domain is the wildcard domain of sandboxes, with its port if that is not the scheme's; empty for
	// none.
	Domain string
	// PublicPorts lets requests to the ports of new sandboxes need no token, unless the client asks for
	// one.
	PublicPorts bool
}

// Surface returns the routes.
func (s *Server) Surface() web.Surface {
	surface := web.Surface{
		WriteError: WriteError, KeyHeader: KeyHeader,
		Prefixes: []string{
			"/sandboxes", "/v2/sandboxes", "/v2/templates", "/v3/", "/templates", "/snapshots", "/volumes", "/volumecontent",
			"/secrets", "/teams", "/nodes", "/api-keys", "/access-tokens",
		},
	}
	add := func(method, path, id, summary string, scope proto.Scope, starts bool, handle web.Handle) {
		route := api.Route{
			Method: method, Path: path, ID: "e2b" + id, Summary: summary, Scope: scope, Starts: starts, Vendor: "E2B",
		}
		if strings.Contains(path, "{id}") {
			route.PathDoc = "The sandbox's id."
		} else if strings.Contains(path, "{") {
			route.PathDoc = "The template's name, which is a sandbox profile's."
		}
		surface.Routes = append(surface.Routes, web.SurfaceRow{
			Route:  route,
			Handle: func(w http.ResponseWriter, r *http.Request) error { return handle(w, web.RequestOf(r)) },
		})
	}
	const get, post, one = http.MethodGet, http.MethodPost, "/sandboxes/{id}"
	execute, read := proto.ScopeExecute, proto.ScopeRead
	add(post, "/v2/sandboxes", "CreateSandbox", "Create a sandbox", execute, true, s.create(timeoutV2))
	add(post, "/sandboxes", "CreateSandboxV1", "Create a sandbox", execute, true, s.create(timeoutV1))
	add(get, "/v2/sandboxes", "ListSandboxes", "List sandboxes", read, false, s.list)
	add(get, "/sandboxes", "ListSandboxesV1", "List running sandboxes", read, false, s.listV1)
	add(get, one, "GetSandbox", "Show a sandbox", read, false, s.get)
	add(http.MethodDelete, one, "KillSandbox", "End a sandbox for good", execute, false, s.kill)
	const connect = "Resume a sandbox, or extend it"
	add(post, "/v2"+one+"/connect", "ConnectSandbox", connect, execute, true, s.connect(timeoutV2))
	add(post, one+"/connect", "ConnectSandboxV1", connect, execute, true, s.connect(timeoutV1))
	add(post, one+"/resume", "ResumeSandbox", "Resume a sandbox", execute, true, s.resume)
	add(post, one+"/pause", "PauseSandbox", "Stop a sandbox and keep its files", execute, false, s.pause)
	add(post, one+"/timeout", "SetTimeout", "Set when a sandbox expires", execute, false, s.setTimeout)
	add(post, one+"/refreshes", "RefreshSandbox", "Extend a sandbox", execute, false, s.refresh)
	add(get, one+"/metrics", "GetMetrics", "Show what a sandbox uses now", read, false, s.metrics)
	add(get, "/v2"+one+"/logs", "GetLogs", "Read what the processes of a sandbox have printed", execute, false, s.logs)
	add(get, one+"/logs", "GetLogsV1", "Read what the processes of a sandbox have printed", execute, false, s.logsV1)
	add(get, "/templates/aliases/{name}", "GetTemplateAlias", "Look a template up by name", read, false, s.alias)
	for i, row := range missing() {
		add(row.method, row.path, "Missing"+strconv.Itoa(i), "Not implemented: "+row.feature, read, false,
			func(http.ResponseWriter, *web.Request) error {
				return web.NotImplemented(row.feature+" are", row.instead)
			})
	}
	return surface
}

// missingRoute is a route of E2B's that answers that there is no such thing here.
type missingRoute struct{ method, path, feature, instead string }

// missing returns the routes that are not implemented, with what to use instead.
func missing() []missingRoute {
	const get, post, put, del = http.MethodGet, http.MethodPost, http.MethodPut, http.MethodDelete
	const (
		snapshots = "snapshots of sandboxes"
		pause     = "pause the sandbox, or copy its files"
		builds    = "builds of templates"
		image     = "build an image with bullpen image build, and name it in a sandbox profile"
		volumes   = "E2B's volumes"
		volume    = "mount bullpen's volumes by the API key"
		secrets   = "E2B's secrets"
		secret    = "bind bullpen's secrets to the API key or the sandbox profile"
	)
	return []missingRoute{
		{post, "/sandboxes/{id}/snapshots", snapshots, pause},
		{get, "/snapshots", snapshots, pause},
		{post, "/sandboxes/{id}/fork", "forks of sandboxes", "create another sandbox and copy the files"},
		{put, "/sandboxes/{id}/network", "changes of a sandbox's network", "choose a template whose profile allows it"},
		{get, "/sandboxes/metrics", "metrics of many sandboxes", "ask for each of them"},
		{get, "/templates", "lists of templates", "ask for one by name at /templates/aliases/NAME"},
		{post, "/templates", builds, image},
		{post, "/v2/templates", builds, image},
		{post, "/v3/templates", builds, image},
		{del, "/templates/{name}", "removals of templates and snapshots", "remove the sandbox profile"},
		{post, "/templates/{name}", builds, image},
		{get, "/volumes", volumes, volume},
		{post, "/volumes", volumes, volume},
		{get, "/volumes/*", volumes, volume},
		{del, "/volumes/*", volumes, volume},
		{get, "/volumecontent/*", volumes, volume},
		{put, "/volumecontent/*", volumes, volume},
		{post, "/volumecontent/*", volumes, volume},
		{del, "/volumecontent/*", volumes, volume},
		{get, "/secrets", secrets, secret},
		{post, "/secrets", secrets, secret},
		{get, "/secrets/*", secrets, secret},
		{del, "/secrets/*", secrets, secret},
	}
}

// WriteError answers with an error as E2B does. Should-Retry decides for its Python client, which would
// otherwise repeat even a request that has created a sandbox.
func WriteError(w http.ResponseWriter, _ *http.Request, e *api.Error) {
	status := e.Code.Status()
	again := !e.Permanent && e.RetryAfter > 0 &&
		(status == http.StatusTooManyRequests || status == http.StatusServiceUnavailable)
	w.Header().Set("Should-Retry", strconv.FormatBool(again))
	body := struct {
		Code    int    `json:"code"`
		Message string `json:"message"`
	}{status, e.Message}
	_ = web.WriteValue(w, status, body) // these are always encoded
}

// sandbox returns the sandbox in the path of a request, if its organisation has it and it has not ended.
func (s *Server) sandbox(r *web.Request) (*proto.LiveSandbox, error) {
	x, err := s.stored(r)
	if err != nil {
		return nil, err
	}
	if _, alive := stateOf(x); !alive {
		return nil, noSandbox(x.ID)
	}
	return x, nil
}

// stored is like sandbox, but the sandbox may have ended.
func (s *Server) stored(r *web.Request) (*proto.LiveSandbox, error) {
	id, _, _ := strings.Cut(chi.URLParam(r.Request, "id"), "-") // old clients append the id of a client
	if !proto.ValidSandboxID(id) {
		return nil, noSandbox(id)
	}
	x, err := s.Store.Get(r.Context(), r.Key.Org, id)
	if err != nil {
		if errors.Is(err, proto.ErrNotFound) {
			err = noSandbox(id)
		}
		return nil, err
	}
	return x, nil
}

func noSandbox(id string) error {
	return api.Errorf(api.CodeNotFound, "sandbox %q was not found", proto.Shorten(id))
}
