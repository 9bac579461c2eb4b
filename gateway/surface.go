package gateway

import (
	"context"
	"errors"
	"net/http"

	"github.com/go-chi/chi/v5"

	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/proto/api"
)

// Surface is a group of routes with the requests and the errors of another API, for programs that
// were written for that. The API keys are this server's.
type Surface struct {
	Routes []SurfaceRoute
	// WriteError answers with an error. The headers of the answer that this server's own errors have
	// are set.
	WriteError func(w http.ResponseWriter, r *http.Request, e *api.Error)
	// KeyHeader, if not empty, is a header with the API key, in place of Authorization.
	KeyHeader string
}

// SurfaceRoute is a route of a surface.
type SurfaceRoute struct {
	Method, Path string
	Scope        proto.Scope // that the API key needs
	Starts       bool        // it starts executions
	// Handle answers a request. It returns an error if it has not answered, or not to the end. Its
	// context is done when the client leaves, and at Leave with the error for the client as its cause.
	Handle func(w http.ResponseWriter, r *http.Request) error
}

// routeSurface registers the routes of a surface.
func (s *Server) routeSurface(r chi.Router, surface *Surface) {
	user := r.With(surface.adopt, s.closeWhenDraining, s.authenticate, s.limitRate, s.warnQuota, s.limitMemory)
	for _, route := range surface.Routes {
		on := user.With(s.authorized(&api.Route{Scope: route.Scope}))
		if route.Starts {
			on = on.With(s.refuseWhenDraining)
		}
		on.Method(route.Method, route.Path, s.answered(func(w http.ResponseWriter, r *http.Request) error {
			i := infoOf(r.Context())
			r, release := i.rec.client.whileConnected(r)
			defer release()
			ctx, cancel := context.WithCancelCause(r.Context())
			defer cancel(nil)
			defer context.AfterFunc(s.leaving, func() { cancel(errDraining) })()
			err := route.Handle(w, r.WithContext(ctx))
			switch {
			case ctx.Err() == nil || !errors.Is(err, context.Canceled):
				return err
			case s.leaving.Err() != nil:
				return errDraining
			default: // the client has left
				i.err = err
				panic(http.ErrAbortHandler)
			}
		}))
	}
}

// adopt makes a request one of this server: its errors are the surface's, and its key is where other
// requests have theirs. Cookies are not for surfaces.
func (surface *Surface) adopt(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		infoOf(r.Context()).writeError = func(w http.ResponseWriter, e *api.Error) { surface.WriteError(w, r, e) }
		if r.Header.Get("Authorization") == "" {
			key := ""
			if surface.KeyHeader != "" {
				key = r.Header.Get(surface.KeyHeader)
			}
			r.Header.Set("Authorization", "Bearer "+key)
		}
		next.ServeHTTP(w, r)
	})
}
