package upstream

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"

	"github.com/bullpen-run/bullpen/agent"
)

// Complete asks for a chat completion, of which all but the name of the model stays as it is, and returns
// the server's answer. The caller closes body. The error is an [*agent.UpstreamError].
func (c *Client) Complete(
	ctx context.Context, model string, members map[string]json.RawMessage,
) (contentType string, body io.ReadCloser, err error) {
	if c.Protocol == Anthropic {
		return "", nil, &agent.UpstreamError{
			Kind: agent.UpstreamRejected, Message: "the models of this server have no chat completions; use the Responses API",
		}
	}
	name, err := c.model(model)
	if err != nil {
		return "", nil, err
	}
	key, err := c.Key()
	if err != nil {
		return "", nil, &agent.UpstreamError{
			Kind: agent.UpstreamFailed, Message: "the server's key for the model cannot be read", Cause: err,
		}
	}
	if members["model"], err = json.Marshal(name); err != nil {
		return "", nil, fmt.Errorf("encode a completion: %w", err)
	}
	text, err := json.Marshal(members)
	if err != nil {
		return "", nil, fmt.Errorf("encode a completion: %w", err)
	}
	p := c.protocol(name, key)
	idle := &idleContext{timeout: c.Timeout}
	ctx, cancel := idle.start(ctx)
	r, err := http.NewRequestWithContext(ctx, http.MethodPost, c.URL+p.path(), bytes.NewReader(text))
	if err != nil {
		cancel()
		return "", nil, &agent.UpstreamError{
			Kind: agent.UpstreamFailed, Message: "the model's server cannot be asked", Cause: err,
		}
	}
	r.Header.Set("Content-Type", "application/json")
	p.headers(r.Header)
	response, err := c.HTTP.Do(r) //nolint:bodyclose // the completion closes it
	if err != nil {
		cancel()
		return "", nil, idle.wrap(err)
	}
	answer := &completion{idle.reader(response.Body), response.Body, cancel}
	if response.StatusCode != http.StatusOK {
		defer func() { _ = answer.Close() }() // it was only read
		return "", nil, statusError(response, key)
	}
	return response.Header.Get("Content-Type"), answer, nil
}

// completion is the body of an answer.
type completion struct {
	io.Reader
	body   io.Closer
	cancel context.CancelFunc
}

// Close implements [io.Closer].
func (c *completion) Close() error {
	defer c.cancel()
	return c.body.Close()
}
