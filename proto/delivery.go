package proto

import (
	"bytes"
	"cmp"
	"encoding/json"
	"fmt"
	"net"
	"net/url"
	"slices"
	"strings"
	"time"
	"unicode/utf8"
)

// TimeLayout is the format of all times in the API and in webhooks: RFC 3339 in UTC with
// milliseconds.
const TimeLayout = "2006-01-02T15:04:05.000Z"

// DeliveryStatus is the status of a delivery, and the webhook_delivery_status of its execution.
type DeliveryStatus string

// The closed list of delivery statuses.
const (
	DeliveryPending   DeliveryStatus = "pending"
	DeliveryDelivered DeliveryStatus = "delivered"
	DeliveryFailed    DeliveryStatus = "failed"
)

// DeliveryStatuses returns the closed list of delivery statuses.
func DeliveryStatuses() []DeliveryStatus {
	return []DeliveryStatus{DeliveryPending, DeliveryDelivered, DeliveryFailed}
}

// Delivery is the webhook of an execution or another event, with its attempts. An execution has at
// most one delivery.
type Delivery struct {
	ID      string         `json:"id"` // the same in all attempts and replays, so that receivers can detect duplicates
	TraceID TraceID        `json:"trace_id"`
	Org     string         `json:"org"`
	Key     string         `json:"key"` // the API key's id: each attempt uses its present settings
	URL     string         `json:"url"` // fixed when the execution was accepted
	Status  DeliveryStatus `json:"status"`
	// Reason is why attempts have stopped, or why the next one waits longer than configured. It may
	// be empty.
	Reason    string    `json:"reason,omitempty"`
	CreatedAt time.Time `json:"created_at"` // when the execution ended
	// NextAt is when the next attempt is due, while pending.
	NextAt time.Time `json:"next_at,omitzero"`
	// Made counts all attempts. Before counts those before the last replay, which the backoff
	// ignores.
	Made   int `json:"made"`
	Before int `json:"before,omitempty"`
	// Ended is the number of attempts when the delivery last ended, 0 if it never has. Usage has
	// counted them.
	Ended int `json:"ended,omitempty"`
	// Attempts are the last [MaxKeptAttempts] attempts.
	Attempts []DeliveryAttempt `json:"attempts"`
	// Body is the request body of a delivery that is not about an execution.
	Body json.RawMessage `json:"body,omitempty"`
	// Traceparent is [Meta.Traceparent] of the execution.
	Traceparent string `json:"traceparent,omitempty"`
}

// DeliveryUsage is the usage that a finished delivery adds to its organisation.
type DeliveryUsage struct {
	Key      string           `json:"key"`
	Attempts map[string]int64 `json:"attempts"` // since it last ended, by the day on which they began
}

// Usage returns the usage that a finished delivery adds to its organisation.
func (d *Delivery) Usage() DeliveryUsage {
	u := DeliveryUsage{Key: d.Key, Attempts: map[string]int64{}}
	for _, a := range d.Attempts {
		if a.Number > max(d.Ended, d.Before) { // an older version stored no Ended
			u.Attempts[a.At.UTC().Format(UsageDayLayout)]++
		}
	}
	return u
}

// DeliveryChange is the part of a stored delivery that scheduling its next attempt needs.
type DeliveryChange struct {
	Org      string
	TraceID  TraceID
	Revision uint64
	Origin   string    // of its URL, see [Origin]
	Due      time.Time // when the next attempt is due; zero if there is none
}

// MaxKeptAttempts is the number of attempts that a delivery keeps.
const MaxKeptAttempts = MaxWebhookAttempts

// MaxResponseHead is the number of bytes of a receiver's answer that are kept.
const MaxResponseHead = 4 << 10

// DeliveryAttempt is one POST to a receiver and its outcome.
type DeliveryAttempt struct {
	Number int       `json:"number"` // from 1
	At     time.Time `json:"at"`     // when it began
	Status int       `json:"status"` // of the answer; 0 without one
	// Error is the class of the failure, empty after a success. Detail describes it in a sentence.
	Error      DeliveryError   `json:"error,omitempty"`
	Detail     string          `json:"detail,omitempty"`
	RemoteAddr string          `json:"remote_addr,omitempty"` // the address of the connection
	Timings    DeliveryTimings `json:"timings"`
	// Headers are those of the request, with redacted signatures. They are nil if nothing was sent,
	// and in attempts of older versions.
	Headers map[string]string `json:"headers,omitempty"`
	// Response is the beginning of the answer: status line, headers and body, at most
	// [MaxResponseHead].
	Response string `json:"response,omitempty"`
}

// DeliveryTimings are the durations of the steps of an attempt, in milliseconds; 0 for steps that
// did not happen.
type DeliveryTimings struct {
	DNS       float64 `json:"dns_ms" minimum:"0"`
	Connect   float64 `json:"connect_ms" minimum:"0"`
	TLS       float64 `json:"tls_ms" minimum:"0"`
	FirstByte float64 `json:"first_byte_ms" minimum:"0" doc:"From the request's last byte to the answer's first."`
	Total     float64 `json:"total_ms" minimum:"0"`
}

// DeliveryError is the class of a failed attempt.
type DeliveryError string

// The closed list of classes.
const (
	DeliveryRefused  DeliveryError = "address_refused" // deliveries to the URL or to its address are not allowed
	DeliveryDNS      DeliveryError = "dns"
	DeliveryConnect  DeliveryError = "connect"
	DeliveryTLS      DeliveryError = "tls"
	DeliveryTimeout  DeliveryError = "timeout"
	DeliveryBroken   DeliveryError = "broken" // the connection ended before the answer did, or the answer was not HTTP
	DeliveryRejected DeliveryError = "status" // the answer was not 2xx
	DeliveryInternal DeliveryError = "internal"
)

// DeliveryID returns the id of the delivery of an execution.
func DeliveryID(id TraceID) string { return "msg_" + strings.TrimPrefix(string(id), tracePrefix) }

// Origin returns the scheme, host and port of a URL, which identify a server.
func Origin(s string) string {
	u, err := url.Parse(s)
	if err != nil {
		return ""
	}
	port := u.Port()
	if port == "" {
		port = map[string]string{"https": "443", "http": "80"}[u.Scheme]
	}
	return u.Scheme + "://" + net.JoinHostPort(strings.ToLower(u.Hostname()), port)
}

// NewDelivery returns the delivery of an execution that has ended, nil if it has no webhook.
func NewDelivery(m *Meta, at time.Time) *Delivery {
	if m.Mode != ModeAsync || m.WebhookURL == "" {
		return nil
	}
	at = at.UTC()
	return &Delivery{
		ID: DeliveryID(m.TraceID), TraceID: m.TraceID, Org: m.Org, Key: m.Key, URL: m.WebhookURL, Status: DeliveryPending,
		CreatedAt: at, NextAt: at, Attempts: []DeliveryAttempt{}, Traceparent: m.Traceparent,
	}
}

// NewEventDelivery returns the delivery of an event that is not about an execution. Its id is
// derived from the event's name, so that an event has at most one delivery.
func NewEventDelivery(name, org, key, url string, body any, at time.Time) (*Delivery, error) {
	text, err := json.Marshal(body)
	if err != nil {
		return nil, fmt.Errorf("make the webhook of %s: %w", name, err)
	}
	id, at := DerivedTraceID(name), at.UTC()
	return &Delivery{
		ID: DeliveryID(id), TraceID: id, Org: org, Key: key, URL: url, Status: DeliveryPending,
		CreatedAt: at, NextAt: at, Attempts: []DeliveryAttempt{}, Body: text,
	}, nil
}

// Event returns the event in the body of a delivery that is not about an execution, else "".
func (d *Delivery) Event() string {
	var body struct {
		Event string `json:"event"`
		Type  string `json:"type"` // in the form of OpenAI
	}
	if json.Unmarshal(d.Body, &body) != nil {
		return ""
	}
	return cmp.Or(body.Event, body.Type)
}

// Record adds an attempt.
func (d *Delivery) Record(a DeliveryAttempt) {
	d.Made++
	a.Number = d.Made
	d.Attempts = append(d.Attempts, a)
	d.Attempts = d.Attempts[max(0, len(d.Attempts)-MaxKeptAttempts):]
}

// Replay makes a delivery that has ended pending again.
func (d *Delivery) Replay(at time.Time) {
	d.Status, d.Reason, d.Before, d.NextAt = DeliveryPending, "", d.Made, at.UTC()
}

// DecodeDelivery decodes the stored delivery of execution id. A contradictory delivery is an error.
func DecodeDelivery(id TraceID, body []byte) (*Delivery, error) {
	d := new(Delivery)
	if err := json.Unmarshal(body, d); err != nil {
		return nil, fmt.Errorf("decode delivery of %s: %w", id, err)
	}
	known := slices.Contains(DeliveryStatuses(), d.Status)
	if d.TraceID != id || d.ID != DeliveryID(id) || d.Org == "" || d.Key == "" || d.URL == "" || !known {
		return nil, fmt.Errorf("decode delivery of %s: it has the status %q and the trace %q", id, d.Status, d.TraceID)
	}
	if d.Before < 0 || d.Before > d.Made || len(d.Attempts) > d.Made || len(d.Attempts) > MaxKeptAttempts {
		return nil, fmt.Errorf("decode delivery of %s: it has %d attempts of %d, %d of them before", id, len(d.Attempts),
			d.Made, d.Before)
	}
	return d, nil
}

// Replayed is the progress of a bulk replay.
type Replayed struct {
	Replayed int    // deliveries that are pending again
	Left     int    // failed deliveries that remain
	Next     string // where the next batch begins; empty if nothing is left
}

// The events of webhook bodies.
const (
	EventCompleted = "execution.completed"
	EventCancelled = "execution.cancelled"
	EventTest      = "webhook.test"
	EventSchedule  = "schedule.failed"
	EventBatch     = "batch.completed"
	// EventSessionPrefix begins the names of the events of agent sessions.
	EventSessionPrefix = "agent_session."
)

// WebhookBody returns the body of an execution's webhook. Its last results are left out, and then
// outputs are truncated, to keep it within most bytes; such a body has resultURL, the URL of the
// whole result. Other fields, above all metadata, may still exceed the limit.
func WebhookBody(r *Record, resultURL string, most int) ([]byte, error) {
	if r.Result == nil || r.CompletedAt == nil {
		return nil, fmt.Errorf("make the webhook of %s: it has not ended", r.TraceID)
	}
	event := EventCompleted
	if r.Status == StatusCancelled {
		event = EventCancelled
	}
	result := *r.Result
	body := struct {
		Event           string            `json:"event"`
		TraceID         TraceID           `json:"trace_id"`
		Timestamp       string            `json:"timestamp"`
		Status          Status            `json:"status"`
		Result          *Result           `json:"result"`
		OutputTruncated bool              `json:"output_truncated"`
		Metadata        map[string]string `json:"metadata,omitempty"`
		ResultURL       string            `json:"result_url,omitempty"` // where the whole result is
	}{
		Event: event, TraceID: r.TraceID, Timestamp: r.CompletedAt.UTC().Format(TimeLayout), Status: r.Status,
		Result: &result, OutputTruncated: r.OutputTruncated, Metadata: r.Metadata,
	}
	left := most - webhookRest
	left -= encodedLen(resultURL)
	for _, text := range []*string{result.Error, result.ErrorCode, result.ErrorMessage} {
		if text != nil {
			left -= encodedLen(*text)
		}
	}
	for name, value := range r.Metadata {
		left -= encodedLen(name) + encodedLen(value) + len(`"":"",`)
	}
	stdout, stderr := encodedLen(result.Stdout), encodedLen(result.Stderr)
	left = max(left, 0)
	if kept := fitDisplays(result.Results, left-stdout-stderr); kept < len(result.Results) {
		result.Results, result.ResultsTruncated, body.ResultURL = result.Results[:kept], true, resultURL
	}
	if stdout+stderr > left {
		// Each output gets half, plus whatever the other output leaves unused of its half.
		half := left / 2
		result.Stdout, result.StdoutTruncated = fit(result.Stdout, max(half, left-stderr), result.StdoutTruncated)
		result.Stderr, result.StderrTruncated = fit(result.Stderr, max(half, left-stdout), result.StderrTruncated)
		body.ResultURL = resultURL
	}
	var b bytes.Buffer
	enc := json.NewEncoder(&b)
	enc.SetEscapeHTML(false)
	if err := enc.Encode(body); err != nil {
		return nil, fmt.Errorf("make the webhook of %s: %w", r.TraceID, err)
	}
	return bytes.TrimSuffix(b.Bytes(), []byte("\n")), nil
}

// webhookRest bounds the size in bytes of a webhook's body without its outputs and other texts of
// variable length.
const webhookRest = 1 << 10

// encodedLen returns an upper bound for the length of s in JSON, without the quotes.
func encodedLen(s string) (n int) {
	for _, r := range s {
		n += encodedRune(r)
	}
	return n
}

func encodedRune(r rune) int {
	switch {
	case r < ' ', r == utf8.RuneError, r == '\u2028', r == '\u2029':
		return len(`\u0000`)
	case r == '"', r == '\\':
		return 2
	}
	return utf8.RuneLen(r)
}

// fitDisplays returns how many of the first displays take at most left bytes in JSON.
func fitDisplays(displays []Display, left int) int {
	for i := range displays {
		if left -= displays[i].Size() + len(","); left < 0 {
			return i
		}
	}
	return len(displays)
}

// fit returns the prefix of text that takes at most left bytes in JSON. It reports whether the text
// is truncated, now or before.
func fit(s string, left int, truncated bool) (string, bool) {
	for i, r := range s {
		if left -= encodedRune(r); left < 0 {
			return s[:i], true
		}
	}
	return s, truncated
}
