package main

import (
	"crypto/hmac"
	"crypto/sha256"
	"encoding/base64"
	"encoding/hex"
	"fmt"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/bullpen-run/bullpen/proto"
)

// webhookTolerance is how far the time of a webhook may be from ours: an older one may be an old one that somebody kept.
const webhookTolerance = 5 * time.Minute

// verifyWebhook tells what is wrong with the signatures of a webhook, of which each has to be by one of the secrets; nothing where it
// is verified. The headers are those with the hexadecimal signature.
func verifyWebhook(h http.Header, body []byte, secrets, headers []string, now time.Time) (problems []string) {
	if len(secrets) == 0 {
		return []string{"no secret is known here"}
	}
	const standard = "Webhook-Signature"
	problem := func(name, what string) { problems = append(problems, name+": "+what) }
	if what := verifyStandard(h, h.Get(standard), body, secrets, now); what != "" {
		problem(standard, what)
	}
	for _, name := range headers {
		if what := verifyHex(h.Get(name), body, secrets); what != "" {
			problem(name, what)
		}
	}
	return problems
}

const (
	unsigned  = "there is none"
	unmatched = "it does not match: the secret is another, or what was signed was changed"
)

// verifyStandard tells what is wrong with a signature of Standard Webhooks.
func verifyStandard(h http.Header, signatures string, body []byte, secrets []string, now time.Time) string {
	if signatures == "" {
		return unsigned
	}
	id, timestamp := h.Get("Webhook-Id"), h.Get("Webhook-Timestamp")
	seconds, err := strconv.ParseInt(timestamp, 10, 64)
	if id == "" || err != nil {
		return "it needs a webhook-id, and a webhook-timestamp in seconds"
	}
	matches := func(secret string) bool {
		key, ok := proto.WebhookKey(secret)
		want := "v1," + base64.StdEncoding.EncodeToString(authenticate(key, id, ".", timestamp, ".", string(body)))
		return ok && slices.ContainsFunc(strings.Fields(signatures), func(s string) bool { return hmac.Equal([]byte(s), []byte(want)) })
	}
	if !slices.ContainsFunc(secrets, matches) {
		return unmatched
	}
	if age := now.Sub(time.Unix(seconds, 0)); age.Abs() > webhookTolerance {
		return fmt.Sprintf("it was made at %s, more than %s from now", time.Unix(seconds, 0).UTC().Format(timeLayout), webhookTolerance)
	}
	return ""
}

// verifyHex tells what is wrong with a hexadecimal signature.
func verifyHex(signature string, body []byte, secrets []string) string {
	if signature == "" {
		return unsigned
	}
	for _, secret := range secrets {
		want := "sha256=" + hex.EncodeToString(authenticate([]byte(secret), string(body)))
		if hmac.Equal([]byte(signature), []byte(want)) {
			return ""
		}
	}
	return unmatched
}

// authenticate gives the HMAC-SHA256 of the parts, one after the other.
func authenticate(key []byte, parts ...string) []byte {
	mac := hmac.New(sha256.New, key)
	for _, part := range parts {
		mac.Write([]byte(part))
	}
	return mac.Sum(nil)
}
