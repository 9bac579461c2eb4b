package api

import (
	"net/http"

	"github.com/bullpen-run/bullpen/proto"
)

func pipelineRoutes() []Route {
	run := Pipeline{
		ID: "run_abcdefghijklmnopqrstuvwxyz", Name: new("build"), Status: proto.PipelineRunning, Commit: new("4f2a91c"), Branch: new("main"), CreatedAt: Time{exampleTime()},
	}
	whole := WholePipeline{Pipeline: run, Cells: []PipelineCell{{
		Step: "test", Cell: new("python=3.12"), Needs: []string{"build"}, Status: proto.StepRunning, TraceID: new(proto.TraceID(exampleTrace)),
		StartedAt: &Time{exampleTime()}, Artifacts: []PipelineArtifact{{"report", []string{"out/*.xml"}}},
	}}}
	id := "The run's id."
	return []Route{
		{
			Method: http.MethodPost, Path: "/v1/pipelines", ID: "createPipeline", Tag: tagPipelines, Scope: proto.ScopeExecute, Summary: "Start a run of a pipeline",
			Doc:       "The whole file is checked, and each step as if it were submitted now, before anything starts. At most 20 runs of an organisation at the same time.",
			Request:   PipelineRequest{File: "steps:\n  - name: build\n    run: make\n", Commit: "4f2a91c", Branch: "main"},
			Responses: created("The run.", whole), Errors: []int{http.StatusForbidden, http.StatusNotFound, http.StatusConflict, http.StatusTooManyRequests},
		},
		{
			Method: http.MethodGet, Path: "/v1/pipelines", ID: "listPipelines", Tag: tagPipelines, Scope: proto.ScopeRead, Summary: "List runs of pipelines",
			Doc:       "The runs of the organisation, the newest first. 200 are kept, for as long as the records of executions.",
			Responses: ok("The runs.", Pipelines{Pipelines: []Pipeline{run}}),
		},
		{
			Method: http.MethodGet, Path: "/v1/pipelines/schema", ID: "getPipelineSchema", Tag: tagPipelines, Scope: proto.ScopeRead, Summary: "The JSON schema of pipeline files",
			Responses: []Response{{Status: http.StatusOK, Doc: "The schema.", Text: map[string]string{"application/schema+json": `{"title": "bullpen pipeline"}`}}},
		},
		{
			Method: http.MethodGet, Path: "/v1/pipelines/{id}", ID: "getPipeline", Tag: tagPipelines, Scope: proto.ScopeRead, Summary: "Show a run of a pipeline", PathDoc: id,
			Doc:       "The output of a step is that of its execution: GET /v1/executions/{id}/output.",
			Responses: ok("The run and its steps.", whole), Errors: []int{http.StatusNotFound},
		},
		{
			Method: http.MethodPost, Path: "/v1/pipelines/{id}/cancel", ID: "cancelPipeline", Tag: tagPipelines, Scope: proto.ScopeExecute, Summary: "Cancel a run of a pipeline", PathDoc: id,
			Doc:       "Steps that run are cancelled, others do not start. A run that has ended stays as it is.",
			Responses: ok("The run and its steps.", whole), Errors: []int{http.StatusNotFound, http.StatusConflict},
		},
	}
}
