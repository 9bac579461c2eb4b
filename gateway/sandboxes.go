package gateway

import (
	"context"
	"errors"
	"fmt"
	"net/http"

	"github.com/go-chi/chi/v5"

	"github.com/bullpen-run/bullpen/proto"
)

// brokenSandboxError says that what an API key is bound to is not there. Its executions are refused: another sandbox might let them do
// more than they should.
type brokenSandboxError struct{ missing string }

func (e *brokenSandboxError) Error() string {
	return e.missing + ", so nothing runs under this API key; whoever administers this server has to make it again, or you need another key"
}

// profileOf gives the sandbox profile that a key is bound to.
func (s *Server) profileOf(ctx context.Context, key *proto.Key) (proto.Profile, error) {
	if key.Sandbox == "" {
		return s.Default, nil
	}
	p, err := s.Profiles.Profile(ctx, key.Sandbox)
	if errors.Is(err, proto.ErrNotFound) {
		return p, &brokenSandboxError{fmt.Sprintf("the sandbox %q does not exist", key.Sandbox)}
	}
	return p, err
}

// resolve makes the snapshot that a program of that language runs in.
func (s *Server) resolve(ctx context.Context, p *proto.Profile, language proto.Language) (proto.Sandbox, error) {
	name, ok := p.ImageName()
	if !ok {
		return p.Sandbox(""), nil
	}
	image, err := s.Images.Image(ctx, name)
	if errors.Is(err, proto.ErrNotFound) {
		return proto.Sandbox{}, &brokenSandboxError{fmt.Sprintf("the image %q of the sandbox %q does not exist", name, p.Name)}
	}
	if err != nil {
		return proto.Sandbox{}, fmt.Errorf("look up image %s: %w", name, err)
	}
	if _, err := image.Interpreter(language); err != nil {
		return proto.Sandbox{}, err
	}
	return p.Sandbox(image.Digest), nil
}

// readProfile reads a profile from the body of a request. A name that the path has may be left out there.
func (s *Server) readProfile(w http.ResponseWriter, r *http.Request, name string) (proto.Profile, error) {
	body, err := s.readBody(w, r)
	if err != nil {
		return proto.Profile{}, err
	}
	p, err := proto.DecodeProfile(name, body, s.Default)
	if err != nil {
		return p, err
	}
	image, ok := p.ImageName()
	if !ok {
		return p, nil
	}
	_, err = s.Images.Image(r.Context(), image)
	if errors.Is(err, proto.ErrNotFound) {
		return p, &proto.FieldError{Field: "image", Message: fmt.Sprintf("image %q does not exist; make it first", image)}
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
	w.Header().Set("Location", "/v1/admin/sandboxes/"+p.Name)
	return writeValue(w, http.StatusCreated, p)
}

func (s *Server) listSandboxes(w http.ResponseWriter, r *http.Request) error {
	list, err := s.Profiles.List(r.Context())
	if err != nil {
		return fmt.Errorf("list sandboxes: %w", err)
	}
	list = append([]proto.Profile{s.Default}, list...)
	return writeValue(w, http.StatusOK, map[string][]proto.Profile{"sandboxes": list})
}

func (s *Server) getSandbox(w http.ResponseWriter, r *http.Request) error {
	name := chi.URLParam(r, "name")
	if name == proto.DefaultProfileName {
		return writeValue(w, http.StatusOK, s.Default)
	}
	if proto.CheckProfileName(name) != nil {
		return proto.ErrNotFound
	}
	p, err := s.Profiles.Profile(r.Context(), name)
	if err != nil {
		return fmt.Errorf("look up sandbox: %w", err)
	}
	return writeValue(w, http.StatusOK, p)
}

func (s *Server) replaceSandbox(w http.ResponseWriter, r *http.Request) error {
	p, err := s.readProfile(w, r, chi.URLParam(r, "name"))
	if err != nil {
		return err
	}
	if err := s.Profiles.Replace(r.Context(), p); err != nil {
		return fmt.Errorf("replace sandbox: %w", err)
	}
	return writeValue(w, http.StatusOK, p)
}

func (s *Server) deleteSandbox(w http.ResponseWriter, r *http.Request) error {
	name := chi.URLParam(r, "name")
	if err := proto.CheckProfileName(name); err != nil {
		return err
	}
	p, err := s.Profiles.Remove(r.Context(), name)
	if err != nil {
		return fmt.Errorf("remove sandbox: %w", err)
	}
	return writeValue(w, http.StatusOK, p)
}
