package proto

import (
	"encoding/base64"
	"slices"
	"strings"
	"testing"
	"time"
)

// TestWebhookSecrets checks every limit and the values just beyond it.
func TestWebhookSecrets(t *testing.T) {
	made := map[string]bool{}
	for range 100 {
		s := NewWebhookSecret()
		key, ok := WebhookKey(s)
		if CheckWebhookSecret(s) != nil || !ok || len(key) != 32 || made[s] {
			t.Errorf("%s has %d bytes of key", s, len(key))
		}
		made[s] = true
		if hint := WebhookSecretHint(s); len([]rune(hint)) != 5 || !strings.HasSuffix(s, strings.TrimPrefix(hint, "…")) {
			t.Errorf("hint %s", hint)
		}
	}
	if hint := WebhookSecretHint("correct horse battery"); hint != "…" {
		t.Errorf("the hint of a short one is %q", hint)
	}
	// A receiver uses the bytes after the prefix, or the whole secret without one.
	for secret, want := range map[string]string{
		"whsec_" + base64.StdEncoding.EncodeToString([]byte("123456789012345678901234")): "123456789012345678901234",
		"correct horse battery": "correct horse battery",
		"Whsec_AAAA":            "Whsec_AAAA",
	} {
		if key, ok := WebhookKey(secret); !ok || string(key) != want {
			t.Errorf("%s: %q, %v", secret, key, ok)
		}
	}
}

func TestRotation(t *testing.T) {
	at := time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)
	var w Webhook
	is := func(when string, at time.Time, want ...string) {
		t.Helper()
		if got := w.Secrets(at); !slices.Equal(got, want) {
			t.Errorf("%s: %q sign, want %q", when, got, want)
		}
	}
	is("without one", at)
	w.Rotate("a", at.Add(time.Hour))
	is("the first", at, "a")
	w.Rotate("b", at.Add(time.Hour))
	is("rotated", at, "b", "a")
	is("just before the end", at.Add(time.Hour-1), "b", "a")
	is("at the end", at.Add(time.Hour), "b")
	w.Rotate("b", at.Add(2*time.Hour))
	is("to the same one", at, "b", "a")
	is("to the same one, at the end", at.Add(time.Hour), "b")
	w.Rotate("c", at.Add(time.Minute))
	is("again", at, "c", "b")
	w.Rotate("b", at)
	is("back, at once", at, "b")
}
