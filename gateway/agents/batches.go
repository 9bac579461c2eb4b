package agents

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"time"

	"github.com/bullpen-run/bullpen/gateway/web"
	"github.com/bullpen-run/bullpen/gateway/work"
	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/proto/api"
	"github.com/bullpen-run/bullpen/proto/fault"
)

// Batches stores batches of agent requests, as [work.Batches] does those of executions.
type Batches interface {
	work.Batches
	// Content returns a reader of the items of a batch as uploaded.
	Content(ctx context.Context, batch *proto.Batch) (
		read func(ctx context.Context, number int) ([]byte, error), err error)
}

// Uploads stores new batches.
type Uploads interface {
	// Upload stores a new batch with the items in a request's body, which the result of read reads.
	// With an idempotency key it may find an earlier request's batch.
	Upload(w http.ResponseWriter, r *web.Request, batch *proto.Batch, keyed bool,
		read func(work.BatchUpload) *api.BatchBody) (_ *proto.Batch, created bool, err error)
}

var errNoBatch = api.Errorf(api.CodeNotFound, "there is no batch of that id")

// CreateBatch stores a batch of API requests, which are the only member of the object in the
// request's body. The batch expires after life. check is called with each request.
func (a *Agent) CreateBatch(
	w http.ResponseWriter, whose, member string, life time.Duration, check func(item []byte) error,
) (*proto.BatchAndState, error) {
	if err := a.m.Keys.CheckMode(a.r.Context(), &a.i.Plan, proto.ModeAsync); err != nil {
		return nil, a.public(err)
	}
	now := time.Now().UTC()
	batch := &proto.Batch{
		ID: proto.NewBatchID(a.org(), a.i.Key.ID, ""), Org: a.org(), Key: a.i.Key.ID, API: whose,
		CreatedAt: now, ExpiresAt: now.Add(life),
	}
	_, _, err := a.m.Uploads.Upload(w, a.r, batch, false, func(upload work.BatchUpload) *api.BatchBody {
		return &api.BatchBody{
			Member:   member,
			Settings: func(object []byte) error { _, err := api.Decode[struct{}](object); return err },
			Item: func(item []byte) error {
				if _, err := api.CountValues(item); err != nil {
					return err
				}
				if err := check(item); err != nil {
					return err
				}
				return upload.Add(a.r.Context(), item)
			},
		}
	})
	if err != nil {
		w.Header().Set("Connection", "close") // the rest of the body is not read
		return nil, a.public(err)
	}
	fault.Here(fault.AfterBatchBeforeAnswer)
	return a.Batch(a.r.Context(), batch.ID)
}

// BaseURL returns this server's address for clients, without a trailing slash.
func (a *Agent) BaseURL() (string, error) {
	url, err := a.m.BaseURL(a.r.Request)
	return url, a.public(err)
}

// Batches returns the organisation's batches of requests to agents, the newest first.
func (a *Agent) Batches() []proto.BatchAndState {
	list, _ := a.m.Batches.Page(a.org(), "", -1, nil)
	return list
}

// Batch returns a batch of requests to agents.
func (a *Agent) Batch(ctx context.Context, id string) (*proto.BatchAndState, error) {
	if !proto.ValidBatchID(id) {
		return nil, errNoBatch
	}
	found, err := a.m.Batches.Get(ctx, a.org(), id)
	return &found, a.batchError(id, err)
}

func (a *Agent) batchError(id string, err error) error {
	switch {
	case err == nil:
		return nil
	case errors.Is(err, proto.ErrNotFound):
		return errNoBatch
	case errors.Is(err, proto.ErrConflict):
		return api.Errorf(api.CodeConflict, "the batch has not ended; cancel it first")
	default:
		return a.public(fmt.Errorf("batch %s: %w", id, err))
	}
}

// CancelBatch cancels a batch that has not ended, and returns it.
func (a *Agent) CancelBatch(ctx context.Context, id string) (*proto.BatchAndState, error) {
	found, err := a.Batch(ctx, id)
	if err != nil || found.Batch.Ended(&found.State) {
		return found, err
	}
	ctx, cancel := web.Detached(ctx)
	defer cancel()
	changed, err := a.m.Batches.Change(ctx, a.org(), id, work.CancelBatch)
	if known, ok := errors.AsType[*api.Error](err); ok && known.Code == api.CodeConflict { // it has just ended
		return a.Batch(ctx, id)
	}
	return &changed, a.batchError(id, err)
}

// RemoveBatch removes a batch that has ended. The code of its error is [api.CodeConflict] if it has
// not.
func (a *Agent) RemoveBatch(ctx context.Context, id string) error {
	if _, err := a.Batch(ctx, id); err != nil {
		return err
	}
	ctx, cancel := web.Detached(ctx)
	defer cancel()
	return a.batchError(id, a.m.Batches.Remove(ctx, a.org(), id))
}

// BatchItems calls each with the items of a batch in order: the uploaded item, the status, and the
// run's id.
func (a *Agent) BatchItems(
	ctx context.Context, b *proto.Batch, each func(item []byte, status proto.ItemStatus, run string) error,
) error {
	items, err := a.m.Batches.Items(ctx, b.Org, b.ID)
	if err != nil {
		return a.batchError(b.ID, err)
	}
	read, err := a.m.Batches.Content(ctx, b)
	if err != nil {
		return a.public(err)
	}
	done, err := a.m.Transfers.Begin(ctx, b.Org)
	if err != nil {
		return a.public(err)
	}
	defer done()
	for number := range items.Len() {
		item, err := read(ctx, number)
		if err != nil {
			return a.public(err)
		}
		if err := each(item, items.Status(number), proto.RunID(b.ItemTrace(number, items.Round(number)))); err != nil {
			return err
		}
	}
	return nil
}
