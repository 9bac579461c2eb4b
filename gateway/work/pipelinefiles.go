package work

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

// getArtifact answers with an artifact as a tar.
func (s *PipelineRoutes) getArtifact(w http.ResponseWriter, r *web.Request) error {
	id, err := s.resource.ID(r)
	if err != nil {
		return err
	}
	org := r.Key.Org
	state, err := s.Pipelines.Get(r.Context(), org, id)
	var p *proto.Pipeline
	if err == nil {
		p, err = s.Pipelines.Definition(r.Context(), org, id)
	}
	if err != nil {
		return s.resource.Error(id, err)
	}
	query := r.URL.Query()
	for _, name := range []string{"step", "artifact"} {
		if query.Get(name) == "" {
			return proto.FieldErrorf(name, "must be given")
		}
	}
	thread, paths, err := findArtifact(p, state, query.Get("step"), query.Get("cell"), query.Get("artifact"))
	if err != nil {
		return err
	}
	done, err := s.Transfers.Begin(r.Context(), org)
	if err != nil {
		return err
	}
	defer done()
	err = s.Versions.ArchiveSelected(r.Context(), org, thread, paths, web.TarAnswer(w, r, query.Get("artifact")))
	if errors.Is(err, proto.ErrNotFound) {
		return errNoArtifact
	}
	if err != nil {
		return fmt.Errorf("archive an artifact of run %s: %w", id, err)
	}
	return nil
}

var errNoArtifact = api.Errorf(
	api.CodeNotFound, "the step has not ended, or nothing of it was kept; see /v1/pipelines/{id}")

// findArtifact returns the thread of a cell and the paths of its artifact.
func findArtifact(
	p *proto.Pipeline, state *proto.PipelineState, step, cell, name string,
) (thread string, paths []string, err error) {
	known := false
	for i := range state.Cells {
		c := &state.Cells[i]
		if c.Step != step {
			continue
		}
		if known = true; c.Cell == cell {
			thread = c.Thread
			break
		}
		if i == len(state.Cells)-1 || state.Cells[i+1].Step != step {
			return "", nil, api.Errorf(api.CodeNotFound, "the step %s has no such cell; see /v1/pipelines/{id}", step)
		}
	}
	if !known {
		return "", nil, api.Errorf(api.CodeNotFound, "the run has no such step; see /v1/pipelines/{id}")
	}
	for i := range p.Steps {
		if p.Steps[i].Name == step {
			paths = p.Steps[i].Artifacts[name]
		}
	}
	switch {
	case paths == nil:
		return "", nil, api.Errorf(api.CodeNotFound, "the step %s has no such artifact; see /v1/pipelines/{id}", step)
	case thread == "":
		return "", nil, errNoArtifact
	}
	return thread, paths, nil
}

func (s *PipelineRoutes) listCaches(w http.ResponseWriter, r *web.Request) error {
	limit, err := web.PageSize(r)
	if err != nil {
		return err
	}
	cursor := r.URL.Query().Get("cursor")
	if cursor != "" && proto.CheckThreadID("cursor", cursor) != nil { // keys have its form
		return web.BadCursor()
	}
	list, err := s.Caches.List(r.Context(), r.Key.Org, proto.OwnerCache, cursor, limit+1)
	if err != nil {
		return fmt.Errorf("list caches: %w", err)
	}
	answer := api.PipelineCaches{Caches: []api.PipelineCache{}}
	for _, t := range list[:min(len(list), limit)] {
		answer.Caches = append(answer.Caches, api.NewPipelineCache(&t))
	}
	if len(list) > limit {
		answer.NextCursor = &list[limit-1].ID
	}
	return web.WriteValue(w, http.StatusOK, answer)
}

func (s *PipelineRoutes) removeCache(w http.ResponseWriter, r *web.Request) error {
	org, err := web.AdminOrg(r, r.URL.Query().Get("org"))
	if err != nil {
		return err
	}
	key := chi.URLParam(r.Request, "key")
	ctx, cancel := context.WithTimeout(context.WithoutCancel(r.Context()), web.VersionsTimeout)
	defer cancel()
	thread := proto.OwnerCache.Thread(key)
	if head, err := s.Caches.Get(ctx, org, thread); err == nil {
		summary := head.Summary()
		summary.ID = key
		web.AuditBefore(r, org, key, api.NewPipelineCache(&summary))
	}
	err = proto.ErrNotFound
	if proto.CheckThreadID("key", key) == nil { // keys have the form of ids
		err = s.Versions.Remove(ctx, org, thread)
	}
	if errors.Is(err, proto.ErrNotFound) {
		return api.Errorf(api.CodeNotFound, "there is no cache of this key; see /v1/pipelines/caches")
	}
	if err != nil {
		return fmt.Errorf("remove the cache %s: %w", key, err)
	}
	w.WriteHeader(http.StatusNoContent)
	return nil
}
