package client

import (
	"context"
	"encoding/json"
	"io"
	"net/http"
	"net/url"

	"github.com/bullpen-run/bullpen/proto/api"
)

// Usage is a report of usage.
type Usage = api.Usage

// UsageRow is the usage of a group.
type UsageRow = api.UsageRow

// usagePath returns the path of a report: of the organisation of the API key, or, for an
// administrator, of others. The query has the parameters as the API names them.
func usagePath(admin bool, query url.Values) string {
	path := "/v1/usage"
	if admin {
		path = "/v1/admin/usage"
	}
	return path + "?" + query.Encode()
}

// Usage returns a report of usage, see usagePath.
func (c *Client) Usage(ctx context.Context, admin bool, query url.Values) (*Usage, json.RawMessage, error) {
	return get[Usage](ctx, c, call{method: http.MethodGet, path: usagePath(admin, query), resend: true})
}

// UsageCSV writes a report of usage to w as CSV, see usagePath.
func (c *Client) UsageCSV(ctx context.Context, admin bool, query url.Values, w io.Writer) error {
	resp, err := c.do(ctx, call{method: http.MethodGet, path: usagePath(admin, query), header: map[string]string{"Accept": "text/csv"}, resend: true})
	if err != nil {
		return err
	}
	defer func() { _ = resp.Body.Close() }() // its end was read, or the error says why not
	_, err = io.Copy(w, resp.Body)
	return err
}
