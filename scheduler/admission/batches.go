package admission

import (
	"context"
	"encoding/json"
	"fmt"

	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/proto/api"
)

// OpenBatch returns a function that submits the items of a batch. shared is the JSON of their
// common fields, nil for none.
func (a *Admission) OpenBatch(b *proto.Batch, shared []byte) (
	submit func(ctx context.Context, item []byte, number int, id proto.TraceID) (refused string, err error), err error,
) {
	var fields *api.ExecuteRequest
	if shared != nil {
		if err := json.Unmarshal(shared, &fields); err != nil {
			return nil, fmt.Errorf("decode what the items of batch %s share: %w: %w", b.ID, proto.ErrCorrupt, err)
		}
	}
	return func(ctx context.Context, item []byte, number int, id proto.TraceID) (_ string, err error) {
		ctx, span := a.startSpan(ctx, id, "batch item", b.Org, b.Key)
		defer func() { endSpan(span, err) }()
		job, err := a.batchJob(ctx, b, fields, item, number, id)
		if err == nil {
			_, err = a.Submit(ctx, &proto.Submission{Job: job})
		}
		return settle(err)
	}, nil
}

// batchJob returns the job of an item, under the batch's own key.
func (a *Admission) batchJob(
	ctx context.Context, b *proto.Batch, shared *api.ExecuteRequest, item []byte, number int, id proto.TraceID,
) (*proto.Job, error) {
	key, e, err := a.ValidKey(ctx, b.Key)
	if err != nil {
		return nil, err
	}
	request, err := api.DecodeBatchItem(shared, item)
	if err != nil {
		return nil, err
	}
	job, err := a.Job(ctx, request, proto.Caller{Key: key, Entitlement: e}, proto.ModeAsync, id, 0)
	if err != nil {
		return nil, err
	}
	job.Batch, job.BatchIndex = b.ID, number
	if !b.ItemWebhooks {
		job.WebhookURL = ""
	}
	return job, nil
}

// BatchLimits returns the limits of an API key and its plans: how many executions may run at a
// time, and how many may be queued. Both are 0 for a key that may not run programs.
func (a *Admission) BatchLimits(ctx context.Context, key string) (concurrent, queued int) {
	_, e, err := a.ValidKey(ctx, key)
	if err != nil {
		return 0, 0
	}
	return min(proto.LimitOf(e.Concurrent), proto.LimitOf(e.KeyConcurrent)), proto.LimitOf(e.MaxQueued)
}
