package proto

import (
	"crypto/rand"
	"encoding/base64"
	"encoding/json"
	"fmt"
	"math"
	"net/textproto"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"time"
	"unicode/utf8"
)

// The limits of what a [Webhook] may say.
const (
	MaxWebhookURLLen     = 2048 // characters
	MaxWebhookAttempts   = 20
	MaxWebhookWait       = Seconds(7 * 24 * time.Hour)
	MaxWebhookTimeout    = Seconds(30 * time.Second)
	MinWebhookTimeout    = Seconds(100 * time.Millisecond)
	MinWebhookSecretLen  = 16 // characters
	MaxWebhookSecretLen  = 512
	MaxSignatureHeaders  = 4
	MaxWebhookOverlap    = MaxWebhookWait // during which two secrets sign
	DefaultOverlap       = Seconds(24 * time.Hour)
	maxHeaderNameLen     = 64
	webhookSecretPrefix  = "whsec_"
	minWhsecBytes        = 24
	maxWhsecBytes        = 64
	defaultWebhookTries  = 3
	defaultWebhookWait   = Seconds(15 * time.Second)
	durableLadder        = "durable"
	signatureHeadersName = "signature_headers"
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

// readSeconds reads a number of seconds from least to most.
func readSeconds(field string, raw []byte, least, most Seconds) (Seconds, error) {
	f, err := decodeFloat(field, raw)
	if err != nil || kindOf(raw) == 'n' {
		return 0, FieldErrorf(field, "must be a number of seconds")
	}
	if from, to := time.Duration(least).Seconds(), time.Duration(most).Seconds(); f < from || f > to {
		return 0, FieldErrorf(field, "must be %s to %s seconds", plain(from), plain(to))
	}
	var s Seconds
	err = s.UnmarshalJSON(raw)
	return s, err
}

func plain(f float64) string { return strconv.FormatFloat(f, 'f', -1, 64) }

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

// durableWaits is the schedule that the Standard Webhooks specification recommends: ten attempts over three days.
var durableWaits = [...]time.Duration{
	5 * time.Second, 5 * time.Minute, 30 * time.Minute, 2 * time.Hour, 5 * time.Hour, 10 * time.Hour, 14 * time.Hour, 20 * time.Hour, 24 * time.Hour,
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

// DecodeWebhook reads the JSON form of webhook settings over base: what it does not say is as there. What is wrong with it is a
// [*FieldError]. secret tells whether it names a secret. Whether the URL may be delivered to is not checked here.
func DecodeWebhook(body []byte, base Webhook) (w Webhook, secret bool, err error) {
	names := []string{"url", "secret", "max_attempts", "waits", signatureHeadersName, "timeout"}
	members, err := decodeObject(body, names...)
	if err == nil {
		err = onlyKnown(body, names)
	}
	if err != nil {
		return Webhook{}, false, err
	}
	w = base
	w.Waits, w.SignatureHeaders = slices.Clone(base.Waits), slices.Clone(base.SignatureHeaders)
	for _, m := range []struct {
		name string
		read func(raw []byte) error
	}{
		{"url", w.readURL},
		{"secret", w.readSecret},
		{"waits", w.readWaits}, // before the attempts, whose number a named ladder brings along
		{"max_attempts", w.readMaxAttempts},
		{signatureHeadersName, w.readSignatureHeaders},
		{"timeout", w.readTimeout},
	} {
		if raw := members[m.name]; raw != nil {
			if err := m.read(raw); err != nil {
				return Webhook{}, false, err
			}
		}
	}
	return w, members["secret"] != nil, nil
}

// Rotation is a request to put another secret in the place of the present one.
type Rotation struct {
	Secret  string        // empty for one that is made
	Overlap time.Duration // how long the present one goes on signing
}

// DecodeRotation reads the JSON form of a rotation. What is wrong with it is a [*FieldError].
func DecodeRotation(body []byte) (Rotation, error) {
	names := []string{"secret", "overlap"}
	members, err := decodeObject(body, names...)
	if err == nil {
		err = onlyKnown(body, names)
	}
	if err != nil {
		return Rotation{}, err
	}
	overlap := DefaultOverlap
	if raw := members["overlap"]; raw != nil {
		if overlap, err = readSeconds("overlap", raw, 0, MaxWebhookOverlap); err != nil {
			return Rotation{}, err
		}
	}
	var w Webhook
	if raw := members["secret"]; raw != nil {
		if err := w.readSecret(raw); err != nil {
			return Rotation{}, err
		}
	}
	return Rotation{Secret: w.Secret, Overlap: time.Duration(overlap)}, nil
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

// DecodeEndpointRequest reads a JSON object that names the URL of an endpoint. What is wrong with it is a [*FieldError].
func DecodeEndpointRequest(body []byte) (url string, err error) {
	names := []string{"url"}
	members, err := decodeObject(body, names...)
	if err == nil {
		err = onlyKnown(body, names)
	}
	if err != nil {
		return "", err
	}
	var w Webhook
	if members["url"] == nil {
		return "", FieldErrorf("url", "must be given")
	}
	err = w.readURL(members["url"])
	return w.URL, err
}

func (w *Webhook) readURL(raw []byte) (err error) {
	if w.URL, err = decodeString("url", raw); err != nil {
		return err
	}
	return CheckWebhookURL("url", w.URL)
}

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

func (w *Webhook) readSecret(raw []byte) error {
	secret, err := decodeString("secret", raw)
	if err != nil {
		return err
	}
	w.Secret = secret
	return CheckWebhookSecret(secret)
}

func (w *Webhook) readMaxAttempts(raw []byte) error {
	if err := decodeWhole("max_attempts", raw, &w.MaxAttempts); err != nil {
		return err
	}
	if w.MaxAttempts < 1 || w.MaxAttempts > MaxWebhookAttempts {
		return FieldErrorf("max_attempts", "must be 1 to %d", MaxWebhookAttempts)
	}
	return nil
}

func (w *Webhook) readWaits(raw []byte) error {
	if kindOf(raw) == '"' {
		name, err := decodeString("waits", raw)
		if err != nil || name != durableLadder {
			return FieldErrorf("waits", `must be an array of seconds, or "%s"`, durableLadder)
		}
		w.Waits = nil
		for _, d := range durableWaits {
			w.Waits = append(w.Waits, Seconds(d))
		}
		w.MaxAttempts = len(w.Waits) + 1
		return nil
	}
	if kindOf(raw) != '[' {
		return FieldErrorf("waits", `must be an array of seconds, or "%s"`, durableLadder)
	}
	waits := []Seconds{}
	err := eachElement(raw, func(raw []byte) error {
		wait, err := readSeconds("waits", raw, 0, MaxWebhookWait)
		if waits = append(waits, wait); err == nil && len(waits) >= MaxWebhookAttempts {
			err = errWaits()
		}
		return err
	})
	if err != nil {
		return err
	}
	if len(waits) == 0 {
		return errWaits()
	}
	w.Waits = waits
	return nil
}

func errWaits() error { return FieldErrorf("waits", "must have 1 to %d entries", MaxWebhookAttempts-1) }

func (w *Webhook) readTimeout(raw []byte) (err error) {
	w.Timeout, err = readSeconds("timeout", raw, MinWebhookTimeout, MaxWebhookTimeout)
	return err
}

func (w *Webhook) readSignatureHeaders(raw []byte) error {
	if kindOf(raw) != '[' {
		return FieldErrorf(signatureHeadersName, "must be an array of strings")
	}
	w.SignatureHeaders = []string{}
	return eachElement(raw, func(raw []byte) error {
		name, err := decodeString(signatureHeadersName, raw)
		if err != nil {
			return err
		}
		if !signatureHeader(name) {
			return FieldErrorf(signatureHeadersName, "must be names such as X-Signature: 1 to %d letters, digits and hyphens that begin with X- or end in Signature, and mean nothing else on the way", maxHeaderNameLen)
		}
		if name = textproto.CanonicalMIMEHeaderKey(name); slices.Contains(w.SignatureHeaders, name) {
			return FieldErrorf(signatureHeadersName, "must name %s only once", name)
		}
		w.SignatureHeaders = append(w.SignatureHeaders, name)
		if len(w.SignatureHeaders) > MaxSignatureHeaders {
			return FieldErrorf(signatureHeadersName, "must have at most %d entries", MaxSignatureHeaders)
		}
		return nil
	})
}

// signatureHeader reports whether a header of that name can carry a signature: no tenant may set one that means something to servers
// and proxies on the way.
func signatureHeader(name string) bool {
	for _, c := range []byte(name) {
		if c != '-' && (c < '0' || c > '9') && (c < 'A' || c > 'Z') && (c < 'a' || c > 'z') {
			return false
		}
	}
	lower := strings.ToLower(name)
	for _, prefix := range []string{"webhook-", "x-forwarded", "x-original-", "x-rewrite-", "x-real-", "x-http-method", "x-method-"} {
		if strings.HasPrefix(lower, prefix) { // the first are those of the Standard Webhooks signature
			return false
		}
	}
	return len(name) <= maxHeaderNameLen && (len(lower) > 2 && strings.HasPrefix(lower, "x-") || strings.HasSuffix(lower, "signature"))
}
