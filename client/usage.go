package client

import (
	"context"
	"io"
	"net/http"
	"net/url"
	"strings"

	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/proto/api"
)

// UsageFilter selects the content of a usage report.
type UsageFilter struct {
	From, To string             // the first and the last day in UTC, such as 2026-11-01; empty for this month until today
	GroupBy  []proto.UsageGroup // what the rows differ in; nil for days, and one row if it is empty

	Org string // of another organisation, for an administrator; empty for the organisation of the API key
	All bool   // of all organisations, for a global administrator
}

func (f *UsageFilter) path() string {
	path := "/v1/usage"
	if f.All || f.Org != "" {
		path = "/v1/admin/usage"
	}
	query := url.Values{"group_by": {string(proto.UsageByDay)}}
	for name, value := range map[string]string{"from": f.From, "to": f.To, "org": f.Org} {
		if value != "" {
			query.Set(name, value)
		}
	}
	if f.GroupBy != nil {
		groups := make([]string, len(f.GroupBy))
		for i, g := range f.GroupBy {
			groups[i] = string(g)
		}
		query.Set("group_by", strings.Join(groups, ","))
	}
	return path + "?" + query.Encode()
}

// Usage returns a report of what executions used.
func (c *Client) Usage(ctx context.Context, filter UsageFilter) (*api.Usage, error) {
	return read[api.Usage](ctx, c, filter.path())
}

// UsageCSV writes a report of what executions used to w as CSV.
func (c *Client) UsageCSV(ctx context.Context, filter UsageFilter, w io.Writer) error {
	return c.copyTo(ctx, call{
		method: http.MethodGet, path: filter.path(), header: map[string]string{"Accept": "text/csv"}, resend: true,
	}, w)
}
