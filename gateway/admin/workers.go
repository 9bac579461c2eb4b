package admin

import (
	"context"
	"fmt"
	"net/http"

	"github.com/go-chi/chi/v5"

	"github.com/bullpen-run/bullpen/gateway/web"
	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/proto/api"
)

// Workers lists and drains the live workers.
type Workers interface {
	// Workers returns all live workers by name.
	Workers(ctx context.Context) ([]proto.Worker, error)
	// Pools returns all pools of workers with the demand for them, by name.
	Pools(ctx context.Context) ([]proto.Pool, error)
	// Drain makes a worker stop or resume taking jobs, and returns the worker once it has. It
	// returns [proto.ErrNotFound] if there is none with that name.
	Drain(ctx context.Context, name string, drain bool) (proto.Worker, error)
}

// Processes finds the running processes of the deployment.
type Processes interface {
	// Processes returns the processes that answer within a few seconds, by name.
	Processes(ctx context.Context) ([]proto.Process, error)
}

// WorkerRoutes are the routes of workers and processes.
type WorkerRoutes struct {
	*web.Core
	Workers   Workers
	Processes Processes
}

// Handlers returns the handlers of the routes.
func (s *WorkerRoutes) Handlers() []web.Handler {
	return []web.Handler{
		{ID: "getAutoscale", Handle: s.getAutoscale},
		{ID: "listWorkers", Handle: s.list},
		{ID: "listProcesses", Handle: s.listProcesses},
		{ID: "drainWorker", Handle: s.drain(true)},
		{ID: "undrainWorker", Handle: s.drain(false)},
	}
}

func (s *WorkerRoutes) list(w http.ResponseWriter, r *web.Request) error {
	list, err := s.Workers.Workers(r.Context())
	if err != nil {
		return fmt.Errorf("list workers: %w", err)
	}
	answer := api.Workers{Workers: make([]api.Worker, len(list))}
	for i := range list {
		answer.Workers[i] = api.NewWorker(&list[i])
	}
	return web.WriteValue(w, http.StatusOK, answer)
}

// drain returns the handler that makes a worker drain or resume.
func (s *WorkerRoutes) drain(drain bool) func(w http.ResponseWriter, r *web.Request) error {
	return func(w http.ResponseWriter, r *web.Request) error {
		worker, err := s.Workers.Drain(r.Context(), chi.URLParam(r.Request, "name"), drain)
		if err != nil {
			return err
		}
		web.AuditAfter(r, "", worker.Name, api.NewWorker(&worker))
		return web.WriteValue(w, http.StatusOK, api.NewWorker(&worker))
	}
}

// getAutoscale answers with the demand for workers and the recommendation.
func (s *WorkerRoutes) getAutoscale(w http.ResponseWriter, r *web.Request) error {
	pools, err := s.Workers.Pools(r.Context())
	if err != nil {
		return fmt.Errorf("list pools of workers: %w", err)
	}
	return web.WriteValue(w, http.StatusOK, api.NewAutoscale(pools))
}

// listProcesses answers with all running processes, their problems and their workers' missing
// capabilities.
func (s *WorkerRoutes) listProcesses(w http.ResponseWriter, r *web.Request) error {
	list, err := s.Processes.Processes(r.Context())
	if err != nil {
		return err
	}
	return web.WriteValue(w, http.StatusOK, api.NewProcesses(list))
}
