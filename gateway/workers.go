package gateway

import (
	"fmt"
	"net/http"

	"github.com/go-chi/chi/v5"

	"github.com/bullpen-run/bullpen/proto/api"
)

func (s *Server) listWorkers(w http.ResponseWriter, r *http.Request) error {
	list, err := s.Workers.Workers(r.Context())
	if err != nil {
		return fmt.Errorf("list workers: %w", err)
	}
	answer := api.Workers{Workers: make([]api.Worker, len(list))}
	for i := range list {
		answer.Workers[i] = api.NewWorker(&list[i])
	}
	return writeValue(w, http.StatusOK, answer)
}

// drainWorker returns the handler that makes a worker drain, or take jobs again.
func (s *Server) drainWorker(drain bool) func(w http.ResponseWriter, r *http.Request) error {
	return func(w http.ResponseWriter, r *http.Request) error {
		worker, err := s.Workers.Drain(r.Context(), chi.URLParam(r, "name"), drain)
		if err != nil {
			return err
		}
		auditAfter(r, "", worker.Name, api.NewWorker(&worker))
		return writeValue(w, http.StatusOK, api.NewWorker(&worker))
	}
}

// getAutoscale answers with the demand for workers, and what is recommended.
func (s *Server) getAutoscale(w http.ResponseWriter, r *http.Request) error {
	pools, err := s.Workers.Pools(r.Context())
	if err != nil {
		return fmt.Errorf("list pools of workers: %w", err)
	}
	return writeValue(w, http.StatusOK, api.NewAutoscale(pools))
}
