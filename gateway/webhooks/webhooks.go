package webhooks

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"net/url"
	"strings"
	"time"

	"github.com/bullpen-run/bullpen/gateway/web"
	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/proto/api"
)

// Webhooks stores the webhook settings of API keys, and the URLs at which deliveries fail.
type Webhooks interface {
	// Stored returns the stored settings of a key, or [proto.ErrNotFound].
	Stored(ctx context.Context, org, key string) (proto.Webhook, error)
	// Change replaces the settings of a key by f's result, and returns it. f is called with the
	// current settings, nil if there are none, possibly more than once. Change returns an error of
	// f unchanged.
	Change(
		ctx context.Context, org, key string, f func(old *proto.Webhook) (proto.Webhook, error),
	) (proto.Webhook, error)
	// Remove removes the settings of a key. It returns [proto.ErrNotFound] if there are none.
	Remove(ctx context.Context, org, key string) error
	// Endpoint returns the state of a URL. ok is false if deliveries to it do not fail.
	Endpoint(org, url string) (e proto.Endpoint, ok bool)
	// Endpoints returns all URLs at which deliveries of an organisation fail.
	Endpoints(org string) []proto.Endpoint
	// Enable enables deliveries to a URL again. It returns [proto.ErrNotFound] if they do not fail.
	Enable(ctx context.Context, org, url string) error
}

// URLs checks webhook URLs. Its errors are [*proto.FieldError] for the given field.
type URLs interface {
	// Check checks the text of a URL and the addresses of its host.
	Check(ctx context.Context, field, url string) error
}

// Keys reads API keys.
type Keys interface {
	// Get returns a key, even if it is revoked, or [proto.ErrNotFound].
	Get(ctx context.Context, id string) (proto.Key, error)
}

// Members reads members.
type Members interface {
	// Get returns a member, or [proto.ErrNotFound].
	Get(ctx context.Context, id string) (proto.Member, error)
}

// Routes are the routes of webhooks.
type Routes struct {
	*web.Core
	Webhooks   Webhooks
	Deliveries Deliveries
	URLs       URLs
	Executions Executions
	Keys       Keys
	Members    Members
	// Body returns the body of the webhook of an execution that has ended.
	Body func(r *proto.Record) ([]byte, error)
	// MayGetObjects returns an error if an organisation does not exist or is being deleted.
	MayGetObjects func(ctx context.Context, org string) error
}

// Handlers returns the handlers of the routes.
func (s *Routes) Handlers() []web.Handler {
	return []web.Handler{
		{ID: "getDelivery", Handle: s.getDelivery},
		{ID: "getDeliveryBody", Handle: s.getDeliveryBody},
		{ID: "listDeliveries", Handle: s.listDeliveries},
		{ID: "replayDelivery", Handle: s.replayDelivery},
		{ID: "getWebhook", Handle: s.get},
		{ID: "putWebhook", Handle: s.put},
		{ID: "patchWebhook", Handle: s.patch},
		{ID: "deleteWebhook", Handle: s.remove},
		{ID: "rotateWebhook", Handle: s.rotate},
		{ID: "testWebhook", Handle: s.test},
		{ID: "replayFailed", Handle: s.replayFailed},
		{ID: "listEndpoints", Handle: s.listEndpoints},
		{ID: "enableEndpoint", Handle: s.enableEndpoint},
	}
}

// settingsKey returns the API key or member whose webhook settings a request is about: the one in
// the query, or the caller. Others need the scope admin: the URL receives the results of all their
// async executions. The caller can send its own anywhere with each request, too.
func (s *Routes) settingsKey(r *web.Request, change bool) (*proto.Key, error) {
	own, id := &r.Key, r.URL.Query().Get("key")
	if id == "" {
		web.AuditBefore(r, own.Org, own.ID, nil)
		return own, nil
	}
	if !own.Has(proto.ScopeAdmin) {
		return nil, api.MissingScope(proto.ScopeAdmin)
	}
	key, err := s.principal(r.Context(), id)
	if err == nil {
		err = web.Administer(r, &key, change)
	}
	if errors.Is(err, proto.ErrNotFound) {
		return nil, api.Errorf(api.CodeNotFound,
			"there is no API key or member of that id; see /v1/admin/keys and /v1/admin/members")
	}
	if err == nil && change {
		err = s.MayGetObjects(r.Context(), key.Org)
	}
	if err == nil {
		web.AuditBefore(r, key.Org, key.ID, nil)
	}
	return &key, err
}

// principal returns the stored API key with an id, which may be revoked, or the one for the member
// with that id.
func (s *Routes) principal(ctx context.Context, id string) (proto.Key, error) {
	if !strings.HasPrefix(id, proto.MemberPrefix) {
		return s.Keys.Get(ctx, id)
	}
	m, err := s.Members.Get(ctx, id)
	return m.Key(), err
}

func (s *Routes) get(w http.ResponseWriter, r *web.Request) error {
	key, err := s.settingsKey(r, false)
	if err != nil {
		return err
	}
	settings, err := s.Webhooks.Stored(r.Context(), key.Org, key.ID)
	if err != nil {
		return settingsError(err)
	}
	return web.WriteValue(w, http.StatusOK, api.NewWebhook(&settings, "", time.Now()))
}

// settingsError wraps an error of webhook settings. ErrNotFound gets the message for settings.
func settingsError(err error) error {
	if errors.Is(err, proto.ErrNotFound) {
		return api.Errorf(api.CodeNotFound, "this API key has no webhook settings; PUT them at /v1/webhook")
	}
	return fmt.Errorf("webhook settings: %w", err)
}

// read decodes webhook settings from a request's body and checks where their URL leads.
func (s *Routes) read(w http.ResponseWriter, r *web.Request) (*api.WebhookRequest, error) {
	req, err := web.DecodeBody[api.WebhookRequest](s.Core, w, r)
	if err != nil || req.URL == nil {
		return req, err
	}
	return req, s.URLs.Check(r.Context(), "url", *req.URL)
}

// put replaces the settings of a key. The previous secret keeps signing for a
// day.
func (s *Routes) put(w http.ResponseWriter, r *web.Request) error {
	key, err := s.settingsKey(r, true)
	if err != nil {
		return err
	}
	req, err := s.read(w, r)
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
	return s.change(w, r, key, created, func(old *proto.Webhook) (proto.Webhook, error) {
		return rotateFrom(old, req.Apply(proto.DefaultWebhook())), nil
	})
}

// patch changes the settings of a key that the request names.
func (s *Routes) patch(w http.ResponseWriter, r *web.Request) error {
	key, err := s.settingsKey(r, true)
	if err != nil {
		return err
	}
	req, err := s.read(w, r)
	if err != nil {
		return err
	}
	return s.change(w, r, key, "", func(old *proto.Webhook) (proto.Webhook, error) {
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

// rotateFrom returns wanted with old's secret as its previous secret, which signs for another day.
func rotateFrom(old *proto.Webhook, wanted proto.Webhook) proto.Webhook {
	secret := wanted.Secret
	if old != nil {
		wanted.Secret, wanted.OldSecret, wanted.OldUntil = old.Secret, old.OldSecret, old.OldUntil
	}
	wanted.Rotate(secret, time.Now().Add(time.Duration(proto.DefaultOverlap)))
	return wanted
}

// change replaces a key's settings by change's result, and answers with them and with secret.
func (s *Routes) change(
	w http.ResponseWriter, r *web.Request, key *proto.Key, secret string,
	change func(old *proto.Webhook) (proto.Webhook, error),
) error {
	ctx, cancel := web.Detached(r.Context())
	defer cancel()
	settings, err := s.Webhooks.Change(ctx, key.Org, key.ID, func(old *proto.Webhook) (proto.Webhook, error) {
		web.AuditBefore(r, key.Org, key.ID, auditSettings(old))
		return change(old)
	})
	if err != nil {
		return settingsError(err)
	}
	web.AuditAfter(r, key.Org, key.ID, auditSettings(&settings))
	return web.WriteValue(w, http.StatusOK, api.NewWebhook(&settings, secret, time.Now()))
}

func (s *Routes) remove(w http.ResponseWriter, r *web.Request) error {
	key, err := s.settingsKey(r, true)
	if err != nil {
		return err
	}
	ctx, cancel := web.Detached(r.Context())
	defer cancel()
	if settings, err := s.Webhooks.Stored(ctx, key.Org, key.ID); err == nil {
		web.AuditBefore(r, key.Org, key.ID, auditSettings(&settings))
	}
	if err := s.Webhooks.Remove(ctx, key.Org, key.ID); err != nil {
		return settingsError(err)
	}
	w.WriteHeader(http.StatusNoContent)
	return nil
}

// rotate replaces the secret of a key. The previous secret keeps signing for the
// overlap.
func (s *Routes) rotate(w http.ResponseWriter, r *web.Request) error {
	key, err := s.settingsKey(r, true)
	if err != nil {
		return err
	}
	req, err := web.DecodeOptionalBody[api.WebhookRotation](s.Core, w, r)
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
	return s.change(w, r, key, secret, func(old *proto.Webhook) (proto.Webhook, error) {
		if old == nil {
			return proto.Webhook{}, proto.ErrNotFound
		}
		next := *old
		next.Rotate(secret, time.Now().Add(time.Duration(overlap)))
		return next, nil
	})
}

// test sends a test to the URL of a key.
func (s *Routes) test(w http.ResponseWriter, r *web.Request) error {
	key, err := s.settingsKey(r, false)
	if err != nil {
		return err
	}
	settings, err := s.Webhooks.Stored(r.Context(), key.Org, key.ID)
	if err != nil && !errors.Is(err, proto.ErrNotFound) {
		return settingsError(err)
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

func (s *Routes) listEndpoints(w http.ResponseWriter, r *web.Request) error {
	list := s.Webhooks.Endpoints(r.Key.Org)
	answer := api.Endpoints{Endpoints: make([]api.Endpoint, len(list))}
	for i := range list {
		answer.Endpoints[i] = api.NewEndpoint(&list[i])
	}
	return web.WriteValue(w, http.StatusOK, answer)
}

func (s *Routes) enableEndpoint(w http.ResponseWriter, r *web.Request) error {
	req, err := web.DecodeBody[api.EndpointRequest](s.Core, w, r)
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

// auditSettings returns the form of settings for the audit log. Of a URL it has scheme and host only: its
// path is often a credential.
func auditSettings(settings *proto.Webhook) any {
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
