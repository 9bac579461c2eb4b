package gateway

import (
	"context"
	"fmt"
	"maps"
	"net/http"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/bullpen-run/bullpen/gateway/web"
	"github.com/bullpen-run/bullpen/proto"
)

const (
	webhookPath = "/v1/webhook"
	hookURL     = "https://example.com/hook"
	async       = "respond-async"
)

// hooks keeps webhook settings and deliveries in memory, and checks URLs. A host that begins with
// "inner" is not allowed.
type hooks struct {
	mu         sync.Mutex
	settings   map[string]proto.Webhook
	endpoints  map[string][]proto.Endpoint // by organisation
	deliveries map[proto.TraceID]*proto.Delivery
	looked     int // number of look-ups of a delivery
	checked    []string
	attempt    proto.DeliveryAttempt // result of a test
	tested     proto.Key
	untested   error
	asked      string // arguments of the last bulk replay, or of the last list
	replayed   proto.Replayed
	listed     []*proto.Delivery
	next       string // of listed
}

func newHooks() *hooks {
	return &hooks{
		settings: map[string]proto.Webhook{}, endpoints: map[string][]proto.Endpoint{},
		deliveries: map[proto.TraceID]*proto.Delivery{},
	}
}

func (s *hooks) Webhook(_, key string) proto.Webhook {
	s.mu.Lock()
	defer s.mu.Unlock()
	if w, ok := s.settings[key]; ok {
		return w
	}
	return proto.DefaultWebhook()
}

func (s *hooks) Stored(_ context.Context, _, key string) (proto.Webhook, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	w, ok := s.settings[key]
	if !ok {
		return w, fmt.Errorf("settings of %s: %w", key, proto.ErrNotFound)
	}
	return w, nil
}

func (s *hooks) Change(
	_ context.Context, _, key string, f func(*proto.Webhook) (proto.Webhook, error),
) (proto.Webhook, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	var old *proto.Webhook
	if w, ok := s.settings[key]; ok {
		old = &w
	}
	w, err := f(old)
	if err == nil {
		w, err = f(old) // as if another writer was faster
	}
	if err != nil {
		return proto.Webhook{}, err
	}
	w.UpdatedAt = time.Now()
	s.settings[key] = w
	return w, nil
}

func (s *hooks) Remove(_ context.Context, _, key string) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if _, ok := s.settings[key]; !ok {
		return proto.ErrNotFound
	}
	delete(s.settings, key)
	return nil
}

func (s *hooks) Endpoint(org, url string) (proto.Endpoint, bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, e := range s.endpoints[org] {
		if e.URL == url {
			return e, true
		}
	}
	return proto.Endpoint{}, false
}

func (s *hooks) Endpoints(org string) []proto.Endpoint {
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.Clone(s.endpoints[org])
}

func (s *hooks) Enable(_ context.Context, org, url string) error {
	if _, ok := s.Endpoint(org, url); !ok {
		return proto.ErrNotFound
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.endpoints[org] = slices.DeleteFunc(s.endpoints[org], func(e proto.Endpoint) bool { return e.URL == url })
	return nil
}

func (s *hooks) CheckURL(field, url string) error {
	if err := proto.CheckWebhookURL(field, url); err != nil {
		return err
	}
	if !strings.HasPrefix(url, "https:") {
		return &proto.FieldError{Field: field, Message: field + " must begin with https"}
	}
	return nil
}

func (s *hooks) Check(_ context.Context, field, url string) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.checked = append(s.checked, url)
	if strings.HasPrefix(url, "https://inner") {
		return &proto.FieldError{Field: field, Message: field + " leads to an address of a private network"}
	}
	return s.CheckURL(field, url)
}

func (s *hooks) Delivery(_ context.Context, org string, id proto.TraceID) (*proto.Delivery, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.looked++
	d, ok := s.deliveries[id]
	if !ok || d.Org != org {
		return nil, fmt.Errorf("delivery of %s: %w", id, proto.ErrNotFound)
	}
	return d, nil
}

func (s *hooks) Replay(ctx context.Context, org string, id proto.TraceID) (*proto.Delivery, error) {
	d, err := s.Delivery(ctx, org, id)
	if err != nil {
		return nil, err
	}
	if d.Status == proto.DeliveryPending {
		return nil, fmt.Errorf("replay %s: %w", id, proto.ErrConflict)
	}
	d.Replay(time.Now())
	return d, nil
}

func (s *hooks) ReplayFailed(
	_ context.Context, org string, since time.Time, after string, most int,
) (proto.Replayed, error) {
	s.asked = fmt.Sprintf("%s %s %q %d", org, since.UTC().Format(time.RFC3339), after, most)
	return s.replayed, nil
}

func (s *hooks) List(
	_ context.Context, org string, status proto.DeliveryStatus, before string, limit int,
) ([]*proto.Delivery, string, error) {
	s.asked = fmt.Sprintf("%s %q %q %d", org, status, before, limit)
	return s.listed, s.next, nil
}

func (s *hooks) Test(_ context.Context, key proto.Key) (*proto.DeliveryAttempt, error) {
	s.tested = key
	return &s.attempt, s.untested
}

// deliver creates the delivery of an execution that has ended.
func (h *harness) deliver(id proto.TraceID, change func(*proto.Delivery)) {
	h.hooks.mu.Lock()
	defer h.hooks.mu.Unlock()
	rec := h.stub.record(id)
	d := proto.NewDelivery(&rec.Meta, time.Date(2026, 1, 2, 3, 4, 5, 678_900_000, time.UTC))
	change(d)
	h.hooks.deliveries[id] = d
}

func delivered(d *proto.Delivery) { d.Status, d.NextAt = proto.DeliveryDelivered, time.Time{} }

func (h *harness) as(key string) *harness {
	with := *h
	with.key = key
	return &with
}

// Only async executions have webhooks. For other modes, the URL is validated and ignored.
func TestWebhookURLIsForAsync(t *testing.T) {
	h := newHarness(t)
	h.stub.finishAtOnce(proto.Exited(0))
	h.hooks.settings["key_1"] = proto.Webhook{URL: "https://example.com/default"}
	inner := body("webhook_url", "https://inner.example.com/")
	for _, headers := range [][]string{nil, {"Accept", web.TypeNDJSON}} {
		for _, b := range []string{hello, body("webhook_url", hookURL), inner} {
			if job := h.jobOf(h.execute(b, headers...).want(200, "")); job.WebhookURL != "" {
				t.Errorf("%s of %s: delivered to %q", headers, b, job.WebhookURL)
			}
		}
		h.execute(body("webhook_url", "http://example.com/"), headers...).want(400, "validation_error",
			"webhook_url must begin with https")
	}
	if len(h.hooks.checked) != 0 {
		t.Errorf("resolved %s for nothing", h.hooks.checked)
	}
	h.execute(inner, "Prefer", async).want(400, "validation_error", "webhook_url leads to an address")
	h.execute(body("webhook_url", "http://example.com/"), "Prefer", async).want(400, "validation_error",
		"webhook_url must begin with https")

	accepted := h.execute(body("webhook_url", hookURL), "Prefer", async).want(202, "")
	byDefault := h.execute(hello, "Prefer", async).want(202, "")
	other := h.as(h.stub.addKey("acme", "enterprise", asUser)).execute(hello, "Prefer", async).want(202, "")
	// Later settings do not affect accepted executions.
	h.do("PUT", webhookPath, `{"url":"https://example.com/later"}`).want(200, "")
	for a, want := range map[*reply]any{accepted: hookURL, byDefault: "https://example.com/default", other: nil} {
		got := h.do("GET", "/v1/executions/"+string(a.trace()), "").want(200, "").json()
		if got["webhook_url"] != want || h.jobOf(a).WebhookURL != strings.TrimPrefix(fmt.Sprint(want), "<nil>") {
			t.Errorf("delivered to %v, %s; want %v", got["webhook_url"], h.jobOf(a).WebhookURL, want)
		}
	}
}

// A repeated request with the same Idempotency-Key is the same only if its URL is the same.
func TestWebhookURLIsPartOfTheRequest(t *testing.T) {
	h := newHarness(t)
	first := h.execute(body("webhook_url", hookURL), "Prefer", async, "Idempotency-Key", "a").want(202, "")
	if again := h.execute(body("webhook_url", hookURL), "Prefer", async, "Idempotency-Key", "a").want(
		202, ""); again.trace() != first.trace() {
		t.Error("it ran twice")
	}
	h.execute(body("webhook_url", hookURL+"2"), "Prefer", async, "Idempotency-Key", "a").want(422, "idempotency_mismatch")
}

func TestDeliveryOfAnExecution(t *testing.T) {
	h := newHarness(t)
	path := func(id proto.TraceID) string { return "/v1/executions/" + string(id) }
	status := func(id proto.TraceID) any {
		h.t.Helper()
		return h.do("GET", path(id), "").want(200, "").json()["webhook_delivery_status"]
	}
	id := h.execute(body("webhook_url", hookURL), "Prefer", async).want(202, "").trace()
	pending := map[string]any{
		"trace_id": string(id), "webhook_id": "msg_" + string(id)[4:], "url": hookURL, "status": "pending", "reason": nil,
		"created_at": nil,
		"next_at":    nil, "attempts_made": 0.0, "attempts": []any{},
	}
	is := func(when string, want map[string]any) {
		t.Helper()
		got := h.do("GET", path(id)+"/webhook", "").want(200, "")
		if d := cmp.Diff(want, got.json()); d != "" || got.trace() != id {
			t.Errorf("%s: %s", when, d)
		}
		if got := status(id); got != want["status"] {
			t.Errorf("%s: the execution reports %v", when, got)
		}
	}
	is("queued", pending)
	h.do("POST", path(id)+"/webhook/replay", "").want(409, "conflict", "pending")
	h.stub.start(id)
	is("running", pending)
	if h.hooks.looked != 1 { // by the replay
		t.Errorf("looked %d times for what cannot be there", h.hooks.looked)
	}
	h.stub.finish(id, proto.Exited(0))
	is("ended, and not handed over yet", pending)
	h.do("POST", path(id)+"/webhook/replay", "").want(409, "conflict", "pending")

	at := time.Date(2026, 1, 2, 4, 4, 5, 678_900_000, time.FixedZone("x", 3600))
	h.deliver(id, func(d *proto.Delivery) {
		d.Reason = "the endpoint is slow"
		d.NextAt = at.Add(time.Second)
		d.Record(proto.DeliveryAttempt{
			At: at, Error: proto.DeliveryDNS, Detail: "no such host", Timings: proto.DeliveryTimings{DNS: 1.5, Total: 1.5},
		})
		d.Record(proto.DeliveryAttempt{
			At: at, Status: 503, Error: proto.DeliveryRejected, RemoteAddr: "203.0.113.7:443",
			Headers:  map[string]string{"Webhook-Id": "msg_1", "X-Signature": "[redacted]"},
			Response: "HTTP/1.1 503\r\n\r\n\xff\x00",
			Timings:  proto.DeliveryTimings{DNS: 1, Connect: 2, TLS: 3, FirstByte: 4, Total: 11},
		})
	})
	const startedAt = "2026-01-02T03:04:05.678Z"
	started := maps.Clone(pending)
	started["reason"], started["created_at"], started["next_at"], started["attempts_made"] = "the endpoint is slow",
		startedAt, "2026-01-02T03:04:06.678Z", 2.0
	started["attempts"] = []any{
		map[string]any{
			"number": 1.0, "at": startedAt, "status": nil, "error": "dns", "detail": "no such host", "remote_addr": nil,
			"request": nil, "response": nil,
			"timings": map[string]any{"dns_ms": 1.5, "connect_ms": 0.0, "tls_ms": 0.0, "first_byte_ms": 0.0, "total_ms": 1.5},
		},
		map[string]any{
			"number": 2.0, "at": startedAt, "status": 503.0, "error": "status", "detail": nil, "remote_addr": "203.0.113.7:443",
			"request": map[string]any{
				"method": "POST", "headers": map[string]any{"Webhook-Id": "msg_1", "X-Signature": "[redacted]"},
			},
			"response": "HTTP/1.1 503\r\n\r\n\ufffd\x00",
			"timings":  map[string]any{"dns_ms": 1.0, "connect_ms": 2.0, "tls_ms": 3.0, "first_byte_ms": 4.0, "total_ms": 11.0},
		},
	}
	is("tried", started)
	h.do("POST", path(id)+"/webhook/replay", "").want(409, "conflict", "pending")

	for _, ended := range []proto.DeliveryStatus{proto.DeliveryDelivered, proto.DeliveryFailed} {
		h.deliver(id, func(d *proto.Delivery) { d.Status, d.NextAt = ended, time.Time{} })
		if got := status(id); got != string(ended) {
			t.Errorf("%s: the execution reports %v", ended, got)
		}
		a := h.do("POST", path(id)+"/webhook/replay", `not looked at`).want(202, "")
		if got := a.json(); got["status"] != "pending" || got["webhook_id"] != pending["webhook_id"] ||
			got["next_at"] == nil || a.trace() != id {
			t.Errorf("%s, replayed: %v", ended, got)
		}
		if got := status(id); got != "pending" {
			t.Errorf("%s, replayed: the execution reports %v", ended, got)
		}
	}

	// An execution without a webhook has no delivery, and none is looked up.
	h.hooks.looked = 0
	h.stub.finishAtOnce(proto.Exited(0))
	for _, a := range []*reply{
		h.execute(hello).want(200, ""), h.execute(hello, "Prefer", async).want(202, ""),
		h.execute(body("webhook_url", hookURL)),
	} {
		none := path(a.trace())
		if got := status(a.trace()); got != nil || h.hooks.looked != 0 {
			t.Errorf("without a URL: %v, looked for %d times", got, h.hooks.looked)
		}
		h.do("GET", none+"/webhook", "").want(404, "not_found", "asked for none")
		h.do("POST", none+"/webhook/replay", "").want(404, "not_found", "asked for none")
	}
}

func TestBodyOfAWebhook(t *testing.T) {
	h := newHarness(t)
	path := func(id proto.TraceID) string { return "/v1/executions/" + string(id) + "/webhook/body" }
	id := h.execute(body("webhook_url", hookURL), "Prefer", async).want(202, "").trace()
	h.do("GET", path(id), "").want(409, "conflict", "has not ended")
	h.stub.start(id)
	result := proto.Exited(0)
	result.Stdout = "<\x00"
	h.stub.finish(id, result)
	record := h.stub.record(id)
	want, err := h.server.WebhookBody(&record)
	if err != nil {
		t.Fatal(err)
	}
	a := h.do("GET", path(id), "").want(200, "")
	if string(a.body) != string(want) || !strings.Contains(string(want), `"stdout":"<\u0000"`) || a.trace() != id {
		t.Errorf("%s, want %s", a.body, want)
	}
	other := h.as(h.stub.addKey("other", "", asUser))
	other.do("GET", path(id), "").want(404, "not_found")
	other.do("GET", path("x"), "").want(404, "not_found")
	h.do("GET", path(h.run()), "").want(404, "not_found", "asked for none")
}

func TestDeliveriesAreListed(t *testing.T) {
	h := newHarness(t)
	const path = webhookPath + "/deliveries"
	if got := string(h.do("GET", path, "").want(200, "").body); got != `{"deliveries":[],"next_cursor":null}`+"\n" ||
		h.hooks.asked != `acme "" "" 20` {
		t.Errorf("none: %s, asked for %s", got, h.hooks.asked)
	}
	at := time.Date(2026, 1, 2, 3, 4, 5, 678_900_000, time.UTC)
	event, err := proto.NewEventDelivery("x", "acme", "key_1", hookURL, map[string]string{"event": proto.EventBatch}, at)
	if err != nil {
		t.Fatal(err)
	}
	failed := proto.NewDelivery(&proto.Meta{
		TraceID: "trc_AbCdEfGhIjKlMnOpQrSt", Org: "acme", Mode: proto.ModeAsync, WebhookURL: hookURL,
	}, at)
	failed.Record(proto.DeliveryAttempt{At: at, Status: 200})
	failed.Record(proto.DeliveryAttempt{At: at.Add(time.Second), Status: 503, Error: proto.DeliveryRejected})
	failed.Status, failed.Reason, failed.NextAt = proto.DeliveryFailed, "all attempts failed", time.Time{}
	h.hooks.listed, h.hooks.next = []*proto.Delivery{event, failed}, "77-1"
	answer := h.do("GET", path+"?status=failed&limit=2", "").want(200, "").json()
	next, _ := answer["next_cursor"].(string)
	if h.hooks.asked != `acme "failed" "" 2` || next == "" || strings.Contains(next, "77") {
		t.Errorf("asked for %s, next %q", h.hooks.asked, next)
	}
	const created = "2026-01-02T03:04:05.678Z"
	if d := cmp.Diff([]any{
		map[string]any{
			"trace_id": string(event.TraceID), "webhook_id": event.ID, "event": "batch.completed", "url": hookURL,
			"status": "pending", "reason": nil, "created_at": created, "next_at": created, "attempts_made": 0.0,
			"last_attempt_at": nil, "last_status": nil, "last_error": nil,
		},
		map[string]any{
			"trace_id": string(failed.TraceID), "webhook_id": failed.ID, "event": nil, "url": hookURL, "status": "failed",
			"reason": "all attempts failed", "created_at": created, "next_at": nil, "attempts_made": 2.0,
			"last_attempt_at": "2026-01-02T03:04:06.678Z", "last_status": 503.0, "last_error": "status",
		},
	}, answer["deliveries"]); d != "" {
		t.Error(d)
	}
	h.do("GET", path+"?status=failed&cursor="+next, "").want(200, "")
	if h.hooks.asked != `acme "failed" "77-1" 20` {
		t.Errorf("asked for %s", h.hooks.asked)
	}
	for query, field := range map[string]string{
		"?status=lost": "status", "?limit=0": "limit", "?limit=101": "limit", "?cursor=x": "cursor",
		"?status=pending&cursor=" + next: "cursor", // of another list
	} {
		h.do("GET", path+query, "").want(400, "validation_error", field+" must be")
	}
	other := h.as(h.stub.addKey("other", "", asUser))
	other.do("GET", path+"?status=failed&cursor="+next, "").want(400, "validation_error")
}

func TestDisabledURLIsNotReplayed(t *testing.T) {
	h := newHarness(t)
	h.stub.finishAtOnce(proto.Exited(0))
	id := h.execute(body("webhook_url", hookURL), "Prefer", async).want(202, "").trace()
	h.deliver(id, delivered)
	path := "/v1/executions/" + string(id) + "/webhook/replay"
	at := time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)
	gone := proto.Endpoint{URL: hookURL, FailingSince: at, DisabledAt: at.Add(time.Second), Reason: "it answered 410"}
	h.hooks.endpoints = map[string][]proto.Endpoint{
		"acme": {gone, {URL: hookURL + "2", FailingSince: at}}, "other": {gone},
	}
	h.do("POST", path, "").want(409, "conflict", hookURL, "disabled", "/v1/webhook/endpoints/enable")

	endpoints := webhookPath + "/endpoints"
	want := map[string]any{"endpoints": []any{
		map[string]any{
			"url": hookURL, "failing_since": "2026-01-02T03:04:05.000Z", "disabled_at": "2026-01-02T03:04:06.000Z",
			"reason": "it answered 410",
		},
		map[string]any{"url": hookURL + "2", "failing_since": "2026-01-02T03:04:05.000Z", "disabled_at": nil, "reason": nil},
	}}
	if d := cmp.Diff(want, h.do("GET", endpoints, "").want(200, "").json()); d != "" {
		t.Error(d)
	}
	h.do("POST", endpoints+"/enable", `{"url":"`+hookURL+`"}`).want(204, "")
	h.do("POST", endpoints+"/enable", `{"url":"`+hookURL+`"}`).want(404, "not_found", "URL")
	h.do("POST", endpoints+"/enable", `{"url":"`+hookURL+`","all":true}`).want(400, "validation_error", "all")
	h.do("POST", endpoints+"/enable", ``).want(400, "validation_error", "body")
	if len(h.hooks.endpoints["other"]) != 1 {
		t.Error("the URL of another organisation was enabled")
	}
	h.do("POST", path, "").want(202, "")
	// A URL that fails but is not disabled.
	h.hooks.endpoints["acme"] = []proto.Endpoint{{URL: hookURL, FailingSince: at}}
	h.deliver(id, delivered)
	h.do("POST", path, "").want(202, "")
	h.hooks.endpoints = nil
	if got := string(h.do("GET", endpoints, "").want(200, "").body); got != "{\"endpoints\":[]}\n" {
		t.Errorf("none: %s", got)
	}
}

func TestFailedDeliveriesAreReplayed(t *testing.T) {
	h := newHarness(t)
	path := webhookPath + "/replay-failed"
	h.hooks.replayed = proto.Replayed{Replayed: 100, Left: 23, Next: "101-123-23"}
	first := h.do("POST", path+"?since=2026-01-02T04:04:05.5%2B01:00", "").want(200, "").json()
	next, _ := first["next"].(string)
	if first["replayed"] != 100.0 || first["left"] != 23.0 || next == "" || strings.Contains(next, "123") {
		t.Error(first)
	}
	if h.hooks.asked != `acme 2026-01-02T03:04:05Z "" 100` {
		t.Errorf("asked for %s", h.hooks.asked)
	}
	h.hooks.replayed = proto.Replayed{Replayed: 23}
	if got := string(h.do("POST", path+"?since=2026-01-02T04:04:05.5%2B01:00&after="+next, "").want(
		200, "").body); got != `{"replayed":23,"left":0,"next":null}`+"\n" {
		t.Error(got)
	}
	if h.hooks.asked != `acme 2026-01-02T03:04:05Z "101-123-23" 100` {
		t.Errorf("asked for %s", h.hooks.asked)
	}
	for query, field := range map[string]string{
		"": "since", "?since=": "since", "?since=yesterday": "since", "?since=2026-01-02": "since",
		"?since=2026-01-02T03:04:05%20Z": "since",
		// of another time
		"?since=2026-01-02T03:04:05Z&after=x": "after", "?since=2026-01-02T03:04:05Z&after=" + next: "after",
	} {
		h.do("POST", path+query, "").want(400, "validation_error", field+" must be")
	}
}

func TestWebhookSettings(t *testing.T) {
	h := newHarness(t)
	const first, second, third = "the first secret that was set", "another secret, long enough", "0123456789abcdef"
	secrets := func() []string {
		w := h.hooks.Webhook("acme", "key_1")
		return w.Secrets(time.Now())
	}
	h.do("GET", webhookPath, "").want(404, "not_found", "PUT")
	h.do("DELETE", webhookPath, "").want(404, "not_found", "PUT")
	h.do("POST", webhookPath+"/rotate", "").want(404, "not_found", "PUT")

	got := h.do("PUT", webhookPath, `{"url":"`+hookURL+`"}`).want(200, "").json()
	made, _ := got["secret"].(string)
	if !strings.HasPrefix(made, "whsec_") || !slices.Equal(secrets(), []string{made}) {
		t.Fatalf("%q was made, %q sign", made, secrets())
	}
	delete(got, "secret")
	want := map[string]any{
		"url": hookURL, "secret_hint": "…" + made[len(made)-4:], "old_secret_hint": nil, "old_secret_until": nil,
		"max_attempts": 3.0,
		"waits":        []any{1.0, 10.0, 60.0}, "signature_headers": []any{"X-Baponi-Signature", "X-Bullpen-Signature"},
		"timeout":    15.0,
		"updated_at": got["updated_at"],
	}
	if d := cmp.Diff(want, got); d != "" {
		t.Error(d)
	}
	if d := cmp.Diff(got, h.do("GET", webhookPath, "").want(200, "").json()); d != "" {
		t.Errorf("shown again: %s", d)
	}

	// Omitted fields keep their values, and no secret is created.
	got = h.do("PATCH", webhookPath, `{"max_attempts":7,"waits":[0.5],"signature_headers":[],"timeout":2}`).want(
		200, "").json()
	want["max_attempts"], want["waits"], want["signature_headers"], want["timeout"] = 7.0, []any{0.5}, []any{}, 2.0
	want["updated_at"] = got["updated_at"]
	if d := cmp.Diff(want, got); d != "" || !slices.Equal(secrets(), []string{made}) {
		t.Errorf("%s, %q sign", d, secrets())
	}
	got = h.do("PATCH", webhookPath, `{"secret":"`+first+`"}`).want(200, "").json()
	if _, sent := got["secret"]; sent || !slices.Equal(secrets(), []string{first, made}) ||
		got["old_secret_hint"] != want["secret_hint"] {
		t.Errorf("a secret was set: %v, %q sign", got, secrets())
	}
	until, err := time.Parse(proto.TimeLayout, fmt.Sprint(got["old_secret_until"]))
	if left := time.Until(until); err != nil || left < 23*time.Hour || left > 24*time.Hour {
		t.Errorf("the old secret signs until %v", got["old_secret_until"])
	}

	// All settings are replaced. The previous secret goes on signing for a day.
	got = h.do("PUT", webhookPath, `{"url":"`+hookURL+`2","secret":"`+second+`"}`).want(200, "").json()
	if _, sent := got["secret"]; sent || got["max_attempts"] != 3.0 || got["url"] != hookURL+"2" ||
		!slices.Equal(secrets(), []string{second, first}) {
		t.Errorf("replaced: %v, %q sign", got, secrets())
	}
	h.do("PUT", webhookPath, `{"url":"`+hookURL+`","secret":"`+second+`"}`).want(200, "")
	if !slices.Equal(secrets(), []string{second, first}) {
		t.Errorf("with the same secret: %q sign", secrets())
	}

	got = h.do("POST", webhookPath+"/rotate", "").want(200, "").json()
	rotated, _ := got["secret"].(string)
	if !slices.Equal(secrets(), []string{rotated, second}) || !strings.HasPrefix(rotated, "whsec_") ||
		got["url"] != hookURL {
		t.Errorf("rotated: %v, %q sign", got, secrets())
	}
	got = h.do("POST", webhookPath+"/rotate", `{"secret":"`+third+`","overlap":0}`).want(200, "").json()
	if !slices.Equal(secrets(), []string{third}) || got["secret"] != third || got["old_secret_hint"] != nil ||
		got["old_secret_until"] != nil {
		t.Errorf("rotated at once: %v, %q sign", got, secrets())
	}
	if got := h.do("GET", webhookPath, "").want(200, "").json(); got["secret"] != nil || got["secret_hint"] != "…" {
		t.Errorf("a short secret is shown as %v", got)
	}

	// Another key of the organisation has its own settings.
	other := h.as(h.stub.addKey("acme", "free", asAdmin))
	other.do("GET", webhookPath, "").want(404, "not_found")
	got = other.do("PATCH", webhookPath, `{"max_attempts":1}`).want(200, "").json()
	if got["url"] != nil || got["secret_hint"] != nil || got["secret"] != nil || got["max_attempts"] != 1.0 {
		t.Errorf("the first of it: %v", got)
	}
	other.do("POST", webhookPath+"/test", "").want(400, "validation_error", "url")

	h.do("DELETE", "/v1/admin/keys/key_2", "").want(200, "") // pending deliveries keep their settings
	if _, err := h.hooks.Stored(t.Context(), "acme", "key_2"); err != nil {
		t.Error(err)
	}
	h.do("DELETE", webhookPath, "").want(204, "")
	h.do("GET", webhookPath, "").want(404, "not_found")
	got = h.do("PUT", webhookPath, `{"url":"`+hookURL+`"}`).want(200, "").json()
	if !slices.Equal(secrets(), []string{got["secret"].(string)}) {
		t.Errorf("after all was removed %q sign", secrets())
	}
	log := h.log.String()
	for _, secret := range []string{made, first, second, third, rotated} {
		if strings.Contains(log, secret) {
			t.Errorf("%s is in the log", secret)
		}
	}
}

func TestWebhookSettingsThatAreRefused(t *testing.T) {
	h := newHarness(t)
	for _, tt := range []struct{ method, path, body, field string }{
		{"PUT", "", ``, "body"},
		{"PUT", "", `{}`, "url must be given"},
		{"PUT", "", `{"url":null}`, "url must be given"},
		{"PUT", "", `{"url":"http://example.com/"}`, "url must begin with https"},
		{"PUT", "", `{"url":"https://inner.example.com/"}`, "url leads to an address"},
		{"PUT", "", `{"url":"` + hookURL + `","secret":"whsec_short67890123456"}`, "secret"},
		{"PUT", "", `{"url":"` + hookURL + `","secrets":"0123456789abcdef"}`, "secrets is not known"},
		{"PATCH", "", ``, "body"},
		{"PATCH", "", `{"url":"https://inner.example.com/"}`, "url leads to an address"},
		{"PATCH", "", `{"max_attempts":21}`, "max_attempts"},
		{"PATCH", "", `{"secret":"short"}`, "secret"},
		{"POST", "/rotate", `[]`, "body"},
		{"POST", "/rotate", `{"overlap":"1d"}`, "overlap"},
		{"POST", "/rotate", `{"secret":"short"}`, "secret"},
		{"POST", "/test", ``, "url is not set"},
	} {
		h.do(tt.method, webhookPath+tt.path, tt.body).want(400, "validation_error", tt.field)
	}
	if len(h.hooks.settings) != 0 {
		t.Errorf("stored all the same: %+v", h.hooks.settings)
	}
	for _, route := range []string{
		"GET ", "PUT ", "PATCH ", "DELETE ", "POST /rotate", "POST /test", "POST /replay-failed", "GET /endpoints",
		"POST /endpoints/enable",
	} {
		method, path, _ := strings.Cut(route, " ")
		h.do(method, webhookPath+path, `{"url":"`+hookURL+`"}`, "Authorization", "").want(401, "unauthorized")
	}
}

func TestWebhookTest(t *testing.T) {
	h := newHarness(t)
	h.do("PUT", webhookPath, `{"url":"`+hookURL+`"}`).want(200, "")
	h.hooks.attempt = proto.DeliveryAttempt{
		Number: 1, At: time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC),
		Status: http.StatusOK, Response: "HTTP/1.1 200 OK\r\n\r\n",
	}
	got := h.do("POST", webhookPath+"/test", "").want(200, "").json()
	want := map[string]any{
		"number": 1.0, "at": "2026-01-02T03:04:05.000Z", "status": 200.0, "error": nil, "detail": nil, "remote_addr": nil,
		"request": nil, "response": "HTTP/1.1 200 OK\r\n\r\n",
		"timings": map[string]any{"dns_ms": 0.0, "connect_ms": 0.0, "tls_ms": 0.0, "first_byte_ms": 0.0, "total_ms": 0.0},
	}
	if d := cmp.Diff(want, got); d != "" || h.hooks.tested.ID != "key_1" || h.hooks.tested.Org != "acme" {
		t.Errorf("%+v: %s", h.hooks.tested, d)
	}
	for _, err := range []error{&proto.Rejection{Reason: proto.RejectedUnavailable}, proto.ErrNotFound} {
		h.hooks.untested = fmt.Errorf("test: %w", err)
		if a := h.do("POST", webhookPath+"/test", "").want(503, "service_unavailable", "sends webhooks"); a.header.Get(
			"Retry-After") == "" {
			t.Errorf("%v: no Retry-After", err)
		}
	}
}

// A key that runs programs changes its own webhook settings. A caller that changes those of another key gets the
// results of all its async executions, so that it has to be an administrator.
func TestWebhookSettingsOfAnotherKeyAreChangedByAdministrators(t *testing.T) {
	h := newHarness(t)
	secret := h.stub.addKey("beta", "pro", asUser)
	user, id := h.as(secret), h.stub.secrets[secret]
	body := `{"url":"` + hookURL + `"}`
	reader := h.as(h.stub.addKey("beta", "pro", proto.Key{Scopes: []proto.Scope{proto.ScopeRead, proto.ScopeFiles}}))
	for _, route := range []string{"PUT ", "PATCH ", "POST /rotate", "POST /test", "DELETE "} {
		method, path, _ := strings.Cut(route, " ")
		body := body
		reader.do(method, webhookPath+path, body).want(403, "forbidden", "scope execute")
		user.do(method, webhookPath+path+"?key=key_1", body).want(403, "forbidden", "scope admin")
		if strings.HasPrefix(path, "/") {
			body = ""
		}
		if a := user.do(method, webhookPath+path, body); a.status >= 300 {
			t.Errorf("%s of its own settings: %d %s", route, a.status, a.body)
		}
	}
	administrator := h.as(h.stub.addKey("beta", "pro", proto.Key{Scopes: []proto.Scope{proto.ScopeAdmin}}))
	h.as(h.stub.addKey("other", "pro", proto.Key{Scopes: proto.Scopes()})).do("PUT", webhookPath+"?key="+id, body).want(
		404, "not_found")
	administrator.do("PUT", webhookPath+"?key="+id, body).want(200, "")
	administrator.do("DELETE", webhookPath+"?key="+id, "").want(204, "")
	h.do("PUT", webhookPath+"?key="+id, body).want(200, "")
	h.do("POST", webhookPath+"/rotate?key="+id, "").want(200, "")
	h.do("PATCH", webhookPath+"?key="+id, `{"max_attempts":5}`).want(200, "")
	if got := user.do("GET", webhookPath, "").want(200, "").json(); got["url"] != hookURL || got["max_attempts"] != 5.0 {
		t.Errorf("settings %v", got)
	}
	if got := h.do("GET", webhookPath+"?key="+id, "").want(200, "").json(); got["url"] != hookURL {
		t.Errorf("settings %v", got)
	}
	h.do("GET", webhookPath, "").want(404, "not_found")
	user.do("GET", webhookPath+"?key="+id, "").want(403, "forbidden", "scope admin")
	h.do("DELETE", webhookPath+"?key="+id, "").want(204, "")
	user.do("GET", webhookPath, "").want(404, "not_found")
	h.do("GET", webhookPath+"?key=key_nobody", "").want(404, "not_found")
}
