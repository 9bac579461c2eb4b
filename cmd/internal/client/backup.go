package client

import (
	"context"
	"io"
	"net/http"
)

// Backup writes a backup of what the server's JetStream holds to w.
func (c *Client) Backup(ctx context.Context, w io.Writer) error {
	resp, err := c.do(ctx, call{method: http.MethodGet, path: "/v1/admin/backup", header: map[string]string{"Accept": "application/zstd"}})
	if err != nil {
		return err
	}
	return save(resp, w)
}
