package anthropic

import (
	"net/http"
	"time"

	"github.com/go-chi/chi/v5"

	"github.com/bullpen-run/bullpen/agent"
)

// modelBody is a model. Properties unknown to this server are null.
type modelBody struct {
	ID             string    `json:"id"`
	Type           string    `json:"type"`
	DisplayName    string    `json:"display_name"`
	CreatedAt      time.Time `json:"created_at"`
	Lifecycle      string    `json:"lifecycle"`
	Line           *string   `json:"line"`
	Capabilities   *struct{} `json:"capabilities"`
	MaxInputTokens *int      `json:"max_input_tokens"`
	MaxTokens      *int      `json:"max_tokens"`
	DeprecatedAt   *string   `json:"deprecated_at"`
	RetiresAt      *string   `json:"retires_at"`
}

// newModelBody returns the model of a name. The time of the API for an unknown one is the epoch.
func newModelBody(name *string) modelBody {
	return modelBody{ID: *name, Type: "model", DisplayName: *name, CreatedAt: time.Unix(0, 0).UTC(), Lifecycle: "active"}
}

// ListModels answers with the models.
func (s *Server) ListModels(w http.ResponseWriter, r *http.Request) error {
	names, _, err := s.Upstream.ListModels(r.Context())
	if err != nil {
		return agent.ClientError(err)
	}
	p, err := newPage(names, r.URL.Query(), func(name *string) string { return *name }, newModelBody)
	if err != nil {
		return err
	}
	writeJSON(w, http.StatusOK, p)
	return nil
}

// GetModel answers with the model whose name is the rest of the path.
func (s *Server) GetModel(w http.ResponseWriter, r *http.Request) error {
	name, err := agent.FindModel(r.Context(), s.Upstream, chi.URLParam(r, "*"))
	if err != nil {
		return err
	}
	writeJSON(w, http.StatusOK, newModelBody(&name))
	return nil
}
