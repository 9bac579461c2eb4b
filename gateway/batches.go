package gateway

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"mime"
	"net/http"
	"slices"
	"time"

	"github.com/go-chi/chi/v5"

	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/proto/api"
	"github.com/bullpen-run/bullpen/proto/fault"
)

// batchMemory is what a request for a batch may need: its largest item several times, as it is
// read, decoded, encoded and compressed.
const batchMemory = 5 * DefaultMaxBody

func batchError(id string, err error) error {
	if errors.Is(err, proto.ErrNotFound) {
		return api.Errorf(api.CodeNotFound, "there is no batch of that id; see /v1/batches")
	}
	return fmt.Errorf("batch %s: %w", id, err)
}

// batchID returns the id in the path. An id of the wrong form does not exist.
func batchID(r *http.Request) (string, error) {
	id := chi.URLParam(r, "id")
	if !proto.ValidBatchID(id) {
		return "", batchError(id, proto.ErrNotFound)
	}
	return id, nil
}

func (s *Server) createBatch(w http.ResponseWriter, r *http.Request) error {
	batch, created, err := s.readBatch(w, r)
	if err != nil {
		w.Header().Set("Connection", "close") // the rest of the body is not read
		return err
	}
	if created {
		fault.Here(fault.AfterBatchBeforeAnswer)
	}
	found, err := s.Batches.Get(r.Context(), batch.Org, batch.ID)
	if err != nil {
		return batchError(batch.ID, err)
	}
	w.Header().Set("Location", "/v1/batches/"+batch.ID)
	return s.writeBatch(w, r, http.StatusCreated, &found)
}

// readBatch stores the batch in the body of a request, or finds the one of an earlier request with
// the same idempotency key.
func (s *Server) readBatch(w http.ResponseWriter, r *http.Request) (batch *proto.Batch, created bool, err error) {
	idempotencyKey, err := idempotencyKeyOf(r.Header)
	if err != nil {
		return nil, false, err
	}
	if err := requireIdentity(w, r); err != nil {
		return nil, false, err
	}
	c := clientOf(r)
	batch = &proto.Batch{ID: proto.NewBatchID(c.key.Org, c.key.ID, idempotencyKey), Org: c.key.Org, Key: c.key.ID, CreatedAt: time.Now().UTC()}
	return s.uploadBatch(w, r, batch, idempotencyKey != "", func(upload BatchUpload) *api.BatchBody {
		reader := &batchReader{Server: s, ctx: r.Context(), client: c, batch: batch, upload: upload, urls: map[string]bool{}}
		return &api.BatchBody{Lines: isLines(r.Header), Member: "items", Settings: reader.settings, Item: reader.item}
	})
}

// uploadBatch stores a new batch with the items in the body of a request, which the result of read
// reads. With an idempotency key it finds the one of an earlier request.
func (s *Server) uploadBatch(w http.ResponseWriter, r *http.Request, batch *proto.Batch, keyed bool, read func(BatchUpload) *api.BatchBody) (_ *proto.Batch, created bool, err error) {
	if r.ContentLength > proto.MaxBatchBytes {
		return nil, false, bodyTooLarge(proto.MaxBatchBytes)
	}
	if err := s.checkNewBatch(r.Context(), batch); err != nil {
		return nil, false, err
	}
	done, err := s.beginBatch(r.Context(), batch.Org)
	if err != nil {
		return nil, false, err
	}
	defer done()
	upload, err := s.Batches.Upload(batch.Org)
	if err != nil {
		return nil, false, err
	}
	body := &longBody{from: http.MaxBytesReader(w, r.Body, proto.MaxBatchBytes), control: infoOf(r.Context()).rec.control, limit: proto.MaxBatchBytes}
	items := read(upload)
	items.MaxItem = s.MaxBody
	err = items.Read(body)
	body.clearDeadline()
	if err == nil {
		batch, created, err = s.storeBatch(r.Context(), batch, upload, keyed)
	}
	if !created {
		discarding, cancel := detached(r.Context())
		defer cancel()
		upload.Discard(discarding)
	}
	return batch, created, placed(err)
}

// checkNewBatch refuses a batch whose items would be refused because a monthly quota is used up.
// One that was accepted before, under the same idempotency key, is found nevertheless.
func (s *Server) checkNewBatch(ctx context.Context, b *proto.Batch) error {
	refused := s.checkQuota(ctx, b.Org)
	if refused == nil {
		return nil
	}
	_, err := s.Batches.Get(ctx, b.Org, b.ID)
	if errors.Is(err, proto.ErrNotFound) {
		return refused
	}
	return err
}

// beginBatch begins the upload of a batch and reserves its memory. done ends it.
func (s *Server) beginBatch(ctx context.Context, org string) (done func(), err error) {
	if s.DiskFull != nil && s.DiskFull() != "" {
		return nil, errDiskFull
	}
	end, err := s.transfers.begin(ctx, org)
	if err != nil {
		return nil, err
	}
	memory := min(batchMemory, s.Memory/orgShare/2)
	if !s.budget.reserve(org, memory, s.Memory) {
		end()
		return nil, errOverloaded
	}
	return func() { s.budget.release(org, memory); end() }, nil
}

// isLines reports whether the body is JSONL.
func isLines(h http.Header) bool {
	kind, _, _ := mime.ParseMediaType(h.Get("Content-Type"))
	return slices.Contains([]string{"application/jsonl", "application/x-jsonl", "application/jsonlines", typeNDJSON}, kind)
}

// placed returns the error for a client whose batch was not accepted: that of an item, with its
// place.
func placed(err error) error {
	place, ok := errors.AsType[*api.PlaceError](err)
	if !ok {
		return err
	}
	if field, ok := errors.AsType[*proto.FieldError](place.Err); ok {
		return &proto.FieldError{Field: place.Place, Message: place.Place + ": " + field.Message}
	}
	if known, ok := errors.AsType[*api.Error](place.Err); ok {
		at := *known
		at.Message = place.Place + ": " + known.Message
		return &at
	}
	return err
}

// batchReader checks and stores the items of a new batch.
type batchReader struct {
	*Server
	ctx    context.Context
	client client
	batch  *proto.Batch
	upload BatchUpload
	shared *api.ExecuteRequest
	urls   map[string]bool // checked URLs of items
}

func (b *batchReader) settings(object []byte) error {
	settings, err := api.Decode[api.BatchSettings](object)
	if err != nil {
		return err
	}
	settings.Apply(b.batch)
	note, err := json.Marshal(settings)
	if err != nil {
		return fmt.Errorf("encode the settings of a batch: %w", err)
	}
	b.upload.Note(note)
	request := api.ExecuteRequest{WebhookURL: settings.WebhookURL}
	if b.batch.WebhookURL, err = b.webhookURL(b.ctx, &request, proto.ModeAsync, b.client.key); err != nil {
		return err
	}
	if b.shared = settings.Shared(); b.shared == nil {
		return nil
	}
	fields, err := json.Marshal(b.shared)
	if err != nil {
		return fmt.Errorf("encode the fields of all items: %w", err)
	}
	return b.upload.Shared(b.ctx, fields)
}

// item checks an item as if it were submitted now.
func (b *batchReader) item(item []byte) error {
	request, err := api.DecodeBatchItem(b.shared, item)
	if err != nil {
		return err
	}
	if err := b.checkURL(request.WebhookURL); err != nil {
		return err
	}
	request.WebhookURL = "" // a look-up for each item would take too long
	if _, err := b.newJob(b.ctx, request, b.client, proto.ModeAsync, "", 0); err != nil {
		return err
	}
	return b.upload.Add(b.ctx, item)
}

func (b *batchReader) checkURL(url string) error {
	const field = "webhook_url"
	switch {
	case url == "" || b.urls[url]:
		return nil
	case !b.batch.ItemWebhooks:
		return proto.FieldErrorf(field, "must not be given, unless the batch sets item_webhooks")
	case len(b.urls) >= proto.MaxBatchURLs:
		return proto.FieldErrorf(field, "must be one of at most %d different URLs in a batch", proto.MaxBatchURLs)
	}
	b.urls[url] = true
	return b.URLs.Check(b.ctx, field, url)
}

// storeBatch stores a batch whose items are uploaded, unless there is one of its idempotency key.
func (s *Server) storeBatch(ctx context.Context, b *proto.Batch, upload BatchUpload, keyed bool) (batch *proto.Batch, created bool, err error) {
	if b.Content, b.Total, err = upload.Finish(ctx); err != nil {
		return nil, false, err
	}
	fault.Here(fault.AfterItemsBeforeBatch)
	storing, cancel := detached(ctx)
	defer cancel()
	batch, created, err = s.Batches.Create(storing, b)
	switch {
	case err != nil:
		// It may be stored, so its items stay. They are removed after a day if it is not.
		return nil, true, err
	case !created && keyed && batch.Content.Hash != b.Content.Hash:
		return nil, false, api.Errorf(api.CodeIdempotency, "this Idempotency-Key was used with another batch; use a new key for a new batch")
	}
	return batch, created, nil
}

func (s *Server) listBatches(w http.ResponseWriter, r *http.Request) error {
	limit, err := pageSize(r)
	if err != nil {
		return err
	}
	list := s.Batches.List(infoOf(r.Context()).key.Org)
	if cursor := r.URL.Query().Get("cursor"); cursor != "" {
		at := slices.IndexFunc(list, func(b proto.BatchAndState) bool { return b.Batch.ID == cursor })
		if at < 0 {
			return badCursor()
		}
		list = list[at+1:]
	}
	now := time.Now()
	answer := api.Batches{Batches: []api.Batch{}}
	for i := range list[:min(len(list), limit)] {
		answer.Batches = append(answer.Batches, api.NewBatch(&list[i].Batch, &list[i].State, now))
	}
	if len(list) > limit {
		answer.NextCursor = &list[limit-1].Batch.ID
	}
	return writeValue(w, http.StatusOK, answer)
}

func (s *Server) getBatch(w http.ResponseWriter, r *http.Request) error {
	found, err := s.findBatch(r)
	if err != nil {
		return err
	}
	return s.writeBatch(w, r, http.StatusOK, &found)
}

// findBatch returns the batch in the path of a request.
func (s *Server) findBatch(r *http.Request) (proto.BatchAndState, error) {
	id, err := batchID(r)
	if err != nil {
		return proto.BatchAndState{}, err
	}
	found, err := s.Batches.Get(r.Context(), infoOf(r.Context()).key.Org, id)
	if err != nil {
		return found, batchError(id, err)
	}
	return found, nil
}

func (s *Server) writeBatch(w http.ResponseWriter, r *http.Request, status int, b *proto.BatchAndState) error {
	form := api.NewBatch(&b.Batch, &b.State, time.Now())
	if b.Batch.WebhookURL != "" && b.Batch.Finished(&b.State) {
		d, err := s.Deliveries.Delivery(r.Context(), b.Batch.Org, proto.BatchDeliveryTrace(&b.Batch))
		if err != nil && !errors.Is(err, proto.ErrNotFound) { // past its retention
			return fmt.Errorf("webhook of batch %s: %w", b.Batch.ID, err)
		}
		if err == nil {
			form.WebhookDeliveryStatus = &d.Status
		}
	}
	return writeValue(w, status, form)
}

// changeBatch answers with what change makes of the batch in the path.
func (s *Server) changeBatch(change func(*proto.Batch, *proto.BatchState) error) func(http.ResponseWriter, *http.Request) error {
	return func(w http.ResponseWriter, r *http.Request) error {
		id, err := batchID(r)
		if err != nil {
			return err
		}
		ctx, cancel := detached(r.Context())
		defer cancel()
		changed, err := s.Batches.Change(ctx, infoOf(r.Context()).key.Org, id, change)
		if err != nil {
			return batchError(id, err)
		}
		return s.writeBatch(w, r, http.StatusOK, &changed)
	}
}

func hasEnded() error { return api.Errorf(api.CodeConflict, "the batch has ended") }

// pauseBatch pauses a batch, or goes on with it.
func pauseBatch(paused bool) func(*proto.Batch, *proto.BatchState) error {
	return func(b *proto.Batch, s *proto.BatchState) error {
		if b.Ended(s) {
			return hasEnded()
		}
		if b.Status(s) == proto.BatchStopping {
			return api.Errorf(api.CodeConflict, "the batch is being stopped and starts no more items")
		}
		b.Paused = paused
		return nil
	}
}

func cancelBatch(b *proto.Batch, s *proto.BatchState) error {
	if b.Ended(s) && b.Status(s) != proto.BatchCancelled {
		return hasEnded()
	}
	if !b.Cancelled {
		b.CancelledAt = time.Now().UTC()
	}
	b.Cancelled, b.Paused = true, false
	return nil
}

func (s *Server) retryBatch(w http.ResponseWriter, r *http.Request) error {
	request, err := decodeOptionalBody[api.BatchRetryRequest](s, w, r)
	if err != nil {
		return err
	}
	return s.changeBatch(func(b *proto.Batch, s *proto.BatchState) error {
		switch {
		case !b.Finished(s):
			return api.Errorf(api.CodeConflict, "the batch has not ended; cancel it, or wait for its end")
		case s.Counts.Failed == 0 && (!request.Cancelled || s.Counts.Cancelled == 0):
			return api.Errorf(api.CodeConflict, "no item has failed; cancelled items are retried with {\"cancelled\":true}")
		case b.Retries >= proto.MaxBatchRetries:
			return api.Errorf(api.CodeConflict, "the batch was retried %d times; create another one", b.Retries)
		}
		b.Retries++
		b.RetryCancelled, b.Cancelled, b.Paused = request.Cancelled, false, false
		return nil
	})(w, r)
}

func (s *Server) deleteBatch(w http.ResponseWriter, r *http.Request) error {
	id, err := batchID(r)
	if err != nil {
		return err
	}
	ctx, cancel := detached(r.Context())
	defer cancel()
	err = s.Batches.Remove(ctx, infoOf(r.Context()).key.Org, id)
	if errors.Is(err, proto.ErrConflict) {
		return api.Errorf(api.CodeConflict, "the batch has not ended; cancel it first")
	}
	if err != nil {
		return batchError(id, err)
	}
	w.WriteHeader(http.StatusNoContent)
	return nil
}

// OpenBatch returns what submits the items of a batch. shared is the JSON of the fields that they
// share, nil for none.
func (s *Server) OpenBatch(b *proto.Batch, shared []byte) (
	submit func(ctx context.Context, item []byte, number int, id proto.TraceID) (refused string, err error), err error,
) {
	var fields *api.ExecuteRequest
	if shared != nil {
		if err := json.Unmarshal(shared, &fields); err != nil {
			return nil, fmt.Errorf("decode what the items of batch %s share: %w: %w", b.ID, proto.ErrCorrupt, err)
		}
	}
	return func(ctx context.Context, item []byte, number int, id proto.TraceID) (_ string, err error) {
		ctx, span := s.startBackgroundSpan(ctx, id, "batch item", b.Org, b.Key)
		defer func() { endBackgroundSpan(span, err) }()
		job, err := s.batchJob(ctx, b, fields, item, number, id)
		if err == nil {
			_, err = s.submitNew(ctx, &proto.Submission{Job: job})
		}
		_, rejected := errors.AsType[*proto.Rejection](err)
		_, busy := errors.AsType[*proto.BusyError](err)
		if rejected || busy {
			return "", err
		}
		return s.rejectionReason(ctx, err, b.Key)
	}, nil
}

// batchJob returns the job of an item, under the batch's own key.
func (s *Server) batchJob(ctx context.Context, b *proto.Batch, shared *api.ExecuteRequest, item []byte, number int, id proto.TraceID) (*proto.Job, error) {
	key, plan, err := s.validKey(ctx, b.Key)
	if err != nil {
		return nil, err
	}
	request, err := api.DecodeBatchItem(shared, item)
	if err != nil {
		return nil, err
	}
	job, err := s.newJob(ctx, request, client{key: key, plan: plan}, proto.ModeAsync, id, 0)
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
// time, and how many may be queued.
func (s *Server) BatchLimits(ctx context.Context, id string) (concurrent, queued int) {
	_, plan, err := s.validKey(ctx, id)
	if err != nil {
		return 0, 0
	}
	return min(proto.LimitOf(plan.Concurrent), proto.LimitOf(plan.keyConcurrent)), proto.LimitOf(plan.MaxQueued)
}

// Slots returns the number of slots of all workers.
func (s *Server) Slots(ctx context.Context) (int, error) {
	stats, err := s.Jobs.Stats(ctx)
	return stats.Slots, err
}
