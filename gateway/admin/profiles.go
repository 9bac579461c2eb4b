package admin

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"time"

	"github.com/go-chi/chi/v5"

	"github.com/bullpen-run/bullpen/gateway/web"
	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/proto/api"
)

// Profiles stores the sandbox profiles.
type Profiles interface {
	profileList
	// Create stores a new profile. It returns [proto.ErrExists] if the name is taken.
	Create(ctx context.Context, p proto.Profile) error
	// Replace replaces the profile with the same name if check returns nil for it. check may be
	// called again. Its error is returned unchanged. Replace returns [proto.ErrNotFound] if there
	// is no such profile.
	Replace(ctx context.Context, p proto.Profile, check func(old proto.Profile) error) error
	// Remove removes a profile, for which check must return nil, and returns it. It returns
	// [proto.ErrNotFound] if the profile does not exist, and a [*proto.BoundError] if valid keys are
	// bound to it or allow it.
	Remove(ctx context.Context, name string, check func(old proto.Profile) error) (proto.Profile, error)
}

// profileList lists sandbox profiles.
type profileList interface {
	// List returns all profiles by name, without the built-in ones. org is empty.
	List(org string) []proto.Profile
}

// profileFinder finds sandbox profiles.
type profileFinder interface {
	// Profile returns the profile of that name, which may be a built-in one, or [proto.ErrNotFound].
	Profile(ctx context.Context, name string) (proto.Profile, error)
}

// ProfileResolver finds profiles and what they mean for a program.
type ProfileResolver interface {
	profileFinder
	// DefaultProfile returns the profile of keys that are bound to none.
	DefaultProfile() proto.Profile
	// Sandbox returns the snapshot of a profile for a program in language.
	Sandbox(ctx context.Context, p *proto.Profile, language proto.Language) (proto.Sandbox, error)
}

// imageFinder finds sandbox images.
type imageFinder interface {
	// Image returns an image, or [proto.ErrNotFound].
	Image(ctx context.Context, name string) (*proto.Image, error)
}

// PreloadFailures knows which modules of sandboxes could not be preloaded.
type PreloadFailures interface {
	// PreloadFailure returns why the modules of a sandbox cannot be preloaded, or nil if no worker
	// has failed recently.
	PreloadFailure(ctx context.Context, s proto.Sandbox) (*proto.PreloadFailure, error)
}

// ProfileRoutes are the routes of sandbox profiles.
type ProfileRoutes struct {
	*web.Core
	Profiles Profiles
	Resolver ProfileResolver
	Images   imageFinder
	Keys     keyList
	Preload  PreloadFailures
}

// Handlers returns the handlers of the routes.
func (s *ProfileRoutes) Handlers() []web.Handler {
	x := &web.Resource[proto.Profile, proto.Profile]{
		Core: s.Core, Kind: "profile", Path: "/v1/admin/profiles", Param: "name", Form: web.Same[proto.Profile],
		Name:    func(p *proto.Profile) (org, id string) { return "", p.Name },
		Audited: auditProfile,
		Answer:  func(list []proto.Profile, next *string) any { return api.Profiles{Profiles: list, NextCursor: next} },
	}
	return []web.Handler{
		{ID: "createProfile", Handle: x.Create(s.read, func(ctx context.Context, p proto.Profile) (proto.Profile, error) {
			return p, s.Profiles.Create(ctx, p)
		})},
		{ID: "listProfiles", Handle: func(w http.ResponseWriter, r *web.Request) error {
			sees, builtIn := s.visible(r), s.Resolver.DefaultProfile()
			list := web.NamedAfter([]proto.Profile{builtIn, proto.AgentsProfile(builtIn)}, s.Profiles.List(""),
				func(p *proto.Profile) string { return p.Name })
			return x.WritePage(w, r, list, "", func(p *proto.Profile) bool { return sees(p.Name) })
		}},
		{ID: "getProfile", Handle: x.Get(s.inPath)},
		{ID: "getProfilePreload", Handle: s.getPreload},
		{ID: "replaceProfile", Handle: x.Put(s.read,
			func(ctx context.Context, r *web.Request, _ string, wanted proto.Profile) (proto.Profile, error) {
				return wanted, s.Profiles.Replace(ctx, wanted, func(old proto.Profile) error { return x.Before(r, &old) })
			})},
		{ID: "removeProfile", Handle: x.Remove(
			func(ctx context.Context, r *web.Request, name string) (*proto.Profile, error) {
				if err := proto.CheckProfileName(name); err != nil {
					return nil, err
				}
				p, err := s.Profiles.Remove(ctx, name, func(old proto.Profile) error { return x.Before(r, &old) })
				return &p, err
			})},
	}
}

// read decodes a profile from the body of a request. If the path has a name, the body may omit it.
func (s *ProfileRoutes) read(w http.ResponseWriter, r *web.Request) (p proto.Profile, err error) {
	err = s.WithBody(w, r, func(body []byte) (err error) {
		p, err = api.DecodeProfile(chi.URLParam(r.Request, "name"), body, s.Resolver.DefaultProfile())
		return err
	})
	if err != nil {
		return p, err
	}
	image, ok := p.ImageName()
	if !ok {
		return p, nil
	}
	_, err = s.Images.Image(r.Context(), image)
	if errors.Is(err, proto.ErrNotFound) {
		return p, proto.FieldErrorf("image", "%q does not exist; make it first", image)
	}
	return p, err
}

// visible returns a function that reports whether a request may see a profile: a global
// administrator's sees all, others see the built-in ones and those of the valid keys of their
// organisation.
func (s *ProfileRoutes) visible(r *web.Request) func(name string) bool {
	own := &r.Key
	if own.Global {
		return func(string) bool { return true }
	}
	used, now := map[string]bool{proto.DefaultProfileName: true, proto.AgentsProfileName: true}, time.Now()
	for _, k := range s.Keys.List(own.Org) {
		if k.Valid(now) {
			addProfiles(used, &k)
		}
	}
	return func(name string) bool { return used[name] }
}

// inPath returns the profile in a request's path, which may be built-in. A profile hidden from the
// request does not exist.
func (s *ProfileRoutes) inPath(ctx context.Context, r *web.Request) (proto.Profile, error) {
	name := chi.URLParam(r.Request, "name")
	if !s.visible(r)(name) {
		return proto.Profile{}, proto.ErrNotFound
	}
	return s.Resolver.Profile(ctx, name)
}

func (s *ProfileRoutes) getPreload(w http.ResponseWriter, r *web.Request) error {
	p, err := s.inPath(r.Context(), r)
	if err != nil {
		return err
	}
	var status api.ProfilePreload
	if len(p.Preload) == 0 {
		return web.WriteValue(w, http.StatusOK, status)
	}
	sandbox, err := s.Resolver.Sandbox(r.Context(), &p, proto.Python)
	if err != nil {
		return err
	}
	failure, err := s.Preload.PreloadFailure(r.Context(), sandbox)
	if err != nil {
		return fmt.Errorf("look up preload failures: %w", err)
	}
	if failure != nil {
		status.Error, status.At = &failure.Error, &api.Time{Time: failure.At}
		if failure.Worker != "" {
			status.Worker = &failure.Worker
		}
	}
	return web.WriteValue(w, http.StatusOK, status)
}
