package gateway

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"net/url"
	"time"

	"github.com/bullpen-run/bullpen/gateway/admin"
	"github.com/bullpen-run/bullpen/gateway/web"
	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/proto/api"
)

// replayBatch is the number of failed deliveries that one request replays.
const replayBatch = 100

var errNoWebhook = api.Errorf(
	api.CodeNotFound, "the execution has no webhook: it asked for none, and its API key has no URL")

// deliveryStatus returns the status of the webhook of an execution, empty if it has none.
func (s *Server) deliveryStatus(ctx context.Context, r *proto.Record) (proto.DeliveryStatus, error) {
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
func (s *Server) delivery(ctx context.Context, r *proto.Record) (*proto.Delivery, error) {
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

func (s *Server) getDelivery(w http.ResponseWriter, r *web.Request) error {
	record, err := web.ExecutionInPath(r, s.Jobs.Summary)
	if err != nil {
		return err
	}
	d, err := s.delivery(r.Context(), record)
	if err != nil {
		return fmt.Errorf("look up the webhook of %s: %w", record.TraceID, err)
	}
	return web.WriteValue(w, http.StatusOK, api.NewDelivery(d))
}

func (s *Server) replayDelivery(w http.ResponseWriter, r *web.Request) error {
	record, err := web.ExecutionInPath(r, s.Jobs.Summary)
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
func (s *Server) replayFailed(w http.ResponseWriter, r *web.Request) error {
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

// settingsKey returns the API key or the member whose webhook settings a request is about: the one
// that the query names, or the calling one. Others need the scope admin: the URL gets the results of all their
// async executions. The calling one can send these anywhere with each request, too.
func (s *Server) settingsKey(r *web.Request, change bool) (*proto.Key, error) {
	own, id := &r.Key, r.URL.Query().Get("key")
	if id == "" {
		web.AuditBefore(r, own.Org, own.ID, nil)
		return own, nil
	}
	if !own.Has(proto.ScopeAdmin) {
		return nil, api.MissingScope(proto.ScopeAdmin)
	}
	key, err := s.storedPrincipal(r.Context(), id)
	if err == nil {
		err = web.Administer(r, &key, change)
	}
	if errors.Is(err, proto.ErrNotFound) {
		return nil, api.Errorf(api.CodeNotFound,
			"there is no API key or member of that id; see /v1/admin/keys and /v1/admin/members")
	}
	if err == nil && change {
		err = admin.CheckMayGetObjects(r.Context(), s.Orgs, key.Org)
	}
	if err == nil {
		web.AuditBefore(r, key.Org, key.ID, nil)
	}
	return &key, err
}

func (s *Server) getWebhook(w http.ResponseWriter, r *web.Request) error {
	key, err := s.settingsKey(r, false)
	if err != nil {
		return err
	}
	settings, err := s.Webhooks.Stored(r.Context(), key.ID)
	if err != nil {
		return webhookError(err)
	}
	return web.WriteValue(w, http.StatusOK, api.NewWebhook(&settings, "", time.Now()))
}

// webhookError wraps an error of webhook settings. ErrNotFound gets the message for settings.
func webhookError(err error) error {
	if errors.Is(err, proto.ErrNotFound) {
		return api.Errorf(api.CodeNotFound, "this API key has no webhook settings; PUT them at /v1/webhook")
	}
	return fmt.Errorf("webhook settings: %w", err)
}

// readWebhook decodes webhook settings from the body of a request and checks where their URL leads.
func (s *Server) readWebhook(w http.ResponseWriter, r *web.Request) (*api.WebhookRequest, error) {
	req, err := web.DecodeBody[api.WebhookRequest](&s.Core, w, r)
	if err != nil || req.URL == nil {
		return req, err
	}
	return req, s.URLs.Check(r.Context(), "url", *req.URL)
}

// putWebhook replaces the settings of a key. The previous secret goes on signing for a
// day.
func (s *Server) putWebhook(w http.ResponseWriter, r *web.Request) error {
	key, err := s.settingsKey(r, true)
	if err != nil {
		return err
	}
	req, err := s.readWebhook(w, r)
	if err != nil {
		return err
	}
	if req.URL == nil {
		return proto.FieldErrorf("url", "must be given")
	}
	created := ""
	if req.Secret == nil {
		created = proto.NewWebhookSecret()
		req.Secret = &created
	}
	return s.changeWebhook(w, r, key, created, func(old *proto.Webhook) (proto.Webhook, error) {
		return rotateFrom(old, req.Apply(proto.DefaultWebhook())), nil
	})
}

// patchWebhook changes the settings of a key that the request names.
func (s *Server) patchWebhook(w http.ResponseWriter, r *web.Request) error {
	key, err := s.settingsKey(r, true)
	if err != nil {
		return err
	}
	req, err := s.readWebhook(w, r)
	if err != nil {
		return err
	}
	return s.changeWebhook(w, r, key, "", func(old *proto.Webhook) (proto.Webhook, error) {
		base := proto.DefaultWebhook()
		if old != nil {
			base = *old
		}
		wanted := req.Apply(base)
		if req.Secret == nil {
			return wanted, nil
		}
		return rotateFrom(old, wanted), nil
	})
}

// rotateFrom returns wanted with the secret of old as its previous secret, which signs for another
// day.
func rotateFrom(old *proto.Webhook, wanted proto.Webhook) proto.Webhook {
	secret := wanted.Secret
	if old != nil {
		wanted.Secret, wanted.OldSecret, wanted.OldUntil = old.Secret, old.OldSecret, old.OldUntil
	}
	wanted.Rotate(secret, time.Now().Add(time.Duration(proto.DefaultOverlap)))
	return wanted
}

// changeWebhook stores the settings that change returns for a key, and answers with them
// and with secret.
func (s *Server) changeWebhook(
	w http.ResponseWriter, r *web.Request, key *proto.Key, secret string,
	change func(old *proto.Webhook) (proto.Webhook, error),
) error {
	ctx, cancel := web.Detached(r.Context())
	defer cancel()
	settings, err := s.Webhooks.Change(ctx, key.ID, func(old *proto.Webhook) (proto.Webhook, error) {
		web.AuditBefore(r, key.Org, key.ID, auditWebhook(old))
		return change(old)
	})
	if err != nil {
		return webhookError(err)
	}
	web.AuditAfter(r, key.Org, key.ID, auditWebhook(&settings))
	return web.WriteValue(w, http.StatusOK, api.NewWebhook(&settings, secret, time.Now()))
}

func (s *Server) deleteWebhook(w http.ResponseWriter, r *web.Request) error {
	key, err := s.settingsKey(r, true)
	if err != nil {
		return err
	}
	ctx, cancel := web.Detached(r.Context())
	defer cancel()
	if settings, err := s.Webhooks.Stored(ctx, key.ID); err == nil {
		web.AuditBefore(r, key.Org, key.ID, auditWebhook(&settings))
	}
	if err := s.Webhooks.Remove(ctx, key.ID); err != nil {
		return webhookError(err)
	}
	w.WriteHeader(http.StatusNoContent)
	return nil
}

// rotateWebhook replaces the secret of a key. The previous secret goes on signing for the
// overlap.
func (s *Server) rotateWebhook(w http.ResponseWriter, r *web.Request) error {
	key, err := s.settingsKey(r, true)
	if err != nil {
		return err
	}
	req, err := web.DecodeOptionalBody[api.WebhookRotation](&s.Core, w, r)
	if err != nil {
		return err
	}
	secret, overlap := proto.NewWebhookSecret(), proto.DefaultOverlap
	if req.Secret != nil {
		secret = *req.Secret
	}
	if req.Overlap != nil {
		overlap = *req.Overlap
	}
	return s.changeWebhook(w, r, key, secret, func(old *proto.Webhook) (proto.Webhook, error) {
		if old == nil {
			return proto.Webhook{}, proto.ErrNotFound
		}
		next := *old
		next.Rotate(secret, time.Now().Add(time.Duration(overlap)))
		return next, nil
	})
}

// testWebhook sends a test to the URL of a key.
func (s *Server) testWebhook(w http.ResponseWriter, r *web.Request) error {
	key, err := s.settingsKey(r, false)
	if err != nil {
		return err
	}
	settings, err := s.Webhooks.Stored(r.Context(), key.ID)
	if err != nil && !errors.Is(err, proto.ErrNotFound) {
		return webhookError(err)
	}
	if settings.URL == "" {
		return proto.FieldErrorf("url", "is not set for this API key; PUT or PATCH it at /v1/webhook")
	}
	attempt, err := s.Deliveries.Test(r.Context(), *key)
	var rejection *proto.Rejection
	if errors.As(err, &rejection) || errors.Is(err, proto.ErrNotFound) {
		return fmt.Errorf("%w: %w",
			api.Unavailable(1, "no process that sends webhooks is ready, or has heard of this URL yet; send the request again"),
			err)
	}
	if err != nil {
		return fmt.Errorf("test webhook: %w", err)
	}
	return web.WriteValue(w, http.StatusOK, api.NewDeliveryAttempt(attempt))
}

func (s *Server) listEndpoints(w http.ResponseWriter, r *web.Request) error {
	list := s.Webhooks.Endpoints(r.Key.Org)
	answer := api.Endpoints{Endpoints: make([]api.Endpoint, len(list))}
	for i := range list {
		answer.Endpoints[i] = api.NewEndpoint(&list[i])
	}
	return web.WriteValue(w, http.StatusOK, answer)
}

func (s *Server) enableEndpoint(w http.ResponseWriter, r *web.Request) error {
	req, err := web.DecodeBody[api.EndpointRequest](&s.Core, w, r)
	if err != nil {
		return err
	}
	ctx, cancel := web.Detached(r.Context())
	defer cancel()
	err = s.Webhooks.Enable(ctx, r.Key.Org, req.URL)
	if errors.Is(err, proto.ErrNotFound) {
		return api.Errorf(api.CodeNotFound, "deliveries to this URL do not fail; see /v1/webhook/endpoints for those that do")
	}
	if err != nil {
		return fmt.Errorf("enable webhook: %w", err)
	}
	w.WriteHeader(http.StatusNoContent)
	return nil
}

// auditWebhook returns the form of settings for the audit log. Of a URL it has scheme and host only: its
// path is often a credential.
func auditWebhook(settings *proto.Webhook) any {
	if settings == nil {
		return nil
	}
	public := *settings
	if u, err := url.Parse(public.URL); err == nil && u.Host != "" {
		public.URL = u.Scheme + "://" + u.Host + "/" + web.Redacted
	} else if public.URL != "" {
		public.URL = web.Redacted
	}
	return api.NewWebhook(&public, "", time.Now())
}
