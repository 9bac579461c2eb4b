package client

import (
	"context"
	"maps"
	"net/http"
	"net/url"
	"strconv"

	"github.com/bullpen-run/bullpen/proto/api"
)

// Executions is a page of executions.
type Executions = api.Executions

// ListedExecution is an execution in a list.
type ListedExecution = api.ListedExecution

const maxPage = 100 // the largest page that the server answers with

// List returns up to limit executions that match the filters, the newest first. The query has the
// filters as the API names them.
func (c *Client) List(ctx context.Context, filters url.Values, limit int) (*Executions, error) {
	all := &Executions{Executions: []ListedExecution{}, Complete: true}
	query := maps.Clone(filters)
	for {
		query.Set("limit", strconv.Itoa(min(limit-len(all.Executions), maxPage)))
		page, _, err := get[Executions](ctx, c, call{method: http.MethodGet, path: "/v1/executions?" + query.Encode(), resend: true})
		if err != nil {
			return nil, err
		}
		all.Executions = append(all.Executions, page.Executions...)
		all.NextCursor, all.Behind, all.Complete = page.NextCursor, page.Behind, all.Complete && page.Complete
		if page.NextCursor == nil || len(all.Executions) >= limit {
			return all, nil
		}
		query.Set("cursor", *page.NextCursor)
	}
}
