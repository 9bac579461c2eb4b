package client

import (
	"context"
	"io"
	"iter"
	"net/http"
	"net/url"

	"github.com/bullpen-run/bullpen/proto/api"
)

const pipelinesPath = "/v1/pipelines"

func pipelinePath(id string) string { return pipelinesPath + "/" + url.PathEscape(id) }

// StartPipeline starts a run and returns it. It is not resent when the connection breaks, because
// that could start two.
func (c *Client) StartPipeline(ctx context.Context, r *api.PipelineRequest) (*api.WholePipeline, error) {
	return get[api.WholePipeline](ctx, c, call{method: http.MethodPost, path: pipelinesPath, body: r})
}

// Pipelines returns the runs of the key's organisation, the newest first.
func (c *Client) Pipelines(ctx context.Context) iter.Seq2[api.Pipeline, error] {
	return pages[api.Pipeline](ctx, c, pipelinesPath, "pipelines", largestPages())
}

// Pipeline returns a run with its steps.
func (c *Client) Pipeline(ctx context.Context, id string) (*api.WholePipeline, error) {
	return read[api.WholePipeline](ctx, c, pipelinePath(id))
}

// CancelPipeline cancels a run and returns it.
func (c *Client) CancelPipeline(ctx context.Context, id string) (*api.WholePipeline, error) {
	return get[api.WholePipeline](ctx, c, call{method: http.MethodPost, path: pipelinePath(id) + "/cancel", resend: true})
}

// PipelineArtifact writes an artifact of a step to w, as a tar. cell is empty for a step without a
// matrix.
func (c *Client) PipelineArtifact(ctx context.Context, id, step, cell, artifact string, w io.Writer) error {
	query := url.Values{"step": {step}, "artifact": {artifact}, "cell": {cell}}
	return c.archive(ctx, withQuery(pipelinePath(id)+"/artifacts", query), w)
}

// PipelineCaches returns the caches of the key's organisation by key.
func (c *Client) PipelineCaches(ctx context.Context) iter.Seq2[api.PipelineCache, error] {
	return pages[api.PipelineCache](ctx, c, pipelinesPath+"/caches", "caches", largestPages())
}
