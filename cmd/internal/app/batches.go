package app

import (
	"context"

	"github.com/bullpen-run/bullpen/gateway"
	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/scheduler/batches"
	"github.com/bullpen-run/bullpen/scheduler/queue"
)

// batchStore adapts the stored batches to the interface of the gateway.
type batchStore struct{ *batches.Batches }

func (s batchStore) Upload(org string) (gateway.BatchUpload, error) { return s.Batches.Upload(org) }

func (s batchStore) Items(ctx context.Context, org, id string) (gateway.BatchItems, error) {
	return s.Batches.Items(ctx, org, id)
}

// batchExecutions implements [batches.Executions].
type batchExecutions struct {
	*gateway.Server
	*queue.Queue
}

func (x batchExecutions) OpenBatch(b *proto.Batch, shared []byte) (batches.SubmitItem, error) {
	return x.Server.OpenBatch(b, shared)
}
