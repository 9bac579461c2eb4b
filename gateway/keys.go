package gateway

import (
	"errors"
	"fmt"
	"net/http"
	"time"

	"github.com/go-chi/chi/v5"

	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/proto/api"
)

func (s *Server) createKey(w http.ResponseWriter, r *http.Request) error {
	req, err := decodeBody[api.KeyRequest](s, w, r)
	if err != nil {
		return err
	}
	wanted := req.Key()
	wanted.CreatedAt = time.Now().UTC()
	key, secret, err := s.KeyAdmin.Create(r.Context(), wanted)
	if errors.Is(err, proto.ErrNotFound) {
		return proto.FieldErrorf("sandbox", "%q does not exist; make it first", wanted.Sandbox)
	}
	if err != nil {
		return fmt.Errorf("create key: %w", err)
	}
	answer := api.NewKey(&key)
	answer.Secret = secret
	w.Header().Set("Location", "/v1/admin/keys/"+key.ID)
	return writeValue(w, http.StatusCreated, answer)
}

func (s *Server) listKeys(w http.ResponseWriter, r *http.Request) error {
	keys, err := s.KeyAdmin.List(r.Context())
	if err != nil {
		return fmt.Errorf("list keys: %w", err)
	}
	answer := api.Keys{Keys: make([]api.Key, len(keys))}
	for i := range keys {
		answer.Keys[i] = api.NewKey(&keys[i])
	}
	return writeValue(w, http.StatusOK, answer)
}

func (s *Server) revokeKey(w http.ResponseWriter, r *http.Request) error {
	ctx, cancel := detached(r.Context())
	defer cancel()
	key, err := s.KeyAdmin.Revoke(ctx, chi.URLParam(r, "id"))
	if err != nil {
		return fmt.Errorf("revoke key: %w", err)
	}
	return writeValue(w, http.StatusOK, api.NewKey(&key))
}
