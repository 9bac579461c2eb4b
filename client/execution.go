package client

import (
	"context"
	"net/url"
	"strconv"
	"strings"
	"time"

	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/proto/api"
)

// ExecutionFilter selects executions of the key's organisation. All fields that are set must match.
type ExecutionFilter struct {
	Status    proto.Status
	Language  proto.Language
	Mode      proto.Mode
	ThreadID  string
	RequestID string // of the request that submitted them
	KeyID     string // of the API key that they run under
	Schedule  string // the id of the schedule that started them
	Batch     string // the id of the batch that they belong to
	Pipeline  string // the id of the run that started them

	CreatedAfter  time.Time // or at that time
	CreatedBefore time.Time
	Metadata      map[string]string
	// Cursor is [api.Executions.NextCursor] of an earlier list with the same filter, to continue
	// after it.
	Cursor string
}

func (f *ExecutionFilter) query() url.Values {
	query := given(url.Values{
		"status": {string(f.Status)}, "language": {string(f.Language)}, "delivery_mode": {string(f.Mode)},
		"thread_id": {f.ThreadID}, "request_id": {f.RequestID}, "key": {f.KeyID}, "schedule": {f.Schedule},
		"batch": {f.Batch}, "pipeline": {f.Pipeline},
		"created_after": {timeText(f.CreatedAfter)}, "created_before": {timeText(f.CreatedBefore)}, "cursor": {f.Cursor},
	})
	for key, value := range f.Metadata {
		query.Set(api.MetadataParam+key, value)
	}
	return query
}

// timeText returns a time as the API has it, empty for none.
func timeText(t time.Time) string {
	if t.IsZero() {
		return ""
	}
	return t.UTC().Format(time.RFC3339Nano)
}

// Executions returns up to limit executions, the newest first. The index of executions follows the
// server with a delay: [api.Executions.Complete] is false if the newest changes may be missing.
func (c *Client) Executions(ctx context.Context, filter ExecutionFilter, limit int) (*api.Executions, error) {
	all := &api.Executions{Executions: []api.ListedExecution{}, Complete: true}
	query := filter.query()
	for {
		query.Set("limit", strconv.Itoa(min(limit-len(all.Executions), maxPage)))
		page, err := read[api.Executions](ctx, c, "/v1/executions?"+query.Encode())
		if err != nil {
			return nil, err
		}
		all.Executions = append(all.Executions, page.Executions...)
		all.NextCursor, all.Behind, all.Complete = page.NextCursor, page.Behind, all.Complete && page.Complete
		if page.NextCursor == nil || len(all.Executions) >= limit {
			return all, nil
		}
		query.Set("cursor", *page.NextCursor)
	}
}

// Overview returns the figures of the last hour's executions. A global administrator gets those of
// the organisation org, or of all if it is empty. With other API keys, org is empty and the figures
// are those of the organisation of the key.
func (c *Client) Overview(ctx context.Context, org string) (*api.Overview, error) {
	return read[api.Overview](ctx, c, withQuery("/v1/overview", url.Values{"org": {org}}))
}

// Queue returns the queue of the API key and its organisation, with the positions of these executions.
func (c *Client) Queue(ctx context.Context, ids ...proto.TraceID) (*api.Queue, error) {
	names := make([]string, len(ids))
	for i, id := range ids {
		names[i] = string(id)
	}
	return read[api.Queue](ctx, c, withQuery("/v1/queue", url.Values{"trace_id": {strings.Join(names, ",")}}))
}
