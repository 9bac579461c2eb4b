package gateway

import (
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"time"

	"github.com/go-chi/chi/v5"

	"github.com/bullpen-run/bullpen/proto"
)

// keyView is the JSON form of an API key.
type keyView struct {
	ID         string       `json:"id"`
	Name       string       `json:"name"`
	Org        string       `json:"org"`
	Plan       string       `json:"plan"`
	Rights     proto.Rights `json:"rights"`
	Sandbox    string       `json:"sandbox"`
	Concurrent *int         `json:"concurrent"`
	Hint       string       `json:"hint"`
	CreatedAt  string       `json:"created_at"`
	RevokedAt  *string      `json:"revoked_at"`
	Secret     string       `json:"key,omitempty"` // once, when it is made
}

func viewKey(k proto.Key) keyView {
	v := keyView{
		ID: k.ID, Name: k.Name, Org: k.Org, Plan: k.Plan, Rights: k.Rights, Sandbox: k.Sandbox, Hint: k.Hint,
		CreatedAt: k.CreatedAt.UTC().Format(timeLayout),
	}
	if v.Sandbox == "" {
		v.Sandbox = proto.DefaultProfileName
	}
	if k.Concurrent > 0 {
		v.Concurrent = &k.Concurrent
	}
	if k.RevokedAt != nil {
		v.RevokedAt = optional(k.RevokedAt.UTC().Format(timeLayout))
	}
	return v
}

func (s *Server) createKey(w http.ResponseWriter, r *http.Request) error {
	body, err := s.readBody(w, r)
	if err != nil {
		return err
	}
	wanted, err := proto.DecodeKeyRequest(body)
	if err != nil {
		return err
	}
	wanted.CreatedAt = time.Now().UTC()
	key, secret, err := s.KeyAdmin.Create(r.Context(), wanted)
	if errors.Is(err, proto.ErrNotFound) {
		return &proto.FieldError{Field: "sandbox", Message: fmt.Sprintf("sandbox %q does not exist; make it first", wanted.Sandbox)}
	}
	if err != nil {
		return fmt.Errorf("create key: %w", err)
	}
	view := viewKey(key)
	view.Secret = secret
	w.Header().Set("Location", "/v1/admin/keys/"+key.ID)
	return writeValue(w, http.StatusCreated, view)
}

func (s *Server) listKeys(w http.ResponseWriter, r *http.Request) error {
	keys, err := s.KeyAdmin.List(r.Context())
	if err != nil {
		return fmt.Errorf("list keys: %w", err)
	}
	views := make([]keyView, len(keys))
	for i, k := range keys {
		views[i] = viewKey(k)
	}
	return writeValue(w, http.StatusOK, map[string][]keyView{"keys": views})
}

func (s *Server) revokeKey(w http.ResponseWriter, r *http.Request) error {
	ctx, cancel := detached(r.Context()) // whoever asked and left wants it revoked all the same
	defer cancel()
	key, err := s.KeyAdmin.Revoke(ctx, chi.URLParam(r, "id"))
	if err != nil {
		return fmt.Errorf("revoke key: %w", err)
	}
	return writeValue(w, http.StatusOK, viewKey(key))
}

func writeValue(w http.ResponseWriter, status int, v any) error {
	body, err := json.Marshal(v)
	if err != nil {
		return fmt.Errorf("encode answer: %w", err)
	}
	writeJSON(w, status, body)
	return nil
}
