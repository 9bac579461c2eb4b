package proto

import (
	"crypto/hmac"
	"crypto/rand"
	"crypto/sha256"
	"encoding/base64"
	"encoding/json"
	"fmt"
	"math"
	"net/url"
	"strings"
	"time"
	"unicode/utf8"
)

// The limits of a [Webhook].
const (
	MaxWebhookURLLen    = 2048 // characters
	MaxWebhookAttempts  = 20
	MaxWebhookTimeout   = Seconds(30 * time.Second)
	MinWebhookSecretLen = 16 // characters
	MaxWebhookSecretLen = 512
	DefaultOverlap      = Seconds(24 * time.Hour)
	webhookSecretPrefix = "whsec_"
	minWhsecBytes       = 24
	maxWhsecBytes       = 64
	defaultWebhookTries = 3
	defaultWebhookWait  = Seconds(15 * time.Second)
)

// Seconds is a duration that JSON encodes as a number of seconds.
type Seconds time.Duration

// MarshalJSON implements [json.Marshaler].
func (s Seconds) MarshalJSON() ([]byte, error) { return json.Marshal(time.Duration(s).Seconds()) }

// UnmarshalJSON parses a number of seconds, rounded to milliseconds.
func (s *Seconds) UnmarshalJSON(b []byte) error {
	var f float64
	if err := json.Unmarshal(b, &f); err != nil {
		return err
	}
	ms := math.Round(f * 1000)
	if math.Abs(ms) > float64(math.MaxInt64/time.Millisecond) {
		return fmt.Errorf("%s seconds are too many", b)
	}
	*s = Seconds(time.Duration(ms) * time.Millisecond)
	return nil
}

// Webhook are the settings for delivering the results of an API key's async executions.
type Webhook struct {
	// URL is the destination of executions that name no URL themselves; empty for none.
	URL string `json:"url,omitempty"`
	// Secret signs deliveries; empty for no signature.
	Secret string `json:"secret,omitempty"`
	// OldSecret is the previous secret, which signs too until OldUntil.
	OldSecret string    `json:"old_secret,omitempty"`
	OldUntil  time.Time `json:"old_until,omitzero"`
	// MaxAttempts is the largest number of attempts of a delivery.
	MaxAttempts int `json:"max_attempts"`
	// Waits are the pauses before the second attempt, the third and so on, each from the end of the
	// previous attempt. The last one repeats.
	Waits []Seconds `json:"waits"`
	// SignatureHeaders are the headers with the hexadecimal signature.
	SignatureHeaders []string `json:"signature_headers"`
	// Timeout bounds one attempt.
	Timeout   Seconds   `json:"timeout"`
	UpdatedAt time.Time `json:"updated_at,omitzero"`
}

// DefaultWebhook returns the settings of a key without settings: no URL, no signature, three
// attempts.
func DefaultWebhook() Webhook {
	return Webhook{
		MaxAttempts: defaultWebhookTries, Timeout: defaultWebhookWait,
		Waits:            []Seconds{Seconds(time.Second), Seconds(10 * time.Second), Seconds(time.Minute)},
		SignatureHeaders: []string{"X-Baponi-Signature", "X-Bullpen-Signature"},
	}
}

// DurableWaits returns the pauses that the Standard Webhooks specification recommends: ten attempts
// over three days.
func DurableWaits() []Seconds {
	const hour = Seconds(time.Hour)
	return []Seconds{
		Seconds(5 * time.Second), Seconds(5 * time.Minute), Seconds(30 * time.Minute), 2 * hour, 5 * hour, 10 * hour,
		14 * hour, 20 * hour, 24 * hour,
	}
}

// Wait returns the pause after attempt n, from 1.
func (w *Webhook) Wait(n int) time.Duration { return time.Duration(w.Waits[min(n, len(w.Waits))-1]) }

// Secrets returns the secrets that sign at a time, the present one first.
func (w *Webhook) Secrets(at time.Time) []string {
	var secrets []string
	if w.Secret != "" {
		secrets = append(secrets, w.Secret)
	}
	if w.OldSecret != "" && at.Before(w.OldUntil) {
		secrets = append(secrets, w.OldSecret)
	}
	return secrets
}

// Rotate replaces the current secret, which keeps signing until the given time. Only one old secret
// signs at a time.
func (w *Webhook) Rotate(secret string, until time.Time) {
	if w.Secret != "" && w.Secret != secret {
		w.OldSecret, w.OldUntil = w.Secret, until.UTC()
	}
	w.Secret = secret
}

// NewWebhookSecret returns a secret of 32 random bytes.
func NewWebhookSecret() string {
	var b [32]byte
	_, _ = rand.Read(b[:]) // crypto/rand.Read never returns an error since Go 1.24
	return webhookSecretPrefix + base64.StdEncoding.EncodeToString(b[:])
}

// WebhookSecretHint returns the displayable part of a secret: the last characters of a long one,
// nothing of a short one.
func WebhookSecretHint(secret string) string {
	const tail = 4
	r := []rune(secret)
	if len(r) < 2*MinWebhookSecretLen {
		return "…"
	}
	return "…" + string(r[len(r)-tail:])
}

// CheckWebhookSecret checks a secret that a client chose. Its error is a [*FieldError] for the
// field "secret".
func CheckWebhookSecret(s string) error {
	if n := utf8.RuneCountInString(s); n < MinWebhookSecretLen || n > MaxWebhookSecretLen {
		return FieldErrorf("secret", "must be %d to %d characters", MinWebhookSecretLen, MaxWebhookSecretLen)
	}
	if _, ok := WebhookKey(s); !ok {
		return FieldErrorf("secret", "begins with %s and must go on with the base64 of %d to %d bytes", webhookSecretPrefix,
			minWhsecBytes, maxWhsecBytes)
	}
	return nil
}

// WebhookKey returns the key of the Standard Webhooks signature for a secret: the bytes after
// "whsec_" in base64, or otherwise the secret itself. ok is false if the base64 does not decode to
// 24 to 64 bytes.
func WebhookKey(secret string) (key []byte, ok bool) {
	encoded, has := strings.CutPrefix(secret, webhookSecretPrefix)
	if !has {
		return []byte(secret), true
	}
	key, err := base64.StdEncoding.DecodeString(encoded)
	// The decoder ignores line breaks, but the decoders of receivers may not.
	return key, err == nil && len(key) >= minWhsecBytes && len(key) <= maxWhsecBytes &&
		!strings.ContainsAny(encoded, "\r\n")
}

// WebhookSignature returns the signature of Standard Webhooks, version 1, for a delivery's id, its time
// in seconds since 1970 and its body. key is that of [WebhookKey].
func WebhookSignature(key []byte, id, timestamp string, body []byte) string {
	mac := hmac.New(sha256.New, key)
	_, _ = fmt.Fprintf(mac, "%s.%s.%s", id, timestamp, body) // never fails
	return "v1," + base64.StdEncoding.EncodeToString(mac.Sum(nil))
}

// Endpoint is a URL at which an organisation's deliveries fail.
type Endpoint struct {
	URL          string    `json:"url"`
	FailingSince time.Time `json:"failing_since"`        // the first failure after the last success
	DisabledAt   time.Time `json:"disabled_at,omitzero"` // zero while deliveries go on
	Reason       string    `json:"reason,omitempty"`     // why it was disabled
}

// Disabled reports whether deliveries to the URL have stopped.
func (e *Endpoint) Disabled() bool { return !e.DisabledAt.IsZero() }

// CheckWebhookURL checks the form of a webhook URL. Its error is a [*FieldError] for that field.
func CheckWebhookURL(field, s string) error {
	if utf8.RuneCountInString(s) > MaxWebhookURLLen {
		return FieldErrorf(field, "must be at most %d characters", MaxWebhookURLLen)
	}
	for _, c := range s {
		if c <= ' ' || (c >= 0x7f && c <= 0xa0) {
			return FieldErrorf(field, "must not contain spaces or control characters")
		}
	}
	u, err := url.Parse(s)
	switch {
	case err != nil, u.Scheme != "https" && u.Scheme != "http", u.Hostname() == "":
		return FieldErrorf(field, "must be an absolute https URL with a host")
	case u.User != nil:
		return FieldErrorf(field, "must not contain a user name or password")
	}
	return nil
}
