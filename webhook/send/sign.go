package send

import (
	"crypto/hmac"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/bullpen-run/bullpen/proto"
)

// signatureHeader has the Standard Webhooks signatures.
const signatureHeader = "Webhook-Signature"

// sign sets the headers with the id, the time and the signatures of a delivery.
//
// The hexadecimal signature covers the body and is keyed with the characters of the current secret.
// The Standard Webhooks signatures cover id, time and body. There is one for each valid secret,
// keyed with the decoded secret.
func sign(h http.Header, p *Post, at time.Time) error {
	if secret := p.Settings.Secret; secret != "" {
		mac := hmac.New(sha256.New, []byte(secret))
		mac.Write(p.Body)
		signature := "sha256=" + hex.EncodeToString(mac.Sum(nil))
		for _, name := range p.Settings.SignatureHeaders {
			h.Set(name, signature)
		}
	}
	timestamp := strconv.FormatInt(at.Unix(), 10)
	h.Set("Webhook-Id", p.ID)
	h.Set("Webhook-Timestamp", timestamp)
	var signatures []string
	for _, secret := range p.Settings.Secrets(at) {
		key, ok := proto.WebhookKey(secret)
		if !ok {
			return errors.New("the secret of the API key's webhook cannot be used: set it anew")
		}
		signatures = append(signatures, proto.WebhookSignature(key, p.ID, timestamp, p.Body))
	}
	if len(signatures) > 0 {
		h.Set(signatureHeader, strings.Join(signatures, " "))
	}
	return nil
}

// redacted replaces a signature.
const redacted = "[redacted]"

// redact returns the headers of a request without its signatures.
func redact(h http.Header, settings *proto.Webhook) map[string]string {
	headers := map[string]string{}
	for name, values := range h {
		switch {
		case len(values) == 0: // it is not sent
		case name == signatureHeader || slices.ContainsFunc(settings.SignatureHeaders, func(of string) bool {
			return http.CanonicalHeaderKey(of) == name
		}):
			headers[name] = redacted
		default:
			headers[name] = values[0]
		}
	}
	return headers
}
