package api

import (
	"bytes"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/bullpen-run/bullpen/proto"
)

func decodeWebhook(t *testing.T, body string, base proto.Webhook) (proto.Webhook, bool) {
	t.Helper()
	r, err := Decode[WebhookRequest]([]byte(body))
	if err != nil {
		t.Fatalf("%s: %v", body, err)
	}
	return r.Apply(base), r.Secret != nil
}

func TestWebhookIsDecodedOverItsBase(t *testing.T) {
	const sixteen = "0123456789abcdef"
	got, secret := decodeWebhook(
		t, `{"url":"https://example.com/a?b=c","secret":"`+sixteen+`","max_attempts":5,"waits":[0.25,60],`+
			`"signature_headers":["x-a","Signature"],"timeout":2.5}`, proto.DefaultWebhook())
	want := proto.Webhook{
		URL: "https://example.com/a?b=c", Secret: sixteen, MaxAttempts: 5,
		Waits:            []proto.Seconds{proto.Seconds(250 * time.Millisecond), proto.Seconds(time.Minute)},
		SignatureHeaders: []string{"X-A", "Signature"}, Timeout: proto.Seconds(2500 * time.Millisecond),
	}
	if d := cmp.Diff(want, got); d != "" || !secret {
		t.Errorf("secret %v, %s", secret, d)
	}
	// Omitted fields have the values of base, which does not change.
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
	// The stored form decodes to the same settings.
	stored, err := json.Marshal(base)
	if err != nil {
		t.Fatal(err)
	}
	var back proto.Webhook
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
	w, _ := decodeWebhook(t, `{"waits":"durable"}`, proto.DefaultWebhook())
	var total time.Duration
	for n := 1; n < w.MaxAttempts; n++ {
		total += w.Wait(n)
	}
	if w.MaxAttempts != 10 || w.Wait(1) != 5*time.Second || total < 72*time.Hour || total > 80*time.Hour {
		t.Errorf("%d attempts over %v: %v", w.MaxAttempts, total, w.Waits)
	}
	for _, body := range []string{`{"waits":"durable","max_attempts":4}`, `{"max_attempts":4,"waits":"durable"}`} {
		if w, _ := decodeWebhook(t, body, proto.DefaultWebhook()); w.MaxAttempts != 4 || len(w.Waits) != 9 {
			t.Errorf("%s: %+v", body, w)
		}
	}
}

func TestWaits(t *testing.T) {
	w, _ := decodeWebhook(t, `{"waits":[1,2,3],"max_attempts":10}`, proto.DefaultWebhook())
	for n, want := range map[int]string{1: "1s", 2: "2s", 3: "3s", 4: "3s", 9: "3s"} {
		if got := w.Wait(n); got.String() != want {
			t.Errorf("after attempt %d: %v", n, got)
		}
	}
}

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
			{`"http://example.com/"`, true}, // a server setting decides
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
		"max_attempts": {
			{`1`, true},
			{`0`, false},
			{`-1`, false},
			{`20`, true},
			{`21`, false},
			{`1.5`, false},
			{`"3"`, false},
			{`1e99`, false},
		},
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
		"timeout": {
			{`0.1`, true},
			{`0.099`, false},
			{`30`, true},
			{`30.001`, false},
			{`0`, false},
			{`-1`, false},
			{`1e300`, false},
			{`"15s"`, false},
		},
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
			_, err := Decode[WebhookRequest]([]byte(`{"` + field + `":` + b.value + `}`))
			if b.ok != (err == nil) {
				t.Errorf("%s %.80s: %v", field, b.value, err)
			}
			if got := new(proto.FieldError); err != nil &&
				(!errors.As(err, &got) || strings.Trim(got.Field, `"`) != field || !strings.HasPrefix(got.Message, got.Field)) {
				t.Errorf("%s %.80s: error %#v", field, b.value, err)
			}
		}
	}
	for _, body := range []string{
		``, `[]`, `{} {}`, `{"url":"https://a.example","url":"https://b.example"}`,
		`{"secret":"\ud8000123456789abcdef"}`,
	} {
		if _, err := Decode[WebhookRequest]([]byte(body)); err == nil {
			t.Errorf("%s is accepted", body)
		}
	}
}

func TestDecodeRotation(t *testing.T) {
	const secret = "0123456789abcdef"
	day := proto.Seconds(24 * time.Hour)
	for body, want := range map[string]WebhookRotation{
		`{}`:                              {},
		`{"overlap":0}`:                   {Overlap: new(proto.Seconds(0))},
		`{"overlap":1.5,"secret":null}`:   {Overlap: new(proto.Seconds(1500 * time.Millisecond))},
		`{"overlap":604800}`:              {Overlap: new(7 * day)},
		`{"secret":"0123456789abcdef"}`:   {Secret: new(secret)},
		`{"overlap":null,"secret":null} `: {},
	} {
		got, err := Decode[WebhookRotation]([]byte(body))
		if d := cmp.Diff(&want, got); err != nil || d != "" {
			t.Errorf("%s: %v %s", body, err, d)
		}
	}
	for body, field := range map[string]string{
		``: "body", `{"overlap":-1}`: "overlap", `{"overlap":604801}`: "overlap", `{"overlap":"1d"}`: "overlap",
		`{"overlap":1e300}`:  "overlap",
		`{"secret":"short"}`: "secret", `{"secret":"whsec_short67890123456"}`: "secret", `{"until":1}`: "until",
	} {
		_, err := Decode[WebhookRotation]([]byte(body))
		if got := new(proto.FieldError); !errors.As(err, &got) || got.Field != field {
			t.Errorf("%s: %v", body, err)
		}
	}
}

func TestDecodeEndpointRequest(t *testing.T) {
	if r, err := Decode[EndpointRequest]([]byte(`{"url":"https://example.com/a"}`)); err != nil ||
		r.URL != "https://example.com/a" {
		t.Errorf("%v, %v", r, err)
	}
	for body, field := range map[string]string{
		``: "body", `{}`: "url", `{"url":null}`: "url", `{"url":"x"}`: "url",
		`{"uri":"https://example.com/a"}`: "uri",
	} {
		_, err := Decode[EndpointRequest]([]byte(body))
		if got := new(proto.FieldError); !errors.As(err, &got) || got.Field != field {
			t.Errorf("%s: %v", body, err)
		}
	}
}

func FuzzDecodeWebhook(f *testing.F) {
	for _, seed := range []string{
		``, `{}`, `{"url":"https://e.com","secret":"0123456789abcdef","max_attempts":3,"waits":[1,0.5e1],` +
			`"signature_headers":["X-A"],"timeout":1}`,
		`{"waits":"durable","max_attempts":-0}`, `{"waits":[1e300,null]}`, `{"timeout":1e-1}`, `{"secret":"whsec_AAAA"}`,
		`{"signature_headers":[]}`,
	} {
		f.Add([]byte(seed))
	}
	f.Fuzz(func(t *testing.T, body []byte) {
		r, err := Decode[WebhookRequest](body)
		if err != nil {
			if field := new(proto.FieldError); !errors.As(err, &field) || field.Field == "" ||
				!strings.HasPrefix(field.Message, field.Field) {
				t.Fatalf("error %#v", err)
			}
			return
		}
		w := r.Apply(proto.DefaultWebhook())
		secret := r.Secret != nil
		if secret != (w.Secret != "") || secret && proto.CheckWebhookSecret(w.Secret) != nil ||
			w.URL != "" && proto.CheckWebhookURL("url", w.URL) != nil {
			t.Fatalf("accepted %+v", w)
		}
		for n := 1; n <= w.MaxAttempts; n++ {
			if d := w.Wait(n); d < 0 || d > 7*24*time.Hour {
				t.Fatalf("waits %v after attempt %d", d, n)
			}
		}
		if w.MaxAttempts < 1 || w.MaxAttempts > proto.MaxWebhookAttempts || w.Timeout < proto.Seconds(100*time.Millisecond) ||
			w.Timeout > proto.MaxWebhookTimeout ||
			len(w.SignatureHeaders) > 4 {
			t.Fatalf("accepted %+v", w)
		}
		stored, err := json.Marshal(w)
		if err != nil {
			t.Fatal(err)
		}
		again, err := Decode[WebhookRequest](stored)
		if err != nil {
			t.Fatalf("%s: %v", stored, err)
		}
		if d := cmp.Diff(w, again.Apply(proto.DefaultWebhook())); d != "" {
			t.Fatalf("%s is read as something else: %s", stored, d)
		}
	})
}
