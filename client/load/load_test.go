package load_test

import (
	"encoding/xml"
	"errors"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/bullpen-run/bullpen/client"
	"github.com/bullpen-run/bullpen/client/load"
)

const (
	succeeded = `{"success":true,"stdout":"","stderr":"","exit_code":0,"error_code":null,"error_message":null,` +
		`"duration_ms":1}`
	failed = `{"success":false,"stdout":"","stderr":"","exit_code":3,"error_code":null,"error_message":null,` +
		`"duration_ms":1}`
)

// serve returns a client of a server.
func serve(t *testing.T, answer http.HandlerFunc) *client.Client {
	t.Helper()
	server := httptest.NewServer(answer)
	t.Cleanup(server.Close)
	c, err := client.New(client.Config{URL: server.URL, Key: "k", NoRetry: true})
	if err != nil {
		t.Fatal(err)
	}
	return c
}

func config(profiles ...load.Profile) load.Config {
	return load.Config{Profiles: profiles, Rate: 200, Duration: time.Second / 2, InFlight: 1000, Seed: 1}
}

var python = load.Profile{Name: "python", Weight: 1, Language: "python", Code: "1"}

// A server that stands still is charged with all that was due meanwhile, not only with the requests
// that it had: a client that waits for each answer would see one slow request.
func TestStall(t *testing.T) {
	const stall = 400 * time.Millisecond
	released := make(chan struct{})
	c := serve(t, func(w http.ResponseWriter, _ *http.Request) {
		<-released
		_, _ = io.WriteString(w, succeeded)
	})
	end := time.Now().Add(stall)
	time.AfterFunc(stall, func() { close(released) })
	r := load.Run(t.Context(), c, config(python))
	during := 0
	for _, s := range r.Samples {
		if waited := end.Sub(r.Start) - s.Due; waited > 0 {
			if during++; s.Took < waited {
				t.Errorf("what was due after %s took %s, less than the stall", s.Due, s.Took)
			}
		}
	}
	if during < 20 || r.Rows()[0].Succeeded != len(r.Samples) {
		t.Errorf("%d were due during the stall: %+v", during, r.Rows())
	}
}

func TestFailures(t *testing.T) {
	var n atomic.Int64
	c := serve(t, func(w http.ResponseWriter, _ *http.Request) {
		switch n.Add(1) % 4 {
		case 0:
			_, _ = io.WriteString(w, failed)
		case 1:
			w.Header().Set("Retry-After", "1")
			w.WriteHeader(http.StatusTooManyRequests)
			_, _ = io.WriteString(w, `{"error":"rate_limited","message":"too many"}`)
		case 2:
			w.WriteHeader(http.StatusInternalServerError)
		default:
			_, _ = io.WriteString(w, succeeded)
		}
	})
	second := python
	second.Name, second.Weight = "second", 3
	r := load.Run(t.Context(), c, config(python, second))
	rows := r.Rows()
	all := rows[2]
	if len(rows) != 3 || all.Sent != len(r.Samples) || int64(all.Sent) != n.Load() || rows[0].Sent == 0 ||
		rows[1].Sent <= rows[0].Sent {
		t.Fatalf("%d requests: %+v", n.Load(), rows)
	}
	for _, name := range []string{"failed", "429 rate_limited", "500 Internal Server Error"} {
		if got := all.Failures[name]; got < all.Sent/4-1 || got > all.Sent/4+1 {
			t.Errorf("%d are %s: %+v", got, name, all)
		}
	}
	var page strings.Builder
	if err := r.HTML(&page); err != nil {
		t.Fatal(err)
	}
	if strings.Count(page.String(), "<svg") != 1 || strings.Count(page.String(), "<path stroke") != 5 ||
		strings.Contains(page.String(), "NaN") || !strings.Contains(page.String(), "429 rate_limited") {
		t.Error(page.String())
	}
	charts := xml.NewDecoder(
		strings.NewReader(page.String()[strings.Index(page.String(), "<svg"):strings.LastIndex(page.String(), "</svg>")]))
	charts.Strict = false
	for {
		if _, err := charts.Token(); err != nil {
			if syntax, ok := errors.AsType[*xml.SyntaxError](err); ok && !strings.Contains(syntax.Msg, "EOF") {
				t.Error(err)
			}
			break
		}
	}
}

// What is not sent is told.
func TestTooManyInFlight(t *testing.T) {
	release := make(chan struct{})
	c := serve(t, func(w http.ResponseWriter, _ *http.Request) {
		<-release
		_, _ = io.WriteString(w, succeeded)
	})
	cfg := config(python)
	cfg.InFlight = 3
	time.AfterFunc(2*cfg.Duration, func() { close(release) })
	r := load.Run(t.Context(), c, cfg)
	if len(r.Samples) != 3 || r.Unsent < 10 || !strings.Contains(r.Summary(), "since 3 were in flight") {
		t.Errorf("%d sent, %d not: %s", len(r.Samples), r.Unsent, r.Summary())
	}
}
