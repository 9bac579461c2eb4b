package client

import (
	"context"
	"net/http"
	"net/url"

	"github.com/bullpen-run/bullpen/proto/api"
)

// ConnectionsPath is the path of the list of storage connections.
const ConnectionsPath = "/v1/admin/connections"

// Connection is a storage connection.
type Connection = api.Connection

// NewConnection is a storage connection to store.
type NewConnection = api.ConnectionRequest

// ConnectionPath returns the path of a storage connection. org is empty for that of the API key. test
// is as in CreateConnection, for a change.
func ConnectionPath(org, slug string, test bool) string {
	return ConnectionsPath + "/" + url.PathEscape(slug) + connectionQuery(org, test)
}

// NewConnectionPath returns the path at which CreateConnection creates a storage connection.
func NewConnectionPath(org string, test bool) string {
	return ConnectionsPath + connectionQuery(org, test)
}

// connectionQuery returns the query of requests about connections of an organisation.
func connectionQuery(org string, test bool) string {
	q := url.Values{}
	if org != "" {
		q.Set("org", org)
	}
	if !test {
		q.Set("test", "false")
	}
	if len(q) == 0 {
		return ""
	}
	return "?" + q.Encode()
}

// CreateConnection stores a new storage connection. Unless test is true, the server does not use the
// storage first.
func (c *Client) CreateConnection(ctx context.Context, org string, connection *NewConnection, test bool) (*Connection, error) {
	stored, _, err := get[Connection](ctx, c, call{method: http.MethodPost, path: NewConnectionPath(org, test), body: connection})
	return stored, err
}

// EditConnection stores what change makes of a storage connection, unless somebody else has changed
// it meanwhile. test is as in CreateConnection.
func (c *Client) EditConnection(ctx context.Context, org, slug string, test bool, change func(*NewConnection)) (*Connection, error) {
	present := new(Connection)
	tag, err := c.ReadObject(ctx, ConnectionPath(org, slug, test), present)
	if err != nil {
		return nil, err
	}
	wanted := present.Request()
	change(&wanted)
	stored, _, err := get[Connection](ctx, c, replacing(ConnectionPath(org, slug, test), wanted, tag))
	return stored, err
}

// Connection returns a storage connection.
func (c *Client) Connection(ctx context.Context, org, slug string) (*Connection, error) {
	connection, _, err := get[Connection](ctx, c, call{method: http.MethodGet, path: ConnectionPath(org, slug, true), resend: true})
	return connection, err
}

// Connections returns the storage connections of an organisation. If org is empty, these are those
// of the API key's organisation, or all for a global administrator.
func (c *Client) Connections(ctx context.Context, org string) ([]Connection, error) {
	list, _, err := get[api.Connections](ctx, c, call{method: http.MethodGet, path: ConnectionsPath + connectionQuery(org, true), resend: true})
	if err != nil {
		return nil, err
	}
	return list.Connections, nil
}

// RemoveConnection removes a storage connection and returns it.
func (c *Client) RemoveConnection(ctx context.Context, org, slug string) (*Connection, error) {
	removed, _, err := get[Connection](ctx, c, call{method: http.MethodDelete, path: ConnectionPath(org, slug, true)})
	return removed, err
}

// TestConnection makes the server use the storage of a connection.
func (c *Client) TestConnection(ctx context.Context, org, slug string) (*Connection, error) {
	path := ConnectionsPath + "/" + url.PathEscape(slug) + "/test" + connectionQuery(org, true)
	tested, _, err := get[Connection](ctx, c, call{method: http.MethodPost, path: path})
	return tested, err
}
