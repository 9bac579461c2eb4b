package client

import (
	"context"
	"io"
	"net/http"
)

// Backup returns a backup of the server's JetStream while the server creates it.
func (c *Client) Backup(ctx context.Context) (io.ReadCloser, error) {
	resp, err := c.do(ctx, call{method: http.MethodGet, path: "/v1/admin/backup", header: map[string]string{"Accept": "application/zstd"}})
	if err != nil {
		return nil, err
	}
	return resp.Body, nil
}
