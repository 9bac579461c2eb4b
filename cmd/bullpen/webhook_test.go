package main

import (
	"bytes"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

// webhookRoutes answers about webhooks: the key has no settings until they are set.
func (s *stub) webhookRoutes(mux *http.ServeMux) {
	const secret = "whsec_AbCdEfGhIjKlMnOpQrStUvWxYz0123456789ABCDcD0="
	settings := func(w http.ResponseWriter, more string) {
		_, _ = fmt.Fprintf(w, `{"url":"https://example.com/hook",%s"max_attempts":4,"waits":[0.5,60],`+
			`"signature_headers":["X-A","X-B"],"timeout":15,`+
			`"updated_at":"2026-01-02T03:04:05.000Z"}`, more)
	}
	made := func(w http.ResponseWriter, until string) {
		settings(w, `"secret":"`+secret+`","secret_hint":"…cD0=","old_secret_hint":null,"old_secret_until":`+until+`,`)
	}
	handle := func(pattern string, f func(w http.ResponseWriter, r *http.Request)) {
		mux.HandleFunc(pattern, func(w http.ResponseWriter, r *http.Request) {
			body, _ := io.ReadAll(r.Body)
			s.record(r, body)
			s.mu.Lock()
			defer s.mu.Unlock()
			f(w, r)
		})
	}
	handle("GET /v1/webhook", func(w http.ResponseWriter, _ *http.Request) {
		if !s.webhook {
			refuse(w, http.StatusNotFound, "not_found", "this API key has no webhook settings", "")
			return
		}
		settings(w, `"secret_hint":"…cD0=","old_secret_hint":"…xyz=","old_secret_until":"2026-01-03T03:04:05.000Z",`)
	})
	handle("PUT /v1/webhook", func(w http.ResponseWriter, _ *http.Request) {
		s.webhook = true
		made(w, "null")
	})
	handle("PATCH /v1/webhook", func(w http.ResponseWriter, _ *http.Request) {
		settings(w, `"secret_hint":null,"old_secret_hint":null,"old_secret_until":null,`)
	})
	handle("POST /v1/webhook/rotate", func(w http.ResponseWriter, _ *http.Request) {
		made(w, `"2026-01-03T03:04:05.000Z"`)
	})
	handle("DELETE /v1/webhook", func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(http.StatusNoContent) })
	const attempt = `{"number":%d,"at":"2026-01-02T03:04:05.000Z","status":%s,"error":%s,"detail":%s,` +
		`"remote_addr":"203.0.113.7:443",` +
		`"timings":{"dns_ms":1.25,"connect_ms":2,"tls_ms":0,"first_byte_ms":4,"total_ms":1500},"response":%s}`
	const rejected = `"HTTP/1.1 503 Service Unavailable\r\nA: b\r\n\r\n\u001b[31mlater\n"`
	tests := 0
	handle("POST /v1/webhook/test", func(w http.ResponseWriter, _ *http.Request) {
		if tests++; tests == 1 {
			_, _ = fmt.Fprintf(w, attempt, 1, "200", "null", "null", `"HTTP/1.1 200 OK\r\n\r\nok"`)
			return
		}
		_, _ = fmt.Fprintf(w, attempt, 1, "null", `"timeout"`, `"no answer within 15s\u0007"`, "null")
	})
	delivery := func(w http.ResponseWriter, r *http.Request, status, reason, attempts string) {
		_, _ = fmt.Fprintf(w, `{"trace_id":%q,"webhook_id":"msg_a","url":"https://example.com/hook","status":%q,"reason":%s,`+
			`"created_at":"2026-01-02T03:04:05.000Z","next_at":"2026-01-02T03:05:05.000Z","attempts_made":2,"attempts":[%s]}`,
			r.PathValue("id"), status, reason, attempts)
	}
	handle("GET /v1/executions/{id}/webhook", func(w http.ResponseWriter, r *http.Request) {
		delivery(w, r, "pending", `"the receiver is slow"`,
			fmt.Sprintf(attempt+","+attempt, 1, "null", `"dns"`, `"no such host"`, "null",
				2, "503", `"status"`, `"the receiver answered 503"`, rejected))
	})
	handle("POST /v1/executions/{id}/webhook/replay", func(w http.ResponseWriter, r *http.Request) {
		if r.PathValue("id") == string(stubRunning) {
			refuse(w, http.StatusConflict, "conflict", "the webhook is pending", "")
			return
		}
		w.WriteHeader(http.StatusAccepted)
		delivery(w, r, "pending", "null", "")
	})
	handle("POST /v1/webhook/replay-failed", func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Query().Get("after") == "" {
			_, _ = fmt.Fprintf(w, `{"replayed":100,"left":23,"next":%q}`, stubTrace)
			return
		}
		_, _ = io.WriteString(w, `{"replayed":23,"left":0,"next":null}`)
	})
	handle("GET /v1/webhook/endpoints", func(w http.ResponseWriter, _ *http.Request) {
		_, _ = io.WriteString(w, `{"endpoints":[{"url":"https://example.com/gone",`+
			`"failing_since":"2026-01-02T03:04:05.000Z",`+
			`"disabled_at":"2026-01-03T03:04:05.000Z","reason":"it answered 410"},`+
			`{"url":"https://example.com/slow","failing_since":"2026-01-04T03:04:05.000Z","disabled_at":null,"reason":null}]}`)
	})
	handle("POST /v1/webhook/endpoints/enable", func(w http.ResponseWriter, _ *http.Request) {
		w.WriteHeader(http.StatusNoContent)
	})
}

// A terminal shows one bar that is redrawn; a log gets lines.
func TestReplayProgress(t *testing.T) {
	server := httptest.NewServer(newStub(filepath.Join(t.TempDir(), "requests")))
	t.Cleanup(server.Close)
	t.Setenv("BULLPEN_URL", server.URL)
	t.Setenv("BULLPEN_API_KEY", stubKey)
	for _, terminal := range []bool{true, false} {
		var out, err bytes.Buffer
		if code := run([]string{"webhook", "replay", "--failed", "--since", "24h"},
			streams{in: strings.NewReader(""), out: &out, err: &err, terminal: terminal}); code != 0 {
			t.Fatalf("exit code %d: %s", code, &err)
		}
		want := "bullpen: 100 of 123\nbullpen: 123 of 123\n"
		if terminal {
			want = "\r[" + strings.Repeat("#", 32) + "........] 100 of 123\x1b[K\r[" + strings.Repeat("#", 40) +
				"] 123 of 123\x1b[K\n"
		}
		if err.String() != want || out.String() != "123 failed webhooks are sent again\n" {
			t.Errorf("terminal %v: %q, %q", terminal, err.String(), out.String())
		}
	}
}

func TestParseTime(t *testing.T) {
	now := time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)
	for text, want := range map[string]time.Time{
		"2026-01-01T00:00:00Z":        time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC),
		"2026-01-01T01:00:00.5+01:00": time.Date(2026, 1, 1, 0, 0, 0, 5e8, time.UTC),
		"90m":                         now.Add(-90 * time.Minute), "0s": now,
	} {
		if got, err := parseTime(text, now); err != nil || !got.Equal(want) {
			t.Errorf("%s: %v, %v", text, got, err)
		}
	}
	for _, text := range []string{"", "yesterday", "-1h", "2026-01-01", "5"} {
		if got, err := parseTime(text, now); err == nil {
			t.Errorf("%q is %v", text, got)
		}
	}
}
