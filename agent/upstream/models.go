package upstream

import (
	"context"
	"encoding/json"
	"errors"
	"maps"
	"net/http"
	"slices"
	"time"

	"github.com/bullpen-run/bullpen/agent"
)

const (
	maxModels  = 4 << 20          // bytes of a list of models
	modelsTime = 30 * time.Second // for the list
)

// ListModels implements [agent.Upstream]. It asks the server for its models if names are not
// mapped.
func (c *Client) ListModels(ctx context.Context) (names []string, others bool, err error) {
	if c.Models == nil {
		names, err = c.askModels(ctx)
		return names, false, err
	}
	all := maps.Clone(c.Models)
	if to, ok := all["*"]; ok {
		delete(all, "*")
		all[to], others = to, true
	}
	return slices.Sorted(maps.Keys(all)), others, nil
}

func (c *Client) askModels(ctx context.Context) ([]string, error) {
	failed := &agent.UpstreamError{Kind: agent.UpstreamFailed, Message: "the model's server did not list its models"}
	key, err := c.Key()
	if err != nil {
		failed.Cause = err
		return nil, failed
	}
	ctx, cancel := context.WithTimeout(ctx, modelsTime)
	defer cancel()
	p := c.protocol("", key)
	r, err := http.NewRequestWithContext(ctx, http.MethodGet, c.URL+p.modelsPath(), http.NoBody)
	if err != nil {
		failed.Cause = err
		return nil, failed
	}
	p.headers(r.Header)
	response, err := c.HTTP.Do(r)
	if err != nil {
		failed.Cause = err
		return nil, failed
	}
	defer func() { _ = response.Body.Close() }() // it was only read
	if response.StatusCode != http.StatusOK {
		err := statusError(response, key)
		if e, ok := errors.AsType[*agent.UpstreamError](err); ok && e.Kind == agent.UpstreamNoModel {
			return nil, failed // it has no such route
		}
		return nil, err
	}
	var list struct {
		Data []struct {
			ID string `json:"id"`
		} `json:"data"`
		HasMore bool `json:"has_more"`
	}
	err = json.NewDecoder(http.MaxBytesReader(nil, response.Body, maxModels)).Decode(&list)
	if err == nil && list.HasMore {
		err = errors.New("there is more than one page")
	}
	if err != nil {
		failed.Cause = err
		return nil, failed
	}
	var names []string
	for _, m := range list.Data {
		names = append(names, m.ID)
	}
	return names, nil
}
