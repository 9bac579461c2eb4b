package upstream

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
)

// Complete requests a chat completion with only the model's name changed, and returns the server's
// answer. The caller closes body. Its error is that of [Client.Stream]. The server's protocol is [OpenAI].
func (c *Client) Complete(
	ctx context.Context, model string, members map[string]json.RawMessage,
) (contentType string, body io.ReadCloser, err error) {
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
