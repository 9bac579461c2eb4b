package sandboxes

import (
	"context"
	"errors"
	"net/http"
	"slices"
	"strings"

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

	resource *web.Resource[proto.LiveSandbox, api.LiveSandbox]
}

// Handlers returns the handlers of the routes.
func (s *Routes) Handlers() []web.Handler {
	s.resource = &web.Resource[proto.LiveSandbox, api.LiveSandbox]{
		Core: s.Core, Kind: "sandbox", Path: "/v1/sandboxes", Param: "id", Form: api.NewLiveSandbox,
		Valid: proto.ValidSandboxID,
		Name:  func(x *proto.LiveSandbox) (org, id string) { return x.Org, x.ID },
		Answer: func(list []api.LiveSandbox, next *string) any {
			return api.LiveSandboxes{Sandboxes: list, NextCursor: next}
		},
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
		{ID: "saveSandbox", Handle: s.save},
		{ID: "deleteSandbox", Handle: s.stop(proto.SandboxKill)},
		{ID: "readSandboxLogs", Handle: s.logs},
		{
			ID:     "createContext",
			Handle: contextCall[api.ContextRequest, api.Context](s, http.MethodPost, "", http.StatusCreated),
		},
		{ID: "listContexts", Handle: contextCall[any, api.Contexts](s, http.MethodGet, "", http.StatusOK)},
		{ID: "getContext", Handle: contextCall[any, api.Context](s, http.MethodGet, "", http.StatusOK)},
		{ID: "executeCell", Handle: s.executeCell},
		{ID: "readRun", Handle: s.readRun},
		{
			ID:     "interruptContext",
			Handle: contextCall[any, api.ContextInterrupt](s, http.MethodPost, "/interrupt", http.StatusOK),
		},
		{ID: "restartContext", Handle: contextCall[any, api.Context](s, http.MethodPost, "/restart", http.StatusOK)},
		{ID: "deleteContext", Handle: contextCall[any, any](s, http.MethodDelete, "", http.StatusNoContent)},
		{ID: "callGuest", Handle: s.guest("service", "method")},
		{ID: "readGuest", Handle: s.guest("name")},
		{ID: "writeGuest", Handle: s.guest("name")},
	}
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
	return web.WriteValue(w, http.StatusCreated, api.NewLiveSandbox(x))
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
	return web.WriteValue(w, http.StatusOK, api.NewLiveSandbox(x))
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
			return s.Stop(ctx, id, how, web.CallerOf(r))
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

func (s *Routes) save(w http.ResponseWriter, r *web.Request) error {
	id, err := s.resource.ID(r)
	if err != nil {
		return err
	}
	version, err := s.Save(r.Context(), r.Key.Org, id)
	if err != nil {
		return s.resource.Error(id, err)
	}
	return web.WriteValue(w, http.StatusOK, api.SandboxSave{Version: version})
}

// guest passes requests on to the guest of a sandbox, at the path of some parameters.
func (s *Routes) guest(parameters ...string) web.Handle {
	return func(w http.ResponseWriter, r *web.Request) (err error) {
		id, err := s.resource.ID(r)
		if err != nil {
			return err
		}
		var path strings.Builder
		for _, name := range parameters {
			path.WriteString("/" + chi.URLParam(r.Request, name))
		}
		r, release := r.WhileConnected()
		defer release()
		ctx, stop := s.UntilLeave(r.Context())
		defer stop()
		request := r.Request.WithContext(ctx)
		request.Header.Del("Authorization") // the API key
		if user := request.Header.Get(HeaderUser); user != "" {
			request.SetBasicAuth(user, "")
		}
		r.Relayed = true
		w.Header().Set("Cache-Control", "private, no-store") // whatever the guest answers
		s.Serve(w, request, Target{Org: r.Key.Org, ID: id, Path: path.String()}, func(cause error) {
			switch {
			case r.Context().Err() != nil:
				panic(http.ErrAbortHandler) // the client has left
			case errors.Is(cause, ErrNotReached):
				err = api.Errorf(api.CodeConflict, "the sandbox is not running; look at it for the reason")
			default:
				err = s.resource.Error(id, cause)
			}
		})
		return err
	}
}
