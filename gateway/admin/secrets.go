package admin

import (
	"context"
	"errors"
	"fmt"
	"net/http"

	"github.com/go-chi/chi/v5"

	"github.com/bullpen-run/bullpen/gateway/web"
	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/proto/api"
)

// Secrets stores the named secrets of organisations.
type Secrets interface {
	// Put stores a secret, replacing one with the same name. If injection is nil, the replaced
	// secret's injection stays. Put returns [proto.ErrNoSecretsKey] if nothing can be encrypted,
	// and a [*proto.FieldError] if the organisation has too many secrets or the value cannot be
	// injected.
	Put(ctx context.Context, org, name, value string, injection *proto.Injection) (proto.Secret, error)
	// Get returns a secret without its value, or [proto.ErrNotFound].
	Get(ctx context.Context, org, name string) (proto.Secret, error)
	web.Pages[proto.Secret] // by name
	// Remove removes a secret. It returns [proto.ErrNotFound] if there is none, and a
	// [*proto.SecretInUseError] if it is in use.
	Remove(ctx context.Context, org, name string) error
}

// SecretsKey is the operator's key, which protects all stored secrets.
type SecretsKey interface {
	// Rotate rewraps the secrets' key with the operator's current keys, and returns their names. It
	// returns [proto.ErrNoSecretsKey] if there is no key.
	Rotate(ctx context.Context) (keys string, err error)
}

// SecretRoutes are the routes of secrets.
type SecretRoutes struct {
	*web.Core
	Secrets Secrets
	Orgs    orgFinder
	Key     SecretsKey
}

// Handlers returns the handlers of the routes. Secrets have no ETags.
func (s *SecretRoutes) Handlers() []web.Handler {
	x := &web.Resource[proto.Secret, api.Secret]{
		Core: s.Core, Kind: "secret", Path: "/v1/admin/secrets", Param: "name", Form: api.NewSecret,
		Name:   func(s *proto.Secret) (org, id string) { return s.Org, s.Name },
		Answer: func(list []api.Secret, next *string) any { return api.Secrets{Secrets: list, NextCursor: next} },
		NotFound: func(name string) error {
			return api.Errorf(api.CodeNotFound, "there is no secret %s in this organisation", name)
		},
	}
	return []web.Handler{
		{ID: "rotateSecretsKey", Handle: s.rotateKey},
		{ID: "putSecret", Handle: s.put},
		{ID: "getSecret", Handle: func(w http.ResponseWriter, r *web.Request) error {
			org, name, err := secretPath(r)
			if err != nil {
				return err
			}
			secret, err := s.Secrets.Get(r.Context(), org, name)
			if err != nil {
				return x.Error(name, err)
			}
			return web.WriteValue(w, http.StatusOK, api.NewSecret(&secret))
		}},
		{ID: "listSecrets", Handle: x.List(web.NamedOrg, s.Secrets)},
		{ID: "deleteSecret", Handle: x.Remove(func(ctx context.Context, r *web.Request, _ string) (*proto.Secret, error) {
			org, name, err := secretPath(r)
			if err != nil {
				return nil, err
			}
			if old, err := s.Secrets.Get(ctx, org, name); err == nil {
				web.AuditBefore(r, org, name, api.NewSecret(&old))
			}
			return nil, s.Secrets.Remove(ctx, org, name)
		})},
	}
}

func (s *SecretRoutes) rotateKey(w http.ResponseWriter, r *web.Request) error {
	ctx, cancel := web.Detached(r.Context())
	defer cancel()
	keys, err := s.Key.Rotate(ctx)
	if errors.Is(err, proto.ErrNoSecretsKey) {
		return api.Errorf(api.CodeConflict, "%s", err)
	}
	if err != nil {
		return fmt.Errorf("rotate the key of secrets: %w", err)
	}
	web.AuditAfter(r, "", "", api.RotatedKey{WrappedFor: keys})
	s.Log.InfoContext(ctx, "key of secrets rotated", "wrapped_for", keys, "key", r.Key.ID)
	return web.WriteValue(w, http.StatusOK, api.RotatedKey{WrappedFor: keys})
}

// secretPath returns the organisation and the name of the secret that a request names.
func secretPath(r *web.Request) (org, name string, err error) {
	if org, err = web.NamedOrg(r); err != nil {
		return "", "", err
	}
	name = chi.URLParam(r.Request, "name")
	return org, name, proto.CheckSecretName("name", name)
}

func (s *SecretRoutes) put(w http.ResponseWriter, r *web.Request) error {
	org, name, err := secretPath(r)
	if err != nil {
		return err
	}
	request, err := web.DecodeBody[api.SecretRequest](s.Core, w, r)
	if err != nil {
		return err
	}
	ctx, cancel := web.Detached(r.Context())
	defer cancel()
	// The organisation may be created later, with its first API key.
	if err := CheckMayGetObjects(ctx, s.Orgs, org); err != nil && !errors.Is(err, web.ErrNoOrg) {
		return err
	}
	if old, err := s.Secrets.Get(ctx, org, name); err == nil {
		web.AuditBefore(r, org, name, api.NewSecret(&old))
	}
	secret, err := s.Secrets.Put(ctx, org, name, request.Value, request.Injection)
	if errors.Is(err, proto.ErrNoSecretsKey) {
		return api.Errorf(api.CodeConflict, "%s", proto.ErrNoSecretsKey)
	}
	if err != nil {
		return err
	}
	web.AuditAfter(r, org, name, api.NewSecret(&secret))
	return web.WriteValue(w, http.StatusOK, api.NewSecret(&secret))
}
