package client

import (
	"context"
	"encoding/json"
	"net/http"
	"strings"

	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/proto/api"
)

// Queue is the queue of an API key and its organisation.
type Queue = api.Queue

// QueuedExecution is the place of an execution in the queue.
type QueuedExecution = api.QueuedExecution

// Queue returns the queue, with the places of these executions.
func (c *Client) Queue(ctx context.Context, ids []proto.TraceID) (*Queue, json.RawMessage, error) {
	path, names := "/v1/queue", make([]string, len(ids))
	for i, id := range ids {
		names[i] = string(id)
	}
	if len(ids) > 0 {
		path += "?trace_id=" + strings.Join(names, ",")
	}
	return get[Queue](ctx, c, call{method: http.MethodGet, path: path, resend: true})
}
