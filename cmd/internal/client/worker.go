package client

import (
	"context"
	"net/http"
	"net/url"

	"github.com/bullpen-run/bullpen/proto/api"
)

// Worker is a live worker.
type Worker = api.Worker

const workersPath = "/v1/admin/workers"

// Workers lists the live workers.
func (c *Client) Workers(ctx context.Context) ([]Worker, error) {
	list, _, err := get[api.Workers](ctx, c, call{method: http.MethodGet, path: workersPath, resend: true})
	if err != nil {
		return nil, err
	}
	return list.Workers, nil
}

// Pool is a pool of workers.
type Pool = api.Pool

// Pools lists the pools of workers with the demand for them.
func (c *Client) Pools(ctx context.Context) ([]Pool, error) {
	answer, _, err := get[api.Autoscale](ctx, c, call{method: http.MethodGet, path: "/v1/admin/autoscale", resend: true})
	if err != nil {
		return nil, err
	}
	return answer.Pools, nil
}

// DrainWorker makes a worker take no more executions, or take them again.
func (c *Client) DrainWorker(ctx context.Context, name string, drain bool) (*Worker, error) {
	verb := "/undrain"
	if drain {
		verb = "/drain"
	}
	w, _, err := get[Worker](ctx, c, call{method: http.MethodPost, path: workersPath + "/" + url.PathEscape(name) + verb, resend: true})
	return w, err
}
