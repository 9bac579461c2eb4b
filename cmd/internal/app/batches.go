package app

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"time"

	"github.com/bullpen-run/bullpen/agent"
	"github.com/bullpen-run/bullpen/gateway/work"
	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/scheduler/admission"
	"github.com/bullpen-run/bullpen/scheduler/agentruns"
	"github.com/bullpen-run/bullpen/scheduler/batches"
	"github.com/bullpen-run/bullpen/scheduler/queue"
)

// batchStore adapts the stored batches of one API, or of executions if that is empty, to the
// gateway's interface.
type batchStore struct {
	*batches.Batches
	api string
}

func (s batchStore) Upload(org string) (work.BatchUpload, error) { return s.Batches.Upload(org) }

func (s batchStore) Page(
	org, after string, limit int, keep func(*proto.BatchAndState) bool,
) ([]proto.BatchAndState, string) {
	return s.Batches.Page(org, after, limit, func(b *proto.BatchAndState) bool {
		return b.Batch.API == s.api && (keep == nil || keep(b))
	})
}

// check returns [proto.ErrNotFound] for a batch of another kind.
func (s batchStore) check(b *proto.Batch) error {
	if b.API != s.api {
		return fmt.Errorf("batch %s is of another kind: %w", b.ID, proto.ErrNotFound)
	}
	return nil
}

func (s batchStore) Get(ctx context.Context, org, id string) (proto.BatchAndState, error) {
	found, err := s.Batches.Get(ctx, org, id)
	if err != nil {
		return found, err
	}
	return found, s.check(&found.Batch)
}

func (s batchStore) Change(
	ctx context.Context, org, id string, change func(*proto.Batch, *proto.BatchState) error,
) (proto.BatchAndState, error) {
	return s.Batches.Change(ctx, org, id, func(b *proto.Batch, state *proto.BatchState) error {
		if err := s.check(b); err != nil {
			return err
		}
		return change(b, state)
	})
}

func (s batchStore) Remove(ctx context.Context, org, id string) error {
	if _, err := s.Get(ctx, org, id); err != nil {
		return err
	}
	return s.Batches.Remove(ctx, org, id)
}

func (s batchStore) Items(ctx context.Context, org, id string) (work.BatchItems, error) {
	if _, err := s.Get(ctx, org, id); err != nil {
		return nil, err
	}
	return s.Batches.Items(ctx, org, id)
}

// batchExecutions implements [batches.Executions].
type batchExecutions struct {
	*admission.Admission
	queue *queue.Queue
	runs  *agentruns.Runs
}

func (x batchExecutions) ItemsOf(b *proto.Batch) batches.ItemExecutions {
	if b.API != "" {
		return batchRuns{b, x.runs}
	}
	return itemExecutions{x.Admission, x.queue, b.Org}
}

func (x batchExecutions) Slots(ctx context.Context) (int, error) {
	stats, err := x.queue.Stats(ctx)
	return stats.Slots, err
}

func (x batchExecutions) RemoveRun(ctx context.Context, b *proto.Batch, id proto.TraceID) error {
	return x.runs.Remove(ctx, b.Org, proto.RunID(id))
}

// itemExecutions implements [batches.ItemExecutions] for executions.
type itemExecutions struct {
	admission *admission.Admission
	queue     *queue.Queue
	org       string
}

func (x itemExecutions) OpenBatch(b *proto.Batch, shared []byte) (batches.SubmitItem, error) {
	return x.admission.OpenBatch(b, shared)
}

func (x itemExecutions) Lookup(ctx context.Context, id proto.TraceID) (*proto.Record, error) {
	return x.queue.Lookup(ctx, x.org, id)
}

func (x itemExecutions) Cancel(ctx context.Context, id proto.TraceID) (*proto.Record, error) {
	return x.queue.Cancel(ctx, x.org, id)
}

func (x itemExecutions) Withdraw(ctx context.Context, id proto.TraceID, r proto.Result) (*proto.Record, error) {
	return x.queue.Withdraw(ctx, x.org, id, r)
}

// batchRuns implements [batches.ItemExecutions] for runs of agents.
type batchRuns struct {
	batch *proto.Batch
	runs  *agentruns.Runs
}

// OpenBatch implements [batches.ItemExecutions]. An item has the request of its run as params. The run
// waits for a gateway that has a server with models.
func (x batchRuns) OpenBatch(b *proto.Batch, _ []byte) (batches.SubmitItem, error) {
	return func(ctx context.Context, item []byte, _ int, id proto.TraceID) (string, error) {
		var request struct {
			Params json.RawMessage `json:"params"`
		}
		if err := json.Unmarshal(item, &request); err != nil {
			return "", fmt.Errorf("decode an item of batch %s: %w", b.ID, err)
		}
		_, err := x.runs.Create(ctx, &proto.AgentRun{
			Org: b.Org, ID: proto.RunID(id), Key: b.Key, API: b.API, Request: request.Params, Background: true,
			CreatedAt: time.Now().UTC(),
		})
		if quota, ok := errors.AsType[*proto.QuotaError](err); ok { // others end first
			return "", &proto.Rejection{Reason: proto.RejectedUnavailable, Detail: quota.Error()}
		}
		return "", err
	}, nil
}

// Lookup implements [batches.ItemExecutions].
func (x batchRuns) Lookup(ctx context.Context, id proto.TraceID) (*proto.Record, error) {
	record := &proto.Record{Meta: proto.Meta{TraceID: id, Org: x.batch.Org}, Status: proto.StatusRunning, Attempt: 1}
	if x.runs.IsActive(x.batch.Org, proto.RunID(id)) {
		return record, nil
	}
	last, _, err := x.runs.Last(ctx, x.batch.Org, proto.RunID(id))
	if err != nil {
		return nil, err
	}
	var entry agent.Entry
	if err := json.Unmarshal(last, &entry); err != nil {
		return nil, fmt.Errorf("decode the end of run %s: %w", proto.RunID(id), err)
	}
	switch {
	case entry.Cancelled:
		record.Status = proto.StatusCancelled
	case entry.Failed != nil:
		record.Status = proto.StatusFailed
	case entry.Ended():
		record.Status = proto.StatusSuccess
	default: // it was not made active, which submitting it again does
		return nil, fmt.Errorf("run %s is not active: %w", proto.RunID(id), proto.ErrNotFound)
	}
	return record, nil
}

// Cancel implements [batches.ItemExecutions].
func (x batchRuns) Cancel(ctx context.Context, id proto.TraceID) (*proto.Record, error) {
	if err := x.runs.Cancel(ctx, x.batch.Org, proto.RunID(id)); err != nil && !errors.Is(err, proto.ErrNotFound) {
		return nil, err
	}
	return x.Lookup(ctx, id)
}

// Withdraw implements [batches.ItemExecutions]. A run has begun once it is submitted.
func (x batchRuns) Withdraw(ctx context.Context, id proto.TraceID, _ proto.Result) (*proto.Record, error) {
	return x.Lookup(ctx, id)
}
