package web

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"slices"
	"strings"

	"github.com/bullpen-run/bullpen/proto/api"
)

// Surface is a group of routes with the requests and errors of another API, for programs written
// for that API. The API keys are this server's.
type Surface struct {
	Routes []SurfaceRow
	// WriteError answers with an error. The headers of the answer that this server's own errors
	// have are set.
	WriteError func(w http.ResponseWriter, r *http.Request, e *api.Error)
	// Prefixes are the other API's path prefixes. Errors for unknown paths below them use its form.
	Prefixes []string
	// KeyHeader, if not empty, is the header with the API key, instead of Authorization.
	KeyHeader string
	// Key, if not nil, returns the API key of a request, or "". Otherwise it is in KeyHeader or in
	// Authorization, with the scheme Bearer.
	Key func(r *http.Request) string
	// Cookies accepts the session of a browser in requests without Authorization.
	Cookies bool
}

// SurfaceRow is a route of a surface with its handler, which returns an error if it has not
// answered completely. The context of its request is done when the client leaves, and at Leave with
// the error for the client as its cause.
type SurfaceRow struct {
	api.Route
	Handle func(w http.ResponseWriter, r *http.Request) error
}

// SurfaceRoutes returns the descriptions of the routes of all surfaces.
func (c *Core) SurfaceRoutes() (list []api.Route) {
	for i := range c.Surfaces {
		for _, row := range c.Surfaces[i].Routes {
			list = append(list, row.Route)
		}
	}
	return list
}

// Unknown answers requests for unknown routes, in the form of the surface addressed.
func (c *Core) Unknown(answer http.HandlerFunc) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		for i := range c.Surfaces {
			surface := &c.Surfaces[i]
			isTheirs := func(prefix string) bool { return strings.HasPrefix(r.URL.Path, prefix) }
			if slices.ContainsFunc(surface.Prefixes, isTheirs) {
				surface.Adopt(answer).ServeHTTP(w, r)
				return
			}
		}
		answer(w, r)
	}
}

// Row returns the row of a surface's route.
func (c *Core) Row(surface *SurfaceRow) Row {
	return Row{surface.Route, func(w http.ResponseWriter, r *Request) error {
		i := r.Info
		connected, release := r.WhileConnected()
		defer release()
		ctx, cancel := c.UntilLeave(connected.Context())
		defer cancel()
		err := surface.Handle(w, connected.WithContext(ctx).Request)
		switch {
		case ctx.Err() == nil || !errors.Is(err, context.Canceled):
			return i.afterCalls(err)
		case c.leaving.Err() != nil:
			return i.afterCalls(ErrDraining)
		default: // the client has left
			i.Err = err
			panic(http.ErrAbortHandler)
		}
	}}
}

// afterCalls returns an error that keeps the client from repeating the request, if calls were
// carried out for it. Other errors, and those that are the request's own fault, are unchanged.
func (i *Info) afterCalls(err error) error {
	if err == nil || !i.Calls.Load() {
		return err
	}
	e := *api.NewError(err)
	if status := e.Code.Status(); status < http.StatusInternalServerError && status != http.StatusTooManyRequests &&
		status != http.StatusConflict && status != http.StatusRequestTimeout {
		return err
	}
	e.Reason, e.Permanent, e.RetryAfter = api.ReasonCallsMade, true, 0
	e.Message += "; calls of this request were carried out, which its repetition would carry out again"
	return fmt.Errorf("%w: %w", &e, err)
}

// Adopt converts a surface's request: its errors take the surface's form, and its key moves to the
// usual header.
func (surface *Surface) Adopt(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		infoOf(r.Context()).WriteError = func(w http.ResponseWriter, e *api.Error) { surface.WriteError(w, r, e) }
		switch {
		case surface.Cookies && r.Header.Get("Authorization") == "":
		case surface.Key != nil:
			r.Header.Set("Authorization", "Bearer "+surface.Key(r))
		case r.Header.Get("Authorization") == "":
			key := ""
			if surface.KeyHeader != "" {
				key = r.Header.Get(surface.KeyHeader)
			}
			r.Header.Set("Authorization", "Bearer "+key)
		}
		next.ServeHTTP(w, r)
	})
}
