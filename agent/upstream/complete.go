package upstream

import (
	"context"
	"encoding/json"
	"fmt"
	"io"

	"github.com/bullpen-run/bullpen/agent"
)

// Complete requests a chat completion with only the model's name changed, and returns the server's
// answer. The caller closes body. The error is an [*agent.UpstreamError].
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
	key, err := c.readKey()
	if err != nil {
		return "", nil, err
	}
	if members["model"], err = json.Marshal(name); err != nil {
		return "", nil, fmt.Errorf("encode a completion: %w", err)
	}
	text, err := json.Marshal(members)
	if err != nil {
		return "", nil, fmt.Errorf("encode a completion: %w", err)
	}
	answer, err := c.post(ctx, c.protocol(name, key), key, text, "")
	if err != nil {
		return "", nil, err
	}
	return answer.contentType, answer, nil
}
