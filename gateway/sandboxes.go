package gateway

import (
	"context"
	"errors"
	"fmt"
	"net/http"

	"github.com/go-chi/chi/v5"

	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/proto/api"
)

// brokenSandbox refuses executions of an API key whose sandbox or image is missing. Any other
// sandbox might allow more.
func brokenSandbox(format string, args ...any) error {
	return api.Errorf(api.CodeInternal, format+", so nothing runs under this API key; ask the administrator of this server to create it again, or use another key", args...)
}

// profileOf returns the sandbox profile that a key is bound to.
func (s *Server) profileOf(ctx context.Context, key *proto.Key) (proto.Profile, error) {
	if key.Sandbox == "" {
		return s.Default, nil
	}
	p, err := s.Profiles.Profile(ctx, key.Sandbox)
	if errors.Is(err, proto.ErrNotFound) {
		return p, brokenSandbox("the sandbox %q does not exist", key.Sandbox)
	}
	return p, err
}

// resolve returns the snapshot of a profile for a program in language. A profile without an image
// has that of the default profile.
func (s *Server) resolve(ctx context.Context, p *proto.Profile, language proto.Language) (proto.Sandbox, error) {
	if p.Image == "" && s.Default.Image != "" {
		imaged := *p
		imaged.Image = s.Default.Image
		p = &imaged
	}
	name, ok := p.ImageName()
	if !ok {
		return p.Sandbox(""), nil
	}
	image, err := s.Images.Image(ctx, name)
	if errors.Is(err, proto.ErrNotFound) {
		return proto.Sandbox{}, brokenSandbox("the image %q of the sandbox %q does not exist", name, p.Name)
	}
	if err != nil {
		return proto.Sandbox{}, fmt.Errorf("look up image %s: %w", name, err)
	}
	if _, err := image.Interpreter(language); err != nil {
		return proto.Sandbox{}, err
	}
	sandbox := p.Sandbox(image.Digest)
	sandbox.Architecture = image.Architecture
	return sandbox, nil
}

// readProfile decodes a profile from the body of a request. If the path has a name, the body may
// omit it.
func (s *Server) readProfile(w http.ResponseWriter, r *http.Request, name string) (proto.Profile, error) {
	body, err := s.readBody(w, r)
	if err != nil {
		return proto.Profile{}, err
	}
	p, err := api.DecodeSandbox(name, body, s.Default)
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

func (s *Server) createSandbox(w http.ResponseWriter, r *http.Request) error {
	p, err := s.readProfile(w, r, "")
	if err != nil {
		return err
	}
	if err := s.Profiles.Create(r.Context(), p); err != nil {
		return fmt.Errorf("create sandbox: %w", err)
	}
	auditAfter(r, "", p.Name, auditProfile(p))
	w.Header().Set("Location", "/v1/admin/sandboxes/"+p.Name)
	return writeTagged(w, http.StatusCreated, p)
}

func (s *Server) listSandboxes(w http.ResponseWriter, r *http.Request) error {
	list, err := s.Profiles.List(r.Context())
	if err != nil {
		return fmt.Errorf("list sandboxes: %w", err)
	}
	return writeValue(w, http.StatusOK, api.Sandboxes{Sandboxes: append([]proto.Profile{s.Default}, list...)})
}

func (s *Server) getSandbox(w http.ResponseWriter, r *http.Request) error {
	p, err := s.profileNamed(r.Context(), chi.URLParam(r, "name"))
	if err != nil {
		return err
	}
	return writeTagged(w, http.StatusOK, p)
}

// profileNamed returns the profile of that name, which may be the default one.
func (s *Server) profileNamed(ctx context.Context, name string) (proto.Profile, error) {
	if name == proto.DefaultProfileName {
		return s.Default, nil
	}
	if proto.CheckProfileName(name) != nil {
		return proto.Profile{}, proto.ErrNotFound
	}
	p, err := s.Profiles.Profile(ctx, name)
	if err != nil {
		return p, fmt.Errorf("look up sandbox: %w", err)
	}
	return p, nil
}

func (s *Server) getSandboxPreload(w http.ResponseWriter, r *http.Request) error {
	p, err := s.profileNamed(r.Context(), chi.URLParam(r, "name"))
	if err != nil {
		return err
	}
	var status api.SandboxPreload
	if len(p.Preload) == 0 {
		return writeValue(w, http.StatusOK, status)
	}
	sandbox, err := s.resolve(r.Context(), &p, proto.Python)
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
	return writeValue(w, http.StatusOK, status)
}

func (s *Server) replaceSandbox(w http.ResponseWriter, r *http.Request) error {
	p, err := s.readProfile(w, r, chi.URLParam(r, "name"))
	if err != nil {
		return err
	}
	err = s.Profiles.Replace(r.Context(), p, func(old proto.Profile) error {
		auditBefore(r, "", p.Name, auditProfile(old))
		return checkMatch(r, old)
	})
	if err != nil {
		return fmt.Errorf("replace sandbox: %w", err)
	}
	auditAfter(r, "", p.Name, auditProfile(p))
	return writeTagged(w, http.StatusOK, p)
}

func (s *Server) deleteSandbox(w http.ResponseWriter, r *http.Request) error {
	name := chi.URLParam(r, "name")
	if err := proto.CheckProfileName(name); err != nil {
		return err
	}
	p, err := s.Profiles.Remove(r.Context(), name, func(old proto.Profile) error { return checkMatch(r, old) })
	if err != nil {
		return fmt.Errorf("remove sandbox: %w", err)
	}
	auditBefore(r, "", name, auditProfile(p))
	return writeValue(w, http.StatusOK, p)
}
