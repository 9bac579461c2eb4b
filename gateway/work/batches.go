package work

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"mime"
	"net/http"
	"slices"
	"time"

	"github.com/bullpen-run/bullpen/gateway/web"
	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/proto/api"
	"github.com/bullpen-run/bullpen/proto/fault"
)

// batchMemory is the memory for uploading a batch: several copies of its largest item, as it is
// read, decoded, encoded and compressed.
const batchMemory = 5 * web.DefaultMaxBody

// Batches stores batches.
type Batches interface {
	// Upload begins the storage of the items of a new batch. It returns a [*proto.QuotaError] if the
	// organisation has too many batches.
	Upload(org string) (BatchUpload, error)
	// Create stores a new batch. If its id exists, Create returns the existing batch and false.
	Create(ctx context.Context, batch *proto.Batch) (stored *proto.Batch, created bool, err error)
	web.Pages[proto.BatchAndState] // the newest first
	// Get returns a batch, or [proto.ErrNotFound].
	Get(ctx context.Context, org, id string) (proto.BatchAndState, error)
	// Change stores the result of change for a batch in its current state, and returns both. change
	// may be called again. Its error is returned unchanged. Change returns [proto.ErrNotFound] if
	// there is no such batch.
	Change(ctx context.Context, org, id string, change func(*proto.Batch, *proto.BatchState) error) (
		proto.BatchAndState, error)
	// Remove removes a batch. It returns [proto.ErrNotFound] if there is none, and
	// [proto.ErrConflict] if it has not ended.
	Remove(ctx context.Context, org, id string) error
	// Items returns the current items of a batch, or [proto.ErrNotFound].
	Items(ctx context.Context, org, id string) (BatchItems, error)
}

// BatchUpload stores the items of a new batch, in the blob store.
type BatchUpload interface {
	// Note makes a value part of the hash of the content.
	Note(value []byte)
	// Shared stores the JSON of the fields that all items share.
	Shared(ctx context.Context, fields []byte) error
	// Add stores the next item: JSON without line breaks. It returns a [*proto.QuotaError] if the
	// organisation stores too much.
	Add(ctx context.Context, item []byte) error
	// Finish returns the reference to the content, and the number of items.
	Finish(ctx context.Context) (content proto.BatchContent, items int, err error)
	// Discard removes what was stored.
	Discard(ctx context.Context)
}

// BatchItems are the items of a batch.
type BatchItems interface {
	Len() int
	Status(index int) proto.ItemStatus
	// Round returns how often the item was submitted anew.
	Round(index int) int
}

// BatchChecker admits batches and their items.
type BatchChecker interface {
	// CheckQuota rejects a use if the organisation has reached a hard limit this month: of the
	// named quotas, or of any if none are named.
	CheckQuota(ctx context.Context, org string, quotas ...proto.QuotaName) error
	// Job returns the job of a request as execution id, which is empty for a mere check. wait is
	// how long an inline or streaming execution waits for a worker.
	Job(ctx context.Context, req *api.ExecuteRequest, c proto.Caller, mode proto.Mode, id proto.TraceID,
		wait time.Duration) (*proto.Job, error)
	// WebhookURL returns where to deliver a result, empty for nowhere. url is the request's; if
	// empty, the key's own is used. It returns a [*proto.FieldError] for a URL that is not allowed.
	WebhookURL(ctx context.Context, url string, mode proto.Mode, key *proto.Key) (string, error)
}

// URLs checks webhook URLs. Its errors are [*proto.FieldError] for the given field.
type URLs interface {
	// Check checks the text of a URL and the addresses of its host.
	Check(ctx context.Context, field, url string) error
}

// Deliveries reads the deliveries of webhooks.
type Deliveries interface {
	// Delivery returns the delivery of an execution, or [proto.ErrNotFound] if it has none yet.
	Delivery(ctx context.Context, org string, id proto.TraceID) (*proto.Delivery, error)
}

// Results reads the results of executions.
type Results interface {
	// Lookup returns the record of an execution, or [proto.ErrNotFound].
	Lookup(ctx context.Context, org string, id proto.TraceID) (*proto.Record, error)
}

// BatchRoutes are the routes of batches.
type BatchRoutes struct {
	*web.Core
	Batches    Batches
	Checker    BatchChecker
	URLs       URLs
	Deliveries Deliveries
	Results    Results
	Waiting    Waiting

	resource *web.Resource[proto.BatchAndState, api.Batch]
}

// Handlers returns the handlers of the routes.
func (s *BatchRoutes) Handlers() []web.Handler {
	x := &web.Resource[proto.BatchAndState, api.Batch]{
		Core: s.Core, Kind: "batch", Path: "/v1/batches", Param: "id", Form: newBatch, Valid: proto.ValidBatchID,
		Name:   func(b *proto.BatchAndState) (org, id string) { return b.Batch.Org, b.Batch.ID },
		Answer: func(list []api.Batch, next *string) any { return api.Batches{Batches: list, NextCursor: next} },
		NotFound: func(string) error {
			return api.Errorf(api.CodeNotFound, "there is no batch of that id; see /v1/batches")
		},
	}
	s.resource = x
	return []web.Handler{
		{ID: "createBatch", Handle: s.create},
		{ID: "listBatches", Handle: x.List(web.OwnOrg, s.Batches)},
		{ID: "getBatch", Handle: s.get},
		{ID: "deleteBatch", Handle: x.Remove(s.remove)},
		{ID: "pauseBatch", Handle: s.change(pauseBatch(true))},
		{ID: "resumeBatch", Handle: s.change(pauseBatch(false))},
		{ID: "cancelBatch", Handle: s.change(CancelBatch)},
		{ID: "retryBatch", Handle: s.retry},
		{ID: "getBatchResults", Handle: s.getResults},
	}
}

func (s *BatchRoutes) create(w http.ResponseWriter, r *web.Request) error {
	batch, created, err := s.read(w, r)
	if err != nil {
		w.Header().Set("Connection", "close") // the rest of the body is not read
		return err
	}
	if created {
		fault.Here(fault.AfterBatchBeforeAnswer)
	}
	found, err := s.Batches.Get(r.Context(), batch.Org, batch.ID)
	if err != nil {
		return s.resource.Error(batch.ID, err)
	}
	s.resource.Location(w, &found)
	return s.write(w, r, http.StatusCreated, &found)
}

// read stores the batch in a request's body, or finds the batch of an earlier request with the same
// idempotency key.
func (s *BatchRoutes) read(w http.ResponseWriter, r *web.Request) (batch *proto.Batch, created bool, err error) {
	idempotencyKey, err := web.IdempotencyKeyOf(r.Header)
	if err != nil {
		return nil, false, err
	}
	if err := web.RequireIdentity(w, r); err != nil {
		return nil, false, err
	}
	lines, err := isLines(r.Header)
	if err != nil {
		return nil, false, err
	}
	c := web.CallerOf(r)
	batch = &proto.Batch{
		ID: proto.NewBatchID(c.Key.Org, c.Key.ID, idempotencyKey), Org: c.Key.Org, Key: c.Key.ID,
		CreatedAt: time.Now().UTC(),
	}
	return s.Upload(w, r, batch, idempotencyKey != "", func(upload BatchUpload) *api.BatchBody {
		reader := &batchReader{
			BatchRoutes: s, ctx: r.Context(), caller: c, batch: batch, upload: upload, urls: map[string]bool{},
		}
		return &api.BatchBody{Lines: lines, Member: "items", Settings: reader.settings, Item: reader.item}
	})
}

// Upload stores a new batch with the items in a request's body, which the result of read reads.
// With an idempotency key it may find an earlier request's batch.
func (s *BatchRoutes) Upload(
	w http.ResponseWriter, r *web.Request, batch *proto.Batch, keyed bool, read func(BatchUpload) *api.BatchBody,
) (_ *proto.Batch, created bool, err error) {
	if r.ContentLength > proto.MaxBatchBytes {
		return nil, false, web.BodyTooLarge(proto.MaxBatchBytes)
	}
	if err := s.checkNew(r.Context(), batch); err != nil {
		return nil, false, err
	}
	done, err := s.begin(r.Context(), batch.Org)
	if err != nil {
		return nil, false, err
	}
	defer done()
	upload, err := s.Batches.Upload(batch.Org)
	if err != nil {
		return nil, false, err
	}
	body := r.LongBody(http.MaxBytesReader(w, r.Body, proto.MaxBatchBytes), proto.MaxBatchBytes)
	items := read(upload)
	items.MaxItem = s.MaxBody
	turn := s.TurnBody(r.Context(), batch.Org)
	err = items.Read(turn.Plain(turn.Encoded(body)))
	turn.End()
	body.ClearDeadline()
	if err == nil {
		batch, created, err = s.store(r.Context(), batch, upload, keyed)
	}
	if !created {
		discarding, cancel := web.Detached(r.Context())
		defer cancel()
		upload.Discard(discarding)
	}
	return batch, created, placed(err)
}

// checkNew refuses a batch whose items would be refused because a monthly quota is used up. It
// still finds a batch accepted earlier under the same idempotency key.
func (s *BatchRoutes) checkNew(ctx context.Context, b *proto.Batch) error {
	refused := s.Checker.CheckQuota(ctx, b.Org)
	if refused == nil {
		return nil
	}
	_, err := s.Batches.Get(ctx, b.Org, b.ID)
	if errors.Is(err, proto.ErrNotFound) {
		return refused
	}
	return err
}

// begin begins the upload of a batch and reserves its memory. done ends it.
func (s *BatchRoutes) begin(ctx context.Context, org string) (done func(), err error) {
	if err := s.CheckDisk(); err != nil {
		return nil, err
	}
	end, err := s.Transfers.Begin(ctx, org)
	if err != nil {
		return nil, err
	}
	memory := min(batchMemory, s.Memory/web.OrgShare/2)
	if !s.ReserveFor(org, memory) {
		end()
		return nil, web.ErrOverloaded
	}
	return func() { s.Release(org, memory); end() }, nil
}

// isLines reports whether the body is JSONL, and not an object. What clients send unless told otherwise
// is an object.
func isLines(h http.Header) (bool, error) {
	kind, _, err := mime.ParseMediaType(h.Get("Content-Type"))
	switch {
	case h.Get("Content-Type") == "":
		return false, nil
	case err == nil && slices.Contains(
		[]string{"application/jsonl", "application/x-jsonl", "application/jsonlines", web.TypeNDJSON}, kind):
		return true, nil
	case err == nil && slices.Contains(
		[]string{"application/json", "application/x-www-form-urlencoded", "text/plain"}, kind):
		return false, nil
	default:
		return false, api.Errorf(api.CodeUnsupportedMedia,
			"the Content-Type of a batch must be application/json for an object with items, or application/jsonl for an item "+
				"in each line")
	}
}

// placed returns the client's error for a batch that was not accepted: an item's error, with its
// place.
func placed(err error) error {
	place, ok := errors.AsType[*api.PlaceError](err)
	if !ok {
		return err
	}
	if field, ok := errors.AsType[*proto.FieldError](place.Err); ok {
		return &proto.FieldError{Field: place.Place, Message: place.Place + ": " + field.Message}
	}
	_, known := errors.AsType[*api.Error](place.Err)
	_, rejected := errors.AsType[*proto.Rejection](place.Err)
	if known || rejected {
		at := *api.NewError(place.Err)
		at.Message = place.Place + ": " + at.Message
		return &at
	}
	return err
}

// batchReader checks and stores the items of a new batch.
type batchReader struct {
	*BatchRoutes
	ctx    context.Context
	caller proto.Caller
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
	if b.batch.WebhookURL, err = b.Checker.WebhookURL(b.ctx, settings.WebhookURL, proto.ModeAsync,
		b.caller.Key); err != nil {
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
	if _, err := b.Checker.Job(b.ctx, request, b.caller, proto.ModeAsync, "", 0); err != nil {
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

// store stores a batch whose items are uploaded, unless its idempotency key is already used.
func (s *BatchRoutes) store(
	ctx context.Context, b *proto.Batch, upload BatchUpload, keyed bool,
) (batch *proto.Batch, created bool, err error) {
	if b.Content, b.Total, err = upload.Finish(ctx); err != nil {
		return nil, false, err
	}
	fault.Here(fault.AfterItemsBeforeBatch)
	storing, cancel := web.Detached(ctx)
	defer cancel()
	batch, created, err = s.Batches.Create(storing, b)
	switch {
	case err != nil:
		// The batch may be stored, so its items stay. If it is not, they are removed after a day.
		return nil, true, err
	case !created && keyed && batch.Content.Hash != b.Content.Hash:
		return nil, false, api.Errorf(
			api.CodeIdempotency, "this Idempotency-Key was used with another batch; use a new key for a new batch")
	}
	return batch, created, nil
}

func newBatch(b *proto.BatchAndState) api.Batch { return api.NewBatch(&b.Batch, &b.State, time.Now()) }

func (s *BatchRoutes) get(w http.ResponseWriter, r *web.Request) error {
	found, err := s.inPath(r)
	if err != nil {
		return err
	}
	return s.write(w, r, http.StatusOK, &found)
}

// inPath returns the batch in the path of a request.
func (s *BatchRoutes) inPath(r *web.Request) (proto.BatchAndState, error) {
	id, err := s.resource.ID(r)
	if err != nil {
		return proto.BatchAndState{}, err
	}
	found, err := s.Batches.Get(r.Context(), r.Key.Org, id)
	if err != nil {
		return found, s.resource.Error(id, err)
	}
	return found, nil
}

func (s *BatchRoutes) write(w http.ResponseWriter, r *web.Request, status int, b *proto.BatchAndState) error {
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
	var err error
	if form.WaitingFor, err = s.waitingFor(r.Context(), b); err != nil {
		return err
	}
	return web.WriteValue(w, status, form)
}

// batchSample is the number of queued items, from the first on, whose missing needs a batch shows.
const batchSample = 8

// waitingFor returns what workers lack to run one of the first queued items, or nil.
func (s *BatchRoutes) waitingFor(ctx context.Context, b *proto.BatchAndState) (*proto.Missing, error) {
	if b.State.Counts.Queued == 0 {
		return nil, nil
	}
	items, err := s.Batches.Items(ctx, b.Batch.Org, b.Batch.ID)
	if err != nil {
		return nil, s.resource.Error(b.Batch.ID, err)
	}
	var ids []proto.TraceID
	for i := 0; i < items.Len() && len(ids) < batchSample; i++ {
		if items.Status(i) == proto.ItemSubmitted {
			ids = append(ids, b.Batch.ItemTrace(i, items.Round(i)))
		}
	}
	waiting, err := s.Waiting(ctx, b.Batch.Org, ids)
	for _, id := range ids {
		if missing := waiting[id]; missing != nil {
			return missing, err
		}
	}
	return nil, err
}

// change answers with the result of change for the batch in the path.
func (s *BatchRoutes) change(
	change func(*proto.Batch, *proto.BatchState) error,
) func(http.ResponseWriter, *web.Request) error {
	return func(w http.ResponseWriter, r *web.Request) error {
		id, err := s.resource.ID(r)
		if err != nil {
			return err
		}
		ctx, cancel := web.Detached(r.Context())
		defer cancel()
		changed, err := s.Batches.Change(ctx, r.Key.Org, id, change)
		if err != nil {
			return s.resource.Error(id, err)
		}
		return s.write(w, r, http.StatusOK, &changed)
	}
}

func hasEnded() error { return api.Errorf(api.CodeConflict, "the batch has ended") }

// pauseBatch pauses or resumes a batch.
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

// CancelBatch cancels a batch that has not ended.
func CancelBatch(b *proto.Batch, s *proto.BatchState) error {
	if b.Ended(s) && b.Status(s) != proto.BatchCancelled {
		return hasEnded()
	}
	if !b.Cancelled {
		b.CancelledAt = time.Now().UTC()
	}
	b.Cancelled, b.Paused = true, false
	return nil
}

func (s *BatchRoutes) retry(w http.ResponseWriter, r *web.Request) error {
	request, err := web.DecodeOptionalBody[api.BatchRetryRequest](s.Core, w, r)
	if err != nil {
		return err
	}
	return s.change(func(b *proto.Batch, s *proto.BatchState) error {
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

func (s *BatchRoutes) remove(ctx context.Context, r *web.Request, id string) (*proto.BatchAndState, error) {
	err := s.Batches.Remove(ctx, r.Key.Org, id)
	if errors.Is(err, proto.ErrConflict) {
		err = api.Errorf(api.CodeConflict, "the batch has not ended; cancel it first")
	}
	return nil, err
}
