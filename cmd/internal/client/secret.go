package client

import (
	"context"
	"net/http"
	"net/url"

	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/proto/api"
)

const adminSecretsPath = "/v1/admin/secrets"

// Secret is a named secret, without its value.
type Secret = api.Secret

// secretPath returns the path of a secret; of the list if name is empty. org is empty for that of
// the API key.
func secretPath(org, name string) string {
	path := adminSecretsPath
	if name != "" {
		path += "/" + url.PathEscape(name)
	}
	if org != "" {
		path += "?org=" + url.QueryEscape(org)
	}
	return path
}

// Injection is how the worker adds a secret to requests.
type Injection = proto.Injection

// PutSecret stores a secret. If injection is nil, a replaced secret keeps its own.
func (c *Client) PutSecret(ctx context.Context, org, name, value string, injection *Injection) (*Secret, error) {
	body := api.SecretRequest{Value: value, Injection: injection}
	secret, _, err := get[Secret](ctx, c, call{method: http.MethodPut, path: secretPath(org, name), body: body, resend: true})
	return secret, err
}

// Secret returns a secret without its value.
func (c *Client) Secret(ctx context.Context, org, name string) (*Secret, error) {
	secret, _, err := get[Secret](ctx, c, call{method: http.MethodGet, path: secretPath(org, name)})
	return secret, err
}

// Secrets returns the secrets of an organisation.
func (c *Client) Secrets(ctx context.Context, org string) ([]Secret, error) {
	list, _, err := get[api.Secrets](ctx, c, call{method: http.MethodGet, path: secretPath(org, "")})
	if err != nil {
		return nil, err
	}
	return list.Secrets, nil
}

// DeleteSecret removes a secret.
func (c *Client) DeleteSecret(ctx context.Context, org, name string) error {
	return c.empty(ctx, call{method: http.MethodDelete, path: secretPath(org, name)})
}

// RotatedKey is what the secrets of a server are encrypted for.
type RotatedKey = api.RotatedKey

// RotateSecretsKey protects the secrets of the server with the operator's present keys.
func (c *Client) RotateSecretsKey(ctx context.Context) (*RotatedKey, error) {
	rotated, _, err := get[RotatedKey](ctx, c, call{method: http.MethodPost, path: adminSecretsPath + "/rotate-key"})
	return rotated, err
}
