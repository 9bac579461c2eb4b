package client

import (
	"encoding/json"
	"errors"
	"io"
	"net"
	"net/http"
	"strings"

	"github.com/bullpen-run/bullpen/proto/api"
)

// MCP returns the address of the server's endpoint of the Model Context Protocol, and an HTTP
// client that adds the API key. Its requests fail with [*Error] or [*UnreachableError] if the
// answer does not follow the protocol.
func (c *Client) MCP() (address string, client *http.Client) {
	transport := http.DefaultTransport
	if c.cfg.HTTP.Transport != nil {
		transport = c.cfg.HTTP.Transport
	}
	return c.cfg.URL + api.MCPPath, &http.Client{Transport: &mcpTransport{c, transport}}
}

type mcpTransport struct {
	client *Client
	next   http.RoundTripper
}

// RoundTrip implements [http.RoundTripper].
func (t *mcpTransport) RoundTrip(r *http.Request) (*http.Response, error) {
	r = r.Clone(r.Context())
	r.Header.Set("Authorization", "Bearer "+t.client.cfg.Key)
	r.Header.Set("User-Agent", t.client.cfg.UserAgent)
	resp, err := t.next.RoundTrip(r)
	var op *net.OpError
	switch {
	case errors.As(err, &op) && op.Op == "dial":
		return nil, &UnreachableError{URL: t.client.cfg.URL, Err: op}
	case err != nil:
		return nil, err
	case resp.StatusCode < http.StatusBadRequest || resp.StatusCode == http.StatusMethodNotAllowed:
		return resp, nil
	}
	body, err := io.ReadAll(io.LimitReader(resp.Body, maxErrorBody))
	_ = resp.Body.Close() // it was only read
	if err != nil {
		return nil, err
	}
	resp.Body = io.NopCloser(strings.NewReader(string(body)))
	var message struct {
		Version string `json:"jsonrpc"`
	}
	if json.Unmarshal(body, &message) == nil && message.Version != "" {
		return resp, nil
	}
	return nil, readError(resp)
}
