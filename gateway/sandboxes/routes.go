package sandboxes

import (
	"context"
	"errors"
	"net/http"
	"slices"

	"github.com/go-chi/chi/v5"

	"github.com/bullpen-run/bullpen/gateway/web"
	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/proto/api"
)

// HeaderUser names the user of a sandbox as whom a request to its guest acts.
const HeaderUser = "Bullpen-User"

// Routes are the routes of live sandboxes.
type Routes struct {
	*Service

	resource *web.Resource[proto.LiveSandbox, api.Sandbox]
}

// Handlers returns the handlers of the routes.
func (s *Routes) Handlers() []web.Handler {
	s.resource = &web.Resource[proto.LiveSandbox, api.Sandbox]{
		Core: s.Core, Kind: "sandbox", Path: "/v1/sandboxes", Param: "id", Form: api.NewSandbox,
		Valid:  proto.ValidSandboxID,
		Name:   func(x *proto.LiveSandbox) (org, id string) { return x.Org, x.ID },
		Answer: func(list []api.Sandbox, next *string) any { return api.Sandboxes{Sandboxes: list, NextCursor: next} },
		NotFound: func(string) error {
			return api.Errorf(api.CodeNotFound, "there is no sandbox of that id; see /v1/sandboxes")
		},
	}
	return []web.Handler{
		{ID: "createSandbox", Handle: s.create},
		{ID: "listSandboxes", Handle: s.list},
		{ID: "getSandbox", Handle: s.get},
		{ID: "extendSandbox", Handle: s.extend},
		{ID: "pauseSandbox", Handle: s.stop(proto.SandboxPause)},
		{ID: "resumeSandbox", Handle: s.resume},
		{ID: "deleteSandbox", Handle: s.stop(proto.SandboxKill)},
	}
}

// Surface has the routes of guests, which answer as their own protocol says.
func (s *Routes) Surface() web.Surface {
	const path = "/v1/sandboxes/{id}" + api.GuestPath + "/*"
	surface := web.Surface{}
	for _, method := range []string{http.MethodGet, http.MethodHead, http.MethodPost} {
		surface.Routes = append(surface.Routes, web.SurfaceRow{
			Route:  api.Route{Method: method, Path: path, ID: "guest" + method, Scope: proto.ScopeExecute, Vendor: "E2B"},
			Handle: s.guest,
		})
	}
	return surface
}

func (s *Routes) create(w http.ResponseWriter, r *web.Request) error {
	request, err := web.DecodeBody[api.SandboxRequest](s.Core, w, r)
	if err != nil {
		return err
	}
	c := web.CallerOf(r)
	x := NewSandbox(request, c)
	if err := s.Create(r.Context(), r.Info, x, c); err != nil {
		return err
	}
	s.resource.Location(w, x)
	return web.WriteValue(w, http.StatusCreated, api.NewSandbox(x))
}

func (s *Routes) list(w http.ResponseWriter, r *web.Request) error {
	query := r.URL.Query()
	state, name := proto.SandboxState(query.Get("state")), query.Get("name")
	if state != "" && !slices.Contains(proto.SandboxStates(), state) {
		return proto.FieldErrorf("state", "must be one of %v", proto.SandboxStates())
	}
	return s.resource.WritePage(w, r, s.Store, r.Key.Org, func(x *proto.LiveSandbox) bool {
		return (state == "" || x.State == state) && (name == "" || x.Name == name)
	})
}

func (s *Routes) get(w http.ResponseWriter, r *web.Request) error {
	return s.answer(w, r, func(ctx context.Context, id string) (*proto.LiveSandbox, error) {
		return s.Store.Get(ctx, r.Key.Org, id)
	})
}

// answer answers with the sandbox that do returns for the id in the path.
func (s *Routes) answer(
	w http.ResponseWriter, r *web.Request, do func(ctx context.Context, id string) (*proto.LiveSandbox, error),
) error {
	id, err := s.resource.ID(r)
	if err != nil {
		return err
	}
	x, err := do(r.Context(), id)
	if err != nil {
		return s.resource.Error(id, err)
	}
	return web.WriteValue(w, http.StatusOK, api.NewSandbox(x))
}

func (s *Routes) extend(w http.ResponseWriter, r *web.Request) error {
	request, err := web.DecodeOptionalBody[api.SandboxTimeout](s.Core, w, r)
	if err != nil {
		return err
	}
	return s.answer(w, r, func(ctx context.Context, id string) (*proto.LiveSandbox, error) {
		var timeout *int
		if request.Timeout > 0 {
			timeout = &request.Timeout
		}
		return s.Extend(ctx, id, timeout, web.CallerOf(r))
	})
}

func (s *Routes) stop(how proto.SandboxStop) web.Handle {
	return func(w http.ResponseWriter, r *web.Request) error {
		return s.answer(w, r, func(ctx context.Context, id string) (*proto.LiveSandbox, error) {
			return s.Stop(ctx, r.Key.Org, id, how)
		})
	}
}

func (s *Routes) resume(w http.ResponseWriter, r *web.Request) error {
	request, err := web.DecodeOptionalBody[api.SandboxTimeout](s.Core, w, r)
	if err != nil {
		return err
	}
	return s.answer(w, r, func(ctx context.Context, id string) (*proto.LiveSandbox, error) {
		return s.Resume(ctx, r.Info, id, request.Timeout, web.CallerOf(r))
	})
}

// guest passes a request on to the guest of a sandbox.
func (s *Routes) guest(w http.ResponseWriter, r *http.Request) (err error) {
	request := web.RequestOf(r)
	id := chi.URLParam(r, "id")
	if !proto.ValidSandboxID(id) {
		return s.resource.Error(id, proto.ErrNotFound)
	}
	r.Header.Del("Authorization") // the API key
	if user := r.Header.Get(HeaderUser); user != "" {
		r.SetBasicAuth(user, "")
	}
	s.Serve(w, r, request.Key.Org, id, "/"+chi.URLParam(r, "*"), func(cause error) {
		switch {
		case errors.Is(cause, proto.ErrNotFound):
			err = s.resource.Error(id, proto.ErrNotFound)
		case errors.Is(cause, errNotReached):
			err = api.Errorf(api.CodeConflict, "the sandbox is not running; look at it for the reason")
		default:
			err = cause
		}
	})
	return err
}
