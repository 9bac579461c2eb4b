package client

import (
	"context"
	"net/http"

	"github.com/bullpen-run/bullpen/proto/api"
)

const adminSecretsPath = "/v1/admin/secrets"

// RotatedKey says what the secrets of a server are encrypted for.
type RotatedKey = api.RotatedKey

// RotateSecretsKey protects the secrets of the server with the operator's present keys.
func (c *Client) RotateSecretsKey(ctx context.Context) (*RotatedKey, error) {
	rotated, _, err := get[RotatedKey](ctx, c, call{method: http.MethodPost, path: adminSecretsPath + "/rotate-key"})
	return rotated, err
}
