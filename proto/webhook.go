package proto

import (
	"crypto/rand"
	"encoding/base64"
	"encoding/json"
	"fmt"
	"math"
	"net/url"
	"strings"
	"time"
	"unicode/utf8"
)

// The limits of what a [Webhook] may say.
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

// Seconds is a duration whose JSON form is a number of seconds.
type Seconds time.Duration

// MarshalJSON gives the number of seconds.
func (s Seconds) MarshalJSON() ([]byte, error) { return json.Marshal(time.Duration(s).Seconds()) }

// UnmarshalJSON reads a number of seconds, to the millisecond. One that no duration can hold is an error.
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

// Webhook is where the results of an API key's asynchronous executions go, and how they are sent there.
type Webhook struct {
	// URL is where executions deliver that name no URL themselves; empty for nowhere.
	URL string `json:"url,omitempty"`
	// Secret is what deliveries are signed with; empty for no signature.
	Secret string `json:"secret,omitempty"`
	// OldSecret is the one before, which signs too until OldUntil.
	OldSecret string    `json:"old_secret,omitempty"`
	OldUntil  time.Time `json:"old_until,omitzero"`
	// MaxAttempts is how often a delivery is tried.
	MaxAttempts int `json:"max_attempts"`
	// Waits are the pauses before the second attempt, the third and so on, each after the end of the one before. The last is also that
	// before all further ones.
	Waits []Seconds `json:"waits"`
	// SignatureHeaders are the headers with the hexadecimal signature.
	SignatureHeaders []string `json:"signature_headers"`
	// Timeout is how long one attempt may take.
	Timeout   Seconds   `json:"timeout"`
	UpdatedAt time.Time `json:"updated_at,omitzero"`
}

// DefaultWebhook is what holds for a key that nothing was set for: no URL, no signature, three attempts.
func DefaultWebhook() Webhook {
	return Webhook{
		MaxAttempts: defaultWebhookTries, Timeout: defaultWebhookWait,
		Waits:            []Seconds{Seconds(time.Second), Seconds(10 * time.Second), Seconds(time.Minute)},
		SignatureHeaders: []string{"X-Baponi-Signature", "X-Bullpen-Signature"},
	}
}

// DurableWaits returns the pauses that the Standard Webhooks specification recommends: ten attempts over three days.
func DurableWaits() []Seconds {
	const hour = Seconds(time.Hour)
	return []Seconds{
		Seconds(5 * time.Second), Seconds(5 * time.Minute), Seconds(30 * time.Minute), 2 * hour, 5 * hour, 10 * hour, 14 * hour, 20 * hour, 24 * hour,
	}
}

// Wait is the pause after attempt n of a ladder, from 1.
func (w *Webhook) Wait(n int) time.Duration { return time.Duration(w.Waits[min(n, len(w.Waits))-1]) }

// Secrets gives the secrets that sign at a time, the present one first.
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

// Rotate puts secret in the place of the present one, which signs too until the time given. There is one such at a time: the one before
// it signs no more.
func (w *Webhook) Rotate(secret string, until time.Time) {
	if w.Secret != "" && w.Secret != secret {
		w.OldSecret, w.OldUntil = w.Secret, until.UTC()
	}
	w.Secret = secret
}

// NewWebhookSecret makes a secret of 32 random bytes.
func NewWebhookSecret() string {
	var b [32]byte
	_, _ = rand.Read(b[:]) // crypto/rand.Read never returns an error since Go 1.24
	return webhookSecretPrefix + base64.StdEncoding.EncodeToString(b[:])
}

// WebhookSecretHint shortens a secret to what may be shown: its last characters where it is long, and nothing of a short one.
func WebhookSecretHint(secret string) string {
	const tail = 4
	r := []rune(secret)
	if len(r) < 2*MinWebhookSecretLen {
		return "…"
	}
	return "…" + string(r[len(r)-tail:])
}

// CheckWebhookSecret checks a secret that somebody chose. What is wrong with it is a [*FieldError] for the field "secret".
func CheckWebhookSecret(s string) error {
	if n := utf8.RuneCountInString(s); n < MinWebhookSecretLen || n > MaxWebhookSecretLen {
		return FieldErrorf("secret", "must be %d to %d characters", MinWebhookSecretLen, MaxWebhookSecretLen)
	}
	if _, ok := WebhookKey(s); !ok {
		return FieldErrorf("secret", "begins with %s and must go on with the base64 of %d to %d bytes", webhookSecretPrefix, minWhsecBytes, maxWhsecBytes)
	}
	return nil
}

// WebhookKey gives the bytes that a secret keys the Standard Webhooks signature with: those that follow "whsec_" in base64, or the
// secret's own; ok is false where that is not base64 of 24 to 64 bytes.
func WebhookKey(secret string) (key []byte, ok bool) {
	encoded, has := strings.CutPrefix(secret, webhookSecretPrefix)
	if !has {
		return []byte(secret), true
	}
	key, err := base64.StdEncoding.DecodeString(encoded)
	// The decoder passes over line breaks, which others do not.
	return key, err == nil && len(key) >= minWhsecBytes && len(key) <= maxWhsecBytes && !strings.ContainsAny(encoded, "\r\n")
}

// Endpoint is a URL that an organisation's deliveries fail at.
type Endpoint struct {
	URL          string    `json:"url"`
	FailingSince time.Time `json:"failing_since"`        // the first failure after the last success
	DisabledAt   time.Time `json:"disabled_at,omitzero"` // zero where it is still delivered to
	Reason       string    `json:"reason,omitempty"`     // why it was disabled
}

// Disabled reports whether nothing is delivered there.
func (e *Endpoint) Disabled() bool { return !e.DisabledAt.IsZero() }

// CheckWebhookURL checks the form of a URL that deliveries are to go to. What is wrong with it is a [*FieldError] for that field.
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
