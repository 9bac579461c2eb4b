package work

import (
	"context"
	"io"
	"net/http"
	"time"

	"github.com/bullpen-run/bullpen/gateway/web"
	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/proto/api"
)

// Pipelines stores runs of pipelines.
type Pipelines interface {
	// Parse reads the file of a pipeline. Errors are [*proto.FieldError].
	Parse(file string) (*proto.Pipeline, error)
	// Schema returns the JSON schema of the files.
	Schema() []byte
	// Create stores a new run and returns its state. prepare is called before the run can start, and
	// its error is returned. Create returns a [*proto.Rejection] if the organisation has too many
	// runs, and a [*proto.FieldError] if the run is too large.
	Create(ctx context.Context, p *proto.Pipeline, prepare func(context.Context) error) (*proto.PipelineState, error)
	web.Pages[proto.PipelineState] // the newest first
	// Get returns the state of a run, or [proto.ErrNotFound].
	Get(ctx context.Context, org, id string) (*proto.PipelineState, error)
	// Definition returns the definition of a run, or [proto.ErrNotFound].
	Definition(ctx context.Context, org, id string) (*proto.Pipeline, error)
	// Cancel asks for the end of a run and returns its state, or [proto.ErrNotFound].
	Cancel(ctx context.Context, org, id string) (*proto.PipelineState, error)
}

// PipelineChecker admits runs of pipelines.
type PipelineChecker interface {
	// CheckQuota rejects a use if the organisation has reached a hard limit this month: of the
	// named quotas, or of any if none are named.
	CheckQuota(ctx context.Context, org string, quotas ...proto.QuotaName) error
	// CheckPipeline rejects a run if one of its steps would be rejected now, or if its secrets do
	// not match the names in its steps.
	CheckPipeline(ctx context.Context, p *proto.Pipeline) error
}

// Caches lists the caches of pipelines, which are threads.
type Caches interface {
	// Get returns a thread, or [proto.ErrNotFound].
	Get(ctx context.Context, org, id string) (*proto.Thread, error)
	// List returns up to limit threads of an owner with names after a given one, ordered by name,
	// which replaces the id.
	List(ctx context.Context, org string, owner proto.ThreadOwner, after string, limit int) ([]proto.ThreadSummary, error)
}

// Versions forks, reads and removes the stored versions of threads.
type Versions interface {
	// Fork creates a thread from a version of another; version 0 is the newest with the staged
	// files. It returns [proto.ErrNotFound] if there is no such thread or version, and
	// [proto.ErrExists] if the new id is taken.
	Fork(ctx context.Context, org, from string, version int64, to string) (*proto.Thread, error)
	// ArchiveSelected writes what patterns select of the newest version as a tar. Before it writes, it
	// returns [proto.ErrNotFound] if there is no such thread.
	ArchiveSelected(ctx context.Context, org, thread string, paths []string, w io.Writer) error
	// Remove removes a thread with its versions and staged files. It returns [proto.ErrNotFound] if
	// there is none, and a [*proto.BusyError] while an execution holds it.
	Remove(ctx context.Context, org, thread string) error
}

// PipelineRoutes are the routes of runs of pipelines, of their artifacts and caches.
type PipelineRoutes struct {
	*web.Core
	Pipelines Pipelines
	Checker   PipelineChecker
	Caches    Caches
	Versions  Versions
	Waiting   Waiting

	resource *web.Resource[proto.PipelineState, api.Pipeline]
}

// Handlers returns the handlers of the routes.
func (s *PipelineRoutes) Handlers() []web.Handler {
	x := &web.Resource[proto.PipelineState, api.Pipeline]{
		Core: s.Core, Kind: "run", Path: "/v1/pipelines", Param: "id", Form: api.NewPipeline, Valid: proto.ValidPipelineID,
		Name:   func(p *proto.PipelineState) (org, id string) { return p.Org, p.ID },
		Answer: func(list []api.Pipeline, next *string) any { return api.Pipelines{Pipelines: list, NextCursor: next} },
		NotFound: func(string) error {
			return api.Errorf(api.CodeNotFound, "there is no run of that id; see /v1/pipelines")
		},
	}
	s.resource = x
	return []web.Handler{
		{ID: "createPipeline", Handle: s.create},
		{ID: "listPipelines", Handle: x.List(web.OwnOrg, s.Pipelines)},
		{ID: "getPipelineSchema", Handle: s.getSchema},
		{ID: "getPipeline", Handle: s.get},
		{ID: "cancelPipeline", Handle: s.cancel},
		{ID: "getPipelineArtifact", Handle: s.getArtifact},
		{ID: "listPipelineCaches", Handle: s.listCaches},
		{ID: "removePipelineCache", Handle: s.removeCache},
	}
}

func (s *PipelineRoutes) create(w http.ResponseWriter, r *web.Request) error {
	request, err := web.DecodeBody[api.PipelineRequest](s.Core, w, r)
	if err != nil {
		return err
	}
	p, err := s.Pipelines.Parse(request.File)
	if err != nil {
		return err
	}
	key := r.Key
	if err := s.Checker.CheckQuota(r.Context(), key.Org); err != nil {
		return err
	}
	p.ID, p.Org, p.Key, p.CreatedAt = proto.NewPipelineID(), key.Org, key.ID, time.Now().UTC()
	p.Commit, p.Branch, p.Secrets = request.Commit, request.Branch, request.Secrets
	if err := s.Checker.CheckPipeline(r.Context(), p); err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(r.Context()), web.VersionsTimeout)
	defer cancel()
	state, err := s.Pipelines.Create(ctx, p, func(ctx context.Context) error {
		if request.ThreadID == "" {
			return nil
		}
		if _, err := s.Versions.Fork(ctx, p.Org, request.ThreadID, 0, proto.RunThread(p.ID)); err != nil {
			return web.ThreadError("fork", request.ThreadID, err)
		}
		return nil
	})
	if err != nil {
		return err
	}
	s.resource.Location(w, state)
	return web.WriteValue(w, http.StatusCreated, api.NewWholePipeline(p, state, nil))
}

func (s *PipelineRoutes) getSchema(w http.ResponseWriter, _ *web.Request) error {
	h := w.Header()
	web.JSONHeader(h)
	h.Set("Content-Type", "application/schema+json")
	_, _ = w.Write(s.Pipelines.Schema()) // the client may be gone
	return nil
}

func (s *PipelineRoutes) get(w http.ResponseWriter, r *web.Request) error {
	return s.answer(w, r, s.Pipelines.Get)
}

func (s *PipelineRoutes) cancel(w http.ResponseWriter, r *web.Request) error {
	return s.answer(w, r, s.Pipelines.Cancel)
}

// answer answers with a run in the state that read returns.
func (s *PipelineRoutes) answer(
	w http.ResponseWriter, r *web.Request, read func(context.Context, string, string) (*proto.PipelineState, error),
) error {
	id, err := s.resource.ID(r)
	if err != nil {
		return err
	}
	org := r.Key.Org
	state, err := read(r.Context(), org, id)
	if err != nil {
		return s.resource.Error(id, err)
	}
	p, err := s.Pipelines.Definition(r.Context(), org, id)
	if err != nil {
		return s.resource.Error(id, err)
	}
	var queued []proto.TraceID
	for i := range state.Cells {
		if c := &state.Cells[i]; c.Status == proto.StepRunning && c.TraceID != "" && c.StartedAt.IsZero() {
			queued = append(queued, c.TraceID)
		}
	}
	waiting, err := s.Waiting(r.Context(), org, queued)
	if err != nil {
		return err
	}
	return web.WriteValue(w, http.StatusOK, api.NewWholePipeline(p, state, waiting))
}
