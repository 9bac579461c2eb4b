package gateway

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/fstest"
	"time"

	"github.com/getkin/kin-openapi/openapi3"
	"github.com/getkin/kin-openapi/openapi3filter"
	"github.com/getkin/kin-openapi/routers"
	"go.opentelemetry.io/otel/trace/noop"
	"go.uber.org/goleak"

	"github.com/bullpen-run/bullpen/gateway/admin"
	"github.com/bullpen-run/bullpen/gateway/changes"
	"github.com/bullpen-run/bullpen/gateway/interpreters"
	"github.com/bullpen-run/bullpen/gateway/overview"
	"github.com/bullpen-run/bullpen/gateway/web"
	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/proto/api"
	"github.com/bullpen-run/bullpen/scheduler/admission"
	"github.com/bullpen-run/bullpen/scheduler/submit"
	"github.com/bullpen-run/bullpen/storage/blob"
	"github.com/bullpen-run/bullpen/storage/storagetest"
	storedthread "github.com/bullpen-run/bullpen/storage/thread"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// harness is a server and its client. Their connections are in memory, so that they can run in a
// synctest bubble.
type harness struct {
	t         *testing.T
	stub      *stub
	server    *Server
	admission *admission.Admission
	submitter *submit.Submitter
	registry  *registry
	hooks     *hooks
	threads   *threads
	letters   *letters
	secrets   secretStore
	audit     *auditStub
	sandboxes *sandboxStub
	queue     *queueStub
	counters  *overview.Counters
	http      *httptest.Server
	dial      func() (net.Conn, error)
	client    *http.Client
	key       string // enterprise, a global administrator's, organisation acme
	log       *syncBuffer
}

// newHarness starts a server. set, if given, changes its fields first.
func newHarness(t *testing.T, set ...func(*Server)) *harness {
	t.Helper()
	q := newStub()
	log := &syncBuffer{}
	reg := &registry{stub: q, profiles: map[string]proto.Profile{}, images: map[string]*proto.Image{}}
	q.registry = reg
	hook, thread, dead := newHooks(), newThreads(q), &letters{stored: map[string]*letter{}}
	h := &harness{
		t: t, stub: q, registry: reg, hooks: hook, threads: thread, letters: dead, secrets: secretStore{},
		audit: &auditStub{}, log: log, queue: new(queueStub), counters: overview.NewCounters(),
		key: q.addKey("acme", "enterprise", asAdmin),
	}
	logger := slog.New(slog.NewJSONHandler(log, &slog.HandlerOptions{Level: slog.LevelDebug}))
	h.submitter = &submit.Submitter{Jobs: q, Bindings: q, Threads: thread, DeadLetters: dead, Log: logger}
	h.server = &Server{
		Core: web.Core{
			Callers: q, KeyUses: &keyUses{}, Auditor: h.audit, Transfers: new(web.Transfers), Log: logger,
			Tracer: noop.NewTracerProvider().Tracer(""), MaxBody: web.DefaultMaxBody, Memory: 1 << 30,
			CursorSecret: &[32]byte{8, 8, 8},
		},
		Submissions: h.submitter,
		Jobs:        q, Capabilities: q, Events: q, Keys: q, KeyAdmin: rotatingKeys{q}, Orgs: q.orgs,
		OrgData: orgData{q.orgs}, Plans: q.plans, Members: memberStore{}, Sessions: sessionStore{},
		Connections: &connectionStore{stub: q}, Storage: &storageStub{}, Profiles: reg, Preload: reg,
		ImageAdmin: &imageStub{registry: reg}, Webhooks: hook, URLs: hook, Deliveries: hook,
		WebhookBody: func(r *proto.Record) ([]byte, error) { return proto.WebhookBody(r, "", 1<<20) },
		Threads:     thread, Versions: thread, ThreadAdmin: thread, Files: threadFiles{thread}, Parts: &storedthread.Versions{
			Blobs: &blob.Store{Backend: new(storagetest.Memory)},
		}, Batches: new(batchStub),
		Changes: new(changes.Feed), Usage: new(usageStub), Home: "/home/baponi", URLSecret: &[32]byte{7, 7, 7},

		Metrics: http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
			_, _ = io.WriteString(w, "bullpen_up 1\n")
		}),
		QueueWait: 3 * time.Second, MaxVolume: proto.MaxVolume,
		Console: fstest.MapFS{
			"index.html": {Data: []byte("<!DOCTYPE html>")}, "main-1.js": {Data: []byte("1")}, "README": {},
		},
		Version: "1.2.3", StoreReady: func() bool { return true }, Problems: func() []proto.Problem { return nil },
	}
	for _, f := range set {
		f(h.server)
	}
	s := h.server
	h.admission = &admission.Admission{
		Submitter: h.submitter, Keys: q, Members: s.Members, Orgs: q.orgs, Plans: q.plans, Usage: s.Usage.(admission.Usage),
		Profiles: reg,
		Images:   reg, Secrets: h.secrets, Connections: s.Connections, Buckets: s.Storage.(*storageStub),
		Threads: thread, Files: threadFiles{thread}, Transfers: s.Transfers, Webhooks: hook, URLs: hook,
		Default: proto.DefaultProfile(), QueueExpiry: 24 * time.Hour, Retention: 7 * 24 * time.Hour,
		UpgradeURL: "https://example.com/upgrade", Log: logger, Tracer: s.Tracer,
	}
	s.Admission, s.Entitlements = h.admission, h.admission
	h.sandboxes = newSandboxStub(q)
	live := h.sandboxes.routes(s, h.admission)
	s.Interpreters = &interpreters.Service{Live: live.Service}
	s.Groups = []web.Group{
		live,
		&overview.Routes{
			Core: &s.Core, Counters: h.counters, Queue: h.queue, Stats: q, Sandboxes: h.sandboxes, Problems: s.Problems,
		},
		&admin.DeadLetterRoutes{Core: &s.Core, DeadLetters: dead, Requeuer: h.admission},
		&admin.SecretRoutes{Core: &s.Core, Secrets: h.secrets, Orgs: q.orgs, Key: q},
		&admin.AuditRoutes{Core: &s.Core, Audit: h.audit},
	}
	listener := &memListener{conns: make(chan net.Conn), closed: make(chan struct{})}
	h.dial = listener.dial
	protocols := new(http.Protocols)
	protocols.SetHTTP1(true)
	protocols.SetUnencryptedHTTP2(true)
	h.http = &httptest.Server{Listener: listener, Config: &http.Server{
		Handler: h.server.Handler(), Protocols: protocols, ErrorLog: slog.NewLogLogger(slog.DiscardHandler, slog.LevelError),
	}}
	h.http.Start()
	h.client = &http.Client{
		Transport: &http.Transport{DialContext: func(context.Context, string, string) (net.Conn, error) {
			return listener.dial()
		}},
		CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse },
	}
	t.Cleanup(func() {
		h.client.CloseIdleConnections()
		h.http.Close()
		if n := q.watches.Load(); n != 0 {
			t.Errorf("%d executions are still watched", n)
		}
	})
	return h
}

// remount makes later requests use what was set of the server's fields.
func (h *harness) remount() { h.http.Config.Handler = h.server.Handler() }

type memListener struct {
	conns  chan net.Conn
	closed chan struct{}
	once   sync.Once
}

func (l *memListener) Accept() (net.Conn, error) {
	select {
	case c := <-l.conns:
		return c, nil
	case <-l.closed:
		return nil, net.ErrClosed
	}
}

func (l *memListener) dial() (net.Conn, error) {
	client, server := net.Pipe()
	select {
	case l.conns <- server:
		return client, nil
	case <-l.closed:
		return nil, net.ErrClosed
	}
}

func (l *memListener) Close() error {
	l.once.Do(func() { close(l.closed) })
	return nil
}

func (l *memListener) Addr() net.Addr { return &net.TCPAddr{IP: net.IPv4(127, 0, 0, 1), Port: 80} }

type syncBuffer struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (b *syncBuffer) Write(p []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.b.Write(p)
}

func (b *syncBuffer) String() string {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.b.String()
}

// in returns the harness for use in a subtest.
func (h *harness) in(t *testing.T) *harness {
	sub := *h
	sub.t = t
	return &sub
}

type reply struct {
	t      *testing.T
	status int
	header http.Header
	closed bool // the server closes the connection
	body   []byte
}

// request returns a request with the harness's key. headers alternates names and values.
func (h *harness) request(method, path, body string, headers ...string) *http.Request {
	h.t.Helper()
	r, err := http.NewRequestWithContext(h.t.Context(), method, h.http.URL+path, strings.NewReader(body))
	if err != nil {
		h.t.Fatal(err)
	}
	r.Header.Set("Authorization", "Bearer "+h.key)
	for i := 0; i < len(headers); i += 2 {
		if headers[i+1] == "" {
			r.Header.Del(headers[i])
			continue
		}
		r.Header.Set(headers[i], headers[i+1])
	}
	return r
}

// do sends a request, reads the whole answer and validates it against the OpenAPI document.
func (h *harness) do(method, path, body string, headers ...string) *reply {
	h.t.Helper()
	return h.send(h.request(method, path, body, headers...))
}

func (h *harness) execute(body string, headers ...string) *reply {
	h.t.Helper()
	return h.do(http.MethodPost, "/v1/sandbox/execute", body, headers...)
}

func (h *harness) send(r *http.Request) *reply {
	h.t.Helper()
	resp, err := h.client.Do(r)
	if err != nil {
		h.t.Fatalf("%s %s: %v", r.Method, r.URL.Path, err)
	}
	defer func() { _ = resp.Body.Close() }()
	body, err := io.ReadAll(resp.Body)
	if err != nil {
		h.t.Fatalf("%s %s: read: %v", r.Method, r.URL.Path, err)
	}
	a := &reply{t: h.t, status: resp.StatusCode, header: resp.Header, closed: resp.Close, body: body}
	if resp.Header.Get("X-Request-Id") == "" {
		h.t.Errorf("%s %s: no X-Request-Id", r.Method, r.URL.Path)
	}
	a.validate(r)
	return a
}

// raw sends an execute request whose headers end with rest on a new connection, and reads the head
// of the answer.
func (h *harness) raw(rest string) *http.Response {
	h.t.Helper()
	conn, err := h.dial()
	if err != nil {
		h.t.Fatal(err)
	}
	h.t.Cleanup(func() { _ = conn.Close() })
	h.write(conn, rest)
	resp, err := http.ReadResponse(bufio.NewReader(conn), nil)
	if err != nil {
		h.t.Fatal(err)
	}
	h.t.Cleanup(func() { _ = resp.Body.Close() })
	return resp
}

const executeHead = "POST /v1/sandbox/execute HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer %s\r\n%s"

func (h *harness) write(conn net.Conn, rest string) {
	h.t.Helper()
	if _, err := fmt.Fprintf(conn, executeHead, h.key, rest); err != nil {
		h.t.Fatal(err)
	}
}

// writeAll writes rest, even if the server does not read all of it.
func (h *harness) writeAll(conn net.Conn, rest string) {
	_, _ = fmt.Fprintf(conn, executeHead, h.key, rest)
}

// want checks the status. For errors it also checks the code, and that the message contains words.
func (a *reply) want(status int, code string, words ...string) *reply {
	a.t.Helper()
	var envelope struct{ Error, Message string }
	if a.status >= 400 {
		if err := json.Unmarshal(a.body, &envelope); err != nil {
			a.t.Fatalf("envelope: %v in %.200q", err, a.body)
		}
	}
	if a.status != status || envelope.Error != code {
		a.t.Fatalf("answer is %d %q, want %d %q: %.300s", a.status, envelope.Error, status, code, a.body)
	}
	for _, word := range words {
		if code != "" && !strings.Contains(envelope.Message, word) {
			a.t.Errorf("message %q does not contain %q", envelope.Message, word)
		}
	}
	return a
}

func (a *reply) json() map[string]any {
	a.t.Helper()
	var m map[string]any
	if err := json.Unmarshal(a.body, &m); err != nil {
		a.t.Fatalf("%v in %.200q", err, a.body)
	}
	return m
}

func (a *reply) trace() proto.TraceID {
	a.t.Helper()
	id, err := proto.ParseTraceID(a.header.Get("X-Trace-Id"))
	if err != nil {
		a.t.Fatalf("X-Trace-Id %q: %v", a.header.Get("X-Trace-Id"), err)
	}
	return id
}

// contract is the OpenAPI document, read once for all tests.
var contract = sync.OnceValues(func() (*openapi3.T, error) {
	document, err := api.OpenAPI("1.2.3")
	if err != nil {
		return nil, err
	}
	return openapi3.NewLoader().LoadFromData(document)
})

// validate checks the status, the headers and the body of an answer against the document.
func (a *reply) validate(r *http.Request) {
	a.t.Helper()
	doc, err := contract()
	if err != nil {
		a.t.Fatal(err)
	}
	path, item := findPath(doc, r.URL.Path)
	if item == nil || item.GetOperation(r.Method) == nil || a.status == http.StatusMethodNotAllowed {
		return
	}
	input := &openapi3filter.ResponseValidationInput{
		RequestValidationInput: &openapi3filter.RequestValidationInput{
			Request: r, Route: &routers.Route{
				Spec: doc, Path: path, PathItem: item, Method: r.Method, Operation: item.GetOperation(r.Method),
			},
		},
		Status: a.status, Header: a.header,
		Options: &openapi3filter.Options{
			IncludeResponseStatus: true, ExcludeResponseBody: !strings.HasPrefix(a.header.Get("Content-Type"), web.TypeJSON),
		},
	}
	input.SetBodyBytes(a.body)
	if err := openapi3filter.ValidateResponse(a.t.Context(), input); err != nil {
		a.t.Errorf("%s %s %d is not as documented: %v", r.Method, path, a.status, err)
	}
	if a.header.Get("Content-Type") == web.TypeNDJSON {
		schema := doc.Components.Schemas["Event"].Value
		if strings.HasSuffix(path, "/results") {
			schema = doc.Components.Schemas["BatchResult"].Value
		}
		if strings.HasSuffix(path, "/audit") {
			schema = doc.Components.Schemas["AuditRecord"].Value
		}
		for line := range bytes.Lines(a.body) {
			var event any
			if err := json.Unmarshal(line, &event); err != nil {
				a.t.Fatalf("line %.200q: %v", line, err)
			}
			if err := schema.VisitJSON(event, openapi3.EnableJSONSchema2020()); err != nil {
				a.t.Errorf("event %.200q is not as documented: %v", line, err)
			}
		}
	}
}

func findPath(doc *openapi3.T, path string) (string, *openapi3.PathItem) {
	if item := doc.Paths.Value(path); item != nil {
		return path, item
	}
	segments := strings.Split(path, "/")
	for pattern, item := range doc.Paths.Map() {
		if slices.EqualFunc(strings.Split(pattern, "/"), segments, matchesSegment) {
			return pattern, item
		}
	}
	return "", nil
}

func matchesSegment(pattern, segment string) bool {
	return pattern == segment || strings.HasPrefix(pattern, "{") && segment != ""
}
