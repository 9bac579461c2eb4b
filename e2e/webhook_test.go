package e2e

import (
	"crypto/hmac"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"io"
	"maps"
	"math/rand/v2"
	"net"
	"net/http"
	"net/http/httptest"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/alicebob/miniredis/v2"
	standardwebhooks "github.com/standard-webhooks/standard-webhooks/libraries/go"

	"github.com/bullpen-run/bullpen/proto"
)

var kills = repeatsFlag("kills", 2, 4, "how often the sender of webhooks is killed")

// posted is a webhook that was received.
type posted struct {
	path, id string
	header   http.Header
	body     []byte
	at       time.Time
}

func (p posted) trace(t testing.TB) string {
	t.Helper()
	var body struct {
		TraceID string `json:"trace_id"`
	}
	if err := json.Unmarshal(p.body, &body); err != nil {
		t.Errorf("%v in %s", err, p.body)
	}
	return body.TraceID
}

// receiver receives webhooks. It responds with the status in the path, or with the next one in
// answers.
type receiver struct {
	url        string
	flags      []string // flags that let bullpen send there
	deliveries chan posted

	mu      sync.Mutex
	answers []int
	// It is called once when a webhook has arrived and once when it was answered. It may be nil.
	step func(done string)
}

// The steps of a webhook at its receiver.
const (
	stepArrived  = "arrived"
	stepAnswered = "answered"
)

// onStep calls f at the next step of that name at the receiver.
func (r *receiver) onStep(step string, f func()) {
	var once sync.Once
	r.mu.Lock()
	defer r.mu.Unlock()
	r.step = func(done string) {
		if done == step {
			once.Do(f)
		}
	}
}

func (r *receiver) reached(step string) {
	r.mu.Lock()
	f := r.step
	r.mu.Unlock()
	if f != nil {
		f(step)
	}
}

func startReceiver(t *testing.T) *receiver {
	t.Helper()
	r := &receiver{deliveries: make(chan posted, 1<<14)}
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
		body, err := io.ReadAll(req.Body)
		if err != nil {
			return // its sender was killed
		}
		r.reached(stepArrived)
		r.deliveries <- posted{req.URL.Path, req.Header.Get("webhook-id"), req.Header, body, time.Now()}
		status, err := strconv.Atoi(strings.TrimPrefix(req.URL.Path, "/"))
		if err != nil {
			r.mu.Lock()
			status, r.answers = r.answers[0], r.answers[1:]
			r.mu.Unlock()
		}
		w.WriteHeader(status)
		_ = http.NewResponseController(w).Flush() // its sender may be gone
		r.reached(stepAnswered)
	}))
	t.Cleanup(s.Close)
	_, port, err := net.SplitHostPort(s.Listener.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	r.url = s.URL
	r.flags = []string{"--webhook-allow-http", "--webhook-allow-cidrs", "127.0.0.0/8", "--webhook-allow-ports", port}
	return r
}

func (r *receiver) next(t testing.TB) posted {
	t.Helper()
	select {
	case p := <-r.deliveries:
		return p
	case <-time.After(patience):
		t.Fatal("no webhook came")
		return posted{}
	}
}

// forward starts a server that answers each request with the next webhook, as it came. It returns the
// URL of the server.
func (r *receiver) forward(t *testing.T) string {
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
		select {
		case p := <-r.deliveries:
			maps.Copy(w.Header(), p.header)
			_, _ = w.Write(p.body) // the client asks again
		case <-req.Context().Done():
		}
	}))
	t.Cleanup(s.Close)
	return s.URL
}

func (r *receiver) answer(statuses ...int) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.answers = statuses
}

// delivery is a webhook delivery as the API returns it.
type delivery struct {
	WebhookID    string  `json:"webhook_id"`
	URL          string  `json:"url"`
	Status       string  `json:"status"`
	Reason       *string `json:"reason"`
	AttemptsMade int     `json:"attempts_made"`
	Attempts     []struct {
		Number  int  `json:"number"`
		Status  *int `json:"status"`
		Request struct {
			Method  string
			Headers map[string]string
		} `json:"request"`
	} `json:"attempts"`
}

// delivered waits until a webhook is no longer pending.
func (a *api) delivered(id string) (d delivery) {
	a.t.Helper()
	eventually(a.t, "the webhook of "+id+" ends", func() (bool, any) {
		r := a.get(execution(id, "webhook"))
		if r.status != http.StatusOK {
			return false, r
		}
		r.into(a.t, &d)
		return d.Status != string(proto.DeliveryPending), string(r.body)
	})
	return d
}

func (d delivery) check(t testing.TB, status proto.DeliveryStatus, made int) {
	t.Helper()
	if d.Status != string(status) || d.AttemptsMade != made || len(d.Attempts) != made {
		t.Errorf("%+v, want %s after %d attempts", d, status, made)
	}
}

// verify checks both signatures of a webhook.
func (p posted) verify(t testing.TB, secrets ...string) {
	t.Helper()
	mac := hmac.New(sha256.New, []byte(secrets[0]))
	mac.Write(p.body)
	if got, want := p.header.Get("X-Baponi-Signature"), "sha256="+hex.EncodeToString(mac.Sum(nil)); got != want ||
		p.header.Get("X-Bullpen-Signature") != want {
		t.Errorf("signature %s, want %s", got, want)
	}
	for _, secret := range secrets {
		hook, err := standardwebhooks.NewWebhook(secret)
		if err != nil {
			t.Fatal(err)
		}
		if err := hook.Verify(p.body, p.header); err != nil {
			t.Errorf("Standard Webhooks: %v", err)
		}
	}
}

// settings changes the key's webhook settings. It returns the secret if one was created.
func (a *api) settings(method, path string, body any) (secret string) {
	a.t.Helper()
	var s struct{ Secret string }
	r := a.do(method, path, body)
	if r.status != http.StatusOK {
		a.t.Fatalf("%s %s: %s", method, path, r)
	}
	r.into(a.t, &s)
	return s.Secret
}

func testWebhooks(t *testing.T, p *programs, in topology) {
	rec := startReceiver(t)
	sys := newSystem(t, p, in, manySlots, rec.flags...)
	async := func(body request) string { return sys.submit(body) }
	secret := sys.settings(http.MethodPut, "/v1/webhook", request{"url": rec.url + "/200", "waits": []float64{0.05}})

	id := async(python("print(6*7)").and("metadata", map[string]string{"build": "7"}))
	got := rec.next(t)
	got.verify(t, secret)
	var body struct {
		Event     string
		TraceID   string    `json:"trace_id"`
		Timestamp time.Time `json:"timestamp"`
		Result    proto.Result
		Metadata  map[string]string
	}
	if err := json.Unmarshal(got.body, &body); err != nil {
		t.Fatal(err)
	}
	if body.Event != "execution.completed" || body.TraceID != id || body.Result.Stdout != "42\n" || !body.Result.Success ||
		body.Metadata["build"] != "7" ||
		got.path != "/200" || got.id == "" || got.header.Get("Content-Type") != "application/json" ||
		!strings.HasPrefix(got.header.Get("User-Agent"), "bullpen/") {
		t.Errorf("%+v with %s", got.header, got.body)
	}
	d := sys.delivered(id)
	d.check(t, proto.DeliveryDelivered, 1)
	if d.WebhookID != got.id || d.URL != rec.url+"/200" {
		t.Errorf("%+v", d)
	}
	// What was sent can be read, without the signatures.
	if r := sys.get(execution(id, "webhook", "body")); string(r.body) != string(got.body) {
		t.Errorf("%s, sent was %s", r, got.body)
	}
	for name, value := range d.Attempts[0].Request.Headers {
		if sent := got.header.Get(name); sent == "" || (sent != value) != (value == "[redacted]") {
			t.Errorf("%s: %q was sent, %q is recorded", name, sent, value)
		}
	}
	if r := d.Attempts[0].Request; r.Method != http.MethodPost || r.Headers["Webhook-Signature"] != "[redacted]" ||
		r.Headers["Webhook-Id"] != got.id {
		t.Errorf("%+v", r)
	}
	var list struct{ Deliveries []delivery }
	if sys.get("/v1/webhook/deliveries?status=delivered").into(t, &list); len(list.Deliveries) != 1 ||
		list.Deliveries[0].WebhookID != got.id {
		t.Errorf("%+v", list)
	}
	if r := string(sys.get(execution(id)).body); !strings.Contains(r, `"webhook_delivery_status":"delivered"`) ||
		!strings.Contains(r, `"webhook_url":"`+rec.url+`/200"`) {
		t.Errorf("the execution reports %s", r)
	}

	// A URL in the request. In the other modes it is only validated.
	if r := sys.inline(bash("echo 1").and("webhook_url", rec.url+"/299")); r.Stdout != "1\n" {
		t.Errorf("%+v", r)
	}
	id = async(bash("sleep 60").and("webhook_url", rec.url+"/201"))
	sys.do(http.MethodPost, execution(id, "cancel"), nil)
	if got := rec.next(t); got.path != "/201" || got.trace(t) != id ||
		!strings.Contains(string(got.body), `"event":"execution.cancelled"`) {
		t.Errorf("%s %s", got.path, got.body)
	}
	for _, url := range []string{
		"http://169.254.169.254/", "http://localhost:1/", "https://10.0.0.1/",
		"ftp://example.com/",
	} {
		sys.execute(bash("echo 1").and("webhook_url", url), "Prefer", "respond-async").rejection(t, http.StatusBadRequest,
			"validation_error")
	}

	// Retries, signed with both secrets after a rotation.
	rec.answer(500, 302, 200)
	newest := sys.settings(http.MethodPost, "/v1/webhook/rotate", request{})
	id = async(bash("echo 1").and("webhook_url", rec.url+"/next"))
	first := rec.next(t)
	for range 2 {
		if again := rec.next(t); again.id != first.id || string(again.body) != string(first.body) {
			t.Errorf("%s %s, then %s %s", first.id, first.body, again.id, again.body)
		}
	}
	first.verify(t, newest, secret)
	sys.delivered(id).check(t, proto.DeliveryDelivered, 3)

	// A 410 response disables the URL until it is enabled again.
	rec.answer(410, 200)
	gone := async(bash("echo 1").and("webhook_url", rec.url+"/gone"))
	goneID := rec.next(t).id
	sys.delivered(gone).check(t, proto.DeliveryFailed, 1)
	unsent := async(bash("echo 1").and("webhook_url", rec.url+"/gone"))
	sys.delivered(unsent).check(t, proto.DeliveryFailed, 0)
	sys.do(http.MethodPost, execution(gone, "webhook", "replay"), nil).rejection(t, http.StatusConflict, "conflict")
	if r := sys.get("/v1/webhook/endpoints"); !strings.Contains(string(r.body), rec.url+"/gone") {
		t.Errorf("endpoints: %s", r)
	}
	sys.do(http.MethodPost, "/v1/webhook/endpoints/enable", request{"url": rec.url + "/gone"})
	sys.do(http.MethodPost, execution(gone, "webhook", "replay"), nil)
	if again := rec.next(t); again.id != goneID {
		t.Errorf("sent again as %s, was %s", again.id, goneID)
	}
	sys.delivered(gone).check(t, proto.DeliveryDelivered, 2)
	rec.answer(200)
	if r := sys.do(http.MethodPost, "/v1/webhook/replay-failed?since="+time.Now().Add(-time.Hour).UTC().Format(
		time.RFC3339), nil); !strings.Contains(string(r.body), `"replayed":1`) {
		t.Errorf("replay: %s", r)
	}
	if again := rec.next(t); again.trace(t) != unsent {
		t.Errorf("sent again %s, want %s", again.trace(t), unsent)
	}

	if r := sys.do(http.MethodPost, "/v1/webhook/test", nil); r.status != http.StatusOK ||
		!strings.Contains(string(r.body), `"status":200`) {
		t.Errorf("test: %s", r)
	}
	if got := rec.next(t); !strings.Contains(string(got.body), `"event":"webhook.test"`) {
		t.Errorf("%s", got.body)
	}

	other, _ := sys.newKey("other", "pro")
	for _, r := range []*reply{
		sys.with(other).get(execution(gone, "webhook")),
		sys.with(other).do(http.MethodPost, execution(gone, "webhook", "replay"), nil),
	} {
		r.rejection(t, http.StatusNotFound, "not_found")
	}
	select {
	case p := <-rec.deliveries:
		t.Errorf("one too many: %s %s", p.path, p.body)
	default:
	}
}

// testWebhooksKilled repeatedly kills the process that sends webhooks. It does so at random times
// between the submission of an execution and the record of its webhook. It also does so just after
// a webhook has arrived and just after the response was sent.
func testWebhooksKilled(t *testing.T, p *programs, in topology) {
	rec := startReceiver(t)
	sys := newSystem(t, p, in, manySlots, rec.flags...)
	accepted := map[string]bool{}
	var mu sync.Mutex
	random := rand.New(rand.NewPCG(1, 2))
	for i := range kills.n() {
		now := make(chan struct{})
		switch i % 4 {
		case 0:
			rec.onStep(stepArrived, func() { close(now) })
		case 1:
			rec.onStep(stepAnswered, func() { close(now) })
		default:
			// The random time is the point of the test.
			time.AfterFunc(time.Duration(random.IntN(150))*time.Millisecond, func() { close(now) })
		}
		var all sync.WaitGroup
		for range 8 {
			all.Go(func() {
				r, err := sys.try(t.Context(), http.MethodPost, executePath, bash("echo 1").and("webhook_url", rec.url+"/200"),
					"Prefer", "respond-async")
				if err == nil && r.status == http.StatusAccepted {
					mu.Lock()
					defer mu.Unlock()
					accepted[r.header.Get("X-Trace-Id")] = true
				}
			})
		}
		select {
		case <-now:
		case <-time.After(patience):
			all.Wait()
			t.Fatalf("no webhook came after kill %d, of %v", i, slices.Sorted(maps.Keys(accepted)))
		}
		sys.front.kill()
		all.Wait()
		sys.startFront(t)
		sys.ready(t)
	}
	reached := map[string]int{}
	for id := range accepted {
		sys.ended(id)
		d := sys.delivered(id)
		if d.Status != string(proto.DeliveryDelivered) || d.AttemptsMade < 1 || d.AttemptsMade != len(d.Attempts) {
			t.Errorf("%s: %+v", id, d)
		}
	}
	for done := false; !done; {
		select {
		case got := <-rec.deliveries:
			id := got.trace(t)
			if reached[id]++; got.id != proto.DeliveryID(proto.TraceID(id)) {
				t.Errorf("webhook %s of %s", got.id, id)
			}
		default:
			done = true
		}
	}
	twice := 0
	for id := range accepted {
		switch n := reached[id]; {
		case n == 0:
			t.Errorf("the webhook of %s never came", id)
		case n > 1:
			twice++
		}
	}
	t.Logf("killed %d times: of %d webhooks %d came more than once", kills.n(), len(accepted), twice)
}

// testRedis stops Redis while webhooks wait for their second attempt. None may be more than a
// minute late.
func testRedis(t *testing.T, p *programs) {
	for name, fault := range map[string]func(t *testing.T, r *redis){
		"killed":  func(_ *testing.T, r *redis) { r.server.Close() },
		"flushed": func(_ *testing.T, r *redis) { r.server.FlushAll() },
		"empty": func(t *testing.T, r *redis) {
			r.server.Close()
			r.start(t)
		},
		"slow": func(_ *testing.T, r *redis) { r.delay.Store(int64(2 * time.Second)) },
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			rec := startReceiver(t)
			r := startRedis(t, nil)
			sys := newSystem(t, p, topology{}, manySlots, append(rec.flags, "--redis", "redis://"+r.addr)...)
			sys.settings(http.MethodPut, "/v1/webhook", request{"url": rec.url + "/next", "waits": []int{5}})
			rec.answer(503, 503, 200, 200)
			ids := []string{sys.submit(bash("echo 1")), sys.submit(bash("echo 2"))}
			first := []posted{rec.next(t), rec.next(t)}
			fault(t, r)
			for range ids {
				if late := rec.next(t).at.Sub(first[1].at); late > 66*time.Second {
					t.Errorf("the second attempt came after %s", late)
				}
			}
			for _, id := range ids {
				sys.delivered(id).check(t, proto.DeliveryDelivered, 2)
			}
		})
	}
}

// redis is a Redis server behind a connection that can be slow.
type redis struct {
	addr   string
	delay  atomic.Int64 // of each response, nanoseconds
	server *miniredis.Miniredis
	mu     sync.Mutex
	to     string // address of the server
}

func startRedis(t *testing.T, m *machine) *redis {
	t.Helper()
	line, err := m.listen("127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = line.Close() })
	r := &redis{addr: line.Addr().String()}
	r.start(t)
	go func() {
		for {
			conn, err := line.Accept()
			if err != nil {
				return
			}
			go r.carry(conn)
		}
	}()
	return r
}

// start starts an empty server in place of one that was closed.
func (r *redis) start(t *testing.T) {
	t.Helper()
	s := miniredis.NewMiniRedis()
	if err := s.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(s.Close)
	r.mu.Lock()
	defer r.mu.Unlock()
	r.server, r.to = s, s.Addr()
}

// carry forwards a connection to the current server.
func (r *redis) carry(conn net.Conn) {
	defer func() { _ = conn.Close() }()
	r.mu.Lock()
	addr := r.to
	r.mu.Unlock()
	to, err := net.Dial("tcp", addr)
	if err != nil {
		return
	}
	defer func() { _ = to.Close() }()
	go func() {
		_, _ = io.Copy(to, conn)
		_ = to.Close()
	}()
	buf := make([]byte, 32<<10)
	for {
		n, err := to.Read(buf)
		if err != nil {
			return
		}
		time.Sleep(time.Duration(r.delay.Load()))
		if _, err := conn.Write(buf[:n]); err != nil {
			return
		}
	}
}
