package proto

import (
	"bytes"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
)

func decodeWebhook(t *testing.T, body string, base Webhook) (Webhook, bool) {
	t.Helper()
	w, secret, err := DecodeWebhook([]byte(body), base)
	if err != nil {
		t.Fatalf("%s: %v", body, err)
	}
	return w, secret
}

func TestWebhookIsDecodedOverItsBase(t *testing.T) {
	const sixteen = "0123456789abcdef"
	got, secret := decodeWebhook(t, `{"url":"https://example.com/a?b=c","secret":"`+sixteen+`","max_attempts":5,"waits":[0.25,60],`+
		`"signature_headers":["x-a","Signature"],"timeout":2.5}`, DefaultWebhook())
	want := Webhook{
		URL: "https://example.com/a?b=c", Secret: sixteen, MaxAttempts: 5, Waits: []Seconds{Seconds(250 * time.Millisecond), Seconds(time.Minute)},
		SignatureHeaders: []string{"X-A", "Signature"}, Timeout: Seconds(2500 * time.Millisecond),
	}
	if d := cmp.Diff(want, got); d != "" || !secret {
		t.Errorf("secret %v, %s", secret, d)
	}
	// Whatever it does not say is as in the base, which nothing changes.
	base := got
	base.OldSecret, base.OldUntil = "old", time.Unix(1, 0)
	for _, body := range []string{
		`{}`, `{"url":null,"secret":null,"max_attempts":null,"waits":null,"signature_headers":null,"timeout":null}`,
	} {
		same, secret := decodeWebhook(t, body, base)
		if d := cmp.Diff(base, same); d != "" || secret {
			t.Errorf("%s: secret %v, %s", body, secret, d)
		}
		same.Waits[0], same.SignatureHeaders[0] = 7, "changed"
		if base.Waits[0] == 7 || base.SignatureHeaders[0] == "changed" {
			t.Errorf("%s: the base was changed", body)
		}
	}
	// What is stored is read as the same.
	stored, err := json.Marshal(base)
	if err != nil {
		t.Fatal(err)
	}
	var back Webhook
	if err := json.Unmarshal(stored, &back); err != nil {
		t.Fatal(err)
	}
	if d := cmp.Diff(base, back, cmp.Comparer(func(a, b time.Time) bool { return a.Equal(b) })); d != "" {
		t.Error(d)
	}
	if !bytes.Contains(stored, []byte(`"waits":[0.25,60]`)) {
		t.Errorf("not in seconds: %s", stored)
	}
}

func TestDurableLadder(t *testing.T) {
	w, _ := decodeWebhook(t, `{"waits":"durable"}`, DefaultWebhook())
	var total time.Duration
	for n := 1; n < w.MaxAttempts; n++ {
		total += w.Wait(n)
	}
	if w.MaxAttempts != 10 || w.Wait(1) != 5*time.Second || total < 72*time.Hour || total > 80*time.Hour {
		t.Errorf("%d attempts over %v: %v", w.MaxAttempts, total, w.Waits)
	}
	for _, body := range []string{`{"waits":"durable","max_attempts":4}`, `{"max_attempts":4,"waits":"durable"}`} {
		if w, _ := decodeWebhook(t, body, DefaultWebhook()); w.MaxAttempts != 4 || len(w.Waits) != 9 {
			t.Errorf("%s: %+v", body, w)
		}
	}
}

func TestWaits(t *testing.T) {
	w, _ := decodeWebhook(t, `{"waits":[1,2,3],"max_attempts":10}`, DefaultWebhook())
	for n, want := range map[int]string{1: "1s", 2: "2s", 3: "3s", 4: "3s", 9: "3s"} {
		if got := w.Wait(n); got.String() != want {
			t.Errorf("after attempt %d: %v", n, got)
		}
	}
}

// TestWebhookLimits has every bound, and what is just beyond it.
func TestWebhookLimits(t *testing.T) {
	whsec := func(n int) string { return `"whsec_` + base64.StdEncoding.EncodeToString(make([]byte, n)) + `"` }
	list := func(n int, format string) string {
		items := make([]string, n)
		for i := range items {
			items[i] = strings.ReplaceAll(format, "#", fmt.Sprint(i))
		}
		return "[" + strings.Join(items, ",") + "]"
	}
	type bound struct {
		value string
		ok    bool
	}
	for field, bounds := range map[string][]bound{
		"url": {
			{`"https://example.com"`, true},
			{`"http://example.com/"`, true}, // a setting of the server decides
			{`"https://example.com/` + strings.Repeat("é", 2048-20) + `"`, true},
			{`"https://example.com/` + strings.Repeat("é", 2049-20) + `"`, false},
			{`""`, false},
			{`"/x"`, false},
			{`"//example.com/"`, false},
			{`"https:///x"`, false},
			{`"https://:443/"`, false},
			{`"https:example.com"`, false},
			{`"ftp://example.com/"`, false},
			{`"https://user@example.com/"`, false},
			{`"https://u:p@example.com/"`, false},
			{`"https://example.com/\r\nX: 1"`, false},
			{`"https://example.com/ x"`, false},
			{`"https://example.com/\u007f"`, false},
			{`"https://example.com/\u0085"`, false},
			{`"https://example.com/\u00a0"`, false},
			{`"https://example.com/%zz"`, false},
			{`1`, false},
			{`["https://example.com"]`, false},
		},
		"secret": {
			{`"` + strings.Repeat("é", 16) + `"`, true},
			{`"` + strings.Repeat("é", 15) + `"`, false},
			{`"` + strings.Repeat("é", 512) + `"`, true},
			{`"` + strings.Repeat("é", 513) + `"`, false},
			{whsec(24), true},
			{whsec(23), false},
			{whsec(64), true},
			{whsec(65), false},
			{`"whsec_` + strings.Repeat("-", 32) + `"`, false}, // base64url
			{`"whsec_` + strings.Repeat("A", 31) + `"`, false},
			{`"whsec_` + strings.Repeat("A", 16) + `\n` + strings.Repeat("A", 16) + `"`, false},
			{`"whsec_"`, false},
			{`""`, false},
			{`0`, false},
		},
		"max_attempts": {{`1`, true}, {`0`, false}, {`-1`, false}, {`20`, true}, {`21`, false}, {`1.5`, false}, {`"3"`, false}, {`1e99`, false}},
		"waits": {
			{`[0]`, true},
			{`[]`, false},
			{list(19, "1"), true},
			{list(20, "1"), false},
			{`[604800]`, true},
			{`[604800.001]`, false},
			{`[-0.001]`, false},
			{`[1e13]`, false},
			{`[1e300]`, false},
			{`[1e999]`, false},
			{`[null]`, false},
			{`[1,null]`, false},
			{`["1"]`, false},
			{`[[1]]`, false},
			{`60`, false},
			{`{}`, false},
			{`"durable"`, true},
			{`"Durable"`, false},
		},
		"timeout": {{`0.1`, true}, {`0.099`, false}, {`30`, true}, {`30.001`, false}, {`0`, false}, {`-1`, false}, {`1e300`, false}, {`"15s"`, false}},
		"signature_headers": {
			{`[]`, true},
			{list(4, `"X-A#"`), true},
			{list(5, `"X-A#"`), false},
			{`["X-` + strings.Repeat("a", 62) + `"]`, true},
			{`["X-` + strings.Repeat("a", 63) + `"]`, false},
			{`["X-Hub-Signature-256","Signature","Acme-Signature"]`, true},
			{`["X-"]`, false},
			{`[""]`, false},
			{`["X-A","x-a"]`, false},
			{`["X-A\r\nHost: b"]`, false},
			{`["X-A: b"]`, false},
			{`["X_A"]`, false},
			{`["X-É"]`, false},
			{`["Authorization"]`, false},
			{`["Content-Length"]`, false},
			{`["Host"]`, false},
			{`["webhook-signature"]`, false},
			{`["X-Forwarded-For"]`, false},
			{`["X-Original-URL"]`, false},
			{`["x-rewrite-url"]`, false},
			{`["X-Real-IP"]`, false},
			{`["X-HTTP-Method-Override"]`, false},
			{`[1]`, false},
			{`[null]`, false},
			{`"X-A"`, false},
		},
		"max_attempt": {{`3`, false}},
		"old_secret":  {{`"0123456789abcdef"`, false}},
		"":            {{`1`, false}},
	} {
		for _, b := range bounds {
			_, _, err := DecodeWebhook([]byte(`{"`+field+`":`+b.value+`}`), DefaultWebhook())
			if b.ok != (err == nil) {
				t.Errorf("%s %.80s: %v", field, b.value, err)
			}
			if got := new(FieldError); err != nil && (!errors.As(err, &got) || strings.Trim(got.Field, `"`) != field || !strings.HasPrefix(got.Message, got.Field)) {
				t.Errorf("%s %.80s: error %#v", field, b.value, err)
			}
		}
	}
	for _, body := range []string{``, `[]`, `{} {}`, `{"url":"https://a.example","url":"https://b.example"}`, `{"secret":"\ud8000123456789abcdef"}`} {
		if _, _, err := DecodeWebhook([]byte(body), DefaultWebhook()); err == nil {
			t.Errorf("%s is accepted", body)
		}
	}
}

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
	// What a receiver has to know: the bytes after the prefix, or all that there are.
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

func TestDecodeRotation(t *testing.T) {
	const secret = "0123456789abcdef"
	for body, want := range map[string]Rotation{
		`{}`:                              {Overlap: 24 * time.Hour},
		`{"overlap":0}`:                   {},
		`{"overlap":1.5,"secret":null}`:   {Overlap: 1500 * time.Millisecond},
		`{"overlap":604800}`:              {Overlap: 7 * 24 * time.Hour},
		`{"secret":"0123456789abcdef"}`:   {Secret: secret, Overlap: 24 * time.Hour},
		`{"overlap":null,"secret":null} `: {Overlap: 24 * time.Hour},
	} {
		if got, err := DecodeRotation([]byte(body)); err != nil || got != want {
			t.Errorf("%s: %+v, %v", body, got, err)
		}
	}
	for body, field := range map[string]string{
		``: "body", `{"overlap":-1}`: "overlap", `{"overlap":604801}`: "overlap", `{"overlap":"1d"}`: "overlap", `{"overlap":1e300}`: "overlap",
		`{"secret":"short"}`: "secret", `{"secret":"whsec_short67890123456"}`: "secret", `{"until":1}`: "until",
	} {
		_, err := DecodeRotation([]byte(body))
		if got := new(FieldError); !errors.As(err, &got) || got.Field != field {
			t.Errorf("%s: %v", body, err)
		}
	}
}

func TestDecodeEndpointRequest(t *testing.T) {
	if url, err := DecodeEndpointRequest([]byte(`{"url":"https://example.com/a"}`)); err != nil || url != "https://example.com/a" {
		t.Errorf("%q, %v", url, err)
	}
	for body, field := range map[string]string{``: "body", `{}`: "url", `{"url":null}`: "url", `{"url":"x"}`: "url", `{"uri":"https://example.com/a"}`: "uri"} {
		_, err := DecodeEndpointRequest([]byte(body))
		if got := new(FieldError); !errors.As(err, &got) || got.Field != field {
			t.Errorf("%s: %v", body, err)
		}
	}
}

func FuzzDecodeWebhook(f *testing.F) {
	for _, seed := range []string{
		``, `{}`, `{"url":"https://e.com","secret":"0123456789abcdef","max_attempts":3,"waits":[1,0.5e1],"signature_headers":["X-A"],"timeout":1}`,
		`{"waits":"durable","max_attempts":-0}`, `{"waits":[1e300,null]}`, `{"timeout":1e-1}`, `{"secret":"whsec_AAAA"}`, `{"signature_headers":[]}`,
	} {
		f.Add([]byte(seed))
	}
	f.Fuzz(func(t *testing.T, body []byte) {
		w, secret, err := DecodeWebhook(body, DefaultWebhook())
		if err != nil {
			if field := new(FieldError); !errors.As(err, &field) || field.Field == "" || !strings.HasPrefix(field.Message, field.Field) {
				t.Fatalf("error %#v", err)
			}
			return
		}
		if secret != (w.Secret != "") || secret && CheckWebhookSecret(w.Secret) != nil || w.URL != "" && CheckWebhookURL("url", w.URL) != nil {
			t.Fatalf("accepted %+v", w)
		}
		for n := 1; n <= w.MaxAttempts; n++ {
			if d := w.Wait(n); d < 0 || d > time.Duration(MaxWebhookWait) {
				t.Fatalf("waits %v after attempt %d", d, n)
			}
		}
		if w.MaxAttempts < 1 || w.MaxAttempts > MaxWebhookAttempts || w.Timeout < MinWebhookTimeout || w.Timeout > MaxWebhookTimeout ||
			len(w.SignatureHeaders) > MaxSignatureHeaders {
			t.Fatalf("accepted %+v", w)
		}
		stored, err := json.Marshal(w)
		if err != nil {
			t.Fatal(err)
		}
		again, _, err := DecodeWebhook(stored, DefaultWebhook())
		if err != nil {
			t.Fatalf("%s: %v", stored, err)
		}
		if d := cmp.Diff(w, again); d != "" {
			t.Fatalf("%s is read as something else: %s", stored, d)
		}
	})
}
