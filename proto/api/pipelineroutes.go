package api

import (
	"net/http"

	"github.com/bullpen-run/bullpen/proto"
)

func pipelineRoutes() []Route {
	run := Pipeline{
		ID: "run_abcdefghijklmnopqrstuvwxyz", Name: new("build"), Status: proto.PipelineRunning, Commit: new("4f2a91c"),
		Branch: new("main"), CreatedAt: Time{exampleTime()},
	}
	whole := WholePipeline{Pipeline: run, Cells: []PipelineCell{{
		Step: "test", Cell: new("python=3.12"), Needs: []string{"build"}, Status: proto.StepRunning,
		TraceID:   new(proto.TraceID(exampleTrace)),
		StartedAt: &Time{exampleTime()}, Warnings: []string{}, Artifacts: []PipelineArtifact{
			{"report", []string{"out/*.xml"}},
		},
	}}}
	id := "The run's id."
	return []Route{
		{
			Method: http.MethodPost, Path: "/v1/pipelines", ID: "createPipeline", Tag: tagPipelines, Starts: true,
			Scope: proto.ScopeExecute, Summary: "Start a run of a pipeline",
			Doc: "The whole file is checked, and each step as if it were submitted now, before anything starts. At " +
				"most 20 runs of an organisation at the same time.",
			Request:   PipelineRequest{File: "steps:\n  - name: build\n    run: make\n", Commit: "4f2a91c", Branch: "main"},
			Responses: created("The run.", whole),
			Errors:    []int{http.StatusForbidden, http.StatusNotFound, http.StatusConflict, http.StatusTooManyRequests},
		},
		{
			Method: http.MethodGet, Path: "/v1/pipelines", ID: "listPipelines", Tag: tagPipelines, Scope: proto.ScopeRead,
			Summary: "List runs of pipelines",
			Doc:     "The runs of the organisation, the newest first. 200 are kept, for as long as the records of executions.",
			Params:  paging(), Responses: ok("The runs.", Pipelines{Pipelines: []Pipeline{run}}),
		},
		{
			Method: http.MethodGet, Path: "/v1/pipelines/schema", ID: "getPipelineSchema", Tag: tagPipelines,
			Scope: proto.ScopeRead, Summary: "The JSON schema of pipeline files",
			Responses: []Response{{
				Status: http.StatusOK, Doc: "The schema.",
				Text: map[string]string{"application/schema+json": `{"title": "bullpen pipeline"}`},
			}},
		},
		{
			Method: http.MethodGet, Path: "/v1/pipelines/{id}", ID: "getPipeline", Tag: tagPipelines, Scope: proto.ScopeRead,
			Summary: "Show a run of a pipeline", PathDoc: id,
			Doc:       "The output of a step is that of its execution: GET /v1/executions/{id}/output.",
			Responses: ok("The run and its steps.", whole), Errors: []int{http.StatusNotFound},
		},
		{
			Method: http.MethodGet, Path: "/v1/pipelines/{id}/artifacts", ID: "getPipelineArtifact", Tag: tagPipelines,
			Scope: proto.ScopeFiles, Summary: "Get an artifact of a step as a tar", PathDoc: id,
			Doc: "The names in the tar are paths in the workspace. Modes, times, links and empty directories are in it. A " +
				"link may lead anywhere: unpack the tar with a program that does not follow it.",
			Params: []Param{
				{Name: "step", In: "query", Required: true, Doc: "The name of the step.", schema: filter()},
				{Name: "artifact", In: "query", Required: true, Doc: "The name of the artifact.", schema: filter()},
				query("cell", "The cell of the step's matrix, such as python=3.12; needed if it has one.", text()),
			},
			Responses: []Response{{
				Status: http.StatusOK, Doc: "The archive. An answer that breaks off is incomplete.",
				Text:    map[string]string{"application/x-tar": ""},
				Headers: map[string]string{"Content-Disposition": "attachment, with a file name."},
			}},
			Errors: []int{http.StatusNotFound, http.StatusTooManyRequests},
		},
		{
			Method: http.MethodGet, Path: "/v1/pipelines/caches", ID: "listPipelineCaches", Tag: tagPipelines,
			Scope: proto.ScopeRead, Summary: "List the caches of pipelines",
			Doc: "By key. A cache never changes; an administrator can remove it.", Params: paging(),
			Responses: ok("A page of the list.",
				PipelineCaches{Caches: []PipelineCache{{"deps-2", 4096, 12, Time{exampleTime()}}}}),
		},
		{
			Method: http.MethodDelete, Path: "/v1/admin/caches/{key}", ID: "removePipelineCache", Tag: tagAdmin,
			Scope: proto.ScopeAdmin, Audit: "cache.remove", Summary: "Remove a cache of pipelines",
			PathDoc:   "The key of the cache.",
			Doc:       "The next step with the key that succeeds creates it again. Steps that use it now have a copy.",
			Params:    []Param{query("org", "The organisation. By default that of the API key.", text())},
			Responses: empty("It is removed."), Errors: []int{http.StatusNotFound},
		},
		{
			Method: http.MethodPost, Path: "/v1/pipelines/{id}/cancel", ID: "cancelPipeline", Tag: tagPipelines,
			Scope: proto.ScopeExecute, Summary: "Cancel a run of a pipeline", PathDoc: id,
			Doc:       "Steps that run are cancelled, others do not start. A run that has ended stays as it is.",
			Responses: ok("The run and its steps.", whole), Errors: []int{http.StatusNotFound, http.StatusConflict},
		},
	}
}
