package gateway

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"slices"

	"github.com/go-chi/chi/v5"

	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/proto/api"
)

func (s *Server) rotateSecretsKey(w http.ResponseWriter, r *http.Request) error {
	ctx, cancel := detached(r.Context())
	defer cancel()
	keys, err := s.SecretsKey.Rotate(ctx)
	if errors.Is(err, proto.ErrNoSecretsKey) {
		return api.Errorf(api.CodeConflict, "%s", err)
	}
	if err != nil {
		return fmt.Errorf("rotate the key of secrets: %w", err)
	}
	auditAfter(r, "", "", api.RotatedKey{WrappedFor: keys})
	s.Log.InfoContext(ctx, "key of secrets rotated", "wrapped_for", keys, "key", infoOf(r.Context()).key.ID)
	return writeValue(w, http.StatusOK, api.RotatedKey{WrappedFor: keys})
}

// sealSecrets sets the Sealed of a job: the values of its secrets and the credentials of its mounts,
// encrypted. It sets the injections of the bindings. requested are the variables of the request.
func (s *Server) sealSecrets(ctx context.Context, job *proto.Job, requested map[string]string) error {
	needed := slices.Clone(job.Bound)
	for _, m := range job.Mounts {
		if m.S3 != nil {
			needed = append(needed, proto.SecretBinding{Secret: m.S3.Credential})
		}
	}
	if len(needed) == 0 {
		return nil
	}
	secrets, sealed, err := s.Secrets.Bind(ctx, job.Org, job.TraceID, needed)
	if missing, ok := errors.AsType[*proto.MissingSecretError](err); ok {
		return brokenSandbox("the secret %q of this organisation does not exist", missing.Secret)
	}
	if err != nil {
		return fmt.Errorf("bind secrets: %w", err)
	}
	copy(job.Bound, needed)
	job.Sealed, job.HasSecrets, job.HasInjections = sealed, true, proto.HasInjections(job.Bound)
	if err := proto.CheckInjections(job.Bound, job.Sandbox.Network.Effective()); err != nil {
		return err
	}
	return proto.CheckSecretEnv(job.Env, requested, job.Bound, secrets)
}

// secretPath returns the organisation and the name of the secret that a request names.
func secretPath(r *http.Request) (org, name string, err error) {
	if org, err = secretOrg(r); err != nil {
		return "", "", err
	}
	name = chi.URLParam(r, "name")
	return org, name, proto.CheckSecretName("name", name)
}

// secretOrg returns the organisation that a request names: by default that of its key.
func secretOrg(r *http.Request) (string, error) { return adminOrg(r, r.URL.Query().Get("org")) }

func secretError(name string, err error) error {
	if errors.Is(err, proto.ErrNotFound) {
		return api.Errorf(api.CodeNotFound, "there is no secret %s in this organisation", name)
	}
	return fmt.Errorf("secret %s: %w", name, err)
}

func (s *Server) putSecret(w http.ResponseWriter, r *http.Request) error {
	org, name, err := secretPath(r)
	if err != nil {
		return err
	}
	request, err := decodeBody[api.SecretRequest](s, w, r)
	if err != nil {
		return err
	}
	ctx, cancel := detached(r.Context())
	defer cancel()
	// The organisation may be created later, with its first API key.
	if err := s.checkMayGetObjects(ctx, org); err != nil && !errors.Is(err, errNoOrg) {
		return err
	}
	if old, err := s.Secrets.Get(ctx, org, name); err == nil {
		auditBefore(r, org, name, api.NewSecret(&old))
	}
	secret, err := s.Secrets.Put(ctx, org, name, request.Value, request.Injection)
	if errors.Is(err, proto.ErrNoSecretsKey) {
		return api.Errorf(api.CodeConflict, "%s", proto.ErrNoSecretsKey)
	}
	if err != nil {
		return err
	}
	auditAfter(r, org, name, api.NewSecret(&secret))
	return writeValue(w, http.StatusOK, api.NewSecret(&secret))
}

func (s *Server) getSecret(w http.ResponseWriter, r *http.Request) error {
	org, name, err := secretPath(r)
	if err != nil {
		return err
	}
	secret, err := s.Secrets.Get(r.Context(), org, name)
	if err != nil {
		return secretError(name, err)
	}
	return writeValue(w, http.StatusOK, api.NewSecret(&secret))
}

func (s *Server) listSecrets(w http.ResponseWriter, r *http.Request) error {
	org, err := secretOrg(r)
	if err != nil {
		return err
	}
	answer := api.Secrets{Secrets: []api.Secret{}}
	for _, secret := range s.Secrets.List(org) {
		answer.Secrets = append(answer.Secrets, api.NewSecret(&secret))
	}
	return writeValue(w, http.StatusOK, answer)
}

func (s *Server) deleteSecret(w http.ResponseWriter, r *http.Request) error {
	org, name, err := secretPath(r)
	if err != nil {
		return err
	}
	ctx, cancel := detached(r.Context())
	defer cancel()
	if old, err := s.Secrets.Get(ctx, org, name); err == nil {
		auditBefore(r, org, name, api.NewSecret(&old))
	}
	if err := s.Secrets.Remove(ctx, org, name); err != nil {
		return secretError(name, err)
	}
	w.WriteHeader(http.StatusNoContent)
	return nil
}
