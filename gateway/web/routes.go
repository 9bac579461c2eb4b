package web

import (
	"context"
	"net/http"
	"strings"
	"time"

	"github.com/go-chi/chi/v5"

	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/proto/api"
)

// Handle answers a request. It returns an error if it has not answered, or not to the end.
type Handle = func(w http.ResponseWriter, r *Request) error

// Handler carries out the route of an id.
type Handler struct {
	ID     string
	Handle Handle
}

// Group has the handlers of routes that belong together.
type Group interface{ Handlers() []Handler }

// Row is a route with its handler. Its description decides who may use it, whether it starts work
// and whether the audit log records it.
type Row struct {
	api.Route
	Handle Handle
}

// Guard returns the router of a route, with the middleware that admits requests to its handler.
func (c *Core) Guard(r chi.Router, row *Row) chi.Router {
	on := r.With(c.closeWhenDraining)
	if !row.Public { // otherwise a signed URL, or a login
		on = on.With(c.authenticate, c.limitRate, c.warnQuota, c.limitMemory, c.audited(&row.Route),
			c.authorized(&row.Route))
	}
	if row.Starts {
		on = on.With(c.refuseWhenDraining)
	}
	return on
}

// Drain makes the server answer /readyz and requests that start executions with 503, and calls of
// the tool that starts them with the same error. Other requests are answered, and their connections
// closed, so that clients find another server. It is called after Handler.
func (c *Core) Drain() { c.drain() }

// Leave ends all waits for executions. Queued executions of waiting requests are withdrawn and
// answered with 503, running ones with the path to poll. Streams end between two events after a
// second without events: clients resume at another server. It is called after Handler.
func (c *Core) Leave() { c.leave() }

// maxPathName is the length, in bytes, of the longest name of anything.
const maxPathName = 255

// NamesInPath answers 404 to a path with an invalid name. If a request creates the object in its
// path, the handler answers and explains which names are valid.
func (c *Core) NamesInPath(route *api.Route) func(http.Handler) http.Handler {
	return func(next http.Handler) http.Handler {
		if route.Method == http.MethodPut {
			return next
		}
		return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			for _, value := range chi.RouteContext(r.Context()).URLParams.Values {
				if value == "" || len(value) > maxPathName || strings.ContainsFunc(value, neverInName) {
					c.writeError(w, r, proto.ErrNotFound)
					return
				}
			}
			next.ServeHTTP(w, r)
		})
	}
}

// neverInName reports whether no name contains c. Names are parts of NATS subjects. The router does
// not decode unnecessary escapes.
func neverInName(c rune) bool { return c <= ' ' || c > '~' || c == '*' || c == '>' || c == '%' }

// Get registers a handler for GET and for HEAD.
func Get(r chi.Router, path string, handler http.Handler) {
	r.Method(http.MethodGet, path, handler)
	r.Method(http.MethodHead, path, handler)
}

func (c *Core) closeWhenDraining(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if c.IsDraining() {
			w.Header().Set("Connection", "close")
		}
		next.ServeHTTP(w, r)
	})
}

func (c *Core) refuseWhenDraining(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if c.IsDraining() {
			c.writeError(w, r, ErrDraining)
			return
		}
		next.ServeHTTP(w, r)
	})
}

// MethodNotAllowed lists the methods of a path. A path that a route spells out has the methods of
// that route only, not those of a route with a parameter in its place. The router also calls it for
// unknown methods on any path, so a path without methods does not exist.
func MethodNotAllowed(root chi.Routes) Handle {
	methods := []string{
		http.MethodGet, http.MethodHead, http.MethodPost, http.MethodPut, http.MethodPatch, http.MethodDelete,
	}
	return func(w http.ResponseWriter, r *Request) error {
		path := r.URL.RawPath
		if path == "" {
			path = r.URL.Path
		}
		var allowed, literal []string
		for _, method := range methods {
			switch root.Find(chi.NewRouteContext(), method, path) {
			case "":
			case path:
				literal = append(literal, method)
			default:
				allowed = append(allowed, method)
			}
		}
		if len(literal) > 0 {
			allowed = literal
		}
		if len(allowed) == 0 {
			return ErrNoRoute
		}
		w.Header().Set("Allow", strings.Join(allowed, ", "))
		return api.Errorf(api.CodeMethodNotAllowed, "this path does not take that method; see the Allow header")
	}
}

// Until returns a context that ends at the deadline, or at Leave.
func (c *Core) Until(ctx context.Context, deadline time.Time) (context.Context, context.CancelFunc) {
	ctx, cancel := context.WithDeadline(ctx, deadline)
	stop := context.AfterFunc(c.leaving, cancel)
	return ctx, func() {
		stop()
		cancel()
	}
}

// UntilLeave returns a context that ends at Leave, with the error for the client as its cause.
func (c *Core) UntilLeave(ctx context.Context) (context.Context, context.CancelFunc) {
	ctx, cancel := context.WithCancelCause(ctx)
	stop := context.AfterFunc(c.leaving, func() { cancel(ErrDraining) })
	return ctx, func() {
		stop()
		cancel(nil)
	}
}

// UntilDrain returns a context that Drain cancels. It is for endless responses.
func (c *Core) UntilDrain(ctx context.Context) (context.Context, context.CancelFunc) {
	ctx, cancel := context.WithCancel(ctx)
	if c.IsDraining() { // AfterFunc would not have called cancel yet
		cancel()
	}
	stop := context.AfterFunc(c.draining, cancel)
	return ctx, func() {
		stop()
		cancel()
	}
}

// Detached returns a context for changes that must complete even if the client is gone.
func Detached(ctx context.Context) (context.Context, context.CancelFunc) {
	return context.WithTimeout(context.WithoutCancel(ctx), storeTimeout)
}
