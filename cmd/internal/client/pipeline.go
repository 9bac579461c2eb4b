package client

import (
	"context"
	"encoding/json"
	"net/http"
	"net/url"

	"github.com/bullpen-run/bullpen/proto/api"
)

// Pipeline is a run in a list.
type Pipeline = api.Pipeline

// WholePipeline is a run with its steps.
type WholePipeline = api.WholePipeline

// PipelineCell is a step of a run, or a cell of its matrix.
type PipelineCell = api.PipelineCell

// PipelineRequest starts a run.
type PipelineRequest = api.PipelineRequest

const pipelinesPath = "/v1/pipelines"

func pipelinePath(id string) string { return pipelinesPath + "/" + url.PathEscape(id) }

// StartPipeline starts a run and returns it.
func (c *Client) StartPipeline(ctx context.Context, r *PipelineRequest) (*WholePipeline, json.RawMessage, error) {
	return get[WholePipeline](ctx, c, call{method: http.MethodPost, path: pipelinesPath, body: r})
}

// Pipelines lists the runs of the key's organisation, the newest first.
func (c *Client) Pipelines(ctx context.Context) ([]Pipeline, json.RawMessage, error) {
	list, raw, err := get[api.Pipelines](ctx, c, call{method: http.MethodGet, path: pipelinesPath, resend: true})
	if err != nil {
		return nil, nil, err
	}
	return list.Pipelines, raw, nil
}

// Pipeline returns a run, and the answer's bytes.
func (c *Client) Pipeline(ctx context.Context, id string) (*WholePipeline, json.RawMessage, error) {
	return get[WholePipeline](ctx, c, call{method: http.MethodGet, path: pipelinePath(id), resend: true})
}

// CancelPipeline cancels a run and returns it.
func (c *Client) CancelPipeline(ctx context.Context, id string) (*WholePipeline, json.RawMessage, error) {
	return get[WholePipeline](ctx, c, call{method: http.MethodPost, path: pipelinePath(id) + "/cancel", resend: true})
}
