package main

import (
	"crypto/hmac"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/bullpen-run/bullpen/proto"
)

// webhookTolerance is the allowed age of a webhook, against replays.
const webhookTolerance = 5 * time.Minute

// verifyWebhook returns what is wrong with the signatures of a webhook, none if all are valid.
// Each must be made with one of the secrets. headers names the headers with a hexadecimal
// signature.
func verifyWebhook(h http.Header, body []byte, secrets, headers []string, now time.Time) (problems []string) {
	if len(secrets) == 0 {
		return []string{"no secret is configured here"}
	}
	const standard = "Webhook-Signature"
	report := func(name, problem string) {
		if problem != "" {
			problems = append(problems, name+": "+problem)
		}
	}
	report(standard, verifyStandard(h, h.Get(standard), body, secrets, now))
	for _, name := range headers {
		report(name, verifyHex(h.Get(name), body, secrets))
	}
	return problems
}

const (
	noSignature = "missing"
	mismatch    = "does not match: the secret differs, or the webhook was changed"
)

// verifyStandard returns what is wrong with a signature in the format of Standard Webhooks.
func verifyStandard(h http.Header, signatures string, body []byte, secrets []string, now time.Time) string {
	if signatures == "" {
		return noSignature
	}
	id, timestamp := h.Get("Webhook-Id"), h.Get("Webhook-Timestamp")
	seconds, err := strconv.ParseInt(timestamp, 10, 64)
	if id == "" || err != nil {
		return "needs a webhook-id header, and a webhook-timestamp header in seconds"
	}
	matches := func(secret string) bool {
		key, ok := proto.WebhookKey(secret)
		want := proto.WebhookSignature(key, id, timestamp, body)
		return ok && slices.ContainsFunc(strings.Fields(signatures), func(s string) bool {
			return hmac.Equal([]byte(s), []byte(want))
		})
	}
	if !slices.ContainsFunc(secrets, matches) {
		return mismatch
	}
	if age := now.Sub(time.Unix(seconds, 0)); age.Abs() > webhookTolerance {
		return fmt.Sprintf("made at %s, more than %s from now", time.Unix(seconds, 0).UTC().Format(timeLayout),
			webhookTolerance)
	}
	return ""
}

// verifyHex returns what is wrong with a hexadecimal signature.
func verifyHex(signature string, body []byte, secrets []string) string {
	if signature == "" {
		return noSignature
	}
	for _, secret := range secrets {
		want := "sha256=" + hex.EncodeToString(sign([]byte(secret), string(body)))
		if hmac.Equal([]byte(signature), []byte(want)) {
			return ""
		}
	}
	return mismatch
}

// sign returns the HMAC-SHA256 of the concatenated parts.
func sign(key []byte, parts ...string) []byte {
	mac := hmac.New(sha256.New, key)
	for _, part := range parts {
		mac.Write([]byte(part))
	}
	return mac.Sum(nil)
}
