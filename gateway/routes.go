package gateway

import (
	"fmt"
	"net/http"
	"slices"

	"github.com/go-chi/chi/v5"

	"github.com/bullpen-run/bullpen/gateway/web"
	"github.com/bullpen-run/bullpen/proto/api"
)

// apiRows joins the routes of the API with their handlers. It panics if one lacks the other, which
// is a programming error.
func (s *Server) apiRows() []web.Row {
	handlers := s.handlers()
	var list []web.Row
	for _, route := range api.Routes() {
		if route.OfServer() {
			continue
		}
		i := slices.IndexFunc(handlers, func(h web.Handler) bool { return h.ID == route.ID })
		if i < 0 {
			panic("gateway: the route " + route.ID + " has no handler")
		}
		list = append(list, web.Row{Route: route, Handle: handlers[i].Handle})
		handlers = slices.Delete(handlers, i, i+1)
	}
	if len(handlers) > 0 {
		panic(fmt.Sprintf("gateway: %s and %d more handlers have no route, or a route that has one", handlers[0].ID,
			len(handlers)-1))
	}
	return list
}

// route registers the routes of the API and of the surfaces. They are not mounted as routers of their own,
// because a mounted router cannot distinguish unknown paths from unknown methods.
func (s *Server) route(r chi.Router) {
	for _, row := range s.apiRows() {
		on := s.Guard(r, &row)
		if !row.Public {
			on = on.With(s.NamesInPath(&row.Route))
		}
		if row.Method == http.MethodGet {
			web.Get(on, row.Path, s.Handle(row.Handle))
		} else {
			on.Method(row.Method, row.Path, s.Handle(row.Handle))
		}
	}
	for i := range s.Surfaces {
		surface := &s.Surfaces[i]
		for j := range surface.Routes {
			row := s.Row(&surface.Routes[j])
			s.Guard(r.With(surface.Adopt), &row).Method(row.Method, row.Path, s.Answered(row.Handle))
		}
	}
}
