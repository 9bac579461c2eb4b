package webhooks

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"strconv"
	"time"

	"github.com/bullpen-run/bullpen/gateway/web"
	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/proto/api"
)

// replayBatch is the number of failed deliveries that one request replays.
const replayBatch = 100

// Deliveries reads and replays the deliveries of webhooks.
type Deliveries interface {
	// Delivery returns the delivery of an execution, or [proto.ErrNotFound] if it has none yet.
	Delivery(ctx context.Context, org string, id proto.TraceID) (*proto.Delivery, error)
	// List returns up to limit deliveries of an organisation, most recently changed first. An empty
	// status selects all. before is empty for the first page, and the previous call's next for
	// others.
	List(ctx context.Context, org string, status proto.DeliveryStatus, before string, limit int) (
		page []*proto.Delivery, next string, err error)
	// Replay makes a finished delivery pending again. It returns [proto.ErrNotFound] if there is
	// none, and [proto.ErrConflict] while it is pending.
	Replay(ctx context.Context, org string, id proto.TraceID) (*proto.Delivery, error)
	// ReplayFailed replays up to most deliveries that have failed since a time, in the order of
	// their failures, starting after an earlier call's Next.
	ReplayFailed(ctx context.Context, org string, since time.Time, after string, most int) (proto.Replayed, error)
	// Test sends a test to a key's URL, and returns the attempt. It returns [proto.ErrNotFound] if
	// the sending process does not know the URL yet, and a [*proto.Rejection] if no such process is
	// ready.
	Test(ctx context.Context, key proto.Key) (*proto.DeliveryAttempt, error)
}

// Executions reads executions.
type Executions interface {
	// Summary returns the record of an execution without the outputs of the result, or
	// [proto.ErrNotFound].
	Summary(ctx context.Context, org string, id proto.TraceID) (*proto.Record, error)
	// Lookup is Summary with the outputs.
	Lookup(ctx context.Context, org string, id proto.TraceID) (*proto.Record, error)
}

var errNoWebhook = api.Errorf(
	api.CodeNotFound, "the execution has no webhook: it asked for none, and its API key has no URL")

// DeliveryStatus returns the status of an execution's webhook, or "".
func (s *Routes) DeliveryStatus(ctx context.Context, r *proto.Record) (proto.DeliveryStatus, error) {
	d, err := s.delivery(ctx, r)
	switch {
	case errors.Is(err, errNoWebhook):
		return "", nil
	case err != nil:
		return "", err
	default:
		return d.Status, nil
	}
}

// delivery returns the webhook of an execution, or errNoWebhook. Until the execution has ended and
// its delivery is stored, the delivery is pending and has no times.
func (s *Routes) delivery(ctx context.Context, r *proto.Record) (*proto.Delivery, error) {
	if proto.NewDelivery(&r.Meta, time.Time{}) == nil {
		return nil, errNoWebhook
	}
	if r.Status.Terminal() {
		d, err := s.Deliveries.Delivery(ctx, r.Org, r.TraceID)
		if !errors.Is(err, proto.ErrNotFound) {
			return d, err
		}
	}
	return proto.NewDelivery(&r.Meta, time.Time{}), nil
}

func (s *Routes) getDelivery(w http.ResponseWriter, r *web.Request) error {
	record, err := web.ExecutionInPath(r, s.Executions.Summary)
	if err != nil {
		return err
	}
	d, err := s.delivery(r.Context(), record)
	if err != nil {
		return fmt.Errorf("look up the webhook of %s: %w", record.TraceID, err)
	}
	return web.WriteValue(w, http.StatusOK, api.NewDelivery(d))
}

// getDeliveryBody sends the body of an execution's webhook, as its receiver gets it.
func (s *Routes) getDeliveryBody(w http.ResponseWriter, r *web.Request) error {
	record, err := web.ExecutionInPath(r, s.Executions.Lookup)
	switch {
	case err != nil:
		return err
	case proto.NewDelivery(&record.Meta, time.Time{}) == nil:
		return errNoWebhook
	case !record.Status.Terminal():
		return api.Errorf(api.CodeConflict, "the execution has not ended; its webhook has no body yet")
	}
	body, err := s.Body(record)
	if err != nil {
		return err
	}
	if err := proto.ReserveRead(r.Context(), len(body)); err != nil {
		return err
	}
	web.JSONHeader(w.Header())
	w.Header().Set("Content-Length", strconv.Itoa(len(body)))
	_, err = w.Write(body)
	return err
}

// listDeliveries lists the deliveries of the key's organisation, most recently changed first.
func (s *Routes) listDeliveries(w http.ResponseWriter, r *web.Request) error {
	limit, err := web.PageSize(r)
	if err != nil {
		return err
	}
	var status proto.DeliveryStatus
	query := r.URL.Query()
	if text := query.Get("status"); text != "" {
		if err := web.ParseOneOf(&status, "status", text, proto.DeliveryStatuses()); err != nil {
			return err
		}
	}
	list, filter, before := r.URL.Path, [2]string{r.Key.Org, string(status)}, query.Get("cursor")
	if before != "" {
		if before, err = s.OpenPlace(list, filter, before); err != nil {
			return err
		}
	}
	page, next, err := s.Deliveries.List(r.Context(), r.Key.Org, status, before, limit)
	if err != nil {
		return fmt.Errorf("list webhooks: %w", err)
	}
	answer := api.Deliveries{Deliveries: make([]api.ListedDelivery, len(page))}
	for i, d := range page {
		answer.Deliveries[i] = api.NewListedDelivery(d)
	}
	if next != "" {
		if next, err = s.SealPlace(list, filter, next); err != nil {
			return err
		}
		answer.NextCursor = &next
	}
	return web.WriteValue(w, http.StatusOK, answer)
}

func (s *Routes) replayDelivery(w http.ResponseWriter, r *web.Request) error {
	record, err := web.ExecutionInPath(r, s.Executions.Summary)
	if err != nil {
		return err
	}
	if proto.NewDelivery(&record.Meta, time.Time{}) == nil {
		return errNoWebhook
	}
	if e, ok := s.Webhooks.Endpoint(record.Org, record.WebhookURL); ok && e.Disabled() {
		return api.Errorf(api.CodeConflict,
			"deliveries to %s are disabled; once it answers again, POST its URL to /v1/webhook/endpoints/enable",
			record.WebhookURL)
	}
	ctx, cancel := web.Detached(r.Context())
	defer cancel()
	d, err := s.Deliveries.Replay(ctx, record.Org, record.TraceID)
	if errors.Is(err, proto.ErrConflict) || errors.Is(err, proto.ErrNotFound) { // not found: not stored yet
		return api.Errorf(api.CodeConflict,
			"the webhook is pending: it can be sent again once it was delivered or has failed")
	}
	if err != nil {
		return fmt.Errorf("replay the webhook of %s: %w", record.TraceID, err)
	}
	return web.WriteValue(w, http.StatusAccepted, api.NewDelivery(d))
}

// replayFailed replays one batch of failed deliveries. The client asks again for the next batch.
func (s *Routes) replayFailed(w http.ResponseWriter, r *web.Request) error {
	query := r.URL.Query()
	since, err := time.Parse(time.RFC3339, query.Get("since"))
	if err != nil {
		return proto.FieldErrorf("since", "must be a time such as 2026-11-20T12:00:00Z")
	}
	list, filter, after := r.URL.Path, [2]string{r.Key.Org, query.Get("since")}, query.Get("after")
	if after != "" {
		if after, err = s.OpenPlace(list, filter, after); err != nil {
			return proto.FieldErrorf("after", "must be what next had in the answer before")
		}
	}
	done, err := s.Deliveries.ReplayFailed(r.Context(), r.Key.Org, since, after, replayBatch)
	if err == nil && done.Next != "" {
		done.Next, err = s.SealPlace(list, filter, done.Next)
	}
	if err != nil {
		return fmt.Errorf("replay failed webhooks: %w", err)
	}
	return web.WriteValue(w, http.StatusOK, api.NewReplayed(done))
}
