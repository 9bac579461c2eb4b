package gateway

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net/http"
	"time"

	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/proto/api"
)

// maxReplayed is how many failed deliveries one request makes begin again.
const maxReplayed = 100

// webhookURL gives where the result of a request is delivered to; empty for nowhere. A URL that is not used is checked, too, but not where
// it leads to.
func (s *Server) webhookURL(ctx context.Context, req *api.ExecuteRequest, mode proto.Mode, key *proto.Key) (string, error) {
	const field = "webhook_url"
	switch {
	case mode != proto.ModeAsync && req.WebhookURL == "":
		return "", nil
	case mode != proto.ModeAsync:
		return "", s.URLs.CheckURL(field, req.WebhookURL)
	case req.WebhookURL == "":
		return s.Webhooks.Webhook(key.ID).URL, nil
	default:
		return req.WebhookURL, s.URLs.Check(ctx, field, req.WebhookURL)
	}
}

// deliveryStatus tells how the webhook of an execution stands; empty where it has none.
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

// delivery gives the webhook of an execution. Before the execution has ended, and was handed over, it is pending without a time.
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

// deliveryView is the JSON form of a delivery.
type deliveryView struct {
	TraceID      proto.TraceID        `json:"trace_id"`
	WebhookID    string               `json:"webhook_id"`
	URL          string               `json:"url"`
	Status       proto.DeliveryStatus `json:"status"`
	Reason       *string              `json:"reason"`
	CreatedAt    *string              `json:"created_at"`
	NextAt       *string              `json:"next_at"`
	AttemptsMade int                  `json:"attempts_made"`
	Attempts     []attemptView        `json:"attempts"`
}

// attemptView is the JSON form of an attempt.
type attemptView struct {
	Number     int                   `json:"number"`
	At         string                `json:"at"`
	Status     *int                  `json:"status"`
	Error      *string               `json:"error"`
	Detail     *string               `json:"detail"`
	RemoteAddr *string               `json:"remote_addr"`
	Timings    proto.DeliveryTimings `json:"timings"`
	Response   *string               `json:"response"`
}

func viewDelivery(d *proto.Delivery) deliveryView {
	v := deliveryView{
		TraceID: d.TraceID, WebhookID: d.ID, URL: d.URL, Status: d.Status, Reason: optional(d.Reason), CreatedAt: optionalTime(d.CreatedAt),
		NextAt: optionalTime(d.NextAt), AttemptsMade: d.Made, Attempts: make([]attemptView, len(d.Attempts)),
	}
	for i := range d.Attempts {
		v.Attempts[i] = viewAttempt(&d.Attempts[i])
	}
	return v
}

func viewAttempt(a *proto.DeliveryAttempt) attemptView {
	v := attemptView{
		Number: a.Number, At: a.At.UTC().Format(timeLayout), Error: optional(string(a.Error)), Detail: optional(a.Detail),
		RemoteAddr: optional(a.RemoteAddr), Timings: a.Timings, Response: optional(a.Response),
	}
	if a.Status != 0 {
		v.Status = &a.Status
	}
	return v
}

func optionalTime(t time.Time) *string {
	if t.IsZero() {
		return nil
	}
	return optional(t.UTC().Format(timeLayout))
}

func (s *Server) getDelivery(w http.ResponseWriter, r *http.Request) error {
	record, err := s.lookup(r)
	if err != nil {
		return err
	}
	d, err := s.delivery(r.Context(), record)
	if err != nil {
		return fmt.Errorf("look up the webhook of %s: %w", record.TraceID, err)
	}
	return writeValue(w, http.StatusOK, viewDelivery(d))
}

func (s *Server) replayDelivery(w http.ResponseWriter, r *http.Request) error {
	record, err := s.lookup(r)
	if err != nil {
		return err
	}
	if proto.NewDelivery(&record.Meta, time.Time{}) == nil {
		return errNoWebhook
	}
	if e, ok := s.Webhooks.Endpoint(record.Org, record.WebhookURL); ok && e.Disabled() {
		return &disabledURLError{record.WebhookURL}
	}
	ctx, cancel := detached(r.Context())
	defer cancel()
	d, err := s.Deliveries.Replay(ctx, record.Org, record.TraceID)
	if errors.Is(err, proto.ErrConflict) || errors.Is(err, proto.ErrNotFound) { // not found: not handed over yet
		return errPending
	}
	if err != nil {
		return fmt.Errorf("replay the webhook of %s: %w", record.TraceID, err)
	}
	return writeValue(w, http.StatusAccepted, viewDelivery(d))
}

// replayFailed makes failed deliveries begin again, so many at a time that it can be repeated and watched.
func (s *Server) replayFailed(w http.ResponseWriter, r *http.Request) error {
	query := r.URL.Query()
	since, err := time.Parse(time.RFC3339, query.Get("since"))
	if err != nil {
		return &proto.FieldError{Field: "since", Message: "since must be a time such as 2026-11-20T12:00:00Z"}
	}
	var after proto.TraceID
	if text := query.Get("after"); text != "" {
		if after, err = proto.ParseTraceID(text); err != nil {
			return &proto.FieldError{Field: "after", Message: "after must be the id that next had in the answer before: " + err.Error()}
		}
	}
	done, err := s.Deliveries.ReplayFailed(r.Context(), infoOf(r.Context()).key.Org, since, after, maxReplayed)
	if err != nil {
		return fmt.Errorf("replay failed webhooks: %w", err)
	}
	return writeValue(w, http.StatusOK, struct {
		Replayed int     `json:"replayed"`
		Left     int     `json:"left"`
		Next     *string `json:"next"`
	}{done.Replayed, done.Left, optional(string(done.Next))})
}

// webhookView is the JSON form of webhook settings. It tells no secret but one that was just made.
type webhookView struct {
	URL              *string         `json:"url"`
	Secret           string          `json:"secret,omitempty"`
	SecretHint       *string         `json:"secret_hint"` // null: nothing is signed
	OldSecretHint    *string         `json:"old_secret_hint"`
	OldSecretUntil   *string         `json:"old_secret_until"`
	MaxAttempts      int             `json:"max_attempts"`
	Waits            []proto.Seconds `json:"waits"`
	SignatureHeaders []string        `json:"signature_headers"`
	Timeout          proto.Seconds   `json:"timeout"`
	UpdatedAt        string          `json:"updated_at"`
}

// answerWebhook answers with settings, and with a secret that is not told again.
func answerWebhook(w http.ResponseWriter, s *proto.Webhook, secret string) error {
	v := webhookView{
		URL: optional(s.URL), Secret: secret, MaxAttempts: s.MaxAttempts, Waits: s.Waits, SignatureHeaders: s.SignatureHeaders, Timeout: s.Timeout,
		UpdatedAt: s.UpdatedAt.UTC().Format(timeLayout),
	}
	if s.Secret != "" {
		v.SecretHint = optional(proto.WebhookSecretHint(s.Secret))
	}
	if len(s.Secrets(time.Now())) > 1 {
		v.OldSecretHint, v.OldSecretUntil = optional(proto.WebhookSecretHint(s.OldSecret)), optionalTime(s.OldUntil)
	}
	return writeValue(w, http.StatusOK, v)
}

func (s *Server) getWebhook(w http.ResponseWriter, r *http.Request) error {
	settings, err := s.Webhooks.Stored(r.Context(), infoOf(r.Context()).key.ID)
	if err != nil {
		return noSettings(err)
	}
	return answerWebhook(w, &settings, "")
}

// noSettings says of an error of the settings what it means for whoever asked.
func noSettings(err error) error {
	if errors.Is(err, proto.ErrNotFound) {
		return errNoSettings
	}
	return fmt.Errorf("webhook settings: %w", err)
}

// putWebhook replaces the settings of the calling key. The secret before goes on signing for a day.
func (s *Server) putWebhook(w http.ResponseWriter, r *http.Request) error {
	body, err := s.readBody(w, r)
	if err != nil {
		return err
	}
	wanted, named, err := proto.DecodeWebhook(body, proto.DefaultWebhook())
	if err != nil {
		return err
	}
	if wanted.URL == "" {
		return &proto.FieldError{Field: "url", Message: "url must be given"}
	}
	if err := s.URLs.Check(r.Context(), "url", wanted.URL); err != nil {
		return err
	}
	made := ""
	if !named {
		made = proto.NewWebhookSecret()
		wanted.Secret = made
	}
	return s.changeWebhook(w, r, made, func(old *proto.Webhook) (proto.Webhook, error) {
		return rotated(old, wanted, time.Duration(proto.DefaultOverlap)), nil
	})
}

// rotated gives wanted with its secret in the place of that of old, which signs too for the time given.
func rotated(old *proto.Webhook, wanted proto.Webhook, overlap time.Duration) proto.Webhook {
	secret := wanted.Secret
	if old != nil {
		wanted.Secret, wanted.OldSecret, wanted.OldUntil = old.Secret, old.OldSecret, old.OldUntil
	}
	wanted.Rotate(secret, time.Now().Add(overlap))
	return wanted
}

// changeWebhook stores what f makes of the calling key's settings, and answers with that and with a secret that was made.
func (s *Server) changeWebhook(
	w http.ResponseWriter, r *http.Request, made string, f func(old *proto.Webhook) (proto.Webhook, error),
) error {
	ctx, cancel := detached(r.Context()) // so that whoever left does not leave half of it
	defer cancel()
	settings, err := s.Webhooks.Change(ctx, infoOf(ctx).key.ID, f)
	if err != nil {
		return noSettings(err)
	}
	return answerWebhook(w, &settings, made)
}

// patchWebhook changes what the request names of the calling key's settings.
func (s *Server) patchWebhook(w http.ResponseWriter, r *http.Request) error {
	body, err := s.readBody(w, r)
	if err != nil {
		return err
	}
	named, _, err := proto.DecodeWebhook(body, proto.DefaultWebhook())
	if err != nil {
		return err
	}
	if named.URL != "" {
		if err := s.URLs.Check(r.Context(), "url", named.URL); err != nil {
			return err
		}
	}
	return s.changeWebhook(w, r, "", func(old *proto.Webhook) (proto.Webhook, error) {
		base := proto.DefaultWebhook()
		if old != nil {
			base = *old
		}
		wanted, secret, err := proto.DecodeWebhook(body, base)
		if err != nil || !secret {
			return wanted, err
		}
		return rotated(old, wanted, time.Duration(proto.DefaultOverlap)), nil
	})
}

func (s *Server) deleteWebhook(w http.ResponseWriter, r *http.Request) error {
	ctx, cancel := detached(r.Context())
	defer cancel()
	if err := s.Webhooks.Remove(ctx, infoOf(ctx).key.ID); err != nil {
		return noSettings(err)
	}
	w.WriteHeader(http.StatusNoContent)
	return nil
}

// rotateWebhook gives the calling key another secret, while the one before goes on signing for some time.
func (s *Server) rotateWebhook(w http.ResponseWriter, r *http.Request) error {
	body, err := s.readBody(w, r)
	if err != nil {
		return err
	}
	if len(bytes.TrimSpace(body)) == 0 {
		body = []byte("{}") // nothing of it is needed
	}
	rotation, err := proto.DecodeRotation(body)
	if err != nil {
		return err
	}
	if rotation.Secret == "" {
		rotation.Secret = proto.NewWebhookSecret()
	}
	return s.changeWebhook(w, r, rotation.Secret, func(old *proto.Webhook) (proto.Webhook, error) {
		if old == nil {
			return proto.Webhook{}, proto.ErrNotFound
		}
		next := *old
		next.Rotate(rotation.Secret, time.Now().Add(rotation.Overlap))
		return next, nil
	})
}

// testWebhook sends a test to the URL of the calling key.
func (s *Server) testWebhook(w http.ResponseWriter, r *http.Request) error {
	key := infoOf(r.Context()).key
	settings, err := s.Webhooks.Stored(r.Context(), key.ID)
	if err != nil && !errors.Is(err, proto.ErrNotFound) {
		return noSettings(err)
	}
	if settings.URL == "" {
		return &proto.FieldError{Field: "url", Message: "url is not set for this API key; PUT or PATCH it at /v1/webhook"}
	}
	attempt, err := s.Deliveries.Test(r.Context(), key)
	var refusal *proto.Refusal
	if errors.As(err, &refusal) || errors.Is(err, proto.ErrNotFound) {
		return fmt.Errorf("%w: %w", errNoDispatcher, err)
	}
	if err != nil {
		return fmt.Errorf("test webhook: %w", err)
	}
	return writeValue(w, http.StatusOK, viewAttempt(attempt))
}

// endpointView is the JSON form of a URL that deliveries fail at.
type endpointView struct {
	URL          string  `json:"url"`
	FailingSince string  `json:"failing_since"`
	DisabledAt   *string `json:"disabled_at"`
	Reason       *string `json:"reason"`
}

func (s *Server) listEndpoints(w http.ResponseWriter, r *http.Request) error {
	list := s.Webhooks.Endpoints(infoOf(r.Context()).key.Org)
	views := make([]endpointView, len(list))
	for i, e := range list {
		views[i] = endpointView{e.URL, e.FailingSince.UTC().Format(timeLayout), optionalTime(e.DisabledAt), optional(e.Reason)}
	}
	return writeValue(w, http.StatusOK, map[string][]endpointView{"endpoints": views})
}

func (s *Server) enableEndpoint(w http.ResponseWriter, r *http.Request) error {
	body, err := s.readBody(w, r)
	if err != nil {
		return err
	}
	url, err := proto.DecodeEndpointRequest(body)
	if err != nil {
		return err
	}
	ctx, cancel := detached(r.Context())
	defer cancel()
	err = s.Webhooks.Enable(ctx, infoOf(ctx).key.Org, url)
	if errors.Is(err, proto.ErrNotFound) {
		return errNoEndpoint
	}
	if err != nil {
		return fmt.Errorf("enable webhook: %w", err)
	}
	w.WriteHeader(http.StatusNoContent)
	return nil
}
