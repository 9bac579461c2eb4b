package client

import (
	"context"
	"io"
	"net/http"
)

// Backup gives a backup of what the server's JetStream holds, as it comes.
func (c *Client) Backup(ctx context.Context) (io.ReadCloser, error) {
	resp, err := c.do(ctx, call{method: http.MethodGet, path: "/v1/admin/backup", header: map[string]string{"Accept": "application/zstd"}})
	if err != nil {
		return nil, err
	}
	return resp.Body, nil
}
