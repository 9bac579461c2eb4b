package send

import (
	"crypto/hmac"
	"crypto/sha256"
	"encoding/base64"
	"encoding/hex"
	"errors"
	"net/http"
	"strconv"
	"strings"
	"time"

	"github.com/bullpen-run/bullpen/proto"
)

// sign sets the headers that tell a receiver which delivery this is, when it was sent, and that it is ours.
//
// The hexadecimal signature is keyed with the characters of the present secret, and covers the body. That of Standard Webhooks is
// keyed with the bytes that a secret stands for, covers id and time as well, and is made with every secret that holds.
func sign(h http.Header, p *Post, at time.Time) error {
	if secret := p.Settings.Secret; secret != "" {
		signature := "sha256=" + hex.EncodeToString(authenticate([]byte(secret), p.Body))
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
		signed := authenticate(key, []byte(p.ID), []byte("."), []byte(timestamp), []byte("."), p.Body)
		signatures = append(signatures, "v1,"+base64.StdEncoding.EncodeToString(signed))
	}
	if len(signatures) > 0 {
		h.Set("Webhook-Signature", strings.Join(signatures, " "))
	}
	return nil
}

// authenticate gives the HMAC-SHA256 of the parts, one after the other.
func authenticate(key []byte, parts ...[]byte) []byte {
	mac := hmac.New(sha256.New, key)
	for _, part := range parts {
		mac.Write(part)
	}
	return mac.Sum(nil)
}
