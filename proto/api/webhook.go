package api

import (
	"encoding/json"
	"net/http"
	"net/textproto"
	"reflect"
	"slices"
	"strings"
	"time"

	"github.com/bullpen-run/bullpen/proto"
)

const maxHeaderNameLen = 64

// WebhookRequest is the part of an API key's webhook settings that a request sets.
type WebhookRequest struct {
	_ struct{} `doc:"null means absent."`

	URL              *string        `json:"url,omitempty" format:"webhook-url" doc:"The destination of executions that name no webhook_url. Needed in PUT."`
	Secret           *string        `json:"secret,omitempty" format:"webhook-secret" doc:"The key of the signature. After the prefix whsec_ it must be the base64 of 24 to 64 bytes."`
	MaxAttempts      *int           `json:"max_attempts,omitempty" default:"3" minimum:"1" maximum:"20" must:"be 1 to 20"`
	Waits            *Waits         `json:"waits,omitempty" default:"[1,10,60]" minimum:"0" maximum:"604800" doc:"Seconds before the second attempt, the third and so on; the last one holds for all further attempts. durable: ten attempts over three days."`
	SignatureHeaders *[]string      `json:"signature_headers,omitempty" default:"[\"X-Baponi-Signature\",\"X-Bullpen-Signature\"]" maxItems:"4" uniqueItems:"true" valuePattern:"^([Xx]-[A-Za-z0-9-]+|[A-Za-z0-9-]*[Ss][Ii][Gg][Nn][Aa][Tt][Uu][Rr][Ee])$" valueMaxLength:"64" doc:"Headers with the hexadecimal signature. Their names begin with X- or end in Signature, and must have no other meaning on the way, as X-Forwarded-… does."`
	Timeout          *proto.Seconds `json:"timeout,omitempty" default:"15" minimum:"0.1" maximum:"30" doc:"Seconds that one attempt may take."`
}

// Validate checks the names of headers.
func (r *WebhookRequest) Validate() error {
	const field = "signature_headers"
	var seen []string
	for _, name := range r.headers() {
		if !validSignatureHeader(name) {
			return proto.FieldErrorf(
				field, "must be names such as X-Signature: 1 to %d letters, digits and hyphens that begin with X- or end in "+
					"Signature, and mean nothing else on the way", maxHeaderNameLen)
		}
		if slices.Contains(seen, name) {
			return proto.FieldErrorf(field, "must name %s only once", name)
		}
		seen = append(seen, name)
	}
	return nil
}

// headers returns the canonical names of the signature headers.
func (r *WebhookRequest) headers() []string {
	names := []string{}
	if r.SignatureHeaders != nil {
		for _, name := range *r.SignatureHeaders {
			names = append(names, textproto.CanonicalMIMEHeaderKey(name))
		}
	}
	return names
}

// validSignatureHeader reports whether a header of that name can carry a signature. Tenants must
// not set headers that have a meaning to servers and proxies on the way.
func validSignatureHeader(name string) bool {
	for _, c := range []byte(name) {
		if c != '-' && (c < '0' || c > '9') && (c < 'A' || c > 'Z') && (c < 'a' || c > 'z') {
			return false
		}
	}
	lower := strings.ToLower(name)
	// The first prefix belongs to the Standard Webhooks signature.
	for _, prefix := range []string{
		"webhook-", "x-forwarded", "x-original-", "x-rewrite-", "x-real-", "x-http-method",
		"x-method-",
	} {
		if strings.HasPrefix(lower, prefix) {
			return false
		}
	}
	return len(name) <= maxHeaderNameLen &&
		(len(lower) > 2 && strings.HasPrefix(lower, "x-") || strings.HasSuffix(lower, "signature"))
}

// Apply returns base with the changes that the request asks for.
func (r *WebhookRequest) Apply(base proto.Webhook) proto.Webhook {
	w := base
	w.Waits, w.SignatureHeaders = slices.Clone(base.Waits), slices.Clone(base.SignatureHeaders)
	set(&w.URL, r.URL)
	set(&w.Secret, r.Secret)
	if r.Waits != nil {
		w.Waits = r.Waits.Pauses
		if r.Waits.Durable {
			w.Waits = proto.DurableWaits()
			w.MaxAttempts = len(w.Waits) + 1
		}
	}
	set(&w.MaxAttempts, r.MaxAttempts)
	if r.SignatureHeaders != nil {
		w.SignatureHeaders = r.headers()
	}
	set(&w.Timeout, r.Timeout)
	return w
}

// set stores a value that is given.
func set[T any](to *T, value *T) {
	if value != nil {
		*to = *value
	}
}

// Waits are the pauses between the attempts of a delivery. The JSON form is an array of seconds, or
// "durable".
type Waits struct {
	Durable bool // the built-in pauses of [proto.DurableWaits]
	Pauses  []proto.Seconds
}

const durable = "durable"

// MarshalJSON implements [json.Marshaler].
func (w Waits) MarshalJSON() ([]byte, error) {
	if w.Durable {
		return json.Marshal(durable)
	}
	return json.Marshal(w.Pauses)
}

// decode decodes the waits of a request. The tag limits each pause.
func (w *Waits) decode(field string, raw []byte, tag reflect.StructTag) error {
	switch typeByte(raw) {
	case '"':
		if text, err := decodeString(field, raw); err == nil && text == durable {
			w.Durable = true
			return nil
		}
	case '[':
		wrongCount := proto.FieldErrorf(field, "must have 1 to %d entries", proto.MaxWebhookAttempts-1)
		err := eachElement(raw, func(raw []byte) error {
			pause, err := decodeSeconds(field, raw, tag)
			if w.Pauses = append(w.Pauses, pause); err == nil && len(w.Pauses) >= proto.MaxWebhookAttempts {
				err = wrongCount
			}
			return err
		})
		if err == nil && len(w.Pauses) == 0 {
			err = wrongCount
		}
		return err
	}
	return proto.FieldErrorf(field, `must be an array of seconds, or "%s"`, durable)
}

// Webhook are the webhook settings of an API key. The secret is present only if the request set or
// created it.
type Webhook struct {
	URL              *string         `json:"url"`
	Secret           string          `json:"secret,omitempty" doc:"A secret that this request created; shown only here."`
	SecretHint       *string         `json:"secret_hint" doc:"Its last characters, if it is long; null if nothing is signed."`
	OldSecretHint    *string         `json:"old_secret_hint" doc:"The hint of the previous secret, while it signs too."`
	OldSecretUntil   *Time           `json:"old_secret_until" doc:"When the previous secret stops signing."`
	MaxAttempts      int             `json:"max_attempts" minimum:"1" maximum:"20"`
	Waits            []proto.Seconds `json:"waits"`
	SignatureHeaders []string        `json:"signature_headers" valuePattern:"^[A-Za-z0-9-]+$" valueMaxLength:"64"`
	Timeout          proto.Seconds   `json:"timeout" doc:"Seconds."`
	UpdatedAt        Time            `json:"updated_at"`
}

// NewWebhook returns the form of webhook settings at the time now. secret is a secret that was just
// created, else empty.
func NewWebhook(w *proto.Webhook, secret string, now time.Time) Webhook {
	settings := Webhook{
		URL: optional(w.URL), Secret: secret, MaxAttempts: w.MaxAttempts, Waits: w.Waits,
		SignatureHeaders: w.SignatureHeaders,
		Timeout:          w.Timeout, UpdatedAt: Time{w.UpdatedAt},
	}
	if w.Secret != "" {
		settings.SecretHint = optional(proto.WebhookSecretHint(w.Secret))
	}
	if len(w.Secrets(now)) > 1 {
		settings.OldSecretHint, settings.OldSecretUntil = optional(proto.WebhookSecretHint(w.OldSecret)),
			optionalTime(w.OldUntil)
	}
	return settings
}

// WebhookRotation asks for another secret.
type WebhookRotation struct {
	Secret  *string        `json:"secret,omitempty" format:"webhook-secret" doc:"Created by the server if absent."`
	Overlap *proto.Seconds `json:"overlap,omitempty" default:"86400" minimum:"0" maximum:"604800" doc:"Seconds for which the previous secret keeps signing."`
}

// Delivery is the webhook of an execution.
type Delivery struct {
	TraceID      proto.TraceID        `json:"trace_id" format:"trace-id"`
	WebhookID    string               `json:"webhook_id" doc:"The webhook-id header, the same in all attempts."`
	URL          string               `json:"url" doc:"Fixed when the execution was accepted."`
	Status       proto.DeliveryStatus `json:"status"`
	Reason       *string              `json:"reason" doc:"Why no more attempts are made, or why the next attempt waits longer."`
	CreatedAt    *Time                `json:"created_at" doc:"When the execution ended; null before."`
	NextAt       *Time                `json:"next_at" doc:"When the next attempt is due."`
	AttemptsMade int                  `json:"attempts_made" minimum:"0"`
	Attempts     []DeliveryAttempt    `json:"attempts" maxItems:"20" doc:"The last ones."`
}

// DeliveryAttempt is one attempt of a delivery, or a test.
type DeliveryAttempt struct {
	Number     int                   `json:"number" minimum:"0" doc:"From 1; replays continue the count."`
	At         Time                  `json:"at" doc:"When it began."`
	Status     *int                  `json:"status" doc:"The status of the receiver's answer; null without one."`
	Error      *string               `json:"error" doc:"Why it failed: address_refused, dns, connect, tls, timeout, broken, status or internal; more may come."`
	Detail     *string               `json:"detail" doc:"The error in a sentence."`
	RemoteAddr *string               `json:"remote_addr" doc:"The address of the connection."`
	Timings    proto.DeliveryTimings `json:"timings" doc:"Milliseconds; 0 for steps that did not happen."`
	Request    *DeliveryRequest      `json:"request" doc:"What was sent to the URL; null if nothing was, and in attempts of versions that did not record it."`
	Response   *string               `json:"response" doc:"The beginning of the answer, up to 4 KiB: status line, headers and body."`
}

// NewDelivery returns the form of a delivery.
func NewDelivery(d *proto.Delivery) Delivery {
	delivery := Delivery{
		TraceID: d.TraceID, WebhookID: d.ID, URL: d.URL, Status: d.Status, Reason: optional(d.Reason),
		CreatedAt: optionalTime(d.CreatedAt), NextAt: optionalTime(d.NextAt), AttemptsMade: d.Made,
		Attempts: []DeliveryAttempt{},
	}
	for i := range d.Attempts {
		delivery.Attempts = append(delivery.Attempts, NewDeliveryAttempt(&d.Attempts[i]))
	}
	return delivery
}

// DeliveryRequest is the request of an attempt. Its URL is that of the delivery, and another route
// returns its body.
type DeliveryRequest struct {
	Method  string            `json:"method" enum:"POST"`
	Headers map[string]string `json:"headers" doc:"The headers that bullpen set. [redacted] replaces signatures."`
}

// NewDeliveryAttempt returns the form of an attempt.
func NewDeliveryAttempt(a *proto.DeliveryAttempt) DeliveryAttempt {
	var request *DeliveryRequest
	if a.Headers != nil {
		request = &DeliveryRequest{http.MethodPost, a.Headers}
	}
	return DeliveryAttempt{
		Number: a.Number, At: Time{a.At}, Status: optional(a.Status), Error: optional(string(a.Error)),
		Detail:     optional(a.Detail),
		RemoteAddr: optional(a.RemoteAddr), Timings: a.Timings, Request: request, Response: optional(a.Response),
	}
}

// Deliveries is a page of deliveries.
type Deliveries struct {
	Deliveries []ListedDelivery `json:"deliveries"`
	NextCursor *string          `json:"next_cursor" doc:"The cursor of the next page; null on the last one."`
}

// ListedDelivery is a delivery in a list. Its attempts are in [Delivery].
type ListedDelivery struct {
	TraceID       proto.TraceID        `json:"trace_id" format:"trace-id" doc:"The execution, unless event is set."`
	WebhookID     string               `json:"webhook_id"`
	Event         *string              `json:"event" doc:"The event that is not about an execution, such as batch.completed; null for an execution's."`
	URL           string               `json:"url"`
	Status        proto.DeliveryStatus `json:"status"`
	Reason        *string              `json:"reason" doc:"Why no more attempts are made, or why the next attempt waits longer."`
	CreatedAt     Time                 `json:"created_at"`
	NextAt        *Time                `json:"next_at" doc:"When the next attempt is due."`
	AttemptsMade  int                  `json:"attempts_made" minimum:"0"`
	LastAttemptAt *Time                `json:"last_attempt_at"`
	LastStatus    *int                 `json:"last_status" doc:"The status of the answer to the last attempt; null without one."`
	LastError     *string              `json:"last_error" doc:"As in an attempt."`
}

// NewListedDelivery returns the form of a delivery in a list.
func NewListedDelivery(d *proto.Delivery) ListedDelivery {
	listed := ListedDelivery{
		TraceID: d.TraceID, WebhookID: d.ID, Event: optional(d.Event()), URL: d.URL, Status: d.Status,
		Reason: optional(d.Reason), CreatedAt: Time{d.CreatedAt}, NextAt: optionalTime(d.NextAt), AttemptsMade: d.Made,
	}
	if n := len(d.Attempts); n > 0 {
		last := &d.Attempts[n-1]
		listed.LastAttemptAt, listed.LastStatus, listed.LastError = &Time{last.At}, optional(last.Status),
			optional(string(last.Error))
	}
	return listed
}

// Replayed is the progress of a bulk replay.
type Replayed struct {
	Replayed int     `json:"replayed" minimum:"0" doc:"Deliveries that are pending again."`
	Left     int     `json:"left" minimum:"0" doc:"Deliveries that remain to be replayed."`
	Next     *string `json:"next" doc:"The value of after in the next request; null if nothing is left."`
}

// NewReplayed returns the form of the progress of a bulk replay.
func NewReplayed(r proto.Replayed) Replayed { return Replayed{r.Replayed, r.Left, optional(r.Next)} }

// Endpoint is a URL at which deliveries fail.
type Endpoint struct {
	URL          string  `json:"url"`
	FailingSince Time    `json:"failing_since" doc:"The first failure after the last success."`
	DisabledAt   *Time   `json:"disabled_at" doc:"When deliveries to the URL stopped; null while they go on."`
	Reason       *string `json:"reason" doc:"Why it was disabled."`
}

// Endpoints is the list of URLs at which deliveries fail.
type Endpoints struct {
	Endpoints []Endpoint `json:"endpoints"`
}

// NewEndpoint returns the form of an endpoint.
func NewEndpoint(e *proto.Endpoint) Endpoint {
	return Endpoint{e.URL, Time{e.FailingSince}, optionalTime(e.DisabledAt), optional(e.Reason)}
}

// EndpointRequest names a URL.
type EndpointRequest struct {
	URL string `json:"url" required:"true" format:"webhook-url"`
}
