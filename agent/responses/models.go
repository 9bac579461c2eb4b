package responses

import (
	"net/http"

	"github.com/go-chi/chi/v5"

	"github.com/bullpen-run/bullpen/agent"
)

// modelBody is a model. Its creation time is unknown to this server.
type modelBody struct {
	ID      string `json:"id"`
	Object  string `json:"object"`
	Created int64  `json:"created"`
	OwnedBy string `json:"owned_by"`
}

func newModelBody(name string) modelBody {
	return modelBody{ID: name, Object: "model", OwnedBy: "bullpen"}
}

// ListModels answers with the models.
func (s *Server) ListModels(w http.ResponseWriter, r *http.Request) error {
	names, _, err := s.Upstream.ListModels(r.Context())
	if err != nil {
		return agent.ClientError(err)
	}
	l := list[modelBody]{Object: "list", Data: []modelBody{}}
	for _, name := range names {
		l.Data = append(l.Data, newModelBody(name))
	}
	writeJSON(w, http.StatusOK, &l)
	return nil
}

// GetModel answers with the model whose name is the rest of the path.
func (s *Server) GetModel(w http.ResponseWriter, r *http.Request) error {
	name, err := agent.FindModel(r.Context(), s.Upstream, chi.URLParam(r, "*"))
	if err != nil {
		return err
	}
	writeJSON(w, http.StatusOK, newModelBody(name))
	return nil
}
