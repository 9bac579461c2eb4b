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
	if _, err := adminOrg(r, req.Org); err != nil {
		return err
	}
	wanted := req.Key()
	if err := s.checkGrantable(r, &wanted); err != nil {
		return err
	}
	wanted.CreatedAt = time.Now().UTC()
	key, secret, err := s.KeyAdmin.Create(r.Context(), wanted)
	if errors.Is(err, proto.ErrNotFound) {
		return proto.FieldErrorf("sandbox", "%q does not exist; make it first", wanted.Sandbox)
	}
	if err != nil {
		return fmt.Errorf("create key: %w", err)
	}
	auditAfter(r, key.Org, key.ID, auditKey(&key))
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
	org := r.URL.Query().Get("org")
	if org != "" || !infoOf(r.Context()).key.Global {
		if org, err = adminOrg(r, org); err != nil {
			return err
		}
	}
	answer := api.Keys{Keys: []api.Key{}}
	for i := range keys {
		if org == "" || keys[i].Org == org {
			answer.Keys = append(answer.Keys, api.NewKey(&keys[i]))
		}
	}
	return writeValue(w, http.StatusOK, answer)
}

func (s *Server) revokeKey(w http.ResponseWriter, r *http.Request) error {
	ctx, cancel := detached(r.Context())
	defer cancel()
	key, err := s.KeyAdmin.Get(ctx, chi.URLParam(r, "id"))
	if err == nil {
		err = administer(r, &key, true)
	}
	if err == nil {
		auditBefore(r, key.Org, key.ID, auditKey(&key))
		key, err = s.KeyAdmin.Revoke(ctx, key.ID)
	}
	if err != nil {
		return fmt.Errorf("revoke key: %w", err)
	}
	auditAfter(r, key.Org, key.ID, auditKey(&key))
	return writeValue(w, http.StatusOK, api.NewKey(&key))
}
